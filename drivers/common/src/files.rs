//! Small files that must be whole or absent after a crash.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::Path,
};

use serde::{Serialize, de::DeserializeOwned};
use tokio::runtime::{Handle, RuntimeFlavor};
use torpor_sandbox::{DriverError, SandboxId};

/// Mode of a file for nobody but its owner: specs hold environments, and those hold secrets.
pub const OWNERS_FILE: u32 = 0o600;
const OWNERS_FOLDER: u32 = 0o700;

/// Makes a folder, and those above it, for nobody but its owner. One that is there already is left as it is.
///
/// # Errors
/// Those of the file system.
pub fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(OWNERS_FOLDER).create(path)
}

/// Opens a file to be written anew; it is its owner's only.
///
/// # Errors
/// Those of the file system.
pub fn create(path: &Path) -> io::Result<File> {
    with_mode(path, OWNERS_FILE)
}

fn with_mode(path: &Path, mode: u32) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(path)
}

/// Waits for a disk without keeping others of this runtime thread waiting, where the runtime has more than one.
pub fn in_place<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current() {
        Ok(runtime) if runtime.runtime_flavor() == RuntimeFlavor::MultiThread => {
            tokio::task::block_in_place(work)
        }
        _ => work(),
    }
}

/// Writes a file under another name, makes it durable, and gives it its name.
///
/// # Errors
/// Those of the file system: then the file is as it was.
pub fn write_whole(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    in_place(|| {
        let temporary = path.with_extension("tmp");
        let mut file = with_mode(&temporary, mode)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        sync_folder_of(path)
    })
}

/// Makes a rename or a new name in the folder of `path` durable.
///
/// # Errors
/// Those of the file system.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// [`write_whole`] of a value as JSON, for nobody but its owner.
///
/// # Errors
/// `NoSpace`, or another failure that names the file.
pub fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), DriverError> {
    let bytes = serde_json::to_vec_pretty(value)
        .map_err(|error| DriverError::backend(format!("encode {}", path.display()), error))?;
    write_whole(path, &bytes, OWNERS_FILE).map_err(|error| failed("write", path, error))
}

/// Reads a JSON file; none when there is no such file.
///
/// # Errors
/// `Corrupt` for one that isn't what it should be; else a failure that names the file.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, DriverError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", path, error)),
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|error| DriverError::Corrupt(format!("{} is damaged: {error}", path.display())))
}

/// Removes a tree; whether it was there.
///
/// # Errors
/// A failure that names the tree.
pub fn remove_tree(path: &Path) -> Result<bool, DriverError> {
    match in_place(|| fs::remove_dir_all(path)) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed("remove", path, error)),
    }
}

/// Removes a file that need not be there.
///
/// # Errors
/// A failure that names the file.
pub fn remove_file(path: &Path) -> Result<(), DriverError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path, error)),
        _ => Ok(()),
    }
}

/// The folders below `path` that are named by a sandbox; none when `path` is not there.
///
/// # Errors
/// Those of the file system.
pub fn ids(path: &Path) -> io::Result<Vec<SandboxId>> {
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// The name by which a state directory's things are told from others'; made when it is asked for first.
///
/// # Errors
/// Those of the file system.
pub fn identity(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Ok(text) if !text.trim().is_empty() => return Ok(text.trim().to_owned()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let new = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    write_whole(path, new.as_bytes(), OWNERS_FILE)?;
    Ok(new.trim().to_owned())
}

/// A file's error, which names it; a full disk is told from others.
pub fn failed(what: &str, path: &Path, error: io::Error) -> DriverError {
    let context = format!("{what} {}", path.display());
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            DriverError::NoSpace(format!("{context}: {error}"))
        }
        _ => DriverError::backend(context, error),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_file_that_is_not_what_it_should_be_is_called_damaged_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spec.json");
        assert_eq!(read_json::<u32>(&path).unwrap(), None);
        fs::write(&path, "{\"half\":").unwrap();
        let error = read_json::<u32>(&path).unwrap_err();
        assert!(matches!(&error, DriverError::Corrupt(text) if text.contains("spec.json")), "{error:?}");
    }

    #[test]
    fn what_is_written_is_its_owners_only_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        write_json(&path, &7).unwrap();
        write_json(&path, &8).unwrap();
        assert_eq!(read_json::<u32>(&path).unwrap(), Some(8));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_identity_stays_what_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity");
        let first = identity(&path).unwrap();
        assert!(!first.is_empty());
        assert_eq!(identity(&path).unwrap(), first);
    }

    #[test]
    fn a_full_disk_is_told_from_other_failures() {
        let path = Path::new("/x");
        let full = failed("write", path, io::ErrorKind::StorageFull.into());
        assert!(matches!(full, DriverError::NoSpace(_)), "{full:?}");
        let other = failed("write", path, io::ErrorKind::PermissionDenied.into());
        assert!(matches!(other, DriverError::Backend { .. }), "{other:?}");
    }
}
