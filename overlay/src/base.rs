//! The identity of a base image, and the proof that a file still is that base.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::files::{NewFile, read_up_to};
use crate::inspect::inspect;

/// Name of the file beside a base that says which bytes were hashed when.
const STAMP_FILE: &str = "verified.json";
/// Bytes hashed at a time.
const CHUNK: usize = 1 << 20;
/// A file changed later than this long before its hashing began gets no stamp: with the coarse time stamps of
/// older kernels a further change could carry the same ctime.
const SETTLE_NANOS: i64 = 100_000_000;

/// Names the bytes of a base image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseIdentity {
    /// `sha256:` and 64 hex digits, over the whole file. Empty in [`crate::Info`] for an image that isn't ours.
    pub digest: String,
    /// Size of the file in bytes.
    pub size: u64,
}

/// Checks that `base` is the file that `overlay` was made over.
///
/// The file is hashed only when its device, inode, size, mtime or ctime differ from those noted in
/// `verified.json` beside it after the last hashing. The ctime can't be set back, so that a base that was
/// replaced or changed in place is found even when its size and mtime are the same.
///
/// # Errors
/// [`Error::BaseMissing`], [`Error::BaseChanged`]; those of [`inspect`] for the overlay; [`Error::Unsupported`]
/// for an overlay that records no identity.
pub fn verify_base(overlay: &Path, base: &Path) -> Result<(), Error> {
    let info = inspect(overlay)?;
    if !info.ours {
        return Err(Error::Unsupported {
            path: overlay.to_path_buf(),
            detail: "it records no base identity, so its base can't be verified; import it first".to_owned(),
        });
    }
    verify_identity(base, &info.base).map(drop)
}

/// [`verify_base`] against a known identity; returns the very file that was verified.
pub(crate) fn verify_identity(base: &Path, identity: &BaseIdentity) -> Result<File, Error> {
    let (file, metadata) = open_base(base, identity)?;
    let stamp = Stamp::of(&metadata);
    if let Some(known) = Stamps::load(base).get(base)
        && known.stamp == stamp
    {
        return compare(base, identity, known.digest.clone()).map(|()| file);
    }
    let begun = now_nanos();
    let digest = hash(&file, base)?;
    let after = file.metadata().map_err(|source| Error::io(base, "inspect base image", source))?;
    if Stamp::of(&after) != stamp {
        return Err(changed(base, identity, "a file that was written to while it was read".to_owned()));
    }
    if stamp.ctime_nanos.saturating_add(SETTLE_NANOS) < begun {
        // Best effort: without a stamp the next start hashes again.
        let _ = Stamps::save(base, Verified { stamp, digest: digest.clone() });
    }
    compare(base, identity, digest).map(|()| file)
}

/// Opens a base and checks what is cheap: that it is there, is a file, and has the size.
pub(crate) fn open_base(base: &Path, identity: &BaseIdentity) -> Result<(File, Metadata), Error> {
    let file = File::open(base).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => {
            Error::BaseMissing { path: base.to_path_buf(), digest: identity.digest.clone() }
        }
        _ => Error::io(base, "open base image", source),
    })?;
    let metadata = file.metadata().map_err(|source| Error::io(base, "inspect base image", source))?;
    if !metadata.is_file() {
        return Err(changed(base, identity, "something other than a regular file".to_owned()));
    }
    if metadata.len() != identity.size {
        return Err(Error::BaseChanged {
            path: base.to_path_buf(),
            expected: format!("{} of {} bytes", identity.digest, identity.size),
            found: format!("a file of {} bytes", metadata.len()),
        });
    }
    Ok((file, metadata))
}

fn compare(base: &Path, identity: &BaseIdentity, found: String) -> Result<(), Error> {
    match found == identity.digest {
        true => Ok(()),
        false => Err(changed(base, identity, found)),
    }
}

fn changed(base: &Path, identity: &BaseIdentity, found: String) -> Error {
    Error::BaseChanged { path: base.to_path_buf(), expected: identity.digest.clone(), found }
}

