//! Exec: the client's stream on one side, the agent's on the other, and nothing kept in between.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use futures::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use torpor_proto::{agent::v1 as agent, v1};
use torpor_sandbox::spec::{MAX_WORD, validate_environment};

use super::{Shared, to_status};
use crate::{
    access::Caller,
    error::{ApiError, Code},
    store::{Record, StoreError},
};

/// Messages under way in each direction; the rest of the back-pressure is HTTP/2's.
pub(super) const BUFFER: usize = 8;
/// Most bytes of all arguments: with the environment they fit into what Linux takes.
const ARGUMENTS: usize = 1 << 20;
/// Longest path, bytes.
const LONGEST_PATH: usize = 4095;
/// Most bytes of input in one message to the agent.
const PIECE: usize = 1 << 20;
/// SIGHUP.
const HANG_UP: i32 = 1;
/// For a last message to get through.
const LAST_WORD: std::time::Duration = std::time::Duration::from_secs(1);
/// Exit code when the timeout ended the command, as timeout(1) has it.
const TIMED_OUT: i32 = 124;

/// What a client sends.
pub trait Inputs: Stream<Item = Result<v1::ExecInput, Status>> + Send + Unpin + 'static {}

impl<S: Stream<Item = Result<v1::ExecInput, Status>> + Send + Unpin + 'static> Inputs for S {}

pub(super) type Outputs = Pin<Box<dyn Stream<Item = Result<v1::ExecOutput, Status>> + Send>>;

/// Runs one command.
pub async fn exec(service: Shared, caller: &Caller, mut input: impl Inputs) -> Result<Outputs, Status> {
    let start = match input.next().await.transpose()? {
        Some(v1::ExecInput { kind: Some(v1::exec_input::Kind::Start(start)) }) => start,
        _ => return Err(ApiError::invalid("start", "the first message must say what to run").into()),
    };
    let (sandbox, tty) = (caller.key(&start.sandbox).await?, start.tty);
    let open = Arc::new(AtomicBool::new(start.stdin));
    let (to_agent, start) = (mpsc::channel(BUFFER), convert_start(start)?);
    let (record, channel, session) = service.connect(&sandbox).await?;
    let (tx, rx) = to_agent;
    // Cannot fail: the channel is new and has room.
    let _ = tx.send(agent::ExecInput { kind: Some(agent::exec_input::Kind::Start(start)) }).await;
    let mut client = agent::agent_client::AgentClient::new(channel);
    let opened = tokio::select! {
        opened = client.exec(ReceiverStream::new(rx)) => opened,
        () = session.cancelled() => return Err(left_ready(&service, &record).await),
    };
    let mut output = opened.map_err(|status| agent_failed(&record, &status))?.into_inner();

    let (out, outputs) = mpsc::channel(BUFFER);
    tokio::spawn(async move {
        let (hang_up, hung_up) = (tx.clone(), Arc::new(AtomicBool::new(false)));
        let pump = tokio::spawn(pump_input(input, tx, open.clone(), hung_up.clone()));
        loop {
            let next = tokio::select! {
                next = output.next() => next,
                () = session.cancelled() => {
                    // The last words of a command that was ended on purpose don't matter any more.
                    let _ = out.send(Err(left_ready(&service, &record).await)).await;
                    break;
                }
                () = out.closed() => {
                    // A terminal that went away ends what ran on it. So does an input that has not ended: half of it must not be
                    // taken for the whole, which its end would say. Other commands go on, their output is dropped.
                    let ends = tty || open.load(Ordering::SeqCst);
                    if ends && !hung_up.swap(true, Ordering::SeqCst) {
                        let signal = agent::exec_input::Kind::Signal(HANG_UP);
                        let sent = hang_up.send(agent::ExecInput { kind: Some(signal) });
                        let _ = tokio::time::timeout(LAST_WORD, sent).await;
                        let _ = tokio::time::timeout(LAST_WORD, output.next()).await;
                    }
                    break;
                }
                () = service.end.cancelled() => {
                    let _ = out.send(Err(StoreError::Closed.into())).await;
                    break;
                }
            };
            let (message, last) = match next {
                Some(Ok(message)) => convert_output(message, &record),
                // A broken stream and a suspend come together: say which it was.
                Some(Err(_)) | None if session.is_cancelled() => {
                    (Err(left_ready(&service, &record).await), true)
                }
                Some(Err(status)) => (Err(agent_failed(&record, &status)), true),
                None => (Err(Status::unavailable("the agent ended the stream without an exit code")), true),
            };
            if out.send(message).await.is_err() || last {
                break;
            }
        }
        pump.abort();
    });
    Ok(Box::pin(ReceiverStream::new(outputs)))
}

