//! A flat model of a disk that knows what a power failure may leave, and random operations.
#![allow(dead_code)] // each test program uses its part

use std::collections::BTreeMap;

use torpor_overlay::Block;

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
    older: BTreeMap<usize, Vec<Vec<u8>>>,
}

impl Model {
    pub fn new(mut base: Vec<u8>, size: u64) -> Self {
        base.resize(size as usize, 0);
        Self { now: base, older: BTreeMap::new() }
    }

    pub fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Write(offset, data) => self.write(*offset as usize, data),
            Operation::WriteZeroes(offset, length) => {
                self.write(*offset as usize, &vec![0; *length as usize])
            }
            Operation::Discard(offset, length) => {
                let (start, end) = (offset.next_multiple_of(CLUSTER), (offset + length) / CLUSTER * CLUSTER);
                if start < end {
                    self.write(start as usize, &vec![0; (end - start) as usize]);
                }
            }
            Operation::Flush => self.flushed(),
        }
    }

    pub fn flushed(&mut self) {
        self.older.clear();
    }

    fn write(&mut self, offset: usize, data: &[u8]) {
        for sector in offset / SECTOR..(offset + data.len()).div_ceil(SECTOR) {
            let old = self.now[sector * SECTOR..(sector + 1) * SECTOR].to_vec();
            self.older.entry(sector).or_default().push(old);
        }
        self.now[offset..offset + data.len()].copy_from_slice(data);
    }

    /// The first sector of a disk's content that a crash can't have left.
    pub fn wrong_sector(&self, content: &[u8]) -> Option<usize> {
        (0..self.now.len() / SECTOR).find(|sector| {
            let range = sector * SECTOR..(sector + 1) * SECTOR;
            let found = &content[range.clone()];
            let older = || self.older.get(sector).is_some_and(|older| older.iter().any(|old| old == found));
            found != &self.now[range] && !older()
        })
    }
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

/// How much more than usual the slow ring asks for.
pub fn effort() -> u64 {
    std::env::var("OVERLAY_EFFORT").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}
