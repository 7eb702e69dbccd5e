//! Elements of the firewall's sets, by nfnetlink (linux/netfilter/nf_tables.h): a change costs a system call and no process.

use std::io;
use std::net::Ipv4Addr;

use nix::libc;

use super::link::ipv4;
use super::netlink::{Attributes, Message, Netlink, attributes, find, text};
use super::ruleset::{GUESTS, HOSTS, NAMES, OPEN, PUBLIC, SERVICES};
use crate::{Guest, Mac, Service, Span};

const SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_NFTABLES as u16) << 8;
const NEW: u16 = SUBSYSTEM | libc::NFT_MSG_NEWSETELEM as u16;
const GET: u16 = SUBSYSTEM | libc::NFT_MSG_GETSETELEM as u16;
const DELETE: u16 = SUBSYSTEM | libc::NFT_MSG_DELSETELEM as u16;
/// `NFTA_SET_ELEM_LIST_TABLE`, `_SET`, `_ELEMENTS`; `NFTA_LIST_ELEM`; `NFTA_SET_ELEM_KEY`; `NFTA_DATA_VALUE`.
const TABLE: u16 = 1;
const SET: u16 = 2;
const ELEMENTS: u16 = 3;
const LIST_ELEMENT: u16 = 1;
const KEY: u16 = 1;
/// `NFTA_SET_ELEM_KEY_END`: the last value of each field of an interval.
const KEY_END: u16 = 10;
const VALUE: u16 = 1;
/// `struct nfgenmsg`: family, version, resource.
const GENERIC: usize = 4;
const IFNAMSIZ: usize = libc::IFNAMSIZ;

/// One element. Fields of a key are padded to four bytes each; names have 16.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Element {
    Guest { tap: String, mac: Mac, ip: Ipv4Addr },
    Open(Ipv4Addr),
    Public(Ipv4Addr),
    Names(Ipv4Addr),
    Host(Ipv4Addr, Span),
    Service(Ipv4Addr, Service),
}

impl Element {
    /// The names of all sets.
    pub(super) const SETS: [&str; 6] = [GUESTS, OPEN, PUBLIC, NAMES, HOSTS, SERVICES];

    pub(super) fn set(&self) -> &'static str {
        match self {
            Element::Guest { .. } => GUESTS,
            Element::Open(_) => OPEN,
            Element::Public(_) => PUBLIC,
            Element::Names(_) => NAMES,
            Element::Host(..) => HOSTS,
            Element::Service(..) => SERVICES,
        }
    }

    /// The guest's address.
    pub(super) fn ip(&self) -> Ipv4Addr {
        match self {
            Element::Guest { ip, .. } => *ip,
            Element::Open(ip) | Element::Public(ip) | Element::Names(ip) => *ip,
            Element::Host(ip, _) | Element::Service(ip, _) => *ip,
        }
    }

    /// The guest's own element and those of its grants.
    pub(super) fn of(guest: &Guest) -> Vec<Element> {
        let Guest { tap, mac, ip, grants } = guest;
        let mut all = vec![Element::Guest { tap: tap.clone(), mac: *mac, ip: *ip }];
        all.extend(grants.open.then_some(Element::Open(*ip)));
        all.extend(grants.public.then_some(Element::Public(*ip)));
        all.extend(grants.names.then_some(Element::Names(*ip)));
        all.extend(grants.hosts.iter().map(|span| Element::Host(*ip, *span)));
        all.extend(grants.services.iter().map(|service| Element::Service(*ip, *service)));
        all
    }

    /// As `nft` writes it.
    pub(super) fn text(&self) -> String {
        let span = |to: &Span| match to.first == to.last {
            true => to.first.to_string(),
            false => format!("{}-{}", to.first, to.last),
        };
        match self {
            Element::Guest { tap, mac, ip } => format!("\"{tap}\" . {mac} . {ip}"),
            Element::Open(ip) | Element::Public(ip) | Element::Names(ip) => ip.to_string(),
            Element::Host(ip, to) => format!("{ip} . {}", span(to)),
            Element::Service(ip, Service { to, protocol, first_port, last_port }) => {
                format!("{ip} . {} . {protocol} . {first_port}-{last_port}", span(to))
            }
        }
    }

    /// The key, and the key's end where the set has intervals.
    fn keys(&self) -> (Vec<u8>, Option<Vec<u8>>) {
        match self {
            Element::Guest { tap, mac, ip } => {
                let mut key = tap.as_bytes().to_vec();
                key.resize(IFNAMSIZ, 0);
                key.extend(mac.0);
                key.extend([0, 0]);
                key.extend(ip.octets());
                (key, None)
            }
            Element::Open(ip) | Element::Public(ip) | Element::Names(ip) => (ip.octets().to_vec(), None),
            Element::Host(ip, to) => {
                let key = |to: Ipv4Addr| [ip.octets(), to.octets()].concat();
                (key(to.first), Some(key(to.last)))
            }
            Element::Service(ip, Service { to, protocol, first_port, last_port }) => {
                let key = |to: Ipv4Addr, port: u16| {
                    let [high, low] = port.to_be_bytes();
                    [ip.octets(), to.octets(), [*protocol, 0, 0, 0], [high, low, 0, 0]].concat()
                };
                (key(to.first, *first_port), Some(key(to.last, *last_port)))
            }
        }
    }

    fn read(set: &str, key: &[u8], end: &[u8]) -> Option<Element> {
        let ip = |at: usize| ipv4(key.get(at..at + 4)?);
        let span = || Some(Span { first: ip(4)?, last: ipv4(end.get(4..8)?)? });
        match (set, key.len()) {
            (OPEN, 4) => ip(0).map(Element::Open),
            (PUBLIC, 4) => ip(0).map(Element::Public),
            (NAMES, 4) => ip(0).map(Element::Names),
            (HOSTS, 8) => Some(Element::Host(ip(0)?, span()?)),
            (SERVICES, 16) => {
                let port = |key: &[u8]| Some(u16::from_be_bytes([*key.get(12)?, *key.get(13)?]));
                let (protocol, first_port, last_port) = (key[8], port(key)?, port(end)?);
                Some(Element::Service(ip(0)?, Service { to: span()?, protocol, first_port, last_port }))
            }
            (GUESTS, 28) => {
                let name = key.split(|byte| *byte == 0).next()?;
                let mac = Mac(key.get(16..22)?.try_into().ok()?);
                Some(Element::Guest { tap: String::from_utf8_lossy(name).into_owned(), mac, ip: ip(24)? })
            }
            _ => None,
        }
    }
}

