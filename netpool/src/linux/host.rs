//! What the host's network is like, and the one switch of it that sandboxes need.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use super::error::NetError;
use super::{link, sys};
use crate::{Nameservers, PoolConfig, choose_nameservers, default_interface, overlapping_route};

/// The route table of the calling thread's network namespace; /proc/net is that of the process's first thread.
pub(super) const ROUTES: &str = "/proc/thread-self/net/route";
pub(super) const IP_FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";

/// The interface that the host reaches the world by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uplink {
    /// Its name.
    pub interface: String,
    /// Its MTU in bytes.
    pub mtu: u32,
}

/// The uplink: the configured one, or else the interface of the default route. `None` when the host has no default route.
///
/// # Errors
/// The route table or the interface can't be read.
pub fn uplink(config: &PoolConfig) -> Result<Option<Uplink>, NetError> {
    let interface = match &config.uplink {
        Some(name) => Some(name.clone()),
        None => default_interface(&read(ROUTES)?),
    };
    let Some(interface) = interface else { return Ok(None) };
    let socket = link::control_socket().map_err(NetError::link("open a control socket", &interface))?;
    let mtu = sys::mtu(socket.as_fd(), &interface).map_err(NetError::link("read the mtu", &interface))?;
    Ok(Some(Uplink { interface, mtu }))
}

/// The MTU for TAPs and guests: the configured one, or else the uplink's up to 1500, or else 1500. A jumbo or loopback uplink
/// gives no more than 1500, since the rest of the path seldom carries more.
pub fn effective_mtu(config: &PoolConfig, uplink: Option<&Uplink>) -> u32 {
    config.mtu.unwrap_or_else(|| uplink.map_or(1500, |uplink| uplink.mtu.clamp(576, 1500)))
}

/// Checks that the host has no route of others in the pool's range.
///
/// # Errors
/// [`NetError::RangeInUse`] names the route.
pub fn check_range(config: &PoolConfig) -> Result<(), NetError> {
    match overlapping_route(&read(ROUTES)?, config.range, &config.tap_prefix()) {
        Some(route) => Err(NetError::RangeInUse { range: config.range, route }),
        None => Ok(()),
    }
}

/// Whether IPv4 forwarding had to be switched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forwarding {
    /// It was on.
    AlreadyOn,
    /// It was off: this call changed the host, and the user should be told.
    TurnedOn,
}

/// Switches IPv4 forwarding on if it is off.
///
/// # Errors
/// The setting can't be read or written.
pub fn enable_forwarding() -> Result<Forwarding, NetError> {
    match set_sysctl(IP_FORWARD, "1")? {
        true => Ok(Forwarding::TurnedOn),
        false => Ok(Forwarding::AlreadyOn),
    }
}

/// The name servers to give to guests: see [`choose_nameservers`]. `resolv_conf` is normally `/etc/resolv.conf`.
///
/// # Errors
/// `resolv_conf` exists and can't be read.
pub fn host_nameservers(resolv_conf: &Path) -> Result<Nameservers, NetError> {
    let own = match fs::read_to_string(resolv_conf) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(NetError::file("read", resolv_conf)(error)),
    };
    let upstream = fs::read_to_string("/run/systemd/resolve/resolv.conf").ok();
    Ok(choose_nameservers(&own, upstream.as_deref()))
}

/// Writes a setting unless it has the value already (which also works where /proc/sys is read-only). Says whether it wrote.
pub(super) fn set_sysctl(path: &str, value: &str) -> Result<bool, NetError> {
    if read(path)?.trim() == value {
        return Ok(false);
    }
    fs::write(path, value).map_err(NetError::file("write", path))?;
    Ok(true)
}

pub(super) fn read(path: &str) -> Result<String, NetError> {
    fs::read_to_string(path).map_err(NetError::file("read", path))
}
