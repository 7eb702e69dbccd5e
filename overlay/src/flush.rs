//! Bringing the disk up to date: the order that [`crate::engine`] describes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use crate::alloc::piece_offset;
use crate::engine::{Engine, Meta};
use crate::header::State;
use crate::layout::{CLUSTER, TABLE_ENTRIES};
use crate::tables::write_state;

/// What one flush has taken on.
struct Taken {
    /// Pieces of refcounts, with their content.
    refcounts: Vec<(u64, Vec<u8>)>,
    /// L2 entries by guest cluster.
    entries: BTreeMap<u64, u64>,
    /// Host clusters that nothing refers to once the entries are durable.
    unlinked: Vec<u64>,
}

impl Taken {
    /// All content written by requests that have ended is in the file's cache by now, and so every entry taken here
    /// refers to content that the next sync makes durable.
    fn from(meta: &mut Meta) -> Self {
        let pieces = meta.allocator.take_changed();
        Self {
            refcounts: pieces.into_iter().map(|piece| (piece, meta.allocator.piece(piece))).collect(),
            entries: std::mem::take(&mut meta.changed),
            unlinked: std::mem::take(&mut meta.unlinked),
        }
    }

    /// After a failure: the same is to be done by the next flush. Newer entries win.
    fn give_back(self, meta: &mut Meta) {
        meta.allocator.put_back(self.refcounts.into_iter().map(|(piece, _)| piece).collect::<BTreeSet<_>>());
        for (cluster, entry) in self.entries {
            meta.changed.entry(cluster).or_insert(entry);
        }
        meta.unlinked.extend(self.unlinked);
    }
}

impl Engine {
    /// A guest's flush: none at all when another one, begun after the last change had ended, did it already.
    pub(crate) fn flush(&self) -> io::Result<()> {
        let needed = self.changes.load(Ordering::Acquire);
        let durable = self.flushing.lock().unwrap_or_else(PoisonError::into_inner);
        match *durable >= needed {
            true => self.refuse_broken(),
            false => self.flush_as(durable),
        }
    }

    /// A flush that brings all metadata to the disk, whether the guest changed anything or not.
    pub(crate) fn flush_all(&self) -> io::Result<()> {
        self.flush_as(self.flushing.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn flush_as(&self, mut durable: MutexGuard<'_, u64>) -> io::Result<()> {
        self.refuse_broken()?;
        let changes = self.changes.load(Ordering::Acquire);
        let taken = Taken::from(&mut self.meta());
        if let Err(error) = self.write_out(&taken) {
            taken.give_back(&mut self.meta());
            return Err(error);
        }
        self.reuse(taken.unlinked);
        *durable = changes;
        Ok(())
    }

    fn write_out(&self, taken: &Taken) -> io::Result<()> {
        for (piece, bytes) in &taken.refcounts {
            self.host.write(bytes, piece_offset(&self.tables.blocks, *piece))?;
        }
        self.sync()?;
        if taken.entries.is_empty() {
            return Ok(());
        }
        for (first, entries) in runs(&taken.entries) {
            let table = self.tables.l2[(first / TABLE_ENTRIES) as usize];
            self.host.write(&entries, table + first % TABLE_ENTRIES * 8)?;
        }
        self.sync()
    }

    /// Makes clusters allocatable again, after their punching has ended. False when the host couldn't punch one.
    pub(crate) fn reuse(&self, mut unlinked: Vec<u64>) -> bool {
        let mut all = true;
        unlinked.sort_unstable();
        for run in unlinked.chunk_by(|one, next| one + 1 == *next) {
            let (first, count) = (run[0], run.len() as u64);
            // A host that can't punch keeps the space until the cluster is used again: no reason to fail.
            let zeroed = self.host.punch(first * CLUSTER, count * CLUSTER).is_ok();
            all &= zeroed;
            let mut meta = self.meta();
            run.iter().for_each(|cluster| meta.allocator.release(*cluster, zeroed));
        }
        all
    }

    /// Close: everything durable, refcounts exact, the file as short as can be, then the mark.
    pub(crate) fn finish(&self) -> io::Result<()> {
        self.flush_all()?;
        if self.meta().allocator.has_changes() {
            self.flush_all()?;
        }
        let end = self.meta().allocator.end() * CLUSTER;
        if end < self.host.length()? {
            self.host.set_length(end)?;
            self.sync()?;
        }
        write_state(&*self.host, &self.tables.torpor, self.generation, State::Clean)
    }
}

/// Entries that lie side by side in one table, as bytes.
fn runs(entries: &BTreeMap<u64, u64>) -> Vec<(u64, Vec<u8>)> {
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    for (cluster, entry) in entries {
        let bytes = entry.to_be_bytes();
        match runs.last_mut() {
            Some((first, run))
                if *first + run.len() as u64 / 8 == *cluster && !cluster.is_multiple_of(TABLE_ENTRIES) =>
            {
                run.extend_from_slice(&bytes);
            }
            _ => runs.push((*cluster, bytes.to_vec())),
        }
    }
    runs
}
