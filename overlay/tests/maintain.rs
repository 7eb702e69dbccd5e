//! Check, repair, grow, compact, export and flatten, with qemu-img as judge.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use common::model::{CLUSTER, Random, content};
use common::{
    Bench, assert_clean, assert_no_corruption, base_content, qemu_tools, run, same, scribble, text,
};
use torpor_overlay::{
    Block, Error, Format, Image, Lock, check, compact, export, flatten, fork, grow, inspect, mark_closed,
    open, open_read_only, raise_generation, repair, rewrite, verify_base,
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const BASE: u64 = 2 * MIB + 5;

/// An overlay whose writer died after a flush, with a refcount too many for each of some clusters.
fn leaking(bench: &Bench) -> PathBuf {
    let path = bench.overlay(4 * MIB);
    scribble(&path, &[&bench.base], base_content(BASE), 1);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let end = path.metadata().unwrap().len();
    file.set_len(end + 3 * CLUSTER).unwrap();
    // The first refcount block follows the header and the refcount table.
    for cluster in end / CLUSTER..end / CLUSTER + 3 {
        file.write_all_at(&1u16.to_be_bytes(), 2 * CLUSTER + cluster * 2).unwrap();
        file.write_all_at(&[9; 100], cluster * CLUSTER).unwrap();
    }
    path
}

#[test]
fn leaks_are_found_and_given_back_by_repair_with_a_copy_of_the_metadata() {
    let bench = Bench::new(BASE);
    let path = leaking(&bench);
    let qemu = qemu_tools("leaks_are_found_and_given_back_by_repair_with_a_copy_of_the_metadata");
    assert!(!qemu || assert_no_corruption(&path));
    let report = check(&path).unwrap();
    assert_eq!((report.leaked_clusters, report.damages), (3, 0));
    let before = std::fs::read(&path).unwrap();
    let repaired = repair(&path).unwrap();
    assert_eq!(repaired.freed_clusters, 3);
    assert_eq!(check(&path).unwrap().leaked_clusters, 0);
    let copy = std::fs::read(repaired.copy.unwrap()).unwrap();
    assert!(copy[..5 * 65_536] == before[..5 * 65_536]); // header, refcount table and block, L1, one L2
    if qemu {
        assert_clean(&path);
    }
    assert_eq!(repair(&path).unwrap().copy, None);
}

#[test]
fn opening_for_writing_gives_leaks_back_by_itself() {
    let bench = Bench::new(BASE);
    let path = leaking(&bench);
    open(&path, &[&bench.base]).unwrap().close().unwrap();
    assert_eq!(check(&path).unwrap().leaked_clusters, 0);
}

#[test]
fn damage_is_described_and_neither_repaired_nor_opened_nor_written_to() {
    let bench = Bench::new(BASE);
    let path = bench.overlay(4 * MIB);
    scribble(&path, &[&bench.base], base_content(BASE), 2);
    let whole = std::fs::read(&path).unwrap();
    let l2 = 4 * 65_536;
    let entries: Vec<usize> = (0..64).filter(|n| whole[l2 + n * 8] == 0x80).collect();
    let (first, second) = (l2 + entries[0] * 8, l2 + entries[1] * 8);
    type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);
    let damages: [(&str, Damage<'_>); 6] = [
        ("two guest clusters on one host cluster", &|image| image.copy_within(first..first + 8, second)),
        ("an entry that points to the header", &|image| image[first + 1..first + 8].fill(0)),
        ("an entry beyond the file", &|image| image[first + 3] = 0x70),
        ("an unaligned entry", &|image| image[first + 6] |= 2),
        ("a refcount of zero", &|image| image[2 * 65_536..2 * 65_536 + 200].fill(0)),
        ("a reserved bit", &|image| image[first + 7] |= 4),
    ];
    for (what, damage) in damages {
        let mut image = whole.clone();
        damage(&mut image);
        std::fs::write(&path, &image).unwrap();
        let report = check(&path).unwrap();
        assert!(report.damages > 0 && !report.damage.is_empty(), "{what}");
        for error in [
            repair(&path).unwrap_err(),
            open(&path, &[&bench.base]).unwrap_err(),
            grow(&path, GIB).unwrap_err(),
            fork(&path, &bench.path("sealed"), &[]).unwrap_err(),
        ] {
            assert_eq!(error.reason(), "CORRUPT", "{what}: {error}");
        }
        assert!(std::fs::read(&path).unwrap() == image, "{what}");
    }
}

#[test]
fn images_with_features_that_are_unsafe_to_write_are_refused_unchanged() {
    let test = "images_with_features_that_are_unsafe_to_write_are_refused_unchanged";
    if !qemu_tools(test) {
        return;
    }
    let bench = Bench::new(BASE);
    let changes: [&[&str]; 3] = [
        &["snapshot", "-c", "one"],
        &["amend", "-o", "lazy_refcounts=on"],
        &["resize", "-f", "qcow2", "PATH", "2G"],
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let path = bench.path(&format!("{number}.qcow2"));
        torpor_overlay::create(&path, &bench.base, &bench.identity, 4 * MIB).unwrap();
        let mut arguments: Vec<&str> =
            change.iter().map(|word| if *word == "PATH" { text(&path) } else { word }).collect();
        if !change.contains(&"PATH") {
            arguments.push(text(&path));
        }
        run("qemu-img", &arguments);
        let before = std::fs::read(&path).unwrap();
        let error = open(&path, &[&bench.base]).unwrap_err();
        assert_eq!(error.reason(), "UNSUPPORTED", "{change:?}: {error}");
        assert!(std::fs::read(&path).unwrap() == before);
        assert!(open_read_only(&path, &[&bench.base]).is_ok());
    }
}

#[test]
fn a_grown_overlay_keeps_its_content_and_has_room() {
    let bench = Bench::new(BASE);
    let qemu = qemu_tools("a_grown_overlay_keeps_its_content_and_has_room");
    let path = bench.overlay(3 * MIB);
    let mut now = scribble(&path, &[&bench.base], base_content(BASE), 3);
    // The last steps need refcount blocks and L2 tables of their own.
    for size in [3 * MIB + 1, 8 * MIB, 600 * MIB, 3 * GIB, 9 * GIB] {
        grow(&path, size).unwrap();
        let info = inspect(&path).unwrap();
        assert_eq!(info.virtual_bytes, size.next_multiple_of(CLUSTER));
        if qemu {
            assert_clean(&path);
        }
        let disk = open(&path, &[&bench.base]).unwrap();
        let mut found = vec![1; now.len()];
        disk.read(&mut found, 0).unwrap();
        assert!(found == now);
        let last = disk.size() - 5000;
        disk.read(&mut found[..5000], last).unwrap();
        assert!(found[..5000].iter().all(|byte| *byte == 0));
        disk.write(&[7; 5000], last).unwrap();
        disk.close().unwrap();
        drop(disk);
        if qemu {
            assert_clean(&path);
        }
        if size <= 8 * MIB {
            now.resize(last as usize, 0);
            now.extend([7; 5000]);
            now = scribble(&path, &[&bench.base], now, size);
        }
    }
    assert_eq!(grow(&path, 8 * GIB).unwrap_err().reason(), "TOO_SMALL");
    let error = grow(&path, 5 << 40).unwrap_err();
    assert!(
        matches!(error, Error::TooLarge { maximum, .. } if (4 << 40..5 << 40).contains(&maximum)),
        "{error}"
    );
    assert!(error.to_string().contains("flatten it into a new base"), "{error}");
    assert_eq!(grow(&path, 17 << 40).unwrap_err().reason(), "TOO_LARGE");
    let _lock = Lock::acquire(&path).unwrap();
    assert_eq!(grow(&path, 10 * GIB).unwrap_err().reason(), "LOCKED");
}

#[test]
fn compact_gives_zeroed_and_stale_clusters_back_to_the_host() {
    let bench = Bench::new(BASE);
    let path = bench.overlay(32 * MIB);
    let disk = open(&path, &[&bench.base]).unwrap();
    let data = Random::new(1).bytes(24 << 20);
    disk.write(&data, 0).unwrap();
    disk.flush().unwrap();
    // Zeros written as data, as a guest without discard does it.
    disk.write(&vec![0; 20 << 20], MIB).unwrap();
    disk.close().unwrap();
    drop(disk);
    let mut last = (0, 0);
    let done = compact(&path, &[&bench.base], &mut |now, all| last = (now, all)).unwrap();
    assert_eq!(last, (32 * MIB, 32 * MIB));
    assert!(done.used_before > 24 * MIB && done.used_after < 5 * MIB, "{done:?}");
    let mut expected = data;
    expected[1 << 20..21 << 20].fill(0);
    expected.resize(32 << 20, 0);
    same(&path, &[&bench.base], &expected);
    if qemu_tools("compact_gives_zeroed_and_stale_clusters_back_to_the_host") {
        assert_clean(&path);
    }
}

#[test]
fn a_compaction_that_is_unwound_from_leaves_a_closed_overlay_with_its_content() {
    let bench = Bench::new(BASE);
    let path = bench.overlay(64 * MIB);
    let disk = open(&path, &[&bench.base]).unwrap();
    let mut expected = Random::new(2).bytes(48 << 20);
    disk.write(&expected, 0).unwrap();
    disk.write(&vec![0; 8 << 20], MIB).unwrap();
    disk.close().unwrap();
    drop(disk);
    expected[1 << 20..9 << 20].fill(0);
    let before = inspect(&path).unwrap().used_bytes;
    let mut told = Vec::new();
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        compact(&path, &[&bench.base], &mut |done, _| {
            told.push(done);
            std::panic::resume_unwind(Box::new("enough"));
        })
    }));
    assert_eq!(ended.unwrap_err().downcast_ref::<&str>(), Some(&"enough"));
    assert_eq!(told, [16 * MIB]);
    let report = check(&path).unwrap();
    assert!(!report.unclean && report.damages == 0 && report.leaked_clusters == 0, "{report:?}");
    // What it had got through is given back.
    assert!(inspect(&path).unwrap().used_bytes <= before - 7 * MIB);

    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        rewrite(&path, &mut |done, _| {
            // Once for 16 MiB that were copied, not once for a table of 512 MiB.
            assert!(done < 64 * MIB);
            std::panic::resume_unwind(Box::new("enough"));
        })
    }));
    assert_eq!(ended.unwrap_err().downcast_ref::<&str>(), Some(&"enough"));
    expected.resize(64 << 20, 0);
    same(&path, &[&bench.base], &expected);
}

