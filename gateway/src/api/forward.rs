//! Forward: one connection between a client and a port of a sandbox. Nothing is kept in between.

use std::pin::Pin;

use futures::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use torpor_proto::{
    agent::v1 as agent,
    v1::{self, forward_input, forward_output},
};

use super::{
    Shared,
    exec::{left_ready, see_through},
    to_status,
};
use crate::{
    access::Caller,
    error::{ApiError, Code},
    expose::port_of,
    forward::{self, Piece},
};

/// Messages under way to the client.
const BUFFER: usize = 4;

/// What a client sends.
pub trait Inputs: Stream<Item = Result<v1::ForwardInput, Status>> + Send + Unpin + 'static {}

impl<S: Stream<Item = Result<v1::ForwardInput, Status>> + Send + Unpin + 'static> Inputs for S {}

type Output = mpsc::Sender<Result<v1::ForwardOutput, Status>>;
type Outputs = Pin<Box<dyn Stream<Item = Result<v1::ForwardOutput, Status>> + Send>>;

/// Opens a connection and carries it.
pub async fn forward(service: Shared, caller: &Caller, mut input: impl Inputs) -> Result<Outputs, Status> {
    let start = match input.next().await.transpose()? {
        Some(v1::ForwardInput { kind: Some(forward_input::Kind::Start(start)) }) => start,
        _ => return Err(ApiError::invalid("start", "the first message must say which port").into()),
    };
    let key = caller.key(&start.sandbox).await?;
    let port = port_of(start.port)?;
    let (record, channel, session) = service.connect(&key).await?;
    let opened = tokio::select! {
        opened = forward::open(channel, port) => opened,
        () = session.cancelled() => return Err(left_ready(&service, &record).await),
    };
    let opened = opened.map_err(|error| to_status(error.answer(&record, port)))?;
    let (out, outputs) = mpsc::channel(BUFFER);
    let connected = forward_output::Kind::Connected(v1::ForwardConnected { run: record.state.run.0 });
    // Cannot fail: the channel is new and has room.
    let _ = out.send(Ok(v1::ForwardOutput { kind: Some(connected) })).await;
    tokio::spawn(async move {
        let forward::Forward { input: to_agent, output } = opened;
        let work = async {
            match tokio::try_join!(upwards(input, to_agent), downwards(output, &out)) {
                Err(Broken::InSandbox) if session.is_cancelled() => Some(left_ready(&service, &record).await),
                Err(Broken::InSandbox) => {
                    let text = format!("the connection to port {port} of sandbox '{}' broke", record.name);
                    let error = ApiError::new(Code::Aborted, "CONNECTION_BROKE", text);
                    Some(to_status(error.about(&record)))
                }
                Err(Broken::AtClient) | Ok(_) => None,
            }
        };
        see_through(&service, &session, &out, work, left_ready(&service, &record)).await;
    });
    Ok(Box::pin(ReceiverStream::new(outputs)))
}

/// Which side went away before it had said all.
enum Broken {
    /// What drops the way to the agent resets the connection in the sandbox.
    AtClient,
    InSandbox,
}

/// From the client into the sandbox.
async fn upwards(mut input: impl Inputs, to_agent: mpsc::Sender<agent::ForwardInput>) -> Result<(), Broken> {
    loop {
        let kind = match input.next().await.transpose().ok().flatten().map(|message| message.kind) {
            Some(Some(forward_input::Kind::Data(data))) => agent::forward_input::Kind::Data(data),
            Some(Some(forward_input::Kind::Close(_))) => {
                agent::forward_input::Kind::Close(agent::ForwardClose {})
            }
            // A second start, or something newer than this gateway.
            Some(_) => continue,
            None => return Err(Broken::AtClient),
        };
        let last = matches!(kind, agent::forward_input::Kind::Close(_));
        let sent = to_agent.send(agent::ForwardInput { kind: Some(kind) }).await;
        // A stream that is gone: the other direction tells how it ended.
        if last || sent.is_err() {
            return Ok(());
        }
    }
}

/// From the sandbox to the client.
async fn downwards(mut output: Streaming<agent::ForwardOutput>, out: &Output) -> Result<(), Broken> {
    loop {
        let kind = match forward::next(&mut output).await {
            Some(Piece::Data(data)) => forward_output::Kind::Data(data),
            Some(Piece::Close) => forward_output::Kind::Close(v1::ForwardClose {}),
            None => return Err(Broken::InSandbox),
        };
        let last = matches!(kind, forward_output::Kind::Close(_));
        out.send(Ok(v1::ForwardOutput { kind: Some(kind) })).await.map_err(|_| Broken::AtClient)?;
        if last {
            return Ok(());
        }
    }
}
