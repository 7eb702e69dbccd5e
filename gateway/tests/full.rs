//! A state directory whose file system is full: what frees something works, what takes something is refused.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{fs, io::Write as _, path::PathBuf, process::Command};

use common::{World, create, error_info, phase, target};
use tonic::Code;
use torpor_proto::v1::{self, Phase};
use torpor_sandbox::sim::Script;

/// A small file system, gone at the end.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(dir: PathBuf) -> Self {
        fs::create_dir_all(&dir).unwrap();
        let done =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=128m", "torpor-test"]).arg(&dir).status();
        assert!(done.unwrap().success());
        Self(dir)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn is_root(test: &str) -> bool {
    if nix::unistd::geteuid().is_root() {
        return true;
    }
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|need| need == "root"), "{test} needs root");
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: not root\n"));
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_full_disk_creates_are_refused_and_suspend_stop_and_delete_work() {
    if !is_root("on_a_full_disk_creates_are_refused_and_suspend_stop_and_delete_work") {
        return;
    }
    let mut mounted = None;
    let world = World::with(Script::default(), |config| {
        mounted = Some(Tmpfs::mount(config.state_dir.clone()));
        // Of a file system of this size all would be the reserve.
        config.limits.disk_reserve_bytes = 40 << 20;
    })
    .await;
    let mut client = world.sandboxes().await;
    for name in ["a", "b", "c"] {
        client.create(create(name)).await.unwrap();
    }
    assert!(!world.info().await.disk.unwrap().pressure);

    let ballast = mounted.as_ref().unwrap().0.join("ballast");
    let mut file = fs::File::create(&ballast).unwrap();
    let zeros = vec![0; 1 << 16];
    while file.write_all(&zeros).is_ok() {}
    drop(file);

    let error = client.create(create("d")).await.unwrap_err();
    assert_eq!((error.code(), error_info(&error).0.as_str()), (Code::ResourceExhausted, "DISK_PRESSURE"));
    assert!(error.message().contains("32 MiB"), "{error}");
    assert!(error_info(&error).1.contains("torpor image list"), "{}", error_info(&error).1);
    let shown = client.get(v1::GetSandboxRequest { sandbox: "a".into() }).await.unwrap().into_inner();
    let conditions = shown.status.unwrap().conditions;
    assert!(conditions.iter().any(|c| c.r#type == "DiskPressure" && c.status), "{conditions:?}");

    for _ in 0..3 {
        let keep = v1::Keep::Disk.into();
        let asleep = client.suspend(v1::SuspendRequest { target: target("a"), keep }).await.unwrap();
        assert_eq!(phase(&asleep.into_inner()), Phase::Suspended);
        let awake =
            client.resume(v1::ResumeRequest { target: target("a"), ..Default::default() }).await.unwrap();
        assert_eq!(phase(&awake.into_inner()), Phase::Ready);
    }
    client.stop(v1::StopRequest { target: target("b") }).await.unwrap();
    for name in ["a", "b", "c"] {
        client.delete(v1::DeleteSandboxRequest { target: target(name), allow_missing: false }).await.unwrap();
    }

    fs::remove_file(&ballast).unwrap();
    client.create(create("d")).await.unwrap();
    client.delete(v1::DeleteSandboxRequest { target: target("d"), allow_missing: false }).await.unwrap();
    let mut world = world;
    world.stop().await;
    // Before the folder that it is mounted in goes.
    drop(mounted);
}
