//! One connection: a Unix socket on the host's side, two ports, and credit both ways.

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use libc::iovec;
use vmm_sys_util::epoll::EventSet;

use super::host::Wish;
use super::packet::{HEADER_BYTES, Header, MAX_DATA, operation, shut};
use super::socket;

/// A connection's ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ports {
    pub(super) guest: u32,
    pub(super) host: u32,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The client hasn't said yet what it wants.
    Greeting,
    /// The guest is being asked.
    Asking(Asking),
    /// Data flows.
    Open,
    /// The host is gone, the guest has been told.
    Leaving,
    /// The guest is gone; what it sent before is still handed to the host.
    Draining,
    /// A reset is on its way to the guest, then nothing is left.
    Failed,
}

/// A client that waits for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asking {
    pub(super) wish: Wish,
    /// The request is with the guest, unanswered.
    pub(super) asked: bool,
    /// Until it is asked again after a refusal.
    pub(super) delay: Duration,
}

/// Control packets that are due, as bits, in the order in which they are sent.
pub(super) mod due {
    pub(in super::super) const RESET: u8 = 1;
    pub(in super::super) const REQUEST: u8 = 2;
    pub(in super::super) const RESPONSE: u8 = 4;
    pub(in super::super) const SHUTDOWN: u8 = 8;
    pub(in super::super) const CREDIT_REQUEST: u8 = 16;
    pub(in super::super) const CREDIT_UPDATE: u8 = 32;
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    /// None when the host's side is gone.
    pub(super) stream: Option<UnixStream>,
    pub(super) ports: Ports,
    pub(super) phase: Phase,
    /// The guest began it.
    pub(super) from_guest: bool,
    pub(super) due: u8,
    /// It is in the list of those that have something for the guest.
    pub(super) queued: bool,
    pub(super) timer: Option<Instant>,

    // From the host to the guest.
    /// There may be something to read.
    readable: bool,
    /// The host won't send any more: this was read.
    end_read: bool,
    /// The host won't send any more: to be read after all data.
    half_closed: bool,
    /// The socket's other side is gone.
    hung_up: bool,
    /// Bytes sent, and what the guest says of its buffer; all modulo 2^32.
    sent: u32,
    guest_window: u32,
    guest_forwarded: u32,
    /// A credit request is out.
    begged: bool,

    // From the guest to the host.
    writable: bool,
    /// What the socket didn't take yet: at most `window` bytes.
    pending: VecDeque<u8>,
    /// The buffer that the guest was promised.
    window: u32,
    received: u32,
    forwarded: u32,
    /// `forwarded`, as the guest was told last.
    told: u32,

    /// What the guest has shut down, and what the guest was told that the host has.
    guest_shut: u32,
    host_shut: u32,
    /// The socket's way out was shut.
    shut_write: bool,
}

impl Connection {
    pub(super) fn new(stream: UnixStream, ports: Ports, phase: Phase, window: u32) -> Self {
        Self {
            stream: Some(stream),
            ports,
            phase,
            from_guest: false,
            due: 0,
            queued: false,
            timer: None,
            readable: false,
            end_read: false,
            half_closed: false,
            hung_up: false,
            sent: 0,
            guest_window: 0,
            guest_forwarded: 0,
            begged: false,
            writable: true,
            pending: VecDeque::new(),
            window,
            received: 0,
            forwarded: 0,
            told: 0,
            guest_shut: 0,
            host_shut: 0,
            shut_write: false,
        }
    }

    /// What epoll says of the socket. Edges: what it says once holds until the opposite was seen.
    pub(super) fn socket_says(&mut self, events: EventSet) {
        let hung_up = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        self.hung_up |= hung_up;
        self.half_closed |= hung_up || events.contains(EventSet::READ_HANG_UP);
        self.readable |= self.half_closed || events.contains(EventSet::IN);
        self.writable |= events.contains(EventSet::OUT);
    }

    pub(super) fn has_hung_up(&self) -> bool {
        self.hung_up
    }

    /// What the guest says of its buffer. Whatever it says only decides how much it gets.
    pub(super) fn guest_credit(&mut self, header: &Header) {
        (self.guest_window, self.guest_forwarded) = (header.window, header.forwarded);
        // A guest whose buffer is still full will say so when it isn't: it isn't begged twice.
        self.begged &= self.credit() == 0;
    }

