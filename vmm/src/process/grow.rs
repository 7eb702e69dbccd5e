//! A disk that becomes larger while its guest runs.

use std::sync::Arc;

use torpor_overlay::{Block as _, Error, Overlay};
use torpor_vmm_api::{GrowProblem, Reply};
use torpor_vmm_devices::virtio::block::BlockHandle;

use super::error::with_causes;

/// A disk of the running VM.
pub(super) struct RunningDisk {
    /// Its serial number.
    pub(super) serial: String,
    /// None: a raw disk, which does not grow.
    pub(super) overlay: Option<Arc<Overlay>>,
    pub(super) handle: BlockHandle,
}

/// Grows the overlay, and tells the guest. Requests wait until it is done.
pub(super) fn grow(disks: &[RunningDisk], serial: &str, bytes: u64) -> Reply {
    let refused = |problem, reason| Reply::NotGrown { problem, reason };
    let Some(disk) = disks.iter().find(|disk| disk.serial == serial) else {
        return refused(GrowProblem::Invalid, format!("there is no disk with the serial number {serial:?}"));
    };
    let Some(overlay) = &disk.overlay else {
        return refused(
            GrowProblem::Invalid,
            format!("the disk {serial:?} is a raw one, which doesn't grow"),
        );
    };
    let before = overlay.size();
    let grown = overlay.grow(bytes);
    let now = overlay.size();
    // Also after a failure that came when it was larger already.
    if now != before {
        disk.handle.resized();
    }
    match grown {
        Ok(()) => Reply::Grown { bytes: now },
        Err(error) => refused(problem(&error), with_causes(&error)),
    }
}

fn problem(error: &Error) -> GrowProblem {
    match error {
        Error::TooSmall { .. } | Error::TooLarge { .. } => GrowProblem::Invalid,
        Error::NoSpace { .. } => GrowProblem::NoSpace,
        _ => GrowProblem::Failed,
    }
}
