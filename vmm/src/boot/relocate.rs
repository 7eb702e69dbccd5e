//! Address space randomization for kernels that are loaded unpacked: what a bzImage does when it unpacks itself.
//!
//! Behind the ELF file inside a bzImage is a table of all places that hold a virtual address of the kernel (Linux
//! arch/x86/tools/relocs.c writes it): words of 32 bits, each a virtual address itself that is to be sign-extended, in
//! two or three lists with a zero before each: places of 64 bits; places of 32 bits from which the distance is taken (not
//! in newer kernels); places of 32 bits. The kernel may then run at another virtual address, a multiple of 2 MiB; where it
//! is in memory doesn't change (Documentation/arch/x86/boot.rst, `kernel_alignment`; arch/x86/kernel/head64.c).

use std::fs::File;
use std::io;

use torpor_vmm_devices::Memory;
use vm_memory::{GuestAddress, GuestMemoryBackend as _, VolatileMemory as _};

use super::{BootError, read};

/// `__START_KERNEL_map`: the virtual address of what is at physical address 0.
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// `KERNEL_IMAGE_SIZE` of kernels that can be moved: what is mapped for the kernel there.
const IMAGE_SPACE: u64 = 1 << 30;
/// `CONFIG_PHYSICAL_ALIGN`, at least.
const STEP: u64 = 2 << 20;
/// More than any kernel has, bytes.
const MOST_BYTES: u64 = 16 << 20;

/// The places that hold addresses.
#[derive(Debug)]
pub(super) struct Relocations {
    wide: Vec<u32>,
    inverse: Vec<u32>,
    narrow: Vec<u32>,
}

/// The table that begins at `offset`; none when there is something else, or nothing.
pub(super) fn read(file: &File, offset: u64) -> Result<Option<Relocations>, BootError> {
    let bytes = read::size(file, "kernel")?.saturating_sub(offset);
    if bytes == 0 || !bytes.is_multiple_of(4) || bytes > MOST_BYTES {
        return Ok(None);
    }
    let mut table = vec![0; bytes as usize];
    read::exact(file, "kernel", offset, &mut table)?;
    let (words, _) = table.as_chunks::<4>();
    let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let mut lists: Vec<&[u32]> = words.split(|word| *word == 0).collect();
    // Before the first zero there is nothing.
    if !lists.first().is_some_and(|list| list.is_empty()) {
        return Ok(None);
    }
    lists.remove(0);
    let (wide, inverse, narrow) = match lists.as_slice() {
        [wide, narrow] => (*wide, &[][..], *narrow),
        [wide, inverse, narrow] => (*wide, *inverse, *narrow),
        _ => return Ok(None),
    };
    let list = |list: &[u32]| list.to_vec();
    Ok(Some(Relocations { wide: list(wide), inverse: list(inverse), narrow: list(narrow) }))
}

/// A distance to move a kernel by of which the last byte is before physical address `end` where it is built to be.
pub(super) fn distance(end: u64) -> Result<u64, BootError> {
    let places = IMAGE_SPACE.saturating_sub(end) / STEP + 1;
    let mut random = [0; 8];
    // SAFETY: the buffer has 8 bytes, of which the call fills as many as it returns.
    let got = unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) };
    if got != random.len() as isize {
        return Err(BootError::Random(io::Error::last_os_error()));
    }
    Ok(u64::from_le_bytes(random) % places * STEP)
}

