//! A hostile driver of the entropy device.
#![no_main]

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::{Bytes, act, settle};
use torpor_vmm_devices::testing::Driver;
use torpor_vmm_devices::virtio::rng::Rng;

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let mut driver = Driver::start_with(Box::new(Rng::new(None).unwrap()), bytes.number(8));
    while !bytes.is_empty() {
        act(&mut driver, &mut bytes);
    }
    settle(&driver);
});
