//! The seam between what runs a VM and everything around it. Above it, once: launch, adoption, the console file, the
//! agent's channel, stop and cleanup. Below it, per machine: the command line, and how to ask a running one.

mod control;
mod kvm;
mod lines;
mod qemu;
mod qmp;
mod tsc;

use std::{
    ffi::OsString,
    io,
    os::fd::{OwnedFd, RawFd},
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
    /// The same as an ELF file with its relocations, for a machine that loads it so.
    pub(crate) unpacked_kernel: Option<&'a Path>,
    pub(crate) initramfs: &'a Path,
    pub(crate) overlay: &'a Path,
    pub(crate) base: &'a Path,
    pub(crate) cpus: u32,
    pub(crate) memory_bytes: u64,
    pub(crate) net: &'a GuestNet,
    /// Largest packet of the guest, bytes.
    pub(crate) mtu: u32,
    /// The user that the process may become; it owns the TAP.
    pub(crate) uid: Option<u32>,
    /// The TAP's descriptor in the new process. Its standard input is the overlay, with the lock on it.
    pub(crate) tap_fd: RawFd,
}

/// The process to start.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<OsString>,
    /// Descriptors that the process inherits, under the numbers that they have here.
    pub(crate) inherited: Vec<OwnedFd>,
}

/// Where the guest's agent is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AgentEndpoint {
    /// A Unix socket that is one end of a virtio-serial port.
    VirtioSerial(PathBuf),
    /// A Unix socket of the host's side of vsock, and the agent's port. A connection that is made before the guest listens
    /// waits for it.
    Vsock(PathBuf, u32),
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
    /// The machine's process was told to end.
    Ordered,
}

/// What a running machine says by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// The guest has ended while the machine's process is still there. Said again to who asks again.
    Ended(GuestEnd),
    /// The host has no room for what the guest writes. Said again and again as long as it lasts.
    DiskFull,
}

/// What a machine's process left when it ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LastWords {
    /// How the guest ended, where the process wrote it down.
    pub(crate) end: Option<GuestEnd>,
    /// More about it, for people.
    pub(crate) detail: Option<String>,
    /// Why what the guest has written may not all be on its disk, although the machine ended in order.
    pub(crate) disk_error: Option<String>,
    /// What of the console was not taken over before.
    pub(crate) console: Vec<u8>,
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
    /// What its process left when it ended. Blocks.
    fn last_words(&self, _run_dir: &Path) -> LastWords {
        LastWords::default()
    }
    /// The most that its process needs beyond guest memory, bytes: a limit against leaks, not a budget.
    fn headroom(&self, memory_bytes: u64, disk_bytes: u64) -> u64;
}

/// A connection to a running machine. An error means that it is lost; another one may be made.
#[async_trait]
pub(crate) trait Monitor: Send {
    /// Waits until the machine has something to say. May be dropped and called again.
    async fn news(&mut self) -> io::Result<News>;
    /// What the guest has written to its console since the last call, of bounded length.
    async fn console(&mut self) -> io::Result<Vec<u8>>;
    /// Makes the guest's root disk larger while the guest uses it, and tells the guest; its size then, bytes. The inner
    /// error is the machine's answer.
    async fn grow_disk(&mut self, bytes: u64) -> io::Result<Result<u64, DriverError>>;
    /// Asks the machine's process to end.
    async fn quit(&mut self) -> io::Result<()>;
}

/// The machines of this host.
#[derive(Debug)]
pub(crate) struct Machines {
    qemu: Arc<dyn Machine>,
    kvm: Result<Arc<dyn Machine>, String>,
    /// What "auto" is.
    default: Arc<dyn Machine>,
    /// Why.
    choice: String,
}

impl Machines {
    /// The machines that there are. "auto" is torpor-vmm where it is installed and KVM runs a stock kernel, and QEMU elsewhere.
    pub(crate) fn open(config: &VmConfig, probe: &Probe) -> Result<Self, ConfigError> {
        let qemu: Arc<dyn Machine> = Arc::new(qemu::Qemu::new(&config.qemu, probe));
        let kvm = match (&config.vmm, probe.usable) {
            (Some(program), true) => Ok(Arc::new(kvm::Kvm::new(program)) as Arc<dyn Machine>),
            (_, false) => Err(format!("{}; use auto or qemu", probe.reason)),
            (None, true) => Err(
                "the program torpor-vmm was found neither where the configuration's `vmm` says nor beside torpor"
                    .to_owned(),
            ),
        };
        let (default, choice) = match (config.machine.as_str(), &kvm) {
            ("auto", Ok(kvm)) => (Arc::clone(kvm), "kvm: this host's KVM runs a stock kernel".to_owned()),
            ("auto", Err(why)) => (Arc::clone(&qemu), format!("qemu: {why}")),
            ("qemu", _) => (Arc::clone(&qemu), "qemu: the configuration says so".to_owned()),
            ("kvm", Ok(kvm)) => (Arc::clone(kvm), "kvm: the configuration says so".to_owned()),
            ("kvm", Err(why)) => return Err(ConfigError::NoKvmMachine(why.clone())),
            (other, _) => return Err(ConfigError::UnknownMachine(other.to_owned())),
        };
        Ok(Self { qemu, kvm, default, choice })
    }

    /// The machine of this name for so many CPUs, "auto" being the default where that can have them.
    pub(crate) fn get(&self, name: &str, cpus: u32) -> Result<Arc<dyn Machine>, DriverError> {
        match (name, &self.kvm) {
            ("auto", _) if self.default.name() == kvm::NAME && cpus > kvm::MOST_CPUS => {
                Ok(Arc::clone(&self.qemu))
            }
            ("auto", _) => Ok(Arc::clone(&self.default)),
            ("qemu", _) => Ok(Arc::clone(&self.qemu)),
            ("kvm", Ok(_)) if cpus > kvm::MOST_CPUS => Err(DriverError::Unsupported(format!(
                "machine: 'kvm' has at most {} CPUs, {cpus} asked for; use auto or qemu",
                kvm::MOST_CPUS
            ))),
            ("kvm", Ok(kvm)) => Ok(Arc::clone(kvm)),
            ("kvm", Err(why)) => {
                Err(DriverError::Unsupported(format!("machine: 'kvm' can't be used on this host: {why}")))
            }
            (other, _) => {
                Err(DriverError::Invalid(format!("machine: '{other}' is not one of auto, qemu, kvm")))
            }
        }
    }

    /// The machine of a VM that runs: known by the name in its record.
    pub(crate) fn of_record(&self, name: &str) -> Arc<dyn Machine> {
        match name {
            // Also when it could not be chosen any more: it runs.
            kvm::NAME => {
                self.kvm.clone().unwrap_or_else(|_| Arc::new(kvm::Kvm::new(Path::new(kvm::PROGRAM))))
            }
            _ => Arc::clone(&self.qemu),
        }
    }

    /// The machine of a process whose record is lost: known by its program.
    pub(crate) fn of_process(&self, pid: u32) -> Arc<dyn Machine> {
        let program = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        let name = if program.starts_with(kvm::PROGRAM.as_bytes()) { kvm::NAME } else { "qemu" };
        self.of_record(name)
    }

    /// What "auto" is.
    pub(crate) fn default(&self) -> &dyn Machine {
        &*self.default
    }

    /// What "auto" is, and why: "kvm: this host's KVM runs a stock kernel".
    pub(crate) fn choice(&self) -> &str {
        &self.choice
    }
}
