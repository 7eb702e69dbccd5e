//! Where the serial port's bytes go. The writing side of the console ring is here; `torpor_vmm_api::console` has the format
//! and the reader.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use torpor_vmm_api::console::{
    CAPACITY_AT, DROPPED_AT, HEADER_BYTES, MAGIC, MAX_CAPACITY, MIN_CAPACITY, TOTAL_AT, VERSION, VERSION_AT,
};

/// Where the serial port's bytes go.
#[derive(Debug)]
pub enum Console {
    /// Nowhere.
    None,
    /// Into a ring file, which outlives the process.
    Ring(ConsoleRing),
    /// Into a pipe or to a terminal, as they come.
    Stream(ConsoleStream),
}

impl Console {
    /// Into `file`: a regular file becomes a ring of `capacity` bytes, anything else is written to. Called before the
    /// process confines itself, as a pipe or terminal is opened once more.
    ///
    /// # Errors
    /// The file can't be allocated, mapped or written to without waiting.
    pub fn open(file: File, capacity: u64) -> io::Result<Self> {
        match file.metadata()?.is_file() {
            true => Ok(Self::Ring(ConsoleRing::create(&file, capacity, ConsoleLimit::default())?)),
            false => Ok(Self::Stream(ConsoleStream::new(file)?)),
        }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        match self {
            Self::None => {}
            Self::Ring(ring) => bytes.iter().for_each(|byte| ring.push(*byte)),
            Self::Stream(stream) => stream.write(bytes),
        }
    }
}

/// A console for people: a pipe or a terminal. What doesn't fit there at once is dropped and counted, so that a reader who
/// stops never stops the guest.
#[derive(Debug)]
pub struct ConsoleStream {
    file: File,
    dropped: u64,
}

impl ConsoleStream {
    fn new(file: File) -> io::Result<Self> {
        // Opened anew, because not waiting is a property of the open file, which others may share. A socket can't be
        // opened so; then it is set where it is.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let own = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
        let file = match own {
            Ok(own) => own,
            Err(_) => {
                let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?);
                fcntl(&file, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
                file
            }
        };
        Ok(Self { file, dropped: 0 })
    }

    /// Bytes that didn't fit.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    fn write(&mut self, bytes: &[u8]) {
        let written = self.file.write(bytes).unwrap_or(0);
        self.dropped += (bytes.len() - written) as u64;
    }
}

/// How much a guest may write: a token bucket. What is beyond it is dropped and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsoleLimit {
    /// Bytes a second.
    pub bytes_per_second: u64,
    /// Bytes that may come at once.
    pub burst_bytes: u64,
}

impl Default for ConsoleLimit {
    fn default() -> Self {
        Self { bytes_per_second: 1 << 20, burst_bytes: 256 << 10 }
    }
}

/// The ring, mapped: a byte written is a store, and outlives the process however it ends.
#[derive(Debug)]
pub struct ConsoleRing {
    map: NonNull<u8>,
    capacity: u64,
    /// Where the next byte goes.
    at: u64,
    total: u64,
    dropped: u64,
    limit: ConsoleLimit,
    tokens: u64,
    filled: Instant,
    /// The line that says that something was dropped is written once.
    told: bool,
}

// SAFETY: the mapping belongs to the ring alone, and `&mut self` is needed to write to it.
unsafe impl Send for ConsoleRing {}

