//! virtio-net (virtio 1.2, section 5.1) over a TAP.
//!
//! - `port`: the TAP.
//! - `receive`, `transmit`: the two directions.
//! - `service`: the thread that serves both.

mod port;
mod receive;
mod service;
#[cfg(test)]
mod tests;
mod transmit;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use torpor_vmm_api::RateLimit;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
};

pub use self::port::Port;
use self::port::offload;
use self::receive::Receiver;
use self::service::Service;
use self::transmit::Transmitter;
use super::rate::Limiter;
use super::ring::Ring;
use super::{Activation, DeviceError, VirtioDevice};
use crate::host::Surroundings;

/// Entries of each queue.
const QUEUE_SIZE: u16 = 256;
/// Bytes of the header before each packet (`struct virtio_net_hdr_v1`).
const HEADER: usize = 12;
/// Largest frame: 64 KiB of IP packet, Ethernet header, VLAN tag.
const MAX_FRAME: usize = 65535 + 18;
/// The queues.
const RECEIVE: usize = 0;
const SEND: usize = 1;

/// What a direction of the device waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Nothing: there may be more.
    Again,
    /// The driver.
    Kick,
    /// The wire.
    Port,
    /// Its rate limit.
    Wait(Duration),
}

/// What a network device is made of.
#[derive(Debug)]
pub struct NetOptions {
    /// The host's end of the wire.
    pub port: Port,
    /// The guest's hardware address, as the driver is told it. What it sends from is for the host's firewall to check.
    pub mac: [u8; 6],
    /// Largest IP packet, bytes.
    pub mtu: u16,
    /// Limit of what the guest sends, if any.
    pub send: Option<RateLimit>,
    /// Limit of what it gets, if any.
    pub receive: Option<RateLimit>,
}

/// Packets that were dropped since the start.
#[derive(Debug, Default)]
pub struct Drops {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Drops {
    /// Of those that the guest sent: too short, too long, or refused by the host.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Of those for the guest: longer than its buffers.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }
}

/// The network device.
#[derive(Debug)]
pub struct NetDevice {
    port: Arc<Port>,
    mac: [u8; 6],
    mtu: u16,
    send: Option<RateLimit>,
    receive: Option<RateLimit>,
    drops: Arc<Drops>,
    service: Option<Service>,
}

impl NetDevice {
    /// A device that no driver has found yet.
    pub fn new(options: NetOptions) -> Self {
        let NetOptions { port, mac, mtu, send, receive } = options;
        Self { port: Arc::new(port), mac, mtu, send, receive, drops: Arc::default(), service: None }
    }

    /// What was dropped; goes on counting as long as the device lives.
    pub fn drops(&self) -> Arc<Drops> {
        Arc::clone(&self.drops)
    }
}

/// Whether a feature is among those.
fn has(features: u64, bit: u32) -> bool {
    features & 1 << bit != 0
}

/// What may come from the TAP, given what was agreed on with the driver. Segmentation needs checksums.
fn offloads(features: u64) -> u32 {
    if !has(features, VIRTIO_NET_F_GUEST_CSUM) {
        return 0;
    }
    let pairs = [
        (VIRTIO_NET_F_GUEST_TSO4, offload::TUN_F_TSO4),
        (VIRTIO_NET_F_GUEST_TSO6, offload::TUN_F_TSO6),
        (VIRTIO_NET_F_GUEST_ECN, offload::TUN_F_TSO_ECN),
    ];
    let segmentation =
        pairs.iter().filter(|(bit, _)| has(features, *bit)).fold(0, |flags, (_, flag)| flags | flag);
    let alone = segmentation & (offload::TUN_F_TSO4 | offload::TUN_F_TSO6) == 0;
    offload::TUN_F_CSUM | if alone { 0 } else { segmentation }
}

/// Bytes of the longest packet for the driver, with header.
fn longest(features: u64, mtu: u16) -> usize {
    match offloads(features) & (offload::TUN_F_TSO4 | offload::TUN_F_TSO6) {
        0 => HEADER + usize::from(mtu) + 18,
        _ => HEADER + MAX_FRAME,
    }
}

impl VirtioDevice for NetDevice {
    fn id(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn name(&self) -> String {
        "net".into()
    }

    fn features(&self) -> u64 {
        let bits = [
            VIRTIO_NET_F_CSUM,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_MTU,
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
            VIRTIO_NET_F_GUEST_ECN,
            VIRTIO_NET_F_HOST_TSO4,
            VIRTIO_NET_F_HOST_TSO6,
            VIRTIO_NET_F_HOST_ECN,
            VIRTIO_NET_F_MRG_RXBUF,
            VIRTIO_NET_F_STATUS,
        ];
        bits.iter().fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE, QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; 12];
        config[..6].copy_from_slice(&self.mac);
        config[6..8].copy_from_slice(&(VIRTIO_NET_S_LINK_UP as u16).to_le_bytes());
        config[8..10].copy_from_slice(&1u16.to_le_bytes()); // max_virtqueue_pairs
        config[10..].copy_from_slice(&self.mtu.to_le_bytes());
        super::device::read_bytes(&config, offset, data);
    }

    fn activate(
        &mut self,
        mut activation: Activation,
        surroundings: &Arc<dyn Surroundings>,
    ) -> Result<(), DeviceError> {
        let mut take = |index: usize| {
            let queue = activation.queues.get_mut(index).and_then(Option::take);
            queue.ok_or(DeviceError::QueueMissing(index))
        };
        let (receive, send) = (take(RECEIVE)?, take(SEND)?);
        let features = activation.features;
        let ring = |queue| Ring::new(queue, activation.memory.clone(), features);
        let now = Instant::now();
        let receiver = Receiver::new(
            ring(&receive.queue)?,
            has(features, VIRTIO_NET_F_MRG_RXBUF),
            longest(features, self.mtu),
            Limiter::new(self.receive, now),
        );
        let transmitter = Transmitter::new(ring(&send.queue)?, Limiter::new(self.send, now));
        let work = service::Work {
            port: Arc::clone(&self.port),
            offloads: offloads(features),
            drops: Arc::clone(&self.drops),
            receiver,
            transmitter,
            kicks: [receive.kick, send.kick],
            interrupt: Arc::clone(&activation.interrupt),
            broken: Arc::clone(&activation.broken),
        };
        let service = Service::start(work, surroundings);
        self.service =
            Some(service.map_err(|source| DeviceError::Host { what: "starting the thread", source })?);
        Ok(())
    }

    fn reset(&mut self) {
        if let Some(service) = self.service.take() {
            service.stop();
        }
    }

    fn pause(&mut self, paused: bool) {
        if let Some(service) = &self.service {
            service.pause(paused);
        }
    }
}
