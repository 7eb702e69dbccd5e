//! Real VMs in software emulation, from create to delete.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{os::unix::fs::PermissionsExt as _, time::Duration};

use common::{bench, block_on, exec, signal};
use futures::StreamExt as _;
use torpor_driver_vm::Standing;
use torpor_sandbox::{Change, ComputeDriver as _, DriverError, Exit, Keep, Observed, Run, SandboxId};

const STOPPED: Observed = Observed::Stopped { memory: false };

/// Runs the test's future on its bench.
macro_rules! on_bench {
    ($name:expr, |$bench:ident| $work:block) => {
        #[allow(unused_mut, reason = "some tests change their bench")]
        let Some(mut $bench) = bench($name) else { return };
        block_on(async { $work });
    };
}

#[test]
fn files_outlive_suspends_gateways_and_killed_vms() {
    on_bench!("files_outlive_suspends_gateways_and_killed_vms", |bench| {
        let driver = bench.driver();
        let id = SandboxId::generate();
        if std::env::var_os("TORPOR_BOX").is_some() {
            let kvm = common::machine() == "kvm";
            assert_eq!(driver.capabilities().machine, if kvm { "kvm (torpor-vmm)" } else { "qemu (kvm)" });
        }
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Missing);
        assert_eq!(driver.create(&id, &bench.spec(), Run(1)).await.unwrap(), Change::Done);
        assert_eq!(driver.create(&id, &bench.spec(), Run(1)).await.unwrap(), Change::Already);
        assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);

        // Without a loan nothing starts.
        assert!(matches!(driver.start(&id, Keep::Disk, Run(1)).await, Err(DriverError::Exhausted(_))));
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());

        bench.loans.lend(&id, Run(1));
        driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Running { run: Run(1), agent: true });
        assert_eq!(driver.start(&id, Keep::Disk, Run(1)).await.unwrap(), Change::Already);
        assert!(matches!(driver.start(&id, Keep::Disk, Run(2)).await, Err(DriverError::Invalid(_))));
        let facts = driver.facts(&id).await;
        let host = facts.host.unwrap();
        assert!(
            host.resident_bytes > 0
                && host.tap.starts_with("tpr")
                && facts.disk.unwrap().virtual_bytes == 1 << 30
        );
        let mode = |path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(bench.run_dir(&id)), 0o700);
        assert_eq!(mode(bench.run_dir(&id).join("vm.json")), 0o600);
        assert_eq!(exec(&driver, &id, "echo $GREETING; echo one > /one").await, (0, "hello\n".to_owned()));
        let (_, shown) = exec(&driver, &id, "ip addr; ip route").await;
        assert!(shown.contains(&host.ip) && shown.contains("default via"), "{shown}");
        let stopped = driver.stop(&id, Keep::Disk, Duration::from_secs(60)).await.unwrap();
        assert!(stopped.flushed, "{stopped:?}");
        assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
        assert!(!driver.console(&id, 1 << 16).await.is_empty(), "the last run's console is kept");

        // A stop of what is stopped is a success.
        driver.stop(&id, Keep::Disk, Duration::from_secs(1)).await.unwrap();

        // Another gateway finds the same process.
        bench.loans.lend(&id, Run(2));
        driver.start(&id, Keep::Disk, Run(2)).await.unwrap();
        let second = driver.facts(&id).await;
        assert_ne!(second.boot_id, facts.boot_id);
        assert!(second.boot_id.is_some());
        assert_eq!(exec(&driver, &id, "cat /one; echo two > /two; sync").await, (0, "one\n".to_owned()));
        drop(driver);
        let driver = bench.driver();
        let mut hints = driver.hints();
        let lines = driver.sweep(&|_| Standing::Unknown).await.unwrap();
        assert!(lines.iter().any(|line| line.contains("no record knows it")), "left alone: {lines:?}");
        let lines = driver.sweep(&|_| Standing::Runs).await.unwrap();
        assert_eq!(driver.facts(&id).await.boot_id, second.boot_id, "known without asking the guest");
        let pid = second.host.unwrap().pid;
        assert!(lines.iter().any(|line| line.contains(&format!("process {pid}"))), "{lines:?}");

        // A VM that somebody kills is seen, and what it had is given back.
        signal(pid, "-9");
        assert_eq!(hints.next().await, Some(id.clone()));
        let ended = loop {
            match driver.observe(&id).await.unwrap() {
                Observed::Ended(ended) => break ended,
                Observed::Running { .. } => tokio::time::sleep(Duration::from_millis(20)).await,
                other => panic!("{other:?}"),
            }
        };
        assert!(ended.run == Run(2) && matches!(ended.exit, Exit::Lost(_)), "{ended:?}");
        let stopped = driver.stop(&id, Keep::Disk, Duration::from_secs(5)).await.unwrap();
        assert!(!stopped.flushed);
        assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());

        // The synced files are there; a guest that switches itself off has ended so.
        bench.loans.lend(&id, Run(3));
        driver.start(&id, Keep::Disk, Run(3)).await.unwrap();
        assert_eq!(exec(&driver, &id, "cat /one /two").await, (0, "one\ntwo\n".to_owned()));
        let vm = driver.facts(&id).await.host.unwrap().pid;
        assert!(std::path::Path::new(&format!("/proc/{vm}")).exists());
        assert_eq!(driver.delete(&id).await.unwrap(), Change::Done);
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Missing);
        assert_eq!(driver.delete(&id).await.unwrap(), Change::Already);
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
        assert_eq!(driver.list().await.unwrap(), vec![]);
    });
}

