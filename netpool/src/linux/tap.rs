//! TAP devices.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::process::Command;

use nix::errno::Errno;
use nix::libc;
use nix::net::if_::if_nameindex;

use super::error::NetError;
use super::{host, link, sys};
use crate::{GuestNet, HOST_MAC, PoolConfig};

/// How a TAP is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapOptions {
    /// The user that the VM process runs as, when it isn't root.
    pub owner_uid: Option<u32>,
    /// The MTU in bytes; `None` leaves the kernel's 1500.
    pub mtu: Option<u32>,
    /// Every frame is preceded by a `struct virtio_net_hdr`, as vhost and QEMU want it.
    pub vnet_hdr: bool,
}

/// A TAP device: configured, up, and alive as long as its descriptor is open somewhere.
///
/// It is not persistent: give the descriptor to the VM process and let go of it here, and the kernel removes the TAP,
/// its addresses, routes and neighbours when that process ends, however it ends.
#[derive(Debug)]
pub struct Tap {
    name: String,
    fd: OwnedFd,
}

impl Tap {
    /// Makes the TAP of `net`, with the host's address and MTU, IPv6 off, and up. When a step fails, nothing is left.
    ///
    /// # Errors
    /// [`NetError::TapBusy`] when the TAP exists; otherwise the step that failed.
    pub fn create(net: &GuestNet, options: &TapOptions) -> Result<Tap, NetError> {
        let file =
            OpenOptions::new().read(true).write(true).open("/dev/net/tun").map_err(NetError::OpenTun)?;
        let tap = Tap { name: net.tap.clone(), fd: file.into() };
        sys::tun_set_iff(tap.fd.as_fd(), &tap.name, options.vnet_hdr).map_err(|source| {
            match source.raw_os_error() {
                Some(libc::EBUSY) => NetError::TapBusy { tap: net.tap.clone(), slot: net.slot.0 },
                _ => NetError::link("create a tap", &net.tap)(source),
            }
        })?;
        tap.configure(net, options)?;
        Ok(tap)
    }

    /// Everything between making the device and setting it up: it must not carry a packet before it is complete.
    fn configure(&self, net: &GuestNet, options: &TapOptions) -> Result<(), NetError> {
        let name = self.name.as_str();
        let socket = link::control_socket().map_err(NetError::link("open a control socket", name))?;
        if let Some(uid) = options.owner_uid {
            sys::tun_set_owner(self.fd.as_fd(), uid).map_err(NetError::link("set the owner", name))?;
        }
        if let Some(mtu) = options.mtu {
            sys::set_mtu(socket.as_fd(), name, mtu).map_err(NetError::link("set the mtu", name))?;
        }
        sys::set_mac(socket.as_fd(), name, HOST_MAC).map_err(NetError::link("set the mac", name))?;
        restrict(name)?;
        sys::set_address(socket.as_fd(), name, net.host_ip)
            .map_err(NetError::link("set the address", name))?;
        sys::set_prefix(socket.as_fd(), name, net.prefix).map_err(NetError::link("set the netmask", name))?;
        sys::set_up(socket.as_fd(), name).map_err(NetError::link("set the link up", name))
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The descriptor, closed on exec, for a VM in this process. The TAP lives as long as it.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }

    /// Gives the TAP to the child of `command`, which finds it open at the descriptor number that this returns; no other child
    /// inherits it. Drop the command after spawning: until then this process holds the TAP too.
    pub fn hand_to(self, command: &mut Command) -> RawFd {
        let number = self.fd.as_raw_fd();
        sys::keep_open_in_child(command, self.fd);
        number
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// IPv6 off, and ARP answered only for the TAP's own address and only to its own network: otherwise the host answers a
/// guest for every address that it has.
fn restrict(name: &str) -> Result<(), NetError> {
    let ipv6 = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
    // Absent when the kernel has no IPv6.
    if Path::new(&ipv6).exists() {
        host::set_sysctl(&ipv6, "1")?;
    }
    for (key, value) in [("arp_ignore", "2"), ("accept_redirects", "0")] {
        host::set_sysctl(&format!("/proc/sys/net/ipv4/conf/{name}/{key}"), value)?;
    }
    Ok(())
}

/// Deletes a TAP, even one that a process still holds open. `false` when there is none.
///
/// # Errors
/// The kernel refused; not being there is none.
pub fn delete_tap(name: &str) -> Result<bool, NetError> {
    let found = interfaces()?.into_iter().find(|(other, _)| other == name);
    let Some((_, index)) = found else { return Ok(false) };
    match link::delete_link(index) {
        Ok(()) => Ok(true),
        // It went away by itself meanwhile.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(false),
        Err(error) => Err(NetError::link("delete the tap", name)(error)),
    }
}

/// The pool's TAPs in this network namespace, sorted.
///
/// # Errors
/// The interfaces can't be listed.
pub fn list_taps(config: &PoolConfig) -> Result<Vec<String>, NetError> {
    let names = interfaces()?.into_iter().map(|(name, _)| name);
    let mut taps: Vec<String> = names.filter(|name| config.slot_of_tap(name).is_some()).collect();
    taps.sort();
    Ok(taps)
}

/// Names and indexes. Asked of a socket and not of /sys/class/net, which shows the namespace that /sys was mounted in.
fn interfaces() -> Result<Vec<(String, u32)>, NetError> {
    let list = if_nameindex().map_err(|errno: Errno| NetError::ListLinks(io::Error::from(errno)))?;
    Ok(list.iter().map(|i| (i.name().to_string_lossy().into_owned(), i.index())).collect())
}
