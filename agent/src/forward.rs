//! Connections from the host to ports of the sandbox.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use bytes::BytesMut;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::mpsc,
    time::timeout,
};
use tonic::{Status, Streaming};
use torpor_proto::agent::v1::{
    ForwardClose, ForwardConnected, ForwardError, ForwardInput, ForwardOutput, forward_error, forward_input,
    forward_output::Kind,
};

use crate::agent::Agent;

/// Connections at once.
pub const MOST: usize = 1024;
/// Most bytes in one message to the host.
const PIECE: usize = 32 << 10;
/// How long one address may take to answer: it is this machine's own.
const ANSWER: Duration = Duration::from_secs(5);

/// Where outputs go.
pub type Sink = mpsc::Sender<Result<ForwardOutput, Status>>;

/// Carries one connection to its end.
pub async fn run(agent: Arc<Agent>, port: u16, inbound: Streaming<ForwardInput>, sink: Sink) {
    let Ok(_place) = agent.forwards.try_acquire() else {
        let message = format!("{MOST} connections from the host are open already");
        return refuse(&sink, forward_error::Kind::TooMany, message).await;
    };
    let stream = match connect(&agent, port).await {
        Ok(stream) => stream,
        Err(error) => {
            let kind = match error.kind() {
                io::ErrorKind::ConnectionRefused => forward_error::Kind::Refused,
                _ => forward_error::Kind::Other,
            };
            return refuse(&sink, kind, format!("port {port}: {error}")).await;
        }
    };
    // Only slower when it can't be set.
    let _ = stream.set_nodelay(true);
    if send(&sink, Kind::Connected(ForwardConnected {})).await {
        carry(stream, inbound, sink).await;
    }
}

async fn refuse(sink: &Sink, kind: forward_error::Kind, message: String) {
    send(sink, Kind::Error(ForwardError { kind: kind.into(), message })).await;
}

async fn send(sink: &Sink, kind: Kind) -> bool {
    sink.send(Ok(ForwardOutput { kind: Some(kind) })).await.is_ok()
}

/// Where servers listen that name no address, one of the loopback's, or the sandbox's own.
async fn connect(agent: &Agent, port: u16) -> io::Result<TcpStream> {
    let own = agent.state().network.as_ref().and_then(|network| {
        network.address.split('/').next().and_then(|address| address.parse::<IpAddr>().ok())
    });
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let mut first = None;
    for address in loopback.into_iter().chain(own) {
        let tried = timeout(ANSWER, TcpStream::connect((address, port))).await;
        match tried.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(stream) => return Ok(stream),
            Err(error) => first = first.or(Some(error)),
        }
    }
    Err(first.unwrap_or_else(|| io::ErrorKind::ConnectionRefused.into()))
}

async fn carry(mut stream: TcpStream, inbound: Streaming<ForwardInput>, sink: Sink) {
    let (read, write) = stream.split();
    if tokio::try_join!(feed(inbound, write), drain(read, &sink)).is_err() {
        // A server must not take a host that went away for one that had said all: without it the server sees an end in
        // place of a break.
        let _ = stream.set_zero_linger();
    }
}

/// The host or the server went away before it had said all.
struct Broken;

/// From the host to the server. It breaks when the host goes away.
async fn feed(mut inbound: Streaming<ForwardInput>, mut write: WriteHalf<'_>) -> Result<(), Broken> {
    loop {
        match inbound.message().await.ok().flatten().map(|input| input.kind) {
            Some(Some(forward_input::Kind::Data(data))) => {
                // A server that takes no more: what it sends, or the break, is told by the other direction.
                if write.write_all(&data).await.is_err() {
                    return Ok(());
                }
            }
            Some(Some(forward_input::Kind::Close(ForwardClose {}))) => {
                // Fails only when the server has gone, which the other direction tells.
                let _ = write.shutdown().await;
                return Ok(());
            }
            // A kind of a newer host, or a second start.
            Some(_) => {}
            None => return Err(Broken),
        }
    }
}

/// From the server to the host. It breaks when one of them goes away.
async fn drain(mut read: ReadHalf<'_>, sink: &Sink) -> Result<(), Broken> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(PIECE);
        let got = tokio::select! {
            got = read.read_buf(&mut buffer) => got,
            () = sink.closed() => return Err(Broken),
        };
        let kind = match got {
            Ok(0) => Kind::Close(ForwardClose {}),
            Ok(_) => Kind::Data(buffer.split().freeze()),
            Err(error) => {
                let status = Status::aborted(format!("the connection in the sandbox broke: {error}"));
                // Nobody listens any more.
                let _ = sink.send(Err(status)).await;
                return Err(Broken);
            }
        };
        let last = matches!(kind, Kind::Close(_));
        if !send(sink, kind).await {
            return Err(Broken);
        }
        if last {
            return Ok(());
        }
    }
}