#[test]
fn a_disk_grows_under_a_running_guest_and_its_file_system_with_it() {
    on_bench!("a_disk_grows_under_a_running_guest_and_its_file_system_with_it", |bench| {
        let (driver, id) = (bench.driver(), SandboxId::generate());
        driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
        bench.loans.lend(&id, Run(1));
        driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
        let disks = driver.disks().unwrap();
        let asked = disks.grow(&id, 3 << 30).await;
        if !driver.facts(&id).await.machine.unwrap().starts_with("kvm") {
            assert!(matches!(asked, Err(DriverError::Unsupported(_))), "{asked:?}");
            assert_eq!(disks.report(&id, false).await.unwrap().virtual_bytes, 1 << 30);
            driver.delete(&id).await.unwrap();
            return;
        }
        assert_eq!(asked.unwrap(), 3 << 30);
        assert!(matches!(disks.grow(&id, 1 << 30).await, Err(DriverError::Invalid(_))), "never smaller");
        assert_eq!(driver.facts(&id).await.disk.unwrap().virtual_bytes, 3 << 30);
        let (_, shown) = exec(&driver, &id, "echo new > /new; sync; df -k /").await;
        let line = shown.lines().last().unwrap_or_default();
        let kibibytes: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(kibibytes > 5 << 19, "{shown}");
        assert!(driver.stop(&id, Keep::Disk, Duration::from_secs(60)).await.unwrap().flushed);
        let check = disks.report(&id, true).await.unwrap().check.unwrap();
        assert_eq!(check.damages, Vec::<String>::new());
        bench.loans.lend(&id, Run(2));
        driver.start(&id, Keep::Disk, Run(2)).await.unwrap();
        assert_eq!(exec(&driver, &id, "cat /new").await, (0, "new\n".to_owned()));
        driver.delete(&id).await.unwrap();
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
    });
}

#[test]
fn a_vm_whose_record_is_half_made_or_gone_is_found_and_put_down() {
    on_bench!("a_vm_whose_record_is_half_made_or_gone_is_found_and_put_down", |bench| {
        let id = SandboxId::generate();
        bench.driver().create(&id, &bench.spec(), Run(1)).await.unwrap();
        for (run, folder_too) in [(Run(1), false), (Run(2), true)] {
            let driver = bench.driver();
            bench.loans.lend(&id, run);
            driver.start(&id, Keep::Disk, run).await.unwrap();
            let pid = driver.facts(&id).await.host.unwrap().pid;
            drop(driver);
            if folder_too {
                std::fs::remove_dir_all(bench.run_dir(&id)).unwrap();
            } else {
                // As a gateway leaves it that is killed between the start of the process and the note of it.
                let path = bench.run_dir(&id).join("vm.json");
                let mut record: serde_json::Value =
                    serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
                record["process"] = serde_json::Value::Null;
                std::fs::write(&path, record.to_string()).unwrap();
            }
            let driver = bench.driver();
            assert!(
                matches!(driver.observe(&id).await.unwrap(), Observed::Running { run: seen, .. } if seen == run)
            );
            assert_eq!(driver.facts(&id).await.host.unwrap().pid, pid);
            let stopped = driver.stop(&id, Keep::Disk, Duration::from_secs(30)).await.unwrap();
            assert_eq!(stopped.flushed, !folder_too, "{stopped:?}");
            assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
            assert_eq!(bench.leftovers(&id), Vec::<String>::new());
        }
    });
}

