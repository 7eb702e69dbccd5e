//! Any accesses to the registers of a device, of any width, in any order. Afterwards a good driver must find it working.
#![no_main]

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::Bytes;
use torpor_vmm_devices::bus::BusDevice;
use torpor_vmm_devices::testing::Driver;
use torpor_vmm_devices::virtio::rng::Rng;

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let mut driver = Driver::new(Box::new(Rng::new(None).unwrap()));
    // Most of what follows would be ignored before this.
    if bytes.byte() % 2 == 0 {
        driver.negotiate(bytes.number(8));
    }
    while !bytes.is_empty() {
        let kind = bytes.byte();
        let offset = match kind % 8 {
            0 => bytes.number(8),
            1 => bytes.number(2),
            _ => bytes.number(1) % 64 * 4,
        };
        let width = if kind < 0xe0 { 4 } else { 1 << (kind % 4) };
        let value = bytes.number(if kind & 0x10 == 0 { 1 } else { width }).to_le_bytes();
        driver.transport.write(offset, &value[..width]);
        let mut data = [0; 8];
        driver.transport.read(offset, &mut data[..width]);
    }
    driver.bring_up(u64::MAX);
    let room = driver.room(16);
    assert_eq!(driver.request(0, &[room]), 16);
});
