//! How many verbs are done at once, and how long drivers take for them.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use tokio::sync::{Semaphore, SemaphorePermit};
use torpor_sandbox::Step;

use crate::metrics::DriverCalls;

/// Places of verbs of one kind.
pub struct Pool {
    name: &'static str,
    places: Semaphore,
    most: usize,
    waiting: AtomicUsize,
}

impl Pool {
    /// None is taken.
    pub fn new(name: &'static str, most: usize) -> Self {
        Self { name, places: Semaphore::new(most), most, waiting: AtomicUsize::new(0) }
    }

    /// Waits for one.
    ///
    /// # Errors
    /// Never: it is not closed.
    pub async fn place(&self) -> Result<SemaphorePermit<'_>, tokio::sync::AcquireError> {
        struct Counted<'a>(&'a AtomicUsize);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let _counted = Counted(&self.waiting);
        self.places.acquire().await
    }

    /// What it has to do now.
    pub fn load(&self) -> PoolLoad {
        let running = self.most.saturating_sub(self.places.available_permits());
        PoolLoad { name: self.name, waiting: self.waiting.load(Ordering::Relaxed), running }
    }
}

/// What a pool has to do.
#[derive(Clone, Copy, Debug)]
pub struct PoolLoad {
    /// "start".
    pub name: &'static str,
    /// Verbs that wait for a place.
    pub waiting: usize,
    /// Verbs that have one.
    pub running: usize,
}

/// What there is to do.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Sandboxes that have something to do.
    pub active: usize,
    /// Those that wait for something of the host.
    pub hungry: usize,
    /// By kind of verb.
    pub pools: [PoolLoad; 4],
}

/// A call of a driver under way: counted as dropped unless its end is told.
pub struct Call<'a> {
    calls: &'a DriverCalls,
    driver: &'a str,
    verb: &'static str,
    begun: Instant,
    ended: bool,
}

impl<'a> Call<'a> {
    /// It begins.
    pub fn begin(calls: &'a DriverCalls, driver: &'a str, verb: &'static str) -> Self {
        Self { calls, driver, verb, begun: Instant::now(), ended: false }
    }

    /// It is over, and why it failed.
    pub fn end(mut self, failed: Option<&'static str>) {
        self.ended = true;
        self.calls.note(self.driver, self.verb, self.begun.elapsed(), failed);
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.calls.note(self.driver, self.verb, self.begun.elapsed(), Some("DROPPED"));
        }
    }
}

/// What a driver is asked for, in one word.
pub fn verb_name(step: &Step) -> &'static str {
    match step {
        Step::Create => "create",
        Step::Start(_) => "start",
        Step::Stop(_) => "stop",
        Step::Delete => "delete",
        Step::Rest | Step::Wait | Step::Happened(_) => "observe",
    }
}
