//! One owner for each overlay: an exclusive lock on an open file description (OFD).
//!
//! The lock lives as long as any descriptor of that description. A driver opens and locks an overlay, then lets the
//! VM's process inherit the descriptor: the lock outlives the driver and is gone, without a trace to clean up, when
//! the VM's process is.
//!
//! The lock covers all bytes, also those on which QEMU's tools take locks of their own: a QEMU that is to work on a
//! locked overlay is started with `file.locking=off` (`-U` for `qemu-img info`).

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::error::{Error, Flaw};

/// How often a lock is tried.
const ATTEMPTS: u32 = 11;
/// The time between two attempts.
const PAUSE: Duration = Duration::from_millis(10);

/// The exclusive lock of an overlay, and the descriptor (read-write, close-on-exec) that carries it.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Opens an overlay for reading and writing and locks all of it.
    ///
    /// A lock that another holds is waited for, but only for a tenth of a second: a process that is being started
    /// (between fork and exec) shares all descriptors of its parent, also those that have just been closed there.
    ///
    /// # Errors
    /// [`Error::Locked`] with the holder's pid where /proc tells it, [`Error::DataMissing`] when there is no such
    /// file, [`Error::Unsupported`] when it isn't a regular file, [`Error::Io`].
    pub fn acquire(path: &Path) -> Result<Self, Error> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|source| Error::data(path, "open overlay", source))?;
        let opened = file.metadata().map_err(|source| Error::io(path, "inspect overlay", source))?;
        if !opened.is_file() {
            return Err(Flaw::unsupported("it isn't a regular file").at(path));
        }
        if !lock_soon(&file).map_err(|errno| Error::io(path, "lock", errno.into()))? {
            return Err(Error::Locked { path: path.to_path_buf(), holder: holder_of(path) });
        }
        // The name may have moved to another file between open and lock.
        let named = path.metadata().map_err(|source| Error::data(path, "inspect overlay", source))?;
        if (named.dev(), named.ino()) != (opened.dev(), opened.ino()) {
            return Err(Error::Locked { path: path.to_path_buf(), holder: None });
        }
        Ok(Self { file, path: path.to_path_buf() })
    }

    /// Takes over a descriptor (read-write) whose description carries the lock, as a VM's process inherits it. `path` is for
    /// messages only. A description that was open without the lock gets it here.
    ///
    /// # Errors
    /// [`Error::Locked`] when another description holds the lock, [`Error::Unsupported`] when it isn't a regular file,
    /// [`Error::Io`], also when it isn't open for writing.
    pub fn from_fd(fd: OwnedFd, path: &Path) -> Result<Self, Error> {
        let file = File::from(fd);
        let opened = file.metadata().map_err(|source| Error::io(path, "inspect overlay", source))?;
        if !opened.is_file() {
            return Err(Flaw::unsupported("it isn't a regular file").at(path));
        }
        // To the description that holds it, a lock is given again; nobody has to be waited for.
        match fcntl(&file, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_WRLCK))) {
            Ok(_) => Ok(Self { file, path: path.to_path_buf() }),
            Err(Errno::EAGAIN | Errno::EACCES) => {
                Err(Error::Locked { path: path.to_path_buf(), holder: holder_of(path) })
            }
            Err(errno) => Err(Error::io(path, "lock", errno.into())),
        }
    }

    /// The locked overlay's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The locked file.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Ends the lock for all descriptors that carry it, also inherited ones. Dropping only closes this descriptor.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn release(&self) -> Result<(), Error> {
        fcntl(&self.file, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_UNLCK)))
            .map(drop)
            .map_err(|errno| Error::io(&self.path, "unlock", errno.into()))
    }

    /// Gives up the descriptor; the lock lives on in it and in every duplicate, also in other processes.
    pub fn into_fd(self) -> OwnedFd {
        self.file.into()
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn lock_soon(file: &File) -> Result<bool, Errno> {
    for attempt in 0..ATTEMPTS {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&whole_file(libc::F_WRLCK))) {
            Ok(_) => return Ok(true),
            Err(Errno::EAGAIN | Errno::EACCES) if attempt + 1 < ATTEMPTS => std::thread::sleep(PAUSE),
            Err(Errno::EAGAIN | Errno::EACCES) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(false)
}

/// Tells whether anyone holds a lock on the file (any kind of fcntl lock on any of its bytes).
///
/// # Errors
/// [`Error::DataMissing`] when there is no such file, [`Error::Io`].
pub fn is_locked(path: &Path) -> Result<bool, Error> {
    let file = File::open(path).map_err(|source| Error::data(path, "open overlay", source))?;
    let mut probe = whole_file(libc::F_WRLCK);
    fcntl(&file, FcntlArg::F_OFD_GETLK(&mut probe))
        .map_err(|errno| Error::io(path, "look for locks on", errno.into()))?;
    Ok(i32::from(probe.l_type) != libc::F_UNLCK)
}

/// The process that holds a lock on the file, when /proc tells it: another process than this one if there are
/// several, as a lock that was inherited is held by all heirs.
pub fn holder_of(path: &Path) -> Option<u32> {
    let metadata = path.metadata().ok()?;
    let inode = (metadata.dev(), metadata.ino());
    let own = std::process::id();
    let mut found = None;
    for entry in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if (found.is_none() || pid != own) && holds(&entry.path(), inode) {
            found = Some(pid);
            if pid != own {
                break;
            }
        }
    }
    found.or_else(|| posix_holder(inode.1))
}

/// True if one of the process's descriptors carries a lock and is of that inode. Only descriptors with locks are
/// looked up, as looking at a file of a dead network file system can hang.
fn holds(process: &Path, inode: (u64, u64)) -> bool {
    let Ok(descriptors) = std::fs::read_dir(process.join("fdinfo")) else { return false };
    descriptors.flatten().any(|entry| {
        let locked = std::fs::read_to_string(entry.path()).is_ok_and(|info| info.lines().any(is_fcntl_lock));
        let descriptor = process.join("fd").join(entry.file_name());
        locked && descriptor.metadata().is_ok_and(|found| (found.dev(), found.ino()) == inode)
    })
}

fn is_fcntl_lock(line: &str) -> bool {
    line.starts_with("lock:") && (line.contains(" OFDLCK ") || line.contains(" POSIX "))
}

/// For processes whose descriptors aren't readable to us, /proc/locks still names the holder of a classic lock.
/// A line is `N: POSIX ADVISORY WRITE pid major:minor:inode start end`; OFD locks have pid -1 there.
fn posix_holder(inode: u64) -> Option<u32> {
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields.as_slice() {
            [_, "POSIX", _, _, pid, file, ..] if file.rsplit(':').next()?.parse() == Ok(inode) => {
                pid.parse().ok()
            }
            _ => None,
        }
    })
}

fn whole_file(kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}
