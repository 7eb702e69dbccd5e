//! The few things of this driver, beside the KVM probe, that the language can't see to be safe.
#![allow(unsafe_code, reason = "each block says why it is sound")]

use std::{
    ffi::CStr,
    fs::File,
    io::{self, Seek as _, Write as _},
    os::fd::OwnedFd,
    sync::Arc,
};

use rustix::fs::{MemfdFlags, memfd_create};
use tokio::io::{Interest, unix::AsyncFd};

/// The CPU's time stamp counter.
#[cfg(target_arch = "x86_64")]
pub(crate) fn time_stamp() -> u64 {
    // SAFETY: RDTSC reads a counter, touches no memory, and every x86_64 CPU has it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Watches a descriptor for being readable. At most one watch per descriptor at a time.
pub(crate) fn watch_readable(fd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the descriptor is owned through the Arc, which can't be exchanged from here on: it stays open and the same for as long as
    // the watch lives.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(io::Error::from)
}

/// A nameless file that holds these bytes, to be read from its beginning.
pub(crate) fn file_in_memory(name: &CStr, bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file.into())
}