#[test]
fn a_rewritten_overlay_is_dense_and_holds_the_same() {
    let bench = Bench::new(BASE);
    let path = bench.overlay(700 * MIB);
    let now = scribble(&path, &[&bench.base], base_content(BASE), 8);
    let disk = open(&path, &[&bench.base]).unwrap();
    disk.write(b"last", 700 * MIB - 4).unwrap();
    disk.close().unwrap();
    drop(disk);
    let before = inspect(&path).unwrap();
    assert_eq!(rewrite(&path, &mut |done, all| assert!(done <= all)).unwrap().used_before, before.used_bytes);
    let after = inspect(&path).unwrap();
    assert_eq!(
        (after.generation, &after.base, &after.base_path),
        (before.generation, &before.base, &before.base_path)
    );
    let report = check(&path).unwrap();
    assert_eq!((report.damages, report.leaked_clusters), (0, 0));
    if qemu_tools("a_rewritten_overlay_is_dense_and_holds_the_same") {
        assert_clean(&path);
    }
    let disk = open(&path, &[&bench.base]).unwrap();
    let mut found = vec![1; now.len()];
    disk.read(&mut found, 0).unwrap();
    assert!(found[..8 << 20] == now[..8 << 20]);
    disk.read(&mut found[..4], 700 * MIB - 4).unwrap();
    assert_eq!(&found[..4], b"last");
    // Metadata (header, refcount table and block, L1, two L2 tables), and the data right behind it.
    let clusters = path.metadata().unwrap().len() / CLUSTER;
    assert_eq!(clusters, 6 + report.data_clusters);
    disk.write(&[9; 300_000], 20 * MIB).unwrap();
    disk.close().unwrap();
    assert_eq!(check(&path).unwrap().damages, 0);
}

