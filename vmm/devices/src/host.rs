//! What a device needs of the process around it.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use torpor_vmm_api::{End, ThreadKind};

/// What a thread does.
pub type Body = Box<dyn FnOnce() + Send>;

/// The process around the devices. All of it may be called from any thread.
pub trait Surroundings: Send + Sync {
    /// Runs first in every thread that a device starts: installs its system call filter.
    ///
    /// # Errors
    /// The thread must not go on.
    fn enter_thread(&self, kind: ThreadKind) -> io::Result<()>;

    /// Starts a thread for a device. A new thread is bound by the filter of the thread that makes it, and devices are
    /// activated by CPU threads, whose filter is narrow: so the process has another thread do it.
    ///
    /// # Errors
    /// The thread can't be started.
    fn start_thread(&self, kind: ThreadKind, body: Body) -> io::Result<JoinHandle<()>> {
        start_here(kind, body)
    }

    /// The guest has ended. Only the first call counts.
    fn end(&self, end: End);

    /// The guest broke a device's rules; the device is dead until the guest resets it.
    fn device_broken(&self, device: &str, reason: &str);

    /// The host has no room for what the guest writes to a disk, so that requests wait; or it has again. The first is told
    /// again and again as long as it lasts, the second once.
    fn disk_full(&self, _device: &str, _full: bool) {}
}

/// Starts a named thread of a kind, in which the surroundings' rules hold before `body` runs.
///
/// # Errors
/// The thread can't be started.
pub fn spawn(
    surroundings: &Arc<dyn Surroundings>,
    kind: ThreadKind,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let inside = Arc::clone(surroundings);
    let body = move || match inside.enter_thread(kind) {
        Ok(()) => body(),
        Err(error) => {
            let detail = format!("a {} thread can't be confined: {error}", kind.name());
            inside.end(End::Failed { detail });
        }
    };
    surroundings.start_thread(kind, Box::new(body))
}

/// Starts a named thread from the calling one. Everybody but [`Surroundings::start_thread`] uses [`spawn`].
///
/// # Errors
/// The thread can't be started.
pub fn start_here(kind: ThreadKind, body: Body) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(kind.name().to_owned()).stack_size(STACK).spawn(body)
}

/// Stack of a device's thread, bytes: address space, of which only what is touched costs memory.
const STACK: usize = 256 << 10;
