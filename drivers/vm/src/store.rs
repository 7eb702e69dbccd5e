//! What lasts: one folder per sandbox with the overlay and the spec, and the last console of each.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use torpor_overlay::BaseIdentity;
use torpor_sandbox::{Change, DriverError, SandboxId, SandboxSpec};

use crate::{
    assets::Base,
    errors,
    files::{read_json, remove_tree, sync_folder_of, write_durably, write_json},
};

/// A sandbox's folder under this name is on its way out.
const TRASH: &str = ".deleted-";

/// The durable side of the driver.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    sandboxes: PathBuf,
    consoles: PathBuf,
}

impl Store {
    /// Opens or makes the folders below the state directory.
    pub(crate) fn open(state_dir: &Path) -> io::Result<Self> {
        let store = Self { sandboxes: state_dir.join("sandboxes"), consoles: state_dir.join("consoles") };
        fs::create_dir_all(&store.sandboxes)?;
        fs::create_dir_all(&store.consoles)?;
        Ok(store)
    }

    fn folder(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes.join(id.as_str())
    }

    /// The workspace disk.
    pub(crate) fn overlay(&self, id: &SandboxId) -> PathBuf {
        self.folder(id).join("overlay.qcow2")
    }

    fn spec_path(&self, id: &SandboxId) -> PathBuf {
        self.folder(id).join("spec.json")
    }

    fn console_path(&self, id: &SandboxId) -> PathBuf {
        self.consoles.join(format!("{id}.log"))
    }

    /// Whether there is anything of the sandbox, be it half-made.
    pub(crate) fn exists(&self, id: &SandboxId) -> bool {
        self.folder(id).exists()
    }

    /// The spec of a sandbox.
    pub(crate) fn spec(&self, id: &SandboxId) -> Result<SandboxSpec, DriverError> {
        match read_json(&self.spec_path(id))? {
            Some(spec) => Ok(spec),
            None if self.exists(id) => {
                Err(DriverError::DataMissing(format!("{} is missing", self.spec_path(id).display())))
            }
            None => Err(DriverError::Missing),
        }
    }

    /// Makes the disk, then the spec: a sandbox with a spec has had a disk, and never gets another one.
    pub(crate) fn create(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        base: &Base,
    ) -> Result<Change, DriverError> {
        if self.spec_path(id).exists() {
            return self.update(id, spec);
        }
        let folder = self.folder(id);
        let failed = |source| DriverError::backend(format!("make {}", folder.display()), source);
        fs::create_dir_all(&folder).map_err(failed)?;
        sync_folder_of(&folder).map_err(failed)?;
        let identity = BaseIdentity { digest: base.digest.clone(), size: base.size };
        let overlay = self.overlay(id);
        match torpor_overlay::create(&overlay, &base.path, &identity, spec.resources.disk_bytes) {
            // A crash came between disk and spec.
            Err(torpor_overlay::Error::AlreadyExists { .. }) => self.check_base(&overlay, &identity)?,
            other => other.map_err(errors::overlay)?,
        }
        write_json(&self.spec_path(id), spec)?;
        Ok(Change::Done)
    }

    fn check_base(&self, overlay: &Path, identity: &BaseIdentity) -> Result<(), DriverError> {
        let found = torpor_overlay::inspect(overlay).map_err(errors::overlay)?;
        if found.base.digest == identity.digest {
            return Ok(());
        }
        let text =
            format!("{} stands on {}, not on {}", overlay.display(), found.base.digest, identity.digest);
        Err(DriverError::Invalid(text))
    }

    fn update(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        let old = self.spec(id)?;
        if old == *spec {
            return Ok(Change::Already);
        }
        if old.image_digest != spec.image_digest {
            return Err(DriverError::Invalid("image: the image of a sandbox can't be changed".to_owned()));
        }
        if old.resources.disk_bytes != spec.resources.disk_bytes {
            return Err(DriverError::Unsupported(
                "resources.disk_bytes: the disk can't be resized".to_owned(),
            ));
        }
        write_json(&self.spec_path(id), spec)?;
        Ok(Change::Done)
    }

    /// Removes all of a sandbox. Renamed first, so that half a folder is never taken for a sandbox.
    pub(crate) fn delete(&self, id: &SandboxId) -> Result<Change, DriverError> {
        let trash = self.sandboxes.join(format!("{TRASH}{id}"));
        let folder = self.folder(id);
        let was_there = folder.exists();
        let failed = |source| DriverError::backend(format!("remove {}", folder.display()), source);
        if was_there {
            remove_tree(&trash)?;
            fs::rename(&folder, &trash).map_err(failed)?;
            sync_folder_of(&folder).map_err(failed)?;
        }
        remove_tree(&trash)?;
        // Only a copy of what was said: its absence is fine.
        let _ = fs::remove_file(self.console_path(id));
        Ok(if was_there { Change::Done } else { Change::Already })
    }

    /// Every sandbox that has storage. Finishes deletes that a crash cut short.
    pub(crate) fn list(&self) -> io::Result<Vec<SandboxId>> {
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.sandboxes)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.starts_with(TRASH) {
                let _ = fs::remove_dir_all(entry.path());
            }
            ids.extend(name.parse());
        }
        Ok(ids)
    }

    /// Keeps the console of a run that is over.
    pub(crate) fn keep_console(&self, id: &SandboxId, console: &[u8]) -> Result<(), DriverError> {
        write_durably(&self.console_path(id), console)
    }

    /// The console of the last run that is over.
    pub(crate) fn console(&self, id: &SandboxId) -> Vec<u8> {
        fs::read(self.console_path(id)).unwrap_or_default()
    }
}
