//! Where a sandbox may send to, its exposed ports, and connections to its ports.

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use torpor_proto::v1::{self, forward_input, forward_output, ssh_input};

use crate::{
    client::{Client, target},
    error::{Error, chain},
};

/// Inputs that may wait for the network: beyond it the writer waits, so that memory stays flat.
const INPUTS_IN_FLIGHT: usize = 4;

/// A connection to a port of a sandbox. Dropping both halves breaks it.
pub struct Forward {
    /// To the sandbox. Dropped without [`ForwardInput::close`], the connection is broken.
    pub input: ForwardInput,
    /// From the sandbox.
    pub output: ForwardOutput,
}

/// The way into the sandbox.
pub struct ForwardInput(mpsc::Sender<v1::ForwardInput>);

/// The way out of the sandbox.
pub struct ForwardOutput {
    stream: Streaming<v1::ForwardOutput>,
    ended: bool,
}

/// The way to the SSH server of a sandbox.
pub struct SshInput(mpsc::Sender<v1::SshInput>);

impl SshInput {
    /// Sends bytes; waits while the other side doesn't read. False: the connection has ended.
    pub async fn write(&self, bytes: Bytes) -> bool {
        self.send(ssh_input::Kind::Data(bytes)).await
    }

    /// Nothing more comes. False: the connection has ended.
    pub async fn close(&self) -> bool {
        self.send(ssh_input::Kind::Close(v1::ForwardClose {})).await
    }

    async fn send(&self, kind: ssh_input::Kind) -> bool {
        self.0.send(v1::SshInput { kind: Some(kind) }).await.is_ok()
    }
}

impl ForwardInput {
    /// Sends bytes; waits while the other side doesn't read. False: the connection has ended.
    pub async fn write(&self, bytes: Bytes) -> bool {
        self.send(forward_input::Kind::Data(bytes)).await
    }

    /// Says that nothing more comes; what comes from the sandbox goes on. False: the connection has ended.
    pub async fn close(&self) -> bool {
        self.send(forward_input::Kind::Close(v1::ForwardClose {})).await
    }

    async fn send(&self, kind: forward_input::Kind) -> bool {
        self.0.send(v1::ForwardInput { kind: Some(kind) }).await.is_ok()
    }
}

impl ForwardOutput {
    /// The next bytes; none when the sandbox has said that nothing more comes.
    ///
    /// # Errors
    /// FAILED_PRECONDITION when the sandbox has left Ready, ABORTED when the connection broke in the sandbox,
    /// [`Error::Lost`] when that to the gateway did.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        while !self.ended {
            let Some(message) = self.stream.message().await.map_err(lost)? else {
                return Err(Error::Lost("the stream ended before the connection did".to_owned()));
            };
            match message.kind {
                Some(forward_output::Kind::Data(bytes)) => return Ok(Some(bytes)),
                Some(forward_output::Kind::Close(_)) => self.ended = true,
                // A kind of a newer gateway.
                _ => {}
            }
        }
        Ok(None)
    }
}

fn lost(status: tonic::Status) -> Error {
    if Error::is_transport(&status) { Error::Lost(chain(&status)) } else { status.into() }
}

impl Client {
    /// Replaces where a sandbox may send to, in every phase; none: by the gateway's default from now on.
    ///
    /// # Errors
    /// See [`Client`]; INVALID_ARGUMENT names the rule that is none.
    pub async fn set_egress(&self, sandbox: &str, egress: Option<v1::Egress>) -> Result<v1::Sandbox, Error> {
        let request = v1::SetEgressRequest { target: Some(target(sandbox)), egress };
        retried!(self.sandboxes().set_egress(request))
    }

