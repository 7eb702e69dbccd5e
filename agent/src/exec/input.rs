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
pub struct Inbound {
    /// In its order; its end is the end of the input.
    pub inputs: Pin<Box<dyn Stream<Item = Result<ExecInput, Status>> + Send>>,
    /// Signals and sizes that wait for nothing.
    pub urgent: mpsc::Receiver<ExecInput>,
}

impl Inbound {
    /// All in one order.
    pub fn of(inputs: impl Stream<Item = Result<ExecInput, Status>> + Send + 'static) -> Self {
        Self { inputs: Box::pin(inputs), urgent: mpsc::channel(1).1 }
    }
}

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
    let act = move |kind| match kind {
        Kind::Resize(size) => {
            if let Some(terminal) = &terminal {
                // A terminal that is gone has no size.
                let _ = spawn::resize(terminal.as_raw_fd(), &size);
            }
        }
        // An unknown number changes nothing; the stream has no place for an answer.
        Kind::Signal(number) => drop(reaper.signal_group(pid, number)),
        _ => {}
    };
    let reading = async move {
        let mut held = None;
        let mut urgent = true;
        loop {
            tokio::select! {
                biased;
                message = inbound.urgent.recv(), if urgent => match message {
                    Some(ExecInput { kind }) => kind.into_iter().for_each(&act),
                    None => urgent = false,
                },
                room = chunks.reserve(), if held.is_some() => {
                    // Without room: nobody reads it any more, and it is thrown away.
                    if let (Ok(room), Some(input)) = (room, held.take()) {
                        room.send(input);
                    }
                }
                message = inbound.inputs.next(), if held.is_none() => match message {
                    Some(Ok(ExecInput { kind: Some(Kind::Stdin(data)) })) => held = Some(Input::Data(data)),
                    Some(Ok(ExecInput { kind: Some(Kind::StdinClose(_)) })) => held = Some(Input::End),
                    Some(Ok(ExecInput { kind })) => kind.into_iter().for_each(&act),
                    Some(Err(_)) | None => return,
                },
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
        // A terminal goes on after the character for an end.
        if written.is_err() || (matches!(input, Input::End) && end.is_empty()) {
            return;
        }
    }
}
