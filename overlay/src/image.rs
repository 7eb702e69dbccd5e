//! Reading any qcow2 image: versions 2 and 3, clusters of 512 bytes to 2 MiB, over a base or alone.
//!
//! Nothing is ever written. What can't be read right is refused: encryption, external data files, extended L2
//! entries at opening; a compressed cluster when it is read.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use crate::block::{Block, Host, check_range, read_only, read_padded, skip_zeros_padded, total};
use crate::error::{Error, Flaw};
use crate::header::{
    Header, INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_EXTENDED_L2,
    INCOMPATIBLE_EXTERNAL_DATA,
};
use crate::inspect::read_header;
use crate::tables::{COMPRESSED, OFFSET, ZERO, read_numbers};

/// Most entries of an L1 table (32 MiB of them), as in QEMU.
const MOST_L1: u64 = 4 << 20;
/// Entries of an L2 table that are read and kept together.
const SLICE: u64 = 512;
/// Slices that are kept: 4 MiB of memory.
const MOST_SLICES: usize = 1024;

/// A qcow2 image, open for reading.
pub struct Image {
    host: Box<dyn Host>,
    header: Header,
    length: u64,
    l1: Vec<u64>,
    backing: Option<Box<dyn Block>>,
    slices: RwLock<HashMap<u64, Arc<[u64]>>>,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Image").field("header", &self.header).finish_non_exhaustive()
    }
}

/// What a guest offset maps to.
enum Found {
    Backing,
    Zero,
    Data(u64),
}

impl Image {
    /// Opens an image. The file that it stands on is given by the caller and never looked up by the name in the
    /// header.
    ///
    /// # Errors
    /// [`Error::DataMissing`], [`Error::Corrupt`], [`Error::Unsupported`] (also when the image names a backing file
    /// and none is given), [`Error::Io`].
    pub fn open(path: &Path, backing: Option<Box<dyn Block>>) -> Result<Self, Error> {
        let file = File::open(path).map_err(|source| Error::data(path, "open image", source))?;
        Self::from_file(file, backing, path)
    }

    /// Reads an open file; `path` is for messages.
    pub(crate) fn from_file(file: File, backing: Option<Box<dyn Block>>, path: &Path) -> Result<Self, Error> {
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return Err(Flaw::unsupported("it isn't a regular file").at(path));
        }
        let header = read_header(&file, path)?;
        Self::from_parts(Box::new(file), header, backing, path)
    }

    fn from_parts(
        host: Box<dyn Host>,
        header: Header,
        backing: Option<Box<dyn Block>>,
        path: &Path,
    ) -> Result<Self, Error> {
        let failed = |source| Error::io(path, "read the L1 table of", source);
        let length = host.length().map_err(failed)?;
        readable(&header, length).map_err(|flaw| flaw.at(path))?;
        if backing.is_none() && !header.backing_name.is_empty() {
            let name = String::from_utf8_lossy(&header.backing_name).into_owned();
            return Err(
                Flaw::unsupported(format!("it stands on {name:?}, which must be named with it")).at(path)
            );
        }
        let l1 = read_numbers(&*host, header.l1_offset, header.l1_entries.into()).map_err(failed)?;
        Ok(Self { host, header, length, l1, backing, slices: RwLock::default() })
    }

    fn find(&self, guest: u64) -> io::Result<Found> {
        let cluster = guest >> self.header.cluster_bits;
        let entries = self.header.cluster_bytes() / 8;
        let table = self.l1.get((cluster / entries) as usize).copied().unwrap_or(0) & OFFSET;
        if table == 0 {
            return Ok(Found::Backing);
        }
        let entry = self.l2_entry(table, cluster % entries)?;
        if entry & COMPRESSED != 0 {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("the cluster at {guest} is compressed; convert the image with qemu-img first"),
            ));
        }
        let host = entry & OFFSET;
        match (entry & ZERO != 0 && self.header.version >= 3, host) {
            (true, _) => Ok(Found::Zero),
            (false, 0) => Ok(Found::Backing),
            (false, host) if host.is_multiple_of(self.header.cluster_bytes()) && host < self.length => {
                Ok(Found::Data(host))
            }
            _ => Err(damaged(format!("the entry of guest offset {guest} is {entry:#x}"))),
        }
    }

    fn l2_entry(&self, table: u64, index: u64) -> io::Result<u64> {
        if !table.is_multiple_of(self.header.cluster_bytes()) || table >= self.length {
            return Err(damaged(format!("an L2 table is at {table:#x}")));
        }
        let count = SLICE.min(self.header.cluster_bytes() / 8);
        let offset = table + index / count * count * 8;
        let known = self.slices.read().unwrap_or_else(PoisonError::into_inner).get(&offset).map(Arc::clone);
        if let Some(slice) = known {
            return Ok(slice[(index % count) as usize]);
        }
        let slice: Arc<[u64]> = read_numbers(&*self.host, offset, count)?.into();
        let mut slices = self.slices.write().unwrap_or_else(PoisonError::into_inner);
        if slices.len() >= MOST_SLICES {
            slices.clear();
        }
        slices.insert(offset, Arc::clone(&slice));
        Ok(slice[(index % count) as usize])
    }

    /// True when a whole L2 table lets the backing file through.
    fn is_empty(&self, table: u64) -> io::Result<bool> {
        let offset = self.l1.get(table as usize).copied().unwrap_or(0) & OFFSET;
        let end = offset.saturating_add(self.header.cluster_bytes());
        Ok(offset == 0 || self.host.next_data(offset, end)?.0 == end)
    }

    fn read_piece(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match (self.find(offset)?, &self.backing) {
            (Found::Data(host), _) => self.host.read(buffer, host + offset % self.header.cluster_bytes()),
            (Found::Backing, Some(backing)) => read_padded(&**backing, buffer, offset),
            _ => {
                buffer.fill(0);
                Ok(())
            }
        }
    }
}

