//! All steps, in order.

use std::fs;
use std::io::Write as _;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::sys::resource::{Resource, setrlimit};
use nix::sys::stat::{Mode, umask};

use crate::error::{JailError, Step, step};
use crate::{mounts, privileges};

/// What the process keeps of the world.
#[derive(Debug)]
pub struct Plan<'a> {
    /// User and group id to become; none: they stay.
    pub uid: Option<u32>,
    /// An empty directory that becomes the root, read-only; none: a new, empty tmpfs.
    pub root: Option<&'a Path>,
    /// The run directory. It becomes the working directory: the only place from which a path leads anywhere, and only
    /// to what is in it, as its mount has no parent.
    pub folder: Option<&'a Path>,
    /// Most descriptors at once from here on.
    pub descriptors: u64,
    /// Largest file that it may write, bytes; none: no limit.
    pub file_bytes: Option<u64>,
    /// A `cgroup.procs`, open for writing, of the control group to join; none: it is where whoever started it put it.
    pub cgroup: Option<BorrowedFd<'a>>,
}

/// Confines the process. Must be called before the first thread is started. System call filters are not set here: each
/// thread installs its own from [`crate::Filters`].
///
/// Afterwards: control group joined, mount, IPC and UTS namespaces of its own, an empty
/// read-only root, the run directory as working directory, umask 077, limits, no capabilities at all and none to be had
/// (`no_new_privs`, empty bounding set), user and group changed, memory hidden from other users.
///
/// # Errors
/// [`JailError`] names the step. The process must end then.
pub fn enter(plan: &Plan<'_>) -> Result<(), JailError> {
    refuse_threads()?;
    if let Some(cgroup) = plan.cgroup {
        let file = step(Step::JoinCgroup, cgroup.try_clone_to_owned())?;
        step(Step::JoinCgroup, fs::File::from(file).write_all(b"0"))?;
    }
    mounts::isolate(plan.root, plan.folder)?;
    umask(Mode::from_bits_truncate(0o077));
    limits(plan)?;
    privileges::drop_all(plan.uid)
}

/// A new mount namespace, for one, is the calling thread's alone.
fn refuse_threads() -> Result<(), JailError> {
    // A directory's link count is two more than its subdirectories: one per thread here.
    match fs::metadata("/proc/self/task").map(|task| task.nlink().saturating_sub(2)) {
        Ok(threads) if threads > 1 => Err(JailError::Threads(threads)),
        // Without /proc it can't be told.
        _ => Ok(()),
    }
}

fn limits(plan: &Plan<'_>) -> Result<(), JailError> {
    let limit = |name, resource, most| step(Step::Limit(name), setrlimit(resource, most, most));
    limit("RLIMIT_NOFILE", Resource::RLIMIT_NOFILE, plan.descriptors)?;
    // A core file would hold the guest's memory.
    limit("RLIMIT_CORE", Resource::RLIMIT_CORE, 0)?;
    limit("RLIMIT_MEMLOCK", Resource::RLIMIT_MEMLOCK, 0)?;
    limit("RLIMIT_MSGQUEUE", Resource::RLIMIT_MSGQUEUE, 0)?;
    match plan.file_bytes {
        Some(most) => limit("RLIMIT_FSIZE", Resource::RLIMIT_FSIZE, most),
        None => Ok(()),
    }
}
