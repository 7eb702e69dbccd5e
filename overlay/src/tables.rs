//! The metadata of an image with our layout: where its tables lie, and the gate that every image passes before it is
//! written to.

use std::io;
use std::path::Path;

use crate::block::Host;
use crate::error::{Error, Flaw};
use crate::header::{self, Header, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DIRTY, PREFIX, Torpor};
use crate::layout::{
    BLOCK_REFCOUNTS, CLUSTER, CLUSTER_BITS, Layout, MAX_VIRTUAL, TABLE_ENTRIES, l2_tables, refcount_room,
};

/// References to tables and clusters carry this bit when the refcount is exactly one: writing in place is allowed.
pub(crate) const COPIED: u64 = 1 << 63;
/// L2 entries with this bit point to compressed data.
pub(crate) const COMPRESSED: u64 = 1 << 62;
/// L2 entries with this bit read as zeros.
pub(crate) const ZERO: u64 = 1;
/// The bits of a reference that are a host offset.
pub(crate) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// What an L2 entry says of a guest cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// Nothing here: the base shows through.
    Base,
    /// Zeros; the host cluster that is kept for it, if any, is not read.
    Zero(Option<u64>),
    /// The content is in this host cluster.
    Data(u64),
}

impl Mapping {
    /// Decodes an entry of an image that passed the check.
    pub(crate) fn of(entry: u64) -> Self {
        let host = (entry & OFFSET) >> CLUSTER_BITS;
        match (entry & ZERO != 0, host) {
            (true, 0) => Self::Zero(None),
            (true, host) => Self::Zero(Some(host)),
            (false, 0) => Self::Base,
            (false, host) => Self::Data(host),
        }
    }

    /// The host cluster that it refers to.
    pub(crate) fn host(self) -> Option<u64> {
        match self {
            Self::Base => None,
            Self::Zero(host) => host,
            Self::Data(host) => Some(host),
        }
    }
}

/// Where the tables of an image with our layout lie.
#[derive(Debug, Clone)]
pub(crate) struct Tables {
    pub(crate) header: Header,
    pub(crate) torpor: Torpor,
    /// File offsets of the L2 tables, in order.
    pub(crate) l2: Vec<u64>,
    /// File offsets of the refcount blocks, in order.
    pub(crate) blocks: Vec<u64>,
}

impl Tables {
    /// Reads the header, the L1 and the refcount table; refuses everything that isn't our layout.
    pub(crate) fn load(host: &dyn Host, path: &Path) -> Result<Self, Error> {
        let length = host.length().map_err(|source| Error::io(path, "inspect", source))?;
        let header = read_header(host, length, path)?;
        let torpor = gate(&header).and_then(|torpor| tables_inside(&header, length).map(|()| torpor));
        let torpor = torpor.map_err(|flaw| flaw.at(path))?;
        let read = |offset, entries| {
            read_numbers(host, offset, entries)
                .map_err(|source| Error::io(path, "read the tables of", source))
        };
        let l1 = read(header.l1_offset, u64::from(header.l1_entries))?;
        let most_blocks = u64::from(header.refcount_table_clusters) * TABLE_ENTRIES;
        let table = read(header.refcount_table_offset, most_blocks)?;
        let l2 = l1_targets(&l1, length).map_err(|flaw| flaw.at(path))?;
        let blocks = block_targets(&table, length).map_err(|flaw| flaw.at(path))?;
        Ok(Self { header, torpor, l2, blocks })
    }

    /// Host clusters that refcount blocks count.
    pub(crate) fn counted_clusters(&self) -> u64 {
        self.blocks.len() as u64 * BLOCK_REFCOUNTS
    }

    /// Guest clusters.
    pub(crate) fn guest_clusters(&self) -> u64 {
        self.header.virtual_bytes / CLUSTER
    }

    /// All metadata clusters, in no order; a damaged image may name one twice.
    pub(crate) fn metadata_clusters(&self) -> impl Iterator<Item = u64> {
        let run = |offset: u64, count: u64| (0..count).map(move |n| offset / CLUSTER + n);
        let l1_clusters = (u64::from(self.header.l1_entries) * 8).div_ceil(CLUSTER);
        run(0, 1)
            .chain(run(self.header.refcount_table_offset, self.header.refcount_table_clusters.into()))
            .chain(run(self.header.l1_offset, l1_clusters))
            .chain(self.blocks.iter().chain(&self.l2).map(|offset| offset / CLUSTER))
    }
}

/// Reads and parses an image's header.
pub(crate) fn read_header(host: &dyn Host, length: u64, path: &Path) -> Result<Header, Error> {
    let mut bytes = vec![0; PREFIX.min(length) as usize];
    host.read(&mut bytes, 0).map_err(|source| Error::io(path, "read the header of", source))?;
    Header::parse(&bytes).map_err(|flaw| flaw.at(path))
}