fn damaged(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn readable(header: &Header, length: u64) -> Result<(), Flaw> {
    let incompatible = header.incompatible;
    let refused = [
        (header.encryption != 0, "it is encrypted"),
        (incompatible & INCOMPATIBLE_EXTERNAL_DATA != 0, "its data is in another file"),
        (incompatible & INCOMPATIBLE_EXTENDED_L2 != 0, "it has subclusters (extended L2 entries)"),
        (incompatible & INCOMPATIBLE_COMPRESSION != 0, "it has another compression than deflate"),
        (u64::from(header.l1_entries) > MOST_L1, "its L1 table is too large"),
        (header.virtual_bytes > i64::MAX as u64, "its disk is too large"),
    ];
    if let Some((_, what)) = refused.iter().find(|(found, _)| *found) {
        return Err(Flaw::unsupported(format!(
            "{what}, which isn't supported; convert it with qemu-img first"
        )));
    }
    if incompatible & INCOMPATIBLE_CORRUPT != 0 {
        return Err(Flaw::corrupt("another program marked it as corrupt"));
    }
    let covered =
        u128::from(header.l1_entries) * u128::from(header.cluster_bytes() / 8 * header.cluster_bytes());
    if covered < u128::from(header.virtual_bytes) {
        return Err(Flaw::corrupt(format!("its L1 table of {} entries is too small", header.l1_entries)));
    }
    let l1_end = header.l1_offset.checked_add(u64::from(header.l1_entries) * 8);
    if header.l1_entries > 0 && l1_end.is_none_or(|end| end > length) {
        return Err(Flaw::corrupt(format!("its L1 table at {:#x} isn't inside the file", header.l1_offset)));
    }
    Ok(())
}

impl Block for Image {
    fn size(&self) -> u64 {
        self.header.virtual_bytes
    }

    fn readv(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        check_range(self.size(), offset, total(buffers.iter().map(|buffer| buffer.len())))?;
        let cluster = self.header.cluster_bytes();
        let mut at = offset;
        for buffer in buffers {
            let mut rest = &mut buffer[..];
            while !rest.is_empty() {
                let count = (cluster - at % cluster).min(rest.len() as u64);
                let (piece, after) = rest.split_at_mut(count as usize);
                self.read_piece(piece, at)?;
                (rest, at) = (after, at + count);
            }
        }
        Ok(())
    }

    fn writev(&self, _: &[IoSlice<'_>], _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn skip_zeros(&self, offset: u64) -> io::Result<u64> {
        let table_bytes = self.header.cluster_bytes() / 8 * self.header.cluster_bytes();
        let mut at = offset.min(self.size());
        while at < self.size() && self.is_empty(at / table_bytes)? {
            let below =
                self.backing.as_deref().map_or(Ok(u64::MAX), |backing| skip_zeros_padded(backing, at))?;
            let end = (at / table_bytes + 1) * table_bytes;
            if below < end {
                return Ok(below);
            }
            at = end.min(self.size());
        }
        Ok(at)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn write_zeroes(&self, _: u64, _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn close(&self) -> io::Result<()> {
        Ok(())
    }
}
