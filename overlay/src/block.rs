//! What a guest's disk is to the rest of the product: one trait, and the plain file behind it.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use crate::base::data_start;
use crate::error::Error;
use crate::files::{read_up_to, readv_up_to, writev_all};
use crate::vectors::{fill_zeros, part_mut};

/// A disk. Offsets and lengths are in bytes and of any alignment; all methods may be called from many threads at
/// once. A request that isn't inside `0..size()` fails with [`io::ErrorKind::InvalidInput`] and changes nothing.
/// The kinds and numbers of the host's errors are kept: a full host is [`io::ErrorKind::StorageFull`].
///
/// What was written is durable when a [`Block::flush`] that began after the write ended has succeeded.
pub trait Block: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Fills the buffers, one after the other, from `offset` on.
    ///
    /// # Errors
    /// The host's, or those of a damaged image; the buffers' content is then undefined.
    fn readv(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()>;

    /// Writes the buffers, one after the other, from `offset` on.
    ///
    /// # Errors
    /// The host's; each sector of the range then has its old or its new content.
    fn writev(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()>;

    /// Makes durable what was written before.
    ///
    /// # Errors
    /// The host's. After a failed sync nothing more can be written until the disk is opened again, as the host
    /// doesn't tell what it lost.
    fn flush(&self) -> io::Result<()>;

    /// Gives a range up. Whole clusters of it read as zeros from now on, the rest keeps its content.
    ///
    /// # Errors
    /// The host's.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Makes a range read as zeros.
    ///
    /// # Errors
    /// The host's.
    fn write_zeroes(&self, offset: u64, length: u64) -> io::Result<()>;

    /// A place at or after `offset` (at most the size) up to which all reads as zeros, as far as is known without
    /// reading content: for going through large, mostly empty disks.
    ///
    /// # Errors
    /// The host's.
    fn skip_zeros(&self, offset: u64) -> io::Result<u64> {
        Ok(offset.min(self.size()))
    }

    /// Flushes and ends: every later request fails. Nothing of this happens on drop.
    ///
    /// # Errors
    /// The host's; the disk then counts as not closed in order.
    fn close(&self) -> io::Result<()>;

    /// [`Block::readv`] with one buffer.
    ///
    /// # Errors
    /// As for `readv`.
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.readv(&mut [IoSliceMut::new(buffer)], offset)
    }

    /// [`Block::writev`] with one buffer.
    ///
    /// # Errors
    /// As for `writev`.
    fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.writev(&[IoSlice::new(data)], offset)
    }
}

/// Fails unless the range lies inside the disk.
pub(crate) fn check_range(size: u64, offset: u64, length: u64) -> io::Result<()> {
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{length} bytes at {offset} are not inside the disk of {size} bytes"),
        )),
    }
}

