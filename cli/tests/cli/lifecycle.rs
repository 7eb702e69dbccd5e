//! Verbs, waits, errors and exit codes.

use std::{fs, thread, time::Duration};

use tonic::{Code, Status};
use torpor_sdk::v1::{self, Phase};

use crate::fake::{Fake, at, failed, refusal, sandbox};

#[test]
fn each_verb_waits_for_its_phase_and_says_it() {
    let fake = Fake::start();
    fake.put(sandbox("web", Phase::Ready));
    for (verb, end) in
        [("suspend", "Suspended"), ("resume", "Ready"), ("stop", "Stopped"), ("start", "Ready")]
    {
        let done = fake.run(&[verb, "web"]);
        assert_eq!(
            (done.code, done.stdout, done.stderr),
            (0, format!("web {end}\n"), String::new()),
            "{verb}"
        );
        // Another one: what follows an answer that nobody waited for comes late.
        fake.put(sandbox(end, Phase::Ready));
        let done = fake.run(&["sandbox", verb, end, "--no-wait", "-o", "name"]);
        assert_eq!((done.code, done.stdout), (0, format!("{end}\n")), "{verb}");
    }
}

#[test]
fn create_sends_what_was_typed() {
    let fake = Fake::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("env");
    fs::write(&file, "A=1\nB=2\n").unwrap();
    let args = [
        "create",
        "--cpus",
        "2",
        "--memory",
        "1GiB",
        "--disk",
        "20G",
        "--env-file",
        file.to_str().unwrap(),
        "--env",
        "B=3",
        "--env",
        "FROM_HERE",
        "--label",
        "team=blue",
        "--workdir",
        "/srv",
        "--user",
        "app",
        "--restart",
        "on-failure",
        "--machine",
        "qemu",
        "--kernel",
        "vmlinux",
        "--stop-grace",
        "1.5s",
        "--",
        "run",
        "-v",
        "--env",
    ];
    let output = fake.torpor(&args).env("FROM_HERE", "yes").current_dir(&dir).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "made-up-1 Ready\n");
    let request = fake.state.created.lock().unwrap().clone().unwrap();
    assert!(request.name.is_empty() && request.request_id.len() == 32);
    assert_eq!(request.labels["team"], "blue");
    let spec = request.spec.unwrap();
    assert_eq!(spec.command, ["run", "-v", "--env"]);
    assert_eq!(
        spec.resources,
        Some(v1::Resources { cpus: Some(2), memory_bytes: Some(1 << 30), disk_bytes: Some(20 << 30) })
    );
    let mut environment: Vec<_> = spec.environment.iter().map(|(k, v)| format!("{k}={v}")).collect();
    environment.sort();
    assert_eq!(environment, ["A=1", "B=3", "FROM_HERE=yes"]);
    assert_eq!(spec.restart_policy, v1::RestartPolicy::OnFailure as i32);
    assert_eq!(spec.stop_grace, Some(prost_types::Duration { seconds: 1, nanos: 500_000_000 }));
    assert_eq!(spec.kernel, dir.path().join("vmlinux").to_str().unwrap());
    assert_eq!((spec.workdir.as_str(), spec.user.as_str(), spec.machine.as_str()), ("/srv", "app", "qemu"));
}

#[test]
fn a_failed_boot_tells_step_reason_console_and_next_command() {
    let fake = Fake::start();
    fake.plan("create", vec![at(Phase::Provisioning), failed()]);
    let done = fake.run(&["create", "web"]);
    let expected = "\
error: sandbox 'web' is Error and will not become Ready by itself
  step    boot
  reason  RUN_FAILED
  cause   the kernel panicked
  console:
    | [    0.9] Kernel panic - not syncing
    | [    0.9] end
next: torpor logs web --source console
";
    assert_eq!((done.code, done.stderr.as_str(), done.stdout.as_str()), (1, expected, ""));
}

#[test]
fn a_failure_that_was_awaited_has_the_exit_code_of_its_reason() {
    let fake = Fake::start();
    for (reason, code) in [("DATA_MISSING", 4), ("EXHAUSTED", 6), ("INVALID", 2), ("BACKEND_FAILED", 1)] {
        let mut status = failed();
        status.failure.as_mut().unwrap().reason = reason.into();
        fake.plan("resume", vec![at(Phase::Resuming), status]);
        fake.put(sandbox("web", Phase::Suspended));
        assert_eq!(fake.run(&["resume", "web"]).code, code, "{reason}");
    }
}

#[test]
fn what_rests_is_not_blamed_on_an_old_failure_and_its_next_command_works() {
    let fake = Fake::start();
    for (resting, verb) in [(Phase::Suspended, "resume"), (Phase::Stopped, "start")] {
        let mut web = sandbox("web", resting);
        web.status = Some(v1::SandboxStatus { failure: failed().failure, ..at(resting) });
        fake.put(web);
        for command in ["recover", "wait"] {
            let done = fake.run(&[command, "web"]);
            let name = format!("{resting:?}");
            assert!(done.stderr.contains(&name) && !done.stderr.contains("reason"), "{}", done.stderr);
            assert!(
                done.code == 1 && done.stderr.ends_with(&format!("next: torpor {verb} web\n")),
                "{}",
                done.stderr
            );
        }
    }
}

