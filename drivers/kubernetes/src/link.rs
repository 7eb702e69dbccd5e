//! The way to a pod's agent: a program of the pod that connects its input and output with the agent's socket, run by the
//! API server's exec. It works from within the cluster and from without, needs no port of the pod, and ends with the run.
//! Where the configuration says so it is the agent's own port instead, see `way.rs`.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{AttachParams, AttachedProcess},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::timeout,
};
use tonic::transport::{Channel, Endpoint, Uri};
use torpor_agent_channel::host;
use torpor_sandbox::SandboxId;
use tower::Service;

use crate::{
    dial::Stream,
    driver::Inner,
    live::Live,
    manifest::{self, CONTAINER, SOCKET},
    trust,
    types::name,
};

/// For the API server to connect, and for the answer to a greeting.
const WAIT: Duration = Duration::from_secs(10);
/// Bytes between the websocket and the stream, each way.
const BUFFER: usize = 64 << 10;
/// Flow-control windows, bytes: what may wait unread in one call, and in all. The second is never reached: some slow
/// readers must not stop everybody else's calls.
const WINDOWS: (u32, u32) = (1 << 20, 1 << 30);

/// An agent with a port of its own that answers no ping for so long, twice over, while something is asked of it, is gone.
const ALIVE: Duration = Duration::from_secs(30);

type Half<T> = Pin<Box<T>>;

/// Standard input and output of a program in a pod.
struct Stdio {
    input: Half<dyn AsyncWrite + Send>,
    output: Half<dyn AsyncRead + Send>,
    /// Ends the program's connection when it is dropped.
    _process: AttachedProcess,
}

impl AsyncRead for Stdio {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.output.as_mut().poll_read(cx, buf)
    }
}

impl AsyncWrite for Stdio {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        self.input.as_mut().poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.input.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.input.as_mut().poll_shutdown(cx)
    }
}

async fn exec(inner: &Inner, id: &SandboxId) -> io::Result<Stdio> {
    let namespace = inner.namespace_of(id).map_err(io::Error::other)?;
    let api: Api<Pod> = Api::namespaced(inner.cluster.client.clone(), &namespace);
    let params = AttachParams::default()
        .container(CONTAINER)
        .stdin(true)
        .stdout(true)
        .stderr(false)
        .max_stdin_buf_size(BUFFER)
        .max_stdout_buf_size(BUFFER);
    let pod = match inner.cache.view(id).pod {
        Some(pod) => Some(pod),
        None => inner.ask(id).await.map_err(io::Error::other)?.pod,
    };
    let program = manifest::program(pod.is_some_and(|pod| pod.agent_volume));
    let exec = timeout(WAIT, api.exec(&name(id), [program, "--connect", SOCKET], &params)).await;
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the API server does not connect to the pod");
    let mut process = exec.map_err(late)?.map_err(io::Error::other)?;
    let (Some(input), Some(output)) = (process.stdin(), process.stdout()) else {
        return Err(io::Error::other("the API server gives no input and output"));
    };
    Ok(Stdio { input: Box::pin(input), output: Box::pin(output), _process: process })
}

/// By the agent's own port where it is to be used, else by exec.
async fn reach(inner: &Arc<Inner>, live: &Arc<Live>) -> io::Result<Stream> {
    if live.way.is_by_port() {
        match inner.dial(live).await {
            Ok(dialed) => {
                if dialed.until.is_some_and(trust::is_short) {
                    inner.enroll(live);
                }
                return Ok(dialed.stream);
            }
            Err(why) => {
                let stream = by_exec(inner, &live.id).await?;
                inner.port_failed(live, &why);
                return Ok(stream);
            }
        }
    }
    by_exec(inner, &live.id).await
}

async fn by_exec(inner: &Inner, id: &SandboxId) -> io::Result<Stream> {
    // Never closed. Given back when it stands: what stands for long is bounded by what is used.
    let _place = inner.cluster.exec.acquire().await;
    let stdio = exec(inner, id).await?;
    Ok(Box::pin(host::connect(stdio, WAIT).await.map_err(io::Error::other)?))
}

/// Connects again and again, the first time by what there is already.
fn connector(
    inner: &Arc<Inner>,
    live: &Arc<Live>,
    first: Option<Stream>,
) -> impl Service<Uri, Response = TokioIo<Stream>, Error = io::Error, Future: Send> + Send + 'static {
    // Both may end while somebody still holds a channel.
    let (inner, live, mut first) = (Arc::downgrade(inner), Arc::downgrade(live), first);
    tower::service_fn(move |_: Uri| {
        let (inner, live, first) = (inner.clone(), live.clone(), first.take());
        async move {
            if let Some(first) = first {
                return Ok(TokioIo::new(first));
            }
            let inner = inner.upgrade().ok_or_else(|| io::Error::other("the driver has ended"))?;
            let live = live.upgrade().ok_or_else(|| io::Error::other("the run has ended"))?;
            reach(&inner, &live).await.map(TokioIo::new)
        }
    })
}

fn endpoint(inner: &Inner) -> Endpoint {
    // The name is never looked up: the connector knows where to go.
    let endpoint = Endpoint::from_static("http://agent.torpor.invalid")
        .initial_stream_window_size(WINDOWS.0)
        .initial_connection_window_size(WINDOWS.1);
    match inner.trust {
        None => endpoint,
        // Nobody else tells when a pod is gone with its node.
        Some(_) => endpoint.http2_keep_alive_interval(ALIVE).keep_alive_timeout(ALIVE),
    }
}

/// A channel that connects when it is first used, and again after it was lost.
pub(crate) fn channel(inner: &Arc<Inner>, live: &Arc<Live>) -> Channel {
    endpoint(inner).connect_with_connector_lazy(connector(inner, live, None))
}

/// The same over a connection that there is.
///
/// # Errors
/// When it ends before it can be used.
pub(crate) async fn channel_on(
    inner: &Arc<Inner>,
    live: &Arc<Live>,
    first: Stream,
) -> Result<Channel, tonic::transport::Error> {
    endpoint(inner).connect_with_connector(connector(inner, live, Some(first))).await
}
