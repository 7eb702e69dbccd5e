//! torpor-vmm: one process, one VM.
//!
//! - [`hypervisor`]: what runs guest CPUs: KVM, or a script that pretends.
//! - [`layout`]: where things are in the guest's address spaces.
//! - [`memory`]: the guest's RAM.
//! - [`boot`]: kernels, initramfs, and what they are told.
//! - [`acpi`]: the tables that announce devices, and the power registers.
//! - [`machine`]: all of it put together.
//! - [`process`]: the program around a machine: configuration, jail, control socket, end.

pub mod acpi;
pub mod boot;
pub mod hypervisor;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod process;
mod vcpu;
