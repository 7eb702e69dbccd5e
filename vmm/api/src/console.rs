//! The console ring: a file of fixed size into which the VMM writes what the guest says on its serial port, and which
//! outlives it.
//!
//! A header of [`HEADER_BYTES`], then the ring. All numbers are little-endian.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 8 | [`MAGIC`] |
//! | 8 | 4 | [`VERSION`] |
//! | 16 | 8 | capacity of the ring |
//! | 24 | 8 | bytes written so far, ever: byte `n` is at `n % capacity` of the ring |
//! | 32 | 8 | bytes that the rate limit has dropped |
//!
//! The writer stores a byte first and counts it afterwards, one by one. So a reader knows that a byte it has read was whole
//! when the count, read once more after it, isn't a whole ring further.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The first bytes of the file.
pub const MAGIC: [u8; 8] = *b"torpcon\n";
/// The format's version.
pub const VERSION: u32 = 1;
/// Where the ring begins.
pub const HEADER_BYTES: u64 = 4096;
/// Where the version is.
pub const VERSION_AT: usize = 8;
/// Where the capacity is.
pub const CAPACITY_AT: usize = 16;
/// Where the count of written bytes is.
pub const TOTAL_AT: usize = 24;
/// Where the count of dropped bytes is.
pub const DROPPED_AT: usize = 32;
/// The smallest ring, bytes.
pub const MIN_CAPACITY: u64 = 4 << 10;
/// The largest ring, bytes: also what a reader allocates at most, whatever the file says.
pub const MAX_CAPACITY: u64 = 16 << 20;

/// How often a count is read again before a reader gives up; one retry is rare.
const TRIES: usize = 1000;

/// A console ring can't be read.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// The file is something else.
    #[error("not a console ring: {0}")]
    Foreign(String),
    /// It can't be read.
    #[error("reading the console ring: {0}")]
    Io(#[from] io::Error),
}

/// What [`ConsoleReader::read_since`] gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsoleChunk {
    /// The bytes, oldest first.
    pub bytes: Vec<u8>,
    /// What to ask with the next time.
    pub total: u64,
    /// Bytes between what was asked for and `bytes` that are overwritten already.
    pub dropped: u64,
}

/// Reads a console ring while it is being written, or after its writer is gone.
#[derive(Debug)]
pub struct ConsoleReader {
    file: File,
    capacity: u64,
}

impl ConsoleReader {
    /// Over an open file.
    ///
    /// # Errors
    /// [`ConsoleError::Foreign`] for a file that isn't a ring, [`ConsoleError::Io`] when it can't be read.
    pub fn new(file: File) -> Result<Self, ConsoleError> {
        let mut header = [0; DROPPED_AT + 8];
        file.read_exact_at(&mut header, 0)?;
        let version = u32_at(&header, VERSION_AT);
        let capacity = u64_at(&header, CAPACITY_AT);
        if header[..8] != MAGIC {
            return Err(ConsoleError::Foreign("its first bytes are others".to_owned()));
        }
        if version != VERSION {
            return Err(ConsoleError::Foreign(format!("version {version}, this program knows {VERSION}")));
        }
        if !(MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity) {
            return Err(ConsoleError::Foreign(format!("a capacity of {capacity} bytes")));
        }
        Ok(Self { file, capacity })
    }

    /// What was written after the first `since` bytes: 0 gives all that is still there. A `since` beyond what was ever
    /// written (the ring was made anew) counts as 0.
    ///
    /// # Errors
    /// [`ConsoleError::Io`] when the file can't be read or is shorter than it says.
    pub fn read_since(&self, since: u64) -> Result<ConsoleChunk, ConsoleError> {
        let (end, _) = self.total()?;
        let since = if since > end { 0 } else { since };
        let start = since.max(end.saturating_sub(self.capacity));
        let mut bytes = self.read_ring(start, end)?;
        // The byte after the last counted one may be half done already: hence the one more.
        let (_, guard) = self.total()?;
        let whole = guard.saturating_add(1).saturating_sub(self.capacity).clamp(start, end);
        bytes.drain(..(whole - start) as usize);
        Ok(ConsoleChunk { bytes, total: end, dropped: whole - since })
    }

    /// Bytes that the writer's rate limit has dropped so far: they were never in the ring.
    ///
    /// # Errors
    /// [`ConsoleError::Io`] when the file can't be read.
    pub fn limited(&self) -> Result<u64, ConsoleError> {
        self.number(DROPPED_AT)
    }

