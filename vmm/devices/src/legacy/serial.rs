//! The first serial port, a 16550, of which only the way out is connected: to the console.

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_superio::Trigger;
use vm_superio::serial::NoEvents;
use vmm_sys_util::eventfd::EventFd;

use super::Console;
use crate::bus::BusDevice;

/// The port's interrupt line.
#[derive(Debug)]
struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// The console, with a count of what the guest wrote to it.
#[derive(Debug)]
struct Out {
    console: Console,
    bytes: u64,
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes += bytes.len() as u64;
        self.console.write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The port: eight bytes of I/O space.
#[derive(Debug)]
pub struct Serial {
    uart: Mutex<vm_superio::Serial<Line, NoEvents, Out>>,
}

impl Serial {
    /// With the eventfd of its interrupt and where its bytes go.
    pub fn new(line: EventFd, console: Console) -> Self {
        Self { uart: Mutex::new(vm_superio::Serial::new(Line(line), Out { console, bytes: 0 })) }
    }

    /// Bytes that the guest has written so far, those that were dropped included.
    pub fn console_bytes(&self) -> u64 {
        self.uart().writer().bytes
    }

    fn uart(&self) -> MutexGuard<'_, vm_superio::Serial<Line, NoEvents, Out>> {
        self.uart.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BusDevice for Serial {
    /// A wide access is one of each register in a row, as the bus of a PC splits it.
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut uart = self.uart();
        for (register, byte) in (offset..).zip(data) {
            *byte = uart.read(register as u8);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut uart = self.uart();
        for (register, byte) in (offset..).zip(data) {
            // It fails only when 2^64 - 2 interrupts are pending.
            let _ = uart.write(register as u8, *byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use torpor_vmm_api::console::ConsoleReader;

    use super::*;

    fn port() -> (Serial, ConsoleReader, EventFd) {
        let line = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let file = tempfile::tempfile().unwrap();
        let console = Console::open(file.try_clone().unwrap(), 4096).unwrap();
        (Serial::new(line.try_clone().unwrap(), console), ConsoleReader::new(file).unwrap(), line)
    }

    #[test]
    fn what_the_guest_writes_is_in_the_ring_and_the_line_says_that_there_is_room() {
        let (serial, reader, line) = port();
        let mut status = [0];
        serial.read(5, &mut status);
        assert_eq!(status[0] & 0x60, 0x60, "empty and idle: the driver never waits");
        b"login: ".iter().for_each(|byte| serial.write(0, &[*byte]));
        assert_eq!(reader.read_since(0).unwrap().bytes, b"login: ");
        assert_eq!(serial.console_bytes(), 7);
        assert!(line.read().is_err(), "nobody asked for interrupts");
        serial.write(1, &[2]);
        assert_eq!(line.read().unwrap(), 1);
        let mut identification = [0];
        serial.read(2, &mut identification);
        assert_eq!(identification[0] & 0x0f, 2);
        serial.write(0, b"x");
        assert_eq!(line.read().unwrap(), 1);
    }

    #[test]
    fn without_a_console_bytes_are_counted_and_dropped() {
        let serial = Serial::new(EventFd::new(0).unwrap(), Console::None);
        serial.write(0, b"a");
        serial.write(0, b"b");
        assert_eq!(serial.console_bytes(), 2);
    }

    #[test]
    fn any_access_at_any_register_is_survived() {
        let (serial, reader, _line) = port();
        for round in 0..2000_u64 {
            for offset in 0..8 {
                let bytes = (round.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ offset).to_le_bytes();
                for width in [1, 2, 4, 8] {
                    serial.write(offset, &bytes[..width]);
                    serial.read(offset, &mut [0; 8][..width]);
                }
            }
        }
        assert!(reader.read_since(0).unwrap().bytes.len() <= 4096);
    }
}
