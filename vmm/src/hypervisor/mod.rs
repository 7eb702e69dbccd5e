//! What runs guest CPUs. Registers, CPUID and interrupt controllers stay inside a backend; what is saved is opaque
//! outside it.

pub mod kvm;
pub mod sim;

use std::any::Any;
use std::io;
use std::sync::Arc;

use torpor_vmm_devices::Memory;
use vmm_sys_util::eventfd::EventFd;

use crate::boot::Entry;

/// What a hypervisor could not do.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct HypervisorError {
    /// What was attempted.
    pub what: &'static str,
    /// The host's error.
    pub source: io::Error,
}

impl HypervisorError {
    pub(crate) fn new(what: &'static str, source: impl Into<io::Error>) -> Self {
        Self { what, source: source.into() }
    }
}

/// A way to make VMs.
pub trait Hypervisor: Send + Sync {
    /// Makes a VM with that memory, for so many CPUs.
    ///
    /// # Errors
    /// [`HypervisorError`].
    fn create_vm(&self, memory: &Memory, cpus: u8) -> Result<Arc<dyn Vm>, HypervisorError>;
}

/// How a CPU begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// With the kernel's first instruction.
    Entry(Entry),
    /// It waits until another CPU starts it.
    Waiting,
}

/// A VM: memory, interrupt controllers, clock.
pub trait Vm: Send + Sync {
    /// Makes CPU number `index`.
    ///
    /// # Errors
    /// [`HypervisorError`].
    fn create_vcpu(&self, index: u8, start: Start) -> Result<Box<dyn Vcpu>, HypervisorError>;

    /// Each write to the event is an edge on an interrupt line.
    ///
    /// # Errors
    /// [`HypervisorError`].
    fn irq(&self, line: u32, event: &EventFd) -> Result<(), HypervisorError>;

    /// A guest's 4-byte write of `value` to `address` signals the event instead of being an exit.
    ///
    /// # Errors
    /// [`HypervisorError`].
    fn notify(&self, address: u64, value: u32, event: &EventFd) -> Result<(), HypervisorError>;

    /// A guest's 4-byte writes to `address` needn't be exits at once: they may come late, in order, but before any other
    /// exit that the same CPU makes.
    fn defer(&self, address: u64);

    /// Interrupt controllers and clock. The CPUs must be stopped.
    ///
    /// # Errors
    /// [`HypervisorError`].
    fn save(&self) -> Result<Saved, HypervisorError>;

    /// Puts back what [`Vm::save`] gave, also in another VM of the same kind.
    ///
    /// # Errors
    /// [`HypervisorError`].
    fn restore(&self, saved: &Saved) -> Result<(), HypervisorError>;
}

/// State that only the backend understands that saved it.
pub struct Saved(Box<dyn Any + Send>);

impl std::fmt::Debug for Saved {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Saved")
    }
}

impl Saved {
    pub(crate) fn new(state: impl Any + Send) -> Self {
        Self(Box::new(state))
    }

    pub(crate) fn get<T: Any>(&self) -> Result<&T, HypervisorError> {
        let stranger = || {
            let text = "the state was saved by another backend, or is of another thing";
            HypervisorError::new("restore", io::Error::new(io::ErrorKind::InvalidInput, text))
        };
        self.0.downcast_ref().ok_or_else(stranger)
    }
}

/// A virtual CPU. It is run by one thread.
pub trait Vcpu: Send {
    /// Runs the guest until it needs this process. To be called from one thread only.
    ///
    /// # Errors
    /// [`HypervisorError`]: the CPU can't go on.
    fn run(&mut self) -> Result<Exit<'_>, HypervisorError>;

    /// What gets it out of the guest, from any thread.
    fn kicker(&self) -> Arc<dyn Kicker>;

    /// Registers and all. The CPU must be stopped, by a kick.
    ///
    /// # Errors
    /// [`HypervisorError`].
    fn save(&self) -> Result<Saved, HypervisorError>;

    /// Puts back what [`Vcpu::save`] gave, also in another VM of the same kind.
    ///
    /// # Errors
    /// [`HypervisorError`].
    fn restore(&mut self, saved: &Saved) -> Result<(), HypervisorError>;

    /// Tells the guest's clock that it was stopped by us, so that its watchdogs don't bark.
    fn was_paused(&mut self) {}
}

/// Gets a CPU out of the guest.
pub trait Kicker: Send + Sync {
    /// The CPU's current or else next [`Vcpu::run`] returns [`Exit::Kicked`] soon. When it has ended already, nothing
    /// happens.
    fn kick(&self);
}

/// Why a CPU came out of the guest.
#[derive(Debug, PartialEq, Eq)]
pub enum Exit<'a> {
    /// Port input: `data` holds one or more elements of `size` bytes, to be filled.
    PortRead {
        /// The port.
        port: u16,
        /// Bytes of each element: 1, 2 or 4.
        size: usize,
        /// The elements.
        data: &'a mut [u8],
    },
    /// Port output.
    PortWrite {
        /// The port.
        port: u16,
        /// Bytes of each element: 1, 2 or 4.
        size: usize,
        /// The elements.
        data: &'a [u8],
    },
    /// A read where no RAM is, to be filled.
    MmioRead {
        /// The address.
        address: u64,
        /// At most 8 bytes.
        data: &'a mut [u8],
    },
    /// A write where no RAM is.
    MmioWrite {
        /// The address.
        address: u64,
        /// At most 8 bytes.
        data: &'a [u8],
    },
    /// By [`Kicker::kick`], or by chance.
    Kicked,
    /// The CPU shut down (triple fault).
    Shutdown,
    /// The CPU can't go on: what the hypervisor said.
    Crash(String),
}
