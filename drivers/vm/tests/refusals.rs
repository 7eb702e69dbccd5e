//! What is refused before anything is borrowed, and what is cleaned up. No VM boots here.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{
    fs,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
    process::Command,
    sync::Arc,
    time::Duration,
};

use common::{bench, block_on};
use torpor_driver_vm::{ConfigError, Standing, VmDriver};
use torpor_sandbox::{Change, ComputeDriver as _, DriverError, Keep, Observed, Run, SandboxId};

macro_rules! on_bench {
    ($name:expr, |$bench:ident| $work:block) => {
        #[allow(unused_mut, reason = "some tests change their bench")]
        let Some(mut $bench) = bench($name) else { return };
        block_on(async { $work });
    };
}

const STOPPED: Observed = Observed::Stopped { memory: false };

#[test]
fn a_disk_that_is_gone_is_reported_and_never_made_anew() {
    on_bench!("a_disk_that_is_gone_is_reported_and_never_made_anew", |bench| {
        let (driver, id) = (bench.driver(), SandboxId::generate());
        driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
        bench.loans.lend(&id, Run(1));
        fs::remove_file(bench.state(&id).join("overlay.qcow2")).unwrap();
        assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
        let error = driver.start(&id, Keep::Disk, Run(1)).await.unwrap_err();
        assert_eq!(error.reason(), "DATA_MISSING", "{error}");
        driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
        assert!(!bench.state(&id).join("overlay.qcow2").exists());
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
        driver.delete(&id).await.unwrap();
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Missing);
    });
}

#[test]
fn a_locked_disk_names_its_holder_and_nothing_is_borrowed() {
    on_bench!("a_locked_disk_names_its_holder_and_nothing_is_borrowed", |bench| {
        let (driver, id) = (bench.driver(), SandboxId::generate());
        driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
        bench.loans.lend(&id, Run(1));
        let lock = torpor_overlay::Lock::acquire(&bench.state(&id).join("overlay.qcow2")).unwrap();
        let mut holder = Command::new("sleep").arg("100").stdin(lock.into_fd()).spawn().unwrap();
        let error = driver.start(&id, Keep::Disk, Run(1)).await.unwrap_err();
        assert!(
            matches!(error, DriverError::Locked { holder: Some(pid), .. } if pid == holder.id()),
            "{error}"
        );
        assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
        assert!(holder.try_wait().unwrap().is_none(), "the holder must live");
        holder.kill().unwrap();
        holder.wait().unwrap();
    });
}

#[test]
fn a_base_that_is_gone_or_changed_is_named_and_the_disk_stays_as_it_is() {
    on_bench!("a_base_that_is_gone_or_changed_is_named_and_the_disk_stays_as_it_is", |bench| {
        // Images of this test's own: they are spoilt.
        let images = bench.config.state_dir.join("images");
        let shared = fs::canonicalize(&images).unwrap();
        fs::remove_file(&images).unwrap();
        let copied = Command::new("cp").arg("-a").arg(&shared).arg(&images).status().unwrap();
        assert!(copied.success());
        let (driver, id) = (bench.driver(), SandboxId::generate());
        driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
        bench.loans.lend(&id, Run(1));
        let overlay = fs::read(bench.state(&id).join("overlay.qcow2")).unwrap();
        let base = images.join(bench.digest.trim_start_matches("sha256:")).join("base.raw");
        let bytes = fs::read(&base).unwrap();
        let mut other = bytes.clone();
        other[4096] ^= 1;
        let _ = Command::new("chattr").arg("-i").arg(&base).status();
        fs::remove_file(&base).unwrap();
        let error = driver.start(&id, Keep::Disk, Run(1)).await.unwrap_err();
        assert_eq!(error.reason(), "BASE_MISSING", "{error}");
        fs::write(&base, &other).unwrap();
        let error = driver.start(&id, Keep::Disk, Run(1)).await.unwrap_err();
        assert_eq!(error.reason(), "BASE_CHANGED", "{error}");
        assert!(fs::read(bench.state(&id).join("overlay.qcow2")).unwrap() == overlay);
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
    });
}

