//! What stands between the gateway and whatever runs a sandbox: a VM, a container, a pod.

use std::{pin::Pin, time::Duration};

use async_trait::async_trait;
use futures::{Stream, StreamExt as _};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;
use tonic::transport::Channel;

use crate::{
    disk::DiskCare,
    id::{Run, SandboxId},
    images::ImageCare,
    lifecycle::Keep,
    spec::SandboxSpec,
    update::Field,
};

/// Word about sandboxes, as it comes.
pub type Word = Pin<Box<dyn Stream<Item = SandboxId> + Send>>;

/// What is said there from now on. Who lags misses some, which may happen to such word.
pub fn word_of(sender: &broadcast::Sender<SandboxId>) -> Word {
    Box::pin(BroadcastStream::new(sender.subscribe()).filter_map(|word| async { word.ok() }))
}

/// A backend. Verbs are idempotent by id and return when done; the gateway repeats them after a crash, and **drops
/// them** when the user turns round (a resume that becomes a suspend): a dropped verb must leave something that
/// `observe` reports truly and that the next verb can go on from.
#[async_trait]
pub trait ComputeDriver: Send + Sync + 'static {
    /// What the backend can do; asked before anything is written. Cheap.
    fn capabilities(&self) -> Capabilities;

    /// Whether a spec asks for something that this backend can't do at all; asked before anything is written. Cheap.
    ///
    /// # Errors
    /// `Unsupported` or `Invalid`, naming the field.
    fn check(&self, _spec: &SandboxSpec) -> Result<(), DriverError> {
        Ok(())
    }

    /// Why nothing but a delete can be asked of this backend now, when it lacks what sandboxes are made of. Asked before
    /// anything is written. Cheap.
    fn lacks(&self) -> Option<DriverError> {
        None
    }

    /// Whether a spec's `driver_config` means anything to this backend: what it may say is [`ComputeDriver::check`]'s to
    /// tell.
    fn takes_config(&self) -> bool {
        false
    }

    /// Whether volumes that this backend has for a workspace are that workspace's alone, so that whoever may use it may
    /// name any of them.
    fn has_place_of_its_own(&self, _workspace: &str) -> bool {
        false
    }

    /// Whether sandboxes use this host's memory and CPUs, so that none can be larger than it, and so many start at once as it
    /// has CPUs for.
    fn is_of_this_host(&self) -> bool {
        true
    }

    /// The care of disks, of a driver that has any of its own.
    fn disks(&self) -> Option<&dyn DiskCare> {
        None
    }

    /// The images of a driver that keeps its own: names of images are looked up there, and not in the gateway's catalog.
    fn images(&self) -> Option<&dyn ImageCare> {
        None
    }

    /// Makes the storage of a sandbox; nothing runs afterwards. A repeat with another spec updates the stored spec.
    async fn create(&self, id: &SandboxId, spec: &SandboxSpec, run: Run) -> Result<Change, DriverError>;

    /// Starts run `run` and returns when its agent has answered with that number. `from` says whether to boot from the
    /// disk or to go on from the memory image. Never makes or replaces a disk.
    async fn start(&self, id: &SandboxId, from: Keep, run: Run) -> Result<Change, DriverError>;

    /// Makes what may change of a spec at any time (where it may send to) as it is in `spec`: of the stored spec, and of
    /// the run there is. Cheap when it is so already; a repeat after a failure or a crash finishes it. A driver whose
    /// sandboxes have nothing of this kind has nothing to do.
    async fn adjust(&self, _id: &SandboxId, _spec: &SandboxSpec) -> Result<Change, DriverError> {
        Ok(Change::Already)
    }

    /// What of a spec this backend can make another of while nothing runs. Asked before anything is written.
    fn updates(&self) -> &'static [Field] {
        &[]
    }

    /// Why it can't change a field that `updates` doesn't hold, in words that say what to do, where there is more to say.
    fn why_not(&self, _field: Field) -> Option<&'static str> {
        None
    }

    /// Makes the stored spec of a sandbox that nothing runs as it is in `spec`, which differs in fields of `updates` only;
    /// the size of its disk is changed before, by [`DiskCare`]. The next start goes by it. All or nothing; a repeat after
    /// a failure or a crash finishes it.
    async fn update(&self, _id: &SandboxId, _spec: &SandboxSpec) -> Result<Change, DriverError> {
        Err(DriverError::Unsupported("this backend can't change the spec of a sandbox".to_owned()))
    }

    /// Stops whatever runs, at the latest when `deadline` has passed, and gives everything back to the host. Success
    /// means: seen to be stopped. With `Keep::Disk` a memory image is discarded.
    async fn stop(&self, id: &SandboxId, keep: Keep, deadline: Duration) -> Result<Stopped, DriverError>;

    /// Removes compute and storage, in whatever state they are. Boots nothing.
    async fn delete(&self, id: &SandboxId) -> Result<Change, DriverError>;

    /// Facts, now. Bounded in time: an agent that doesn't answer is reported, not waited for.
    async fn observe(&self, id: &SandboxId) -> Result<Observed, DriverError>;

    /// Every sandbox that has compute or storage here, to find orphans.
    async fn list(&self) -> Result<Vec<SandboxId>, DriverError>;

    /// "Look again at this one." Hints may be lost or doubled.
    fn hints(&self) -> Word;

    /// "The host has no room for what this one writes." Said again and again as long as that lasts; may be lost.
    fn shortages(&self) -> Word {
        Box::pin(futures::stream::pending())
    }

    /// The gRPC channel to the agent of the running sandbox. The driver owns the one connection there is; a `Channel` is
    /// a cheap handle on it, good for any number of calls at once, and ends with the run.
    async fn agent(&self, id: &SandboxId) -> Result<Channel, DriverError>;

    /// What people look at: process id, addresses, sizes. Never needed for correctness. Cheap; best effort.
    async fn facts(&self, id: &SandboxId) -> Facts;

    /// How many agents are reached each way, for figures; empty where there is one way only.
    fn agent_links(&self) -> Vec<(&'static str, usize)> {
        Vec::new()
    }

    /// The end of the console of the present or last run, at most `bytes`.
    async fn console(&self, id: &SandboxId, bytes: usize) -> Vec<u8>;
}

