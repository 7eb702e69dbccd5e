//! Buffers in guest memory, as the host's system calls take them.

use std::io::{IoSlice, IoSliceMut};

use libc::iovec;

/// Most entries whose space is kept from one use to the next.
const KEPT: usize = 128;

/// A list of buffers in guest memory, taken as one stream of bytes. Whoever holds it holds the memory (see
/// [`super::ring::Chain`]).
#[derive(Default)]
pub(crate) struct Segments {
    list: Vec<iovec>,
    /// Entries before this one have been taken off the front.
    start: usize,
    bytes: u64,
}

// SAFETY: the pointers are into a shared mapping that any thread may access; see HostMap.
unsafe impl Send for Segments {}

impl Segments {
    /// Empties it for the next use.
    pub(crate) fn clear(&mut self) {
        self.list.clear();
        self.list.shrink_to(KEPT);
        (self.start, self.bytes) = (0, 0);
    }

    /// No bytes are left.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Bytes left.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a buffer, which the caller knows to be mapped.
    pub(crate) fn push(&mut self, host: *mut u8, length: usize) {
        self.list.push(iovec { iov_base: host.cast(), iov_len: length });
        self.bytes += length as u64;
    }

    /// The buffers as the kernel takes them.
    pub(crate) fn list(&self) -> &[iovec] {
        &self.list[self.start..]
    }

    /// Takes bytes off the front, as many as there are and `target` holds; returns how many.
    pub(crate) fn take_front(&mut self, target: &mut [u8]) -> usize {
        let mut done = 0;
        while done < target.len() && self.start < self.list.len() {
            let entry = &mut self.list[self.start];
            let count = entry.iov_len.min(target.len() - done);
            // SAFETY: the source is mapped guest memory of at least `count` bytes, the target our own; they don't overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(entry.iov_base.cast::<u8>(), target[done..].as_mut_ptr(), count)
            };
            done += count;
            self.drop_front(count);
        }
        done
    }

    /// Takes `count` bytes off the front entry, which has as many.
    fn drop_front(&mut self, count: usize) {
        let entry = &mut self.list[self.start];
        // SAFETY: inside the buffer or just at its end.
        entry.iov_base = unsafe { entry.iov_base.cast::<u8>().add(count) }.cast();
        entry.iov_len -= count;
        self.bytes -= count as u64;
        self.start += usize::from(entry.iov_len == 0);
    }

    /// Takes whole entries off the front.
    pub(crate) fn drop_pieces(&mut self, count: usize) {
        for entry in &self.list[self.start..self.start + count] {
            self.bytes -= entry.iov_len as u64;
        }
        self.start += count;
        // Moved seldom, so that each entry is moved once at most on average.
        if self.start * 2 >= self.list.len() {
            self.list.drain(..self.start);
            self.start = 0;
        }
    }

    /// Works on the buffers with one more byte after them, of our own.
    pub(crate) fn with_extra<R>(&mut self, extra: &mut u8, work: impl FnOnce(&[iovec]) -> R) -> R {
        self.list.push(iovec { iov_base: std::ptr::from_mut(extra).cast(), iov_len: 1 });
        let result = work(&self.list[self.start..]);
        self.list.pop();
        result
    }

    /// Takes the last byte off; where it is.
    pub(crate) fn take_last(&mut self) -> Option<LastByte> {
        let entry = self.list[self.start..].last_mut()?;
        entry.iov_len -= 1;
        // SAFETY: the buffer had this byte, as no buffer here is empty.
        let at = unsafe { entry.iov_base.cast::<u8>().add(entry.iov_len) };
        if entry.iov_len == 0 {
            self.list.pop();
        }
        self.bytes -= 1;
        Some(LastByte(at))
    }

    /// Copies bytes to the buffers, `skip` bytes from the front; as many as there is room for.
    pub(crate) fn fill(&self, mut skip: usize, mut source: &[u8]) {
        for entry in self.list() {
            let from = skip.min(entry.iov_len);
            let count = source.len().min(entry.iov_len - from);
            skip -= from;
            // SAFETY: `from + count` is inside the mapped buffer; the source is our own memory.
            unsafe {
                std::ptr::copy_nonoverlapping(source.as_ptr(), entry.iov_base.cast::<u8>().add(from), count)
            };
            source = &source[count..];
            if source.is_empty() {
                return;
            }
        }
    }

    /// The buffers, to be written from.
    pub(crate) fn slices(&self) -> &[IoSlice<'_>] {
        let list = self.list();
        // SAFETY: IoSlice has the layout of iovec; each buffer is mapped while this is borrowed. The guest may change the
        // bytes meanwhile: they are passed to the kernel or copied, and nobody relies on reading the same twice.
        unsafe { std::slice::from_raw_parts(list.as_ptr().cast(), list.len()) }
    }

    /// The buffers, to be read into.
    pub(crate) fn slices_mut(&mut self) -> &mut [IoSliceMut<'_>] {
        let list = &mut self.list[self.start..];
        // SAFETY: as for `slices`; IoSliceMut has the layout of iovec too.
        unsafe { std::slice::from_raw_parts_mut(list.as_mut_ptr().cast(), list.len()) }
    }
}

/// Where a request's last writable byte is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastByte(*mut u8);

// SAFETY: as for Segments.
unsafe impl Send for LastByte {}

impl LastByte {
    /// Sets it. The chain that it came from must still be held.
    pub(crate) fn set(self, value: u8) {
        // SAFETY: it is mapped guest memory, held by the chain.
        unsafe { self.0.write_volatile(value) }
    }
}
