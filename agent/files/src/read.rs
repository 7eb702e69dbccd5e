//! Walks a tree and hands out what is there.

use std::{
    ffi::CStr,
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    os::fd::{AsFd, OwnedFd},
    os::unix::ffi::OsStrExt as _,
};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{AtFlags, OFlag, openat, readlinkat},
    sys::stat::{FileStat, Mode, SFlag, fstat, fstatat},
};
use sha2::{Digest as _, Sha256};

use crate::{
    Entry, Kind, Place,
    error::{FileError, Problem},
    path::folder_in,
};

/// Bytes read from a file at once.
const PIECE: usize = 128 << 10;
/// Folders in each other at most: each of them takes a descriptor while the walk is in it.
const DEEPEST: usize = 256;

/// What becomes of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// Its bytes are wanted from here on.
    From(u64),
    /// Nothing more of it.
    Skip,
}

/// Whoever takes what is read. Its errors end the walk.
pub trait Sink {
    /// What its errors are.
    type Error: From<FileError>;

    /// An entry. Of a file the bytes follow, from where this answer says, and then [`Sink::end`].
    fn begin(&mut self, entry: Entry, file: Option<&mut File>) -> Result<Begin, Self::Error>;
    /// Bytes of the file.
    fn data(&mut self, bytes: &[u8]) -> Result<(), Self::Error>;
    /// The file has ended.
    fn end(&mut self) -> Result<(), Self::Error>;
    /// Something that is left out, and why.
    fn skipped(&mut self, path: &[u8], why: &str) -> Result<(), Self::Error>;
}

/// Hands out what is at `path` in `place`: a file, or a folder with all that is in it, folders before what they hold. A link
/// at the path itself is followed, those in the tree are kept. Entries are named from `name` on (empty: from the tree's
/// own root).
///
/// # Errors
/// What the file system or the sink says; `NotAFile` for a socket, pipe or device.
pub fn read<S: Sink>(place: &Place, path: &[u8], name: &[u8], sink: &mut S) -> Result<(), S::Error> {
    let stat = place.look(path)?;
    match kind(&stat) {
        Kind::Folder => {
            let folder = place.at(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
            sink.begin(entry(name, &stat), None)?;
            walk(folder, name, sink, 0)
        }
        Kind::File => {
            // It may have become a pipe since, at which an open would wait.
            let fd = place.at(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY)?;
            file(fd, name, sink)
        }
        Kind::Link | Kind::Other => {
            let what = format!("'{}' is a socket, a pipe or a device", crate::error::shown(path));
            Err(FileError::new(Problem::NotAFile, what).into())
        }
    }
}

/// What a file is.
pub fn kind(stat: &FileStat) -> Kind {
    match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFREG => Kind::File,
        SFlag::S_IFDIR => Kind::Folder,
        SFlag::S_IFLNK => Kind::Link,
        _ => Kind::Other,
    }
}

/// An entry of what was looked at, without a link's target.
pub fn entry(path: &[u8], stat: &FileStat) -> Entry {
    let kind = kind(stat);
    let mut entry = Entry::new(path, kind, stat.st_mode & 0o7777);
    entry.modified = Some((stat.st_mtime, u32::try_from(stat.st_mtime_nsec).unwrap_or(0)));
    entry.size = (kind == Kind::File).then(|| u64::try_from(stat.st_size).unwrap_or(0));
    entry
}

fn walk<S: Sink>(folder: OwnedFd, path: &[u8], sink: &mut S, depth: usize) -> Result<(), S::Error> {
    if depth >= DEEPEST {
        return sink.skipped(path, &format!("more than {DEEPEST} folders in each other"));
    }
    for name in names(&folder, path)? {
        let mut whole = path.to_vec();
        if !whole.is_empty() {
            whole.push(b'/');
        }
        whole.extend_from_slice(&name);
        match fstatat(&folder, name.as_slice(), AtFlags::AT_SYMLINK_NOFOLLOW) {
            Ok(stat) => one(&folder, &name, &whole, &stat, sink, depth)?,
            // Gone since the names were read.
            Err(Errno::ENOENT) => {}
            Err(errno) => return Err(FileError::of("look at", &whole, errno).into()),
        }
    }
    Ok(())
}

