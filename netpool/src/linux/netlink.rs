//! Messages of netlink(7): building, sending in batches, reading answers and dumps.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::sockopt::ReceiveTimeout;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, setsockopt, socket,
};
use nix::sys::time::TimeVal;

/// `NLA_F_NESTED` of linux/netlink.h; the top two bits of an attribute's type are flags.
const NESTED: u16 = 0x8000;
const TYPE_MASK: u16 = 0x3fff;
/// `NLM_F_DUMP_INTR`: the objects changed while they were listed.
const DUMP_INTERRUPTED: u16 = 0x10;
const HEADER: usize = 16;
/// The kernel answers before `sendto` returns, or never: the time is a bound, not a wait.
const ANSWER_SECONDS: i64 = 10;
/// The kernel's largest dump datagram is 32 KiB.
const BUFFER: usize = 64 << 10;
const DUMP_TRIES: u32 = 8;

/// Attributes (`struct nlattr` and value, padded to four bytes).
#[derive(Clone, Default)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    pub(super) fn new() -> Attributes {
        Attributes::default()
    }

    pub(super) fn put(mut self, kind: u16, value: &[u8]) -> Attributes {
        put(&mut self.0, kind, value);
        self
    }

    pub(super) fn nest(mut self, kind: u16, inner: &Attributes) -> Attributes {
        put(&mut self.0, kind | NESTED, &inner.0);
        self
    }
}

fn put(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    // No attribute of this crate is near 64 KiB.
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

/// A text as an attribute's value: with a closing NUL.
pub(super) fn text(value: &str) -> Vec<u8> {
    [value.as_bytes(), &[0]].concat()
}

/// One message: `struct nlmsghdr`, a fixed part, attributes.
#[derive(Clone)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// A message of a type with flags beside `NLM_F_REQUEST`.
    pub(super) fn new(kind: u16, flags: i32, fixed: &[u8]) -> Message {
        let flags = (libc::NLM_F_REQUEST | flags) as u16;
        let mut bytes = Vec::with_capacity(128);
        bytes.extend([0; 4]);
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend(fixed);
        Message(bytes)
    }

    pub(super) fn with(mut self, attributes: &Attributes) -> Message {
        self.0.extend(&attributes.0);
        self
    }

    fn finished(mut self, sequence: u32) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }
}

/// A message that the kernel sent.
pub(super) struct Reply {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: Vec<u8>,
}

impl Reply {
    /// The attributes after a fixed part of `fixed` bytes.
    pub(super) fn attributes(&self, fixed: usize) -> impl Iterator<Item = (u16, &[u8])> {
        attributes(self.body.get(fixed..).unwrap_or_default())
    }

    /// The fixed part and all after it.
    pub(super) fn body(&self) -> &[u8] {
        &self.body
    }

    /// The errno of an acknowledgement (0: done), a negative number after the header.
    fn errno(&self) -> Option<i32> {
        let is_ack = libc::c_int::from(self.kind) == libc::NLMSG_ERROR;
        let number = self.body.get(..4).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
        number.filter(|_| is_ack).map(i32::saturating_neg)
    }
}

/// Reads a row of attributes; a damaged one ends it.
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & TYPE_MASK;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The value of the first attribute of a kind.
pub(super) fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

/// A netlink socket in the network namespace that the calling thread was in when it was opened.
#[derive(Debug)]
pub(super) struct Netlink {
    fd: OwnedFd,
    sequence: u32,
}

impl Netlink {
    pub(super) fn open(protocol: SockProtocol) -> io::Result<Netlink> {
        let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?;
        setsockopt(&fd, ReceiveTimeout, &TimeVal::new(ANSWER_SECONDS, 0))?;
        Ok(Netlink { fd, sequence: 0 })
    }

