//! Files, folders and symlinks as a row of entries, in both directions: [`read`] walks a tree, [`Writer`] makes one. The
//! agent and the command line use the same two, each for its side of a copy.
//!
//! What comes from the other side is not trusted. A [`Writer`] stays beneath its root whatever the names and links say
//! (openat2 with `RESOLVE_BENEATH`), and a file appears whole or not at all: it is written beside its place, brought to
//! the disk and renamed.

mod error;
mod manage;
mod part;
mod path;
mod read;
#[cfg(test)]
mod tests;
mod write;

pub use error::{FileError, Problem, shown};
pub use manage::{Info, info, list, make_folder, remove};
pub use part::digest_of_partial;
pub use path::{LONGEST_PATH, Name, Place};
pub use read::{Begin, Sink, digest, read};
pub use write::{Options, Owner, Totals, Writer};

/// What kind of file an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An ordinary file.
    File,
    /// A folder.
    Folder,
    /// A symlink, which is kept as it is and followed by nobody.
    Link,
    /// A socket, a pipe or a device: never copied.
    Other,
}

/// Point in time: seconds since 1970 and nanoseconds.
pub type Time = (i64, u32);

/// One file, folder or symlink of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// From the root of the tree, without a slash at either end. Empty: the root itself.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Permission bits, 0o7777 at most.
    pub mode: u32,
    /// When it was changed last.
    pub modified: Option<Time>,
    /// Of a file, bytes; none: not known before its end.
    pub size: Option<u64>,
    /// Of a symlink.
    pub target: Vec<u8>,
    /// The first so many bytes are there already from an earlier try.
    pub offset: u64,
    /// SHA-256 of those bytes.
    pub prefix_sha256: Vec<u8>,
}

impl Entry {
    /// An entry of this kind without anything else.
    pub fn new(path: impl Into<Vec<u8>>, kind: Kind, mode: u32) -> Self {
        Self {
            path: path.into(),
            kind,
            mode,
            modified: None,
            size: None,
            target: Vec::new(),
            offset: 0,
            prefix_sha256: Vec::new(),
        }
    }
}
