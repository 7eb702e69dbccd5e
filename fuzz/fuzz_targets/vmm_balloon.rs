//! A hostile driver of the balloon. Memory that it never named keeps what it holds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::{Bytes, act, settle};
use torpor_vmm_devices::testing::Driver;
use torpor_vmm_devices::virtio::balloon::Balloon;

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let balloon = Balloon::new().unwrap();
    let handle = balloon.handle();
    let mut driver = Driver::start_with(Box::new(balloon), bytes.number(8));
    while !bytes.is_empty() {
        match bytes.byte() {
            0 => handle.set_target_bytes(bytes.number(8)),
            // A list of page numbers, as a good driver makes one.
            1..=0x3f => {
                let count = usize::from(bytes.byte());
                let list = bytes.take(count);
                driver.write(0x20_0000, list);
                let index = u16::from(bytes.byte() % 16);
                let queue = usize::from(bytes.byte() % 2).min(driver.queues.len().saturating_sub(1));
                if driver.queues.is_empty() {
                    continue;
                }
                let descriptor = torpor_vmm_devices::testing::RawDescriptor {
                    address: 0x20_0000,
                    length: list.len() as u32,
                    ..Default::default()
                };
                driver.set_descriptor(queue, index, descriptor);
                driver.publish(queue, index);
                driver.kick_anyway(queue as u32);
            }
            _ => act(&mut driver, &mut bytes),
        }
    }
    settle(&driver);
    let _ = (handle.actual(), handle.reclaimed());
});