/// Hashes a whole file: `sha256:` and 64 hex digits. Holes are hashed as the zeros they are without being read.
///
/// # Errors
/// [`Error::DataMissing`] when there is no such file, [`Error::Io`] when it can't be read.
pub fn sha256_file(path: &Path) -> Result<String, Error> {
    let file = File::open(path).map_err(|source| Error::data(path, "open", source))?;
    hash(&file, path)
}

fn hash(file: &File, path: &Path) -> Result<String, Error> {
    let failed = |source| Error::io(path, "hash", source);
    let size = file.metadata().map_err(failed)?.len();
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    let zeros = vec![0; CHUNK];
    let mut at = 0;
    while at < size {
        let data = next_data(file, at, size).map_err(failed)?;
        feed_zeros(&mut hasher, &zeros, data.0 - at);
        at = data.0;
        while at < data.1 {
            let length = CHUNK.min(usize::try_from(data.1 - at).unwrap_or(CHUNK));
            let count = read_up_to(file, &mut buffer[..length], at).map_err(failed)?;
            if count == 0 {
                return Err(failed(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter")));
            }
            hasher.update(&buffer[..count]);
            at += count as u64;
        }
    }
    Ok(format!("sha256:{}", hex(&hasher.finalize())))
}

fn feed_zeros(hasher: &mut Sha256, zeros: &[u8], mut count: u64) {
    while count > 0 {
        let length = count.min(zeros.len() as u64);
        hasher.update(&zeros[..length as usize]);
        count -= length;
    }
}

/// The next extent of data at or after `from`, as (start, end); both are `size` when only a hole follows.
pub(crate) fn next_data(file: &File, from: u64, size: u64) -> io::Result<(u64, u64)> {
    let start = data_start(file, from, size)?;
    if start == size {
        return Ok((size, size));
    }
    match lseek(file, start as i64, Whence::SeekHole) {
        Ok(offset) => Ok((start, (offset as u64).min(size))),
        Err(Errno::ENXIO | Errno::EINVAL) => Ok((start, size)),
        Err(errno) => Err(errno.into()),
    }
}

/// The start of what [`next_data`] finds.
pub(crate) fn data_start(file: &File, from: u64, size: u64) -> io::Result<u64> {
    match lseek(file, from as i64, Whence::SeekData) {
        Ok(offset) => Ok((offset as u64).min(size)),
        Err(Errno::ENXIO) => Ok(size),
        Err(Errno::EINVAL) => Ok(from), // no SEEK_DATA on this file system: all is data
        Err(errno) => Err(errno.into()),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|n| char::from_digit(n.into(), 16))
        .collect()
}

fn now_nanos() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i64)
}

/// What tells that a file's content may have changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    /// Nanoseconds since 1970, as 64 bits hold until 2262.
    mtime_nanos: i64,
    ctime_nanos: i64,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        let nanos = |seconds: i64, nanos: i64| seconds.saturating_mul(1_000_000_000).saturating_add(nanos);
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.len(),
            mtime_nanos: nanos(metadata.mtime(), metadata.mtime_nsec()),
            ctime_nanos: nanos(metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Verified {
    stamp: Stamp,
    digest: String,
}

/// The content of `verified.json`: one entry for each base in the directory, by file name.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
struct Stamps(BTreeMap<String, Verified>);

impl Stamps {
    fn path(base: &Path) -> PathBuf {
        base.with_file_name(STAMP_FILE)
    }

    fn key(base: &Path) -> String {
        base.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Nothing or nonsense there means nothing verified.
    fn load(base: &Path) -> Self {
        std::fs::read(Self::path(base))
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default()
    }

    fn get(&self, base: &Path) -> Option<&Verified> {
        self.0.get(&Self::key(base))
    }

    fn save(base: &Path, verified: Verified) -> Result<(), Error> {
        let mut stamps = Self::load(base);
        stamps.0.insert(Self::key(base), verified);
        let path = Self::path(base);
        let bytes = serde_json::to_vec_pretty(&stamps)
            .map_err(|error| Error::io(&path, "encode", io::Error::other(error)))?;
        let new = NewFile::beside(&path)?;
        new.file().write_all(&bytes).map_err(|source| Error::io(new.path(), "write", source))?;
        new.replace()
    }
}
