//! JSON lines over a Unix socket, as all machines' monitors speak.

use std::{io, path::Path};

use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};

/// A connection.
#[derive(Debug)]
pub(super) struct Lines {
    stream: UnixStream,
    /// Read and not yet taken.
    buffer: Vec<u8>,
    /// Who is at the other end, for messages.
    peer: &'static str,
    /// The longest line that makes sense, bytes.
    longest: usize,
}

impl Lines {
    pub(super) async fn connect(path: &Path, peer: &'static str, longest: usize) -> io::Result<Self> {
        Ok(Self { stream: UnixStream::connect(path).await?, buffer: Vec::new(), peer, longest })
    }

    /// Sends one line; `text` has no line's end.
    pub(super) async fn send(&mut self, text: &str) -> io::Result<()> {
        self.stream.write_all(format!("{text}\n").as_bytes()).await
    }

    /// The next line. Loses nothing when dropped.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(io::Error::from);
            }
            if self.buffer.len() > self.longest {
                let text = format!("{} sent an endless line", self.peer);
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}
