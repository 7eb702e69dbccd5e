//! Whole disks into new files.

use std::io;
use std::path::Path;

use crate::base::{BaseIdentity, sha256_file};
use crate::block::{Block, Raw};
use crate::create::{Layer, prepare};
use crate::error::Error;
use crate::files::NewFile;
use crate::header::BaseFormat;
use crate::layout::CLUSTER;
use crate::lock::Lock;
use crate::open::{Nothing, open_read_only};
use crate::overlay::Overlay;
use crate::vectors::is_zero;

/// Bytes copied at a time.
const CHUNK: u64 = 16 * CLUSTER;

/// What kind of file [`export`] makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Byte for byte, zeros left out as holes.
    Raw,
    /// A qcow2 image without a base, with the layout of our overlays: it can be opened by [`crate::open()`] with no
    /// bases, and by other tools.
    Qcow2,
}

/// Writes a disk's content to a new file, which appears complete or not at all. Also the way to import a foreign
/// [`crate::Image`]. What is written to the disk meanwhile may or may not be in it.
///
/// `progress` is called with the bytes done, and all of them.
///
/// # Errors
/// [`Error::AlreadyExists`], [`Error::NoSpace`], [`Error::Io`]; [`Error::Unsupported`] above 16 TiB.
pub fn export(
    disk: &dyn Block,
    target: &Path,
    format: Format,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), Error> {
    if target.symlink_metadata().is_ok() {
        return Err(Error::AlreadyExists { path: target.to_path_buf() });
    }
    let failed = |source| Error::io(target, "export to", source);
    let new = match format {
        Format::Raw => NewFile::beside(target)?,
        Format::Qcow2 => {
            let identity = BaseIdentity::default();
            let layer =
                Layer { path: Path::new(""), format: BaseFormat::None, identity: &identity, generation: 0 };
            prepare(target, &layer, disk.size())?
        }
    };
    let file = new.file().try_clone().map_err(failed)?;
    let copy: Box<dyn Block> = match format {
        Format::Raw => {
            file.set_len(disk.size()).map_err(failed)?;
            Box::new(Raw::from_file(file, true).map_err(failed)?)
        }
        Format::Qcow2 => Box::new(Overlay::open_on(Box::new(file), Box::new(Nothing), new.path())?),
    };
    copy_content(disk, &*copy, progress).and_then(|()| copy.close()).map_err(failed)?;
    new.publish()
}

fn copy_content(from: &dyn Block, to: &dyn Block, progress: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
    let (size, mut at) = (from.size(), 0);
    let mut buffer = vec![0; CHUNK as usize];
    loop {
        let next = from.skip_zeros(at)?;
        if next >= size {
            progress(size, size);
            return Ok(());
        }
        // Whole clusters, so that the copy's are written once.
        at = next / CLUSTER * CLUSTER;
        let chunk = &mut buffer[..CHUNK.min(size - at) as usize];
        from.read(chunk, at)?;
        for (number, piece) in chunk.chunks(CLUSTER as usize).enumerate() {
            if !is_zero(piece) {
                to.write(piece, at + number as u64 * CLUSTER)?;
            }
        }
        at += chunk.len() as u64;
        progress(at, size);
    }
}

/// Makes a new raw base image from an overlay that isn't in use, and what it stands on. Returns the new base's
/// identity; the overlay stays as it is.
///
/// # Errors
/// [`Error::Locked`], those of [`crate::open_read_only`] and of [`export`].
pub fn flatten(
    path: &Path,
    bases: &[&Path],
    target: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<BaseIdentity, Error> {
    let _lock = Lock::acquire(path)?;
    let disk = open_read_only(path, bases)?;
    export(&disk, target, Format::Raw, progress)?;
    Ok(BaseIdentity { digest: sha256_file(target)?, size: disk.size() })
}
