//! The Linux half: it makes what the pure half decides. Every call works in the network namespace of the calling
//! thread and blocks for a few milliseconds at most; a [`Network`] keeps two or three sockets of the kernel's open.
//!
//! The uses of `unsafe` in this crate are the ioctls of the module `sys` and, there too, the inheritance of a TAP's descriptor.

mod attach;
mod cgroup;
mod conntrack;
mod cpu;
mod diagnose;
mod elements;
mod error;
mod firewall;
mod fix;
mod forwarder;
mod hierarchy;
mod host;
mod link;
mod netlink;
mod repair;
mod ruleset;
mod stock;
mod sys;
mod tap;
mod tcp_names;

pub use attach::{Network, Tend, attach, detach};
pub use cgroup::{Cgroup, CgroupLimits, CgroupParent, CgroupProbe, Controller, CpuMax};
pub use conntrack::Forgotten;
pub use cpu::{host_cpus, host_topology, pin, read_topology};
pub use diagnose::{Check, Finding, diagnose};
pub use error::NetError;
pub use firewall::{Ensured, Firewall, Listing};
pub use fix::{Applied, Fix, Undone, applied, apply_fix, undo_fixes};
pub use forwarder::{Forwarder, ForwarderOptions};
pub use host::{Forwarding, Uplink, check_range, effective_mtu, enable_forwarding, host_nameservers, uplink};
pub use repair::{apply, live};
pub use stock::{TapStock, Tended};
pub use sys::keep_open_in_child;
pub use tap::{Offload, Tap, TapOptions, delete_tap, list_taps};
