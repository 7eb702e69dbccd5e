//! ELF kernels (vmlinux): by their PVH note, or else by their 64-bit entry. One with the table of its relocations behind it
//! is moved to a random virtual address, which only the 64-bit entry allows.

use std::fs::File;
use std::ops::Range;

use torpor_vmm_devices::Memory;

use super::{BootError, Kernel, Protocol, check_room, read, relocate};

const HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: u16 = 56;
/// More than any kernel has.
const MOST_PROGRAM_HEADERS: u16 = 64;
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const MACHINE_X86_64: u16 = 62;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_NOTE: u32 = 4;
/// More than any kernel has.
const MOST_NOTE_BYTES: u64 = 64 << 10;
/// `XEN_ELFNOTE_PHYS32_ENTRY`.
const NOTE_PVH_ENTRY: u32 = 18;
/// x86's `COMMAND_LINE_SIZE`, without the NUL.
const COMMAND_LINE_LIMIT: u64 = 2047;

#[derive(Clone, Copy, Debug)]
struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    file_bytes: u64,
    memory_bytes: u64,
}

struct Header {
    entry: u64,
    table: u64,
    count: u16,
    /// Behind the last section header.
    sections_end: u64,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut number = [0; N];
    number.copy_from_slice(&bytes[at..at + N]);
    number
}

fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(number(bytes, at))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(number(bytes, at))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(number(bytes, at))
}

fn fault(text: impl Into<String>) -> BootError {
    BootError::Elf(text.into())
}

/// `may_move`: to a random address, if the file says how.
pub(super) fn load(memory: &Memory, file: &File, low_end: u64, may_move: bool) -> Result<Kernel, BootError> {
    let header = header(file)?;
    let (mut end, mut pvh, mut file_end) = (0, None, header.sections_end);
    let mut loaded = Vec::new();
    for index in 0..header.count {
        let segment = segment(file, header.table, index)?;
        file_end = file_end.max(segment.offset.saturating_add(segment.file_bytes));
        match segment.kind {
            SEGMENT_LOAD if segment.memory_bytes > 0 => {
                end = end.max(load_segment(memory, file, &segment, low_end)?);
                loaded.push(segment);
            }
            SEGMENT_NOTE if pvh.is_none() => pvh = pvh_entry(file, &segment)?,
            _ => {}
        }
    }
    let begin = loaded.iter().map(|segment| segment.address).min().unwrap_or_default();
    let moved = may_move && move_it(memory, file, file_end, begin..end)?;
    let pvh = pvh.filter(|_| !moved);
    let entry = pvh.map_or(header.entry, u64::from);
    let inside = |s: &Segment| entry >= s.address && entry - s.address < s.memory_bytes;
    if !loaded.iter().any(inside) {
        return Err(fault(format!("begins at {entry:#x}, which none of its segments holds")));
    }
    let protocol = match pvh {
        Some(entry) => Protocol::Pvh { entry },
        None => Protocol::Linux { entry, header: linux_header(moved) },
    };
    // Below 2 GiB: what a kernel maps early.
    let initramfs_limit = 0x8000_0000;
    Ok(Kernel { protocol, end, initramfs_limit, command_line_limit: COMMAND_LINE_LIMIT })
}

/// Moves the kernel to a random virtual address. False when what is behind the file's parts doesn't say how.
fn move_it(memory: &Memory, file: &File, file_end: u64, kernel: Range<u64>) -> Result<bool, BootError> {
    let Some(relocations) = relocate::read(file, file_end.saturating_add(3) & !3)? else { return Ok(false) };
    relocations.apply(memory, kernel.start, kernel.end, relocate::distance(kernel.end)?)?;
    Ok(true)
}

