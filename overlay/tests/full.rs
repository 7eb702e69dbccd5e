//! Full and failing hosts: the request fails, the image stays sound, and work goes on when there is room.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use common::model::{CLUSTER, Model, Operation, Random, content, operation, perform};
use common::{Bench, assert_clean, base_content, qemu_tools, skip};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use torpor_overlay::fault::Recorder;
use torpor_overlay::{Block, Overlay, Raw, check, create, open};

const MIB: u64 = 1 << 20;

/// A small file system of its own, gone at the end.
struct Tiny(tempfile::TempDir);

impl Tiny {
    fn new(test: &str, size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size}");
        match mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some(options.as_str())) {
            Ok(()) => Some(Self(dir)),
            Err(error) => {
                skip(test, "root", &format!("a tmpfs can't be mounted: {error}"));
                None
            }
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        let _ = umount2(self.0.path(), MntFlags::MNT_DETACH);
    }
}

/// Writes whole random clusters from `from` on until one fails; returns the clusters written.
fn fill(disk: &Overlay, model: &mut [u8], from: u64) -> u64 {
    for cluster in from..disk.size() / CLUSTER {
        let data = Random::new(cluster + 1).bytes(CLUSTER as usize);
        match disk.write(&data, cluster * CLUSTER) {
            Ok(()) => {
                model[(cluster * CLUSTER) as usize..((cluster + 1) * CLUSTER) as usize].copy_from_slice(&data)
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
                return cluster;
            }
        }
    }
    panic!("the file system never became full");
}

#[test]
fn on_a_full_file_system_writes_fail_and_go_on_when_there_is_room() {
    let test = "on_a_full_file_system_writes_fail_and_go_on_when_there_is_room";
    let Some(tiny) = Tiny::new(test, "6m") else { return };
    let bench = Bench::new(MIB);
    let path = tiny.path("overlay.qcow2");
    create(&path, &bench.base, &bench.identity, 32 * MIB).unwrap();
    let mut model = base_content(MIB);
    model.resize(32 << 20, 0);
    let disk = open(&path, &[&bench.base]).unwrap();
    assert!(!disk.host_is_full());
    let full = fill(&disk, &mut model, 0);
    assert!(disk.host_is_full());
    assert!(content(&disk) == model);
    disk.flush().unwrap();
    // Writing in place needs no room.
    disk.write(&[5; 5000], 3 * CLUSTER).unwrap();
    model[3 * 65_536..3 * 65_536 + 5000].fill(5);
    assert_eq!(disk.write(&[1], full * CLUSTER).unwrap_err().kind(), ErrorKind::StorageFull);
    // What the guest discards is room at once.
    disk.discard(0, 4 * CLUSTER).unwrap();
    model[..4 * 65_536].fill(0);
    assert!(fill(&disk, &mut model, full) >= full + 4);
    disk.flush().unwrap();
    assert!(content(&disk) == model);
    disk.close().unwrap();
    drop(disk);
    let disk = open(&path, &[&bench.base]).unwrap();
    assert!(content(&disk) == model);
    disk.close().unwrap();
    drop(disk);
    assert_eq!(check(&path).unwrap().damages, 0);
    if qemu_tools(test) {
        assert_clean(&path);
    }
}

#[test]
fn room_made_on_the_host_is_room_for_the_guest() {
    let test = "room_made_on_the_host_is_room_for_the_guest";
    let Some(tiny) = Tiny::new(test, "4m") else { return };
    let bench = Bench::new(MIB);
    let path = tiny.path("overlay.qcow2");
    create(&path, &bench.base, &bench.identity, 32 * MIB).unwrap();
    let other = tiny.path("other");
    std::fs::write(&other, vec![1; 1 << 20]).unwrap();
    let mut model = base_content(MIB);
    model.resize(32 << 20, 0);
    let disk = open(&path, &[&bench.base]).unwrap();
    let full = fill(&disk, &mut model, 0);
    std::fs::remove_file(other).unwrap();
    disk.write(&[1], full * CLUSTER).unwrap();
    assert!(!disk.host_is_full());
    assert!(fill(&disk, &mut model, full) >= full + 14);
    disk.close().unwrap();
    drop(disk);
    assert!(content(&open(&path, &[&bench.base]).unwrap()) == model);
}

