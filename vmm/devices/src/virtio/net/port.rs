//! The host's end of the wire: a TAP, or any descriptor that keeps packets apart.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libc::{c_int, c_ulong, iovec};
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::HEADER;

/// What the reader of a TAP can take.
pub(super) mod offload {
    pub(crate) use libc::{TUN_F_CSUM, TUN_F_TSO_ECN, TUN_F_TSO4, TUN_F_TSO6};
}

/// The host's end of the wire. Every packet has a virtio-net header of 12 bytes before it, both ways.
#[derive(Debug)]
pub struct Port {
    descriptor: OwnedFd,
    is_tap: bool,
}

impl Port {
    /// A TAP that was opened with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`.
    ///
    /// # Errors
    /// It is something else, or the kernel doesn't know one of the requests.
    pub fn tap(descriptor: OwnedFd) -> io::Result<Self> {
        // SAFETY: all zeros is a value of this plain structure.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel fills the structure, which is of the size that it expects.
        check(unsafe { libc::ioctl(descriptor.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })?;
        // SAFETY: TUNGETIFF sets the flags, of which any bits are valid.
        let flags = c_int::from(unsafe { request.ifr_ifru.ifru_flags });
        let needed = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if flags & needed != needed {
            let text = format!("it is not a TAP with IFF_NO_PI and IFF_VNET_HDR: flags {flags:#x}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        for (number, value) in [(libc::TUNSETVNETHDRSZ, HEADER as c_int), (libc::TUNSETVNETLE, 1)] {
            // SAFETY: the kernel reads one int.
            check(unsafe { libc::ioctl(descriptor.as_raw_fd(), number, &raw const value) })?;
        }
        Ok(Self { is_tap: true, ..Self::packets(descriptor)? })
    }

    /// A descriptor that keeps packets apart, such as a socket of type `SOCK_SEQPACKET`.
    ///
    /// # Errors
    /// It can't be made non-blocking.
    pub fn packets(descriptor: OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(&descriptor, FcntlArg::F_GETFL)?);
        fcntl(&descriptor, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Self { descriptor, is_tap: false })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Tells a TAP what may come (see [`offload`]).
    pub(super) fn set_offloads(&self, flags: u32) -> io::Result<()> {
        if !self.is_tap {
            return Ok(());
        }
        // SAFETY: this request's argument is a number.
        check(unsafe { libc::ioctl(self.descriptor.as_raw_fd(), libc::TUNSETOFFLOAD, c_ulong::from(flags)) })
    }

    /// Reads one packet into buffers. More bytes than they hold are lost.
    pub(super) fn read(&self, buffers: &[iovec]) -> io::Result<usize> {
        // SAFETY: the buffers are mapped guest memory or our own, held by the caller, and at most IOV_MAX.
        let count =
            unsafe { libc::readv(self.descriptor.as_raw_fd(), buffers.as_ptr(), buffers.len() as c_int) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Writes one packet.
    pub(super) fn write(&self, buffers: &[iovec]) -> io::Result<usize> {
        // SAFETY: as for `read`.
        let count =
            unsafe { libc::writev(self.descriptor.as_raw_fd(), buffers.as_ptr(), buffers.len() as c_int) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
