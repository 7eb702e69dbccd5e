//! ACPI: the tables by which a stock kernel finds CPUs, virtio devices, serial port and power button, and the registers
//! behind "off" and "reset".
//!
//! The platform is "hardware-reduced" (ACPI 6.5, 4.1): no legacy power management block, no SMI, no interrupt
//! controllers of a PC but the I/O APIC.

use std::sync::Arc;

use acpi_tables::aml::{
    Device, EISAName, IO, Interrupt, Memory32Fixed, Method, Name, Notify, Package, Path, ResourceTemplate,
    Scope,
};
use acpi_tables::fadt::{FADT, FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, aml};
use torpor_vmm_api::End;
use torpor_vmm_devices::bus::BusDevice;
use torpor_vmm_devices::host::Surroundings;

use crate::layout;

const OEM: [u8; 6] = *b"TORPOR";
const OEM_TABLE: [u8; 8] = *b"TORPORVM";
const REVISION: u32 = 1;

/// The power registers' first port.
pub const POWER_PORTS: u16 = 0x600;
/// How many.
pub const POWER_PORT_COUNT: u16 = 3;
const SLEEP_CONTROL: u16 = POWER_PORTS;
const SLEEP_STATUS: u16 = POWER_PORTS + 1;
const RESET: u16 = POWER_PORTS + 2;
const RESET_VALUE: u8 = 1;
/// The sleep type that means "off" here.
const SOFT_OFF: u8 = 5;

/// IA-PC boot architecture flags (ACPI 6.5, table 5.11). No keyboard controller to look for: a kernel would wait for
/// it, and a reset through it works all the same.
const BOOT_NO_VGA: u16 = 1 << 2;

/// A virtio-mmio device, as it is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announced {
    /// Its window's address.
    pub address: u64,
    /// Its interrupt line.
    pub irq: u32,
}

/// What the tables tell.
#[derive(Clone, Debug)]
pub struct Platform<'a> {
    /// CPUs.
    pub cpus: u8,
    /// Virtio devices, in order.
    pub devices: &'a [Announced],
}

/// What belongs at [`layout::RESET_VECTOR`]: code for real mode that writes the reset value to the reset register.
///
/// Linux on hardware-reduced ACPI doesn't reset by the register, but by UEFI, and where there is none by a jump to the
/// firmware (arch/x86/kernel/reboot.c, `efi_reboot_required`). Without code there the CPU would run through zeros for ever.
pub const RESET_CODE: [u8; 9] = {
    let [low, high] = RESET.to_le_bytes();
    // mov dx, port; mov al, value; out dx, al; hlt; jmp to the hlt
    [0xba, low, high, 0xb0, RESET_VALUE, 0xee, 0xf4, 0xeb, 0xfd]
};

/// The bytes that belong at [`layout::ACPI_TABLES`], where the root pointer comes first.
pub fn tables(platform: &Platform<'_>) -> Vec<u8> {
    let mut area = Area::new(Rsdp::len());
    let dsdt = area.add(&dsdt(platform));
    let tables = [area.add(&bytes(&fadt(dsdt))), area.add(&bytes(&madt(platform.cpus)))];
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, REVISION);
    for table in tables {
        xsdt.add_entry(table);
    }
    let xsdt = area.add(&bytes(&xsdt));
    let root = bytes(&Rsdp::new(OEM, xsdt));
    area.bytes[..root.len()].copy_from_slice(&root);
    area.bytes
}

/// Tables one after the other.
struct Area {
    bytes: Vec<u8>,
}

impl Area {
    fn new(reserved: usize) -> Self {
        Self { bytes: vec![0; reserved] }
    }

    /// Appends a table; its guest address.
    fn add(&mut self, table: &[u8]) -> u64 {
        const ALIGNMENT: usize = 16;
        let at = self.bytes.len().next_multiple_of(ALIGNMENT);
        self.bytes.resize(at, 0);
        self.bytes.extend(table);
        layout::ACPI_TABLES + at as u64
    }
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn port(address: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(address))
}

