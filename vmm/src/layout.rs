//! Where things are in the guest's address spaces (x86).

/// RAM ends here at the latest, below 4 GiB; what doesn't fit goes on at [`HIGH_RAM`].
pub const LOW_RAM_LIMIT: u64 = 0xc000_0000;
/// RAM above the hole.
pub const HIGH_RAM: u64 = 1 << 32;
/// Conventional memory ends here: 1 KiB below 640 KiB, as a PC's firmware leaves it.
pub const CONVENTIONAL_END: u64 = 0x9_fc00;
/// RAM goes on here after the PC's hole.
pub const EXTENDED: u64 = 0x10_0000;

/// Descriptor table for the first instructions.
pub const GDT: u64 = 0x500;
/// PVH start information.
pub const START_INFO: u64 = 0x6000;
/// Linux boot parameters ("zero page").
pub const BOOT_PARAMS: u64 = 0x7000;
/// Six pages of page tables that map the first 4 GiB one to one.
pub const PAGE_TABLES: u64 = 0x9000;
/// Initial stack pointer (grows down).
pub const STACK: u64 = 0x8ff0;
/// The command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Most bytes of command line, with the NUL that ends it.
pub const COMMAND_LINE_BYTES: u64 = 0x1_0000;
/// ACPI tables, up to [`RESET_VECTOR`].
pub const ACPI_TABLES: u64 = 0xe_0000;
/// Where a processor in real mode goes on after a reset, and with it a kernel that resets by the firmware.
pub const RESET_VECTOR: u64 = 0xf_fff0;

/// The first virtio-mmio window.
pub const MMIO: u64 = 0xd000_0000;
/// Bytes of each.
pub const MMIO_BYTES: u64 = 0x1000;
/// I/O APIC.
pub const IO_APIC: u32 = 0xfec0_0000;
/// Local APICs.
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// Three pages that KVM needs on Intel CPUs without "unrestricted guest".
pub const TSS: u64 = 0xfffb_d000;

/// COM1.
pub const SERIAL_PORT: u16 = 0x3f8;
/// COM1's interrupt line.
pub const SERIAL_IRQ: u32 = 4;
/// The first interrupt line of virtio devices.
pub const FIRST_IRQ: u32 = 5;
/// The line of ACPI events (the power button): the I/O APIC's last.
pub const EVENT_IRQ: u32 = 23;
/// Most virtio devices.
pub const MOST_DEVICES: usize = (EVENT_IRQ - FIRST_IRQ) as usize;
/// Most CPUs.
pub const MOST_CPUS: u8 = 32;

/// The window's address of device number `index`.
pub const fn mmio_window(index: usize) -> u64 {
    MMIO + index as u64 * MMIO_BYTES
}

/// The interrupt line of device number `index`.
pub const fn device_irq(index: usize) -> u32 {
    FIRST_IRQ + index as u32
}
