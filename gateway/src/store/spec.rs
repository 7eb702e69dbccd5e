//! The parts of a spec that change while a sandbox is neither stopped nor made anew: its disk's size and its egress policy.
//! And what the database knows for drivers that have lost theirs.

use std::{collections::BTreeSet, sync::Arc};

use torpor_sandbox::{Egress, Phase, Run, SandboxId, SandboxSpec};

use super::{
    Applied, RequestKey, Store, StoreError,
    requests::{Begun, begin, remember},
    rows::parsed,
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

    /// Every sandbox that a driver has made, with its spec and its run, unless it is at rest.
    ///
    /// # Errors
    /// The database's.
    pub async fn of_driver(
        self: &Arc<Self>,
        driver: &'static str,
    ) -> Result<Vec<(SandboxId, SandboxSpec, Option<Run>)>, StoreError> {
        self.read(move |conn| {
            let sql = "SELECT id, spec, phase, json_extract(state, '$.run') FROM sandboxes
                WHERE json_extract(spec, '$.driver') = ?1 AND json_extract(state, '$.created')";
            let mut chosen = conn.prepare(sql)?;
            let rows: Vec<(String, String, String, u64)> = chosen
                .query_map([driver], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?
                .collect::<Result<_, _>>()?;
            let mut all = Vec::with_capacity(rows.len());
            for (id, spec, phase, run) in rows {
                let spec = parsed(&id, "spec", &spec)?;
                let rests = matches!(phase.as_str(), "Suspended" | "Stopped" | "Completed" | "Error");
                if let Ok(id) = id.parse() {
                    all.push((id, spec, (!rests && run > 0).then_some(Run(run))));
                }
            }
            Ok(all)
        })
        .await
    }

    /// Which of these are remembered as deleted.
    ///
    /// # Errors
    /// The database's.
    pub async fn deleted(
        self: &Arc<Self>,
        ids: BTreeSet<SandboxId>,
    ) -> Result<BTreeSet<SandboxId>, StoreError> {
        if ids.is_empty() {
            return Ok(ids);
        }
        self.read(move |conn| {
            let all: BTreeSet<String> = conn
                .prepare_cached("SELECT id FROM tombstones")?
                .query_map([], |row| row.get(0))?
                .collect::<Result<_, _>>()?;
            Ok(ids.into_iter().filter(|id| all.contains(id.as_str())).collect())
        })
        .await
    }
}
