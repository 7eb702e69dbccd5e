//! Commands in a sandbox, and connections into it.

use std::pin::Pin;

use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use tonic::{Status, Streaming};
use torpor_proto::{
    openshell::v1::{self as os, exec_sandbox_event, exec_sandbox_input, tcp_forward_frame},
    v1::{self, exec_input, exec_output, forward_input, forward_output},
};
use torpor_sandbox::SandboxId;

use super::{Events, OpenShellApi, call::Call, services};
use crate::{
    access::Caller,
    api::{exec, forward, ssh::ended},
    error::ApiError,
};

/// As shells have it: a command that isn't there, and one that can't be executed.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;
/// Largest piece of stdin that is sent at once, bytes.
const PIECE: usize = 64 << 10;

fn input(kind: exec_input::Kind) -> Result<v1::ExecInput, Status> {
    Ok(v1::ExecInput { kind: Some(kind) })
}

/// A command of theirs, in our words. It is run as it is, without a shell around it.
async fn start(
    api: &OpenShellApi,
    call: &Call,
    from: os::ExecSandboxRequest,
    stdin: bool,
) -> Result<(v1::ExecStart, Caller), ApiError> {
    let named = call.sandbox(&api.service, from.workspace_scope, &from.sandbox).await?;
    if from.command.is_empty() {
        return Err(ApiError::invalid("command", "a command is needed"));
    }
    let size =
        (from.cols > 0 && from.rows > 0).then_some(v1::WindowSize { cols: from.cols, rows: from.rows });
    let start = v1::ExecStart {
        sandbox: named.key,
        argv: from.command,
        environment: from.environment.into_iter().collect(),
        workdir: from.workdir,
        stdin,
        tty: from.tty,
        size,
        timeout: from.execution_timeout,
        ..v1::ExecStart::default()
    };
    Ok((start, call.caller.clone().in_workspace(&named.workspace)))
}

/// What came of it.
fn outcome(code: i32) -> os::ExecSandboxEvent {
    let exit = os::ExecSandboxExit { exit_code: code };
    os::ExecSandboxEvent { payload: Some(exec_sandbox_event::Payload::Exit(exit)) }
}

fn output(from: v1::ExecOutput) -> Option<os::ExecSandboxEvent> {
    use exec_sandbox_event::Payload;
    let payload = match from.kind? {
        exec_output::Kind::Stdout(data) => Payload::Stdout(os::ExecSandboxStdout { data }),
        exec_output::Kind::Stderr(data) => Payload::Stderr(os::ExecSandboxStderr { data }),
        exec_output::Kind::Exit(exit) => return Some(outcome(exit.code)),
        exec_output::Kind::Started(_) => return None,
    };
    Some(os::ExecSandboxEvent { payload: Some(payload) })
}

/// A command that could not be started, as a shell would say it; none: the call itself failed.
fn not_started(status: &Status) -> Option<Vec<os::ExecSandboxEvent>> {
    use tonic_types::StatusExt as _;
    let reason = status.get_error_details().error_info().map(|info| info.reason.clone())?;
    let code = match reason.as_str() {
        "COMMAND_NOT_FOUND" => NOT_FOUND,
        "COMMAND_NOT_EXECUTABLE" => NOT_EXECUTABLE,
        _ => return None,
    };
    let data = Bytes::from(format!("{}\n", status.message()));
    let said = exec_sandbox_event::Payload::Stderr(os::ExecSandboxStderr { data });
    Some(vec![os::ExecSandboxEvent { payload: Some(said) }, outcome(code)])
}

async fn run(
    api: &OpenShellApi,
    caller: &Caller,
    inputs: impl Stream<Item = Result<v1::ExecInput, Status>> + Send + 'static,
) -> Result<Events<os::ExecSandboxEvent>, Status> {
    let outputs = exec::exec(api.service.clone(), caller, Box::pin(inputs)).await?;
    let events = outputs.flat_map(|output_or_end| {
        let events: Vec<Result<_, Status>> = match output_or_end {
            Ok(message) => output(message).map(Ok).into_iter().collect(),
            Err(status) => match not_started(&status) {
                Some(events) => events.into_iter().map(Ok).collect(),
                None => vec![Err(status)],
            },
        };
        stream::iter(events)
    });
    Ok(Box::pin(events))
}

