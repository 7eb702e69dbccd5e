//! Requests over many clusters: neighbours that are neighbours on the host too cost one operation.
//!
//! Locks of several guest clusters are taken in rising order of the locks and never across their wrap-around, so that
//! no two requests wait for each other.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::RwLockReadGuard;
use std::sync::atomic::Ordering;

use crate::block::read_padded;
use crate::engine::{Engine, SHARDS};
use crate::layout::{CLUSTER, TABLE_ENTRIES};
use crate::tables::{COPIED, Mapping};
use crate::vectors::{fill_zeros, part, part_mut};

/// A range from a request's offset on whose clusters are alike: all with data, in one run on the host, or all zeros, or
/// all the base's. They stay so as long as it lives.
struct Span<'a> {
    /// What the first cluster maps to.
    mapping: Mapping,
    /// Bytes.
    length: usize,
    /// The first cluster's, apart from the others: requests inside one cluster allocate nothing.
    _first: RwLockReadGuard<'a, ()>,
    _others: Vec<RwLockReadGuard<'a, ()>>,
}

impl Engine {
    /// Reads `length` bytes, all that the buffers hold, from any offset.
    pub(crate) fn read(&self, offset: u64, buffers: &mut [IoSliceMut<'_>], length: usize) -> io::Result<()> {
        let mut done = 0;
        while done < length {
            let at = offset + done as u64;
            let span = self.span(at, length - done)?;
            part_mut(buffers, done, span.length, |part| match span.mapping {
                Mapping::Data(host) => self.host.readv(part, host * CLUSTER + at % CLUSTER),
                Mapping::Base => read_padded(&*self.base, part, span.length, at),
                Mapping::Zero(_) => {
                    fill_zeros(part);
                    Ok(())
                }
            })?;
            done += span.length;
        }
        Ok(())
    }

    /// Writes `length` bytes, all that the buffers hold, to any offset.
    pub(crate) fn write(&self, offset: u64, buffers: &[IoSlice<'_>], length: usize) -> io::Result<()> {
        let mut done = 0;
        while done < length {
            let (at, left) = (offset + done as u64, length - done);
            let mut count = self.write_in_place(at, left, buffers, done)?;
            if count == 0 {
                count = self.write_fresh(at, left, buffers, done)?;
            }
            if count == 0 {
                count = to_cluster_end(at, left);
                part(buffers, done, count, |part| self.write_cluster(at / CLUSTER, at % CLUSTER, part))?;
            }
            done += count;
        }
        Ok(())
    }

    /// Writes to the clusters from `at` on that have data already; returns the bytes done.
    fn write_in_place(
        &self,
        at: u64,
        left: usize,
        buffers: &[IoSlice<'_>],
        done: usize,
    ) -> io::Result<usize> {
        let span = self.span(at, left)?;
        let Mapping::Data(host) = span.mapping else { return Ok(0) };
        let offset = host * CLUSTER + at % CLUSTER;
        part(buffers, done, span.length, |part| self.write_data(part, span.length, offset))?;
        Ok(span.length)
    }

    fn span(&self, at: u64, length: usize) -> io::Result<Span<'_>> {
        let mut clusters = run(at, length);
        let first = at / CLUSTER;
        clusters.next();
        let entry = self.entry(first)?;
        let lock = self.shared(first);
        let mapping = Mapping::of(entry.load(Ordering::Acquire));
        let mut others = Vec::new();
        for cluster in clusters {
            let entry = self.entry(cluster)?;
            let lock = self.shared(cluster);
            if !continues(mapping, cluster - first, Mapping::of(entry.load(Ordering::Acquire))) {
                break;
            }
            others.push(lock);
        }
        let end = (first + 1 + others.len() as u64) * CLUSTER;
        let length = length.min((end - at) as usize);
        Ok(Span { mapping, length, _first: lock, _others: others })
    }

    /// Writes whole clusters that have no data yet to one run of fresh ones. Returns the bytes done: none when there
    /// aren't two such clusters, or no room; one at a time is then the way, with all that it does about a full host.
    fn write_fresh(&self, at: u64, left: usize, buffers: &[IoSlice<'_>], done: usize) -> io::Result<usize> {
        let whole = left / CLUSTER as usize;
        if whole < 2 || !at.is_multiple_of(CLUSTER) {
            return Ok(0);
        }
        let mut locks = Vec::new();
        let mut targets = Vec::new();
        for cluster in run(at, whole * CLUSTER as usize) {
            let entry = self.entry(cluster)?;
            let lock = self.exclusive(cluster);
            let old = Mapping::of(entry.load(Ordering::Acquire));
            if matches!(old, Mapping::Data(_)) {
                break;
            }
            locks.push(lock);
            targets.push((entry, cluster, old));
        }
        let clusters: Vec<u64> = targets.iter().map(|(_, cluster, _)| *cluster).collect();
        let fresh = self.allocate_run(&clusters);
        let count = fresh.len() * CLUSTER as usize;
        let Some(start) = fresh.first().filter(|_| fresh.len() > 1) else {
            self.abandon(&fresh);
            return Ok(0);
        };
        if part(buffers, done, count, |part| self.write_data(part, count, start * CLUSTER)).is_err() {
            self.abandon(&fresh);
            return Ok(0);
        }
        for ((entry, cluster, old), host) in targets.into_iter().zip(&fresh) {
            self.link(entry, cluster, old, (host * CLUSTER) | COPIED);
        }
        drop(locks);
        self.full.store(false, Ordering::Relaxed);
        self.bound_changes()?;
        Ok(count)
    }

    /// Host clusters in one run for guest clusters in one run; as many as there are.
    fn allocate_run(&self, clusters: &[u64]) -> Vec<u64> {
        let mut run: Vec<u64> = Vec::new();
        for cluster in clusters {
            let Ok(fresh) = self.allocate(*cluster) else { break };
            if run.last().is_some_and(|last| last + 1 != fresh.cluster) {
                self.abandon(&[fresh.cluster]);
                break;
            }
            run.push(fresh.cluster);
        }
        run
    }

    /// Gives back clusters that nothing refers to yet.
    fn abandon(&self, clusters: &[u64]) {
        let mut meta = self.meta();
        clusters.iter().for_each(|cluster| meta.allocator.release(*cluster, false));
    }
}

/// True when a mapping goes on where `first` was `distance` clusters before.
fn continues(first: Mapping, distance: u64, mapping: Mapping) -> bool {
    match (first, mapping) {
        (Mapping::Data(first), Mapping::Data(host)) => first + distance == host,
        (Mapping::Zero(_), Mapping::Zero(_)) | (Mapping::Base, Mapping::Base) => true,
        _ => false,
    }
}

/// The clusters of a range from its start on that lie in one table and whose locks rise.
fn run(at: u64, length: usize) -> std::ops::Range<u64> {
    let first = at / CLUSTER;
    let shards = SHARDS as u64;
    let end = (at + length as u64).div_ceil(CLUSTER);
    let bound = ((first / shards + 1) * shards).min((first / TABLE_ENTRIES + 1) * TABLE_ENTRIES);
    first..end.min(bound)
}

fn to_cluster_end(at: u64, length: usize) -> usize {
    length.min((CLUSTER - at % CLUSTER) as usize)
}
