//! A hostile driver of the block device, over a raw disk in memory on a host that is now and then full.
#![no_main]

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::FromRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::{Bytes, act, settle};
use torpor_overlay::{Block, Raw};
use torpor_vmm_devices::testing::Driver;
use torpor_vmm_devices::virtio::block::{BlockDevice, BlockOptions};

/// A disk of 1 MiB that no file system knows.
fn disk() -> Raw {
    // SAFETY: the name ends with a zero; the descriptor is nobody else's.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"disk".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(1 << 20).unwrap();
    Raw::from_file(file, true).unwrap()
}

/// A disk that has no room for every so-many-th change.
struct Tight {
    disk: Raw,
    every: u8,
    changes: AtomicU8,
}

impl Tight {
    fn change(&self) -> io::Result<()> {
        let number = self.changes.fetch_add(1, Ordering::Relaxed);
        match self.every > 0 && number % self.every == 0 {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => Ok(()),
        }
    }
}

impl Block for Tight {
    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn readv(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        self.disk.readv(buffers, offset)
    }

    fn writev(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        self.change()?;
        self.disk.writev(buffers, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.disk.flush()
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.change()?;
        self.disk.discard(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.change()?;
        self.disk.write_zeroes(offset, length)
    }

    fn close(&self) -> io::Result<()> {
        self.disk.close()
    }
}

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let device = BlockDevice::new(BlockOptions {
        name: "vda".into(),
        disk: Arc::new(Tight { disk: disk(), every: bytes.byte() % 4, changes: AtomicU8::new(0) }),
        serial: "fuzz".into(),
        read_only: bytes.byte() % 8 == 0,
        rate: None,
        discard_unit: 65536,
        patience: std::time::Duration::from_secs(60),
    });
    let mut driver = Driver::start_with(Box::new(device), bytes.number(8));
    while !bytes.is_empty() {
        act(&mut driver, &mut bytes);
    }
    settle(&driver);
    driver.transport.close().unwrap();
});
