//! A directory of the host to a tree of our own, so that cleaning it touches nothing of the user's.

use std::collections::HashMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::sys::stat::{major, minor};

use super::node::{Meta, Special, finish, make_link, make_special, wanted_xattr};
use crate::error::At;
use crate::fsutil::{set_mtime, sorted_entries};
use crate::{Error, OnProgress, tell};

/// Copies the content of `from` into the directory `to`. What is mounted below `from` stays out (its mount points come
/// along empty), and so do sockets.
pub(crate) fn copy_tree(from: &Path, to: &Path, progress: OnProgress<'_>) -> Result<(), Error> {
    let root = fs::symlink_metadata(from).at("look at", from)?;
    let mut copy = Copy { device: root.dev(), linked: HashMap::new(), progress };
    copy.directory(from, to)
}

struct Copy<'a> {
    device: u64,
    /// The first copy of every file that has more than one name, by device and inode.
    linked: HashMap<(u64, u64), PathBuf>,
    progress: OnProgress<'a>,
}

impl Copy<'_> {
    fn directory(&mut self, from: &Path, to: &Path) -> Result<(), Error> {
        tell(self.progress, "copy", from.display().to_string());
        for source in sorted_entries(from)? {
            let Some(name) = source.file_name() else { continue };
            let target = to.join(name);
            let found = fs::symlink_metadata(&source).at("look at", &source)?;
            if found.is_dir() {
                fs::create_dir(&target).at("create directory", &target)?;
                if found.dev() == self.device {
                    self.directory(&source, &target)?;
                }
                let meta = meta_of(&source, &found)?;
                finish(&target, &meta)?;
                set_mtime(&target, meta.mtime)?;
            } else {
                self.node(&source, &found, &target)?;
            }
        }
        Ok(())
    }

    fn node(&mut self, source: &Path, found: &Metadata, target: &Path) -> Result<(), Error> {
        let kind = found.file_type();
        if kind.is_socket() {
            return Ok(());
        }
        if found.nlink() > 1 {
            let key = (found.dev(), found.ino());
            if let Some(first) = self.linked.get(&key) {
                return fs::hard_link(first, target).at("make hard link", target);
            }
            self.linked.insert(key, target.to_owned());
        }
        let meta = meta_of(source, found)?;
        if kind.is_symlink() {
            let points_to = fs::read_link(source).at("read link", source)?;
            return make_link(target, &points_to, &meta);
        }
        match special_of(found) {
            Some(special) => make_special(target, special)?,
            None => copy_file(source, target)?,
        }
        finish(target, &meta)
    }
}

fn special_of(found: &Metadata) -> Option<Special> {
    let kind = found.file_type();
    let (major, minor) = (major(found.rdev()), minor(found.rdev()));
    if kind.is_fifo() {
        Some(Special::Fifo)
    } else if kind.is_char_device() {
        Some(Special::Char { major, minor })
    } else if kind.is_block_device() {
        Some(Special::Block { major, minor })
    } else {
        None
    }
}

fn copy_file(source: &Path, target: &Path) -> Result<(), Error> {
    // Whoever owns the directory could put a link to a file of the host in the place of the one just looked at.
    let mut options = OpenOptions::new();
    let mut input =
        options.read(true).custom_flags(OFlag::O_NOFOLLOW.bits()).open(source).at("open", source)?;
    let mut output = File::create_new(target).at("create", target)?;
    io::copy(&mut input, &mut output).at("copy to", target)?;
    Ok(())
}

fn meta_of(source: &Path, found: &Metadata) -> Result<Meta, Error> {
    let mut meta = Meta {
        uid: found.uid(),
        gid: found.gid(),
        mode: found.mode() & 0o7777,
        mtime: found.mtime(),
        xattrs: Vec::new(),
    };
    if found.is_symlink() {
        return Ok(meta);
    }
    let names = match xattr::list(source) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => return Ok(meta),
        names => names.at("list the attributes of", source)?,
    };
    for name in names {
        let Some(name) = name.to_str().filter(|name| wanted_xattr(name)) else { continue };
        if let Some(value) = xattr::get(source, name).at("read an attribute of", source)? {
            meta.xattrs.push((name.to_owned(), value));
        }
    }
    meta.xattrs.sort();
    Ok(meta)
}
