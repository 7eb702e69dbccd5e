//! Suspends with memory over real container engines and a real CRIU, by gateway and command line: what is published, what
//! becomes of a gateway that is killed in the middle, and of a checkpoint that can't be used.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;

use torpor_tests::{
    Host,
    engine::{Engine, can_run, criu},
    need,
};

/// Counts in a file system that lives in memory only, and says who counts.
const COUNTER: &str = "i=0; while :; do i=$((i+1)); echo $i $$ > /dev/shm/count; sleep 0.05; done";

/// Where a suspend is cut short, and where the resume after it is; the first two always, all in the slow ring.
const PLACES: [(&str, &str); 4] = [
    ("container.memory.asked", "container.memory.restoring"),
    ("container.memory.noted", "container.launch.asked"),
    ("container.memory.made", "container.launch.started"),
    ("container.memory.kept", "container.start.launched"),
];

#[test]
fn processes_of_a_docker_container_sleep_and_wake() {
    on("docker", "processes_of_a_docker_container_sleep_and_wake", &PLACES[..2]);
}

#[test]
fn processes_of_a_podman_container_sleep_and_wake() {
    on("podman", "processes_of_a_podman_container_sleep_and_wake", &PLACES[..2]);
}

#[test]
#[ignore = "slow: every failpoint of suspends with memory"]
fn a_gateway_killed_anywhere_in_a_suspend_with_memory_goes_on() {
    on("docker", "a_gateway_killed_anywhere_in_a_suspend_with_memory_goes_on", &PLACES);
    on("podman", "a_gateway_killed_anywhere_in_a_suspend_with_memory_goes_on", &PLACES);
}

fn on(name: &'static str, test: &str, places: &[(&str, &str)]) {
    if !can_run(test, name) {
        return;
    }
    let Some(criu) = criu(test) else { return };
    let engine = Engine::start_with(name, Some(&criu));
    let host = Host::on(&[&engine]);
    host.until("checkpoints are found to work", |host| {
        host.ok(&["info", "-o", "json"]).replace(' ', "").contains("\"keeps_memory\":true")
    });
    host.ok(&["create", "web", "--", "sh", "-c", COUNTER]);
    host.sh("web", "echo kept > /root/file");
    let id = host.get("web")["id"].as_str().unwrap().to_owned();
    let container = engine.inspect(&id)["Id"].clone();

    let before = count(&host);
    host.ok(&["suspend", "web", "--memory"]);
    asleep(&engine, &host, &id);
    host.ok(&["resume", "web"]);
    assert_eq!(engine.inspect(&id)["Id"], container);
    goes_on(&host, before);
    killed_in_the_middle(test, &engine, &host, &id, places);
    a_checkpoint_that_is_damaged(&engine, &host, &id);

    // Given up by who wants the disk only.
    host.ok(&["suspend", "web", "--memory"]);
    host.ok(&["stop", "web"]);
    assert!(engine.checkpoint_files(container.as_str().unwrap()).is_empty());
    host.ok(&["start", "web"]);
    assert_eq!(host.sh("web", "cat /root/file"), "kept\n");
    host.ok(&["suspend", "web", "--memory"]);
    host.ok(&["delete", "web"]);
    assert!(engine.inspect(&id).is_null());
}

fn killed_in_the_middle(test: &str, engine: &Engine, host: &Host, id: &str, places: &[(&str, &str)]) {
    host.kill_gateway();
    host.start_gateway_with("nothing=error");
    let built_in = host.gateway_log().contains("built with failpoints");
    if !need(test, "root", built_in, "torpor was built without --features torpor-cli/failpoints") {
        return;
    }
    let before = count(host);
    for (suspend, resume) in places {
        ends_at(host, suspend, &["suspend", "web", "--memory", "--no-wait"]);
        host.until(suspend, |host| host.get("web")["phase"] == "Suspended");
        asleep(engine, host, id);
        ends_at(host, resume, &["resume", "web", "--no-wait"]);
        host.until(resume, |host| host.get("web")["phase"] == "Ready");
        goes_on(host, before);
    }
}

/// The gateway ends at a failpoint of what is asked for, and another goes on.
fn ends_at(host: &Host, failpoint: &str, arguments: &[&str]) {
    host.kill_gateway();
    host.start_gateway_with(&format!("{failpoint}=abort"));
    // At first it may not know yet that the engine keeps memory; and it may end while it answers.
    host.until("the verb is taken", |host| {
        let done = host.run(arguments);
        done.status.success() || !String::from_utf8_lossy(&done.stderr).contains("cannot keep memory")
    });
    host.gateway_ends(failpoint);
    host.start_gateway();
}

fn a_checkpoint_that_is_damaged(engine: &Engine, host: &Host, id: &str) {
    let container = engine.inspect(id)["Id"].as_str().unwrap().to_owned();
    let damage = || {
        host.ok(&["suspend", "web", "--memory"]);
        for file in engine.checkpoint_files(&container) {
            if file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("core-")) {
                fs::write(file, "damaged").unwrap();
            }
        }
    };
    damage();
    host.fails(&["resume", "web"]);
    let seen = host.get("web");
    assert_eq!((&seen["phase"], &seen["failure"]["step"]), (&"Error".into(), &"restore".into()), "{seen}");
    assert_eq!(engine.inspect(id)["State"]["Running"], false);
    host.ok(&["resume", "web"]);
    assert_eq!(host.sh("web", "cat /root/file"), "kept\n");
    // As its user may say before.
    damage();
    host.ok(&["resume", "web", "--restart-if-restore-fails"]);
    assert_eq!(host.get("web")["phase"], "Ready");
    assert_eq!(host.sh("web", "cat /root/file"), "kept\n");
}

/// Published only with nothing running and the checkpoint there.
fn asleep(engine: &Engine, host: &Host, id: &str) {
    let seen = host.get("web");
    assert_eq!((&seen["phase"], &seen["retained"]), (&"Suspended".into(), &"memory".into()), "{seen}");
    let shown = engine.inspect(id);
    assert_eq!(engine.held(id), Vec::<String>::new());
    assert!(!engine.checkpoint_files(shown["Id"].as_str().unwrap()).is_empty());
    assert!(!host.dir().join("run").join(engine.name).join(id).exists(), "its run folder is there");
}

/// The count, and the process that counts.
fn count(host: &Host) -> (u64, u64) {
    let mut counted = None;
    host.until("something counts", |host| {
        let text = host.sh("web", "cat /dev/shm/count; true");
        let parts = text.trim().split_once(' ');
        counted = parts.and_then(|(count, pid)| Some((count.parse().ok()?, pid.parse().ok()?)));
        counted.is_some()
    });
    counted.unwrap()
}

fn goes_on(host: &Host, (count_before, pid): (u64, u64)) {
    let (now, same) = count(host);
    assert!(now >= count_before && same == pid, "{now} by {same}, after {count_before} by {pid}");
    assert_eq!(host.sh("web", "cat /root/file"), "kept\n");
}
