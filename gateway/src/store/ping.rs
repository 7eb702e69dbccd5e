//! Whether the database can be written: found out by writing.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::watch;

use super::{Store, StoreError, now, schema};

/// How long an answer is good for.
const FRESH: Duration = Duration::from_secs(1);

type Answer = watch::Receiver<Option<Result<(), Arc<StoreError>>>>;

/// The last attempt and when it was begun.
#[derive(Default)]
pub(super) struct Pings(Mutex<Option<(Instant, Answer)>>);

impl Store {
    /// Whether the database can be written. A row is written for it, at most once a second and once at a time, however many
    /// ask.
    ///
    /// # Errors
    /// Why not.
    pub async fn ping(self: &Arc<Self>) -> Result<(), Arc<StoreError>> {
        let mut answer = self.attempt();
        let said = answer.wait_for(Option::is_some).await.map_err(|_| StoreError::Closed)?;
        said.clone().unwrap_or_else(|| Err(Arc::new(StoreError::Closed)))
    }

    /// The attempt that is under way or was made a moment ago, or a new one.
    fn attempt(self: &Arc<Self>) -> Answer {
        let mut last = self.pings.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((begun, answer)) = &*last
            && (begun.elapsed() < FRESH || is_under_way(answer))
        {
            return answer.clone();
        }
        let (told, answer) = watch::channel(None);
        *last = Some((Instant::now(), answer.clone()));
        let store = self.clone();
        // A task of its own: one whose callers have given up still waits for the writer, and no second one is begun.
        tokio::spawn(async move {
            let done = store.write(|conn, _| schema::set_meta(conn, "pinged", &now().to_string())).await;
            told.send_replace(Some(done.map_err(Arc::new)));
        });
        answer
    }
}

fn is_under_way(answer: &Answer) -> bool {
    answer.borrow().is_none() && answer.has_changed().is_ok()
}
