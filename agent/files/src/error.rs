//! What goes wrong with files, by what can be done about it.

use std::io;

use nix::errno::Errno;

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Problem {
    /// Nothing is there.
    NotFound,
    /// Something is there already.
    Exists,
    /// A folder is needed, and something else is there.
    NotAFolder,
    /// A file is needed, and a folder is there.
    IsAFolder,
    /// A socket, a pipe or a device.
    NotAFile,
    /// A folder that is to be removed has something in it.
    NotEmpty,
    /// The name can't be one: a zero byte, too long, `..` in a tree.
    BadPath,
    /// The path leads out of its root.
    Escapes,
    /// The file system is full, or a quota is used up.
    Full,
    /// The file system is read-only.
    ReadOnly,
    /// Not allowed to this user.
    Denied,
    /// The bytes of an earlier try are not the beginning of this file.
    PrefixDiffers,
    /// Another transfer writes the same file.
    Busy,
    /// The row of entries makes no sense.
    Protocol,
    /// Anything else.
    Other,
}

/// A fault, with the path and what was attempted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FileError {
    /// Its kind.
    pub problem: Problem,
    /// In words, with the path in quotes.
    pub message: String,
}

impl FileError {
    /// A fault in these words.
    pub fn new(problem: Problem, message: impl Into<String>) -> Self {
        Self { problem, message: message.into() }
    }

    /// What a system call said while it did `what` with `path`.
    pub fn of(what: &str, path: &[u8], errno: Errno) -> Self {
        let problem = match errno {
            Errno::ENOENT => Problem::NotFound,
            Errno::EEXIST => Problem::Exists,
            Errno::ENOTDIR => Problem::NotAFolder,
            Errno::EISDIR => Problem::IsAFolder,
            Errno::ENOTEMPTY => Problem::NotEmpty,
            Errno::ENAMETOOLONG => Problem::BadPath,
            // A link out of the root, or one of those in /proc that are no links.
            Errno::EXDEV | Errno::ELOOP => Problem::Escapes,
            Errno::ENOSPC | Errno::EDQUOT => Problem::Full,
            Errno::EROFS => Problem::ReadOnly,
            Errno::EACCES | Errno::EPERM => Problem::Denied,
            _ => Problem::Other,
        };
        let shown = shown(path);
        let why = match errno {
            Errno::EXDEV => "it leads out of its folder".to_owned(),
            Errno::ENOSYS => "the kernel has no openat2: Linux 5.6 or later is needed".to_owned(),
            errno => errno.desc().to_owned(),
        };
        Self::new(problem, format!("{what} '{shown}': {why}"))
    }

    /// The same for an error of the standard library.
    pub fn io(what: &str, path: &[u8], error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(number) => Self::of(what, path, Errno::from_raw(number)),
            None => Self::new(Problem::Other, format!("{what} '{}': {error}", shown(path))),
        }
    }
}

/// A path for people: control characters escaped, and not longer than they read.
pub fn shown(path: &[u8]) -> String {
    const MOST: usize = 200;
    let text = String::from_utf8_lossy(path);
    let text = if text.is_empty() { ".".into() } else { text };
    let mut chars = text.chars();
    let short: String = chars.by_ref().take(MOST).flat_map(char::escape_debug).collect();
    if chars.next().is_some() { format!("{short}…") } else { short }
}
