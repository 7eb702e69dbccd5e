//! Small files that must be whole or absent after a crash.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::Path,
};

use serde::{Serialize, de::DeserializeOwned};
use tokio::runtime::{Handle, RuntimeFlavor};
use torpor_sandbox::DriverError;

/// Makes a folder, and those above it, for nobody but its owner. One that is there already is left as it is.
pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Waits for a disk without keeping others of this runtime thread waiting, where the runtime has more than one.
fn blocking<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current() {
        Ok(runtime) if runtime.runtime_flavor() == RuntimeFlavor::MultiThread => {
            tokio::task::block_in_place(work)
        }
        _ => work(),
    }
}

/// Writes a file under another name, makes it durable, and gives it its name.
pub(crate) fn write_whole(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    blocking(|| write_and_sync(path, bytes, mode))
}

fn write_and_sync(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// Writes a value as JSON, for nobody but its owner: specs hold environments, and those hold secrets.
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), DriverError> {
    let bytes = serde_json::to_vec_pretty(value)
        .map_err(|error| DriverError::backend(format!("encode {}", path.display()), error))?;
    write_whole(path, &bytes, 0o600).map_err(|error| failed("write", path, error))
}

/// Reads a JSON file; none when there is no such file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, DriverError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", path, error)),
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|error| DriverError::backend(format!("{} is damaged", path.display()), error))
}

/// Removes a tree; whether it was there.
pub(crate) fn remove_tree(path: &Path) -> Result<bool, DriverError> {
    match blocking(|| fs::remove_dir_all(path)) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed("remove", path, error)),
    }
}

/// The folders below `path` that are named by a sandbox.
pub(crate) fn ids(path: &Path) -> io::Result<Vec<torpor_sandbox::SandboxId>> {
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// A file's error, which names it; a full disk is told from others.
pub(crate) fn failed(what: &str, path: &Path, error: io::Error) -> DriverError {
    let context = format!("{what} {}", path.display());
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            DriverError::NoSpace(format!("{context}: {error}"))
        }
        _ => DriverError::backend(context, error),
    }
}
