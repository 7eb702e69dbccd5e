//! The one connection to a guest's agent: gRPC over the session channel over the machine's byte pipe.

use std::{io, path::PathBuf, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use torpor_agent_channel::host::{self, Stream};

use crate::machine::AgentEndpoint;

/// How long one greeting waits for an answer; a booting guest is greeted again and again.
const GREETING: Duration = Duration::from_secs(10);
/// Flow-control windows, bytes: what may wait unread in one call, and in all. The second is never reached: some slow
/// readers must not stop everybody else's calls.
const WINDOWS: (u32, u32) = (1 << 20, 1 << 30);

async fn dial(endpoint: AgentEndpoint) -> io::Result<TokioIo<Stream>> {
    let AgentEndpoint::VirtioSerial(path) = endpoint;
    let stream = open(path).await?;
    let session = host::connect(stream, GREETING).await.map_err(io::Error::other)?;
    Ok(TokioIo::new(session))
}

async fn open(path: PathBuf) -> io::Result<UnixStream> {
    UnixStream::connect(&path)
        .await
        .map_err(|error| io::Error::new(error.kind(), format!("connect to {}: {error}", path.display())))
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
