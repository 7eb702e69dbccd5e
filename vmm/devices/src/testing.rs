//! The driver's side of a virtio device in plain guest memory, without a hypervisor: for tests, fuzz targets and
//! measurements. It does what a good driver does, and on request what a hostile one does.
//!
//! ```ignore
//! let mut driver = Driver::start(Box::new(device));
//! let out = driver.buffer(b"hello");            // in guest memory, for the device to read
//! let input = driver.room(4096);                // for the device to fill
//! let head = driver.add(0, &[out, input]);
//! driver.kick(0);
//! assert_eq!(driver.wait(0), Used { head, length: 4096 });
//! ```
#![allow(clippy::unwrap_used, reason = "a test's helper: what goes wrong here is a wrong test")]

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use std::{io, os::fd::AsFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use torpor_vmm_api::{End, ThreadKind};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::Memory;
use crate::bus::BusDevice;
use crate::host::Surroundings;
use crate::virtio::mmio::{INTERRUPT_ACKNOWLEDGE, NOTIFY, feature, register, status};
use crate::virtio::{Transport, VirtioDevice};

/// How long to wait for what must come, on a slow and busy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// How long to wait for what must not come.
pub const MOMENT: Duration = Duration::from_millis(30);
/// Memory at 0.
pub const LOW_MEMORY: u64 = 16 << 20;
/// Where memory goes on, as in a PC with more than 3 GiB.
pub const HIGH_START: u64 = 4 << 30;
/// Memory from there on.
pub const HIGH_MEMORY: u64 = 2 << 20;

/// Descriptor flags.
pub mod flag {
    /// Another one follows.
    pub const NEXT: u16 = 1;
    /// For the device to write.
    pub const WRITE: u16 = 2;
    /// Names a table.
    pub const INDIRECT: u16 = 4;
}

/// Surroundings that remember what they were told.
#[derive(Default)]
pub struct Host {
    told: Mutex<Told>,
    news: Condvar,
}

/// What the surroundings were told.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Kinds of the threads that were started.
    pub threads: Vec<ThreadKind>,
    /// Their thread ids.
    pub thread_ids: Vec<i32>,
    /// The first end.
    pub end: Option<End>,
    /// Devices that were broken, and why.
    pub broken: Vec<(String, String)>,
    /// Disks that were said to have no room, or room again, in order.
    pub full: Vec<(String, bool)>,
}

impl Surroundings for Host {
    fn enter_thread(&self, kind: ThreadKind) -> io::Result<()> {
        let mut told = self.told.lock().unwrap();
        told.threads.push(kind);
        told.thread_ids.push(nix::unistd::gettid().as_raw());
        Ok(())
    }

    fn end(&self, end: End) {
        self.told.lock().unwrap().end.get_or_insert(end);
        self.news.notify_all();
    }

    fn device_broken(&self, device: &str, reason: &str) {
        self.told.lock().unwrap().broken.push((device.to_owned(), reason.to_owned()));
        self.news.notify_all();
    }

    fn disk_full(&self, device: &str, full: bool) {
        self.told.lock().unwrap().full.push((device.to_owned(), full));
        self.news.notify_all();
    }
}

impl Host {
    /// All that was told so far.
    pub fn told(&self) -> Told {
        self.told.lock().unwrap().clone()
    }

    /// Processor time that all threads have used so far.
    pub fn processor_time(&self) -> Duration {
        let of = |id: &i32| {
            let text = std::fs::read_to_string(format!("/proc/self/task/{id}/schedstat")).unwrap_or_default();
            text.split(' ').next().and_then(|nanoseconds| nanoseconds.parse().ok()).unwrap_or(0)
        };
        Duration::from_nanos(self.told().thread_ids.iter().map(of).sum())
    }

