//! One owner for each overlay.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};

use common::Bench;
use torpor_overlay::{Error, Lock, holder_of, is_locked};

const MIB: u64 = 1 << 20;

/// A process that holds the lock because it inherited the descriptor, as a VM does.
fn heir(lock: Lock) -> Child {
    Command::new("sleep").arg("1000").stdin(Stdio::from(lock.into_fd())).spawn().unwrap()
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_locked_overlay_names_its_holder() {
    let bench = Bench::new(MIB);
    let path = bench.overlay(MIB);
    assert_eq!((is_locked(&path).unwrap(), holder_of(&path)), (false, None));
    let child = heir(Lock::acquire(&path).unwrap());
    let pid = child.id();
    let error = Lock::acquire(&path).unwrap_err();
    assert!(matches!(error, Error::Locked { holder: Some(holder), .. } if holder == pid), "{error:?}");
    assert!(error.to_string().contains(&format!("by process {pid}")), "{error}");
    assert_eq!((is_locked(&path).unwrap(), holder_of(&path)), (true, Some(pid)));
    end(child);
    assert!(!is_locked(&path).unwrap());
    Lock::acquire(&path).unwrap();
}

#[test]
fn the_lock_lives_as_long_as_any_descriptor_of_it() {
    let bench = Bench::new(MIB);
    let path = bench.overlay(MIB);
    let lock = Lock::acquire(&path).unwrap();
    let copy = lock.as_fd().try_clone_to_owned().unwrap();
    drop(lock);
    assert!(is_locked(&path).unwrap());
    assert_eq!(holder_of(&path), Some(std::process::id()));
    drop(copy);
    assert!(!is_locked(&path).unwrap());
}

#[test]
fn two_descriptions_in_one_process_exclude_each_other() {
    let bench = Bench::new(MIB);
    let path = bench.overlay(MIB);
    let _lock = Lock::acquire(&path).unwrap();
    assert_eq!(Lock::acquire(&path).unwrap_err().reason(), "LOCKED");
    // Opening and closing the file elsewhere must not drop the lock, as it would with classic POSIX locks.
    drop(std::fs::File::open(&path).unwrap());
    assert_eq!(Lock::acquire(&path).unwrap_err().reason(), "LOCKED");
}

#[test]
fn a_missing_overlay_is_missing_data_and_is_not_made() {
    let bench = Bench::new(MIB);
    let path = bench.path("none.qcow2");
    assert_eq!(Lock::acquire(&path).unwrap_err().reason(), "DATA_MISSING");
    assert_eq!(is_locked(&path).unwrap_err().reason(), "DATA_MISSING");
    assert!(!path.exists());
}

#[test]
fn a_directory_or_pipe_in_place_of_an_overlay_is_refused() {
    let bench = Bench::new(MIB);
    let pipe = bench.path("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(Lock::acquire(&pipe).unwrap_err().reason(), "UNSUPPORTED");
    assert_eq!(Lock::acquire(bench.dir.path()).unwrap_err().reason(), "IO");
}

#[test]
fn an_inherited_descriptor_carries_the_lock_into_the_process_that_adopts_it() {
    let bench = Bench::new(MIB);
    let path = bench.overlay(MIB);
    let fd = Lock::acquire(&path).unwrap().into_fd();
    let adopted = Lock::from_fd(fd, &path).unwrap();
    assert_eq!(Lock::acquire(&path).unwrap_err().reason(), "LOCKED");
    // Another description of the same file is a stranger, and one that is not open for writing is no owner.
    let stranger = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    assert_eq!(Lock::from_fd(stranger.into(), &path).unwrap_err().reason(), "LOCKED");
    drop(adopted);
    let reader = std::fs::File::open(&path).unwrap();
    assert_eq!(Lock::from_fd(reader.into(), &path).unwrap_err().reason(), "IO");
    assert!(!is_locked(&path).unwrap());
}

#[test]
fn an_overlay_opens_over_a_base_that_is_open_already_and_has_the_right_size() {
    let bench = Bench::new(MIB);
    let path = bench.overlay(MIB);
    let base = || std::fs::File::open(&bench.base).unwrap();
    let overlay =
        torpor_overlay::open_locked_over(Lock::acquire(&path).unwrap(), base(), &bench.base).unwrap();
    drop(overlay);
    std::fs::OpenOptions::new().write(true).open(&bench.base).unwrap().set_len(2 * MIB).unwrap();
    let lock = Lock::acquire(&path).unwrap();
    let error = torpor_overlay::open_locked_over(lock, base(), &bench.base).unwrap_err();
    assert_eq!(error.reason(), "BASE_CHANGED");
}
