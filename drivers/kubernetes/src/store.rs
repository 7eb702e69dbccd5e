//! What lasts of a sandbox beside the cluster's objects: its spec and its present run. And who this driver is.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use serde::{Deserialize, Serialize};
use torpor_driver_common::{
    Specs,
    files::{OWNERS_FILE, identity, make_folder, read_json, remove_file, write_json, write_whole},
};
use torpor_sandbox::{DriverError, Run, SandboxId};

use crate::{
    config::{ConfigError, KubernetesConfig},
    folder,
    place::Place,
};

/// What is noted of a run, first before the cluster is asked for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) run: Run,
    /// The pod that runs it, once there was one. Another one is another life.
    pub(crate) pod: Option<String>,
    /// Its agent was configured: there is something to flush.
    pub(crate) configured: bool,
    /// Written again from the database: which pod runs it, and whether its agent was configured, is not known.
    #[serde(default)]
    pub(crate) restored: bool,
    /// Its agent has said that all is written out.
    pub(crate) flushed: bool,
    pub(crate) boot_id: Option<String>,
}

impl Record {
    pub(crate) fn new(run: Run) -> Self {
        Self { run, pod: None, configured: false, restored: false, flushed: false, boot_id: None }
    }
}

/// The durable side of the driver: `kubernetes/` in the state directory.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) specs: Specs,
    /// Marks the objects of this state directory among those of the cluster.
    pub(crate) identity: String,
    /// The namespaces of sandboxes, as their places say.
    namespaces: Mutex<HashMap<SandboxId, Arc<str>>>,
}

impl Store {
    pub(crate) fn open(config: &KubernetesConfig) -> Result<Self, ConfigError> {
        let folder = folder::path(&config.state_dir);
        let error = |what, path: &Path| {
            let path = path.to_owned();
            move |source| ConfigError::File { what, path, source }
        };
        make_folder(&folder).map_err(error("make", &folder))?;
        let path = folder.join("identity");
        if let Some(given) = &config.identity
            && folder::identity(&config.state_dir).map_err(error("read", &path))?.as_ref() != Some(given)
        {
            write_whole(&path, given.as_bytes(), OWNERS_FILE).map_err(error("write", &path))?;
        }
        let identity = identity(&path).map_err(error("read or make", &path))?;
        Ok(Self { specs: Specs::new(folder), identity, namespaces: Mutex::default() })
    }

    fn namespaces(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<str>>> {
        self.namespaces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads where the sandboxes are. Of those of which that was never noted, it is noted now, as far as their spec tells.
    pub(crate) fn find_places(&self, of: impl Fn(&str) -> Place) -> Result<(), DriverError> {
        for id in self.specs.list()? {
            let noted = match self.place(&id) {
                Ok(None) => match self.specs.read(&id) {
                    Ok(spec) => self.note_place(&id, &of(&spec.workspace)),
                    Err(error) => Err(error),
                },
                Ok(Some(place)) => {
                    self.know_place(&id, &place);
                    Ok(())
                }
                Err(error) => Err(error),
            };
            if let Err(error) = noted {
                tracing::error!(%id, %error, "it is not known where the objects of a sandbox are");
            }
        }
        Ok(())
    }

    fn know_place(&self, id: &SandboxId, place: &Place) {
        let mut all = self.namespaces();
        // One text for all of a namespace.
        let known = all.values().find(|one| ***one == *place.namespace).cloned();
        all.insert(id.clone(), known.unwrap_or_else(|| Arc::from(place.namespace.as_str())));
    }

    /// Where the objects of a sandbox are; none when that is not noted.
    pub(crate) fn place(&self, id: &SandboxId) -> Result<Option<Place>, DriverError> {
        read_json(&self.specs.of(id).join("place.json"))
    }

    pub(crate) fn note_place(&self, id: &SandboxId, place: &Place) -> Result<(), DriverError> {
        write_json(&self.specs.of(id).join("place.json"), place)?;
        self.know_place(id, place);
        Ok(())
    }

    /// The namespace of its place.
    pub(crate) fn namespace(&self, id: &SandboxId) -> Option<Arc<str>> {
        self.namespaces().get(id).cloned()
    }

    /// Looks for it there, while there is no note of it.
    pub(crate) fn suppose(&self, id: &SandboxId, namespace: &str) {
        self.namespaces().insert(id.clone(), Arc::from(namespace));
    }

    pub(crate) fn forget_place(&self, id: &SandboxId) {
        self.namespaces().remove(id);
    }

    /// Those of all places.
    pub(crate) fn all_namespaces(&self) -> BTreeSet<String> {
        self.namespaces().values().map(|one| one.to_string()).collect()
    }

    /// Removes all that is noted of a sandbox.
    pub(crate) fn delete(&self, id: &SandboxId) -> Result<(), DriverError> {
        self.specs.delete(id)?;
        self.forget_place(id);
        Ok(())
    }

    pub(crate) fn record(&self, id: &SandboxId) -> Result<Option<Record>, DriverError> {
        read_json(&self.specs.of(id).join("run.json"))
    }

    pub(crate) fn note(&self, id: &SandboxId, record: &Record) -> Result<(), DriverError> {
        write_json(&self.specs.of(id).join("run.json"), record)
    }

    pub(crate) fn forget_run(&self, id: &SandboxId) -> Result<(), DriverError> {
        remove_file(&self.specs.of(id).join("run.json"))
    }

    /// The uids of the claims that the controller has made for it, by their names, as they were in its last run. None: that
    /// was never noted.
    pub(crate) fn claims(&self, id: &SandboxId) -> Result<Option<BTreeMap<String, String>>, DriverError> {
        read_json(&self.specs.of(id).join("claims.json"))
    }

    pub(crate) fn note_claims(
        &self,
        id: &SandboxId,
        claims: &BTreeMap<String, String>,
    ) -> Result<(), DriverError> {
        write_json(&self.specs.of(id).join("claims.json"), claims)
    }
}
