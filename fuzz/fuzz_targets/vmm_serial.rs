//! Any accesses to the serial port: it answers, and its console ring holds what a reader makes sense of.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::Bytes;
use torpor_vmm_api::console::ConsoleReader;
use torpor_vmm_devices::bus::BusDevice;
use torpor_vmm_devices::legacy::{Console, Serial};
use vmm_sys_util::eventfd::EventFd;

fn file() -> &'static std::fs::File {
    static FILE: OnceLock<std::fs::File> = OnceLock::new();
    FILE.get_or_init(|| tempfile::tempfile().unwrap())
}

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let capacity = bytes.number(2);
    let console = Console::open(file().try_clone().unwrap(), capacity).unwrap();
    let reader = ConsoleReader::new(file().try_clone().unwrap()).unwrap();
    let serial = Serial::new(EventFd::new(libc::EFD_NONBLOCK).unwrap(), console);
    let mut since = 0;
    while !bytes.is_empty() {
        let act = bytes.byte();
        let (offset, width) = (u64::from(act & 7), 1 << (act >> 3 & 3));
        match act >> 5 {
            0..=4 => serial.write(offset, bytes.take(width)),
            5 | 6 => serial.read(offset, &mut [0; 8][..width]),
            _ => {
                let chunk = reader.read_since(since).unwrap();
                assert_eq!(since + chunk.dropped + chunk.bytes.len() as u64, chunk.total);
                since = chunk.total;
            }
        }
    }
    let chunk = reader.read_since(0).unwrap();
    // The port writes what was counted, but not what the limit dropped; the line that says so is beyond the count.
    assert!(chunk.total + reader.limited().unwrap() >= serial.console_bytes());
});
