//! Where sandboxes may send to: what a request says, checked, and the change of it.

use torpor_sandbox::{ComputeDriver, DriverError, Egress, Phase};

use crate::{
    error::{ApiError, Code, with_causes},
    service::{Service, Target, place_of, request_key},
    store::{Applied, Record},
};

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
    /// Replaces where a sandbox may send to: when this returns, the run there is (if any) goes by it. None: by the
    /// gateway's default from now on.
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
        let mut spec = record.spec.clone();
        spec.egress.clone_from(&egress);
        driver.check(&spec).map_err(|error| ApiError::from(error).about(&record))?;
        let id = record.id.to_string();
        let applied = self.store.set_egress(id, egress, target.expected_version, request).await?;
        let record = &applied.record;
        self.enforce(&*driver, record).await.map_err(|error| {
            let message = format!(
                "sandbox '{}': its egress policy is written, but not in force yet ({}); that is tried again by itself",
                record.name,
                with_causes(&error)
            );
            ApiError::new(Code::Unavailable, "NOT_IN_FORCE", message).about(record)
        })?;
        Ok(applied)
    }

    /// Lets the run of a sandbox go by its policy as it is written now: another request may have written one after `written`
    /// and been done first.
    async fn enforce(&self, driver: &dyn ComputeDriver, written: &Record) -> Result<(), DriverError> {
        let (mut spec, mut phase) = (written.spec.clone(), written.state.phase);
        // What rests or starts is told with its start.
        while phase == Phase::Ready {
            driver.adjust(&written.id, &spec).await?;
            // One that is gone meanwhile has no run.
            let Ok(latest) = self.store.get(written.id.as_str()).await else { break };
            if latest.spec.egress == spec.egress {
                break;
            }
            (spec, phase) = (latest.spec, latest.state.phase);
        }
        Ok(())
    }
}
