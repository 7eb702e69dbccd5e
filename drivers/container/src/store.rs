//! What lasts of a sandbox beside its container: its spec, under the state directory. And who this driver is.

use std::{
    fs, io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use torpor_sandbox::{Change, DriverError, SandboxId, SandboxSpec};

use crate::{
    config::ConfigError,
    engine::Engine,
    files::{self, failed, make_folder, read_json, remove_tree, write_json, write_whole},
    memory::Note,
};

/// What is noted of a sandbox's memory.
const MEMORY: &str = "memory.json";

/// The durable side of the driver.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    folder: PathBuf,
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
        Ok(Self { folder, agent: place, identity })
    }

    fn of(&self, id: &SandboxId) -> PathBuf {
        self.folder.join(id.as_str())
    }

    pub(crate) fn exists(&self, id: &SandboxId) -> bool {
        self.of(id).exists()
    }

    pub(crate) fn spec(&self, id: &SandboxId) -> Result<SandboxSpec, DriverError> {
        let path = self.of(id).join("spec.json");
        match read_json(&path)? {
            Some(spec) => Ok(spec),
            None if self.exists(id) => {
                Err(DriverError::DataMissing(format!("{} is missing", path.display())))
            }
            None => Err(DriverError::Missing),
        }
    }

    /// Written before the engine hears of the sandbox: what has no folder here has nothing there.
    pub(crate) fn write(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        let folder = self.of(id);
        let path = folder.join("spec.json");
        match read_json::<SandboxSpec>(&path)? {
            Some(old) if old == *spec => return Ok(Change::Already),
            Some(old) if old.image_digest != spec.image_digest => {
                return Err(DriverError::Invalid(
                    "image: the image of a sandbox can't be changed".to_owned(),
                ));
            }
            _ => {}
        }
        make_folder(&folder).map_err(|error| failed("make", &folder, error))?;
        write_json(&path, spec)?;
        Ok(Change::Done)
    }

    /// What is noted of its memory.
    pub(crate) fn note(&self, id: &SandboxId) -> Result<Option<Note>, DriverError> {
        read_json(&self.of(id).join(MEMORY))
    }

    pub(crate) fn write_note(&self, id: &SandboxId, note: &Note) -> Result<(), DriverError> {
        write_json(&self.of(id).join(MEMORY), note)
    }

    pub(crate) fn remove_note(&self, id: &SandboxId) -> Result<(), DriverError> {
        let path = self.of(id).join(MEMORY);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", &path, error)),
            _ => Ok(()),
        }
    }

    /// The agent as the sandbox's container mounts it.
    pub(crate) fn agent_of(&self, id: &SandboxId) -> PathBuf {
        self.of(id).join("torpor-agent")
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

    pub(crate) fn delete(&self, id: &SandboxId) -> Result<bool, DriverError> {
        remove_tree(&self.of(id))
    }

    pub(crate) fn list(&self) -> io::Result<Vec<SandboxId>> {
        files::ids(&self.folder)
    }
}

fn identity(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Ok(text) if !text.trim().is_empty() => return Ok(text.trim().to_owned()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let new = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    write_whole(path, new.as_bytes(), 0o600)?;
    Ok(new.trim().to_owned())
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