fn header(file: &File) -> Result<Header, BootError> {
    let mut bytes = [0; HEADER_BYTES];
    read::exact(file, "kernel", 0, &mut bytes)?;
    let (class, order, machine) = (bytes[4], bytes[5], half(&bytes, 18));
    if (class, order, machine) != (CLASS_64, LITTLE_ENDIAN, MACHINE_X86_64) {
        return Err(fault(format!(
            "is not for x86_64 (class {class}, byte order {order}, machine {machine})"
        )));
    }
    let (entry, table) = (long(&bytes, 24), long(&bytes, 32));
    let (size, count) = (half(&bytes, 54), half(&bytes, 56));
    if size != PROGRAM_HEADER_BYTES || count == 0 || count > MOST_PROGRAM_HEADERS {
        return Err(fault(format!("has {count} program headers of {size} bytes")));
    }
    let (sections, section_bytes, sections_count) = (long(&bytes, 40), half(&bytes, 58), half(&bytes, 60));
    let sections_end = sections.saturating_add(u64::from(section_bytes) * u64::from(sections_count));
    Ok(Header { entry, table, count, sections_end })
}

fn segment(file: &File, table: u64, index: u16) -> Result<Segment, BootError> {
    let mut bytes = [0; PROGRAM_HEADER_BYTES as usize];
    let at = table
        .checked_add(u64::from(index) * u64::from(PROGRAM_HEADER_BYTES))
        .ok_or_else(|| fault(format!("has its program headers at {table:#x}")))?;
    read::exact(file, "kernel", at, &mut bytes)?;
    Ok(Segment {
        kind: word(&bytes, 0),
        offset: long(&bytes, 8),
        address: long(&bytes, 24),
        file_bytes: long(&bytes, 32),
        memory_bytes: long(&bytes, 40),
    })
}

fn load_segment(memory: &Memory, file: &File, segment: &Segment, low_end: u64) -> Result<u64, BootError> {
    let Segment { offset, address, file_bytes, memory_bytes, .. } = *segment;
    if file_bytes > memory_bytes {
        return Err(fault(format!(
            "has a segment of {file_bytes} bytes in the file and only {memory_bytes} in memory"
        )));
    }
    let end = check_room("the kernel", address, memory_bytes, low_end)?;
    // The rest is zero, as new memory is.
    read::into_guest(file, "kernel", offset, memory, address, file_bytes)?;
    Ok(end)
}

/// The 32-bit entry from a PVH note.
fn pvh_entry(file: &File, segment: &Segment) -> Result<Option<u32>, BootError> {
    if segment.file_bytes > MOST_NOTE_BYTES {
        return Err(fault(format!("has a note segment of {} bytes", segment.file_bytes)));
    }
    let mut bytes = vec![0; segment.file_bytes as usize];
    read::exact(file, "kernel", segment.offset, &mut bytes)?;
    let mut rest = &bytes[..];
    while rest.len() >= 12 {
        let (name_bytes, value_bytes, kind) = (word(rest, 0) as usize, word(rest, 4) as usize, word(rest, 8));
        let name_end = name_bytes.next_multiple_of(4).saturating_add(12);
        let value_end = name_end.saturating_add(value_bytes.next_multiple_of(4));
        let (Some(name), Some(value)) = (
            rest.get(12..name_bytes.saturating_add(12)),
            rest.get(name_end..name_end.saturating_add(value_bytes)),
        ) else {
            return Err(fault("has a note that is longer than its segment"));
        };
        if kind == NOTE_PVH_ENTRY && name == b"Xen\0" {
            return match value.len() {
                4.. => Ok(Some(word(value, 0))),
                length => Err(fault(format!("has a PVH note of {length} bytes"))),
            };
        }
        rest = rest.get(value_end..).unwrap_or_default();
    }
    Ok(None)
}

/// The setup header for a kernel that has none: what the boot protocol wants a loader to fill in. `moved`: addresses are
/// random, and the kernel shall choose its other ones at random too.
fn linux_header(moved: bool) -> Vec<u8> {
    /// loadflags: loaded at 1 MiB or above; `KASLR_FLAG`.
    const LOADED_HIGH: u8 = 1;
    const RANDOM_ADDRESSES: u8 = 2;
    use linux_loader::loader::bootparam::setup_header;
    use vm_memory::ByteValued as _;
    let header = setup_header {
        boot_flag: 0xaa55,
        header: 0x5372_6448,
        version: 0x20f,
        loadflags: if moved { LOADED_HIGH | RANDOM_ADDRESSES } else { LOADED_HIGH },
        kernel_alignment: 0x100_0000,
        cmdline_size: COMMAND_LINE_LIMIT as u32,
        ..setup_header::default()
    };
    header.as_slice().to_vec()
}
