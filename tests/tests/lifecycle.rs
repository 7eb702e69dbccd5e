//! The main job, for real: VMs with a stock kernel, through the gateway and the command line.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{fs, path::Path};

use sha2::{Digest as _, Sha256};
use torpor_tests::{Host, can_run_vms, is_alive};

fn hash(path: &Path) -> String {
    format!("{:x}", Sha256::digest(fs::read(path).unwrap()))
}

fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_suspended_sandbox_leaves_nothing_but_its_disk_and_comes_back_with_its_files() {
    if !can_run_vms("a_suspended_sandbox_leaves_nothing_but_its_disk_and_comes_back_with_its_files") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "web"]);
    let ready = host.get("web");
    assert_eq!(ready["phase"], "Ready");
    let (id, lent) = (ready["id"].as_str().unwrap().to_owned(), ready["host"].clone());
    assert!(
        is_alive(lent["pid"].as_i64().unwrap()) && lent["ip"].is_string() && lent["mac"].is_string(),
        "{lent}"
    );
    assert_eq!(host.sh("web", "echo never-synced > /root/file; cat /root/file"), "never-synced\n");
    let boot = host.sh("web", "cat /proc/sys/kernel/random/boot_id");

    host.ok(&["suspend", "web"]);
    let asleep = host.get("web");
    assert_eq!(
        (&asleep["phase"], &asleep["retained"], &asleep["host"]),
        (&"Suspended".into(), &"disk".into(), &serde_json::Value::Null)
    );
    assert_eq!(asleep["flushed"], true);
    assert_eq!(host.leftovers(&id, &lent), Vec::<String>::new());
    let dir = host.sandbox_dir(&id);
    assert_eq!(files(&dir), ["overlay.qcow2", "spec.json"]);
    let before = hash(&dir.join("overlay.qcow2"));
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(hash(&dir.join("overlay.qcow2")), before, "a sleeping disk changes");

    let (code, error) = host.fails(&["exec", "web", "--", "true"]);
    assert!(
        code == 4 && error.contains("Suspended") && error.contains("torpor resume web"),
        "{code} {error}"
    );

    host.ok(&["resume", "web"]);
    let awake = host.get("web");
    assert_eq!((&awake["phase"], &awake["run"], &awake["id"]), (&"Ready".into(), &2.into(), &ready["id"]));
    assert_eq!(awake["host"]["mac"], lent["mac"], "the hardware address is part of the identity");
    assert_eq!(host.sh("web", "cat /root/file"), "never-synced\n");
    assert_ne!(host.sh("web", "cat /proc/sys/kernel/random/boot_id"), boot, "it was booted anew");

    host.ok(&["create", "other"]);
    host.fails(&["exec", "other", "--", "test", "-e", "/root/file"]);

    let lent = host.get("web")["host"].clone();
    host.ok(&["delete", "web", "other"]);
    assert_eq!(host.leftovers(&id, &lent), Vec::<String>::new());
    assert!(!dir.exists());
    assert_eq!(host.fails(&["get", "web"]).0, 3);
}

#[test]
fn ten_cycles_keep_ten_files_that_were_never_synced_through_a_gateway_that_is_killed_between_steps() {
    if !can_run_vms("ten_cycles_keep_ten_files") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "web"]);
    for cycle in 0..10 {
        host.sh("web", &format!("echo {cycle} > /root/file-{cycle}"));
        let pid = host.get("web")["host"]["pid"].clone();
        if cycle % 2 == 0 {
            host.restart_gateway();
            let again = host.get("web");
            assert_eq!(
                (&again["phase"], &again["host"]["pid"]),
                (&"Ready".into(), &pid),
                "the VM outlives its gateway"
            );
        }
        host.ok(&["suspend", "web"]);
        if cycle % 3 == 0 {
            host.restart_gateway();
            assert_eq!(host.get("web")["phase"], "Suspended", "suspended stays suspended");
        }
        host.ok(&["resume", "web"]);
        let there = host.sh("web", "cat /root/file-* | sort -n | tr '\\n' ' '");
        let expected: String = (0..=cycle).map(|n| format!("{n} ")).collect();
        assert_eq!(there, expected);
    }
}

