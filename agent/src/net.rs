//! Sets up interfaces by the old ioctls: enough for one address and one default route, without a netlink library.

use std::{
    fs, mem,
    net::{AddrParseError, Ipv4Addr},
    os::fd::{AsRawFd as _, OwnedFd},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};
use torpor_proto::agent::v1::Network;

/// The driver may still be looking for its devices when the host calls.
const APPEARS_WITHIN: Duration = Duration::from_secs(3);
/// How often /sys is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// The network could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// An address of the request is none.
    #[error("network {field} {value:?} is no IPv4 address: {source}")]
    Address {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: String,
        /// Why.
        source: AddrParseError,
    },
    /// The address has no usable prefix length.
    #[error("network address {0:?} has no prefix length from 0 to 32")]
    Prefix(String),
    /// No interface has the hardware address.
    #[error("no network interface with hardware address {mac}; there are: {present}")]
    NoInterface {
        /// As asked for.
        mac: String,
        /// Names and addresses of those there are.
        present: String,
    },
    /// A system call failed.
    #[error("{what} of interface {interface}: {}", source.desc())]
    System {
        /// What was set.
        what: &'static str,
        /// On which interface.
        interface: String,
        /// Why.
        source: Errno,
    },
}

/// Brings the loopback interface up.
///
/// # Errors
/// [`NetError::System`].
pub fn loopback() -> Result<(), NetError> {
    let interface = Interface::new("lo".to_owned())?;
    interface.set_up(true)
}

/// Gives the interface with the hardware address of `network` its address, MTU and default route, and nothing of what
/// it had before.
///
/// # Errors
/// [`NetError`] with the field or the step.
pub fn configure(network: &Network) -> Result<(), NetError> {
    let (address, mask) = parse_address(&network.address)?;
    let interface = Interface::new(find(&network.mac)?)?;
    no_ipv6();
    // Down drops every route of the interface, also those that a former address of the sandbox left.
    interface.set_up(false)?;
    interface.remove_addresses();
    interface.set_address(libc::SIOCSIFADDR, "set the address", address)?;
    interface.set_address(libc::SIOCSIFNETMASK, "set the netmask", mask)?;
    interface.set_address(libc::SIOCSIFBRDADDR, "set the broadcast address", address | !mask)?;
    if network.mtu != 0 {
        interface.set_mtu(network.mtu)?;
    }
    interface.set_up(true)?;
    if !network.gateway.is_empty() {
        interface.default_route(parse("gateway", &network.gateway)?)?;
    }
    Ok(())
}

fn parse(field: &'static str, value: &str) -> Result<Ipv4Addr, NetError> {
    value.parse().map_err(|source| NetError::Address { field, value: value.to_owned(), source })
}

/// Splits "10.95.0.2/30" into address and mask.
fn parse_address(text: &str) -> Result<(Ipv4Addr, Ipv4Addr), NetError> {
    let (address, prefix) = text.split_once('/').ok_or_else(|| NetError::Prefix(text.to_owned()))?;
    let prefix: u32 = prefix
        .parse()
        .ok()
        .filter(|prefix| *prefix <= 32)
        .ok_or_else(|| NetError::Prefix(text.to_owned()))?;
    let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
    Ok((parse("address", address)?, mask.into()))
}

/// The sandbox has IPv4 only; an address that the kernel makes up would only mislead.
fn no_ipv6() {
    for scope in ["all", "default"] {
        // Not there in a kernel without IPv6.
        let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6"), "1");
    }
}

/// The name of the interface with this hardware address; waits for it to appear.
fn find(mac: &str) -> Result<String, NetError> {
    let limit = Instant::now() + APPEARS_WITHIN;
    loop {
        let interfaces = interfaces();
        if let Some((name, _)) = interfaces.iter().find(|(_, address)| address.eq_ignore_ascii_case(mac)) {
            return Ok(name.clone());
        }
        if Instant::now() > limit {
            let present: Vec<_> =
                interfaces.iter().map(|(name, address)| format!("{name} {address}")).collect();
            return Err(NetError::NoInterface { mac: mac.to_owned(), present: present.join(", ") });
        }
        thread::sleep(LOOK);
    }
}

fn interfaces() -> Vec<(String, String)> {
    let Ok(entries) = fs::read_dir("/sys/class/net") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let address = fs::read_to_string(entry.path().join("address")).ok()?;
            Some((entry.file_name().into_string().ok()?, address.trim().to_owned()))
        })
        .collect()
}

struct Interface {
    socket: OwnedFd,
    name: String,
}

