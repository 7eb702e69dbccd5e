//! How a VM ends.

use serde::{Deserialize, Serialize};

/// Why the VM is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum End {
    /// The guest switched itself off.
    PowerOff,
    /// The guest reset itself (keyboard controller, ACPI or FADT reset register).
    Reset,
    /// The guest's kernel said that it panicked.
    Panic,
    /// The guest's CPU shut down: a triple fault.
    TripleFault,
    /// Whoever holds the control socket, or a signal, ended it.
    Host,
    /// A CPU can't go on: what KVM said.
    Crash {
        /// For people.
        detail: String,
    },
    /// The VMM itself failed.
    Failed {
        /// For people.
        detail: String,
    },
}

impl End {
    /// The exit code of `torpor-vmm` after this end. 1 and 2 are those of a VM that never ran: it couldn't be started, or
    /// the arguments were wrong.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::PowerOff => 0,
            Self::Reset => 10,
            Self::Panic => 11,
            Self::TripleFault => 12,
            Self::Host => 13,
            Self::Crash { .. } => 14,
            Self::Failed { .. } => 15,
        }
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::PowerOff => formatter.write_str("the guest switched itself off"),
            Self::Reset => formatter.write_str("the guest reset itself"),
            Self::Panic => formatter.write_str("the guest's kernel panicked"),
            Self::TripleFault => formatter.write_str("the guest's cpu shut down (triple fault)"),
            Self::Host => formatter.write_str("the host ended it"),
            Self::Crash { detail } => write!(formatter, "a cpu can't go on: {detail}"),
            Self::Failed { detail } => write!(formatter, "the vmm failed: {detail}"),
        }
    }
}

/// What the end file holds, as one JSON object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndFile {
    /// Why.
    pub end: End,
    /// All disks were flushed and closed in order.
    pub disks_closed: bool,
    /// What a disk said when it couldn't be.
    #[serde(default)]
    pub disk_error: Option<String>,
    /// Devices that the guest had broken, with what it did.
    #[serde(default)]
    pub broken: Vec<String>,
}
