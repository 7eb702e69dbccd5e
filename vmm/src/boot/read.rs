//! Reads from kernel files, which may be anything.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

use torpor_vmm_devices::Memory;
use vm_memory::{GuestAddress, GuestMemoryBackend as _};

/// A file can't be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It ends too early.
    #[error("the {what} ends before byte {end}")]
    Short {
        /// Kernel or initramfs.
        what: &'static str,
        /// What was wanted.
        end: u64,
    },
    /// The host's error.
    #[error("read the {what}: {source}")]
    Host {
        /// Kernel or initramfs.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// Guest memory isn't there.
    #[error("put the {what} into guest memory at {address:#x}: {source}")]
    Memory {
        /// Kernel or initramfs.
        what: &'static str,
        /// Where to.
        address: u64,
        /// The cause.
        source: vm_memory::GuestMemoryError,
    },
}

/// The file's size, bytes.
pub(super) fn size(file: &File, what: &'static str) -> Result<u64, ReadError> {
    Ok(file.metadata().map_err(|source| ReadError::Host { what, source })?.len())
}

/// Fills `bytes` from `offset` on.
pub(super) fn exact(file: &File, what: &'static str, offset: u64, bytes: &mut [u8]) -> Result<(), ReadError> {
    let end = offset.saturating_add(bytes.len() as u64);
    // Beyond that, the host speaks of an invalid argument.
    if i64::try_from(end).is_err() {
        return Err(ReadError::Short { what, end });
    }
    file.read_exact_at(bytes, offset).map_err(|source| match source.kind() {
        io::ErrorKind::UnexpectedEof => ReadError::Short { what, end },
        _ => ReadError::Host { what, source },
    })
}

/// Reads `bytes` bytes from `offset` on into guest memory, without a copy in between.
pub(super) fn into_guest(
    file: &File,
    what: &'static str,
    offset: u64,
    memory: &Memory,
    address: u64,
    bytes: u64,
) -> Result<(), ReadError> {
    let slice = memory
        .get_slice(GuestAddress(address), bytes as usize)
        .map_err(|source| ReadError::Memory { what, address, source })?;
    let mut done = 0;
    while done < bytes {
        let (left, position) = ((bytes - done) as usize, offset.saturating_add(done));
        let position = libc::off_t::try_from(position)
            .map_err(|_| ReadError::Short { what, end: position.saturating_add(left as u64) })?;
        let guard = slice.ptr_guard_mut();
        // SAFETY: the slice is `bytes` bytes of mapped guest memory, of which `left` bytes from `done` on remain; bytes
        // of guest memory may change at any time, nobody has a reference to them.
        let read = unsafe {
            libc::pread(file.as_raw_fd(), guard.as_ptr().add(done as usize).cast(), left, position)
        };
        match read {
            0 => return Err(ReadError::Short { what, end: offset.saturating_add(bytes) }),
            1.. => done += read as u64,
            _ => {
                let source = io::Error::last_os_error();
                if source.kind() != io::ErrorKind::Interrupted {
                    return Err(ReadError::Host { what, source });
                }
            }
        }
    }
    Ok(())
}
