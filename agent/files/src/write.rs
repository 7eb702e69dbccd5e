//! Makes a tree of what comes.

use std::{
    fs::File,
    io::{Seek as _, SeekFrom, Write as _},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    sync::Arc,
};

use crate::{
    Entry, Kind, Name, Place, Time,
    error::{FileError, Problem, shown},
    part::{self, Claim, Left},
    path::folder_in,
    read,
};
use nix::{
    errno::Errno,
    fcntl::{AtFlags, Flock, FlockArg, OFlag, renameat},
    sys::{
        stat::{Mode, UtimensatFlags, fchmod, fstatat, futimens, mkdirat, utimensat},
        time::TimeSpec,
    },
    unistd::{UnlinkatFlags, fchown, fchownat, symlinkat, syncfs, unlinkat},
};

/// Files and folders that wait for one flush of the disk.
const BATCH: usize = 64;
/// Bytes that wait for one flush of the disk.
const BATCH_BYTES: u64 = 64 << 20;
/// New folders in each other at most: each of them takes a descriptor.
const DEEPEST: usize = 256;

/// Numbers of user and group.
pub type Owner = (u32, u32);

/// How a tree is made.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Who owns what is new; none: whoever runs this program.
    pub owner: Option<Owner>,
    /// Bits of a mode that are taken over.
    pub mode_mask: u32,
    /// A file whose end doesn't come stays as it is beside its place, for a transfer that goes on with it.
    pub keep_partial: bool,
    /// Files are brought to the disk before they get their names.
    pub flush: bool,
}

/// What was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Files.
    pub files: u64,
    /// Folders, those that were there already too.
    pub folders: u64,
    /// Symlinks.
    pub links: u64,
    /// Bytes that came: not those of an earlier try.
    pub bytes: u64,
}

/// Writes entries beneath a root. Dropped before [`Writer::finish`], it leaves the files that are complete, and of the
/// one under way nothing or its partial file.
pub struct Writer {
    root: Place,
    options: Options,
    current: Option<Current>,
    pending: Vec<Pending>,
    pending_bytes: u64,
    /// New folders, from the outermost to the one that is written in.
    open: Vec<Folder>,
    /// New folders that are complete, but for their modes and times.
    settled: Vec<Folder>,
    /// The folder of the last entry, and what was left in it, once that was looked at.
    last: Option<(Vec<u8>, Arc<OwnedFd>)>,
    left: Option<Left>,
    totals: Totals,
}

/// A file under way.
struct Current {
    file: Flock<File>,
    place: Spot,
    entry: Entry,
    written: u64,
    temporary: String,
    claim: Option<Claim>,
    /// It can't be gone on with.
    spoiled: bool,
}

/// A file that is complete and has not yet its name. Its lock is held until it has: nobody else writes to it.
struct Pending {
    file: Flock<File>,
    place: Spot,
    entry: Entry,
    temporary: String,
    _claim: Option<Claim>,
}

struct Folder {
    path: Vec<u8>,
    opened: OwnedFd,
    mode: u32,
    modified: Option<Time>,
}

/// A folder and a name in it.
struct Spot {
    folder: Arc<OwnedFd>,
    name: Vec<u8>,
    path: Vec<u8>,
}

impl Spot {
    fn failed(&self, what: &str) -> impl Fn(Errno) -> FileError + use<'_> {
        let what = what.to_owned();
        move |errno| FileError::of(&what, &self.path, errno)
    }
}

impl Writer {
    /// Writes into this folder and nowhere else.
    pub fn new(root: Place, options: Options) -> Self {
        Self {
            root,
            options,
            current: None,
            pending: Vec::new(),
            pending_bytes: 0,
            open: Vec::new(),
            settled: Vec::new(),
            last: None,
            left: None,
            totals: Totals::default(),
        }
    }

    /// Begins a file, or makes a folder or link. The last file must have ended.
    ///
    /// # Errors
    /// `BadPath` and `Escapes` for names that lead elsewhere, `PrefixDiffers` when there is nothing to go on with, and
    /// whatever the file system says.
    pub fn entry(&mut self, entry: Entry) -> Result<(), FileError> {
        if self.current.is_some() {
            return Err(FileError::new(Problem::Protocol, "an entry came before the last file had ended"));
        }
        let spot = self.spot(&entry.path)?;
        match entry.kind {
            Kind::File => self.file(entry, spot),
            Kind::Folder => self.folder(&entry, &spot),
            Kind::Link => self.link(&entry, &spot),
            Kind::Other => {
                let what = format!("'{}' is of a kind that can't be copied", shown(&entry.path));
                Err(FileError::new(Problem::NotAFile, what))
            }
        }
    }

