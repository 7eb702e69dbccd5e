//! The engine's promises, one by one, and many threads against each other.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use common::model::{CLUSTER, Operation, Random, content, perform};
use common::{Bench, assert_clean, base_content, qemu_tools};
use torpor_overlay::fault::{Change, Faulty};
use torpor_overlay::{Block, Overlay, inspect, open};

const MIB: u64 = 1 << 20;

fn opened(bench: &Bench) -> Overlay {
    open(&bench.path("overlay.qcow2"), &[&bench.base]).unwrap()
}

#[test]
fn many_threads_on_one_overlay_keep_to_their_own_bytes() {
    let bench = Bench::new(2 * MIB);
    let (size, threads) = (16 * MIB, 8);
    bench.overlay(size);
    let disk = opened(&bench);
    // Each thread owns every eighth 4 KiB block, so that all of them meet in every cluster; one more discards and
    // flushes whole clusters of its own in between.
    let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let disk = &disk;
        let handles: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || write_own_blocks(disk, thread, threads, size / 2)))
            .collect();
        let discarder = scope.spawn(move || discard_and_flush(disk, size / 2, size * 3 / 4));
        let checker = scope.spawn(move || (0..20).all(|_| disk.check().unwrap().damages == 0));
        let runner = scope.spawn(move || write_runs(disk, size * 3 / 4, size));
        let models = handles.into_iter().map(|handle| handle.join().unwrap()).collect();
        discarder.join().unwrap();
        runner.join().unwrap();
        assert!(checker.join().unwrap());
        models
    });
    let check = |disk: &Overlay| {
        for (thread, model) in models.iter().enumerate() {
            for block in (thread as u64..size / 2 / 4096).step_by(threads as usize) {
                let mut found = [0; 4096];
                disk.read(&mut found, block * 4096).unwrap();
                let at = block as usize * 4096;
                assert!(found == model[at..at + 4096], "block {block}");
            }
        }
    };
    check(&disk);
    disk.close().unwrap();
    drop(disk);
    if qemu_tools("many_threads_on_one_overlay_keep_to_their_own_bytes") {
        assert_clean(&bench.path("overlay.qcow2"));
    }
    check(&opened(&bench));
}

fn write_own_blocks(disk: &Overlay, thread: u64, threads: u64, size: u64) -> Vec<u8> {
    let mut random = Random::new(100 + thread);
    let mut model = base_content(2 * MIB);
    model.resize(size as usize, 0);
    for _ in 0..1500 {
        let block = random.below(size / 4096 / threads) * threads + thread;
        let at = block as usize * 4096;
        if random.below(3) == 0 {
            let mut found = [0; 4096];
            disk.read(&mut found, block * 4096).unwrap();
            assert!(found == model[at..at + 4096], "block {block}");
        } else {
            let data = random.bytes(4096);
            disk.write(&data, block * 4096).unwrap();
            model[at..at + 4096].copy_from_slice(&data);
        }
    }
    model
}

/// Requests over many clusters, fresh and in place, aligned and not.
fn write_runs(disk: &Overlay, from: u64, to: u64) {
    let mut random = Random::new(8);
    for _ in 0..150 {
        let length = random.below(1_500_000) + 1;
        let mut offset = from + random.below(to - from - length);
        if random.below(2) == 0 {
            offset = offset / CLUSTER * CLUSTER;
        }
        let data = random.bytes(length as usize);
        disk.write(&data, offset).unwrap();
        let mut found = vec![0; length as usize];
        disk.read(&mut found, offset).unwrap();
        assert!(found == data);
        if random.below(4) == 0 {
            disk.discard(offset, length).unwrap();
        }
    }
}

fn discard_and_flush(disk: &Overlay, from: u64, to: u64) {
    let mut random = Random::new(7);
    for round in 0..300u64 {
        let cluster = from / CLUSTER + random.below((to - from) / CLUSTER);
        let data = vec![round as u8 | 1; CLUSTER as usize];
        disk.write(&data, cluster * CLUSTER).unwrap();
        let mut found = vec![0; CLUSTER as usize];
        disk.read(&mut found, cluster * CLUSTER).unwrap();
        assert!(found == data);
        disk.discard(cluster * CLUSTER, CLUSTER).unwrap();
        disk.read(&mut found, cluster * CLUSTER).unwrap();
        assert!(found.iter().all(|byte| *byte == 0));
        if round % 3 == 0 {
            disk.flush().unwrap();
        }
    }
}

#[test]
fn a_guest_that_never_flushes_can_change_any_number_of_clusters() {
    let bench = Bench::new(MIB);
    let size = 3 << 30;
    let base = bench.path("large.raw");
    std::fs::File::create(&base).unwrap().set_len(size).unwrap();
    let identity = torpor_overlay::BaseIdentity { digest: "not looked at".to_owned(), size };
    let path = bench.path("overlay.qcow2");
    torpor_overlay::create(&path, &base, &identity, size).unwrap();
    let (send, receive) = std::sync::mpsc::channel();
    let image = path.clone();
    std::thread::spawn(move || {
        let file = std::fs::File::options().read(true).write(true).open(&image).unwrap();
        let base = torpor_overlay::Raw::open_read_only(&base).unwrap();
        let disk = Overlay::open_on(Box::new(file), Box::new(base), &image).unwrap();
        disk.write_zeroes(0, size).unwrap();
        disk.write(&vec![7; 4 << 20], MIB).unwrap();
        disk.close().unwrap();
        send.send(()).unwrap();
    });
    receive.recv_timeout(std::time::Duration::from_secs(120)).unwrap();
    let report = torpor_overlay::check(&path).unwrap();
    assert_eq!(
        (report.damages, report.data_clusters, report.zero_clusters),
        (0, 64, (3 << 30) / CLUSTER - 64)
    );
}

