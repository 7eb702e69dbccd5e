//! Tables of any machine: they are where the root says, sum to zero, and their code can be read to its end. And any accesses
//! to the registers behind them.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::Bytes;
use torpor_vmm::acpi::{self, Announced, Platform, PowerRegisters};
use torpor_vmm::layout;
use torpor_vmm_api::End;
use torpor_vmm_devices::bus::BusDevice;
use torpor_vmm_devices::testing::Host;

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte))
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The table at a guest address: inside the area, of its own length, sound.
fn table<'a>(area: &'a [u8], address: u64, name: &[u8; 4]) -> &'a [u8] {
    let at = (address - layout::ACPI_TABLES) as usize;
    let length = number(&area[at + 4..at + 8]) as usize;
    let table = &area[at..at + length];
    assert_eq!((&table[..4], sum(table), at % 16), (&name[..], 0, 0));
    table
}

/// Reads AML (ACPI 6.5, chapter 20), as far as it is used here.
struct Code<'a> {
    rest: Bytes<'a>,
    devices: Vec<[u8; 4]>,
}

impl<'a> Code<'a> {
    fn part(&mut self, count: usize) -> &'a [u8] {
        let part = self.rest.take(count);
        assert_eq!(part.len(), count, "the code ends early");
        part
    }

    fn byte(&mut self) -> u8 {
        self.part(1)[0]
    }

    fn name(&mut self) -> [u8; 4] {
        let name: [u8; 4] = self.part(4).try_into().unwrap();
        assert!(
            name.iter()
                .all(|letter| letter.is_ascii_uppercase() || letter.is_ascii_digit() || *letter == b'_')
        );
        name
    }

    /// What a package length spans, without the length itself.
    fn package(&mut self) -> &'a [u8] {
        let lead = self.byte();
        let more = usize::from(lead >> 6);
        let mut length = usize::from(if more == 0 { lead & 0x3f } else { lead & 0xf });
        for place in 0..more {
            length |= usize::from(self.byte()) << (4 + 8 * place);
        }
        self.part(length - 1 - more)
    }

    fn inside(&mut self, body: &'a [u8], work: impl FnOnce(&mut Self)) {
        let after = std::mem::replace(&mut self.rest, Bytes(body));
        work(self);
        self.rest = after;
    }

    /// Statements to the end of what is read.
    fn list(&mut self) {
        while !self.rest.is_empty() {
            match self.byte() {
                0x08 => {
                    self.name();
                    self.object();
                }
                0x10 => {
                    let body = self.package();
                    self.inside(body, |code| {
                        assert_eq!(code.byte(), b'\\');
                        code.name();
                        code.list();
                    });
                }
                0x14 => {
                    let body = self.package();
                    self.inside(body, |code| {
                        code.name();
                        code.byte();
                        // Notify(name, value)
                        assert_eq!(code.byte(), 0x86);
                        code.name();
                        code.object();
                        assert!(code.rest.is_empty());
                    });
                }
                0x5b => {
                    assert_eq!(self.byte(), 0x82);
                    let body = self.package();
                    self.inside(body, |code| {
                        let name = code.name();
                        code.devices.push(name);
                        code.list();
                    });
                }
                other => panic!("{other:#x} is no statement"),
            }
        }
    }

    fn object(&mut self) {
        match self.byte() {
            0x00 | 0x01 | 0xff => {}
            0x0a => drop(self.part(1)),
            0x0b => drop(self.part(2)),
            0x0c => drop(self.part(4)),
            0x0d => while self.byte() != 0 {},
            0x0e => drop(self.part(8)),
            0x11 => {
                let body = self.package();
                self.inside(body, |code| {
                    code.object();
                    // A list of resources ends with a tag and its sum.
                    assert_eq!(code.rest.0[code.rest.0.len() - 2], 0x79);
                });
            }
            0x12 => {
                let body = self.package();
                self.inside(body, |code| {
                    for _ in 0..code.byte() {
                        code.object();
                    }
                    assert!(code.rest.is_empty());
                });
            }
            other => panic!("{other:#x} is no object"),
        }
    }
}

fn tables(cpus: u8, devices: &[Announced]) {
    let area = acpi::tables(&Platform { cpus, devices });
    if cpus <= layout::MOST_CPUS && devices.len() <= layout::MOST_DEVICES {
        assert!(area.len() as u64 <= layout::RESET_VECTOR - layout::ACPI_TABLES);
    }
    assert_eq!((&area[..8], sum(&area[..20]), sum(&area[..36])), (&b"RSD PTR "[..], 0, 0));
    let xsdt = table(&area, number(&area[24..32]), b"XSDT");
    assert_eq!(xsdt.len(), 36 + 16);
    let fadt = table(&area, number(&xsdt[36..44]), b"FACP");
    let madt = table(&area, number(&xsdt[44..52]), b"APIC");
    assert_eq!(madt.len(), 44 + 8 * usize::from(cpus) + 12);
    let dsdt = table(&area, number(&fadt[140..148]), b"DSDT");
    let mut code = Code { rest: Bytes(&dsdt[36..]), devices: Vec::new() };
    code.list();
    // COM1, the button and its event device; no two of one name.
    assert_eq!(code.devices.len(), 3 + devices.len());
    let mut names = code.devices.clone();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), code.devices.len());
    for device in devices {
        // A memory range of 32 bits: writable, address, length.
        let window =
            [&[0x86, 9, 0, 1][..], &(device.address as u32).to_le_bytes(), &0x1000_u32.to_le_bytes()];
        let window = window.concat();
        assert!(dsdt.windows(window.len()).any(|found| found == window));
    }
}

fn registers(bytes: &mut Bytes<'_>) {
    let host = Arc::new(Host::default());
    let registers = PowerRegisters::new(host.clone());
    let mut expected = None;
    while !bytes.is_empty() {
        let offset = if bytes.byte() < 0x80 { bytes.number(1) % 4 } else { bytes.number(8) };
        let count = 1 << (bytes.byte() % 4);
        let data = bytes.take(count);
        let mut read = [9; 8];
        registers.read(offset, &mut read[..count]);
        assert!(read[..count].iter().all(|byte| *byte == 0));
        registers.write(offset, data);
        let end = match (offset, data) {
            (0, [value]) if value & 0x3c == 0x34 => Some(End::PowerOff),
            (2, [1]) => Some(End::Reset),
            _ => None,
        };
        expected = expected.or(end);
        assert_eq!(host.told().end, expected);
    }
}

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let count = usize::from(bytes.byte() % 32);
    let cpus = bytes.byte() % 65;
    let devices: Vec<_> = (0..count)
        .map(|index| match bytes.byte() % 2 {
            0 => Announced { address: layout::mmio_window(index), irq: layout::device_irq(index) },
            _ => Announced { address: bytes.number(8), irq: bytes.number(4) as u32 },
        })
        .collect();
    tables(cpus, &devices);
    registers(&mut bytes);
});