    fn spot(&mut self, path: &[u8]) -> Result<Spot, FileError> {
        let (parent, name) = Name::check(path)?.split();
        while self.open.last().is_some_and(|folder| !is_in(parent, &folder.path)) {
            self.settled.extend(self.open.pop());
        }
        if self.pending.len() + self.settled.len() >= BATCH {
            self.flush()?;
        }
        let folder = match &self.last {
            Some((last, folder)) if last == parent => folder.clone(),
            _ => {
                let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
                let folder = Arc::new(self.root.at(parent, flags).map_err(|mut error| {
                    error.message = format!("{} (for '{}')", error.message, shown(path));
                    error
                })?);
                self.last = Some((parent.to_vec(), folder.clone()));
                self.left = None;
                folder
            }
        };
        Ok(Spot { folder, name: name.to_vec(), path: path.to_vec() })
    }

    fn file(&mut self, entry: Entry, spot: Spot) -> Result<(), FileError> {
        refuse_folder(&spot)?;
        let (file, temporary, claim) = if self.options.keep_partial {
            let (file, name, claim) = self.partial(&spot, &entry)?;
            (file, name, Some(claim))
        } else {
            let (file, name) = fresh(&spot, part::passing_name())?;
            (file, name, None)
        };
        let written = entry.offset;
        self.current = Some(Current { file, place: spot, entry, written, temporary, claim, spoiled: false });
        Ok(())
    }

    /// What an earlier transfer has left of this very file, or a new one in place of all that was left.
    fn partial(&mut self, spot: &Spot, entry: &Entry) -> Result<(Flock<File>, String, Claim), FileError> {
        let claim = Claim::of(&spot.folder, &spot.name).map_err(spot.failed("look at the folder of"))?;
        let claim = claim.ok_or_else(|| busy(spot))?;
        let left = self.left.get_or_insert_with(|| part::left_in(&spot.folder));
        let mut parts = part::parts(&spot.folder, &spot.name, left).map_err(|_| busy(spot))?;
        let mut chosen = None;
        if entry.offset > 0 {
            let mut differs = prefix_differs(entry);
            for at in 0..parts.len() {
                // What is not the beginning of this file stays: it may be that of another.
                match go_on(&mut parts[at].file, entry) {
                    Ok(()) => {
                        chosen = Some(parts.swap_remove(at));
                        break;
                    }
                    Err(error) => differs = error,
                }
            }
            if chosen.is_none() {
                return Err(differs);
            }
        }
        parts.into_iter().for_each(|part| part.remove(&spot.folder));
        let (file, name) = match chosen {
            Some(part) => (part.file, part.name),
            None => fresh(spot, part::kept_name(&spot.name))?,
        };
        Ok((file, name, claim))
    }

    /// Bytes of the file that was begun last.
    ///
    /// # Errors
    /// `Full` and the like; the file is then gone.
    pub fn data(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        let Some(current) = &mut self.current else {
            return Err(FileError::new(Problem::Protocol, "bytes came without a file"));
        };
        let length = bytes.len() as u64;
        if current.entry.size.is_some_and(|size| current.written + length > size) {
            let size = current.entry.size.unwrap_or(0);
            let text = format!(
                "'{}': more than the {size} bytes came that were promised",
                shown(&current.entry.path)
            );
            return Err(FileError::new(Problem::Protocol, text));
        }
        current.file.write_all(bytes).map_err(|error| {
            current.spoiled = true;
            FileError::io("write", &current.entry.path, &error)
        })?;
        current.written += length;
        self.totals.bytes += length;
        Ok(())
    }

    /// The file that was begun last is complete.
    ///
    /// # Errors
    /// `Protocol` when bytes are missing, and whatever the file system says.
    pub fn end_file(&mut self) -> Result<(), FileError> {
        let Some(current) = self.current.take() else {
            return Err(FileError::new(Problem::Protocol, "a file ended that had not begun"));
        };
        if let Some(size) = current.entry.size.filter(|size| *size != current.written) {
            let (path, written) = (shown(&current.entry.path), current.written);
            // Kept, so that it can be gone on with.
            self.current = Some(current);
            let text = format!("'{path}': {written} bytes came of {size}");
            return Err(FileError::new(Problem::Protocol, text));
        }
        let Current { file, place, temporary, written, entry, claim, .. } = current;
        self.totals.files += 1;
        self.pending_bytes += written - entry.offset;
        self.pending.push(Pending { file, place, entry, temporary, _claim: claim });
        if self.pending_bytes > BATCH_BYTES { self.flush() } else { Ok(()) }
    }

