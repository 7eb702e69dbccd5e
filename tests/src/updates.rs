//! What an update can change, field by field: the same on every driver, done or refused with the reason.

use serde_json::{Value, json};

use crate::Host;

/// A field as the API calls it, and what `torpor update` is told to change it.
pub const CHANGES: [(&str, &[&str]); 13] = [
    ("command", &["--", "sh", "-c", "echo $(id -un) is $WHO in $(pwd); exec sleep 4343"]),
    ("environment", &["--env", "WHO=changed"]),
    ("workdir", &["--workdir", "/etc"]),
    ("user", &["--user", "worker"]),
    ("resources.cpus", &["--cpus", "2"]),
    ("resources.memory_bytes", &["--memory", "320M"]),
    ("resources.disk_bytes", &["--disk", "2G"]),
    ("egress", &["--egress", "none"]),
    ("restart_policy", &["--restart", "on-failure"]),
    ("stop_grace", &["--stop-grace", "7s"]),
    ("endpoints", &["--serves", "web=8080/health"]),
    ("stdin", &["--stdin"]),
    ("tty", &["--tty"]),
];

/// Makes a sandbox, changes each field of it at rest and starts it again. Those of `refused` must be refused by their names,
/// with the reason, and leave it as it was; all others must be in force then.
pub fn each_field_is_changed_or_refused(host: &Host, refused: &[&str]) {
    let main = ["--", "sh", "-c", "echo before; exec sleep 4242"];
    let made = ["create", "table", "--env", "WHO=before", "--cpus", "1", "--memory", "256M"];
    host.ok(&[&made[..], &main].concat());
    host.sh("table", "echo kept > /root/kept");
    host.ok(&["stop", "table"]);
    for (field, options) in CHANGES {
        let before = host.get("table");
        let arguments = [&["update", "table"], options].concat();
        if !refused.contains(&field) {
            host.ok(&arguments);
            assert!(host.get("table")["version"].as_u64() > before["version"].as_u64(), "{field}");
            continue;
        }
        let (code, error) = host.fails(&[&arguments[..2], &["-o", "json"], &arguments[2..]].concat());
        let said = error.contains("UPDATE_NOT_SUPPORTED") && error.contains(&format!("{field}: the "));
        assert!(code == 4 && said && error.contains("it can change command, "), "{field}: {code} {error}");
        assert_eq!(host.get("table"), before, "{field}");
    }
    host.ok(&["start", "table"]);
    let seen = host.get("table");
    let wanted = [
        ("environment", "environment", json!({ "WHO": "changed" })),
        ("restart_policy", "restart_policy", json!("on-failure")),
        ("stdin", "stdin", json!(true)),
        ("tty", "tty", json!(true)),
    ];
    for (field, key, value) in wanted {
        assert!(refused.contains(&field) || seen[key] == value, "{field}: {seen}");
    }
    assert_eq!(seen["endpoints"][0]["http_path"], "/health", "{seen}");
    let size =
        |field: &str, changed: Value, before: Value| if refused.contains(&field) { before } else { changed };
    let resources = &seen["resources"];
    assert_eq!(resources["cpus"], size("resources.cpus", json!(2), json!(1)));
    let memory = size("resources.memory_bytes", json!(320 << 20), json!(256 << 20));
    assert_eq!(resources["memory_bytes"], memory);
    let said = "worker is changed in /etc";
    host.until("the new command runs", |host| host.ok(&["logs", "table"]).contains(said));
    assert_eq!(host.sh("table", "cat /root/kept"), "kept\n");
    // Nothing serves there, and that is seen.
    host.until("the endpoint is looked at", |host| host.get("table")["endpoints"][0]["result"] == "refused");
    host.ok(&["stop", "table"]);
    host.ok(&["update", "table", "--no-serves", "--no-stdin", "--no-tty", "--no-command"]);
    let seen = host.get("table");
    assert_eq!(
        (&seen["endpoints"], &seen["stdin"], &seen["tty"]),
        (&json!([]), &json!(false), &json!(false))
    );
    let (code, error) = host.fails(&["update", "table", "--stdin"]);
    assert!(code == 2 && error.contains("stdin: it is the main command's"), "{code} {error}");
    host.ok(&["start", "table"]);
    assert_eq!(host.sh("table", "cat /root/kept"), "kept\n");
}
