//! Making one node of a tree, with its owner, mode, attributes and time.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::path::Path;

use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::Error;
use crate::error::At;
use crate::fsutil::set_mtime;

/// What a node needs beside its content.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meta {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Permission bits with set-id and sticky bits, no type.
    pub(crate) mode: u32,
    /// Seconds since 1970. Whole seconds, because that is what every tar format carries.
    pub(crate) mtime: i64,
    /// Only file capabilities and `user.` attributes are kept; labels of the host's security modules mean nothing in a guest.
    pub(crate) xattrs: Vec<(String, Vec<u8>)>,
}

/// A device or pipe: the `tar` crate makes empty files of them, so we make them ourselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    Char { major: u64, minor: u64 },
    Block { major: u64, minor: u64 },
    Fifo,
}

pub(crate) fn wanted_xattr(name: &str) -> bool {
    name == "security.capability" || name.starts_with("user.")
}

pub(crate) fn make_special(path: &Path, special: Special) -> Result<(), Error> {
    let (kind, device) = match special {
        Special::Char { major, minor } => (SFlag::S_IFCHR, makedev(major, minor)),
        Special::Block { major, minor } => (SFlag::S_IFBLK, makedev(major, minor)),
        Special::Fifo => (SFlag::S_IFIFO, 0),
    };
    mknod(path, kind, Mode::from_bits_truncate(0o600), device).at("make device node", path)
}

pub(crate) fn make_link(path: &Path, target: &Path, meta: &Meta) -> Result<(), Error> {
    symlink(target, path).at("make link", path)?;
    lchown(path, Some(meta.uid), Some(meta.gid)).at("set the owner of", path)?;
    set_mtime(path, meta.mtime)
}

/// Sets everything in the one order that keeps it all: a change of owner drops set-id bits and capabilities.
pub(crate) fn finish(path: &Path, meta: &Meta) -> Result<(), Error> {
    lchown(path, Some(meta.uid), Some(meta.gid)).at("set the owner of", path)?;
    fs::set_permissions(path, Permissions::from_mode(meta.mode & 0o7777)).at("set the mode of", path)?;
    for (name, value) in &meta.xattrs {
        match xattr::set(path, name, value) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
            done => done.at("set an attribute of", path)?,
        }
    }
    set_mtime(path, meta.mtime)
}
