//! The transport: virtio over MMIO, version 2 (virtio 1.2, section 4.2), between a bus and one device.
//!
//! It holds what the driver says before it is ready, checks it, and hands the queues to the device. Whatever the driver
//! writes in whatever order changes this state or is ignored; nothing here fails.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

use super::ring;
use super::{Activation, Interrupt, VirtioDevice, VirtioQueue};
use crate::Memory;
use crate::bus::BusDevice;
use crate::host::Surroundings;

/// Bytes of a device's register window.
pub const WINDOW: u64 = 0x1000;

/// Offset of the register to which the driver writes a queue's index, as four bytes, to kick it. A hypervisor that can
/// turns these writes into signals on [`Transport::kicks`]; those that reach the transport do the same.
pub const NOTIFY: u64 = 0x050;

/// Offset of the interrupt acknowledge register. Writes to it may be delivered late, but before any later access.
pub const INTERRUPT_ACKNOWLEDGE: u64 = 0x064;

/// Features of the ring and the transport (virtio 1.2, section 6).
pub mod feature {
    /// A descriptor may name a table of descriptors.
    pub const INDIRECT_DESCRIPTORS: u64 = 1 << 28;
    /// Kicks and interrupts are suppressed by index.
    pub const EVENT_INDEX: u64 = 1 << 29;
    /// Not a legacy device.
    pub const VERSION_1: u64 = 1 << 32;
    /// All that the transport adds to a device's own.
    pub const TRANSPORT: u64 = INDIRECT_DESCRIPTORS | EVENT_INDEX | VERSION_1;
}

/// Status bits (virtio 1.2, section 2.1).
pub mod status {
    /// The driver has seen the device.
    pub const ACKNOWLEDGE: u32 = 1;
    /// It knows how to drive it.
    pub const DRIVER: u32 = 2;
    /// It is ready.
    pub const DRIVER_OK: u32 = 4;
    /// Both sides have agreed on features.
    pub const FEATURES_OK: u32 = 8;
    /// The device can't go on.
    pub const NEEDS_RESET: u32 = 64;
    /// The driver has given up.
    pub const FAILED: u32 = 128;
}

/// Offsets of the registers (virtio 1.2, table 4.1).
pub mod register {
    #![allow(missing_docs, reason = "the names are the standard's")]

    pub const MAGIC: u64 = 0x000;
    pub const VERSION: u64 = 0x004;
    pub const DEVICE_ID: u64 = 0x008;
    pub const VENDOR_ID: u64 = 0x00c;
    pub const DEVICE_FEATURES: u64 = 0x010;
    pub const DEVICE_FEATURES_SELECT: u64 = 0x014;
    pub const DRIVER_FEATURES: u64 = 0x020;
    pub const DRIVER_FEATURES_SELECT: u64 = 0x024;
    pub const QUEUE_SELECT: u64 = 0x030;
    pub const QUEUE_SIZE_MAX: u64 = 0x034;
    pub const QUEUE_SIZE: u64 = 0x038;
    pub const QUEUE_READY: u64 = 0x044;
    pub const INTERRUPT_STATUS: u64 = 0x060;
    pub const STATUS: u64 = 0x070;
    pub const DESCRIPTORS_LOW: u64 = 0x080;
    pub const DESCRIPTORS_HIGH: u64 = 0x084;
    pub const AVAILABLE_LOW: u64 = 0x090;
    pub const AVAILABLE_HIGH: u64 = 0x094;
    pub const USED_LOW: u64 = 0x0a0;
    pub const USED_HIGH: u64 = 0x0a4;
    /// Length and place of a shared memory region, which no device here has.
    pub const SHARED_MEMORY: std::ops::RangeInclusive<u64> = 0x0b0..=0x0bc;
    pub const CONFIG_GENERATION: u64 = 0x0fc;
    pub const CONFIG: u64 = 0x100;
}

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
/// Any number will do: drivers don't look at it.
const VENDOR: u32 = 0x7052_7054;

/// One device in its register window.
pub struct Transport {
    inner: Mutex<Inner>,
    state: Arc<State>,
    kicks: Vec<EventFd>,
}

impl std::fmt::Debug for Transport {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Transport").field("device", &self.state.name).finish_non_exhaustive()
    }
}

/// What devices' threads reach as well. Its lock is never held while a device is called.
struct State {
    name: String,
    status: Mutex<Status>,
    interrupt: Arc<Interrupt>,
    surroundings: Arc<dyn Surroundings>,
}

