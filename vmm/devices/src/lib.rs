//! The devices of a VM, without any hypervisor: they see guest memory, kicks and an interrupt line.
//!
//! - [`bus`]: what sits at an address.
//! - [`virtio`]: the device trait, the MMIO transport, and a file per device.
//! - [`legacy`]: serial port, clock, keyboard controller, power management, panic notifier.

pub mod bus;
pub mod host;
pub mod legacy;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod virtio;

/// Guest memory. Clones are cheap and see the same pages.
pub type Memory = vm_memory::GuestMemoryMmap<()>;
