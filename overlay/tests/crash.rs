//! Power failures: everything that the engine writes is recorded, the recording is cut at every point with every kind of
//! reordering, and what is left is opened and read.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::path::Path;

use common::model::{CLUSTER, Model, Operation, Random, Replay, content, operation, perform};
use common::{Bench, assert_no_corruption, base_content, qemu_tools, run, text};
use torpor_overlay::fault::{Change, Recorder};
use torpor_overlay::{Block, Overlay, Raw, grow_on};

const SIZE: u64 = 20 * CLUSTER;
const BASE: u64 = 9 * CLUSTER + 1000;

fn open(recorder: &Recorder, base: &Path) -> Overlay {
    let base = Raw::open_read_only(base).unwrap();
    Overlay::open_on(Box::new(recorder.clone()), Box::new(base), Path::new("recorded")).unwrap()
}

struct Judge<'a> {
    bench: &'a Bench,
    qemu: bool,
    crashes: u64,
    leaks: u64,
}

impl Judge<'_> {
    /// Opens what a crash left: it must be sound, hold what was flushed, and be free of leaks once closed.
    fn judge(&mut self, image: Vec<u8>, model: &Model, what: &str) {
        self.crashes += 1;
        let path = self.bench.path("crashed.qcow2");
        if self.qemu && self.crashes.is_multiple_of(97) {
            std::fs::write(&path, &image).unwrap();
            self.leaks += u64::from(assert_no_corruption(&path));
        }
        let recorder = Recorder::new(image);
        let overlay = open(&recorder, &self.bench.base);
        let found = content(&overlay);
        if let Some(sector) = model.wrong_sector(&found) {
            let at = sector * 512;
            panic!(
                "{what}: sector {sector} holds {:?}..., not {:?}...",
                &found[at..at + 8],
                &model.now[at..at + 8]
            );
        }
        let found = match self.crashes.is_multiple_of(3) {
            true => go_on(&overlay, found, self.crashes),
            false => found,
        };
        overlay.close().unwrap();
        if self.qemu && self.crashes.is_multiple_of(97) {
            std::fs::write(&path, recorder.content()).unwrap();
            common::assert_clean(&path);
            let flat = self.bench.path("flat.raw");
            std::fs::write(&flat, &found).unwrap();
            run("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", text(&path), text(&flat)]);
        }
    }
}

/// Work after a crash: clusters that the crash left with unknown content are used again.
fn go_on(overlay: &Overlay, found: Vec<u8>, seed: u64) -> Vec<u8> {
    let mut model = Model::new(found, SIZE);
    let mut random = Random::new(seed);
    for _ in 0..4 {
        let length = (random.below(8) + 1) * 512;
        let write =
            Operation::Write(random.below((SIZE - length) / 512) * 512, random.bytes(length as usize));
        perform(overlay, &write).unwrap();
        model.apply(&write);
    }
    assert!(content(overlay) == model.now, "after crash {seed}");
    model.now
}

/// One history of random operations with crashes at every change that it makes.
fn history(seed: u64, operations: u64, judge: &mut Judge<'_>) {
    let overlay = judge.bench.path(&format!("{seed}.qcow2"));
    torpor_overlay::create(&overlay, &judge.bench.base, &judge.bench.identity, SIZE).unwrap();
    let mut random = Random::new(seed);
    let mut model = Model::new(base_content(BASE), SIZE);
    let first = std::fs::read(&overlay).unwrap();
    let recorder = Recorder::new(first.clone());
    let mut replay = Replay::new(first);
    let mut disk = open(&recorder, &judge.bench.base);
    let mut seen = 0;
    for number in 0..operations {
        let before = model.clone();
        let reopened = random.below(40) == 0;
        let operation = match reopened {
            true => {
                disk.close().unwrap();
                disk = open(&recorder, &judge.bench.base);
                Operation::Flush
            }
            false => {
                let operation = operation(&mut random, SIZE, 512);
                perform(&disk, &operation).unwrap();
                operation
            }
        };
        model.apply(&operation);
        let mut during = before;
        during.apply(&match operation {
            Operation::Flush => Operation::Write(0, Vec::new()), // while it runs, all is as before it
            ref other => other.clone(),
        });
        let log = recorder.log();
        for change in &log[seen..] {
            replay.advance(change.clone());
            for keep in [0, 4, 8] {
                let left = replay.crash(&mut random, keep);
                judge.judge(left, &during, &format!("seed {seed}, in operation {number}"));
            }
        }
        seen = log.len();
        assert!(model.wrong_sector(&content(&disk)).is_none());
        let left = replay.crash(&mut random, 4);
        judge.judge(left, &model, &format!("seed {seed}, after operation {number}"));
    }
}