#[derive(Default)]
struct Status {
    bits: u32,
    /// Grows with each reset, so that late words of an earlier life are dropped.
    life: u64,
}

/// What CPUs reach, one at a time.
struct Inner {
    device: Box<dyn VirtioDevice>,
    memory: Memory,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    queues: Vec<QueueSetup>,
    /// The device holds queues.
    active: bool,
    /// The VM is over.
    closed: bool,
}

/// What the driver says of a queue before it is ready.
#[derive(Clone, Copy, Debug, Default)]
struct QueueSetup {
    size: u32,
    descriptors: u64,
    available: u64,
    used: u64,
    ready: bool,
}

/// A lock whose holder panicked is as good as any: all state is valid at every moment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Marks the device broken, unless it already is, or was reset since `life`.
    fn broken(&self, life: Option<u64>, reason: &str) {
        let running = {
            let mut status = lock(&self.status);
            let late = life.is_some_and(|life| life != status.life);
            if late || status.bits & status::NEEDS_RESET != 0 {
                return;
            }
            status.bits |= status::NEEDS_RESET;
            status.bits & status::DRIVER_OK != 0
        };
        if running {
            self.interrupt.config_changed();
        }
        self.surroundings.device_broken(&self.name, reason);
    }
}

impl Transport {
    /// A device before its driver has come.
    ///
    /// # Errors
    /// No eventfd can be made for a queue.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: Memory,
        line: EventFd,
        surroundings: Arc<dyn Surroundings>,
    ) -> io::Result<Self> {
        let queues = vec![QueueSetup::default(); device.queue_sizes().len()];
        let kicks = queues.iter().map(|_| EventFd::new(EFD_CLOEXEC)).collect::<io::Result<_>>()?;
        let interrupt = Interrupt::new(line);
        let state = State { name: device.name(), status: Mutex::default(), interrupt, surroundings };
        let inner = Inner {
            device,
            memory,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            queues,
            active: false,
            closed: false,
        };
        Ok(Self { inner: Mutex::new(inner), state: Arc::new(state), kicks })
    }

    /// The queues' kicks, by index: what a write of the index to [`NOTIFY`] signals.
    pub fn kicks(&self) -> &[EventFd] {
        &self.kicks
    }

    /// The device's name, for messages.
    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// The CPUs have been stopped or go on: see [`VirtioDevice::pause`].
    pub fn pause(&self, paused: bool) {
        let mut inner = lock(&self.inner);
        if !inner.closed {
            inner.device.pause(paused);
        }
    }

    /// The VM is over: see [`VirtioDevice::close`]. Whatever the driver writes from now on is ignored.
    ///
    /// # Errors
    /// What the device could not keep.
    pub fn close(&self) -> io::Result<()> {
        let mut inner = lock(&self.inner);
        if std::mem::replace(&mut inner.closed, true) {
            return Ok(());
        }
        inner.active = false;
        inner.device.close()
    }

    fn read_register(&self, offset: u64) -> u32 {
        match offset {
            register::MAGIC => MAGIC,
            register::VERSION => 2,
            register::VENDOR_ID => VENDOR,
            register::INTERRUPT_STATUS => self.state.interrupt.status(),
            register::STATUS => lock(&self.state.status).bits,
            register::CONFIG_GENERATION => self.state.interrupt.config_generation(),
            _ if register::SHARED_MEMORY.contains(&offset) => u32::MAX,
            _ => lock(&self.inner).read_register(offset),
        }
    }

    fn write_register(&self, offset: u64, value: u32) {
        match offset {
            NOTIFY => self.kick(value),
            INTERRUPT_ACKNOWLEDGE => self.state.interrupt.acknowledge(value),
            register::STATUS => self.write_status(value),
            register::QUEUE_READY => self.write_ready(value),
            _ => {
                let mut inner = lock(&self.inner);
                let bits = lock(&self.state.status).bits;
                inner.write_register(offset, value, bits);
            }
        }
    }

    fn kick(&self, queue: u32) {
        if let Some(kick) = self.kicks.get(queue as usize) {
            // It would fail after 2^64 - 2 kicks that nobody took.
            let _ = kick.write(1);
        }
    }

    /// The driver sets status bits, or resets the device with 0. Bits are taken in the order of the standard's list; one
    /// whose time hasn't come is ignored, and none is taken back.
    fn write_status(&self, value: u32) {
        let mut inner = lock(&self.inner);
        if inner.closed {
            return;
        }
        if value == 0 {
            return self.reset(&mut inner);
        }
        let ready = {
            let mut status = lock(&self.state.status);
            let before = status.bits;
            let steps = [
                (status::ACKNOWLEDGE, 0),
                (status::DRIVER, status::ACKNOWLEDGE),
                (status::FEATURES_OK, status::DRIVER),
                (status::DRIVER_OK, status::FEATURES_OK),
            ];
            for (bit, needs) in steps {
                let fits = bit != status::FEATURES_OK || inner.features_fit();
                if value & bit != 0 && status.bits & needs == needs && fits {
                    status.bits |= bit;
                }
            }
            status.bits |= value & status::FAILED;
            let news = status.bits & !before;
            let usable = status.bits & (status::NEEDS_RESET | status::FAILED) == 0;
            (news & status::DRIVER_OK != 0 && usable).then_some(status.life)
        };
        if let Some(life) = ready {
            self.activate(&mut inner, life);
        }
    }

    fn activate(&self, inner: &mut Inner, life: u64) {
        let state = Arc::clone(&self.state);
        let broken = Arc::new(move |reason: &str| state.broken(Some(life), reason));
        let activated = inner.hand_over(&self.kicks).map_err(super::DeviceError::from).and_then(|queues| {
            let activation = Activation {
                memory: inner.memory.clone(),
                queues,
                interrupt: Arc::clone(&self.state.interrupt),
                features: inner.driver_features,
                broken,
            };
            inner.active = true;
            inner.device.activate(activation, &self.state.surroundings)
        });
        if let Err(error) = activated {
            self.state.broken(Some(life), &format!("it can't be started: {error}"));
        }
    }

    fn reset(&self, inner: &mut Inner) {
        if std::mem::replace(&mut inner.active, false) {
            inner.device.reset();
        }
        inner.queues.fill(QueueSetup::default());
        inner.driver_features = 0;
        inner.device_features_select = 0;
        inner.driver_features_select = 0;
        inner.queue_select = 0;
        let mut status = lock(&self.state.status);
        status.bits = 0;
        status.life += 1;
        self.state.interrupt.clear();
    }

    fn write_ready(&self, value: u32) {
        let mut inner = lock(&self.inner);
        let (bits, life) = {
            let status = lock(&self.state.status);
            (status.bits, status.life)
        };
        let select = inner.queue_select as usize;
        let Some(queue) = inner.queues.get(select).copied() else { return };
        if value == 0 && queue.ready {
            // One queue can't be taken from a device: all stops.
            inner.queues[select].ready = false;
            if std::mem::replace(&mut inner.active, false) {
                inner.device.reset();
                self.state.broken(Some(life), &format!("queue {select} was taken away in use"));
            }
        } else if value == 1 && !queue.ready && configurable(bits) {
            match inner.check(select, &queue) {
                Ok(()) => inner.queues[select].ready = true,
                Err(reason) => self.state.broken(Some(life), &format!("queue {select}: {reason}")),
            }
        }
    }
}

