//! Deleting overlays in an order that leaves none without what it stands on.
//!
//! A fork notes beside the sealed file who stands on it (`NAME.children`, JSON). The note is written before the overlay
//! that it names, so it may name one that never came to be; it counts only while an overlay is there that names the
//! sealed file by digest.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::base::{BaseIdentity, sha256_file};
use crate::error::Error;
use crate::files::{NewFile, read_up_to, sync_directory_of};
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
    /// Only where there is no file there is no note: one that can't be read may name overlays that stand elsewhere.
    fn load(sealed: &Path) -> Result<Option<Self>, Error> {
        let path = note_path(sealed);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(Error::io(&path, "read", source)),
        };
        serde_json::from_slice(&bytes).map(Some).map_err(|error| Error::Corrupt {
            detail: format!("it should list the overlays that stand on {}: {error}", sealed.display()),
            path,
        })
    }
}

/// Notes, durably, that overlays are about to stand on a sealed file.
pub(crate) fn note_children(sealed: &Path, identity: &BaseIdentity, children: &[&Path]) -> Result<(), Error> {
    let mut note = Note::load(sealed)?.filter(|note| note.sealed == *identity).unwrap_or_default();
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

/// The overlays known from the note that still stand on a sealed file, as far as can be told: for a message.
pub(crate) fn noted_children(sealed: &Path) -> Vec<PathBuf> {
    let Ok(Some(note)) = Note::load(sealed) else { return Vec::new() };
    let standing = |child: &PathBuf| stands_on(child, &note.sealed.digest).unwrap_or(true);
    note.children.iter().filter(|child| standing(child)).cloned().collect()
}

/// Whether a file stands on a sealed one. An image whose header can't be understood may: it counts.
fn stands_on(child: &Path, digest: &str) -> Result<bool, Error> {
    match inspect(child) {
        Ok(info) => Ok(info.ours && info.base.digest == digest),
        Err(Error::DataMissing { .. }) => Ok(false),
        Err(Error::Corrupt { .. } | Error::Unsupported { .. }) => is_image(child),
        Err(error) => Err(error),
    }
}

/// Whether a file begins as qcow2 images do.
fn is_image(path: &Path) -> Result<bool, Error> {
    let file = match File::open(path) {
        Err(error) if is_gone(&error) => return Ok(false),
        opened => opened.map_err(|source| Error::io(path, "open", source))?,
    };
    let mut start = [0; 4];
    let count = read_up_to(&file, &mut start, 0).map_err(|source| Error::io(path, "read", source))?;
    Ok(count == start.len() && start == *b"QFI\xfb")
}

/// The error says for certain that there is no such file.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Deletes an overlay that isn't in use, durably, with what this crate has put beside it. A sealed one goes last, after
/// all that stand on it: those noted when it was forked, those in its folder, and those among `others`, where the caller
/// names what may have been moved elsewhere.
///
/// # Errors
/// [`Error::Sealed`] with the overlays that stand on it, [`Error::Locked`], [`Error::DataMissing`], [`Error::Io`] also when
/// a file that may stand on it can't be looked at, [`Error::Corrupt`] when the note beside it is damaged.
pub fn remove(path: &Path, others: &[&Path]) -> Result<(), Error> {
    let lock = Lock::acquire(path)?;
    let note = Note::load(path)?;
    // A header that can't be read is no reason to keep a file, but a note is.
    if note.is_some() || is_sealed(path)? {
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

/// Whether an overlay is sealed, where its header tells.
fn is_sealed(path: &Path) -> Result<bool, Error> {
    match inspect(path) {
        Ok(info) => Ok(info.sealed),
        Err(Error::Corrupt { .. } | Error::Unsupported { .. }) => Ok(false),
        Err(error) => Err(error),
    }
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
    let listing = |source| Error::io(&folder, "list", source);
    let beside: Vec<PathBuf> = std::fs::read_dir(&folder)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
        .map_err(listing)?;
    let mut found: Vec<PathBuf> = Vec::new();
    let candidates = note.into_iter().flat_map(|note| note.children);
    let candidates = candidates.chain(beside);
    for candidate in candidates.chain(others.iter().map(|path| path.to_path_buf())) {
        let metadata = match candidate.metadata() {
            Err(error) if is_gone(&error) => continue,
            known => known.map_err(|source| Error::io(&candidate, "inspect", source))?,
        };
        let new = !found.contains(&candidate) && (metadata.dev(), metadata.ino()) != (own.dev(), own.ino());
        if new && metadata.is_file() && stands_on(&candidate, &digest)? {
            found.push(candidate);
        }
    }
    Ok(found)
}
