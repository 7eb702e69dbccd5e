//! Paths that are safe to use, and the folders that they are relative to.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::{
    errno::Errno,
    fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2},
    sys::stat::{FileStat, Mode, fstatat, mkdirat},
};

use crate::error::{FileError, Problem, shown};

/// Longest path, bytes: the kernel's own limit is one more, with the zero byte at its end.
pub const LONGEST_PATH: usize = 4095;
/// Longest name of one file, bytes.
const LONGEST_NAME: usize = 255;

/// Flags of a folder that is only a place to start from.
fn place() -> OFlag {
    OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC
}

/// A path below a root: no `..`, no `.`, no empty part, no zero byte, none too long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name<'a>(&'a [u8]);

impl<'a> Name<'a> {
    /// Checks a path that somebody else sent.
    ///
    /// # Errors
    /// `BadPath`, with what is wrong.
    pub fn check(path: &'a [u8]) -> Result<Self, FileError> {
        whole(path)?;
        let wrong = |why: &str| {
            FileError::new(
                Problem::BadPath,
                format!("'{}' can't be the name of an entry: {why}", shown(path)),
            )
        };
        for part in path.split(|byte| *byte == b'/') {
            match part {
                b"" => return Err(wrong("a part of it is empty")),
                b"." | b".." => return Err(wrong("'.' and '..' are not allowed in it")),
                _ if part.len() > LONGEST_NAME => return Err(wrong("a part of it is longer than 255 bytes")),
                _ => {}
            }
        }
        Ok(Self(path))
    }

    /// The folder it is in (empty: the root) and its last part.
    pub fn split(&self) -> (&'a [u8], &'a [u8]) {
        match self.0.iter().rposition(|byte| *byte == b'/') {
            Some(at) => (&self.0[..at], &self.0[at + 1..]),
            None => (&[], self.0),
        }
    }
}

/// What no path may be, wherever it comes from.
pub fn whole(path: &[u8]) -> Result<(), FileError> {
    let wrong = |why: &str| {
        Err(FileError::new(Problem::BadPath, format!("'{}' can't be a path: {why}", shown(path))))
    };
    if path.contains(&0) {
        return wrong("it holds a zero byte");
    }
    if path.len() > LONGEST_PATH {
        return wrong(&format!("it has {} bytes, and {LONGEST_PATH} are the most", path.len()));
    }
    Ok(())
}

/// Opens a folder by its name in another one; a link is not followed.
pub fn folder_in(folder: impl AsFd, name: &[u8]) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(folder, name, flags, Mode::empty())
}

/// The empty path is the folder itself.
fn named(path: &[u8]) -> &[u8] {
    if path.is_empty() { b"." } else { path }
}

/// A folder from which paths are looked up, and out of which none leads.
#[derive(Debug)]
pub struct Place {
    folder: OwnedFd,
    how: ResolveFlag,
}

impl Place {
    /// The root of the file system, as a chroot has it: links are followed, and `..` ends there.
    ///
    /// # Errors
    /// When it can't be opened.
    pub fn root() -> Result<Self, FileError> {
        let folder = nix::fcntl::open("/", place(), Mode::empty())
            .map_err(|errno| FileError::of("open", b"/", errno))?;
        Ok(Self { folder, how: ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS })
    }

    /// A folder of the user's own choice, by its path as everybody sees it.
    ///
    /// # Errors
    /// When it isn't there or no folder.
    pub fn open(path: &[u8]) -> Result<Self, FileError> {
        whole(path)?;
        let folder = nix::fcntl::open(named(path), place(), Mode::empty())
            .map_err(|errno| FileError::of("open the folder", path, errno))?;
        Ok(Self::beneath(folder))
    }

    /// Nothing leads out of this folder: neither `..` nor a link.
    fn beneath(folder: OwnedFd) -> Self {
        Self { folder, how: ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS }
    }

    /// A folder in this one, as a place of its own.
    ///
    /// # Errors
    /// When it isn't there, no folder, or outside.
    pub fn folder(&self, path: &[u8]) -> Result<Self, FileError> {
        self.at(path, place()).map(Self::beneath)
    }

    /// The same, and the folders of the path that are missing are made, with mode 0755.
    ///
    /// # Errors
    /// As [`Place::folder`].
    pub fn folder_made(&self, path: &[u8]) -> Result<Self, FileError> {
        match self.folder(path) {
            Err(error) if error.problem == Problem::NotFound => {}
            found => return found,
        }
        let parts: Vec<&[u8]> =
            path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
        let mut done = Vec::new();
        for part in parts {
            let parent = self.at(if done.is_empty() { b"." } else { &done }, place())?;
            match mkdirat(&parent, part, Mode::from_bits_truncate(0o755)) {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(errno) => return Err(FileError::of("make the folder", path, errno)),
            }
            if !done.is_empty() {
                done.push(b'/');
            }
            done.extend_from_slice(part);
        }
        self.folder(path)
    }

    /// Opens what is there.
    ///
    /// # Errors
    /// When it can't be opened or is outside.
    pub fn at(&self, path: &[u8], flags: OFlag) -> Result<OwnedFd, FileError> {
        whole(path)?;
        let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).resolve(self.how);
        openat2(&self.folder, named(path), how).map_err(|errno| FileError::of("open", path, errno))
    }

    /// What is there, its last link followed.
    ///
    /// # Errors
    /// As [`Place::at`].
    pub fn look(&self, path: &[u8]) -> Result<FileStat, FileError> {
        let found = self.at(path, OFlag::O_PATH)?;
        fstatat(&found, "", AtFlags::AT_EMPTY_PATH).map_err(|errno| FileError::of("look at", path, errno))
    }
}

impl AsFd for Place {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }
}