#[test]
fn exports_and_flattened_bases_hold_what_the_overlay_shows() {
    let bench = Bench::new(BASE);
    let path = bench.overlay(5 * MIB);
    let now = scribble(&path, &[&bench.base], base_content(BASE), 4);
    let disk = open_read_only(&path, &[&bench.base]).unwrap();
    let mut calls = 0;
    export(&disk, &bench.path("out.raw"), Format::Raw, &mut |_, _| calls += 1).unwrap();
    export(&disk, &bench.path("out.qcow2"), Format::Qcow2, &mut |done, all| assert!(done <= all)).unwrap();
    assert!(calls > 0 && std::fs::read(bench.path("out.raw")).unwrap() == now);
    same(&bench.path("out.qcow2"), &[], &now);
    let again = export(&disk, &bench.path("out.raw"), Format::Raw, &mut |_, _| {}).unwrap_err();
    assert_eq!(again.reason(), "ALREADY_EXISTS");
    let identity = flatten(&path, &[&bench.base], &bench.path("new.raw"), &mut |_, _| {}).unwrap();
    let next = bench.path("next.qcow2");
    torpor_overlay::create(&next, &bench.path("new.raw"), &identity, 6 * MIB).unwrap();
    verify_base(&next, &bench.path("new.raw")).unwrap();
    let mut larger = now.clone();
    larger.resize(6 << 20, 0);
    same(&next, &[&bench.path("new.raw")], &larger);
    if qemu_tools("exports_and_flattened_bases_hold_what_the_overlay_shows") {
        assert_clean(&bench.path("out.qcow2"));
        run("qemu-img", &["compare", text(&bench.path("out.qcow2")), text(&bench.path("out.raw"))]);
    }
}