/// What a backend can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The driver's name, as in `SandboxSpec::driver`.
    pub name: String,
    /// Version of the backend, for people.
    pub version: String,
    /// `stop(Keep::Memory)` and `start(Keep::Memory)` work.
    pub keeps_memory: bool,
    /// Why they don't, where that depends on the host or the backend, in words that say what to do.
    pub no_memory: Option<String>,
    /// The spec of a stopped sandbox can be changed.
    pub updates: bool,
    /// Needs a loan of TAP, address, CPUs and memory from the host's pool before a start.
    pub needs_loan: bool,
    /// How it runs sandboxes: "qemu (tcg)".
    pub machine: String,
    /// What the user should know ("software emulation: slow").
    pub notice: Option<String>,
}

/// Whether a verb did anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It did.
    Done,
    /// All was so already.
    Already,
}

/// What a stop left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// The guest said that it had flushed its disk. False: it was killed, or had ended before.
    pub flushed: bool,
    /// What is kept: memory only when a usable image was written.
    pub kept: Keep,
    /// Why it was not as asked ("the agent did not answer within 10 s").
    pub detail: Option<String>,
}

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// Nothing is known of this sandbox: neither compute nor storage.
    #[error("the backend has nothing of this sandbox")]
    Missing,
    /// The image that the disk stands on is gone.
    #[error("the base image is gone: {0}")]
    BaseMissing(String),
    /// The image that the disk stands on holds other bytes.
    #[error("the base image was changed: {0}")]
    BaseChanged(String),
    /// The disk is gone. It is never made anew.
    #[error("the workspace disk is gone: {0}")]
    DataMissing(String),
    /// Another process has the disk open.
    #[error("the workspace disk is locked{}: {detail}", holder.map(|p| format!(" by process {p}")).unwrap_or_default())]
    Locked {
        /// The process that holds it, where it can be told.
        holder: Option<u32>,
        /// The path.
        detail: String,
    },
    /// The workspace disk contradicts itself.
    #[error("the workspace disk is damaged: {0}")]
    Corrupt(String),
    /// The host has no more of something; the sandbox waits for it.
    #[error("exhausted: {0}")]
    Exhausted(String),
    /// The host's file system is full; the sandbox waits until it isn't.
    #[error("the host's disk is full: {0}")]
    NoSpace(String),
    /// A volume or folder of the host that the sandbox mounts is gone. It is never made anew.
    #[error("a mount is missing: {0}")]
    MountMissing(String),
    /// The backend can't be reached now: it is down or restarts. The sandbox waits until it is back.
    #[error("the backend can't be reached: {0}")]
    Unreachable(String),
    /// The backend is still about to bring it up (a pod whose image is being pulled): the start is asked for again until it
    /// is there.
    #[error("not up yet: {0}")]
    Pending(String),
    /// What it ran under ended or was told to end it while it came up (a node that is drained), and nothing runs any more or
    /// is about to end: no fault of its own, so it is started again.
    #[error("interrupted while it came up: {0}")]
    Interrupted(String),
    /// Whoever watched an operation ended it.
    #[error("{0} was cancelled")]
    Cancelled(&'static str),
    /// This backend can't do it.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// The request or something it names is wrong; a repeat can't help.
    #[error("invalid: {0}")]
    Invalid(String),
    /// The compute started and failed by itself: a kernel that panics, an agent that never answers.
    #[error("{step}: {cause}")]
    Failed {
        /// The step that failed ("boot").
        step: String,
        /// What was seen.
        cause: String,
        /// The end of the console.
        console: String,
    },
    /// The backend or the host failed; a repeat may help.
    #[error("{context}: {source}")]
    Backend {
        /// What was attempted.
        context: String,
        /// Why it failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl DriverError {
    /// A failure of the backend or host, with what was attempted.
    pub fn backend(
        context: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Backend { context: context.into(), source: source.into() }
    }

    /// The code that clients see in ErrorInfo and Failure.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Missing => "BACKEND_MISSING",
            Self::BaseMissing(_) => "BASE_MISSING",
            Self::BaseChanged(_) => "BASE_CHANGED",
            Self::DataMissing(_) => "DATA_MISSING",
            Self::Locked { .. } => "LOCKED",
            Self::Corrupt(_) => "CORRUPT",
            Self::Exhausted(_) => "EXHAUSTED",
            Self::NoSpace(_) => "NO_SPACE",
            Self::MountMissing(_) => "MOUNT_MISSING",
            Self::Unreachable(_) => "BACKEND_UNREACHABLE",
            Self::Pending(_) => "PENDING",
            Self::Interrupted(_) => "INTERRUPTED",
            Self::Cancelled(_) => "CANCELLED",
            Self::Unsupported(_) => "UNSUPPORTED",
            Self::Invalid(_) => "INVALID",
            Self::Failed { .. } => "RUN_FAILED",
            Self::Backend { .. } => "BACKEND_FAILED",
        }
    }

    /// Whether the same call may succeed later without anybody doing anything.
    pub fn is_transient(&self) -> bool {
        self.waits_for_host() || matches!(self, Self::Backend { .. })
    }

    /// Whether it is the host or the backend that lacks something or has not come so far: to be waited for, however long it
    /// takes.
    pub fn waits_for_host(&self) -> bool {
        matches!(
            self,
            Self::Exhausted(_)
                | Self::NoSpace(_)
                | Self::Unreachable(_)
                | Self::Pending(_)
                | Self::Interrupted(_)
        )
    }
}

