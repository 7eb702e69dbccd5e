//! What is being done right now: not durable, for people and for waits.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::broadcast;
use torpor_sandbox::SandboxId;

use crate::byid::ById;

/// A failure that is being retried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Code for programs.
    pub reason: String,
    /// Cause for people.
    pub message: String,
}

impl Trouble {
    /// A trouble.
    pub fn new(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { reason: reason.into(), message: message.into() }
    }
}

/// The step under way and what stands in its way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// The step ("start").
    pub step: &'static str,
    /// Why it is being tried again.
    pub trouble: Option<Trouble>,
}

/// Steps of every sandbox that has something to do.
pub struct Progress {
    now: Mutex<HashMap<SandboxId, Now>>,
    changed: broadcast::Sender<SandboxId>,
    listeners: ById<()>,
}

impl Default for Progress {
    fn default() -> Self {
        Self { now: Mutex::default(), changed: broadcast::channel(4096).0, listeners: ById::default() }
    }
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Now>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, id: &SandboxId, change: impl FnOnce(&mut Now)) {
        let changed = {
            let mut all = self.lock();
            let now = all.entry(id.clone()).or_default();
            let before = now.clone();
            change(now);
            before != *now
        };
        if changed {
            self.listeners.send(id, || ());
            // Nobody listens.
            let _ = self.changed.send(id.clone());
        }
    }

    /// A step begins; what stood in the way of the last one is forgotten.
    pub fn step(&self, id: &SandboxId, step: &'static str) {
        self.update(id, |now| *now = Now { step, trouble: None });
    }

    /// A step failed and is tried again.
    pub fn trouble(&self, id: &SandboxId, trouble: Trouble) {
        self.update(id, |now| now.trouble = Some(trouble));
    }

    /// Something else that is not durable was noticed of a sandbox: whoever watches looks again.
    pub fn noticed(&self, id: &SandboxId) {
        // Nobody listens.
        let _ = self.changed.send(id.clone());
    }

    /// Nothing is under way.
    pub fn clear(&self, id: &SandboxId) {
        self.lock().remove(id);
    }

    /// The present step.
    pub fn get(&self, id: &SandboxId) -> Option<Now> {
        self.lock().get(id).cloned()
    }

    /// Word that the step of one sandbox changed.
    pub fn subscribe_to(&self, id: &SandboxId) -> broadcast::Receiver<()> {
        self.listeners.subscribe(id)
    }

    /// Ids whose step changed.
    pub fn subscribe(&self) -> broadcast::Receiver<SandboxId> {
        self.changed.subscribe()
    }
}
