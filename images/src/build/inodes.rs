//! Takes the moment of building out of an ext4 file system.
//!
//! mke2fs copies a file's change time from the host, and nobody can set that one: two builds of the same tree would
//! differ by it. Here change, access and creation time of every inode become its modification time. The layout is the
//! kernel's (Documentation/filesystems/ext4); only file systems with the features of [`super::ext4`] are accepted.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::Error;
use crate::error::At;

const SUPERBLOCK: u64 = 1024;
const MAGIC: u16 = 0xef53;
const METADATA_CSUM: u32 = 0x400;
/// A file system with this flag keeps the seed of its checksums apart from its UUID; ours never has it.
const CSUM_SEED: u32 = 0x2000;
const GROUP_INODE_UNINIT: u16 = 1;

struct Layout {
    block_size: u64,
    groups: u64,
    inodes_per_group: u32,
    inode_size: usize,
    desc_size: usize,
    checksum_seed: u32,
}

/// Sets all times of all inodes in the file system at `disk` to their modification times.
pub(crate) fn settle_times(disk: &Path) -> Result<(), Error> {
    let file = File::options().read(true).write(true).open(disk).at("open", disk)?;
    let layout = read_layout(&file, disk)?;
    let mut desc = vec![0; layout.desc_size];
    for group in 0..layout.groups {
        // The descriptors begin in the block after the superblock's.
        let at = layout.block_size + group * layout.desc_size as u64;
        file.read_exact_at(&mut desc, at).at("read", disk)?;
        if le16(&desc, 0x12) & GROUP_INODE_UNINIT == 0 {
            settle_group(&file, disk, &layout, group, &desc)?;
        }
    }
    Ok(())
}

fn read_layout(file: &File, disk: &Path) -> Result<Layout, Error> {
    let bad = |why| Error::BadDisk { path: disk.to_owned(), why };
    let mut sb = [0; 1024];
    file.read_exact_at(&mut sb, SUPERBLOCK).at("read", disk)?;
    if le16(&sb, 0x38) != MAGIC {
        return Err(bad("it has no ext4 superblock"));
    }
    let block_size = 1024_u64 << le32(&sb, 0x18).min(6);
    if block_size < 4096 {
        return Err(bad("its blocks are smaller than 4096 bytes"));
    }
    if le32(&sb, 0x64) & METADATA_CSUM == 0 || le32(&sb, 0x60) & CSUM_SEED != 0 {
        return Err(bad("its checksums are not of the expected kind"));
    }
    let blocks = u64::from(le32(&sb, 0x4)) | u64::from(le32(&sb, 0x150)) << 32;
    let layout = Layout {
        block_size,
        groups: blocks.div_ceil(u64::from(le32(&sb, 0x20)).max(1)),
        inodes_per_group: le32(&sb, 0x28),
        inode_size: le16(&sb, 0x58).into(),
        desc_size: le16(&sb, 0xfe).into(),
        checksum_seed: crc32c(!0, &sb[0x68..0x78]),
    };
    if layout.desc_size < 64 || layout.inode_size < 256 {
        return Err(bad("its inodes or group descriptors are smaller than expected"));
    }
    Ok(layout)
}

fn settle_group(file: &File, disk: &Path, layout: &Layout, group: u64, desc: &[u8]) -> Result<(), Error> {
    let table = u64::from(le32(desc, 0x8)) | u64::from(le32(desc, 0x28)) << 32;
    // Inodes at the end of the table that were never used are all zeros.
    let unused = u32::from(le16(desc, 0x1c)) | u32::from(le16(desc, 0x32)) << 16;
    let used = layout.inodes_per_group.saturating_sub(unused) as usize;
    let at = table * layout.block_size;
    let mut bytes = vec![0; used * layout.inode_size];
    file.read_exact_at(&mut bytes, at).at("read", disk)?;
    let first = group * u64::from(layout.inodes_per_group) + 1;
    for (index, inode) in bytes.chunks_exact_mut(layout.inode_size).enumerate() {
        let mode_and_links = le16(inode, 0) | le16(inode, 0x1a);
        if mode_and_links != 0 {
            // Inode numbers are 32 bits wide in this format.
            settle_inode(inode, (first + index as u64) as u32, layout.checksum_seed);
        }
    }
    file.write_all_at(&bytes, at).at("write", disk)
}

fn settle_inode(inode: &mut [u8], number: u32, seed: u32) {
    let extra = le16(inode, 0x80);
    inode.copy_within(0x10..0x14, 0x8); // access time
    inode.copy_within(0x10..0x14, 0xc); // change time
    if extra >= 28 {
        inode.copy_within(0x88..0x8c, 0x84); // change time, finer part
        inode.copy_within(0x88..0x8c, 0x8c); // access time, finer part
        inode.copy_within(0x10..0x14, 0x90); // creation time
        inode.copy_within(0x88..0x8c, 0x94); // creation time, finer part
    }
    let wide = extra >= 4;
    inode[0x7c..0x7e].fill(0);
    if wide {
        inode[0x82..0x84].fill(0);
    }
    let generation: [u8; 4] = [inode[0x64], inode[0x65], inode[0x66], inode[0x67]];
    let sum = crc32c(crc32c(crc32c(seed, &number.to_le_bytes()), &generation), inode).to_le_bytes();
    inode[0x7c..0x7e].copy_from_slice(&sum[..2]);
    if wide {
        inode[0x82..0x84].copy_from_slice(&sum[2..]);
    }
}

/// CRC-32C without the final inversion, as ext4 chains it.
fn crc32c(start: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(start, |crc, byte| {
        let index = (crc as u8) ^ byte;
        TABLE[usize::from(index)] ^ (crc >> 8)
    })
}

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc32c() {
        // The check value of the CRC-32C (Castagnoli) definition.
        assert_eq!(!crc32c(!0, b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_file_that_is_no_ext4_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, vec![0; 8192]).unwrap();
        assert!(matches!(settle_times(&path), Err(Error::BadDisk { .. })));
    }
}
