//! The I/O APIC, of which KVM keeps only the way from a line to a local APIC.
//!
//! KVM could emulate all of it, but then each interrupt of a device goes through a kernel worker; a line that is routed
//! as a message is delivered where the event is signalled. All lines are edge-triggered here.
//!
//! Source: Intel 82093AA data sheet.

use kvm_bindings::{KVM_IRQ_ROUTING_MSI, kvm_irq_routing_entry, kvm_irq_routing_msi};

use crate::layout;

/// Lines.
pub(super) const PINS: usize = 24;
/// Bytes of its window.
const WINDOW: u64 = 0x20;
const SELECT: u64 = 0x00;
const DATA: u64 = 0x10;
/// Indirect registers.
const ID: u8 = 0;
const VERSION: u8 = 1;
const ARBITRATION: u8 = 2;
const REDIRECTION: u8 = 0x10;
/// Version 0x11: no EOI register.
const VERSION_VALUE: u32 = 0x11 | ((PINS as u32 - 1) << 16);
const MASKED: u64 = 1 << 16;
/// Delivery status and remote request are the chip's to write.
const READ_ONLY: u64 = (1 << 12) | (1 << 14);

/// Its registers.
#[derive(Clone, Debug)]
pub(super) struct IoApic {
    select: u8,
    id: u32,
    entries: [u64; PINS],
}

/// Offset in the window, if that is what lies there.
pub(super) fn offset(address: u64) -> Option<u64> {
    address.checked_sub(u64::from(layout::IO_APIC)).filter(|offset| *offset < WINDOW)
}

impl IoApic {
    /// All lines masked.
    pub(super) fn new() -> Self {
        Self { select: 0, id: 0, entries: [MASKED; PINS] }
    }

    /// The entry and which half of it a register is.
    fn entry(&self) -> Option<(usize, u32)> {
        let index = usize::from(self.select.checked_sub(REDIRECTION)?);
        (index / 2 < PINS).then_some((index / 2, 32 * (index as u32 % 2)))
    }

    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        let value = match (offset, self.select) {
            (SELECT, select) => u32::from(select),
            (DATA, ID | ARBITRATION) => self.id << 24,
            (DATA, VERSION) => VERSION_VALUE,
            (DATA, _) => self.entry().map_or(0, |(pin, shift)| (self.entries[pin] >> shift) as u32),
            _ => 0,
        };
        let bytes = u64::from(value).to_le_bytes();
        let count = data.len().min(bytes.len());
        data[..count].copy_from_slice(&bytes[..count]);
    }

    /// Whether the routes have changed.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let mut bytes = [0; 4];
        let count = data.len().min(bytes.len());
        bytes[..count].copy_from_slice(&data[..count]);
        let value = u32::from_le_bytes(bytes);
        match (offset, self.select) {
            (SELECT, _) => self.select = value as u8,
            (DATA, ID) => self.id = (value >> 24) & 0xf,
            (DATA, _) => {
                if let Some((pin, shift)) = self.entry() {
                    return self.write_entry(pin, shift, value);
                }
            }
            _ => {}
        }
        false
    }

    fn write_entry(&mut self, pin: usize, shift: u32, value: u32) -> bool {
        let before = self.message(pin);
        let kept = !(u64::from(u32::MAX) << shift);
        self.entries[pin] = ((self.entries[pin] & kept) | (u64::from(value) << shift)) & !READ_ONLY;
        self.message(pin) != before
    }

    /// Address and data of the message that stands for an edge on the line; none while it is masked.
    fn message(&self, pin: usize) -> Option<(u32, u32)> {
        let entry = self.entries[pin];
        if entry & MASKED != 0 {
            return None;
        }
        let (destination, logical) = ((entry >> 56) as u32, (entry >> 11) as u32 & 1);
        // Vector and delivery mode have the same places in both.
        Some((layout::LOCAL_APIC | (destination << 12) | (logical << 2), entry as u32 & 0x7ff))
    }

    /// What KVM is to know: each line that isn't masked.
    pub(super) fn routes(&self) -> Vec<kvm_irq_routing_entry> {
        let route = |pin: usize| {
            let (address_lo, data) = self.message(pin)?;
            let mut entry =
                kvm_irq_routing_entry { gsi: pin as u32, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
            entry.u.msi = kvm_irq_routing_msi { address_lo, data, ..Default::default() };
            Some(entry)
        };
        (0..PINS).filter_map(route).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(chip: &mut IoApic, register: u8, value: u32) -> bool {
        chip.write(SELECT, &[register, 0, 0, 0]);
        chip.write(DATA, &value.to_le_bytes())
    }

    fn get(chip: &mut IoApic, register: u8) -> u32 {
        let mut data = [0; 4];
        chip.write(SELECT, &[register, 0, 0, 0]);
        chip.read(DATA, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn a_line_is_routed_while_it_is_not_masked_and_only_changes_are_told() {
        let mut chip = IoApic::new();
        assert_eq!((chip.routes().len(), get(&mut chip, 1)), (0, 0x0017_0011));
        assert!(!set(&mut chip, 0x10 + 2 * 5 + 1, 3 << 24), "still masked");
        assert!(set(&mut chip, 0x10 + 2 * 5, 0x0841));
        assert!(!set(&mut chip, 0x10 + 2 * 5, 0x0841 | 0x5000), "status bits are not the guest's");
        assert_eq!(get(&mut chip, 0x10 + 2 * 5), 0x0841);
        let routes = chip.routes();
        // SAFETY: the union is plain numbers, and its type says that this is the part.
        let message = unsafe { routes[0].u.msi };
        assert_eq!(
            (routes.len(), routes[0].gsi, message.address_lo, message.data),
            (1, 5, 0xfee0_3004, 0x41)
        );
        assert!(set(&mut chip, 0x10 + 2 * 5, 0x1_0841));
        assert!(chip.routes().is_empty());
    }

    #[test]
    fn no_access_however_odd_does_more_than_be_ignored() {
        let mut chip = IoApic::new();
        for register in 0..=255 {
            for length in [1, 2, 4, 8] {
                chip.write(SELECT, &[register]);
                chip.write(DATA, &[0xff; 8][..length]);
                chip.write(register.into(), &[0xff; 8][..length]);
                chip.read(register.into(), &mut [0; 8][..length]);
            }
        }
        assert!(
            offset(0xfec0_0020).is_none()
                && offset(0xfebf_ffff).is_none()
                && offset(0xfec0_0010) == Some(0x10)
        );
    }
}
