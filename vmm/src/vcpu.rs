//! The threads that run CPUs.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use torpor_vmm_api::{End, ThreadKind};
use torpor_vmm_devices::bus::Bus;
use torpor_vmm_devices::host::{self, Body, Surroundings};

use crate::hypervisor::{Exit, Kicker, Vcpu};

const RUN: u8 = 0;
const PAUSE: u8 = 1;
const STOP: u8 = 2;

/// Where a guest's accesses go.
pub(crate) struct Buses {
    pub(crate) ports: Bus,
    pub(crate) mmio: Bus,
}

/// Surroundings that also keep a CPU from the guest once that has ended: a guest may spin after it has asked for a
/// reset, and the processor is better left to those who are to end it.
pub(crate) struct Ending {
    inner: Arc<dyn Surroundings>,
    over: AtomicBool,
}

impl Ending {
    pub(crate) fn new(inner: Arc<dyn Surroundings>) -> Arc<Self> {
        Arc::new(Self { inner, over: AtomicBool::new(false) })
    }
}

impl Surroundings for Ending {
    fn enter_thread(&self, kind: ThreadKind) -> io::Result<()> {
        self.inner.enter_thread(kind)
    }

    fn start_thread(&self, kind: ThreadKind, body: Body) -> io::Result<JoinHandle<()>> {
        self.inner.start_thread(kind, body)
    }

    fn end(&self, end: End) {
        self.over.store(true, Ordering::Relaxed);
        self.inner.end(end);
    }

    fn device_broken(&self, device: &str, reason: &str) {
        self.inner.device_broken(device, reason);
    }

    fn disk_full(&self, device: &str, full: bool) {
        self.inner.disk_full(device, full);
    }
}

/// What all CPU threads and their owner share.
struct Shared {
    /// RUN, PAUSE or STOP: looked at by a thread when it is kicked.
    wanted: AtomicU8,
    /// How many threads don't run the guest: waiting, or over.
    still: Mutex<usize>,
    changed: Condvar,
    /// Exits of each CPU; each is written by its own thread only.
    exits: Vec<AtomicU64>,
}

impl Shared {
    fn still(&self) -> MutexGuard<'_, usize> {
        self.still.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn one_more_still(&self) -> MutexGuard<'_, usize> {
        let mut still = self.still();
        *still += 1;
        self.changed.notify_all();
        still
    }
}

/// Counts a thread as over when it ends, in whatever way.
struct Over(Arc<Shared>);

impl Drop for Over {
    fn drop(&mut self) {
        drop(self.0.one_more_still());
    }
}

/// All CPUs of a VM.
pub(crate) struct Cpus {
    shared: Arc<Shared>,
    kickers: Vec<Arc<dyn Kicker>>,
    waiting: Vec<Box<dyn Vcpu>>,
    threads: Vec<JoinHandle<()>>,
}

impl Cpus {
    /// They don't run yet.
    pub(crate) fn new(vcpus: Vec<Box<dyn Vcpu>>) -> Self {
        let shared = Shared {
            wanted: AtomicU8::new(RUN),
            still: Mutex::new(0),
            changed: Condvar::new(),
            exits: vcpus.iter().map(|_| AtomicU64::new(0)).collect(),
        };
        let kickers = vcpus.iter().map(|vcpu| vcpu.kicker()).collect();
        Self { shared: Arc::new(shared), kickers, waiting: vcpus, threads: Vec::new() }
    }

    /// A thread for each. A second call does nothing.
    pub(crate) fn start(&mut self, buses: &Arc<Buses>, surroundings: &Arc<Ending>) -> io::Result<()> {
        let spawner = Arc::clone(surroundings) as Arc<dyn Surroundings>;
        for (index, vcpu) in self.waiting.drain(..).enumerate() {
            let over = Over(Arc::clone(&self.shared));
            let (buses, around) = (Arc::clone(buses), Arc::clone(surroundings));
            let body = move || run(vcpu, &buses, &over.0, index, &around);
            self.threads.push(host::spawn(&spawner, ThreadKind::Vcpu, body)?);
        }
        Ok(())
    }

    /// Gets all CPUs out of the guest, and returns when they are.
    pub(crate) fn pause(&self) {
        self.shared.wanted.store(PAUSE, Ordering::SeqCst);
        self.kick();
        let mut still = self.shared.still();
        while *still < self.threads.len() {
            still = self.shared.changed.wait(still).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets them go on.
    pub(crate) fn resume(&self) {
        let still = self.shared.still();
        self.shared.wanted.store(RUN, Ordering::SeqCst);
        self.shared.changed.notify_all();
        drop(still);
    }

    /// Ends all threads.
    pub(crate) fn stop(&mut self) {
        let still = self.shared.still();
        self.shared.wanted.store(STOP, Ordering::SeqCst);
        self.shared.changed.notify_all();
        drop(still);
        self.kick();
        self.waiting.clear();
        for thread in self.threads.drain(..) {
            // A thread that panicked is over, too.
            let _ = thread.join();
        }
    }

    /// Exits since the start.
    pub(crate) fn exits(&self) -> u64 {
        self.shared.exits.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    fn kick(&self) {
        for kicker in &self.kickers {
            kicker.kick();
        }
    }
}

/// A CPU's life.
fn run(mut vcpu: Box<dyn Vcpu>, buses: &Buses, shared: &Shared, index: usize, surroundings: &Ending) {
    let exits = &shared.exits[index];
    loop {
        match vcpu.run() {
            Ok(Exit::MmioWrite { address, data }) => buses.mmio.write(address, data),
            Ok(Exit::MmioRead { address, data }) => buses.mmio.read(address, data),
            Ok(Exit::PortWrite { port, size, data }) => {
                data.chunks_exact(size.max(1))
                    .for_each(|element| buses.ports.write(u64::from(port), element));
            }
            Ok(Exit::PortRead { port, size, data }) => {
                data.chunks_exact_mut(size.max(1))
                    .for_each(|element| buses.ports.read(u64::from(port), element));
            }
            Ok(Exit::Kicked) => match obey(shared) {
                Order::GoOn => {}
                Order::GoOnAfterPause => vcpu.was_paused(),
                Order::End => return,
            },
            Ok(Exit::Shutdown) => return surroundings.end(End::TripleFault),
            Ok(Exit::Crash(detail)) => {
                return surroundings.end(End::Crash { detail: format!("CPU {index}: {detail}") });
            }
            Err(error) => {
                return surroundings.end(End::Crash { detail: format!("CPU {index}: {error}") });
            }
        }
        // Only this thread writes it: no need for an atomic addition.
        exits.store(exits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        if surroundings.over.load(Ordering::Relaxed) {
            return;
        }
    }
}

enum Order {
    GoOn,
    GoOnAfterPause,
    End,
}

/// What a kicked thread is to do; returns when it may go on.
fn obey(shared: &Shared) -> Order {
    match shared.wanted.load(Ordering::SeqCst) {
        RUN => return Order::GoOn,
        STOP => return Order::End,
        _ => {}
    }
    let mut still = shared.one_more_still();
    while shared.wanted.load(Ordering::SeqCst) == PAUSE {
        still = shared.changed.wait(still).unwrap_or_else(PoisonError::into_inner);
    }
    *still -= 1;
    match shared.wanted.load(Ordering::SeqCst) {
        STOP => Order::End,
        _ => Order::GoOnAfterPause,
    }
}