impl Relocations {
    /// Moves the kernel that lies at `begin..end`, by its own numbers, `distance` up.
    pub(super) fn apply(
        &self,
        memory: &Memory,
        begin: u64,
        end: u64,
        distance: u64,
    ) -> Result<(), BootError> {
        let kernel = memory
            .get_slice(GuestAddress(begin), (end - begin) as usize)
            .map_err(|source| BootError::Write { what: "the kernel's addresses", source })?;
        let outside = |place: u32| BootError::Elf(format!("has a relocation at {place:#x}, outside of it"));
        let offset = |place: u32| {
            let address = i64::from(place.cast_signed()).cast_unsigned().wrapping_sub(KERNEL_MAP);
            address.checked_sub(begin).map(|offset| offset as usize).ok_or_else(|| outside(place))
        };
        for place in &self.wide {
            let word = kernel.get_ref::<u64>(offset(*place)?).map_err(|_| outside(*place))?;
            word.store(word.load().wrapping_add(distance));
        }
        let short = distance as u32;
        for place in &self.inverse {
            let word = kernel.get_ref::<u32>(offset(*place)?).map_err(|_| outside(*place))?;
            word.store(word.load().wrapping_sub(short));
        }
        for place in &self.narrow {
            let word = kernel.get_ref::<u32>(offset(*place)?).map_err(|_| outside(*place))?;
            word.store(word.load().wrapping_add(short));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use torpor_vmm_api::HugePages;
    use vm_memory::Bytes as _;

    use super::*;
    use crate::memory::Ram;

    fn table(words: &[u32]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"before").unwrap();
        words.iter().for_each(|word| file.write_all(&word.to_le_bytes()).unwrap());
        file
    }

    #[test]
    fn each_kind_of_place_is_moved_in_its_own_way() {
        let ram = Ram::new(4 << 20, HugePages::Default).unwrap();
        let put = |at: u64, value: u64| ram.memory().write_obj(value, GuestAddress(at)).unwrap();
        put(0x10_0000, 0xffff_ffff_8010_0000);
        put(0x10_0010, 0x0000_0001_8010_0000);
        put(0x10_0020, 0x0000_0001_8010_0000);
        let file = table(&[0, 0x8010_0000, 0, 0x8010_0010, 0, 0x8010_0020]);
        let relocations = super::read(&file, 6).unwrap().unwrap();
        relocations.apply(ram.memory(), 0x10_0000, 0x10_1000, 0x20_0000).unwrap();
        let get = |at: u64| ram.memory().read_obj::<u64>(GuestAddress(at)).unwrap();
        assert_eq!(get(0x10_0000), 0xffff_ffff_8030_0000);
        assert_eq!(get(0x10_0010), 0x0000_0001_7ff0_0000);
        assert_eq!(get(0x10_0020), 0x0000_0001_8030_0000);
    }

    #[test]
    fn a_place_outside_of_the_kernel_is_refused() {
        let ram = Ram::new(4 << 20, HugePages::Default).unwrap();
        for place in [0x800f_fff0, 0x8010_0ffc, 0x8010_1000, 0x7fff_ffff, 1] {
            let relocations = super::read(&table(&[0, place, 0]), 6).unwrap().unwrap();
            let error = relocations.apply(ram.memory(), 0x10_0000, 0x10_1000, 0x20_0000).unwrap_err();
            assert!(error.to_string().contains("outside of it"), "{error}");
        }
    }

    #[test]
    fn what_is_no_table_is_none() {
        for words in [&[][..], &[1, 0, 2], &[0, 1], &[0, 1, 0, 2, 0, 3, 0, 4]] {
            assert!(super::read(&table(words), 6).unwrap().is_none(), "{words:?}");
        }
        assert!(super::read(&table(&[0, 1, 0]), 7).unwrap().is_none(), "not whole words");
        assert!(super::read(&table(&[0, 1, 0]), 1 << 40).unwrap().is_none());
    }

    #[test]
    fn a_distance_leaves_room_for_the_kernel() {
        for _ in 0..1000 {
            let distance = distance(0x400_0000).unwrap();
            assert!(distance.is_multiple_of(STEP) && distance + 0x400_0000 <= IMAGE_SPACE, "{distance:#x}");
        }
        assert_eq!(distance(2 * IMAGE_SPACE).unwrap(), 0, "no room");
    }
}