#[test]
fn a_record_whose_pid_is_a_strangers_now_ends_nobody_else() {
    on_bench!("a_record_whose_pid_is_a_strangers_now_ends_nobody_else", |bench| {
        let (driver, id) = (bench.driver(), SandboxId::generate());
        driver.create(&id, &bench.spec(), Run(4)).await.unwrap();
        bench.loans.lend(&id, Run(4));
        let mut stranger = Command::new("sleep").arg("100").spawn().unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", stranger.id())).unwrap();
        let start_time: u64 =
            stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap().parse().unwrap();
        let net = bench.config.pool.guest_net(id.as_str(), torpor_netpool::Slot(0)).unwrap();
        let host_boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let record = serde_json::json!({
            "sandbox": id, "run": 4, "machine": "qemu", "label": "qemu (tcg)", "host_boot": host_boot.trim(),
            "process": { "pid": stranger.id(), "start_time": start_time }, "net": net, "cpus": "0", "memory_bytes": 1,
        });
        fs::create_dir_all(bench.run_dir(&id)).unwrap();
        fs::write(bench.run_dir(&id).join("vm.json"), record.to_string()).unwrap();
        assert!(matches!(driver.observe(&id).await.unwrap(), Observed::Ended(ended) if ended.run == Run(4)));
        driver.stop(&id, Keep::Disk, Duration::from_secs(1)).await.unwrap();
        assert!(stranger.try_wait().unwrap().is_none(), "the stranger must live");
        assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
        stranger.kill().unwrap();
        stranger.wait().unwrap();
    });
}

#[test]
fn leftovers_of_every_kind_are_swept_or_stopped() {
    on_bench!("leftovers_of_every_kind_are_swept_or_stopped", |bench| {
        let (driver, known, unknown) = (bench.driver(), SandboxId::generate(), SandboxId::generate());
        driver.create(&known, &bench.spec(), Run(1)).await.unwrap();
        // A start that was cut between folder and record, and one with a damaged record.
        fs::create_dir_all(bench.run_dir(&known)).unwrap();
        fs::create_dir_all(bench.run_dir(&unknown)).unwrap();
        fs::write(bench.run_dir(&unknown).join("vm.json"), "{ half").unwrap();
        let element = bench.config.pool.guest_net("sb-gone", torpor_netpool::Slot(9)).unwrap().guest();
        let firewall = torpor_netpool::linux::Firewall::new(&bench.config.pool);
        firewall.ensure().unwrap();
        firewall.add(&element).unwrap();
        let lines =
            driver.sweep(&|id| if *id == known { Standing::Runs } else { Standing::AtRest }).await.unwrap();
        assert!(lines.iter().any(|line| line.contains("firewall element")), "{lines:?}");
        assert!(lines.iter().any(|line| line.starts_with(unknown.as_str())), "{lines:?}");
        assert!(!bench.run_dir(&unknown).exists());
        assert!(
            matches!(driver.observe(&known).await.unwrap(), Observed::Ended(ended) if ended.run == Run(0))
        );
        driver.stop(&known, Keep::Disk, Duration::from_secs(1)).await.unwrap();
        assert_eq!(driver.observe(&known).await.unwrap(), STOPPED);
        assert_eq!(bench.leftovers(&known), Vec::<String>::new());
        assert!(Path::new(&bench.state(&known).join("overlay.qcow2")).exists());
    });
}

#[test]
fn a_run_directory_of_another_driver_or_state_directory_is_refused() {
    on_bench!("a_run_directory_of_another_driver_or_state_directory_is_refused", |bench| {
        let first = bench.driver();
        let refused = |config| VmDriver::new(config, bench.loans.clone()).unwrap_err();
        assert!(matches!(refused(bench.config.clone()), ConfigError::RunDirInUse { .. }));
        let mut other = bench.config.clone();
        other.state_dir = bench.folder.path().join("other");
        assert!(matches!(refused(other.clone()), ConfigError::RunDirInUse { .. }));
        // Something of the driver that lives on doesn't keep the directory.
        let hints = first.hints();
        drop(first);
        assert!(matches!(refused(other.clone()), ConfigError::RunDirOwned { .. }));
        drop(bench.driver());
        drop(hints);
    });
}

#[test]
fn a_loan_of_another_run_starts_nothing() {
    on_bench!("a_loan_of_another_run_starts_nothing", |bench| {
        let (driver, id) = (bench.driver(), SandboxId::generate());
        driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
        bench.loans.lend(&id, Run(1));
        let error = driver.start(&id, Keep::Disk, Run(2)).await.unwrap_err();
        assert!(
            matches!(&error, DriverError::Exhausted(text) if text.contains("run 1") && text.contains("run 2")),
            "{error}"
        );
        assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
    });
}

