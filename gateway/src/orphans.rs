//! What the drivers have and no record knows: said at once; its compute is ended after a while, its storage never.
//!
//! A driver lists only what carries the identity of this gateway's state directory, so nothing of anybody else's is ended.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;
use torpor_sandbox::{ComputeDriver, Observed, SandboxId};

use crate::{drivers::Drivers, reconcile::Reconciler, store::Store};

/// Looks as often in every grace time.
const LOOKS: u32 = 2;
const SOONEST: Duration = Duration::from_millis(100);

/// Looks for orphans until the gateway ends.
pub struct Orphans {
    /// Records.
    pub store: Arc<Store>,
    /// Backends.
    pub drivers: Arc<Drivers>,
    /// Ends compute.
    pub reconciler: Arc<Reconciler>,
    /// How long compute may be there without a record.
    pub grace: Duration,
    /// The gateway's end.
    pub end: CancellationToken,
}

impl Orphans {
    /// See the module.
    pub async fn look_after(self) {
        let mut since = HashMap::new();
        loop {
            self.look(&mut since).await;
            tokio::select! {
                () = tokio::time::sleep((self.grace / LOOKS).max(SOONEST)) => {}
                () = self.end.cancelled() => return,
            }
        }
    }

    async fn look(&self, since: &mut HashMap<SandboxId, Instant>) {
        let mut seen = Vec::new();
        for driver in self.drivers.all() {
            let name = driver.capabilities().name;
            let (ids, known) = match (driver.list().await, self.store.all_ids().await) {
                (Ok(ids), Ok(known)) => (ids, known),
                (Err(error), _) => {
                    tracing::error!(driver = name, %error, "cannot list what the driver has");
                    continue;
                }
                (_, Err(error)) => {
                    tracing::error!(%error, "cannot list the records");
                    continue;
                }
            };
            let ids: BTreeSet<SandboxId> = ids.into_iter().filter(|id| !known.contains(id)).collect();
            let late = self.clear_late(driver.as_ref(), &ids).await;
            for id in ids.into_iter().filter(|id| !late.contains(id)) {
                let observed = driver.observe(&id).await.unwrap_or_else(|e| Observed::Unknown(e.to_string()));
                // Deleted while this was looking.
                if observed == Observed::Missing || self.end.is_cancelled() {
                    continue;
                }
                let runs = matches!(observed, Observed::Running { .. } | Observed::Ended(_));
                let first = *since.entry(id.clone()).or_insert_with(|| {
                    tracing::warn!(driver = name, %id, runs, "no record knows this sandbox; its disk is left where it is");
                    Instant::now()
                });
                if runs && first.elapsed() >= self.grace {
                    self.reconciler.end_orphan(driver.as_ref(), &id).await;
                }
                seen.push(id);
            }
        }
        since.retain(|id, _| seen.contains(id));
    }

    /// Deletes what is there again of sandboxes that were deleted: a cluster may carry out a request after it was given
    /// up, and nobody else would ever remove it. Whose these are.
    async fn clear_late(&self, driver: &dyn ComputeDriver, ids: &BTreeSet<SandboxId>) -> BTreeSet<SandboxId> {
        if driver.is_of_this_host() {
            return BTreeSet::new();
        }
        let late = self.store.deleted(ids.clone()).await.unwrap_or_else(|error| {
            tracing::error!(%error, "cannot list what was deleted");
            BTreeSet::new()
        });
        for id in &late {
            if self.end.is_cancelled() {
                break;
            }
            match driver.delete(id).await {
                Ok(_) => tracing::warn!(%id, "what came late of a deleted sandbox is removed"),
                Err(error) => tracing::error!(%id, %error, "what came late of a deleted sandbox is left"),
            }
        }
        late
    }
}
