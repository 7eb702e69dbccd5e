//! What fuzz targets share: the input as a row of decisions, and a hostile driver of a virtio device.

use torpor_vmm_devices::bus::BusDevice;
use torpor_vmm_devices::testing::{Driver, HIGH_MEMORY, HIGH_START, LOW_MEMORY, RawDescriptor};

/// The input, taken piece by piece; at its end all numbers are 0.
#[derive(Clone, Copy, Debug)]
pub struct Bytes<'input>(pub &'input [u8]);

impl<'input> Bytes<'input> {
    /// All was taken.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Up to so many bytes.
    pub fn take(&mut self, count: usize) -> &'input [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// A number of so many bytes, at most eight.
    pub fn number(&mut self, bytes: usize) -> u64 {
        self.take(bytes).iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// A byte.
    pub fn byte(&mut self) -> u8 {
        self.number(1) as u8
    }

    /// A guest address: often inside memory, often at an edge of it, sometimes anywhere.
    pub fn address(&mut self) -> u64 {
        match self.byte() % 6 {
            0..=2 => 0x10_0000 + self.number(2) * 16,
            3 => LOW_MEMORY - self.number(1),
            4 => HIGH_START + HIGH_MEMORY - self.number(1),
            _ => self.number(8),
        }
    }

    /// A length: often short.
    pub fn length(&mut self) -> u32 {
        match self.byte() % 4 {
            0 => self.number(4) as u32,
            1 => self.number(2) as u32,
            _ => self.number(1) as u32,
        }
    }
}

/// One act of a driver that keeps no rule.
pub fn act(driver: &mut Driver, bytes: &mut Bytes<'_>) {
    let act = bytes.byte();
    let queue = usize::from(bytes.byte() % 4);
    let is_there = queue < driver.queues.len();
    match act % 12 {
        0..=2 if is_there => {
            let descriptor = RawDescriptor {
                address: bytes.address(),
                length: bytes.length(),
                flags: u16::from(bytes.byte() % 8),
                next: u16::from(bytes.byte() % 16),
            };
            let index = u16::from(bytes.byte() % 16);
            driver.set_descriptor(queue, index % driver.queues[queue].size, descriptor);
        }
        3..=5 if is_there => {
            let head = bytes.byte();
            driver.publish(queue, u16::from(if head < 0xf0 { head % 16 } else { head }));
            driver.kick_anyway(queue as u32);
        }
        6 if is_there => driver.set_available_index(queue, bytes.number(2) as u16),
        7 => {
            let count = usize::from(bytes.byte());
            let content = bytes.take(count);
            driver.write(0x10_0000 + bytes.number(2) * 16, content);
        }
        8 => {
            let (offset, value) = (bytes.number(1) * 4, bytes.length());
            driver.set(offset, value);
        }
        9 => {
            let offset = 0x100 + bytes.number(2);
            let mut data = [0; 8];
            driver.transport.read(offset, &mut data);
            driver.transport.write(offset, &data[..1 << (bytes.byte() % 4)]);
            driver.transport.write(offset, &bytes.number(4).to_le_bytes()[..4]);
        }
        10 if act > 0xc0 => driver.bring_up(bytes.number(8)),
        _ => {
            driver.kick_anyway(queue as u32);
            (0..driver.queues.len()).for_each(|queue| while driver.take_used(queue).is_some() {});
        }
    }
}

/// Lets the device's thread do what it has to, and waits until it is idle or between two steps.
pub fn settle(driver: &Driver) {
    std::thread::yield_now();
    driver.transport.pause(true);
    driver.transport.pause(false);
}
