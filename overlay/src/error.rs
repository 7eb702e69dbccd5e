//! What can go wrong with an overlay, typed by what the caller can do about it.

use std::io;
use std::path::{Path, PathBuf};

use nix::libc;

/// A failure of an overlay operation. [`Error::reason`] gives the stable code, the text is for people.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another open description holds the overlay.
    #[error("overlay {} is in use{}; suspend its sandbox or end that process first", path.display(), by(*holder))]
    Locked {
        /// The overlay.
        path: PathBuf,
        /// A process that holds it, where /proc tells.
        holder: Option<u32>,
    },
    /// The base image file isn't there.
    #[error("base image {} ({digest}) is missing; import that image again, the overlay is untouched", path.display())]
    BaseMissing {
        /// Where the base was looked for.
        path: PathBuf,
        /// The digest that the overlay was made over.
        digest: String,
    },
    /// The base image file has other bytes than those that the overlay was made over.
    #[error(
        "base image {} has changed: expected {expected}, found {found}; put the original back, the overlay is untouched",
        path.display()
    )]
    BaseChanged {
        /// The base.
        path: PathBuf,
        /// Digest or size recorded in the overlay.
        expected: String,
        /// Digest or size of the file.
        found: String,
    },
    /// The overlay (or another file that holds a sandbox's data) isn't there.
    #[error("data file {} is missing; restore it, a new one is never made in its place", path.display())]
    DataMissing {
        /// The missing file.
        path: PathBuf,
    },
    /// The file's structure contradicts itself.
    #[error("{} is damaged: {detail}; nothing was written to it; keep a copy", path.display())]
    Corrupt {
        /// The damaged file.
        path: PathBuf,
        /// What is wrong, with offsets.
        detail: String,
    },
    /// The host's file system (or quota) is full.
    #[error("no space left to {action} {}; free space on the host and try again", path.display())]
    NoSpace {
        /// The file that couldn't grow.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
    /// A valid request or file that this crate doesn't support.
    #[error("{}: {detail}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What isn't supported, and what to do instead where there is something.
        detail: String,
    },
    /// There already is a file; it is never overwritten.
    #[error("{} already exists and is not overwritten", path.display())]
    AlreadyExists {
        /// The existing file.
        path: PathBuf,
    },
    /// The requested size is below what must fit.
    #[error("a size of {size} bytes for {} is below the minimum of {minimum} bytes", path.display())]
    TooSmall {
        /// The overlay.
        path: PathBuf,
        /// The requested size in bytes.
        size: u64,
        /// The smallest possible size in bytes.
        minimum: u64,
    },
    /// Read-only for ever, as other overlays stand on it: it can't be written to, nor deleted before them.
    #[error("{} is sealed{}; open or delete those", path.display(), children_of(children))]
    Sealed {
        /// The sealed overlay.
        path: PathBuf,
        /// The overlays that are known to stand on it.
        children: Vec<PathBuf>,
    },
    /// A disk can't become that large in its place: the tables that were laid out for it have no room.
    #[error(
        "{} has room for {maximum} bytes at most, not for {size}: flatten it into a new base and make an overlay of that \
         size over it",
        path.display()
    )]
    TooLarge {
        /// The overlay.
        path: PathBuf,
        /// The requested size in bytes.
        size: u64,
        /// The largest possible size in bytes.
        maximum: u64,
    },
    /// Any other failure of the operating system.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
}

fn by(holder: Option<u32>) -> String {
    holder.map(|pid| format!(" by process {pid}")).unwrap_or_default()
}

fn children_of(children: &[PathBuf]) -> String {
    match children {
        [] => ", as other overlays stand on it".to_owned(),
        _ => {
            let names: Vec<String> = children.iter().map(|child| child.display().to_string()).collect();
            format!(", as {} stand on it", names.join(", "))
        }
    }
}

impl Error {
    /// The stable reason code, as used in statuses and by scripts.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Locked { .. } => "LOCKED",
            Self::BaseMissing { .. } => "BASE_MISSING",
            Self::BaseChanged { .. } => "BASE_CHANGED",
            Self::DataMissing { .. } => "DATA_MISSING",
            Self::Corrupt { .. } => "CORRUPT",
            Self::NoSpace { .. } => "NO_SPACE",
            Self::Unsupported { .. } => "UNSUPPORTED",
            Self::AlreadyExists { .. } => "ALREADY_EXISTS",
            Self::TooSmall { .. } => "TOO_SMALL",
            Self::Sealed { .. } => "SEALED",
            Self::TooLarge { .. } => "TOO_LARGE",
            Self::Io { .. } => "IO",
        }
    }

    /// Gives an operating system error its file and action; a full disk becomes [`Error::NoSpace`].
    pub(crate) fn io(path: &Path, action: &'static str, source: io::Error) -> Self {
        let path = path.to_path_buf();
        match is_full(&source) {
            true => Self::NoSpace { path, action, source },
            false => Self::Io { path, action, source },
        }
    }

    /// Like [`Error::io`] for a file that holds data: its absence is [`Error::DataMissing`].
    pub(crate) fn data(path: &Path, action: &'static str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::DataMissing { path: path.to_path_buf() },
            _ => Self::io(path, action, source),
        }
    }
}

/// True for the errors by which a host says that there is no room (ENOSPC, EDQUOT).
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
        || matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// What is wrong with the bytes of an image, before the path is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// The bytes contradict themselves or the format.
    Corrupt(String),
    /// The format allows it, this crate doesn't.
    Unsupported(String),
}

impl Flaw {
    pub(crate) fn corrupt(detail: impl Into<String>) -> Self {
        Self::Corrupt(detail.into())
    }

    pub(crate) fn unsupported(detail: impl Into<String>) -> Self {
        Self::Unsupported(detail.into())
    }

    /// Names the file.
    pub(crate) fn at(self, path: &Path) -> Error {
        let path = path.to_path_buf();
        match self {
            Self::Corrupt(detail) => Error::Corrupt { path, detail },
            Self::Unsupported(detail) => Error::Unsupported { path, detail },
        }
    }
}
