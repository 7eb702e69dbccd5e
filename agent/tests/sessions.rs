//! What stays and what goes when hosts come and go.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::{Agent, Client, Exec, LIMIT, configure, eventually, lives, run, sh};
use tokio::time::timeout;
use tonic::Code;
use torpor_proto::agent::v1::{
    EventsRequest, ExecInput, MainCommand, ShutdownRequest, StatusRequest, StdinClose, WindowSize, event,
    exec_input, exec_output,
};

fn main_command(script: &str) -> Option<MainCommand> {
    let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
    Some(MainCommand { argv, workdir: "/".into(), ..MainCommand::default() })
}

/// Main output up to its exit: stdout, stderr, code.
async fn main_until_exit(client: &mut common::Client) -> (String, String, i32) {
    let mut events = client.events(EventsRequest {}).await.unwrap().into_inner();
    let (mut out, mut err) = (String::new(), String::new());
    loop {
        let event = timeout(LIMIT, events.message()).await.unwrap().unwrap().unwrap();
        match event.kind {
            Some(event::Kind::MainOutput(output)) => {
                let text = String::from_utf8_lossy(&output.data).into_owned();
                if output.stderr { err.push_str(&text) } else { out.push_str(&text) }
            }
            Some(event::Kind::MainExit(exit)) => return (out, err, exit.code),
            Some(event::Kind::KeepAlive(_)) | None => {}
        }
    }
}

#[tokio::test]
async fn a_command_outlives_its_connection_and_a_new_one_works() {
    let agent = Agent::start().await;
    let mut first = agent.ready().await;
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("mark");
    // Writes far more than any buffer holds after the host has gone: it must be drained, not stopped.
    let script = format!(
        "echo $$; sleep 0.5; head -c 3000000 /dev/zero; echo done > {}; exec sleep 99",
        mark.display()
    );
    let mut exec = Exec::start(&mut first, sh(&script)).await;
    let pid: i32 = exec.until("\n").await.trim().parse().unwrap();
    drop((exec, first));
    let mut second = agent.ready().await;
    assert_eq!(run(&mut second, sh("echo again")).await.text(), "again\n");
    assert!(eventually(|| mark.exists()).await);
    assert!(lives(pid));
    assert_eq!(second.status(StatusRequest {}).await.unwrap().into_inner().execs, 1);
}

