//! What can be changed of a sandbox that no pod runs: what its agent is told at every start, and its pods' limits and grace.

use std::sync::Arc;

use kube::{
    Api,
    api::{Patch, PatchParams},
    core::DynamicObject,
};
use serde_json::json;
use tokio::time::sleep;
use torpor_sandbox::{Change, DriverError, Field, SandboxId, SandboxSpec};

use crate::{
    client::{LIMIT, Lane, MANAGER, if_there},
    driver::Inner,
    manifest,
    start::{AGAIN, PATCHES},
    types::name,
};

/// All but the workspace's size, and egress, which is the cluster's network policies' to say.
pub(crate) const UPDATES: &[Field] = {
    use Field::*;
    &[Command, Environment, Workdir, User, Cpus, Memory, Restart, StopGrace, Endpoints, Stdin, Tty]
};

/// Why not the others.
pub(crate) fn why_not(field: Field) -> Option<&'static str> {
    match field {
        Field::Disk => {
            Some("not every storage class lets a claim grow: `kubectl edit pvc`, where yours does")
        }
        Field::Egress => Some("where a pod may send to is the cluster's network policies' to say"),
        _ => None,
    }
}

impl Inner {
    pub(crate) async fn update(
        self: &Arc<Self>,
        id: &SandboxId,
        spec: &SandboxSpec,
    ) -> Result<Change, DriverError> {
        let turn = self.turns.turn(id).await;
        self.store.specs.read(id)?;
        let (inner, wanted, spec) = (self.clone(), id.clone(), spec.clone());
        let write = async move {
            let fitted = inner.fit_template(&wanted, &spec).await?;
            let written = inner.store.specs.write(&wanted, &spec)?;
            Ok(if fitted { Change::Done } else { written })
        };
        self.turns.step(id, &turn, write).await
    }

    /// Makes the pods that come like the spec; whether anything was different. What others have put there stays.
    async fn fit_template(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<bool, DriverError> {
        let (object, namespace) = (name(id), self.namespace_of(id)?);
        let what = format!("change the pod template of {object}");
        for attempt in 1.. {
            let served = self.cluster.served().await?;
            let client = self.cluster.client.clone();
            let api: Api<DynamicObject> = Api::namespaced_with(client, &namespace, &served.resource());
            let found = if_there(self.cluster.call(Lane::Fast, LIMIT, &what, api.get(&object)).await)?;
            let Some(found) = found.filter(|found| self.is_ours(&found.metadata, id)) else {
                return Err(self.absence(id, "update").await);
            };
            let before = &found.data["spec"]["podTemplate"]["spec"];
            let mut pod = before.clone();
            if !manifest::fit(&self.config, spec, &mut pod) {
                let text = format!("it has no container '{}' any more", manifest::CONTAINER);
                return Err(DriverError::backend(what, text));
            }
            if pod == *before {
                return Ok(false);
            }
            // A merge takes lists whole: at the version that was read, or not at all.
            let patch = json!({
                "metadata": {"resourceVersion": found.metadata.resource_version},
                "spec": {"podTemplate": {"spec": {
                    "containers": pod["containers"],
                    "terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"],
                }}},
            });
            let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
            let patch = Patch::Merge(&patch);
            let done = self.cluster.call(Lane::Fast, LIMIT, &what, api.patch(&object, &params, &patch)).await;
            match done {
                Ok(_) => return Ok(true),
                Err(error) if (error.is_conflict() || error.is_unknown_version()) && attempt < PATCHES => {
                    sleep(AGAIN / 4 * attempt).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(DriverError::backend(what, "somebody else changes it all the time"))
    }
}
