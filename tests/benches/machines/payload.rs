//! The smallest guest: an ELF file with a PVH note (Xen's docs/misc/pvh: type 18, the 32-bit physical entry) that writes one byte to
//! the first serial port and stops.

const LOADED_AT: u64 = 0x10_0000;
const HEADERS: u64 = 64 + 2 * 56;
const NOTE_BYTES: u64 = 12 + 4 + 8;

/// mov dx, 0x3f8; mov al, 'P'; out dx, al; mov al, '\n'; out dx, al; cli; hlt; jmp to hlt (32-bit code).
const CODE: [u8; 15] =
    [0x66, 0xba, 0xf8, 0x03, 0xb0, b'P', 0xee, 0xb0, b'\n', 0xee, 0xfa, 0xf4, 0xeb, 0xfd, 0x90];

fn program_header(kind: u32, flags: u32, offset: u64, address: u64, bytes: u64) -> Vec<u8> {
    let mut header = Vec::new();
    header.extend(kind.to_le_bytes());
    header.extend(flags.to_le_bytes());
    for word in [offset, address, address, bytes, bytes, 4] {
        header.extend(word.to_le_bytes());
    }
    header
}

/// The file.
pub(crate) fn elf() -> Vec<u8> {
    let code_at = HEADERS + NOTE_BYTES;
    let entry = LOADED_AT + code_at;
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    file.extend(2_u16.to_le_bytes());
    file.extend(62_u16.to_le_bytes());
    file.extend(1_u32.to_le_bytes());
    file.extend(entry.to_le_bytes());
    file.extend(64_u64.to_le_bytes());
    file.extend(0_u64.to_le_bytes());
    file.extend(0_u32.to_le_bytes());
    for half in [64_u16, 56, 2, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    file.extend(program_header(1, 7, 0, LOADED_AT, code_at + CODE.len() as u64));
    file.extend(program_header(4, 4, HEADERS, LOADED_AT + HEADERS, NOTE_BYTES));
    for word in [4_u32, 8, 18] {
        file.extend(word.to_le_bytes());
    }
    file.extend(b"Xen\0");
    file.extend(entry.to_le_bytes());
    file.extend(CODE);
    file
}