#[test]
fn a_create_whose_command_has_already_ended_is_done() {
    let fake = Fake::start();
    let completed = v1::SandboxStatus { exit_code: Some(3), ..at(Phase::Completed) };
    fake.plan("create", vec![at(Phase::Provisioning), completed]);
    let done = fake.run(&["create", "job", "--", "false"]);
    assert_eq!(
        (done.code, done.stdout.as_str()),
        (0, "job Completed (the main command ended with code 3)\n")
    );
}

#[test]
fn every_status_code_has_its_exit_code_and_the_next_command_is_printed() {
    let fake = Fake::start();
    fake.put(sandbox("web", Phase::Ready));
    let cases = [
        (Code::InvalidArgument, 2),
        (Code::NotFound, 3),
        (Code::FailedPrecondition, 4),
        (Code::Unimplemented, 4),
        (Code::Aborted, 5),
        (Code::AlreadyExists, 5),
        (Code::ResourceExhausted, 6),
        (Code::DeadlineExceeded, 124),
        (Code::Internal, 1),
    ];
    for (code, exit) in cases {
        fake.refuse("suspend", refusal(code, "not now", "SOME_REASON", "torpor get web"));
        let done = fake.run(&["suspend", "web"]);
        let expected = "error: not now\n  reason  SOME_REASON\nnext: torpor get web\n";
        assert_eq!((done.code, done.stderr.as_str()), (exit, expected), "{code:?}");
    }
}

#[test]
fn a_gateway_that_is_not_there_is_told_with_how_to_start_it() {
    let fake = Fake::start();
    let mut command = fake.torpor(&["list", "--endpoint", "unix:///nonexistent/gateway.sock"]);
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(7));
    assert!(
        stderr.starts_with("error: no gateway answers at unix:///nonexistent/gateway.sock: "),
        "{stderr}"
    );
    assert!(stderr.contains("next: torpor serve"), "{stderr}");
}

#[test]
fn wrong_values_are_refused_before_anything_is_asked() {
    let fake = Fake::start();
    for args in [
        &["create", "--cpus", "0"][..],
        &["create", "--memory", "1MB"],
        &["create", "--env", "NOT_SET_ANYWHERE"],
        &["create", "--label", "x"],
        &["wait", "web", "--for", "asleep"],
        &["exec", "web", "echo"],
        &["suspend"],
        &["list", "--endpoint", "ftp://x"],
    ] {
        assert_eq!(fake.run(args).code, 2, "{args:?}");
    }
    assert!(fake.calls().is_empty());
}

#[test]
fn several_names_are_all_asked_and_each_failure_is_told_by_its_name() {
    let fake = Fake::start();
    fake.put(sandbox("a", Phase::Ready));
    fake.put(sandbox("c", Phase::Ready));
    let done = fake.run(&["suspend", "a", "b", "c"]);
    assert_eq!((done.code, done.stdout.as_str()), (3, "a Suspended\nc Suspended\n"));
    assert!(done.stderr.starts_with("error: b: no sandbox is called 'b'\n"), "{}", done.stderr);
}

#[test]
fn a_wait_ends_at_once_on_a_phase_that_leads_elsewhere() {
    let fake = Fake::start();
    fake.put(sandbox("web", Phase::Resuming));
    let state = std::sync::Arc::clone(&fake.state);
    let mut waiting = fake.torpor(&["wait", "web"]);
    let waiting =
        waiting.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    while state.watches.load(std::sync::atomic::Ordering::Relaxed) == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    state.put(v1::Sandbox { status: Some(failed()), ..sandbox("web", Phase::Error) });
    // Without a timeout: it would wait for ever.
    let done = crate::fake::Finished::from(waiting.wait_with_output().unwrap());
    assert_eq!(done.code, 1);
    assert!(done.stderr.contains("RUN_FAILED"), "{}", done.stderr);
    assert_eq!(fake.run(&["wait", "web", "--for", "suspended"]).code, 1);
    assert_eq!(fake.run(&["wait", "web", "--for", "error"]).code, 0);
}

#[test]
fn a_wait_that_takes_too_long_ends_with_124_and_the_last_step() {
    let fake = Fake::start();
    let status = v1::SandboxStatus { step: "booting".into(), ..at(Phase::Resuming) };
    fake.put(v1::Sandbox { status: Some(status), ..sandbox("web", Phase::Resuming) });
    let done = fake.run(&["wait", "web", "--timeout", "200ms"]);
    assert_eq!(done.code, 124);
    assert!(done.stderr.contains("still Resuming") && done.stderr.contains("booting"), "{}", done.stderr);
}

