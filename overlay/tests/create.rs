//! New overlays, with QEMU's own tools as judges.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use common::{Bench, assert_clean, base_content, qemu_tools, run, text};
use proptest::prelude::*;
use torpor_overlay::{BaseIdentity, Error, create, inspect};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

#[test]
fn a_new_overlay_of_any_size_checks_clean_and_is_small() {
    if !qemu_tools("a_new_overlay_of_any_size_checks_clean_and_is_small") {
        return;
    }
    let bench = Bench::new(4096);
    let sizes = [4096, MIB, 512 * MIB, 512 * MIB + 1, 10 * GIB, 100 * GIB, GIB << 10, GIB << 14];
    for (number, size) in sizes.into_iter().enumerate() {
        let path = bench.path(&format!("{number}.qcow2"));
        create(&path, &bench.base, &bench.identity, size).unwrap();
        assert_clean(&path);
        let info = inspect(&path).unwrap();
        assert_eq!(info.virtual_bytes, size.next_multiple_of(65536));
        assert_eq!((info.generation, info.ours), (0, true));
        assert_eq!((&info.base, &info.base_path), (&bench.identity, &bench.base));
        if size <= 10 * GIB {
            assert!(info.used_bytes <= 32 << 10, "{size}: {} bytes used", info.used_bytes);
        }
    }
}

#[test]
fn qemu_sees_the_backing_file_and_its_format() {
    if !qemu_tools("qemu_sees_the_backing_file_and_its_format") {
        return;
    }
    let bench = Bench::new(MIB);
    let path = bench.overlay(2 * MIB);
    let info = run("qemu-img", &["info", "--output=json", text(&path)]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["backing-filename"], text(&bench.base));
    assert_eq!(info["backing-filename-format"], "raw");
    assert_eq!(info["virtual-size"], 2 * MIB);
    assert_eq!(info["cluster-size"], 65536);
}

#[test]
fn what_qemu_writes_into_an_overlay_is_read_back_and_checks_clean() {
    if !qemu_tools("what_qemu_writes_into_an_overlay_is_read_back_and_checks_clean") {
        return;
    }
    let bench = Bench::new(3 * MIB + 1000);
    let path = bench.overlay(700 * MIB);
    let writes =
        ["write -P 0xaa 0 512", "write -P 0xbb 65000 70000", "write -P 0xcc 699M 1M", "discard 1M 128k"];
    let mut arguments = vec!["-f", "qcow2", "-d", "unmap", text(&path)];
    for write in &writes {
        arguments.extend(["-c", write]);
    }
    run("qemu-io", &arguments);
    assert_clean(&path);
    let flat = bench.path("flat.raw");
    run("qemu-img", &["convert", "-O", "raw", text(&path), text(&flat)]);
    let flat = std::fs::File::open(flat).unwrap();
    let mut expected = base_content(3 * MIB + 1000);
    expected.resize(4 << 20, 0);
    expected[..512].fill(0xaa);
    expected[65000..135_000].fill(0xbb);
    expected[1 << 20..(1 << 20) + 131_072].fill(0);
    let mut found = vec![1; 4 << 20];
    flat.read_exact_at(&mut found, 0).unwrap();
    assert!(found == expected);
    flat.read_exact_at(&mut found[..1 << 20], 699 * MIB).unwrap();
    assert!(found[..1 << 20].iter().all(|byte| *byte == 0xcc));
    assert!(inspect(&path).unwrap().used_bytes > MIB);
}

#[test]
fn the_identity_survives_a_rewrite_of_the_header_by_qemu() {
    if !qemu_tools("the_identity_survives_a_rewrite_of_the_header_by_qemu") {
        return;
    }
    let bench = Bench::new(MIB);
    let path = bench.overlay(2 * MIB);
    run("qemu-img", &["amend", "-f", "qcow2", "-o", "lazy_refcounts=on", text(&path)]);
    run("qemu-img", &["resize", "-f", "qcow2", text(&path), "3M"]);
    let info = inspect(&path).unwrap();
    assert_eq!((info.base, info.ours, info.virtual_bytes), (bench.identity.clone(), true, 3 * MIB));
}

