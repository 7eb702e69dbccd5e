//! Where a sandbox may send to: the part of its spec that changes in every phase.

use std::sync::Arc;

use torpor_sandbox::{Egress, Phase};

use super::{
    Applied, Change, RequestKey, Store, StoreError,
    sandboxes::{expect, json, load, remember, replayed, swap},
};

impl Store {
    /// Writes it.
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
            if let Some(request) = &request
                && let Some(id) = replayed(conn, request)?
            {
                let record = Arc::new(load(conn, &id)?);
                return Ok(Applied { record, changed: false, gone: false, replayed: true });
            }
            let mut record = load(conn, &key)?;
            expect(&record, expected)?;
            if record.state.phase == Phase::Deleting {
                return Err(StoreError::Deleting(record.name));
            }
            if let Some(request) = &request {
                remember(conn, request, &record.id)?;
            }
            if record.spec.egress == egress {
                let record = Arc::new(record);
                return Ok(Applied { record, changed: false, gone: false, replayed: false });
            }
            record.spec.egress = egress;
            let spec = json(&record.id, "spec", &record.spec)?;
            conn.prepare_cached("UPDATE sandboxes SET spec = ?2 WHERE id = ?1")?
                .execute((record.id.as_str(), spec))?;
            let state = record.state.clone();
            let record = Arc::new(swap(conn, record, state, "")?);
            changes.push(Change { number: record.change, record: record.clone(), gone: false });
            Ok(Applied { record, changed: true, gone: false, replayed: false })
        })
        .await
    }
}