    fn folder(&mut self, entry: &Entry, spot: &Spot) -> Result<(), FileError> {
        self.totals.folders += 1;
        match mkdirat(&*spot.folder, spot.name.as_slice(), Mode::from_bits_truncate(0o700)) {
            Ok(()) => {}
            Err(Errno::EEXIST) => {
                // One that is there stays as it is; a link to one, in the root, will do.
                let there = self.root.at(&entry.path, OFlag::O_PATH | OFlag::O_DIRECTORY);
                return there.map(drop);
            }
            Err(errno) => return Err(spot.failed("make the folder")(errno)),
        }
        if self.open.len() >= DEEPEST {
            let text = format!("'{}': more than {DEEPEST} folders in each other", shown(&entry.path));
            return Err(FileError::new(Problem::BadPath, text));
        }
        let opened = folder_in(&*spot.folder, &spot.name).map_err(spot.failed("open the folder"))?;
        if let Some((user, group)) = self.options.owner {
            fchown(&opened, Some(user.into()), Some(group.into()))
                .map_err(spot.failed("set the owner of"))?;
        }
        let mode = entry.mode & self.options.mode_mask;
        self.open.push(Folder { path: entry.path.clone(), opened, mode, modified: entry.modified });
        Ok(())
    }

    fn link(&mut self, entry: &Entry, spot: &Spot) -> Result<(), FileError> {
        crate::path::whole(&entry.target)?;
        refuse_folder(spot)?;
        let name = part::passing_name();
        symlinkat(entry.target.as_slice(), &*spot.folder, name.as_str())
            .map_err(spot.failed("make the link"))?;
        let placed = self.place_link(entry, spot, &name);
        if placed.is_err() {
            let _ = unlinkat(&*spot.folder, name.as_str(), UnlinkatFlags::NoRemoveDir);
        }
        self.totals.links += u64::from(placed.is_ok());
        placed
    }

    fn place_link(&self, entry: &Entry, spot: &Spot, name: &str) -> Result<(), FileError> {
        if let Some((user, group)) = self.options.owner {
            fchownat(
                &*spot.folder,
                name,
                Some(user.into()),
                Some(group.into()),
                AtFlags::AT_SYMLINK_NOFOLLOW,
            )
            .map_err(spot.failed("set the owner of"))?;
        }
        if let Some(time) = entry.modified {
            let time = spec(time);
            // Not every file system has times of links.
            let _ = utimensat(&*spot.folder, name, &time, &time, UtimensatFlags::NoFollowSymlink);
        }
        renameat(&*spot.folder, name, &*spot.folder, spot.name.as_slice())
            .map_err(spot.failed("make the link"))
    }

    /// Brings what is complete to the disk and gives it its names.
    fn flush(&mut self) -> Result<(), FileError> {
        let pending = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        let flushed = match pending.as_slice() {
            [] => Ok(()),
            _ if !self.options.flush => Ok(()),
            // One by one is slow for many, and the whole file system for one.
            [one] => one.file.sync_data().map_err(|error| FileError::io("write", &one.place.path, &error)),
            [first, ..] => syncfs(first.file.as_fd()).map_err(first.place.failed("write")),
        };
        let mut result = flushed;
        for file in pending {
            if result.is_ok() {
                // Only now is it another's than this user's, and another's to read: until then it can be gone on with.
                result = finish_file(&file, self.options).and_then(|()| file.named());
                if result.is_ok() {
                    continue;
                }
            }
            file.drop_file();
        }
        for folder in self.settled.drain(..) {
            let settled = settle(&folder);
            result = result.and(settled);
        }
        result
    }

    /// Everything has come.
    ///
    /// # Errors
    /// `Protocol` when a file has not ended, and whatever the file system says.
    pub fn finish(mut self) -> Result<Totals, FileError> {
        if let Some(current) = &self.current {
            let text = format!("'{}' has not ended", shown(&current.entry.path));
            return Err(FileError::new(Problem::Protocol, text));
        }
        while let Some(folder) = self.open.pop() {
            self.settled.push(folder);
        }
        self.flush()?;
        Ok(self.totals)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Some(current) = self.current.take()
            && (!self.options.keep_partial || current.spoiled || current.written == 0)
        {
            let _ = unlinkat(&*current.place.folder, current.temporary.as_str(), UnlinkatFlags::NoRemoveDir);
        }
        // What is complete is worth keeping; who is told of the failure that ended this already knows.
        let _ = self.flush();
        while let Some(folder) = self.open.pop() {
            let _ = settle(&folder);
        }
    }
}

