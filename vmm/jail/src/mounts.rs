//! A mount namespace with nothing in it.

use std::ffi::CString;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, fchdir, pivot_root};

use crate::error::{JailError, Step, raw, step};

/// Where a new tmpfs is mounted before it becomes the root: a directory that every host of a VM has, as /dev/kvm is there.
const MOUNT_POINT: &str = "/dev";

/// The root becomes empty, the working directory is `folder`.
pub(crate) fn isolate(root: Option<&Path>, folder: Option<&Path>) -> Result<(), JailError> {
    let flags = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
    step(Step::Unshare, unshare(flags))?;
    let nothing = None::<&str>;
    step(Step::PrivateMounts, mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing))?;
    let folder = folder.map(hold).transpose()?;
    empty_root(root)?;
    // Both names are the new root's directory; the old root then lies over it and goes (pivot_root(2), NOTES).
    step(Step::PivotRoot, pivot_root(".", "."))?;
    step(Step::DetachOldRoot, umount2(".", MntFlags::MNT_DETACH))?;
    match folder {
        Some(folder) => step(Step::WorkingFolder, fchdir(&folder)),
        None => step(Step::WorkingFolder, chdir("/")),
    }
}

/// Mounts what becomes the root and goes there.
fn empty_root(root: Option<&Path>) -> Result<(), JailError> {
    let nothing = None::<&str>;
    let closed = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let Some(root) = root else {
        let options = Some("mode=0555,size=4k,nr_inodes=1");
        step(Step::MountRoot, mount(Some("torpor"), MOUNT_POINT, Some("tmpfs"), closed, options))?;
        return step(Step::MountRoot, chdir(MOUNT_POINT));
    };
    step(Step::MountRoot, mount(Some(root), root, nothing, MsFlags::MS_BIND, nothing))?;
    step(
        Step::MountRoot,
        mount(nothing, root, nothing, MsFlags::MS_BIND | MsFlags::MS_REMOUNT | closed, nothing),
    )?;
    step(Step::MountRoot, chdir(root))
}

/// A copy of the folder's mount that is attached nowhere. As a working directory it has no parent, so that `..` doesn't
/// lead out of it.
fn hold(folder: &Path) -> Result<OwnedFd, JailError> {
    let path = CString::new(folder.as_os_str().as_bytes()).map_err(|_| JailError::Path(folder.to_owned()))?;
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    // SAFETY: the path is a string that ends with zero and lives until the call returns.
    let result = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) };
    let number = raw(Step::HoldFolder, result)?;
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    let tree = unsafe { OwnedFd::from_raw_fd(number as i32) };
    debug_assert!(tree.as_raw_fd() > 2);
    Ok(tree)
}
