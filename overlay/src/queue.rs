//! Many requests in flight over one disk: threads that are started when they are needed, completions that are called when
//! a request has ended, and futures for those who would rather wait.
//!
//! A [`Block`] does one request for each thread that calls it, in the caller's thread; for a single request at a time
//! nothing is faster. A queue is for more: [`Queue::submit`] hands a request over and returns. Requests in flight have no
//! order among each other: a flush covers the writes whose completion was called before it was submitted.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;

use crate::block::Block;
use crate::reply::{Reply, Waiting};

/// Errors that are kept for [`Queue::close`]; more are only counted.
const KEPT_ERRORS: usize = 16;

/// Runs first in each thread of a queue, for what belongs to a thread: a seccomp filter, a scheduling class.
pub type Hook = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// How much a queue takes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Threads at most, at least one. Each is busy for as long as the host takes for a request.
    pub threads: usize,
    /// Requests in flight at most, waiting or being done, at least one.
    pub depth: usize,
}

impl Default for Limits {
    /// Four threads, and the depth of a virtio queue: 256.
    fn default() -> Self {
        Self { threads: 4, depth: 256 }
    }
}

/// A request that a queue didn't take: everything comes back.
pub struct Refused<W, C> {
    /// Why: [`io::ErrorKind::WouldBlock`] when as many are in flight as may be, [`io::ErrorKind::NotConnected`] after
    /// [`Queue::close`], another kind when no thread could be started.
    pub error: io::Error,
    /// The request.
    pub work: W,
    /// Its completion, which hasn't been called.
    pub completion: C,
}

/// What went wrong and nobody has been told of before.
#[derive(Debug, thiserror::Error)]
#[error("the disk was not closed in order: {} ({more} more)", shown(errors))]
pub struct CloseError {
    /// The first 16 errors: of requests whose futures were dropped, of hooks, of completions, and of the closing itself.
    pub errors: Vec<io::Error>,
    /// How many more there were.
    pub more: usize,
}

