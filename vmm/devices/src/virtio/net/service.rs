//! The thread of a network device: both directions, woken by the wire and by the driver.
//!
//! All events are edge-triggered: what was seen is remembered, nothing has to be read to quieten a descriptor, and a wire
//! whose packets nobody has room for wakes nobody.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use torpor_vmm_api::ThreadKind;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::port::Port;
use super::receive::Receiver;
use super::transmit::Transmitter;
use super::{Drops, Next, RECEIVE, SEND};
use crate::host::{Surroundings, spawn};
use crate::virtio::Interrupt;
use crate::virtio::ring::RingError;

/// What the thread works with.
pub(super) struct Work {
    pub(super) port: Arc<Port>,
    pub(super) offloads: u32,
    pub(super) drops: Arc<Drops>,
    pub(super) receiver: Receiver,
    pub(super) transmitter: Transmitter,
    /// By queue.
    pub(super) kicks: [EventFd; 2],
    pub(super) interrupt: Arc<Interrupt>,
    pub(super) broken: Arc<dyn Fn(&str) + Send + Sync>,
}

/// A device at work.
#[derive(Debug)]
pub(super) struct Service {
    control: Arc<Control>,
    thread: JoinHandle<()>,
}

/// How the thread is told to stop or rest.
#[derive(Debug)]
struct Control {
    wake: EventFd,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stop: bool,
    pause: bool,
    /// The thread touches nothing: it rests, or is over.
    still: bool,
}

impl Control {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rests while it is told to, or for good when `dead`; false: it is over.
    fn may_go_on(&self, dead: bool) -> bool {
        let mut state = self.state();
        while !state.stop && (state.pause || dead) {
            state.still = true;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.still = state.stop;
        self.changed.notify_all();
        !state.stop
    }
}

impl Service {
    pub(super) fn start(work: Work, surroundings: &Arc<dyn Surroundings>) -> io::Result<Self> {
        let wake = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        let control = Arc::new(Control { wake, state: Mutex::default(), changed: Condvar::new() });
        let epoll = watch(&work, &control)?;
        let its = Arc::clone(&control);
        let thread = spawn(surroundings, ThreadKind::Net, move || serve(work, &its, &epoll))?;
        Ok(Self { control, thread })
    }

    /// Ends the thread.
    pub(super) fn stop(self) {
        self.control.state().stop = true;
        self.control.changed.notify_all();
        // A full counter wakes as well.
        let _ = self.control.wake.write(1);
        // A thread that panicked has nothing left to say.
        let _ = self.thread.join();
    }

    /// Lets the thread rest, and returns when it does; or go on.
    pub(super) fn pause(&self, paused: bool) {
        let mut state = self.control.state();
        state.pause = paused;
        self.control.changed.notify_all();
        let _ = self.control.wake.write(1);
        // A thread that wasn't allowed to start will never rest.
        while paused && !state.still && !self.thread.is_finished() {
            let waited = self.control.changed.wait_timeout(state, Duration::from_millis(100));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// What an event is about.
const PORT: u64 = 2;
const WAKE: u64 = 3;

fn watch(work: &Work, control: &Control) -> io::Result<Epoll> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let input = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
    epoll.add(work.port.descriptor(), EpollEvent::new(input | EpollFlags::EPOLLOUT, PORT))?;
    for (descriptor, name) in
        [(&work.kicks[RECEIVE], RECEIVE as u64), (&work.kicks[SEND], SEND as u64), (&control.wake, WAKE)]
    {
        // SAFETY: the descriptor is open as long as the eventfd, which is borrowed here.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor.as_raw_fd()) };
        epoll.add(descriptor, EpollEvent::new(input, name))?;
    }
    Ok(epoll)
}

fn serve(mut work: Work, control: &Control, epoll: &Epoll) {
    let mut dead = false;
    if let Err(error) = work.port.set_offloads(work.offloads) {
        (work.broken)(&format!("the TAP doesn't take the offloads {:#x}: {error}", work.offloads));
        dead = true;
    }
    let (mut receive, mut send) = (Next::Again, Next::Again);
    while control.may_go_on(dead) {
        let moved = work.receive(&mut receive).and_then(|()| work.send(&mut send));
        if let Err((queue, error)) = moved {
            (work.broken)(&format!("queue {queue}: {error}"));
            dead = true;
            continue;
        }
        match wait(epoll, timeout(receive, send), &mut receive, &mut send) {
            Ok(()) => {}
            Err(error) => {
                (work.broken)(&format!("the host's events can't be waited for: {error}"));
                dead = true;
            }
        }
    }
}

impl Work {
    fn receive(&mut self, next: &mut Next) -> Result<(), (usize, RingError)> {
        if *next != Next::Again {
            return Ok(());
        }
        let (interrupt, mut dropped) = (&self.interrupt, 0);
        let told = |receiver: &mut Receiver| {
            if receiver.must_interrupt() {
                interrupt.used();
            }
        };
        let result = self.receiver.run(&self.port, &mut dropped, told);
        self.drops.received.fetch_add(dropped, Ordering::Relaxed);
        *next = result.map_err(|error| (RECEIVE, error))?;
        Ok(())
    }

    fn send(&mut self, next: &mut Next) -> Result<(), (usize, RingError)> {
        if *next != Next::Again {
            return Ok(());
        }
        let mut dropped = 0;
        let result = self.transmitter.run(&self.port, &mut dropped);
        self.drops.sent.fetch_add(dropped, Ordering::Relaxed);
        if self.transmitter.must_interrupt() {
            self.interrupt.used();
        }
        *next = result.map_err(|error| (SEND, error))?;
        Ok(())
    }
}

/// How long to sleep at most; none: until something happens.
fn timeout(receive: Next, send: Next) -> Option<Duration> {
    let of = |next| match next {
        Next::Again => Some(Duration::ZERO),
        Next::Wait(time) => Some(time),
        Next::Kick | Next::Port => None,
    };
    of(receive).into_iter().chain(of(send)).min()
}

/// Sleeps, and notes who can go on.
fn wait(epoll: &Epoll, timeout: Option<Duration>, receive: &mut Next, send: &mut Next) -> io::Result<()> {
    if timeout.is_none_or(|time| !time.is_zero()) {
        // Milliseconds, rounded up: too early would be for nothing.
        let limit = timeout.map_or(EpollTimeout::NONE, |time| {
            EpollTimeout::try_from(time.as_millis().saturating_add(1)).unwrap_or(EpollTimeout::MAX)
        });
        let mut events = [EpollEvent::empty(); 4];
        let count = match epoll.wait(&mut events, limit) {
            Ok(count) => count,
            Err(nix::errno::Errno::EINTR) => 0,
            Err(error) => return Err(error.into()),
        };
        for event in &events[..count] {
            note(*event, receive, send);
        }
    }
    // A limit is looked at again whatever the reason for waking.
    for next in [receive, send] {
        if matches!(next, Next::Wait(_)) {
            *next = Next::Again;
        }
    }
    Ok(())
}

fn note(event: EpollEvent, receive: &mut Next, send: &mut Next) {
    let go_on = |next: &mut Next, from: Next| {
        if *next == from {
            *next = Next::Again;
        }
    };
    match event.data() {
        PORT => {
            let flags = event.events();
            if flags.contains(EpollFlags::EPOLLIN) {
                go_on(receive, Next::Port);
            }
            if flags.contains(EpollFlags::EPOLLOUT) {
                go_on(send, Next::Port);
            }
        }
        name if name == RECEIVE as u64 => go_on(receive, Next::Kick),
        name if name == SEND as u64 => go_on(send, Next::Kick),
        _ => {}
    }
}
