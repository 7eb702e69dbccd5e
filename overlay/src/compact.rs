//! Giving space back to the host.

use std::path::Path;

use crate::block::Block;
use crate::engine::Engine;
use crate::error::Error;
use crate::inspect::inspect;
use crate::open::open;

/// Clusters that are punched together.
const BATCH: usize = 1024;

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
/// `progress` is called with the bytes of the disk that have been looked at, and all of them.
///
/// # Errors
/// Those of [`crate::open()`]; [`Error::NoSpace`], [`Error::Io`].
pub fn compact(path: &Path, bases: &[&Path], progress: &mut dyn FnMut(u64, u64)) -> Result<Compacted, Error> {
    let used_before = inspect(path)?.used_bytes;
    let overlay = open(path, bases)?;
    let failed = |source| Error::io(path, "compact", source);
    overlay.give_back(progress).map_err(failed)?;
    overlay.close().map_err(failed)?;
    Ok(Compacted { used_before, used_after: inspect(path)?.used_bytes })
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
