//! The gateway is killed at the failpoints of the vm driver, over real virtual machines, and started again: the sandbox
//! comes to rest where the last request wanted it, on the same disk, with one VM at most, and nothing is left on the host.
//! gateway/tests/crash.rs does the same at every failpoint over the sim driver.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::Value;
use torpor_tests::{Host, can_run_vms, need};

/// Where a stop is cut short, and where the start after it is.
const CHOSEN: [(&str, &str); 3] = [
    ("vm.stop.flushed", "vm.launch.network"),
    ("vm.release.network", "vm.launch.spawned"),
    ("reconcile.stopped", "vm.start.launched"),
];

/// Every `hit("vm.…")` of the driver's source: those of a start, those of a stop. (Those of a changed policy are network.rs's.)
fn all() -> (Vec<String>, Vec<String>) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("drivers/vm/src");
    let mut names = BTreeSet::new();
    for file in
        fs::read_dir(source).unwrap().flatten().filter(|e| e.path().extension().is_some_and(|e| e == "rs"))
    {
        let text = fs::read_to_string(file.path()).unwrap();
        for piece in text.split("hit(\"").skip(1) {
            names.extend(piece.split('"').next().map(str::to_owned));
        }
    }
    names.retain(|name| !name.starts_with("vm.adjust."));
    names.into_iter().partition(|name| name.starts_with("vm.launch.") || name.starts_with("vm.start."))
}

/// Processes whose arguments name the sandbox.
fn processes(id: &str) -> usize {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let arguments = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    arguments
        .filter(|text| {
            let text = String::from_utf8_lossy(text);
            text.contains(id) && text.contains("-name")
        })
        .count()
}

fn gapless(host: &Host, name: &str) {
    let history: Value = serde_json::from_str(&host.ok(&["history", name, "-o", "json"])).unwrap();
    let rows = history.as_array().or_else(|| history["transitions"].as_array()).cloned().unwrap();
    let newest_first = rows.windows(2).all(|pair| pair[0]["from"] == pair[1]["to"]);
    let oldest_first = rows.windows(2).all(|pair| pair[0]["to"] == pair[1]["from"]);
    assert!(rows.len() > 2 && (newest_first || oldest_first), "a gap in {history}");
}

/// Whether the program at hand has failpoints at all.
fn has_failpoints(test: &str, host: &Host) -> bool {
    host.kill_gateway();
    host.start_gateway_with("nothing=error");
    let built_in = host.gateway_log().contains("built with failpoints");
    need(test, "emu", built_in, "torpor was built without --features torpor-cli/failpoints")
}

fn through(host: &Host, cases: &[(&str, &str)]) {
    host.ok(&["create", "web"]);
    let id = host.get("web")["id"].as_str().unwrap().to_owned();
    host.sh("web", "echo 0 > /root/count");
    for (n, (stop, start)) in cases.iter().enumerate() {
        let borrowed = host.get("web")["host"].clone();
        host.kill_gateway();
        host.start_gateway_with(&format!("{stop}=abort"));
        let _ = host.run(&["suspend", "web", "--no-wait"]);
        host.gateway_ends(stop);
        host.start_gateway();
        host.until(&format!("{stop}: Suspended"), |h| h.get("web")["phase"] == "Suspended");
        assert_eq!(host.leftovers(&id, &borrowed), Vec::<String>::new(), "{stop}");
        assert_eq!(processes(&id), 0, "{stop}");

        host.kill_gateway();
        host.start_gateway_with(&format!("{start}=abort"));
        let _ = host.run(&["resume", "web", "--no-wait"]);
        host.gateway_ends(start);
        host.start_gateway();
        host.until(&format!("{start}: Ready"), |h| h.get("web")["phase"] == "Ready");
        assert_eq!(processes(&id), 1, "{start}: VMs of one sandbox");
        assert_eq!(host.sh("web", "cat /root/count"), format!("{n}\n"), "{start}: another disk");
        host.sh("web", &format!("echo {} > /root/count", n + 1));
    }
    gapless(host, "web");
    let borrowed = host.get("web")["host"].clone();
    host.ok(&["delete", "web"]);
    assert_eq!(host.leftovers(&id, &borrowed), Vec::<String>::new());
}

#[test]
fn a_gateway_killed_in_the_middle_of_stops_and_starts_of_virtual_machines_goes_on() {
    let test = "a_gateway_killed_in_the_middle_of_stops_and_starts_of_virtual_machines_goes_on";
    if !can_run_vms(test) {
        return;
    }
    let host = Host::new();
    if has_failpoints(test, &host) {
        through(&host, &CHOSEN);
    }
}

#[test]
#[ignore = "slow: every failpoint of the vm driver"]
fn a_gateway_killed_at_any_failpoint_of_the_vm_driver_goes_on() {
    let test = "a_gateway_killed_at_any_failpoint_of_the_vm_driver_goes_on";
    if !can_run_vms(test) {
        return;
    }
    let host = Host::new();
    if !has_failpoints(test, &host) {
        return;
    }
    let (starts, stops) = all();
    assert!(starts.len() > 5 && stops.len() > 3, "{starts:?} {stops:?}");
    let longest = starts.len().max(stops.len());
    let pairs: Vec<(&str, &str)> =
        (0..longest).map(|n| (stops[n % stops.len()].as_str(), starts[n % starts.len()].as_str())).collect();
    through(&host, &pairs);
}
