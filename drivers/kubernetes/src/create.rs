//! Create, delete, and what there is of either.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use kube::{
    Api,
    api::{DeleteParams, ListParams, PostParams, Preconditions, PropagationPolicy},
    core::{ApiResource, DynamicObject, ObjectMeta},
};
use serde_json::Value;
use tokio::time::Instant;
use torpor_sandbox::{Change, DriverError, SandboxId, SandboxSpec, failpoint::hit};

use crate::{
    cache::{News, PAGE},
    client::{ApiError, LIMIT, Lane, MANAGER, PAGE_LIMIT, claim_resource, if_there},
    driver::{Inner, no_kind},
    manifest,
    types::{Claim, Sandbox, claim_name, id_of, name},
};

/// Tries at a deletion whose object is being replaced.
const TRIES: usize = 5;

impl Inner {
    pub(crate) async fn create(
        self: &Arc<Self>,
        id: &SandboxId,
        spec: &SandboxSpec,
    ) -> Result<Change, DriverError> {
        let turn = self.turns.turn(id).await;
        let (inner, wanted, spec) = (self.clone(), id.clone(), spec.clone());
        self.turns.step(id, &turn, async move { inner.make(&wanted, &spec).await }).await
    }

    async fn make(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        // Nothing is written for a cluster that has no such thing as a Sandbox.
        match self.cluster.served().await {
            Err(ApiError::Absent) => return Err(no_kind()),
            served => served?,
        };
        let noted = self.store.specs.write(id, spec)?;
        let namespace = self.settle(id, &spec.workspace).await?;
        hit("kubernetes.create.noted")?;
        let made_claim = if manifest::has_own_claim(&self.config, spec) {
            self.make_claim(id, spec, &namespace).await?
        } else {
            false
        };
        hit("kubernetes.create.claimed")?;
        let made = self.make_sandbox(id, spec, &namespace).await?;
        self.is_not_taken(id)?;
        hit("kubernetes.create.made")?;
        Ok(if made || made_claim { Change::Done } else { noted })
    }

    /// True when it was made; one of ours that is there already is as good.
    async fn make_claim(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        namespace: &str,
    ) -> Result<bool, DriverError> {
        let api = self.cluster.claims(namespace);
        let object = claim_name(id);
        if let Some(found) = self.get_claim(&api, &object).await? {
            return self.ours_or_refuse(&found.metadata, id, &object);
        }
        let claim = manifest::claim(&self.config, id, &self.store.identity, spec);
        let made =
            self.post(&format!("create the claim {object}"), namespace, &claim_resource(), claim).await;
        match made {
            Ok(_) => Ok(true),
            Err(error) if error.is_exists() => match self.get_claim(&api, &object).await? {
                Some(found) => self.ours_or_refuse(&found.metadata, id, &object),
                None => Err(error.into()),
            },
            Err(error) => Err(error.into()),
        }
    }

    /// What is there already: nothing was made when it is ours to keep.
    fn ours_or_refuse(&self, meta: &ObjectMeta, id: &SandboxId, object: &str) -> Result<bool, DriverError> {
        let ours = self.is_ours(meta, id);
        if meta.deletion_timestamp.is_some() {
            Err(DriverError::backend("create", format!("{object} is still being deleted")))
        } else if ours {
            Ok(false)
        } else {
            self.note_taken(id, meta.labels.as_ref())?;
            Err(somebody_elses(object))
        }
    }

    async fn post(
        &self,
        what: &str,
        namespace: &str,
        resource: &ApiResource,
        object: Value,
    ) -> Result<DynamicObject, ApiError> {
        let object: DynamicObject = serde_json::from_value(object).map_err(|error| ApiError::Garbled {
            what: what.to_owned(),
            source: Box::new(kube::Error::SerdeError(error)),
        })?;
        let api: Api<DynamicObject> = Api::namespaced_with(self.cluster.client.clone(), namespace, resource);
        let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
        self.cluster.call(Lane::Create, LIMIT, what, api.create(&params, &object)).await
    }