#[tokio::test]
async fn nothing_but_status_and_shutdown_is_answered_before_configure() {
    let agent = Agent::start().await;
    let mut client = agent.dial().await;
    let status = client.status(StatusRequest {}).await.unwrap().into_inner();
    assert!(!status.configured && status.run == 0 && status.memory_total_bytes > 0);
    let refused = client.events(EventsRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn an_exec_without_start_is_refused() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let refused = client.exec(tokio_stream::iter([])).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn configure_repeats_and_a_stale_run_is_refused() {
    let agent = Agent::start().await;
    let mut client = agent.dial().await;
    let first = configure(&mut client, 5, None).await.unwrap();
    assert_eq!(configure(&mut client, 5, None).await.unwrap(), first);
    assert_eq!(configure(&mut client, 6, None).await.unwrap().run, 6);
    let refused = configure(&mut client, 5, None).await.unwrap_err();
    assert_eq!(refused.code(), Code::Aborted);
    assert!(refused.message().contains("run 5 is over"));
}

#[tokio::test]
async fn the_main_command_starts_once_and_its_story_is_told_to_everybody() {
    let agent = Agent::start().await;
    let folder = tempfile::tempdir().unwrap();
    let counter = folder.path().join("count");
    let main = main_command(&format!("echo x >> {}; echo out; echo err >&2; exit 3", counter.display()));
    let mut client = agent.dial().await;
    configure(&mut client, 1, main.clone()).await.unwrap();
    assert_eq!(main_until_exit(&mut client).await, ("out\n".into(), "err\n".into(), 3));
    drop(client);
    let mut client = agent.dial().await;
    configure(&mut client, 1, main.clone()).await.unwrap();
    // As after a memory resume.
    configure(&mut client, 2, main).await.unwrap();
    assert_eq!(main_until_exit(&mut client).await, ("out\n".into(), "err\n".into(), 3));
    assert_eq!(std::fs::read_to_string(&counter).unwrap(), "x\n");
    let status = client.status(StatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.main_exit.unwrap().code, 3);
    assert!(status.main_started.is_some());
}

/// Hands the main command one line, and leaves.
async fn say(client: &mut Client, kinds: Vec<exec_input::Kind>) -> Result<(), tonic::Status> {
    let inputs: Vec<_> = kinds.into_iter().map(|kind| ExecInput { kind: Some(kind) }).collect();
    client.attach(tokio_stream::iter(inputs)).await.map(drop)
}

#[tokio::test]
async fn the_input_of_a_main_command_stays_open_until_somebody_closes_it() {
    use exec_input::Kind;
    let agent = Agent::start().await;
    let mut client = agent.dial().await;
    let script = "while read line; do echo got $line; done; echo over; exit 4";
    let main = main_command(script).map(|main| MainCommand { stdin: true, ..main });
    configure(&mut client, 1, main).await.unwrap();
    say(&mut client, vec![Kind::Stdin("one\n".into())]).await.unwrap();
    drop(client);
    let mut client = agent.dial().await;
    configure(&mut client, 1, None).await.unwrap();
    say(&mut client, vec![Kind::Stdin("two\n".into())]).await.unwrap();
    say(&mut client, vec![Kind::StdinClose(StdinClose {})]).await.unwrap();
    assert_eq!(main_until_exit(&mut client).await, ("got one\ngot two\nover\n".into(), String::new(), 4));
    let late = say(&mut client, vec![Kind::Stdin("late\n".into())]).await.unwrap_err();
    assert_eq!(late.code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn signals_pass_by_input_that_a_main_command_does_not_read() {
    use exec_input::Kind;
    let agent = Agent::start().await;
    let mut client = agent.dial().await;
    let main = main_command("trap 'echo caught; exit 9' USR1; while :; do sleep 0.1; done");
    let main = main.map(|main| MainCommand { stdin: true, ..main });
    configure(&mut client, 1, main).await.unwrap();
    let mut other = client.clone();
    let stuck =
        tokio::spawn(async move { say(&mut other, vec![Kind::Stdin(vec![b'x'; 100_000].into()); 64]).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!stuck.is_finished(), "a pipe holds less");
    say(&mut client, vec![Kind::Signal(10)]).await.unwrap();
    let (out, _, code) = main_until_exit(&mut client).await;
    assert_eq!((out.as_str(), code), ("caught\n", 9));
    timeout(LIMIT, stuck).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn who_writes_to_an_input_that_was_closed_is_told() {
    use exec_input::Kind;
    let agent = Agent::start().await;
    let mut client = agent.dial().await;
    let main =
        main_command("cat >/dev/null; exec sleep 4242").map(|main| MainCommand { stdin: true, ..main });
    configure(&mut client, 1, main).await.unwrap();
    say(&mut client, vec![Kind::StdinClose(StdinClose {})]).await.unwrap();
    let late = say(&mut client, vec![Kind::Stdin("late\n".into())]).await.unwrap_err();
    assert_eq!(late.code(), Code::Aborted, "{late}");
}

#[tokio::test]
async fn a_main_command_with_a_terminal_is_told_its_size_and_its_keys() {
    use exec_input::Kind;
    let agent = Agent::start().await;
    let mut client = agent.dial().await;
    let script = "test -t 0 && test -t 1 && read line; stty size; echo got $line; exit 6";
    let main = main_command(script).map(|main| MainCommand { stdin: true, tty: true, ..main });
    configure(&mut client, 1, main).await.unwrap();
    let kinds = vec![Kind::Resize(WindowSize { cols: 99, rows: 33 }), Kind::Stdin("hello\n".into())];
    say(&mut client, kinds).await.unwrap();
    let (out, err, code) = main_until_exit(&mut client).await;
    assert!(out.ends_with("33 99\r\ngot hello\r\n"), "{out:?}");
    assert_eq!((err.as_str(), code), ("", 6));
}

#[tokio::test]
async fn a_main_command_that_is_missing_ends_with_127_and_says_so() {
    let agent = Agent::start().await;
    let mut client = agent.dial().await;
    let main = MainCommand { argv: vec!["no-such-main".into()], ..MainCommand::default() };
    configure(&mut client, 1, Some(main)).await.unwrap();
    let (_, err, code) = main_until_exit(&mut client).await;
    assert_eq!(code, 127);
    assert!(err.contains("no-such-main"), "{err}");
}

#[tokio::test]
async fn shutdown_ends_all_processes_and_answers_before_it_leaves() {
    let mut agent = Agent::start().await;
    let mut client = agent.ready().await;
    let script = "setsid sh -c 'trap \"\" TERM; echo $$; while :; do sleep 0.1; done' & sleep 0.3; echo; exec sleep 99";
    let mut exec = Exec::start(&mut client, sh(script)).await;
    let Some(exec_output::Kind::Started(started)) = exec.next().await else { panic!("not started") };
    let stubborn: i32 = exec.until("\n\n").await.trim().parse().unwrap();
    let grace = prost_types::Duration::try_from(Duration::from_millis(600)).ok();
    let answer = client.shutdown(ShutdownRequest { grace }).await.unwrap().into_inner();
    assert!(answer.flushed, "{answer:?}");
    assert_eq!(answer.run, 1);
    assert!(!lives(started.pid) && !lives(stubborn));
    drop((client, exec));
    let status = timeout(LIMIT, async {
        loop {
            if let Some(status) = agent.process.try_wait().unwrap() {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    assert!(status.await.unwrap().success());
}
