//! Small file helpers: durable writes, hashes, times.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::Error;
use crate::error::At;

/// Makes a directory and its parents durable enough: the directory itself is synced into its parent.
pub(crate) fn make_dir(path: &Path) -> Result<(), Error> {
    if path.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(path).at("create directory", path)?;
    path.parent().map_or(Ok(()), sync_dir)
}

pub(crate) fn sync_dir(path: &Path) -> Result<(), Error> {
    File::open(path).and_then(|dir| dir.sync_all()).at("sync directory", path)
}

/// Writes a new file and syncs it.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = File::create_new(path).at("create", path)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).at("write", path)
}

/// Renames and makes the new name durable.
pub(crate) fn rename_synced(from: &Path, to: &Path) -> Result<(), Error> {
    fs::rename(from, to).at("rename to", to)?;
    to.parent().map_or(Ok(()), sync_dir)
}

pub(crate) fn to_json<T: Serialize>(path: &Path, value: &T) -> Result<Vec<u8>, Error> {
    let mut bytes = serde_json::to_vec_pretty(value).map_err(std::io::Error::other).at("encode", path)?;
    bytes.push(b'\n');
    Ok(bytes)
}

pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let bytes = fs::read(path).at("read", path)?;
    serde_json::from_slice(&bytes).map_err(std::io::Error::other).at("understand", path)
}

/// Tells one state of a file from another without reading it: whoever writes to it can't set back the change time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileStamp {
    path: PathBuf,
    file: (u64, u64),
    bytes: u64,
    changed: (i64, i64),
}

impl FileStamp {
    pub(crate) fn of(path: &Path) -> std::io::Result<Self> {
        use std::os::unix::fs::MetadataExt as _;
        let found = fs::metadata(path)?;
        Ok(Self {
            path: path.to_owned(),
            file: (found.dev(), found.ino()),
            bytes: found.len(),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}

/// SHA-256 of a file's bytes, as 64 hex digits.
pub(crate) fn sha256_file(path: &Path) -> Result<String, Error> {
    let mut file = File::open(path).at("open", path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).at("read", path)? {
            0 => return Ok(hex(&hash.finalize())),
            n => hash.update(&buffer[..n]),
        }
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Sets access and modification time to `seconds`, of a link itself and not of what it points to.
pub(crate) fn set_mtime(path: &Path, seconds: i64) -> Result<(), Error> {
    let time = TimeSpec::new(seconds, 0);
    utimensat(AT_FDCWD, path, &time, &time, UtimensatFlags::NoFollowSymlink).at("set the time of", path)
}

/// The entries of a directory in order of their names, so that nothing depends on the host's file system.
pub(crate) fn sorted_entries(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).at("list", dir)? {
        paths.push(entry.at("list", dir)?.path());
    }
    paths.sort();
    Ok(paths)
}