#[test]
fn a_wedged_vm_is_killed_at_the_deadline_and_said_not_to_have_flushed() {
    on_bench!("a_wedged_vm_is_killed_at_the_deadline_and_said_not_to_have_flushed", |bench| {
        let driver = bench.driver();
        let id = SandboxId::generate();
        driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
        bench.loans.lend(&id, Run(1));
        driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
        let pid = driver.facts(&id).await.host.unwrap().pid;
        signal(pid, "-STOP");
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Running { run: Run(1), agent: false });
        let stopped = driver.stop(&id, Keep::Disk, Duration::from_secs(2)).await.unwrap();
        assert!(
            !stopped.flushed && stopped.detail.as_ref().unwrap().contains("did not answer"),
            "{stopped:?}"
        );
        assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
    });
}

#[test]
fn three_vms_with_four_cpus_each_run_at_once_and_end_flushed() {
    if common::machine() != "kvm" {
        println!(
            "SKIP three_vms_with_four_cpus_each_run_at_once_and_end_flushed: twelve emulated CPUs take minutes; it runs in tests/box/ring"
        );
        return;
    }
    on_bench!("three_vms_with_four_cpus_each_run_at_once_and_end_flushed", |bench| {
        let driver = bench.driver();
        let ids: Vec<_> = (0..3).map(|_| SandboxId::generate()).collect();
        for id in &ids {
            let mut spec = bench.spec();
            spec.resources.cpus = 4;
            driver.create(id, &spec, Run(1)).await.unwrap();
            bench.loans.lend(id, Run(1));
        }
        let starts = ids.iter().map(|id| driver.start(id, Keep::Disk, Run(1)));
        futures::future::try_join_all(starts).await.unwrap();
        for id in &ids {
            let (code, shown) = exec(&driver, id, "nproc; echo kept > /kept; cat /kept").await;
            assert_eq!((code, shown.as_str()), (0, "4\nkept\n"));
        }
        let stops = ids.iter().map(|id| driver.stop(id, Keep::Disk, Duration::from_secs(60)));
        for stopped in futures::future::try_join_all(stops).await.unwrap() {
            assert!(stopped.flushed, "{stopped:?}");
        }
        for id in &ids {
            assert_eq!(bench.leftovers(id), Vec::<String>::new());
        }
    });
}

#[test]
fn a_guest_that_panics_at_boot_fails_with_the_console_and_leaves_nothing() {
    on_bench!("a_guest_that_panics_at_boot_fails_with_the_console_and_leaves_nothing", |bench| {
        // A first program that ends is what a kernel doesn't survive.
        bench.config.agent = bench.folder.path().join("ends-at-once");
        std::fs::write(&bench.config.agent, program_that_ends()).unwrap();
        let driver = bench.driver();
        let id = SandboxId::generate();
        driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
        bench.loans.lend(&id, Run(1));
        let error = driver.start(&id, Keep::Disk, Run(1)).await.unwrap_err();
        let DriverError::Failed { step, cause, console } = error else { panic!("{error}") };
        assert_eq!(step, "boot");
        assert!(cause.contains("Kernel panic - not syncing"), "{cause}");
        assert!(console.contains("Kernel panic"), "{console}");
        assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
    });
}

/// A static ELF program of 64 + 56 + 12 bytes: exit(1).
fn program_that_ends() -> Vec<u8> {
    let code = [0xbf, 1, 0, 0, 0, 0xb8, 60, 0, 0, 0, 0x0f, 0x05];
    let (address, size) = (0x40_0000_u64, 64 + 56 + code.len() as u64);
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
    elf.resize(16, 0);
    elf.extend([2, 0, 62, 0, 1, 0, 0, 0]); // executable, x86-64
    for number in [address + 64 + 56, 64, 0] {
        elf.extend(number.to_le_bytes()); // entry, program headers, section headers
    }
    elf.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    elf.extend([1, 0, 0, 0, 5, 0, 0, 0]); // loaded, readable and executable
    for number in [0, address, address, size, size, 4096] {
        elf.extend(number.to_le_bytes());
    }
    elf.extend(code);
    elf
}

#[test]
fn a_start_that_is_dropped_is_seen_as_it_is_and_stop_goes_on_from_it() {
    on_bench!("a_start_that_is_dropped_is_seen_as_it_is_and_stop_goes_on_from_it", |bench| {
        let driver = bench.driver();
        let id = SandboxId::generate();
        driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
        bench.loans.lend(&id, Run(1));
        for millis in [0, 20, 60, 1500] {
            let start = driver.start(&id, Keep::Disk, Run(1));
            assert!(tokio::time::timeout(Duration::from_millis(millis), start).await.is_err());
            let seen = driver.observe(&id).await.unwrap();
            let allowed = [STOPPED, Observed::Running { run: Run(1), agent: false }];
            assert!(
                allowed.contains(&seen) || matches!(seen, Observed::Unknown(_)),
                "{seen:?} after {millis} ms"
            );
            driver.stop(&id, Keep::Disk, Duration::from_secs(30)).await.unwrap();
            assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
            assert_eq!(bench.leftovers(&id), Vec::<String>::new(), "after {millis} ms");
        }
    });
}