impl ConsoleRing {
    /// Makes `file` a ring of `capacity` bytes, which is clamped to what the format allows. Its blocks are allocated here, so
    /// that a full disk can't hurt later.
    ///
    /// # Errors
    /// The file can't be allocated or mapped.
    pub fn create(file: &File, capacity: u64, limit: ConsoleLimit) -> io::Result<Self> {
        let capacity = capacity.clamp(MIN_CAPACITY, MAX_CAPACITY);
        let length = HEADER_BYTES + capacity;
        file.set_len(0)?;
        allocate(file, length)?;
        let size = NonZeroUsize::new(length as usize).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else is touched.
        let map = unsafe {
            mmap(
                None,
                size,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED,
                file.as_fd(),
                0,
            )
        }?;
        let mut ring = Self {
            map: map.cast(),
            capacity,
            at: 0,
            total: 0,
            dropped: 0,
            limit,
            tokens: limit.burst_bytes,
            filled: Instant::now(),
            told: false,
        };
        ring.put(VERSION_AT, &VERSION.to_le_bytes());
        ring.put(CAPACITY_AT, &capacity.to_le_bytes());
        // Last: a file that has it is a ring.
        ring.put(0, &MAGIC);
        Ok(ring)
    }

    /// Bytes written so far, those that are overwritten included.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes that the limit has dropped so far.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Writes one byte, or drops it.
    pub fn push(&mut self, byte: u8) {
        // The clock is read only when the bucket is empty.
        if self.tokens == 0 {
            self.refill();
        }
        if self.tokens > 0 {
            self.tokens -= 1;
            self.store(byte);
            return;
        }
        self.dropped += 1;
        self.number(DROPPED_AT).store(self.dropped.to_le(), Ordering::Relaxed);
        if !std::mem::replace(&mut self.told, true) {
            let limit = self.limit.bytes_per_second;
            format!(
                "\r\n[torpor: more than {limit} bytes a second; from here on some output is missing]\r\n"
            )
            .bytes()
            .for_each(|byte| self.store(byte));
        }
    }

    fn refill(&mut self) {
        let gone = self.filled.elapsed().as_micros();
        let tokens = gone * u128::from(self.limit.bytes_per_second) / 1_000_000;
        if tokens > 0 {
            self.tokens = self.limit.burst_bytes.min(u64::try_from(tokens).unwrap_or(u64::MAX));
            self.filled = Instant::now();
        }
    }

    fn store(&mut self, byte: u8) {
        // SAFETY: `at` is below `capacity`, and the mapping is HEADER_BYTES + capacity long.
        unsafe { self.map.add((HEADER_BYTES + self.at) as usize).write_volatile(byte) };
        self.at = if self.at + 1 == self.capacity { 0 } else { self.at + 1 };
        self.total += 1;
        // After the byte: what is counted is there.
        self.number(TOTAL_AT).store(self.total.to_le(), Ordering::Release);
    }

    /// Only within the header.
    fn put(&mut self, at: usize, bytes: &[u8]) {
        for (index, byte) in bytes.iter().enumerate() {
            // SAFETY: the callers' offsets are constants within the header, which the mapping begins with.
            unsafe { self.map.add(at + index).write_volatile(*byte) };
        }
    }

    fn number(&self, at: usize) -> &AtomicU64 {
        // SAFETY: `at` is one of the header's offsets, a multiple of eight within the mapping, which lives as long as self.
        unsafe { AtomicU64::from_ptr(self.map.add(at).as_ptr().cast()) }
    }
}

impl Drop for ConsoleRing {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped in `create`; no reference to it outlives self.
        let _ = unsafe { munmap(self.map.cast(), (HEADER_BYTES + self.capacity) as usize) };
    }
}

