//! Updates of a stopped VM, for real: what the guest finds after its next start.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;

use serde_json::Value;
use torpor_tests::{Host, can_run_vms, updates::each_field_is_changed_or_refused};

/// A folder in the place of a file that is to be written keeps even root from writing it.
fn in_the_way(host: &Host, id: &str) -> std::path::PathBuf {
    let spec = host.sandbox_dir(id).join("spec.json");
    fs::rename(&spec, spec.with_extension("kept")).unwrap();
    fs::create_dir(&spec).unwrap();
    spec
}

fn out_of_the_way(spec: &std::path::Path) {
    fs::remove_dir(spec).unwrap();
    fs::rename(spec.with_extension("kept"), spec).unwrap();
}

fn memory_mib(host: &Host) -> u64 {
    let text = host.sh("web", "awk '/MemTotal/ { print $2 }' /proc/meminfo");
    text.trim().parse::<u64>().unwrap() >> 10
}

#[test]
fn a_stopped_vm_comes_back_with_another_environment_memory_and_disk_and_with_its_files() {
    if !can_run_vms("a_stopped_vm_comes_back_with_another_environment_memory_and_disk_and_with_its_files") {
        return;
    }
    let host = Host::with("enable_sandbox_updates = true");
    host.ok(&["create", "web", "--env", "MODE=slow", "--env", "STAYS=1", "--label", "team=blue"]);
    let id = host.get("web")["id"].as_str().unwrap().to_owned();
    host.sh("web", "echo kept > /root/file");
    let before = memory_mib(&host);
    let (code, error) = host.fails(&["update", "web", "--memory", "256M"]);
    assert!(code == 4 && error.contains("torpor stop web"), "{code} {error}");
    host.ok(&["update", "web", "--label", "team-", "--label", "tier=gold"]);
    assert_eq!(host.get("web")["labels"], serde_json::json!({ "tier": "gold" }));

    host.ok(&["stop", "web"]);
    let change = ["update", "web", "--env", "MODE=fast", "--memory", "320M", "--disk", "2G"];
    host.ok(&change);
    let stored: Value =
        serde_json::from_str(&fs::read_to_string(host.sandbox_dir(&id).join("spec.json")).unwrap()).unwrap();
    assert_eq!(stored["environment"]["MODE"], "fast");
    assert_eq!(stored["resources"]["memory_bytes"], 320_u64 << 20);
    host.ok(&["start", "web"]);
    assert_eq!(host.sh("web", "echo $MODE $STAYS; cat /root/file"), "fast 1\nkept\n");
    assert!(memory_mib(&host) > before + 64, "{before} MiB, then {} MiB", memory_mib(&host));
    let kib = host.sh("web", "df -kP / | tail -n 1 | awk '{ print $2 }'");
    assert!(kib.trim().parse::<u64>().unwrap() > 1 << 20, "{kib}");

    // Half an update: the driver's record can't be written. Nothing starts by it, and it is finished later.
    host.ok(&["stop", "web"]);
    let spec = in_the_way(&host, &id);
    let (code, error) = host.fails(&["update", "web", "--env", "MODE=later"]);
    assert!(code != 0 && error.contains("torpor update --resume-pending web"), "{code} {error}");
    out_of_the_way(&spec);
    host.restart_gateway();
    let (code, error) = host.fails(&["start", "web"]);
    assert!(code == 4 && error.contains("torpor update --resume-pending web"), "{code} {error}");
    let pending = host.get("web");
    let condition =
        pending["conditions"].as_array().unwrap().iter().find(|c| c["type"] == "UpdatePending").cloned();
    assert!(condition.is_some_and(|c| c["status"] == true), "{pending}");
    host.ok(&["update", "--resume-pending", "web"]);
    host.ok(&["start", "web"]);
    assert_eq!(host.sh("web", "echo $MODE; cat /root/file"), "later\nkept\n");

    host.ok(&["delete", "web"]);
    assert!(!host.sandbox_dir(&id).exists());
    each_field_is_changed_or_refused(&host, &[]);
}
