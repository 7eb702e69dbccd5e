//! A base is known by its bytes.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::fs::{File, FileTimes};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use common::{Bench, run, text};
use torpor_overlay::{Error, sha256_file, verify_base};

const MIB: u64 = 1 << 20;

/// A bench whose base has been left alone long enough to be stamped.
fn settled() -> (Bench, std::path::PathBuf) {
    let bench = Bench::new(MIB + 17);
    let overlay = bench.overlay(2 * MIB);
    std::thread::sleep(Duration::from_millis(150));
    (bench, overlay)
}

#[test]
fn a_base_that_is_as_it_was_is_verified_with_and_without_a_stamp() {
    let (bench, overlay) = settled();
    verify_base(&overlay, &bench.base).unwrap();
    assert!(bench.path("verified.json").exists());
    verify_base(&overlay, &bench.base).unwrap();
    std::fs::write(bench.path("verified.json"), "nonsense").unwrap();
    verify_base(&overlay, &bench.base).unwrap();
}

#[test]
fn an_unchanged_base_is_not_hashed_again() {
    let (bench, overlay) = settled();
    verify_base(&overlay, &bench.base).unwrap();
    let stamps = std::fs::read_to_string(bench.path("verified.json")).unwrap();
    // A stamp that says other bytes is believed, which shows that the file wasn't read.
    let other = stamps.replace(&bench.identity.digest, "sha256:other");
    assert_ne!(stamps, other);
    std::fs::write(bench.path("verified.json"), other).unwrap();
    let error = verify_base(&overlay, &bench.base).unwrap_err();
    assert!(matches!(error, Error::BaseChanged { found, .. } if found == "sha256:other"));
}

#[test]
fn a_base_changed_in_place_with_its_mtime_set_back_is_found() {
    let (bench, overlay) = settled();
    verify_base(&overlay, &bench.base).unwrap();
    let file = File::options().write(true).open(&bench.base).unwrap();
    let before = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(b"x", 4711).unwrap();
    file.set_times(FileTimes::new().set_modified(before)).unwrap();
    let error = verify_base(&overlay, &bench.base).unwrap_err();
    assert_eq!(error.reason(), "BASE_CHANGED");
    assert!(error.to_string().contains(&bench.identity.digest), "{error}");
    assert!(error.to_string().contains(&sha256_file(&bench.base).unwrap()), "{error}");
}

#[test]
fn a_base_replaced_by_another_file_of_the_same_size_is_found() {
    let (bench, overlay) = settled();
    verify_base(&overlay, &bench.base).unwrap();
    let times = bench.base.metadata().unwrap().modified().unwrap();
    let other = bench.path("other.raw");
    std::fs::write(&other, vec![9; MIB as usize + 17]).unwrap();
    File::options()
        .write(true)
        .open(&other)
        .unwrap()
        .set_times(FileTimes::new().set_modified(times))
        .unwrap();
    std::fs::rename(&other, &bench.base).unwrap();
    assert_eq!(verify_base(&overlay, &bench.base).unwrap_err().reason(), "BASE_CHANGED");
}

#[test]
fn a_missing_base_and_one_of_another_size_are_told_apart() {
    let (bench, overlay) = settled();
    let away = bench.path("away.raw");
    std::fs::rename(&bench.base, &away).unwrap();
    let error = verify_base(&overlay, &bench.base).unwrap_err();
    assert_eq!(error.reason(), "BASE_MISSING");
    assert!(error.to_string().contains(&bench.identity.digest), "{error}");
    std::fs::write(&bench.base, "short").unwrap();
    assert_eq!(verify_base(&overlay, &bench.base).unwrap_err().reason(), "BASE_CHANGED");
    std::fs::rename(&away, &bench.base).unwrap();
    verify_base(&overlay, &bench.base).unwrap();
}

#[test]
fn a_missing_overlay_is_missing_data() {
    let (bench, overlay) = settled();
    std::fs::remove_file(&overlay).unwrap();
    assert_eq!(verify_base(&overlay, &bench.base).unwrap_err().reason(), "DATA_MISSING");
}

#[test]
fn a_sparse_file_has_the_same_digest_as_its_bytes() {
    let bench = Bench::new(1);
    let path = bench.path("sparse.raw");
    let file = File::create(&path).unwrap();
    file.set_len(9 * MIB + 5).unwrap();
    for at in [0, 3 * MIB + 1, 5 * MIB] {
        file.write_all_at(&[7; 70_000], at).unwrap();
    }
    let expected = run("sha256sum", &[text(&path)]);
    assert_eq!(sha256_file(&path).unwrap(), format!("sha256:{}", &expected[..64]));
    let empty = bench.path("empty.raw");
    File::create(&empty).unwrap();
    let expected = run("sha256sum", &[text(&empty)]);
    assert_eq!(sha256_file(&empty).unwrap(), format!("sha256:{}", &expected[..64]));
}
