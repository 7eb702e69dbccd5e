//! A flat model of a disk that knows what a power failure may leave, and random operations.
#![allow(dead_code)] // each test program uses its part

use torpor_overlay::Block;
use torpor_overlay::fault::{Change, apply};

pub const SECTOR: usize = 512;
pub const CLUSTER: u64 = 65_536;

/// A small generator of random numbers with a fixed sequence for each seed (xorshift64*).
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }

    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(length);
        bytes
    }
}

#[derive(Debug, Clone)]
pub enum Operation {
    Write(u64, Vec<u8>),
    Discard(u64, u64),
    WriteZeroes(u64, u64),
    Flush,
}

/// A random operation on a disk of `size` bytes; offsets and lengths are multiples of `unit`.
pub fn operation(random: &mut Random, size: u64, unit: u64) -> Operation {
    let range = |random: &mut Random, most: u64| {
        let length = (random.below(most / unit) + 1) * unit;
        let offset = random.below((size - length) / unit + 1) * unit;
        (offset, length)
    };
    match random.below(100) {
        0..45 => {
            let (offset, length) = range(random, 16_384);
            Operation::Write(offset, random.bytes(length as usize))
        }
        45..60 => {
            let (offset, length) = range(random, 200_000);
            Operation::Write(offset, random.bytes(length as usize))
        }
        60..73 => {
            let (offset, length) = range(random, 300_000);
            Operation::Discard(offset, length)
        }
        73..82 => {
            let (offset, length) = range(random, 150_000);
            Operation::WriteZeroes(offset, length)
        }
        _ => Operation::Flush,
    }
}

/// What a disk holds now, and what else each sector may hold after a crash.
#[derive(Clone)]
pub struct Model {
    pub now: Vec<u8>,
    flushed: Vec<u8>,
    /// What was done since the last flush.
    since: Vec<(u64, Vec<u8>)>,
}

impl Model {
    pub fn new(mut base: Vec<u8>, size: u64) -> Self {
        base.resize(size as usize, 0);
        Self { flushed: base.clone(), now: base, since: Vec::new() }
    }

    pub fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Write(offset, data) => self.write(*offset, data.clone()),
            Operation::WriteZeroes(offset, length) => self.write(*offset, vec![0; *length as usize]),
            Operation::Discard(offset, length) => {
                let (start, end) = (offset.next_multiple_of(CLUSTER), (offset + length) / CLUSTER * CLUSTER);
                if start < end {
                    self.write(start, vec![0; (end - start) as usize]);
                }
            }
            Operation::Flush => self.flushed(),
        }
    }

    pub fn flushed(&mut self) {
        for (offset, data) in self.since.drain(..) {
            put(&mut self.flushed, offset, &data);
        }
    }

    /// The disk has grown to that size.
    pub fn grown(&mut self, size: u64) {
        self.flushed();
        self.now.resize(size as usize, 0);
        self.flushed.resize(size as usize, 0);
    }

    fn write(&mut self, offset: u64, data: Vec<u8>) {
        put(&mut self.now, offset, &data);
        self.since.push((offset, data));
    }

    /// The first sector of a disk's content that a crash can't have left.
    pub fn wrong_sector(&self, content: &[u8]) -> Option<usize> {
        let differs = |sector: &usize| content[range_of(*sector)] != self.now[range_of(*sector)];
        (0..self.now.len() / SECTOR)
            .filter(differs)
            .find(|sector| !self.was(*sector, &content[range_of(*sector)]))
    }

    /// True when a sector held that at the last flush, or after any of the changes since.
    fn was(&self, sector: usize, found: &[u8]) -> bool {
        let (start, mut bytes) = ((sector * SECTOR) as u64, self.flushed[range_of(sector)].to_vec());
        if bytes == found {
            return true;
        }
        self.since.iter().any(|(offset, data)| {
            let (from, to) = (start.max(*offset), (start + SECTOR as u64).min(offset + data.len() as u64));
            if from >= to {
                return false;
            }
            put(&mut bytes, from - start, &data[(from - offset) as usize..(to - offset) as usize]);
            bytes == found
        })
    }
}

fn range_of(sector: usize) -> std::ops::Range<usize> {
    sector * SECTOR..(sector + 1) * SECTOR
}

fn put(target: &mut [u8], offset: u64, data: &[u8]) {
    target[offset as usize..offset as usize + data.len()].copy_from_slice(data);
}

pub fn perform(disk: &dyn Block, operation: &Operation) -> std::io::Result<()> {
    match operation {
        Operation::Write(offset, data) => disk.write(data, *offset),
        Operation::Discard(offset, length) => disk.discard(*offset, *length),
        Operation::WriteZeroes(offset, length) => disk.write_zeroes(*offset, *length),
        Operation::Flush => disk.flush(),
    }
}

pub fn content(disk: &dyn Block) -> Vec<u8> {
    let mut content = vec![0xee; disk.size() as usize];
    disk.read(&mut content, 0).unwrap();
    content
}

/// What the disk is sure to hold, and what it may have got of the changes since its last sync.
pub struct Replay {
    durable: Vec<u8>,
    pending: Vec<Change>,
}

impl Replay {
    pub fn new(durable: Vec<u8>) -> Self {
        Self { durable, pending: Vec::new() }
    }

    pub fn advance(&mut self, change: Change) {
        let is_sync = change == Change::Sync;
        self.pending.push(change);
        if is_sync {
            for change in self.pending.drain(..) {
                apply(&mut self.durable, &change, &mut || true);
            }
        }
    }

    /// A possible content after a failure now: each sector of the pending changes is there with a chance of `keep`
    /// in 8.
    pub fn crash(&self, random: &mut Random, keep: u64) -> Vec<u8> {
        let mut left = self.durable.clone();
        for change in &self.pending {
            // With 4, every other change is there or missing as a whole, as a failure between two writes leaves it.
            let whole = keep == 4 && random.below(2) == 0;
            let chosen = random.below(8) < keep;
            apply(&mut left, change, &mut || if whole { chosen } else { random.below(8) < keep });
        }
        left
    }
}
