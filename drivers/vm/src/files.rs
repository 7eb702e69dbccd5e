//! Small files that must be whole or absent after a crash.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::Path,
};

use serde::{Serialize, de::DeserializeOwned};
use torpor_sandbox::DriverError;

/// Writes a file under another name, makes it durable, and gives it its name.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> Result<(), DriverError> {
    let failed = |source| DriverError::backend(format!("write {}", path.display()), source);
    let temporary = path.with_extension("tmp");
    let write = || -> io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        sync_folder_of(path)
    };
    write().map_err(failed)
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
