//! What lasts of a sandbox beside its container: its spec, under the state directory. And who this driver is.

use std::{
    fs, io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use torpor_driver_common::{
    Specs,
    files::{failed, identity, make_folder, read_json, remove_file, write_json, write_whole},
};
use torpor_sandbox::{DriverError, SandboxId};

use crate::{config::ConfigError, engine::Engine, memory::Note};

/// What is noted of a sandbox's memory.
const MEMORY: &str = "memory.json";

/// The durable side of the driver.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    pub(crate) specs: Specs,
    /// The agent, where every container of this state directory finds it, whatever this program's own place is.
    pub(crate) agent: PathBuf,
    /// Marks the containers of this state directory among those of the engine.
    pub(crate) identity: String,
}

impl Store {
    pub(crate) fn open(state_dir: &Path, engine: Engine, agent: &Path) -> Result<Self, ConfigError> {
        let of_all = state_dir.join("containers");
        let folder = of_all.join(engine.name());
        let error = |what, path: &Path| {
            let path = path.to_owned();
            move |source| ConfigError::File { what, path, source }
        };
        make_folder(&folder).map_err(error("make", &folder))?;
        let path = of_all.join("identity");
        let identity = identity(&path).map_err(error("read or make", &path))?;
        let place = of_all.join("torpor-agent");
        keep_agent(agent, &place).map_err(error("copy the agent from", agent))?;
        Ok(Self { specs: Specs::new(folder), agent: place, identity })
    }

    /// What is noted of its memory.
    pub(crate) fn note(&self, id: &SandboxId) -> Result<Option<Note>, DriverError> {
        read_json(&self.specs.of(id).join(MEMORY))
    }

    pub(crate) fn write_note(&self, id: &SandboxId, note: &Note) -> Result<(), DriverError> {
        write_json(&self.specs.of(id).join(MEMORY), note)
    }

    pub(crate) fn remove_note(&self, id: &SandboxId) -> Result<(), DriverError> {
        remove_file(&self.specs.of(id).join(MEMORY))
    }

    /// The agent as the sandbox's container mounts it.
    pub(crate) fn agent_of(&self, id: &SandboxId) -> PathBuf {
        self.specs.of(id).join("torpor-agent")
    }

    /// Gives a sandbox the present agent, from its next start on. One whose memory is kept must find the one that it was
    /// started with, so each has a name of its own for it.
    pub(crate) fn link_agent(&self, id: &SandboxId) -> Result<(), DriverError> {
        let place = self.agent_of(id);
        let inode = |path: &Path| fs::metadata(path).map(|file| file.ino()).ok();
        if inode(&place).is_some() && inode(&place) == inode(&self.agent) {
            return Ok(());
        }
        let new = place.with_extension("new");
        let _not_there = fs::remove_file(&new);
        let linked = fs::hard_link(&self.agent, &new).and_then(|()| fs::rename(&new, &place));
        linked.map_err(|error| failed("link the agent as", &place, error))
    }
}

/// Containers that run keep the agent that they were started with.
fn keep_agent(agent: &Path, place: &Path) -> io::Result<()> {
    let bytes = fs::read(agent)?;
    if fs::read(place).is_ok_and(|now| now == bytes) {
        return Ok(());
    }
    write_whole(place, &bytes, 0o755)?;
    fs::set_permissions(place, fs::Permissions::from_mode(0o755))
}
