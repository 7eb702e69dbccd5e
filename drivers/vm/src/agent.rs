//! The one connection to a guest's agent: gRPC over the session channel over the machine's byte pipe.

use std::{io, path::PathBuf, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};
use tonic::transport::{Channel, Endpoint, Uri};
use torpor_agent_channel::host::{self, Stream};

use crate::machine::AgentEndpoint;

/// How long one greeting waits for an answer; a booting guest is greeted again and again.
const GREETING: Duration = Duration::from_secs(10);
/// Flow-control windows, bytes: what may wait unread in one call, and in all. The second is never reached: some slow
/// readers must not stop everybody else's calls.
const WINDOWS: (u32, u32) = (1 << 20, 1 << 30);
/// The longest answer of the machine's vsock, bytes.
const LONGEST_ANSWER: usize = 128;

async fn dial(endpoint: AgentEndpoint) -> io::Result<TokioIo<Stream>> {
    let stream = match endpoint {
        AgentEndpoint::VirtioSerial(path) => open(path).await?,
        AgentEndpoint::Vsock(path, port) => open_vsock(path, port).await?,
    };
    let session = host::connect(stream, GREETING).await.map_err(io::Error::other)?;
    Ok(TokioIo::new(session))
}

async fn open(path: PathBuf) -> io::Result<UnixStream> {
    UnixStream::connect(&path)
        .await
        .map_err(|error| io::Error::new(error.kind(), format!("connect to {}: {error}", path.display())))
}

/// Connects to a port of the guest's vsock. While the guest boots nobody listens there: the machine keeps the connection until
/// somebody does.
async fn open_vsock(path: PathBuf, port: u32) -> io::Result<UnixStream> {
    let mut stream = open(path).await?;
    stream.write_all(format!("AWAIT {port}\n").as_bytes()).await?;
    // Byte by byte: what follows the line is the agent's.
    let mut line = Vec::with_capacity(16);
    while line.last() != Some(&b'\n') {
        if line.len() > LONGEST_ANSWER {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the machine's vsock sent an endless line",
            ));
        }
        line.push(stream.read_u8().await?);
    }
    if line.starts_with(b"OK ") {
        return Ok(stream);
    }
    let said = String::from_utf8_lossy(&line).trim().to_owned();
    Err(io::Error::new(io::ErrorKind::ConnectionRefused, format!("the machine's vsock said: {said}")))
}

/// A channel that connects when it is first used, and again after it was lost.
pub(crate) fn channel(endpoint: &AgentEndpoint) -> Channel {
    let endpoint = endpoint.clone();
    let connector = tower::service_fn(move |_: Uri| dial(endpoint.clone()));
    // The name is never looked up: the connector knows where to go.
    Endpoint::from_static("http://agent.torpor.invalid")
        .initial_stream_window_size(WINDOWS.0)
        .initial_connection_window_size(WINDOWS.1)
        .connect_with_connector_lazy(connector)
}
