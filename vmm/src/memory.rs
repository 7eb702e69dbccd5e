//! The guest's RAM: anonymous, private, and touched only when the guest or a device touches it.

use std::io;
use std::sync::Arc;

use torpor_vmm_api::HugePages;
use torpor_vmm_devices::Memory;
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

use crate::layout::{HIGH_RAM, LOW_RAM_LIMIT};

/// Sizes are multiples of it, and mappings begin at a multiple: a large page of the guest can be one of the host.
const LARGE_PAGE: usize = 2 << 20;

/// RAM can't be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size makes no sense.
    #[error("guest memory of {0} bytes: it must be a multiple of 2 MiB and not 0")]
    Size(u64),
    /// The host has no address space or no huge pages left.
    #[error("map {bytes} bytes of guest memory{}: {source}", if *huge { " in huge pages (are enough reserved? see vm.nr_hugepages)" } else { "" })]
    Map {
        /// How much.
        bytes: usize,
        /// In huge pages.
        huge: bool,
        /// The host's error.
        source: io::Error,
    },
    /// vm-memory refused the regions.
    #[error("put guest memory together: {0}")]
    Regions(String),
}

/// RAM, owned. [`Ram::memory`] may be cloned to devices; the pages go back to the host when `Ram` is dropped, at the
/// latest, and the addresses too unless a clone is still alive.
#[derive(Debug)]
pub struct Ram {
    memory: Option<Memory>,
    mappings: Vec<Mapping>,
}

#[derive(Debug)]
struct Mapping {
    region: Arc<MmapRegion<()>>,
}

/// Address and bytes of each piece of RAM of a guest of that much memory.
pub fn ranges(bytes: u64) -> Vec<(u64, u64)> {
    let low = bytes.min(LOW_RAM_LIMIT);
    let mut ranges = vec![(0, low)];
    if bytes > low {
        ranges.push((HIGH_RAM, bytes - low));
    }
    ranges
}

impl Ram {
    /// Maps RAM. No page of it is there before it is touched, unless reserved huge pages are asked for.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn new(bytes: u64, huge_pages: HugePages) -> Result<Self, MemoryError> {
        if bytes == 0 || !bytes.is_multiple_of(LARGE_PAGE as u64) || bytes > 1 << 46 {
            return Err(MemoryError::Size(bytes));
        }
        let mut ram = Self { memory: None, mappings: Vec::new() };
        let mut regions = Vec::new();
        for (start, size) in ranges(bytes) {
            let region = Arc::new(map(size as usize, huge_pages)?);
            ram.mappings.push(Mapping { region: Arc::clone(&region) });
            let region = GuestRegionMmap::with_arc(region, GuestAddress(start))
                .ok_or_else(|| MemoryError::Regions(format!("{size} bytes at {start:#x} wrap around")))?;
            regions.push(region);
        }
        let memory =
            Memory::from_regions(regions).map_err(|error| MemoryError::Regions(error.to_string()))?;
        ram.memory = Some(memory);
        Ok(ram)
    }

    /// The guest's view.
    pub fn memory(&self) -> &Memory {
        // `new` returns none without it, and only `drop` takes it.
        self.memory.as_ref().unwrap_or_else(|| unreachable!("memory is there for life"))
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        self.memory = None;
        for Mapping { region } in self.mappings.drain(..) {
            let (address, size) = (region.as_ptr().cast(), region.size());
            if Arc::strong_count(&region) == 1 {
                // SAFETY: `map` made this mapping, of this size; the only reference to it is the one that ends here, so
                // that no slice of it can be alive or be made.
                unsafe { libc::munmap(address, size) };
            } else {
                // SAFETY: the mapping stays; its pages read as zeros from now on, which guest memory may at any time.
                unsafe { libc::madvise(address, size, libc::MADV_DONTNEED) };
            }
        }
    }
}

