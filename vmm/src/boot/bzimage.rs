//! bzImage: a setup header and a kernel that unpacks itself.

use std::fs::File;

use linux_loader::loader::bootparam::setup_header;
use torpor_vmm_devices::Memory;
use vm_memory::ByteValued as _;

use super::{BootError, Kernel, Protocol, check_room, read};

/// The header's offset in the file and in the boot parameters.
const HEADER: u64 = 0x1f1;
/// "HdrS".
const MAGIC: u32 = 0x5372_6448;
/// 2.12: the first protocol that tells about the 64-bit entry.
const OLDEST: u16 = 0x20c;
const BOOT_FLAG: u16 = 0xaa55;
/// xloadflags: has the 64-bit entry at 0x200.
const XLF_KERNEL_64: u16 = 1;
/// loadflags: the protected-mode code is loaded at 1 MiB.
const LOADED_HIGH: u8 = 1;
/// Where the 64-bit entry is, from the protected-mode code's start.
const ENTRY_64: u64 = 0x200;
/// Where the jump over the header is: its second byte tells the header's end, counted from 0x202.
const JUMP_TARGET: u64 = 0x201;

/// Whether the file has a setup header.
pub(super) fn is_one(file: &File) -> Result<bool, BootError> {
    if read::size(file, "kernel")? < HEADER + size_of::<setup_header>() as u64 {
        return Ok(false);
    }
    let mut magic = [0; 4];
    read::exact(file, "kernel", 0x202, &mut magic)?;
    Ok(u32::from_le_bytes(magic) == MAGIC)
}

pub(super) fn load(memory: &Memory, file: &File, low_end: u64) -> Result<Kernel, BootError> {
    let header = read_header(file)?;
    check(&header)?;
    // 0 means 4, for kernels older than all that we take; a rule of the protocol all the same.
    let sectors = if header.setup_sects == 0 { 4 } else { u64::from(header.setup_sects) };
    let code = (sectors + 1) * 512;
    let size = read::size(file, "kernel")?;
    let payload = size
        .checked_sub(code)
        .filter(|payload| *payload > ENTRY_64)
        .ok_or_else(|| BootError::BzImage(format!("has {size} bytes, and its code begins at byte {code}")))?;
    let needed = payload.max(u64::from(header.init_size));
    let start = place(&header)?;
    let end = check_room("the kernel", start, needed, low_end)?;
    read::into_guest(file, "kernel", code, memory, start, payload)?;
    Ok(Kernel {
        protocol: Protocol::Linux { entry: start + ENTRY_64, header: header_bytes(file, header)? },
        end,
        initramfs_limit: u64::from(header.initrd_addr_max) + 1,
        command_line_limit: u64::from(header.cmdline_size),
    })
}

fn read_header(file: &File) -> Result<setup_header, BootError> {
    let mut header = setup_header::default();
    read::exact(file, "kernel", HEADER, header.as_mut_slice())?;
    Ok(header)
}

fn check(header: &setup_header) -> Result<(), BootError> {
    let (flag, version, flags) = (header.boot_flag, header.version, header.xloadflags);
    let fault = if flag != BOOT_FLAG {
        format!("has the boot flag {flag:#x} instead of {BOOT_FLAG:#x}")
    } else if version < OLDEST {
        format!("speaks boot protocol {}.{:02}; 2.12 or newer is needed", version >> 8, version & 0xff)
    } else if header.loadflags & LOADED_HIGH == 0 {
        "is a zImage: too old".to_owned()
    } else if flags & XLF_KERNEL_64 == 0 {
        "has no 64-bit entry".to_owned()
    } else {
        return Ok(());
    };
    Err(BootError::BzImage(fault))
}

/// Where the protected-mode code goes: where it wants to be, for then it needn't move.
fn place(header: &setup_header) -> Result<u64, BootError> {
    let (wanted, alignment) = (header.pref_address, u64::from(header.kernel_alignment));
    if header.relocatable_kernel != 0 && !(alignment.is_power_of_two() && wanted.is_multiple_of(alignment)) {
        return Err(BootError::BzImage(format!(
            "wants to be at {wanted:#x}, which isn't a multiple of its alignment {alignment:#x}"
        )));
    }
    Ok(wanted)
}

/// The header as far as the file's own goes, for the boot parameters.
fn header_bytes(file: &File, mut header: setup_header) -> Result<Vec<u8>, BootError> {
    let mut target = [0];
    read::exact(file, "kernel", JUMP_TARGET, &mut target)?;
    let length = (0x202 + u64::from(target[0]) - HEADER) as usize;
    let bytes = header.as_mut_slice();
    Ok(bytes[..length.min(bytes.len())].to_vec())
}
