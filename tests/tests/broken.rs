//! What a stranger who tried to break it found, each pinned.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    process::{Command, Stdio},
    time::Duration,
};

use torpor_tests::{Host, can_run_vms, is_alive, wait_at_most};

#[test]
fn commands_that_do_not_read_their_input_stop_no_others() {
    if !can_run_vms("commands_that_do_not_read_their_input_stop_no_others") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    let zero = || Stdio::from(fs::File::open("/dev/zero").unwrap());
    let mut stuck: Vec<_> = (0..4)
        .map(|_| {
            let mut command = host.command(&["exec", "-i", "box", "--", "sleep", "300"]);
            command.stdin(zero()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        })
        .collect();
    host.until("they run", |h| h.sh("box", "ps | grep -c '[s]leep 300' || true") == "4\n");
    std::thread::sleep(Duration::from_secs(2));
    let mut other = host.command(&["exec", "box", "--", "true"]).spawn().unwrap();
    assert!(wait_at_most(&mut other, Duration::from_secs(30)).is_some_and(|s| s.success()), "an exec hangs");
    host.ok(&["suspend", "box"]);
    assert_eq!(host.get("box")["flushed"], true);
    for child in &mut stuck {
        assert!(wait_at_most(child, Duration::from_secs(30)).is_some());
    }
}

#[test]
fn a_firewall_that_others_flushed_away_comes_back_with_every_running_sandbox() {
    if !can_run_vms("a_firewall_that_others_flushed_away_comes_back_with_every_running_sandbox") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    let tap = host.get("box")["host"]["tap"].as_str().unwrap().to_owned();
    let table = format!("torpor_{}", host.instance());
    let listed = || {
        let out = Command::new("nft").args(["list", "table", "inet", &table]).output().unwrap();
        String::from_utf8_lossy(&out.stdout).contains(&format!("\"{tap}\""))
    };
    assert!(listed());
    let gone = Command::new("nft").args(["delete", "table", "inet", &table]).status().unwrap();
    assert!(gone.success() && !listed());
    host.until("the element is back", |_| listed());
    host.ok(&["suspend", "box"]);
    std::thread::sleep(Duration::from_secs(6));
    assert!(!listed(), "what is not running has no element");
}

#[test]
fn a_second_gateway_touches_nothing_of_the_first() {
    if !can_run_vms("a_second_gateway_touches_nothing_of_the_first") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    let pid = host.get("box")["host"]["pid"].as_i64().unwrap();
    let second = |state: &str, run: &str, socket: &str| {
        let mut command = Command::new(torpor_tests::torpor_program());
        command.args(["serve", "--config"]).arg(host.dir().join("torpor.toml"));
        command.arg("--state-dir").arg(host.dir().join(state)).arg("--run-dir").arg(host.dir().join(run));
        command.args(["--listen", &format!("unix://{}/{socket}", host.dir().display())]);
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        wait_at_most(&mut child, Duration::from_secs(60)).expect("it serves")
    };
    for (state, run, socket) in
        [("state2", "run", "2.sock"), ("state3", "run3", "3.sock"), ("state4", "run4", "gw.sock")]
    {
        assert!(!second(state, run, socket).success(), "{state} {run} {socket}");
        assert!(is_alive(pid), "the VM of the first gateway was ended");
    }
    assert_eq!(host.sh("box", "echo there"), "there\n");
}

#[test]
fn a_lost_database_is_not_taken_for_an_empty_one() {
    if !can_run_vms("a_lost_database_is_not_taken_for_an_empty_one") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    let pid = host.get("box")["host"]["pid"].as_i64().unwrap();
    host.kill_gateway();
    let state = host.dir().join("state");
    let away = host.dir().join("away");
    fs::create_dir(&away).unwrap();
    for name in ["torpor.db", "torpor.db-wal", "torpor.db-shm"] {
        let _ = fs::rename(state.join(name), away.join(name));
    }
    let mut command = Command::new(torpor_tests::torpor_program());
    command.args(["serve", "--config"]).arg(host.dir().join("torpor.toml"));
    command.arg("--state-dir").arg(&state).arg("--run-dir").arg(host.dir().join("run"));
    command.args(["--listen", &format!("unix://{}/gw.sock", host.dir().display())]);
    let refused = command.output().unwrap();
    let words = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && words.contains("restore torpor.db"), "{words}");
    assert!(is_alive(pid), "it was taken for a leftover");
    for name in ["torpor.db", "torpor.db-wal", "torpor.db-shm"] {
        let _ = fs::remove_file(state.join(name));
        let _ = fs::rename(away.join(name), state.join(name));
    }
    host.start_gateway();
    assert_eq!(host.get("box")["host"]["pid"], pid);
}

