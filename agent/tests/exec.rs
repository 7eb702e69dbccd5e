//! Commands through a real agent process: output, ends, input, terminals, users, limits.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{collections::HashMap, time::Duration};

use common::{Agent, Exec, command, eventually, is_root, lives, run, sh};
use sha2::{Digest as _, Sha256};
use torpor_proto::agent::v1::{
    ExecStart, StdinClose, WindowSize, exec_error::Kind as Fault, exec_input, exec_output,
};

fn duration(millis: u64) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(Duration::from_millis(millis)).ok()
}

#[tokio::test]
async fn exit_codes_and_signals_are_told_apart() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let exit = run(&mut client, sh("exit 7")).await.exit.unwrap();
    assert_eq!((exit.code, exit.signal, exit.timed_out), (7, 0, false));
    let exit = run(&mut client, sh("kill -9 $$")).await.exit.unwrap();
    assert_eq!((exit.code, exit.signal), (137, 9));
    // A real-time signal, which not every wrapper of waitpid can name.
    let exit = run(&mut client, sh("kill -40 $$")).await.exit.unwrap();
    assert_eq!((exit.code, exit.signal), (168, 40));
}

#[tokio::test]
async fn stdout_and_stderr_stay_apart() {
    let agent = Agent::start().await;
    let outcome = run(&mut agent.ready().await, sh("echo out; echo err >&2")).await;
    assert_eq!((outcome.stdout.as_slice(), outcome.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
}

#[tokio::test]
async fn a_large_output_arrives_whole_while_the_agent_stays_small() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let script = "i=0; while [ $i -lt 300 ]; do i=$((i+1)); seq 1 20000; done";
    let mut exec = Exec::start(&mut client, sh(script)).await;
    let (mut hash, mut length, mut peak) = (Sha256::new(), 0, 0);
    while let Some(kind) = exec.next().await {
        if let exec_output::Kind::Stdout(data) = kind {
            hash.update(&data);
            length += data.len();
            peak = peak.max(resident(agent.process.id()));
        }
    }
    let chunk: String = (1..=20000).map(|number| format!("{number}\n")).collect();
    let mut want = Sha256::new();
    (0..300).for_each(|_| want.update(&chunk));
    assert_eq!(length, chunk.len() * 300);
    assert_eq!(hash.finalize(), want.finalize());
    assert!(peak < 32 << 20, "the agent took {peak} bytes");
}

#[tokio::test]
async fn a_reader_that_stands_still_stops_the_command_and_loses_nothing() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let mut slow = Exec::start(&mut client, sh("head -c 50000000 /dev/zero; echo done >&2")).await;
    assert!(matches!(slow.next().await, Some(exec_output::Kind::Started(_))));
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(resident(agent.process.id()) < 32 << 20);
    // Another command is not held up.
    assert_eq!(run(&mut client, sh("echo hi")).await.text(), "hi\n");
    let outcome = slow.finish().await;
    assert_eq!((outcome.stdout.len(), outcome.stderr.as_slice()), (50_000_000, &b"done\n"[..]));
}

fn resident(pid: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
}

#[tokio::test]
async fn a_background_child_does_not_hold_the_command_back_and_lives_on() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let outcome = run(&mut client, sh("(while :; do sleep 0.1; echo x; done) & echo $!")).await;
    assert_eq!(outcome.code(), 0);
    let child: i32 = outcome.text().lines().next().unwrap().parse().unwrap();
    // It goes on writing into a pipe that nobody listens to, and is not killed by that.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(lives(child));
}

#[tokio::test]
async fn all_that_a_command_wrote_before_its_end_arrives_although_a_child_holds_the_pipe() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    for _ in 0..10 {
        let outcome = run(&mut client, sh("sleep 30 & head -c 60000 /dev/zero")).await;
        assert_eq!(outcome.stdout.len(), 60_000);
    }
}

#[tokio::test]
async fn stdin_is_empty_unless_asked_for() {
    let agent = Agent::start().await;
    let outcome = run(&mut agent.ready().await, sh("cat; echo end")).await;
    assert_eq!(outcome.text(), "end\n");
}

#[tokio::test]
async fn a_stdin_that_never_closes_does_not_hold_the_end_back() {
    let agent = Agent::start().await;
    let start = ExecStart { stdin: true, ..sh("echo hi") };
    let outcome = run(&mut agent.ready().await, start).await;
    assert_eq!((outcome.text().as_str(), outcome.code()), ("hi\n", 0));
}

