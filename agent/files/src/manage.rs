//! Single looks and changes: what is there, what is in a folder, make a folder, remove.

use std::os::{fd::OwnedFd, unix::ffi::OsStrExt as _};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, OFlag, readlinkat},
    sys::stat::{FileStat, Mode, fchmod, fstatat, mkdirat},
    unistd::{UnlinkatFlags, fchown, unlinkat},
};

use crate::{
    Entry, Kind, Name, Place,
    error::{FileError, Problem},
    part,
    path::folder_in,
    read::{self, names},
    write::Owner,
};

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Kind, mode, size and so on; its path is the name alone.
    pub entry: Entry,
    /// The kind of what a link leads to; as `entry.kind` when it is none. None: the link leads nowhere.
    pub leads_to: Option<Kind>,
    /// Numbers of user and group.
    pub owner: (u32, u32),
    /// Bytes that a broken transfer to this path has left, for one that goes on.
    pub partial: Option<u64>,
}

/// What is at a path, the link itself when it is one.
///
/// # Errors
/// `NotFound` and the like.
pub fn info(place: &Place, path: &[u8]) -> Result<Info, FileError> {
    let Some((folder, name)) = parent(place, path)? else {
        return Ok(of(place.look(path)?, &[], None));
    };
    match fstatat(&folder, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) => {
            let mut info = of(stat, name, part::longest(&folder, name));
            if info.entry.kind == Kind::Link {
                info.leads_to = place.look(path).ok().map(|stat| read::kind(&stat));
                let target =
                    readlinkat(&folder, name).map_err(|e| FileError::of("read the link", path, e))?;
                info.entry.target = target.as_bytes().to_vec();
            }
            Ok(info)
        }
        Err(Errno::ENOENT) => match part::longest(&folder, name) {
            // Nothing but what a broken transfer has left.
            Some(left) => Ok(Info {
                entry: Entry::new(name, Kind::Other, 0),
                leads_to: None,
                owner: (0, 0),
                partial: Some(left),
            }),
            None => Err(FileError::of("look at", path, Errno::ENOENT)),
        },
        Err(errno) => Err(FileError::of("look at", path, errno)),
    }
}

/// What was looked at; where a link leads is left open.
fn of(stat: FileStat, name: &[u8], partial: Option<u64>) -> Info {
    let entry = read::entry(name, &stat);
    let leads_to = (entry.kind != Kind::Link).then_some(entry.kind);
    Info { entry, leads_to, owner: (stat.st_uid, stat.st_gid), partial }
}

/// The folder a path is in, and its last part; none for a root, or a path that ends in `.` or `..`.
fn parent<'a>(place: &Place, path: &'a [u8]) -> Result<Option<(OwnedFd, &'a [u8])>, FileError> {
    crate::path::whole(path)?;
    let path = trimmed(path);
    let from = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    let name = &path[from..];
    if matches!(name, b"" | b"." | b"..") {
        return Ok(None);
    }
    let above = if path[..from].is_empty() { &b"."[..] } else { &path[..from] };
    let folder = place.at(above, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
    Ok(Some((folder, name)))
}

/// Without the slashes at its end.
fn trimmed(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
    &path[..end]
}

/// What is in a folder, by name, after `after`, at most `most`; whether there is more.
///
/// # Errors
/// `NotFound`, `NotAFolder` and the like.
pub fn list(place: &Place, path: &[u8], after: &[u8], most: usize) -> Result<(Vec<Info>, bool), FileError> {
    let folder = place.at(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
    let all = names(&folder, path)?;
    let from = if after.is_empty() { 0 } else { all.partition_point(|name| name.as_slice() <= after) };
    let mut found = Vec::new();
    for name in all[from..].iter().take(most) {
        // Gone since the names were read.
        let Ok(stat) = fstatat(&folder, name.as_slice(), AtFlags::AT_SYMLINK_NOFOLLOW) else { continue };
        let mut info = of(stat, name, None);
        if info.entry.kind == Kind::Link {
            info.entry.target =
                readlinkat(&folder, name.as_slice()).map(|t| t.as_bytes().to_vec()).unwrap_or_default();
        }
        found.push(info);
    }
    Ok((found, all.len() - from > most))
}

/// Makes a folder; with `parents` also those above it, and one that is there already is no fault.
///
/// # Errors
/// `Exists`, `NotFound` and the like.
pub fn make_folder(
    place: &Place,
    path: &[u8],
    mode: u32,
    parents: bool,
    owner: Option<Owner>,
) -> Result<(), FileError> {
    let failed = |errno| FileError::of("make the folder", path, errno);
    if parents && place.folder(path).is_ok() {
        return Ok(());
    }
    let trimmed = trimmed(path);
    if parents && let Some(at) = trimmed.iter().rposition(|byte| *byte == b'/') {
        place.folder_made(if at == 0 { b"/" } else { &trimmed[..at] })?;
    }
    let Some((folder, name)) = parent(place, trimmed)? else {
        return Err(failed(Errno::EEXIST));
    };
    Name::check(name)?;
    mkdirat(&folder, name, Mode::from_bits_truncate(0o700)).map_err(failed)?;
    let made = folder_in(&folder, name).map_err(failed)?;
    if let Some((user, group)) = owner {
        fchown(&made, Some(user.into()), Some(group.into())).map_err(failed)?;
    }
    fchmod(&made, Mode::from_bits_truncate(mode & 0o7777)).map_err(failed)
}

/// Removes a file, a link or an empty folder; with `recursive` a folder with all that is in it. Links are never followed.
///
/// # Errors
/// `NotFound`, `NotEmpty` and the like.
pub fn remove(place: &Place, path: &[u8], recursive: bool) -> Result<(), FileError> {
    let Some((folder, name)) = parent(place, path)? else {
        let shown = crate::error::shown(path);
        return Err(FileError::new(
            Problem::BadPath,
            format!("'{shown}' names no file that could be removed"),
        ));
    };
    remove_at(&folder, name, path, recursive)
}

/// Trees that are as deep as their path may be long come to an end too.
fn remove_at(folder: &OwnedFd, name: &[u8], path: &[u8], recursive: bool) -> Result<(), FileError> {
    let failed = |errno| FileError::of("remove", path, errno);
    match unlinkat(folder, name, UnlinkatFlags::NoRemoveDir) {
        // Linux says EISDIR for a folder.
        Err(Errno::EISDIR) => {}
        done => return done.map_err(failed),
    }
    if recursive {
        let inner = folder_in(folder, name).map_err(failed)?;
        for name in names(&inner, path)? {
            let mut below = path.to_vec();
            below.push(b'/');
            below.extend_from_slice(&name);
            match remove_at(&inner, &name, &below, true) {
                Err(error) if error.problem == Problem::NotFound => {}
                done => done?,
            }
        }
    }
    unlinkat(folder, name, UnlinkatFlags::RemoveDir).map_err(failed)
}