#[test]
fn a_lost_database_is_made_anew_and_what_runs_goes_on() {
    if !can_run_vms("a_lost_database_is_made_anew_and_what_runs_goes_on") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    host.ok(&["create", "asleep"]);
    host.sh("asleep", "echo kept > /root/file");
    host.ok(&["suspend", "asleep"]);
    let before = host.get("box");
    let (state, run) = (host.dir().join("state"), host.dir().join("run"));
    let place = ["--state-dir", state.to_str().unwrap(), "--run-dir", run.to_str().unwrap()];
    let (_, refused) = host.fails(&[&["admin", "rebuild"][..], &place].concat());
    assert!(refused.contains("in use"), "{refused}");
    host.kill_gateway();
    for name in ["torpor.db", "torpor.db-wal", "torpor.db-shm"] {
        let _ = fs::remove_file(state.join(name));
    }
    host.ok(&[&["admin", "rebuild"][..], &place].concat());
    host.start_gateway();
    let after = host.get("box");
    assert_eq!((&after["phase"], &after["host"]["pid"]), (&before["phase"], &before["host"]["pid"]));
    assert_eq!(host.sh("box", "echo there"), "there\n");
    assert_eq!(host.get("asleep")["phase"], "Stopped");
    host.ok(&["start", "asleep"]);
    assert_eq!(host.sh("asleep", "cat /root/file"), "kept\n");
    let orphans = host.ok(&[&["doctor", "--orphans"][..], &place].concat());
    assert!(orphans.contains("no orphans"), "{orphans}");
}

#[test]
fn a_truncated_disk_is_refused_before_anything_writes_to_it() {
    if !can_run_vms("a_truncated_disk_is_refused_before_anything_writes_to_it") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    host.ok(&["suspend", "box"]);
    let disk = host.sandbox_dir(host.get("box")["id"].as_str().unwrap()).join("overlay.qcow2");
    let whole = host.dir().join("whole");
    fs::copy(&disk, &whole).unwrap();
    for size in [1000, 400_000] {
        let file = fs::File::options().write(true).open(&disk).unwrap();
        file.set_len(size).unwrap();
        let before = fs::read(&disk).unwrap();
        let (_, error) = host.fails(&["resume", "box"]);
        assert!(error.contains("damaged"), "{size}: {error}");
        assert_eq!(fs::read(&disk).unwrap(), before, "something wrote to it");
        fs::copy(&whole, &disk).unwrap();
    }
    host.ok(&["resume", "box"]);
}

#[test]
fn a_terminal_that_goes_away_ends_what_ran_on_it() {
    if !can_run_vms("a_terminal_that_goes_away_ends_what_ran_on_it") {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    let inner = format!("{} exec -t box -- sleep 777", torpor_tests::torpor_program().display());
    let mut command = Command::new("script");
    command
        .args(["-qec", &inner, "/dev/null"])
        .env("TORPOR_ENDPOINT", format!("unix://{}/gw.sock", host.dir().display()));
    let mut client = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let running = |h: &Host| h.sh("box", "ps | grep -c '[s]leep 777' || true") == "1\n";
    host.until("it runs", running);
    client.kill().unwrap();
    client.wait().unwrap();
    host.until("it is gone", |h| !running(h));
}
