//! From the wire to the guest: packets are read straight into the driver's buffers.
//!
//! How long a packet is is known only when it has been read, so buffers for the longest are gathered before; those that
//! it didn't need stay gathered for the next. One byte of our own after them tells a packet that was too long.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::port::Port;
use super::{HEADER, Next};
use crate::virtio::rate::Limiter;
use crate::virtio::ring::{Chain, Ring, RingError};
use crate::virtio::segments::Segments;

/// Most packets before the other direction gets its turn.
const BUDGET: usize = 64;
/// Most buffers of one read: what the kernel takes (IOV_MAX), less one for our own byte.
const MOST_PIECES: usize = 1023;
/// How long a driver that has brought some buffers, but too few for the longest packet, may take to bring more.
const PATIENCE: Duration = Duration::from_millis(10);
/// Where in the header the number of buffers is (virtio 1.2, 5.1.6).
const NUM_BUFFERS: usize = 10;

/// A request of the driver that was gathered.
struct Gathered {
    head: u16,
    bytes: usize,
    pieces: usize,
}

/// One direction of the device.
pub(super) struct Receiver {
    ring: Ring,
    chain: Chain,
    /// A packet may fill several requests.
    mergeable: bool,
    /// Bytes of the longest packet, with header.
    longest: usize,
    limiter: Limiter,
    gathered: VecDeque<Gathered>,
    /// The buffers of what was gathered, one after the other.
    room: Segments,
    /// Since when there hasn't been enough of it.
    scarce: Option<Instant>,
}

/// Whether there is room to read a packet into.
enum Room {
    Enough,
    /// Some: the driver may bring more within this time.
    Scarce(Duration),
    None,
}

impl Receiver {
    pub(super) fn new(mut ring: Ring, mergeable: bool, longest: usize, limiter: Limiter) -> Self {
        let chain = ring.chain();
        ring.disable_kicks();
        Self {
            ring,
            chain,
            mergeable,
            longest,
            limiter,
            gathered: VecDeque::new(),
            room: Segments::default(),
            scarce: None,
        }
    }

    /// Whether the driver is to be interrupted for what was received.
    pub(super) fn must_interrupt(&mut self) -> bool {
        self.ring.must_interrupt()
    }

    /// Reads packets until there are none, or no buffers. `told` is called after each that the driver got.
    pub(super) fn run(
        &mut self,
        port: &Port,
        dropped: &mut u64,
        mut told: impl FnMut(&mut Self),
    ) -> Result<Next, RingError> {
        for _ in 0..BUDGET {
            match self.gather()? {
                Room::Enough => {}
                Room::Scarce(time) => return Ok(Next::Wait(time)),
                Room::None => return Ok(Next::Kick),
            }
            if let Some(wait) = self.throttled() {
                return Ok(Next::Wait(wait));
            }
            let mut extra = 0u8;
            let read = self.room.with_extra(&mut extra, |list| port.read(list));
            match read {
                Ok(0) => return Ok(Next::Port),
                Ok(count) if count < HEADER || count as u64 > self.room.bytes() => *dropped += 1,
                Ok(count) => {
                    self.limiter.take((count - HEADER) as u64);
                    self.give(count);
                    told(self);
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // Nothing there, or the TAP is down: there will be an event when that changes.
                Err(_) => return Ok(Next::Port),
            }
        }
        Ok(Next::Again)
    }

    fn throttled(&mut self) -> Option<Duration> {
        if self.limiter.is_open() {
            return None;
        }
        Some(self.limiter.wait(Instant::now())).filter(|wait| !wait.is_zero())
    }

    /// Gathers buffers for the longest packet. When the driver has brought less, it gets some time to bring more; after
    /// that it gets what fits.
    fn gather(&mut self) -> Result<Room, RingError> {
        loop {
            while self.wants_more() && self.ring.pop(&mut self.chain)? {
                self.keep()?;
            }
            if !self.wants_more() {
                self.scarce = None;
                return Ok(Room::Enough);
            }
            if self.ring.enable_kicks()? {
                self.ring.disable_kicks();
                continue;
            }
            if self.gathered.is_empty() {
                return Ok(Room::None);
            }
            let waited = self.scarce.get_or_insert_with(Instant::now).elapsed();
            return Ok(PATIENCE.checked_sub(waited).map_or(Room::Enough, Room::Scarce));
        }
    }

    fn wants_more(&self) -> bool {
        match self.mergeable {
            true => self.room.bytes() < self.longest as u64 && self.room.list().len() < MOST_PIECES,
            false => self.gathered.is_empty(),
        }
    }

    fn keep(&mut self) -> Result<(), RingError> {
        let pieces = self.chain.writable.list();
        if pieces.is_empty() {
            return Err(RingError::NoRoom);
        }
        let fits = MOST_PIECES.saturating_sub(self.room.list().len()).min(pieces.len());
        let pieces = &pieces[..fits];
        let bytes = pieces.iter().map(|piece| piece.iov_len).sum();
        for piece in pieces {
            self.room.push(piece.iov_base.cast(), piece.iov_len);
        }
        self.gathered.push_back(Gathered { head: self.chain.head, bytes, pieces: fits });
        Ok(())
    }

    /// Gives the driver a packet of `count` bytes that lies in what was gathered.
    fn give(&mut self, count: usize) {
        let (mut used, mut sum) = (0, 0);
        while sum < count && used < self.gathered.len() {
            sum += self.gathered[used].bytes;
            used += 1;
        }
        self.room.fill(NUM_BUFFERS, &(used as u16).to_le_bytes());
        let mut left = count;
        for request in self.gathered.drain(..used) {
            let written = left.min(request.bytes);
            left -= written;
            self.ring.stage(request.head, written as u32);
            self.room.drop_pieces(request.pieces);
        }
        self.ring.publish();
    }
}
