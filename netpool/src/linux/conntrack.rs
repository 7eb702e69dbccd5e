//! Connections that the kernel remembers (linux/netfilter/nfnetlink_conntrack.h), forgotten before an address changes hands.
//! To list them the kernel walks its whole table, for milliseconds; so many addresses share one walk, off the hot path.

use std::collections::HashSet;
use std::io;
use std::net::Ipv4Addr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::libc;
use nix::sys::socket::SockProtocol;

use super::error::NetError;
use super::link::ipv4;
use super::netlink::{Attributes, Message, Netlink, Reply, find};
use crate::{Ipv4Cidr, PoolConfig};

const GET: u16 = (1 << 8) | 1;
const DELETE: u16 = (1 << 8) | 2;
const TUPLE_ORIGINAL: u16 = 1;
const ID: u16 = 12;
const ZONE: u16 = 18;
/// CTA_FILTER, CTA_FILTER_ORIG_FLAGS and the flag for the source address: Linux 5.8; ignored before.
const FILTER: u16 = 25;
const FILTER_ORIGINAL: u16 = 1;
const FILTER_SOURCE: u32 = 1;
const TUPLE_IP: u16 = 1;
const IP_SOURCE: u16 = 1;
const NFGENMSG: [u8; 4] = [libc::AF_INET as u8, 0, 0, 0];
/// Each filtered list walks the whole table as well, but copies only what matches.
const FILTERED_AT_MOST: usize = 4;

/// How many connections were forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgotten {
    /// So many.
    Connections(usize),
    /// This kernel can't list or delete connections (CONFIG_NF_CT_NETLINK): one of a former guest ends by its timeout. The
    /// quarantine of the slot makes up for some of it.
    Unsupported,
}

/// The addresses whose connections are to be forgotten.
///
/// The value works in the network namespace of the thread that uses it first.
#[derive(Debug)]
pub(super) struct Connections {
    range: Ipv4Cidr,
    state: Mutex<State>,
    /// Held while connections are listed and deleted.
    socket: Mutex<Option<Netlink>>,
}

#[derive(Debug, Default)]
struct State {
    /// What an earlier process left behind has been looked for.
    looked: bool,
    waiting: HashSet<Ipv4Addr>,
    under_way: HashSet<Ipv4Addr>,
}

impl Connections {
    pub(super) fn new(config: &PoolConfig) -> Connections {
        Connections { range: config.range, state: Mutex::default(), socket: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address has been given back: its connections are forgotten before it is used again.
    pub(super) fn given_back(&self, ip: Ipv4Addr) {
        self.state().waiting.insert(ip);
    }

    /// The address is in use again: its connections are its new guest's from now on, and stay.
    pub(super) fn lent_again(&self, ip: Ipv4Addr) {
        self.state().waiting.remove(&ip);
    }

    /// Whether connections of a former guest of the address may still be remembered.
    pub(super) fn may_remember(&self, ip: Ipv4Addr) -> bool {
        let state = self.state();
        !state.looked || state.waiting.contains(&ip) || state.under_way.contains(&ip)
    }

    /// Forgets what is to be forgotten. The first time that is all of the pool's addresses but those that `in_use` tells,
    /// asked after the connections were listed: a process that was killed may have had some on its list.
    pub(super) fn settle(
        &self,
        in_use: impl FnOnce() -> Result<HashSet<Ipv4Addr>, NetError>,
    ) -> Result<Forgotten, NetError> {
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let (looked, addresses) = {
            let mut state = self.state();
            state.under_way = std::mem::take(&mut state.waiting);
            (state.looked, state.under_way.clone())
        };
        if looked && addresses.is_empty() {
            return Ok(Forgotten::Connections(0));
        }
        let result = open(&mut socket).and_then(|socket| {
            let found = find_all(socket, looked.then_some(&addresses))?;
            let wanted = if looked { HashSet::new() } else { in_use()? };
            let gone = |ip: &Ipv4Addr| match looked {
                true => addresses.contains(ip),
                false => self.range.contains(*ip) && (addresses.contains(ip) || !wanted.contains(ip)),
            };
            let leftovers = found.iter().filter(|reply| source(reply).is_some_and(|ip| gone(&ip)));
            delete_all(socket, leftovers.filter_map(delete).collect())
        });
        let mut state = self.state();
        let under_way = std::mem::take(&mut state.under_way);
        match result {
            Ok(count) => {
                state.looked = true;
                Ok(Forgotten::Connections(count))
            }
            // nfnetlink answers EINVAL or EOPNOTSUPP for a subsystem that it doesn't have, netlink EPROTONOSUPPORT.
            Err(NetError::Connections(error))
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT)
                ) =>
            {
                state.looked = true;
                Ok(Forgotten::Unsupported)
            }
            Err(error) => {
                state.waiting.extend(under_way);
                Err(error)
            }
        }
    }
}

