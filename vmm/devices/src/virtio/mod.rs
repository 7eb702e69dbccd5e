//! Virtio devices (OASIS virtio 1.2) over MMIO.

pub mod balloon;
pub mod block;
mod device;
pub mod mmio;
pub mod net;
pub(crate) mod rate;
pub(crate) mod ring;
pub mod rng;
pub(crate) mod segments;
pub mod vsock;
pub(crate) mod worker;

pub(crate) use device::DriverThere;
pub use device::{Activation, DeviceError, Interrupt, VirtioDevice, VirtioQueue};
pub use mmio::Transport;
pub use ring::RingError;
