//! The engine: a guest's disk in an overlay, with its base showing through.
//!
//! # Order of writes
//! A write to a cluster that the overlay doesn't have yet goes to a fresh host cluster at once; the L2 entry that
//! refers to it is kept in memory until the next flush. A flush then
//! 1. writes the refcounts that changed,
//! 2. syncs: data and refcounts are durable before anything refers to them,
//! 3. writes the L2 entries that changed before the flush began,
//! 4. syncs: the guest's flush is done,
//! 5. punches the clusters that those entries no longer refer to, and only then lets them be allocated again.
//!
//! On the disk, an entry thus never refers to a cluster whose content or refcount isn't there, and a cluster never
//! gets new content while an old entry may still refer to it. A crash between any two writes leaves clusters that
//! are counted but not referred to (leaks), never the reverse.
//!
//! # Threads
//! Reading, and writing in place, hold the lock of each guest cluster shared; giving a guest cluster another host
//! cluster or none holds it exclusively. So no request can be under way in a host cluster that is given up. Locks are
//! taken in the order gate, guest clusters, meta, or gate, flush, meta: no flush begins under a guest cluster's lock,
//! and the meta lock is never held over data I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice, IoSliceMut};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::alloc::{Allocator, Fresh};
use crate::block::{Block, Host, read_padded, skip_zeros_padded, total};
use crate::check;
use crate::error::{Error, is_full};
use crate::header::State;
use crate::layout::{CLUSTER, TABLE_ENTRIES};
use crate::maintain::grow_on;
use crate::tables::{COPIED, Mapping, Tables, ZERO, read_numbers, write_state};
use crate::vectors;

/// Locks for guest clusters, shared by all clusters with the same remainder.
pub(crate) const SHARDS: usize = 256;
/// Changed L2 entries that are kept in memory at most; one more and the writer flushes.
const MOST_CHANGED: usize = 16_384;
/// Bytes from which on a write is a long one.
const LONG_WRITE: usize = 256 << 10;
/// Metadata is reserved on the host in pieces of this many bytes.
const RESERVE: u64 = 4096;
/// The file grows by this many clusters at a time.
const GROW_CLUSTERS: u64 = 256;

/// An image open for writing, without a word on who may call when: that is [`crate::Overlay`]'s part.
pub(crate) struct Engine {
    pub(crate) host: Box<dyn Host>,
    pub(crate) base: Box<dyn Block>,
    pub(crate) tables: Tables,
    pub(crate) generation: u64,
    l2: Vec<OnceLock<Box<[AtomicU64]>>>,
    shards: Vec<RwLock<()>>,
    meta: Mutex<Meta>,
    /// Held by the one flush that is under way: how many changes (see `changes`) were durable after the last one.
    pub(crate) flushing: Mutex<u64>,
    /// Requests that have changed something and ended.
    pub(crate) changes: AtomicU64,
    /// Held by a long write of data; nothing else is locked under it.
    long_write: Mutex<()>,
    /// A sync failed: what the host lost is unknown.
    broken: AtomicBool,
    /// The last request that needed room on the host got none.
    pub(crate) full: AtomicBool,
}

/// What is ahead of the disk.
pub(crate) struct Meta {
    pub(crate) allocator: Allocator,
    /// L2 entries by guest cluster that are newer than those on the disk.
    pub(crate) changed: BTreeMap<u64, u64>,
    /// Host clusters that an entry on the disk may still refer to.
    pub(crate) unlinked: Vec<u64>,
    /// Pieces of L2 tables and refcount blocks, by offset / RESERVE, that the host has room for.
    reserved: BTreeSet<u64>,
    /// Length of the file in clusters, as far as set by us.
    length: u64,
}

impl Meta {
    /// What an image on the disk says, with nothing ahead of it; leaked clusters are free.
    fn scan(host: &dyn Host, tables: &Tables, path: &Path) -> Result<Self, Error> {
        let scan = check::scan(host, tables, path)?.refuse_damage(path)?;
        let length = host.length().map_err(|source| Error::io(path, "inspect", source))?;
        Ok(Self {
            allocator: Allocator::new(scan.used, length, tables.counted_clusters(), scan.leaking),
            changed: BTreeMap::new(),
            unlinked: Vec::new(),
            reserved: BTreeSet::new(),
            length: length / CLUSTER,
        })
    }
}

