//! Connections to ports inside of sandboxes, by their agents. What waits in between is bounded in every direction: a side
//! that doesn't read stops the other one.

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream},
    net::TcpStream,
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming, transport::Channel};
use torpor_proto::agent::v1::{
    ForwardClose, ForwardInput, ForwardOutput, ForwardStart, agent_client::AgentClient, forward_error,
    forward_input, forward_output::Kind,
};

use torpor_sandbox::words::said;

use crate::{
    error::{ApiError, Code},
    store::Record,
};

/// Messages under way in each direction; the rest of the back-pressure is HTTP/2's.
const BUFFER: usize = 4;
/// Most bytes in one message.
const PIECE: usize = 32 << 10;

/// A connection to a port of a sandbox.
#[derive(Debug)]
pub struct Forward {
    /// To the sandbox. Dropped without a close, the connection there is reset.
    pub input: mpsc::Sender<ForwardInput>,
    /// From the sandbox.
    pub output: Streaming<ForwardOutput>,
}

/// Why there is no connection.
#[derive(Debug)]
pub enum NoForward {
    /// Nothing listens there, by the sandbox's word.
    Refused(String),
    /// The sandbox takes no more.
    TooMany(String),
    /// Anything else.
    Failed(Status),
}

impl NoForward {
    /// What whoever asked is told.
    pub fn answer(self, record: &Record, port: u16) -> ApiError {
        let name = &record.name;
        let error = match self {
            Self::Refused(message) => {
                let text = format!("nothing listens on port {port} of sandbox '{name}': {message}");
                let next = format!("torpor exec {name} -- COMMAND, which listens on 127.0.0.1 or 0.0.0.0");
                ApiError::new(Code::FailedPrecondition, "PORT_CLOSED", text).with("next", next)
            }
            Self::TooMany(message) => {
                let text = format!("sandbox '{name}' takes no more connections: {message}");
                ApiError::new(Code::ResourceExhausted, "TOO_MANY_CONNECTIONS", text)
            }
            Self::Failed(status) if status.code() == tonic::Code::Unimplemented => {
                let text = format!("the agent in sandbox '{name}' is of an older version, without forwards");
                let next = format!("torpor suspend {name}; torpor resume {name}");
                ApiError::new(Code::FailedPrecondition, "AGENT_TOO_OLD", text).with("next", next)
            }
            Self::Failed(status) => {
                let text = format!("the agent of sandbox '{name}': {}", status.message());
                ApiError::new(Code::Unavailable, "AGENT_FAILED", text)
                    .with("next", format!("torpor get {name}"))
            }
        };
        error.about(record)
    }
}

/// Connects to a port of the sandbox behind the channel.
///
/// # Errors
/// Why there is no connection.
pub async fn open(channel: Channel, port: u16) -> Result<Forward, NoForward> {
    let (input, inputs) = mpsc::channel(BUFFER);
    let start = forward_input::Kind::Start(ForwardStart { port: port.into() });
    // Cannot fail: the channel is new and has room.
    let _ = input.send(ForwardInput { kind: Some(start) }).await;
    let opened = AgentClient::new(channel).forward(ReceiverStream::new(inputs)).await;
    let mut output = opened.map_err(NoForward::Failed)?.into_inner();
    match output.message().await.map_err(NoForward::Failed)?.and_then(|message| message.kind) {
        Some(Kind::Connected(_)) => Ok(Forward { input, output }),
        Some(Kind::Error(error)) => Err(match error.kind() {
            forward_error::Kind::Refused => NoForward::Refused(said(&error.message)),
            forward_error::Kind::TooMany => NoForward::TooMany(said(&error.message)),
            _ => NoForward::Failed(Status::unavailable(said(&error.message))),
        }),
        _ => Err(NoForward::Failed(Status::unavailable("it did not say whether it has connected"))),
    }
}

/// Carries bytes between a connection of the host and one in the sandbox until both directions have ended, one of them
/// breaks, or `end` is cancelled. What did not end in order is reset, so that nobody takes half for the whole.
pub async fn carry(stream: &mut TcpStream, forward: Forward, end: &CancellationToken) {
    // Only slower when it can't be set.
    let _ = stream.set_nodelay(true);
    let Forward { input, output } = forward;
    let (read, write) = stream.split();
    let ended = tokio::select! {
        both = async { tokio::try_join!(upwards(read, &input), downwards(output, write)) } => both.map(drop),
        () = end.cancelled() => Err(Broken),
    };
    if ended.is_err() {
        reset(stream);
    }
}

/// The same for a connection within the gateway. Its end is all that the other side sees: whoever reads HTTP there knows
/// from its lengths whether it was whole.
pub async fn carry_stream(stream: DuplexStream, forward: Forward, end: &CancellationToken) {
    let Forward { input, output } = forward;
    let (read, write) = tokio::io::split(stream);
    tokio::select! {
        // How it ended is the other side's to find out.
        _ = async { tokio::try_join!(upwards(read, &input), downwards(output, write)) } => {}
        () = end.cancelled() => {}
    }
}

/// Makes the connection end as a broken one when it is dropped.
pub fn reset(stream: &TcpStream) {
    // Without it the other side sees an end in place of a break.
    let _ = stream.set_zero_linger();
}

/// One of the sides went away before it had said all.
struct Broken;

/// From the host into the sandbox.
async fn upwards(mut read: impl AsyncRead + Unpin, input: &mpsc::Sender<ForwardInput>) -> Result<(), Broken> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(PIECE);
        let kind = match read.read_buf(&mut buffer).await {
            Ok(0) => forward_input::Kind::Close(ForwardClose {}),
            Ok(_) => forward_input::Kind::Data(buffer.split().freeze()),
            Err(_) => return Err(Broken),
        };
        let last = matches!(kind, forward_input::Kind::Close(_));
        // A stream that is gone: the other direction tells how it ended.
        if input.send(ForwardInput { kind: Some(kind) }).await.is_err() || last {
            return Ok(());
        }
    }
}

/// From the sandbox to the host.
async fn downwards(
    mut output: Streaming<ForwardOutput>,
    mut write: impl AsyncWrite + Unpin,
) -> Result<(), Broken> {
    loop {
        match next(&mut output).await {
            Some(Piece::Data(data)) => write.write_all(&data).await.map_err(|_| Broken)?,
            Some(Piece::Close) => return write.shutdown().await.map_err(|_| Broken),
            None => return Err(Broken),
        }
    }
}

/// What comes from a sandbox.
pub enum Piece {
    /// Bytes.
    Data(Bytes),
    /// There is nothing more.
    Close,
}

/// The next piece; none when the connection broke.
pub async fn next(output: &mut Streaming<ForwardOutput>) -> Option<Piece> {
    loop {
        match output.message().await.ok()??.kind {
            Some(Kind::Data(data)) => return Some(Piece::Data(data)),
            Some(Kind::Close(_)) => return Some(Piece::Close),
            // A kind of a newer agent.
            _ => {}
        }
    }
}
