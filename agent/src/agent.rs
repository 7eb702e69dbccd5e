//! What the agent knows across connections: who the sandbox is, what runs, whether it is ending.

use std::{
    collections::HashMap,
    fs, io,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::SystemTime,
};

use torpor_proto::agent::v1::Network;

use crate::{
    exec::cgroup::Cgroups, files::Transfers, forward, main_log::MainLog, port::Port, reaper::Reaper,
};

/// Where the agent runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// As the first process of a virtual machine, which is all its own.
    Machine,
    /// As the first process of a container: network, names and clock are the engine's, the processes are ours.
    Container,
    /// As a process among others: network, names, clock and power are somebody else's.
    Process,
}

/// Everything that outlives a connection.
pub struct Agent {
    pub mode: Mode,
    pub reaper: Reaper,
    pub cgroups: Cgroups,
    pub main: MainLog,
    /// Names this boot of the kernel, or this start of the container; stays over a memory resume.
    pub boot_id: String,
    /// Held while the sandbox is configured or ended: one at a time.
    pub turn: tokio::sync::Mutex<()>,
    /// Places for connections from the host.
    pub forwards: tokio::sync::Semaphore,
    pub transfers: Transfers,
    /// Of a pod's agent only.
    pub port: OnceLock<Port>,
    state: Mutex<State>,
    execs: AtomicU32,
}

/// What Configure brought.
#[derive(Default)]
pub struct State {
    pub run: u64,
    pub configured: bool,
    pub environment: HashMap<String, String>,
    /// What stands under it: in a pod, what the image sets.
    image: HashMap<String, String>,
    /// As it was set up last.
    pub network: Option<Network>,
    pub main_started: Option<SystemTime>,
    /// Shutdown was called: nothing new starts.
    pub ending: bool,
}

impl Agent {
    /// A fresh agent. Must be called within the tokio runtime.
    ///
    /// # Errors
    /// When the boot has no id or children can't be watched.
    pub fn new(mode: Mode) -> io::Result<Arc<Self>> {
        let group = match mode {
            Mode::Machine | Mode::Container => "torpor".to_owned(),
            Mode::Process => format!("torpor-agent-{}", std::process::id()),
        };
        // A container shares its kernel's boot with everybody on the host; its own start has no name but this.
        let name = if mode == Mode::Container { "uuid" } else { "boot_id" };
        let boot_id = fs::read_to_string(format!("/proc/sys/kernel/random/{name}"))?.trim().to_owned();
        Ok(Arc::new(Self {
            mode,
            reaper: Reaper::start()?,
            cgroups: Cgroups::new(&group),
            main: MainLog::default(),
            boot_id,
            turn: tokio::sync::Mutex::new(()),
            forwards: tokio::sync::Semaphore::new(forward::MOST),
            transfers: Transfers::default(),
            port: OnceLock::new(),
            state: Mutex::default(),
            execs: AtomicU32::new(0),
        }))
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn environment(&self) -> HashMap<String, String> {
        let state = self.state();
        let mut all = state.image.clone();
        all.extend(state.environment.clone());
        all
    }

    /// What commands have in their environment when nobody says otherwise.
    pub fn keep_image_environment(&self, image: HashMap<String, String>) {
        self.state().image = image;
    }

    /// Counts a running command until the guard is dropped.
    pub fn count_exec(&self) -> impl Drop + use<'_> {
        self.execs.fetch_add(1, Ordering::Relaxed);
        Counted(&self.execs)
    }

    pub fn execs(&self) -> u32 {
        self.execs.load(Ordering::Relaxed)
    }
}

struct Counted<'a>(&'a AtomicU32);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
