//! Interfaces, their addresses, routes and neighbours by rtnetlink(7).

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::libc;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

use super::netlink::{Attributes, Message, Netlink, Reply, find, text};
use crate::{Ipv4Cidr, Mac};

/// `struct ifinfomsg`, `struct ndmsg` and `struct rtmsg`: their sizes.
const IFINFO: usize = 16;
const NDMSG: usize = 12;
const RTMSG: usize = 12;
const NUD_NOARP: u16 = 0x40;
const INET: u8 = libc::AF_INET as u8;

/// A socket for the interface ioctls; it stands for the network namespace of the calling thread.
pub(super) fn control_socket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?)
}

/// A socket for the calls of this module.
pub(super) fn route_socket() -> io::Result<Netlink> {
    Netlink::open(SockProtocol::NetlinkRoute)
}

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) group: u32,
    /// Somebody is at the other end: of a TAP, a process that holds it.
    pub(super) carrier: bool,
}

/// The index of an interface, or `None` when there is none of that name.
pub(super) fn index_of(name: &str) -> io::Result<Option<u32>> {
    match if_nametoindex(name) {
        Ok(index) => Ok(Some(index)),
        Err(Errno::ENODEV) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// The interface of a name.
pub(super) fn link_named(name: &str) -> io::Result<Option<Link>> {
    let attributes = Attributes::new().put(libc::IFLA_IFNAME, &text(name));
    one_link(Message::new(libc::RTM_GETLINK, 0, &[0; IFINFO]).with(&attributes))
}

/// The interface of an index.
pub(super) fn link_at(index: u32) -> io::Result<Option<Link>> {
    one_link(Message::new(libc::RTM_GETLINK, 0, &ifinfo(index, 0, 0)))
}

fn one_link(message: Message) -> io::Result<Option<Link>> {
    match route_socket()?.ask(message) {
        Ok(reply) => Ok(link_of(&reply)),
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(error) => Err(error),
    }
}

/// All interfaces. Asked of a socket and not of /sys/class/net, which shows the namespace that /sys was mounted in.
pub(super) fn links() -> io::Result<Vec<Link>> {
    let message = Message::new(libc::RTM_GETLINK, libc::NLM_F_DUMP, &[0; IFINFO]);
    Ok(route_socket()?.dump(&message)?.iter().filter_map(link_of).collect())
}

fn link_of(reply: &Reply) -> Option<Link> {
    let attributes = reply.body().get(IFINFO..)?;
    let name = find(attributes, libc::IFLA_IFNAME)?;
    Some(Link {
        index: word(reply.body(), 4)?,
        name: String::from_utf8_lossy(name.split(|b| *b == 0).next()?).into_owned(),
        group: find(attributes, libc::IFLA_GROUP).and_then(|value| word(value, 0)).unwrap_or_default(),
        carrier: find(attributes, libc::IFLA_CARRIER).is_some_and(|value| value == [1]),
    })
}

/// Changes to an interface, made in one step of the kernel's.
#[derive(Clone, Debug, Default)]
pub(super) struct Change<'a> {
    pub(super) name: Option<&'a str>,
    pub(super) mac: Option<Mac>,
    pub(super) mtu: Option<u32>,
    pub(super) group: Option<u32>,
    pub(super) up: Option<bool>,
}

pub(super) fn change(index: u32, change: &Change<'_>) -> Message {
    let flag = libc::IFF_UP as u32;
    let flags = if change.up == Some(true) { flag } else { 0 };
    let mask = if change.up.is_some() { flag } else { 0 };
    let mut attributes = Attributes::new();
    if let Some(name) = change.name {
        attributes = attributes.put(libc::IFLA_IFNAME, &text(name));
    }
    if let Some(mac) = change.mac {
        attributes = attributes.put(libc::IFLA_ADDRESS, &mac.0);
    }
    if let Some(mtu) = change.mtu {
        attributes = attributes.put(libc::IFLA_MTU, &mtu.to_ne_bytes());
    }
    if let Some(group) = change.group {
        attributes = attributes.put(libc::IFLA_GROUP, &group.to_ne_bytes());
    }
    Message::new(libc::RTM_NEWLINK, libc::NLM_F_ACK, &ifinfo(index, flags, mask)).with(&attributes)
}

/// `struct ifinfomsg`: family, pad, type, index, flags, change mask.
fn ifinfo(index: u32, flags: u32, mask: u32) -> [u8; IFINFO] {
    let mut fixed = [0; IFINFO];
    fixed[4..8].copy_from_slice(&index.to_ne_bytes());
    fixed[8..12].copy_from_slice(&flags.to_ne_bytes());
    fixed[12..].copy_from_slice(&mask.to_ne_bytes());
    fixed
}

pub(super) fn delete(index: u32) -> Message {
    Message::new(libc::RTM_DELLINK, libc::NLM_F_ACK, &ifinfo(index, 0, 0))
}

/// Deletes all interfaces of a group in one step.
pub(super) fn delete_group(group: u32) -> Message {
    let attributes = Attributes::new().put(libc::IFLA_GROUP, &group.to_ne_bytes());
    Message::new(libc::RTM_DELLINK, libc::NLM_F_ACK, &ifinfo(0, 0, 0)).with(&attributes)
}

/// Gives an interface an address.
pub(super) fn address(index: u32, address: Ipv4Addr, prefix: u8) -> Message {
    // struct ifaddrmsg: family, prefix length, flags, scope, index.
    let mut fixed = [INET, prefix, 0, 0, 0, 0, 0, 0];
    fixed[4..].copy_from_slice(&index.to_ne_bytes());
    let octets = address.octets();
    let attributes = Attributes::new().put(libc::IFA_LOCAL, &octets).put(libc::IFA_ADDRESS, &octets);
    let flags = libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    Message::new(libc::RTM_NEWADDR, flags, &fixed).with(&attributes)
}

/// An IPv4 route of the main table: index of the interface, destination.
pub(super) fn routes() -> io::Result<Vec<(u32, Ipv4Cidr)>> {
    let mut fixed = [0; RTMSG];
    fixed[0] = INET;
    let message = Message::new(libc::RTM_GETROUTE, libc::NLM_F_DUMP, &fixed);
    Ok(route_socket()?.dump(&message)?.iter().filter_map(route_of).collect())
}

fn route_of(reply: &Reply) -> Option<(u32, Ipv4Cidr)> {
    let (fixed, attributes) = reply.body().split_at_checked(RTMSG)?;
    // struct rtmsg: family, destination length, source length, tos, table, protocol, scope, type.
    let main = fixed[4] == libc::RT_TABLE_MAIN && fixed[7] == libc::RTN_UNICAST;
    let interface = find(attributes, libc::RTA_OIF).and_then(|value| word(value, 0)).filter(|_| main)?;
    let to = find(attributes, libc::RTA_DST).map_or(Some(Ipv4Addr::UNSPECIFIED), ipv4)?;
    Some((interface, Ipv4Cidr::containing(to, fixed[1])))
}

pub(super) fn delete_route(index: u32, to: Ipv4Cidr) -> Message {
    let nowhere = libc::RT_SCOPE_NOWHERE;
    let fixed = [INET, to.prefix(), 0, 0, libc::RT_TABLE_MAIN, 0, nowhere, 0, 0, 0, 0, 0];
    let attributes =
        Attributes::new().put(libc::RTA_DST, &to.network().octets()).put(libc::RTA_OIF, &index.to_ne_bytes());
    Message::new(libc::RTM_DELROUTE, libc::NLM_F_ACK, &fixed).with(&attributes)
}

/// IPv4 neighbours: index of the interface, address, and MAC when it is known. Entries that need no asking (multicast) are
/// left out.
pub(super) fn neighbours() -> io::Result<Vec<(u32, Ipv4Addr, Option<Mac>)>> {
    let mut fixed = [0; NDMSG];
    fixed[0] = INET;
    let message = Message::new(libc::RTM_GETNEIGH, libc::NLM_F_DUMP, &fixed);
    Ok(route_socket()?.dump(&message)?.iter().filter_map(neighbour_of).collect())
}

fn neighbour_of(reply: &Reply) -> Option<(u32, Ipv4Addr, Option<Mac>)> {
    let (fixed, attributes) = reply.body().split_at_checked(NDMSG)?;
    let state = u16::from_ne_bytes([fixed[8], fixed[9]]);
    let ip = find(attributes, libc::NDA_DST).and_then(ipv4).filter(|_| state & NUD_NOARP == 0)?;
    let mac = find(attributes, libc::NDA_LLADDR).and_then(|value| value.try_into().ok()).map(Mac);
    Some((word(fixed, 4)?, ip, mac))
}

pub(super) fn delete_neighbour(index: u32, ip: Ipv4Addr) -> Message {
    let mut fixed = [0; NDMSG];
    fixed[0] = INET;
    fixed[4..8].copy_from_slice(&index.to_ne_bytes());
    let attributes = Attributes::new().put(libc::NDA_DST, &ip.octets());
    Message::new(libc::RTM_DELNEIGH, libc::NLM_F_ACK, &fixed).with(&attributes)
}

/// One message and its result.
pub(super) fn request(message: Message) -> io::Result<()> {
    route_socket()?.request(vec![message])?.into_iter().collect()
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

pub(super) fn ipv4(bytes: &[u8]) -> Option<Ipv4Addr> {
    <[u8; 4]>::try_from(bytes).ok().map(Ipv4Addr::from)
}