/// A command whose whole stdin is there from the beginning.
pub async fn exec(
    api: &OpenShellApi,
    call: Call,
    mut message: os::ExecSandboxRequest,
) -> Result<Events<os::ExecSandboxEvent>, Status> {
    let data = std::mem::take(&mut message.stdin);
    // A terminal without an input side would end at once.
    let (start, caller) = start(api, &call, message, !data.is_empty()).await?;
    let mut inputs = vec![input(exec_input::Kind::Start(start))];
    let pieces = data.chunks(PIECE).map(|piece| input(exec_input::Kind::Stdin(data.slice_ref(piece))));
    inputs.extend(pieces);
    inputs.push(input(exec_input::Kind::StdinClose(v1::StdinClose {})));
    run(api, &caller, stream::iter(inputs)).await
}

/// A command whose client goes on writing.
pub async fn interactive(
    api: &OpenShellApi,
    call: Call,
    mut inputs: Streaming<os::ExecSandboxInput>,
) -> Result<Events<os::ExecSandboxEvent>, Status> {
    use exec_sandbox_input::Payload;
    let mut first = match inputs.message().await?.and_then(|message| message.payload) {
        Some(Payload::Start(start)) => start,
        _ => return Err(ApiError::invalid("start", "the first message must say what to run").into()),
    };
    let data = std::mem::take(&mut first.stdin);
    let (start, caller) = start(api, &call, first, true).await?;
    let mut begin = vec![input(exec_input::Kind::Start(start))];
    if !data.is_empty() {
        begin.push(input(exec_input::Kind::Stdin(data)));
    }
    let rest = inputs.filter_map(async |message| {
        let kind = match message.map(|message| message.payload) {
            Ok(Some(Payload::Stdin(data))) => exec_input::Kind::Stdin(data),
            Ok(Some(Payload::Resize(size))) => {
                exec_input::Kind::Resize(v1::WindowSize { cols: size.cols, rows: size.rows })
            }
            // A second start, or something newer than this gateway.
            Ok(Some(Payload::Start(_)) | None) => return None,
            Err(status) => return Some(Err(status)),
        };
        Some(input(kind))
    });
    run(api, &caller, stream::iter(begin).chain(rest)).await
}

/// Which port of the sandbox is meant.
async fn port(api: &OpenShellApi, id: &SandboxId, init: &os::TcpForwardInit) -> Result<u32, ApiError> {
    use os::tcp_forward_init::Target;
    match &init.target {
        Some(Target::Tcp(tcp)) => {
            if !["", "localhost", "127.0.0.1", "::1"].contains(&tcp.host.as_str()) {
                let problem =
                    format!("'{}': connections go to the sandbox's own loopback", tcp.host.escape_debug());
                return Err(ApiError::invalid("tcp.host", problem));
            }
            Ok(tcp.port)
        }
        Some(Target::Ssh(_)) => Ok(super::ssh::PORT),
        None if !init.service_id.is_empty() => services::port_of_id(api, id, &init.service_id).await,
        None => Err(ApiError::invalid("target", "a port is needed, or ssh")),
    }
}

fn up(kind: forward_input::Kind) -> Result<v1::ForwardInput, Status> {
    Ok(v1::ForwardInput { kind: Some(kind) })
}

/// From the client: its end is an end, its failure a failure.
fn upwards(
    frames: Streaming<os::TcpForwardFrame>,
) -> impl Stream<Item = Result<v1::ForwardInput, Status>> + Send + 'static {
    stream::unfold(Some(frames), async |frames| {
        let mut frames = frames?;
        loop {
            match frames.message().await {
                Ok(Some(os::TcpForwardFrame { payload: Some(tcp_forward_frame::Payload::Data(data)) })) => {
                    return Some((up(forward_input::Kind::Data(data)), Some(frames)));
                }
                // A second beginning, or something newer than this gateway.
                Ok(Some(_)) => {}
                Ok(None) => return Some((up(forward_input::Kind::Close(v1::ForwardClose {})), None)),
                Err(status) => return Some((Err(status), None)),
            }
        }
    })
}

