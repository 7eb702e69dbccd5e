//! Clusters compressed by deflate, for reading.
//!
//! Source: qemu's docs/interop/qcow2.txt, "Compressed Clusters Descriptor": a raw deflate stream in whole sectors of
//! 512 bytes from an offset of any alignment on.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

use crate::block::Host;
use crate::image::damaged;

/// Bytes of inflated clusters that are kept, at least one cluster.
const KEPT: u64 = 4 << 20;
const SECTOR: u64 = 512;

/// Where a compressed cluster lies in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packed {
    pub(crate) offset: u64,
    /// Bytes up to the end of its last sector; at most a little more than two clusters.
    bytes: u64,
}

impl Packed {
    /// Decodes an L2 entry that has the compressed flag.
    pub(crate) fn decode(entry: u64, cluster_bits: u32) -> Self {
        let count_bits = cluster_bits - 8;
        let offset_bits = 62 - count_bits;
        let offset = entry & ((1 << offset_bits) - 1);
        let sectors = (entry >> offset_bits & ((1 << count_bits) - 1)) + 1;
        Self { offset, bytes: sectors * SECTOR - offset % SECTOR }
    }
}

/// Inflates clusters and keeps the last ones: small reads in order inflate each once.
pub(crate) struct Inflater {
    cluster_bytes: u64,
    kept: Mutex<VecDeque<(u64, Arc<[u8]>)>>,
}

impl Inflater {
    pub(crate) fn new(cluster_bytes: u64) -> Self {
        Self { cluster_bytes, kept: Mutex::default() }
    }

    /// The content of a compressed cluster.
    pub(crate) fn get(&self, host: &dyn Host, packed: Packed) -> io::Result<Arc<[u8]>> {
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let known =
            kept().iter().find(|(offset, _)| *offset == packed.offset).map(|(_, bytes)| Arc::clone(bytes));
        if let Some(content) = known {
            return Ok(content);
        }
        let mut packed_bytes = vec![0; packed.bytes as usize];
        host.read(&mut packed_bytes, packed.offset)?;
        let content: Arc<[u8]> = inflate(&packed_bytes, self.cluster_bytes as usize)
            .ok_or_else(|| {
                damaged(format!("the compressed cluster at {:#x} can't be inflated", packed.offset))
            })?
            .into();
        let mut kept = kept();
        while kept.len() as u64 >= (KEPT / self.cluster_bytes).max(1) {
            kept.pop_front();
        }
        kept.push_back((packed.offset, Arc::clone(&content)));
        Ok(content)
    }
}

/// Exactly `length` bytes out of a raw deflate stream, which may be followed by anything.
fn inflate(packed: &[u8], length: usize) -> Option<Vec<u8>> {
    let mut content = vec![0; length];
    let mut state = Box::new(DecompressorOxide::new());
    let (status, _, count) =
        decompress(&mut state, packed, &mut content, 0, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF);
    let sound = matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput);
    (sound && count == length).then_some(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_names_sectors_from_an_offset_of_any_alignment() {
        // 64 KiB clusters: 54 bits of offset, then 8 of further sectors.
        let entry = 1 << 62 | 3 << 54 | 0x5_0007;
        assert_eq!(Packed::decode(entry, 16), Packed { offset: 0x5_0007, bytes: 4 * 512 - 7 });
        // 2 MiB clusters: 49 bits of offset, 13 of sectors.
        assert_eq!(Packed::decode(u64::MAX, 21).bytes, (1 << 13) * 512 - 511);
    }

    #[test]
    fn streams_that_are_cut_or_too_short_or_nonsense_are_refused() {
        let content: Vec<u8> = (0..4096u32).map(|at| (at / 7 % 251) as u8).collect();
        let mut packed = miniz_oxide::deflate::compress_to_vec(&content, 6);
        assert_eq!(inflate(&packed, 4096).as_deref(), Some(&content[..]));
        assert_eq!(inflate(&packed, 4097), None, "too short");
        assert_eq!(inflate(&packed[..packed.len() / 2], 4096), None, "cut");
        assert_eq!(inflate(&[0xff; 600], 4096), None);
        packed.extend([0xee; 500]);
        assert_eq!(inflate(&packed, 4096).as_deref(), Some(&content[..]), "the rest of a sector is anything");
    }
}
