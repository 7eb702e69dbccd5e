//! One verb of a sandbox at a time, made of steps that run to their end even when nobody waits for them any more.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Mutex as AsyncMutex, OwnedMutexGuard},
    time::timeout,
};
use torpor_sandbox::{DriverError, SandboxId};

/// How long somebody who looks waits for a step of a verb that was dropped.
const STEP_WAIT: Duration = Duration::from_millis(500);
/// So many sandboxes' locks are kept before those that nobody uses are let go.
const MANY_LOCKS: usize = 4096;

/// What lets a verb's steps run.
pub type Turn = Arc<OwnedMutexGuard<()>>;

/// One sandbox's locks.
#[derive(Clone, Debug, Default)]
struct Locks {
    /// Held by a verb and by its steps: these go on when the verb is dropped, and the next one must wait.
    verb: Arc<AsyncMutex<()>>,
    /// Held by a step that changes something: while it lasts, nobody can tell the truth.
    step: Arc<AsyncMutex<()>>,
    /// Held while what runs is looked for and taken up, so that it is taken up once.
    adopt: Arc<AsyncMutex<()>>,
}

impl Locks {
    /// Whether somebody holds or waits for one: who does has a clone of it.
    fn in_use(&self) -> bool {
        [&self.verb, &self.step, &self.adopt].iter().any(|lock| Arc::strong_count(lock) > 1)
    }
}

/// The locks of all sandboxes.
#[derive(Debug, Default)]
pub struct Turns {
    locks: Mutex<HashMap<SandboxId, Locks>>,
}

impl Turns {
    fn of(&self, id: &SandboxId) -> Locks {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if locks.len() >= MANY_LOCKS {
            locks.retain(|_, locks| locks.in_use());
        }
        locks.entry(id.clone()).or_default().clone()
    }

    /// Whether a verb or a step of it is under way, or waits.
    pub fn is_busy(&self, id: &SandboxId) -> bool {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner).get(id).is_some_and(Locks::in_use)
    }

    /// Waits for the verb or the dangling step before.
    pub async fn turn(&self, id: &SandboxId) -> Turn {
        Arc::new(self.of(id).verb.lock_owned().await)
    }

    /// One step that changes something. It runs to its end even when the caller is dropped: who was asked for it goes on
    /// with it, whoever still listens, and nobody may look or ask for something else before it is done.
    ///
    /// # Errors
    /// The step's own; a step that panics is an error of the backend.
    pub async fn step<T: Send + 'static>(
        &self,
        id: &SandboxId,
        turn: &Turn,
        work: impl Future<Output = Result<T, DriverError>> + Send + 'static,
    ) -> Result<T, DriverError> {
        let held = self.held(id, turn).await;
        let done = tokio::spawn(async move {
            let _held = held;
            work.await
        });
        done.await.unwrap_or_else(|error| Err(DriverError::backend("run a step", error)))
    }

    /// [`Turns::step`] of work that blocks.
    ///
    /// # Errors
    /// The step's own; a step that panics is an error of the backend.
    pub async fn blocking_step<T: Send + 'static>(
        &self,
        id: &SandboxId,
        turn: &Turn,
        work: impl FnOnce() -> Result<T, DriverError> + Send + 'static,
    ) -> Result<T, DriverError> {
        let held = self.held(id, turn).await;
        blocking(move || {
            let _held = held;
            work()
        })
        .await
    }

    /// Work of no verb that blocks, between the steps of those that there are: unlike a verb it doesn't wait for a guest that
    /// boots or is asked to end. It must look for itself what is still there.
    ///
    /// # Errors
    /// The work's own; work that panics is an error of the backend.
    pub async fn aside<T: Send + 'static>(
        &self,
        id: &SandboxId,
        work: impl FnOnce() -> Result<T, DriverError> + Send + 'static,
    ) -> Result<T, DriverError> {
        let guard = self.of(id).step.lock_owned().await;
        blocking(move || {
            let _held = guard;
            work()
        })
        .await
    }

    async fn held(&self, id: &SandboxId, turn: &Turn) -> (Turn, OwnedMutexGuard<()>) {
        let guard = self.of(id).step.lock_owned().await;
        (Arc::clone(turn), guard)
    }

    /// Keeps steps away for as long as it is held, for somebody who looks. None when one is under way: it may be half-way,
    /// and what is seen now would not be what is there in a moment.
    pub async fn quiet(&self, id: &SandboxId) -> Option<OwnedMutexGuard<()>> {
        let step = self.of(id).step;
        timeout(STEP_WAIT, step.lock_owned()).await.ok()
    }

    /// Keeps others from taking up what runs, for as long as it is held.
    pub async fn adopting(&self, id: &SandboxId) -> OwnedMutexGuard<()> {
        self.of(id).adopt.lock_owned().await
    }
}

/// Work that blocks, on a thread for such.
///
/// # Errors
/// The work's own; work that panics is an error of the backend.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DriverError> + Send + 'static,
) -> Result<T, DriverError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(DriverError::backend("run a step", error)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_step_goes_on_when_its_verb_is_dropped_and_the_next_verb_waits_for_it() {
        let (turns, id) = (Arc::new(Turns::default()), SandboxId::generate());
        let (finish, finished) = oneshot::channel::<()>();
        let (begin, began) = oneshot::channel::<()>();
        let verb = tokio::spawn({
            let (turns, id) = (turns.clone(), id.clone());
            async move {
                let turn = turns.turn(&id).await;
                let work = async move {
                    begin.send(()).unwrap();
                    let _ended = finished.await;
                    Ok(())
                };
                turns.step(&id, &turn, work).await
            }
        });
        began.await.unwrap();
        verb.abort();
        assert!(verb.await.unwrap_err().is_cancelled());
        assert!(turns.is_busy(&id));
        assert!(turns.quiet(&id).await.is_none());
        assert!(timeout(STEP_WAIT, turns.turn(&id)).await.is_err());
        finish.send(()).unwrap();
        let turn = turns.turn(&id).await;
        assert!(turns.quiet(&id).await.is_some());
        drop(turn);
        assert!(!turns.is_busy(&id));
    }

    #[tokio::test]
    async fn a_step_that_panics_is_an_error_and_lets_the_next_one_run() {
        let (turns, id) = (Turns::default(), SandboxId::generate());
        let turn = turns.turn(&id).await;
        let broken = turns.blocking_step::<()>(&id, &turn, || panic!("broken")).await;
        assert!(matches!(broken, Err(DriverError::Backend { .. })), "{broken:?}");
        turns.step(&id, &turn, async { Ok(()) }).await.unwrap();
    }

    #[tokio::test]
    async fn locks_that_nobody_uses_are_let_go() {
        let (turns, held) = (Turns::default(), SandboxId::generate());
        let _turn = turns.turn(&held).await;
        for _ in 0..2 * MANY_LOCKS {
            drop(turns.turn(&SandboxId::generate()).await);
        }
        assert!(turns.locks.lock().unwrap().len() <= MANY_LOCKS);
        assert!(turns.is_busy(&held));
    }
}