#[test]
fn the_end_of_the_main_command_and_of_the_guest_are_told_with_their_reasons() {
    on_bench!("the_end_of_the_main_command_and_of_the_guest_are_told_with_their_reasons", |bench| {
        let driver = bench.driver();
        let id = SandboxId::generate();
        let mut spec = bench.spec();
        spec.command = ["/bin/sh", "-c", "sleep 1; exit 7"].map(str::to_owned).to_vec();
        driver.create(&id, &spec, Run(1)).await.unwrap();
        bench.loans.lend(&id, Run(1));
        let mut hints = driver.hints();
        driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
        let exit = ended(&driver, &id, &mut hints).await;
        assert_eq!(exit, Exit::Code(7));
        assert!(driver.stop(&id, Keep::Disk, Duration::from_secs(60)).await.unwrap().flushed);
        assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);

        // The reason outlives a gateway that wasn't there when it happened.
        spec.command.clear();
        assert_eq!(driver.create(&id, &spec, Run(2)).await.unwrap(), Change::Done);
        bench.loans.lend(&id, Run(2));
        driver.start(&id, Keep::Disk, Run(2)).await.unwrap();
        let vm = driver.facts(&id).await.host.unwrap().pid;
        exec(&driver, &id, "(sleep 2; reboot -f) >/dev/null 2>&1 &").await;
        drop(driver);
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert!(std::path::Path::new(&format!("/proc/{vm}")).exists(), "the end waits to be seen");
        let driver = bench.driver();
        let mut hints = driver.hints();
        assert_eq!(ended(&driver, &id, &mut hints).await, Exit::PowerOff);
        drop(driver);
        let driver = bench.driver();
        let Observed::Ended(seen) = driver.observe(&id).await.unwrap() else {
            panic!("an end was forgotten")
        };
        assert_eq!((seen.run, seen.exit), (Run(2), Exit::PowerOff));
        driver.stop(&id, Keep::Disk, Duration::from_secs(5)).await.unwrap();
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
    });
}

async fn ended(
    driver: &torpor_driver_vm::VmDriver,
    id: &SandboxId,
    hints: &mut (impl futures::Stream<Item = SandboxId> + Unpin),
) -> Exit {
    loop {
        if let Observed::Ended(ended) = driver.observe(id).await.unwrap() {
            return ended.exit;
        }
        let hint = tokio::time::timeout(Duration::from_secs(60), hints.next()).await;
        assert!(hint.is_ok(), "no hint and no end");
    }
}

#[test]
fn a_ready_guest_is_flushed_whichever_gateway_stops_it() {
    on_bench!("a_ready_guest_is_flushed_whichever_gateway_stops_it", |bench| {
        let driver = bench.driver();
        let id = SandboxId::generate();
        driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
        bench.loans.lend(&id, Run(1));
        driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
        let pid = driver.facts(&id).await.host.unwrap().pid;
        drop(driver);
        // Another gateway takes it up while it is too busy to answer, and stops it at once.
        signal(pid, "-STOP");
        let driver = bench.driver();
        driver.sweep(&|_| Standing::Runs).await.unwrap();
        let busy = async {
            tokio::time::sleep(Duration::from_secs(2)).await;
            signal(pid, "-CONT");
        };
        let (stopped, ()) = tokio::join!(driver.stop(&id, Keep::Disk, Duration::from_secs(60)), busy);
        let stopped = stopped.unwrap();
        assert!(stopped.flushed, "{stopped:?}");
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());

        // A gateway that ends between the guest's answer and the release leaves a note of it.
        bench.loans.lend(&id, Run(2));
        driver.start(&id, Keep::Disk, Run(2)).await.unwrap();
        let noted = async {
            while !bench.run_dir(&id).join("flushed.json").exists() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::select! {
            stopped = driver.stop(&id, Keep::Disk, Duration::from_secs(60)) => panic!("no note: {stopped:?}"),
            () = noted => {}
        }
        drop(driver);
        let driver = bench.driver();
        let stopped = driver.stop(&id, Keep::Disk, Duration::from_secs(60)).await.unwrap();
        assert!(stopped.flushed && stopped.detail.is_none(), "{stopped:?}");
        assert_eq!(driver.observe(&id).await.unwrap(), STOPPED);
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
    });
}
