//! Who is connected to a running sandbox. On leaving Ready every session ends, and none comes back by itself.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;
use torpor_sandbox::SandboxId;

use crate::ssh::SshSessions;

/// Tokens by sandbox.
#[derive(Default)]
pub struct Sessions {
    all: Mutex<HashMap<SandboxId, CancellationToken>>,
    /// Leave to open SSH connections.
    pub ssh: SshSessions,
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, CancellationToken>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A token that is cancelled when the sandbox leaves Ready. Take it first, then look whether the sandbox is Ready:
    /// the other way round it could leave in between unseen.
    pub fn join(&self, id: &SandboxId) -> CancellationToken {
        self.lock().entry(id.clone()).or_default().child_token()
    }

    /// Ends every session of a sandbox.
    pub fn revoke(&self, id: &SandboxId) {
        if let Some(token) = self.lock().remove(id) {
            token.cancel();
        }
    }

    /// Sandboxes that somebody is or was connected to.
    pub fn ids(&self) -> Vec<SandboxId> {
        self.lock().keys().cloned().collect()
    }
}