    fn send(&mut self, messages: Vec<Message>) -> io::Result<std::ops::Range<u32>> {
        let first = self.sequence.wrapping_add(1);
        let mut bytes = Vec::new();
        for message in messages {
            self.sequence = self.sequence.wrapping_add(1);
            bytes.extend(message.finished(self.sequence));
        }
        sendto(self.fd.as_raw_fd(), &bytes, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
        Ok(first..self.sequence.wrapping_add(1))
    }

    fn receive(&self, flags: MsgFlags) -> io::Result<Vec<Reply>> {
        let mut buffer = vec![0; BUFFER];
        let length = loop {
            match recv(self.fd.as_raw_fd(), &mut buffer, flags) {
                Err(Errno::EINTR) => {}
                result => break result?,
            }
        };
        let (mut rest, mut replies) = (&buffer[..length], Vec::new());
        while let Some((reply, after)) = split(rest) {
            replies.push(reply);
            rest = after;
        }
        Ok(replies)
    }

    /// Sends messages, each of which asks for an acknowledgement; the result of each. The kernel goes on after one that fails.
    pub(super) fn request(&mut self, messages: Vec<Message>) -> io::Result<Vec<io::Result<()>>> {
        let mut results: Vec<Option<io::Result<()>>> = messages.iter().map(|_| None).collect();
        let range = self.send(messages)?;
        while results.iter().any(Option::is_none) {
            for reply in self.receive(MsgFlags::empty())? {
                let place = reply.sequence.wrapping_sub(range.start) as usize;
                if let (Some(errno), Some(result)) = (reply.errno(), results.get_mut(place)) {
                    *result = Some(outcome(errno));
                }
            }
        }
        Ok(results.into_iter().flatten().collect())
    }

    /// Sends a question that has one answer.
    pub(super) fn ask(&mut self, message: Message) -> io::Result<Reply> {
        let range = self.send(vec![message])?;
        loop {
            for reply in self.receive(MsgFlags::empty())? {
                match reply.errno() {
                    _ if !range.contains(&reply.sequence) => {}
                    Some(errno) => outcome(errno)?,
                    None => return Ok(reply),
                }
            }
        }
    }

    /// Sends messages that are one transaction (nfnetlink's batches): the first error of any. The kernel has answered when
    /// `sendto` returns; the last but one message asks for an acknowledgement.
    pub(super) fn transact(&mut self, messages: Vec<Message>) -> io::Result<()> {
        let range = self.send(messages)?;
        let mut answered = None;
        loop {
            let replies = match self.receive(MsgFlags::MSG_DONTWAIT) {
                Ok(replies) => replies,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            };
            for reply in replies.iter().filter(|reply| range.contains(&reply.sequence)) {
                if let Some(errno) = reply.errno().filter(|_| !matches!(answered, Some(1..))) {
                    answered = Some(errno);
                }
            }
        }
        answered.map_or_else(|| Err(malformed("the kernel did not answer")), outcome)
    }

    /// All replies to a request for a list; again from the start when the objects changed meanwhile.
    pub(super) fn dump(&mut self, message: &Message) -> io::Result<Vec<Reply>> {
        for _ in 0..DUMP_TRIES {
            if let Some(replies) = self.dump_once(message.clone())? {
                return Ok(replies);
            }
        }
        Err(malformed("the objects change faster than they can be listed"))
    }

    fn dump_once(&mut self, message: Message) -> io::Result<Option<Vec<Reply>>> {
        let range = self.send(vec![message])?;
        let (mut found, mut whole) = (Vec::new(), true);
        loop {
            for reply in self.receive(MsgFlags::empty())? {
                if !range.contains(&reply.sequence) {
                    continue;
                }
                whole &= reply.flags & DUMP_INTERRUPTED == 0;
                if libc::c_int::from(reply.kind) == libc::NLMSG_DONE {
                    // A dump that fails ends with a negative errno in place of 0.
                    let errno = reply.body.get(..4).and_then(|bytes| bytes.try_into().ok());
                    outcome(errno.map_or(0, i32::from_ne_bytes).saturating_neg().max(0))?;
                    return Ok(whole.then_some(found));
                }
                match reply.errno() {
                    Some(errno) => outcome(errno)?,
                    None => found.push(reply),
                }
            }
        }
    }
}

fn outcome(errno: i32) -> io::Result<()> {
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
}

pub(super) fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn split(bytes: &[u8]) -> Option<(Reply, &[u8])> {
    let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let reply = Reply {
        kind: u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?),
        flags: u16::from_ne_bytes(bytes.get(6..8)?.try_into().ok()?),
        sequence: u32::from_ne_bytes(bytes.get(8..12)?.try_into().ok()?),
        body: bytes.get(HEADER..length)?.to_vec(),
    };
    Some((reply, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_come_back_as_they_were_put() {
        let inner = Attributes::new().put(1, b"abc").put(2, &[]);
        let all = Attributes::new().put(7, &5u32.to_ne_bytes()).nest(9, &inner);
        let found: Vec<_> = attributes(&all.0).collect();
        assert_eq!(found.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [7, 9]);
        assert_eq!(find(found[1].1, 1), Some(&b"abc"[..]));
        assert_eq!(find(found[1].1, 2), Some(&b""[..]));
        assert_eq!(find(found[1].1, 3), None);
    }

    #[test]
    fn damaged_attributes_and_messages_end_the_row() {
        for bad in [&[1][..], &[3, 0, 1, 0], &[200, 0, 1, 0, 5], &[0, 0, 0, 0]] {
            assert_eq!(attributes(bad).count(), 0, "{bad:?}");
            assert!(split(bad).is_none(), "{bad:?}");
        }
        let mut short = Message::new(16, 0, &[1, 2, 3, 4]).finished(7);
        assert_eq!(split(&short).map(|(reply, rest)| (reply.body, rest.len())), Some((vec![1, 2, 3, 4], 0)));
        short[0] = 8;
        assert!(split(&short).is_none());
    }
}