fn shown(errors: &[io::Error]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// A request's result, and what it gives back.
type Done<T> = (io::Result<()>, T);

type Job = Box<dyn FnOnce(&Shared, Option<io::Error>) + Send>;

/// A front to a disk, for many requests at a time. Clones are the same queue.
///
/// Dropped without [`Queue::close`], the threads end when all that is in flight is done; nobody waits for that, and the
/// disk isn't closed.
#[derive(Clone)]
pub struct Queue {
    handle: Arc<Handle>,
}

/// What all clones of a queue have in common, and the threads have not.
struct Handle {
    shared: Arc<Shared>,
}

struct Shared {
    disk: Arc<dyn Block>,
    limits: Limits,
    hook: Hook,
    /// Requests that count against the depth.
    taken: AtomicUsize,
    /// How many there are in `State::waiting`.
    waiting: AtomicUsize,
    state: Mutex<State>,
    /// There is a job, or no more will come.
    work: Condvar,
    /// Nothing is in flight.
    idle: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Jobs that wait or whose completion hasn't returned.
    in_flight: usize,
    threads: Vec<JoinHandle<()>>,
    /// Threads that will look for jobs.
    alive: usize,
    sleeping: usize,
    /// Sleeping threads that have been called.
    called: usize,
    closing: bool,
    /// Why no further thread is started.
    unstartable: Option<String>,
    /// Who waits for room.
    waiting: Vec<Waker>,
    errors: Vec<io::Error>,
    more_errors: usize,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = formatter.debug_struct("Queue");
        shown
            .field("limits", &self.handle.shared.limits)
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

impl Queue {
    /// A queue over a disk. No thread is started before the first request.
    pub fn new(disk: Arc<dyn Block>, limits: Limits, hook: Hook) -> Self {
        let limits = Limits { threads: limits.threads.max(1), depth: limits.depth.max(1) };
        let shared = Shared {
            disk,
            limits,
            hook,
            taken: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            state: Mutex::default(),
            work: Condvar::new(),
            idle: Condvar::new(),
        };
        Self { handle: Arc::new(Handle { shared: Arc::new(shared) }) }
    }

    /// Requests that have been submitted and whose completion hasn't returned.
    pub fn in_flight(&self) -> usize {
        self.handle.shared.lock().in_flight
    }

    /// Hands a request over: `work` is called with the disk in one of the queue's threads, then `completion` with its
    /// result in the same thread. Never waits. A completion may submit, and finds room for one at least; one that takes
    /// long keeps a thread from its work.
    ///
    /// # Errors
    /// [`Refused`] with both when there is no room, after close, or when no thread can be started. The disk's own
    /// errors go to the completion; so does a panic of `work`.
    pub fn submit<W, C>(&self, work: W, completion: C) -> Result<(), Refused<W, C>>
    where
        W: FnOnce(&dyn Block) -> io::Result<()> + Send + 'static,
        C: FnOnce(io::Result<()>) + Send + 'static,
    {
        let shared = &self.handle.shared;
        if !shared.take_room() {
            let error = if shared.lock().closing { closed() } else { full() };
            return Err(Refused { error, work, completion });
        }
        let mut state = shared.lock();
        if let Err(error) = shared.ready(&mut state) {
            drop(state);
            shared.give_room();
            return Err(Refused { error, work, completion });
        }
        let job: Job = Box::new(move |shared, failed| {
            let result = match failed {
                None => caught(|| work(&*shared.disk)),
                Some(error) => Err(error),
            };
            shared.give_room();
            if catch_unwind(AssertUnwindSafe(|| completion(result))).is_err() {
                shared.keep_error(io::Error::other("the completion of a request panicked"));
            }
        });
        shared.enqueue(state, job);
        Ok(())
    }

    /// Fills a buffer from `offset` on, and returns it. Like all futures here it waits for room, starts when it is first
    /// polled, runs in any executor, and leaves the request in flight when it is dropped.
    ///
    /// # Errors
    /// Those of [`Block::readv`], or the queue's (see [`Refused::error`]); the buffer comes back either way.
    pub async fn read(&self, mut buffer: Vec<u8>, offset: u64) -> (io::Result<()>, Vec<u8>) {
        self.perform(move |disk| {
            let result = disk.and_then(|disk| caught(|| disk.read(&mut buffer, offset)));
            (result, buffer)
        })
        .await
    }

    /// Writes a buffer from `offset` on, and returns it.
    ///
    /// # Errors
    /// Those of [`Block::writev`], or the queue's.
    pub async fn write(&self, data: Vec<u8>, offset: u64) -> (io::Result<()>, Vec<u8>) {
        self.perform(move |disk| {
            let result = disk.and_then(|disk| caught(|| disk.write(&data, offset)));
            (result, data)
        })
        .await
    }

    /// [`Block::flush`].
    ///
    /// # Errors
    /// Those of [`Block::flush`], or the queue's.
    pub async fn flush(&self) -> io::Result<()> {
        self.simple(|disk| disk.flush()).await
    }

    /// [`Block::discard`].
    ///
    /// # Errors
    /// Those of [`Block::discard`], or the queue's.
    pub async fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.simple(move |disk| disk.discard(offset, length)).await
    }

    /// [`Block::write_zeroes`].
    ///
    /// # Errors
    /// Those of [`Block::write_zeroes`], or the queue's.
    pub async fn write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.simple(move |disk| disk.write_zeroes(offset, length)).await
    }

    async fn simple(
        &self,
        work: impl FnOnce(&dyn Block) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        self.perform(move |disk| (disk.and_then(|disk| caught(|| work(disk))), ())).await.0
    }

    /// Waits for room, then for the result. The work is called also when there is no disk to be had, so that it can
    /// give back what it owns.
    async fn perform<T: Send + 'static>(
        &self,
        work: impl FnOnce(io::Result<&dyn Block>) -> Done<T> + Send + 'static,
    ) -> Done<T> {
        poll_fn(|context| self.handle.shared.poll_room(context)).await;
        match self.send(work) {
            Ok(reply) => reply.await,
            Err(refused) => refused,
        }
    }

    /// Enqueues work for which there is room; the result is that of the work without a disk when that fails.
    fn send<T: Send + 'static>(
        &self,
        work: impl FnOnce(io::Result<&dyn Block>) -> Done<T> + Send + 'static,
    ) -> Result<Waiting<Done<T>>, Done<T>> {
        let shared = &self.handle.shared;
        let mut state = shared.lock();
        if let Err(error) = shared.ready(&mut state) {
            drop(state);
            shared.give_room();
            return Err(work(Err(error)));
        }
        let (reply, waiting) = Reply::new();
        let job: Job = Box::new(move |shared, failed| {
            let done = work(failed.map_or(Ok(&*shared.disk), Err));
            shared.give_room();
            if let Some((Err(error), _)) = reply.give(done) {
                shared.keep_error(error);
            }
        });
        shared.enqueue(state, job);
        Ok(waiting)
    }

    /// Takes no more requests, waits for all that are in flight and for their completions, ends the threads and closes
    /// the disk ([`Block::close`]).
    ///
    /// # Errors
    /// [`CloseError`] with everything that went wrong and was told to nobody yet. From a completion, where it would wait
    /// for itself, it does nothing but fail.
    pub fn close(&self) -> Result<(), CloseError> {
        let shared = &self.handle.shared;
        let mut state = shared.lock();
        let own = std::thread::current().id();
        let refused = match state.threads.iter().any(|thread| thread.thread().id() == own) {
            true => Some(io::Error::new(io::ErrorKind::Deadlock, "a completion can't close its queue")),
            false => state.closing.then(closed),
        };
        if let Some(error) = refused {
            return Err(CloseError { errors: vec![error], more: 0 });
        }
        state.closing = true;
        shared.wake_waiting(&mut state);
        while state.in_flight > 0 {
            state = shared.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        shared.work.notify_all();
        for thread in threads {
            if thread.join().is_err() {
                shared.keep_error(io::Error::other("a thread of the queue panicked"));
            }
        }
        if let Err(error) = shared.disk.close() {
            shared.keep_error(error);
        }
        let mut state = shared.lock();
        let (errors, more) = (std::mem::take(&mut state.errors), state.more_errors);
        if errors.is_empty() { Ok(()) } else { Err(CloseError { errors, more }) }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_room(&self) -> bool {
        let more = |taken| (taken < self.limits.depth).then_some(taken + 1);
        self.taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }

    fn give_room(&self) {
        self.taken.fetch_sub(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            let mut state = self.lock();
            self.wake_waiting(&mut state);
        }
    }

    /// All are woken, so that one that was dropped meanwhile keeps nobody waiting.
    fn wake_waiting(&self, state: &mut State) {
        self.waiting.store(0, Ordering::SeqCst);
        state.waiting.drain(..).for_each(Waker::wake);
    }

    /// Room, or a closed queue, which the caller finds out with [`Shared::ready`]; either way it counts against the depth.
    fn poll_room(&self, context: &mut Context<'_>) -> Poll<()> {
        if self.take_room() {
            return Poll::Ready(());
        }
        let mut state = self.lock();
        state.waiting.push(context.waker().clone());
        self.waiting.store(state.waiting.len(), Ordering::SeqCst);
        // Room that was given before that store has woken nobody.
        if self.take_room() {
            return Poll::Ready(());
        }
        if state.closing {
            self.taken.fetch_add(1, Ordering::SeqCst);
            return Poll::Ready(());
        }
        Poll::Pending
    }

    /// Fails when no more requests are taken; makes sure that a thread is there otherwise.
    fn ready(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        if state.closing {
            return Err(closed());
        }
        let idle = state.sleeping - state.called;
        if idle <= state.jobs.len() && state.alive < self.limits.threads && state.unstartable.is_none() {
            self.start(state);
        }
        match (&state.unstartable, state.alive) {
            (Some(why), 0) => Err(io::Error::other(format!("no thread for the disk's requests: {why}"))),
            _ => Ok(()),
        }
    }

    fn start(self: &Arc<Self>, state: &mut State) {
        let shared = Arc::clone(self);
        let builder = std::thread::Builder::new().name(format!("disk-{}", state.threads.len()));
        match builder.spawn(move || shared.serve()) {
            Ok(thread) => {
                state.threads.push(thread);
                state.alive += 1;
            }
            // With some threads there, work goes on; the next request tries again.
            Err(_) if state.alive > 0 => {}
            Err(error) => state.unstartable = Some(format!("starting one failed: {error}")),
        }
    }

    fn enqueue(&self, mut state: MutexGuard<'_, State>, job: Job) {
        state.jobs.push_back(job);
        state.in_flight += 1;
        let call = state.sleeping > state.called;
        state.called += usize::from(call);
        drop(state);
        if call {
            self.work.notify_one();
        }
    }

    /// The life of a thread.
    fn serve(&self) {
        if let Err(error) = caught(|| (self.hook)()) {
            return self.give_up(error);
        }
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job(self, None);
                state = self.lock();
                self.ended(&mut state, 1);
            } else if state.closing {
                return;
            } else {
                state.sleeping += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleeping -= 1;
                state.called = state.called.saturating_sub(1).min(state.sleeping);
            }
        }
    }

    fn ended(&self, state: &mut State, count: usize) {
        state.in_flight -= count;
        if state.in_flight == 0 {
            self.idle.notify_all();
        }
    }

    /// A thread whose hook failed; the last one fails what waits.
    fn give_up(&self, error: io::Error) {
        let mut state = self.lock();
        state.alive -= 1;
        state.unstartable.get_or_insert_with(|| error.to_string());
        let left = match state.alive {
            0 => std::mem::take(&mut state.jobs),
            _ => VecDeque::new(),
        };
        drop(state);
        let text = format!("no thread for the disk's requests: {error}");
        self.keep_error(error);
        let count = left.len();
        left.into_iter().for_each(|job| job(self, Some(io::Error::other(text.clone()))));
        self.ended(&mut self.lock(), count);
    }

    fn keep_error(&self, error: io::Error) {
        let mut state = self.lock();
        match state.errors.len() < KEPT_ERRORS {
            true => state.errors.push(error),
            false => state.more_errors += 1,
        }
    }
}

/// A panic becomes an error: the thread has other requests to do.
fn caught(work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(io::Error::other("a request panicked")))
}

fn full() -> io::Error {
    io::Error::new(io::ErrorKind::WouldBlock, "as many requests are in flight as the queue takes")
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the queue has been closed")
}
