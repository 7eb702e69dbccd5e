//! Puts a kernel, an initramfs and what the kernel is told into guest memory.
//!
//! Sources: Linux Documentation/arch/x86/boot.rst (bzImage, boot parameters), Xen docs/misc/pvh.pandoc (PVH), ELF-64.

mod bzimage;
mod elf;
mod params;
mod read;
mod relocate;

use std::fs::File;

use torpor_vmm_devices::Memory;
use vm_memory::{Bytes as _, GuestAddress};

use crate::layout;

pub use read::ReadError;

/// How the first CPU begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// In 64-bit mode, memory mapped one to one, with a number in RSI (Linux: the boot parameters' address).
    Long {
        /// Physical address of the first instruction.
        address: u64,
        /// RSI.
        argument: u64,
    },
    /// In 32-bit mode without paging, with a number in EBX (PVH: the start information's address).
    Protected {
        /// Physical address of the first instruction.
        address: u32,
        /// EBX.
        argument: u32,
    },
}

/// What to boot.
#[derive(Debug)]
pub struct Boot<'a> {
    /// bzImage or ELF.
    pub kernel: &'a File,
    /// The initramfs.
    pub initramfs: Option<&'a File>,
    /// The command line, without a NUL.
    pub command_line: &'a str,
    /// Guest memory, bytes.
    pub memory_bytes: u64,
    /// Where the ACPI root pointer is.
    pub acpi_root: u64,
}

/// A kernel can't be booted.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// It isn't one.
    #[error("the kernel is neither a bzImage nor an ELF file: it begins with {0:02x?}")]
    NoKernel([u8; 4]),
    /// A bzImage that is broken or can't be used.
    #[error("the kernel (a bzImage) {0}")]
    BzImage(String),
    /// An ELF file that is broken or can't be used.
    #[error("the kernel (an ELF file) {0}")]
    Elf(String),
    /// Too little memory.
    #[error(
        "{what} needs memory from {start:#x} to {end:#x}, and the guest's ends at {limit:#x}; give it more"
    )]
    TooBig {
        /// Kernel or initramfs.
        what: &'static str,
        /// First byte.
        start: u64,
        /// Behind the last byte.
        end: u64,
        /// What there is.
        limit: u64,
    },
    /// The initramfs has no room.
    #[error(
        "an initramfs of {bytes} bytes doesn't fit between the kernel's end at {floor:#x} and {ceiling:#x}; give the guest more memory"
    )]
    InitramfsTooBig {
        /// Its size.
        bytes: u64,
        /// Where the kernel ends.
        floor: u64,
        /// Where it must end.
        ceiling: u64,
    },
    /// The command line.
    #[error("the command line {0}")]
    CommandLine(String),
    /// No random number for where the kernel is to be.
    #[error("get a random number for the kernel's address: {0}")]
    Random(std::io::Error),
    /// A file can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A write to guest memory.
    #[error("write {what} to guest memory: {source}")]
    Write {
        /// What.
        what: &'static str,
        /// The cause.
        source: vm_memory::GuestMemoryError,
    },
}

/// What a loader found.
#[derive(Debug)]
struct Kernel {
    protocol: Protocol,
    /// Behind the last byte that it uses until it manages memory itself.
    end: u64,
    /// The initramfs may not reach beyond.
    initramfs_limit: u64,
    /// Most bytes of command line, without the NUL.
    command_line_limit: u64,
}

#[derive(Debug)]
enum Protocol {
    /// 64-bit entry, boot parameters with this setup header (as raw bytes from offset 0x1f1).
    Linux { entry: u64, header: Vec<u8> },
    /// PVH entry.
    Pvh { entry: u32 },
}

/// Where the initramfs is.
#[derive(Clone, Copy, Debug)]
struct Initramfs {
    address: u64,
    bytes: u64,
}

/// Loads all into memory, and says how to begin.
///
/// # Errors
/// [`BootError`]: every field of the files is checked before it is used.
pub fn load(memory: &Memory, boot: &Boot<'_>) -> Result<Entry, BootError> {
    let mut magic = [0; 4];
    read::exact(boot.kernel, "kernel", 0, &mut magic)?;
    let low_end = boot.memory_bytes.min(layout::LOW_RAM_LIMIT);
    let kernel = if magic == *b"\x7fELF" {
        elf::load(memory, boot.kernel, low_end, may_move(boot.command_line))?
    } else if bzimage::is_one(boot.kernel)? {
        bzimage::load(memory, boot.kernel, low_end)?
    } else {
        return Err(BootError::NoKernel(magic));
    };
    let initramfs = match boot.initramfs {
        Some(file) => Some(place_initramfs(memory, file, &kernel, low_end)?),
        None => None,
    };
    write_command_line(memory, boot.command_line, kernel.command_line_limit)?;
    match &kernel.protocol {
        Protocol::Linux { entry, header } => {
            params::write_boot_params(memory, boot, header, initramfs)?;
            params::write_long_mode(memory)?;
            Ok(Entry::Long { address: *entry, argument: layout::BOOT_PARAMS })
        }
        Protocol::Pvh { entry } => {
            params::write_start_info(memory, boot, initramfs)?;
            Ok(Entry::Protected { address: *entry, argument: layout::START_INFO as u32 })
        }
    }
}

/// Whether the kernel may be put at a random address: unless its command line has the kernel's own word against it.
fn may_move(command_line: &str) -> bool {
    command_line.split_ascii_whitespace().all(|word| word != "nokaslr")
}

/// As high as it may be, so that the kernel has room to unpack itself.
fn place_initramfs(
    memory: &Memory,
    file: &File,
    kernel: &Kernel,
    low_end: u64,
) -> Result<Initramfs, BootError> {
    const PAGE: u64 = 4096;
    let bytes = read::size(file, "initramfs")?;
    let ceiling = low_end.min(kernel.initramfs_limit);
    let floor = kernel.end;
    let address = ceiling
        .checked_sub(bytes)
        .map(|address| address / PAGE * PAGE)
        .filter(|address| *address >= floor.next_multiple_of(PAGE))
        .ok_or(BootError::InitramfsTooBig { bytes, floor, ceiling })?;
    read::into_guest(file, "initramfs", 0, memory, address, bytes)?;
    Ok(Initramfs { address, bytes })
}

fn write_command_line(memory: &Memory, line: &str, limit: u64) -> Result<(), BootError> {
    let limit = limit.min(layout::COMMAND_LINE_BYTES - 1);
    if line.len() as u64 > limit {
        let length = line.len();
        return Err(BootError::CommandLine(format!("has {length} bytes; this kernel takes {limit}")));
    }
    if line.contains('\0') {
        return Err(BootError::CommandLine("contains a NUL".to_owned()));
    }
    let mut bytes = line.as_bytes().to_vec();
    bytes.push(0);
    write(memory, "the command line", layout::COMMAND_LINE, &bytes)
}

fn write(memory: &Memory, what: &'static str, address: u64, bytes: &[u8]) -> Result<(), BootError> {
    memory.write_slice(bytes, GuestAddress(address)).map_err(|source| BootError::Write { what, source })
}

/// Checks that `start..start + bytes` is extended memory.
fn check_room(what: &'static str, start: u64, bytes: u64, limit: u64) -> Result<u64, BootError> {
    let end = start.saturating_add(bytes);
    if start < layout::EXTENDED || end > limit {
        return Err(BootError::TooBig { what, start, end, limit });
    }
    Ok(end)
}
