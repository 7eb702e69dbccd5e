//! Kernel files, good, broken and hostile.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

mod support;

use support::{CODE, MEMORY, elf, file, load};
use torpor_vmm::boot::{self, Boot, BootError, Entry};
use torpor_vmm::layout;
use torpor_vmm::memory::Ram;
use vm_memory::{Bytes as _, GuestAddress};

fn ram() -> Ram {
    Ram::new(MEMORY, torpor_vmm_api::HugePages::Default).unwrap()
}

/// A bzImage with one setup sector, a kernel of 4 KiB that wants to be at 1 MiB, and needs 64 KiB there.
fn bzimage() -> Vec<u8> {
    let mut image = vec![0; 1024 + 4096];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]); // setup sectors
    put(0x1fe, &[0x55, 0xaa]);
    put(0x200, &[0xeb, 0x6a]); // the jump over the header
    put(0x202, b"HdrS");
    put(0x206, &0x20f_u16.to_le_bytes());
    put(0x211, &[1]); // loaded high
    put(0x22c, &0x7fff_ffff_u32.to_le_bytes()); // initramfs limit
    put(0x230, &0x20_0000_u32.to_le_bytes()); // alignment
    put(0x236, &1_u16.to_le_bytes()); // 64-bit entry
    put(0x238, &255_u32.to_le_bytes()); // command line
    put(0x258, &0x10_0000_u64.to_le_bytes());
    put(0x260, &0x1_0000_u32.to_le_bytes());
    put(1024, b"code");
    image
}

fn boot_with(
    ram: &Ram,
    kernel: &[u8],
    initramfs: Option<&[u8]>,
    command_line: &str,
) -> Result<Entry, BootError> {
    let (kernel, initramfs) = (file(kernel), initramfs.map(file));
    let boot = Boot {
        kernel: &kernel,
        initramfs: initramfs.as_ref(),
        command_line,
        memory_bytes: MEMORY,
        acpi_root: layout::ACPI_TABLES,
    };
    boot::load(ram.memory(), &boot)
}

fn number(ram: &Ram, at: u64) -> u32 {
    ram.memory().read_obj(GuestAddress(at)).unwrap()
}

#[test]
fn a_bzimage_is_put_where_it_wants_to_be_and_told_where_all_else_is() {
    let ram = ram();
    let entry = boot_with(&ram, &bzimage(), Some(&[7; 5000]), "quiet").unwrap();
    assert_eq!(entry, Entry::Long { address: 0x10_0200, argument: layout::BOOT_PARAMS });
    assert_eq!(number(&ram, 0x10_0000), u32::from_le_bytes(*b"code"));
    let params = |offset: u64| number(&ram, layout::BOOT_PARAMS + offset);
    assert_eq!(params(0x202), u32::from_le_bytes(*b"HdrS"));
    assert_eq!((params(0x218), params(0x21c)), ((MEMORY as u32 - 5000) & !0xfff, 5000));
    assert_eq!((params(0x228), params(0x70)), (layout::COMMAND_LINE as u32, layout::ACPI_TABLES as u32));
    assert_eq!(params(0x1e8) & 0xff, 3, "three pieces of memory");
    let mut line = [0; 6];
    ram.memory().read_slice(&mut line, GuestAddress(layout::COMMAND_LINE)).unwrap();
    assert_eq!(&line, b"quiet\0");
}

#[test]
fn an_elf_kernel_begins_at_its_pvh_note_or_else_at_its_64_bit_entry() {
    assert_eq!(
        load(&ram(), &elf(b"code", None)).unwrap(),
        Entry::Long { address: CODE, argument: layout::BOOT_PARAMS }
    );
    let ram = ram();
    let entry = load(&ram, &elf(b"code", Some(CODE as u32 + 2))).unwrap();
    assert_eq!(entry, Entry::Protected { address: CODE as u32 + 2, argument: layout::START_INFO as u32 });
    assert_eq!(number(&ram, layout::START_INFO), 0x336e_c578);
    assert_eq!(number(&ram, CODE), u32::from_le_bytes(*b"code"));
}