#[test]
fn a_wait_means_the_sandbox_and_not_its_name() {
    let fake = Fake::start();
    fake.put(sandbox("web", Phase::Resuming));
    let mut waiting = fake.torpor(&["wait", "web"]);
    let waiting =
        waiting.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap();
    while fake.state.watches.load(std::sync::atomic::Ordering::Relaxed) == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    fake.put(v1::Sandbox { id: "sb-other".into(), ..sandbox("web", Phase::Ready) });
    fake.state.remove("sb-web");
    let done = crate::fake::Finished::from(waiting.wait_with_output().unwrap());
    assert_eq!(done.code, 3, "{done:?}");
    assert!(done.stderr.contains("was deleted"), "{}", done.stderr);
}

#[test]
fn a_wait_goes_on_where_it_was_when_the_gateway_is_restarted() {
    let mut fake = Fake::start();
    fake.put(sandbox("web", Phase::Resuming));
    let mut waiting = fake.torpor(&["wait", "web", "--timeout", "60s"]);
    let waiting =
        waiting.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    while fake.state.watches.load(std::sync::atomic::Ordering::Relaxed) == 0 {
        thread::sleep(Duration::from_millis(5));
    }
    // Long enough for the snapshot with its cursor to arrive.
    thread::sleep(Duration::from_millis(300));
    fake.kill();
    fake.put(sandbox("web", Phase::Ready));
    fake.serve_again();
    let done = crate::fake::Finished::from(waiting.wait_with_output().unwrap());
    assert_eq!((done.code, done.stdout.as_str()), (0, "web Ready\n"), "{}", done.stderr);
    let watches: Vec<_> = fake.calls().into_iter().filter(|c| c.starts_with("watch")).collect();
    assert_eq!(watches, ["watch sb-web ", "watch sb-web 1"]);
}

#[test]
fn a_watch_whose_cursor_is_too_old_begins_anew() {
    let fake = Fake::start();
    fake.put(sandbox("web", Phase::Ready));
    fake.state.oldest.store(100, std::sync::atomic::Ordering::Relaxed);
    let mut watching = fake.torpor(&["watch", "--cursor", "1", "-o", "json"]);
    let mut watching = watching.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let lines = std::io::BufRead::lines(std::io::BufReader::new(watching.stdout.take().unwrap()));
    let kinds: Vec<String> = lines
        .take(3)
        .map(|l| {
            serde_json::from_str::<serde_json::Value>(&l.unwrap()).unwrap()["kind"]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    watching.kill().unwrap();
    watching.wait().unwrap();
    assert_eq!(kinds, ["reset", "snapshot", "synced"]);
}

#[test]
fn a_verb_is_sent_again_with_the_same_request_id() {
    let fake = Fake::start();
    fake.put(sandbox("web", Phase::Ready));
    fake.refuse("stop", Status::unavailable("starting"));
    fake.refuse("stop", Status::unavailable("starting"));
    assert_eq!(fake.run(&["stop", "web"]).code, 0);
    let calls: Vec<_> = fake.calls().into_iter().filter(|c| c.starts_with("stop")).collect();
    assert_eq!(calls.len(), 3);
    assert!(calls.iter().all(|c| *c == calls[0] && c.len() == "stop web ".len() + 32), "{calls:?}");
}

#[test]
fn delete_waits_until_nothing_is_left() {
    let fake = Fake::start();
    fake.put(sandbox("a", Phase::Ready));
    let done = fake.run(&["delete", "a"]);
    assert_eq!((done.code, done.stdout.as_str()), (0, "a deleted\n"));
    assert_eq!(fake.run(&["delete", "a"]).code, 3);
    let done = fake.run(&["delete", "a", "--allow-missing", "-o", "json"]);
    let json: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!((done.code, json["outcome"].as_str()), (0, Some("absent")));
    assert_eq!(fake.run(&["wait", "a", "--for", "deleted"]).code, 0);
    fake.put(sandbox("b", Phase::Ready));
    assert_eq!(fake.run(&["rm", "b", "--no-wait"]).stdout, "b deleting\n");
}

#[test]
fn images_are_built_imported_listed_and_removed() {
    let fake = Fake::start();
    let done = fake.run(&["image", "build", "debian", "-p", "git", "-p", "curl"]);
    assert_eq!((done.code, done.stdout.as_str()), (0, "debian sha256:0123456789abcdef0123 (300 MiB)\n"));
    let mut import = fake.torpor(&["image", "import", "mine", "root.tar", "-q"]);
    let output = import.current_dir("/tmp").output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "mine\n");
    assert_eq!(fake.calls(), ["build debian git,curl", "import mine /tmp/root.tar"]);
    assert!(fake.run(&["image", "list"]).stdout.contains("sha256:0123456789ab  1 GiB  300 MiB  -    2"));
    fake.refuse("remove", refusal(Code::FailedPrecondition, "in use by web", "IN_USE", "torpor delete web"));
    let done = fake.run(&["image", "rm", "a", "b"]);
    assert_eq!((done.code, done.stdout.as_str()), (4, "b removed, 3 MiB freed\n"));
}
