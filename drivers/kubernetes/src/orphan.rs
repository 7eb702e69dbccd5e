//! What is left of a Sandbox that somebody has deleted without what it owned, or taken our label from.

use std::time::Duration;

use kube::{
    Api,
    api::{DeleteParams, Preconditions},
    core::ObjectMeta,
};
use tokio::time::Instant;
use torpor_sandbox::{DriverError, SandboxId};

use crate::{
    client::{ApiError, LIMIT, Lane},
    driver::Inner,
    start::missing,
    types::{Claim, name},
};

/// How long a claim may take to be gone: nothing uses it any more.
const CLAIM_GONE: Duration = Duration::from_secs(30);
/// Pauses between two looks at a claim, which is not watched.
const LOOK: Duration = Duration::from_millis(200);

impl Inner {
    /// What to do about a Sandbox that is there without our label: it is not touched, and its pod lives on.
    pub(crate) async fn unlabelled(&self, id: &SandboxId) -> Result<Option<String>, ApiError> {
        let namespace = self.namespace_of(id).unwrap_or_else(|_| self.cluster.namespace.clone());
        let object = name(id);
        let found = self.find_sandbox(Lane::Look, id).await?;
        let stranger = found.filter(|found| !self.is_labelled(&found.metadata, id));
        Ok(stranger.map(|_| {
            format!(
                "the Sandbox {object} and its pod are there, but the object has lost the labels that make it this gateway's; `{}` gives them back",
                self.label_command(id, "sandbox", &object, &namespace)
            )
        }))
    }

    /// Whether a Sandbox that is not among ours is gone: neither in another cluster nor there without our labels.
    pub(crate) async fn is_gone(&self, id: &SandboxId, verb: &str) -> Result<(), DriverError> {
        self.is_here(id).await?;
        match self.unlabelled(id).await? {
            Some(text) => Err(DriverError::backend(verb, text)),
            None => Ok(()),
        }
    }

    /// Why there is no Sandbox among ours to go on with.
    pub(crate) async fn absence(&self, id: &SandboxId, verb: &str) -> DriverError {
        self.is_gone(id, verb).await.err().unwrap_or_else(|| missing(id))
    }

    /// Ends a pod of ours that nobody owns and whose Sandbox is gone: nobody else ever would. Its Sandbox was seen to be
    /// gone.
    pub(crate) async fn end_orphan(&self, id: &SandboxId) -> Result<(), DriverError> {
        let Some(pod) = self.get_pod(id).await? else { return Ok(()) };
        let meta = &pod.metadata;
        let owned = meta.owner_references.as_ref().is_some_and(|all| !all.is_empty());
        if owned || meta.deletion_timestamp.is_some() || !self.is_labelled(meta, id) {
            return Ok(());
        }
        let (namespace, object) = (self.namespace_of(id)?, name(id));
        let preconditions = Some(Preconditions { uid: meta.uid.clone(), resource_version: None });
        let params = DeleteParams { preconditions, ..DeleteParams::default() };
        let what = format!("delete the pod {object}, whose Sandbox somebody has deleted without it");
        let api = self.cluster.pods(&namespace);
        match self.cluster.call(Lane::Fast, LIMIT, &what, api.delete(&object, &params)).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
            Err(error) if error.is_forbidden() => {
                let next = format!("{what}; `kubectl -n {namespace} delete pod {object}` does it");
                Err(DriverError::backend(next, error))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the claims that the controller has made, when somebody has deleted their Sandbox without them.
    pub(crate) async fn remove_made_claims(
        &self,
        id: &SandboxId,
        namespace: &str,
    ) -> Result<bool, DriverError> {
        let mut some = false;
        for (object, uid) in self.store.claims(id)?.unwrap_or_default() {
            let same = |meta: &ObjectMeta| meta.uid.as_ref() == Some(&uid);
            some |= self.remove_claim(&self.cluster.claims(namespace), &object, same).await?;
        }
        Ok(some)
    }

    /// Removes a claim, if it is the one that is meant, and sees it gone. True when there was one.
    pub(crate) async fn remove_claim(
        &self,
        api: &Api<Claim>,
        object: &str,
        is_meant: impl Fn(&ObjectMeta) -> bool,
    ) -> Result<bool, DriverError> {
        let end = Instant::now() + CLAIM_GONE;
        let mut asked = false;
        loop {
            let Some(found) = self.get_claim(api, object).await? else { return Ok(asked) };
            if !is_meant(&found.metadata) {
                return Ok(asked);
            }
            if found.metadata.deletion_timestamp.is_none() {
                let uid = found.metadata.uid.clone();
                let preconditions = Some(Preconditions { uid, resource_version: None });
                let params = DeleteParams { preconditions, ..DeleteParams::default() };
                let what = format!("delete the claim {object}");
                let done = self.cluster.call(Lane::Fast, LIMIT, &what, api.delete(object, &params)).await;
                match done {
                    Ok(_) => {}
                    Err(error) if error.is_not_found() || error.is_conflict() => {}
                    Err(error) => return Err(error.into()),
                }
            } else if Instant::now() >= end {
                let text = format!("the claim {object} is still in use");
                return Err(DriverError::backend("delete", text));
            } else {
                tokio::time::sleep(LOOK).await;
            }
            asked = true;
        }
    }
}
