//! Kicks: a flag in the page shared with KVM, and a signal for a CPU that is in the guest.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use kvm_bindings::kvm_run;

use crate::hypervisor::Kicker;

/// The signal that gets a thread out of the guest.
pub(crate) fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn nothing(_signal: libc::c_int) {}

/// Makes the signal interrupt system calls, and do nothing else.
pub(super) fn install_handler() -> io::Result<()> {
    // SAFETY: all bits zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
    // SAFETY: the handler does nothing, which is safe at any point of any thread; the pointers are valid or null.
    match unsafe { libc::sigaction(signal(), &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[derive(Debug)]
pub(super) struct KvmKicker {
    target: Mutex<Option<Target>>,
}

#[derive(Debug)]
struct Target {
    /// `kvm_run.immediate_exit`: KVM_RUN returns at once where it is not 0.
    flag: *const AtomicU8,
    /// The thread that runs the CPU, once there is one.
    thread: Option<libc::pid_t>,
}

// SAFETY: the pointer is used only under the lock, while the page is mapped (`KvmKicker::new`), for atomic stores.
unsafe impl Send for Target {}

impl KvmKicker {
    /// # Safety
    /// `run` stays mapped until [`KvmKicker::forget`] is called.
    pub(super) unsafe fn new(run: &mut kvm_run) -> Self {
        let flag = (&raw mut run.immediate_exit).cast::<AtomicU8>().cast_const();
        Self { target: Mutex::new(Some(Target { flag, thread: None })) }
    }

    /// The calling thread runs the CPU from now on.
    pub(super) fn enter_thread(&self) {
        // SAFETY: the call has no arguments and can't fail.
        let thread = unsafe { libc::gettid() };
        if let Some(target) = &mut *self.target.lock().unwrap_or_else(PoisonError::into_inner) {
            target.thread = Some(thread);
        }
    }

    /// The CPU ends: no more kicks.
    pub(super) fn forget(&self) {
        *self.target.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Kicker for KvmKicker {
    fn kick(&self) {
        let target = self.target.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(target) = &*target else { return };
        // SAFETY: the page is mapped until `forget`, which takes the lock that is held here.
        unsafe { &*target.flag }.store(1, Ordering::SeqCst);
        if let Some(thread) = target.thread {
            // SAFETY: a plain system call; the thread belongs to this process and runs until its CPU is dropped, which
            // waits for the lock. Should it be gone all the same, the call fails.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal()) };
        }
    }
}