/// One change of a transaction.
pub(super) struct Op<'a> {
    pub(super) add: bool,
    pub(super) element: &'a Element,
}

/// Makes the changes, all or none. An element that is added may be there already; one that is deleted must be there, or be
/// added earlier in the same transaction.
pub(super) fn transact(socket: &mut Netlink, table: &str, ops: &[Op<'_>]) -> io::Result<()> {
    if ops.is_empty() {
        return Ok(());
    }
    let mut messages = vec![mark(libc::NFNL_MSG_BATCH_BEGIN)];
    for (number, Op { add, element }) in ops.iter().enumerate() {
        let ack = if number + 1 == ops.len() { libc::NLM_F_ACK } else { 0 };
        let (kind, flags) = if *add { (NEW, libc::NLM_F_CREATE) } else { (DELETE, 0) };
        let (key, end) = element.keys();
        let mut one = Attributes::new().nest(KEY, &Attributes::new().put(VALUE, &key));
        if let Some(end) = end {
            one = one.nest(KEY_END, &Attributes::new().put(VALUE, &end));
        }
        let list = Attributes::new()
            .put(TABLE, &text(table))
            .put(SET, &text(element.set()))
            .nest(ELEMENTS, &Attributes::new().nest(LIST_ELEMENT, &one));
        messages.push(Message::new(kind, flags | ack, &generic(0)).with(&list));
    }
    messages.push(mark(libc::NFNL_MSG_BATCH_END));
    socket.transact(messages)
}

/// The elements of a set; none when there is no such set.
pub(super) fn list(socket: &mut Netlink, table: &str, set: &'static str) -> io::Result<Vec<Element>> {
    let wanted = Attributes::new().put(TABLE, &text(table)).put(SET, &text(set));
    let replies = match socket.dump(&Message::new(GET, libc::NLM_F_DUMP, &generic(0)).with(&wanted)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        result => result?,
    };
    let mut found = Vec::new();
    for reply in &replies {
        let lists = reply.attributes(GENERIC).filter(|(kind, _)| *kind == ELEMENTS);
        for (_, element) in lists.flat_map(|(_, list)| attributes(list)) {
            let key = find(element, KEY).and_then(|key| find(key, VALUE)).unwrap_or_default();
            let end = find(element, KEY_END).and_then(|key| find(key, VALUE)).unwrap_or(key);
            // What isn't of the set's own form is an older version's, which the next replacement of the table removes.
            found.extend(Element::read(set, key, end));
        }
    }
    Ok(found)
}

/// The begin or end of a batch for nftables.
fn mark(kind: libc::c_int) -> Message {
    Message::new(kind as u16, 0, &generic(libc::NFNL_SUBSYS_NFTABLES as u16))
}

/// `struct nfgenmsg` of the family inet; the resource is in network order.
fn generic(resource: u16) -> [u8; GENERIC] {
    let [high, low] = resource.to_be_bytes();
    [libc::NFPROTO_INET as u8, libc::NFNETLINK_V0 as u8, high, low]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Egress, PoolConfig, Slot};

    #[test]
    fn keys_are_read_as_they_were_written() {
        let rules = ["192.0.2.0/24", "192.0.2.7:443", "0.0.0.0/0:1-9/udp"].map(|rule| rule.parse().unwrap());
        for egress in
            [Egress::Open, Egress::Public, Egress::None, Egress::Allow { rules: rules.to_vec(), names: true }]
        {
            let net = PoolConfig::default().guest_net("sb", Slot(7)).unwrap();
            let guest = crate::GuestNet { egress: Some(egress), ..net }.guest();
            for element in Element::of(&guest) {
                let (key, end) = element.keys();
                let read = Element::read(element.set(), &key, end.as_ref().unwrap_or(&key));
                assert_eq!(read, Some(element.clone()));
                assert_eq!(element.ip(), guest.ip);
                assert_eq!(Element::read(element.set(), &key[1..], &key), None);
            }
        }
    }
}
