//! The ioctls on interfaces (netdevice(7)) and TUN/TAP descriptors (linux/if_tun.h).
#![allow(unsafe_code)]

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc;

use crate::Mac;

/// `IFF_TUN_EXCL` of linux/if_tun.h: fail when the interface exists.
const IFF_TUN_EXCL: libc::c_int = 0x8000;

/// Makes the TAP `name` and ties it to `tun`, an open `/dev/net/tun`. It fails with EBUSY when the interface exists.
pub(super) fn tun_set_iff(tun: BorrowedFd<'_>, name: &str, vnet_hdr: bool) -> io::Result<()> {
    let vnet_hdr = if vnet_hdr { libc::IFF_VNET_HDR } else { 0 };
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | IFF_TUN_EXCL | vnet_hdr;
    let mut request = request_for(name)?;
    // The kernel reads the flags as 16 bits (struct ifreq's ifr_flags is a short): IFF_TUN_EXCL is the sign bit.
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    ifreq_ioctl(tun, libc::TUNSETIFF as libc::Ioctl, &mut request)
}

/// Lets the user `uid` use the TAP tied to `tun` without privileges.
pub(super) fn tun_set_owner(tun: BorrowedFd<'_>, uid: u32) -> io::Result<()> {
    // SAFETY: TUNSETOWNER takes its argument by value (a uid), reads no memory, and `tun` is open while borrowed.
    let result =
        unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETOWNER as libc::Ioctl, libc::c_ulong::from(uid)) };
    check(result)
}

/// Gives the interface an address. It gets the prefix of the address's class until [`set_prefix`]; while the interface is
/// down no route is made of it.
pub(super) fn set_address(socket: BorrowedFd<'_>, name: &str, address: Ipv4Addr) -> io::Result<()> {
    let mut request = request_for(name)?;
    request.ifr_ifru.ifru_addr = ipv4_sockaddr(address);
    ifreq_ioctl(socket, libc::SIOCSIFADDR, &mut request)
}

/// Sets the prefix length of the interface's address, at most 32.
pub(super) fn set_prefix(socket: BorrowedFd<'_>, name: &str, prefix: u8) -> io::Result<()> {
    let mask = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
    let mut request = request_for(name)?;
    request.ifr_ifru.ifru_netmask = ipv4_sockaddr(Ipv4Addr::from_bits(mask));
    ifreq_ioctl(socket, libc::SIOCSIFNETMASK, &mut request)
}

/// Sets the interface's MTU in bytes.
pub(super) fn set_mtu(socket: BorrowedFd<'_>, name: &str, mtu: u32) -> io::Result<()> {
    let mut request = request_for(name)?;
    request.ifr_ifru.ifru_mtu = libc::c_int::try_from(mtu).map_err(io::Error::other)?;
    ifreq_ioctl(socket, libc::SIOCSIFMTU, &mut request)
}

/// The interface's MTU in bytes.
pub(super) fn mtu(socket: BorrowedFd<'_>, name: &str) -> io::Result<u32> {
    let mut request = request_for(name)?;
    ifreq_ioctl(socket, libc::SIOCGIFMTU, &mut request)?;
    // SAFETY: SIOCGIFMTU has written the union's member `ifru_mtu`, a plain integer.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(io::Error::other)
}

/// Sets the interface up.
pub(super) fn set_up(socket: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let mut request = request_for(name)?;
    ifreq_ioctl(socket, libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: SIOCGIFFLAGS has written the union's member `ifru_flags`, a plain integer.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as libc::c_short;
    ifreq_ioctl(socket, libc::SIOCSIFFLAGS, &mut request)
}

/// Makes the child of `command` inherit `fd` under its present number. Only that child does: the flag is cleared in the child, after
/// the fork. (A copy at a chosen number could replace a descriptor that `Command` itself needs between fork and exec.)
pub(super) fn keep_open_in_child(command: &mut Command, fd: OwnedFd) {
    let in_child = move || {
        // SAFETY: F_SETFD takes an integer and touches no memory; the closure owns the descriptor.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0) })
    };
    // SAFETY: the closure runs between fork and exec; it makes one async-signal-safe system call and allocates nothing.
    unsafe { command.pre_exec(in_child) };
}

/// Sets the interface's own Ethernet address.
pub(super) fn set_mac(socket: BorrowedFd<'_>, name: &str, mac: Mac) -> io::Result<()> {
    let mut sa_data: [libc::c_char; 14] = [0; 14];
    for (to, from) in sa_data.iter_mut().zip(mac.0) {
        *to = from as libc::c_char;
    }
    let mut request = request_for(name)?;
    request.ifr_ifru.ifru_hwaddr = libc::sockaddr { sa_family: libc::ARPHRD_ETHER, sa_data };
    ifreq_ioctl(socket, libc::SIOCSIFHWADDR, &mut request)
}

fn ifreq_ioctl(fd: BorrowedFd<'_>, request: libc::Ioctl, argument: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: every request in this file reads or writes one `struct ifreq`, which `argument` is, exclusively borrowed; the
    // descriptor is open while borrowed.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(argument)) };
    check(result)
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// An empty request that names an interface.
fn request_for(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: `struct ifreq` is a C structure of integers and byte arrays, for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains('\0') {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "interface names have 1 to 15 bytes"));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// A `struct sockaddr_in` in the shape of a `struct sockaddr`: port, then the address in network order.
fn ipv4_sockaddr(address: Ipv4Addr) -> libc::sockaddr {
    let mut sa_data: [libc::c_char; 14] = [0; 14];
    for (to, from) in sa_data[2..6].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data }
}
