//! What a disk does at queue depth 1: a line `RESULT name operations nanoseconds` for each kind of work.
//!
//! The first half of the disk is taken as written before (its clusters are there), the second half as never written.

use std::{
    fs::File,
    io::{self, Seek as _, SeekFrom},
    os::unix::fs::FileExt as _,
    time::Instant,
};

use torpor_test_guest::Places;

use crate::say;

const SMALL: usize = 4 << 10;
const LARGE: usize = 128 << 10;
/// A cluster of our overlays, bytes.
const CLUSTER: u64 = 64 << 10;
/// Operations of each kind with small and large buffers.
const SMALL_OPERATIONS: u64 = 2000;
const LARGE_OPERATIONS: u64 = 400;
const SYNCED_OPERATIONS: u64 = 500;

/// A buffer as direct I/O wants it.
pub(crate) struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    pub(crate) fn new(length: usize, fill: u8) -> Self {
        let bytes = vec![fill; length + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        Self { bytes, start, length }
    }

    pub(crate) fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

fn timed(name: &str, operations: u64, mut one: impl FnMut(u64) -> io::Result<()>) -> io::Result<()> {
    let begin = Instant::now();
    for number in 0..operations {
        one(number)?;
    }
    say(&format!("RESULT {name} {operations} {}", begin.elapsed().as_nanos()));
    Ok(())
}

/// Measures; the disk's content is lost.
pub(crate) fn measure(disk: &File) -> io::Result<()> {
    let size = (&*disk).seek(SeekFrom::End(0))?;
    let written = size / 4;
    let mut places = Places::new(7);
    let mut small = Aligned::new(SMALL, 0x5a);
    let mut large = Aligned::new(LARGE, 0xa5);
    // So that the first quarter is there.
    let mut offset = 0;
    while offset < written {
        disk.write_all_at(large.get(), offset)?;
        offset += LARGE as u64;
    }
    disk.sync_data()?;
    let at = |places: &mut Places, block: usize| places.below(written / block as u64) * block as u64;
    timed("random-read-4k", SMALL_OPERATIONS, |_| disk.read_exact_at(small.get(), at(&mut places, SMALL)))?;
    timed("random-overwrite-4k", SMALL_OPERATIONS, |_| {
        disk.write_all_at(small.get(), at(&mut places, SMALL))
    })?;
    timed("write-fdatasync-4k", SYNCED_OPERATIONS, |_| {
        disk.write_all_at(small.get(), at(&mut places, SMALL))?;
        disk.sync_data()
    })?;
    // Every cluster once, in an order that is not the disk's: 7919 is prime.
    let clusters = (size - written) / CLUSTER;
    timed("first-write-4k", SMALL_OPERATIONS.min(clusters), |number| {
        disk.write_all_at(small.get(), written + (number * 7919 % clusters) * CLUSTER)
    })?;
    let sequence = |number: u64| number * LARGE as u64 % written;
    timed("sequential-read-128k", LARGE_OPERATIONS, |number| {
        disk.read_exact_at(large.get(), sequence(number))
    })?;
    timed("sequential-write-128k", LARGE_OPERATIONS, |number| {
        disk.write_all_at(large.get(), sequence(number))
    })
}