/// What a backend sees of one sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observed {
    /// The backend can't tell now.
    Unknown(String),
    /// Neither compute nor storage.
    Missing,
    /// Storage, and nothing runs and nothing is borrowed from the host.
    Stopped {
        /// There is a memory image.
        memory: bool,
    },
    /// Compute runs.
    Running {
        /// Which start it came from.
        run: Run,
        /// Its agent answers, configured for this run.
        agent: bool,
    },
    /// The main command or the compute has ended by itself; something is still to be given back by `stop`.
    Ended(Ended),
}

/// How a run ended by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which run.
    pub run: Run,
    /// How.
    pub exit: Exit,
}

/// How a main command or its compute ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// The main command ended with this code (128 + signal when killed).
    Code(i32),
    /// The guest switched itself off or rebooted.
    PowerOff,
    /// The guest's kernel panicked.
    Panic(String),
    /// The compute vanished or was killed.
    Lost(String),
    /// What it ran under ended or was told to end it (a container engine that restarts, a host that lost its power): no
    /// fault of its own, so what was wanted of it still is.
    Interrupted(String),
}

impl Exit {
    /// Whether a restart policy of on-failure leaves it.
    pub fn is_success(&self) -> bool {
        matches!(self, Self::Code(0) | Self::PowerOff)
    }
}

/// What people look at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// What it borrows from the host, when it runs.
    pub host: Option<HostFacts>,
    /// Its disk.
    pub disk: Option<DiskFacts>,
    /// How it runs or ran: "qemu (tcg)".
    pub machine: Option<String>,
    /// New at every boot.
    pub boot_id: Option<String>,
}

/// What a running sandbox borrows from the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// Process.
    pub pid: u32,
    /// Network device.
    pub tap: String,
    /// Guest's address.
    pub ip: String,
    /// Guest's hardware address.
    pub mac: String,
    /// Host CPUs, "0-1".
    pub cpus: String,
    /// Guest memory, bytes.
    pub memory_bytes: u64,
    /// Resident memory of the process, bytes.
    pub resident_bytes: u64,
    /// Vsock context id.
    pub cid: u32,
    /// Folder of sockets and pid file.
    pub run_dir: String,
}

/// The workspace disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskFacts {
    /// What the guest sees, bytes.
    pub virtual_bytes: u64,
    /// What it takes on the host, bytes.
    pub used_bytes: u64,
    /// Where.
    pub path: String,
}