fn fadt(dsdt: u64) -> FADT {
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = BOOT_NO_VGA.into();
    fadt.reset_reg = port(RESET);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_CONTROL);
    fadt.sleep_status_reg = port(SLEEP_STATUS);
    fadt.finalize()
}

fn madt(cpus: u8) -> MADT {
    let mut madt = MADT::new(OEM, OEM_TABLE, REVISION, LocalInterruptController::Address(layout::LOCAL_APIC));
    for cpu in 0..cpus {
        madt.add_structure(ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IO_APIC, 0));
    madt
}

fn dsdt(platform: &Platform<'_>) -> Vec<u8> {
    let mut table = Sdt::new(*b"DSDT", 36, 6, OEM, OEM_TABLE, REVISION);
    let off = Name::new("_S5_".into(), &Package::new(vec![&SOFT_OFF, &aml::ZERO, &aml::ZERO, &aml::ZERO]));
    table.append_slice(&bytes(&off));
    table.append_slice(&bytes(&Scoped(platform)));
    table.update_checksum();
    table.as_slice().to_vec()
}

/// `\_SB`: devices.
struct Scoped<'a>(&'a Platform<'a>);

impl Aml for Scoped<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        let virtio: Vec<_> = self
            .0
            .devices
            .iter()
            .enumerate()
            .map(|(index, device)| Virtio { index, device: *device })
            .collect();
        let mut children: Vec<&dyn Aml> = vec![&SerialPort, &PowerButton];
        children.extend(virtio.iter().map(|device| device as &dyn Aml));
        Scope::new("\\_SB_".into(), children).to_aml_bytes(sink);
    }
}

struct Virtio {
    index: usize,
    device: Announced,
}

impl Aml for Virtio {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        let window = Memory32Fixed::new(true, self.device.address as u32, layout::MMIO_BYTES as u32);
        let line = Interrupt::new(true, true, false, false, self.device.irq);
        Device::new(
            Path::new(&format!("VR{:02X}", self.index)),
            vec![
                &Name::new("_HID".into(), &"LNRO0005"),
                &Name::new("_UID".into(), &(self.index as u32)),
                &Name::new("_CCA".into(), &aml::ONE),
                &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&window, &line])),
            ],
        )
        .to_aml_bytes(sink);
    }
}

struct SerialPort;

impl Aml for SerialPort {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        let ports = IO::new(layout::SERIAL_PORT, layout::SERIAL_PORT, 0, 8);
        let line = Interrupt::new(true, true, false, false, layout::SERIAL_IRQ);
        Device::new(
            "COM1".into(),
            vec![
                &Name::new("_HID".into(), &EISAName::new("PNP0501")),
                &Name::new("_UID".into(), &aml::ZERO),
                &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ports, &line])),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// A generic event device whose one interrupt presses the button.
struct PowerButton;

impl Aml for PowerButton {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        /// Notification of a pressed button (ACPI 6.5, 5.6.6).
        const PRESSED: u8 = 0x80;
        Device::new("PWRB".into(), vec![&Name::new("_HID".into(), &EISAName::new("PNP0C0C"))])
            .to_aml_bytes(sink);
        let line = Interrupt::new(true, true, false, false, layout::EVENT_IRQ);
        let button = Path::new("PWRB");
        let press = Notify::new(&button, &PRESSED);
        Device::new(
            "GED_".into(),
            vec![
                &Name::new("_HID".into(), &"ACPI0013"),
                &Name::new("_UID".into(), &aml::ZERO),
                &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&line])),
                &Method::new("_EVT".into(), 1, true, vec![&press]),
            ],
        )
        .to_aml_bytes(sink);
    }
}

/// The registers that the FADT names.
pub struct PowerRegisters {
    surroundings: Arc<dyn Surroundings>,
}