#[test]
fn an_existing_file_is_never_overwritten() {
    let bench = Bench::new(MIB);
    let path = bench.path("overlay.qcow2");
    std::fs::write(&path, "mine").unwrap();
    let error = create(&path, &bench.base, &bench.identity, MIB).unwrap_err();
    assert_eq!(error.reason(), "ALREADY_EXISTS");
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("nowhere", &path).unwrap();
    let error = create(&path, &bench.base, &bench.identity, MIB).unwrap_err();
    assert_eq!(error.reason(), "ALREADY_EXISTS");
}

#[test]
fn of_many_creators_one_wins_and_the_directory_holds_one_file_more() {
    let bench = Bench::new(MIB);
    let path = bench.path("overlay.qcow2");
    let wins: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| create(&path, &bench.base, &bench.identity, GIB).is_ok()))
            .collect();
        threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum()
    });
    assert_eq!(wins, 1);
    assert_eq!(std::fs::read_dir(bench.dir.path()).unwrap().count(), 2);
    assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
}

#[test]
fn wrong_sizes_and_bases_are_refused_and_leave_no_file() {
    let bench = Bench::new(MIB);
    let path = bench.path("overlay.qcow2");
    let reason = |base: &Path, identity: &BaseIdentity, size| {
        create(&path, base, identity, size).unwrap_err().reason()
    };
    assert_eq!(reason(&bench.base, &bench.identity, MIB - 1), "TOO_SMALL");
    assert_eq!(reason(&bench.base, &bench.identity, u64::MAX), "UNSUPPORTED");
    assert_eq!(reason(&bench.path("none.raw"), &bench.identity, MIB), "BASE_MISSING");
    let mut other = bench.identity.clone();
    other.size += 1;
    assert_eq!(reason(&bench.base, &other, 2 * MIB), "BASE_CHANGED");
    assert_eq!(std::fs::read_dir(bench.dir.path()).unwrap().count(), 1);
}

#[test]
fn a_missing_or_foreign_or_cut_file_is_told_apart() {
    let bench = Bench::new(MIB);
    let reason = |name: &str| inspect(&bench.path(name)).unwrap_err().reason();
    assert_eq!(reason("none.qcow2"), "DATA_MISSING");
    assert_eq!(reason("base.raw"), "CORRUPT");
    std::fs::write(bench.path("cut.qcow2"), b"QFI\xfb\0\0\0\x03").unwrap();
    assert_eq!(reason("cut.qcow2"), "CORRUPT");
    std::fs::create_dir(bench.path("dir")).unwrap();
    assert_eq!(reason("dir"), "UNSUPPORTED");
}

#[test]
fn an_image_made_by_qemu_is_inspected_as_not_ours() {
    if !qemu_tools("an_image_made_by_qemu_is_inspected_as_not_ours") {
        return;
    }
    let bench = Bench::new(MIB);
    for (compat, cluster) in [("0.10", "4k"), ("1.1", "64k"), ("1.1", "2M")] {
        let path = bench.path(&format!("{compat}-{cluster}.qcow2"));
        let options = format!(
            "compat={compat},cluster_size={cluster},backing_fmt=raw,backing_file={}",
            text(&bench.base)
        );
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text(&path), "5M"]);
        let info = inspect(&path).unwrap();
        assert_eq!((info.virtual_bytes, info.ours, info.base_path), (5 * MIB, false, bench.base.clone()));
        let error = torpor_overlay::verify_base(&path, &bench.base).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn inspecting_a_changed_overlay_never_panics(changes in prop::collection::vec((0u64..500, any::<u8>()), 1..8)) {
        let bench = Bench::with_base(b"base");
        let path = bench.overlay(MIB);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        for (at, value) in changes {
            file.write_all_at(&[value], at).unwrap();
        }
        let _ = inspect(&path);
    }
}
