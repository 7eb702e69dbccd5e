//! An open overlay: the engine, behind a gate that close and grow shut.

use std::io::{self, IoSlice, IoSliceMut};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::block::{Block, Host, check_range, total};
use crate::check::Report;
use crate::compact::TOLD;
use crate::engine::Engine;
use crate::error::Error;
use crate::layout::{CLUSTER, TABLE_ENTRIES};
use crate::lock::Lock;
use crate::vectors::Piece;

/// An overlay open for writing.
///
/// Made by [`crate::open()`]. [`Block::close`] ends it in order; dropping it without is a crash as far as the disk is
/// concerned: nothing is lost that was flushed. Either way the lock ends.
pub struct Overlay {
    path: PathBuf,
    generation: u64,
    lock: Option<Lock>,
    /// Every request holds it shared; close and grow wait for all of them.
    gate: RwLock<Gate>,
}

struct Gate {
    open: bool,
    engine: Engine,
}

impl Gate {
    /// Does what changes the disk and counts it, also when it failed half-way.
    fn change(&self, work: impl FnOnce(&Engine) -> io::Result<()>) -> io::Result<()> {
        let result = work(&self.engine);
        self.engine.changes.fetch_add(1, Ordering::Release);
        result
    }
}

impl std::fmt::Debug for Overlay {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = formatter.debug_struct("Overlay");
        shown.field("path", &self.path).field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl Overlay {
    /// Opens an image in any [`Host`] for writing, over a base that the caller has verified: the whole image is
    /// checked, leaked clusters become free, the generation is raised.
    ///
    /// `path` is for messages. [`crate::open()`] is what a driver uses.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and [`Error::Unsupported`] (nothing has been written then), [`Error::Io`].
    pub fn open_on(host: Box<dyn Host>, base: Box<dyn Block>, path: &Path) -> Result<Self, Error> {
        let engine = Engine::open(host, base, path)?;
        let generation = engine.generation;
        let gate = RwLock::new(Gate { open: true, engine });
        Ok(Self { path: path.to_path_buf(), generation, lock: None, gate })
    }

    /// Opens the locked file.
    pub(crate) fn open_locked(lock: Lock, base: Box<dyn Block>) -> Result<Self, Error> {
        let file = lock.file().try_clone();
        let file = file.map_err(|source| Error::io(lock.path(), "duplicate the descriptor of", source))?;
        let overlay = Self::open_on(Box::new(file), base, lock.path())?;
        Ok(Self { lock: Some(lock), ..overlay })
    }

    /// The number of this opening for writing: it grows with each. A memory image is valid only together with the
    /// generation that it was made at.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The image's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks what is on the disk, while requests go on. What waits for the next flush isn't in the report, and
    /// clusters that were given up lately count as leaked.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn check(&self) -> Result<Report, Error> {
        self.shared().engine.check(&self.path)
    }

    /// True while the host has no room for what the guest writes: set by the first request that fails for that reason,
    /// ended by the next one that gets room.
    pub fn host_is_full(&self) -> bool {
        self.shared().engine.full.load(Ordering::Relaxed)
    }

    /// Makes the disk larger while it is in use: requests wait until it is done, [`Block::size`] then tells the new
    /// size (rounded up to 64 KiB), and it is for the caller to tell the guest.
    ///
    /// # Errors
    /// Those of [`crate::grow`] but [`Error::Locked`].
    pub fn grow(&self, size: u64) -> Result<(), Error> {
        let mut gate = self.shut();
        if !gate.open {
            return Err(Error::io(&self.path, "grow", closed()));
        }
        gate.engine.grow(size, &self.path)
    }

    fn shared(&self) -> RwLockReadGuard<'_, Gate> {
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn shut(&self) -> RwLockWriteGuard<'_, Gate> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, offset: u64, length: u64) -> io::Result<RwLockReadGuard<'_, Gate>> {
        let gate = self.shared();
        check_range(gate.engine.tables.header.virtual_bytes, offset, length)?;
        match gate.open {
            true => Ok(gate),
            false => Err(closed()),
        }
    }

    fn enter_writing(&self, offset: u64, length: u64) -> io::Result<RwLockReadGuard<'_, Gate>> {
        let gate = self.enter(offset, length)?;
        gate.engine.refuse_broken()?;
        Ok(gate)
    }

    /// What [`crate::compact`] does, while requests go on.
    ///
    /// # Errors
    /// The host's, as for [`Block::flush`].
    pub fn give_back(&self, progress: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
        let size = self.size();
        let table_bytes = TABLE_ENTRIES * CLUSTER;
        for table in 0..size.div_ceil(table_bytes) {
            let end = size.min((table + 1) * table_bytes);
            if !self.enter_writing(0, 0)?.engine.is_empty(table)? {
                for cluster in table * TABLE_ENTRIES..end / CLUSTER {
                    self.enter_writing(0, 0)?.engine.drop_zeros(cluster)?;
                    if cluster % TOLD == TOLD - 1 {
                        progress((cluster + 1) * CLUSTER, size);
                    }
                }
                self.enter_writing(0, 0)?.engine.flush_all()?;
            }
            progress(end, size);
        }
        self.give_back_stale()
    }

    /// The last part of [`Overlay::give_back`]: what has been given up is punched out of the file.
    pub(crate) fn give_back_stale(&self) -> io::Result<()> {
        let gate = self.enter_writing(0, 0)?;
        gate.engine.flush_all()?;
        gate.engine.punch_stale();
        gate.engine.flush_all()
    }
}

/// The error of every request after close.
fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the disk has been closed")
}

impl Block for Overlay {
    fn size(&self) -> u64 {
        self.shared().engine.tables.header.virtual_bytes
    }

    fn readv(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        let length = total(buffers.iter().map(|buffer| buffer.len()));
        self.enter(offset, length)?.engine.read(offset, buffers, length as usize)
    }

    fn writev(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        let length = total(buffers.iter().map(|buffer| buffer.len()));
        let gate = self.enter_writing(offset, length)?;
        gate.change(|engine| engine.write(offset, buffers, length as usize))
    }

    fn flush(&self) -> io::Result<()> {
        self.enter_writing(0, 0)?.engine.flush()
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let gate = self.enter_writing(offset, length)?;
        gate.change(|engine| engine.zero_whole_clusters(offset, length))
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        let gate = self.enter_writing(offset, length)?;
        let ends = [Piece::head(offset, length), Piece::tail(offset, length)];
        gate.change(|engine| {
            ends.into_iter().flatten().try_for_each(|end| engine.zero_part(end.offset, end.length))?;
            engine.zero_whole_clusters(offset, length)
        })
    }

    fn skip_zeros(&self, offset: u64) -> io::Result<u64> {
        let gate = self.enter(0, 0)?;
        gate.engine.skip_zeros(offset)
    }

    fn close(&self) -> io::Result<()> {
        let mut gate = self.shut();
        if !std::mem::replace(&mut gate.open, false) {
            return Err(closed());
        }
        gate.engine.refuse_broken()?;
        gate.engine.finish()?;
        match &self.lock {
            Some(lock) => lock.release().map_err(io::Error::other),
            None => Ok(()),
        }
    }
}
