//! One command in a sandbox.

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use torpor_proto::v1::{self, exec_input, exec_output, sandboxes_client::SandboxesClient};

use crate::{endpoint::Transport, error::Error};

/// Inputs that may wait for the network: beyond it the writer waits, so that memory stays flat.
const INPUTS_IN_FLIGHT: usize = 8;

/// A running command: what goes in and what comes out. Dropping it hangs up.
pub struct Exec {
    /// To the command. Dropping it leaves the command running.
    pub input: ExecInput,
    /// From the command.
    pub output: ExecOutput,
}

/// The way to a running command; may be cloned. After the command has ended everything sent here is dropped.
#[derive(Clone)]
pub struct ExecInput(mpsc::Sender<v1::ExecInput>);

/// The way from a running command.
pub struct ExecOutput {
    stream: Streaming<v1::ExecOutput>,
    ended: bool,
}

/// Something that a command did.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// It runs.
    Started(v1::ExecStarted),
    /// It wrote to its standard output (or to its terminal).
    Stdout(Bytes),
    /// It wrote to its standard error.
    Stderr(Bytes),
    /// It has ended; nothing follows.
    Exit(v1::ExecExit),
}

impl Exec {
    pub(crate) async fn start(
        mut client: SandboxesClient<Transport>,
        start: v1::ExecStart,
    ) -> Result<Self, Error> {
        let (input, inputs) = first(exec_input::Kind::Start(start)).await;
        let stream = client.exec(inputs).await?.into_inner();
        Ok(Self { input, output: ExecOutput { stream, ended: false } })
    }

    pub(crate) async fn attach(
        mut client: SandboxesClient<Transport>,
        start: v1::AttachStart,
    ) -> Result<Self, Error> {
        let (input, inputs) = first(exec_input::Kind::Attach(start)).await;
        let stream = client.attach(inputs).await?.into_inner();
        Ok(Self { input, output: ExecOutput { stream, ended: false } })
    }
}

/// Inputs that begin with `kind`.
async fn first(kind: exec_input::Kind) -> (ExecInput, ReceiverStream<v1::ExecInput>) {
    let (sender, receiver) = mpsc::channel(INPUTS_IN_FLIGHT);
    let input = ExecInput(sender);
    input.send(kind).await;
    (input, ReceiverStream::new(receiver))
}

impl ExecInput {
    /// Sends bytes to the command's standard input; waits while the command doesn't read. False: it has ended.
    pub async fn write(&self, bytes: Bytes) -> bool {
        self.send(exec_input::Kind::Stdin(bytes)).await
    }

    /// Ends the command's standard input. False: it has ended.
    pub async fn close(&self) -> bool {
        self.send(exec_input::Kind::StdinClose(v1::StdinClose {})).await
    }

    /// Tells the size of the terminal. False: the command has ended.
    pub async fn resize(&self, cols: u32, rows: u32) -> bool {
        self.send(exec_input::Kind::Resize(v1::WindowSize { cols, rows })).await
    }

    /// Sends a signal, by its Linux number. False: the command has ended.
    pub async fn signal(&self, number: i32) -> bool {
        self.send(exec_input::Kind::Signal(number)).await
    }

    async fn send(&self, kind: exec_input::Kind) -> bool {
        self.0.send(v1::ExecInput { kind: Some(kind) }).await.is_ok()
    }
}

impl ExecOutput {
    /// The next output; none after the exit.
    ///
    /// # Errors
    /// [`Error::Lost`] when the connection ends before the command does: the outcome is not known then. What the gateway
    /// answers otherwise.
    pub async fn next(&mut self) -> Result<Option<Output>, Error> {
        if self.ended {
            return Ok(None);
        }
        loop {
            let Some(message) = self.stream.message().await.map_err(lost)? else {
                return Err(Error::Lost("the stream ended before the command did".to_owned()));
            };
            // A kind of a newer gateway is skipped.
            let Some(kind) = message.kind else { continue };
            return Ok(Some(match kind {
                exec_output::Kind::Started(started) => Output::Started(started),
                exec_output::Kind::Stdout(bytes) => Output::Stdout(bytes),
                exec_output::Kind::Stderr(bytes) => Output::Stderr(bytes),
                exec_output::Kind::Exit(exit) => {
                    self.ended = true;
                    Output::Exit(exit)
                }
            }));
        }
    }
}

fn lost(status: tonic::Status) -> Error {
    if Error::is_transport(&status) { Error::Lost(crate::error::chain(&status)) } else { status.into() }
}
