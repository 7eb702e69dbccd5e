//! Small files that must be whole or absent after a crash.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::Path,
};

use serde::{Serialize, de::DeserializeOwned};
use torpor_sandbox::DriverError;

/// A file for nobody but its owner: specs hold environments, and those hold secrets.
const OWNERS_FILE: u32 = 0o600;
const OWNERS_FOLDER: u32 = 0o700;

/// Opens a file to be written anew; it is its owner's only.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(OWNERS_FILE).open(path)
}

/// Makes a folder, and those above it, for nobody but its owner. One that is there already is left as it is.
pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(OWNERS_FOLDER).create(path)
}

/// Writes a file under another name, makes it durable, and gives it its name.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file = create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    sync_folder_of(path)
}

/// [`write_whole`], with an error that names the file.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> Result<(), DriverError> {
    write_whole(path, bytes)
        .map_err(|source| DriverError::backend(format!("write {}", path.display()), source))
}

/// [`write_durably`] of a value as JSON.
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), DriverError> {
    let bytes = serde_json::to_vec_pretty(value)
        .map_err(|error| DriverError::backend(format!("encode {}", path.display()), error))?;
    write_durably(path, &bytes)
}

/// Reads a JSON file; none when there is no such file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, DriverError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(DriverError::backend(format!("read {}", path.display()), error)),
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|error| DriverError::backend(format!("{} is damaged", path.display()), error))
}

/// Makes a rename or a new name in the folder of `path` durable.
pub(crate) fn sync_folder_of(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// Removes a tree; not being there is no error.
pub(crate) fn remove_tree(path: &Path) -> Result<(), DriverError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(DriverError::backend(format!("remove {}", path.display()), error))
        }
        _ => Ok(()),
    }
}
