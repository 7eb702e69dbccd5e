//! The balloon (virtio 1.2, 5.5): pages that the guest doesn't need go back to the host.
//!
//! Two ways: the driver reports free pages on its own (F_REPORTING) and may use them again at any time; and it hands over
//! pages until [`BalloonHandle::set_target_bytes`] is met, and takes them back when it runs out of memory
//! (F_DEFLATE_ON_OOM). In both cases the host forgets what was in the pages: touched again, they read as zeros.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::ring::{Chain, Ring};
use super::segments::Segments;
use super::worker::{Next, Worker};
use super::{Activation, DeviceError, DriverThere, VirtioDevice};
use crate::Memory;
use crate::host::Surroundings;

/// The device's number.
const ID: u32 = 5;
/// The driver takes pages back when it is out of memory.
const DEFLATE_ON_OOM: u64 = 1 << 2;
/// The driver reports free pages.
const REPORTING: u64 = 1 << 5;
/// Inflate, deflate, reporting: as the queues for statistics and hints aren't offered, the third is the reports'.
const QUEUES: [u16; 3] = [128, 128, 32];
const INFLATE: usize = 0;
const REPORTS: usize = 2;
/// The balloon counts in pages of this size, whatever the guest's are.
const PAGE: u64 = 4096;
/// Page numbers are read in portions of this many, each of which is sorted and coalesced.
const PORTION: usize = 256;
/// Most bytes of page numbers in one request; Linux sends 1 KiB.
const MAX_REQUEST: u64 = 4 << 10;
/// Offsets in the configuration space: pages wanted, pages handed over.
const TARGET: usize = 0;
const ACTUAL: usize = 4;
/// Bytes of it.
const CONFIG: usize = 16;

/// What the device and its handle share.
#[derive(Default)]
struct Shared {
    target_pages: AtomicU32,
    actual_pages: AtomicU32,
    reclaimed: AtomicU64,
    driver: DriverThere,
}

/// Moves the balloon from outside. Clones are the same balloon.
#[derive(Clone)]
pub struct BalloonHandle(Arc<Shared>);

impl BalloonHandle {
    /// How much the guest is asked to hand over, bytes; rounded down to pages. It need not obey.
    pub fn set_target_bytes(&self, bytes: u64) {
        let pages = u32::try_from(bytes / PAGE).unwrap_or(u32::MAX);
        if self.0.target_pages.swap(pages, Ordering::SeqCst) != pages {
            self.0.driver.config_changed();
        }
    }

    /// How much the guest says that it has handed over, bytes.
    pub fn actual(&self) -> u64 {
        u64::from(self.0.actual_pages.load(Ordering::SeqCst)) * PAGE
    }

    /// Bytes that went back to the host so far, counted again each time.
    pub fn reclaimed(&self) -> u64 {
        self.0.reclaimed.load(Ordering::Relaxed)
    }
}

/// The device.
pub struct Balloon {
    worker: Worker,
    shared: Arc<Shared>,
}

impl Balloon {
    /// A balloon with nothing in it.
    ///
    /// # Errors
    /// No eventfd can be made.
    pub fn new() -> io::Result<Self> {
        Ok(Self { worker: Worker::new()?, shared: Arc::default() })
    }

    /// The handle for the control socket.
    pub fn handle(&self) -> BalloonHandle {
        BalloonHandle(Arc::clone(&self.shared))
    }
}

impl VirtioDevice for Balloon {
    fn id(&self) -> u32 {
        ID
    }

    fn name(&self) -> String {
        "balloon".to_owned()
    }

    fn features(&self) -> u64 {
        DEFLATE_ON_OOM | REPORTING
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; CONFIG];
        config[TARGET..][..4].copy_from_slice(&self.shared.target_pages.load(Ordering::SeqCst).to_le_bytes());
        config[ACTUAL..][..4].copy_from_slice(&self.shared.actual_pages.load(Ordering::SeqCst).to_le_bytes());
        super::device::read_bytes(&config, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let (true, Ok(bytes)) = (offset == ACTUAL as u64, data.try_into()) {
            self.shared.actual_pages.store(u32::from_le_bytes(bytes), Ordering::SeqCst);
        }
    }

    fn activate(
        &mut self,
        activation: Activation,
        surroundings: &Arc<dyn Surroundings>,
    ) -> Result<(), DeviceError> {
        let Activation { memory, queues, interrupt, features, broken } = activation;
        self.shared.driver.set(Some(Arc::clone(&interrupt)));
        let (mut rings, mut kicks) = (Vec::new(), Vec::new());
        for (index, queue) in queues.into_iter().enumerate() {
            let Some(queue) = queue else { continue };
            match Ring::new(&queue.queue, memory.clone(), features) {
                Ok(ring) => rings.push(Served { index, chain: ring.chain(), ring }),
                Err(error) => {
                    broken(&format!("queue {index}: {error}"));
                    return Ok(());
                }
            }
            kicks.push(queue.kick);
        }
        let pages = Pages::new(&memory, Arc::clone(&self.shared));
        let step = move || {
            // Held as long as pages of it may be let go.
            let _memory = &memory;
            let mut next = Next::Kick;
            for served in &mut rings {
                if served.serve(&pages)? {
                    next = Next::After(Duration::ZERO);
                }
                if served.ring.must_interrupt() {
                    interrupt.used();
                }
            }
            Ok(next)
        };
        self.worker.start_serving(surroundings, "starting the balloon's thread", kicks, broken, step)
    }

