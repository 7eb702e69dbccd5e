//! What an overlay says of itself, read without a lock.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::base::BaseIdentity;
use crate::error::{Error, Flaw};
use crate::files::read_up_to;
use crate::header::{Header, PREFIX, State};
use crate::layout::CLUSTER_BITS;

/// What [`inspect`] finds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// Size of the disk that the guest sees, in bytes.
    pub virtual_bytes: u64,
    /// Bytes that the file takes on the host.
    pub used_bytes: u64,
    /// The base that the overlay was made over; empty when not [`Info::ours`].
    pub base: BaseIdentity,
    /// The backing file as the header names it, for display only; empty when there is none.
    pub base_path: PathBuf,
    /// Number of openings for writing so far; 0 when not [`Info::ours`].
    pub generation: u64,
    /// Made by this crate, with its layout.
    pub ours: bool,
    /// Read-only for ever, as other overlays stand on it (see [`crate::fork()`]).
    pub sealed: bool,
}

/// Reads an image's header and its use of the host's disk. Takes no lock; works on an image in use.
///
/// # Errors
/// [`Error::DataMissing`] when there is no such file, [`Error::Corrupt`] and [`Error::Unsupported`] with the
/// reason when it isn't a qcow2 image that this crate knows, [`Error::Io`] when it can't be read.
pub fn inspect(path: &Path) -> Result<Info, Error> {
    let file = File::open(path).map_err(|source| Error::data(path, "open overlay", source))?;
    let metadata = file.metadata().map_err(|source| Error::io(path, "inspect overlay", source))?;
    if !metadata.is_file() {
        return Err(Flaw::unsupported("it isn't a regular file").at(path));
    }
    let header = read_header(&file, path)?;
    let ours = header.cluster_bits == CLUSTER_BITS && header.version == 3 && header.torpor.is_some();
    let (base, generation, sealed) = match header.torpor {
        Some(torpor) if ours => (torpor.identity, torpor.generation, torpor.state == State::Sealed),
        _ => (BaseIdentity::default(), 0, false),
    };
    Ok(Info {
        virtual_bytes: header.virtual_bytes,
        used_bytes: metadata.blocks() * 512,
        base,
        base_path: PathBuf::from(OsString::from_vec(header.backing_name)),
        generation,
        ours,
        sealed,
    })
}

/// Reads and parses the header of an open image.
pub(crate) fn read_header(file: &File, path: &Path) -> Result<Header, Error> {
    let mut bytes = vec![0; PREFIX as usize];
    let count =
        read_up_to(file, &mut bytes, 0).map_err(|source| Error::io(path, "read the header of", source))?;
    Header::parse(&bytes[..count]).map_err(|flaw| flaw.at(path))
}