impl Engine {
    /// Checks the whole image, then marks it as open under a new generation.
    pub(crate) fn open(host: Box<dyn Host>, base: Box<dyn Block>, path: &Path) -> Result<Self, Error> {
        let tables = Tables::load(&*host, path)?;
        if tables.torpor.state == State::Sealed {
            return Err(crate::open::sealed(path));
        }
        let meta = Meta::scan(&*host, &tables, path)?;
        let generation = tables.torpor.generation.saturating_add(1);
        write_state(&*host, &tables.torpor, generation, State::Open)
            .map_err(|source| Error::io(path, "open for writing", source))?;
        Ok(Self {
            host,
            base,
            l2: (0..tables.l2.len()).map(|_| OnceLock::new()).collect(),
            tables,
            generation,
            shards: (0..SHARDS).map(|_| RwLock::new(())).collect(),
            meta: Mutex::new(meta),
            flushing: Mutex::new(0),
            changes: AtomicU64::new(1),
            long_write: Mutex::new(()),
            broken: AtomicBool::new(false),
            full: AtomicBool::new(false),
        })
    }

    /// Makes the disk larger; no request is under way.
    pub(crate) fn grow(&mut self, size: u64, path: &Path) -> Result<(), Error> {
        let failed = |source| Error::io(path, "flush", source);
        // Twice: what the first one unlinks, the second one counts as free.
        self.flush_all().and_then(|()| self.flush_all()).map_err(failed)?;
        let grown = grow_on(&*self.host, path, size);
        // Also after a failure: the tables on the disk may have changed in part.
        let tables = Tables::load(&*self.host, path)?;
        self.meta = Mutex::new(Meta::scan(&*self.host, &tables, path)?);
        self.l2.resize_with(tables.l2.len(), OnceLock::new);
        self.tables = tables;
        grown
    }

    /// Checks what is on the disk, between two flushes.
    pub(crate) fn check(&self, path: &Path) -> Result<check::Report, Error> {
        let _between = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        check::scan(&*self.host, &self.tables, path).map(|scan| scan.report)
    }

    pub(crate) fn refuse_broken(&self) -> io::Result<()> {
        match self.broken.load(Ordering::Acquire) {
            true => Err(io::Error::other(
                "an earlier sync failed, so what is on the disk is unknown: open it again",
            )),
            false => Ok(()),
        }
    }

    /// Writes data to the file. The host's file systems let one thread at a time write to a file, and who waits for that
    /// spins: well for short writes, a waste of a processor for long ones, which therefore take turns asleep.
    pub(crate) fn write_data(&self, data: &[IoSlice<'_>], length: usize, offset: u64) -> io::Result<()> {
        let _turn =
            (length >= LONG_WRITE).then(|| self.long_write.lock().unwrap_or_else(PoisonError::into_inner));
        self.host.writev(data, offset)
    }

    /// Syncs the file; a failure ends all writing.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.host.sync().inspect_err(|_| self.broken.store(true, Ordering::Release))
    }

    pub(crate) fn meta(&self) -> MutexGuard<'_, Meta> {
        self.meta.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn shared(&self, cluster: u64) -> RwLockReadGuard<'_, ()> {
        self.shards[cluster as usize % SHARDS].read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn exclusive(&self, cluster: u64) -> RwLockWriteGuard<'_, ()> {
        self.shards[cluster as usize % SHARDS].write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The entry of a guest cluster; its table is read when first needed.
    pub(crate) fn entry(&self, cluster: u64) -> io::Result<&AtomicU64> {
        let (table, index) = ((cluster / TABLE_ENTRIES) as usize, (cluster % TABLE_ENTRIES) as usize);
        if let Some(entries) = self.l2[table].get() {
            return Ok(&entries[index]);
        }
        // Two may read it at once: nothing in a table changes, on the disk or in memory, before one of them is set.
        let numbers = read_numbers(&*self.host, self.tables.l2[table], TABLE_ENTRIES)?;
        Ok(&self.l2[table].get_or_init(|| numbers.into_iter().map(AtomicU64::new).collect())[index])
    }

