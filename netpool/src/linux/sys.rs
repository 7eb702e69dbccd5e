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

/// Ties the TAP `name` to `tun`, an open `/dev/net/tun`, after making it if it isn't there; gives back its name, in which the
/// kernel has put a number for `%d`. It fails with EBUSY when another descriptor is tied to it or, if it is to be `new`, when it
/// exists.
pub(super) fn tun_set_iff(tun: BorrowedFd<'_>, name: &str, vnet_hdr: bool, new: bool) -> io::Result<String> {
    let vnet_hdr = if vnet_hdr { libc::IFF_VNET_HDR } else { 0 };
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | vnet_hdr | if new { IFF_TUN_EXCL } else { 0 };
    let mut request = request_for(name)?;
    // The kernel reads the flags as 16 bits (struct ifreq's ifr_flags is a short): IFF_TUN_EXCL is the sign bit.
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    ifreq_ioctl(tun, libc::TUNSETIFF as libc::Ioctl, &mut request)?;
    let name: Vec<u8> = request.ifr_name.iter().map(|c| *c as u8).take_while(|byte| *byte != 0).collect();
    Ok(String::from_utf8_lossy(&name).into_owned())
}

/// Whether the TAP tied to `tun` outlives its descriptors.
pub(super) fn tun_set_persist(tun: BorrowedFd<'_>, persist: bool) -> io::Result<()> {
    tun_set(tun, libc::TUNSETPERSIST as libc::Ioctl, libc::c_ulong::from(persist))
}

/// What the reader of `tun` can do with frames (`TUN_F_` flags): unfinished checksums, segments larger than the MTU.
pub(super) fn tun_set_offload(tun: BorrowedFd<'_>, flags: u32) -> io::Result<()> {
    tun_set(tun, libc::TUNSETOFFLOAD as libc::Ioctl, libc::c_ulong::from(flags))
}

/// The size of the header before each frame, in bytes.
pub(super) fn tun_set_vnet_hdr_size(tun: BorrowedFd<'_>, size: libc::c_int) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ reads one int, which `size` is, alive during the call; `tun` is open while borrowed.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETVNETHDRSZ as libc::Ioctl, &raw const size) })
}

/// Lets the user `uid` use the TAP tied to `tun` without privileges, and nobody else.
pub(super) fn tun_set_owner(tun: BorrowedFd<'_>, uid: u32) -> io::Result<()> {
    tun_set(tun, libc::TUNSETOWNER as libc::Ioctl, libc::c_ulong::from(uid))
}

fn tun_set(tun: BorrowedFd<'_>, request: libc::Ioctl, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: TUNSETOWNER, TUNSETPERSIST and TUNSETOFFLOAD take their argument by value and read no memory; `tun` is open
    // while borrowed.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), request, value) })
}

/// The interface's first IPv4 address.
pub(super) fn address(socket: BorrowedFd<'_>, name: &str) -> io::Result<Option<Ipv4Addr>> {
    let mut request = request_for(name)?;
    match ifreq_ioctl(socket, libc::SIOCGIFADDR, &mut request) {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => return Ok(None),
        result => result?,
    }
    // SAFETY: SIOCGIFADDR has written the union's member `ifru_addr`, plain bytes.
    let address = unsafe { request.ifr_ifru.ifru_addr };
    let mut octets = [0; 4];
    for (to, from) in octets.iter_mut().zip(&address.sa_data[2..6]) {
        *to = *from as u8;
    }
    Ok(Some(octets.into()))
}

/// Puts an address in the place of the interface's first one; zeroes delete it.
pub(super) fn set_address(socket: BorrowedFd<'_>, name: &str, address: Ipv4Addr) -> io::Result<()> {
    let mut request = request_for(name)?;
    request.ifr_ifru.ifru_addr = ipv4_sockaddr(address);
    ifreq_ioctl(socket, libc::SIOCSIFADDR, &mut request)
}

/// The interface's MTU in bytes.
pub(super) fn mtu(socket: BorrowedFd<'_>, name: &str) -> io::Result<u32> {
    let mut request = request_for(name)?;
    ifreq_ioctl(socket, libc::SIOCGIFMTU, &mut request)?;
    // SAFETY: SIOCGIFMTU has written the union's member `ifru_mtu`, a plain integer.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(io::Error::other)
}

/// Makes the child of `command` inherit `fd` under its present number. Only that child does: the flag is cleared in the child, after
/// the fork. Drop the command after spawning: until then this process holds the descriptor too. (A copy at a chosen number could replace a descriptor that `Command` itself needs between fork and exec.)
pub fn keep_open_in_child(command: &mut Command, fd: OwnedFd) {
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
