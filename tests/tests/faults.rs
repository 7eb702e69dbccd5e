//! Bad input and damaged hosts: a clear error, the next command, and nothing lost.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs::{self, File},
    os::fd::AsRawFd as _,
    path::PathBuf,
    process::Command,
};

use torpor_tests::{Host, can_run_vms};

fn overlay(host: &Host, name: &str) -> PathBuf {
    host.sandbox_dir(host.get(name)["id"].as_str().unwrap()).join("overlay.qcow2")
}

fn base(host: &Host) -> PathBuf {
    let images = host.dir().join("state/images");
    let digest = fs::read_dir(&images).unwrap().flatten().find(|e| e.file_name().len() == 64).unwrap();
    digest.path().join("base.raw")
}

#[test]
fn bad_requests_are_refused_by_the_name_of_the_field() {
    if !can_run_vms("bad_requests_are_refused_by_the_name_of_the_field") {
        return;
    }
    let host = Host::new();
    for (arguments, word) in [
        (&["create", "a", "--image", "nothing"][..], "nothing"),
        (&["create", "Bad_Name"], "Bad_Name"),
        (&["create", "a", "--cpus", "0"], "cpus"),
        (&["create", "a", "--memory", "100T"], "memory"),
        (&["create", "a", "--disk", "1K"], "disk"),
        (&["create", "a", "--machine", "kvm"], "kvm"),
        (&["create", "a", "--kernel", "/no/such/kernel"], "/no/such/kernel"),
    ] {
        let (_, error) = host.fails(arguments);
        assert!(error.contains(word), "{arguments:?}: {error}");
    }
    let (code, _) = host.fails(&["suspend", "nobody"]);
    assert_eq!(code, 3);
}

#[test]
fn a_base_that_is_gone_or_changed_stops_the_resume_and_the_disk_waits() {
    if !can_run_vms("a_base_that_is_gone_or_changed_stops_the_resume_and_the_disk_waits") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "web"]);
    host.sh("web", "echo kept > /root/file");
    host.ok(&["suspend", "web"]);
    let (base, away) = (base(&host), host.dir().join("base.away"));

    fs::rename(&base, &away).unwrap();
    let (_, error) = host.fails(&["resume", "web"]);
    assert!(error.contains("BASE_MISSING") && error.contains("torpor resume web"), "{error}");

    // The same size and times, other bytes.
    fs::copy(&away, &base).unwrap();
    let file = File::options().write(true).open(&base).or_else(|_| {
        fs::set_permissions(&base, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
        File::options().write(true).open(&base)
    });
    std::os::unix::fs::FileExt::write_all_at(&file.unwrap(), b"!", 5000).unwrap();
    Command::new("touch").arg("-r").arg(&away).arg(&base).status().unwrap();
    let (_, error) = host.fails(&["resume", "web"]);
    assert!(error.contains("BASE_CHANGED"), "{error}");

    fs::rename(&away, &base).unwrap();
    host.ok(&["resume", "web"]);
    assert_eq!(host.sh("web", "cat /root/file"), "kept\n");
}

#[test]
fn a_lost_disk_is_reported_and_never_made_anew() {
    if !can_run_vms("a_lost_disk_is_reported_and_never_made_anew") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "web"]);
    host.sh("web", "echo kept > /root/file");
    host.ok(&["suspend", "web"]);
    let (disk, away) = (overlay(&host, "web"), host.dir().join("overlay.away"));
    fs::rename(&disk, &away).unwrap();
    let (_, error) = host.fails(&["resume", "web"]);
    assert!(error.contains("DATA_MISSING"), "{error}");
    assert!(!disk.exists(), "a fresh disk was made");
    fs::rename(&away, &disk).unwrap();
    host.ok(&["recover", "web"]);
    host.ok(&["sandbox", "recover", "web"]);
    assert_eq!(host.sh("web", "cat /root/file"), "kept\n");
}

#[test]
fn a_disk_held_by_another_process_names_it() {
    if !can_run_vms("a_disk_held_by_another_process_names_it") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "web"]);
    host.ok(&["suspend", "web"]);
    let file = File::options().read(true).write(true).open(overlay(&host, "web")).unwrap();
    let lock = nix::libc::flock {
        l_type: nix::libc::F_WRLCK as i16,
        l_whence: nix::libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_OFD_SETLK(&lock)).unwrap();
    let (_, error) = host.fails(&["resume", "web"]);
    let me = std::process::id().to_string();
    assert!(
        error.contains("LOCKED") && error.contains(&me),
        "process {me} holds descriptor {}: {error}",
        file.as_raw_fd()
    );
    drop(file);
    host.ok(&["resume", "web"]);
}

#[test]
fn a_kernel_that_panics_fails_the_create_with_the_console() {
    if !can_run_vms("a_kernel_that_panics_fails_the_create_with_the_console") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "good"]);
    // A kernel with no modules beside it never finds the disk; the agent says so and the kernel panics or reboots.
    let kernels = host.dir().join("state/kernels");
    let vmlinuz = fs::read_dir(kernels).unwrap().flatten().find_map(|e| {
        let kernel = e.path().join("vmlinuz");
        kernel.exists().then_some(kernel)
    });
    let copy = host.dir().join("vmlinuz-alone");
    fs::copy(vmlinuz.expect("the default kernel"), &copy).unwrap();
    let began = std::time::Instant::now();
    let (_, error) = host.fails(&["create", "bad", "--kernel", copy.to_str().unwrap()]);
    assert!(began.elapsed().as_secs() < 60, "took {:?}", began.elapsed());
    assert!(error.contains("torpor-agent") || error.contains("panic"), "no console in: {error}");
    let failed = host.get("bad");
    assert_eq!((&failed["phase"], &failed["host"]), (&"Error".into(), &serde_json::Value::Null));
    host.ok(&["delete", "bad"]);
}

#[test]
fn lifecycle_verbs_work_on_a_full_state_disk() {
    if !can_run_vms("lifecycle_verbs_work_on_a_full_state_disk") {
        return;
    }
    let host = Host::empty("");
    host.kill_gateway();
    // The state moves to a small file system of its own.
    let state = host.dir().join("state");
    let mount =
        |arguments: &[&str]| assert!(Command::new("mount").args(arguments).status().unwrap().success());
    let kernels = fs::read_link(state.join("kernels")).unwrap();
    mount(&["-t", "tmpfs", "-o", "size=160m", "torpor-test", state.to_str().unwrap()]);
    struct Unmount(PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
    let _unmount = Unmount(state.clone());
    std::os::unix::fs::symlink(&kernels, state.join("kernels")).unwrap();
    host.start_gateway();
    let tree = torpor_tests::torpor_program().parent().unwrap().join("torpor-tests/tree");
    host.ok(&["image", "import", "tiny", tree.to_str().unwrap()]);
    host.ok(&["create", "web"]);
    host.sh("web", "echo kept > /root/file; sync");

    let ballast = File::create(state.join("ballast")).unwrap();
    let zeros = vec![0; 1 << 16];
    while std::io::Write::write_all(&mut &ballast, &zeros).is_ok() {}
    for _ in 0..3 {
        host.ok(&["suspend", "web"]);
        host.ok(&["resume", "web"]);
        assert_eq!(host.sh("web", "cat /root/file"), "kept\n");
    }
    host.ok(&["stop", "web"]);
    host.restart_gateway();
    host.ok(&["start", "web"]);
    host.ok(&["delete", "web"]);
    let left = fs::read_dir(state.join("sandboxes")).map(|d| d.count()).unwrap_or_default();
    assert_eq!(left, 0);
}
