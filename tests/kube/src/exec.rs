//! Exec: a websocket whose messages name their channel by the first byte.

use std::sync::Arc;

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use http_body_util::{BodyExt as _, Empty};
use hyper::{Response, StatusCode, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, handshake::derive_accept_key, protocol::Role},
};

use crate::{
    http::Body, kubelet::Connection, lists::Query, resources::Key, status::Refusal, store::text, world::World,
};

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STATUS: u8 = 3;
/// Of version 5: the channel that follows is at its end.
const CLOSE: u8 = 255;

/// Only the agent can be run: it connects with its socket.
pub(crate) fn start(
    world: &Arc<World>,
    key: &Key,
    query: &Query,
    upgrade: OnUpgrade,
    websocket: &str,
    protocols: &str,
) -> Result<Response<Body>, Refusal> {
    let pod = world.lock().objects.get(key)?;
    let command: Vec<&str> = query.all("command").collect();
    // The agent is where the pod has it, and nowhere else.
    let agent = text(&pod, "/spec/containers/0/command/0");
    if !matches!(command.as_slice(), [program, "--connect", _] if *program == agent) {
        return Err(Refusal::bad(format!("the test's pods can't run {command:?}")));
    }
    let connection = world.kubelet.connect(text(&pod, "/metadata/uid"));
    let Some(connection) = connection else {
        return Err(Refusal::new(500, "InternalError", "container not found (\"sandbox\")", json!({})));
    };
    let offered: Vec<&str> = protocols.split(',').map(str::trim).collect();
    let known = ["v5.channel.k8s.io", "v4.channel.k8s.io"];
    let protocol = known.into_iter().find(|one| offered.contains(one));
    let protocol = protocol.ok_or_else(|| Refusal::bad("no websocket protocol in common"))?;
    tokio::spawn(async move {
        let Ok(upgraded) = upgrade.await else { return };
        let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await;
        match connection {
            Connection::Local(stream) => {
                let (read, write) = tokio::io::split(stream);
                carry(socket, read, write).await;
            }
            Connection::Process(mut child) => {
                if let (Some(read), Some(write)) = (child.stdout.take(), child.stdin.take()) {
                    carry(socket, read, write).await;
                }
            }
        }
    });
    Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header("Connection", "Upgrade")
        .header("Upgrade", "websocket")
        .header("Sec-WebSocket-Accept", derive_accept_key(websocket.as_bytes()))
        .header("Sec-WebSocket-Protocol", protocol)
        .body(Empty::<Bytes>::new().boxed())
        .map_err(|error| Refusal::bad(error.to_string()))
}

async fn carry<S>(
    socket: WebSocketStream<S>,
    mut read: impl AsyncRead + Unpin,
    mut write: impl AsyncWrite + Unpin,
) where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut out, mut input) = socket.split();
    let mut piece = vec![0; 64 << 10];
    loop {
        tokio::select! {
            message = input.next() => {
                let Some(Ok(message)) = message else { return };
                match message {
                    Message::Binary(data) if data.first() == Some(&STDIN) => {
                        let fed = write.write_all(&data[1..]).await;
                        if fed.is_err() || write.flush().await.is_err() {
                            break;
                        }
                    }
                    Message::Binary(data) if data.first() == Some(&CLOSE) => {
                        let _gone = write.shutdown().await.is_err();
                    }
                    Message::Close(_) => return,
                    _ => {}
                }
            }
            count = read.read(&mut piece) => {
                let Ok(count @ 1..) = count else { break };
                let mut data = Vec::with_capacity(count + 1);
                data.push(STDOUT);
                data.extend_from_slice(&piece[..count]);
                if out.send(Message::Binary(data.into())).await.is_err() {
                    return;
                }
            }
        }
    }
    let mut status = vec![STATUS];
    status.extend_from_slice(json!({"metadata": {}, "status": "Success"}).to_string().as_bytes());
    let _gone = out.send(Message::Binary(status.into())).await.is_err();
    let _gone = out.close().await.is_err();
}
