//! What a command writes, until it has ended and everything that it wrote has been read.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, ReadBuf, ReadHalf},
    net::unix::pipe,
    sync::{mpsc, watch},
    time::timeout,
};
use tonic::Status;
use torpor_proto::agent::v1::{ExecOutput, exec_output::Kind};

use crate::fd::FdStream;

/// Most bytes in one message.
const CHUNK: usize = 32 * 1024;
/// A terminal that is still held open says nothing more when it was quiet for this long after the command's end.
const QUIET: Duration = Duration::from_millis(50);
/// Most bytes that are taken from a terminal after the command's end; the kernel holds fewer.
const TTY_REST: usize = 64 * 1024;

/// Where output goes.
pub type Sink = mpsc::Sender<Result<ExecOutput, Status>>;

/// One stream of a command.
pub enum Source {
    Pipe(pipe::Receiver),
    Tty(ReadHalf<FdStream>),
}

impl Source {
    pub fn pipe(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self::Pipe(pipe::Receiver::from_owned_fd(fd)?))
    }
}

impl AsyncRead for Source {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Pipe(pipe) => Pin::new(pipe).poll_read(cx, buf),
            Self::Tty(tty) => Pin::new(tty).poll_read(cx, buf),
        }
    }
}

/// Sends what comes from `source` to `sink` until its end, or until the command has ended (`ended` turns true) and all
/// that it wrote is sent. Waits while the sink is full, and so does the command. What comes later, or after the sink's
/// reader left, is read and thrown away, so that nobody who still writes is stopped.
pub async fn pump(mut source: Source, kind: fn(Bytes) -> Kind, sink: Sink, mut ended: watch::Receiver<bool>) {
    let mut buffer = BytesMut::new();
    let read = loop {
        let count = tokio::select! {
            count = read(&mut source, &mut buffer, CHUNK) => count,
            () = over(&mut ended) => break rest(&mut source, &mut buffer, kind, &sink).await,
        };
        match count {
            0 => break Read::End,
            _ if !send(&mut buffer, kind, &sink).await => break Read::More,
            _ => {}
        }
    };
    if read == Read::More {
        tokio::spawn(discard(source));
    }
}

async fn over(ended: &mut watch::Receiver<bool>) {
    // A sender that is gone without a word means the same.
    let _ = ended.wait_for(|ended| *ended).await;
}

#[derive(PartialEq, Eq)]
enum Read {
    End,
    More,
}

/// What stood in the stream when the command had ended.
async fn rest(source: &mut Source, buffer: &mut BytesMut, kind: fn(Bytes) -> Kind, sink: &Sink) -> Read {
    let (mut left, exact) = match source {
        Source::Pipe(pipe) => (waiting(pipe.as_raw_fd()), true),
        Source::Tty(_) => (TTY_REST, false),
    };
    while left > 0 {
        let reading = read(source, buffer, left.min(CHUNK));
        let count = if exact { Ok(reading.await) } else { timeout(QUIET, reading).await };
        match count {
            Ok(0) => return Read::End,
            Ok(count) => left -= count,
            Err(_quiet) => return Read::More,
        }
        if !send(buffer, kind, sink).await {
            return Read::More;
        }
    }
    Read::More
}

/// Bytes that a pipe holds.
fn waiting(pipe: RawFd) -> usize {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    unsafe { libc::ioctl(pipe, libc::FIONREAD, &raw mut count) };
    usize::try_from(count).unwrap_or(0)
}

/// Reads at most `most` bytes. An error is an end: a terminal says EIO when its last user has gone.
async fn read(source: &mut Source, buffer: &mut BytesMut, most: usize) -> usize {
    buffer.reserve(most);
    source.read_buf(&mut buffer.limit(most)).await.unwrap_or(0)
}

async fn send(buffer: &mut BytesMut, kind: fn(Bytes) -> Kind, sink: &Sink) -> bool {
    let data = buffer.split().freeze();
    sink.send(Ok(ExecOutput { kind: Some(kind(data)) })).await.is_ok()
}

async fn discard(mut source: Source) {
    let mut buffer = vec![0; 4096];
    while source.read(&mut buffer).await.is_ok_and(|count| count > 0) {}
}

/// Splits a terminal into what it says and what it is told.
pub fn terminal(fd: OwnedFd) -> io::Result<(Source, super::input::Stdin)> {
    let fd = Arc::new(fd);
    let (read, write) = tokio::io::split(FdStream::new(fd.clone())?);
    Ok((Source::Tty(read), super::input::Stdin::Tty(write, fd)))
}