    /// The count as a lower and an upper bound. A number of eight bytes that is read while it is written can be torn:
    /// two readings, the second not below the first, can't both be in a way that hurts (a lower bound that is too low and an
    /// upper bound that is too high cost bytes, not truth).
    fn total(&self) -> Result<(u64, u64), ConsoleError> {
        for _ in 0..TRIES {
            let (first, second) = (self.number(TOTAL_AT)?, self.number(TOTAL_AT)?);
            if first <= second && second - first <= self.capacity {
                return Ok((first, second));
            }
        }
        Err(ConsoleError::Foreign("its count of bytes jumps about".to_owned()))
    }

    fn number(&self, at: usize) -> Result<u64, ConsoleError> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at as u64)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn read_ring(&self, start: u64, end: u64) -> Result<Vec<u8>, ConsoleError> {
        let mut bytes = vec![0; (end - start) as usize];
        let at = start % self.capacity;
        let (first, second) = bytes.split_at_mut(((self.capacity - at).min(end - start)) as usize);
        self.file.read_exact_at(first, HEADER_BYTES + at)?;
        self.file.read_exact_at(second, HEADER_BYTES)?;
        Ok(bytes)
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(total: u64, capacity: u64) -> (std::path::PathBuf, ConsoleReader) {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("torpor-console-{}-{number}", std::process::id()));
        let mut bytes = vec![0; (HEADER_BYTES + capacity) as usize];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[VERSION_AT..VERSION_AT + 4].copy_from_slice(&VERSION.to_le_bytes());
        bytes[CAPACITY_AT..CAPACITY_AT + 8].copy_from_slice(&capacity.to_le_bytes());
        bytes[TOTAL_AT..TOTAL_AT + 8].copy_from_slice(&total.to_le_bytes());
        for position in total.saturating_sub(capacity)..total {
            bytes[(HEADER_BYTES + position % capacity) as usize] = position as u8;
        }
        std::fs::write(&path, &bytes).unwrap();
        let reader = ConsoleReader::new(File::open(&path).unwrap()).unwrap();
        (path, reader)
    }

    fn expected(range: std::ops::Range<u64>) -> Vec<u8> {
        range.map(|position| position as u8).collect()
    }

    #[test]
    fn what_is_still_there_is_read_from_where_one_asks() {
        let (path, reader) = ring(100, MIN_CAPACITY);
        assert_eq!(
            reader.read_since(0).unwrap(),
            ConsoleChunk { bytes: expected(0..100), total: 100, dropped: 0 }
        );
        assert_eq!(reader.read_since(90).unwrap().bytes, expected(90..100));
        assert!(reader.read_since(100).unwrap().bytes.is_empty());
        assert_eq!(
            reader.read_since(101).unwrap().bytes.len(),
            100,
            "a ring made anew is read from its start"
        );
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_ring_that_went_round_says_how_much_is_gone() {
        let total = 3 * MIN_CAPACITY + 77;
        let (path, reader) = ring(total, MIN_CAPACITY);
        let chunk = reader.read_since(10).unwrap();
        // The oldest byte may be in the middle of being overwritten and isn't given out.
        let first = total - MIN_CAPACITY + 1;
        assert_eq!((chunk.dropped, chunk.total), (first - 10, total));
        assert_eq!(chunk.bytes, expected(first..total));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn files_that_are_no_rings_are_refused_and_never_believed() {
        let (path, _) = ring(0, MIN_CAPACITY);
        let whole = std::fs::read(&path).unwrap();
        let refused = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = whole.clone();
            change(&mut bytes);
            std::fs::write(&path, &bytes).unwrap();
            ConsoleReader::new(File::open(&path).unwrap())
                .and_then(|reader| reader.read_since(0))
                .unwrap_err()
        };
        assert!(matches!(refused(&|bytes| bytes[0] = 0), ConsoleError::Foreign(_)));
        assert!(matches!(refused(&|bytes| bytes[VERSION_AT] = 9), ConsoleError::Foreign(_)));
        assert!(matches!(refused(&|bytes| bytes[CAPACITY_AT + 7] = 1), ConsoleError::Foreign(_)));
        assert!(matches!(refused(&|bytes| bytes.truncate(20)), ConsoleError::Io(_)));
        assert!(matches!(
            refused(&|bytes| {
                bytes[TOTAL_AT..TOTAL_AT + 8].copy_from_slice(&u64::MAX.to_le_bytes());
                bytes.truncate(5000);
            }),
            ConsoleError::Io(_)
        ));
        std::fs::remove_file(path).unwrap();
    }
}