/// `open`: the command has an input that has not ended. `hung_up`: it was told that its caller is gone, which it is once.
async fn pump_input(
    input: impl Inputs,
    to_agent: mpsc::Sender<agent::ExecInput>,
    open: Arc<AtomicBool>,
    hung_up: Arc<AtomicBool>,
) {
    let seen = open.clone();
    let input = input.inspect(move |message| {
        if let Ok(v1::ExecInput { kind: Some(v1::exec_input::Kind::StdinClose(_)) }) = message {
            seen.store(false, Ordering::SeqCst);
        }
    });
    if !pass_input(input, &to_agent).await && open.load(Ordering::SeqCst) {
        // It broke off, or its rights have ended: the command is told so, and not that all has come.
        if !hung_up.swap(true, Ordering::SeqCst) {
            let signal = agent::exec_input::Kind::Signal(HANG_UP);
            let _ = to_agent.send(agent::ExecInput { kind: Some(signal) }).await;
        }
        to_agent.closed().await;
        return;
    }
    open.store(false, Ordering::SeqCst);
    // The client has closed its side: so does the command's stdin. The sender is kept until the command ends, since
    // dropping it would look like a client that went away.
    let close = agent::exec_input::Kind::StdinClose(agent::StdinClose {});
    if to_agent.send(agent::ExecInput { kind: Some(close) }).await.is_ok() {
        to_agent.closed().await;
    }
}

/// Hands over what the client sends, until it or the command ends; false when it broke off before its end.
pub(super) async fn pass_input(mut input: impl Inputs, to_agent: &mpsc::Sender<agent::ExecInput>) -> bool {
    use v1::exec_input::Kind;
    while let Some(message) = input.next().await {
        let Ok(message) = message else { return false };
        let kind = match message.kind {
            Some(Kind::Stdin(mut data)) => {
                while data.len() > PIECE {
                    let piece = agent::exec_input::Kind::Stdin(data.split_to(PIECE));
                    if to_agent.send(agent::ExecInput { kind: Some(piece) }).await.is_err() {
                        return true;
                    }
                }
                agent::exec_input::Kind::Stdin(data)
            }
            Some(Kind::StdinClose(_)) => agent::exec_input::Kind::StdinClose(agent::StdinClose {}),
            Some(Kind::Resize(size)) => {
                agent::exec_input::Kind::Resize(agent::WindowSize { cols: size.cols, rows: size.rows })
            }
            Some(Kind::Signal(signal)) => agent::exec_input::Kind::Signal(signal),
            // A second start, or something newer than this gateway.
            Some(Kind::Start(_) | Kind::Attach(_)) | None => continue,
        };
        if to_agent.send(agent::ExecInput { kind: Some(kind) }).await.is_err() {
            return true;
        }
    }
    true
}

fn convert_start(start: v1::ExecStart) -> Result<agent::ExecStart, ApiError> {
    if start.argv.first().is_none_or(String::is_empty) {
        return Err(ApiError::invalid("argv", "a command is needed"));
    }
    if start.argv.iter().any(|a| a.contains('\0')) {
        return Err(ApiError::invalid("argv", "an argument holds a NUL byte"));
    }
    if start.argv.iter().any(|argument| argument.len() > MAX_WORD) {
        return Err(ApiError::invalid("argv", format!("an argument has more than {MAX_WORD} bytes")));
    }
    if start.argv.iter().map(|argument| argument.len() + 1).sum::<usize>() > ARGUMENTS {
        return Err(ApiError::invalid("argv", format!("more than {ARGUMENTS} bytes; send them as input")));
    }
    if start.workdir.len() > LONGEST_PATH || start.workdir.contains('\0') {
        return Err(ApiError::invalid(
            "workdir",
            format!("it has a NUL byte or more than {LONGEST_PATH} bytes"),
        ));
    }
    let environment: std::collections::BTreeMap<_, _> = start.environment.into_iter().collect();
    validate_environment("environment", &environment)?;
    super::convert::given(start.timeout, "timeout")?;
    Ok(agent::ExecStart {
        argv: start.argv,
        environment: environment.into_iter().collect(),
        workdir: start.workdir,
        user: start.user,
        stdin: start.stdin,
        tty: start.tty,
        size: start.size.map(|s| agent::WindowSize { cols: s.cols, rows: s.rows }),
        timeout: start.timeout,
        kill_grace: None,
    })
}