#[tokio::test]
async fn stdin_and_its_end_reach_the_command() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let exec = Exec::start(&mut client, ExecStart { stdin: true, ..command(&["sha256sum"]) }).await;
    let chunk = vec![b'x'; 1 << 16];
    let mut hash = Sha256::new();
    for _ in 0..64 {
        hash.update(&chunk);
        exec.send(exec_input::Kind::Stdin(chunk.clone().into())).await;
    }
    exec.send(exec_input::Kind::StdinClose(StdinClose {})).await;
    let hex: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(exec.finish().await.text().starts_with(&hex));
}

#[tokio::test]
async fn a_signal_reaches_the_process_group() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let mut exec =
        Exec::start(&mut client, sh("trap 'echo got; exit 5' USR1; echo up; while :; do sleep 0.05; done"))
            .await;
    exec.until("up\n").await;
    exec.send(exec_input::Kind::Signal(10)).await;
    let outcome = exec.finish().await;
    assert_eq!((outcome.text().as_str(), outcome.code()), ("got\n", 5));
}

#[tokio::test]
async fn a_terminal_has_its_size_on_the_first_line_and_can_be_resized() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let script = "stty size; trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done";
    let size = Some(WindowSize { cols: 133, rows: 41 });
    let mut exec = Exec::start(&mut client, ExecStart { tty: true, size, ..sh(script) }).await;
    let first = exec.until("ready").await;
    assert!(first.starts_with("41 133\r\n"), "{first:?}");
    exec.send(exec_input::Kind::Resize(WindowSize { cols: 90, rows: 20 })).await;
    let outcome = exec.finish().await;
    assert!(outcome.text().contains("20 90\r\n"), "{outcome:?}");
    assert!(outcome.stderr.is_empty());
}

#[tokio::test]
async fn a_terminal_takes_input_and_its_end() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let mut exec = Exec::start(
        &mut client,
        ExecStart { tty: true, ..sh("tty; read line; echo got $line; cat; echo end") },
    )
    .await;
    exec.until("/dev/pts/").await;
    exec.send(exec_input::Kind::Stdin("word\n".into())).await;
    exec.until("got word").await;
    exec.send(exec_input::Kind::StdinClose(StdinClose {})).await;
    let outcome = exec.finish().await;
    assert!(outcome.text().contains("end"), "{outcome:?}");
    assert_eq!(outcome.code(), 0);
}

#[tokio::test]
async fn a_time_limit_ends_the_whole_tree_even_what_left_the_session() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let script = "setsid sh -c 'trap \"\" TERM; sleep 99 & echo $$ $!; wait; sleep 99' & sleep 99 & echo $!; wait; wait";
    let start = ExecStart { timeout: duration(700), kill_grace: duration(300), ..sh(script) };
    let outcome = run(&mut client, start).await;
    let exit = outcome.exit.as_ref().unwrap();
    assert!(exit.timed_out);
    assert_eq!(exit.signal, 15, "{outcome:?}");
    let pids: Vec<i32> = outcome.text().split_ascii_whitespace().map(|pid| pid.parse().unwrap()).collect();
    assert_eq!(pids.len(), 3, "{outcome:?}");
    for pid in pids {
        assert!(!lives(pid), "{pid} survived");
    }
}

#[tokio::test]
async fn a_command_that_ends_in_time_is_not_timed_out() {
    let agent = Agent::start().await;
    let start = ExecStart { timeout: duration(20_000), ..sh("echo in time") };
    let exit = run(&mut agent.ready().await, start).await.exit.unwrap();
    assert!(!exit.timed_out);
}

#[tokio::test]
async fn what_can_not_be_started_is_told_by_kind() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("plain");
    std::fs::write(&plain, "no program").unwrap();
    let orphan = folder.path().join("orphan");
    std::fs::write(&orphan, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&orphan, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let cases = [
        (command(&["no-such-command"]), Fault::NotFound, "\"no-such-command\" not found"),
        (command(&["/no/such/file"]), Fault::NotFound, "not found"),
        (command(&[&path(&orphan)]), Fault::NotFound, "interpreter"),
        (command(&[&path(&plain)]), Fault::NotExecutable, "plain"),
        (command(&[&path(folder.path())]), Fault::NotExecutable, "can't be executed"),
        (ExecStart { workdir: "/no/dir".into(), ..sh("true") }, Fault::NoSuchDirectory, "/no/dir"),
        (ExecStart { user: "no-such-user".into(), ..sh("true") }, Fault::NoSuchUser, "no-such-user"),
        (command(&[]), Fault::Invalid, "empty"),
        (command(&["a\0b"]), Fault::Invalid, "zero byte"),
    ];
    for (start, kind, says) in cases {
        let outcome = run(&mut client, start).await;
        let error = outcome.error.as_ref().unwrap_or_else(|| panic!("{outcome:?}"));
        assert_eq!(error.kind(), kind, "{error:?}");
        assert!(error.message.contains(says), "{error:?}");
        assert!(outcome.exit.is_none());
    }
}

