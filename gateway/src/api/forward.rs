//! Forward: one connection between a client and a port of a sandbox. Nothing is kept in between.

use std::pin::Pin;

use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use torpor_proto::{
    agent::v1 as agent,
    v1::{self, forward_input, forward_output},
};

use super::{Shared, exec::left_ready, to_status};
use crate::{
    error::{ApiError, Code},
    expose::port_of,
    forward::{self, Piece},
};

/// Messages under way to the client.
const BUFFER: usize = 4;

type Outputs = Pin<Box<dyn Stream<Item = Result<v1::ForwardOutput, Status>> + Send>>;

/// Opens a connection and carries it.
pub async fn forward(service: Shared, mut input: Streaming<v1::ForwardInput>) -> Result<Outputs, Status> {
    let start = match input.message().await? {
        Some(v1::ForwardInput { kind: Some(forward_input::Kind::Start(start)) }) => start,
        _ => return Err(to_status(ApiError::invalid("start", "the first message must say which port"))),
    };
    let port = port_of(start.port).map_err(to_status)?;
    let (record, channel, session) = service.connect(&start.sandbox).await.map_err(to_status)?;
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
        let forward::Forward { input: to_agent, mut output } = opened;
        let mut up = Box::pin(upwards(input, to_agent));
        let (mut up_ended, mut closed) = (false, false);
        let last = loop {
            let piece = tokio::select! {
                in_order = &mut up, if !up_ended => {
                    up_ended = true;
                    if in_order && !closed { continue } else { break None }
                }
                piece = forward::next(&mut output), if !closed => piece,
                () = session.cancelled() => break Some(left_ready(&service, &record).await),
                () = service.end.cancelled() => break Some(to_status(crate::store::StoreError::Closed.into())),
                () = out.closed() => break None,
            };
            let kind = match piece {
                Some(Piece::Data(data)) => forward_output::Kind::Data(data),
                Some(Piece::Close) => forward_output::Kind::Close(v1::ForwardClose {}),
                None if session.is_cancelled() => break Some(left_ready(&service, &record).await),
                None => {
                    let text = format!("the connection to port {port} of sandbox '{}' broke", record.name);
                    break Some(to_status(
                        ApiError::new(Code::Aborted, "CONNECTION_BROKE", text).about(&record),
                    ));
                }
            };
            closed = matches!(kind, forward_output::Kind::Close(_));
            if out.send(Ok(v1::ForwardOutput { kind: Some(kind) })).await.is_err() || (closed && up_ended) {
                break None;
            }
        };
        if let Some(status) = last {
            // The client may have gone.
            let _ = out.send(Err(status)).await;
        }
    });
    Ok(Box::pin(ReceiverStream::new(outputs)))
}

/// From the client into the sandbox. False: the client went away, and what drops `to_agent` resets the connection there.
async fn upwards(
    mut input: Streaming<v1::ForwardInput>,
    to_agent: mpsc::Sender<agent::ForwardInput>,
) -> bool {
    loop {
        let kind = match input.message().await.ok().flatten().map(|message| message.kind) {
            Some(Some(forward_input::Kind::Data(data))) => agent::forward_input::Kind::Data(data),
            Some(Some(forward_input::Kind::Close(_))) => {
                agent::forward_input::Kind::Close(agent::ForwardClose {})
            }
            // A second start, or something newer than this gateway.
            Some(_) => continue,
            None => return false,
        };
        let last = matches!(kind, agent::forward_input::Kind::Close(_));
        let sent = to_agent.send(agent::ForwardInput { kind: Some(kind) }).await;
        // A stream that is gone: the other direction tells how it ended.
        if last || sent.is_err() {
            return true;
        }
    }
}