/// The names in a folder, sorted: the same tree always makes the same row.
pub fn names(folder: &OwnedFd, path: &[u8]) -> Result<Vec<Vec<u8>>, FileError> {
    let failed = |errno| FileError::of("read the folder", path, errno);
    // A descriptor of its own: reading moves its position.
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut dir = Dir::openat(folder, ".", flags, Mode::empty()).map_err(failed)?;
    let mut names = Vec::new();
    for entry in dir.iter() {
        let entry = entry.map_err(failed)?;
        let name = CStr::to_bytes(entry.file_name());
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    names.sort_unstable();
    Ok(names)
}

fn one<S: Sink>(
    folder: &OwnedFd,
    name: &[u8],
    path: &[u8],
    stat: &FileStat,
    sink: &mut S,
    depth: usize,
) -> Result<(), S::Error> {
    match kind(stat) {
        Kind::Folder => match folder_in(folder, name) {
            Ok(inner) => {
                sink.begin(entry(path, stat), None)?;
                walk(inner, path, sink, depth + 1)
            }
            Err(errno) => changed(path, errno, sink),
        },
        Kind::File => {
            let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_NOFOLLOW;
            match openat(folder, name, flags | OFlag::O_CLOEXEC, Mode::empty()) {
                Ok(opened) => file(opened, path, sink),
                Err(errno) => changed(path, errno, sink),
            }
        }
        Kind::Link => match readlinkat(folder, name) {
            Ok(target) => {
                let mut entry = entry(path, stat);
                entry.target = target.as_bytes().to_vec();
                sink.begin(entry, None).map(drop)
            }
            Err(errno) => changed(path, errno, sink),
        },
        Kind::Other => sink.skipped(path, "it is a socket, a pipe or a device"),
    }
}

/// A tree that is in use changes under the walk: what has gone or become something else since is left out.
fn changed<S: Sink>(path: &[u8], errno: Errno, sink: &mut S) -> Result<(), S::Error> {
    match errno {
        Errno::ENOENT => Ok(()),
        Errno::ELOOP | Errno::ENOTDIR | Errno::ENXIO => sink.skipped(path, "it changed while it was read"),
        errno => Err(FileError::of("open", path, errno).into()),
    }
}

fn file<S: Sink>(opened: OwnedFd, path: &[u8], sink: &mut S) -> Result<(), S::Error> {
    let stat = fstat(opened.as_fd()).map_err(|errno| FileError::of("look at", path, errno))?;
    if kind(&stat) != Kind::File {
        return sink.skipped(path, "it changed while it was read");
    }
    let failed = |error: io::Error| FileError::io("read", path, &error);
    let mut file = File::from(opened);
    let from = match sink.begin(entry(path, &stat), Some(&mut file))? {
        Begin::From(from) => from,
        Begin::Skip => return Ok(()),
    };
    file.seek(SeekFrom::Start(from)).map_err(failed)?;
    let mut buffer = vec![0; PIECE];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return sink.end(),
            Ok(count) => sink.data(&buffer[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error).into()),
        }
    }
}

/// SHA-256 of the first `length` bytes; none when there are fewer.
///
/// # Errors
/// When they can't be read.
pub fn digest(file: &mut File, length: u64, path: &[u8]) -> Result<Option<Vec<u8>>, FileError> {
    let failed = |error: io::Error| FileError::io("read", path, &error);
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; PIECE];
    let mut left = length;
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
        match file.read(&mut buffer[..most]) {
            Ok(0) => return Ok(None),
            Ok(count) => {
                hash.update(&buffer[..count]);
                left -= count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(Some(hash.finalize().to_vec()))
}