#[test]
fn a_large_and_mostly_empty_disk_is_exported_without_reading_all_of_it() {
    let bench = Bench::new(BASE);
    let path = bench.overlay(8 << 40);
    let disk = open(&path, &[&bench.base]).unwrap();
    let spots = [100_000, 5 * GIB + 77, (3 << 40) + 5, (8 << 40) - 5];
    spots.iter().for_each(|spot| disk.write(b"here!", *spot).unwrap());
    export(&disk, &bench.path("online.qcow2"), Format::Qcow2, &mut |_, _| {}).unwrap();
    disk.close().unwrap();
    let mut calls = 0;
    let still = open_read_only(&path, &[&bench.base]).unwrap();
    export(&still, &bench.path("out.qcow2"), Format::Qcow2, &mut |_, _| calls += 1).unwrap();
    assert!(calls < 10_000, "{calls} pieces");
    let mut start = base_content(BASE);
    start[100_000..100_005].copy_from_slice(b"here!");
    for name in ["online.qcow2", "out.qcow2"] {
        let copy = open_read_only(&bench.path(name), &[]).unwrap();
        let mut found = vec![0; BASE as usize];
        copy.read(&mut found, 0).unwrap();
        assert!(found == start);
        for spot in &spots[1..] {
            let mut around = [1; 12];
            copy.read(&mut around[..10], spot - 5).unwrap();
            assert_eq!(&around[..10], b"\0\0\0\0\0here!");
        }
    }
}

#[test]
fn a_disk_of_any_size_is_imported() {
    let bench = Bench::new(1);
    for size in [0, 1, 511, CLUSTER - 1, CLUSTER, 3 * CLUSTER + 1000, 2 * MIB + 5] {
        let (raw, name) = (bench.path(&format!("{size}.raw")), format!("{size}.qcow2"));
        std::fs::write(&raw, base_content(size)).unwrap();
        let disk = torpor_overlay::Raw::open_read_only(&raw).unwrap();
        let done = export(&disk, &bench.path(&name), Format::Qcow2, &mut |_, _| {});
        if size == 0 {
            assert_eq!(done.unwrap_err().reason(), "UNSUPPORTED");
            continue;
        }
        done.unwrap();
        let mut expected = base_content(size);
        expected.resize(size.next_multiple_of(CLUSTER) as usize, 0);
        same(&bench.path(&name), &[], &expected);
        export(&disk, &bench.path(&format!("{size}.copy")), Format::Raw, &mut |_, _| {}).unwrap();
        assert!(std::fs::read(bench.path(&format!("{size}.copy"))).unwrap() == base_content(size));
    }
}