    /// Writes a part of a guest cluster that had no data just now.
    pub(crate) fn write_cluster(&self, cluster: u64, within: u64, data: &[IoSlice<'_>]) -> io::Result<()> {
        let entry = self.entry(cluster)?;
        let mut written = self.write_exclusively(entry, cluster, within, data);
        if written.as_ref().is_err_and(is_full) && !self.meta().unlinked.is_empty() {
            // What was discarded since the last flush gives room now.
            self.flush_all()?;
            written = self.write_exclusively(entry, cluster, within, data);
        }
        self.full.store(written.as_ref().is_err_and(is_full), Ordering::Relaxed);
        written?;
        self.bound_changes()
    }

    /// Flushes when too much waits for the guest to do it. No lock of a guest cluster is held.
    pub(crate) fn bound_changes(&self) -> io::Result<()> {
        let many = self.meta().changed.len() > MOST_CHANGED;
        match many {
            true => self.flush_all(),
            false => Ok(()),
        }
    }

    fn write_exclusively(
        &self,
        entry: &AtomicU64,
        cluster: u64,
        within: u64,
        data: &[IoSlice<'_>],
    ) -> io::Result<()> {
        let _exclusive = self.exclusive(cluster);
        let old = Mapping::of(entry.load(Ordering::Acquire));
        if let Mapping::Data(host) = old {
            return self.host.writev(data, host * CLUSTER + within);
        }
        let fresh = self.allocate(cluster)?;
        if let Err(error) = self.fill(fresh, old, cluster, within, data) {
            // Nothing refers to it yet.
            self.meta().allocator.release(fresh.cluster, false);
            return Err(error);
        }
        self.link(entry, cluster, old, (fresh.cluster * CLUSTER) | COPIED);
        Ok(())
    }

    /// Changes an entry in memory; the caller holds the guest cluster exclusively.
    pub(crate) fn link(&self, entry: &AtomicU64, cluster: u64, old: Mapping, new: u64) {
        let mut meta = self.meta();
        meta.changed.insert(cluster, new);
        meta.unlinked.extend(old.host());
        entry.store(new, Ordering::Release);
    }

    /// A fresh host cluster, with room on the host for the metadata that goes with it, so that a later flush doesn't
    /// fail on a full disk.
    pub(crate) fn allocate(&self, cluster: u64) -> io::Result<Fresh> {
        let mut meta = self.meta();
        self.reserve_entry(&mut meta, cluster)?;
        let fresh = meta.allocator.allocate().ok_or_else(|| {
            io::Error::new(io::ErrorKind::StorageFull, "every cluster that this image can count is in use")
        })?;
        let ready =
            self.reserve_refcount(&mut meta, fresh.cluster).and_then(|()| self.lengthen(&mut meta, fresh));
        match ready {
            Ok(()) => Ok(fresh),
            Err(error) => {
                meta.allocator.release(fresh.cluster, fresh.zeroed);
                Err(error)
            }
        }
    }

    fn reserve_entry(&self, meta: &mut Meta, cluster: u64) -> io::Result<()> {
        let table = self.tables.l2[(cluster / TABLE_ENTRIES) as usize];
        self.reserve(meta, table + cluster % TABLE_ENTRIES * 8)
    }

    fn reserve_refcount(&self, meta: &mut Meta, host: u64) -> io::Result<()> {
        self.reserve(meta, crate::alloc::piece_offset(&self.tables.blocks, host / check::PIECE_REFCOUNTS))
    }

    fn reserve(&self, meta: &mut Meta, offset: u64) -> io::Result<()> {
        let piece = offset / RESERVE;
        if !meta.reserved.contains(&piece) {
            self.host.reserve(piece * RESERVE, RESERVE)?;
            meta.reserved.insert(piece);
        }
        Ok(())
    }

    /// Keeps every used cluster inside the file, as other tools expect it.
    fn lengthen(&self, meta: &mut Meta, fresh: Fresh) -> io::Result<()> {
        if fresh.cluster < meta.length {
            return Ok(());
        }
        let length = fresh.cluster + GROW_CLUSTERS;
        self.host.set_length(length * CLUSTER)?;
        meta.length = length;
        Ok(())
    }

    /// Gives a fresh host cluster the guest cluster's old content with the new data in it.
    fn fill(
        &self,
        fresh: Fresh,
        old: Mapping,
        cluster: u64,
        within: u64,
        data: &[IoSlice<'_>],
    ) -> io::Result<()> {
        let offset = fresh.cluster * CLUSTER;
        let whole = total(data.iter().map(|buffer| buffer.len())) == CLUSTER;
        let below = !whole && old == Mapping::Base && !self.is_base_zero(cluster)?;
        if whole || (fresh.zeroed && !below) {
            return self.host.writev(data, offset + within);
        }
        let mut content = vec![0; CLUSTER as usize];
        if below {
            let buffers = &mut [IoSliceMut::new(&mut content)];
            read_padded(&*self.base, buffers, CLUSTER as usize, cluster * CLUSTER)?;
        }
        vectors::gather(data, &mut content[within as usize..]);
        let (start, end) = match fresh.zeroed {
            true => vectors::without_zeros(&content),
            false => (0, content.len()),
        };
        self.host.write(&content[start..end], offset + start as u64)
    }

    /// True when the base is known, without reading it, to have nothing but zeros there.
    fn is_base_zero(&self, cluster: u64) -> io::Result<bool> {
        let start = cluster * CLUSTER;
        Ok(start >= self.base.size() || skip_zeros_padded(&*self.base, start)? >= start + CLUSTER)
    }

    /// Makes a whole guest cluster read as zeros and gives its host cluster up.
    fn zero_cluster(&self, cluster: u64) -> io::Result<()> {
        let entry = self.entry(cluster)?;
        let new = self.zero_entry(cluster);
        let _exclusive = self.exclusive(cluster);
        let current = entry.load(Ordering::Acquire);
        let old = Mapping::of(current);
        if current == new || old == Mapping::Zero(None) {
            return Ok(());
        }
        let mut meta = self.meta();
        self.reserve_entry(&mut meta, cluster)?;
        drop(meta);
        self.link(entry, cluster, old, new);
        Ok(())
    }

    /// True when nothing was ever written under an L2 table: guests discard whole disks, and reading all tables for
    /// that would take time and memory.
    pub(crate) fn is_empty(&self, table: u64) -> io::Result<bool> {
        if self.l2[table as usize].get().is_some() {
            return Ok(false);
        }
        let (offset, end) = (self.tables.l2[table as usize], self.tables.l2[table as usize] + CLUSTER);
        Ok(self.host.next_data(offset, end)?.0 == end)
    }

    /// See [`Block::skip_zeros`].
    pub(crate) fn skip_zeros(&self, offset: u64) -> io::Result<u64> {
        let (size, table_bytes) = (self.tables.header.virtual_bytes, TABLE_ENTRIES * CLUSTER);
        let mut at = offset.min(size);
        while at < size && self.is_empty(at / table_bytes)? {
            let (below, end) = (skip_zeros_padded(&*self.base, at)?, (at / table_bytes + 1) * table_bytes);
            if below < end {
                return Ok(below);
            }
            at = end.min(size);
        }
        Ok(at)
    }

    /// Gives up a guest cluster's host cluster if it holds nothing but zeros.
    pub(crate) fn drop_zeros(&self, cluster: u64) -> io::Result<()> {
        let entry = self.entry(cluster)?;
        let _exclusive = self.exclusive(cluster);
        let old = Mapping::of(entry.load(Ordering::Acquire));
        let Mapping::Data(host) = old else { return Ok(()) };
        let mut content = vec![0; CLUSTER as usize];
        self.host.read(&mut content, host * CLUSTER)?;
        if vectors::is_zero(&content) {
            self.link(entry, cluster, old, self.zero_entry(cluster));
        }
        Ok(())
    }

    /// The entry by which a guest cluster reads as zeros.
    fn zero_entry(&self, cluster: u64) -> u64 {
        match cluster * CLUSTER < self.base.size() {
            true => ZERO,
            false => 0,
        }
    }

    pub(crate) fn zero_whole_clusters(&self, offset: u64, length: u64) -> io::Result<()> {
        let (mut cluster, end) = (offset.div_ceil(CLUSTER), (offset + length) / CLUSTER);
        while cluster < end {
            if cluster * CLUSTER >= self.base.size() && self.is_empty(cluster / TABLE_ENTRIES)? {
                cluster = (cluster / TABLE_ENTRIES + 1) * TABLE_ENTRIES;
                continue;
            }
            self.zero_cluster(cluster)?;
            cluster += 1;
            self.bound_changes()?;
        }
        Ok(())
    }

    /// Writes zeros to a part of a cluster, unless it reads as zeros already.
    pub(crate) fn zero_part(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut found = vec![0; length as usize];
        self.read(offset, &mut [IoSliceMut::new(&mut found)], length as usize)?;
        if vectors::is_zero(&found) {
            return Ok(());
        }
        found.fill(0);
        self.write(offset, &[IoSlice::new(&found)], length as usize)
    }
}
