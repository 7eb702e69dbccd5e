//! What lasts of a sandbox beside the cluster's objects: its spec and its present run. And who this driver is.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use torpor_sandbox::{Change, DriverError, Run, SandboxId, SandboxSpec};

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
    pub(crate) folder: PathBuf,
    /// Marks the objects of this state directory among those of the cluster.
    pub(crate) identity: String,
}

/// The driver's own of a state directory.
pub(crate) fn folder(state_dir: &Path) -> PathBuf {
    state_dir.join("kubernetes")
}

fn failed(what: &str, path: &Path, error: io::Error) -> DriverError {
    let full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    if full {
        return DriverError::NoSpace(format!("{what} {}: {error}", path.display()));
    }
    DriverError::backend(format!("{what} {}", path.display()), error)
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
        Ok(Self { folder, identity })
    }

    fn of(&self, id: &SandboxId) -> PathBuf {
        self.folder.join(id.as_str())
    }

    pub(crate) fn exists(&self, id: &SandboxId) -> bool {
        self.of(id).exists()
    }

    pub(crate) fn spec(&self, id: &SandboxId) -> Result<SandboxSpec, DriverError> {
        let path = self.of(id).join("spec.json");
        match read(&path)? {
            Some(spec) => Ok(spec),
            None if self.exists(id) => {
                Err(DriverError::DataMissing(format!("{} is missing", path.display())))
            }
            None => Err(DriverError::Missing),
        }
    }

    /// Written before the cluster hears of the sandbox: what has no folder here has nothing there.
    pub(crate) fn write(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        let folder = self.of(id);
        let path = folder.join("spec.json");
        match read::<SandboxSpec>(&path)? {
            Some(old) if old == *spec => return Ok(Change::Already),
            Some(old) if old.image_digest != spec.image_digest => {
                return Err(DriverError::Invalid(
                    "image: the image of a sandbox can't be changed".to_owned(),
                ));
            }
            _ => {}
        }
        make_folder(&folder).map_err(|error| failed("make", &folder, error))?;
        write(&path, spec)?;
        Ok(Change::Done)
    }

    pub(crate) fn record(&self, id: &SandboxId) -> Result<Option<Record>, DriverError> {
        read(&self.of(id).join("run.json"))
    }

    pub(crate) fn note(&self, id: &SandboxId, record: &Record) -> Result<(), DriverError> {
        write(&self.of(id).join("run.json"), record)
    }

    pub(crate) fn forget_run(&self, id: &SandboxId) -> Result<(), DriverError> {
        let path = self.of(id).join("run.json");
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", &path, error)),
            _ => Ok(()),
        }
    }

    /// The uids of the claims that the controller has made for it, by their names, as they were in its last run.
    pub(crate) fn claims(&self, id: &SandboxId) -> Result<BTreeMap<String, String>, DriverError> {
        Ok(read(&self.of(id).join("claims.json"))?.unwrap_or_default())
    }

    pub(crate) fn note_claims(
        &self,
        id: &SandboxId,
        claims: &BTreeMap<String, String>,
    ) -> Result<(), DriverError> {
        write(&self.of(id).join("claims.json"), claims)
    }

    pub(crate) fn delete(&self, id: &SandboxId) -> Result<(), DriverError> {
        let path = self.of(id);
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", &path, error)),
            _ => Ok(()),
        }
    }

    pub(crate) fn list(&self) -> Result<Vec<SandboxId>, DriverError> {
        let entries = fs::read_dir(&self.folder).map_err(|error| failed("list", &self.folder, error))?;
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        Ok(names.filter_map(|name| name.parse().ok()).collect())
    }
}

fn make_folder(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, DriverError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", path, error)),
    };
    let value = serde_json::from_slice(&bytes);
    value.map(Some).map_err(|error| DriverError::Corrupt(format!("{}: {error}", path.display())))
}

fn write(path: &Path, value: &impl Serialize) -> Result<(), DriverError> {
    let bytes = serde_json::to_vec(value)
        .map_err(|error| DriverError::backend(format!("write {}", path.display()), error))?;
    write_whole(path, &bytes).map_err(|error| failed("write", path, error))
}

/// All of it or nothing, also when the host loses its power.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::{io::Write as _, os::unix::fs::OpenOptionsExt as _};
    let new = path.with_extension("new");
    let mut file = fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_data()?;
    fs::rename(&new, path)?;
    // The new name, too: the cluster is told next.
    path.parent().map_or(Ok(()), |folder| fs::File::open(folder)?.sync_all())
}

fn identity(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Ok(text) if !text.trim().is_empty() => return Ok(text.trim().to_owned()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let new = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    write_whole(path, new.trim().as_bytes())?;
    Ok(new.trim().to_owned())
}
