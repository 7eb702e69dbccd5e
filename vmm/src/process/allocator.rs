//! The C library's heap, kept small.

/// One heap for all threads: each further one would cost memory and system calls, and the threads of this process
/// allocate next to nothing while a guest runs.
pub(super) fn keep_small() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number of the allocator's, before there is a second thread.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
