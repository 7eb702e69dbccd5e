//! Which host clusters are used, and which refcounts are still to be written.

use std::collections::BTreeSet;

use crate::bitmap::Bitmap;
use crate::check::{PIECE, PIECE_REFCOUNTS};
use crate::layout::{BLOCK_REFCOUNTS, CLUSTER};

/// A cluster handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fresh {
    pub(crate) cluster: u64,
    /// It is known to be all zeros.
    pub(crate) zeroed: bool,
}

/// The state of all host clusters. A cluster counts as used from its allocation until its release, which comes only
/// when nothing on the disk refers to it any more.
#[derive(Debug)]
pub(crate) struct Allocator {
    used: Bitmap,
    /// Clusters that may hold something else than zeros.
    written: Bitmap,
    /// Clusters below this have been used; free ones among them are taken first.
    top: u64,
    /// Free clusters below `top`.
    free: u64,
    /// Where the search for a free cluster goes on.
    cursor: u64,
    /// Clusters that refcount blocks can count.
    limit: u64,
    /// Pieces of refcounts that differ from those on the disk.
    changed: BTreeSet<u64>,
}

impl Allocator {
    /// From the references found in an image whose file has `length` bytes.
    pub(crate) fn new(used: Bitmap, length: u64, limit: u64, leaking: BTreeSet<u64>) -> Self {
        let mut written = Bitmap::default();
        let (top, stale) = (used.end(), length.div_ceil(CLUSTER).min(limit));
        for cluster in 0..stale {
            written.set(cluster);
        }
        let free = top - used.count();
        Self { used, written, top, free, cursor: 0, limit, changed: leaking }
    }

    /// Hands out a cluster; none when all that can be counted are used.
    pub(crate) fn allocate(&mut self) -> Option<Fresh> {
        let cluster = match self.free {
            0 => {
                let cluster = Some(self.top).filter(|top| *top < self.limit)?;
                self.top += 1;
                cluster
            }
            _ => {
                let wrapped = || self.used.next_clear(0, self.top);
                let cluster = self.used.next_clear(self.cursor, self.top).or_else(wrapped)?;
                self.free -= 1;
                self.cursor = cluster + 1;
                cluster
            }
        };
        self.used.set(cluster);
        self.changed.insert(cluster / PIECE_REFCOUNTS);
        Some(Fresh { cluster, zeroed: self.written.set(cluster) })
    }

    /// Takes a cluster back. Nothing on the disk refers to it; `zeroed` says that its content has been punched out.
    pub(crate) fn release(&mut self, cluster: u64, zeroed: bool) {
        if self.used.clear(cluster) {
            self.free += 1;
            self.changed.insert(cluster / PIECE_REFCOUNTS);
        }
        if zeroed {
            self.written.clear(cluster);
        }
    }

    /// Takes free clusters that may still hold old content, `most` of them; they count as used until released.
    pub(crate) fn take_stale(&mut self, most: usize) -> Vec<u64> {
        let mut stale = Vec::new();
        let mut at = 0;
        while let Some(cluster) = self.used.next_clear(at, self.top).filter(|_| stale.len() < most) {
            if self.written.get(cluster) {
                self.used.set(cluster);
                self.free -= 1;
                stale.push(cluster);
            }
            at = cluster + 1;
        }
        stale
    }

    /// Takes the numbers of the changed pieces; they count as written from now on.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.changed)
    }

    /// Gives pieces back that couldn't be written.
    pub(crate) fn put_back(&mut self, pieces: BTreeSet<u64>) {
        self.changed.extend(pieces);
    }

    pub(crate) fn has_changes(&self) -> bool {
        !self.changed.is_empty()
    }

    /// The content of a piece as it should be on the disk.
    pub(crate) fn piece(&self, piece: u64) -> Vec<u8> {
        let mut bytes = vec![0; PIECE as usize];
        let (counts, _) = bytes.as_chunks_mut::<2>();
        for (cluster, count) in (piece * PIECE_REFCOUNTS..).zip(counts) {
            *count = u16::from(self.used.get(cluster)).to_be_bytes();
        }
        bytes
    }

    /// One more than the highest used cluster.
    pub(crate) fn end(&self) -> u64 {
        self.used.end()
    }
}

/// Where a piece lies, given the refcount blocks' offsets.
pub(crate) fn piece_offset(blocks: &[u64], piece: u64) -> u64 {
    let per_block = BLOCK_REFCOUNTS / PIECE_REFCOUNTS;
    blocks[(piece / per_block) as usize] + piece % per_block * PIECE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_cluster_is_handed_out_twice_and_none_of_the_metadata() {
        let mut used = Bitmap::default();
        (0..10).chain([12, 14]).for_each(|cluster| {
            used.set(cluster);
        });
        let mut allocator = Allocator::new(used, 13 * CLUSTER, 20, BTreeSet::new());
        let handed: Vec<u64> =
            std::iter::from_fn(|| allocator.allocate()).map(|fresh| fresh.cluster).collect();
        assert_eq!(handed, [10, 11, 13, 15, 16, 17, 18, 19]);
        allocator.release(16, false);
        assert_eq!(allocator.allocate(), Some(Fresh { cluster: 16, zeroed: false }));
        allocator.release(11, true);
        assert_eq!(allocator.allocate(), Some(Fresh { cluster: 11, zeroed: true }));
        assert_eq!(allocator.allocate(), None);
    }

    #[test]
    fn what_lies_inside_the_file_is_not_taken_for_zeros() {
        let mut used = Bitmap::default();
        used.set(0);
        let mut allocator = Allocator::new(used, 2 * CLUSTER + 1, 20, BTreeSet::new());
        let zeroed: Vec<bool> =
            (0..4).filter_map(|_| allocator.allocate()).map(|fresh| fresh.zeroed).collect();
        assert_eq!(zeroed, [false, false, true, true]);
    }
}