/// Reads `length` bytes from a disk as if zeros followed its end.
pub(crate) fn read_padded(
    disk: &dyn Block,
    buffers: &mut [IoSliceMut<'_>],
    length: usize,
    offset: u64,
) -> io::Result<()> {
    let inside = disk.size().saturating_sub(offset).min(length as u64) as usize;
    if inside == length {
        return disk.readv(buffers, offset);
    }
    part_mut(buffers, inside, length - inside, fill_zeros);
    match inside {
        0 => Ok(()),
        _ => part_mut(buffers, 0, inside, |head| disk.readv(head, offset)),
    }
}

/// [`Block::skip_zeros`] on a disk that zeros follow without end.
pub(crate) fn skip_zeros_padded(disk: &dyn Block, offset: u64) -> io::Result<u64> {
    if offset >= disk.size() {
        return Ok(u64::MAX);
    }
    let next = disk.skip_zeros(offset)?;
    Ok(if next == disk.size() { u64::MAX } else { next })
}

/// A raw disk: a file, byte for byte.
#[derive(Debug)]
pub struct Raw {
    file: File,
    size: u64,
    writable: bool,
    /// A sync has failed. The host tells of that once only, so the next one that succeeds would say nothing.
    broken: AtomicBool,
}

impl Raw {
    /// Opens a raw disk for reading.
    ///
    /// # Errors
    /// [`Error::DataMissing`], [`Error::Io`].
    pub fn open_read_only(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(|source| Error::data(path, "open", source))?;
        Self::from_file(file, false).map_err(|source| Error::io(path, "inspect", source))
    }

    /// Opens a raw disk for reading and writing; takes no lock.
    ///
    /// # Errors
    /// [`Error::DataMissing`], [`Error::Io`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let opened = File::options().read(true).write(true).open(path);
        let file = opened.map_err(|source| Error::data(path, "open", source))?;
        Self::from_file(file, true).map_err(|source| Error::io(path, "inspect", source))
    }

    /// A disk in an open file, with the file's present size.
    ///
    /// # Errors
    /// When the file's size can't be read.
    pub fn from_file(file: File, writable: bool) -> io::Result<Self> {
        let size = file.metadata()?.len();
        Ok(Self { file, size, writable, broken: AtomicBool::new(false) })
    }

    fn writing(&self, offset: u64, length: u64) -> io::Result<()> {
        check_range(self.size, offset, length)?;
        match self.writable {
            true => self.refuse_broken(),
            false => Err(read_only()),
        }
    }

    fn refuse_broken(&self) -> io::Result<()> {
        match self.broken.load(Ordering::Acquire) {
            true => Err(after_failed_sync()),
            false => Ok(()),
        }
    }

    /// Syncs the file; a failure ends all writing.
    fn sync(&self, how: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        self.refuse_broken()?;
        how(&self.file).inspect_err(|_| self.broken.store(true, Ordering::Release))
    }
}

fn after_failed_sync() -> io::Error {
    io::Error::other("an earlier sync failed, so what is on the disk is unknown: open it again")
}

/// The error of every request that would change a read-only disk.
pub(crate) fn read_only() -> io::Error {
    io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the disk is open for reading only")
}

impl Block for Raw {
    fn size(&self) -> u64 {
        self.size
    }

    fn readv(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        let length = total(buffers.iter().map(|buffer| buffer.len()));
        check_range(self.size, offset, length)?;
        match readv_up_to(&self.file, buffers, length as usize, offset)? as u64 == length {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter")),
        }
    }

    fn writev(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        let length = total(buffers.iter().map(|buffer| buffer.len()));
        self.writing(offset, length)?;
        writev_all(&self.file, buffers, length as usize, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.sync(File::sync_data)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.writing(offset, length)?;
        match punch(&self.file, offset, length) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => self.write_zeroes(offset, length),
            other => other,
        }
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.writing(offset, length)?;
        match punch(&self.file, offset, length) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
            other => return other,
        }
        let zeros = vec![0; (1 << 20).min(length as usize)];
        let mut done = 0;
        while done < length {
            let count = (length - done).min(zeros.len() as u64);
            self.file.write_all_at(&zeros[..count as usize], offset + done)?;
            done += count;
        }
        Ok(())
    }

    fn skip_zeros(&self, offset: u64) -> io::Result<u64> {
        match offset < self.size {
            true => data_start(&self.file, offset, self.size),
            false => Ok(self.size),
        }
    }

    fn close(&self) -> io::Result<()> {
        match self.writable {
            true => self.sync(File::sync_all),
            false => Ok(()),
        }
    }
}

/// Sum of lengths.
pub(crate) fn total(lengths: impl Iterator<Item = usize>) -> u64 {
    lengths.map(|length| length as u64).sum()
}

/// The file beneath an image: the few operations that the engine needs, so that tests can stand between it and the
/// disk.
pub trait Host: Send + Sync {
    /// Length in bytes.
    ///
    /// # Errors
    /// The host's, as for all methods here.
    fn length(&self) -> io::Result<u64>;

