//! News about one sandbox for those who wait for it, so that twenty thousand waits don't wake each other.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::broadcast;
use torpor_sandbox::SandboxId;

/// News that wait for a slow listener; one that lags looks at the sandbox itself.
const BUFFER: usize = 16;
/// So many listeners, and those who have gone are looked for.
const MANY: usize = 1024;

/// Listeners by sandbox.
pub struct ById<T>(Mutex<HashMap<SandboxId, broadcast::Sender<T>>>);

impl<T> Default for ById<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> ById<T> {
    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, broadcast::Sender<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// News of `id` from now on.
    pub fn subscribe(&self, id: &SandboxId) -> broadcast::Receiver<T> {
        let mut all = self.lock();
        if all.len() >= MANY && all.len().is_power_of_two() {
            all.retain(|_, sender| sender.receiver_count() > 0);
        }
        all.entry(id.clone()).or_insert_with(|| broadcast::channel(BUFFER).0).subscribe()
    }

    /// Tells those who listen.
    pub fn send(&self, id: &SandboxId, news: impl FnOnce() -> T) {
        let mut all = self.lock();
        if let Some(sender) = all.get(id)
            && sender.send(news()).is_err()
        {
            all.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_who_wait_for_a_sandbox_hear_of_it_and_those_who_have_gone_are_forgotten() {
        let all = ById::default();
        let (one, other) = (SandboxId::generate(), SandboxId::generate());
        let (mut first, second) = (all.subscribe(&one), all.subscribe(&other));
        all.send(&one, || 1);
        assert_eq!(first.try_recv(), Ok(1));
        assert!(second.is_empty());
        drop(second);
        all.send(&other, || 2);
        assert_eq!(all.lock().len(), 1);
    }
}