impl Interface {
    fn new(name: String) -> Result<Self, NetError> {
        match socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None) {
            Ok(socket) => Ok(Self { socket, name }),
            Err(source) => Err(NetError::System { what: "open a socket", interface: name, source }),
        }
    }

    fn error(&self, what: &'static str) -> impl Fn(Errno) -> NetError + use<'_> {
        move |source| NetError::System { what, interface: self.name.clone(), source }
    }

    fn request(&self) -> libc::ifreq {
        // SAFETY: ifreq is plain data for which zeros are valid.
        let mut request: libc::ifreq = unsafe { mem::zeroed() };
        // The last byte stays zero.
        let room = request.ifr_name.len() - 1;
        for (to, from) in request.ifr_name[..room].iter_mut().zip(self.name.bytes()) {
            *to = from as libc::c_char;
        }
        request
    }

    fn ioctl(&self, number: libc::Ioctl, request: &mut libc::ifreq) -> Result<(), Errno> {
        // SAFETY: every request used here reads or writes one ifreq.
        Errno::result(unsafe { libc::ioctl(self.socket.as_raw_fd(), number, &raw mut *request) }).map(drop)
    }

    fn set_up(&self, up: bool) -> Result<(), NetError> {
        let what = if up { "bring up" } else { "take down" };
        let mut request = self.request();
        self.ioctl(libc::SIOCGIFFLAGS, &mut request).map_err(self.error(what))?;
        // SAFETY: the kernel has just filled in the flags.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        let bit = libc::IFF_UP as libc::c_short;
        request.ifr_ifru.ifru_flags = if up { flags | bit } else { flags & !bit };
        self.ioctl(libc::SIOCSIFFLAGS, &mut request).map_err(self.error(what))
    }

    /// Removes addresses one by one: setting 0.0.0.0 deletes the first.
    fn remove_addresses(&self) {
        // Bounded in case that an address comes back.
        for _ in 0..64 {
            let mut request = self.request();
            if self.ioctl(libc::SIOCGIFADDR, &mut request).is_err() {
                return;
            }
            if self.set_address(libc::SIOCSIFADDR, "remove the address", Ipv4Addr::UNSPECIFIED).is_err() {
                return;
            }
        }
    }

    fn set_address(
        &self,
        number: libc::Ioctl,
        what: &'static str,
        address: Ipv4Addr,
    ) -> Result<(), NetError> {
        let mut request = self.request();
        request.ifr_ifru.ifru_addr = sockaddr(address);
        self.ioctl(number, &mut request).map_err(self.error(what))
    }

    fn set_mtu(&self, mtu: u32) -> Result<(), NetError> {
        let mut request = self.request();
        request.ifr_ifru.ifru_mtu = i32::try_from(mtu).unwrap_or(i32::MAX);
        self.ioctl(libc::SIOCSIFMTU, &mut request).map_err(self.error("set the MTU"))
    }

    fn default_route(&self, gateway: Ipv4Addr) -> Result<(), NetError> {
        // SAFETY: rtentry is plain data for which zeros are valid.
        let mut route: libc::rtentry = unsafe { mem::zeroed() };
        route.rt_dst = sockaddr(Ipv4Addr::UNSPECIFIED);
        route.rt_genmask = sockaddr(Ipv4Addr::UNSPECIFIED);
        route.rt_gateway = sockaddr(gateway);
        route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
        // SAFETY: reads one rtentry; its device name is null, so the gateway decides.
        let result =
            Errno::result(unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCADDRT, &raw const route) });
        match result {
            Ok(_) | Err(Errno::EEXIST) => Ok(()),
            Err(errno) => Err(self.error("set the default route")(errno)),
        }
    }
}

fn sockaddr(address: Ipv4Addr) -> libc::sockaddr {
    let inet = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from(address).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: both are 16 bytes of plain data, and the family says how to read them.
    unsafe { mem::transmute::<libc::sockaddr_in, libc::sockaddr>(inet) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_split_into_address_and_mask() {
        let (address, mask) = parse_address("10.95.0.2/30").unwrap();
        assert_eq!((address, mask), ("10.95.0.2".parse().unwrap(), "255.255.255.252".parse().unwrap()));
        assert_eq!(parse_address("1.2.3.4/0").unwrap().1, Ipv4Addr::UNSPECIFIED);
    }

    #[test]
    fn a_bad_address_names_its_field_and_value() {
        for (bad, says) in
            [("10.0.0.1", "prefix"), ("10.0.0.1/33", "prefix"), ("10.0.0/24", "address \"10.0.0\"")]
        {
            let error = parse_address(bad).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
