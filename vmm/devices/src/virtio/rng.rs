//! The entropy device (virtio 1.2, 5.4): the host kernel's random numbers, written straight to the guest's buffers.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libc::iovec;
use torpor_vmm_api::RateLimit;

use super::rate::Limiter;
use super::ring::{Chain, Ring};
use super::worker::{Next, Worker};
use super::{Activation, DeviceError, VirtioDevice};
use crate::host::Surroundings;

/// The device's number.
const ID: u32 = 4;
/// One queue.
const QUEUES: [u16; 1] = [64];
/// Most bytes that one request gets, however long its buffers are.
const MAX_REQUEST: u64 = 64 << 10;

/// A guest that wants more waits: making random numbers costs the host's CPU time.
const DEFAULT_RATE: RateLimit = RateLimit {
    bytes_per_second: 1 << 20,
    burst_bytes: 256 << 10,
    operations_per_second: 0,
    burst_operations: 0,
};

/// The device.
pub struct Rng {
    worker: Worker,
    rate: RateLimit,
}

impl Rng {
    /// With a limit of what the guest gets; 1 MiB a second if none is given.
    ///
    /// # Errors
    /// No eventfd can be made.
    pub fn new(rate: Option<RateLimit>) -> io::Result<Self> {
        Ok(Self { worker: Worker::new()?, rate: rate.unwrap_or(DEFAULT_RATE) })
    }
}

impl VirtioDevice for Rng {
    fn id(&self) -> u32 {
        ID
    }

    fn name(&self) -> String {
        "rng".to_owned()
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }

    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn activate(
        &mut self,
        activation: Activation,
        surroundings: &Arc<dyn Surroundings>,
    ) -> Result<(), DeviceError> {
        let Activation { memory, queues, interrupt, features, broken } = activation;
        let queue = queues.into_iter().next().flatten().ok_or(DeviceError::QueueMissing(0))?;
        let mut ring = match Ring::new(&queue.queue, memory, features) {
            Ok(ring) => ring,
            Err(error) => {
                broken(&error.to_string());
                return Ok(());
            }
        };
        let (mut chain, mut limiter) = (ring.chain(), Limiter::new(Some(self.rate), Instant::now()));
        let step = move || {
            let next = fill(&mut ring, &mut chain, &mut limiter)?;
            if ring.must_interrupt() {
                interrupt.used();
            }
            Ok(next)
        };
        self.worker.start_serving(surroundings, "starting the rng's thread", vec![queue.kick], broken, step)
    }

    fn reset(&mut self) {
        self.worker.stop();
    }

    fn pause(&mut self, paused: bool) {
        self.worker.pause(paused);
    }
}

/// Serves what waits, as far as the limit reaches.
fn fill(ring: &mut Ring, chain: &mut Chain, limiter: &mut Limiter) -> Result<Next, String> {
    ring.disable_kicks();
    for _ in 0..ring.size() {
        let wait = limiter.wait(Instant::now());
        if !wait.is_zero() {
            return Ok(Next::After(wait));
        }
        if !ring.pop(chain).map_err(|error| error.to_string())? {
            let more = ring.enable_kicks().map_err(|error| error.to_string())?;
            return Ok(if more { Next::After(Duration::ZERO) } else { Next::Kick });
        }
        let wanted = chain.writable.bytes().min(MAX_REQUEST);
        let written = random(chain.writable.list(), wanted as usize);
        limiter.take(written as u64);
        ring.push(chain.head, written as u32);
    }
    Ok(Next::After(Duration::ZERO))
}

/// Random bytes into the first `count` bytes of the buffers; how many there are now.
fn random(buffers: &[iovec], count: usize) -> usize {
    let mut done = 0;
    for buffer in buffers {
        let length = buffer.iov_len.min(count - done);
        let mut at = 0;
        while at < length {
            // SAFETY: inside a buffer of guest memory, which the chain keeps mapped; the kernel writes to it.
            let got = unsafe { libc::getrandom(buffer.iov_base.cast::<u8>().add(at).cast(), length - at, 0) };
            match usize::try_from(got) {
                Ok(got) => at += got,
                Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return done + at,
            }
        }
        done += length;
        if done == count {
            break;
        }
    }
    done
}

#[cfg(test)]
#[path = "rng_tests.rs"]
mod tests;
