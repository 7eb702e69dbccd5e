//! What a running sandbox borrows from its host, and how it comes back: a TAP device, an IPv4 /30, a vsock CID, a set
//! of CPUs and an amount of memory.
//!
//! The crate has two halves.
//!
//! * The pure half says *what* is lent: [`PoolConfig`] turns one [`Slot`] into every name and address that belongs to
//!   it, [`policy`] chooses slots and CPUs and admits memory, [`Loan`] and [`Ledger`] are the rows that the gateway
//!   keeps, and [`sweep()`] compares rows with the kernel's objects. It does no I/O and keeps no state.
//! * [`linux`] makes it so: TAP devices, the nftables table, cgroups and CPU affinity. Its calls block for a few
//!   milliseconds; an async caller wraps them in `spawn_blocking`.
//!
//! Order at start: the loan's row, the firewall element, the TAP, the VM process. Order at release: the VM process is
//! gone (its TAP with it), the element, the cgroup, the row. A crash between two steps leaves only things that
//! [`sweep()`] finds.

#![deny(unsafe_code)]

mod cidr;
mod config;
mod cpuset;
mod ledger;
#[cfg(target_os = "linux")]
pub mod linux;
mod mac;
pub mod policy;
mod resolver;
mod route;
mod sweep;

pub use cidr::{Ipv4Cidr, ParseCidrError};
pub use config::{ConfigError, Guest, GuestNet, Instance, MAX_SLOTS, PoolConfig, Slot, SlotOutOfRange};
pub use cpuset::{CpuSet, ParseCpuSetError};
pub use ledger::{Ledger, LedgerError, Loan};
pub use mac::{HOST_MAC, Mac, ParseMacError, mac_for};
pub use resolver::{Nameservers, choose_nameservers, parse_nameservers};
pub use route::{default_interface, overlapping_route};
pub use sweep::{Repair, Sweep, sweep};
