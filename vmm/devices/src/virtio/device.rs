//! What a virtio device is to the transport.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

use super::ring::RingError;
use crate::Memory;
use crate::host::Surroundings;

/// Interrupt status bits (virtio 1.2, 4.2.2: InterruptStatus).
const USED_BUFFER: u32 = 1;
const CONFIG_CHANGED: u32 = 2;

/// A device's way to its driver: the status register and the line, an eventfd that the hypervisor turns into an
/// edge-triggered interrupt.
///
/// An acknowledgement takes back what the driver saw at its last look at the status register and nothing that came
/// later. So it may arrive late (a hypervisor may collect these writes and hand them over before the next access) and no
/// event is lost.
#[derive(Debug)]
pub struct Interrupt {
    used: Events,
    config: Events,
    line: EventFd,
}

/// A device's interrupt while a driver is there, for who changes the device from outside. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub(crate) struct DriverThere(Arc<Mutex<Option<Arc<Interrupt>>>>);

impl DriverThere {
    fn lock(&self) -> MutexGuard<'_, Option<Arc<Interrupt>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A driver has come, or none: has gone.
    pub(crate) fn set(&self, interrupt: Option<Arc<Interrupt>>) {
        *self.lock() = interrupt;
    }

    /// Tells the driver, if there is one, that the configuration space has changed.
    pub(crate) fn config_changed(&self) {
        if let Some(interrupt) = &*self.lock() {
            interrupt.config_changed();
        }
    }
}

/// How often one kind of event happened, was seen, and was acknowledged.
#[derive(Debug, Default)]
struct Events {
    raised: AtomicU32,
    seen: AtomicU32,
    acknowledged: AtomicU32,
}

impl Events {
    /// True when there are some that weren't acknowledged; they count as seen now.
    fn look(&self) -> bool {
        let raised = self.raised.load(Ordering::SeqCst);
        self.seen.store(raised, Ordering::SeqCst);
        raised != self.acknowledged.load(Ordering::SeqCst)
    }

    fn acknowledge(&self) {
        self.acknowledged.store(self.seen.load(Ordering::SeqCst), Ordering::SeqCst);
    }
}

impl Interrupt {
    /// With the line's eventfd.
    pub fn new(line: EventFd) -> Arc<Self> {
        Arc::new(Self { used: Events::default(), config: Events::default(), line })
    }

    /// Some buffers have been used.
    pub fn used(&self) {
        self.raise(&self.used);
    }

    /// The configuration space or the device's status has changed.
    pub fn config_changed(&self) {
        self.raise(&self.config);
    }

    fn raise(&self, events: &Events) {
        events.raised.fetch_add(1, Ordering::SeqCst);
        // It fails only when 2^64 - 2 interrupts are pending.
        let _ = self.line.write(1);
    }

    /// The status register, as the driver reads it; what it says counts as seen.
    pub fn status(&self) -> u32 {
        let used = if self.used.look() { USED_BUFFER } else { 0 };
        let config = if self.config.look() { CONFIG_CHANGED } else { 0 };
        used | config
    }

    /// The driver has handled these of what it has seen.
    pub fn acknowledge(&self, bits: u32) {
        if bits & USED_BUFFER != 0 {
            self.used.acknowledge();
        }
        if bits & CONFIG_CHANGED != 0 {
            self.config.acknowledge();
        }
    }

    /// A number that differs after each change of the configuration space.
    pub fn config_generation(&self) -> u32 {
        self.config.raised.load(Ordering::SeqCst)
    }

    /// Nothing is pending any more: the driver has reset the device.
    pub(super) fn clear(&self) {
        for events in [&self.used, &self.config] {
            events.look();
            events.acknowledge();
        }
    }
}

/// A queue as a device gets it: ready, checked by the transport to lie in memory.
#[derive(Debug)]
pub struct VirtioQueue {
    /// The rings.
    pub queue: Queue,
    /// Signalled by the driver's notification. A blocking descriptor; it may be signalled without cause.
    pub kick: EventFd,
}

/// All that a device needs to work; it owns it until it is reset.
pub struct Activation {
    /// The guest's memory.
    pub memory: Memory,
    /// The queues, by index. One that the driver left out is none.
    pub queues: Vec<Option<VirtioQueue>>,
    /// The way to the driver.
    pub interrupt: Arc<Interrupt>,
    /// The features that both sides agreed on.
    pub features: u64,
    /// Called by a device when the guest has broken the rules: the transport sets DEVICE_NEEDS_RESET and tells the
    /// surroundings why.
    pub broken: Arc<dyn Fn(&str) + Send + Sync>,
}

/// A device can't begin.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The driver left out a queue that the device can't do without.
    #[error("queue {0} is not there")]
    QueueMissing(usize),
    /// A queue can't be used.
    #[error("a queue can't be used: {0}")]
    Ring(#[from] RingError),
    /// The host said no.
    #[error("{what}: {source}")]
    Host {
        /// What was attempted.
        what: &'static str,
        /// The host's error.
        source: io::Error,
    },
}

/// Reads from a configuration space; what is beyond its end stays as it is in `data`, zeros.
pub(super) fn read_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    let rest = usize::try_from(offset).ok().and_then(|at| config.get(at..)).unwrap_or_default();
    let count = data.len().min(rest.len());
    data[..count].copy_from_slice(&rest[..count]);
}

/// One virtio device. The transport calls it under its own lock, from CPU threads: nothing here may block for long
/// but `reset` and `close`, which wait for requests in flight.
pub trait VirtioDevice: Send {
    /// The device's number (virtio 1.2, section 5).
    fn id(&self) -> u32;
    /// For messages: "block vda".
    fn name(&self) -> String;
    /// Features that are offered, beside VERSION_1, EVENT_IDX and INDIRECT_DESC, which the transport adds.
    fn features(&self) -> u64;
    /// The largest size of each queue.
    fn queue_sizes(&self) -> &[u16];
    /// The driver reads the configuration space; what is beyond it reads as zeros.
    fn read_config(&self, offset: u64, data: &mut [u8]);
    /// The driver writes there.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    /// The driver is ready (DRIVER_OK). Threads are started here, through [`crate::host::spawn`].
    ///
    /// # Errors
    /// The device is marked broken.
    fn activate(
        &mut self,
        activation: Activation,
        surroundings: &Arc<dyn Surroundings>,
    ) -> Result<(), DeviceError>;
    /// The driver has reset the device: threads end, queues are dropped, requests in flight are finished first.
    fn reset(&mut self);
    /// The VM is over: as `reset`, and what is to be kept is made durable. Nothing of this happens on drop.
    ///
    /// # Errors
    /// What could not be kept.
    fn close(&mut self) -> io::Result<()> {
        self.reset();
        Ok(())
    }
    /// The CPUs have been stopped (`true`) or go on (`false`): a paused device takes no further request and returns when
    /// those in flight are done.
    fn pause(&mut self, _paused: bool) {}
}
