//! Updates. Labels and annotations are written at once; a change of a spec in two writes, between which the driver does its
//! part: first that it is pending, then that it is done. Whatever happens in between leaves it pending.

use std::{collections::BTreeMap, sync::Arc};

use rusqlite::Connection;
use torpor_sandbox::{PendingUpdate, Phase, SandboxId, UpdateFailure, spec::RESERVED_PREFIXES};

use super::{
    Applied, Change, Record, RequestKey, Store, StoreError, now,
    requests::{Begun, begin},
    rows::json,
    sandboxes::{load, swap},
    watch,
};

/// Labels or annotations.
type Words = BTreeMap<String, String>;

impl Store {
    /// Writes labels and annotations in place of the present ones; those that are none stay. Annotations of Torpor's own
    /// stay, too.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Deleting`, `RequestReused`, or the database's.
    pub async fn relabel(
        &self,
        key: String,
        expected: u64,
        labels: Option<Words>,
        annotations: Option<Words>,
        request: Option<RequestKey>,
    ) -> Result<Applied, StoreError> {
        self.write_if_possible(move |conn, changes| {
            let record = match begin(conn, &key, Some(expected), request.as_ref())? {
                Begun::Before(before) => return Ok(before),
                Begun::New(record) => *record,
            };
            if record.state.phase == Phase::Deleting {
                return Err(StoreError::Deleting(record.name));
            }
            let mut after = record.clone();
            if let Some(update) = &mut after.state.update {
                // An update that is pending was asked for before: what is newer stays when it is done.
                update.labels = update.labels.take().filter(|_| labels.is_none());
                update.annotations = update.annotations.take().filter(|_| annotations.is_none());
            }
            set_words(&mut after, labels, annotations);
            write(conn, changes, &record, after)
        })
        .await
    }

    /// Writes that a sandbox, which is at rest at this version, is to be changed. From now on nothing starts it.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `RequestReused`, or the database's.
    pub async fn begin_update(
        &self,
        id: &SandboxId,
        version: u64,
        update: PendingUpdate,
        request: Option<RequestKey>,
    ) -> Result<Applied, StoreError> {
        let id = id.clone();
        self.write_if_possible(move |conn, changes| {
            let record = match begin(conn, id.as_str(), Some(version), request.as_ref())? {
                Begun::Before(before) => return Ok(before),
                Begun::New(record) => *record,
            };
            let mut after = record.clone();
            after.state.update = Some(Box::new(update));
            write(conn, changes, &record, after)
        })
        .await
    }

    /// Writes why a pending update is not done.
    ///
    /// # Errors
    /// `NotFound`, or the database's.
    pub async fn note_update(&self, id: &SandboxId, failure: UpdateFailure) -> Result<Applied, StoreError> {
        self.change_update(id, move |_, update| {
            if let Some(update) = update {
                update.failure = Some(failure);
            }
            Ok(())
        })
        .await
    }

    /// Gives up what a pending update has not done: only that it must be looked after stays.
    ///
    /// # Errors
    /// `NotFound`, or the database's.
    pub async fn abandon_update(&self, id: &SandboxId) -> Result<Applied, StoreError> {
        self.change_update(id, |_, update| {
            if let Some(update) = update {
                (update.change, update.labels, update.annotations) = Default::default();
            }
            Ok(())
        })
        .await
    }

    /// Writes that nothing of a pending update was done nor ever will be; its request id is free again.
    ///
    /// # Errors
    /// `NotFound`, or the database's.
    pub async fn drop_update(&self, id: &SandboxId) -> Result<Applied, StoreError> {
        self.change_update(id, |conn, update| {
            if let Some(request) = update.take().and_then(|update| update.request) {
                conn.prepare_cached("DELETE FROM requests WHERE request_id = ?1")?.execute([request])?;
            }
            Ok(())
        })
        .await
    }

    async fn change_update(
        &self,
        id: &SandboxId,
        change: impl FnOnce(&Connection, &mut Option<Box<PendingUpdate>>) -> Result<(), StoreError>
        + Send
        + 'static,
    ) -> Result<Applied, StoreError> {
        let id = id.clone();
        self.write(move |conn, changes| {
            let record = load(conn, id.as_str())?;
            let mut after = record.clone();
            change(conn, &mut after.state.update)?;
            write(conn, changes, &record, after)
        })
        .await
    }

    /// Writes what a pending update asked for, now that the driver goes by it. The disk has `disk_bytes`.
    ///
    /// # Errors
    /// `NotFound`, or the database's.
    pub async fn end_update(&self, id: &SandboxId, disk_bytes: u64) -> Result<Applied, StoreError> {
        let id = id.clone();
        self.write(move |conn, changes| {
            let record = load(conn, id.as_str())?;
            let mut after = record.clone();
            if let Some(update) = after.state.update.take() {
                update.change.apply(&mut after.spec);
                after.spec.resources.disk_bytes = disk_bytes;
                set_words(&mut after, update.labels, update.annotations);
            }
            write(conn, changes, &record, after)
        })
        .await
    }
}

fn set_words(record: &mut Record, labels: Option<Words>, annotations: Option<Words>) {
    let ours = |key: &String| RESERVED_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
    let replace = |present: &mut Words, wanted: Option<Words>| {
        let Some(wanted) = wanted else { return };
        present.retain(|key, _| ours(key));
        present.extend(wanted);
    };
    replace(&mut record.labels, labels);
    replace(&mut record.annotations, annotations);
}

/// Writes what `after` is, if that is something else than `before`.
pub(super) fn write(
    conn: &Connection,
    changes: &mut Vec<Change>,
    before: &Record,
    after: Record,
) -> Result<Applied, StoreError> {
    let same = before.spec == after.spec
        && before.state == after.state
        && before.labels == after.labels
        && before.annotations == after.annotations;
    if same {
        return Ok(Applied { record: Arc::new(after), changed: false, gone: false, replayed: false });
    }
    let id = &after.id;
    conn.prepare_cached("UPDATE sandboxes SET spec = ?2, labels = ?3, annotations = ?4 WHERE id = ?1")?
        .execute((
            id.as_str(),
            json(id, "spec", &after.spec)?,
            json(id, "labels", &after.labels)?,
            json(id, "annotations", &after.annotations)?,
        ))?;
    let state = after.state.clone();
    let record = Arc::new(swap(conn, after, state, "")?);
    if before.labels != record.labels {
        // For those who watch by labels that it no longer has, it is as good as deleted.
        watch::bury(conn, &record, record.change, now())?;
    }
    changes.push(Change { number: record.change, record: record.clone(), gone: false, ended: None });
    Ok(Applied { record, changed: true, gone: false, replayed: false })
}
