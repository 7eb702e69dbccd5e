//! Reading any qcow2 image: versions 2 and 3, clusters of 512 bytes to 2 MiB, with subclusters (extended L2 entries) and
//! with clusters compressed by deflate, over a base or alone.
//!
//! Nothing is ever written. What can't be read right is refused at opening: encryption, external data files, other
//! compression.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use crate::block::{Block, Host, check_range, read_only, read_padded, skip_zeros_padded, total};
use crate::compressed::{Inflater, Packed};
use crate::error::{Error, Flaw};
use crate::header::{
    Header, INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_EXTENDED_L2,
    INCOMPATIBLE_EXTERNAL_DATA,
};
use crate::inspect::read_header;
use crate::tables::{COMPRESSED, OFFSET, ZERO, read_numbers};
use crate::vectors::{fill_zeros, part_mut, scatter};

/// Most entries of an L1 table (32 MiB of them), as in QEMU.
const MOST_L1: u64 = 4 << 20;
/// Numbers of an L2 table that are read and kept together.
const SLICE: u64 = 512;
/// Slices that are kept: 4 MiB of memory.
const MOST_SLICES: usize = 1024;
/// Parts of a cluster that an extended L2 entry tells of.
const SUBCLUSTERS: u64 = 32;
/// Smallest clusters with subclusters: those are then sectors.
const LEAST_EXTENDED_BITS: u32 = 14;

/// A qcow2 image, open for reading.
pub struct Image {
    host: Box<dyn Host>,
    header: Header,
    length: u64,
    l1: Vec<u64>,
    backing: Option<Box<dyn Block>>,
    slices: RwLock<HashMap<u64, Arc<[u64]>>>,
    inflater: Inflater,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Image").field("header", &self.header).finish_non_exhaustive()
    }
}

