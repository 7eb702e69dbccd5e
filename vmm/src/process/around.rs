//! What threads and devices share of the process: filters, new threads, the guest's end, broken devices.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;

use torpor_vmm_api::{End, ThreadKind};
use torpor_vmm_devices::host::{Body, Surroundings, spawn, start_here};
use torpor_vmm_jail::Filters;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::error::StartError;
use super::log::clipped;

/// Longest reason that is kept of a broken device, bytes.
const LONGEST_REASON: usize = 300;

/// A device that the guest has broken.
#[derive(Clone, Debug)]
pub(super) struct Broken {
    pub(super) device: String,
    pub(super) reason: String,
    /// Subscribers and the log know.
    told: bool,
}

/// Whether a disk has room.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Room {
    pub(super) full: bool,
    /// It was not so before.
    pub(super) changed: bool,
    /// Subscribers know.
    told: bool,
}

/// A thread that is to be started.
struct Order {
    kind: ThreadKind,
    body: Body,
    reply: SyncSender<io::Result<JoinHandle<()>>>,
}

/// The process around the devices.
pub(super) struct Around {
    filters: Filters,
    /// Wakes the first thread: something of the below has changed.
    wake: EventFd,
    end: Mutex<Option<End>>,
    /// One entry for each device at most, so that a guest can't make it grow.
    broken: Mutex<Vec<Broken>>,
    /// One entry for each disk at most.
    disks: Mutex<BTreeMap<String, Room>>,
    starter: OnceLock<Sender<Order>>,
}

impl Around {
    pub(super) fn new(filters: Filters) -> Result<Arc<Self>, StartError> {
        let wake = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(StartError::host("make an eventfd"))?;
        Ok(Arc::new(Self {
            filters,
            wake,
            end: Mutex::default(),
            broken: Mutex::default(),
            disks: Mutex::default(),
            starter: OnceLock::new(),
        }))
    }

    /// Starts the thread that starts threads. To be called before the first thread has its filter.
    pub(super) fn start_starter(self: &Arc<Self>) -> Result<(), StartError> {
        let (orders, received) = mpsc::channel();
        let surroundings: Arc<dyn Surroundings> = Arc::clone(self) as Arc<dyn Surroundings>;
        spawn(&surroundings, ThreadKind::Starter, move || serve(&received))
            .map_err(StartError::host("start the starter thread"))?;
        // It is set once: this is called once.
        let _ = self.starter.set(orders);
        Ok(())
    }

    pub(super) fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// How the guest has ended, if it has.
    pub(super) fn ended(&self) -> Option<End> {
        lock(&self.end).clone()
    }

    /// All devices that are or were broken.
    pub(super) fn broken(&self) -> Vec<Broken> {
        lock(&self.broken).clone()
    }

    /// Those that nobody was told of yet.
    pub(super) fn newly_broken(&self) -> Vec<Broken> {
        let mut broken = lock(&self.broken);
        let new = broken
            .iter_mut()
            .filter_map(|one| (!std::mem::replace(&mut one.told, true)).then(|| one.clone()));
        new.collect()
    }

    /// Disks of which requests wait for room on the host.
    pub(super) fn full(&self) -> Vec<String> {
        let disks = lock(&self.disks);
        disks.iter().filter(|(_, room)| room.full).map(|(device, _)| device.clone()).collect()
    }

    /// What was said of disks' room and nobody was told of yet.
    pub(super) fn room_news(&self) -> Vec<(String, Room)> {
        let mut disks = lock(&self.disks);
        let new = disks.iter_mut().filter_map(|(device, room)| {
            (!std::mem::replace(&mut room.told, true)).then(|| (device.clone(), *room))
        });
        new.collect()
    }

    fn wake_up(&self) {
        // It fails only when it has been signalled 2^64 - 2 times.
        let _ = self.wake.write(1);
    }
}

fn serve(orders: &Receiver<Order>) {
    while let Ok(Order { kind, body, reply }) = orders.recv() {
        // Whoever asked waits for it.
        let _ = reply.send(start_here(kind, body));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Surroundings for Around {
    fn enter_thread(&self, kind: ThreadKind) -> io::Result<()> {
        self.filters.install(kind)
    }

    fn start_thread(&self, kind: ThreadKind, body: Body) -> io::Result<JoinHandle<()>> {
        // CPU threads come from the first thread, before it has a filter: they then are bound by one filter only, as that
        // is run through for every exit.
        let starter = self.starter.get().filter(|_| kind != ThreadKind::Vcpu);
        let Some(starter) = starter else { return start_here(kind, body) };
        let (reply, started) = mpsc::sync_channel(1);
        let gone = || io::Error::other("the starter thread is gone");
        starter.send(Order { kind, body, reply }).map_err(|_| gone())?;
        started.recv().map_err(|_| gone())?
    }

    fn end(&self, end: End) {
        lock(&self.end).get_or_insert(end);
        self.wake_up();
    }

    fn device_broken(&self, device: &str, reason: &str) {
        let reason = clipped(reason, LONGEST_REASON).to_owned();
        let mut broken = lock(&self.broken);
        match broken.iter_mut().find(|one| one.device == device) {
            Some(known) if known.reason == reason => return,
            Some(known) => (known.reason, known.told) = (reason, false),
            None => broken.push(Broken { device: device.to_owned(), reason, told: false }),
        }
        drop(broken);
        self.wake_up();
    }
    fn disk_full(&self, device: &str, full: bool) {
        let mut disks = lock(&self.disks);
        let room = disks.entry(device.to_owned()).or_default();
        // What was not told yet has not changed twice.
        let changed = room.full != full || room.changed && !room.told;
        *room = Room { full, changed, told: false };
        drop(disks);
        self.wake_up();
    }
}
