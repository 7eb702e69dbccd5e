//! Looking after overlays that no one has open: check, repair, grow.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::alloc::{Allocator, piece_offset};
use crate::block::Host;
use crate::check::{PIECE_REFCOUNTS, Report, Scan, scan};
use crate::error::Error;
use crate::files::NewFile;
use crate::header::{OFFSET_L1_SIZE, OFFSET_SIZE, State};
use crate::layout::{
    BLOCK_REFCOUNTS, CLUSTER, Layout, MAX_VIRTUAL, SLACK, TABLE_ENTRIES, l2_tables, refcount_room,
};
use crate::lock::Lock;
use crate::open::sealed;
use crate::tables::{COPIED, Tables};

/// What a disk writes whole, whatever happens.
const SECTOR: u64 = 512;

/// Checks an overlay without changing it and without a lock. It must not be written to meanwhile, or the report is of
/// a mixture of old and new; for an overlay that is open see [`crate::Overlay::check`].
///
/// # Errors
/// [`Error::DataMissing`], [`Error::Io`]; [`Error::Corrupt`] and [`Error::Unsupported`] when its tables can't be
/// followed at all. Damage within them is in the report.
pub fn check(path: &Path) -> Result<Report, Error> {
    let file = File::open(path).map_err(|source| Error::data(path, "open overlay", source))?;
    let tables = Tables::load(&file, path)?;
    Ok(scan(&file, &tables, path)?.report)
}

/// What [`repair`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repaired {
    /// Clusters of 64 KiB that were given back.
    pub freed_clusters: u64,
    /// A sparse file with all metadata as it was before, at the same offsets; none when nothing was to be done.
    pub copy: Option<PathBuf>,
}

/// Gives leaked clusters back. All metadata is copied to a file beside the overlay first; damage is never touched.
///
/// # Errors
/// [`Error::Locked`], [`Error::Corrupt`] when there is more than leaks, and those of [`check`].
pub fn repair(path: &Path) -> Result<Repaired, Error> {
    let lock = Lock::acquire(path)?;
    let (tables, scan) = load_sound(lock.file(), path)?;
    if scan.leaking.is_empty() {
        return Ok(Repaired { freed_clusters: 0, copy: None });
    }
    let copy = copy_metadata(lock.file(), &tables, path)?;
    let failed = |source| Error::io(path, "repair", source);
    let freed_clusters = scan.report.leaked_clusters;
    write_refcounts(lock.file(), &tables, scan).map_err(failed)?;
    Ok(Repaired { freed_clusters, copy: Some(copy) })
}

/// Writes the refcounts of leaking pieces as the references say, and syncs.
pub(crate) fn write_refcounts(host: &dyn Host, tables: &Tables, scan: Scan) -> io::Result<()> {
    let leaking = scan.leaking.clone();
    let allocator = Allocator::new(scan.used, 0, tables.counted_clusters(), scan.leaking);
    for piece in leaking {
        host.write(&allocator.piece(piece), piece_offset(&tables.blocks, piece))?;
    }
    host.sync()
}

/// The tables of an image that may be written to, and its state.
pub(crate) fn load_sound(host: &dyn Host, path: &Path) -> Result<(Tables, Scan), Error> {
    let tables = Tables::load(host, path)?;
    if tables.torpor.state == State::Sealed {
        return Err(sealed(path));
    }
    let scan = scan(host, &tables, path)?.refuse_damage(path)?;
    Ok((tables, scan))
}

fn copy_metadata(file: &File, tables: &Tables, path: &Path) -> Result<PathBuf, Error> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".metadata-{}", tables.torpor.generation));
    let target = path.with_file_name(name);
    let new = NewFile::beside(&target)?;
    let mut bytes = vec![0; CLUSTER as usize];
    let mut copy = || -> io::Result<()> {
        new.file().set_len(Host::length(file)?)?;
        for cluster in tables.metadata_clusters() {
            let (from, end) = (cluster * CLUSTER, (cluster + 1) * CLUSTER);
            if file.next_data(from, end)?.0 == end {
                continue;
            }
            Host::read(file, &mut bytes, from)?;
            Host::write(new.file(), &bytes, from)?;
        }
        Ok(())
    };
    copy().map_err(|source| Error::io(&target, "copy the metadata to", source))?;
    new.replace()?;
    Ok(target)
}

/// Makes the disk larger. The overlay must not be in use; the guest sees the new size at its next start.
///
/// A crash in between leaves the old size, or the new one, and at most leaks.
///
/// # Errors
/// [`Error::TooSmall`] for a size below the present one (a disk never shrinks; the present size is no change),
/// [`Error::TooLarge`] beyond what the tables of this overlay have room for (at least 4 TiB, at most 16 TiB; it says what
/// to do instead), [`Error::Locked`], [`Error::Corrupt`], [`Error::NoSpace`], [`Error::Io`].
pub fn grow(path: &Path, size: u64) -> Result<(), Error> {
    let lock = Lock::acquire(path)?;
    grow_on(lock.file(), path, size)
}

