//! Descriptors that nobody listed.

use std::os::fd::RawFd;

use crate::error::{JailError, Step, raw};

/// Closes all descriptors but those listed, in any order, and the three standard ones. To be called before the process opens
/// anything: what it inherited without being told of it is gone, and nothing of its own is hit.
///
/// # Errors
/// [`Step::CloseDescriptors`].
pub fn close_all_but(keep: &[RawFd]) -> Result<(), JailError> {
    let mut keep: Vec<u32> =
        keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    let mut next = 3;
    for kept in keep {
        if kept > next {
            range(next, kept - 1)?;
        }
        next = next.max(kept.saturating_add(1));
    }
    range(next, u32::MAX)
}

fn range(first: u32, last: u32) -> Result<(), JailError> {
    // SAFETY: takes two numbers. What is closed is owned by nobody in this process, as the caller promises.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    raw(Step::CloseDescriptors, result).map(drop)
}
