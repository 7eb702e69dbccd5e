//! Small guests for tests: scripts as machine code, kernels as files.
#![allow(dead_code, reason = "each test program uses a part")]

use std::fs::File;
use std::io::{self, Write as _};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use torpor_vmm::boot::{self, Boot, Entry};
use torpor_vmm::hypervisor::kvm::Kvm;
use torpor_vmm::hypervisor::sim::Step;
use torpor_vmm::memory::Ram;
use torpor_vmm_api::{End, ThreadKind};
use torpor_vmm_devices::host::Surroundings;

/// Where the code of test kernels is.
pub const CODE: u64 = 0x10_0000;
/// On this port a guest tells what it has read.
pub const LOG_PORT: u16 = 0xf4;
pub const MEMORY: u64 = 4 << 20;

/// Whether a need that `REQUIRE` names is missing: then the test must not be skipped.
pub fn skip(test: &str, need: &str, reason: &str) {
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|word| word == need), "{test} must not be skipped: {reason}");
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: {reason}\n"));
}

/// A KVM that runs bare guests, or none after a word about it.
pub fn kvm(test: &str) -> Option<Kvm> {
    match Kvm::open() {
        Ok(kvm) => Some(kvm),
        Err(error) => {
            skip(test, "kvm", &error.to_string());
            None
        }
    }
}

fn immediate(data: &[u8]) -> u32 {
    let mut bytes = [0; 4];
    bytes[..data.len()].copy_from_slice(data);
    u32::from_le_bytes(bytes)
}

/// A script as 64-bit code.
pub fn assemble(script: &[Step]) -> Vec<u8> {
    let mut code = Vec::new();
    for step in script {
        match step {
            Step::PortWrite(port, data) => out(&mut code, *port, immediate(data), data.len()),
            Step::PortRead(port, size) => {
                code.extend([0xba]); // mov edx, port
                code.extend(u32::from(*port).to_le_bytes());
                code.extend([0x31, 0xc0]); // xor eax, eax
                match size {
                    1 => code.extend([0xec]),       // in al, dx
                    2 => code.extend([0x66, 0xed]), // in ax, dx
                    _ => code.extend([0xed]),       // in eax, dx
                }
                tell(&mut code, *size);
            }
            Step::MmioWrite(address, data) | Step::Store(address, data) => {
                store(&mut code, *address, immediate(data))
            }
            Step::MmioRead(address, size) => {
                point(&mut code, *address);
                code.extend([0x8b, 0x03]); // mov eax, [rbx]
                tell(&mut code, *size);
            }
            Step::AwaitIrq(line) => await_irq(&mut code, *line),
            Step::Halt => code.extend([0xf4, 0xeb, 0xfd]), // hlt; jmp back
            // An interrupt table without entries; an invalid instruction.
            Step::Shutdown => {
                code.extend([0x31, 0xc0, 0x50, 0x50, 0x0f, 0x01, 0x1c, 0x24]); // xor eax, eax; push; push; lidt [rsp]
                code.extend([0x0f, 0x0b]); // ud2
            }
            Step::Crash(_) => unreachable!("no guest can be sure of that"),
        }
    }
    code.extend([0xf4, 0xeb, 0xfd]);
    code
}

fn out(code: &mut Vec<u8>, port: u16, value: u32, size: usize) {
    code.extend([0xb8]); // mov eax, value
    code.extend(value.to_le_bytes());
    out_register(code, port, size);
}

fn out_register(code: &mut Vec<u8>, port: u16, size: usize) {
    code.extend([0xba]); // mov edx, port
    code.extend(u32::from(port).to_le_bytes());
    match size {
        1 => code.extend([0xee]),
        2 => code.extend([0x66, 0xef]),
        _ => code.extend([0xef]),
    }
}

fn tell(code: &mut Vec<u8>, size: usize) {
    out_register(code, LOG_PORT, size);
}

fn point(code: &mut Vec<u8>, address: u64) {
    code.extend([0x48, 0xbb]); // mov rbx, address
    code.extend(address.to_le_bytes());
}

fn store(code: &mut Vec<u8>, address: u64, value: u32) {
    point(code, address);
    code.extend([0xc7, 0x03]); // mov dword [rbx], value
    code.extend(value.to_le_bytes());
}

/// Lets the line set a bit in the local APIC's request register, and waits for the bit: no handler is needed.
fn await_irq(code: &mut Vec<u8>, line: u32) {
    const VECTOR: u32 = 0x40;
    let (select, window) = (0xfec0_0000, 0xfec0_0010);
    store(code, 0xfee0_00f0, 0x1ff); // local APIC on
    store(code, select, 0x11 + 2 * line);
    store(code, window, 0);
    store(code, select, 0x10 + 2 * line);
    store(code, window, VECTOR);
    // "Ready": the test may raise the line from now on.
    out(code, LOG_PORT, 0xff, 1);
    point(code, 0xfee0_0200 + 0x10 * u64::from(VECTOR / 32));
    code.extend([0x8b, 0x03, 0xa8, 0x01, 0x74, 0xfa]); // mov eax, [rbx]; test al, 1; jz back
}

