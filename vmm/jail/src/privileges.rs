//! Who the process is, and what it may do: nothing.

use std::io;

use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};

use crate::error::{JailError, Step, raw, step};

/// `_LINUX_CAPABILITY_VERSION_3` (linux/capability.h).
const CAPABILITY_VERSION: u32 = 0x2008_0522;
/// More than there will be for long; the kernel says where they end.
const CAPABILITIES: libc::c_ulong = 64;

/// `struct __user_cap_header_struct` (capget(2)).
#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

/// `struct __user_cap_data_struct`, of which version 3 takes two.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Becomes the user for good and gives up everything that could be used to get anything back.
pub(crate) fn drop_all(uid: Option<u32>) -> Result<(), JailError> {
    empty_bounding_set()?;
    if let Some(id) = uid {
        let (user, group) = (Uid::from_raw(id), Gid::from_raw(id));
        step(Step::Groups, setgroups(&[]))?;
        step(Step::GroupId, setresgid(group, group, group))?;
        step(Step::UserId, setresuid(user, user, user))?;
    }
    no_capabilities()?;
    prctl(Step::NoNewPrivileges, libc::PR_SET_NO_NEW_PRIVS, 1)?;
    // Last: a change of the user sets it to what the host's administrator chose.
    prctl(Step::Dumpable, libc::PR_SET_DUMPABLE, 0)
}

fn empty_bounding_set() -> Result<(), JailError> {
    for capability in 0..CAPABILITIES {
        match prctl(Step::BoundingSet, libc::PR_CAPBSET_DROP, capability) {
            Ok(()) => {}
            // The first number that the kernel doesn't know.
            Err(JailError::Step { source, .. })
                if capability > 0 && source.kind() == io::ErrorKind::InvalidInput =>
            {
                break;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Empties the permitted, effective, inheritable and with them the ambient set.
fn no_capabilities() -> Result<(), JailError> {
    let header = Header { version: CAPABILITY_VERSION, pid: 0 };
    let data = [Data::default(); 2];
    // SAFETY: both point to structures of the layout that this version has, alive until the call returns.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) };
    raw(Step::Capabilities, result).map(drop)
}

fn prctl(which: Step, option: libc::c_int, value: libc::c_ulong) -> Result<(), JailError> {
    let zero: libc::c_ulong = 0;
    // SAFETY: the options used in this file take numbers only.
    let result = unsafe { libc::prctl(option, value, zero, zero, zero) };
    raw(which, libc::c_long::from(result)).map(drop)
}
