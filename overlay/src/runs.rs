//! Requests over many clusters: neighbours that are neighbours on the host too cost one operation.
//!
//! Locks of several guest clusters are taken in rising order of the locks and never across their wrap-around, so that
//! no two requests wait for each other.

use std::io;
use std::sync::atomic::Ordering;

use crate::engine::{Engine, SHARDS};
use crate::layout::{CLUSTER, TABLE_ENTRIES};
use crate::tables::{COPIED, Mapping};

impl Engine {
    /// Reads from any offset, of any length.
    pub(crate) fn read(&self, offset: u64, mut buffer: &mut [u8]) -> io::Result<()> {
        let mut at = offset;
        while !buffer.is_empty() {
            let count = match self.read_in_place(at, buffer)? {
                0 => {
                    let count = to_cluster_end(at, buffer.len());
                    self.read_cluster(at / CLUSTER, at % CLUSTER, &mut buffer[..count])?;
                    count
                }
                count => count,
            };
            at += count as u64;
            buffer = &mut buffer[count..];
        }
        Ok(())
    }

    /// Writes to any offset, any length.
    pub(crate) fn write(&self, offset: u64, mut data: &[u8]) -> io::Result<()> {
        let mut at = offset;
        while !data.is_empty() {
            let mut count = self.write_in_place(at, data)?;
            if count == 0 {
                count = self.write_fresh(at, data)?;
            }
            if count == 0 {
                count = to_cluster_end(at, data.len());
                self.write_cluster(at / CLUSTER, at % CLUSTER, &data[..count])?;
            }
            at += count as u64;
            data = &data[count..];
        }
        Ok(())
    }

    fn read_in_place(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.in_place(at, buffer.len(), |host, count| self.host.read(&mut buffer[..count], host))
    }

    fn write_in_place(&self, at: u64, data: &[u8]) -> io::Result<usize> {
        self.in_place(at, data.len(), |host, count| self.host.write(&data[..count], host))
    }

    /// Works on the clusters from `at` on that have data in one run on the host; returns the bytes done.
    fn in_place(
        &self,
        at: u64,
        length: usize,
        work: impl FnOnce(u64, usize) -> io::Result<()>,
    ) -> io::Result<usize> {
        let first = at / CLUSTER;
        let mut locks = Vec::new();
        let mut start = None;
        for cluster in run(at, length) {
            let entry = self.entry(cluster)?;
            let lock = self.shared(cluster);
            let Mapping::Data(host) = Mapping::of(entry.load(Ordering::Acquire)) else { break };
            if *start.get_or_insert(host) + (cluster - first) != host {
                break;
            }
            locks.push(lock);
        }
        let Some(start) = start.filter(|_| !locks.is_empty()) else { return Ok(0) };
        let end = (first + locks.len() as u64) * CLUSTER;
        let count = length.min((end - at) as usize);
        work(start * CLUSTER + at % CLUSTER, count)?;
        Ok(count)
    }

    /// Writes whole clusters that have no data yet to one run of fresh ones. Returns the bytes done: none when there
    /// aren't two such clusters, or no room; one at a time is then the way, with all that it does about a full host.
    fn write_fresh(&self, at: u64, data: &[u8]) -> io::Result<usize> {
        let whole = data.len() / CLUSTER as usize;
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
        if self.host.write(&data[..count], start * CLUSTER).is_err() {
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
