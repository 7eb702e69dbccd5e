//! The parts of a spec that change while a sandbox is neither stopped nor made anew: its disk's size and its egress policy.

use torpor_sandbox::{Egress, Phase, SandboxId};

use super::{
    Applied, RequestKey, Store, StoreError,
    requests::{Begun, begin, remember},
    sandboxes::load,
    update::write,
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
            let mut after = record.clone();
            after.spec.resources.disk_bytes = disk_bytes;
            write(conn, changes, &record, after)
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
            let record = match begin(conn, &key, expected, request.as_ref())? {
                Begun::Before(before) => return Ok(before),
                Begun::New(record) => *record,
            };
            if record.state.phase == Phase::Deleting {
                return Err(StoreError::Deleting(record.name));
            }
            let mut after = record.clone();
            after.spec.egress = egress;
            // What was asked for last counts, also when an older update is finished later.
            if let Some(update) = &mut after.state.update {
                update.change.egress = None;
            }
            write(conn, changes, &record, after)
        })
        .await
    }
}