/// A temporary file with these bytes.
pub fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// An ELF kernel: one segment at [`CODE`], and a PVH note if it has such an entry.
pub fn elf(code: &[u8], pvh: Option<u32>) -> Vec<u8> {
    let count: u16 = if pvh.is_some() { 2 } else { 1 };
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
    elf.resize(16, 0);
    elf.extend(2_u16.to_le_bytes());
    elf.extend(62_u16.to_le_bytes());
    elf.extend(1_u32.to_le_bytes());
    for number in [CODE, 64, 0] {
        elf.extend(number.to_le_bytes());
    }
    elf.extend(0_u32.to_le_bytes());
    for number in [64_u16, 56, count, 0, 0, 0] {
        elf.extend(number.to_le_bytes());
    }
    assert_eq!(elf.len(), 64);
    let mut note = Vec::new();
    if let Some(entry) = pvh {
        for number in [4_u32, 4, 18] {
            note.extend(number.to_le_bytes());
        }
        note.extend(b"Xen\0");
        note.extend(entry.to_le_bytes());
    }
    let (note_at, code_at) = (0x200_u64, 0x300_u64);
    header(&mut elf, 1, code_at, code.len() as u64);
    if pvh.is_some() {
        header(&mut elf, 4, note_at, note.len() as u64);
    }
    elf.resize(note_at as usize, 0);
    elf.extend(note);
    elf.resize(code_at as usize, 0);
    elf.extend(code);
    elf
}

fn header(elf: &mut Vec<u8>, kind: u32, offset: u64, bytes: u64) {
    elf.extend(kind.to_le_bytes());
    elf.extend(5_u32.to_le_bytes());
    for number in [offset, CODE, CODE, bytes, bytes, 0x1000] {
        elf.extend(number.to_le_bytes());
    }
}

/// Loads a kernel that is these bytes.
pub fn load(ram: &Ram, kernel: &[u8]) -> Result<Entry, boot::BootError> {
    boot::load(
        ram.memory(),
        &Boot {
            kernel: &file(kernel),
            initramfs: None,
            command_line: "",
            memory_bytes: MEMORY,
            acpi_root: torpor_vmm::layout::ACPI_TABLES,
        },
    )
}

/// Surroundings that remember the end.
#[derive(Default)]
pub struct Around {
    ends: Mutex<Vec<End>>,
    ended: Condvar,
}

impl Around {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Waits for the guest's end.
    pub fn end(&self) -> End {
        let ends = self.ends.lock().unwrap();
        let limit = Duration::from_secs(60);
        let (ends, waited) = self.ended.wait_timeout_while(ends, limit, |ends| ends.is_empty()).unwrap();
        assert!(!waited.timed_out(), "the guest never ended");
        ends[0].clone()
    }

    pub fn ended(&self) -> bool {
        !self.ends.lock().unwrap().is_empty()
    }
}

impl Surroundings for Around {
    fn enter_thread(&self, _kind: ThreadKind) -> io::Result<()> {
        Ok(())
    }

    fn end(&self, end: End) {
        self.ends.lock().unwrap().push(end);
        self.ended.notify_all();
    }

    fn device_broken(&self, _device: &str, _reason: &str) {}
}

/// An archive for the kernel to unpack (cpio, "newc").
pub fn initramfs(files: &[(&str, u32, &[u8])]) -> Vec<u8> {
    let mut archive = Vec::new();
    let entry = |archive: &mut Vec<u8>, name: &str, mode: u32, data: &[u8]| {
        let fields = [0, mode, 0, 0, 1, 0, data.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        archive.extend(b"070701");
        fields.iter().for_each(|field| archive.extend(format!("{field:08x}").bytes()));
        archive.extend(name.bytes());
        archive.push(0);
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(data);
        archive.resize(archive.len().next_multiple_of(4), 0);
    };
    for (name, mode, data) in files {
        entry(&mut archive, name, *mode, data);
    }
    entry(&mut archive, "TRAILER!!!", 0, &[]);
    archive
}

/// The ELF kernel in a bzImage whose payload is LZ4 in its legacy frame, as Debian's is.
pub fn unpack(bzimage: &[u8]) -> Vec<u8> {
    let number = |at: usize| u32::from_le_bytes(bzimage[at..at + 4].try_into().unwrap()) as usize;
    let code = (usize::from(bzimage[0x1f1]) + 1) * 512;
    let (offset, length) = (number(0x248), number(0x24c));
    let payload = &bzimage[code + offset..code + offset + length];
    assert_eq!(payload[..4], 0x184c_2102_u32.to_le_bytes(), "the payload isn't LZ4");
    // The last four bytes tell the size.
    let (mut rest, mut unpacked) = (&payload[4..payload.len() - 4], Vec::new());
    while let Some((size, more)) = rest.split_first_chunk::<4>() {
        let size = u32::from_le_bytes(*size) as usize;
        unpack_block(&more[..size], &mut unpacked);
        rest = &more[size..];
    }
    unpacked
}

fn unpack_block(mut block: &[u8], unpacked: &mut Vec<u8>) {
    fn take(block: &mut &[u8]) -> usize {
        let byte = block[0];
        *block = &block[1..];
        byte.into()
    }
    fn length(block: &mut &[u8], nibble: usize) -> usize {
        let mut length = nibble;
        let mut more = nibble == 15;
        while more {
            let byte = take(block);
            length += byte;
            more = byte == 255;
        }
        length
    }
    while !block.is_empty() {
        let token = take(&mut block);
        let literals = length(&mut block, token >> 4);
        unpacked.extend(&block[..literals]);
        block = &block[literals..];
        if block.is_empty() {
            return;
        }
        let distance = take(&mut block) | (take(&mut block) << 8);
        let matched = length(&mut block, token & 15) + 4;
        let from = unpacked.len() - distance;
        // What is copied may not be there yet: then it repeats itself.
        let mut left = matched;
        while left > 0 {
            let count = left.min(unpacked.len() - from);
            unpacked.extend_from_within(from..from + count);
            left -= count;
        }
    }
}
