//! TAP devices.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::process::Command;

use nix::libc;

use super::error::NetError;
use super::{host, link, sys};
use crate::{GuestNet, HOST_MAC, PoolConfig};

/// A `struct virtio_net_hdr` without `num_buffers`: the kernel's own default; a VMM that wants 12 sets it.
const VNET_HEADER: libc::c_int = 10;
/// More addresses than anybody gives to a TAP.
const ADDRESSES_AT_MOST: u32 = 64;

/// How a TAP is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapOptions {
    /// The user that the VM process runs as, when it isn't root.
    pub owner_uid: Option<u32>,
    /// The MTU in bytes; `None` is the kernel's 1500.
    pub mtu: Option<u32>,
    /// Every frame is preceded by a `struct virtio_net_hdr`, as vhost and QEMU want it.
    pub vnet_hdr: bool,
    /// What the VM takes over from the kernel; it means something with `vnet_hdr` only. A VMM that negotiates with its guest
    /// may set it again on the descriptor (TUNSETOFFLOAD).
    pub offload: Offload,
}

/// What the reader of a TAP can do with frames: the `TUN_F_` flags of linux/if_tun.h. The default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// Checksums that are not finished (`TUN_F_CSUM`). The others need this one.
    pub checksum: bool,
    /// TCP segments over IPv4 above the MTU (`TUN_F_TSO4`).
    pub tso4: bool,
    /// TCP segments over IPv6 above the MTU (`TUN_F_TSO6`).
    pub tso6: bool,
    /// Such segments with ECN bits (`TUN_F_TSO_ECN`).
    pub ecn: bool,
    /// UDP datagrams in fragments (`TUN_F_UFO`).
    pub ufo: bool,
}

impl Offload {
    fn flags(self) -> u32 {
        [self.checksum, self.tso4, self.tso6, self.ecn, self.ufo]
            .iter()
            .enumerate()
            .map(|(bit, on)| u32::from(*on) << bit)
            .sum()
    }
}

