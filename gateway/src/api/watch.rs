//! Watching: what is, then what changes, with a cursor to go on from.

use std::{collections::HashSet, pin::Pin, sync::Arc};

use futures::Stream;
use tokio::sync::{broadcast::error::RecvError, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use torpor_proto::v1::{self, sandbox_event::Kind};
use torpor_sandbox::spec::unqualified;

use super::{Shared, convert, sandboxes::veiled, to_status};
use crate::{
    access::Caller,
    error::ApiError,
    store::{Cursor, Missed, Record, Selector, Since, Wanted},
};

/// Events that wait for a slow reader; then it is the reader's own stream that waits, and lags, and reads on.
const BUFFER: usize = 64;

type Events = Pin<Box<dyn Stream<Item = Result<v1::SandboxEvent, Status>> + Send>>;

struct Watcher {
    service: Shared,
    caller: Caller,
    wanted: Wanted,
    /// Of the last change that the reader has seen whole: while it is being caught up with, the one before that.
    cursor: Option<Cursor>,
    /// Which sandboxes the reader knows of, so that it hears of the end of those only.
    known: HashSet<String>,
    out: mpsc::Sender<Result<v1::SandboxEvent, Status>>,
}

/// The reader has gone.
struct Gone;

/// Starts a watch.
pub async fn watch(
    service: Shared,
    caller: Caller,
    request: v1::WatchSandboxesRequest,
    selector: Selector,
) -> Result<Events, ApiError> {
    let wanted = match request.sandbox.as_str() {
        "" => Wanted::Labels(selector),
        name => {
            let record = service.store.get(name).await?;
            // With labels that it doesn't have it is not one of the wanted.
            match selector.chooses(&record) {
                true => Wanted::Id(record.id.to_string()),
                false => Wanted::Id(String::new()),
            }
        }
    };
    let cursor = match request.cursor.as_str() {
        "" => None,
        text => Some(text.parse::<Cursor>()?),
    };
    // Before the first read, so that nothing falls between it and the changes.
    let changes = service.store.subscribe();
    let steps = service.progress.subscribe();
    let since = cursor.map_or(Since::START, Since::Cursor);
    let missed = service.store.changes_since(since, wanted.clone()).await?;
    let (out, events) = mpsc::channel(BUFFER);
    let mut watcher = Watcher { service, caller, wanted, cursor, known: HashSet::new(), out };
    tokio::spawn(async move {
        let kind = if cursor.is_some() { Kind::Changed } else { Kind::Snapshot };
        // Ends when the reader does.
        let _ = watcher.run(missed, kind, changes, steps).await;
    });
    Ok(Box::pin(ReceiverStream::new(events)))
}

impl Watcher {
    async fn run(
        &mut self,
        missed: Missed,
        kind: Kind,
        mut changes: tokio::sync::broadcast::Receiver<crate::store::Change>,
        mut steps: tokio::sync::broadcast::Receiver<torpor_sandbox::SandboxId>,
    ) -> Result<(), Gone> {
        let end = self.service.end.clone();
        self.catch_up(missed, kind).await?;
        self.send(Kind::Synced, None).await?;
        loop {
            tokio::select! {
                change = changes.recv() => match change {
                    Ok(change) if self.cursor.is_some_and(|seen| change.number <= seen.0) => {}
                    Ok(change) => {
                        self.cursor = Some(Cursor(change.number));
                        if change.gone {
                            let (id, name) = (change.record.id.to_string(), change.record.name.clone());
                            self.deleted(id, name).await?;
                        } else {
                            self.changed(change.record, Kind::Changed).await?;
                        }
                    }
                    Err(RecvError::Lagged(_)) => {
                        let since = self.cursor.map_or(Since::START, Since::Cursor);
                        let missed = self.read(since).await?;
                        self.catch_up(missed, Kind::Changed).await?;
                    }
                    Err(RecvError::Closed) => return Ok(()),
                },
                step = steps.recv() => {
                    if let Ok(id) = step
                        && self.known.contains(id.as_str())
                        && let Ok(record) = self.service.store.get(id.as_str()).await
                    {
                        self.changed(Arc::new(record), Kind::Changed).await?;
                    }
                },
                () = self.out.closed() => return Err(Gone),
                () = end.cancelled() => {
                    let _ = self.out.send(Err(crate::store::StoreError::Closed.into())).await;
                    return Err(Gone);
                }
            }
        }
    }

    /// A reader of whom too much was forgotten is told, and watches again.
    async fn read(&self, since: Since) -> Result<Missed, Gone> {
        match self.service.store.changes_since(since, self.wanted.clone()).await {
            Ok(missed) => Ok(missed),
            Err(error) => {
                let _ = self.out.send(Err(to_status(error.into()))).await;
                Err(Gone)
            }
        }
    }

    async fn catch_up(&mut self, mut missed: Missed, kind: Kind) -> Result<(), Gone> {
        loop {
            for record in missed.changed {
                self.changed(Arc::new(record), kind).await?;
            }
            for (id, name, _) in missed.deleted {
                // Whether the reader knew it can't be told after a break.
                self.known.insert(id.clone());
                self.deleted(id, name).await?;
            }
            let Some(next) = missed.next else { break };
            if let Since::Cursor(seen) = next {
                self.cursor = Some(seen);
            }
            missed = self.read(next).await?;
        }
        self.cursor = Some(missed.cursor);
        Ok(())
    }

    async fn changed(&mut self, record: Arc<Record>, kind: Kind) -> Result<(), Gone> {
        if !self.wanted.has(&record) {
            // Its labels were changed, or somebody else's sandbox has.
            return self.deleted(record.id.to_string(), record.name.clone()).await;
        }
        self.known.insert(record.id.to_string());
        let view = self.service.view(record).await;
        self.send(kind, Some(veiled(&self.caller, convert::sandbox(&view)))).await
    }

    async fn deleted(&mut self, id: String, name: String) -> Result<(), Gone> {
        let other = match &self.wanted {
            Wanted::Id(wanted) => *wanted != id,
            Wanted::Labels(selector) => !selector.reaches(unqualified(&name).0),
        };
        if !self.known.remove(&id) || other {
            return Ok(());
        }
        self.send(Kind::Deleted, Some(convert::buried(id, &name))).await
    }

    async fn send(&self, kind: Kind, sandbox: Option<v1::Sandbox>) -> Result<(), Gone> {
        let event = v1::SandboxEvent {
            kind: kind.into(),
            sandbox,
            cursor: self.cursor.map_or_else(String::new, |c| c.to_string()),
        };
        self.out.send(Ok(event)).await.map_err(|_| Gone)
    }
}
