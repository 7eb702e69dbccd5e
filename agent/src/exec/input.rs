//! What a command is told while it runs: stdin, its end, sizes, signals.

use std::{
    os::fd::{AsRawFd as _, OwnedFd},
    pin::Pin,
    sync::Arc,
};

use nix::unistd::Pid;
use tokio::{
    io::{AsyncWrite, AsyncWriteExt as _, WriteHalf},
    net::unix::pipe,
    sync::mpsc,
};
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;
use torpor_proto::agent::v1::{ExecInput, exec_input::Kind};

use super::spawn;
use crate::{fd::FdStream, reaper::Reaper};

/// The character that ends input on a terminal in its usual mode.
const END_OF_INPUT: &[u8] = &[4];
/// Messages that wait for a command which doesn't read; signals and sizes pass by these.
const WAITING: usize = 8;

/// What a command is told.
pub type Inbound = Pin<Box<dyn Stream<Item = Result<ExecInput, Status>> + Send>>;

/// The writing end of a command's input.
pub enum Stdin {
    Null,
    Pipe(pipe::Sender),
    Tty(WriteHalf<FdStream>, Arc<OwnedFd>),
}

/// Carries out what comes on `inbound` until it ends or breaks; then a pipe is closed, so that the command sees the end.
pub async fn feed(mut inbound: Inbound, stdin: Stdin, pid: Pid, reaper: Reaper) {
    let terminal = match &stdin {
        Stdin::Tty(_, fd) => Some(fd.clone()),
        _ => None,
    };
    let (chunks, waiting) = mpsc::channel(WAITING);
    // Dropped together with this future: no task is left behind when the command ends.
    let writing = write(stdin, waiting);
    let reading = async move {
        let mut chunks = Some(chunks);
        while let Some(Ok(ExecInput { kind })) = inbound.next().await {
            match kind {
                Some(Kind::Stdin(data)) => {
                    if let Some(chunks) = &chunks {
                        // Nobody reads it any more: thrown away.
                        let _ = chunks.send(Input::Data(data)).await;
                    }
                }
                Some(Kind::StdinClose(_)) => {
                    if let Some(chunks) = chunks.take() {
                        let _ = chunks.send(Input::End).await;
                    }
                }
                Some(Kind::Resize(size)) => {
                    if let Some(terminal) = &terminal {
                        // A terminal that is gone has no size.
                        let _ = spawn::resize(terminal.as_raw_fd(), &size);
                    }
                }
                // An unknown number changes nothing; the stream has no place for an answer.
                Some(Kind::Signal(number)) => drop(reaper.signal_group(pid, number)),
                Some(Kind::Start(_)) | None => {}
            }
        }
    };
    tokio::join!(writing, reading);
}

enum Input {
    Data(bytes::Bytes),
    End,
}

async fn write(stdin: Stdin, mut waiting: mpsc::Receiver<Input>) {
    match stdin {
        Stdin::Null => while waiting.recv().await.is_some() {},
        Stdin::Pipe(pipe) => write_all(pipe, waiting, &[]).await,
        Stdin::Tty(tty, _) => write_all(tty, waiting, END_OF_INPUT).await,
    }
}

async fn write_all(mut stdin: impl AsyncWrite + Unpin, mut waiting: mpsc::Receiver<Input>, end: &[u8]) {
    while let Some(input) = waiting.recv().await {
        let written = match &input {
            Input::Data(data) => stdin.write_all(data).await,
            Input::End => stdin.write_all(end).await,
        };
        if written.is_err() || matches!(input, Input::End) {
            return;
        }
    }
}