#[test]
fn a_standalone_image_is_opened_without_a_base_and_only_so() {
    let bench = Bench::new(BASE);
    let path = bench.overlay(5 * MIB);
    let disk = open_read_only(&path, &[&bench.base]).unwrap();
    let alone = bench.path("alone.qcow2");
    export(&disk, &alone, Format::Qcow2, &mut |_, _| {}).unwrap();
    assert_eq!(open(&alone, &[&bench.base]).unwrap_err().reason(), "UNSUPPORTED");
    assert_eq!(open(&path, &[]).unwrap_err().reason(), "UNSUPPORTED");
    scribble(&alone, &[], base_content(BASE), 5);
}

#[test]
fn another_program_writes_under_a_raised_generation() {
    let test = "another_program_writes_under_a_raised_generation";
    if !qemu_tools(test) {
        return;
    }
    let bench = Bench::new(BASE);
    let path = bench.overlay(5 * MIB);
    {
        let lock = Lock::acquire(&path).unwrap();
        assert_eq!(raise_generation(&lock).unwrap(), 1);
    }
    assert!(check(&path).unwrap().unclean);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 7 1M 100k", "-c", "write -z 3M 128k", text(&path)]);
    mark_closed(&Lock::acquire(&path).unwrap()).unwrap();
    let report = check(&path).unwrap();
    assert!(!report.unclean && report.damages == 0 && report.data_clusters == 2, "{report:?}");
    let mut expected = base_content(BASE);
    expected.resize(5 << 20, 0);
    expected[1 << 20..(1 << 20) + 102_400].fill(7);
    same(&path, &[&bench.base], &expected);
    let disk = open(&path, &[&bench.base]).unwrap();
    assert_eq!(disk.generation(), 2);
    disk.write(&[8; 100], 3 * MIB + 7).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_clean(&path);
    expected[(3 << 20) + 7..(3 << 20) + 107].fill(8);
    same(&path, &[&bench.base], &expected);
}

#[test]
fn images_made_by_qemu_are_read_right() {
    let test = "images_made_by_qemu_are_read_right";
    if !qemu_tools(test) {
        return;
    }
    let bench = Bench::new(BASE);
    let middle = bench.path("middle.qcow2");
    let options = format!("backing_fmt=raw,backing_file={}", text(&bench.base));
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text(&middle), "3M"]);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 5 100k 300k", text(&middle)]);
    for compat in ["0.10", "1.1"] {
        for cluster in ["512", "4k", "64k", "2M"] {
            for (format, backing) in [("raw", &bench.base), ("qcow2", &middle)] {
                read_like_qemu(&bench, compat, cluster, format, backing, &middle);
            }
        }
    }
}

fn read_like_qemu(bench: &Bench, compat: &str, cluster: &str, format: &str, backing: &Path, middle: &Path) {
    let name = format!("{compat}-{cluster}-{format}");
    let path = bench.path(&name);
    let options =
        format!("compat={compat},cluster_size={cluster},backing_fmt={format},backing_file={}", text(backing));
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text(&path), "6M"]);
    let mut random = Random::new(name.len() as u64);
    let mut arguments = vec!["-f".to_owned(), "qcow2".to_owned(), text(&path).to_owned()];
    for number in 1..20 {
        let kind =
            if number % 5 == 0 && compat == "1.1" { "write -z" } else { &format!("write -P {number}") };
        let (offset, length) = (random.below(5 << 20), random.below(200_000) + 1);
        arguments
            .extend(["-c".to_owned(), format!("{kind} {} {}", offset & !511, length.next_multiple_of(512))]);
    }
    run("qemu-io", &arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let flat = bench.path("flat.raw");
    run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", text(&path), text(&flat)]);
    let raw = || Box::new(torpor_overlay::Raw::open_read_only(&bench.base).unwrap());
    let below: Box<dyn Block> = match format {
        "raw" => raw(),
        _ => Box::new(Image::open(middle, Some(raw())).unwrap()),
    };
    let image = Image::open(&path, Some(below)).unwrap();
    assert!(content(&image) == std::fs::read(&flat).unwrap(), "{name}");
    assert_eq!(Image::open(&path, None).unwrap_err().reason(), "UNSUPPORTED");
    assert!(image.write(&[1], 0).is_err());
}
