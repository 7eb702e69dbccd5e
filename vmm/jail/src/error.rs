//! What can go wrong on the way in.

use std::fmt;
use std::io;

/// One step of [`crate::enter`], in the order in which they are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The process joins its control group.
    JoinCgroup,
    /// Descriptors that nobody listed are closed.
    CloseDescriptors,
    /// Namespaces of its own: mounts, System V and POSIX queues, host name.
    Unshare,
    /// Nothing that is mounted from here on is seen outside.
    PrivateMounts,
    /// The run directory is held as a tree of its own.
    HoldFolder,
    /// The empty root is mounted.
    MountRoot,
    /// The empty root becomes the root.
    PivotRoot,
    /// The old root goes.
    DetachOldRoot,
    /// The run directory becomes the working directory.
    WorkingFolder,
    /// A resource limit.
    Limit(&'static str),
    /// The capability bounding set is emptied.
    BoundingSet,
    /// No supplementary groups.
    Groups,
    /// The group.
    GroupId,
    /// The user.
    UserId,
    /// All capabilities are given up.
    Capabilities,
    /// No program that it runs could gain privileges.
    NoNewPrivileges,
    /// Nobody but root can look into the process.
    Dumpable,
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::JoinCgroup => "join the control group",
            Self::CloseDescriptors => "close descriptors that nobody listed",
            Self::Unshare => "make mount, ipc and uts namespaces",
            Self::PrivateMounts => "make mounts private",
            Self::HoldFolder => "take hold of the run directory",
            Self::MountRoot => "mount the empty root",
            Self::PivotRoot => "change to the empty root",
            Self::DetachOldRoot => "detach the old root",
            Self::WorkingFolder => "change to the run directory",
            Self::Limit(name) => return write!(formatter, "set the limit {name}"),
            Self::BoundingSet => "empty the capability bounding set",
            Self::Groups => "drop supplementary groups",
            Self::GroupId => "change the group id",
            Self::UserId => "change the user id",
            Self::Capabilities => "drop all capabilities",
            Self::NoNewPrivileges => "set no_new_privs",
            Self::Dumpable => "hide the process's memory",
        };
        formatter.write_str(text)
    }
}

/// The process can't be confined. It must end: it may be half-way in.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// A step failed.
    #[error("the jail cannot {step}{}", advice(source))]
    Step {
        /// Which.
        step: Step,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Some steps reach the calling thread only.
    #[error("the jail must be entered before the first thread is started; there are {0} threads")]
    Threads(u64),
    /// A path that no system call takes.
    #[error("the jail's path {0:?} holds a zero byte")]
    Path(std::path::PathBuf),
}

/// What to do where the process lacks rights.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "; start torpor-vmm as root, or without a jail for a test",
        _ => "",
    }
}

/// A system call's result as a step's.
pub(crate) fn step<T, E: Into<io::Error>>(step: Step, result: Result<T, E>) -> Result<T, JailError> {
    result.map_err(|source| JailError::Step { step, source: source.into() })
}

/// The result of a raw system call.
pub(crate) fn raw(step: Step, result: libc::c_long) -> Result<libc::c_long, JailError> {
    match result {
        -1 => Err(JailError::Step { step, source: io::Error::last_os_error() }),
        value => Ok(value),
    }
}
