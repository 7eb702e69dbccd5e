//! What a kernel is told at its start: boot parameters or PVH start information, and the tables for the first
//! instructions.

use torpor_vmm_devices::Memory;

use super::{Boot, BootError, Initramfs, write};
use crate::{layout, memory};

/// Address range types of the BIOS's memory map (ACPI 6.5, table 15.4).
const RAM: u32 = 1;
const ACPI: u32 = 3;

/// Offsets in the boot parameters.
const ACPI_ROOT: usize = 0x70;
const RAMDISK_HIGH: usize = 0xc0;
const MAP_ENTRIES: usize = 0x1e8;
const HEADER: usize = 0x1f1;
const LOADER_TYPE: usize = 0x210;
const RAMDISK: usize = 0x218;
const RAMDISK_BYTES: usize = 0x21c;
const COMMAND_LINE: usize = 0x228;
const MAP: usize = 0x2d0;
/// A loader without a number of its own.
const UNKNOWN_LOADER: u8 = 0xff;

/// Selectors 8 (64-bit code) and 16 (data), and 24 (task state; never used, but must be there).
const DESCRIPTORS: [u64; 4] = [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff];

/// Address, bytes and type of each piece of memory.
fn map(memory_bytes: u64) -> Vec<(u64, u64, u32)> {
    let mut map = vec![
        (0, layout::CONVENTIONAL_END, RAM),
        (layout::ACPI_TABLES, layout::EXTENDED - layout::ACPI_TABLES, ACPI),
    ];
    for (start, bytes) in memory::ranges(memory_bytes) {
        let begin = start.max(layout::EXTENDED);
        let end = start + bytes;
        if end > begin {
            map.push((begin, end - begin, RAM));
        }
    }
    map
}

pub(super) fn write_boot_params(
    memory: &Memory,
    boot: &Boot<'_>,
    header: &[u8],
    initramfs: Option<Initramfs>,
) -> Result<(), BootError> {
    let mut page = [0_u8; 4096];
    let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
    put(HEADER, header);
    put(LOADER_TYPE, &[UNKNOWN_LOADER]);
    put(ACPI_ROOT, &boot.acpi_root.to_le_bytes());
    put(COMMAND_LINE, &(layout::COMMAND_LINE as u32).to_le_bytes());
    if let Some(initramfs) = initramfs {
        // It lies below 4 GiB, where all low RAM does.
        put(RAMDISK, &(initramfs.address as u32).to_le_bytes());
        put(RAMDISK_BYTES, &(initramfs.bytes as u32).to_le_bytes());
        put(RAMDISK_HIGH, &[0; 8]);
    }
    let map = map(boot.memory_bytes);
    put(MAP_ENTRIES, &[map.len() as u8]);
    for (index, (start, bytes, kind)) in map.into_iter().enumerate() {
        let at = MAP + 20 * index;
        put(at, &start.to_le_bytes());
        put(at + 8, &bytes.to_le_bytes());
        put(at + 16, &kind.to_le_bytes());
    }
    write(memory, "the boot parameters", layout::BOOT_PARAMS, &page)
}

/// Descriptors and page tables for a CPU that begins in 64-bit mode.
pub(super) fn write_long_mode(memory: &Memory) -> Result<(), BootError> {
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    const PAGE: u64 = 0x1000;
    let mut tables = Vec::with_capacity(6 * 512);
    tables.push((layout::PAGE_TABLES + PAGE) | PRESENT_WRITABLE);
    tables.resize(512, 0);
    tables.extend((0..4).map(|index| (layout::PAGE_TABLES + (2 + index) * PAGE) | PRESENT_WRITABLE));
    tables.resize(2 * 512, 0);
    tables.extend((0..4 * 512_u64).map(|index| (index << 21) | PRESENT_WRITABLE | LARGE));
    let bytes = |numbers: &[u64]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
    write(memory, "page tables", layout::PAGE_TABLES, &bytes(&tables))?;
    write(memory, "descriptors", layout::GDT, &bytes(&DESCRIPTORS))
}

/// Xen, include/public/arch-x86/hvm/start_info.h, version 1.
pub(super) fn write_start_info(
    memory: &Memory,
    boot: &Boot<'_>,
    initramfs: Option<Initramfs>,
) -> Result<(), BootError> {
    const MAGIC: u32 = 0x336e_c578;
    const VERSION: u32 = 1;
    const INFO_BYTES: u64 = 56;
    const MODULE_BYTES: u64 = 32;
    let modules = layout::START_INFO + INFO_BYTES;
    let map_at = modules + MODULE_BYTES;
    let map = map(boot.memory_bytes);
    let mut bytes = Vec::with_capacity(256);
    for number in [MAGIC, VERSION, 0, u32::from(initramfs.is_some())] {
        bytes.extend(number.to_le_bytes());
    }
    for number in [modules, layout::COMMAND_LINE, boot.acpi_root, map_at, map.len() as u64] {
        bytes.extend(number.to_le_bytes());
    }
    let module = initramfs.map_or([0; 4], |initramfs| [initramfs.address, initramfs.bytes, 0, 0]);
    bytes.extend(module.into_iter().flat_map(u64::to_le_bytes));
    for (start, length, kind) in map {
        for number in [start, length, u64::from(kind)] {
            bytes.extend(number.to_le_bytes());
        }
    }
    write(memory, "the start information", layout::START_INFO, &bytes)
}
