//! Long histories of an overlay against a flat model: random requests of any size and alignment, reopening, growing, and
//! power failures in the middle of any of it; qemu-img judges what is left of each.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use common::model::{CLUSTER, Model, Operation, Random, Replay, content, perform};
use common::{Bench, assert_clean, base_content, qemu_tools, run, text};
use torpor_overlay::fault::Recorder;
use torpor_overlay::{Block, Overlay, Raw};

/// Requests in one life of an overlay.
const LIFE: u64 = 20_000;
const MOST_SIZE: u64 = 80 * CLUSTER;
/// How much content a single read or write carries on average is what the running time goes by.
const MOST_READ: u64 = 8192;

/// What a run has done.
#[derive(Debug, Default)]
struct Done {
    operations: AtomicU64,
    reopened: AtomicU64,
    crashes: AtomicU64,
    grown: AtomicU64,
    judged: AtomicU64,
}

impl Done {
    fn count(number: &AtomicU64) {
        number.fetch_add(1, Ordering::Relaxed);
    }
}

/// Tells the seed of a history that fails, whatever it is that fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the history of seed {} failed", self.0);
        }
    }
}

/// One overlay from its creation on, in memory.
struct Life<'a> {
    random: Random,
    /// Offsets and lengths are multiples of this. A power failure is only simulated for whole sectors: a host writes
    /// those back whole, so that two changes in one sector never survive one without the other.
    unit: u64,
    bench: &'a Bench,
    recorder: Recorder,
    replay: Replay,
    disk: Overlay,
    model: Model,
    done: &'a Done,
}

fn open(recorder: &Recorder, bench: &Bench) -> Overlay {
    let base = Raw::open_read_only(&bench.base).unwrap();
    Overlay::open_on(Box::new(recorder.clone()), Box::new(base), Path::new("recorded")).unwrap()
}

impl<'a> Life<'a> {
    fn begin(seed: u64, bench: &'a Bench, done: &'a Done) -> Self {
        let mut random = Random::new(seed);
        let unit = if seed.is_multiple_of(3) { 1 } else { 512 };
        let base = bench.base.metadata().unwrap().len();
        let path = bench.path("overlay.qcow2");
        let _ = std::fs::remove_file(&path);
        bench.overlay(base + random.below(20 * CLUSTER));
        let first = std::fs::read(path).unwrap();
        let recorder = Recorder::new(first.clone());
        let disk = open(&recorder, bench);
        let model = Model::new(base_content(base), disk.size());
        Self { random, unit, bench, recorder, replay: Replay::new(first), disk, model, done }
    }

    /// A range inside the disk.
    fn range(&mut self, most: u64) -> (u64, u64) {
        let (size, unit) = (self.disk.size(), self.unit);
        let length = (self.random.below(most.min(size) / unit) + 1) * unit;
        (self.random.below((size - length) / unit + 1) * unit, length)
    }

    fn operation(&mut self) -> Operation {
        match self.random.below(100) {
            0..72 => {
                let (offset, length) = self.range(8192);
                Operation::Write(offset, self.random.bytes(length as usize))
            }
            72..74 => {
                let (offset, length) = self.range(250_000);
                Operation::Write(offset, self.random.bytes(length as usize))
            }
            74..79 => {
                let (offset, length) = self.range(200_000);
                Operation::Discard(offset, length)
            }
            79..83 => {
                let (offset, length) = self.range(80_000);
                Operation::WriteZeroes(offset, length)
            }
            _ => Operation::Flush,
        }
    }

    fn read(&mut self) {
        let (at, length) = self.range(MOST_READ);
        let mut found = vec![0xee; length as usize];
        self.disk.read(&mut found, at).unwrap();
        assert!(found == self.model.now[at as usize..(at + length) as usize], "{length} bytes at {at}");
    }

    fn step(&mut self) {
        match self.random.below(2000) {
            0..600 => self.read(),
            600 => self.reopen(),
            601 if self.unit == 512 => self.crash(),
            602 => self.grow(),
            603 => assert_eq!(self.disk.check().unwrap().damages, 0),
            _ => {
                let operation = self.operation();
                perform(&self.disk, &operation).unwrap();
                self.model.apply(&operation);
            }
        }
        self.recorder.take_log().into_iter().for_each(|change| self.replay.advance(change));
        Done::count(&self.done.operations);
    }

    fn reopen(&mut self) {
        self.disk.close().unwrap();
        self.model.flushed();
        self.disk = open(&self.recorder, self.bench);
        assert!(content(&self.disk) == self.model.now, "after reopening");
        Done::count(&self.done.reopened);
    }

    fn grow(&mut self) {
        let size = (self.disk.size() + self.random.below(6 * CLUSTER)).min(MOST_SIZE);
        self.disk.grow(size).unwrap();
        self.model.grown(self.disk.size());
        Done::count(&self.done.grown);
    }

    /// A power failure at any point of a request, and on from what it left.
    fn crash(&mut self) {
        let operation = self.operation();
        perform(&self.disk, &operation).unwrap();
        match operation {
            Operation::Flush => {} // not known to be done
            _ => self.model.apply(&operation),
        }
        let changes = self.recorder.take_log();
        let kept = self.random.below(changes.len() as u64 + 1) as usize;
        changes.into_iter().take(kept).for_each(|change| self.replay.advance(change));
        let keep = [0, 4, 4, 8][self.random.below(4) as usize];
        let left = self.replay.crash(&mut self.random, keep);
        self.recorder = Recorder::new(left.clone());
        self.replay = Replay::new(left);
        self.disk = open(&self.recorder, self.bench);
        let found = content(&self.disk);
        assert_eq!(self.model.wrong_sector(&found), None, "after a crash in {operation:.60?}");
        let size = found.len() as u64;
        self.model = Model::new(found, size);
        Done::count(&self.done.crashes);
    }

    fn end(self, qemu: bool) {
        self.disk.close().unwrap();
        if !qemu {
            return;
        }
        let (path, flat) = (self.bench.path("overlay.qcow2"), self.bench.path("flat.raw"));
        std::fs::write(&path, self.recorder.content()).unwrap();
        std::fs::write(&flat, &self.model.now).unwrap();
        assert_clean(&path);
        run("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", text(&path), text(&flat)]);
        Done::count(&self.done.judged);
    }
}

fn histories(operations: u64, threads: u64, test: &str) {
    let (qemu, done) = (qemu_tools(test), Done::default());
    let lives = operations.div_ceil(LIFE);
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(seed) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < lives)
                {
                    let _seed = Seed(seed);
                    let bench = Bench::new(Random::new(seed ^ 0x55).below(40 * CLUSTER));
                    let mut life = Life::begin(seed, &bench, &done);
                    (0..operations.min(LIFE)).for_each(|_| life.step());
                    life.end(qemu);
                }
            });
        }
    });
    println!("{done:?}");
    assert!(done.operations.into_inner() >= operations);
}

#[test]
fn histories_of_random_requests_and_power_failures_are_those_of_a_flat_disk() {
    histories(60_000, 1, "histories_of_random_requests_and_power_failures_are_those_of_a_flat_disk");
}

#[test]
#[ignore = "slow ring: ten million operations"]
fn ten_million_requests_and_power_failures_are_those_of_a_flat_disk() {
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get().min(4) as u64);
    histories(10_000_000, threads, "ten_million_requests_and_power_failures_are_those_of_a_flat_disk");
}
