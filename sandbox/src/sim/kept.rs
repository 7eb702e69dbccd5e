//! What outlives the process of a pretended world.

use serde::{Deserialize, Serialize};

use super::World;
use crate::{SandboxId, SandboxSpec, spec::Egress};

/// A piece of the pretended world that outlives its process: what one sandbox has come to, or what went against the
/// contract.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kept(pub(super) KeptPiece);

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum KeptPiece {
    World(SandboxId, World),
    Violation(String),
}

impl Kept {
    /// The violation, if it is one.
    pub fn violation(&self) -> Option<&str> {
        match &self.0 {
            KeptPiece::Violation(text) => Some(text),
            KeptPiece::World(..) => None,
        }
    }

    /// A sandbox and its stored spec.
    pub fn spec(&self) -> Option<(&SandboxId, &SandboxSpec)> {
        match &self.0 {
            KeptPiece::World(id, world) => world.spec.as_deref().map(|spec| (id, spec)),
            KeptPiece::Violation(_) => None,
        }
    }

    /// A sandbox, and where its compute may send to by its own policy.
    pub fn egress(&self) -> Option<(&SandboxId, Option<&Egress>)> {
        match &self.0 {
            KeptPiece::Violation(_) => None,
            KeptPiece::World(id, world) => Some((id, world.egress.as_ref())),
        }
    }

    /// A sandbox, the number of its disk if it has one, and whether its compute runs.
    pub fn sandbox(&self) -> Option<(&SandboxId, Option<u64>, bool)> {
        match &self.0 {
            KeptPiece::Violation(_) => None,
            KeptPiece::World(id, world) => {
                Some((id, world.storage.then_some(world.disk_id), world.compute.is_some()))
            }
        }
    }
}