#[test]
fn a_crash_between_any_two_writes_leaves_a_sound_image_with_all_that_was_flushed() {
    let test = "a_crash_between_any_two_writes_leaves_a_sound_image_with_all_that_was_flushed";
    histories(1..=2, test);
}

#[test]
#[ignore = "slow ring: more of the same"]
fn a_crash_between_any_two_writes_of_many_histories_leaves_a_sound_image() {
    histories(100..=130, "a_crash_between_any_two_writes_of_many_histories_leaves_a_sound_image");
}

fn histories(seeds: std::ops::RangeInclusive<u64>, test: &str) {
    let bench = Bench::new(BASE);
    let mut judge = Judge { bench: &bench, qemu: qemu_tools(test), crashes: 0, leaks: 0 };
    for seed in seeds {
        history(seed, 60, &mut judge);
    }
    println!("{} crashes, {} of 1 in 97 with leaks", judge.crashes, judge.leaks);
}

#[test]
fn a_crash_while_growing_leaves_the_old_or_the_new_size_and_all_content() {
    let bench = Bench::new(BASE);
    let image = std::fs::read(bench.overlay(SIZE)).unwrap();
    let recorder = Recorder::new(image.clone());
    let disk = open(&recorder, &bench.base);
    let mut random = Random::new(3);
    let mut model = Model::new(base_content(BASE), SIZE);
    for _ in 0..20 {
        let operation = operation(&mut random, SIZE, 512);
        perform(&disk, &operation).unwrap();
        model.apply(&operation);
    }
    disk.close().unwrap();
    let mut replay = Replay::new(recorder.content());
    let before = recorder.log().len();
    // Needs 299 new L2 tables, and 75 new refcount blocks: more than a sector of the refcount table names.
    let size = 150 << 30;
    grow_on(&recorder, Path::new("grown"), size).unwrap();
    let mut sizes = std::collections::BTreeSet::new();
    for change in recorder.log()[before..].iter() {
        replay.advance(change.clone());
        // After a sync there is only one possible content.
        let samples: &[u64] = if *change == Change::Sync { &[8] } else { &[0, 4, 3, 3, 3, 3, 3, 3, 3, 3, 8] };
        for keep in samples {
            let disk = open(&Recorder::new(replay.crash(&mut random, *keep)), &bench.base);
            sizes.insert(disk.size());
            let mut found = vec![0; SIZE as usize];
            disk.read(&mut found, 0).unwrap();
            assert!(found == model.now);
            disk.close().unwrap();
        }
    }
    assert_eq!(sizes.into_iter().collect::<Vec<_>>(), [SIZE, size]);
}

#[test]
fn the_judge_finds_an_engine_that_writes_references_first() {
    // The same replay with every sync left out of the recording: what the order protects from must show.
    let bench = Bench::new(BASE);
    let overlay = bench.overlay(SIZE);
    let first = std::fs::read(overlay).unwrap();
    let recorder = Recorder::new(first.clone());
    let disk = open(&recorder, &bench.base);
    let mut random = Random::new(5);
    for _ in 0..30 {
        perform(&disk, &operation(&mut random, SIZE, 512)).unwrap();
    }
    let mut found = false;
    for _ in 0..50 {
        let mut replay = Replay::new(first.clone());
        recorder
            .log()
            .iter()
            .filter(|change| **change != Change::Sync)
            .for_each(|change| replay.advance(change.clone()));
        let left = Recorder::new(replay.crash(&mut random, 4));
        let base = Raw::open_read_only(&bench.base).unwrap();
        found |= Overlay::open_on(Box::new(left), Box::new(base), Path::new("unordered")).is_err();
    }
    assert!(found, "without syncs, some crash must leave a damaged image");
}
