//! SSH sessions and their connections.

use std::{pin::Pin, time::Duration};

use futures::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;
use torpor_proto::{
    agent::v1::{self as agent, exec_input},
    v1::{self, forward_output, ssh_input},
};

use super::{
    Shared,
    exec::{agent_failed, left_ready, see_through},
    to_status,
};
use crate::{
    access::Caller,
    error::{ApiError, Code},
    ssh::{self, Piece, Said},
    store::Record,
};

/// Messages under way to the client.
const BUFFER: usize = 4;

type Output = mpsc::Sender<Result<v1::ForwardOutput, Status>>;
type Outputs = Pin<Box<dyn Stream<Item = Result<v1::ForwardOutput, Status>> + Send>>;

/// Makes a session.
pub async fn create(
    service: &Shared,
    caller: &Caller,
    request: v1::CreateSshSessionRequest,
) -> Result<v1::SshSession, Status> {
    let named = caller.key(&request.sandbox).await?;
    let key = ssh::key_of(&request.public_key)?;
    let lifetime = match request.lifetime.map(Duration::try_from) {
        None => ssh::USUAL_LIFETIME,
        Some(Ok(lifetime)) if !lifetime.is_zero() && lifetime <= ssh::LONGEST_LIFETIME => lifetime,
        Some(_) => {
            let problem = "it must be more than nothing and at most a day";
            return Err(ApiError::invalid("lifetime", problem).into());
        }
    };
    let (record, channel, ready) = service.connect(&named).await?;
    let host_key = tokio::select! {
        prepared = ssh::prepare(&record, channel) => match prepared {
            Err(_) if ready.is_cancelled() => return Err(left_ready(service, &record).await),
            prepared => prepared?,
        },
        () = ready.cancelled() => return Err(left_ready(service, &record).await),
    };
    let (token, expires) = service.sessions.ssh.create(&record, key, lifetime, &ready)?;
    Ok(v1::SshSession { sandbox_id: record.id.to_string(), token, expires: Some(expires.into()), host_key })
}

fn unknown() -> ApiError {
    let text = "there is no such SSH session: it was revoked, ran out, or its sandbox left Ready";
    ApiError::new(Code::NotFound, "SSH_SESSION_NOT_FOUND", text)
}

/// The session of a token, when the caller may use its sandbox.
async fn session(service: &Shared, caller: &Caller, token: &str) -> Result<ssh::Session, Status> {
    let session = service.sessions.ssh.get(token).ok_or_else(unknown)?;
    caller.key(session.sandbox.as_str()).await?;
    Ok(session)
}

/// Ends a session.
pub async fn revoke(
    service: &Shared,
    caller: &Caller,
    request: v1::RevokeSshSessionRequest,
) -> Result<v1::RevokeSshSessionResponse, Status> {
    match session(service, caller, &request.token).await {
        Ok(_) => Ok(v1::RevokeSshSessionResponse { revoked: service.sessions.ssh.revoke(&request.token) }),
        Err(status) if status.code() == tonic::Code::NotFound && request.allow_missing => {
            Ok(v1::RevokeSshSessionResponse { revoked: false })
        }
        Err(status) => Err(status),
    }
}

/// Carries one connection.
pub async fn connect(
    service: Shared,
    caller: &Caller,
    mut input: impl Stream<Item = Result<v1::SshInput, Status>> + Send + Unpin + 'static,
) -> Result<Outputs, Status> {
    let token = match input.next().await.transpose()? {
        Some(v1::SshInput { kind: Some(ssh_input::Kind::Session(token)) }) => token,
        _ => return Err(ApiError::invalid("session", "the first message must hold its token").into()),
    };
    let session = session(&service, caller, &token).await?;
    let (record, channel, _) = service.connect(session.sandbox.as_str()).await?;
    let opened = tokio::select! {
        opened = ssh::open(channel, &session) => opened,
        () = session.end.cancelled() => return Err(ended(&service, &record).await),
    };
    let opened = opened.map_err(|status| agent_failed(&record, &status))?;
    let (out, outputs) = mpsc::channel(BUFFER);
    let connected = forward_output::Kind::Connected(v1::ForwardConnected { run: record.state.run.0 });
    // Cannot fail: the channel is new and has room.
    let _ = out.send(Ok(v1::ForwardOutput { kind: Some(connected) })).await;
    tokio::spawn(async move {
        let ssh::Connection { input: to_agent, output } = opened;
        // With its end the server sees its client go, and ends.
        let pump = AbortOnDropHandle::new(tokio::spawn(upwards(input, to_agent)));
        let work = async {
            let _pump = pump;
            match downwards(output, &record, &out).await {
                Err(_) if session.end.is_cancelled() => Some(ended(&service, &record).await),
                Err(error) => Some(to_status(error)),
                Ok(()) => None,
            }
        };
        see_through(&service, &session.end, &out, work, ended(&service, &record)).await;
    });
    Ok(Box::pin(ReceiverStream::new(outputs)))
}

/// It was revoked, or the sandbox left Ready.
pub(super) async fn ended(service: &Shared, record: &Record) -> Status {
    match service.store.get(record.id.as_str()).await {
        Ok(latest) if latest.state.phase == torpor_sandbox::Phase::Ready => to_status(
            ApiError::new(Code::Aborted, "SSH_SESSION_REVOKED", "the SSH session was revoked").about(record),
        ),
        _ => left_ready(service, record).await,
    }
}

async fn upwards(
    mut input: impl Stream<Item = Result<v1::SshInput, Status>> + Send + Unpin + 'static,
    to_agent: mpsc::Sender<agent::ExecInput>,
) {
    while let Some(Ok(message)) = input.next().await {
        let kind = match message.kind {
            Some(ssh_input::Kind::Data(data)) => exec_input::Kind::Stdin(data),
            Some(ssh_input::Kind::Close(_)) => exec_input::Kind::StdinClose(agent::StdinClose {}),
            // A second token, or something newer than this gateway.
            Some(ssh_input::Kind::Session(_)) | None => continue,
        };
        if to_agent.send(agent::ExecInput { kind: Some(kind) }).await.is_err() {
            return;
        }
    }
}

async fn downwards(
    mut output: tonic::Streaming<agent::ExecOutput>,
    record: &Record,
    out: &Output,
) -> Result<(), ApiError> {
    let mut said = Said::default();
    loop {
        let kind = match ssh::next(&mut output, &mut said, record).await? {
            Piece::Data(data) => forward_output::Kind::Data(data),
            Piece::End => forward_output::Kind::Close(v1::ForwardClose {}),
        };
        let last = matches!(kind, forward_output::Kind::Close(_));
        if out.send(Ok(v1::ForwardOutput { kind: Some(kind) })).await.is_err() || last {
            return Ok(());
        }
    }
}
