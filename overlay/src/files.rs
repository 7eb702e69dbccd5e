//! Files that appear whole or not at all.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::sys::uio::{pread, preadv, pwrite, pwritev};

use crate::error::Error;
use crate::vectors::{part, part_mut};

/// Buffers in one system call at most (IOV_MAX of readv(2)).
const MOST_BUFFERS: usize = 1024;

/// A new file under a temporary name beside its final one; removed on drop unless it was published.
pub(crate) struct NewFile {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
    published: bool,
}

impl NewFile {
    /// Makes the temporary file, open for reading and writing, mode 0600.
    pub(crate) fn beside(target: &Path) -> Result<Self, Error> {
        use std::os::unix::fs::OpenOptionsExt;
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let name = target.file_name().ok_or_else(|| Error::Unsupported {
            path: target.to_path_buf(),
            detail: "the path doesn't name a file".to_owned(),
        })?;
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        temporary.push(format!(".new-{}-{count}", std::process::id()));
        let temporary = target.with_file_name(temporary);
        // A file of that name can only be what an earlier process with the same pid left when it died.
        let _ = std::fs::remove_file(&temporary);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(|source| Error::io(&temporary, "create", source))?;
        Ok(Self { file, temporary, target: target.to_path_buf(), published: false })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The path to name in errors while the file is being filled.
    pub(crate) fn path(&self) -> &Path {
        &self.temporary
    }

    /// Makes the content durable, gives it its name, and makes the name durable. An existing file stays as it
    /// is ([`Error::AlreadyExists`]).
    pub(crate) fn publish(mut self) -> Result<(), Error> {
        self.sync()?;
        let flags = RenameFlags::RENAME_NOREPLACE;
        match renameat2(AT_FDCWD, &self.temporary, AT_FDCWD, &self.target, flags) {
            Ok(()) => {}
            Err(Errno::EEXIST) => return Err(Error::AlreadyExists { path: self.target.clone() }),
            Err(errno) => return Err(Error::io(&self.target, "rename a new file to", errno.into())),
        }
        self.published = true;
        sync_directory_of(&self.target)
    }

    /// Like [`NewFile::publish`], but takes the place of an existing file.
    pub(crate) fn replace(mut self) -> Result<(), Error> {
        self.sync()?;
        std::fs::rename(&self.temporary, &self.target)
            .map_err(|source| Error::io(&self.target, "replace", source))?;
        self.published = true;
        sync_directory_of(&self.target)
    }

    fn sync(&self) -> Result<(), Error> {
        self.file.sync_all().map_err(|source| Error::io(&self.temporary, "sync", source))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.published {
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Makes the names in a file's directory durable.
pub(crate) fn sync_directory_of(path: &Path) -> Result<(), Error> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    File::open(directory)
        .and_then(|file| file.sync_all())
        .map_err(|source| Error::io(directory, "sync the directory", source))
}

/// Reads until the buffer is full or the file ends; returns the bytes read.
pub(crate) fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    use std::os::unix::fs::FileExt;
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// [`read_up_to`] into `length` bytes of buffers, which stay as they are; one system call when the host gives all at once.
pub(crate) fn readv_up_to(
    file: &File,
    buffers: &mut [IoSliceMut<'_>],
    length: usize,
    offset: u64,
) -> io::Result<usize> {
    let mut done = 0;
    while done < length {
        let read = part_mut(buffers, done, length - done, |left| {
            let (count, at) = (left.len().min(MOST_BUFFERS), (offset + done as u64) as i64);
            match left {
                [one] => pread(file, one, at),
                _ => preadv(file, &mut left[..count], at),
            }
        });
        match read {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(done)
}

/// Writes all of the buffers, `length` bytes; one system call when the host takes all at once.
pub(crate) fn writev_all(file: &File, buffers: &[IoSlice<'_>], length: usize, offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < length {
        let written = part(buffers, done, length - done, |left| {
            let (count, at) = (left.len().min(MOST_BUFFERS), (offset + done as u64) as i64);
            match left {
                [one] => pwrite(file, one, at),
                _ => pwritev(file, &left[..count], at),
            }
        });
        match written {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => done += count,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn an_unpublished_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        drop(NewFile::beside(&dir.path().join("a")).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn more_buffers_than_one_system_call_takes_are_read_and_written_in_order() {
        let file = tempfile::tempfile().unwrap();
        let data: Vec<u8> = (0..9000u32).map(|at| (at % 251) as u8).collect();
        let slices: Vec<IoSlice<'_>> = data.chunks(3).map(IoSlice::new).collect();
        writev_all(&file, &slices, data.len(), 7).unwrap();
        let mut found = vec![0xee; data.len() + 10];
        let length = found.len();
        let mut slices: Vec<IoSliceMut<'_>> = found.chunks_mut(2).map(IoSliceMut::new).collect();
        assert_eq!(readv_up_to(&file, &mut slices, length, 7).unwrap(), data.len());
        assert!(found[..data.len()] == data && found[data.len()..] == [0xee; 10]);
    }

    #[test]
    fn publishing_over_an_existing_file_is_refused_and_leaves_it_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "old").unwrap();
        let new = NewFile::beside(&path).unwrap();
        new.file().write_all(b"new").unwrap();
        assert!(matches!(new.publish(), Err(Error::AlreadyExists { .. })));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
    }
}
