//! The check of an image with our layout: what its references say, against what its refcounts say.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use crate::bitmap::Bitmap;
use crate::block::Host;
use crate::error::{Error, Flaw};
use crate::layout::{BLOCK_REFCOUNTS, CLUSTER, TABLE_ENTRIES};
use crate::tables::{COMPRESSED, COPIED, Mapping, OFFSET, Tables, ZERO};

/// Flaws that are described one by one; more are only counted.
const DESCRIBED: usize = 16;
/// Refcounts are written in pieces of this many bytes.
pub(crate) const PIECE: u64 = 4096;
/// Refcounts in a piece.
pub(crate) const PIECE_REFCOUNTS: u64 = PIECE / 2;

/// What [`crate::check`] finds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Descriptions of damage, the first 16 of them. Empty: every byte that can be reached is in order.
    pub damage: Vec<String>,
    /// How many damages there are.
    pub damages: u64,
    /// Clusters (of 64 KiB) that count as used but that nothing refers to: space lost until the next opening for
    /// writing or [`crate::repair`], but no harm.
    pub leaked_clusters: u64,
    /// Clusters that hold content of the guest's.
    pub data_clusters: u64,
    /// Guest clusters that read as zeros without taking space.
    pub zero_clusters: u64,
    /// True when the last writer didn't close it: it is open now, or its writer died.
    pub unclean: bool,
}

/// A report, and what a writer needs to go on from there.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    pub(crate) report: Report,
    /// Host clusters that something refers to.
    pub(crate) used: Bitmap,
    /// Pieces of refcounts that count leaked clusters.
    pub(crate) leaking: BTreeSet<u64>,
    /// Guest clusters that another program has compressed.
    compressed: u64,
}

impl Scan {
    fn damage(&mut self, text: impl FnOnce() -> String) {
        self.report.damages += 1;
        if self.report.damage.len() < DESCRIBED {
            self.report.damage.push(text());
        }
    }

    /// The error of an image that isn't to be written to.
    pub(crate) fn refuse_damage(self, path: &Path) -> Result<Self, Error> {
        match self.report.damage.first() {
            _ if self.compressed > 0 => Err(Flaw::unsupported(format!(
                "another program has compressed {} clusters, which are read but not written to; export it to a new image",
                self.compressed
            ))
            .at(path)),
            None => Ok(self),
            Some(first) => {
                let more = self.report.damages - 1;
                Err(Flaw::corrupt(format!("{first} (and {more} more flaws)")).at(path))
            }
        }
    }
}

/// Follows all references, then compares them with the refcounts.
pub(crate) fn scan(host: &dyn Host, tables: &Tables, path: &Path) -> Result<Scan, Error> {
    let mut scan = Scan::default();
    scan.report.unclean = tables.torpor.state == crate::header::State::Open;
    for cluster in tables.metadata_clusters() {
        if !scan.used.set(cluster) {
            scan.damage(|| format!("two tables share cluster {cluster}"));
        }
    }
    let failed = |source| Error::io(path, "check", source);
    let bounds = Bounds {
        clusters: tables.counted_clusters().min(host.length().map_err(failed)?.div_ceil(CLUSTER)),
        guest: tables.guest_clusters(),
    };
    for (number, offset) in tables.l2.iter().enumerate() {
        scan_l2(host, &mut scan, &bounds, number as u64, *offset).map_err(failed)?;
    }
    if let Some(cluster) = tables.metadata_clusters().find(|cluster| *cluster >= tables.counted_clusters()) {
        scan.damage(|| format!("the table in cluster {cluster} isn't counted by any refcount block"));
    }
    for (number, offset) in tables.blocks.iter().enumerate() {
        scan_block(host, &mut scan, number as u64, *offset).map_err(failed)?;
    }
    Ok(scan)
}

struct Bounds {
    /// Host clusters that may be referred to.
    clusters: u64,
    /// Guest clusters of the disk.
    guest: u64,
}

fn scan_l2(host: &dyn Host, scan: &mut Scan, bounds: &Bounds, number: u64, offset: u64) -> io::Result<()> {
    let mut bytes = vec![0; CLUSTER as usize];
    let (mut at, end) = (offset, offset + CLUSTER);
    while at < end {
        let (start, stop) = host.next_data(at, end)?;
        // Whole entries, whatever the host's block size is.
        let (start, stop) = (start & !7, stop.next_multiple_of(8).min(end));
        let piece = &mut bytes[..(stop - start) as usize];
        host.read(piece, start)?;
        let (entries, _) = piece.as_chunks();
        for (n, entry) in entries.iter().enumerate() {
            let guest = number * TABLE_ENTRIES + (start - offset) / 8 + n as u64;
            scan_entry(scan, bounds, guest, u64::from_be_bytes(*entry));
        }
        at = stop.max(at + 1);
    }
    Ok(())
}

fn scan_entry(scan: &mut Scan, bounds: &Bounds, guest: u64, entry: u64) {
    if entry == 0 {
        return;
    }
    if guest >= bounds.guest {
        return scan.damage(|| format!("the entry of guest cluster {guest}, beyond the end, is {entry:#x}"));
    }
    if entry & COMPRESSED != 0 {
        scan.compressed += 1;
        return scan.damage(|| format!("guest cluster {guest} is compressed"));
    }
    if entry & !(OFFSET | COPIED | ZERO) != 0 {
        return scan.damage(|| format!("the entry of guest cluster {guest} is {entry:#x}"));
    }
    let mapping = Mapping::of(entry);
    let Some(cluster) = mapping.host() else {
        if entry != ZERO {
            return scan.damage(|| format!("the entry of guest cluster {guest} is {entry:#x}"));
        }
        scan.report.zero_clusters += 1;
        return;
    };
    if !(entry & OFFSET).is_multiple_of(CLUSTER) || entry & COPIED == 0 || cluster >= bounds.clusters {
        return scan.damage(|| format!("the entry of guest cluster {guest} is {entry:#x}"));
    }
    if !scan.used.set(cluster) {
        return scan.damage(|| format!("guest cluster {guest} shares host cluster {cluster}"));
    }
    match mapping {
        Mapping::Data(_) => scan.report.data_clusters += 1,
        _ => scan.report.zero_clusters += 1,
    }
}

fn scan_block(host: &dyn Host, scan: &mut Scan, number: u64, offset: u64) -> io::Result<()> {
    let mut bytes = [0; PIECE as usize];
    let pieces = CLUSTER / PIECE;
    for piece in 0..pieces {
        let at = offset + piece * PIECE;
        let first = number * BLOCK_REFCOUNTS + piece * PIECE_REFCOUNTS;
        let hole = host.next_data(at, at + PIECE)?.0 == at + PIECE;
        if hole && !scan.used.any(first, first + PIECE_REFCOUNTS) {
            continue;
        }
        host.read(&mut bytes, at)?;
        scan_piece(scan, first, &bytes);
    }
    Ok(())
}

fn scan_piece(scan: &mut Scan, first: u64, bytes: &[u8]) {
    let (counts, _) = bytes.as_chunks();
    for (cluster, count) in (first..).zip(counts) {
        match (scan.used.get(cluster), u16::from_be_bytes(*count)) {
            (true, 1) | (false, 0) => {}
            (true, count) => {
                scan.damage(|| format!("cluster {cluster} is used once, its refcount is {count}"));
            }
            (false, _) => {
                scan.report.leaked_clusters += 1;
                scan.leaking.insert(first / PIECE_REFCOUNTS);
            }
        }
    }
}
