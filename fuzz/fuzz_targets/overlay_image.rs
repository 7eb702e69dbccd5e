//! Any bytes as a foreign qcow2 image: opening and reading ends, without a panic, within bounds.
#![no_main]

use std::path::Path;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use torpor_overlay::fault::Recorder;
use torpor_overlay::{Block, Image, Raw};

/// Bytes read of one image at most.
const MOST_READ: u64 = 4 << 20;
const CHUNK: u64 = 70_000;

/// What images with a backing file stand on.
fn backing() -> Box<dyn Block> {
    static FILE: OnceLock<std::fs::File> = OnceLock::new();
    let file = FILE.get_or_init(|| {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[0xbb; 100_000], 0).unwrap();
        file
    });
    Box::new(Raw::from_file(file.try_clone().unwrap(), false).unwrap())
}

fuzz_target!(|bytes: &[u8]| {
    let host = Box::new(Recorder::new(bytes.to_vec()));
    let Ok(image) = Image::open_on(host, Some(backing()), Path::new("fuzz")) else { return };
    let (size, mut at, mut read) = (image.size(), 0, 0);
    let mut buffer = vec![0; CHUNK as usize];
    // All that isn't known to be zeros, then the end.
    while read < MOST_READ {
        let Ok(start) = image.skip_zeros(at) else { break };
        assert!(start >= at && start <= size);
        if start == size {
            break;
        }
        let count = CHUNK.min(size - start);
        let _ = image.read(&mut buffer[..count as usize], start);
        (at, read) = (start + count, read + count);
    }
    let tail = size.min(CHUNK);
    let _ = image.read(&mut buffer[..tail as usize], size - tail);
    assert!(image.read(&mut [0; 2], size - size.min(1)).is_err(), "beyond the end");
});
