//! Sockets that interface calls go through, and deletion of a link by rtnetlink(7).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};

/// A socket for the interface ioctls; it stands for the network namespace of the calling thread.
pub(super) fn control_socket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?)
}

/// Deletes the interface with the index, and waits for the kernel's answer.
pub(super) fn delete_link(index: u32) -> io::Result<()> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let netlink = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
    sendto(netlink.as_raw_fd(), &delete_request(index), &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let mut answer = [0; 1024];
    let length = recv(netlink.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    read_ack(&answer[..length])
}

/// `struct nlmsghdr` (length, type, flags, sequence, port) and `struct ifinfomsg` (family, pad, type, index, flags, change).
fn delete_request(index: u32) -> Vec<u8> {
    const LENGTH: u32 = 32;
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    let mut message = Vec::with_capacity(LENGTH as usize);
    message.extend(LENGTH.to_ne_bytes());
    message.extend(libc::RTM_DELLINK.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend(1u32.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(index.to_ne_bytes());
    message.extend([0; 8]);
    message
}

/// An acknowledgement is a message of type NLMSG_ERROR with a negative errno, or 0, after the header.
fn read_ack(answer: &[u8]) -> io::Result<()> {
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let errno = answer.get(16..20).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, errno) {
        (Some(kind), Some(0)) if libc::c_int::from(kind) == libc::NLMSG_ERROR => Ok(()),
        (Some(kind), Some(errno)) if libc::c_int::from(kind) == libc::NLMSG_ERROR => {
            Err(io::Error::from_raw_os_error(errno.saturating_neg()))
        }
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer is no acknowledgement")),
    }
}
