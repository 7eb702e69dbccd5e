//! From the guest to the wire: packets are written straight from the driver's buffers. What a header asks for (checksums,
//! segmentation) is checked by the kernel, which refuses nonsense; such a packet is dropped.

use std::io::ErrorKind;
use std::time::Instant;

use super::port::Port;
use super::{HEADER, MAX_FRAME, Next};
use crate::virtio::rate::Limiter;
use crate::virtio::ring::{Chain, Ring, RingError};

/// Most packets before the other direction gets its turn.
const BUDGET: usize = 64;
/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

/// One direction of the device.
pub(super) struct Transmitter {
    ring: Ring,
    chain: Chain,
    limiter: Limiter,
}

impl Transmitter {
    pub(super) fn new(ring: Ring, limiter: Limiter) -> Self {
        let chain = ring.chain();
        Self { ring, chain, limiter }
    }

    /// Whether the driver is to be interrupted for what was sent.
    pub(super) fn must_interrupt(&mut self) -> bool {
        self.ring.must_interrupt()
    }

    /// Sends what the driver has, until there is nothing more or the wire is full.
    pub(super) fn run(&mut self, port: &Port, dropped: &mut u64) -> Result<Next, RingError> {
        self.ring.disable_kicks();
        for _ in 0..BUDGET {
            if !self.limiter.is_open() && self.ring.waiting()? > 0 {
                let wait = self.limiter.wait(Instant::now());
                if !wait.is_zero() {
                    return Ok(Next::Wait(wait));
                }
            }
            while !self.ring.pop(&mut self.chain)? {
                if !self.ring.enable_kicks()? {
                    return Ok(Next::Kick);
                }
                self.ring.disable_kicks();
            }
            if !self.send(port, dropped) {
                self.ring.put_back();
                return Ok(Next::Port);
            }
            self.ring.push(self.chain.head, 0);
        }
        Ok(Next::Again)
    }

    /// Sends or drops the packet; false when the wire is full.
    fn send(&mut self, port: &Port, dropped: &mut u64) -> bool {
        let packet = &self.chain.readable;
        let length = packet.bytes();
        if length < (HEADER + ETHERNET) as u64 || length > (HEADER + MAX_FRAME) as u64 {
            *dropped += 1;
            return true;
        }
        loop {
            match port.write(packet.list()) {
                Ok(_) => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                Err(_) => {
                    *dropped += 1;
                    break;
                }
            }
        }
        self.limiter.take(length - HEADER as u64);
        true
    }
}
