//! The vsock device (virtio 1.2, 5.10), stream sockets only: its host side is a Unix socket.
//!
//! A client connects to the socket and writes `CONNECT port\n` or `AWAIT port\n`. Once the guest has taken the
//! connection it reads `OK host-port\n`, and is connected. `CONNECT` is closed when nobody listens there, or nobody answers
//! in time. `AWAIT` is held: the guest is asked again after each refusal, soon at first, and at once when it sends
//! anything. Before the guest's driver is up, and while it is being reset, both wait in the socket's backlog.
//!
//! A guest that connects to port P of the host is connected to the Unix socket at `path_P` (or in a folder of its own, at
//! `folder/P`), or refused.
//!
//! One thread does it all. Data goes straight between sockets and the guest's buffers; only what a slow client doesn't take
//! at once is held, at most the window that the guest was promised (64 KiB for each of the first 32 connections, 16 KiB
//! for each further one). Connections take turns, a packet each.

mod connection;
mod engine;
mod host;
mod muxer;
mod packet;
mod socket;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use torpor_vmm_api::ThreadKind;
use vmm_sys_util::eventfd::EventFd;

pub use self::host::HostSocket;

use self::engine::Engine;
use self::muxer::{HostSide, Muxer};
use super::ring::Ring;
use super::worker::{Gate, Worker};
use super::{Activation, DeviceError, VirtioDevice, VirtioQueue};
use crate::Memory;
use crate::host::Surroundings;

/// The host's side, while no driver is there.
type Kept = Arc<Mutex<Option<HostSide>>>;

/// The device's number.
const ID: u32 = 19;
/// Receive, send, event.
const QUEUES: [u16; 3] = [128, 128, 8];

/// Talks to the device from outside. Clones are the same device.
#[derive(Clone)]
pub struct VsockHandle {
    restored: Arc<AtomicBool>,
    gate: Arc<Gate>,
}

impl VsockHandle {
    /// The VM has been restored from an image: connections of its earlier life end, and the guest is told so.
    pub fn restored(&self) {
        self.restored.store(true, Ordering::SeqCst);
        self.gate.wake();
    }
}

/// The device.
pub struct Vsock {
    cid: u32,
    limit: usize,
    worker: Worker,
    restored: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
    side: Kept,
}

impl Vsock {
    /// With the guest's context id (3 or more) and a limit of connections, clients that wait included. At most half of them
    /// are the guest's.
    ///
    /// # Errors
    /// No epoll or eventfd can be made.
    pub fn new(cid: u32, limit: u32, socket: HostSocket) -> io::Result<Self> {
        let side = HostSide::new(socket)?;
        Ok(Self {
            cid,
            limit: limit.max(1) as usize,
            worker: Worker::new()?,
            restored: Arc::default(),
            over: Arc::default(),
            side: Arc::new(Mutex::new(Some(side))),
        })
    }

    /// The handle.
    pub fn handle(&self) -> VsockHandle {
        VsockHandle { restored: Arc::clone(&self.restored), gate: Arc::clone(self.worker.gate()) }
    }
}

/// The device's part of the rings, or how the guest has broken them.
type Parts = Result<([Ring; 3], [EventFd; 3]), String>;

fn parts(queues: Vec<Option<VirtioQueue>>, memory: &Memory, features: u64) -> Result<Parts, DeviceError> {
    let (mut rings, mut kicks) = (Vec::new(), Vec::new());
    for (index, queue) in queues.into_iter().enumerate() {
        let queue = queue.ok_or(DeviceError::QueueMissing(index))?;
        match Ring::new(&queue.queue, memory.clone(), features) {
            Ok(ring) => rings.push(ring),
            Err(error) => return Ok(Err(format!("queue {index}: {error}"))),
        }
        kicks.push(queue.kick);
    }
    let missing = DeviceError::QueueMissing(rings.len());
    match (rings.try_into(), kicks.try_into()) {
        (Ok(rings), Ok(kicks)) => Ok(Ok((rings, kicks))),
        _ => Err(missing),
    }
}

fn lock(side: &Kept) -> MutexGuard<'_, Option<HostSide>> {
    side.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VirtioDevice for Vsock {
    fn id(&self) -> u32 {
        ID
    }

    fn name(&self) -> String {
        "vsock".to_owned()
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = u64::from(self.cid).to_le_bytes();
        super::device::read_bytes(&config, offset, data);
    }

    fn activate(
        &mut self,
        activation: Activation,
        surroundings: &Arc<dyn Surroundings>,
    ) -> Result<(), DeviceError> {
        let Activation { memory, queues, interrupt, features, broken } = activation;
        let (rings, kicks) = match parts(queues, &memory, features)? {
            Ok(parts) => parts,
            Err(reason) => {
                broken(&reason);
                return Ok(());
            }
        };
        let (cid, limit) = (self.cid, self.limit);
        let (kept, restored) = (Arc::clone(&self.side), Arc::clone(&self.restored));
        let over = Arc::clone(&self.over);
        self.worker
            .start(surroundings, ThreadKind::Vsock, move |gate| {
                // The thread before this one has put it back.
                let Some(side) = lock(&kept).take() else { return };
                let chain = rings[0].chain();
                let muxer = Muxer::new(cid, limit, side, Instant::now());
                let mut engine =
                    Engine { rings, kicks, chain, muxer, interrupt, restored, owed: false, over };
                let reason = engine.run(gate);
                *lock(&kept) = Some(engine.muxer.finish());
                if let Some(reason) = reason {
                    broken(&reason);
                }
            })
            .map_err(|source| DeviceError::Host { what: "starting the vsock thread", source })
    }

    fn reset(&mut self) {
        self.worker.stop();
    }

    fn close(&mut self) -> io::Result<()> {
        self.over.store(true, Ordering::SeqCst);
        self.reset();
        Ok(())
    }

    fn pause(&mut self, paused: bool) {
        self.worker.pause(paused);
    }
}

#[cfg(test)]
mod tests;
