//! Grows the root file system to its disk.

use std::{
    fs::File,
    io,
    os::{fd::AsRawFd as _, unix::fs::FileExt as _},
    path::Path,
};

use nix::errno::Errno;

/// Where the superblock begins on the device, and how much of it is looked at.
const SUPERBLOCK: u64 = 1024;
const LOOKED_AT: usize = 0x160;

// linux/fs.h and ext4.h.
const BLKGETSIZE64: libc::Ioctl = 0x8008_1272;
const EXT4_IOC_RESIZE_FS: libc::Ioctl = 0x4008_6610;

/// The file system could not be grown.
#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    /// The device could not be read.
    #[error("read {device}: {source}")]
    Read {
        /// Which.
        device: String,
        /// Why.
        source: io::Error,
    },
    /// No ext4 superblock.
    #[error("{0} holds no ext4 file system")]
    NotExt4(String),
    /// The kernel refused.
    #[error("resize from {from} to {to} blocks: {}", source.desc())]
    Resize {
        /// Blocks now.
        from: u64,
        /// Blocks wanted.
        to: u64,
        /// Why.
        source: Errno,
    },
}

/// Size of an ext4 file system, from its superblock.
#[derive(Debug, PartialEq, Eq)]
struct Geometry {
    blocks: u64,
    block_bytes: u64,
}

/// Grows the mounted file system to the size of `device`; its new size in bytes, none when it has that size already.
///
/// # Errors
/// [`GrowError`]; the file system is as it was then.
pub fn grow(device: &Path, mounted: &Path) -> Result<Option<u64>, GrowError> {
    let name = device.display().to_string();
    let read = |source| GrowError::Read { device: name.clone(), source };
    let file = File::open(device).map_err(read)?;
    let mut superblock = [0; LOOKED_AT];
    file.read_exact_at(&mut superblock, SUPERBLOCK).map_err(read)?;
    let geometry = geometry(&superblock).ok_or_else(|| GrowError::NotExt4(name.clone()))?;
    let mut device_bytes: u64 = 0;
    // SAFETY: BLKGETSIZE64 writes one u64.
    Errno::result(unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &raw mut device_bytes) })
        .map_err(|errno| read(errno.into()))?;
    let wanted = device_bytes / geometry.block_bytes;
    if wanted <= geometry.blocks {
        return Ok(None);
    }
    let folder = File::open(mounted).map_err(read)?;
    // SAFETY: EXT4_IOC_RESIZE_FS reads one u64.
    Errno::result(unsafe { libc::ioctl(folder.as_raw_fd(), EXT4_IOC_RESIZE_FS, &raw const wanted) })
        .map_err(|source| GrowError::Resize { from: geometry.blocks, to: wanted, source })?;
    Ok(Some(wanted * geometry.block_bytes))
}

/// Reads s_blocks_count and s_log_block_size (fs/ext4/ext4.h, struct ext4_super_block).
fn geometry(superblock: &[u8; LOOKED_AT]) -> Option<Geometry> {
    let word = |at: usize| {
        let bytes = [superblock[at], superblock[at + 1], superblock[at + 2], superblock[at + 3]];
        u64::from(u32::from_le_bytes(bytes))
    };
    let magic = u16::from_le_bytes([superblock[0x38], superblock[0x39]]);
    let wide = word(0x60) & 0x80 != 0;
    let high = if wide { word(0x150) } else { 0 };
    let block_bytes = 1024_u64.checked_shl(u32::try_from(word(0x18)).ok()?)?;
    (magic == 0xef53 && block_bytes <= 65536)
        .then_some(Geometry { blocks: word(0x4) | high << 32, block_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_superblock_of_mke2fs_is_understood() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        File::create(&image).unwrap().set_len(24 << 20).unwrap();
        let made = std::process::Command::new("/usr/sbin/mke2fs")
            .args(["-q", "-t", "ext4", "-b", "4096", "-F"])
            .arg(&image)
            .status();
        if !made.is_ok_and(|status| status.success()) {
            let required = std::env::var("REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|need| need == "tools"), "mke2fs is missing");
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("SKIP the_superblock_of_mke2fs_is_understood: no mke2fs\n"),
            );
            return;
        }
        let mut superblock = [0; LOOKED_AT];
        File::open(&image).unwrap().read_exact_at(&mut superblock, SUPERBLOCK).unwrap();
        assert_eq!(geometry(&superblock), Some(Geometry { blocks: 6144, block_bytes: 4096 }));
    }

    #[test]
    fn zeros_are_no_superblock() {
        assert_eq!(geometry(&[0; LOOKED_AT]), None);
    }
}