/// One connection to a port of the sandbox, or to its SSH server.
pub async fn forward_tcp(
    api: &OpenShellApi,
    call: Call,
    mut frames: Streaming<os::TcpForwardFrame>,
) -> Result<Events<os::TcpForwardFrame>, Status> {
    let init = match frames.message().await?.and_then(|frame| frame.payload) {
        Some(tcp_forward_frame::Payload::Init(init)) => init,
        _ => return Err(ApiError::invalid("init", "the first message must say where to connect to").into()),
    };
    let call = call.within(&init.workspace);
    let record = call.record(&api.service, None, &init.sandbox).await?;
    let end = api.ssh.check(&record.id, &init.authorization_token)?;
    let port = port(api, &record.id, &init).await?;
    let start = v1::ForwardStart { sandbox: record.id.to_string(), port };
    let begin = stream::iter([up(forward_input::Kind::Start(start))]);
    let inputs: Pin<Box<dyn Stream<Item = _> + Send>> = Box::pin(begin.chain(upwards(frames)));
    let outputs = forward::forward(api.service.clone(), &call.caller, inputs).await?;
    let frames = outputs.filter_map(async |output| {
        let kind = match output {
            Ok(output) => output.kind?,
            Err(status) => return Some(Err(status)),
        };
        match kind {
            forward_output::Kind::Data(data) => {
                let payload = Some(tcp_forward_frame::Payload::Data(data));
                Some(Ok(os::TcpForwardFrame { payload }))
            }
            // The end of the stream says it.
            forward_output::Kind::Connected(_) | forward_output::Kind::Close(_) => None,
        }
    });
    let Some(end) = end else { return Ok(Box::pin(frames)) };
    let service = api.service.clone();
    Ok(Box::pin(ending(Box::pin(frames), async move {
        end.cancelled().await;
        ended(&service, &record).await
    })))
}

/// The stream; when `end` is there before its own end, that is its last word: nobody takes a part for the whole.
fn ending<T: Send + 'static>(
    stream: Events<T>,
    end: impl Future<Output = Status> + Send + 'static,
) -> impl Stream<Item = Result<T, Status>> + Send {
    stream::unfold(Some((stream, Box::pin(end))), async |state| {
        let (mut stream, mut end) = state?;
        tokio::select! {
            biased;
            next = stream.next() => Some((next?, Some((stream, end)))),
            status = &mut end => Some((Err(status), None)),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{api::to_status, error::Code};

    #[tokio::test]
    async fn a_connection_whose_session_ends_says_so() {
        let open: Events<u8> = Box::pin(stream::iter([Ok(1), Ok(2)]).chain(stream::pending()));
        let end = async { Status::aborted("revoked") };
        let all: Vec<_> = ending(open, end).map(|item| item.map_err(|status| status.code())).collect().await;
        assert_eq!(all, [Ok(1), Ok(2), Err(tonic::Code::Aborted)]);
        let whole: Events<u8> = Box::pin(stream::iter([Ok(1)]));
        let all: Vec<_> = ending(whole, std::future::pending()).map(Result::unwrap).collect().await;
        assert_eq!(all, [1]);
    }

    #[test]
    fn a_command_that_is_not_there_ends_as_in_a_shell() {
        let status = to_status(ApiError::new(Code::NotFound, "COMMAND_NOT_FOUND", "no command 'x'"));
        let events = not_started(&status).unwrap();
        assert_eq!(events.last(), Some(&outcome(127)));
        let status = to_status(ApiError::new(Code::NotFound, "SANDBOX_NOT_FOUND", "no sandbox"));
        assert!(not_started(&status).is_none());
    }
}
