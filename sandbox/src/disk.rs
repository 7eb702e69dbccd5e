//! Looking after the workspace disks of sandboxes that nothing runs.

use std::ops::ControlFlow;

use async_trait::async_trait;
use tokio::sync::mpsc;

use crate::{driver::DriverError, id::SandboxId};

/// Told the bytes done and all of them, now and then; answers whether to go on. Must not block.
pub type DiskWatch = Box<dyn FnMut(u64, u64) -> ControlFlow<()> + Send>;

/// Where the pieces of an export go, in rising order. A receiver that is full slows the export down, one that is closed or
/// gone ends it.
pub type DiskSink = mpsc::Sender<DiskPiece>;

/// What a driver whose disks are files of its own can do with them. All but `report` and `grow` need a disk that nothing runs
/// on: the gateway sees to that, and the driver refuses a disk that somebody holds all the same. An operation runs to its end, or
/// until its watch says so or its sink is closed, also when its future is dropped; verbs that come meanwhile wait for it.
#[async_trait]
pub trait DiskCare: Send + Sync {
    /// What the disk is. With `check` also whether its structure is in order, which reads all of its tables.
    ///
    /// # Errors
    /// `Missing`, `DataMissing`; with `check` also `Locked`. Damage is in the report.
    async fn report(&self, id: &SandboxId, check: bool) -> Result<DiskReport, DriverError>;

    /// Makes the disk larger and notes it. A guest that runs goes on on the larger disk; one that doesn't finds it so at its
    /// next start. Its new size, bytes: at least what was asked for.
    ///
    /// # Errors
    /// `Unsupported` for a disk that runs where the driver grows only those at rest.
    /// `Invalid` below the present size or above what the disk's tables can hold, with the numbers; `Locked`, `Corrupt`,
    /// `NoSpace`. The disk is as it was then.
    async fn grow(&self, id: &SandboxId, bytes: u64) -> Result<u64, DriverError>;

    /// Gives back to the host what the guest no longer uses.
    ///
    /// # Errors
    /// `Cancelled` when the watch said so; `Locked`, `Corrupt`,
    /// `NoSpace`, those of the base. The disk's content is as it was then.
    async fn compact(
        &self,
        id: &SandboxId,
        how: Compaction,
        watch: DiskWatch,
    ) -> Result<Compacted, DriverError>;

    /// Hands out the whole disk, with what it stands on, as a file of `format`. Nothing of it is kept here.
    ///
    /// # Errors
    /// `Cancelled` when the sink was closed; `Locked`, `Corrupt`, `NoSpace`, those of the base.
    async fn export(&self, id: &SandboxId, format: DiskFormat, sink: DiskSink) -> Result<(), DriverError>;
}

/// How a disk is kept in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFormat {
    /// Byte for byte.
    Raw,
    /// QEMU's format.
    Qcow2,
}

/// How a disk is made smaller on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compaction {
    /// What was discarded, zeroed or leaked is given back, in place.
    GiveBack,
    /// The file is written anew, in order and without gaps. Needs room for a second copy meanwhile.
    Rewrite,
}

/// What a compaction did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compacted {
    /// Bytes that the file took on the host before.
    pub used_before: u64,
    /// Bytes that it takes now.
    pub used_after: u64,
}

/// A piece of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskPiece {
    /// Still before the first data: bytes of the disk that were made ready, and all of them.
    Preparing(u64, u64),
    /// The file's size, bytes. Comes once, before the first data.
    Size(u64),
    /// Bytes at an offset. What is between two of these is zeros.
    Data(u64, Vec<u8>),
    /// All before this offset has been handed out.
    Reached(u64),
}

/// What a workspace disk is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskReport {
    /// What the guest sees, bytes.
    pub virtual_bytes: u64,
    /// What it takes on the host without the images that it stands on, bytes.
    pub used_bytes: u64,
    /// The disk's file first, then what it stands on.
    pub layers: Vec<DiskLayer>,
    /// How often it was opened for writing.
    pub generation: u64,
    /// What can be told without a check.
    pub state: DiskState,
    /// When it was asked for.
    pub check: Option<DiskCheck>,
}

/// One file of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskLayer {
    /// Where it is, or should be.
    pub path: String,
    /// "sha256:…" of a file that never changes; empty for the disk's own.
    pub digest: String,
    /// None: it isn't there.
    pub format: Option<DiskFormat>,
    /// What it holds, bytes.
    pub virtual_bytes: u64,
    /// What it takes on the host, bytes.
    pub used_bytes: u64,
}

/// Who may write to a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskState {
    /// Nobody has it open.
    #[default]
    AtRest,
    /// Somebody has it locked: a running sandbox, or an operation on it.
    InUse,
    /// Nobody ever, as other disks stand on it.
    Sealed,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskCheck {
    /// Descriptions of the first damages. Empty: all is in order.
    pub damages: Vec<String>,
    /// How many there are.
    pub damage_count: u64,
    /// Space that is lost until the next start or compaction, but no harm; bytes.
    pub leaked_bytes: u64,
    /// Clusters that are lost in this way.
    pub leaked_clusters: u64,
    /// Content of the guest's, bytes.
    pub data_bytes: u64,
    /// Its last writer did not close it: a guest that was killed.
    pub unclean: bool,
}