#[test]
fn a_gateway_killed_in_the_middle_of_a_verb_ends_where_it_was_going() {
    if !can_run_vms("a_gateway_killed_in_the_middle_of_a_verb_ends_where_it_was_going") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "web"]);
    host.sh("web", "echo kept > /root/file");
    for delay in [0, 40, 150, 600, 1500] {
        host.ok(&["suspend", "web", "--no-wait"]);
        std::thread::sleep(std::time::Duration::from_millis(delay));
        host.restart_gateway();
        host.until("Suspended", |h| h.get("web")["phase"] == "Suspended");
        host.ok(&["resume", "web", "--no-wait"]);
        std::thread::sleep(std::time::Duration::from_millis(delay));
        host.restart_gateway();
        host.until("Ready", |h| h.get("web")["phase"] == "Ready");
        assert_eq!(host.sh("web", "cat /root/file"), "kept\n");
    }
    let runs = fs::read_dir(host.dir().join("run")).unwrap().flatten();
    let run_dirs = runs.filter(|e| e.file_name().to_string_lossy().starts_with("sb-")).count();
    assert_eq!(run_dirs, 1, "one VM, whatever was killed");
}

#[test]
fn turning_round_during_a_boot_is_carried_out_at_once() {
    if !can_run_vms("turning_round_during_a_boot_is_carried_out_at_once") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "web"]);
    host.ok(&["suspend", "web"]);
    host.ok(&["resume", "web", "--no-wait"]);
    host.until("a VM", |h| h.get("web")["host"].is_object());
    let lent = host.get("web")["host"].clone();
    let id = host.get("web")["id"].as_str().unwrap().to_owned();
    host.ok(&["suspend", "web"]);
    assert_eq!(host.leftovers(&id, &lent), Vec::<String>::new());
    host.ok(&["suspend", "web", "--no-wait"]);
    host.ok(&["resume", "web"]);
    assert_eq!(host.get("web")["phase"], "Ready");
}

#[test]
fn a_vm_that_is_killed_is_an_error_that_resume_heals() {
    if !can_run_vms("a_vm_that_is_killed_is_an_error_that_resume_heals") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "web"]);
    host.sh("web", "echo synced > /root/file; sync");
    let shown = host.get("web");
    let pid = i32::try_from(shown["host"]["pid"].as_i64().unwrap()).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    host.until("Error", |h| h.get("web")["phase"] == "Error");
    assert_eq!(host.get("web")["failure"]["reason"], "COMPUTE_LOST");
    host.until("nothing is left", |h| h.leftovers(shown["id"].as_str().unwrap(), &shown["host"]).is_empty());
    host.ok(&["resume", "web"]);
    assert_eq!(host.sh("web", "cat /root/file"), "synced\n");
}

#[test]
fn the_main_command_runs_again_at_every_resume_and_its_end_completes_the_sandbox() {
    if !can_run_vms("the_main_command_runs_again_at_every_resume_and_its_end_completes_the_sandbox") {
        return;
    }
    let host = Host::new();
    host.ok(&[
        "create",
        "job",
        "--",
        "sh",
        "-c",
        "echo run >> /root/runs; echo hello from main; while [ ! -e /root/end ]; do sleep 0.1; done; exit 7",
    ]);
    host.until("the first run", |h| h.sh("job", "cat /root/runs") == "run\n");
    host.until("its output", |h| h.ok(&["logs", "job"]).contains("hello from main"));
    host.ok(&["suspend", "job"]);
    host.ok(&["resume", "job"]);
    host.until("the second run", |h| h.sh("job", "cat /root/runs") == "run\nrun\n");
    host.sh("job", "touch /root/end");
    host.until("Completed", |h| h.get("job")["phase"] == "Completed");
    assert_eq!(host.get("job")["exit_code"], 7);
    host.until("nothing is lent to it", |h| h.get("job")["host"].is_null());
}

#[test]
fn the_disk_is_as_large_as_asked_for_and_the_guest_reaches_its_gateway_only() {
    if !can_run_vms("the_disk_is_as_large_as_asked_for_and_the_guest_reaches_its_gateway_only") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "web", "--disk", "3G", "--cpus", "2", "--memory", "256M"]);
    let kib: u64 = host.sh("web", "df -k / | tail -n 1 | awk '{print $2}'").trim().parse().unwrap();
    assert!(kib > 2_700_000, "the root file system has {kib} KiB");
    assert_eq!(host.sh("web", "nproc"), "2\n");
    assert_eq!(host.sh("web", "hostname"), "web\n");
    let disk = host.get("web")["disk"].clone();
    assert_eq!(disk["virtual_bytes"], 3_u64 << 30);
    assert!(disk["used_bytes"].as_u64().unwrap() < 64 << 20, "{disk}");
    let shown = host.get("web");
    let ip = shown["host"]["ip"].as_str().unwrap();
    assert!(host.sh("web", "ip -4 addr show").contains(ip));
    assert!(host.sh("web", "cat /etc/hosts").contains("localhost"));
    assert!(!host.sh("web", "cat /etc/resolv.conf").contains("127.0.0."));
    let clock: i64 = host.sh("web", "date +%s").trim().parse().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64;
    assert!((clock - now).abs() <= 2, "guest {clock}, host {now}");
}
