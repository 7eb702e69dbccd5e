//! `torpor serve` and `torpor doctor`: the real gateway, with the driver that runs nothing.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, ChildStderr, Command, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use tempfile::TempDir;

use crate::fake::Finished;

struct Served {
    dir: TempDir,
    process: Child,
    stderr: BufReader<ChildStderr>,
}

impl Served {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.toml"), "drivers = [\"sim\"]\n").unwrap();
        let mut process = serve(&dir).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(process.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains(" serves at ") {
            line.clear();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "the gateway ended: {:?}", process.wait());
        }
        Self { dir, process, stderr }
    }

    fn run(&self, args: &[&str]) -> Finished {
        torpor(&self.dir, args).output().unwrap().into()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn torpor(dir: &TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
    let endpoint = format!("unix://{}/run/gateway.sock", dir.path().display());
    command.args(args).env("TORPOR_ENDPOINT", endpoint).env_remove("TORPOR_LOG").stdin(Stdio::null());
    command
}

fn serve(dir: &TempDir) -> Command {
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let listen = format!("unix://{}", at("run/gateway.sock"));
    let (config, state, run) = (at("config.toml"), at("state"), at("run"));
    torpor(
        dir,
        &[
            "serve",
            "--config",
            &config,
            "--state-dir",
            &state,
            "--run-dir",
            &run,
            "--listen",
            &listen,
            "--log-level",
            "warn",
        ],
    )
}

#[test]
fn the_verbs_work_against_the_real_gateway_and_sigterm_ends_it_well() {
    let mut gateway = Served::start();
    assert_eq!(gateway.run(&["create", "web", "-l", "team=blue", "--memory", "256M"]).stdout, "web Ready\n");
    let done = gateway.run(&["create", "web"]);
    assert_eq!(done.code, 5, "{}", done.stderr);
    assert!(done.stderr.contains("next: torpor get web"), "{}", done.stderr);
    assert_eq!(gateway.run(&["suspend", "web"]).stdout, "web Suspended\n");
    let json: Value = serde_json::from_str(&gateway.run(&["get", "web", "-o", "json"]).stdout).unwrap();
    assert_eq!((json["phase"].as_str(), json["retained"].as_str()), (Some("Suspended"), Some("disk")));
    assert_eq!(json["host"], Value::Null);
    assert_eq!(json["resources"]["memory_bytes"], 256 << 20);
    let done = gateway.run(&["exec", "web", "--", "true"]);
    assert_eq!(done.code, 4, "{}", done.stderr);
    assert_eq!(gateway.run(&["resume", "web"]).stdout, "web Ready\n");
    assert_eq!(gateway.run(&["list", "-l", "team=blue", "-q"]).stdout, "web\n");
    assert_eq!(gateway.run(&["list", "-l", "team=red", "-q"]).stdout, "");
    assert!(gateway.run(&["history", "web"]).stdout.lines().count() > 6);
    assert_eq!(gateway.run(&["delete", "web"]).stdout, "web deleted\n");
    assert_eq!(gateway.run(&["get", "web"]).code, 3);
    assert_eq!(gateway.run(&["create", "Not_A_Name"]).code, 2);

    kill(Pid::from_raw(gateway.process.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    assert_eq!(gateway.process.wait().unwrap().code(), Some(0));
    let mut rest = String::new();
    gateway.stderr.read_to_string(&mut rest).unwrap();
    assert!(!rest.contains("panicked"), "{rest}");
    assert_eq!(gateway.run(&["list"]).code, 7);
}

#[test]
fn a_second_gateway_on_the_same_state_is_refused() {
    let gateway = Served::start();
    let done = Finished::from(serve(&gateway.dir).output().unwrap());
    assert_eq!(done.code, 1);
    assert!(done.stderr.contains("in use by another gateway"), "{}", done.stderr);
}

#[test]
fn a_configuration_with_an_unknown_key_names_it() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.toml"), "colour = \"blue\"\n").unwrap();
    let done = Finished::from(serve(&dir).output().unwrap());
    assert_eq!(done.code, 2);
    assert!(done.stderr.contains("colour"), "{}", done.stderr);
}

#[test]
fn doctor_gives_every_check_a_level_and_what_is_wrong_an_advice() {
    let dir = tempfile::tempdir().unwrap();
    let done = Finished::from(torpor(&dir, &["doctor", "-o", "json"]).output().unwrap());
    let checks: Vec<Value> = serde_json::from_str(&done.stdout).unwrap();
    let mut failed = false;
    for check in &checks {
        let level = check["level"].as_str().unwrap();
        assert!(["ok", "warn", "fail"].contains(&level) && check["finding"].as_str().is_some(), "{check}");
        assert!(level == "ok" || check["advice"] != "", "{check}");
        failed |= level == "fail";
    }
    assert_eq!(done.code, i32::from(failed));
    for name in ["kvm", "qemu", "tun", "nftables", "cgroup", "disk", "memory", "agent", "gateway"] {
        assert!(checks.iter().any(|c| c["name"] == name), "{name} is missing");
    }
}

#[test]
fn doctor_tells_what_a_gateway_has_to_lend_and_how_much_of_it_is_lent() {
    let gateway = Served::start();
    gateway.run(&["create", "web", "--memory", "256M"]);
    let done = gateway.run(&["doctor", "-o", "json"]);
    let checks: Vec<Value> = serde_json::from_str(&done.stdout).unwrap();
    let check = checks.iter().find(|check| check["name"] == "resources").unwrap();
    let named = |name: &str| {
        check["resources"]
            .as_array()
            .unwrap()
            .iter()
            .find(|resource| resource["name"] == name)
            .unwrap()
            .clone()
    };
    let slots = named("network slots");
    assert_eq!((&slots["capacity"], &slots["used"]), (&16384.into(), &1.into()));
    assert_eq!((&slots["free"], &slots["quarantined"]), (&16383.into(), &0.into()));
    assert_eq!(named("memory bytes")["used"], 256 << 20);
    assert_eq!(named("cpus")["used"], 1);
    assert!(checks.iter().all(|check| check.get("fix").is_some()), "what --fix changes, or null");
    let info: Value = serde_json::from_str(&gateway.run(&["info", "-o", "json"]).stdout).unwrap();
    assert_eq!(info["capacity"]["resources"][0], slots);
    let done = gateway.run(&["doctor", "--fix", "--undo"]);
    assert_eq!(done.code, 2, "{}", done.stderr);
}
