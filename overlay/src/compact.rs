//! Giving space back to the host.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::block::{Block, Host};
use crate::create::{Layer, prepare};
use crate::engine::Engine;
use crate::error::Error;
use crate::inspect::inspect;
use crate::layout::{CLUSTER, TABLE_ENTRIES};
use crate::lock::Lock;
use crate::maintain::load_sound;
use crate::open::open;
use crate::overlay::Overlay;
use crate::tables::{COPIED, Mapping, Tables, ZERO, read_numbers};

/// Clusters that are punched together.
const BATCH: usize = 1024;
/// Clusters that are copied or looked at between two tellings of the progress: 16 MiB.
pub(crate) const TOLD: u64 = (16 << 20) / CLUSTER;

/// What [`compact`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compacted {
    /// Bytes that the file took on the host before.
    pub used_before: u64,
    /// Bytes that it takes now.
    pub used_after: u64,
}

/// Gives discarded, zeroed and leaked clusters of an overlay that isn't in use back to the host's file system.
///
/// `progress` is called with the bytes of the disk that have been looked at, and all of them, at least once for each
/// 16 MiB of data. When it unwinds, what was given up so far is given back and the overlay is closed on the way out.
///
/// # Errors
/// Those of [`crate::open()`]; [`Error::NoSpace`], [`Error::Io`].
pub fn compact(path: &Path, bases: &[&Path], progress: &mut dyn FnMut(u64, u64)) -> Result<Compacted, Error> {
    let used_before = inspect(path)?.used_bytes;
    let overlay = Opened(open(path, bases)?);
    let failed = |source| Error::io(path, "compact", source);
    overlay.0.give_back(progress).map_err(failed)?;
    overlay.0.close().map_err(failed)?;
    Ok(Compacted { used_before, used_after: inspect(path)?.used_bytes })
}

/// Closed also when its work is unwound from: `progress` is called between two clusters, where nothing is half done.
struct Opened(Overlay);

impl Drop for Opened {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // An overlay that can't be closed is looked over at its next opening.
            let _ = self.0.give_back_stale().and_then(|()| self.0.close());
        }
    }
}

/// Writes an overlay that isn't in use anew, with its content in order and nothing between, and puts that in its place:
/// for hosts that can't punch holes, and for files in many fragments. Takes room for a second copy meanwhile; a crash
/// leaves the old file. Base, identity and generation stay.
///
/// `progress` is as for [`compact`]; when it unwinds, the old file stays as it is.
///
/// # Errors
/// [`Error::Locked`], [`Error::Corrupt`], [`Error::Unsupported`], [`Error::NoSpace`], [`Error::Io`].
pub fn rewrite(path: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Compacted, Error> {
    let used_before = inspect(path)?.used_bytes;
    let lock = Lock::acquire(path)?;
    let (old, _) = load_sound(lock.file(), path)?;
    let layer = Layer {
        path: Path::new(OsStr::from_bytes(&old.header.backing_name)),
        format: old.torpor.format,
        identity: &old.torpor.identity,
        generation: old.torpor.generation,
    };
    let new = prepare(path, &layer, old.header.virtual_bytes)?;
    let tables = Tables::load(new.file(), new.path())?;
    let copy = Copy { from: lock.file(), to: new.file(), old: &old, new: &tables };
    copy.all(progress).map_err(|source| Error::io(new.path(), "write", source))?;
    new.replace()?;
    Ok(Compacted { used_before, used_after: inspect(path)?.used_bytes })
}

/// A copy into a new overlay that no one else knows of: the order of writes doesn't matter.
struct Copy<'a> {
    from: &'a File,
    to: &'a File,
    old: &'a Tables,
    new: &'a Tables,
}

impl Copy<'_> {
    fn all(&self, progress: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
        let first = self.new.metadata_clusters().count() as u64;
        let (mut next, size) = (first, self.old.header.virtual_bytes);
        for (number, (from, to)) in (1..).zip(self.old.l2.iter().zip(&self.new.l2)) {
            if self.from.next_data(*from, from + CLUSTER)?.0 < from + CLUSTER {
                let entries = read_numbers(self.from, *from, TABLE_ENTRIES)?;
                let mut bytes = Vec::with_capacity(entries.len() * 8);
                for (place, entry) in (1..).zip(entries) {
                    let before = next;
                    bytes.extend(self.entry(entry, &mut next)?.to_be_bytes());
                    if next != before && (next - first).is_multiple_of(TOLD) {
                        progress(size.min(((number - 1) * TABLE_ENTRIES + place) * CLUSTER), size);
                    }
                }
                self.to.write_all_at(&bytes, *to)?;
            }
            progress(size.min(number * TABLE_ENTRIES * CLUSTER), size);
        }
        // In a new overlay the refcount blocks are one array.
        let ones: Vec<u8> = (first..next).flat_map(|_| 1u16.to_be_bytes()).collect();
        self.to.write_all_at(&ones, self.new.blocks[0] + first * 2)
    }

    /// Copies what an entry refers to; returns the new one.
    fn entry(&self, entry: u64, next: &mut u64) -> io::Result<u64> {
        match Mapping::of(entry) {
            Mapping::Base => Ok(0),
            Mapping::Zero(_) => Ok(ZERO),
            Mapping::Data(host) => {
                let mut content = vec![0; CLUSTER as usize];
                Host::read(self.from, &mut content, host * CLUSTER)?;
                let offset = *next * CLUSTER;
                self.to.write_all_at(&content, offset)?;
                *next += 1;
                Ok(offset | COPIED)
            }
        }
    }
}

impl Engine {
    /// Punches the free clusters whose content is still there. They count as used meanwhile, so that none of them
    /// is handed out before its punching has ended.
    pub(crate) fn punch_stale(&self) {
        loop {
            let stale = self.meta().allocator.take_stale(BATCH);
            let more = stale.len() == BATCH;
            // A host that can't punch would be asked about the same clusters for ever.
            if !self.reuse(stale) || !more {
                return;
            }
        }
    }
}
