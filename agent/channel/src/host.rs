//! The host's end: greets until it is answered, then is a byte stream.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    time::{MissedTickBehavior, interval, timeout},
};

use crate::wire::{self, Decoder, Item, Kind, Side, Tag, VERSION};

/// Time between two greetings.
const REPEAT: Duration = Duration::from_millis(200);
/// Every so many greetings come with padding: what a booting guest drops may include the first one.
const PAD_EVERY: u32 = 5;

/// Why no session came up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The pipe failed.
    #[error("channel to the guest agent failed during the greeting: {0}")]
    Io(#[from] io::Error),
    /// The pipe ended.
    #[error("channel to the guest agent was closed during the greeting")]
    Closed,
    /// No answer in time.
    #[error("no guest agent answered on the channel within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// The guest's framing is another one.
    #[error("guest agent speaks channel version {guest}, this side {VERSION}: use the agent of this release")]
    Version {
        /// The version that the guest named.
        guest: u8,
    },
}

trait Pipe: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Pipe for T {}

/// Opens a new session on `io`, whatever bytes stand in it. Any session that the guest still had is ended.
///
/// `limit` bounds the whole greeting, so it is also the longest wait for a guest that is still booting.
///
/// # Errors
/// [`Error`] when the pipe fails or ends, nobody answers in time, or the guest speaks another version.
pub async fn connect<I>(io: I, limit: Duration) -> Result<Stream, Error>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    timeout(limit, greet(io)).await.map_err(|_| Error::Timeout(limit))?
}

async fn greet<I>(io: I) -> Result<Stream, Error>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let nonce: wire::Nonce = rand::random();
    let (mut reader, mut writer) = tokio::io::split(io);
    let mut decoder = Decoder::new(Side::Guest);
    let mut out = BytesMut::new();
    let mut sent = 0;
    let mut ticks = interval(REPEAT);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            read = reader.read_buf(decoder.space()) => {
                if read? == 0 {
                    return Err(Error::Closed);
                }
                if welcomed(&mut decoder, &nonce)? {
                    break;
                }
            }
            written = writer.write(&out), if !out.is_empty() => out.advance(written?),
            _ = ticks.tick(), if out.is_empty() => {
                if sent % PAD_EVERY == 0 {
                    wire::put_padding(&mut out);
                }
                wire::put_greeting(&mut out, Side::Host, &nonce);
                sent += 1;
            }
        }
    }
    // A greeting that is half out is completed first: the guest would take the start for the rest of it.
    let tag = Tag::of(&nonce);
    decoder.expect(tag);
    wire::put_frame(&mut out, tag, Kind::Start, &[]);
    writer.write_all(&out).await?;
    writer.flush().await?;
    let io: Box<dyn Pipe> = Box::new(reader.unsplit(writer));
    out.clear();
    Ok(Stream { io, tag, decoder, data: Bytes::new(), ended: false, out, closed: false })
}

/// Takes what came; true when the guest answered this nonce.
fn welcomed(decoder: &mut Decoder, nonce: &wire::Nonce) -> Result<bool, Error> {
    while let Some(item) = decoder.next() {
        match item {
            Item::Greeting { version, nonce: answered } if answered == *nonce => {
                return if version == VERSION { Ok(true) } else { Err(Error::Version { guest: version }) };
            }
            // Answers to a greeting of an earlier host.
            Item::Greeting { .. } | Item::Frame { .. } | Item::Lost => {}
        }
    }
    Ok(false)
}

/// One session with the guest: bytes in order, both ways.
///
/// Shutting the stream down tells the guest that no more comes; dropping it closes the pipe.
pub struct Stream {
    io: Box<dyn Pipe>,
    tag: Tag,
    decoder: Decoder,
    /// Taken out of a frame, not yet read.
    data: Bytes,
    ended: bool,
    /// Framed, not yet written. At most one frame and a close.
    out: BytesMut,
    closed: bool,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("ended", &self.ended)
            .field("closed", &self.closed)
            .finish_non_exhaustive()
    }
}

impl Stream {
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            let written = ready!(Pin::new(&mut self.io).poll_write(cx, &self.out))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.out.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Takes one item out of what was read; false when more bytes are needed.
    fn take(&mut self) -> io::Result<bool> {
        match self.decoder.next() {
            None => return Ok(false),
            Some(Item::Frame { kind: Kind::Data, data }) => self.data = data,
            Some(Item::Frame { kind: Kind::Close, .. }) => self.ended = true,
            // A welcome may come once for every greeting, before the first frame.
            Some(Item::Frame { kind: Kind::Start, .. } | Item::Greeting { .. }) => {}
            Some(Item::Lost) => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "guest agent sent bytes that are no frame of this session",
                ));
            }
        }
        Ok(true)
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if !this.data.is_empty() {
                let count = this.data.len().min(buf.remaining());
                buf.put_slice(&this.data.split_to(count));
                return Poll::Ready(Ok(()));
            }
            if this.ended {
                return Poll::Ready(Ok(()));
            }
            if this.take()? {
                continue;
            }
            let space = this.decoder.space();
            if ready!(poll_read_buf(&mut this.io, cx, space))? == 0 {
                this.ended = true;
            }
        }
    }
}

/// Reads once into the spare room of `space`.
fn poll_read_buf(
    io: &mut Box<dyn Pipe>,
    cx: &mut Context<'_>,
    space: &mut BytesMut,
) -> Poll<io::Result<usize>> {
    // `read_buf` keeps nothing between polls, so a fresh future each time loses nothing.
    let read = std::pin::pin!(io.read_buf(space));
    read.poll(cx)
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if this.closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        ready!(this.poll_drain(cx))?;
        let data = &data[..data.len().min(wire::MAX_PAYLOAD)];
        wire::put_frame(&mut this.out, this.tag, Kind::Data, data);
        // The frame is taken in any case; what doesn't go out now goes with the next write or flush.
        if let Poll::Ready(Err(error)) = this.poll_drain(cx) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(data.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.closed {
            wire::put_frame(&mut this.out, this.tag, Kind::Close, &[]);
            this.closed = true;
        }
        // The pipe itself stays open: a serial port closed for writing is closed for reading too.
        ready!(this.poll_drain(cx))?;
        Pin::new(&mut this.io).poll_flush(cx)
    }
}
