//! Where a sandbox's objects are. It is noted before they are made, since the configuration may name other namespaces, or
//! another cluster, by the time they are looked for: what isn't found elsewhere is not gone.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};
use torpor_sandbox::{DriverError, SandboxId, words};

use crate::{
    driver::Inner,
    types::{GATEWAY, SANDBOX, name},
};

/// As it was when they were made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) namespace: String,
    /// The cluster: the uid of its namespace kube-system. None where that may not be read.
    #[serde(default)]
    pub(crate) cluster: Option<String>,
    /// The address that the cluster was reached by.
    pub(crate) server: String,
    /// There was an object of its name that is somebody else's, so that nothing was made.
    #[serde(default)]
    pub(crate) taken: bool,
}

impl Inner {
    /// What gives an object of a sandbox the labels by which it is found.
    pub(crate) fn label_command(&self, id: &SandboxId, kind: &str, object: &str, namespace: &str) -> String {
        let ours = &self.store.identity;
        format!("kubectl -n {namespace} label {kind} {object} --overwrite {GATEWAY}={ours} {SANDBOX}={id}")
    }

    /// Where the objects of a new sandbox of this workspace belong.
    pub(crate) async fn place_for(&self, workspace: &str) -> Result<Place, DriverError> {
        Ok(Place {
            namespace: self.namespace_for(workspace),
            cluster: self.cluster.id().await?,
            server: self.cluster.url.clone(),
            taken: false,
        })
    }

    /// Where a sandbox's objects are made: noted first, and then for good.
    pub(crate) async fn settle(&self, id: &SandboxId, workspace: &str) -> Result<String, DriverError> {
        if let Some(place) = self.store.place(id)? {
            self.is_here(id).await?;
            return Ok(place.namespace);
        }
        let place = self.place_for(workspace).await?;
        self.store.note_place(id, &place)?;
        Ok(place.namespace)
    }

    /// Why what is not found may be there all the same: it was made in another cluster than the one that is asked.
    pub(crate) async fn elsewhere(&self, id: &SandboxId) -> Result<Option<String>, DriverError> {
        let Some(place) = self.store.place(id)? else { return Ok(None) };
        let now = self.cluster.id().await?;
        let same = match (&place.cluster, &now) {
            (Some(then), Some(now)) => then == now,
            _ => place.server == self.cluster.url,
        };
        if same {
            return Ok(None);
        }
        let file = self.store.specs.of(id).join("place.json");
        Ok(Some(format!(
            "it was made in the cluster at {}, and the one that is asked now, at {}, is another one as far as can be told: name the first by `kubeconfig` and `context` under [kubernetes]; if it is the same one by another address, remove {} and start the gateway again",
            place.server,
            self.cluster.url,
            file.display()
        )))
    }

    /// Nothing is judged by what another cluster doesn't have.
    pub(crate) async fn is_here(&self, id: &SandboxId) -> Result<(), DriverError> {
        match self.elsewhere(id).await? {
            Some(text) => Err(DriverError::backend("look for its objects", text)),
            None => Ok(()),
        }
    }

    /// An object of its name was there when it was to be made. One that says it is of this very sandbox is of an earlier
    /// try, under another identity.
    pub(crate) fn note_taken(
        &self,
        id: &SandboxId,
        labels: Option<&BTreeMap<String, String>>,
    ) -> Result<(), DriverError> {
        let its_own = labels.and_then(|all| all.get(SANDBOX)).is_some_and(|one| one == id.as_str());
        match self.store.place(id)? {
            Some(place) if !its_own && !place.taken => {
                self.store.note_place(id, &Place { taken: true, ..place })
            }
            _ => Ok(()),
        }
    }

    /// Its object is made, or was its own: whoever was there before has left.
    pub(crate) fn is_not_taken(&self, id: &SandboxId) -> Result<(), DriverError> {
        match self.store.place(id)? {
            Some(place) if place.taken => self.store.note_place(id, &Place { taken: false, ..place }),
            _ => Ok(()),
        }
    }

    /// A deletion is not done while there is an object of the sandbox's name that may be its own under another label. One
    /// that was there before it is nobody's business.
    pub(crate) fn is_strangers(
        &self,
        id: &SandboxId,
        kind: &str,
        meta: &ObjectMeta,
        namespace: &str,
    ) -> Result<(), DriverError> {
        if self.store.place(id)?.is_some_and(|place| place.taken) {
            return Ok(());
        }
        let object = meta.name.clone().unwrap_or_else(|| name(id));
        let labels = meta.labels.as_ref();
        let has = labels.and_then(|all| all.get(GATEWAY)).map_or("none", String::as_str);
        let ours = &self.store.identity;
        let text = format!(
            "the {kind} {object} in {namespace} has not the label of this gateway ({GATEWAY}={ours}; its own is {}), so that it is not touched, and the sandbox is not gone while it is there. If it is the sandbox's: {}; if it is not, its owner has to remove it",
            words::said(has),
            self.label_command(id, kind, &object, namespace)
        );
        Err(DriverError::backend("delete", text))
    }
}