    async fn make_sandbox(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        namespace: &str,
    ) -> Result<bool, DriverError> {
        let object_name = name(id);
        if let Some(found) = self.find_sandbox(Lane::Fast, id).await? {
            return self.ours_or_refuse(&found.metadata, id, &object_name);
        }
        let what = &format!("create the sandbox {object_name}");
        let made = self.cluster.in_version(|served| async move {
            let object = manifest::sandbox(served, &self.config, id, &self.store.identity, spec);
            self.post(what, namespace, &served.resource(), object).await
        });
        match made.await {
            Ok(made) => {
                if let Ok(made) = serde_json::to_value(&made).and_then(serde_json::from_value::<Sandbox>) {
                    self.saw(id, namespace, News::Sandbox((&made).into()));
                }
                Ok(true)
            }
            // Of a try before whose answer was lost, or kube's own.
            Err(error) if error.is_exists() => match self.find_sandbox(Lane::Fast, id).await? {
                Some(found) => self.ours_or_refuse(&found.metadata, id, &object_name),
                None => Err(error.into()),
            },
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) async fn get_claim(&self, api: &Api<Claim>, object: &str) -> Result<Option<Claim>, ApiError> {
        let what = format!("get the claim {object}");
        if_there(self.cluster.call(Lane::Fast, LIMIT, &what, api.get(object)).await)
    }

    pub(crate) async fn delete(self: &Arc<Self>, id: &SandboxId) -> Result<Change, DriverError> {
        let turn = self.turns.turn(id).await;
        let known = self.store.specs.exists(id);
        self.unhear(id);
        let (inner, wanted) = (self.clone(), id.clone());
        let removed = self.turns.step(id, &turn, async move { inner.remove(&wanted).await }).await;
        match removed {
            // What has no folder here has nothing in the cluster; a cluster that is gone keeps nobody.
            Err(DriverError::Unreachable(_)) if !known => Ok(Change::Already),
            Err(error) => Err(error),
            Ok(some) => Ok(if some || known { Change::Done } else { Change::Already }),
        }
    }

    /// Removes the Sandbox with its pod, then the claim, then what is ours here. True when there was anything.
    async fn remove(&self, id: &SandboxId) -> Result<bool, DriverError> {
        let placed = self.store.namespace(id).or_else(|| self.cache.namespace(id)).is_some();
        if placed || self.store.specs.read(id).is_ok() {
            return self.remove_from(id, self.namespace_of(id)?).await;
        }
        // Nothing is noted of it: what came late of one that was deleted may be in each.
        let mut had = false;
        for namespace in self.namespaces() {
            self.store.suppose(id, &namespace);
            let removed = self.remove_from(id, namespace).await;
            self.store.forget_place(id);
            had |= removed?;
        }
        Ok(had)
    }

    async fn remove_from(&self, id: &SandboxId, namespace: String) -> Result<bool, DriverError> {
        // Without the kind there is no object of it.
        let had_sandbox = !matches!(self.cluster.served().await, Err(ApiError::Absent))
            && self.remove_sandbox(id, &namespace).await?;
        hit("kubernetes.delete.removed")?;
        // What belongs to others is never touched.
        let (claims, ours) = (self.cluster.claims(&namespace), |meta: &ObjectMeta| self.is_ours(meta, id));
        if let Some(found) = self.get_claim(&claims, &claim_name(id)).await?
            && !self.is_ours(&found.metadata, id)
        {
            self.is_strangers(id, "pvc", &found.metadata, &namespace)?;
        }
        let mut had_claim = self.remove_claim(&claims, &claim_name(id), ours).await?;
        had_claim |= self.remove_made_claims(id, &namespace).await?;
        hit("kubernetes.delete.unclaimed")?;
        if !had_sandbox && !had_claim {
            self.is_here(id).await?;
        }
        self.store.delete(id)?;
        self.failures.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(id);
        self.waits.over(id);
        Ok(had_sandbox || had_claim)
    }

    async fn remove_sandbox(&self, id: &SandboxId, namespace: &str) -> Result<bool, DriverError> {
        let object = name(id);
        let mut grace = Duration::from_secs(30);
        for attempt in 0.. {
            let found = self.find_sandbox(Lane::Fast, id).await?;
            if let Some(found) = found.as_ref().filter(|found| !self.is_ours(&found.metadata, id)) {
                self.is_strangers(id, "sandbox", &found.metadata, namespace)?;
            }
            let Some(found) = found.filter(|found| self.is_labelled(&found.metadata, id)) else {
                let pod = self.get_pod(id).await?.filter(|pod| self.is_labelled(&pod.metadata, id));
                if attempt == 0 && pod.is_none() {
                    return Ok(false);
                }
                if pod.is_some() {
                    self.end_orphan(id).await?;
                }
                break;
            };
            if let Some(pod) = self.cache.view(id).pod {
                grace = Duration::from_secs(pod.grace);
            }
            if found.metadata.deletion_timestamp.is_none() {
                let params = DeleteParams {
                    propagation_policy: Some(PropagationPolicy::Foreground),
                    preconditions: Some(Preconditions {
                        uid: found.metadata.uid.clone(),
                        resource_version: None,
                    }),
                    ..DeleteParams::default()
                };
                let what = format!("delete the sandbox {object}");
                let asked = self.cluster.on_sandboxes(Lane::Fast, namespace, &what, |api| {
                    let (object, params) = (object.clone(), params.clone());
                    async move { api.delete(&object, &params).await.map(drop) }
                });
                match asked.await {
                    Ok(()) => {}
                    Err(error) if error.is_not_found() => break,
                    // Another one of that name by now.
                    Err(error) if error.is_conflict() && attempt < TRIES => continue,
                    Err(error) => return Err(error.into()),
                }
            }
            break;
        }
        hit("kubernetes.delete.asked")?;
        self.see_gone(id, grace + self.config.stop_margin).await?;
        Ok(true)
    }

    /// Waits until object and pod are gone, and sees it.
    async fn see_gone(&self, id: &SandboxId, limit: Duration) -> Result<(), DriverError> {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let gone =
                self.until(id, left, |view| (view.sandbox.is_none() && view.pod.is_none()).then_some(()));
            if gone.await?.is_none() {
                let view = self.ask(id).await?;
                let node = view.pod.map(|pod| pod.node).filter(|node| !node.is_empty());
                let node = node.map(|node| format!("; its pod is on node {node}")).unwrap_or_default();
                let text = format!("{} is not gone after {} s{node}", name(id), limit.as_secs());
                return Err(DriverError::backend("delete", text));
            }
            let view = self.ask(id).await?;
            if view.sandbox.is_none() && view.pod.is_none() {
                return Ok(());
            }
        }
    }

