//! Many streams at once on one sandbox that goes to sleep under them.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use torpor_sdk::{Client, Code, Error, Output, v1};
use torpor_tests::{Host, can_run_vms};

const EXECS: u32 = 100;
const FORWARDS: u32 = 20;
/// Nothing takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// A command to its end, which must be the word of the suspend.
async fn exec(client: Client, running: &AtomicU32) -> Error {
    let argv = ["sleep", "4242"].map(str::to_owned).to_vec();
    let start = v1::ExecStart { sandbox: "box".to_owned(), argv, ..v1::ExecStart::default() };
    let mut exec = match client.exec(start).await {
        Ok(exec) => exec,
        Err(error) => return error,
    };
    loop {
        match exec.output.next().await {
            Ok(Some(Output::Started(_))) => {
                running.fetch_add(1, Ordering::SeqCst);
            }
            Ok(other) => panic!("a command that sleeps said {other:?}"),
            Err(error) => return error,
        }
    }
}

/// A connection that is used to its end, which must be the word of the suspend.
async fn forward(client: Client, running: &AtomicU32) -> Error {
    let mut forward = match client.forward("box", 8000).await {
        Ok(forward) => forward,
        Err(error) => return error,
    };
    forward.input.write("there and back\n".into()).await;
    let mut echoed = Vec::new();
    loop {
        match forward.output.next().await {
            Ok(Some(bytes)) => {
                echoed.extend_from_slice(&bytes);
                if echoed == b"there and back\n" {
                    running.fetch_add(1, Ordering::SeqCst);
                }
            }
            Ok(None) => panic!("the connection ended as if all had been said: {echoed:?}"),
            Err(error) => return error,
        }
    }
}

#[test]
fn a_hundred_execs_and_twenty_forwards_all_end_with_a_clear_status_when_the_sandbox_is_suspended() {
    let test =
        "a_hundred_execs_and_twenty_forwards_all_end_with_a_clear_status_when_the_sandbox_is_suspended";
    if !can_run_vms(test) {
        return;
    }
    let host = Host::new();
    host.ok(&["create", "box"]);
    host.sh("box", "setsid nc -ll -p 8000 -e cat >/dev/null 2>&1 </dev/null &");
    host.until("the server listens", |h| h.sh("box", "netstat -ltn | grep -c :8000 || true") == "1\n");
    let endpoint = format!("unix://{}/gw.sock", host.dir().display());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let local = tokio::task::LocalSet::new();
    let ended = local.block_on(&runtime, async {
        let client = Client::connect(&endpoint).await.unwrap();
        static RUNNING: AtomicU32 = AtomicU32::new(0);
        let mut streams = Vec::new();
        for _ in 0..EXECS {
            streams.push(tokio::task::spawn_local(exec(client.clone(), &RUNNING)));
        }
        for _ in 0..FORWARDS {
            streams.push(tokio::task::spawn_local(forward(client.clone(), &RUNNING)));
        }
        let all_run = async {
            while RUNNING.load(Ordering::SeqCst) < EXECS + FORWARDS {
                assert!(
                    !streams.iter().any(|stream| stream.is_finished()),
                    "a stream ended before the suspend"
                );
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(LIMIT, all_run).await.expect("not all of them began");
        client.suspend("box", v1::Keep::Disk).await.unwrap();
        let mut ended = Vec::new();
        for stream in streams {
            ended.push(tokio::time::timeout(LIMIT, stream).await.expect("a stream hangs").unwrap());
        }
        ended
    });
    for error in ended {
        let told = (error.code(), error.reason(), error.next_command());
        assert_eq!(
            told,
            (Some(Code::FailedPrecondition), Some("SUSPENDED"), Some("torpor resume box")),
            "{error}"
        );
    }
    host.ok(&["wait", "box", "--for", "suspended"]);
    host.ok(&["resume", "box"]);
    assert_eq!(host.sh("box", "ps | grep -c -e '[s]leep 4242' -e '[n]c -ll' || true"), "0\n");
}
