//! What a guest's request costs on the host.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::path::Path;
use std::sync::{Arc, Mutex};

use common::{Bench, base_content};
use torpor_overlay::{Block, Host, Overlay, Raw};

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 65_536;

/// The names of a file's operations, with the bytes they carried.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<Vec<(&'static str, u64)>>>);

impl Calls {
    fn note(&self, name: &'static str, bytes: usize) {
        self.0.lock().unwrap().push((name, bytes as u64));
    }

    fn take(&self) -> Vec<(&'static str, u64)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// A file whose operations are noted.
struct Counted {
    file: File,
    calls: Calls,
}

impl Host for Counted {
    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.calls.note("read", buffer.len());
        self.file.read(buffer, offset)
    }

    fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.calls.note("write", data.len());
        Host::write(&self.file, data, offset)
    }

    fn readv(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        self.calls.note("read", buffers.iter().map(|buffer| buffer.len()).sum());
        self.file.readv(buffers, offset)
    }

    fn writev(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        self.calls.note("write", buffers.iter().map(|buffer| buffer.len()).sum());
        self.file.writev(buffers, offset)
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.calls.note("length", 0);
        self.file.set_length(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.calls.note("sync", 0);
        self.file.sync()
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        self.calls.note("punch", length as usize);
        self.file.punch(offset, length)
    }

    fn reserve(&self, offset: u64, length: u64) -> io::Result<()> {
        self.calls.note("reserve", 0);
        self.file.reserve(offset, length)
    }

    fn next_data(&self, from: u64, end: u64) -> io::Result<(u64, u64)> {
        self.calls.note("next data", 0);
        self.file.next_data(from, end)
    }
}

/// An overlay of 16 MiB over a base of 2 MiB of data and 2 MiB of hole. Its first cluster beyond the base, its first one
/// over the hole and its first one over data have been written, so that tables are read and space is reserved.
fn warm(bench: &Bench) -> (Overlay, Calls) {
    let base = File::options().write(true).open(&bench.base).unwrap();
    base.set_len(4 * MIB).unwrap();
    let path = bench.path("overlay.qcow2");
    let identity = torpor_overlay::BaseIdentity { digest: "not looked at".to_owned(), size: 4 * MIB };
    torpor_overlay::create(&path, &bench.base, &identity, 16 * MIB).unwrap();
    let calls = Calls::default();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let host = Counted { file, calls: calls.clone() };
    let base = Raw::open_read_only(&bench.base).unwrap();
    let disk = Overlay::open_on(Box::new(host), Box::new(base), Path::new("counted")).unwrap();
    [0, 2 * MIB, 8 * MIB].iter().for_each(|at| disk.write(&[1; 4096], *at).unwrap());
    disk.flush().unwrap();
    calls.take();
    (disk, calls)
}

#[test]
fn a_request_inside_the_overlay_is_one_operation_on_its_file() {
    let bench = Bench::new(2 * MIB);
    let (disk, calls) = warm(&bench);
    disk.write(&vec![2; MIB as usize], 8 * MIB).unwrap();
    calls.take();
    disk.read(&mut [0; 4096], 100).unwrap();
    assert_eq!(calls.take(), [("read", 4096)]);
    disk.write(&[3; 4096], 512).unwrap();
    assert_eq!(calls.take(), [("write", 4096)]);
    // Many buffers, many clusters.
    let mut found = vec![0; 200_000];
    let mut buffers: Vec<IoSliceMut<'_>> = found.chunks_mut(4096).map(IoSliceMut::new).collect();
    disk.readv(&mut buffers, 9 * MIB - 400_001).unwrap();
    assert_eq!(calls.take(), [("read", 200_000)]);
    let data = vec![4; 200_000];
    let buffers: Vec<IoSlice<'_>> = data.chunks(5000).map(IoSlice::new).collect();
    disk.writev(&buffers, 9 * MIB - 400_001).unwrap();
    assert_eq!(calls.take(), [("write", 200_000)]);
    // The base is another file.
    disk.read(&mut [0; 4096], MIB).unwrap();
    assert_eq!(calls.take(), []);
}

#[test]
fn the_first_write_to_a_cluster_carries_no_zeros_that_are_there_already() {
    let bench = Bench::new(2 * MIB);
    let (disk, calls) = warm(&bench);
    for (at, bytes, what) in [
        (8 * MIB + CLUSTER, 4096, "beyond the base"),
        (3 * MIB, 4096, "over a hole of the base"),
        (MIB, CLUSTER, "over the base's data"),
    ] {
        disk.write(&[5; 4096], at + 8192).unwrap();
        let calls = calls.take();
        let written: u64 = calls.iter().filter(|(name, _)| *name == "write").map(|(_, bytes)| bytes).sum();
        assert_eq!(written, bytes, "{what}: {calls:?}");
        assert!(!calls.iter().any(|(name, _)| *name == "read" || *name == "sync"), "{what}: {calls:?}");
    }
    let (mut found, mut expected) = (vec![0; CLUSTER as usize], base_content(2 * MIB));
    disk.read(&mut found, MIB).unwrap();
    expected[(MIB + 8192) as usize..(MIB + 8192 + 4096) as usize].fill(5);
    assert!(found == expected[MIB as usize..(MIB + CLUSTER) as usize]);
}

#[test]
fn a_flush_costs_one_sync_and_a_second_one_only_for_new_clusters() {
    let bench = Bench::new(2 * MIB);
    let (disk, calls) = warm(&bench);
    let syncs = |calls: &Calls| calls.take().iter().filter(|(name, _)| *name == "sync").count();
    disk.flush().unwrap();
    assert_eq!(syncs(&calls), 0, "nothing changed");
    disk.write(&[6; 4096], 0).unwrap();
    disk.flush().unwrap();
    assert_eq!(calls.take(), [("write", 4096), ("sync", 0)]);
    disk.write(&[6; 4096], 10 * MIB).unwrap();
    disk.flush().unwrap();
    assert_eq!(syncs(&calls), 2, "content and refcount, then the reference");
}