#[test]
fn what_holds_secrets_is_its_owners_only() {
    on_bench!("what_holds_secrets_is_its_owners_only", |bench| {
        let (driver, id) = (bench.driver(), SandboxId::generate());
        driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
        let (state, run) = (&bench.config.state_dir, &bench.config.run_dir);
        let folders = [state.join("sandboxes"), state.join("consoles"), bench.state(&id)];
        let files = [bench.state(&id).join("spec.json"), run.join("driver.lock"), run.join("owner")];
        for (paths, wanted) in [(folders, 0o700), (files, 0o600)] {
            for path in paths {
                let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
                assert_eq!(mode, wanted, "{}: {mode:o}", path.display());
            }
        }
    });
}

#[test]
fn a_flush_that_was_noted_is_told_by_the_stop_that_ends_the_work() {
    on_bench!("a_flush_that_was_noted_is_told_by_the_stop_that_ends_the_work", |bench| {
        let (driver, id) = (bench.driver(), SandboxId::generate());
        driver.create(&id, &bench.spec(), Run(4)).await.unwrap();
        let host_boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        for (noted, flushed) in [(None, false), (Some("3"), false), (Some("4"), true)] {
            // As a gateway leaves it that is killed between the guest's answer and the release; this pid is nobody's.
            let record = serde_json::json!({
                "sandbox": id, "run": 4, "machine": "qemu", "label": "qemu (tcg)", "host_boot": host_boot.trim(),
                "process": { "pid": i32::MAX, "start_time": 1 }, "net": null, "cpus": "0", "memory_bytes": 1,
                "configured": true,
            });
            fs::create_dir_all(bench.run_dir(&id)).unwrap();
            fs::write(bench.run_dir(&id).join("vm.json"), record.to_string()).unwrap();
            if let Some(run) = noted {
                fs::write(bench.run_dir(&id).join("flushed.json"), run).unwrap();
            }
            let stopped = driver.stop(&id, Keep::Disk, Duration::from_secs(1)).await.unwrap();
            assert_eq!(
                (stopped.flushed, stopped.detail.is_none()),
                (flushed, flushed),
                "{noted:?}: {stopped:?}"
            );
            assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
        }
    });
}

#[test]
fn a_delete_that_was_cut_short_is_seen_and_finished() {
    on_bench!("a_delete_that_was_cut_short_is_seen_and_finished", |bench| {
        let driver = bench.driver();
        for swept in [false, true] {
            let id = SandboxId::generate();
            driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
            let trash = bench.config.state_dir.join("sandboxes").join(format!(".deleted-{id}"));
            fs::rename(bench.state(&id), &trash).unwrap();
            assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
            assert_eq!(driver.list().await.unwrap(), vec![id.clone()]);
            if swept {
                let lines = driver.sweep(&|_| Standing::AtRest).await.unwrap();
                assert!(lines.iter().any(|line| line.contains(trash.to_str().unwrap())), "{lines:?}");
            } else {
                assert_eq!(driver.delete(&id).await.unwrap(), Change::Done);
            }
            assert!(!trash.exists());
            assert_eq!(driver.observe(&id).await.unwrap(), Observed::Missing);
            assert_eq!(driver.delete(&id).await.unwrap(), Change::Already);
        }
    });
}

#[test]
fn one_sandbox_whose_files_hang_keeps_nobody_from_the_others() {
    on_bench!("one_sandbox_whose_files_hang_keeps_nobody_from_the_others", |bench| {
        let (driver, slow, other) = (bench.driver(), SandboxId::generate(), SandboxId::generate());
        driver.create(&other, &bench.spec(), Run(1)).await.unwrap();
        fs::create_dir_all(bench.run_dir(&slow)).unwrap();
        let record = bench.run_dir(&slow).join("vm.json");
        nix::unistd::mkfifo(&record, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let observer = tokio::spawn({
            let (driver, slow) = (Arc::clone(&driver), slow.clone());
            async move { driver.observe(&slow).await.unwrap() }
        });
        // Opens only when there is a reader, who waits from then on.
        let nonblocking = nix::fcntl::OFlag::O_NONBLOCK.bits();
        let writer = loop {
            match fs::OpenOptions::new().write(true).custom_flags(nonblocking).open(&record) {
                Ok(writer) => break writer,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        let others = async {
            assert_eq!(driver.observe(&other).await.unwrap(), STOPPED);
            assert!(driver.facts(&other).await.disk.is_some());
            assert!(driver.facts(&slow).await.host.is_none());
            driver.stop(&other, Keep::Disk, Duration::from_secs(1)).await.unwrap();
        };
        let done = tokio::time::timeout(Duration::from_secs(30), others).await.is_ok();
        fs::remove_file(&record).unwrap();
        drop(writer);
        assert!(done, "the others waited");
        assert!(matches!(observer.await.unwrap(), Observed::Ended(_)));
    });
}
