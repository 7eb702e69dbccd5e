//! Where sandboxes may send to: what a request says, checked, and the change of it.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio_util::sync::CancellationToken;
use torpor_driver_common::Turns;
use torpor_sandbox::{Change, ComputeDriver, DriverError, Egress, SandboxId, SandboxSpec};

use crate::{
    error::{ApiError, Code, with_causes},
    service::{Service, Target, place_of, request_key},
    store::{Applied, Store, StoreError},
};

/// Before what could not be done is tried again, and the longest.
const AGAIN: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Lets what runs of sandboxes go by what their records say now.
pub struct InForce {
    store: Arc<Store>,
    turns: Turns,
    /// Those for whom somebody tries again.
    again: Mutex<HashSet<SandboxId>>,
}

impl InForce {
    /// For the records of `store`.
    pub fn new(store: Arc<Store>) -> Self {
        Self { store, turns: Turns::default(), again: Mutex::default() }
    }

    /// Tells the driver of a sandbox what its record says. One at a time: who is told later read the record later, so that
    /// nobody puts an older policy in force after a newer one.
    ///
    /// # Errors
    /// The driver's; a record that can't be read is an error of the backend.
    pub async fn see_to(&self, driver: &dyn ComputeDriver, id: &SandboxId) -> Result<Change, DriverError> {
        let _turn = self.turns.turn(id).await;
        let record = match self.store.get(id.as_str()).await {
            Ok(record) => record,
            // Gone meanwhile.
            Err(StoreError::NotFound(_)) => return Ok(Change::Already),
            Err(error) => return Err(DriverError::backend("read the record", error)),
        };
        match driver.adjust(id, &record.spec).await {
            // Not made yet, or lost: there is nothing to note it in, and a start goes by its record or says what is missing.
            Err(DriverError::Missing | DriverError::DataMissing(_)) => Ok(Change::Already),
            other => other,
        }
    }

    /// Tries again, slower each time, what could not be done, until it is or the gateway ends: in phases in which nobody
    /// else would.
    async fn until_done(
        self: Arc<Self>,
        driver: Arc<dyn ComputeDriver>,
        id: SandboxId,
        end: CancellationToken,
    ) {
        if !self.again().insert(id.clone()) {
            return;
        }
        let mut pause = AGAIN;
        loop {
            tokio::select! {
                () = end.cancelled() => break,
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
            }
            match self.see_to(&*driver, &id).await {
                Ok(_) => break,
                Err(error) => {
                    tracing::warn!(%id, error = with_causes(&error), "its egress policy is not in force yet")
                }
            }
        }
        self.again().remove(&id);
    }

    fn again(&self) -> MutexGuard<'_, HashSet<SandboxId>> {
        self.again.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The policy in its usual form.
///
/// # Errors
/// `INVALID_ARGUMENT`, naming the rule.
pub fn checked(egress: Option<Egress>) -> Result<Option<Egress>, ApiError> {
    let usual = egress.map(|egress| torpor_driver_vm::egress::to_pool(&egress)).transpose();
    let usual = usual.map_err(|error| ApiError::invalid("egress.allow", with_causes(&error)))?;
    Ok(usual.as_ref().map(torpor_driver_vm::egress::from_pool))
}

impl Service {
    /// Replaces where a sandbox may send to: when this returns, whatever runs of it goes by it, in every phase. None: by
    /// the gateway's default from now on.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` names the rule; `NOT_FOUND`; `ABORTED` for a stale version; `FAILED_PRECONDITION` while it is being
    /// deleted, or where its driver can't; `UNAVAILABLE` when it is written, and not done yet: that is tried again.
    pub async fn set_egress(&self, target: Target, egress: Option<Egress>) -> Result<Applied, ApiError> {
        let egress = checked(egress)?;
        let asked = format!("{} {egress:?}", target.sandbox);
        let request = request_key(place_of(&target.sandbox), target.request_id, "set egress", &asked)?;
        let record = self.store.get(&target.sandbox).await?;
        let driver = self.driver(&record.spec.driver)?;
        // The policy only: what else of it could not be made anew today must not keep anybody from cutting it off.
        let own = &record.spec;
        let mut spec = SandboxSpec::of(&own.driver, &own.image, &own.image_digest, own.resources);
        spec.egress.clone_from(&egress);
        driver.check(&spec).map_err(|error| ApiError::from(error).about(&record))?;
        let id = record.id.to_string();
        let applied = self.store.set_egress(id, egress, target.expected_version, request).await?;
        let record = &applied.record;
        self.in_force.see_to(&*driver, &record.id).await.map_err(|error| {
            let again = self.in_force.clone().until_done(driver.clone(), record.id.clone(), self.end.clone());
            tokio::spawn(again);
            let message = format!(
                "sandbox '{}': its egress policy is written, but not in force yet ({}); that is tried again by itself",
                record.name,
                with_causes(&error)
            );
            ApiError::new(Code::Unavailable, "NOT_IN_FORCE", message).about(record)
        })?;
        Ok(applied)
    }
}