    /// Makes a port of a sandbox one of the gateway's host, for as long as the sandbox exists.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn expose(&self, request: v1::ExposeRequest) -> Result<v1::ExposedPort, Error> {
        retried!(self.sandboxes().expose(request))
    }

    /// The exposed ports of a sandbox; of all when the name is empty.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn exposed(&self, sandbox: &str) -> Result<Vec<v1::ExposedPort>, Error> {
        let request = v1::ListExposedRequest { sandbox: sandbox.to_owned() };
        let response: v1::ListExposedResponse = retried!(self.sandboxes().list_exposed(request))?;
        Ok(response.ports)
    }

    /// Takes an exposed port back. True: it was exposed.
    ///
    /// # Errors
    /// See [`Client`]; NOT_FOUND when it wasn't, unless `allow_missing`.
    pub async fn unexpose(&self, sandbox: &str, port: u32, allow_missing: bool) -> Result<bool, Error> {
        // Not made again: a repeat of a removal that worked would be told NOT_FOUND.
        let request = v1::UnexposeRequest { sandbox: sandbox.to_owned(), port, allow_missing };
        Ok(self.sandboxes().unexpose(request).await?.into_inner().removed)
    }

    /// Connects to a port of a Ready sandbox. Returns once something in the sandbox has taken the connection.
    ///
    /// # Errors
    /// See [`Client`]; FAILED_PRECONDITION outside Ready and where nothing listens.
    pub async fn forward(&self, sandbox: &str, port: u32) -> Result<Forward, Error> {
        let (sender, receiver) = mpsc::channel(INPUTS_IN_FLIGHT);
        let input = ForwardInput(sender);
        let start = v1::ForwardStart { sandbox: sandbox.to_owned(), port };
        input.send(forward_input::Kind::Start(start)).await;
        let mut stream = self.sandboxes().forward(ReceiverStream::new(receiver)).await?.into_inner();
        match stream.message().await.map_err(lost)?.and_then(|message| message.kind) {
            Some(forward_output::Kind::Connected(_)) => {
                Ok(Forward { input, output: ForwardOutput { stream, ended: false } })
            }
            _ => Err(Error::Protocol("a forward began without a word of its connection")),
        }
    }

    /// Gets leave to open SSH connections to a Ready sandbox with this public key; for ten minutes when no lifetime is given.
    ///
    /// # Errors
    /// See [`Client`]; FAILED_PRECONDITION with SSH_SERVER_MISSING when the sandbox's image has no sshd.
    pub async fn create_ssh_session(
        &self,
        sandbox: &str,
        public_key: &str,
        lifetime: Option<prost_types::Duration>,
    ) -> Result<v1::SshSession, Error> {
        let (sandbox, public_key) = (sandbox.to_owned(), public_key.to_owned());
        let request = v1::CreateSshSessionRequest { sandbox, public_key, lifetime };
        Ok(self.sandboxes().create_ssh_session(request).await?.into_inner())
    }

    /// Ends an SSH session and its connections. True: there was one.
    ///
    /// # Errors
    /// See [`Client`]; NOT_FOUND when there is none, unless `allow_missing`.
    pub async fn revoke_ssh_session(&self, token: &str, allow_missing: bool) -> Result<bool, Error> {
        // Not made again: a repeat of one that worked would be told NOT_FOUND.
        let request = v1::RevokeSshSessionRequest { token: token.to_owned(), allow_missing };
        Ok(self.sandboxes().revoke_ssh_session(request).await?.into_inner().revoked)
    }

    /// Opens an SSH connection of a session: what goes both ways is the SSH protocol.
    ///
    /// # Errors
    /// See [`Client`]; NOT_FOUND when the session is over.
    pub async fn ssh(&self, token: &str) -> Result<(SshInput, ForwardOutput), Error> {
        let (sender, receiver) = mpsc::channel(INPUTS_IN_FLIGHT);
        let input = SshInput(sender);
        input.send(ssh_input::Kind::Session(token.to_owned())).await;
        let mut stream = self.sandboxes().ssh(ReceiverStream::new(receiver)).await?.into_inner();
        match stream.message().await.map_err(lost)?.and_then(|message| message.kind) {
            Some(forward_output::Kind::Connected(_)) => Ok((input, ForwardOutput { stream, ended: false })),
            _ => Err(Error::Protocol("an SSH connection began without a word of it")),
        }
    }
}
