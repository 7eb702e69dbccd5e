//! What is printed, and in which form.

use std::process::Stdio;

use prost_types::Timestamp;
use serde_json::{Value, json};
use torpor_sdk::v1::{self, Phase};

use crate::fake::{Fake, at, sandbox};

fn full() -> v1::Sandbox {
    let spec = v1::SandboxSpec {
        image: "debian".into(),
        command: vec!["run".into(), "a b".into()],
        environment: [("K".to_owned(), "V".to_owned())].into(),
        resources: Some(v1::Resources {
            cpus: Some(2),
            memory_bytes: Some(512 << 20),
            disk_bytes: Some(10 << 30),
        }),
        restart_policy: v1::RestartPolicy::Always.into(),
        ..Default::default()
    };
    let host = v1::HostResources {
        pid: 4711,
        tap: "tpr-000001".into(),
        ip: "10.231.0.2".into(),
        mac: "02:00:00:00:00:01".into(),
        cpus: "0-1".into(),
        memory_bytes: 512 << 20,
        resident_bytes: 100 << 20,
        cid: 7,
        run_dir: "/run/torpor/sb-web".into(),
    };
    let disk = v1::Disk { virtual_bytes: 10 << 30, used_bytes: 5 << 20, path: "/o.qcow2".into() };
    let condition = v1::Condition { r#type: "AgentConnected".into(), status: true, ..Default::default() };
    let status = v1::SandboxStatus {
        driver: "vm".into(),
        machine: "qemu (tcg)".into(),
        run: 3,
        image_digest: "sha256:abc".into(),
        host: Some(host),
        disk: Some(disk),
        conditions: vec![condition],
        restart_count: 1,
        boot_id: "b-1".into(),
        ..at(Phase::Ready)
    };
    v1::Sandbox {
        labels: [("team".to_owned(), "blue".to_owned())].into(),
        spec: Some(spec),
        status: Some(status),
        created: Some(Timestamp { seconds: 1_699_999_000, nanos: 0 }),
        ..sandbox("web", Phase::Ready)
    }
}

fn golden() -> Value {
    json!({
        "id": "sb-web", "name": "web", "workspace": "", "annotations": {}, "phase": "Ready", "retained": null, "driver": "vm", "machine": "qemu (tcg)",
        "run": 3, "version": 1, "image": {"name": "debian", "digest": "sha256:abc"}, "labels": {"team": "blue"},
        "created": "2023-11-14T21:56:40Z", "phase_since": "2023-11-14T22:13:20Z",
        "command": ["run", "a b"], "environment": {"K": "V"}, "stdin": false, "tty": false, "driver_config": {}, "egress": null, "restart_policy": "always",
        "resources": {"cpus": 2, "memory_bytes": 536_870_912, "disk_bytes": 10_737_418_240_u64}, "volumes": [], "endpoints": [],
        "host": {
            "pid": 4711, "tap": "tpr-000001", "ip": "10.231.0.2", "mac": "02:00:00:00:00:01", "cid": 7, "cpus": "0-1",
            "memory_bytes": 536_870_912, "resident_bytes": 104_857_600, "run_dir": "/run/torpor/sb-web"
        },
        "disk": {"virtual_bytes": 10_737_418_240_u64, "used_bytes": 5_242_880, "path": "/o.qcow2"},
        "failure": null,
        "conditions": [{"type": "AgentConnected", "status": true, "reason": null, "message": null, "since": null}],
        "exit_code": null, "restart_count": 1, "flushed": null, "boot_id": "b-1", "then": null, "step": null
    })
}

#[test]
fn the_json_of_a_sandbox_is_as_promised() {
    let fake = Fake::start();
    fake.put(full());
    let done = fake.run(&["get", "web", "-o", "json"]);
    assert_eq!(serde_json::from_str::<Value>(&done.stdout).unwrap(), golden());
    // The order of the fields, too.
    assert!(
        done.stdout.starts_with("{\n  \"id\": \"sb-web\",\n  \"name\": \"web\",\n  \"phase\": \"Ready\",\n")
    );
    let done = fake.run(&["get", "web", "web", "-o", "json"]);
    assert_eq!(serde_json::from_str::<Value>(&done.stdout).unwrap(), json!([golden(), golden()]));
}

#[test]
fn a_suspended_sandbox_has_no_host_and_says_what_is_kept() {
    let fake = Fake::start();
    let status =
        v1::SandboxStatus { retained: v1::Keep::Memory.into(), flushed: Some(true), ..at(Phase::Suspended) };
    fake.put(v1::Sandbox { status: Some(status), ..full() });
    let json: Value = serde_json::from_str(&fake.run(&["get", "web", "-o", "json"]).stdout).unwrap();
    assert_eq!(
        (&json["host"], &json["retained"], &json["flushed"]),
        (&Value::Null, &json!("memory"), &json!(true))
    );
    let human = fake.run(&["get", "web"]).stdout;
    assert!(human.contains("Host:          nothing") && human.contains("kept: memory"), "{human}");
}

#[test]
fn yaml_says_what_json_says() {
    let fake = Fake::start();
    fake.put(full());
    let yaml = fake.run(&["get", "web", "-o", "yaml"]).stdout;
    for line in ["id: sb-web", "phase: Ready", "retained: null", "  digest: sha256:abc", "  pid: 4711"] {
        assert!(yaml.lines().any(|l| l.trim_end() == line), "{line} is missing in\n{yaml}");
    }
}

#[test]
fn the_human_view_shows_what_the_host_lends() {
    let fake = Fake::start();
    fake.put(full());
    let human = fake.run(&["get", "web"]).stdout;
    for part in
        ["4711", "512 MiB, 100 MiB resident", "tpr-000001  10.231.0.2", "5 MiB used of 10 GiB", "run 'a b'"]
    {
        assert!(human.contains(part), "{part} is missing in\n{human}");
    }
}

#[test]
fn a_phase_of_the_future_is_unknown_and_no_error() {
    let fake = Fake::start();
    let status = v1::SandboxStatus { phase: 77, retained: 9, ..Default::default() };
    fake.put(v1::Sandbox { status: Some(status), ..sandbox("web", Phase::Ready) });
    let done = fake.run(&["list"]);
    assert!(done.code == 0 && done.stdout.contains("web   Unknown"), "{done:?}");
}

#[test]
fn list_goes_through_all_pages() {
    let fake = Fake::start();
    for n in 0..1500 {
        let phase = if n % 2 == 0 { Phase::Suspended } else { Phase::Ready };
        fake.put(sandbox(&format!("s{n:04}"), phase));
    }
    let names = fake.run(&["list", "-o", "name"]).stdout;
    assert_eq!(names.lines().count(), 1500);
    assert_eq!(fake.run(&["ls", "-q"]).stdout, names);
    assert_eq!(fake.run(&["sandbox", "list"]).stdout.lines().count(), 1501);
    let json: Value = serde_json::from_str(&fake.run(&["list", "-o", "json"]).stdout).unwrap();
    assert_eq!(json.as_array().unwrap().len(), 1500);
    assert_eq!(json[1499]["name"], "s1499");
}

#[test]
fn a_reader_that_stops_early_ends_the_list_quietly() {
    let fake = Fake::start();
    for n in 0..1500 {
        fake.put(sandbox(&format!("s{n:04}"), Phase::Ready));
    }
    let mut list = fake.torpor(&["list", "-o", "json"]);
    let mut list = list.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(list.stdout.take());
    let output = list.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.len()), (Some(141), 0));
}

