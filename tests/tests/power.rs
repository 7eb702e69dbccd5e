//! How runs of virtual machines end by themselves, by a guest that dies or by a host that loses its power, and what comes
//! after it: docs/reference/ends.md.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{fs, process::Command};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use torpor_tests::{Host, can_run_vms, need};

/// Side by side.
fn create(host: &Host, names: &[&str]) {
    for name in names {
        host.ok(&["create", name, "--no-wait"]);
    }
    for name in names {
        host.ok(&["wait", name, "--for", "Ready"]);
    }
}

fn until_phase(host: &Host, name: &str, phase: &str) -> Value {
    host.until(&format!("{name} is {phase}"), |host| host.get(name)["phase"] == phase);
    host.get(name)
}

fn kill_vm(shown: &Value) {
    let pid = i32::try_from(shown["host"]["pid"].as_i64().unwrap()).unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
}

/// Whether the program at hand has failpoints at all.
fn has_failpoints(test: &str, host: &Host) -> bool {
    host.kill_gateway();
    host.start_gateway_with("nothing=error");
    let built_in = host.gateway_log().contains("built with failpoints");
    need(test, "emu", built_in, "torpor was built without --features torpor-cli/failpoints")
}

fn whys(host: &Host, name: &str) -> String {
    let history: Value = serde_json::from_str(&host.ok(&["history", name, "-o", "json"])).unwrap();
    history.to_string()
}

/// Zeros in place of the agent's own code: nothing in the guest can end process 1 with a signal.
const BREAK_THE_AGENT: &str = "code=$(grep r-xp /proc/1/maps | head -n 1); \
    dd if=/dev/zero of=/proc/1/mem bs=4096 seek=$((0x${code%%-*} / 4096)) count=2000 conv=notrunc";

#[test]
fn each_end_of_a_guest_has_its_outcome_and_error_is_left_by_recover() {
    let test = "each_end_of_a_guest_has_its_outcome_and_error_is_left_by_recover";
    if !can_run_vms(test) {
        return;
    }
    let host = Host::new();
    if !has_failpoints(test, &host) {
        return;
    }
    // Its main command is killed by the guest's kernel, the guest lives. The gateway ends at the last step that follows.
    host.kill_gateway();
    host.start_gateway_with("reconcile.rest=abort");
    host.ok(&["create", "hungry", "--no-wait", "--", "tail", "/dev/zero"]);
    host.gateway_ends("reconcile.rest");
    host.start_gateway();
    host.ok(&["create", "again", "--no-wait", "--restart", "always"]);
    create(&host, &["broken", "off"]);
    assert_eq!(until_phase(&host, "hungry", "Completed")["exit_code"], 137);
    let console = host.ok(&["logs", "hungry", "--source", "console"]);
    assert!(console.contains("Out of memory"), "{console}");

    // Whatever the answer is: the guest is gone with it.
    host.ok(&["wait", "again", "--for", "Ready"]);
    let sh = |name, script| drop(host.run(&["exec", name, "--", "sh", "-c", script]));
    sh("off", "poweroff -f");
    sh("again", "reboot -f");
    sh("broken", BREAK_THE_AGENT);
    assert_eq!(until_phase(&host, "off", "Completed")["exit_code"], 0);
    assert!(whys(&host, "off").contains("guest switched itself off"), "{}", whys(&host, "off"));
    let failure = until_phase(&host, "broken", "Error")["failure"].clone();
    assert_eq!((&failure["step"], &failure["reason"]), (&"run".into(), &"KERNEL_PANIC".into()), "{failure}");
    assert!(failure["console_tail"].as_str().unwrap().contains("Attempted to kill init"), "{failure}");
    assert!(failure["next"].as_str().unwrap().contains("torpor resume broken"), "{failure}");
    for name in ["off", "hungry", "broken"] {
        host.until(&format!("nothing is lent to {name}"), |host| host.get(name)["host"].is_null());
    }
    host.ok(&["recover", "broken"]);
    assert_eq!(host.sh("broken", "echo alive"), "alive\n");
    host.until("again was started again", |host| {
        let now = host.get("again");
        now["phase"] == "Ready" && now["restart_count"] == 1
    });
}

/// What of a host no loss of power leaves: processes, network, cgroups, and all that is in /run.
fn lose_power(host: &Host, running: &[Value]) {
    host.kill_gateway();
    running.iter().for_each(kill_vm);
    let quietly = |program: &str, arguments: &[&str]| {
        let _ = Command::new(program).args(arguments).stderr(std::process::Stdio::null()).status();
    };
    quietly("nft", &["delete", "table", "inet", &format!("torpor_{}", host.instance())]);
    for shown in running {
        quietly("ip", &["link", "delete", shown["host"]["tap"].as_str().unwrap()]);
        let left = || host.leftovers(shown["id"].as_str().unwrap(), &shown["host"]);
        host.until("its processes are gone", |_| !left().iter().any(|line| line.starts_with("process")));
        // One for each hierarchy, of which `left` names the first.
        host.until("its cgroups are gone", |_| {
            let left = left();
            let mut cgroups = left.iter().filter_map(|line| line.strip_prefix("cgroup ")).peekable();
            let none = cgroups.peek().is_none();
            cgroups.for_each(|cgroup| drop(fs::remove_dir(cgroup)));
            none
        });
    }
    fs::remove_dir_all(host.dir().join("run")).unwrap();
    let db = rusqlite::Connection::open(host.dir().join("state/torpor.db")).unwrap();
    assert_eq!(db.execute("UPDATE meta SET value = 'an earlier boot' WHERE key = 'boot_id'", []).unwrap(), 1);
}

#[test]
fn after_a_loss_of_power_what_was_ready_runs_again_and_what_slept_or_was_on_its_way_there_sleeps() {
    let test =
        "after_a_loss_of_power_what_was_ready_runs_again_and_what_slept_or_was_on_its_way_there_sleeps";
    if !can_run_vms(test) {
        return;
    }
    let host = Host::new();
    if !has_failpoints(test, &host) {
        return;
    }
    create(&host, &["one", "asleep", "turning"]);
    host.sh("one", "echo kept > /root/file; sync");
    host.ok(&["suspend", "asleep"]);
    host.kill_gateway();
    host.start_gateway_with("reconcile.stop=abort");
    let before = ["one", "turning"].map(|name| host.get(name));
    let asleep = host.get("asleep");
    let _ = host.run(&["suspend", "turning", "--no-wait"]);
    host.gateway_ends("reconcile.stop");
    lose_power(&host, &before);

    // The gateway ends once more in the middle of noticing it.
    assert!(!host.try_to_start_gateway("serve.host_restart=abort"));
    host.start_gateway();
    let one = until_phase(&host, "one", "Ready");
    assert_eq!(one["run"].as_u64(), before[0]["run"].as_u64().map(|run| run + 1), "{one}");
    assert_eq!(one["restart_count"], 0, "no fault of its own");
    assert!(whys(&host, "one").contains("host was restarted"), "{}", whys(&host, "one"));
    assert_eq!(host.sh("one", "cat /root/file"), "kept\n");
    let turned = until_phase(&host, "turning", "Suspended");
    assert_eq!(host.leftovers(turned["id"].as_str().unwrap(), &before[1]["host"]), Vec::<String>::new());
    assert_eq!(host.get("asleep")["version"], asleep["version"], "what slept was touched");
    let runs = fs::read_dir(host.dir().join("run")).unwrap().flatten();
    let running = runs.filter(|entry| entry.file_name().to_string_lossy().starts_with("sb-")).count();
    assert_eq!(running, 1, "what sleeps has no folder of a run");
}
