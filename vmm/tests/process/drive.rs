//! Steps by which the listed guest drives virtio devices (virtio 1.2, sections 2.7 and 4.2).

use crate::guest::Step;

/// The first device's registers, and the distance to the next ones.
const MMIO: u32 = 0xd000_0000;
const MMIO_BYTES: u32 = 0x1000;
/// The first device's memory, and the distance to the next one's.
const MEMORY: u32 = 0x20_0000;
const MEMORY_BYTES: u32 = 0x4_0000;
/// Each queue's rings, at the beginning of its device's memory.
const QUEUE_BYTES: u32 = 0x1000;
const AVAILABLE: u32 = 0x400;
const USED: u32 = 0x800;
/// Buffers lie behind the rings.
const BUFFERS: u32 = 0x8000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Part of a request: bytes for the device, or room for its answer.
pub enum Part {
    Give(Vec<u8>),
    Take(u32),
    /// Memory that lies there already, at an address, of a length; for the device to write or to read.
    At(u32, u32, bool),
}

/// A device's driver, written down ahead of time.
pub struct Driver {
    registers: u32,
    memory: u32,
    size: u32,
    buffers: u32,
    queues: Vec<Queue>,
    pub steps: Vec<Step>,
    pieces: Vec<(u32, Vec<u8>)>,
}

#[derive(Default)]
struct Queue {
    descriptors: Vec<u8>,
    /// Heads, in the order in which they are made available.
    heads: Vec<u16>,
}

impl Driver {
    /// Of the device at that place, with so many queues of that size.
    pub fn new(place: u32, queues: usize, size: u32) -> Self {
        let memory = MEMORY + place * MEMORY_BYTES;
        Self {
            registers: MMIO + place * MMIO_BYTES,
            memory,
            size,
            buffers: memory + BUFFERS,
            queues: (0..queues).map(|_| Queue::default()).collect(),
            steps: Vec::new(),
            pieces: Vec::new(),
        }
    }

    fn ring(&self, queue: usize) -> u32 {
        self.memory + queue as u32 * QUEUE_BYTES
    }

    fn set(&mut self, register: u32, value: u32) {
        self.steps.push(Step::Write(self.registers + register, value));
    }

    /// Reset, features (the first 32), queues, ready.
    pub fn begin(&mut self, features: u32) {
        for status in [0, 1, 3] {
            self.set(0x70, status);
        }
        for (select, value) in [(0, features), (1, 1)] {
            self.set(0x24, select);
            self.set(0x20, value);
        }
        self.set(0x70, 11);
        for queue in 0..self.queues.len() {
            let ring = self.ring(queue);
            let values = [
                (0x30, queue as u32),
                (0x38, self.size),
                (0x80, ring),
                (0x84, 0),
                (0x90, ring + AVAILABLE),
                (0x94, 0),
                (0xa0, ring + USED),
                (0xa4, 0),
                (0x44, 1),
            ];
            values.into_iter().for_each(|(register, value)| self.set(register, value));
        }
        self.set(0x70, 15);
    }

    /// The driver lets go of the device.
    pub fn reset(&mut self) {
        self.set(0x70, 0);
    }

    /// Writes a request down; it is made available by [`Driver::offer`]. Returns where its last part is.
    pub fn request(&mut self, queue: usize, parts: &[Part]) -> u32 {
        let first = (self.queues[queue].descriptors.len() / 16) as u16;
        self.queues[queue].heads.push(first);
        let mut last = 0;
        for (place, part) in parts.iter().enumerate() {
            last = self.buffers;
            let (length, mut flags) = match part {
                Part::Give(bytes) => {
                    self.pieces.push((self.buffers, bytes.clone()));
                    (bytes.len() as u32, 0)
                }
                Part::Take(length) => (*length, WRITE),
                Part::At(address, length, write) => {
                    last = *address;
                    (*length, if *write { WRITE } else { 0 })
                }
            };
            let next = if place + 1 < parts.len() { first + place as u16 + 1 } else { 0 };
            flags |= if next > 0 { NEXT } else { 0 };
            let descriptors = &mut self.queues[queue].descriptors;
            descriptors.extend(u64::from(last).to_le_bytes());
            descriptors.extend(length.to_le_bytes());
            descriptors.extend(flags.to_le_bytes());
            descriptors.extend(next.to_le_bytes());
            if !matches!(part, Part::At(..)) {
                self.buffers += length.next_multiple_of(16);
            }
        }
        last
    }

    /// Makes the first `count` requests available and kicks.
    pub fn offer(&mut self, queue: usize, count: u32) {
        // Flags are 0, the index is in the upper half.
        self.steps.push(Step::Write(self.ring(queue) + AVAILABLE, count << 16));
        self.set(0x50, queue as u32);
    }

    /// Until the device has used so many, and acknowledges its interrupt.
    pub fn wait(&mut self, queue: usize, count: u32) {
        self.steps.push(Step::WaitBits(self.ring(queue) + USED, count << 16, 0xffff_0000));
        self.set(0x64, 1);
    }

    /// The used ring is empty again, for a driver that begins anew.
    pub fn forget(&mut self) {
        for queue in 0..self.queues.len() {
            self.steps.push(Step::Write(self.ring(queue) + USED, 0));
            self.steps.push(Step::Write(self.ring(queue) + AVAILABLE, 0));
        }
    }

    /// What must be in memory at the start.
    pub fn memory(&self) -> Vec<(u32, Vec<u8>)> {
        let mut pieces = self.pieces.clone();
        for (number, queue) in self.queues.iter().enumerate() {
            let mut available = vec![0; 4];
            available.extend(queue.heads.iter().flat_map(|head| head.to_le_bytes()));
            pieces.push((self.ring(number), queue.descriptors.clone()));
            pieces.push((self.ring(number) + AVAILABLE, available));
        }
        pieces.retain(|(_, bytes)| !bytes.is_empty());
        pieces
    }
}

/// A block request: type, sector, data.
pub fn block(kind: u32, sector: u64, data: impl IntoIterator<Item = Part>) -> Vec<Part> {
    let header = [kind.to_le_bytes().as_slice(), &[0; 4], &sector.to_le_bytes()].concat();
    let mut parts = vec![Part::Give(header)];
    parts.extend(data);
    parts.push(Part::Take(1));
    parts
}

/// A vsock packet of the guest with context id 3 to the host (virtio 1.2, 5.10.6).
pub fn vsock(operation: u16, from: u32, to: u32, flags: u32, data: &[u8]) -> Vec<u8> {
    let mut packet = Vec::new();
    packet.extend(3u64.to_le_bytes());
    packet.extend(2u64.to_le_bytes());
    packet.extend(from.to_le_bytes());
    packet.extend(to.to_le_bytes());
    packet.extend((data.len() as u32).to_le_bytes());
    packet.extend(1u16.to_le_bytes());
    packet.extend(operation.to_le_bytes());
    packet.extend(flags.to_le_bytes());
    packet.extend(0x1_0000u32.to_le_bytes());
    packet.extend(0u32.to_le_bytes());
    packet.extend(data);
    packet
}
