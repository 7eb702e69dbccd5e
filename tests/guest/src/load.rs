//! Writes as fast as it can, and says what must be there after any end: `SYNCED n` after all blocks up to number n are durable.
//!
//! Block n goes to [`place`] n; each 4 KiB block holds its number, over and over, as little-endian words.

use std::{
    fs::File,
    io::{self, Seek as _, SeekFrom},
    os::unix::fs::FileExt as _,
};

use torpor_test_guest::{BLOCK, place};

use crate::{disk::Aligned, say};

/// Blocks between two syncs.
const BETWEEN_SYNCS: u64 = 16;

/// Writes until it is ended.
pub(crate) fn run(disk: &File) -> io::Result<()> {
    let blocks = (&*disk).seek(SeekFrom::End(0))? / BLOCK as u64;
    let mut block = Aligned::new(BLOCK, 0);
    for number in 1_u64.. {
        for word in block.get().chunks_exact_mut(8) {
            word.copy_from_slice(&number.to_le_bytes());
        }
        disk.write_all_at(block.get(), place(number, blocks) * BLOCK as u64)?;
        if number % BETWEEN_SYNCS == 0 {
            disk.sync_data()?;
            say(&format!("SYNCED {number}"));
        }
    }
    Ok(())
}
