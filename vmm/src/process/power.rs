//! The first thread's loop: control socket, signals, end.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use torpor_vmm_api::{Counters, End, EndFile, Event, Reply, Request, Status, VmState};
use torpor_vmm_devices::host::Surroundings as _;
use torpor_vmm_devices::virtio::balloon::BalloonHandle;

use super::around::Around;
use super::build::Running;
use super::control::{Clients, FIRST_CLIENT, is_shortage};
use super::error::StartError;
use super::{endfile, log};
use crate::machine::State;

const WAKE: u64 = 0;
const SIGNALS: u64 = 1;
const LISTENER: u64 = 2;
/// Events that are taken at once.
const BATCH: usize = 16;
/// How long the control socket takes nobody in after the host was short of something.
const REST: Duration = Duration::from_secs(1);

/// Blocks the signals that end the VM, in this thread and all that it starts, and makes them readable.
pub(super) fn signals() -> Result<SignalFd, StartError> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGTERM);
    set.add(Signal::SIGINT);
    set.thread_block().map_err(StartError::host("block signals"))?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    SignalFd::with_flags(&set, flags).map_err(StartError::host("make a signalfd"))
}

/// The running VM and who talks to it.
pub(super) struct Power {
    running: Running,
    around: Arc<Around>,
    signals: SignalFd,
    listener: Option<UnixListener>,
    /// The listener isn't in the epoll before then.
    rests_until: Option<Instant>,
    clients: Clients,
    epoll: Epoll,
}

impl Power {
    pub(super) fn new(
        running: Running,
        around: Arc<Around>,
        signals: SignalFd,
        listener: Option<UnixListener>,
    ) -> Result<Self, StartError> {
        let cannot = "wait for events";
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(StartError::host(cannot))?;
        let add = |fd: BorrowedFd<'_>, number| {
            epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, number)).map_err(StartError::host(cannot))
        };
        // SAFETY: the event lives in `around`, which this object holds for as long as it lives.
        add(unsafe { BorrowedFd::borrow_raw(around.wake().as_raw_fd()) }, WAKE)?;
        add(signals.as_fd(), SIGNALS)?;
        if let Some(listener) = &listener {
            listener.set_nonblocking(true).map_err(StartError::host("prepare the control socket"))?;
            add(listener.as_fd(), LISTENER)?;
        }
        let clients = Clients::default();
        Ok(Self { running, around, signals, listener, rests_until: None, clients, epoll })
    }

    /// Lets the guest run.
    pub(super) fn start(&mut self) -> Result<(), StartError> {
        self.running.machine.start().map_err(StartError::host("start the CPUs"))
    }

    /// Serves until the guest has ended, then closes everything in order and tells how.
    pub(super) fn run(mut self) -> End {
        let end = loop {
            for broken in self.around.newly_broken() {
                log::say(&format_args!("{} is broken by its guest: {}", broken.device, broken.reason));
                let event = Event::DeviceBroken { device: broken.device, reason: broken.reason };
                self.clients.tell(&event, &self.epoll);
            }
            self.tell_of_room();
            if let Some(end) = self.around.ended() {
                break end;
            }
            self.wait();
        };
        self.finish(end)
    }

    fn tell_of_room(&mut self) {
        for (device, room) in self.around.room_news() {
            if room.full && room.changed {
                log::say(&format_args!("{device}: the host has no room for what its guest writes"));
            }
            let event = if room.full { Event::DiskFull { device } } else { Event::DiskHasRoom { device } };
            self.clients.tell(&event, &self.epoll);
        }
    }

    fn wait(&mut self) {
        let mut events = [EpollEvent::empty(); BATCH];
        self.listen_again();
        let count = match self.epoll.wait(&mut events, self.timeout()) {
            Ok(count) => count,
            Err(nix::errno::Errno::EINTR) => return,
            Err(errno) => {
                return self.around.end(End::Failed { detail: format!("wait for events: {errno}") });
            }
        };
        for event in &events[..count] {
            match event.data() {
                WAKE => drop(self.around.wake().read()),
                SIGNALS => self.take_signal(),
                LISTENER => self.accept(),
                number => self.serve(number),
            }
        }
    }

    fn take_signal(&mut self) {
        if let Ok(Some(_)) = self.signals.read_signal() {
            self.around.end(End::Host);
        }
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        let Err(error) = self.clients.accept(listener, &self.epoll) else { return };
        // It would come again at once: nobody is taken in for a while, or ever.
        if is_shortage(&error) && self.epoll.delete(listener).is_ok() {
            log::say(&format_args!("the control socket rests for a second: {error}"));
            self.rests_until = Some(Instant::now() + REST);
        } else {
            log::say(&format_args!("the control socket is closed: {error}"));
            self.listener = None;
        }
    }

    /// Takes clients in again, when the listener has rested.
    fn listen_again(&mut self) {
        let Some(listener) = &self.listener else { return };
        if self.rests_until.is_none_or(|until| Instant::now() < until) {
            return;
        }
        let added = self.epoll.add(listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER));
        self.rests_until = added.err().map(|_| Instant::now() + REST);
    }

    /// How long to wait for events.
    fn timeout(&self) -> EpollTimeout {
        let Some(until) = self.rests_until else { return EpollTimeout::NONE };
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        EpollTimeout::try_from(left).unwrap_or(EpollTimeout::ZERO)
    }

    fn serve(&mut self, number: u64) {
        debug_assert!(number >= FIRST_CLIENT);
        let (running, around) = (&mut self.running, &self.around);
        self.clients.serve(number, &self.epoll, &mut |request| answer(running, around, &request));
    }

    fn finish(self, end: End) -> End {
        let Self { running, around, mut clients, epoll, .. } = self;
        let closed = running.machine.close();
        let error = (!closed.all_closed()).then(|| closed.errors.join("; "));
        if let Some(error) = &error {
            log::say(&format_args!("not everything was closed in order: {error}"));
        }
        endfile::write(&EndFile {
            end: end.clone(),
            disks_closed: error.is_none(),
            disk_error: error,
            broken: broken(&around),
        });
        clients.tell(&Event::Ended { end: end.clone() }, &epoll);
        end
    }
}

