//! The threads of a block device.
//!
//! One thread takes requests from the ring. A lone request it does itself, which costs no switch to another thread. When
//! there are several, it hands them to workers, which are started as they are needed, up to [`WORKERS`], and end when
//! they have had nothing to do for a while; what finds no free worker it does itself. So at most `WORKERS + 1` requests
//! are out of the ring, and they come back in any order.
//!
//! What fails because the host is full isn't answered: it waits in [`Room`], and the workers try it again.
//!
//! A flush covers every write that came back before it was taken, as the disk's own flush does; it waits for no other.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use torpor_overlay::{Block, is_full};
use torpor_vmm_api::ThreadKind;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
};
use vmm_sys_util::eventfd::EventFd;

use super::request::{ID_BYTES, Limits, Range, Request, parse};
use super::room::Room;
use crate::host::{Surroundings, spawn};
use crate::virtio::rate::Limiter;
use crate::virtio::ring::{Chain, Ring};
use crate::virtio::segments::LastByte;
use crate::virtio::{Activation, Interrupt};

/// Most workers of a device.
const WORKERS: usize = 4;
/// A worker without work ends after this time.
const IDLE: Duration = Duration::from_secs(5);
/// For how many requests after the last company a request that seems alone is still given to a worker.
const COMPANY: u8 = 32;

/// A disk as the guest sees it.
pub(super) struct Disk {
    pub(super) disk: Arc<dyn Block>,
    pub(super) serial: [u8; ID_BYTES],
    pub(super) read_only: bool,
}

/// A request that was taken and not yet given back.
pub(super) struct Job {
    request: Request,
    chain: Chain,
    status: LastByte,
    /// Bytes that the guest is told were written: its buffers' size, and the status.
    written: u32,
    /// When it first failed because the host was full.
    waits_since: Option<Instant>,
}

/// What came of doing a request.
enum Outcome {
    /// The status to answer with.
    Answer(u8),
    /// The host is full.
    Full,
}

const IO_ERROR: u8 = VIRTIO_BLK_S_IOERR as u8;

/// A device at work.
pub(super) struct Service {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

struct Shared {
    disk: Arc<Disk>,
    /// Writes are made durable at once, as the driver can't flush.
    write_through: bool,
    kick: EventFd,
    interrupt: Arc<Interrupt>,
    broken: Arc<dyn Fn(&str) + Send + Sync>,
    surroundings: Arc<dyn Surroundings>,
    core: Mutex<Core>,
    /// There are jobs for workers, or it is over.
    work: Condvar,
    /// Pause, stop, or nothing is in flight any more.
    changed: Condvar,
}

struct Core {
    ring: Ring,
    limiter: Limiter,
    jobs: VecDeque<Job>,
    /// Jobs that wait for room on the host: taken, but not in flight.
    room: Room<Job>,
    /// Jobs that have found no room and aren't answered: they wait, or are being tried again.
    short: usize,
    /// Chains to be used again.
    spare: Vec<Chain>,
    workers: Vec<JoinHandle<()>>,
    /// Workers that wait for a job.
    idle: usize,
    /// Workers that live.
    alive: usize,
    in_flight: usize,
    company: u8,
    paused: bool,
    /// The guest broke the rules: nothing more is taken.
    dead: bool,
    stopping: bool,
}

/// What the taking thread is to do.
enum Step {
    Do(Job),
    /// Sleep until the driver kicks.
    Kick,
    /// Sleep until something changes, or this long.
    Change(Option<Duration>),
    End,
}

impl Service {
    /// Starts the thread that takes requests.
    pub(super) fn start(
        disk: Arc<Disk>,
        room: Room<Job>,
        ring: Ring,
        kick: EventFd,
        activation: &Activation,
        limiter: Limiter,
        surroundings: &Arc<dyn Surroundings>,
    ) -> io::Result<Self> {
        let core = Core {
            ring,
            limiter,
            jobs: VecDeque::new(),
            room,
            short: 0,
            spare: Vec::new(),
            workers: Vec::new(),
            idle: 0,
            alive: 0,
            in_flight: 0,
            company: 0,
            paused: false,
            dead: false,
            stopping: false,
        };
        let shared = Arc::new(Shared {
            disk,
            write_through: activation.features & 1 << VIRTIO_BLK_F_FLUSH == 0,
            kick,
            interrupt: Arc::clone(&activation.interrupt),
            broken: Arc::clone(&activation.broken),
            surroundings: Arc::clone(surroundings),
            core: Mutex::new(core),
            work: Condvar::new(),
            changed: Condvar::new(),
        });
        let served = Arc::clone(&shared);
        let thread = spawn(surroundings, ThreadKind::Block, move || serve(&served))?;
        Ok(Self { shared, thread })
    }

