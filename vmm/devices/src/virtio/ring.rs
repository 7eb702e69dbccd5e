//! The device's side of a split virtqueue (virtio 1.2, section 2.7), straight on the guest's memory.
//!
//! Addresses are translated once, when the queue is handed over; after that an access to a ring is a load or a store.
//! Descriptors are copied before they are looked at, and each is checked: whatever breaks the rules is a [`RingError`],
//! which means that the device is broken. Buffers come as host addresses ([`Segments`]) for vectored reads and writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    VRING_USED_F_NO_NOTIFY,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use super::mmio::feature;
use super::segments::Segments;
use crate::Memory;

/// Most descriptors of a chain, also through an indirect table: as many as a vectored system call takes.
const MAX_CHAIN: u32 = 1024;
/// Bytes of a descriptor.
const DESCRIPTOR: u64 = 16;

/// The guest has broken the ring's rules.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RingError {
    /// A part of the ring isn't where it could be used.
    #[error("its {0} can't be reached")]
    Unreachable(&'static str),
    /// More heads are said to be available than the ring holds.
    #[error("the available index runs {0} ahead of a ring of {1}")]
    AvailableIndex(u16, u16),
    /// A head or a next beyond the table.
    #[error("descriptor {0} is beyond the table of {1}")]
    Index(u16, u32),
    /// The chain has more descriptors than it may: it runs in circles.
    #[error("a chain has more than {0} descriptors")]
    Endless(u32),
    /// A buffer isn't memory.
    #[error("a buffer of {length} bytes at {address:#x} is not inside memory")]
    Buffer {
        /// Guest address.
        address: u64,
        /// Bytes.
        length: u32,
    },
    /// A readable buffer follows a writable one.
    #[error("a readable buffer follows a writable one")]
    Order,
    /// A request for data to be received has no buffer for it.
    #[error("a request to receive has no writable buffer")]
    NoRoom,
    /// More than the standard's 2^32 bytes.
    #[error("a chain has more than 2^32 bytes")]
    TooLong,
    /// An indirect table that can't be.
    #[error("an indirect table of {0} bytes: {1}")]
    Indirect(u32, &'static str),
}

/// The three parts of a ring, for checking: what, address, bytes, alignment.
pub(crate) fn areas(
    size: u32,
    descriptors: u64,
    available: u64,
    used: u64,
) -> [(&'static str, u64, u64, u64); 3] {
    let size = u64::from(size);
    [
        ("descriptor table", descriptors, size * DESCRIPTOR, 16),
        ("available ring", available, 6 + 2 * size, 2),
        ("used ring", used, 6 + 8 * size, 4),
    ]
}

/// Whether a range lies inside one piece of memory.
pub(crate) fn is_in_memory(memory: &Memory, address: u64, length: u64) -> bool {
    memory.get_slice(GuestAddress(address), length as usize).is_ok()
}

/// Guest memory as host addresses, and what keeps them mapped.
pub(crate) struct HostMap {
    regions: Vec<Region>,
    _memory: Memory,
}

struct Region {
    start: u64,
    length: u64,
    host: *mut u8,
}

// SAFETY: the addresses are those of a shared mapping that lives as long as the memory held beside them; it is accessed
// by the guest at any time anyway, and here only through volatile or atomic accesses and system calls.
unsafe impl Send for HostMap {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for HostMap {}

impl HostMap {
    fn new(memory: Memory) -> Arc<Self> {
        let regions = memory.iter().filter_map(|region| {
            let host = region.get_host_address(MemoryRegionAddress(0)).ok()?;
            Some(Region { start: region.start_addr().raw_value(), length: region.len(), host })
        });
        Arc::new(Self { regions: regions.collect(), _memory: memory })
    }

    /// The host's address of a range inside one region.
    fn find(&self, address: u64, length: u64) -> Option<*mut u8> {
        self.regions.iter().find_map(|region| {
            let offset = address.checked_sub(region.start)?;
            let inside = offset.checked_add(length)? <= region.length;
            // SAFETY: the offset is inside the region's mapping.
            inside.then(|| unsafe { region.host.add(offset as usize) })
        })
    }

    fn find_aligned(&self, area: (&'static str, u64, u64, u64)) -> Result<*mut u8, RingError> {
        let (what, address, length, alignment) = area;
        let found = self.find(address, length).filter(|host| host.addr().is_multiple_of(alignment as usize));
        found.ok_or(RingError::Unreachable(what))
    }
}

/// One request of the driver: its buffers. Made by [`Ring::chain`] and used again and again.
pub(crate) struct Chain {
    /// Which request: to be given back with [`Ring::push`].
    pub(crate) head: u16,
    /// What the driver has written for the device.
    pub(crate) readable: Segments,
    /// What the device may fill.
    pub(crate) writable: Segments,
    /// Keeps mapped what the segments point to.
    map: Arc<HostMap>,
}

impl std::fmt::Debug for Chain {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Chain").field("head", &self.head).finish_non_exhaustive()
    }
}

/// As it lies in memory (but for the byte order); packed, as an indirect table may be at any address.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Descriptor {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn has(&self, flag: u32) -> bool {
        u32::from(self.flags) & flag != 0
    }
}

/// A table of descriptors, in the ring or indirect.
#[derive(Clone, Copy)]
struct Table {
    host: *const Descriptor,
    entries: u32,
}

/// A queue in use by a device.
pub(crate) struct Ring {
    map: Arc<HostMap>,
    size: u16,
    table: Table,
    available: *mut u16,
    used: *mut u16,
    next_available: u16,
    next_used: u16,
    /// `next_used` when the driver was last told, or could have been.
    told: u16,
    event_index: bool,
    indirect: bool,
}

// SAFETY: see HostMap, which it holds; the cursors are its own.
unsafe impl Send for Ring {}

impl std::fmt::Debug for Ring {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = formatter.debug_struct("Ring");
        shown.field("size", &self.size).field("next_available", &self.next_available);
        shown.field("next_used", &self.next_used).finish_non_exhaustive()
    }
}