/// A TAP device: configured and up.
///
/// One of [`Tap::create`] is alive as long as its descriptor is open somewhere. One of a stock
/// ([`super::TapStock::acquire`]) outlives it, without carrier, until it is released. Give the descriptor to the VM process and
/// let go of it here.
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
        let tap = Tap::tie(net, options, true)?;
        tap.set_owner(options.owner_uid)?;
        tap.set_offload(options)?;
        tap.set_identity()?;
        tap.set_up(net, options)?;
        Ok(tap)
    }

    /// Ties a new descriptor to the TAP of `net`. With `new`, the TAP must not exist; without, it is made if need be.
    pub(super) fn tie(net: &GuestNet, options: &TapOptions, new: bool) -> Result<Tap, NetError> {
        let fd = open_tun()?;
        match sys::tun_set_iff(fd.as_fd(), &net.tap, options.vnet_hdr, new) {
            Ok(name) => Ok(Tap { name, fd: fd.into() }),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                Err(NetError::TapBusy { tap: net.tap.clone(), slot: net.slot.0 })
            }
            Err(error) => Err(NetError::link("create a tap", &net.tap)(error)),
        }
    }

    /// Ties a descriptor to a TAP of any name; `%d` in it makes a new one.
    pub(super) fn tie_named(name: &str) -> io::Result<Tap> {
        let fd = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
        let name = sys::tun_set_iff(fd.as_fd(), name, false, false)?;
        Ok(Tap { name, fd: fd.into() })
    }

    /// Lets only this user use the TAP without privileges; root when it is nobody else.
    pub(super) fn set_owner(&self, uid: Option<u32>) -> Result<(), NetError> {
        // A TAP without an owner is anybody's.
        sys::tun_set_owner(self.fd.as_fd(), uid.unwrap_or(0))
            .map_err(NetError::link("set the owner", &self.name))
    }

    pub(super) fn set_persist(&self, persist: bool) -> Result<(), NetError> {
        sys::tun_set_persist(self.fd.as_fd(), persist)
            .map_err(NetError::link("set the persistence", &self.name))
    }

    pub(super) fn set_offload(&self, options: &TapOptions) -> Result<(), NetError> {
        let set = |()| sys::tun_set_offload(self.fd.as_fd(), options.offload.flags());
        let size = match options.vnet_hdr {
            true => sys::tun_set_vnet_hdr_size(self.fd.as_fd(), VNET_HEADER),
            false => Ok(()),
        };
        size.and_then(set).map_err(NetError::link("set the offloads", &self.name))
    }

    /// What is the same whoever has the TAP: the host's MAC and the settings of the kernel.
    pub(super) fn set_identity(&self) -> Result<(), NetError> {
        let socket = link::control_socket().map_err(NetError::link("open a control socket", &self.name))?;
        sys::set_mac(socket.as_fd(), &self.name, HOST_MAC)
            .map_err(NetError::link("set the mac", &self.name))?;
        restrict(&self.name)
    }

    /// The last steps: MTU, address, up. The TAP must not carry a packet before it is complete.
    pub(super) fn set_up(&self, net: &GuestNet, options: &TapOptions) -> Result<(), NetError> {
        let name = self.name.as_str();
        let gone = || NetError::link("find the tap", name)(io::Error::from_raw_os_error(libc::ENODEV));
        let index = link::index_of(name).map_err(NetError::link("find the tap", name))?.ok_or_else(gone)?;
        let mtu = Some(options.mtu.unwrap_or(1500));
        let steps = [
            ("set the mtu", link::Change { mtu, mac: Some(HOST_MAC), ..Default::default() }),
            ("set the link up", link::Change { up: Some(true), ..Default::default() }),
        ];
        let messages = vec![
            link::change(index, &steps[0].1),
            link::address(index, net.host_ip, net.prefix),
            link::change(index, &steps[1].1),
        ];
        let names = [steps[0].0, "set the address", steps[1].0];
        let results = link::route_socket().and_then(|mut socket| socket.request(messages));
        let results = results.map_err(NetError::link("configure the tap", name))?;
        names
            .into_iter()
            .zip(results)
            .try_for_each(|(step, result)| result.map_err(NetError::link(step, name)))
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The descriptor, closed on exec, for a VM in this process.
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

fn open_tun() -> Result<File, NetError> {
    OpenOptions::new().read(true).write(true).open("/dev/net/tun").map_err(NetError::OpenTun)
}

/// IPv6 off, and ARP answered only for the TAP's own address and only to its own network: otherwise the host answers a
/// guest for every address that it has.
pub(super) fn restrict(name: &str) -> Result<(), NetError> {
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

/// Takes all IPv4 addresses from an interface.
pub(super) fn strip(name: &str) -> Result<(), NetError> {
    let socket = link::control_socket().map_err(NetError::link("open a control socket", name))?;
    for _ in 0..ADDRESSES_AT_MOST {
        if sys::address(socket.as_fd(), name).map_err(NetError::link("read the address", name))?.is_none() {
            break;
        }
        // An address of zeroes deletes the first one (netdevice(7) is silent on it; net/ipv4/devinet.c).
        sys::set_address(socket.as_fd(), name, std::net::Ipv4Addr::UNSPECIFIED)
            .map_err(NetError::link("take the address from", name))?;
    }
    Ok(())
}

/// Deletes a TAP, even one that a process still holds open. `false` when there is none.
///
/// # Errors
/// The kernel refused; not being there is none.
pub fn delete_tap(name: &str) -> Result<bool, NetError> {
    let Some(index) = link::index_of(name).map_err(NetError::link("find the tap", name))? else {
        return Ok(false);
    };
    match link::request(link::delete(index)) {
        Ok(()) => Ok(true),
        // It went away by itself meanwhile.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(false),
        Err(error) => Err(NetError::link("delete the tap", name)(error)),
    }
}

/// The pool's TAPs in this network namespace, sorted; not those in stock.
///
/// # Errors
/// The interfaces can't be listed.
pub fn list_taps(config: &PoolConfig) -> Result<Vec<String>, NetError> {
    let names = link::links().map_err(NetError::ListLinks)?.into_iter().map(|link| link.name);
    let mut taps: Vec<String> = names.filter(|name| config.slot_of_tap(name).is_some()).collect();
    taps.sort();
    Ok(taps)
}
