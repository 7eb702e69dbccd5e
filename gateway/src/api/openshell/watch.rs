//! A stream of what happens to one sandbox, with a cursor to go on from.

use std::collections::BTreeMap;

use futures::StreamExt as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use torpor_proto::{
    openshell::v1::{self as os, sandbox_stream_event::Payload},
    v1::{self, logs_request::Source, sandbox_event::Kind, sandboxes_server::Sandboxes as _},
};
use torpor_sandbox::SandboxId;

use super::{Events, OpenShellApi, call::Call, logs};
use crate::{error::ApiError, store::StoreError};

/// Events that wait for a slow reader.
const BUFFER: usize = 64;
/// What begins a cursor of ours.
const PREFIX: &str = "o1.";

/// What the reader has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Cursor {
    /// As `torpor.v1` has it.
    change: String,
    /// The sandbox's version.
    version: u64,
}

impl Cursor {
    fn parse(text: &str) -> Result<Self, ApiError> {
        let parsed = text.strip_prefix(PREFIX).and_then(|rest| rest.split_once('.'));
        let parsed = parsed.and_then(|(version, change)| Some((version.parse().ok()?, change)));
        let wrong = || StoreError::BadToken(format!("'{}' is not a cursor of ours", text.escape_debug()));
        let (version, change) = parsed.ok_or_else(wrong)?;
        Ok(Self { change: change.to_owned(), version })
    }

    fn text(&self) -> String {
        if self.change.is_empty() {
            String::new()
        } else {
            format!("{PREFIX}{}.{}", self.version, self.change)
        }
    }
}

struct Watcher {
    api: OpenShellApi,
    call: Call,
    sandbox: SandboxId,
    wanted: os::WatchSandboxRequest,
    source: Option<Source>,
    cursor: Cursor,
    out: mpsc::Sender<Result<os::SandboxStreamEvent, Status>>,
}

/// The stream is over.
struct Over;

type Pieces = Events<v1::LogChunk>;

/// Starts a watch.
pub async fn watch(
    api: &OpenShellApi,
    call: Call,
    mut message: os::WatchSandboxRequest,
) -> Result<Events<os::SandboxStreamEvent>, Status> {
    let record = call.record(&api.service, message.workspace_scope.take(), &message.sandbox).await?;
    let sources = logs::wanted(&message.log_sources, &message.log_min_level)?;
    let cursor = match message.resume_after_cursor.as_str() {
        "" => Cursor::default(),
        text => Cursor::parse(text)?,
    };
    let request = v1::WatchSandboxesRequest {
        sandbox: record.id.to_string(),
        cursor: cursor.change.clone(),
        ..v1::WatchSandboxesRequest::default()
    };
    let changes = api.sandboxes().watch(call.ask(call.caller.current(), request)).await?.into_inner();
    let (out, events) = mpsc::channel(BUFFER);
    let source = sources.sandbox.filter(|_| message.follow_logs);
    let mut watcher =
        Watcher { api: api.clone(), call, sandbox: record.id, wanted: message, source, cursor, out };
    tokio::spawn(async move {
        // Ends when the reader does, the sandbox does, or all was said that was asked for.
        let _ = watcher.run(changes).await;
    });
    Ok(Box::pin(ReceiverStream::new(events)))
}

impl Watcher {
    async fn run(&mut self, mut changes: Events<v1::SandboxEvent>) -> Result<(), Over> {
        let follows = self.wanted.follow_status || self.wanted.follow_logs || self.wanted.follow_events;
        let mut pieces = self.open(self.wanted.log_tail_lines).await?;
        let mut lines = self.lines();
        let (mut ready, mut first) = (false, None);
        loop {
            tokio::select! {
                change = changes.next() => {
                    let change = match change {
                        Some(Ok(change)) => change,
                        Some(Err(status)) => return self.fail(status).await,
                        None => return Err(Over),
                    };
                    let change = match (change.kind(), first.take()) {
                        // Its cursor comes when all present states were sent.
                        (Kind::Snapshot, _) => {
                            first = Some(change);
                            continue;
                        }
                        (Kind::Synced, Some(begun)) => v1::SandboxEvent { cursor: change.cursor, ..begun },
                        (Kind::Synced, None) if follows => continue,
                        (Kind::Synced, None) => return Err(Over),
                        _ => change,
                    };
                    let was_ready = std::mem::replace(&mut ready, is_ready(&change));
                    self.changed(change).await?;
                    if !follows {
                        return Err(Over);
                    }
                    // It was woken: what it writes from now on.
                    if ready && !was_ready && pieces.is_none() {
                        (pieces, lines) = (self.open(0).await?, self.lines());
                    }
                }
                piece = next(&mut pieces) => match piece {
                    Some(Ok(piece)) => self.say(lines.push(&piece)).await?,
                    // At rest there is nothing to follow; the state says why.
                    Some(Err(_)) | None => {
                        pieces = None;
                        let rest = std::mem::replace(&mut lines, self.lines());
                        self.say(rest.finish()).await?;
                    }
                },
                () = self.out.closed() => return Err(Over),
            }
        }
    }

    fn lines(&self) -> logs::Lines {
        logs::Lines::new(self.sandbox.as_str(), self.source.unwrap_or_default())
    }