impl Ring {
    /// A queue as the transport hands it over, with the features that were agreed on.
    pub(crate) fn new(queue: &Queue, memory: Memory, features: u64) -> Result<Self, RingError> {
        let map = HostMap::new(memory);
        let size = queue.size();
        let [table, available, used] =
            areas(u32::from(size), queue.desc_table(), queue.avail_ring(), queue.used_ring());
        Ok(Self {
            size,
            table: Table { host: map.find_aligned(table)?.cast(), entries: u32::from(size) },
            available: map.find_aligned(available)?.cast(),
            used: map.find_aligned(used)?.cast(),
            next_available: queue.next_avail(),
            next_used: queue.next_used(),
            told: queue.next_used(),
            event_index: features & feature::EVENT_INDEX != 0,
            indirect: features & feature::INDIRECT_DESCRIPTORS != 0,
            map,
        })
    }

    /// Number of entries.
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// An empty chain for [`Ring::pop`].
    pub(crate) fn chain(&self) -> Chain {
        let map = Arc::clone(&self.map);
        Chain { head: 0, readable: Segments::default(), writable: Segments::default(), map }
    }

    /// The 16-bit word at an index of the available ring (`flags`, `idx`, heads, `used_event`).
    fn available_word(&self, index: usize) -> &AtomicU16 {
        // SAFETY: the area is mapped, aligned (both checked in `new`), `size + 3` words long, and no index here is
        // larger; the guest accesses it with plain loads and stores of the same width.
        unsafe { AtomicU16::from_ptr(self.available.add(index)) }
    }

    /// The 16-bit word at an index of the used ring (`flags`, `idx`, and after the elements `avail_event`).
    fn used_word(&self, index: usize) -> &AtomicU16 {
        // SAFETY: as in `available_word`; the area is `4 * size + 3` words long.
        unsafe { AtomicU16::from_ptr(self.used.add(index)) }
    }

    /// How many requests wait.
    pub(crate) fn waiting(&self) -> Result<u16, RingError> {
        let ahead =
            u16::from_le(self.available_word(1).load(Ordering::Acquire)).wrapping_sub(self.next_available);
        match ahead <= self.size {
            true => Ok(ahead),
            false => Err(RingError::AvailableIndex(ahead, self.size)),
        }
    }