    /// Every sandbox that has an object, a claim or a folder.
    pub(crate) async fn list(&self) -> Result<Vec<SandboxId>, DriverError> {
        let mut all: BTreeSet<SandboxId> = self.store.specs.list()?.into_iter().collect();
        for namespace in self.namespaces() {
            if self.cache.is_live(&namespace) {
                // What the watches tell there is what there is.
                all.extend(self.cache.ids_in(&namespace));
            } else {
                match self.cluster.sandboxes(&namespace).await {
                    Ok(api) => {
                        let listed = self.list_ids(&api, "sandboxes", &namespace, &mut all).await;
                        skip_refused(&namespace, listed)?;
                    }
                    Err(ApiError::Absent) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        for namespace in self.namespaces() {
            let api = self.cluster.claims(&namespace);
            skip_refused(&namespace, self.list_ids(&api, "claims", &namespace, &mut all).await)?;
        }
        Ok(all.into_iter().collect())
    }

    /// The ids of one kind, by its metadata, page by page.
    async fn list_ids<K>(
        &self,
        api: &Api<K>,
        kind: &str,
        namespace: &str,
        all: &mut BTreeSet<SandboxId>,
    ) -> Result<(), ApiError>
    where
        K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
    {
        let identity = &self.store.identity;
        let mut params = ListParams::default().labels(&self.selector()).limit(PAGE);
        let what = format!("list the {kind} of {namespace}");
        let mut fresh = true;
        loop {
            let page =
                match self.cluster.call(Lane::List, PAGE_LIMIT, &what, api.list_metadata(&params)).await {
                    // Once more from the beginning: what is known by now is true all the same.
                    Err(error) if error.is_expired() && fresh => {
                        fresh = false;
                        params.continue_token = None;
                        continue;
                    }
                    page => page?,
                };
            all.extend(page.items.iter().filter_map(|object| id_of(&object.metadata, identity)));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => return Ok(()),
            }
        }
    }
}

/// One namespace that is gone, with its rights, must not hide what there is in the others.
fn skip_refused(namespace: &str, listed: Result<(), ApiError>) -> Result<(), ApiError> {
    match listed {
        Err(error) if error.is_forbidden() => {
            tracing::warn!(namespace, %error, "what sandboxes have there is not looked at");
            Ok(())
        }
        other => other,
    }
}

fn somebody_elses(object: &str) -> DriverError {
    DriverError::Invalid(format!("{object} is there already and belongs to somebody else"))
}
