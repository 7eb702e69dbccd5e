//! What lasts of a sandbox beside the cluster's objects: its spec and its present run. And who this driver is.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use torpor_driver_common::{
    Specs,
    files::{identity, make_folder, read_json, remove_file, write_json},
};
use torpor_sandbox::{DriverError, Run, SandboxId};

use crate::config::ConfigError;

/// What is noted of a run, first before the cluster is asked for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) run: Run,
    /// The pod that runs it, once there was one. Another one is another life.
    pub(crate) pod: Option<String>,
    /// Its agent was configured: there is something to flush.
    pub(crate) configured: bool,
    /// Its agent has said that all is written out.
    pub(crate) flushed: bool,
    pub(crate) boot_id: Option<String>,
}

impl Record {
    pub(crate) fn new(run: Run) -> Self {
        Self { run, pod: None, configured: false, flushed: false, boot_id: None }
    }
}

/// The durable side of the driver: `kubernetes/` in the state directory.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub(crate) specs: Specs,
    /// Marks the objects of this state directory among those of the cluster.
    pub(crate) identity: String,
}

/// The driver's own of a state directory.
pub(crate) fn folder(state_dir: &Path) -> PathBuf {
    state_dir.join("kubernetes")
}

impl Store {
    pub(crate) fn open(state_dir: &Path) -> Result<Self, ConfigError> {
        let folder = folder(state_dir);
        let error = |what, path: &Path| {
            let path = path.to_owned();
            move |source| ConfigError::File { what, path, source }
        };
        make_folder(&folder).map_err(error("make", &folder))?;
        let path = folder.join("identity");
        let identity = identity(&path).map_err(error("read or make", &path))?;
        Ok(Self { specs: Specs::new(folder), identity })
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

    /// The uids of the claims that the controller has made for it, by their names, as they were in its last run.
    pub(crate) fn claims(&self, id: &SandboxId) -> Result<BTreeMap<String, String>, DriverError> {
        Ok(read_json(&self.specs.of(id).join("claims.json"))?.unwrap_or_default())
    }

    pub(crate) fn note_claims(
        &self,
        id: &SandboxId,
        claims: &BTreeMap<String, String>,
    ) -> Result<(), DriverError> {
        write_json(&self.specs.of(id).join("claims.json"), claims)
    }
}