/// What a guest offset maps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Backing,
    Zero,
    /// The offset in the file.
    Data(u64),
    Compressed(Packed),
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

    /// Reads an image in any [`Host`]; `path` is for messages.
    ///
    /// # Errors
    /// Those of [`Image::open`] but [`Error::DataMissing`].
    pub fn open_on(host: Box<dyn Host>, backing: Option<Box<dyn Block>>, path: &Path) -> Result<Self, Error> {
        let length = host.length().map_err(|source| Error::io(path, "inspect", source))?;
        let header = crate::tables::read_header(&*host, length, path)?;
        Self::from_parts(host, header, backing, path)
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
        let inflater = Inflater::new(header.cluster_bytes());
        Ok(Self { host, header, length, l1, backing, slices: RwLock::default(), inflater })
    }

    /// Bytes of an L2 entry.
    fn entry_bytes(&self) -> u64 {
        if self.is_extended() { 16 } else { 8 }
    }

    fn is_extended(&self) -> bool {
        self.header.incompatible & INCOMPATIBLE_EXTENDED_L2 != 0
    }

    /// Bytes of the disk that an L2 table covers.
    fn table_bytes(&self) -> u64 {
        self.header.cluster_bytes() / self.entry_bytes() * self.header.cluster_bytes()
    }

    fn find(&self, guest: u64) -> io::Result<Found> {
        let table = self.l1.get((guest / self.table_bytes()) as usize).copied().unwrap_or(0) & OFFSET;
        if table == 0 {
            return Ok(Found::Backing);
        }
        let index = guest % self.table_bytes() / self.header.cluster_bytes();
        let (entry, subclusters) = self.l2_entry(table, index)?;
        let wrong = || damaged(format!("the entry of guest offset {guest} is {entry:#x}"));
        if entry & COMPRESSED != 0 {
            let packed = Packed::decode(entry, self.header.cluster_bits);
            return if packed.offset < self.length { Ok(Found::Compressed(packed)) } else { Err(wrong()) };
        }
        let host = entry & OFFSET;
        if !host.is_multiple_of(self.header.cluster_bytes()) || host >= self.length {
            return Err(wrong());
        }
        let within = guest % self.header.cluster_bytes();
        let mapped = |there: bool| match there {
            true if host == 0 => Err(wrong()),
            true => Ok(Found::Data(host + within)),
            false => Ok(Found::Backing),
        };
        match subclusters {
            Some(bits) => {
                let subcluster = within * SUBCLUSTERS / self.header.cluster_bytes();
                match (bits >> subcluster & 1 == 1, bits >> (subcluster + SUBCLUSTERS) & 1 == 1) {
                    (true, true) => Err(wrong()),
                    (false, true) => Ok(Found::Zero),
                    (there, false) => mapped(there),
                }
            }
            None if entry & ZERO != 0 && self.header.version >= 3 => Ok(Found::Zero),
            None => mapped(host != 0),
        }
    }

    /// An entry, and with extended entries the bits of its subclusters.
    fn l2_entry(&self, table: u64, index: u64) -> io::Result<(u64, Option<u64>)> {
        if !table.is_multiple_of(self.header.cluster_bytes()) || table >= self.length {
            return Err(damaged(format!("an L2 table is at {table:#x}")));
        }
        let index = index * self.entry_bytes() / 8;
        let count = SLICE.min(self.header.cluster_bytes() / 8);
        let slice = self.slice(table + index / count * count * 8, count)?;
        let at = (index % count) as usize;
        Ok((slice[at], self.is_extended().then(|| slice[at + 1])))
    }

    fn slice(&self, offset: u64, count: u64) -> io::Result<Arc<[u64]>> {
        let known = self.slices.read().unwrap_or_else(PoisonError::into_inner).get(&offset).map(Arc::clone);
        if let Some(slice) = known {
            return Ok(slice);
        }
        let slice: Arc<[u64]> = read_numbers(&*self.host, offset, count)?.into();
        let mut slices = self.slices.write().unwrap_or_else(PoisonError::into_inner);
        if slices.len() >= MOST_SLICES {
            slices.clear();
        }
        slices.insert(offset, Arc::clone(&slice));
        Ok(slice)
    }

    /// What `at` maps to, and how many of `left` bytes from there on lie behind one another.
    fn extent(&self, at: u64, left: u64) -> io::Result<(Found, u64)> {
        let cluster = self.header.cluster_bytes();
        let first = self.find(at)?;
        let unit = match first {
            Found::Compressed(_) => cluster,
            _ if self.is_extended() => cluster / SUBCLUSTERS,
            _ => cluster,
        };
        let mut end = (at / unit + 1) * unit;
        while end < at + left && continues(first, end - at, self.find(end)?) {
            end += unit;
        }
        Ok((first, left.min(end - at)))
    }

    fn read_extent(
        &self,
        found: Found,
        part: &mut [IoSliceMut<'_>],
        length: usize,
        at: u64,
    ) -> io::Result<()> {
        match (found, &self.backing) {
            (Found::Data(host), _) => self.host.readv(part, host),
            (Found::Compressed(packed), _) => {
                let content = self.inflater.get(&*self.host, packed)?;
                let within = (at % self.header.cluster_bytes()) as usize;
                scatter(&content[within..within + length], part);
                Ok(())
            }
            (Found::Backing, Some(backing)) => read_padded(&**backing, part, length, at),
            (Found::Backing | Found::Zero, _) => {
                fill_zeros(part);
                Ok(())
            }
        }
    }

    /// True when a whole L2 table lets the backing file through.
    fn is_empty(&self, table: u64) -> io::Result<bool> {
        let offset = self.l1.get(table as usize).copied().unwrap_or(0) & OFFSET;
        let end = offset.saturating_add(self.header.cluster_bytes());
        Ok(offset == 0 || self.host.next_data(offset, end)?.0 == end)
    }
}

/// True when `next` lies `distance` bytes behind `first`.
fn continues(first: Found, distance: u64, next: Found) -> bool {
    match (first, next) {
        (Found::Data(first), Found::Data(next)) => first + distance == next,
        (Found::Compressed(_), _) | (_, Found::Compressed(_)) => false,
        _ => first == next,
    }
}

pub(crate) fn damaged(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn readable(header: &Header, length: u64) -> Result<(), Flaw> {
    let incompatible = header.incompatible;
    let refused = [
        (header.encryption != 0, "it is encrypted"),
        (incompatible & INCOMPATIBLE_EXTERNAL_DATA != 0, "its data is in another file"),
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
    let extended = incompatible & INCOMPATIBLE_EXTENDED_L2 != 0;
    if extended && header.cluster_bits < LEAST_EXTENDED_BITS {
        return Err(Flaw::corrupt("its clusters are too small for subclusters"));
    }
    let entries = header.cluster_bytes() / if extended { 16 } else { 8 };
    let covered = u128::from(header.l1_entries) * u128::from(entries * header.cluster_bytes());
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
        let length = total(buffers.iter().map(|buffer| buffer.len()));
        check_range(self.size(), offset, length)?;
        let mut done = 0;
        while done < length {
            let at = offset + done;
            let (found, count) = self.extent(at, length - done)?;
            let (skip, count) = (done as usize, count as usize);
            part_mut(buffers, skip, count, |part| self.read_extent(found, part, count, at))?;
            done += count as u64;
        }
        Ok(())
    }

    fn writev(&self, _: &[IoSlice<'_>], _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn skip_zeros(&self, offset: u64) -> io::Result<u64> {
        let table_bytes = self.table_bytes();
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
