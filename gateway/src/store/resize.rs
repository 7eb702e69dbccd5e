//! The one part of a spec that changes while a sandbox is neither stopped nor made anew: its disk's size.

use std::sync::Arc;

use torpor_sandbox::SandboxId;

use super::{
    Applied, Change, RequestKey, Store, StoreError,
    sandboxes::{json, load, remember, swap},
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
            let mut record = load(conn, id.as_str())?;
            if let Some(request) = &request {
                remember(conn, request, &id)?;
            }
            if record.spec.resources.disk_bytes == disk_bytes {
                let record = Arc::new(record);
                return Ok(Applied { record, changed: false, gone: false, replayed: false });
            }
            record.spec.resources.disk_bytes = disk_bytes;
            let spec = json(&id, "spec", &record.spec)?;
            conn.prepare_cached("UPDATE sandboxes SET spec = ?2 WHERE id = ?1")?
                .execute((id.as_str(), spec))?;
            let state = record.state.clone();
            let record = Arc::new(swap(conn, record, state, "")?);
            changes.push(Change { number: record.change, record: record.clone(), gone: false });
            Ok(Applied { record, changed: true, gone: false, replayed: false })
        })
        .await
    }
}