fn broken(around: &Around) -> Vec<String> {
    around.broken().into_iter().map(|one| format!("{}: {}", one.device, one.reason)).collect()
}

fn answer(running: &mut Running, around: &Around, request: &Request) -> Reply {
    let over = around.ended().is_some();
    match request {
        Request::Status => return Reply::Status(status(running, around)),
        Request::Snapshot { .. } => {
            return refused("memory images can't be made yet; shut the guest down instead");
        }
        Request::Pause | Request::Resume | Request::PowerButton | Request::GrowDisk { .. } if over => {
            return refused("the guest has ended");
        }
        Request::Pause => running.machine.pause(),
        Request::Resume => running.machine.resume(),
        Request::PowerButton => {
            if let Err(error) = running.machine.power_button() {
                return refused(&format!("the power button can't be pressed: {error}"));
            }
        }
        Request::GrowDisk { disk, bytes } => return super::grow::grow(&running.disks, disk, *bytes),
        Request::Shutdown => around.end(End::Host),
        // Who keeps the clients sees to it.
        Request::Subscribe => {}
    }
    Reply::Done
}

fn refused(reason: &str) -> Reply {
    Reply::Refused { reason: reason.to_owned() }
}

fn status(running: &Running, around: &Around) -> Status {
    let machine = running.machine.status();
    let state = match machine.state {
        _ if around.ended().is_some() => VmState::Ended,
        State::Paused => VmState::Paused,
        State::Built | State::Running => VmState::Running,
    };
    Status {
        state,
        cpus: running.cpus,
        memory_bytes: running.memory_bytes,
        broken: broken(around),
        full: around.full(),
        counters: Counters {
            console_bytes: running.serial.console_bytes(),
            reclaimed_bytes: running.balloon.as_ref().map_or(0, BalloonHandle::reclaimed),
            exits: machine.exits,
        },
    }
}
