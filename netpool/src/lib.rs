//! What a running sandbox borrows from its host, and how it comes back: a TAP device, an IPv4 /30, a vsock CID, a set
//! of CPUs and an amount of memory.
//!
//! The crate has two halves.
//!
//! * The pure half says *what* is lent: [`PoolConfig`] turns one [`Slot`] into every name and address that belongs to
//!   it, [`policy`] chooses slots and CPUs and admits memory, [`Loan`] and [`Ledger`] are the rows that the gateway
//!   keeps, and [`sweep()`] compares rows with the kernel's objects. It does no I/O and keeps no state.
//! * [`linux`] makes it so: TAP devices and their stock, the nftables table, cgroups, CPU affinity, a forwarder of names, and
//!   the host's health. Its calls block for a few milliseconds; an async caller wraps them in `spawn_blocking`.
//!
//! Order at start: the loan's row, the firewall's elements, the TAP, the VM process. Order at release: the VM process is
//! gone, the TAP (into stock), the elements, the cgroup, the row. A crash between two steps leaves only things that
//! [`sweep()`] finds. What takes long (deleting TAPs, listing connections) is left for [`linux::Network::tend`], off the hot path.

#![deny(unsafe_code)]

mod cidr;
mod config;
mod cpuset;
mod egress;
mod ledger;
#[cfg(target_os = "linux")]
pub mod linux;
mod mac;
pub mod policy;
mod resolver;
mod route;
mod sweep;
mod topology;

pub use cidr::{Ipv4Cidr, ParseCidrError};
pub use config::{ConfigError, Guest, GuestNet, Instance, MAX_SLOTS, PoolConfig, Slot, SlotOutOfRange};
pub use cpuset::{CpuSet, ParseCpuSetError};
pub use egress::{
    AllowRule, Egress, EgressError, Grants, MAX_ALLOW_RULES, PRIVATE_NETWORKS, Protocol, Service, Span,
};
pub use ledger::{Ledger, LedgerError, Loan};
pub use mac::{HOST_MAC, Mac, ParseMacError, mac_for};
pub use resolver::{Nameservers, choose_nameservers, parse_nameservers, parse_upstreams};
pub use route::{default_interface, overlapping_route};
pub use sweep::{Live, Process, Repair, Sweep, TapNeighbour, TapRoute, sweep};
pub use topology::{Core, Placement, Topology};