/// Reads big-endian numbers of 8 bytes.
pub(crate) fn read_numbers(host: &dyn Host, offset: u64, count: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; count as usize * 8];
    host.read(&mut bytes, offset)?;
    let (numbers, _) = bytes.as_chunks();
    Ok(numbers.iter().map(|bytes| u64::from_be_bytes(*bytes)).collect())
}

/// Everything about the header that writing depends on.
fn gate(header: &Header) -> Result<Torpor, Flaw> {
    let Some(torpor) = header.torpor.clone() else {
        return Err(Flaw::unsupported("it isn't an overlay of torpor's; import it first"));
    };
    if header.incompatible & INCOMPATIBLE_CORRUPT != 0 {
        return Err(Flaw::corrupt("another program marked it as corrupt"));
    }
    let limits = Layout::for_size(header.virtual_bytes)?;
    let odd = [
        (header.version != 3, "its version isn't 3"),
        (header.cluster_bits != CLUSTER_BITS, "its clusters aren't of 64 KiB"),
        (header.refcount_order != 4, "its refcounts aren't of 16 bits"),
        (header.encryption != 0, "it is encrypted"),
        (header.snapshots != 0, "it has internal snapshots"),
        (header.incompatible & INCOMPATIBLE_DIRTY != 0, "its lazy refcounts were left dirty"),
        (header.incompatible & !INCOMPATIBLE_DIRTY != 0, "it has incompatible features"),
        (header.compatible != 0 || header.autoclear != 0, "it has optional features"),
        (header.compression != 0, "it has another compression"),
        (!header.virtual_bytes.is_multiple_of(CLUSTER), "its size isn't a multiple of 64 KiB"),
        (u64::from(header.l1_entries) != l2_tables(header.virtual_bytes), "its L1 table isn't of its size"),
        (
            u64::from(header.refcount_table_clusters) > limits.refcount_table.1 + 3,
            "its refcount table is too large",
        ),
        (header.refcount_table_clusters == 0, "it has no refcount table"),
        (header.l1_offset == 0 || header.refcount_table_offset == 0, "it has no tables"),
    ];
    match odd.iter().find(|(found, _)| *found) {
        Some((_, what)) => Err(Flaw::unsupported(format!("{what}, so it isn't written to; import it first"))),
        None => Ok(torpor),
    }
}

/// The two tables that the header refers to lie inside the file.
fn tables_inside(header: &Header, length: u64) -> Result<(), Flaw> {
    let l1 = (header.l1_offset, u64::from(header.l1_entries) * 8);
    let refcounts = (header.refcount_table_offset, u64::from(header.refcount_table_clusters) * CLUSTER);
    for (name, (offset, bytes)) in [("L1", l1), ("refcount", refcounts)] {
        if offset.checked_add(bytes).is_none_or(|end| end > length) {
            return Err(Flaw::corrupt(format!("the {name} table at {offset:#x} isn't inside the file")));
        }
    }
    Ok(())
}

fn l1_targets(l1: &[u64], length: u64) -> Result<Vec<u64>, Flaw> {
    let target = |(number, entry): (usize, &u64)| {
        if *entry == 0 {
            return Err(Flaw::unsupported(format!(
                "L2 table {number} is missing; another program resized it"
            )));
        }
        let offset = entry & OFFSET;
        if *entry != offset | COPIED {
            return Err(Flaw::corrupt(format!("L1 entry {number} is {entry:#x}")));
        }
        table_offset(offset, length)
            .ok_or_else(|| Flaw::corrupt(format!("L2 table {number} is at {offset:#x}")))
    };
    l1.iter().enumerate().map(target).collect()
}

fn block_targets(table: &[u64], length: u64) -> Result<Vec<u64>, Flaw> {
    let count = table.iter().position(|entry| *entry == 0).unwrap_or(table.len());
    if table[count..].iter().any(|entry| *entry != 0) {
        return Err(Flaw::unsupported(format!("refcount block {count} is missing; import it first")));
    }
    let target = |(number, entry): (usize, &u64)| {
        table_offset(*entry, length)
            .ok_or_else(|| Flaw::corrupt(format!("refcount block {number} is at {entry:#x}")))
    };
    let most = refcount_room(MAX_VIRTUAL / CLUSTER + 2 * l2_tables(MAX_VIRTUAL)).1;
    if count as u64 > most {
        return Err(Flaw::unsupported(format!("{count} refcount blocks are more than any overlay needs")));
    }
    table[..count].iter().enumerate().map(target).collect()
}

/// A table's offset is a cluster's, isn't the header's, and lies inside the file.
fn table_offset(offset: u64, length: u64) -> Option<u64> {
    let inside = offset.checked_add(CLUSTER).is_some_and(|end| end <= length);
    (offset != 0 && offset.is_multiple_of(CLUSTER) && inside).then_some(offset)
}

/// Writes generation and state in place and makes them durable.
pub(crate) fn write_state(
    host: &dyn Host,
    torpor: &Torpor,
    generation: u64,
    state: header::State,
) -> io::Result<()> {
    host.write(&header::generation_and_state(generation, state), torpor.offset)?;
    host.sync()
}
