//! Any damage to an overlay of ours: it is refused without a write, or it opens, works, and is sound once it is closed.
//!
//! The input says what is written over a sound image, as records of a cluster (1 byte), an offset (2), a length (1) and
//! that many bytes; the first byte says how the image is cut and read, and seeds the requests.
#![no_main]

use std::fs::File;
use std::path::Path;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use torpor_overlay::fault::Recorder;
use torpor_overlay::{BaseIdentity, Block, Image, Overlay, Raw, create, open, sha256_file};

const CLUSTER: u64 = 65_536;
const SIZE: u64 = 12 * CLUSTER;

struct Sample {
    bytes: Vec<u8>,
    /// The base's file, which has no name any more.
    base: File,
}

fn sample() -> &'static Sample {
    static SAMPLE: OnceLock<Sample> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let (base, path) = (dir.path().join("base"), dir.path().join("overlay"));
        std::fs::write(&base, vec![0xbb; 3 * CLUSTER as usize]).unwrap();
        let identity = BaseIdentity { digest: sha256_file(&base).unwrap(), size: 3 * CLUSTER };
        create(&path, &base, &identity, SIZE).unwrap();
        let disk = open(&path, &[&base]).unwrap();
        for cluster in [0, 2, 5, 6, 9] {
            disk.write(&vec![cluster as u8 + 1; 5000], cluster * CLUSTER + 100).unwrap();
        }
        disk.flush().unwrap();
        disk.discard(5 * CLUSTER, CLUSTER).unwrap();
        disk.write_zeroes(CLUSTER, CLUSTER).unwrap();
        disk.close().unwrap();
        Sample { bytes: std::fs::read(&path).unwrap(), base: File::open(&base).unwrap() }
    })
}

fn base() -> Box<dyn Block> {
    Box::new(Raw::from_file(sample().base.try_clone().unwrap(), false).unwrap())
}

fn damaged(mut records: &[u8], cut: bool) -> Vec<u8> {
    let mut image = sample().bytes.clone();
    while let [cluster, high, low, length, rest @ ..] = records {
        let (bytes, after) = rest.split_at(rest.len().min(usize::from(*length)));
        let clusters = image.len().div_ceil(CLUSTER as usize).max(1);
        let within = usize::from(u16::from_be_bytes([*high, *low]));
        let at = (usize::from(*cluster) % clusters * CLUSTER as usize + within).min(image.len());
        let count = bytes.len().min(image.len() - at);
        image[at..at + count].copy_from_slice(&bytes[..count]);
        if cut && after.is_empty() {
            image.truncate(at);
        }
        records = after;
    }
    image
}

fn read_all(disk: &dyn Block) {
    let mut buffer = vec![0; 70_000];
    let (size, mut at, mut left) = (disk.size(), 0, 64);
    while let Ok(start) = disk.skip_zeros(at) {
        if start >= size || left == 0 {
            break;
        }
        let count = (size - start).min(70_000);
        let _ = disk.read(&mut buffer[..count as usize], start);
        (at, left) = (start + count, left - 1);
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((first, records)) = input.split_first() else { return };
    let image = damaged(records, first & 1 == 1);
    // As a base it is read by the reader of foreign images.
    if first & 2 == 2 {
        if let Ok(image) = Image::open_on(Box::new(Recorder::new(image)), Some(base()), Path::new("fuzz")) {
            read_all(&image);
        }
        return;
    }
    let recorder = Recorder::new(image);
    let Ok(disk) = Overlay::open_on(Box::new(recorder.clone()), base(), Path::new("fuzz")) else {
        assert!(recorder.log().is_empty(), "a refused image was written to");
        return;
    };
    read_all(&disk);
    let size = disk.size();
    for number in 0..6u64 {
        let at = (u64::from(*first) * 7919 + number * 104_729) % size.min(SIZE);
        let length = (number * 33_333 + 1).min(size - at);
        let done = match number % 4 {
            0 | 1 => disk.write(&vec![number as u8 + 1; length as usize], at),
            2 => disk.discard(at, length),
            _ => disk.flush(),
        };
        done.unwrap();
    }
    disk.close().unwrap();
    let again = Overlay::open_on(Box::new(recorder), base(), Path::new("fuzz")).unwrap();
    let report = again.check().unwrap();
    assert!(report.damages == 0 && report.leaked_clusters == 0, "{report:?}");
});