    fn credit(&self) -> u32 {
        self.guest_window.saturating_sub(self.sent.wrapping_sub(self.guest_forwarded))
    }

    /// There is data to be read for a guest that takes it.
    fn has_data(&self) -> bool {
        self.phase == Phase::Open
            && self.readable
            && !self.end_read
            && self.stream.is_some()
            && self.guest_shut & shut::RECEIVE == 0
    }

    /// It has something for the guest, as far as is known.
    pub(super) fn wants_to_send(&self) -> bool {
        self.due != 0 || self.has_data() && (self.credit() > 0 || !self.begged)
    }

    /// The next packet's header, when there is one; its data is in the buffers already, behind the header's place.
    pub(super) fn next_packet(
        &mut self,
        cid: u64,
        buffers: &[iovec],
        space: usize,
        scratch: &mut Vec<iovec>,
    ) -> Option<Header> {
        if let Some(header) = self.first_due(due::RESET | due::REQUEST | due::RESPONSE, cid) {
            return Some(header);
        }
        if self.has_data() {
            let limit = MAX_DATA.min(space - HEADER_BYTES).min(self.credit() as usize);
            if limit > 0 {
                socket::part(buffers, HEADER_BYTES, limit, scratch);
                let read = self.read(scratch, limit);
                self.settle();
                if read > 0 {
                    self.sent = self.sent.wrapping_add(read as u32);
                    let header = self.header(cid, operation::DATA);
                    return Some(Header { length: read as u32, ..header });
                }
            } else if !std::mem::replace(&mut self.begged, true) {
                self.due |= due::CREDIT_REQUEST;
            }
        }
        self.first_due(u8::MAX, cid)
    }

    /// The first of these control packets that is due.
    fn first_due(&mut self, which: u8, cid: u64) -> Option<Header> {
        let first = 1_u8.checked_shl((self.due & which).trailing_zeros())?;
        self.due &= !first;
        let operation = match first {
            due::RESET => operation::RESET,
            due::REQUEST => operation::REQUEST,
            due::RESPONSE => operation::RESPONSE,
            due::SHUTDOWN => operation::SHUTDOWN,
            due::CREDIT_REQUEST => operation::CREDIT_REQUEST,
            _ => operation::CREDIT_UPDATE,
        };
        let flags = if first == due::SHUTDOWN { self.host_shut } else { 0 };
        Some(Header { flags, ..self.header(cid, operation) })
    }

    /// Each packet tells how much room there is.
    fn header(&mut self, cid: u64, operation: u16) -> Header {
        self.told = self.forwarded;
        self.due &= !due::CREDIT_UPDATE;
        Header {
            source_cid: super::packet::HOST_CID,
            target_cid: cid,
            source_port: self.ports.host,
            target_port: self.ports.guest,
            length: 0,
            kind: super::packet::STREAM,
            operation,
            flags: 0,
            window: self.window,
            forwarded: self.forwarded,
        }
    }

    /// Reads from the socket into the buffers, which have `limit` bytes; how many came.
    fn read(&mut self, buffers: &[iovec], limit: usize) -> usize {
        let Some(stream) = &self.stream else { return 0 };
        match socket::receive(stream, buffers) {
            Ok(0) => {
                self.end_read = true;
                0
            }
            Ok(count) => {
                // The rest comes with a new edge; but one that said "the end" has been seen, and comes but once.
                self.readable = count == limit || self.half_closed;
                count
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                0
            }
            Err(_) => {
                (self.end_read, self.hung_up) = (true, true);
                0
            }
        }
    }

    /// Takes data of the guest's. False: it has sent more than it may.
    pub(super) fn take(&mut self, data: &[iovec], length: u32, scratch: &mut Vec<iovec>) -> bool {
        let waiting = self.received.wrapping_sub(self.forwarded);
        if u64::from(waiting) + u64::from(length) > u64::from(self.window)
            || self.guest_shut & shut::SEND != 0
        {
            return false;
        }
        self.received = self.received.wrapping_add(length);
        let mut sent = 0;
        if self.pending.is_empty() && self.writable {
            socket::part(data, 0, length as usize, scratch);
            sent = self.write(|stream| socket::send(stream, scratch));
            self.writable &= sent == length as usize;
        }
        if self.host_takes_nothing() {
            self.forwarded = self.received;
        } else {
            socket::part(data, sent, length as usize - sent, scratch);
            socket::keep(scratch, &mut self.pending);
        }
        true
    }

