//! What is refused before the guest runs.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::process::Command;

use serde_json::{Value, json};
use torpor_vmm_api::End;

use crate::guest::{POWER_OFF, kernel};
use crate::vm::{Setup, has};

fn changed(pointer: &str, value: Value) -> Setup {
    let mut setup = Setup::new(&kernel(&[POWER_OFF], &[]));
    setup.config[pointer] = value;
    setup
}

#[test]
fn a_configuration_that_cannot_be_is_refused_by_field_in_one_line_and_in_the_end_file() {
    if !has("a_configuration_that_cannot_be_is_refused", "kvm") {
        return;
    }
    let overlay = json!([{"overlay": {"image": {"path": "/nonexistent/o"}, "path": "/nonexistent/o", "base": {"path": "/b"}, "serial": ""}}]);
    let net = json!({"tap_fd": 77, "mac": [2, 0, 0, 0, 0, 1], "mtu": 1500});
    let cases = [
        ("cpus", json!(99), "the configuration's cpus is 99, but there can be 1 to 32", false),
        ("memory_bytes", json!(5), "the configuration's memory_bytes is 5", false),
        ("bogus", json!(1), "unknown field `bogus`", false),
        (
            "kernel",
            json!({"path": "/nonexistent/k"}),
            "open the configuration's kernel /nonexistent/k: No such file",
            true,
        ),
        ("kernel", json!({"fd": 77}), "the configuration's kernel is descriptor 77, which isn't open", true),
        ("kernel", json!({"path": "/etc/passwd"}), "kernel", true),
        ("initramfs", json!({"path": "/nonexistent/i"}), "initramfs /nonexistent/i", true),
        ("disks", overlay, "/nonexistent/o is missing", true),
        ("net", net, "net.tap_fd is descriptor 77, which isn't open", true),
        ("control", json!("/nonexistent/c"), "make the control socket /nonexistent/c: No such file", true),
        (
            "jail",
            json!({"root": "/nonexistent/r", "uid": 4242}),
            "the jail cannot mount the empty root: No such file",
            true,
        ),
    ];
    for (field, value, text, told) in cases {
        if field == "jail" && !has("a_jail_that_cannot_be", "root") {
            continue;
        }
        let mut vm = changed(field, value).start();
        assert_eq!(vm.ended().code(), Some(1), "{field}");
        let log = vm.log();
        assert!(log.starts_with("torpor-vmm: cannot start: ") && log.contains(text), "{field}: {log}");
        assert_eq!(log.lines().count(), 1, "{log}");
        match vm.end_file() {
            Some(end) if told => {
                assert!(matches!(end.end, End::Failed { detail } if detail.contains(text)), "{field}")
            }
            other => assert!(!told && other.is_none(), "{field}: {other:?}"),
        }
    }
}

#[test]
fn a_configuration_without_end_or_that_is_no_json_or_isnt_there_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config");
    let program = || Command::new(env!("CARGO_BIN_EXE_torpor-vmm"));
    let cases = [
        (" ".repeat((1 << 20) + 1).into_bytes(), "more than 1048576 bytes"),
        (b"{\"cpus\": ".to_vec(), "can't be understood"),
        (vec![0xff; 100], "can't be understood"),
        (Vec::new(), "can't be understood"),
    ];
    for (content, text) in cases {
        fs::write(&file, content).unwrap();
        let output = program().arg("--config").arg(&file).output().unwrap();
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && log.contains(text), "{log}");
    }
    let output = program().args(["--config", "/nonexistent/c"]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("/nonexistent/c: No such file"));
    let output = program().args(["--config-fd", "99"]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("descriptor 99, which isn't open"));
}

#[test]
fn arguments_that_cannot_be_end_with_their_own_code_and_help_and_version_with_none() {
    let run =
        |arguments: &[&str]| Command::new(env!("CARGO_BIN_EXE_torpor-vmm")).args(arguments).output().unwrap();
    assert_eq!(run(&[]).status.code(), Some(2));
    assert_eq!(run(&["--bogus"]).status.code(), Some(2));
    let help = run(&["--help"]);
    assert!(help.status.success() && String::from_utf8(help.stdout).unwrap().contains("--config-fd N"));
    let version = run(&["--version"]);
    assert!(version.status.success() && version.stdout.starts_with(b"torpor-vmm 0."));
}

#[test]
fn the_configuration_comes_on_a_descriptor_and_strays_are_closed() {
    let test = "the_configuration_comes_on_a_descriptor_and_strays_are_closed";
    if !has(test, "kvm") {
        return;
    }
    let setup = Setup::new(&kernel(&[], &[]));
    fs::write(setup.path("config"), setup.config.to_string()).unwrap();
    let config = fs::File::open(setup.path("config")).unwrap();
    let stray = fs::File::open("/etc/passwd").unwrap();
    // The shell hands both on: 8 and 9 are not close-on-exec.
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec \"$0\" -name torpor-test-run-1 --config-fd 8 8</proc/$PPID/fd/$1 9</etc/passwd"])
        .arg(env!("CARGO_BIN_EXE_torpor-vmm"))
        .arg(config.as_raw_fd().to_string());
    let mut vm = setup.start_as(command);
    vm.control();
    let open = fs::read_dir(format!("/proc/{}/fd", vm.pid())).unwrap();
    let targets: Vec<_> = open.flat_map(|entry| fs::read_link(entry.unwrap().path())).collect();
    assert!(!targets.iter().any(|target| target.ends_with("etc/passwd")), "{targets:?}");
    let words = fs::read(format!("/proc/{}/cmdline", vm.pid())).unwrap();
    assert!(words.windows(24).any(|window| window == b"-name\0torpor-test-run-1\0"));
    drop(stray);
}
