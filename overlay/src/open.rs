//! Opening an overlay: lock, bases, check, generation.

use std::fs::File;
use std::path::Path;

use crate::base::verify_identity;
use crate::block::{Block, Raw};
use crate::check::scan;
use crate::error::{Error, Flaw};
use crate::header::{BaseFormat, Header, State};
use crate::image::Image;
use crate::inspect::read_header;
use crate::lock::Lock;
use crate::overlay::Overlay;
use crate::remove::noted_children;
use crate::tables::{Tables, write_state};

/// Layers beneath an overlay at most. Each costs every read of untouched content a look-up.
const MOST_BASES: usize = 8;

/// Opens an overlay for writing: takes its lock, verifies its base by digest, checks it, gives leaked clusters back,
/// raises its generation.
///
/// `bases` are the files that it stands on, the nearest first: one raw image, or sealed overlays and then a raw image;
/// none for a standalone image. They are taken from here only, never from the names in headers.
///
/// # Errors
/// [`Error::Locked`], [`Error::DataMissing`], [`Error::BaseMissing`], [`Error::BaseChanged`], [`Error::Corrupt`],
/// [`Error::Sealed`], [`Error::Unsupported`], [`Error::NoSpace`], [`Error::Io`].
pub fn open(path: &Path, bases: &[&Path]) -> Result<Overlay, Error> {
    open_locked(Lock::acquire(path)?, bases)
}

/// [`open`] with a lock that is held already. The lock goes over into the overlay.
///
/// # Errors
/// Those of [`open`].
pub fn open_locked(lock: Lock, bases: &[&Path]) -> Result<Overlay, Error> {
    let header = read_header(lock.file(), lock.path())?;
    let base = open_bases(&header, lock.path(), bases)?;
    Overlay::open_locked(lock, base)
}

/// [`open_locked`] over one raw base that the caller has open and has verified by its digest: of it only the size is checked
/// here. For a VM's process, which is handed descriptors. `base_path` is for messages.
///
/// # Errors
/// Those of [`open_locked`].
pub fn open_locked_over(lock: Lock, base: File, base_path: &Path) -> Result<Overlay, Error> {
    let header = read_header(lock.file(), lock.path())?;
    let raw_base = header.torpor.as_ref().filter(|torpor| torpor.format == BaseFormat::Raw);
    let Some(torpor) = raw_base else {
        return Err(Flaw::unsupported("it isn't an overlay over a raw base").at(lock.path()));
    };
    let metadata = base.metadata().map_err(|source| Error::io(base_path, "inspect base image", source))?;
    if metadata.len() != torpor.identity.size {
        return Err(Error::BaseChanged {
            path: base_path.to_path_buf(),
            expected: format!("{} of {} bytes", torpor.identity.digest, torpor.identity.size),
            found: format!("a file of {} bytes", metadata.len()),
        });
    }
    let raw = Raw::from_file(base, false).map_err(|source| Error::io(base_path, "inspect", source))?;
    Overlay::open_locked(lock, Box::new(raw))
}

/// Opens an overlay, sealed or not, for reading, without a lock: for an overlay that no one writes to.
///
/// # Errors
/// Those of [`open`] but [`Error::Locked`].
pub fn open_read_only(path: &Path, bases: &[&Path]) -> Result<Image, Error> {
    let file = File::open(path).map_err(|source| Error::data(path, "open overlay", source))?;
    read_only_from(file, path, bases)
}

fn read_only_from(file: File, path: &Path, bases: &[&Path]) -> Result<Image, Error> {
    let header = read_header(&file, path)?;
    let base = open_bases(&header, path, bases)?;
    Image::from_file(file, Some(base), path)
}

/// Raises the generation of an overlay whose content another program (QEMU) is about to write, and returns it.
/// [`open`] does this by itself.
///
/// # Errors
/// Those of [`open`]; an overlay that isn't fit for writing is refused here too, before the program starts.
pub fn raise_generation(lock: &Lock) -> Result<u64, Error> {
    let tables = Tables::load(lock.file(), lock.path())?;
    if tables.torpor.state == State::Sealed {
        return Err(sealed(lock.path()));
    }
    scan(lock.file(), &tables, lock.path())?.refuse_damage(lock.path())?;
    let generation = tables.torpor.generation.saturating_add(1);
    write_state(lock.file(), &tables.torpor, generation, State::Open)
        .map_err(|source| Error::io(lock.path(), "raise the generation of", source))?;
    Ok(generation)
}

/// Notes that the program that [`raise_generation`] was called for has ended in order, and that the overlay is sound.
///
/// # Errors
/// [`Error::Corrupt`] when it isn't, [`Error::Unsupported`], [`Error::Io`].
pub fn mark_closed(lock: &Lock) -> Result<(), Error> {
    let tables = Tables::load(lock.file(), lock.path())?;
    scan(lock.file(), &tables, lock.path())?.refuse_damage(lock.path())?;
    if tables.torpor.state != State::Open {
        return Ok(());
    }
    write_state(lock.file(), &tables.torpor, tables.torpor.generation, State::Clean)
        .map_err(|source| Error::io(lock.path(), "mark as closed", source))
}

pub(crate) fn sealed(path: &Path) -> Error {
    Error::Sealed { path: path.to_path_buf(), children: noted_children(path) }
}

/// Verifies and opens what an image stands on.
fn open_bases(header: &Header, path: &Path, bases: &[&Path]) -> Result<Box<dyn Block>, Error> {
    if bases.len() > MOST_BASES {
        let detail = format!("it stands on {} layers, more than {MOST_BASES}; flatten it", bases.len());
        return Err(Flaw::unsupported(detail).at(path));
    }
    let Some(torpor) = &header.torpor else {
        return Err(Flaw::unsupported("it isn't an overlay of torpor's; import it first").at(path));
    };
    let Some((nearest, further)) = bases.split_first() else {
        return match torpor.format {
            BaseFormat::None => Ok(Box::new(Nothing)),
            _ => Err(Flaw::unsupported("it stands on a base, which must be named with it").at(path)),
        };
    };
    match torpor.format {
        BaseFormat::None => Err(Flaw::unsupported("it stands on no base, but one was named").at(path)),
        BaseFormat::Raw if !further.is_empty() => {
            Err(Flaw::unsupported(format!("nothing stands beneath {}, which is raw", nearest.display()))
                .at(path))
        }
        BaseFormat::Raw => {
            let file = verify_identity(nearest, &torpor.identity)?;
            let raw = Raw::from_file(file, false).map_err(|source| Error::io(nearest, "inspect", source))?;
            Ok(Box::new(raw))
        }
        BaseFormat::Qcow2 => {
            let file = verify_identity(nearest, &torpor.identity)?;
            Ok(Box::new(read_only_from(file, nearest, further)?))
        }
    }
}

/// The base of a standalone image: no bytes.
pub(crate) struct Nothing;

impl Block for Nothing {
    fn size(&self) -> u64 {
        0
    }

    fn readv(&self, buffers: &mut [std::io::IoSliceMut<'_>], offset: u64) -> std::io::Result<()> {
        crate::block::check_range(0, offset, crate::block::total(buffers.iter().map(|buffer| buffer.len())))
    }

    fn writev(&self, _: &[std::io::IoSlice<'_>], _: u64) -> std::io::Result<()> {
        Err(crate::block::read_only())
    }

    fn flush(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> std::io::Result<()> {
        Err(crate::block::read_only())
    }

    fn write_zeroes(&self, _: u64, _: u64) -> std::io::Result<()> {
        Err(crate::block::read_only())
    }

    fn close(&self) -> std::io::Result<()> {
        Ok(())
    }
}
