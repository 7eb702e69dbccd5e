//! Many overlays on one: the shared content is sealed, each fork gets an overlay of its own over it.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::base::{BaseIdentity, sha256_file};
use crate::block::Host;
use crate::check::scan;
use crate::create::{Layer, prepare};
use crate::error::Error;
use crate::files::sync_directory_of;
use crate::header::{BaseFormat, State};
use crate::lock::Lock;
use crate::maintain::write_refcounts;
use crate::tables::{Tables, write_state};

/// Seals the overlay `path`, which isn't in use, under the name `sealed` (on the same file system), and makes new
/// overlays over it: one in its own place, and one for each of `children`. Returns the identity of the sealed file.
///
/// The new overlays are opened with `sealed` as the nearest base, followed by the bases of the old one. Their
/// generations go on from the old overlay's, so that no memory image made before fits them by chance.
///
/// Each step can be repeated: when a fork was interrupted, the same call finishes it (with the children that are
/// still missing). The sealed file must be kept as long as any overlay stands on it, in whatever order those go; who
/// stands on it is told by the digest in [`crate::Info::base`].
///
/// # Errors
/// [`Error::Locked`], [`Error::Corrupt`]; [`Error::AlreadyExists`] for a child, or when `sealed` is another file;
/// [`Error::NoSpace`], [`Error::Io`].
pub fn fork(path: &Path, sealed: &Path, children: &[&Path]) -> Result<BaseIdentity, Error> {
    let lock = Lock::acquire(path)?;
    let sealed = std::path::absolute(sealed).map_err(|source| Error::io(sealed, "resolve", source))?;
    let tables = seal(&lock)?;
    name(lock.file(), path, &sealed)?;
    let size = Host::length(lock.file()).map_err(|source| Error::io(path, "inspect", source))?;
    let identity = BaseIdentity { digest: sha256_file(&sealed)?, size };
    let generation = tables.torpor.generation.saturating_add(1);
    let layer = Layer { path: &sealed, format: BaseFormat::Qcow2, identity: &identity, generation };
    for child in children {
        prepare(child, &layer, tables.header.virtual_bytes)?.publish()?;
    }
    prepare(path, &layer, tables.header.virtual_bytes)?.replace()?;
    Ok(identity)
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
