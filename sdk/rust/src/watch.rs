//! Changes of sandboxes, across restarts of the gateway.

use std::time::Duration;

use tokio::time::Instant;
use tonic::{Code, Status, Streaming};
use torpor_proto::v1::{self, sandbox_event::Kind, sandboxes_client::SandboxesClient};

use crate::{endpoint::Transport, error::Error, retry::Retry};

/// How long a gateway may be away before a watch gives up.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a watch tells.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The present states follow, anew: at the beginning, and when the gateway no longer knew the cursor. What isn't among
    /// them when [`Event::Synced`] comes is gone.
    Reset,
    /// The present state of one sandbox.
    Snapshot(v1::Sandbox),
    /// A sandbox after a change.
    Changed(v1::Sandbox),
    /// A sandbox that is gone, as it was last.
    Deleted(v1::Sandbox),
    /// All present states were sent.
    Synced,
}

/// A stream of events that goes on where it was when the connection is lost.
pub struct Watch {
    client: SandboxesClient<Transport>,
    retry: Retry,
    request: v1::WatchSandboxesRequest,
    stream: Option<Streaming<v1::SandboxEvent>>,
    announced: bool,
    failures: u32,
    away_since: Option<Instant>,
}

impl Watch {
    pub(crate) fn new(
        client: SandboxesClient<Transport>,
        retry: Retry,
        request: v1::WatchSandboxesRequest,
    ) -> Self {
        Self { client, retry, request, stream: None, announced: false, failures: 0, away_since: None }
    }

    /// Where to go on from later; empty until [`Event::Synced`].
    pub fn cursor(&self) -> &str {
        &self.request.cursor
    }

    /// The next event. Ends only with an error. May be dropped while it waits: nothing is lost.
    ///
    /// # Errors
    /// What the gateway answers, but for a lost connection and an old cursor, which are mended; [`Error::Lost`] after the
    /// gateway was away for a minute.
    pub async fn next(&mut self) -> Result<Event, Error> {
        loop {
            if self.request.cursor.is_empty() && self.stream.is_none() && !self.announced {
                self.announced = true;
                return Ok(Event::Reset);
            }
            match self.message().await {
                Ok(message) => {
                    self.failures = 0;
                    self.away_since = None;
                    if let Some(event) = self.take(message) {
                        return Ok(event);
                    }
                }
                Err(status) => {
                    self.stream = None;
                    self.mend(status).await?;
                }
            }
        }
    }

    async fn message(&mut self) -> Result<v1::SandboxEvent, Status> {
        if self.stream.is_none() {
            self.stream = Some(self.client.watch(self.request.clone()).await?.into_inner());
        }
        let ended = || Status::unavailable("the gateway ended the watch");
        match &mut self.stream {
            Some(stream) => stream.message().await?.ok_or_else(ended),
            None => Err(ended()),
        }
    }

    fn take(&mut self, message: v1::SandboxEvent) -> Option<Event> {
        let kind = message.kind();
        // In the middle of the present states a cursor would skip those that were not sent yet.
        if kind != Kind::Snapshot && !message.cursor.is_empty() {
            self.request.cursor = message.cursor;
        }
        match (kind, message.sandbox) {
            (Kind::Snapshot, Some(sandbox)) => Some(Event::Snapshot(sandbox)),
            (Kind::Changed, Some(sandbox)) => Some(Event::Changed(sandbox)),
            (Kind::Deleted, Some(sandbox)) => Some(Event::Deleted(sandbox)),
            (Kind::Synced, _) => Some(Event::Synced),
            // A kind of a newer gateway.
            _ => None,
        }
    }

    async fn mend(&mut self, status: Status) -> Result<(), Error> {
        if status.code() == Code::OutOfRange && !self.request.cursor.is_empty() {
            self.request.cursor.clear();
            self.announced = false;
            return Ok(());
        }
        let since = *self.away_since.get_or_insert_with(Instant::now);
        if !Error::is_transport(&status) || since.elapsed() > PATIENCE {
            return Err(status.into());
        }
        // Without a cursor the states come again from the beginning.
        self.announced = !self.request.cursor.is_empty();
        tokio::time::sleep(self.retry.pause(self.failures)).await;
        self.failures += 1;
        Ok(())
    }
}
