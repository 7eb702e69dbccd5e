//! Making an overlay.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::base::{BaseIdentity, open_base};
use crate::error::Error;
use crate::files::NewFile;
use crate::header::{self, BaseFormat};
use crate::layout::{CLUSTER, Layout};
use crate::tables::COPIED;

/// Makes an overlay of `size` bytes (rounded up to 64 KiB) over the raw image `base`, which `identity` names.
///
/// The file appears under its name complete and durable, or not at all. It takes about 16 KiB on the host, as the
/// tables are holes.
///
/// # Errors
/// [`Error::AlreadyExists`] when there is a file at `path` (it stays as it is), [`Error::BaseMissing`] and
/// [`Error::BaseChanged`] when the base isn't there or has another size (its digest is checked at each start by
/// [`crate::verify_base`]), [`Error::TooSmall`] when `size` is below the base's, [`Error::Unsupported`] above
/// 16 TiB or for a base path of more than 1023 bytes, [`Error::NoSpace`] and [`Error::Io`].
pub fn create(path: &Path, base: &Path, identity: &BaseIdentity, size: u64) -> Result<(), Error> {
    if path.symlink_metadata().is_ok() {
        return Err(Error::AlreadyExists { path: path.to_path_buf() });
    }
    let base = std::path::absolute(base).map_err(|source| Error::io(base, "resolve", source))?;
    open_base(&base, identity)?;
    if size < identity.size {
        return Err(Error::TooSmall { path: path.to_path_buf(), size, minimum: identity.size });
    }
    let layer = Layer { path: &base, format: BaseFormat::Raw, identity, generation: 0 };
    prepare(path, &layer, size)?.publish()
}

/// What a new overlay stands on.
pub(crate) struct Layer<'a> {
    /// An absolute path; empty for a standalone image.
    pub(crate) path: &'a Path,
    pub(crate) format: BaseFormat,
    pub(crate) identity: &'a BaseIdentity,
    /// The new overlay's generation.
    pub(crate) generation: u64,
}

/// Writes a new overlay that has no name yet; the caller has checked the layer.
pub(crate) fn prepare(path: &Path, layer: &Layer<'_>, size: u64) -> Result<NewFile, Error> {
    let layout = Layout::for_size(size).map_err(|flaw| flaw.at(path))?;
    let header = header::encode(&layout, layer).map_err(|flaw| flaw.at(path))?;
    let new = NewFile::beside(path)?;
    write_tables(new.file(), &layout, &header).map_err(|source| Error::io(new.path(), "write", source))?;
    Ok(new)
}

fn write_tables(file: &File, layout: &Layout, header: &[u8]) -> io::Result<()> {
    file.set_len(layout.metadata_clusters() * CLUSTER)?;
    file.write_all_at(header, 0)?;
    let (first, count) = layout.refcount_blocks;
    write_numbers(file, layout.refcount_table.0, (0..count).map(|n| ((first + n) * CLUSTER).to_be_bytes()))?;
    // One after the other, the refcount blocks are one array.
    let ones = (0..layout.metadata_clusters()).map(|_| 1u16.to_be_bytes());
    write_numbers(file, layout.refcount_blocks.0, ones)?;
    let (first, count) = layout.l2;
    write_numbers(file, layout.l1.0, (0..count).map(|n| (((first + n) * CLUSTER) | COPIED).to_be_bytes()))
}

fn write_numbers<const N: usize>(
    file: &File,
    cluster: u64,
    numbers: impl Iterator<Item = [u8; N]>,
) -> io::Result<()> {
    let bytes: Vec<u8> = numbers.flatten().collect();
    file.write_all_at(&bytes, cluster * CLUSTER)
}
