//! Where things lie in an overlay of ours: arithmetic only.

use crate::error::Flaw;

/// Bits of the cluster size.
pub(crate) const CLUSTER_BITS: u32 = 16;
/// Bytes of a cluster, the unit of allocation.
pub(crate) const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// Entries of 8 bytes in a table of one cluster (L1 and L2 tables, refcount table).
pub(crate) const TABLE_ENTRIES: u64 = CLUSTER / 8;
/// Refcounts of 16 bits in a refcount block of one cluster.
pub(crate) const BLOCK_REFCOUNTS: u64 = CLUSTER / 2;
/// The largest virtual size, 16 TiB: it bounds the memory that an open overlay takes (64 MiB of bitmaps).
pub(crate) const MAX_VIRTUAL: u64 = 16 << 40;
/// Host clusters beyond those that a full overlay needs: room for clusters that are freed but not yet reusable,
/// and for clusters that a crash leaked and no repair has given back yet.
pub(crate) const SLACK: u64 = 1024;

/// Positions of the metadata of a new overlay, all in clusters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Virtual size in bytes, a multiple of the cluster size.
    pub(crate) virtual_bytes: u64,
    /// First cluster of the refcount table, and how many.
    pub(crate) refcount_table: (u64, u64),
    /// First refcount block, and how many.
    pub(crate) refcount_blocks: (u64, u64),
    /// First cluster of the L1 table, and how many.
    pub(crate) l1: (u64, u64),
    /// First L2 table, and how many.
    pub(crate) l2: (u64, u64),
}

impl Layout {
    /// The layout for a virtual size in bytes, rounded up to a whole cluster.
    pub(crate) fn for_size(bytes: u64) -> Result<Self, Flaw> {
        if bytes == 0 || bytes > MAX_VIRTUAL {
            return Err(Flaw::unsupported(format!(
                "a virtual size of {bytes} bytes is outside 1 to {MAX_VIRTUAL} bytes"
            )));
        }
        let virtual_bytes = bytes.next_multiple_of(CLUSTER);
        let l2 = l2_tables(virtual_bytes);
        let l1 = (l2 * 8).div_ceil(CLUSTER);
        let (table, blocks) = refcount_room(1 + l1 + l2 + virtual_bytes / CLUSTER);
        let first_block = 1 + table;
        let first_l1 = first_block + blocks;
        Ok(Self {
            virtual_bytes,
            refcount_table: (1, table),
            refcount_blocks: (first_block, blocks),
            l1: (first_l1, l1),
            l2: (first_l1 + l1, l2),
        })
    }

    /// Clusters of metadata: the first data cluster's number.
    pub(crate) fn metadata_clusters(&self) -> u64 {
        self.l2.0 + self.l2.1
    }
}

/// L2 tables for a virtual size in bytes.
pub(crate) fn l2_tables(virtual_bytes: u64) -> u64 {
    virtual_bytes.div_ceil(CLUSTER).div_ceil(TABLE_ENTRIES)
}

/// Clusters of refcount table and refcount blocks that count `others` clusters, themselves and the slack.
pub(crate) fn refcount_room(others: u64) -> (u64, u64) {
    let (mut table, mut blocks) = (1, 1);
    loop {
        let needed = (others + SLACK + table + blocks).div_ceil(BLOCK_REFCOUNTS);
        let table_needed = needed.div_ceil(TABLE_ENTRIES);
        if needed <= blocks && table_needed <= table {
            return (table, blocks);
        }
        blocks = blocks.max(needed);
        table = table.max(table_needed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_counts_all_of_its_own_clusters() {
        for shift in 0..=44 {
            for bytes in [(1u64 << shift).saturating_sub(1).max(1), 1 << shift, (1 << shift) + 1] {
                let Ok(layout) = Layout::for_size(bytes) else {
                    assert!(bytes > MAX_VIRTUAL);
                    continue;
                };
                let most = layout.metadata_clusters() + layout.virtual_bytes / CLUSTER + SLACK;
                assert!(layout.refcount_blocks.1 * BLOCK_REFCOUNTS >= most, "{bytes}");
                assert!(layout.refcount_table.1 * TABLE_ENTRIES >= layout.refcount_blocks.1, "{bytes}");
                assert!(layout.l1.1 * TABLE_ENTRIES >= layout.l2.1, "{bytes}");
                assert!(layout.l2.1 * TABLE_ENTRIES * CLUSTER >= layout.virtual_bytes, "{bytes}");
            }
        }
    }

    #[test]
    fn sizes_outside_the_limits_are_refused() {
        assert!(Layout::for_size(0).is_err());
        assert!(Layout::for_size(MAX_VIRTUAL + 1).is_err());
        assert!(Layout::for_size(u64::MAX).is_err());
    }
}