impl Pending {
    fn named(&self) -> Result<(), FileError> {
        let spot = &self.place;
        renameat(&*spot.folder, self.temporary.as_str(), &*spot.folder, spot.name.as_slice())
            .map_err(spot.failed("write"))
    }

    /// It will not get its name.
    fn drop_file(self) {
        let _ = unlinkat(&*self.place.folder, self.temporary.as_str(), UnlinkatFlags::NoRemoveDir);
    }
}

/// Whether `path` is `folder` or in it.
fn is_in(path: &[u8], folder: &[u8]) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

fn spec((seconds, nanoseconds): Time) -> TimeSpec {
    TimeSpec::new(seconds, i64::from(nanoseconds.min(999_999_999)))
}

/// Owner, mode and time of a file whose bytes are all there. The owner first: a change of it takes bits from the mode.
fn finish_file(current: &Pending, options: Options) -> Result<(), FileError> {
    let spot = &current.place;
    if let Some((user, group)) = options.owner {
        fchown(&*current.file, Some(user.into()), Some(group.into()))
            .map_err(spot.failed("set the owner of"))?;
    }
    let mode = Mode::from_bits_truncate(current.entry.mode & options.mode_mask);
    fchmod(&*current.file, mode).map_err(spot.failed("set the mode of"))?;
    if let Some(time) = current.entry.modified {
        let time = spec(time);
        futimens(&*current.file, &time, &time).map_err(spot.failed("set the time of"))?;
    }
    Ok(())
}

fn settle(folder: &Folder) -> Result<(), FileError> {
    let failed = |errno| FileError::of("set the mode of", &folder.path, errno);
    fchmod(&folder.opened, Mode::from_bits_truncate(folder.mode)).map_err(failed)?;
    match folder.modified.map(spec) {
        Some(time) => futimens(&folder.opened, &time, &time)
            .map_err(|errno| FileError::of("set the time of", &folder.path, errno)),
        None => Ok(()),
    }
}

/// Before its bytes come, not after.
fn refuse_folder(spot: &Spot) -> Result<(), FileError> {
    match fstatat(&*spot.folder, spot.name.as_slice(), AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) if read::kind(&stat) == Kind::Folder => Err(spot.failed("write")(Errno::EISDIR)),
        _ => Ok(()),
    }
}

fn fresh(spot: &Spot, name: String) -> Result<(Flock<File>, String), FileError> {
    let file = part::make(&*spot.folder, &name).map_err(spot.failed("write"))?;
    lock(file, spot).map(|file| (file, name))
}

fn busy(spot: &Spot) -> FileError {
    let text = format!("'{}' is being written by another transfer", shown(&spot.path));
    FileError::new(Problem::Busy, text)
}

fn lock(file: File, spot: &Spot) -> Result<Flock<File>, FileError> {
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        Errno::EWOULDBLOCK => busy(spot),
        errno => spot.failed("lock")(errno),
    })
}

fn prefix_differs(entry: &Entry) -> FileError {
    let path = shown(&entry.path);
    let text = format!("'{path}': the {} bytes of the earlier try are not its beginning", entry.offset);
    FileError::new(Problem::PrefixDiffers, text)
}

/// Checks the beginning of a file that is there, cuts off what comes after it, and goes to its end.
fn go_on(file: &mut Flock<File>, entry: &Entry) -> Result<(), FileError> {
    if entry.size.is_some_and(|size| entry.offset > size) {
        return Err(prefix_differs(entry));
    }
    let digest = read::digest(file, entry.offset, &entry.path)?;
    if digest.is_none_or(|digest| digest != entry.prefix_sha256) {
        return Err(prefix_differs(entry));
    }
    let failed = |error| FileError::io("write", &entry.path, &error);
    file.set_len(entry.offset).map_err(failed)?;
    file.seek(SeekFrom::Start(entry.offset)).map_err(failed).map(drop)
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer").field("root", &self.root.as_fd().as_raw_fd()).finish_non_exhaustive()
    }
}
