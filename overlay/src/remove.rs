//! Deleting overlays in an order that leaves none without what it stands on.
//!
//! A fork notes beside the sealed file who stands on it (`NAME.children`, JSON). The note is written before the overlay
//! that it names, so it may name one that never came to be; it counts only while an overlay is there that names the
//! sealed file by digest.

use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::base::{BaseIdentity, sha256_file};
use crate::error::Error;
use crate::files::{NewFile, sync_directory_of};
use crate::inspect::inspect;
use crate::lock::Lock;

/// The content of a note.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Note {
    sealed: BaseIdentity,
    /// Absolute paths.
    children: Vec<PathBuf>,
}

fn note_path(sealed: &Path) -> PathBuf {
    let mut name = sealed.file_name().unwrap_or_default().to_os_string();
    name.push(".children");
    sealed.with_file_name(name)
}

impl Note {
    /// Nothing, or what can't be read, is no note: overlays are then found by looking at them.
    fn load(sealed: &Path) -> Option<Self> {
        std::fs::read(note_path(sealed)).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok())
    }
}

/// Notes, durably, that overlays are about to stand on a sealed file.
pub(crate) fn note_children(sealed: &Path, identity: &BaseIdentity, children: &[&Path]) -> Result<(), Error> {
    let mut note = Note::load(sealed).filter(|note| note.sealed == *identity).unwrap_or_default();
    note.sealed = identity.clone();
    for child in children {
        let child = std::path::absolute(child).map_err(|source| Error::io(child, "resolve", source))?;
        if !note.children.contains(&child) {
            note.children.push(child);
        }
    }
    let path = note_path(sealed);
    let bytes = serde_json::to_vec_pretty(&note)
        .map_err(|error| Error::io(&path, "encode", io::Error::other(error)))?;
    let new = NewFile::beside(&path)?;
    new.file().write_all(&bytes).map_err(|source| Error::io(new.path(), "write", source))?;
    new.replace()
}

/// The overlays known from the note that still stand on a sealed file.
pub(crate) fn noted_children(sealed: &Path) -> Vec<PathBuf> {
    let Some(note) = Note::load(sealed) else { return Vec::new() };
    note.children.into_iter().filter(|child| stands_on(child, &note.sealed.digest)).collect()
}

fn stands_on(child: &Path, digest: &str) -> bool {
    inspect(child).is_ok_and(|info| info.ours && info.base.digest == digest)
}

/// Deletes an overlay that isn't in use, durably, with what this crate has put beside it. A sealed one goes last, after
/// all that stand on it: those noted when it was forked, those in its folder, and those among `others`, where the caller
/// names what may have been moved elsewhere.
///
/// # Errors
/// [`Error::Sealed`] with the overlays that stand on it, [`Error::Locked`], [`Error::DataMissing`], [`Error::Io`].
pub fn remove(path: &Path, others: &[&Path]) -> Result<(), Error> {
    let lock = Lock::acquire(path)?;
    let note = Note::load(path);
    // A header that can't be read is no reason to keep a file, but a note is.
    if note.is_some() || inspect(path).is_ok_and(|info| info.sealed) {
        let children = children(path, note, others)?;
        if !children.is_empty() {
            return Err(Error::Sealed { path: path.to_path_buf(), children });
        }
    }
    let gone = |path: &Path| match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io(path, "delete", error)),
        _ => Ok(()),
    };
    gone(path)?;
    gone(&note_path(path))?;
    sync_directory_of(path)?;
    drop(lock);
    Ok(())
}

fn children(path: &Path, note: Option<Note>, others: &[&Path]) -> Result<Vec<PathBuf>, Error> {
    let failed = |source| Error::io(path, "inspect", source);
    let own = path.metadata().map_err(failed)?;
    let digest = match &note {
        Some(note) => note.sealed.digest.clone(),
        None => sha256_file(path)?,
    };
    let folder = std::path::absolute(path).map_err(failed)?;
    let folder = folder.parent().unwrap_or(Path::new("/")).to_path_buf();
    let beside = std::fs::read_dir(&folder).map_err(|source| Error::io(&folder, "list", source))?;
    let mut found: Vec<PathBuf> = Vec::new();
    let candidates = note.into_iter().flat_map(|note| note.children);
    let candidates = candidates.chain(beside.flatten().map(|entry| entry.path()));
    for candidate in candidates.chain(others.iter().map(|path| path.to_path_buf())) {
        let Ok(metadata) = candidate.metadata() else { continue };
        let new = !found.contains(&candidate) && (metadata.dev(), metadata.ino()) != (own.dev(), own.ino());
        if new && metadata.is_file() && stands_on(&candidate, &digest) {
            found.push(candidate);
        }
    }
    Ok(found)
}
