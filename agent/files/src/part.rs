//! Files under way. They lie beside their place under names that nobody can guess: whoever else may write to the folder
//! can't have put anything there. What a broken transfer has left is gone on with only when it is this user's own file, and
//! nobody else's too.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    os::fd::{AsFd, OwnedFd},
    sync::{Mutex, PoisonError},
};

use nix::{
    dir::Dir,
    errno::Errno,
    fcntl::{AtFlags, Flock, FlockArg, OFlag, openat},
    sys::stat::{FileStat, Mode, fstat, fstatat},
    unistd::{UnlinkatFlags, geteuid, unlinkat},
};
use sha2::{Digest as _, Sha256};

use crate::{
    Kind, Place,
    error::FileError,
    read::{self, kind},
};

/// Begins the names of those that a later transfer may go on with, and of all others.
const KEPT: &str = ".torpor-part-";
const PASSING: &str = ".torpor-new-";
/// Letters of a kept one's name that stand for the name it will have.
const STEM: usize = KEPT.len() + 16 + 1;

/// The beginning of all kept ones for this name.
fn stem(name: &[u8]) -> String {
    let digest = Sha256::digest(name);
    let hex: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{KEPT}{hex}-")
}

/// A name that nobody has, and nobody knows before it is there.
pub(crate) fn passing_name() -> String {
    format!("{PASSING}{:032x}", rand::random::<u128>())
}

/// The same for one that may be gone on with.
pub(crate) fn kept_name(name: &[u8]) -> String {
    format!("{}{:032x}", stem(name), rand::random::<u128>())
}

/// Makes a file that was not there, for this user alone.
pub(crate) fn make(folder: impl AsFd, name: &str) -> nix::Result<File> {
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(folder, name, flags, Mode::from_bits_truncate(0o600)).map(File::from)
}

/// What broken transfers have left in a folder, as far as its names say: by the beginning of their names.
pub(crate) type Left = HashMap<String, Vec<String>>;

/// Reads the names of a folder. One that may not be read has nothing to go on with.
pub(crate) fn left_in(folder: &OwnedFd) -> Left {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let Ok(mut dir) = Dir::openat(folder, ".", flags, Mode::empty()) else { return Left::new() };
    let mut left = Left::new();
    for entry in dir.iter().flatten() {
        if let Ok(name) = entry.file_name().to_str()
            && name.starts_with(KEPT)
            && let Some(stem) = name.get(..STEM)
        {
            left.entry(stem.to_owned()).or_default().push(name.to_owned());
        }
    }
    left
}

/// Whether it is a file of this user's that nobody else can have written to: neither made by somebody else nor another
/// name of something.
fn is_ours(stat: &FileStat) -> bool {
    kind(stat) == Kind::File
        && stat.st_uid == geteuid().as_raw()
        && stat.st_nlink == 1
        && stat.st_mode & 0o077 == 0
}

fn looked_at(folder: &OwnedFd, name: &str) -> Option<FileStat> {
    fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW).ok().filter(is_ours)
}

/// Opens one of ours.
fn open(folder: &OwnedFd, name: &str) -> Option<File> {
    // So that a pipe in its place is not opened at all.
    looked_at(folder, name)?;
    let flags = OFlag::O_RDWR | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let file = openat(folder, name, flags, Mode::empty()).ok()?;
    fstat(&file).is_ok_and(|stat| is_ours(&stat)).then(|| File::from(file))
}

/// One that was left, and is nobody else's now.
pub(crate) struct Part {
    pub(crate) file: Flock<File>,
    pub(crate) name: String,
}

/// Those of a name that are ours; `EWOULDBLOCK` when one of them is written to.
pub(crate) fn parts(folder: &OwnedFd, name: &[u8], left: &Left) -> nix::Result<Vec<Part>> {
    let mut parts = Vec::new();
    for name in left.get(&stem(name)).into_iter().flatten() {
        let Some(file) = open(folder, name) else { continue };
        let file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((_, Errno::EWOULDBLOCK)) => return Err(Errno::EWOULDBLOCK),
            Err(_) => continue,
        };
        // Whoever had it until now may have given it its name meanwhile: then it is no part any more.
        let same = |stat: FileStat| fstat(&*file).is_ok_and(|ours| identity(&ours) == identity(&stat));
        if looked_at(folder, name).is_some_and(same) {
            parts.push(Part { file, name: name.clone() });
        }
    }
    Ok(parts)
}

impl Part {
    /// It will not be gone on with.
    pub(crate) fn remove(self, folder: &OwnedFd) {
        let _ = unlinkat(folder, self.name.as_str(), UnlinkatFlags::NoRemoveDir);
    }
}

/// How much the longest of ours has.
pub(crate) fn longest(folder: &OwnedFd, name: &[u8]) -> Option<u64> {
    longest_of(folder, name).map(|(size, _)| size)
}

fn longest_of(folder: &OwnedFd, name: &[u8]) -> Option<(u64, String)> {
    let left = left_in(folder);
    let all = left.get(&stem(name)).into_iter().flatten();
    let sized = |name: &String| {
        let size = looked_at(folder, name)?.st_size;
        Some((u64::try_from(size).unwrap_or(0), name.clone()))
    };
    all.filter_map(sized).max()
}

/// SHA-256 of the first `length` bytes of what a broken transfer to this path has left; none when there are not so many.
///
/// # Errors
/// When the folder can't be opened, or the part not be read.
pub fn digest_of_partial(place: &Place, path: &[u8], length: u64) -> Result<Option<Vec<u8>>, FileError> {
    let (folder, name) = match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&b"."[..], path),
    };
    let folder = place.at(folder, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
    let found = longest_of(&folder, name).and_then(|(_, name)| open(&folder, &name));
    match found {
        Some(mut file) => read::digest(&mut file, length, path),
        None => Ok(None),
    }
}

fn identity(stat: &FileStat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

/// A folder's identity, and a name in it.
type Claimed = ((u64, u64), Vec<u8>);

/// A name in a folder that one transfer of this program writes.
#[derive(Debug)]
pub(crate) struct Claim(Claimed);

static CLAIMS: Mutex<Option<HashSet<Claimed>>> = Mutex::new(None);

impl Claim {
    /// None: another one does.
    pub(crate) fn of(folder: &OwnedFd, name: &[u8]) -> nix::Result<Option<Self>> {
        let claimed = (identity(&fstat(folder)?), name.to_vec());
        let mut claims = CLAIMS.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(claims.get_or_insert_default().insert(claimed.clone()).then(|| Self(claimed)))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claims = CLAIMS.lock().unwrap_or_else(PoisonError::into_inner);
        claims.get_or_insert_default().remove(&self.0);
    }
}
