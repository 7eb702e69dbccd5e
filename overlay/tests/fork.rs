//! Overlays that share a sealed one, and the order in which they go.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use common::model::CLUSTER;
use common::{Bench, assert_clean, base_content, qemu_tools, run, same, scribble, text};
use torpor_overlay::{Block, Error, fork, inspect, open, remove};

const MIB: u64 = 1 << 20;
const BASE: u64 = 2 * MIB + 5;

#[test]
fn forks_share_a_sealed_layer_and_differ_above_it() {
    let bench = Bench::new(BASE);
    let (path, sealed) = (bench.overlay(5 * MIB), bench.path("sealed.qcow2"));
    let now = scribble(&path, &[&bench.base], base_content(BASE), 6);
    let generation = inspect(&path).unwrap().generation;
    let children: Vec<PathBuf> = (0..3).map(|n| bench.path(&format!("child{n}.qcow2"))).collect();
    let paths: Vec<&Path> = children.iter().map(PathBuf::as_path).collect();
    let identity = fork(&path, &sealed, &paths).unwrap();
    let bases: [&Path; 2] = [&sealed, &bench.base];
    let refused = open(&sealed, &[&bench.base]).unwrap_err();
    assert_eq!(refused.reason(), "SEALED");
    assert!(refused.to_string().contains("child1.qcow2"), "{refused}");
    let mut first = None;
    for (number, child) in paths.iter().chain([&path.as_path()]).enumerate() {
        let info = inspect(child).unwrap();
        assert_eq!((&info.base, &info.base_path, info.sealed), (&identity, &sealed, false));
        assert!(inspect(&sealed).unwrap().sealed);
        assert!(info.generation > generation);
        same(child, &bases, &now);
        let after = scribble(child, &bases, now.clone(), 100 + number as u64);
        same(child, &bases, &after);
        if qemu_tools("forks_share_a_sealed_layer_and_differ_above_it") {
            assert_clean(child);
            let flat = bench.path("flat.raw");
            std::fs::write(&flat, &after).unwrap();
            run("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", text(child), text(&flat)]);
        }
        first.get_or_insert(after);
    }
    same(&sealed, &[&bench.base], &now);
    // A fork of a fork: three layers.
    let deeper = bench.path("deeper.qcow2");
    let after = scribble(paths[0], &bases, first.unwrap(), 200);
    fork(paths[0], &deeper, &[]).unwrap();
    same(paths[0], &[&deeper, &sealed, &bench.base], &after);
    // A changed sealed layer is found by its digest.
    std::fs::File::options().write(true).open(&sealed).unwrap().write_all_at(b"x", 5 * CLUSTER + 9).unwrap();
    assert_eq!(open(paths[1], &bases).unwrap_err().reason(), "BASE_CHANGED");
    std::fs::remove_file(&sealed).unwrap();
    assert_eq!(open(paths[1], &bases).unwrap_err().reason(), "BASE_MISSING");
}

#[test]
fn an_interrupted_fork_is_finished_by_the_same_call() {
    let bench = Bench::new(BASE);
    let (path, sealed) = (bench.overlay(5 * MIB), bench.path("sealed.qcow2"));
    let now = scribble(&path, &[&bench.base], base_content(BASE), 7);
    let taken = bench.path("taken");
    std::fs::write(&taken, "mine").unwrap();
    let error = fork(&path, &sealed, &[&taken]).unwrap_err();
    assert!(matches!(error, Error::AlreadyExists { .. }));
    assert_eq!(open(&path, &[&bench.base]).unwrap_err().reason(), "SEALED");
    fork(&path, &sealed, &[]).unwrap();
    same(&path, &[&sealed, &bench.base], &now);
    assert_eq!(std::fs::read(taken).unwrap(), b"mine");
}

