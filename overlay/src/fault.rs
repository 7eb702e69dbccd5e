//! Hosts and disks for tests, of this crate and of those that use it: one that records everything and can show what a
//! power failure would have left, one that fails when told to.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::block::{Block, Host};

/// What a disk writes at least at once: less is never torn.
const SECTOR: usize = 512;

/// A change to a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Bytes written at an offset.
    Write(u64, Vec<u8>),
    /// The length set.
    Length(u64),
    /// A hole punched: offset and length.
    Punch(u64, u64),
    /// A sync that succeeded: all before it is durable.
    Sync,
}

/// A file in memory that records its changes. Clones are the same file.
#[derive(Debug, Clone, Default)]
pub struct Recorder(Arc<Mutex<Recording>>);

#[derive(Debug, Default)]
struct Recording {
    content: Vec<u8>,
    log: Vec<Change>,
    /// Operations until one fails, and with which error number; it goes on failing until reset.
    fail: Option<(u64, i32)>,
}

impl Recorder {
    /// A file with that content and an empty log.
    pub fn new(content: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(Recording { content, log: Vec::new(), fail: None })))
    }

    fn lock(&self) -> MutexGuard<'_, Recording> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The present content.
    pub fn content(&self) -> Vec<u8> {
        self.lock().content.clone()
    }

    /// The changes so far.
    pub fn log(&self) -> Vec<Change> {
        self.lock().log.clone()
    }

    /// The changes since the last call of this.
    pub fn take_log(&self) -> Vec<Change> {
        std::mem::take(&mut self.lock().log)
    }

    /// Lets the operation after `count` more changes, and all after it, fail with an error number; `None` ends that.
    pub fn fail_after(&self, fail: Option<(u64, i32)>) {
        self.lock().fail = fail;
    }
}

impl Recording {
    fn change(&mut self, change: Change) -> io::Result<()> {
        match &mut self.fail {
            Some((0, number)) => return Err(io::Error::from_raw_os_error(*number)),
            Some((count, _)) => *count -= 1,
            None => {}
        }
        apply(&mut self.content, &change, &mut || true);
        self.log.push(change);
        Ok(())
    }
}

/// Applies a change to a file's content. Sectors of a write for which `keep` says no are left as they were, as a power
/// failure may do; the other changes are whole or absent.
pub fn apply(content: &mut Vec<u8>, change: &Change, keep: &mut dyn FnMut() -> bool) {
    match change {
        Change::Sync => {}
        Change::Length(length) => {
            if keep() {
                content.resize(*length as usize, 0);
            }
        }
        Change::Punch(offset, length) => {
            let end = content.len().min((offset + length) as usize);
            if (*offset as usize) < end && keep() {
                content[*offset as usize..end].fill(0);
            }
        }
        Change::Write(offset, data) => apply_write(content, *offset as usize, data, keep),
    }
}

fn apply_write(content: &mut Vec<u8>, offset: usize, data: &[u8], keep: &mut dyn FnMut() -> bool) {
    let mut at = 0;
    while at < data.len() {
        let count = (SECTOR - (offset + at) % SECTOR).min(data.len() - at);
        if keep() {
            let end = offset + at + count;
            if content.len() < end {
                content.resize(end, 0);
            }
            content[offset + at..end].copy_from_slice(&data[at..at + count]);
        }
        at += count;
    }
}

impl Host for Recorder {
    fn length(&self) -> io::Result<u64> {
        Ok(self.lock().content.len() as u64)
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let recording = self.lock();
        let start = recording.content.len().min(offset as usize);
        let count = buffer.len().min(recording.content.len() - start);
        buffer[..count].copy_from_slice(&recording.content[start..start + count]);
        buffer[count..].fill(0);
        Ok(())
    }

    fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.lock().change(Change::Write(offset, data.to_vec()))
    }

    fn writev(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        let mut data = Vec::with_capacity(buffers.iter().map(|buffer| buffer.len()).sum());
        buffers.iter().for_each(|buffer| data.extend_from_slice(buffer));
        self.lock().change(Change::Write(offset, data))
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.lock().change(Change::Length(length))
    }

    fn sync(&self) -> io::Result<()> {
        self.lock().change(Change::Sync)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        self.lock().change(Change::Punch(offset, length))
    }

    fn reserve(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn next_data(&self, from: u64, end: u64) -> io::Result<(u64, u64)> {
        Ok((from, end))
    }
}

/// A request that a [`Faulty`] disk is asked about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// A read at an offset.
    Read(u64),
    /// A write at an offset.
    Write(u64),
    /// A flush.
    Flush,
    /// A discard at an offset.
    Discard(u64),
    /// Zeros written at an offset.
    WriteZeroes(u64),
    /// The end.
    Close,
}

/// Gives a request's error number, or none to let it through.
pub type Plan = Box<dyn Fn(Request) -> Option<i32> + Send + Sync>;

/// A disk that fails as planned, and is another disk otherwise.
pub struct Faulty<B> {
    inner: B,
    plan: Plan,
}

impl<B: Block> Faulty<B> {
    /// A disk over `inner`; the plan is asked before each request.
    pub fn new(inner: B, plan: Plan) -> Self {
        Self { inner, plan }
    }

    fn ask(&self, request: Request) -> io::Result<&B> {
        match (self.plan)(request) {
            Some(number) => Err(io::Error::from_raw_os_error(number)),
            None => Ok(&self.inner),
        }
    }
}

impl<B: Block> Block for Faulty<B> {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn readv(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        self.ask(Request::Read(offset))?.readv(buffers, offset)
    }

    fn writev(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        self.ask(Request::Write(offset))?.writev(buffers, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.ask(Request::Flush)?.flush()
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.ask(Request::Discard(offset))?.discard(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.ask(Request::WriteZeroes(offset))?.write_zeroes(offset, length)
    }

    fn close(&self) -> io::Result<()> {
        self.ask(Request::Close)?.close()
    }
}