    /// Waits until a disk was said to have no room, or room again. Panics when that takes too long.
    pub fn wait_full(&self, full: bool) {
        let told = self.told.lock().unwrap();
        let is_last = |told: &mut Told| told.full.last().is_none_or(|(_, last)| *last != full);
        let (told, _) = self.news.wait_timeout_while(told, PATIENCE, is_last).unwrap();
        assert_eq!(told.full.last().map(|(_, last)| *last), Some(full), "it was not told");
    }

    /// Waits until a device is broken; the reason. Panics when that takes too long.
    pub fn wait_broken(&self) -> String {
        let told = self.told.lock().unwrap();
        let (told, _) = self.news.wait_timeout_while(told, PATIENCE, |told| told.broken.is_empty()).unwrap();
        told.broken.first().expect("no device was broken").1.clone()
    }
}

/// A buffer in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Guest address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// For the device to fill.
    pub writable: bool,
}

/// A descriptor as it lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawDescriptor {
    /// Guest address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// See [`flag`].
    pub flags: u16,
    /// The next one's index.
    pub next: u16,
}

impl RawDescriptor {
    /// Its 16 bytes.
    pub fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// A request that the device has given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Which.
    pub head: u16,
    /// Bytes that the device has written.
    pub length: u32,
}

/// One queue, as its driver sees it.
#[derive(Debug)]
pub struct DriverQueue {
    /// Entries.
    pub size: u16,
    /// Guest address of the descriptor table.
    pub descriptors: u64,
    /// Of the available ring.
    pub available: u64,
    /// Of the used ring.
    pub used: u64,
    /// Requests made available so far, wrapping.
    pub available_index: u16,
    /// The same, when the device was last kicked.
    kicked_index: u16,
    /// Requests taken back so far, wrapping.
    pub used_index: u16,
    free: Vec<u16>,
    chains: HashMap<u16, Vec<u16>>,
}

/// A driver and its device.
pub struct Driver {
    /// The device's registers.
    pub transport: Arc<Transport>,
    /// Guest memory: [`LOW_MEMORY`] at 0 and [`HIGH_MEMORY`] at [`HIGH_START`].
    pub memory: Memory,
    /// What the device told the process.
    pub host: Arc<Host>,
    /// Features agreed on.
    pub features: u64,
    /// The queues.
    pub queues: Vec<DriverQueue>,
    line: EventFd,
    next_address: u64,
}

