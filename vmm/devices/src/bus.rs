//! What sits at an address: port I/O and memory-mapped devices.

use std::sync::Arc;

/// A device on a bus. Called by all CPUs at once; must never block for long and never panic, whatever the guest does.
pub trait BusDevice: Send + Sync {
    /// The guest reads `data.len()` (1, 2, 4 or 8) bytes at `offset` from the device's start.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// The guest writes.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Devices by address range.
#[derive(Default)]
pub struct Bus {
    /// Sorted by start; ranges don't overlap.
    ranges: Vec<(u64, u64, Arc<dyn BusDevice>)>,
}

/// Two devices want the same addresses.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{length:#x} bytes at {start:#x} overlap with another device")]
pub struct Overlap {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub length: u64,
}

impl std::fmt::Debug for Bus {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_list().entries(self.ranges.iter().map(|(start, length, _)| (start, length))).finish()
    }
}

impl Bus {
    /// Puts a device at `start..start + length`.
    ///
    /// # Errors
    /// [`Overlap`], also for an empty or wrapping range.
    pub fn insert(&mut self, start: u64, length: u64, device: Arc<dyn BusDevice>) -> Result<(), Overlap> {
        let overlap = Overlap { start, length };
        let end = start.checked_add(length).filter(|end| *end > start).ok_or(Overlap { start, length })?;
        let at = self.ranges.partition_point(|(other, ..)| *other < start);
        let clear_before = at == 0 || {
            let (other, other_length, _) = &self.ranges[at - 1];
            other + other_length <= start
        };
        let clear_after = self.ranges.get(at).is_none_or(|(other, ..)| *other >= end);
        if !(clear_before && clear_after) {
            return Err(overlap);
        }
        self.ranges.insert(at, (start, length, device));
        Ok(())
    }

    /// What holds all of `address..address + length`, and the offset there.
    fn find(&self, address: u64, length: usize) -> Option<(u64, &dyn BusDevice)> {
        let at = self.ranges.partition_point(|(start, ..)| *start <= address).checked_sub(1)?;
        let (start, size, device) = &self.ranges[at];
        let offset = address - start;
        let inside = offset.checked_add(length as u64).is_some_and(|end| end <= *size);
        inside.then_some((offset, &**device))
    }

    /// The guest reads; where nothing is, all bits are set.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address, data.len()) {
            Some((offset, device)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// The guest writes; where nothing is, nothing happens.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((offset, device)) = self.find(address, data.len()) {
            device.write(offset, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Seen(Mutex<Vec<u64>>);

    impl BusDevice for Seen {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }

        fn write(&self, offset: u64, _data: &[u8]) {
            self.0.lock().unwrap().push(offset);
        }
    }

    #[test]
    fn an_access_reaches_the_device_that_holds_all_of_it_and_no_other() {
        let mut bus = Bus::default();
        let (low, high) = (Arc::new(Seen::default()), Arc::new(Seen::default()));
        bus.insert(0x100, 8, low.clone()).unwrap();
        bus.insert(0x108, 8, high.clone()).unwrap();
        bus.write(0x107, &[1]);
        bus.write(0x108, &[1]);
        bus.write(0x107, &[1, 2]); // astride: nobody's
        bus.write(u64::MAX, &[1, 2]);
        assert_eq!((&*low.0.lock().unwrap(), &*high.0.lock().unwrap()), (&vec![7], &vec![0]));
        let mut data = [0; 2];
        bus.read(0x10f, &mut data);
        assert_eq!(data, [0xff, 0xff]);
        bus.read(0x10a, &mut data);
        assert_eq!(data, [2, 2]);
    }

    #[test]
    fn ranges_that_overlap_wrap_or_are_empty_are_refused() {
        let mut bus = Bus::default();
        bus.insert(0x100, 0x10, Arc::new(Seen::default())).unwrap();
        for (start, length) in [(0xff, 2), (0x10f, 1), (0x108, 1), (0x80, 0x1000), (5, 0), (u64::MAX, 2)] {
            assert!(bus.insert(start, length, Arc::new(Seen::default())).is_err(), "{start:#x} {length:#x}");
        }
    }
}
