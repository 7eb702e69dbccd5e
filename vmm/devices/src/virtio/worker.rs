//! The one thread of a small device: started, paused and stopped from outside.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use torpor_vmm_api::ThreadKind;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::host::{Surroundings, spawn};
use crate::virtio::DeviceError;

/// What a thread passes before it touches anything of the guest's.
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    wake: EventFd,
}

#[derive(Default)]
struct State {
    stopped: bool,
    paused: bool,
    inside: bool,
}

/// The thread is inside; others wait until it is dropped.
pub(crate) struct Pass<'gate>(&'gate Gate);

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.state().inside = false;
        self.0.changed.notify_all();
    }
}

impl Gate {
    fn new() -> io::Result<Arc<Self>> {
        let wake = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        Ok(Arc::new(Self { state: Mutex::default(), changed: Condvar::new(), wake }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while the device is paused. None: the thread is to end.
    pub(crate) fn enter(&self) -> Option<Pass<'_>> {
        let mut state = self
            .changed
            .wait_while(self.state(), |state| state.paused && !state.stopped)
            .unwrap_or_else(PoisonError::into_inner);
        if state.stopped {
            return None;
        }
        state.inside = true;
        Some(Pass(self))
    }

    /// Readable when the thread is to look about.
    pub(crate) fn wake_fd(&self) -> &EventFd {
        &self.wake
    }

    /// Lets the thread look about.
    pub(crate) fn wake(&self) {
        // It fails only when 2^64 - 2 calls are pending.
        let _ = self.wake.write(1);
    }
}

/// A device's thread, or none so far.
pub(crate) struct Worker {
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { gate: Gate::new()?, thread: None })
    }

    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Starts the thread; one that still runs is stopped first.
    pub(crate) fn start(
        &mut self,
        surroundings: &Arc<dyn Surroundings>,
        kind: ThreadKind,
        body: impl FnOnce(&Gate) + Send + 'static,
    ) -> io::Result<()> {
        self.stop();
        self.gate.state().stopped = false;
        let gate = Arc::clone(&self.gate);
        self.thread = Some(spawn(surroundings, kind, move || body(&gate))?);
        Ok(())
    }

    /// Starts a thread that [`serve`]s, and reports how the guest has broken the rules. `what` is for messages.
    pub(crate) fn start_serving(
        &mut self,
        surroundings: &Arc<dyn Surroundings>,
        what: &'static str,
        kicks: Vec<EventFd>,
        broken: Arc<dyn Fn(&str) + Send + Sync>,
        step: impl FnMut() -> Result<Next, String> + Send + 'static,
    ) -> Result<(), DeviceError> {
        let body = move |gate: &Gate| {
            if let Some(reason) = serve(gate, &kicks, step) {
                broken(&reason);
            }
        };
        self.start(surroundings, ThreadKind::Small, body).map_err(|source| DeviceError::Host { what, source })
    }

    /// Stops it and waits until it is gone.
    pub(crate) fn stop(&mut self) {
        self.gate.state().stopped = true;
        self.gate.changed.notify_all();
        self.gate.wake();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked is as gone as any; the panic was printed.
            let _ = thread.join();
        }
    }

    /// Keeps it outside, and returns when it is; or lets it in again.
    pub(crate) fn pause(&self, paused: bool) {
        let mut state = self.gate.state();
        state.paused = paused;
        self.gate.changed.notify_all();
        let inside = |state: &mut State| paused && state.inside;
        drop(self.gate.changed.wait_while(state, inside).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}

/// When a device wants to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// When it is kicked.
    Kick,
    /// After a time, kicked or not.
    After(Duration),
}

/// Calls `step` when the device is kicked, until it is to end or the guest has broken the rules, which is returned.
fn serve(gate: &Gate, kicks: &[EventFd], mut step: impl FnMut() -> Result<Next, String>) -> Option<String> {
    loop {
        let pass = gate.enter()?;
        let next = match step() {
            Ok(next) => next,
            Err(reason) => return Some(reason),
        };
        drop(pass);
        match next {
            Next::Kick => wait(gate, kicks, PollTimeout::NONE),
            Next::After(time) => {
                let milliseconds = time.as_micros().div_ceil(1000).min(1000) as u16;
                wait(gate, &[], PollTimeout::from(milliseconds));
            }
        }
    }
}

/// Waits for one of the eventfds and takes what it has.
fn wait(gate: &Gate, kicks: &[EventFd], timeout: PollTimeout) {
    let all = || std::iter::once(gate.wake_fd()).chain(kicks);
    // SAFETY: the eventfds are borrowed for as long as this function runs.
    let fds = all().map(|fd| unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) });
    let mut entries: Vec<PollFd<'_>> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    if poll(&mut entries, timeout).is_err() {
        return; // a signal: the caller looks about and comes back
    }
    for (entry, eventfd) in entries.iter().zip(all()) {
        if entry.any() == Some(true) {
            let _ = eventfd.read();
        }
    }
}