#[test]
fn an_overlay_grows_while_threads_write_to_it() {
    let bench = Bench::new(2 * MIB);
    let path = bench.overlay(4 * MIB);
    let disk = opened(&bench);
    let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let disk = &disk;
        let handles: Vec<_> =
            (0..4).map(|thread| scope.spawn(move || write_own_blocks(disk, thread, 4, 4 * MIB))).collect();
        for size in [4 * MIB + 1, 700 * MIB, 5 << 30] {
            disk.grow(size).unwrap();
            let size = size.next_multiple_of(CLUSTER);
            assert_eq!(disk.size(), size);
            disk.write(&[3; 9000], size - 9000).unwrap();
        }
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    });
    assert_eq!(disk.grow(MIB).unwrap_err().reason(), "TOO_SMALL");
    disk.close().unwrap();
    drop(disk);
    if qemu_tools("an_overlay_grows_while_threads_write_to_it") {
        assert_clean(&path);
    }
    let disk = opened(&bench);
    for block in 0..4 * MIB / 4096 {
        let (model, at) = (&models[block as usize % 4], block as usize * 4096);
        let mut found = [0; 4096];
        disk.read(&mut found, block * 4096).unwrap();
        assert!(found == model[at..at + 4096], "block {block}");
    }
    let mut found = [0; 9000];
    disk.read(&mut found, (5 << 30) - 9000).unwrap();
    assert_eq!(found, [3; 9000]);
}

#[test]
fn each_opening_raises_the_generation_and_a_reader_sees_the_state() {
    let bench = Bench::new(MIB);
    let path = bench.overlay(MIB);
    for generation in 1..4 {
        let disk = opened(&bench);
        assert_eq!(disk.generation(), generation);
        assert_eq!(inspect(&path).unwrap().generation, generation);
        assert!(torpor_overlay::check(&path).unwrap().unclean);
        assert_eq!(open(&path, &[&bench.base]).unwrap_err().reason(), "LOCKED");
        disk.close().unwrap();
        assert!(!torpor_overlay::check(&path).unwrap().unclean);
    }
}

#[test]
fn a_flush_after_no_change_costs_no_sync_and_one_after_a_change_does() {
    let bench = Bench::new(MIB);
    let recorder = torpor_overlay::fault::Recorder::new(std::fs::read(bench.overlay(MIB)).unwrap());
    let base = torpor_overlay::Raw::open_read_only(&bench.base).unwrap();
    let disk = Overlay::open_on(Box::new(recorder.clone()), Box::new(base), &bench.base).unwrap();
    let syncs = || recorder.log().iter().filter(|change| **change == Change::Sync).count();
    let opened = syncs();
    disk.write(&[1; 10], 0).unwrap();
    disk.flush().unwrap();
    assert_eq!(syncs() - opened, 2, "data, then the reference to it");
    disk.flush().unwrap();
    assert_eq!(syncs() - opened, 2);
    disk.write(&[2; 10], 5).unwrap();
    disk.flush().unwrap();
    assert_eq!(syncs() - opened, 3, "data in place");
    // A flush that failed did nothing: the next one must do it.
    disk.discard(0, MIB).unwrap();
    recorder.fail_after(Some((1, nix::libc::ENOSPC)));
    disk.flush().unwrap_err();
    recorder.fail_after(None);
    let before = recorder.log().len();
    disk.flush().unwrap();
    assert!(recorder.log()[before..].contains(&Change::Sync));
}

#[test]
fn after_close_every_request_fails() {
    let bench = Bench::new(MIB);
    bench.overlay(MIB);
    let disk = opened(&bench);
    disk.close().unwrap();
    assert!(disk.read(&mut [0; 10], 0).is_err());
    assert!(disk.write(&[0; 10], 0).is_err());
    assert!(disk.flush().is_err());
    assert!(disk.discard(0, MIB).is_err());
    assert!(disk.close().is_err());
}

#[test]
fn requests_outside_the_disk_fail_and_change_nothing() {
    let bench = Bench::new(MIB);
    bench.overlay(MIB);
    let disk = opened(&bench);
    for (offset, length) in [(MIB, 1), (MIB - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 5)] {
        let mut buffer = vec![0; length];
        assert_eq!(disk.write(&buffer, offset).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
        assert_eq!(disk.read(&mut buffer, offset).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
        assert_eq!(disk.discard(offset, length as u64).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    }
    disk.write(&[], MIB).unwrap();
    assert!(content(&disk) == base_content(MIB));
}

#[test]
fn an_overlay_larger_than_its_base_reads_zeros_beyond_it() {
    let bench = Bench::new(MIB + 100);
    bench.overlay(3 * MIB);
    let disk = opened(&bench);
    disk.write(b"x", 2 * MIB).unwrap();
    let mut found = vec![0xee; 2 * MIB as usize];
    disk.read(&mut found, MIB).unwrap();
    let mut expected = base_content(MIB + 100)[MIB as usize..].to_vec();
    expected.resize(2 * MIB as usize, 0);
    expected[MIB as usize] = b'x';
    assert!(found == expected);
}

#[test]
fn a_planned_fault_reaches_the_caller_and_the_rest_works() {
    let bench = Bench::new(MIB);
    bench.overlay(MIB);
    let plan = |request| matches!(request, torpor_overlay::fault::Request::Write(4096)).then_some(5);
    let disk = Faulty::new(opened(&bench), Box::new(plan));
    assert_eq!(disk.write(&[1; 10], 4096).unwrap_err().raw_os_error(), Some(5));
    perform(&disk, &Operation::Write(0, vec![1; 10])).unwrap();
    disk.close().unwrap();
}