#[tokio::test]
async fn the_environment_is_base_then_configured_then_given() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let script =
        "echo $FROM_CONFIG $GIVEN ${HOME:+home} ${PATH:+path} ${TERM:-noterm} ${CARGO_MANIFEST_DIR:-clean}";
    let environment = HashMap::from([("GIVEN".to_owned(), "given".to_owned())]);
    let outcome = run(&mut client, ExecStart { environment, ..sh(script) }).await;
    assert_eq!(outcome.text(), "config given home path noterm clean\n");
    let environment = HashMap::from([("FROM_CONFIG".to_owned(), "mine".to_owned())]);
    assert!(run(&mut client, ExecStart { environment, ..sh(script) }).await.text().starts_with("mine "));
}

#[tokio::test]
async fn a_workdir_is_entered() {
    let agent = Agent::start().await;
    let start = ExecStart { workdir: "/usr/bin".into(), ..sh("pwd") };
    assert_eq!(run(&mut agent.ready().await, start).await.text(), "/usr/bin\n");
}

#[tokio::test]
async fn a_command_runs_as_the_user_that_is_asked_for() {
    if !is_root("a_command_runs_as_the_user_that_is_asked_for") {
        return;
    }
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let who = "id -u; id -g; id -G; echo $USER; umask";
    let outcome = run(&mut client, ExecStart { user: "nobody".into(), ..sh(who) }).await;
    assert_eq!(outcome.text(), "65534\n65534\n65534\nnobody\n0022\n");
    let outcome =
        run(&mut client, ExecStart { user: "4242:17".into(), ..sh("id -u; id -g; id -G; pwd") }).await;
    assert_eq!(outcome.text(), "4242\n17\n17\n/\n");
    let start = ExecStart { user: "nobody".into(), workdir: "/root".into(), ..sh("true") };
    let private =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata("/root").unwrap().permissions()) & 1 == 0;
    if private {
        assert_eq!(run(&mut client, start).await.error.unwrap().kind(), Fault::Other);
    }
    let start = ExecStart { user: "nobody".into(), tty: true, ..sh("echo hi > $(tty)") };
    assert_eq!(run(&mut client, start).await.code(), 0);
}

#[tokio::test]
async fn a_command_sees_no_descriptor_and_no_signal_setting_of_the_agent() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let outcome =
        run(&mut client, sh("ls /proc/self/fd | wc -l; grep -E 'Sig(Blk|Ign)' /proc/self/status")).await;
    // 0, 1, 2 and the folder itself.
    assert!(outcome.text().starts_with("4\n"), "{outcome:?}");
    assert!(outcome.text().contains("SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000"), "{outcome:?}");
}

#[tokio::test]
async fn orphans_are_reaped_and_do_not_take_the_place_of_a_command() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let outcome = run(&mut client, sh("for i in 1 2 3 4 5; do (sleep 0.2; exit 9) & done; exit 4")).await;
    assert_eq!(outcome.code(), 4);
    let pid = agent.process.id();
    let children = format!("/proc/{pid}/task/{pid}/children");
    assert!(eventually(|| std::fs::read_to_string(&children).unwrap().is_empty()).await);
}

#[tokio::test]
async fn many_commands_at_once_each_get_their_own_end() {
    let agent = Agent::start().await;
    let client = agent.ready().await;
    let runs: Vec<_> = (0..40)
        .map(|number| {
            let mut client = client.clone();
            tokio::spawn(async move { run(&mut client, sh(&format!("echo {number}; exit {number}"))).await })
        })
        .collect();
    for (number, run) in runs.into_iter().enumerate() {
        let outcome = run.await.unwrap();
        assert_eq!((outcome.code(), outcome.text()), (number as i32, format!("{number}\n")));
    }
}
