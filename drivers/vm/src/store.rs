//! What lasts: one folder per sandbox with the overlay and the spec, and the last console of each.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use torpor_driver_common::files::{
    OWNERS_FILE, failed, make_folder, read_json, remove_tree, sync_folder_of, write_json, write_whole,
};
use torpor_overlay::BaseIdentity;
use torpor_sandbox::{Change, DriverError, Egress, SandboxId, SandboxSpec, failpoint::hit};

use crate::{assets::Base, errors};

/// A sandbox's folder under this name is on its way out.
const TRASH: &str = ".deleted-";
/// Files in a sandbox's folder whose names begin so are good for one operation only: a disk that is being written anew or
/// exported. Nothing of them is needed after it, however it ended.
const TEMPORARY: &str = ".";

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
        fs::create_dir_all(state_dir)?;
        for folder in [&store.sandboxes, &store.consoles] {
            make_folder(folder)?;
            // Earlier versions let everybody in.
            fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;
        }
        Ok(store)
    }

    fn folder(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes.join(id.as_str())
    }

    /// Where the folder of a sandbox goes before it is removed.
    fn trash(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes.join(format!("{TRASH}{id}"))
    }

    /// The workspace disk.
    pub(crate) fn overlay(&self, id: &SandboxId) -> PathBuf {
        self.folder(id).join("overlay.qcow2")
    }

    /// A copy of the disk while it is exported.
    pub(crate) fn export_file(&self, id: &SandboxId) -> PathBuf {
        self.folder(id).join(format!("{TEMPORARY}export.qcow2"))
    }

    fn spec_path(&self, id: &SandboxId) -> PathBuf {
        self.folder(id).join("spec.json")
    }

    fn console_path(&self, id: &SandboxId) -> PathBuf {
        self.consoles.join(format!("{id}.log"))
    }

    /// Whether there is anything of the sandbox, be it half-made or half-deleted.
    pub(crate) fn exists(&self, id: &SandboxId) -> bool {
        self.folder(id).exists() || self.trash(id).exists()
    }

    /// The spec of a sandbox.
    pub(crate) fn spec(&self, id: &SandboxId) -> Result<SandboxSpec, DriverError> {
        match read_json(&self.spec_path(id))? {
            Some(spec) => Ok(spec),
            None if self.folder(id).exists() => {
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
        make_folder(&folder)
            .and_then(|()| sync_folder_of(&folder))
            .map_err(|error| failed("make", &folder, error))?;
        hit("vm.create.folder")?;
        let identity = BaseIdentity { digest: base.digest.clone(), size: base.size };
        let overlay = self.overlay(id);
        match torpor_overlay::create(&overlay, &base.path, &identity, spec.resources.disk_bytes) {
            // A crash came between disk and spec.
            Err(torpor_overlay::Error::AlreadyExists { .. }) => self.check_base(&overlay, &identity)?,
            other => other.map_err(errors::overlay)?,
        }
        hit("vm.create.disk")?;
        write_json(&self.spec_path(id), spec)?;
        hit("vm.create.noted")?;
        Ok(Change::Done)
    }

    /// Notes the size of a disk that has grown.
    pub(crate) fn note_disk_size(&self, id: &SandboxId, bytes: u64) -> Result<(), DriverError> {
        let mut spec = self.spec(id)?;
        if spec.resources.disk_bytes == bytes {
            return Ok(());
        }
        spec.resources.disk_bytes = bytes;
        write_json(&self.spec_path(id), &spec)
    }

    /// Notes where a sandbox may send to from now on.
    pub(crate) fn note_egress(&self, id: &SandboxId, egress: &Option<Egress>) -> Result<Change, DriverError> {
        let mut spec = self.spec(id)?;
        if spec.egress == *egress {
            return Ok(Change::Already);
        }
        spec.egress.clone_from(egress);
        write_json(&self.spec_path(id), &spec)?;
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

    /// Makes the spec another one: what a start goes by. The image and the size of the disk are the disk's.
    pub(crate) fn update(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        let old = self.spec(id)?;
        if old == *spec {
            return Ok(Change::Already);
        }
        if old.image_digest != spec.image_digest {
            return Err(DriverError::Invalid("image: the image of a sandbox can't be changed".to_owned()));
        }
        if old.resources.disk_bytes != spec.resources.disk_bytes {
            return Err(DriverError::Unsupported(
                "resources.disk_bytes: a disk is grown by `torpor sandbox disk grow`".to_owned(),
            ));
        }
        write_json(&self.spec_path(id), spec)?;
        hit("vm.update.noted")?;
        Ok(Change::Done)
    }

    /// Removes all of a sandbox. Renamed first, so that half a folder is never taken for a sandbox.
    pub(crate) fn delete(&self, id: &SandboxId) -> Result<Change, DriverError> {
        let (folder, trash) = (self.folder(id), self.trash(id));
        let was_there = self.exists(id);
        if folder.exists() {
            remove_tree(&trash)?;
            fs::rename(&folder, &trash)
                .and_then(|()| sync_folder_of(&folder))
                .map_err(|error| failed("remove", &folder, error))?;
            hit("vm.delete.moved")?;
        }
        remove_tree(&trash)?;
        hit("vm.delete.removed")?;
        // Only a copy of what was said: its absence is fine.
        let _ = fs::remove_file(self.console_path(id));
        Ok(if was_there { Change::Done } else { Change::Already })
    }

    /// Every sandbox that has storage, be it half-deleted.
    pub(crate) fn list(&self) -> io::Result<Vec<SandboxId>> {
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.sandboxes)? {
            let name = entry?.file_name();
            let Some(name) = name.to_str() else { continue };
            ids.extend(name.strip_prefix(TRASH).unwrap_or(name).parse());
        }
        Ok(ids)
    }

    /// Finishes deletes that were cut short, and removes what operations on disks left that were. Nothing of these may be
    /// under way. What was removed, and what can't be.
    pub(crate) fn empty_trash(&self) -> io::Result<Vec<String>> {
        let mut lines = Vec::new();
        for entry in fs::read_dir(&self.sandboxes)? {
            let entry = entry?;
            let path = entry.path();
            if !entry.file_name().to_string_lossy().starts_with(TRASH) {
                lines.extend(remove_temporaries(&path));
                continue;
            }
            lines.push(match remove_tree(&path) {
                Ok(_) => format!("{}: the rest of a deleted sandbox was removed", path.display()),
                Err(error) => error.to_string(),
            });
        }
        Ok(lines)
    }

    /// Keeps the console of a run that is over.
    pub(crate) fn keep_console(&self, id: &SandboxId, console: &[u8]) -> Result<(), DriverError> {
        let path = self.console_path(id);
        write_whole(&path, console, OWNERS_FILE).map_err(|error| failed("write", &path, error))
    }

    /// The console of the last run that is over.
    pub(crate) fn console(&self, id: &SandboxId) -> Vec<u8> {
        fs::read(self.console_path(id)).unwrap_or_default()
    }
}

/// Removes the temporary files of a sandbox's folder.
fn remove_temporaries(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten();
    let temporary = names.filter(|entry| entry.file_name().to_string_lossy().starts_with(TEMPORARY));
    temporary
        .map(|entry| match fs::remove_file(entry.path()) {
            Ok(()) => format!("{}: left by an operation that was cut short, removed", entry.path().display()),
            Err(error) => format!("{}: {error}", entry.path().display()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_delete_that_was_cut_short_left_is_still_there_until_it_is_removed() {
        let state = tempfile::tempdir().unwrap();
        let store = Store::open(state.path()).unwrap();
        let ids = [SandboxId::generate(), SandboxId::generate()];
        for id in &ids {
            fs::create_dir(store.trash(id)).unwrap();
            fs::write(store.trash(id).join("overlay.qcow2"), "x").unwrap();
        }
        let mut listed = store.list().unwrap();
        listed.sort();
        let mut expected = ids.clone();
        expected.sort();
        assert_eq!(listed, expected);
        assert!(ids.iter().all(|id| store.exists(id)));
        assert!(matches!(store.spec(&ids[0]), Err(DriverError::Missing)));

        assert_eq!(store.delete(&ids[0]).unwrap(), Change::Done);
        assert_eq!(store.delete(&ids[0]).unwrap(), Change::Already);
        assert!(!store.exists(&ids[0]) && store.exists(&ids[1]));
        assert_eq!(store.empty_trash().unwrap().len(), 1);
        assert!(!store.exists(&ids[1]));
        assert_eq!(store.list().unwrap(), []);
    }

    #[test]
    fn what_an_operation_on_a_disk_left_is_removed_and_the_disk_is_not() {
        let state = tempfile::tempdir().unwrap();
        let store = Store::open(state.path()).unwrap();
        let id = SandboxId::generate();
        fs::create_dir(store.folder(&id)).unwrap();
        let left =
            ["..export.qcow2.new-1-0", ".overlay.qcow2.new-1-0"].map(|name| store.folder(&id).join(name));
        for file in left.iter().chain([&store.export_file(&id), &store.overlay(&id), &store.spec_path(&id)]) {
            fs::write(file, "x").unwrap();
        }
        assert_eq!(store.empty_trash().unwrap().len(), 3);
        let mut names: Vec<_> =
            fs::read_dir(store.folder(&id)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["overlay.qcow2", "spec.json"]);
        assert_eq!(store.empty_trash().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn folders_of_earlier_versions_are_closed_to_others() {
        let state = tempfile::tempdir().unwrap();
        for name in ["sandboxes", "consoles"] {
            fs::create_dir(state.path().join(name)).unwrap();
            fs::set_permissions(state.path().join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let store = Store::open(state.path()).unwrap();
        store.keep_console(&SandboxId::generate(), b"secret").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!([&store.sandboxes, &store.consoles].map(|path| mode(path)), [0o700; 2]);
        let kept = fs::read_dir(&store.consoles).unwrap().next().unwrap().unwrap();
        assert_eq!(mode(&kept.path()), 0o600);
    }
}
