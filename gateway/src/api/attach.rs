//! Attach: the main command's input by the agent, its output by the log that the gateway keeps.

use std::{pin::pin, time::Duration};

use futures::StreamExt as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, transport::Channel};
use torpor_proto::{
    agent::v1 as agent,
    v1::{self, exec_input::Kind, exec_output},
};
use torpor_sandbox::Phase;

use super::{
    Shared, convert,
    exec::{self, Inputs, Outputs},
    logs, to_status,
};
use crate::{
    access::Caller,
    error::{ApiError, Code},
    store::{Record, StoreError},
};

/// Between two looks for the word of a command's end in the sandbox's phase.
const LOOK: Duration = Duration::from_millis(100);
/// For the last output, when the sandbox leaves Ready.
const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// Connects a client to the main command of a Ready sandbox.
pub async fn attach(service: Shared, caller: &Caller, mut input: impl Inputs) -> Result<Outputs, Status> {
    let start = match input.next().await.transpose()? {
        Some(v1::ExecInput { kind: Some(Kind::Attach(start)) }) => start,
        _ => return Err(ApiError::invalid("attach", "the first message must say what to attach to").into()),
    };
    let sandbox = caller.key(&start.sandbox).await?;
    let (record, channel, session) = service.connect(&sandbox).await?;
    check(&record, &start)?;
    let (out, outputs) = mpsc::channel(exec::BUFFER);
    // It is there: an empty answer would look like a slow one.
    let started = v1::ExecStarted { pid: 0, run: record.state.run.0 };
    let _ = out.send(Ok(output(exec_output::Kind::Started(started)))).await;
    tokio::spawn(async move {
        let feeding = async {
            let fed = if start.stdin {
                feed(channel, start.size, input, &session).await
            } else {
                // A client that only watches has nothing to say.
                while let Some(Ok(_)) = input.next().await {}
                Ok(())
            };
            match fed {
                // The end of the input leaves the output.
                Ok(()) => std::future::pending().await,
                Err(status) => exec::agent_failed(&record, &status),
            }
        };
        let last = tokio::select! {
            last = follow(&service, &record, &start, &session, &out) => Some(last),
            status = feeding => Some(Err(status)),
            () = service.end.cancelled() => Some(Err(StoreError::Closed.into())),
            () = out.closed() => None,
        };
        if let Some(last) = last {
            // The client may not read.
            let _ = tokio::time::timeout(LAST_OUTPUT, out.send(last)).await;
        }
    });
    Ok(Box::pin(ReceiverStream::new(outputs)))
}

fn check(record: &Record, start: &v1::AttachStart) -> Result<(), ApiError> {
    let refused = |reason, problem: &str, next: String| {
        let text = format!("sandbox '{}' {problem}", record.name);
        Err(ApiError::new(Code::FailedPrecondition, reason, text).about(record).with("next", next))
    };
    if record.spec.command.is_empty() {
        return refused("NO_MAIN_COMMAND", "has no main command", format!("torpor shell {}", record.name));
    }
    if start.stdin && !record.spec.stdin {
        return refused(
            "NO_MAIN_INPUT",
            "was made without an input for its main command (`create --stdin`)",
            format!("torpor attach {}", record.name),
        );
    }
    Ok(())
}

fn output(kind: exec_output::Kind) -> v1::ExecOutput {
    v1::ExecOutput { kind: Some(kind) }
}

/// Hands over input, sizes and signals until the client or the command ends, or the session does. An error where a client
/// would go on typing to nobody.
async fn feed(
    channel: Channel,
    size: Option<v1::WindowSize>,
    input: impl Inputs,
    session: &CancellationToken,
) -> Result<(), Status> {
    let (to_agent, inputs) = mpsc::channel(exec::BUFFER);
    if let Some(v1::WindowSize { cols, rows }) = size {
        let resize = agent::exec_input::Kind::Resize(agent::WindowSize { cols, rows });
        // Cannot fail: the channel is new and has room.
        let _ = to_agent.send(agent::ExecInput { kind: Some(resize) }).await;
    }
    let mut client = agent::agent_client::AgentClient::new(channel);
    let passing = async move { exec::pass_input(input, &to_agent).await };
    let attached = async move {
        match client.attach(ReceiverStream::new(inputs)).await {
            // The output tells the end of a command that takes no input any more.
            Err(status) if status.code() != tonic::Code::FailedPrecondition => Err(status),
            _ => Ok(()),
        }
    };
    let (passing, attached) = (pin!(passing), pin!(attached));
    tokio::select! {
        ended = attached => ended,
        ended = async { passing.await; std::future::pending().await } => ended,
        () = session.cancelled() => Ok(()),
    }
}

/// Passes on the output to its end; what the client is told at last.
async fn follow(
    service: &Shared,
    record: &Record,
    start: &v1::AttachStart,
    session: &CancellationToken,
    out: &mpsc::Sender<Result<v1::ExecOutput, Status>>,
) -> Result<v1::ExecOutput, Status> {
    let request =
        v1::LogsRequest { tail_lines: start.tail_lines, follow: true, ..v1::LogsRequest::default() };
    let since = start.only_new.then(std::time::SystemTime::now);
    let (chunks, mut pieces) = mpsc::channel(exec::BUFFER);
    let passing = async {
        while let Some(Ok(v1::LogChunk { data, stderr, .. })) = pieces.recv().await {
            let kind = if stderr { exec_output::Kind::Stderr(data) } else { exec_output::Kind::Stdout(data) };
            if out.send(Ok(output(kind))).await.is_err() {
                return;
            }
        }
    };
    let over = async {
        session.cancelled().await;
        tokio::time::sleep(LAST_OUTPUT).await;
    };
    // Takes the sending end along, so that the passing ends too.
    let reading = async move { logs::main_output(service, record, &request, since, &chunks).await };
    tokio::select! {
        _ = async { tokio::join!(reading, passing) } => {}
        () = over => {}
    }
    ended(service, record).await
}

/// The command's exit when the sandbox was completed by it, else where the sandbox went.
async fn ended(service: &Shared, record: &Record) -> Result<v1::ExecOutput, Status> {
    let (name, run) = (&record.name, record.state.run);
    let aborted = |reason, text: String, next: &str| {
        to_status(ApiError::new(Code::Aborted, reason, text).with("next", format!("torpor {next} {name}")))
    };
    let news = service.main_logs.of(&record.id).news();
    let latest = loop {
        let latest =
            service.store.get(record.id.as_str()).await.map_err(ApiError::from).map_err(to_status)?;
        if latest.state.phase != Phase::Ready || latest.state.run != run {
            break latest;
        }
        if !news.borrow().ended(run) {
            let text = format!("the output of sandbox '{name}' ended, and the sandbox goes on");
            return Err(aborted("OUTPUT_ENDED", text, "logs"));
        }
        // The guest puts itself down, which takes as long as its disk does.
        tokio::time::sleep(LOOK).await;
    };
    match (latest.state.phase, convert::exit_code(&latest.state)) {
        (Phase::Completed, Some(code)) => {
            Ok(output(exec_output::Kind::Exit(v1::ExecExit { code, ..v1::ExecExit::default() })))
        }
        (Phase::Ready, _) => {
            let text = format!("sandbox '{name}' was started again meanwhile");
            Err(aborted("RESTARTED", text, "attach"))
        }
        _ => Err(to_status(ApiError::not_ready(&latest))),
    }
}