fn map(bytes: usize, huge_pages: HugePages) -> Result<MmapRegion<()>, MemoryError> {
    let huge = huge_pages == HugePages::Reserved;
    let failed = |source| MemoryError::Map { bytes, huge, source };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    if huge {
        // Huge pages are reserved by the mapping: better refused now than killed by a signal later.
        flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
    }
    let slack = if huge { 0 } else { LARGE_PAGE };
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing that is there already.
    let mapped = unsafe { libc::mmap(std::ptr::null_mut(), bytes + slack, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(failed(io::Error::last_os_error()));
    }
    let before = (mapped as usize).next_multiple_of(LARGE_PAGE) - mapped as usize;
    let before = if huge { 0 } else { before };
    // SAFETY: both pieces are parts of the mapping just made, before and after the aligned piece that stays; nobody has
    // a pointer into it yet.
    let start = unsafe {
        let start = mapped.byte_add(before);
        if before > 0 {
            libc::munmap(mapped, before);
        }
        if slack > before {
            libc::munmap(start.byte_add(bytes), slack - before);
        }
        start
    };
    for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
        // SAFETY: it is our mapping; the advice changes what forks and core dumps see. Failing, it changes nothing.
        unsafe { libc::madvise(start, bytes, advice) };
    }
    if huge_pages == HugePages::Advised {
        // SAFETY: as above. A host that has none to give says so, and the guest gets small pages.
        unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
    }
    // SAFETY: the mapping is there, of that size, and `Ram` unmaps it only when no region refers to it.
    unsafe { MmapRegion::build_raw(start.cast(), bytes, protection, flags) }
        .map_err(|error| MemoryError::Regions(error.to_string()))
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes as _, GuestMemoryBackend as _, GuestMemoryRegion as _};

    use super::*;

    fn resident_pages() -> u64 {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn memory_has_a_hole_below_4_gib_and_costs_nothing_until_it_is_touched() {
        let before = resident_pages();
        let ram = Ram::new(5 << 30, HugePages::Default).unwrap();
        let pieces: Vec<_> =
            ram.memory().iter().map(|region| (region.start_addr().0, region.len())).collect();
        assert_eq!(pieces, [(0, LOW_RAM_LIMIT), (HIGH_RAM, (5 << 30) - LOW_RAM_LIMIT)]);
        assert!(resident_pages() - before < 1000);
        ram.memory().write_obj(7_u64, GuestAddress(HIGH_RAM + (1 << 30))).unwrap();
        assert!(ram.memory().write_obj(7_u64, GuestAddress(LOW_RAM_LIMIT)).is_err());
    }

    #[test]
    fn mappings_are_aligned_for_large_pages_and_gone_when_the_last_user_is() {
        let ram = Ram::new(4 << 20, HugePages::Default).unwrap();
        let address = ram.memory().get_host_address(GuestAddress(0)).unwrap() as usize;
        assert_eq!(address % LARGE_PAGE, 0);
        ram.memory().write_obj(7_u64, GuestAddress(8)).unwrap();
        let clone = ram.memory().clone();
        drop(ram);
        assert_eq!(clone.read_obj::<u64>(GuestAddress(8)).unwrap(), 0, "its pages are gone");
    }

    #[test]
    fn advice_for_huge_pages_reaches_the_kernel_and_is_not_there_by_default() {
        for (huge_pages, advised) in [(HugePages::Default, false), (HugePages::Advised, true)] {
            let ram = Ram::new(4 << 20, huge_pages).unwrap();
            let address = ram.memory().get_host_address(GuestAddress(0)).unwrap() as usize;
            // VmFlags of the mapping: "hg" (proc(5)).
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut inside = false;
            let flags = smaps.lines().find_map(|line| {
                if let Some((start, _)) = line.split_once('-')
                    && let Ok(start) = usize::from_str_radix(start, 16)
                {
                    inside = start <= address && address < start + (4 << 20);
                }
                line.strip_prefix("VmFlags:").filter(|_| inside)
            });
            match flags {
                Some(flags) => assert_eq!(flags.split(' ').any(|flag| flag == "hg"), advised, "{flags}"),
                None => println!("SKIP advice_for_huge_pages: this kernel shows no flags of mappings"),
            }
        }
    }

    #[test]
    fn odd_sizes_and_missing_huge_pages_are_refused_with_the_way_out() {
        assert!(matches!(Ram::new(0, HugePages::Default), Err(MemoryError::Size(0))));
        assert!(matches!(Ram::new((2 << 20) + 4096, HugePages::Default), Err(MemoryError::Size(_))));
        let huge = Ram::new(1 << 40, HugePages::Reserved).unwrap_err().to_string();
        assert!(huge.contains("vm.nr_hugepages"), "{huge}");
    }
}
