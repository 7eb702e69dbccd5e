//! The control socket: a stream of JSON objects, a line each. Requests get one [`Reply`] each, in order; between them
//! [`Event`]s come to who has subscribed.

use serde::{Deserialize, Serialize};

use crate::End;

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// State and counters.
    Status,
    /// Events from now on, on this connection.
    Subscribe,
    /// Stops the CPUs; devices finish what they have begun.
    Pause,
    /// Lets the CPUs go on.
    Resume,
    /// A memory image. Refused so far.
    Snapshot {
        /// The folder to write it to.
        folder: String,
    },
    /// Presses the power button: the guest may switch itself off.
    PowerButton,
    /// Makes an overlay larger while the guest uses it, and tells the guest. Answered by [`Reply::Grown`] or
    /// [`Reply::NotGrown`].
    GrowDisk {
        /// Its serial number.
        disk: String,
        /// Bytes that it is to have at least.
        bytes: u64,
    },
    /// Ends the VM: disks are flushed and closed in order, the guest is not asked.
    Shutdown,
}

/// The answer to one request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Done.
    Done,
    /// Can't be done, and why.
    Refused {
        /// For people.
        reason: String,
    },
    /// What was asked for.
    Status(Status),
    /// A disk has been grown, or had the size already.
    Grown {
        /// Bytes that it has now.
        bytes: u64,
    },
    /// A disk is as it was.
    NotGrown {
        /// Of what kind the reason is.
        problem: GrowProblem,
        /// For people.
        reason: String,
    },
    /// Something happened; not an answer.
    Event(Event),
}

/// Why a disk isn't grown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrowProblem {
    /// The size can't be, or the disk is none that grows.
    Invalid,
    /// The host has no room for its tables.
    NoSpace,
    /// Anything else.
    Failed,
}

/// What the VM is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// The CPUs run.
    Running,
    /// They are stopped.
    Paused,
    /// The guest has ended; the process is about to.
    Ended,
}

/// State and counters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// What it is doing.
    pub state: VmState,
    /// Virtual CPUs.
    pub cpus: u8,
    /// Guest memory, bytes.
    pub memory_bytes: u64,
    /// Devices that a guest has broken, with what it did.
    pub broken: Vec<String>,
    /// Devices of which requests wait until the host has room for what the guest writes.
    #[serde(default)]
    pub full: Vec<String>,
    /// What was counted.
    pub counters: Counters,
}

/// What was counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Bytes that the guest has written to its console.
    pub console_bytes: u64,
    /// Bytes given back to the host by the balloon.
    pub reclaimed_bytes: u64,
    /// Exits of the CPUs to this process.
    pub exits: u64,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The guest has ended.
    Ended {
        /// How.
        end: End,
    },
    /// A guest has broken a device, which is dead until it is reset.
    DeviceBroken {
        /// Which.
        device: String,
        /// What the guest did.
        reason: String,
    },
    /// The host has no room for what the guest writes: requests of a disk wait for it. Told again and again as long as
    /// that lasts.
    DiskFull {
        /// Which.
        device: String,
    },
    /// There is room again.
    DiskHasRoom {
        /// Of which.
        device: String,
    },
}
