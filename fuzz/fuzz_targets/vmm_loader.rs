//! Kernels and initramfs of any bytes, mostly good ones with a few of them changed: refused, or loaded where a guest has
//! memory.
#![no_main]

use std::fs::File;
use std::io::Write as _;
use std::os::fd::FromRawFd;

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::Bytes;
use torpor_vmm::boot::{self, Boot, Entry};
use torpor_vmm::layout;
use torpor_vmm::memory::Ram;
use vm_memory::{Bytes as _, GuestAddress};

const MIB: u64 = 1 << 20;
const CODE: u32 = 0x10_0000;

fn file(bytes: &[u8]) -> File {
    // SAFETY: the name ends with a zero; the descriptor is nobody else's.
    let mut file = unsafe { File::from_raw_fd(libc::memfd_create(c"kernel".as_ptr(), libc::MFD_CLOEXEC)) };
    file.write_all(bytes).unwrap();
    file
}

/// One setup sector, and a kernel of 4 KiB that wants to be at 1 MiB.
fn bzimage() -> Vec<u8> {
    let mut image = vec![0; 1024 + 4096];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]);
    put(0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]);
    put(0x202, b"HdrS\x0f\x02");
    put(0x211, &[1]);
    put(0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(0x230, &0x20_0000_u32.to_le_bytes());
    put(0x236, &[1, 0, 0xff, 0x07]);
    put(0x258, &MIB.to_le_bytes());
    put(0x260, &0x1_0000_u32.to_le_bytes());
    image
}

/// Two segments of code and, with `pvh`, a note with an entry.
fn elf(pvh: bool) -> Vec<u8> {
    let note = [4u32, 4, 18, u32::from_le_bytes(*b"Xen\0"), CODE].map(u32::to_le_bytes).concat();
    let mut pieces = vec![(1u32, CODE, vec![0x90; 64]), (1, CODE + 0x8000, vec![7; 100])];
    pieces.extend(pvh.then_some((4, 0, note)));
    let mut file = vec![0; 64 + 56 * pieces.len()];
    file[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\x00");
    file[18] = 62;
    file[24..28].copy_from_slice(&CODE.to_le_bytes());
    (file[32], file[54], file[56]) = (64, 56, pieces.len() as u8);
    for (place, (kind, address, bytes)) in pieces.iter().enumerate() {
        let (at, offset, length) = (64 + 56 * place, file.len() as u64, bytes.len() as u64);
        file[at..at + 4].copy_from_slice(&kind.to_le_bytes());
        for (field, value) in
            [(8, offset), (16, u64::from(*address)), (24, u64::from(*address)), (32, length), (40, length)]
        {
            file[at + field..at + field + 8].copy_from_slice(&value.to_le_bytes());
        }
        file.extend(bytes);
    }
    file
}

/// A few changes to a file, and perhaps another length.
fn changed(mut image: Vec<u8>, bytes: &mut Bytes<'_>) -> Vec<u8> {
    while !bytes.is_empty() {
        let at = bytes.number(2) as usize;
        let count = usize::from(bytes.byte() % 16);
        let change = bytes.take(count);
        if count == 0 {
            image.truncate(at.max(1));
        } else if at + change.len() <= image.len() {
            image[at..at + change.len()].copy_from_slice(change);
        }
    }
    image
}

fn number(ram: &Ram, at: u64) -> u64 {
    ram.memory().read_obj(GuestAddress(at)).unwrap()
}

/// Where the initramfs is, as the kernel is told.
fn told_initramfs(ram: &Ram, entry: &Entry) -> (u64, u64) {
    match entry {
        Entry::Long { .. } => {
            let both = number(ram, layout::BOOT_PARAMS + 0x218);
            (both & 0xffff_ffff, both >> 32)
        }
        Entry::Protected { .. } => {
            let module = number(ram, layout::START_INFO + 16);
            (number(ram, module), number(ram, module + 8))
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let (kind, steps, with) = (bytes.byte() % 4, 1 + u64::from(bytes.byte() % 3), bytes.byte());
    let memory_bytes = steps * 2 * MIB;
    let content = match with % 4 {
        0 => None,
        1 => Some(Vec::new()),
        2 => Some(vec![0xa5; 5000]),
        _ => Some(vec![0xa5; usize::from(with) << 14]),
    };
    let kernel = match kind {
        0 => bytes.0.to_vec(),
        1 => changed(bzimage(), &mut bytes),
        _ => changed(elf(kind == 2), &mut bytes),
    };
    let ram = Ram::new(memory_bytes, torpor_vmm_api::HugePages::Default).unwrap();
    let (kernel, initramfs) = (file(&kernel), content.as_deref().map(file));
    let boot = Boot {
        kernel: &kernel,
        initramfs: initramfs.as_ref(),
        command_line: "console=ttyS0",
        memory_bytes,
        acpi_root: layout::ACPI_TABLES,
    };
    let entry = match boot::load(ram.memory(), &boot) {
        Ok(entry) => entry,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let begins = match entry {
        Entry::Long { address, .. } => address,
        Entry::Protected { address, .. } => u64::from(address),
    };
    assert!((MIB..memory_bytes).contains(&begins), "{begins:#x}");
    assert_eq!(number(&ram, layout::COMMAND_LINE), u64::from_le_bytes(*b"console="));
    let (at, length) = told_initramfs(&ram, &entry);
    assert_eq!(length, content.as_ref().map_or(0, |content| content.len() as u64));
    if let Some(content) = content {
        assert!(at >= MIB && at + length <= memory_bytes, "{length} bytes at {at:#x}");
        let mut found = vec![0; content.len()];
        ram.memory().read_slice(&mut found, GuestAddress(at)).unwrap();
        assert!(found == content);
    }
});