    /// Takes the next request, if there is one.
    pub(crate) fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        if self.waiting()? == 0 {
            return Ok(false);
        }
        let slot = usize::from(self.next_available & (self.size - 1));
        let head = u16::from_le(self.available_word(2 + slot).load(Ordering::Relaxed));
        self.next_available = self.next_available.wrapping_add(1);
        self.walk(head, chain)?;
        Ok(true)
    }

    /// Puts the request that was taken last back, for later.
    pub(crate) fn put_back(&mut self) {
        self.next_available = self.next_available.wrapping_sub(1);
    }

    fn walk(&self, head: u16, chain: &mut Chain) -> Result<(), RingError> {
        if !Arc::ptr_eq(&chain.map, &self.map) {
            chain.map = Arc::clone(&self.map);
        }
        chain.head = head;
        chain.readable.clear();
        chain.writable.clear();
        let (mut table, mut index, mut inside) = (self.table, head, false);
        let mut left = u32::from(self.size);
        loop {
            let descriptor = read(table, index)?;
            if descriptor.has(VRING_DESC_F_INDIRECT) {
                table = self.enter(descriptor, inside)?;
                (index, inside, left) = (0, true, table.entries);
                continue;
            }
            left = left.checked_sub(1).ok_or(RingError::Endless(table.entries))?;
            self.add(descriptor, chain)?;
            if !descriptor.has(VRING_DESC_F_NEXT) {
                return Ok(());
            }
            index = descriptor.next;
        }
    }

    /// The table that an indirect descriptor names.
    fn enter(&self, descriptor: Descriptor, inside: bool) -> Result<Table, RingError> {
        let length = descriptor.length;
        let problem = |what| RingError::Indirect(length, what);
        let entries = length / DESCRIPTOR as u32;
        if !self.indirect {
            return Err(problem("indirect descriptors were not agreed on"));
        }
        if inside || descriptor.has(VRING_DESC_F_NEXT) {
            return Err(problem("it is named from another table, or has a successor"));
        }
        if !length.is_multiple_of(DESCRIPTOR as u32) || entries == 0 || entries > MAX_CHAIN {
            return Err(problem("that is no number of descriptors"));
        }
        let host =
            self.map.find(descriptor.address, u64::from(length)).ok_or(problem("it is not inside memory"))?;
        Ok(Table { host: host.cast(), entries })
    }

    fn add(&self, descriptor: Descriptor, chain: &mut Chain) -> Result<(), RingError> {
        let Descriptor { address, length, .. } = descriptor;
        let writable = descriptor.has(VRING_DESC_F_WRITE);
        if !writable && !chain.writable.is_empty() {
            return Err(RingError::Order);
        }
        if length == 0 {
            return Ok(());
        }
        let host = self.map.find(address, u64::from(length)).ok_or(RingError::Buffer { address, length })?;
        let total = chain.readable.bytes() + chain.writable.bytes() + u64::from(length);
        if total > 1 << 32 {
            return Err(RingError::TooLong);
        }
        let segments = if writable { &mut chain.writable } else { &mut chain.readable };
        segments.push(host, length as usize);
        Ok(())
    }

    /// Gives a request back, of whose writable buffers the first `written` bytes were filled. The driver sees it at once;
    /// it is told by [`Ring::must_interrupt`].
    pub(crate) fn push(&mut self, head: u16, written: u32) {
        self.stage(head, written);
        self.publish();
    }

    /// [`Ring::push`] without the driver seeing it before [`Ring::publish`]: for requests that belong together.
    pub(crate) fn stage(&mut self, head: u16, written: u32) {
        let slot = usize::from(self.next_used & (self.size - 1));
        // SAFETY: the area is mapped, aligned to 4, and holds `size` elements of 8 bytes after 4 bytes of header.
        let element = unsafe { self.used.add(2 + slot * 4) }.cast::<u32>();
        // SAFETY: as above: both words are inside the element.
        let (id, length) = unsafe { (AtomicU32::from_ptr(element), AtomicU32::from_ptr(element.add(1))) };
        id.store(u32::from(head).to_le(), Ordering::Relaxed);
        length.store(written.to_le(), Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Lets the driver see what was staged.
    pub(crate) fn publish(&mut self) {
        self.used_word(1).store(self.next_used.to_le(), Ordering::Release);
    }

    /// Whether the driver wants an interrupt for what was given back since the last call.
    pub(crate) fn must_interrupt(&mut self) -> bool {
        let told = std::mem::replace(&mut self.told, self.next_used);
        if told == self.next_used {
            return false;
        }
        // The driver must see the used index before its wish is read, or it could wait for ever.
        fence(Ordering::SeqCst);
        if self.event_index {
            let event = u16::from_le(self.available_word(2 + usize::from(self.size)).load(Ordering::Relaxed));
            return self.next_used.wrapping_sub(event).wrapping_sub(1) < self.next_used.wrapping_sub(told);
        }
        let flags = u16::from_le(self.available_word(0).load(Ordering::Relaxed));
        u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0
    }

    /// Asks for a kick when the next request comes. True: one is there already.
    pub(crate) fn enable_kicks(&mut self) -> Result<bool, RingError> {
        if self.event_index {
            let word = self.used_word(2 + 4 * usize::from(self.size));
            word.store(self.next_available.to_le(), Ordering::Relaxed);
        } else {
            self.used_word(0).store(0, Ordering::Relaxed);
        }
        // The driver must see the wish before its index is read again, or a request could lie unnoticed.
        fence(Ordering::SeqCst);
        Ok(self.waiting()? > 0)
    }

    /// Asks for no kicks. With event indexes there is nothing to do: a wish is good for one kick.
    pub(crate) fn disable_kicks(&mut self) {
        if !self.event_index {
            self.used_word(0).store((VRING_USED_F_NO_NOTIFY as u16).to_le(), Ordering::Relaxed);
        }
    }
}

/// A copy of a descriptor, which the guest can't change any more.
fn read(table: Table, index: u16) -> Result<Descriptor, RingError> {
    if u32::from(index) >= table.entries {
        return Err(RingError::Index(index, table.entries));
    }
    // SAFETY: the table is mapped and has more entries than the index; any alignment will do.
    let raw = unsafe { table.host.add(usize::from(index)).read_volatile() };
    Ok(Descriptor {
        address: u64::from_le(raw.address),
        length: u32::from_le(raw.length),
        flags: u16::from_le(raw.flags),
        next: u16::from_le(raw.next),
    })
}