/// The message for the client, and whether it is the last one.
fn convert_output(message: agent::ExecOutput, record: &Record) -> (Result<v1::ExecOutput, Status>, bool) {
    use agent::exec_output::Kind;
    let (kind, last) = match message.kind {
        Some(Kind::Stdout(data)) => (v1::exec_output::Kind::Stdout(data), false),
        Some(Kind::Stderr(data)) => (v1::exec_output::Kind::Stderr(data), false),
        Some(Kind::Started(started)) => {
            let started = v1::ExecStarted { pid: started.pid, run: record.state.run.0 };
            (v1::exec_output::Kind::Started(started), false)
        }
        Some(Kind::Exit(exit)) => {
            let code = if exit.timed_out { TIMED_OUT } else { exit.code };
            let exit = v1::ExecExit { code, signal: exit.signal, timed_out: exit.timed_out };
            (v1::exec_output::Kind::Exit(exit), true)
        }
        Some(Kind::Error(error)) => return (Err(not_started(&error, record)), true),
        // Something newer than this gateway.
        None => return (Ok(v1::ExecOutput { kind: None }), false),
    };
    (Ok(v1::ExecOutput { kind: Some(kind) }), last)
}

fn not_started(error: &agent::ExecError, record: &Record) -> Status {
    use agent::exec_error::Kind;
    let (code, reason) = match error.kind() {
        Kind::NotFound => (Code::NotFound, "COMMAND_NOT_FOUND"),
        Kind::NotExecutable => (Code::InvalidArgument, "COMMAND_NOT_EXECUTABLE"),
        Kind::NoSuchUser => (Code::InvalidArgument, "NO_SUCH_USER"),
        Kind::NoSuchDirectory => (Code::InvalidArgument, "NO_SUCH_DIRECTORY"),
        Kind::Invalid => (Code::InvalidArgument, "INVALID_ARGUMENT"),
        Kind::Other | Kind::Unspecified => (Code::Internal, "EXEC_FAILED"),
    };
    to_status(ApiError::new(code, reason, error.message.clone()).with("sandbox", &record.name))
}

/// Sees a stream to its end: what `work` comes to, unless the session ends before that, of which `left` tells, the gateway
/// does, or the client goes. A status is the stream's last word.
pub(super) async fn see_through<T>(
    service: &Shared,
    session: &CancellationToken,
    out: &mpsc::Sender<Result<T, Status>>,
    work: impl Future<Output = Option<Status>>,
    left: impl Future<Output = Status>,
) {
    let last = tokio::select! {
        last = work => last,
        () = session.cancelled() => Some(left.await),
        () = service.end.cancelled() => Some(StoreError::Closed.into()),
        () = out.closed() => None,
    };
    if let Some(status) = last {
        // The client may have gone, or not read.
        let _ = tokio::time::timeout(LAST_WORD, out.send(Err(status))).await;
    }
}

/// What to say when the sandbox left Ready under a session.
pub async fn left_ready(service: &Shared, record: &Record) -> Status {
    match service.store.get(record.id.as_str()).await {
        Ok(latest) => to_status(ApiError::not_ready(&latest)),
        Err(error) => to_status(error.into()),
    }
}

/// What to say when the agent could not do it.
pub fn agent_failed(record: &Record, status: &Status) -> Status {
    let code = match status.code() {
        tonic::Code::InvalidArgument => Code::InvalidArgument,
        tonic::Code::FailedPrecondition => Code::FailedPrecondition,
        tonic::Code::ResourceExhausted => Code::ResourceExhausted,
        _ => Code::Unavailable,
    };
    let message = format!("the agent of sandbox '{}': {}", record.name, status.message());
    to_status(
        ApiError::new(code, "AGENT_FAILED", message)
            .about(record)
            .with("next", format!("torpor get {}", record.name)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_that_linux_would_not_take_are_refused_by_their_field() {
        let refused = |start: v1::ExecStart| convert_start(start).unwrap_err().metadata["field"].clone();
        let argv = |words: &[&str]| v1::ExecStart {
            argv: words.iter().map(|word| (*word).to_owned()).collect(),
            ..v1::ExecStart::default()
        };
        let long = "x".repeat(MAX_WORD);
        assert!(convert_start(argv(&["echo", &long])).is_ok());
        for bad in [vec![], vec![""], vec!["a\0"], vec!["echo", &format!("{long}x")], vec![long.as_str(); 9]]
        {
            assert_eq!(refused(argv(&bad)), "argv", "{} words", bad.len());
        }
        let workdir = v1::ExecStart { workdir: "/x".repeat(3000), ..argv(&["id"]) };
        assert_eq!(refused(workdir), "workdir");
        let environment = v1::ExecStart { environment: [("A".to_owned(), long)].into(), ..argv(&["id"]) };
        assert_eq!(refused(environment), "environment");
    }
}