/// The children named by a refused removal, by file name, sorted.
fn refused(path: &Path, others: &[&Path]) -> Vec<String> {
    let Err(Error::Sealed { children, path: named }) = remove(path, others) else { panic!("it was removed") };
    assert_eq!(named, path);
    let mut names: Vec<String> =
        children.iter().map(|child| child.file_name().unwrap().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

#[test]
fn a_sealed_overlay_goes_after_all_that_stand_on_it() {
    let bench = Bench::new(BASE);
    let (path, sealed) = (bench.overlay(5 * MIB), bench.path("sealed.qcow2"));
    let now = scribble(&path, &[&bench.base], base_content(BASE), 8);
    let (folder, child) = (bench.path("elsewhere"), bench.path("elsewhere/child.qcow2"));
    std::fs::create_dir(&folder).unwrap();
    fork(&path, &sealed, &[&child]).unwrap();
    assert_eq!(refused(&sealed, &[]), ["child.qcow2", "overlay.qcow2"]);
    // Moved, the child is found only by who names it.
    let moved = bench.path("elsewhere/moved.qcow2");
    std::fs::rename(&child, &moved).unwrap();
    assert_eq!(refused(&sealed, &[]), ["overlay.qcow2"]);
    assert_eq!(refused(&sealed, &[&moved, &bench.base]), ["moved.qcow2", "overlay.qcow2"]);
    std::fs::rename(&moved, &child).unwrap();
    // Without the note, those in the same folder are found all the same.
    std::fs::rename(bench.path("sealed.qcow2.children"), bench.path("kept")).unwrap();
    assert_eq!(refused(&sealed, &[&child]), ["child.qcow2", "overlay.qcow2"]);
    std::fs::rename(bench.path("kept"), bench.path("sealed.qcow2.children")).unwrap();
    // A fork of a fork: the deeper sealed layer takes its overlay's place on the first one.
    let deeper = bench.path("elsewhere/deeper.qcow2");
    fork(&child, &deeper, &[]).unwrap();
    assert_eq!(refused(&sealed, &[]), ["deeper.qcow2", "overlay.qcow2"]);
    remove(&path, &[]).unwrap();
    assert_eq!(refused(&sealed, &[]), ["deeper.qcow2"]);
    assert_eq!(refused(&deeper, &[]), ["child.qcow2"]);
    same(&child, &[&deeper, &sealed, &bench.base], &now);
    for last in [&child, &deeper, &sealed] {
        remove(last, &[]).unwrap();
    }
    let left = |folder: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap().flatten();
        entries
            .map(|entry| entry.file_name().into_string().unwrap())
            .filter(|name| name.contains("qcow2"))
            .collect()
    };
    assert_eq!((left(&folder), left(bench.dir.path())), (vec![], vec![]));
    assert!(matches!(remove(&sealed, &[]), Err(Error::DataMissing { .. })));
}

#[test]
fn an_overlay_in_use_is_not_removed_and_a_damaged_one_is() {
    let bench = Bench::new(BASE);
    let path = bench.overlay(5 * MIB);
    let disk = open(&path, &[&bench.base]).unwrap();
    assert!(matches!(remove(&path, &[]), Err(Error::Locked { .. })));
    disk.close().unwrap();
    drop(disk);
    std::fs::File::options().write(true).open(&path).unwrap().write_all_at(b"x", 0).unwrap();
    remove(&path, &[]).unwrap();
    assert!(!path.exists());
}

#[test]
fn a_sealed_overlay_stays_as_long_as_it_is_unknown_what_stands_on_it() {
    let bench = Bench::new(BASE);
    let (path, sealed) = (bench.overlay(5 * MIB), bench.path("sealed.qcow2"));
    let (folder, child) = (bench.path("elsewhere"), bench.path("elsewhere/child.qcow2"));
    std::fs::create_dir(&folder).unwrap();
    fork(&path, &sealed, &[&child]).unwrap();
    remove(&path, &[]).unwrap();
    // The version of the header.
    let damage = |bytes: &[u8]| {
        std::fs::File::options().write(true).open(&child).unwrap().write_all_at(bytes, 4).unwrap();
    };
    damage(&9_u32.to_be_bytes());
    assert_eq!(refused(&sealed, &[]), ["child.qcow2"]);
    damage(&3_u32.to_be_bytes());
    assert_eq!(refused(&sealed, &[]), ["child.qcow2"]);
    // It can't be looked at: its folder leads round in a circle.
    std::fs::rename(&folder, bench.path("kept")).unwrap();
    std::os::unix::fs::symlink(&folder, &folder).unwrap();
    assert_eq!(remove(&sealed, &[]).unwrap_err().reason(), "IO");
    std::fs::remove_file(&folder).unwrap();
    std::fs::rename(bench.path("kept"), &folder).unwrap();
    // Nor can the note.
    let note = bench.path("sealed.qcow2.children");
    let content = std::fs::read(&note).unwrap();
    std::fs::write(&note, &content[..content.len() / 2]).unwrap();
    assert_eq!(remove(&sealed, &[]).unwrap_err().reason(), "CORRUPT");
    std::fs::remove_file(&note).unwrap();
    std::fs::create_dir(&note).unwrap();
    assert_eq!(remove(&sealed, &[]).unwrap_err().reason(), "IO");
    std::fs::remove_dir(&note).unwrap();
    std::fs::write(&note, &content).unwrap();
    assert_eq!(refused(&sealed, &[]), ["child.qcow2"]);
    remove(&child, &[]).unwrap();
    remove(&sealed, &[]).unwrap();
}

#[test]
fn an_overlay_is_not_sealed_under_its_own_name() {
    let bench = Bench::new(BASE);
    let path = bench.overlay(5 * MIB);
    let same = bench.dir.path().join(".").join("overlay.qcow2");
    assert_eq!(fork(&path, &same, &[]).unwrap_err().reason(), "UNSUPPORTED");
    open(&path, &[&bench.base]).unwrap().close().unwrap();
}
