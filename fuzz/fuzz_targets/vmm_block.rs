//! A hostile driver of the block device, over a raw disk in memory.
#![no_main]

use std::fs::File;
use std::os::fd::FromRawFd;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::{Bytes, act, settle};
use torpor_overlay::Raw;
use torpor_vmm_devices::testing::Driver;
use torpor_vmm_devices::virtio::block::{BlockDevice, BlockOptions};

/// A disk of 1 MiB that no file system knows.
fn disk() -> Raw {
    // SAFETY: the name ends with a zero; the descriptor is nobody else's.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"disk".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(1 << 20).unwrap();
    Raw::from_file(file, true).unwrap()
}

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let device = BlockDevice::new(BlockOptions {
        name: "vda".into(),
        disk: Arc::new(disk()),
        serial: "fuzz".into(),
        read_only: bytes.byte() % 8 == 0,
        rate: None,
        discard_unit: 65536,
    });
    let mut driver = Driver::start_with(Box::new(device), bytes.number(8));
    while !bytes.is_empty() {
        act(&mut driver, &mut bytes);
    }
    settle(&driver);
    driver.transport.close().unwrap();
});
