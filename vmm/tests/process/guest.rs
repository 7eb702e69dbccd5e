//! A guest that does what a list says, step by step: an ELF kernel of a few instructions, which also a KVM runs that can't run
//! Linux.

use std::slice;

core::arch::global_asm!(
    ".pushsection .rodata.torpor_test_guest, \"a\", @progbits",
    ".balign 16",
    ".code32",
    "torpor_guest_begin:",
    "  mov esi, 0x110000",
    // The next step: its kind and three numbers.
    "2:",
    "  mov eax, [esi]",
    "  mov edx, [esi + 4]",
    "  mov ebx, [esi + 8]",
    "  mov ecx, [esi + 12]",
    "  add esi, 16",
    "  cmp eax, 1",
    "  je 11f",
    "  cmp eax, 2",
    "  je 12f",
    "  cmp eax, 3",
    "  je 13f",
    "  cmp eax, 4",
    "  je 14f",
    "  cmp eax, 5",
    "  je 15f",
    "  cmp eax, 6",
    "  je 16f",
    "  cli",
    "9:",
    "  hlt",
    "  jmp 9b",
    // Write a byte to a port.
    "11:",
    "  mov eax, ebx",
    "  out dx, al",
    "  jmp 2b",
    // Write four bytes to an address.
    "12:",
    "  mov [edx], ebx",
    "  jmp 2b",
    // Wait until the bits of a mask, at an address, are some value.
    "13:",
    "  mov eax, [edx]",
    "  and eax, ecx",
    "  cmp eax, ebx",
    "  je 2b",
    "  pause",
    "  jmp 13b",
    // Read a byte from a port.
    "14:",
    "  in al, dx",
    "  jmp 2b",
    // Go to a step.
    "15:",
    "  mov esi, edx",
    "  jmp 2b",
    // A triple fault: no interrupt table.
    "16:",
    "  mov esp, 0x90000",
    "  push 0",
    "  push 0",
    "  lidt [esp]",
    "  ud2",
    "  jmp 16b",
    "torpor_guest_end:",
    ".code64",
    ".popsection",
);

unsafe extern "C" {
    static torpor_guest_begin: u8;
    static torpor_guest_end: u8;
}

const CODE: u32 = 0x10_0000;
const STEPS: u32 = 0x11_0000;
const SERIAL: u32 = 0x3f8;

/// One step.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// A byte to a port.
    Out(u32, u8),
    /// Four bytes to an address.
    Write(u32, u32),
    /// Until the bits of a mask in the four bytes at an address are a value.
    WaitBits(u32, u32, u32),
    /// A byte from a port.
    In(u32),
    /// Again from step number so-and-so.
    GoTo(u32),
    /// A triple fault.
    Fault,
}

impl Step {
    fn numbers(self) -> [u32; 4] {
        match self {
            Self::Out(port, value) => [1, port, value.into(), 0],
            Self::Write(address, value) => [2, address, value, 0],
            Self::WaitBits(address, value, mask) => [3, address, value, mask],
            Self::In(port) => [4, port, 0, 0],
            Self::GoTo(step) => [5, STEPS + 16 * step, 0, 0],
            Self::Fault => [6, 0, 0, 0],
        }
    }
}

/// What the guest writes to its console.
pub fn say(text: &str) -> Vec<Step> {
    text.bytes().map(|byte| Step::Out(SERIAL, byte)).collect()
}

/// The ways to end.
pub const POWER_OFF: Step = Step::Out(0x600, 1 << 5 | 5 << 2);
pub const ACPI_RESET: Step = Step::Out(0x602, 1);
pub const KEYBOARD_RESET: Step = Step::Out(0x64, 0xfe);
pub const PANIC: Step = Step::Out(0x505, 1);

/// An ELF file with the interpreter, the steps (after the last one the guest halts for good) and pieces of memory.
pub fn kernel(steps: &[Step], memory: &[(u32, Vec<u8>)]) -> Vec<u8> {
    // SAFETY: both labels are in the one section above, which is part of the program and never written to.
    let code = unsafe {
        let begin = &raw const torpor_guest_begin;
        slice::from_raw_parts(begin, (&raw const torpor_guest_end).offset_from_unsigned(begin))
    };
    let steps =
        steps.iter().flat_map(|step| step.numbers()).chain([0; 4]).flat_map(u32::to_le_bytes).collect();
    let note = [4u32, 4, 18, u32::from_le_bytes(*b"Xen\0"), CODE].map(u32::to_le_bytes).concat();
    let mut pieces = vec![(4u32, 0, note), (1, CODE, code.to_vec()), (1, STEPS, steps)];
    pieces.extend(memory.iter().map(|(address, bytes)| (1, *address, bytes.clone())));
    elf(&pieces)
}

/// Program headers and their content: kind, address, bytes.
fn elf(pieces: &[(u32, u32, Vec<u8>)]) -> Vec<u8> {
    let mut file = vec![0; 64 + 56 * pieces.len()];
    file[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\x00");
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(16, &2u16.to_le_bytes());
    put(18, &62u16.to_le_bytes());
    put(20, &1u32.to_le_bytes());
    put(24, &u64::from(CODE).to_le_bytes());
    put(32, &64u64.to_le_bytes());
    put(54, &56u16.to_le_bytes());
    put(56, &(pieces.len() as u16).to_le_bytes());
    let mut offset = 64 + 56 * pieces.len();
    for (place, (kind, address, bytes)) in pieces.iter().enumerate() {
        let at = 64 + 56 * place;
        let (length, address) = (bytes.len() as u64, u64::from(*address));
        put(at, &kind.to_le_bytes());
        for (field, value) in [(8, offset as u64), (16, address), (24, address), (32, length), (40, length)] {
            put(at + field, &value.to_le_bytes());
        }
        offset += bytes.len();
    }
    file.extend(pieces.iter().flat_map(|(_, _, bytes)| bytes.iter().copied()));
    file
}