    /// Hands the host what waits, as far as it takes it.
    fn flush(&mut self) {
        while self.writable && !self.pending.is_empty() {
            let mut pending = std::mem::take(&mut self.pending);
            let sent = self.write(|stream| socket::drain(stream, &mut pending));
            self.pending = pending;
            if sent == 0 {
                break;
            }
        }
        if self.host_takes_nothing() {
            self.pending = VecDeque::new();
            self.forwarded = self.received;
        }
    }

    fn write(&mut self, send: impl FnOnce(&UnixStream) -> io::Result<usize>) -> usize {
        let Some(stream) = &self.stream else { return 0 };
        match send(stream) {
            Ok(count) => {
                self.forwarded = self.forwarded.wrapping_add(count as u32);
                count
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.writable = false;
                0
            }
            Err(_) => {
                self.tell_shut(shut::RECEIVE);
                0
            }
        }
    }

    fn host_takes_nothing(&self) -> bool {
        self.stream.is_none() || self.host_shut & shut::RECEIVE != 0
    }

    /// The guest is to know that the host won't do this any more.
    fn tell_shut(&mut self, flags: u32) {
        if self.host_shut & flags != flags {
            self.host_shut |= flags;
            self.due |= due::SHUTDOWN;
        }
    }

    /// The guest says so.
    pub(super) fn guest_shuts(&mut self, flags: u32) {
        self.guest_shut |= flags & shut::BOTH;
        if self.guest_shut & shut::RECEIVE != 0
            && let Some(stream) = &self.stream
        {
            let _ = stream.shutdown(Shutdown::Read);
        }
    }

    /// Draws the conclusions from what has happened. To be called after anything has.
    pub(super) fn settle(&mut self) {
        if !matches!(self.phase, Phase::Open | Phase::Draining) {
            return;
        }
        self.flush();
        if self.guest_shut & shut::SEND != 0 && self.pending.is_empty() && !self.shut_write {
            self.shut_write = true;
            if let Some(stream) = &self.stream {
                let _ = stream.shutdown(Shutdown::Write);
            }
        }
        if self.phase == Phase::Draining {
            return;
        }
        if self.guest_shut == shut::BOTH && self.pending.is_empty() {
            self.fail();
        } else if self.hung_up && (self.end_read || self.guest_shut & shut::RECEIVE != 0) {
            self.stream = None;
            self.flush();
            self.tell_shut(shut::BOTH);
            self.phase = Phase::Leaving;
        } else if self.end_read {
            self.tell_shut(shut::SEND);
        }
        let freed = self.forwarded.wrapping_sub(self.told);
        if self.phase == Phase::Open && freed >= self.window / 2 {
            self.due |= due::CREDIT_UPDATE;
        }
    }

    /// Ends it with a reset.
    pub(super) fn fail(&mut self) {
        self.stream = None;
        self.pending = VecDeque::new();
        self.due = due::RESET;
        self.phase = Phase::Failed;
    }

    /// The guest has ended it. True: there is still something for the host.
    pub(super) fn drain(&mut self) -> bool {
        self.due = 0;
        self.phase = Phase::Draining;
        self.settle();
        !self.pending.is_empty()
    }

    /// Everything was handed over, or nobody takes it.
    pub(super) fn is_drained(&self) -> bool {
        self.phase == Phase::Draining && (self.pending.is_empty() || self.hung_up)
    }

    /// The host's client is told that it is connected.
    pub(super) fn open(&mut self, greet: bool) {
        self.phase = Phase::Open;
        let line = format!("OK {}\n", self.ports.host);
        let told = match &self.stream {
            Some(stream) if greet => {
                matches!(socket::send_bytes(stream, line.as_bytes()), Ok(sent) if sent == line.len())
            }
            _ => true,
        };
        self.hung_up |= !told;
        self.end_read |= !told;
        self.settle();
    }
}