    /// Fills the buffer; what lies beyond the end reads as zeros.
    ///
    /// # Errors
    /// The host's.
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of the data; the file grows as needed.
    ///
    /// # Errors
    /// The host's; part of the data may have been written.
    fn write(&self, data: &[u8], offset: u64) -> io::Result<()>;

    /// [`Host::read`] into several buffers, one after the other.
    ///
    /// # Errors
    /// The host's.
    fn readv(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        let mut at = offset;
        for buffer in buffers {
            self.read(buffer, at)?;
            at += buffer.len() as u64;
        }
        Ok(())
    }

    /// [`Host::write`] of several buffers, one after the other.
    ///
    /// # Errors
    /// The host's; part of the data may have been written.
    fn writev(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        let mut at = offset;
        for buffer in buffers {
            self.write(buffer, at)?;
            at += buffer.len() as u64;
        }
        Ok(())
    }

    /// Sets the length.
    ///
    /// # Errors
    /// The host's.
    fn set_length(&self, length: u64) -> io::Result<()>;

    /// Makes everything durable that was written before (fdatasync).
    ///
    /// # Errors
    /// The host's.
    fn sync(&self) -> io::Result<()>;

    /// Gives the range back to the host; it reads as zeros.
    ///
    /// # Errors
    /// The host's; [`io::ErrorKind::Unsupported`] when it can't.
    fn punch(&self, offset: u64, length: u64) -> io::Result<()>;

    /// Makes sure that a later write to the range doesn't fail for lack of space, as far as the host can.
    ///
    /// # Errors
    /// The host's.
    fn reserve(&self, offset: u64, length: u64) -> io::Result<()>;

    /// The next extent at or after `from` and before `end` that may be other than zeros, as (start, end); both
    /// are `end` when there is none.
    ///
    /// # Errors
    /// The host's.
    fn next_data(&self, from: u64, end: u64) -> io::Result<(u64, u64)>;
}

impl Host for File {
    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let count = read_up_to(self, buffer, offset)?;
        buffer[count..].fill(0);
        Ok(())
    }

    fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(data, offset)
    }

    fn readv(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        if let [one] = buffers {
            return Host::read(self, one, offset);
        }
        let length = total(buffers.iter().map(|buffer| buffer.len())) as usize;
        let count = readv_up_to(self, buffers, length, offset)?;
        part_mut(buffers, count, length - count, fill_zeros);
        Ok(())
    }

    fn writev(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        let length = total(buffers.iter().map(|buffer| buffer.len())) as usize;
        writev_all(self, buffers, length, offset)
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        punch(self, offset, length)
    }

    fn reserve(&self, offset: u64, length: u64) -> io::Result<()> {
        match fallocate(self, FallocateFlags::FALLOC_FL_KEEP_SIZE, offset as i64, length as i64) {
            Err(Errno::EOPNOTSUPP) => Ok(()),
            other => other.map_err(io::Error::from),
        }
    }

    fn next_data(&self, from: u64, end: u64) -> io::Result<(u64, u64)> {
        crate::base::next_data(self, from, end)
    }
}

fn punch(file: &File, offset: u64, length: u64) -> io::Result<()> {
    if length == 0 {
        return Ok(());
    }
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(file, flags, offset as i64, length as i64).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_failed_sync_a_raw_disk_takes_nothing_more() {
        // A pipe can be written to and not be synced.
        let (_reader, writer) = std::io::pipe().unwrap();
        let disk = Raw::from_file(File::from(std::os::fd::OwnedFd::from(writer)), true).unwrap();
        disk.writing(0, 0).unwrap();
        assert_eq!(disk.flush().unwrap_err().raw_os_error(), Some(Errno::EINVAL as i32));
        let refused =
            |result: io::Result<()>| result.unwrap_err().to_string().contains("an earlier sync failed");
        assert!(refused(disk.flush()) && refused(disk.write(&[], 0)) && refused(disk.close()));
        assert!(refused(disk.discard(0, 0)) && refused(disk.write_zeroes(0, 0)));
    }
}
