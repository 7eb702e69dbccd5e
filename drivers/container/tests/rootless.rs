//! Podman of a user without rights: found where such a user's is, and held to the same promises. The driver runs as that
//! user, too: this program runs itself once more.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Command, time::Duration};

use common::{Bench, busybox_tree, exec};
use torpor_driver_container::{ContainerConfig, ContainerDriver, Engine, diagnose};
use torpor_sandbox::Level;
use torpor_sandbox::{Change, ComputeDriver, DriverError, ImageSource, Keep, Observed, Run, SandboxId};

const GRACE: Duration = Duration::from_secs(10);
/// Set for the program that runs as the user.
const INSIDE: &str = "TORPOR_TEST_ROOTLESS";
const USER: &str = "65123";

#[test]
fn podman_of_a_user_without_rights_keeps_the_same_promises() {
    let test = "podman_of_a_user_without_rights_keeps_the_same_promises";
    let agent = std::env::var_os("TORPOR_TEST_AGENT").map(PathBuf::from).filter(|path| path.is_file());
    let reason = "needs TORPOR_TEST_AGENT=PATH of a static torpor-agent";
    if !torpor_tests::engine::can_run_rootless(test)
        || !torpor_tests::need(test, "root", agent.is_some(), reason)
    {
        return;
    }
    let engine = torpor_tests::engine::Engine::start("rootless");
    let folder = engine.folder();
    // Where the user sees them, whatever the place of the build.
    let (program, copy) = (folder.join("test"), folder.join("torpor-agent"));
    for (from, to) in [(std::env::current_exe().unwrap(), &program), (agent.unwrap(), &copy)] {
        fs::copy(from, to).unwrap();
        fs::set_permissions(to, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let (user, group) = (format!("--reuid={USER}"), format!("--regid={USER}"));
    let ran = Command::new("timeout")
        .args(["--kill-after=5", "300", "setpriv"])
        .args([&user, &group, "--clear-groups"])
        .arg(&program)
        .args(["--exact", "as_the_user", "--ignored", "--nocapture"])
        .current_dir("/")
        .env(INSIDE, "yes")
        .env("HOME", folder.join("home"))
        .env("XDG_RUNTIME_DIR", folder.join("xdg"))
        .env("TORPOR_TEST_AGENT", &copy)
        .env_remove("REQUIRE")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && text.contains("1 passed"), "{text}\n{}", engine.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by podman_of_a_user_without_rights_keeps_the_same_promises"]
async fn as_the_user() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    let folder = tempfile::Builder::new().prefix("tc").tempdir_in("/tmp").unwrap();
    let agent = PathBuf::from(std::env::var_os("TORPOR_TEST_AGENT").unwrap());
    let (state, run) = (folder.path().join("state"), folder.path().join("run"));
    let config = ContainerConfig::new(Engine::Podman, state, run, agent);
    let runtime = PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR").unwrap());
    assert_eq!(config.socket, runtime.join("podman/podman.sock"));
    let found = diagnose(&config).await;
    let of = |name: &str| found.iter().find(|one| one.name == name).unwrap();
    assert!(of("privileges").finding.contains("without root"), "{found:?}");
    assert!(
        of("checkpoints").level == Level::Warn && of("checkpoints").finding.contains("without root"),
        "{found:?}"
    );

    let driver = ContainerDriver::new(config.clone()).unwrap();
    let tree = busybox_tree();
    let source = ImageSource::Dir(tree.path().to_owned());
    let image = driver.images().unwrap().import("tiny", &source, &|_, _| ()).await.unwrap().digest;
    let bench = Bench { engine: Engine::Podman, config, image, folder };
    let id = SandboxId::generate();
    assert_eq!(driver.create(&id, &bench.spec(), Run(1)).await.unwrap(), Change::Done);
    for run in 1..=2_u64 {
        driver.start(&id, Keep::Disk, Run(run)).await.unwrap();
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Running { run: Run(run), agent: true });
        let (code, text) =
            exec(driver.as_ref(), &id, &format!("echo {run} >> /root/runs; cat /root/runs; id -u")).await;
        let runs: String = (1..=run).map(|run| format!("{run}\n")).collect();
        assert_eq!((code, text), (0, format!("{runs}0\n")));
        let refused = driver.stop(&id, Keep::Memory, GRACE).await.unwrap_err();
        assert!(
            matches!(&refused, DriverError::Unsupported(why) if why.contains("without root")),
            "{refused}"
        );
        let stopped = driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
        assert!(stopped.flushed, "{:?}", stopped.detail);
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
        assert!(bench.leftovers(&id).is_empty());
    }
    assert_eq!(driver.delete(&id).await.unwrap(), Change::Done);
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Missing);
    assert!(driver.list().await.unwrap().is_empty());
}
