//! The one place that waits for children: ours get their status, orphans are just reaped.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Exit code, 128 + signal when killed by one.
    pub code: i32,
    /// The signal that killed it, else 0.
    pub signal: i32,
}

/// Knows which children somebody waits for.
#[derive(Clone, Default)]
pub struct Reaper {
    waiting: Arc<Mutex<HashMap<Pid, oneshot::Sender<Exit>>>>,
}

impl Reaper {
    /// Starts reaping in the running tokio runtime.
    pub fn start() -> std::io::Result<Self> {
        let reaper = Self::default();
        let mut signals = signal(SignalKind::child())?;
        let reaping = reaper.clone();
        tokio::spawn(async move {
            loop {
                reaping.reap();
                if signals.recv().await.is_none() {
                    return;
                }
            }
        });
        Ok(reaper)
    }

    /// Forks by `fork` and registers the child before it can be reaped: both take the same lock.
    pub fn register(
        &self,
        fork: impl FnOnce() -> Result<Pid, Errno>,
    ) -> Result<(Pid, oneshot::Receiver<Exit>), Errno> {
        let mut waiting = self.lock();
        let pid = fork()?;
        let (sender, receiver) = oneshot::channel();
        waiting.insert(pid, sender);
        Ok((pid, receiver))
    }

    /// Sends a signal to the process group of a child, unless the child has been reaped: its number may be another's.
    pub fn signal_group(&self, pid: Pid, number: i32) -> Result<(), Errno> {
        let waiting = self.lock();
        if !waiting.contains_key(&pid) {
            return Ok(());
        }
        // SAFETY: kill takes no pointers; an unknown signal number is answered with EINVAL.
        Errno::result(unsafe { libc::kill(-pid.as_raw(), number) }).map(drop)
    }

    fn reap(&self) {
        let mut waiting = self.lock();
        loop {
            let mut status = 0;
            // SAFETY: waitpid writes one int to the place given. The wrapper of nix loses the status of a process that
            // was killed by a real-time signal.
            let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
            if pid <= 0 {
                return;
            }
            let pid = Pid::from_raw(pid);
            let exit = if libc::WIFSIGNALED(status) {
                let signal = libc::WTERMSIG(status);
                Exit { code: 128 + signal, signal }
            } else {
                Exit { code: libc::WEXITSTATUS(status), signal: 0 }
            };
            if let Some(waiter) = waiting.remove(&pid) {
                // A waiter that went away doesn't need it.
                let _ = waiter.send(exit);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Pid, oneshot::Sender<Exit>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Signals every process of `pids` that still exists.
pub fn signal_all(pids: &[Pid], signal: Signal) {
    for pid in pids {
        // One that is gone by now needs no signal.
        let _ = kill(*pid, signal);
    }
}
