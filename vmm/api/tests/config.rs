//! The configuration's JSON and its checks.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use serde_json::{Value, json};
use torpor_vmm_api::{Config, End};

fn whole() -> Value {
    json!({
        "cpus": 2, "memory_bytes": 134_217_728u64, "kernel": {"path": "/k"}, "initramfs": {"fd": 9},
        "command_line": "console=ttyS0",
        "disks": [
            {"overlay": {"image": {"fd": 0}, "path": "/o", "base": {"path": "/b"}, "serial": "root"}},
            {"raw": {"file": {"fd": 5}, "read_only": true, "serial": "data", "rate": {"bytes_per_second": 5}}},
        ],
        "net": {"tap_fd": 3, "mac": [2, 0, 0, 0, 0, 1], "mtu": 1500},
        "vsock": {"cid": 3, "socket": "/run/x/vsock", "listener_fd": 11},
        "control_fd": 10, "end": {"fd": 12},
        "jail": {"uid": 1000, "cgroup": {"fd": 13}},
    })
}

/// The whole configuration with one field changed.
fn with(pointer: &str, value: Value) -> Value {
    let mut config = whole();
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    let parent = config.pointer_mut(parent).unwrap();
    match parent {
        Value::Array(items) => items[name.parse::<usize>().unwrap()] = value,
        _ => parent[name] = value,
    }
    config
}

fn parsed(config: Value) -> Result<Config, String> {
    serde_json::from_value(config).map_err(|error| error.to_string())
}

#[test]
fn a_whole_configuration_is_valid_and_names_its_descriptors() {
    let config = parsed(whole()).unwrap();
    config.validate().unwrap();
    let mut numbers: Vec<i32> = config.descriptors().into_iter().map(|(_, fd)| fd).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 3, 5, 9, 10, 11, 12, 13]);
    let again: Config = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!(again, config);
}

#[test]
fn every_wrong_field_is_named_with_what_is_wrong() {
    let long = "x".repeat(2048);
    let disk = |serial: &str| json!({"raw": {"file": {"path": "/r"}, "read_only": false, "serial": serial}});
    let cases = [
        ("/cpus", json!(0), "cpus", "1 to 32"),
        ("/cpus", json!(33), "cpus", "1 to 32"),
        ("/memory_bytes", json!(0), "memory_bytes", "2 MiB"),
        ("/memory_bytes", json!(134_217_729u64), "memory_bytes", "2 MiB"),
        ("/memory_bytes", json!(1u64 << 60), "memory_bytes", "more than"),
        ("/command_line", json!(long), "command_line", "2048 bytes"),
        ("/command_line", json!("a\u{0}b"), "command_line", "control character"),
        ("/disks", json!(vec![disk(""); 9]), "disks", "more than 8"),
        ("/disks/1", disk("123456789012345678901"), "disks[1].serial", "21 bytes"),
        ("/disks/1", disk("with blank"), "disks[1].serial", "visible"),
        ("/disks/1", disk("root"), "disks[1].serial", "another"),
        ("/disks/1/raw/rate", json!({"burst_bytes": 1}), "disks[1].rate", "without bytes_per_second"),
        ("/net/send", json!({"burst_operations": 1}), "net.send", "without operations_per_second"),
        ("/net/mac", json!([1, 0, 0, 0, 0, 1]), "net.mac", "no address"),
        ("/net/mac", json!([0, 0, 0, 0, 0, 0]), "net.mac", "no address"),
        ("/net/mtu", json!(67), "net.mtu", "68"),
        ("/net/tap_fd", json!(-1), "net.tap_fd", "begin at 0"),
        ("/net/tap_fd", json!(2), "net.tap_fd", "the log's"),
        ("/net/tap_fd", json!(12), "net.tap_fd", "another field"),
        ("/vsock/cid", json!(2), "vsock.cid", "3 to"),
        ("/vsock/connections", json!(0), "vsock.connections", "1 to"),
        ("/vsock/socket", json!(long), "vsock.socket", "bytes"),
        ("/vsock/socket", json!("/"), "vsock.socket", "names no file"),
        ("/vsock/ports", json!(long), "vsock.ports", "bytes"),
        ("/control", json!(long), "control", "bytes"),
        ("/console_bytes", json!(100), "console_bytes", "4096"),
        ("/jail/uid", json!(0), "jail.uid", "root's"),
        ("/jail/root", json!("relative"), "jail.root", "absolute"),
    ];
    for (pointer, value, field, problem) in cases {
        let error = parsed(with(pointer, value)).unwrap().validate().unwrap_err();
        assert_eq!(error.field, field, "{error}");
        assert!(error.problem.contains(problem), "{error}");
    }
}

#[test]
fn an_unknown_or_missing_or_mistyped_field_is_refused_by_name() {
    assert!(parsed(with("/cpu", json!(1))).unwrap_err().contains("unknown field `cpu`"));
    assert!(parsed(with("/net/speed", json!(1))).unwrap_err().contains("unknown field `speed`"));
    assert!(parsed(with("/cpus", json!("two"))).unwrap_err().contains("\"two\""));
    let mut config = whole();
    config.as_object_mut().unwrap().remove("kernel");
    assert!(parsed(config).unwrap_err().contains("missing field `kernel`"));
}

#[test]
fn every_end_has_an_exit_code_of_its_own_and_none_that_means_never_ran() {
    let detail = || String::from("x");
    let ends = [
        End::PowerOff,
        End::Reset,
        End::Panic,
        End::TripleFault,
        End::Host,
        End::Crash { detail: detail() },
        End::Failed { detail: detail() },
    ];
    let mut codes: Vec<u8> = ends.iter().map(End::exit_code).collect();
    codes.sort_unstable();
    codes.dedup();
    assert_eq!(codes.len(), ends.len());
    assert!(!codes.contains(&1) && !codes.contains(&2));
}
