//! Any accesses to the clock, the keyboard controller and the panic notifier, at any time.
#![no_main]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::Bytes;
use torpor_vmm_devices::bus::Bus;
use torpor_vmm_devices::legacy::{I8042, Pvpanic, Rtc};
use torpor_vmm_devices::testing::Host;

static NOW: AtomicU64 = AtomicU64::new(0);

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let host = Arc::new(Host::default());
    let mut bus = Bus::default();
    bus.insert(0x60, 5, Arc::new(I8042::new(host.clone()))).unwrap();
    bus.insert(0x70, 2, Arc::new(Rtc::with_clock(|| NOW.load(Ordering::Relaxed)))).unwrap();
    bus.insert(0x505, 1, Arc::new(Pvpanic::new(host.clone()))).unwrap();
    while !bytes.is_empty() {
        let act = bytes.byte();
        let port = match act & 7 {
            0..=2 => 0x70,
            3 => 0x71,
            4 => 0x60 + u64::from(bytes.byte() % 6),
            5 => 0x505,
            6 => bytes.number(2),
            _ => {
                NOW.store(bytes.number(8), Ordering::Relaxed);
                continue;
            }
        };
        let width = 1 << (act >> 3 & 3);
        let mut data = [0xa5; 8];
        if act & 0x80 == 0 {
            let written = bytes.take(width);
            data[..written.len()].copy_from_slice(written);
            bus.write(port, &data[..width]);
        } else {
            bus.read(port, &mut data[..width]);
        }
    }
    // The clock is a clock: two decimal digits everywhere, and never in the middle of an update.
    for (register, most) in [(0, 59), (2, 59), (4, 23), (6, 7), (7, 31), (8, 12), (9, 99), (0x32, 99)] {
        bus.write(0x70, &[register]);
        let mut value = [0];
        bus.read(0x71, &mut value);
        assert!(
            value[0] & 15 <= 9 && (value[0] >> 4) * 10 + (value[0] & 15) <= most,
            "{register:#x}: {value:x?}"
        );
    }
    bus.write(0x70, &[0x0a]);
    let mut status = [0];
    bus.read(0x71, &mut status);
    assert_eq!(status[0] & 0x80, 0);
});