    /// What the sandbox writes, when that is wanted and there is something.
    async fn open(&self, tail: u32) -> Result<Option<Pieces>, Over> {
        let Some(source) = self.source else { return Ok(None) };
        let opened = logs::pieces(&self.api, &self.call, self.sandbox.as_str(), source, tail, true).await;
        match opened {
            Ok(pieces) => Ok(Some(pieces)),
            Err(status) => {
                let message = format!("no logs at present: {}", status.message());
                self.send(Payload::Warning(os::SandboxStreamWarning { message })).await?;
                Ok(None)
            }
        }
    }

    async fn changed(&mut self, change: v1::SandboxEvent) -> Result<(), Over> {
        let kind = change.kind();
        let sandbox = change.sandbox.unwrap_or_default();
        let before = self.cursor.version;
        self.cursor = Cursor { change: change.cursor, version: sandbox.version };
        if kind == Kind::Deleted {
            let gone =
                v1::SandboxStatus { phase: v1::Phase::Deleting.into(), ..v1::SandboxStatus::default() };
            let sandbox = v1::Sandbox { status: Some(gone), ..sandbox };
            self.show(sandbox).await?;
            return Err(Over);
        }
        // Every change of phase is one of the version; the steps of a start are none.
        if self.wanted.follow_events && self.cursor.version > before {
            self.events(before).await?;
        }
        let phase = sandbox.status.as_ref().map(v1::SandboxStatus::phase).unwrap_or_default();
        if self.wanted.follow_status || kind == Kind::Snapshot {
            self.show(sandbox).await?;
        }
        if self.wanted.stop_on_terminal && is_terminal(phase) { Err(Over) } else { Ok(()) }
    }

    async fn show(&self, sandbox: v1::Sandbox) -> Result<(), Over> {
        match self.api.show(sandbox).await {
            Ok(shown) => self.send(Payload::Sandbox(shown)).await,
            Err(status) => self.fail(status).await,
        }
    }

    /// The phase changes that the reader hasn't heard of; of those before it came, as many as it asked for.
    async fn events(&self, before: u64) -> Result<(), Over> {
        // A sandbox that went away in between has no history.
        let Ok(all) = logs::transitions(&self.api, &self.call, self.sandbox.as_str()).await else {
            return Ok(());
        };
        let tail = if before == 0 { self.wanted.event_tail as usize } else { usize::MAX };
        let since = self.wanted.since_time;
        let new: Vec<_> = all
            .into_iter()
            .filter(|t| t.version > before && t.version <= self.cursor.version)
            .filter(|t| before > 0 || logs::after(t.time.as_ref(), since.as_ref()))
            .collect();
        let skip = new.len().saturating_sub(tail);
        for transition in new.into_iter().skip(skip) {
            self.send(Payload::Event(event(transition))).await?;
        }
        Ok(())
    }

    async fn say(&self, lines: Vec<os::SandboxLogLine>) -> Result<(), Over> {
        let since = self.wanted.since_time.as_ref();
        for line in lines.into_iter().filter(|line| logs::after(line.event_time.as_ref(), since)) {
            self.send(Payload::Log(line)).await?;
        }
        Ok(())
    }

    async fn send(&self, payload: Payload) -> Result<(), Over> {
        let event = os::SandboxStreamEvent { payload: Some(payload), cursor: self.cursor.text() };
        self.out.send(Ok(event)).await.map_err(|_| Over)
    }

    async fn fail(&self, status: Status) -> Result<(), Over> {
        // The reader may have gone.
        let _ = self.out.send(Err(status)).await;
        Err(Over)
    }
}

/// The next piece, if there ever is one.
async fn next(pieces: &mut Option<Pieces>) -> Option<Result<v1::LogChunk, Status>> {
    match pieces {
        Some(pieces) => pieces.next().await,
        None => std::future::pending().await,
    }
}

fn is_ready(change: &v1::SandboxEvent) -> bool {
    let status = change.sandbox.as_ref().and_then(|sandbox| sandbox.status.as_ref());
    status.is_some_and(|status| status.phase() == v1::Phase::Ready)
}

/// A phase that lasts until somebody asks for another one.
fn is_terminal(phase: v1::Phase) -> bool {
    use v1::Phase::{Completed, Error, Ready, Stopped, Suspended};
    matches!(phase, Ready | Suspended | Stopped | Completed | Error)
}

fn event(transition: v1::Transition) -> os::PlatformEvent {
    let (from, to) = (logs::phase_name(transition.from()), logs::phase_name(transition.to()));
    let metadata: BTreeMap<String, String> = [
        ("from", from),
        ("to", to.clone()),
        ("run", transition.run.to_string()),
        ("version", transition.version.to_string()),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect();
    os::PlatformEvent {
        event_time: transition.time,
        source: "gateway".to_owned(),
        r#type: "PhaseChanged".to_owned(),
        reason: to,
        message: transition.why,
        metadata,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_comes_back_as_it_was() {
        let cursor = Cursor { change: "c1.17".into(), version: 4 };
        assert_eq!(Cursor::parse(&cursor.text()).unwrap(), cursor);
        assert_eq!(Cursor::default().text(), "");
        for text in ["c1.4", "o1.", "o1.x.c1.4", "o1.4"] {
            assert!(Cursor::parse(text).is_err(), "{text}");
        }
    }
}
