//! The seam between what runs a VM and everything around it. Above it, once: launch, adoption, the console file, the
//! agent's channel, stop and cleanup. Below it, per machine: the command line, and how to ask a running one.

mod qemu;
mod qmp;
mod tsc;

use std::{
    ffi::OsString,
    io,
    os::fd::RawFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use torpor_netpool::GuestNet;
use torpor_sandbox::DriverError;

use crate::{
    config::{ConfigError, VmConfig},
    probe::Probe,
};

/// Everything that a machine needs to know of a VM that is to be started.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    /// Must follow `-name` among the arguments: it is how the process is found again.
    pub(crate) marker: &'a str,
    pub(crate) run_dir: &'a Path,
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    pub(crate) overlay: &'a Path,
    pub(crate) base: &'a Path,
    pub(crate) cpus: u32,
    pub(crate) memory_bytes: u64,
    pub(crate) net: &'a GuestNet,
    /// The TAP's descriptor in the new process. Its standard input is the overlay's lock, to be held and not used.
    pub(crate) tap_fd: RawFd,
}

/// The process to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<OsString>,
}

/// Where the guest's agent is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AgentEndpoint {
    /// A Unix socket that is one end of a virtio-serial port.
    VirtioSerial(PathBuf),
}

/// How a guest ended, as far as its machine can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuestEnd {
    /// It switched itself off.
    PowerOff,
    /// It reset itself, which a kernel that panics does too: the console tells.
    Reset,
    /// It said that it panicked.
    Panic,
    /// The machine can't go on with it.
    Crash,
}

/// One kind of machine.
#[async_trait]
pub(crate) trait Machine: Send + Sync + std::fmt::Debug {
    /// As in the spec: "qemu".
    fn name(&self) -> &'static str;
    /// For people: "qemu (tcg)".
    fn label(&self) -> &str;
    /// What the user should know.
    fn notice(&self) -> Option<String>;
    /// The command line of a VM.
    fn plan(&self, launch: &Launch<'_>) -> Result<Plan, DriverError>;
    /// Where its agent is reached.
    fn agent(&self, run_dir: &Path) -> AgentEndpoint;
    /// Connects to the running machine. There is one connection at a time.
    async fn monitor(&self, run_dir: &Path) -> io::Result<Box<dyn Monitor>>;
}

/// A connection to a running machine. An error means that it is lost; another one may be made.
#[async_trait]
pub(crate) trait Monitor: Send {
    /// Waits until the guest has ended while the machine's process is still there. May be dropped and called again.
    async fn guest_end(&mut self) -> io::Result<GuestEnd>;
    /// What the guest has written to its console since the last call, of bounded length.
    async fn console(&mut self) -> io::Result<Vec<u8>>;
    /// Asks the machine's process to end.
    async fn quit(&mut self) -> io::Result<()>;
}

/// The machine that the configuration asks for.
pub(crate) fn open(config: &VmConfig, probe: &Probe) -> Result<Arc<dyn Machine>, ConfigError> {
    match config.machine.as_str() {
        "auto" | "qemu" => Ok(Arc::new(qemu::Qemu::new(&config.qemu, probe))),
        "kvm" => Err(ConfigError::NoKvmMachine),
        other => Err(ConfigError::UnknownMachine(other.to_owned())),
    }
}