fn open(socket: &mut Option<Netlink>) -> Result<&mut Netlink, NetError> {
    match socket {
        Some(socket) => Ok(socket),
        empty => {
            let opened = Netlink::open(SockProtocol::NetlinkNetFilter).map_err(NetError::Connections)?;
            Ok(empty.insert(opened))
        }
    }
}

/// The connections that these addresses began, and perhaps others; `None`: all.
fn find_all(socket: &mut Netlink, addresses: Option<&HashSet<Ipv4Addr>>) -> Result<Vec<Reply>, NetError> {
    let mut found = Vec::new();
    match addresses.filter(|addresses| addresses.len() <= FILTERED_AT_MOST) {
        Some(few) => {
            for ip in few {
                found.extend(socket.dump(&list(Some(*ip))).map_err(NetError::Connections)?);
            }
        }
        None => found = socket.dump(&list(None)).map_err(NetError::Connections)?,
    }
    Ok(found)
}

fn delete_all(socket: &mut Netlink, messages: Vec<Message>) -> Result<usize, NetError> {
    for batch in messages.chunks(64) {
        for result in socket.request(batch.to_vec()).map_err(NetError::Connections)? {
            match result {
                // It ended by itself meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                result => result.map_err(NetError::Connections)?,
            }
        }
    }
    Ok(messages.len())
}

fn list(source: Option<Ipv4Addr>) -> Message {
    let message = Message::new(GET, libc::NLM_F_DUMP, &NFGENMSG);
    let Some(source) = source else { return message };
    let ip = Attributes::new().put(IP_SOURCE, &source.octets());
    let tuple = Attributes::new().nest(TUPLE_IP, &ip);
    let filter = Attributes::new().put(FILTER_ORIGINAL, &FILTER_SOURCE.to_ne_bytes());
    message.with(&Attributes::new().nest(TUPLE_ORIGINAL, &tuple).nest(FILTER, &filter))
}

fn original(reply: &Reply) -> Option<&[u8]> {
    find(reply.body().get(NFGENMSG.len()..)?, TUPLE_ORIGINAL)
}

fn source(reply: &Reply) -> Option<Ipv4Addr> {
    ipv4(find(find(original(reply)?, TUPLE_IP)?, IP_SOURCE)?)
}

/// Deletes exactly the connection that was listed: the id keeps a new one of the same tuple.
fn delete(reply: &Reply) -> Option<Message> {
    let body = reply.body().get(NFGENMSG.len()..)?;
    let mut attributes = Attributes::new().put(TUPLE_ORIGINAL | 0x8000, original(reply)?);
    for kind in [ID, ZONE] {
        if let Some(value) = find(body, kind) {
            attributes = attributes.put(kind, value);
        }
    }
    Some(Message::new(DELETE, libc::NLM_F_ACK, &NFGENMSG).with(&attributes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connections_of_an_address_that_was_lent_again_stay() {
        let connections = Connections::new(&PoolConfig::default());
        connections.state().looked = true;
        let (one, other) = (Ipv4Addr::new(10, 231, 0, 2), Ipv4Addr::new(10, 231, 0, 6));
        connections.given_back(one);
        connections.given_back(other);
        connections.lent_again(one);
        assert!(!connections.may_remember(one) && connections.may_remember(other));
    }
}
