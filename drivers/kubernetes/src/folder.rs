//! The driver's folder as it is before there is a driver: whose objects it is about, and what of it can be written again.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use torpor_driver_common::files::{self, OWNERS_FILE, make_folder, write_whole};
use torpor_sandbox::{Run, SandboxId, SandboxSpec};

use crate::store::Record;

/// `kubernetes/` in the state directory.
pub fn path(state_dir: &Path) -> PathBuf {
    state_dir.join("kubernetes")
}

/// By which label (`torpor.dev/gateway`) the objects of a state directory are found; none: that was never said there.
///
/// # Errors
/// The file's.
pub fn identity(state_dir: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path(state_dir).join("identity")) {
        Ok(text) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The sandboxes that have a folder there.
///
/// # Errors
/// The folder's.
pub fn ids(state_dir: &Path) -> io::Result<Vec<SandboxId>> {
    files::ids(&path(state_dir))
}

/// A sandbox, what it is like, and the run that it was in; none: it was at rest.
pub type Known = (SandboxId, SandboxSpec, Option<Run>);

/// Writes what is lost of these sandboxes again, and last of all the identity, so that one that was cut short is begun
/// anew. How many were lost.
///
/// # Errors
/// Those of the file system.
pub fn restore(state_dir: &Path, identity: &str, all: &[Known]) -> io::Result<usize> {
    let folder = path(state_dir);
    make_folder(&folder)?;
    let mut written = 0;
    for (id, spec, run) in all {
        let of = folder.join(id.as_str());
        let file = of.join("spec.json");
        if !file.exists() {
            make_folder(&of)?;
            if let Some(run) = run {
                // Which pod it is, and whether it is that of this run, its agent says.
                let record = Record { restored: true, ..Record::new(*run) };
                write_whole(&of.join("run.json"), &serde_json::to_vec_pretty(&record)?, OWNERS_FILE)?;
            }
            write_whole(&file, &serde_json::to_vec_pretty(spec)?, OWNERS_FILE)?;
            written += 1;
        }
    }
    write_whole(&folder.join("identity"), identity.as_bytes(), OWNERS_FILE)?;
    Ok(written)
}