/// [`grow`] of an image in any [`Host`]; `path` is for messages.
///
/// # Errors
/// Those of [`grow`] but [`Error::Locked`].
pub fn grow_on(host: &dyn Host, path: &Path, size: u64) -> Result<(), Error> {
    let (tables, scan) = load_sound(host, path)?;
    let present = tables.header.virtual_bytes;
    if size < present {
        return Err(Error::TooSmall { path: path.to_path_buf(), size, minimum: present });
    }
    let too_large = |maximum| Error::TooLarge { path: path.to_path_buf(), size, maximum };
    let layout = Layout::for_size(size).map_err(|_| too_large(MAX_VIRTUAL))?;
    if layout.virtual_bytes == present {
        return Ok(());
    }
    let plan = Growth::plan(&tables, layout.virtual_bytes, scan.used.end()).map_err(too_large)?;
    plan.carry_out(host, &tables, scan).map_err(|source| Error::io(path, "grow", source))
}

/// New tables after the last used cluster.
struct Growth {
    size: u64,
    /// First new refcount block (a cluster), and how many.
    blocks: (u64, u64),
    /// First new L2 table, and how many.
    l2: (u64, u64),
}

impl Growth {
    /// Where the new tables go; the largest possible size when there is no room for them.
    fn plan(tables: &Tables, size: u64, start: u64) -> Result<Self, u64> {
        let l2_total = l2_tables(size);
        let l1_room = tables.l2.len().div_ceil(TABLE_ENTRIES as usize) as u64 * TABLE_ENTRIES;
        let l2 = l2_total - tables.l2.len() as u64;
        let metadata = tables.metadata_clusters().count() as u64;
        // Either the guest's clusters are the most, or the numbers that are in use already are.
        let others = (metadata + l2 + size / CLUSTER).max(start + l2);
        let needed = refcount_room(others).1.max(tables.blocks.len() as u64);
        let blocks = needed - tables.blocks.len() as u64;
        let table_room = u64::from(tables.header.refcount_table_clusters) * TABLE_ENTRIES;
        if l2_total > l1_room || needed > table_room {
            let counted = table_room * BLOCK_REFCOUNTS;
            let beside = (metadata + l1_room + 2 * SLACK).max(start);
            return Err((l1_room * TABLE_ENTRIES)
                .min(counted.saturating_sub(beside))
                .min(MAX_VIRTUAL / CLUSTER)
                * CLUSTER);
        }
        Ok(Self { size, blocks: (start, blocks), l2: (start + blocks, l2) })
    }

    /// Refcounts, then references to them, then references to tables, then the size: each durable before the next.
    fn carry_out(&self, host: &dyn Host, tables: &Tables, mut scan: Scan) -> io::Result<()> {
        let end = self.l2.0 + self.l2.1;
        // What lies there is referred to by nothing; what comes there must be zeros.
        host.set_length(self.blocks.0 * CLUSTER)?;
        host.set_length(end * CLUSTER)?;
        let mut all = tables.clone();
        all.blocks.extend((0..self.blocks.1).map(|n| (self.blocks.0 + n) * CLUSTER));
        for cluster in self.blocks.0..end {
            scan.used.set(cluster);
            scan.leaking.insert(cluster / PIECE_REFCOUNTS);
        }
        write_refcounts(host, &all, scan)?;
        let first_block = tables.blocks.len() as u64;
        let table = tables.header.refcount_table_offset + first_block * 8;
        write_references(host, table, self.blocks, 0)?;
        // Not looked at before the size says so.
        let l1 = tables.header.l1_offset + tables.l2.len() as u64 * 8;
        write_references(host, l1, self.l2, COPIED)?;
        self.write_size(host, tables)
    }

    /// One write inside one sector: the size, and with it the number of L1 entries.
    fn write_size(&self, host: &dyn Host, tables: &Tables) -> io::Result<()> {
        let mut bytes = [0; OFFSET_L1_SIZE + 4 - OFFSET_SIZE];
        let l1_entries = tables.l2.len() as u32 + self.l2.1 as u32;
        bytes[..8].copy_from_slice(&self.size.to_be_bytes());
        bytes[OFFSET_L1_SIZE - OFFSET_SIZE..].copy_from_slice(&l1_entries.to_be_bytes());
        host.write(&bytes, OFFSET_SIZE as u64)?;
        host.sync()
    }
}

/// Writes references sector by sector, each durable before the next: a table must never have a gap.
fn write_references(host: &dyn Host, offset: u64, (first, count): (u64, u64), flag: u64) -> io::Result<()> {
    let bytes: Vec<u8> = (0..count).flat_map(|n| (((first + n) * CLUSTER) | flag).to_be_bytes()).collect();
    let to_sector_end = (SECTOR - offset % SECTOR) as usize;
    let (head, rest) = bytes.split_at(to_sector_end.min(bytes.len()));
    let mut at = offset;
    for piece in [head].into_iter().chain(rest.chunks(SECTOR as usize)) {
        host.write(piece, at)?;
        host.sync()?;
        at += piece.len() as u64;
    }
    Ok(())
}
