//! The device's thread: kicks and sockets in one epoll, packets between rings and connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::muxer::{FIRST, LISTENER, Muxer};
use super::packet::{HEADER_BYTES, Header};
use crate::virtio::Interrupt;
use crate::virtio::ring::{Chain, Ring, RingError};
use crate::virtio::worker::Gate;

/// The epoll tokens of the wake-up and the kicks lie between the listener's and the connections'.
const WAKE: u64 = LISTENER + 1;
const KICKS: u64 = WAKE + 1;
/// Events taken at once.
const EVENTS: usize = 32;

/// The event that says that all connections are gone (virtio 1.2, 5.10.6.7), as it lies in memory.
const TRANSPORT_RESET: [u8; 4] = [0; 4];

/// The queues, by index.
pub(super) const RECEIVE: usize = 0;
pub(super) const SEND: usize = 1;
pub(super) const EVENT: usize = 2;

/// What the thread holds.
pub(super) struct Engine {
    pub(super) rings: [Ring; 3],
    pub(super) kicks: [EventFd; 3],
    pub(super) chain: Chain,
    pub(super) muxer: Muxer,
    pub(super) interrupt: Arc<Interrupt>,
    /// The guest has been restored and is to be told.
    pub(super) restored: Arc<AtomicBool>,
    /// It is still to be told.
    pub(super) owed: bool,
    /// The VM is over: what the guest has sent is still taken.
    pub(super) over: Arc<AtomicBool>,
}

impl Engine {
    /// Works until the gate closes, or the guest has broken the rules: then how.
    pub(super) fn run(&mut self, gate: &Gate) -> Option<String> {
        if let Err(error) = self.watch(gate) {
            return Some(format!("the host can't watch its queues: {error}"));
        }
        let broken = self.work(gate);
        for eventfd in self.kicks.iter().chain([gate.wake_fd()]) {
            let _ = control(self.muxer.epoll(), ControlOperation::Delete, eventfd, 0);
        }
        broken
    }

    fn watch(&self, gate: &Gate) -> std::io::Result<()> {
        control(self.muxer.epoll(), ControlOperation::Add, gate.wake_fd(), WAKE)?;
        (KICKS..)
            .zip(&self.kicks)
            .try_for_each(|(token, kick)| control(self.muxer.epoll(), ControlOperation::Add, kick, token))
    }

    fn work(&mut self, gate: &Gate) -> Option<String> {
        let mut events = [EpollEvent::default(); EVENTS];
        let mut count = 0;
        loop {
            let Some(pass) = gate.enter() else {
                self.last_packets();
                return None;
            };
            let now = Instant::now();
            for event in &events[..count] {
                // Kicks and wake-ups need nothing: all rings are looked at below.
                if event.data() == LISTENER || event.data() >= FIRST {
                    self.muxer.event(event.data(), event.event_set(), now);
                }
            }
            let more = match self.round(now) {
                Ok(more) => more,
                Err(reason) => return Some(reason),
            };
            drop(pass);
            let timeout = if more { 0 } else { milliseconds(self.muxer.next_timer(), now) };
            // Interrupted by a signal: nothing has happened.
            count = self.muxer.epoll().wait(timeout, &mut events).unwrap_or(0);
        }
    }

    /// A guest that switches itself off after its last words need not have waited until they were taken. The CPUs stand, so
    /// a ring full is all.
    fn last_packets(&mut self) {
        if self.over.load(Ordering::SeqCst) {
            // A ring that is broken now has nothing more to say.
            let _ = self.take_packets(Instant::now());
        }
    }

    /// One look at everything. True: there is more to do at once.
    fn round(&mut self, now: Instant) -> Result<bool, String> {
        self.muxer.tick(now);
        if self.restored.swap(false, Ordering::SeqCst) {
            self.muxer.restored();
            self.owed = true;
        }
        let sent = self.take_packets(now).map_err(|error| name("send", &error))?;
        let received = self.give_packets(now)?;
        if self.owed {
            self.give_event().map_err(|error| name("event", &error))?;
        }
        // All of them are asked, as each keeps account of what the driver was told.
        if self.rings.iter_mut().fold(false, |any, ring| ring.must_interrupt() | any) {
            self.interrupt.used();
        }
        Ok(sent || received)
    }

    /// Takes what the guest sends, at most a ring full.
    fn take_packets(&mut self, now: Instant) -> Result<bool, RingError> {
        let ring = &mut self.rings[SEND];
        ring.disable_kicks();
        for _ in 0..ring.size() {
            if !ring.pop(&mut self.chain)? {
                return ring.enable_kicks();
            }
            let mut header = [0; HEADER_BYTES];
            // What is too short for a header says nothing.
            if self.chain.readable.take_front(&mut header) == HEADER_BYTES {
                self.muxer.take(&Header::parse(&header), &self.chain.readable, now);
            }
            ring.push(self.chain.head, 0);
        }
        Ok(true)
    }

    /// Gives the guest what there is, at most a ring full, while it has buffers.
    fn give_packets(&mut self, now: Instant) -> Result<bool, String> {
        let ring = &mut self.rings[RECEIVE];
        let fault = |error: RingError| name("receive", &error);
        ring.disable_kicks();
        for _ in 0..ring.size() {
            if !self.muxer.has_packet() {
                return Ok(false);
            }
            if !ring.pop(&mut self.chain).map_err(fault)? {
                return ring.enable_kicks().map_err(fault);
            }
            let space = self.chain.writable.bytes();
            if space <= HEADER_BYTES as u64 {
                return Err(name("receive", &format!("a buffer of {space} bytes holds no packet")));
            }
            match self.muxer.give(&self.chain.writable, now) {
                Some(length) => ring.push(self.chain.head, length),
                None => ring.put_back(),
            }
        }
        Ok(self.muxer.has_packet())
    }

    fn give_event(&mut self) -> Result<(), RingError> {
        let ring = &mut self.rings[EVENT];
        ring.disable_kicks();
        while self.owed {
            if ring.pop(&mut self.chain)? {
                self.chain.writable.fill(0, &TRANSPORT_RESET);
                ring.push(self.chain.head, TRANSPORT_RESET.len() as u32);
                self.owed = false;
            } else if !ring.enable_kicks()? {
                break;
            }
        }
        Ok(())
    }
}

fn name(queue: &str, error: &dyn std::fmt::Display) -> String {
    format!("the {queue} queue: {error}")
}

fn control(epoll: &Epoll, operation: ControlOperation, eventfd: &EventFd, token: u64) -> std::io::Result<()> {
    let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, token);
    epoll.ctl(operation, std::os::fd::AsRawFd::as_raw_fd(eventfd), event)
}

/// Until then, for epoll: rounded up, so that it is due when the time is over.
fn milliseconds(time: Option<Instant>, now: Instant) -> i32 {
    let Some(time) = time else { return -1 };
    let left = time.saturating_duration_since(now).min(Duration::from_secs(60));
    left.as_micros().div_ceil(1000) as i32
}