#[test]
fn creating_on_a_full_file_system_is_no_space_and_leaves_no_file() {
    let test = "creating_on_a_full_file_system_is_no_space_and_leaves_no_file";
    let Some(tiny) = Tiny::new(test, "64k") else { return };
    let bench = Bench::new(MIB);
    std::fs::write(tiny.path("other"), vec![1; 60 << 10]).unwrap();
    let error = create(&tiny.path("overlay.qcow2"), &bench.base, &bench.identity, 10 << 30).unwrap_err();
    assert_eq!(error.reason(), "NO_SPACE");
    assert_eq!(std::fs::read_dir(tiny.0.path()).unwrap().count(), 1);
}

fn on(recorder: &Recorder, bench: &Bench) -> Overlay {
    let base = Raw::open_read_only(&bench.base).unwrap();
    Overlay::open_on(Box::new(recorder.clone()), Box::new(base), Path::new("recorded")).unwrap()
}

/// After `count` changes the host fails with `number` for a while. Returns false when that was never reached.
fn failing_history(bench: &Bench, image: Vec<u8>, count: u64, number: i32) -> bool {
    let size = 20 * CLUSTER;
    let recorder = Recorder::new(image);
    let disk = on(&recorder, bench);
    let mut model = Model::new(base_content(9 * CLUSTER), size);
    let mut random = Random::new(11);
    recorder.fail_after(Some((count, number)));
    let mut failures = 0;
    for step in 0..60 {
        let operation = operation(&mut random, size, 512);
        // A failed request leaves each sector old or new, and nothing counts as flushed.
        let result = perform(&disk, &operation);
        match (&result, &operation) {
            (Err(error), _) => {
                assert!(error.raw_os_error() == Some(number) || failures > 0, "{error}");
                failures += 1;
                if !matches!(operation, Operation::Flush) {
                    half_done(&mut model, &operation, &content(&disk));
                }
            }
            (Ok(()), operation) => model.apply(operation),
        }
        assert!(content(&disk) == model.now, "step {step}");
        if failures == 4 {
            recorder.fail_after(None);
        }
    }
    recorder.fail_after(None);
    let closed = disk.close();
    let left = Recorder::new(recorder.content());
    let again = on(&left, bench);
    assert!(model.wrong_sector(&content(&again)).is_none(), "after {count} changes");
    assert!(closed.is_err() || content(&again) == model.now);
    again.close().unwrap();
    failures > 0
}

/// The model takes over what a failed request has done, sector by sector.
fn half_done(model: &mut Model, operation: &Operation, found: &[u8]) {
    let before = model.now.clone();
    model.apply(operation);
    for sector in 0..found.len() / 512 {
        let range = sector * 512..(sector + 1) * 512;
        assert!(
            found[range.clone()] == before[range.clone()] || found[range.clone()] == model.now[range.clone()]
        );
    }
    model.now.copy_from_slice(found);
}

#[test]
fn what_a_failed_flush_left_undone_is_done_by_the_next() {
    let bench = Bench::new(MIB);
    let recorder = Recorder::new(std::fs::read(bench.overlay(2 * MIB)).unwrap());
    let disk = on(&recorder, &bench);
    disk.write(&[1; 5000], 0).unwrap();
    // The first write of the flush is that of the refcounts, the third change the one of the entries.
    for count in [0, 2] {
        recorder.fail_after(Some((count, nix::libc::ENOSPC)));
        assert_eq!(disk.flush().unwrap_err().kind(), ErrorKind::StorageFull);
    }
    recorder.fail_after(None);
    disk.flush().unwrap();
    // No close: this is what the next opening finds after a crash.
    let again = on(&Recorder::new(recorder.content()), &bench);
    let mut found = [0; 5000];
    again.read(&mut found, 0).unwrap();
    assert_eq!(found, [1; 5000]);
}

#[test]
fn a_host_that_fails_at_any_write_leaves_a_sound_image() {
    let bench = Bench::new(9 * CLUSTER);
    let image = std::fs::read(bench.overlay(20 * CLUSTER)).unwrap();
    for number in [nix::libc::ENOSPC, nix::libc::EIO] {
        let reached = (0..130)
            .step_by(7)
            .filter(|count| failing_history(&bench, image.clone(), *count, number))
            .count();
        assert!(reached > 15, "{reached}");
    }
}