#[test]
fn history_and_logs_come_whole() {
    let fake = Fake::start();
    assert_eq!(fake.run(&["history", "web"]).stdout.lines().count(), 1201);
    assert_eq!(fake.run(&["history", "web", "-n", "7"]).stdout.lines().count(), 8);
    let json: Value = serde_json::from_str(&fake.run(&["history", "web", "-o", "json"]).stdout).unwrap();
    assert_eq!((&json[0]["from"], &json[1199]["from"]), (&json!("Ready"), &Value::Null));
    assert_eq!(fake.run(&["logs", "web"]).stdout, "one\ntwo\n");
}

#[test]
fn info_is_shown_in_both_forms() {
    let fake = Fake::start();
    let json: Value = serde_json::from_str(&fake.run(&["info", "-o", "json"]).stdout).unwrap();
    assert_eq!((&json["gateway_id"], &json["capacity"]["slots_total"]), (&json!("gw-1"), &json!(16)));
    assert!(fake.run(&["info"]).stdout.contains("1 of 16 slots used"));
}

#[test]
fn help_tells_the_exit_codes_and_both_forms_of_the_verbs() {
    let fake = Fake::start();
    let help = fake.run(&["--help"]).stdout;
    assert!(help.contains("124  a wait ran out of time") && help.contains("suspend"), "{help}");
    assert_eq!(
        fake.run(&["suspend", "--help"]).stdout.replace("sandbox ", ""),
        fake.run(&["sandbox", "suspend", "--help"]).stdout.replace("sandbox ", "")
    );
}

#[test]
fn completions_and_manual_pages_are_made() {
    let fake = Fake::start();
    for shell in ["bash", "zsh", "fish"] {
        let script = fake.run(&["completions", shell]).stdout;
        assert!(script.contains("restart-if-restore-fails"), "{shell}");
    }
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("man1");
    assert_eq!(fake.run(&["man", pages.to_str().unwrap()]).code, 0);
    for page in ["torpor.1", "torpor-suspend.1", "torpor-sandbox-suspend.1", "torpor-image-build.1"] {
        assert!(pages.join(page).is_file(), "{page}");
    }
}