#[test]
fn what_is_no_kernel_is_refused_with_what_is_wrong_with_it() {
    let changed = |mut bytes: Vec<u8>, at: usize, value: &[u8]| {
        bytes[at..at + value.len()].copy_from_slice(value);
        load(&ram(), &bytes).unwrap_err().to_string()
    };
    let cases = [
        (load(&ram(), b"#!/bin/sh\n").unwrap_err().to_string(), "neither a bzImage nor an ELF"),
        (load(&ram(), b"").unwrap_err().to_string(), "ends before byte 4"),
        (changed(bzimage(), 0x206, &[3, 2]), "boot protocol 2.03"),
        (changed(bzimage(), 0x236, &[0, 0]), "no 64-bit entry"),
        (changed(bzimage(), 0x1f1, &[200]), "its code begins at byte"),
        (changed(bzimage(), 0x258, &[0; 8]), "give it more"),
        (changed(bzimage(), 0x260, &[0xff; 4]), "give it more"),
        (changed(elf(b"code", None), 18, &[3, 0]), "not for x86_64"),
        (changed(elf(b"code", None), 56, &[0xff, 0xff]), "program headers"),
        (changed(elf(b"code", None), 32, &[0xff; 8]), "ends before byte"),
        (changed(elf(b"code", None), 39, &[0x80]), "ends before byte"),
        (changed(elf(b"code", None), 24, &[0xff; 8]), "none of its segments"),
        (changed(elf(b"code", None), 64 + 24, &[0xff; 8]), "give it more"),
        (changed(elf(b"code", None), 64 + 32, &[0xff; 8]), "in the file and only"),
        (changed(elf(b"code", Some(0)), 0x204, &[2, 0, 0, 0]), "PVH note of 2 bytes"),
        (changed(elf(b"code", Some(0)), 0x200, &[0xff; 4]), "longer than its segment"),
        (changed(elf(b"code", Some(0)), 0x210, &[0; 4]), "none of its segments"),
    ];
    for (message, wanted) in cases {
        assert!(message.contains(wanted), "{message:?} should contain {wanted:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers() {
    let too_big = boot_with(&ram(), &bzimage(), Some(&vec![0; MEMORY as usize]), "").unwrap_err();
    assert!(matches!(too_big, BootError::InitramfsTooBig { bytes: MEMORY, .. }), "{too_big}");
    let long = boot_with(&ram(), &bzimage(), None, &"x".repeat(256)).unwrap_err().to_string();
    assert!(long.contains("has 256 bytes; this kernel takes 255"), "{long}");
    let zero = boot_with(&ram(), &bzimage(), None, "a\0b").unwrap_err().to_string();
    assert!(zero.contains("NUL"), "{zero}");
}

/// Numbers that look random and are always the same.
fn numbers() -> impl Iterator<Item = u64> {
    std::iter::successors(Some(0x9e37_79b9_7f4a_7c15_u64), |state| {
        let mut next = *state;
        next ^= next << 13;
        next ^= next >> 7;
        next ^= next << 17;
        Some(next)
    })
}

#[test]
fn no_header_however_broken_does_more_than_be_refused() {
    let ram = ram();
    let mut numbers = numbers();
    let mut next = move || numbers.next().unwrap();
    for original in [bzimage(), elf(b"code", None), elf(b"code", Some(CODE as u32))] {
        for _ in 0..500 {
            let mut bytes = original.clone();
            for _ in 0..=next() % 4 {
                let at = (next() % 0x280) as usize;
                let value = [0, 1, 0x7f, 0x80, 0xff, next() as u8][(next() % 6) as usize];
                let run = (1 + next() % 8) as usize;
                bytes[at..at + run].fill(value);
            }
            bytes.truncate((next() % (2 * bytes.len() as u64)) as usize + 4);
            let _ = load(&ram, &bytes);
        }
    }
}