impl PowerRegisters {
    /// They tell the surroundings how the guest ends.
    pub fn new(surroundings: Arc<dyn Surroundings>) -> Self {
        Self { surroundings }
    }
}

impl BusDevice for PowerRegisters {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // Nothing is pending, nothing was woken.
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        /// Sleep control register (ACPI 6.5, 4.8.3.7): SLP_EN, and SLP_TYP from bit 2 on.
        const ENABLE: u8 = 1 << 5;
        let port = u16::try_from(offset).ok().and_then(|offset| POWER_PORTS.checked_add(offset));
        let (Some(port), [value]) = (port, data) else { return };
        match port {
            SLEEP_CONTROL if value & ENABLE != 0 && (value >> 2) & 7 == SOFT_OFF => {
                self.surroundings.end(End::PowerOff);
            }
            RESET if *value == RESET_VALUE => self.surroundings.end(End::Reset),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Mutex;

    use torpor_vmm_api::ThreadKind;

    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte))
    }

    fn table_at(area: &[u8], address: u64) -> &[u8] {
        let at = (address - layout::ACPI_TABLES) as usize;
        let length = u32::from_le_bytes(area[at + 4..at + 8].try_into().unwrap()) as usize;
        &area[at..at + length]
    }

    fn address(bytes: &[u8]) -> u64 {
        u64::from_le_bytes(bytes[..8].try_into().unwrap())
    }

    #[test]
    fn every_table_is_reached_from_the_root_and_sums_to_zero() {
        let devices: Vec<_> = (0..layout::MOST_DEVICES)
            .map(|index| Announced { address: layout::mmio_window(index), irq: layout::device_irq(index) })
            .collect();
        let area = tables(&Platform { cpus: layout::MOST_CPUS, devices: &devices });
        assert!((area.len() as u64) < layout::RESET_VECTOR - layout::ACPI_TABLES);
        assert_eq!((&area[..8], sum(&area[..20]), sum(&area[..36])), (&b"RSD PTR "[..], 0, 0));
        let xsdt = table_at(&area, address(&area[24..]));
        assert_eq!((&xsdt[..4], sum(xsdt), xsdt.len()), (&b"XSDT"[..], 0, 36 + 16));
        let fadt = table_at(&area, address(&xsdt[36..]));
        let madt = table_at(&area, address(&xsdt[44..]));
        let dsdt = table_at(&area, address(&fadt[140..]));
        for (table, name) in [(fadt, b"FACP"), (madt, b"APIC"), (dsdt, b"DSDT")] {
            assert_eq!((&table[..4], sum(table)), (&name[..], 0));
        }
        assert_eq!(madt.len(), 44 + 8 * 32 + 12);
        let announced = dsdt.windows(8).filter(|window| window == b"LNRO0005").count();
        assert_eq!(announced, layout::MOST_DEVICES);
    }

    #[derive(Default)]
    struct Ends(Mutex<Vec<End>>);

    impl Surroundings for Ends {
        fn enter_thread(&self, _kind: ThreadKind) -> io::Result<()> {
            Ok(())
        }

        fn end(&self, end: End) {
            self.0.lock().unwrap().push(end);
        }

        fn device_broken(&self, _device: &str, _reason: &str) {}
    }

    #[test]
    fn only_soft_off_and_the_reset_value_end_the_guest() {
        let ends = Arc::new(Ends::default());
        let registers = PowerRegisters::new(ends.clone());
        for value in 0..=255_u8 {
            registers.write(0, &[value]);
            registers.write(1, &[value]);
            registers.write(2, &[value]);
        }
        registers.write(0, &[0x34, 0x34]);
        registers.write(u64::MAX, &[0x34]);
        registers.write(u64::from(u16::MAX), &[0x34]);
        // SLP_EN and type 5; the bits around them are reserved and ignored.
        let seen = ends.0.lock().unwrap().clone();
        let offs = seen.iter().filter(|end| **end == End::PowerOff).count();
        assert_eq!((offs, seen.len() - offs), (16, 1));
    }
}