impl Driver {
    /// A device whose driver has done nothing yet.
    pub fn new(device: Box<dyn VirtioDevice>) -> Self {
        let ranges =
            [(GuestAddress(0), LOW_MEMORY as usize), (GuestAddress(HIGH_START), HIGH_MEMORY as usize)];
        let memory: Memory = GuestMemoryMmap::from_ranges(&ranges).unwrap();
        let host = Arc::new(Host::default());
        let line = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).unwrap();
        let surroundings: Arc<dyn Surroundings> = host.clone();
        let transport =
            Transport::new(device, memory.clone(), line.try_clone().unwrap(), surroundings).unwrap();
        Self {
            transport: Arc::new(transport),
            memory,
            host,
            features: 0,
            queues: Vec::new(),
            line,
            next_address: 0x1000,
        }
    }

    /// A device brought up with all features that it offers.
    pub fn start(device: Box<dyn VirtioDevice>) -> Self {
        Self::start_with(device, u64::MAX)
    }

    /// A device brought up with those of these features that it offers (and VERSION_1).
    pub fn start_with(device: Box<dyn VirtioDevice>, features: u64) -> Self {
        let mut driver = Self::new(device);
        driver.bring_up(features);
        driver
    }

    /// The whole way from reset to DRIVER_OK, with queues as large as they may be.
    pub fn bring_up(&mut self, features: u64) {
        self.negotiate(features);
        for index in 0.. {
            self.set(register::QUEUE_SELECT, index);
            let max = self.get(register::QUEUE_SIZE_MAX);
            if max == 0 {
                break;
            }
            self.set_up_queue(index, max as u16);
        }
        self.add_status(status::DRIVER_OK);
    }

    /// Reset and features; returns those agreed on. Panics when the device doesn't take them.
    pub fn negotiate(&mut self, wanted: u64) -> u64 {
        self.reset();
        self.add_status(status::ACKNOWLEDGE);
        self.add_status(status::DRIVER);
        self.features = self.offered() & (wanted | feature::VERSION_1);
        self.set_features(self.features);
        self.add_status(status::FEATURES_OK);
        assert_ne!(self.status() & status::FEATURES_OK, 0, "features {:#x} were refused", self.features);
        self.features
    }

    /// Resets the device and forgets the queues and all buffers.
    pub fn reset(&mut self) {
        self.set(register::STATUS, 0);
        self.queues.clear();
        self.next_address = 0x1000;
    }

    /// The features that the device offers.
    pub fn offered(&self) -> u64 {
        self.set(register::DEVICE_FEATURES_SELECT, 0);
        let low = self.get(register::DEVICE_FEATURES);
        self.set(register::DEVICE_FEATURES_SELECT, 1);
        u64::from(self.get(register::DEVICE_FEATURES)) << 32 | u64::from(low)
    }

    /// Writes the driver's features.
    pub fn set_features(&self, features: u64) {
        for (select, half) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.set(register::DRIVER_FEATURES_SELECT, select);
            self.set(register::DRIVER_FEATURES, half);
        }
    }

    /// The device's status.
    pub fn status(&self) -> u32 {
        self.get(register::STATUS)
    }

    /// Sets a status bit beside those that are set.
    pub fn add_status(&self, bit: u32) {
        self.set(register::STATUS, self.status() | bit);
    }

    /// Makes a queue of a size and tells the device; queues are made in order.
    pub fn set_up_queue(&mut self, index: u32, size: u16) {
        let entries = u64::from(size);
        let queue = DriverQueue {
            size,
            descriptors: self.allocate(16 * entries, 16),
            available: self.allocate(6 + 2 * entries, 2),
            used: self.allocate(6 + 8 * entries, 4),
            available_index: 0,
            kicked_index: 0,
            used_index: 0,
            free: (0..size).rev().collect(),
            chains: HashMap::new(),
        };
        let parts = [queue.descriptors, queue.available, queue.used];
        for (address, length) in [(queue.available, 6 + 2 * entries), (queue.used, 6 + 8 * entries)] {
            self.write(address, &vec![0; length as usize]);
        }
        self.set(register::QUEUE_SELECT, index);
        self.set(register::QUEUE_SIZE, u32::from(size));
        let registers = [register::DESCRIPTORS_LOW, register::AVAILABLE_LOW, register::USED_LOW];
        for (low, address) in registers.into_iter().zip(parts) {
            self.set(low, address as u32);
            self.set(low + 4, (address >> 32) as u32);
        }
        self.set(register::QUEUE_READY, 1);
        self.queues.push(queue);
    }

    /// Reads a register.
    pub fn get(&self, register: u64) -> u32 {
        let mut data = [0; 4];
        self.transport.read(register, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes a register.
    pub fn set(&self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }

    /// Reads the configuration space.
    pub fn config<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.transport.read(register::CONFIG + offset, &mut data);
        data
    }

    /// Guest memory that nothing else uses, until the next [`Driver::reset`] or [`Driver::release`].
    pub fn allocate(&mut self, length: u64, alignment: u64) -> u64 {
        let address = self.next_address.next_multiple_of(alignment);
        self.next_address = address + length;
        assert!(self.next_address <= LOW_MEMORY, "guest memory is used up");
        address
    }

    /// Where memory is free from now on, for [`Driver::release`].
    pub fn mark(&self) -> u64 {
        self.next_address
    }

    /// Frees what was allocated since the mark was taken.
    pub fn release(&mut self, mark: u64) {
        self.next_address = mark;
    }

    /// A buffer with content, for the device to read.
    pub fn buffer(&mut self, content: &[u8]) -> Buffer {
        let address = self.allocate(content.len() as u64, 16);
        self.write(address, content);
        Buffer { address, length: content.len() as u32, writable: false }
    }

    /// A buffer for the device to fill, all 0xee.
    pub fn room(&mut self, length: u32) -> Buffer {
        let address = self.allocate(u64::from(length), 16);
        self.write(address, &vec![0xee; length as usize]);
        Buffer { address, length, writable: true }
    }

    /// What a buffer holds.
    pub fn content(&self, buffer: Buffer) -> Vec<u8> {
        self.read(buffer.address, buffer.length as usize)
    }

    /// Reads guest memory.
    pub fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        self.memory.read_slice(&mut data, GuestAddress(address)).unwrap();
        data
    }

    /// Writes guest memory.
    pub fn write(&self, address: u64, data: &[u8]) {
        self.memory.write_slice(data, GuestAddress(address)).unwrap();
    }

    /// Makes a request available; its head. Panics when the ring is full.
    pub fn add(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        let free = &mut self.queues[queue].free;
        assert!(free.len() >= buffers.len(), "the ring is full");
        let ids: Vec<u16> = buffers.iter().map(|_| free.pop().unwrap()).collect();
        for (at, buffer) in buffers.iter().enumerate() {
            let next = ids.get(at + 1);
            self.set_descriptor(queue, ids[at], raw(buffer, next.copied()));
        }
        self.queues[queue].chains.insert(ids[0], ids.clone());
        self.publish(queue, ids[0]);
        ids[0]
    }

    /// As [`Driver::add`], through an indirect table.
    pub fn add_indirect(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        let table = self.allocate(16 * buffers.len() as u64, 16);
        for (at, buffer) in buffers.iter().enumerate() {
            let next = (at + 1 < buffers.len()).then_some(at as u16 + 1);
            self.write(table + 16 * at as u64, &raw(buffer, next).bytes());
        }
        let head = self.queues[queue].free.pop().expect("the ring is full");
        let length = 16 * buffers.len() as u32;
        self.set_descriptor(
            queue,
            head,
            RawDescriptor { address: table, length, flags: flag::INDIRECT, next: 0 },
        );
        self.queues[queue].chains.insert(head, vec![head]);
        self.publish(queue, head);
        head
    }

    /// Writes an entry of the descriptor table.
    pub fn set_descriptor(&self, queue: usize, index: u16, descriptor: RawDescriptor) {
        self.write(self.queues[queue].descriptors + 16 * u64::from(index), &descriptor.bytes());
    }

    /// Puts a head into the available ring, whatever it is.
    pub fn publish(&mut self, queue: usize, head: u16) {
        let at = &mut self.queues[queue];
        let slot = u64::from(at.available_index % at.size);
        let address = at.available + 4 + 2 * slot;
        let next = at.available_index.wrapping_add(1);
        self.write(address, &head.to_le_bytes());
        self.set_available_index(queue, next);
    }

    /// Sets the available index, whatever it is.
    pub fn set_available_index(&mut self, queue: usize, index: u16) {
        self.queues[queue].available_index = index;
        self.store(self.queues[queue].available + 2, index);
    }

    /// Asks the device for no interrupts (without EVENT_IDX), or for them again.
    pub fn suppress_interrupts(&self, queue: usize, suppress: bool) {
        self.store(self.queues[queue].available, u16::from(suppress));
    }

    /// Kicks the device unless it doesn't want to be; true when it was kicked.
    pub fn kick(&mut self, queue: usize) -> bool {
        std::sync::atomic::fence(Ordering::SeqCst);
        let at = &mut self.queues[queue];
        let (old, new) = (at.kicked_index, at.available_index);
        at.kicked_index = new;
        let at = &self.queues[queue];
        let wanted = if self.features & feature::EVENT_INDEX != 0 {
            let event = self.load(at.used + 4 + 8 * u64::from(at.size));
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.load(at.used) & 1 == 0
        };
        if wanted {
            self.kick_anyway(queue as u32);
        }
        wanted
    }

    /// Writes to the notification register, whatever the device wants.
    pub fn kick_anyway(&self, queue: u32) {
        self.set(NOTIFY, queue);
    }

    /// The next request that the device has given back, if there is one.
    pub fn take_used(&mut self, queue: usize) -> Option<Used> {
        let at = &self.queues[queue];
        if self.load(at.used + 2) == at.used_index {
            return None;
        }
        let element = self.read(at.used + 4 + 8 * u64::from(at.used_index % at.size), 8);
        let at = &mut self.queues[queue];
        at.used_index = at.used_index.wrapping_add(1);
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        let (head, length) = (word(&element[..4]) as u16, word(&element[4..]));
        at.free.extend(at.chains.remove(&head).into_iter().flatten());
        Some(Used { head, length })
    }

    /// Waits for a request to come back, by interrupt as a kernel does. Panics when that takes too long.
    pub fn wait(&mut self, queue: usize) -> Used {
        self.wait_for(queue, PATIENCE).unwrap_or_else(|| {
            panic!("nothing came back on queue {queue}; status {:#x}, {:?}", self.status(), self.host.told())
        })
    }

    /// As [`Driver::wait`], with a time limit.
    pub fn wait_for(&mut self, queue: usize, limit: Duration) -> Option<Used> {
        let end = Instant::now() + limit;
        loop {
            if let Some(used) = self.take_used(queue) {
                return Some(used);
            }
            self.want_interrupt(queue);
            if let Some(used) = self.take_used(queue) {
                return Some(used);
            }
            // A signal may end it early.
            self.wait_interrupt(end.checked_duration_since(Instant::now())?);
        }
    }

    /// Sets the event index so that the next request that comes back interrupts.
    pub fn want_interrupt(&self, queue: usize) {
        let at = &self.queues[queue];
        if self.features & feature::EVENT_INDEX != 0 {
            self.store(at.available + 4 + 2 * u64::from(at.size), at.used_index);
            std::sync::atomic::fence(Ordering::SeqCst);
        }
    }

    /// Waits for an interrupt and acknowledges it.
    pub fn wait_interrupt(&self, limit: Duration) -> bool {
        let timeout = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        // SAFETY: the descriptor is open as long as `self.line` is.
        let line =
            unsafe { std::os::fd::BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(&self.line)) };
        let _ = poll(&mut [PollFd::new(line.as_fd(), PollFlags::POLLIN)], timeout);
        let interrupted = self.line.read().is_ok();
        if interrupted {
            let events = self.get(register::INTERRUPT_STATUS);
            self.set(INTERRUPT_ACKNOWLEDGE, events);
        }
        interrupted
    }

    /// Waits until the device is broken or has given everything back that was made available, but no longer than `limit`.
    pub fn settle(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let done = |queue: &DriverQueue| self.load(queue.used + 2) == queue.available_index;
        while Instant::now() < end && self.host.told().broken.is_empty() && !self.queues.iter().all(done) {
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Adds a request, kicks, and waits until it comes back; the number of bytes that the device has written.
    pub fn request(&mut self, queue: usize, buffers: &[Buffer]) -> u32 {
        let head = self.add(queue, buffers);
        self.kick(queue);
        let used = self.wait(queue);
        assert_eq!(used.head, head);
        used.length
    }

    fn load(&self, address: u64) -> u16 {
        self.memory.load(GuestAddress(address), Ordering::SeqCst).unwrap()
    }

    fn store(&self, address: u64, value: u16) {
        self.memory.store(value, GuestAddress(address), Ordering::SeqCst).unwrap();
    }
}

impl Drop for Driver {
    /// Ends the device's threads.
    fn drop(&mut self) {
        self.set(register::STATUS, 0);
    }
}

fn raw(buffer: &Buffer, next: Option<u16>) -> RawDescriptor {
    let write = if buffer.writable { flag::WRITE } else { 0 };
    let more = if next.is_some() { flag::NEXT } else { 0 };
    RawDescriptor {
        address: buffer.address,
        length: buffer.length,
        flags: write | more,
        next: next.unwrap_or(0),
    }
}
