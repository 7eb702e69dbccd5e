//! The whole over real container engines: a gateway, the command line, and Docker's and Podman's own word for what is there.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::BTreeSet,
    fs,
    io::{Read as _, Write as _},
    path::Path,
    time::Duration,
};

use serde_json::Value;
use torpor_tests::{
    Host, can_run_vms,
    engine::{Engine, can_run},
    need,
    updates::each_field_is_changed_or_refused,
};

/// One test for each engine.
macro_rules! on_both {
    ($($(#[$more:meta])* $name:ident)*) => {
        mod docker {
            $(#[test]
            $(#[$more])*
            fn $name() {
                super::on("docker", stringify!($name), super::$name);
            })*
        }
        mod podman {
            $(#[test]
            $(#[$more])*
            fn $name() {
                super::on("podman", stringify!($name), super::$name);
            })*
        }
    };
}

fn on(name: &'static str, test: &str, case: fn(&Engine, &Host)) {
    if can_run(test, name) {
        let engine = Engine::start(name);
        case(&engine, &Host::on(&[&engine]));
    }
}

on_both! {
    a_sandbox_sleeps_and_wakes_in_the_same_container
    what_a_container_can_not_do_is_refused_before_anything_is_written
    each_field_of_an_update_is_done_or_refused_with_the_reason
    an_engine_that_is_away_is_waited_for_and_intent_decides_when_it_is_back
    what_outsiders_do_to_a_container_is_put_right_or_named
    a_database_made_anew_knows_what_runs_and_what_rests
    a_gateway_killed_in_the_middle_of_stops_and_starts_of_containers_goes_on
    #[ignore = "slow: every failpoint of the container driver"]
    a_gateway_killed_at_any_failpoint_of_the_container_driver_goes_on
    a_stop_that_races_a_crashing_main_process_leaves_nothing_running
    #[ignore = "slow: fifty races"]
    fifty_stops_that_race_a_crashing_main_process_leave_nothing_running
}

fn id_of(host: &Host, name: &str) -> String {
    host.get(name)["id"].as_str().unwrap().to_owned()
}

fn until_phase(host: &Host, name: &str, phase: &str) {
    host.until(&format!("{name} is {phase}"), |host| host.get(name)["phase"] == phase);
}

fn nothing_held(engine: &Engine, host: &Host, id: &str) {
    assert_eq!(engine.held(id), Vec::<String>::new());
    assert!(!host.dir().join("run").join(engine.name).join(id).exists(), "its run folder is there");
}

fn a_sandbox_sleeps_and_wakes_in_the_same_container(engine: &Engine, host: &Host) {
    host.ok(&["create", "web", "--env", "GREETING=hello", "--label", "team=blue"]);
    let seen = host.get("web");
    assert_eq!((&seen["phase"], &seen["driver"]), (&"Ready".into(), &engine.name.into()));
    let id = id_of(host, "web");
    let container = engine.inspect(&id)["Id"].clone();
    assert_eq!(host.sh("web", "echo $GREETING; hostname; echo kept > /root/file"), "hello\nweb\n");
    for _ in 0..2 {
        host.ok(&["suspend", "web"]);
        let seen = host.get("web");
        assert_eq!((&seen["phase"], &seen["flushed"]), (&"Suspended".into(), &true.into()), "{seen}");
        nothing_held(engine, host, &id);
        host.restart_gateway();
        assert_eq!(host.get("web")["phase"], "Suspended");
        host.ok(&["resume", "web"]);
        assert_eq!(engine.inspect(&id)["Id"], container);
        assert_eq!(host.sh("web", "cat /root/file"), "kept\n");
    }
    // Its ports are reached by the agent, as those of any sandbox.
    host.sh("web", "httpd -p 8080 -h /root");
    let exposed: Value = serde_json::from_str(&host.ok(&["expose", "web", "8080", "-o", "json"])).unwrap();
    let mut stream = std::net::TcpStream::connect(exposed["host"].as_str().unwrap()).unwrap();
    stream.write_all(b"GET /file HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.ends_with("kept\n"), "{answer}");
    // What runs outlives the gateway.
    let before = host.get("web")["boot_id"].clone();
    host.restart_gateway();
    host.until("the agent is heard again", |host| host.run(&["exec", "web", "--", "true"]).status.success());
    assert_eq!(host.get("web")["boot_id"], before);
    host.ok(&["delete", "web"]);
    assert_eq!(engine.inspect(&id), Value::Null);
    let left =
        |below: &str| fs::read_dir(host.dir().join(below).join(engine.name)).map_or(0, Iterator::count);
    assert_eq!((left("state/containers"), left("run")), (0, 0));
}

fn what_a_container_can_not_do_is_refused_before_anything_is_written(engine: &Engine, host: &Host) {
    host.ok(&["create", "web"]);
    let version = host.get("web")["version"].clone();
    if engine.name == "podman" && Path::new("/usr/sbin/criu").exists() {
        println!("SKIP the refusal of memory: this host's own criu may work");
        return;
    }
    let (_, error) = host.fails(&["suspend", "web", "--memory"]);
    assert!(error.contains("cannot keep memory") && error.contains("nothing was changed"), "{error}");
    let reason = if engine.name == "docker" { "daemon.json" } else { "criu" };
    assert!(error.contains(reason), "{error}");
    assert_eq!(host.get("web")["version"], version);
    host.ok(&["suspend", "web"]);
    let (_, error) = host.fails(&["disk", "show", "web", "--check"]);
    assert!(error.contains("no disks"), "{error}");
    host.ok(&["resume", "web"]);
    for arguments in [
        &["create", "other", "--disk", "1G"][..],
        &["create", "other", "--machine", "kvm"],
        &["create", "other", "--kernel", "/boot/vmlinuz"],
        &["create", "other", "--volume", "/nonexistent:/data"],
        &["create", "other", "--image", "127.0.0.1:1/nobody/nothing:1"],
    ] {
        let (_, error) = host.fails(arguments);
        assert!(!error.is_empty(), "{arguments:?}");
        host.fails(&["get", "other"]);
    }
    assert_eq!(host.get("web")["phase"], "Ready");
    assert_eq!(host.get("web")["driver"], engine.name);
}

fn each_field_of_an_update_is_done_or_refused_with_the_reason(engine: &Engine, host: &Host) {
    let docker = engine.name == "docker";
    let limits: &[&str] = if docker { &[] } else { &["resources.cpus", "resources.memory_bytes"] };
    each_field_is_changed_or_refused(host, &[&["resources.disk_bytes", "egress"], limits].concat());
    let found = engine.inspect(&id_of(host, "table"));
    if docker {
        // What the engine itself says of the container that it had made before.
        let limits = &found["HostConfig"];
        let cpus = std::thread::available_parallelism().unwrap().get().min(2);
        assert_eq!(limits["NanoCpus"].as_u64(), Some(cpus as u64 * 1_000_000_000), "{limits}");
        assert!([0, 320 << 20].contains(&limits["Memory"].as_u64().unwrap()), "{limits}");
    }
    // Whoever may look at a container sees none of its variables.
    host.ok(&["create", "secret", "--env", "KEY=marked-value-of-a-variable"]);
    let found = engine.inspect(&id_of(host, "secret"));
    assert!(!found.to_string().contains("marked-value"), "{found}");
}

fn an_engine_that_is_away_is_waited_for_and_intent_decides_when_it_is_back(engine: &Engine, host: &Host) {
    for name in ["ready", "asleep", "turning"] {
        host.ok(&["create", name]);
        host.sh(name, "echo kept > /root/file");
    }
    host.ok(&["suspend", "asleep"]);
    let ids: Vec<String> = ["ready", "asleep", "turning"].iter().map(|name| id_of(host, name)).collect();
    let fit = doctor(host, engine);
    let level = |checks: &Value, name: &str| {
        let all = checks.as_array().unwrap();
        all.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{name}: {checks}"))["level"]
            .clone()
    };
    for name in ["engine", "runtime", "privileges", "storage", "agent", "gateway"] {
        assert_eq!(level(&fit, name), "ok", "{name}: {fit}");
    }
    assert!(fit.to_string().contains("\"limits\"") && fit.to_string().contains("\"checkpoints\""), "{fit}");
    engine.tell("kill");
    assert_eq!(level(&doctor(host, engine), "engine"), "fail");
    host.ok(&["suspend", "turning", "--no-wait"]);
    host.ok(&["resume", "asleep", "--no-wait"]);
    // Long enough for every attempt that would be given up.
    std::thread::sleep(Duration::from_secs(4));
    let phases = |host: &Host| ["ready", "asleep", "turning"].map(|name| host.get(name)["phase"].clone());
    assert_eq!(phases(host), ["Ready", "Resuming", "Suspending"].map(Value::from));
    host.restart_gateway();
    assert_eq!(phases(host), ["Ready", "Resuming", "Suspending"].map(Value::from));
    engine.tell("start");
    until_phase(host, "turning", "Suspended");
    nothing_held(engine, host, &ids[2]);
    until_phase(host, "asleep", "Ready");
    // Its container ended with the engine, which is no fault of its own.
    host.until("ready is back", |host| host.run(&["exec", "ready", "--", "true"]).status.success());
    assert_eq!(host.get("ready")["phase"], "Ready");
    host.ok(&["resume", "turning"]);
    for name in ["ready", "asleep", "turning"] {
        assert_eq!(host.sh(name, "cat /root/file"), "kept\n");
    }
}

/// What `torpor doctor` finds.
fn doctor(host: &Host, engine: &Engine) -> Value {
    let config = host.dir().join("torpor.toml");
    let arguments =
        ["doctor", "--driver", engine.name, "--config", config.to_str().unwrap(), "--output", "json"];
    let done = host.run(&arguments);
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn what_outsiders_do_to_a_container_is_put_right_or_named(engine: &Engine, host: &Host) {
    host.ok(&["create", "web"]);
    let id = id_of(host, "web");
    host.sh("web", "echo kept > /root/file");
    let boot = |host: &Host| host.get("web")["boot_id"].clone();
    for what in ["stop?t=10", "restart?t=10"] {
        let before = boot(host);
        // Podman may complain that it is running again before its own stop has come to an end.
        let _answer = engine.ask("POST", &format!("/containers/torpor-{id}/{what}"));
        host.until(what, |host| {
            host.get("web")["phase"] == "Ready" && boot(host) != before && !boot(host).is_null()
        });
        assert_eq!(host.sh("web", "cat /root/file"), "kept\n", "{what}");
    }
    engine.container(&id, "pause");
    host.ok(&["suspend", "web"]);
    assert_eq!(host.get("web")["flushed"], true);
    nothing_held(engine, host, &id);
    host.ok(&["resume", "web"]);
    engine.container(&id, "kill");
    until_phase(host, "web", "Error");
    assert_eq!(host.get("web")["failure"]["reason"], "COMPUTE_LOST");
    host.ok(&["resume", "web"]);
    host.ok(&["suspend", "web"]);
    engine.remove(&id);
    assert_eq!(host.get("web")["phase"], "Suspended");
    let (_, error) = host.fails(&["resume", "web"]);
    assert!(error.contains("DATA_MISSING") || error.contains("gone"), "{error}");
    assert_eq!(host.get("web")["failure"]["reason"], "DATA_MISSING");
    assert_eq!(engine.inspect(&id), Value::Null);
    host.ok(&["delete", "web"]);
}

fn a_database_made_anew_knows_what_runs_and_what_rests(engine: &Engine, host: &Host) {
    for name in ["awake", "asleep"] {
        host.ok(&["create", name]);
        host.sh(name, "echo kept > /root/file");
    }
    host.ok(&["suspend", "asleep"]);
    let (id, boot) = (id_of(host, "awake"), host.get("awake")["boot_id"].clone());
    let state = host.dir().join("state");
    host.kill_gateway();
    for name in ["torpor.db", "torpor.db-wal", "torpor.db-shm"] {
        let _ = fs::remove_file(state.join(name));
    }
    let run = host.dir().join("run");
    let place = ["--state-dir", state.to_str().unwrap(), "--run-dir", run.to_str().unwrap()];
    host.ok(&[&["admin", "rebuild"][..], &place].concat());
    host.start_gateway();
    assert_eq!(host.get("awake")["id"].as_str(), Some(id.as_str()));
    host.until("the agent is heard", |host| host.run(&["exec", "awake", "--", "true"]).status.success());
    assert_eq!(host.get("awake")["boot_id"], boot);
    assert_eq!(engine.inspect(&id)["State"]["Running"], true);
    assert_eq!(host.get("asleep")["phase"], "Stopped");
    host.ok(&["start", "asleep"]);
    assert_eq!(host.sh("asleep", "cat /root/file"), "kept\n");
}

/// Where a stop is cut short, and where the start after it is.
const CHOSEN: [(&str, &str); 4] = [
    ("container.stop.flushed", "container.launch.noted"),
    ("container.stop.asked", "container.launch.asked"),
    ("container.stop.ended", "container.launch.started"),
    ("container.stop.released", "container.start.launched"),
];

/// Every failpoint of stops and of starts in the driver's source.
fn all() -> (Vec<String>, Vec<String>) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("drivers/container/src");
    let mut names = BTreeSet::new();
    // Beside the sources are folders with their tests.
    let files =
        fs::read_dir(source).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    for file in files {
        let text = fs::read_to_string(file).unwrap();
        for piece in text.split("hit(\"").skip(1) {
            names.extend(piece.split('"').next().map(str::to_owned));
        }
    }
    let of = |prefixes: &[&str]| -> Vec<String> {
        names.iter().filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix))).cloned().collect()
    };
    (of(&["container.stop."]), of(&["container.launch.", "container.start."]))
}

/// Whether the program at hand has failpoints at all.
fn has_failpoints(host: &Host) -> bool {
    host.kill_gateway();
    host.start_gateway_with("nothing=error");
    let built_in = host.gateway_log().contains("built with failpoints");
    need("containers", "root", built_in, "torpor was built without --features torpor-cli/failpoints")
}

/// The gateway ends at its failpoint, or never comes there: a container that has flushed ends by itself, and is not asked to.
fn crashed(host: &Host, failpoint: &str, optional: bool) {
    if optional {
        std::thread::sleep(Duration::from_secs(3));
        host.kill_gateway();
    } else {
        host.gateway_ends(failpoint);
    }
}

fn through(engine: &Engine, host: &Host, cases: &[(&str, &str)]) {
    if !has_failpoints(host) {
        return;
    }
    host.ok(&["create", "web"]);
    let id = id_of(host, "web");
    let container = engine.inspect(&id)["Id"].clone();
    host.sh("web", "echo 0 > /root/count");
    for (n, (stop, start)) in cases.iter().enumerate() {
        host.kill_gateway();
        host.start_gateway_with(&format!("{stop}=abort"));
        let _ = host.run(&["suspend", "web", "--no-wait"]);
        crashed(host, stop, *stop == "container.stop.asked");
        host.start_gateway();
        until_phase(host, "web", "Suspended");
        nothing_held(engine, host, &id);
        std::thread::sleep(Duration::from_millis(300));
        nothing_held(engine, host, &id);

        host.kill_gateway();
        host.start_gateway_with(&format!("{start}=abort"));
        let _ = host.run(&["resume", "web", "--no-wait"]);
        crashed(host, start, false);
        host.start_gateway();
        until_phase(host, "web", "Ready");
        assert_eq!(engine.inspect(&id)["Id"], container, "{start}");
        assert_eq!(host.sh("web", "cat /root/count"), format!("{n}\n"), "{start}: another workspace");
        host.sh("web", &format!("echo {} > /root/count", n + 1));
    }
    let mut id = id;
    // And at both ends of its life.
    for (point, next) in [
        ("container.delete.asked", Some("container.create.made")),
        ("container.delete.removed", Some("container.create.noted")),
        ("container.delete.removed", None),
    ] {
        host.kill_gateway();
        host.start_gateway_with(&format!("{point}=abort"));
        let _ = host.run(&["delete", "web", "--no-wait", "--allow-missing"]);
        host.gateway_ends(point);
        host.start_gateway();
        host.until(point, |host| !host.run(&["get", "web"]).status.success());
        assert_eq!(engine.inspect(&id), Value::Null, "{point}");
        if let Some(next) = next {
            host.kill_gateway();
            host.start_gateway_with(&format!("{next}=abort"));
            let _ = host.run(&["create", "web", "--no-wait"]);
            host.gateway_ends(next);
            host.start_gateway();
            until_phase(host, "web", "Ready");
            id = id_of(host, "web");
        }
    }
    let (_, listed) = engine.ask("GET", "/containers/json?all=true");
    assert_eq!(listed.as_array().map(Vec::len), Some(0), "{listed}");
}

fn a_gateway_killed_in_the_middle_of_stops_and_starts_of_containers_goes_on(engine: &Engine, host: &Host) {
    through(engine, host, &CHOSEN);
}

fn a_gateway_killed_at_any_failpoint_of_the_container_driver_goes_on(engine: &Engine, host: &Host) {
    let (stops, starts) = all();
    assert!(stops.len() > 3 && starts.len() > 4, "{stops:?} {starts:?}");
    let longest = stops.len().max(starts.len());
    let pairs: Vec<(&str, &str)> =
        (0..longest).map(|n| (stops[n % stops.len()].as_str(), starts[n % starts.len()].as_str())).collect();
    through(engine, host, &pairs);
}

fn race(engine: &Engine, host: &Host, times: u64) {
    // It crashes again and again, and its policy starts it again: now, or when the suspend comes, or never after it.
    let script = "sleep 0.$(cat /proc/sys/kernel/random/uuid | tr -dc 0-3 | head -c 1); exit 1";
    host.ok(&["create", "web", "--no-wait", "--restart", "always", "--", "sh", "-c", script]);
    let id = id_of(host, "web");
    for n in 0..times {
        std::thread::sleep(Duration::from_millis(n * 37 % 400));
        host.ok(&["suspend", "web"]);
        assert_eq!(host.get("web")["phase"], "Suspended", "{n}");
        for _ in 0..3 {
            nothing_held(engine, host, &id);
            std::thread::sleep(Duration::from_millis(40));
        }
        host.ok(&["resume", "web", "--no-wait"]);
    }
    host.ok(&["delete", "web"]);
}

fn a_stop_that_races_a_crashing_main_process_leaves_nothing_running(engine: &Engine, host: &Host) {
    race(engine, host, 8);
}

fn fifty_stops_that_race_a_crashing_main_process_leave_nothing_running(engine: &Engine, host: &Host) {
    race(engine, host, 50);
}

#[test]
fn one_gateway_runs_sandboxes_on_both_engines_of_one_import() {
    let test = "one_gateway_runs_sandboxes_on_both_engines_of_one_import";
    if !can_run(test, "docker") || !can_run(test, "podman") {
        return;
    }
    let (docker, podman) = (Engine::start("docker"), Engine::start("podman"));
    let host = Host::on(&[&docker, &podman]);
    for (name, engine, other) in [("one", &docker, &podman), ("two", &podman, &docker)] {
        host.ok(&["create", name, "--driver", engine.name]);
        assert_eq!(host.get(name)["driver"], engine.name);
        let id = id_of(&host, name);
        assert_ne!(engine.inspect(&id), Value::Null);
        assert_eq!(other.inspect(&id), Value::Null);
        host.ok(&["suspend", name]);
        nothing_held(engine, &host, &id);
    }
    // An engine that is away keeps nobody from the other.
    podman.tell("kill");
    host.ok(&["resume", "one"]);
    host.sh("one", "true");
    let (_, error) = host.fails(&["image", "pull", "x.test/y", "--driver", "podman"]);
    assert!(error.contains("podman"), "{error}");
    let (_, error) = host.fails(&["create", "three", "--driver", "podman"]);
    assert!(error.contains("podman is not reached"), "{error}");
    host.fails(&["get", "three"]);
    podman.tell("start");
    host.ok(&["delete", "one", "two"]);
}

#[test]
fn an_import_feeds_virtual_machines_and_an_engine() {
    let test = "an_import_feeds_virtual_machines_and_an_engine";
    if !can_run(test, "podman") || !can_run_vms(test) {
        return;
    }
    let engine = Engine::start("podman");
    let host = Host::of(&["vm"], &[&engine]);
    assert!(host.ok(&["image", "list"]).contains("tiny"));
    host.ok(&["create", "box", "--driver", "podman"]);
    assert_ne!(engine.inspect(&id_of(&host, "box")), Value::Null);
    // A disk is for the driver that has some.
    let (_, error) = host.fails(&["create", "other", "--volume", "cache:/cache"]);
    assert!(error.contains("volumes"), "{error}");
    host.ok(&["delete", "box"]);
}
