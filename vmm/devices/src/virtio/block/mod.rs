//! virtio-block (virtio 1.2, section 5.2) over a [`Block`] of the overlay crate.
//!
//! - `request`: from a chain of buffers to a checked request.
//! - `service`: the threads that take requests, do them and give them back.
//! - `room`: requests that wait until a full host has room.

mod request;
mod room;
mod service;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use torpor_overlay::Block;
use torpor_vmm_api::RateLimit;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use self::request::{ID_BYTES, MAX_RANGE_SECTORS, MAX_RANGES, MAX_SEGMENT, MAX_SEGMENTS, SECTOR};
use self::room::Room;
use self::service::{Disk, Service};
use super::rate::Limiter;
use super::{Activation, DeviceError, DriverThere, VirtioDevice, ring::Ring};
use crate::host::Surroundings;

/// Entries of the queue.
const QUEUE_SIZE: u16 = 256;
/// Exponent of the physical block in logical ones of 512 bytes: 4 KiB.
const PHYSICAL_BLOCK: u8 = 3;

/// What a block device is made of.
pub struct BlockOptions {
    /// For messages: "vda".
    pub name: String,
    /// The disk. The device is the only one that closes it.
    pub disk: Arc<dyn Block>,
    /// What the guest reads as serial number; cut to 20 bytes.
    pub serial: String,
    /// Writes are refused.
    pub read_only: bool,
    /// Limit, if any.
    pub rate: Option<RateLimit>,
    /// Bytes of which whole ones are given up by a discard: an overlay's cluster.
    pub discard_unit: u32,
    /// How long a request waits for room on a full host before it fails.
    pub patience: Duration,
}

/// Tells the device from outside what happened to its disk. Clones are the same device.
#[derive(Clone, Debug)]
pub struct BlockHandle(DriverThere);

impl BlockHandle {
    /// The disk has another size: the guest is told to look.
    pub fn resized(&self) {
        self.0.config_changed();
    }
}

/// The block device.
pub struct BlockDevice {
    name: String,
    disk: Arc<Disk>,
    read_only: bool,
    rate: Option<RateLimit>,
    discard_unit: u32,
    patience: Duration,
    driver: DriverThere,
    service: Option<Service>,
}

impl std::fmt::Debug for BlockDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("BlockDevice").field("name", &self.name).finish_non_exhaustive()
    }
}

impl BlockDevice {
    /// A device that no driver has found yet.
    pub fn new(options: BlockOptions) -> Self {
        let mut serial = [0; ID_BYTES];
        let count = options.serial.len().min(ID_BYTES);
        serial[..count].copy_from_slice(&options.serial.as_bytes()[..count]);
        Self {
            name: options.name,
            disk: Arc::new(Disk { disk: options.disk, serial, read_only: options.read_only }),
            read_only: options.read_only,
            rate: options.rate,
            discard_unit: options.discard_unit,
            patience: options.patience,
            driver: DriverThere::default(),
            service: None,
        }
    }

    /// The handle.
    pub fn handle(&self) -> BlockHandle {
        BlockHandle(self.driver.clone())
    }

    /// The configuration space (virtio 1.2, section 5.2.4).
    fn config(&self) -> [u8; 60] {
        let mut config = [0; 60];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.disk.disk.size() / SECTOR).to_le_bytes());
        put(8, &MAX_SEGMENT.to_le_bytes()); // size_max
        put(12, &MAX_SEGMENTS.to_le_bytes()); // seg_max
        put(20, &(SECTOR as u32).to_le_bytes()); // blk_size
        put(24, &[PHYSICAL_BLOCK, 0]);
        put(26, &(1u16 << PHYSICAL_BLOCK).to_le_bytes()); // min_io_size
        put(28, &(self.discard_unit / SECTOR as u32).to_le_bytes()); // opt_io_size
        put(34, &1u16.to_le_bytes()); // num_queues
        if !self.read_only {
            put(36, &MAX_RANGE_SECTORS.to_le_bytes());
            put(40, &MAX_RANGES.to_le_bytes());
            put(44, &(self.discard_unit / SECTOR as u32).to_le_bytes());
            put(48, &MAX_RANGE_SECTORS.to_le_bytes());
            put(52, &MAX_RANGES.to_le_bytes());
            put(56, &[1]); // write_zeroes_may_unmap
        }
        config
    }
}

impl VirtioDevice for BlockDevice {
    fn id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn name(&self) -> String {
        format!("block {}", self.name)
    }

    fn features(&self) -> u64 {
        let always = [
            VIRTIO_BLK_F_SIZE_MAX,
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_TOPOLOGY,
            VIRTIO_BLK_F_FLUSH,
        ];
        let writing = [VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES];
        let reading = [VIRTIO_BLK_F_RO];
        let more: &[u32] = if self.read_only { &reading } else { &writing };
        always.iter().chain(more).fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        super::device::read_bytes(&self.config(), offset, data);
    }

    fn activate(
        &mut self,
        mut activation: Activation,
        surroundings: &Arc<dyn Surroundings>,
    ) -> Result<(), DeviceError> {
        let queue =
            activation.queues.first_mut().and_then(Option::take).ok_or(DeviceError::QueueMissing(0))?;
        let ring = Ring::new(&queue.queue, activation.memory.clone(), activation.features)?;
        let limiter = Limiter::new(self.rate, Instant::now());
        self.driver.set(Some(Arc::clone(&activation.interrupt)));
        let room = Room::new(self.name(), self.patience);
        let disk = Arc::clone(&self.disk);
        let service = Service::start(disk, room, ring, queue.kick, &activation, limiter, surroundings);
        self.service =
            Some(service.map_err(|source| DeviceError::Host { what: "starting a thread", source })?);
        Ok(())
    }

    fn reset(&mut self) {
        self.driver.set(None);
        if let Some(service) = self.service.take() {
            service.stop();
        }
    }

    fn close(&mut self) -> io::Result<()> {
        self.reset();
        let flushed = if self.read_only { Ok(()) } else { self.disk.disk.flush() };
        let closed = self.disk.disk.close();
        flushed
            .and(closed)
            .map_err(|error| io::Error::new(error.kind(), format!("closing {}: {error}", self.name)))
    }

    fn pause(&mut self, paused: bool) {
        if let Some(service) = &self.service {
            service.pause(paused);
        }
    }
}