/// Queues can be set up: features are agreed on, the driver isn't ready.
fn configurable(bits: u32) -> bool {
    bits & status::FEATURES_OK != 0 && bits & (status::DRIVER_OK | status::NEEDS_RESET) == 0
}

impl Inner {
    fn offered(&self) -> u64 {
        self.device.features() | feature::TRANSPORT
    }

    fn features_fit(&self) -> bool {
        self.driver_features & feature::VERSION_1 != 0 && self.driver_features & !self.offered() == 0
    }

    fn selected(&self) -> Option<(&QueueSetup, u16)> {
        let select = self.queue_select as usize;
        Some((self.queues.get(select)?, *self.device.queue_sizes().get(select)?))
    }

    fn read_register(&self, offset: u64) -> u32 {
        match offset {
            register::DEVICE_ID => self.device.id(),
            register::DEVICE_FEATURES => match self.device_features_select {
                0 => self.offered() as u32,
                1 => (self.offered() >> 32) as u32,
                _ => 0,
            },
            register::QUEUE_SIZE_MAX => self.selected().map_or(0, |(_, max)| u32::from(max)),
            register::QUEUE_READY => self.selected().map_or(0, |(queue, _)| u32::from(queue.ready)),
            _ => 0,
        }
    }

    fn write_register(&mut self, offset: u64, value: u32, bits: u32) {
        match offset {
            register::DEVICE_FEATURES_SELECT => self.device_features_select = value,
            register::DRIVER_FEATURES_SELECT => self.driver_features_select = value,
            register::DRIVER_FEATURES => self.write_features(value, bits),
            register::QUEUE_SELECT => self.queue_select = value,
            _ if configurable(bits) => self.write_queue(offset, value),
            _ => {}
        }
    }

