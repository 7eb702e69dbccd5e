//! The parts of a spec that change while a sandbox is neither stopped nor made anew: its disk's size and its egress policy.

use std::sync::Arc;

use rusqlite::Connection;
use torpor_sandbox::{Egress, Phase, SandboxId, SandboxSpec};

use super::{
    Applied, Change, Record, RequestKey, Store, StoreError,
    requests::{remember, repeated},
    sandboxes::{expect, json, load, swap},
};

impl Store {
    /// Writes that a sandbox's disk has this size now, whatever else has changed meanwhile: it is a fact.
    ///
    /// # Errors
    /// `NotFound`, or the database's.
    pub async fn resized(
        &self,
        id: &SandboxId,
        disk_bytes: u64,
        request: Option<RequestKey>,
    ) -> Result<Applied, StoreError> {
        let id = id.clone();
        self.write(move |conn, changes| {
            let record = load(conn, id.as_str())?;
            if let Some(request) = &request {
                remember(conn, request, id.as_str())?;
            }
            change(conn, changes, record, |spec| spec.resources.disk_bytes = disk_bytes)
        })
        .await
    }

    /// Writes where a sandbox may send to.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Deleting`, `RequestReused`, or the database's.
    pub async fn set_egress(
        &self,
        key: String,
        egress: Option<Egress>,
        expected: Option<u64>,
        request: Option<RequestKey>,
    ) -> Result<Applied, StoreError> {
        self.write_if_possible(move |conn, changes| {
            if let Some(before) = repeated(conn, request.as_ref())? {
                return Ok(before);
            }
            let record = load(conn, &key)?;
            expect(&record, expected)?;
            if record.state.phase == Phase::Deleting {
                return Err(StoreError::Deleting(record.name));
            }
            if let Some(request) = &request {
                remember(conn, request, record.id.as_str())?;
            }
            change(conn, changes, record, |spec| spec.egress = egress)
        })
        .await
    }
}

/// Writes the spec as `to` leaves it, if that is another one.
fn change(
    conn: &Connection,
    changes: &mut Vec<Change>,
    mut record: Record,
    to: impl FnOnce(&mut SandboxSpec),
) -> Result<Applied, StoreError> {
    let before = record.spec.clone();
    to(&mut record.spec);
    if record.spec == before {
        let record = Arc::new(record);
        return Ok(Applied { record, changed: false, gone: false, replayed: false });
    }
    let spec = json(&record.id, "spec", &record.spec)?;
    conn.prepare_cached("UPDATE sandboxes SET spec = ?2 WHERE id = ?1")?
        .execute((record.id.as_str(), spec))?;
    let state = record.state.clone();
    let record = Arc::new(swap(conn, record, state, "")?);
    changes.push(Change { number: record.change, record: record.clone(), gone: false });
    Ok(Applied { record, changed: true, gone: false, replayed: false })
}
