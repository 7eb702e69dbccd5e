//! The folders of sandboxes whose compute keeps their disk itself: in each the spec, and whatever else a driver notes.

use std::path::PathBuf;

use torpor_sandbox::{Change, DriverError, SandboxId, SandboxSpec};

use crate::files::{failed, ids, make_folder, read_json, remove_tree, sync_folder_of, write_json};

/// A folder with one for each sandbox.
#[derive(Clone, Debug)]
pub struct Specs {
    folder: PathBuf,
}

impl Specs {
    /// What is in `folder`, which exists.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The folder of a sandbox, whether or not it is there.
    pub fn of(&self, id: &SandboxId) -> PathBuf {
        self.folder.join(id.as_str())
    }

    fn path(&self, id: &SandboxId) -> PathBuf {
        self.of(id).join("spec.json")
    }

    /// Whether there is anything of the sandbox.
    pub fn exists(&self, id: &SandboxId) -> bool {
        self.of(id).exists()
    }

    /// The spec of a sandbox.
    ///
    /// # Errors
    /// `Missing` when there is no such sandbox, `DataMissing` when there is one without a spec.
    pub fn read(&self, id: &SandboxId) -> Result<SandboxSpec, DriverError> {
        let path = self.path(id);
        match read_json(&path)? {
            Some(spec) => Ok(spec),
            None if self.exists(id) => {
                Err(DriverError::DataMissing(format!("{} is missing", path.display())))
            }
            None => Err(DriverError::Missing),
        }
    }

    /// Notes a spec, for good: before the backend hears of the sandbox, so that what has no folder here has nothing there.
    ///
    /// # Errors
    /// `Invalid` when it has another image than before; `NoSpace`.
    pub fn write(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        let (folder, path) = (self.of(id), self.path(id));
        match read_json::<SandboxSpec>(&path)? {
            Some(old) if old == *spec => return Ok(Change::Already),
            Some(old) if old.image_digest != spec.image_digest => {
                return Err(DriverError::Invalid(
                    "image: the image of a sandbox can't be changed".to_owned(),
                ));
            }
            Some(_) => {}
            None => {
                make_folder(&folder)
                    .and_then(|()| sync_folder_of(&folder))
                    .map_err(|error| failed("make", &folder, error))?;
            }
        }
        write_json(&path, spec)?;
        Ok(Change::Done)
    }

    /// Removes all that is noted of a sandbox; whether there was anything.
    ///
    /// # Errors
    /// A failure that names the folder.
    pub fn delete(&self, id: &SandboxId) -> Result<bool, DriverError> {
        remove_tree(&self.of(id))
    }

    /// Every sandbox that has a folder.
    ///
    /// # Errors
    /// A failure that names the folder.
    pub fn list(&self) -> Result<Vec<SandboxId>, DriverError> {
        ids(&self.folder).map_err(|error| failed("list", &self.folder, error))
    }
}