    fn write_features(&mut self, value: u32, bits: u32) {
        if bits & status::DRIVER == 0 || bits & status::FEATURES_OK != 0 {
            return;
        }
        let (low, high) = (self.driver_features as u32, (self.driver_features >> 32) as u32);
        self.driver_features = match self.driver_features_select {
            0 => join(value, high),
            1 => join(low, value),
            _ => return,
        };
    }

    fn write_queue(&mut self, offset: u64, value: u32) {
        let Some(queue) = self.queues.get_mut(self.queue_select as usize) else { return };
        if queue.ready {
            return;
        }
        let low = |address: u64| join(value, (address >> 32) as u32);
        let high = |address: u64| join(address as u32, value);
        match offset {
            register::QUEUE_SIZE => queue.size = value,
            register::DESCRIPTORS_LOW => queue.descriptors = low(queue.descriptors),
            register::DESCRIPTORS_HIGH => queue.descriptors = high(queue.descriptors),
            register::AVAILABLE_LOW => queue.available = low(queue.available),
            register::AVAILABLE_HIGH => queue.available = high(queue.available),
            register::USED_LOW => queue.used = low(queue.used),
            register::USED_HIGH => queue.used = high(queue.used),
            _ => {}
        }
    }

    /// What is wrong with a queue that the driver calls ready.
    fn check(&self, index: usize, queue: &QueueSetup) -> Result<(), String> {
        let max = self.device.queue_sizes().get(index).copied().unwrap_or(0);
        let size = queue.size;
        if !size.is_power_of_two() || size > u32::from(max) {
            return Err(format!("its size {size} is not a power of two up to {max}"));
        }
        for (what, address, length, alignment) in
            ring::areas(size, queue.descriptors, queue.available, queue.used)
        {
            if !address.is_multiple_of(alignment) {
                return Err(format!("its {what} at {address:#x} is not aligned to {alignment}"));
            }
            if !ring::is_in_memory(&self.memory, address, length) {
                return Err(format!("its {what} of {length} bytes at {address:#x} is not inside memory"));
            }
        }
        Ok(())
    }

    /// The queues as the device gets them.
    fn hand_over(&self, kicks: &[EventFd]) -> Result<Vec<Option<VirtioQueue>>, HandOver> {
        let event_index = self.driver_features & feature::EVENT_INDEX != 0;
        let all = self.queues.iter().zip(self.device.queue_sizes()).zip(kicks);
        all.map(|((setup, max), kick)| {
            if !setup.ready {
                return Ok(None);
            }
            let mut queue = Queue::new(*max).map_err(|error| HandOver(io::Error::other(error)))?;
            queue.set_size(setup.size as u16);
            let halves = |address: u64| (Some(address as u32), Some((address >> 32) as u32));
            let (low, high) = halves(setup.descriptors);
            queue.set_desc_table_address(low, high);
            let (low, high) = halves(setup.available);
            queue.set_avail_ring_address(low, high);
            let (low, high) = halves(setup.used);
            queue.set_used_ring_address(low, high);
            queue.set_event_idx(event_index);
            queue.set_ready(true);
            Ok(Some(VirtioQueue { queue, kick: kick.try_clone().map_err(HandOver)? }))
        })
        .collect()
    }
}

/// Why queues can't be handed over.
struct HandOver(io::Error);

impl From<HandOver> for super::DeviceError {
    fn from(error: HandOver) -> Self {
        Self::Host { what: "handing the queues over", source: error.0 }
    }
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

impl BusDevice for Transport {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(at) = offset.checked_sub(register::CONFIG) {
            lock(&self.inner).device.read_config(at, data);
        } else if let Some(value) = word(offset, data) {
            value.copy_from_slice(&self.read_register(offset).to_le_bytes());
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(at) = offset.checked_sub(register::CONFIG) {
            let mut inner = lock(&self.inner);
            if !inner.closed {
                inner.device.write_config(at, data);
            }
        } else if let (true, Ok(bytes)) = (offset.is_multiple_of(4), data.try_into()) {
            self.write_register(offset, u32::from_le_bytes(bytes));
        }
    }
}

/// The four bytes of an access to a register; none when it has another width or place.
fn word(offset: u64, data: &mut [u8]) -> Option<&mut [u8; 4]> {
    data.try_into().ok().filter(|_| offset.is_multiple_of(4))
}

#[cfg(test)]
#[path = "mmio_tests.rs"]
mod tests;