    fn reset(&mut self) {
        self.worker.stop();
        self.shared.driver.set(None);
        // A new driver begins with an empty balloon.
        self.shared.actual_pages.store(0, Ordering::SeqCst);
    }

    fn pause(&mut self, paused: bool) {
        self.worker.pause(paused);
    }
}

/// A queue that is being served.
struct Served {
    index: usize,
    ring: Ring,
    chain: Chain,
}

impl Served {
    /// Serves what waits: one request that lets pages go, which takes the host a while, or a ring full of others. So the
    /// device can be paused or stopped soon. True: there may be more.
    fn serve(&mut self, pages: &Pages) -> Result<bool, String> {
        let name = |error: &dyn std::fmt::Display| format!("queue {}: {error}", self.index);
        self.ring.disable_kicks();
        for _ in 0..self.ring.size() {
            if !self.ring.pop(&mut self.chain).map_err(|error| name(&error))? {
                return self.ring.enable_kicks().map_err(|error| name(&error));
            }
            let lets_go = matches!(self.index, INFLATE | REPORTS);
            match self.index {
                INFLATE => pages.inflate(&mut self.chain.readable).map_err(|error| name(&error))?,
                REPORTS => pages.report(&self.chain.writable),
                // Deflated pages come back when they are touched.
                _ => {}
            }
            self.ring.push(self.chain.head, 0);
            if lets_go {
                break;
            }
        }
        Ok(true)
    }
}

/// A piece of guest memory on the host.
struct Area {
    start: u64,
    length: u64,
    host: usize,
    /// What lets pages go: a shared mapping's are in its file.
    advice: libc::c_int,
}

/// Lets pages of the guest's memory go.
struct Pages {
    areas: Vec<Area>,
    shared: Arc<Shared>,
}

impl Pages {
    fn new(memory: &Memory, shared: Arc<Shared>) -> Self {
        let areas = memory.iter().filter_map(|region| {
            let host = region.get_host_address(MemoryRegionAddress(0)).ok()?;
            let is_shared = region.flags() & libc::MAP_SHARED != 0;
            let advice = if is_shared { libc::MADV_REMOVE } else { libc::MADV_DONTNEED };
            Some(Area {
                start: region.start_addr().raw_value(),
                length: region.len(),
                host: host.expose_provenance(),
                advice,
            })
        });
        Self { areas: areas.collect(), shared }
    }

    /// Page numbers as the driver lists them.
    fn inflate(&self, list: &mut Segments) -> Result<(), String> {
        if list.bytes() > MAX_REQUEST {
            return Err(format!("a list of {} bytes, more than {MAX_REQUEST}", list.bytes()));
        }
        let mut bytes = [0; PORTION * 4];
        loop {
            let count = list.take_front(&mut bytes) / 4;
            if count == 0 {
                return Ok(());
            }
            let mut numbers = [0; PORTION];
            for (number, bytes) in numbers.iter_mut().zip(bytes.chunks_exact(4)).take(count) {
                *number = bytes.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte));
            }
            let numbers = &mut numbers[..count];
            numbers.sort_unstable();
            for run in numbers.chunk_by(|one, next| next - one <= 1) {
                let pages = u64::from(run[run.len() - 1] - run[0]) + 1;
                self.let_go_guest(u64::from(run[0]) * PAGE, pages * PAGE);
            }
        }
    }

    /// Free ranges, as buffers of a request. They were checked to be guest memory when they were taken from the ring.
    fn report(&self, ranges: &Segments) {
        for range in ranges.list() {
            let host = range.iov_base.addr();
            let area = self
                .areas
                .iter()
                .find(|area| host.checked_sub(area.host).is_some_and(|offset| (offset as u64) < area.length));
            if let Some(area) = area {
                self.let_go(area, (host - area.host) as u64, range.iov_len as u64);
            }
        }
    }

    /// What isn't memory is left alone.
    fn let_go_guest(&self, start: u64, length: u64) {
        let end = start + length;
        for area in &self.areas {
            let (from, to) = (start.max(area.start), end.min(area.start + area.length));
            if from < to {
                self.let_go(area, from - area.start, to - from);
            }
        }
    }

    /// The whole pages of a range inside an area.
    fn let_go(&self, area: &Area, offset: u64, length: u64) {
        let end = (offset + length).min(area.length) / PAGE * PAGE;
        let start = offset.next_multiple_of(PAGE);
        if start >= end {
            return;
        }
        let length = end - start;
        let host = std::ptr::with_exposed_provenance_mut::<libc::c_void>(area.host + start as usize);
        // SAFETY: whole pages inside a mapping of guest memory, which the thread holds. The host has no references into
        // guest memory, so that pages may turn to zeros at any time.
        if unsafe { libc::madvise(host, length as usize, area.advice) } == 0 {
            self.shared.reclaimed.fetch_add(length, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
#[path = "balloon_tests.rs"]
mod tests;