/// Gives the file its blocks. A file system that can't do it ahead gets zeros written.
fn allocate(file: &File, length: u64) -> io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), 0, length as i64) {
        Err(Errno::EOPNOTSUPP) => {
            io::copy(&mut io::Read::take(io::repeat(0), length), &mut io::BufWriter::new(file)).map(drop)
        }
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use torpor_vmm_api::console::ConsoleReader;

    use super::*;

    fn ring(capacity: u64, limit: ConsoleLimit) -> (ConsoleRing, ConsoleReader) {
        let file = tempfile::tempfile().unwrap();
        let ring = ConsoleRing::create(&file, capacity, limit).unwrap();
        (ring, ConsoleReader::new(file).unwrap())
    }

    fn write(ring: &mut ConsoleRing, bytes: &[u8]) {
        bytes.iter().for_each(|byte| ring.push(*byte));
    }

    #[test]
    fn a_pipe_gets_the_bytes_and_one_that_nobody_reads_stops_nobody() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut console = Console::open(File::from(std::os::fd::OwnedFd::from(writer)), 0).unwrap();
        console.write(b"hello");
        let mut bytes = [0; 5];
        reader.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
        (0..2000).for_each(|_| console.write(&[0; 1000]));
        let Console::Stream(stream) = console else { panic!("a pipe is no ring") };
        assert!(stream.dropped() > 0);
        let mut all = Vec::new();
        let dropped = stream.dropped();
        drop(stream);
        reader.read_to_end(&mut all).unwrap();
        assert_eq!(all.len() as u64 + dropped, 2_000_000);
    }

    #[test]
    fn a_reader_follows_a_ring_that_goes_round() {
        let (mut ring, reader) = ring(MIN_CAPACITY, ConsoleLimit::default());
        write(&mut ring, b"hello\n");
        let chunk = reader.read_since(0).unwrap();
        assert_eq!((chunk.bytes.as_slice(), chunk.total, chunk.dropped), (&b"hello\n"[..], 6, 0));
        for round in 0..20_u8 {
            write(&mut ring, &[round; 999]);
        }
        let chunk = reader.read_since(6).unwrap();
        assert_eq!(chunk.total, 6 + 20 * 999);
        assert_eq!(chunk.bytes.len() as u64 + chunk.dropped, 20 * 999);
        assert!(chunk.bytes.ends_with(&[19; 999]) && chunk.bytes.len() as u64 > MIN_CAPACITY - 2);
        assert_eq!(ring.total(), chunk.total);
    }

    #[test]
    fn what_a_reader_gets_while_the_ring_is_written_is_never_torn() {
        let (mut ring, reader) =
            ring(MIN_CAPACITY, ConsoleLimit { bytes_per_second: 0, burst_bytes: 3_000_000 });
        let writer = std::thread::spawn(move || {
            for position in 0..2_000_000_u64 {
                ring.push((position % 251) as u8);
            }
        });
        let (mut since, mut seen) = (0, 0);
        while since < 2_000_000 {
            let chunk = reader.read_since(since).unwrap();
            let first = chunk.total - chunk.bytes.len() as u64;
            assert_eq!(first, since + chunk.dropped);
            for (position, byte) in (first..).zip(&chunk.bytes) {
                assert_eq!(u64::from(*byte), position % 251, "byte {position}");
            }
            (since, seen) = (chunk.total, seen + chunk.bytes.len());
        }
        writer.join().unwrap();
        assert!(seen > 0);
    }

    #[test]
    fn a_guest_that_writes_too_much_is_told_once_and_cut() {
        let (mut ring, reader) = ring(64 << 10, ConsoleLimit { bytes_per_second: 0, burst_bytes: 1000 });
        write(&mut ring, &[b'x'; 5000]);
        write(&mut ring, &[b'x'; 5000]);
        let text = String::from_utf8(reader.read_since(0).unwrap().bytes).unwrap();
        assert_eq!(text.matches('x').count(), 1000);
        assert_eq!(text.matches("[torpor: ").count(), 1);
        assert_eq!((reader.limited().unwrap(), ring.dropped()), (9000, 9000));
    }

    #[test]
    fn what_was_written_outlives_the_ring_and_the_file_keeps_its_size() {
        let file = tempfile::tempfile().unwrap();
        let mut ring = ConsoleRing::create(&file, 1, ConsoleLimit::default()).unwrap();
        let size = file.metadata().unwrap().len();
        write(&mut ring, &[7; 100_000]);
        drop(ring);
        assert_eq!(file.metadata().unwrap().len(), size);
        assert_eq!(ConsoleReader::new(file).unwrap().read_since(99_990).unwrap().bytes, [7; 10]);
    }
}
