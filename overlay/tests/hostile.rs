//! Arbitrary images: no panic, no endless loop, no memory beyond the tables; and nothing is made worse.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::fs::File;
use std::path::Path;
use std::sync::OnceLock;

use common::Bench;
use common::model::{Random, operation, perform};
use proptest::prelude::*;
use torpor_overlay::fault::Recorder;
use torpor_overlay::{Block, Image, Overlay, Raw, check, inspect, open};

const CLUSTER: u64 = 65_536;

struct Sample {
    bytes: Vec<u8>,
    /// The base's file, which has no name any more.
    base: File,
}

/// A small overlay with some content.
fn sample() -> &'static Sample {
    static SAMPLE: OnceLock<Sample> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let bench = Bench::new(3 * CLUSTER);
        let path = bench.overlay(12 * CLUSTER);
        let disk = open(&path, &[&bench.base]).unwrap();
        let mut random = Random::new(1);
        for _ in 0..25 {
            perform(&disk, &operation(&mut random, disk.size(), 512)).unwrap();
        }
        disk.close().unwrap();
        Sample { bytes: std::fs::read(path).unwrap(), base: File::open(&bench.base).unwrap() }
    })
}

/// A change of some bytes in the places that matter: header, refcount table, refcounts, L1, L2.
fn change() -> impl Strategy<Value = (usize, Vec<u8>)> {
    let place = prop_oneof![
        0usize..130,
        65_536usize..65_560,
        131_072usize..131_140,
        196_608usize..196_624,
        262_144usize..262_260
    ];
    let number = prop_oneof![
        prop::collection::vec(any::<u8>(), 1..9),
        (0u64..40, any::<bool>())
            .prop_map(|(cluster, copied)| (cluster << 16 | u64::from(copied) << 63).to_be_bytes().to_vec()),
        prop_oneof![Just(0u64), Just(1), Just(u64::MAX), Just(1 << 62), Just(1 << 56)]
            .prop_map(|n| n.to_be_bytes().to_vec()),
    ];
    (place, number, any::<bool>())
        .prop_map(|(at, bytes, aligned)| (if aligned { at & !7 } else { at }, bytes))
}

fn changed(changes: &[(usize, Vec<u8>)], length: usize) -> Vec<u8> {
    let mut image = sample().bytes.clone();
    for (at, bytes) in changes {
        image[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    image.truncate(length);
    image
}

fn base() -> Box<dyn Block> {
    Box::new(Raw::from_file(sample().base.try_clone().unwrap(), false).unwrap())
}

fn file_of(image: &[u8]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), image).unwrap();
    file
}

/// Reads here and there, to the end.
fn look_around(disk: &dyn Block) {
    let size = disk.size();
    let mut buffer = vec![0; 70_000];
    for at in [0, 5 * CLUSTER, 11 * CLUSTER, size / 2, size.saturating_sub(70_000)] {
        let length = 70_000.min(size.saturating_sub(at)) as usize;
        let _ = disk.read(&mut buffer[..length], at.min(size));
    }
}

#[test]
fn tables_far_beyond_the_file_are_damage_and_take_no_memory() {
    for field in [40, 48] {
        let mut image = sample().bytes.clone();
        image[field..field + 8].copy_from_slice(&(1u64 << 55).to_be_bytes());
        assert_eq!(check(file_of(&image).path()).unwrap_err().reason(), "CORRUPT");
        let opened = Overlay::open_on(Box::new(Recorder::new(image)), base(), Path::new("far"));
        assert_eq!(opened.unwrap_err().reason(), "CORRUPT");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn an_image_that_opens_for_writing_stays_sound(
        changes in prop::collection::vec(change(), 1..4),
        seed in any::<u64>(),
    ) {
        let recorder = Recorder::new(changed(&changes, usize::MAX));
        let before = recorder.content();
        match Overlay::open_on(Box::new(recorder.clone()), base(), Path::new("hostile")) {
            Err(_) => prop_assert!(recorder.content() == before, "a refused image was written to"),
            Ok(disk) => {
                let mut random = Random::new(seed);
                for _ in 0..12 {
                    perform(&disk, &operation(&mut random, disk.size().min(12 * CLUSTER), 512)).unwrap();
                }
                look_around(&disk);
                disk.close().unwrap();
                let report = check(file_of(&recorder.content()).path()).unwrap();
                prop_assert!(report.damages == 0 && report.leaked_clusters == 0, "{report:?}");
            }
        }
    }

    #[test]
    fn reading_any_image_ends(
        changes in prop::collection::vec(change(), 0..6),
        length in prop_oneof![Just(usize::MAX), 0usize..400_000],
    ) {
        let file = file_of(&changed(&changes, length));
        let _ = inspect(file.path());
        let _ = check(file.path());
        if let Ok(image) = Image::open(file.path(), Some(base())) {
            look_around(&image);
        }
    }
}