    /// Takes nothing more, finishes what was taken, ends all threads.
    pub(super) fn stop(self) {
        self.shared.core().stopping = true;
        self.shared.changed.notify_all();
        self.shared.work.notify_all();
        // A kick too many is nothing to anybody.
        let _ = self.shared.kick.write(1);
        // A thread that panicked has nothing left to say.
        let _ = self.thread.join();
        let workers = std::mem::take(&mut self.shared.core().workers);
        for worker in workers {
            let _ = worker.join();
        }
        self.shared.core().tell_room(&self.shared);
    }

    /// Takes nothing more until it goes on; returns when what was taken is done, or waits for room.
    pub(super) fn pause(&self, paused: bool) {
        let mut core = self.shared.core();
        core.paused = paused;
        self.shared.changed.notify_all();
        self.shared.work.notify_all();
        while paused && core.in_flight > 0 {
            core = self.shared.changed.wait(core).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The taking thread.
fn serve(shared: &Arc<Shared>) {
    let mut core = shared.core();
    loop {
        match core.step(shared) {
            Step::Do(job) => match core.delegate(shared, job) {
                None => {}
                Some(mut job) => {
                    drop(core);
                    let outcome = shared.run(&mut job);
                    core = shared.core();
                    core.note_company();
                    core.finish(shared, job, outcome);
                }
            },
            Step::Kick => {
                drop(core);
                // When a signal interrupts it, the ring is looked at for nothing.
                let _ = shared.kick.read();
                core = shared.core();
            }
            Step::Change(None) => core = shared.changed.wait(core).unwrap_or_else(PoisonError::into_inner),
            Step::Change(Some(time)) => {
                let waited = shared.changed.wait_timeout(core, time);
                core = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
            Step::End => return,
        }
    }
}

/// A worker.
fn work(shared: &Arc<Shared>) {
    let mut core = shared.core();
    loop {
        core.try_again();
        if let Some(mut job) = core.jobs.pop_front() {
            drop(core);
            let outcome = shared.run(&mut job);
            core = shared.core();
            core.finish(shared, job, outcome);
            continue;
        }
        if core.stopping {
            break;
        }
        let time =
            core.room.pause(Instant::now()).filter(|_| !core.paused).map_or(IDLE, |time| time.min(IDLE));
        core.idle += 1;
        let waited = shared.work.wait_timeout(core, time).unwrap_or_else(PoisonError::into_inner);
        core = waited.0;
        core.idle -= 1;
        if waited.1.timed_out() && core.jobs.is_empty() && !core.room.is_waited_for() {
            break;
        }
    }
    core.alive -= 1;
}

impl Shared {
    fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does a request.
    fn run(&self, job: &mut Job) -> Outcome {
        let Disk { disk, serial, .. } = &*self.disk;
        let segments = &mut job.chain;
        let result = match &job.request {
            Request::Read(offset) => disk.readv(segments.writable.slices_mut(), *offset),
            Request::Write(offset) => {
                disk.writev(segments.readable.slices(), *offset).and_then(|()| self.written())
            }
            Request::Flush if self.disk.read_only => Ok(()),
            Request::Flush => disk.flush(),
            Request::Identify => {
                segments.writable.fill(0, serial);
                Ok(())
            }
            Request::Discard(ranges) => self.each(ranges, |range| disk.discard(range.offset, range.length)),
            Request::WriteZeroes(ranges) => {
                self.each(ranges, |range| disk.write_zeroes(range.offset, range.length))
            }
            Request::Refused(status) => return Outcome::Answer(*status),
        };
        Outcome::Answer(match result {
            Ok(()) => VIRTIO_BLK_S_OK as u8,
            Err(error) if error.kind() == io::ErrorKind::Unsupported => VIRTIO_BLK_S_UNSUPP as u8,
            Err(error) if is_full(&error) => return Outcome::Full,
            Err(_) => IO_ERROR,
        })
    }

    fn each(&self, ranges: &[Range], work: impl FnMut(&Range) -> io::Result<()>) -> io::Result<()> {
        ranges.iter().filter(|range| range.length > 0).try_for_each(work)?;
        self.written()
    }

    /// After a change of the disk.
    fn written(&self) -> io::Result<()> {
        match self.write_through {
            true => self.disk.disk.flush(),
            false => Ok(()),
        }
    }
}

impl Core {
    /// Takes the next request, or finds out what to wait for.
    fn step(&mut self, shared: &Shared) -> Step {
        if self.stopping {
            return Step::End;
        }
        if self.paused || self.dead {
            return Step::Change(None);
        }
        let taken = self.take(shared).unwrap_or_else(|reason| {
            self.dead = true;
            (shared.broken)(&reason);
            Step::Change(None)
        });
        if matches!(taken, Step::Do(_)) {
            self.in_flight += 1;
        }
        taken
    }

    fn take(&mut self, shared: &Shared) -> Result<Step, String> {
        let of_queue = |error| format!("queue 0: {error}");
        if !self.limiter.is_open() && self.ring.waiting().map_err(of_queue)? > 0 {
            let wait = self.limiter.wait(Instant::now());
            if !wait.is_zero() {
                return Ok(Step::Change(Some(wait)));
            }
        }
        let mut chain = self.spare.pop().unwrap_or_else(|| self.ring.chain());
        while !self.ring.pop(&mut chain).map_err(of_queue)? {
            if !self.ring.enable_kicks().map_err(of_queue)? {
                self.spare.push(chain);
                return Ok(Step::Kick);
            }
        }
        self.ring.disable_kicks();
        let room = chain.writable.bytes();
        let limits = Limits { size: shared.disk.disk.size(), read_only: shared.disk.read_only };
        let parsed = parse(&mut chain.readable, &mut chain.writable, &limits);
        let (request, status) = parsed.map_err(|error| error.to_string())?;
        self.limiter.take(chain.readable.bytes() + chain.writable.bytes());
        let written = u32::try_from(room).unwrap_or(u32::MAX);
        Ok(Step::Do(Job { request, chain, status, written, waits_since: None }))
    }

    /// Requests have come while one was done: the next ones will hardly be alone.
    fn note_company(&mut self) {
        if self.ring.waiting().is_ok_and(|waiting| waiting > 0) {
            self.company = COMPANY;
        }
    }

    /// Gives a job to a worker if it isn't alone and one is free or can be started; else it comes back.
    fn delegate(&mut self, shared: &Arc<Shared>, job: Job) -> Option<Job> {
        match self.ring.waiting() {
            Ok(0) => self.company = self.company.saturating_sub(1),
            _ => self.company = COMPANY,
        }
        if self.company == 0 || !(self.idle > self.jobs.len() || self.start_worker(shared)) {
            return Some(job);
        }
        self.jobs.push_back(job);
        shared.work.notify_one();
        None
    }

    fn start_worker(&mut self, shared: &Arc<Shared>) -> bool {
        if self.alive >= WORKERS {
            return false;
        }
        self.workers.retain(|worker| !worker.is_finished());
        let its = Arc::clone(shared);
        match spawn(&shared.surroundings, ThreadKind::BlockWorker, move || work(&its)) {
            Ok(worker) => {
                self.workers.push(worker);
                self.alive += 1;
                true
            }
            // Slower, but as good.
            Err(_) => false,
        }
    }

    /// What waited for room becomes work again, when it is time or all is to end.
    fn try_again(&mut self) {
        let due = self.room.pause(Instant::now()).is_some_and(|time| time.is_zero()) && !self.paused;
        if due || self.stopping {
            let jobs = self.room.take();
            self.in_flight += jobs.len();
            self.jobs.extend(jobs);
        }
    }

    /// Answers a request, or lets it wait for room.
    fn finish(&mut self, shared: &Arc<Shared>, job: Job, outcome: Outcome) {
        match outcome {
            Outcome::Answer(status) => {
                let wrote = job.request.changes() || job.waits_since.is_some();
                let written = status == VIRTIO_BLK_S_OK as u8 && wrote;
                self.give_back(shared, job, status);
                if written {
                    self.tell_room(shared);
                }
            }
            Outcome::Full => self.wait_for_room(shared, job),
        }
    }

    fn wait_for_room(&mut self, shared: &Arc<Shared>, mut job: Job) {
        let now = Instant::now();
        if job.waits_since.is_none() {
            self.short += 1;
        }
        let since = *job.waits_since.get_or_insert(now);
        if self.room.note_full(now) {
            shared.surroundings.disk_full(self.room.device(), true);
        }
        // Somebody must be there to try it again.
        let watched = self.alive > 0 || self.start_worker(shared);
        if self.stopping || !watched || self.room.is_too_late(since, now) {
            return self.give_back(shared, job, IO_ERROR);
        }
        self.room.wait(job, now);
        shared.work.notify_one();
        self.one_less_in_flight(shared);
    }

    fn tell_room(&mut self, shared: &Shared) {
        if self.short == 0 && self.room.note_room() {
            shared.surroundings.disk_full(self.room.device(), false);
        }
    }

    fn one_less_in_flight(&mut self, shared: &Shared) {
        self.in_flight -= 1;
        if self.in_flight == 0 && (self.paused || self.stopping) {
            shared.changed.notify_all();
        }
    }

    /// Answers a request.
    fn give_back(&mut self, shared: &Shared, job: Job, status: u8) {
        if job.waits_since.is_some() {
            self.short -= 1;
        }
        job.status.set(status);
        self.ring.push(job.chain.head, job.written);
        if self.ring.must_interrupt() {
            shared.interrupt.used();
        }
        if self.spare.len() <= WORKERS {
            self.spare.push(job.chain);
        }
        self.one_less_in_flight(shared);
    }
}
