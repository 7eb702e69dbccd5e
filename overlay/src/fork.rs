//! Many overlays on one: the shared content is sealed, each fork gets an overlay of its own over it.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::base::{BaseIdentity, sha256_file};
use crate::block::Host;
use crate::check::scan;
use crate::create::{Layer, prepare};
use crate::error::{Error, Flaw};
use crate::files::sync_directory_of;
use crate::header::{BaseFormat, State};
use crate::inspect::inspect;
use crate::lock::Lock;
use crate::maintain::write_refcounts;
use crate::remove::note_children;
use crate::tables::{Tables, write_state};

/// Seals the overlay `path`, which isn't in use, under the name `sealed` (on the same file system), and makes new
/// overlays over it: one in its own place, and one for each of `children`. Returns the identity of the sealed file.
///
/// The new overlays are opened with `sealed` as the nearest base, followed by the bases of the old one. Their
/// generations go on from the old overlay's, so that no memory image made before fits them by chance.
///
/// Each step can be repeated: when a fork was interrupted, the same call finishes it (with the children that are
/// still missing). The sealed file must be kept as long as any overlay stands on it, in whatever order those go:
/// [`crate::remove()`] sees to that, by a note beside the sealed file and by the digest in [`crate::Info::base`].
///
/// # Errors
/// [`Error::Locked`], [`Error::Corrupt`]; [`Error::AlreadyExists`] for a child, or when `sealed` is another file;
/// [`Error::Unsupported`] when it is `path` itself; [`Error::NoSpace`], [`Error::Io`].
pub fn fork(path: &Path, sealed: &Path, children: &[&Path]) -> Result<BaseIdentity, Error> {
    let lock = Lock::acquire(path)?;
    let sealed = std::path::absolute(sealed).map_err(|source| Error::io(sealed, "resolve", source))?;
    if is_same_name(path, &sealed)? {
        return Err(Flaw::unsupported("an overlay can't be sealed under its own name").at(path));
    }
    let tables = seal(&lock)?;
    name(lock.file(), path, &sealed)?;
    let size = Host::length(lock.file()).map_err(|source| Error::io(path, "inspect", source))?;
    let identity = BaseIdentity { digest: sha256_file(&sealed)?, size };
    let generation = tables.torpor.generation.saturating_add(1);
    note_sealed(&tables, &sealed)?;
    let standing: Vec<&Path> = children.iter().copied().chain([path]).collect();
    note_children(&sealed, &identity, &standing)?;
    let layer = Layer { path: &sealed, format: BaseFormat::Qcow2, identity: &identity, generation };
    for child in children {
        prepare(child, &layer, tables.header.virtual_bytes)?.publish()?;
    }
    prepare(path, &layer, tables.header.virtual_bytes)?.replace()?;
    Ok(identity)
}

/// One and the same entry of a folder; a second name of the same file is another one.
fn is_same_name(path: &Path, sealed: &Path) -> Result<bool, Error> {
    let place = |path: &Path| {
        let folder = std::path::absolute(path)?.parent().unwrap_or(Path::new("/")).canonicalize()?;
        Ok(folder.join(path.file_name().unwrap_or_default()))
    };
    let failed = |source| Error::io(sealed, "resolve", source);
    Ok(place(path).map_err(failed)? == place(sealed).map_err(failed)?)
}

/// The sealed file takes the overlay's place on what that stands on. Where that is, is only known from the header's
/// name for it: the note goes there if the file is the one.
fn note_sealed(tables: &Tables, sealed: &Path) -> Result<(), Error> {
    let below = Path::new(OsStr::from_bytes(&tables.header.backing_name));
    let known = tables.torpor.format == BaseFormat::Qcow2 && inspect(below).is_ok_and(|info| info.sealed);
    match known {
        true => note_children(below, &tables.torpor.identity, &[sealed]),
        false => Ok(()),
    }
}

fn seal(lock: &Lock) -> Result<Tables, Error> {
    let tables = Tables::load(lock.file(), lock.path())?;
    if tables.torpor.state == State::Sealed {
        return Ok(tables);
    }
    let failed = |source| Error::io(lock.path(), "seal", source);
    let scan = scan(lock.file(), &tables, lock.path())?.refuse_damage(lock.path())?;
    write_refcounts(lock.file(), &tables, scan).map_err(failed)?;
    write_state(lock.file(), &tables.torpor, tables.torpor.generation, State::Sealed).map_err(failed)?;
    Ok(tables)
}

/// Gives the sealed file its second name.
fn name(file: &File, path: &Path, sealed: &Path) -> Result<(), Error> {
    if let Err(source) = std::fs::hard_link(path, sealed) {
        if source.kind() != std::io::ErrorKind::AlreadyExists {
            return Err(Error::io(sealed, "link the sealed overlay to", source));
        }
        let failed = |source| Error::io(sealed, "inspect", source);
        let (own, other) = (file.metadata().map_err(failed)?, sealed.metadata().map_err(failed)?);
        if (own.dev(), own.ino()) != (other.dev(), other.ino()) {
            return Err(Error::AlreadyExists { path: sealed.to_path_buf() });
        }
    }
    sync_directory_of(sealed)
}
