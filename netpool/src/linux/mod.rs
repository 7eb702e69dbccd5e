//! The Linux half: it makes what the pure half decides. Every call works in the network namespace of the calling
//! thread, blocks for a few milliseconds, and keeps no descriptor open.
//!
//! The uses of `unsafe` in this crate are the ioctls of the module `sys` and, there too, the inheritance of a TAP's descriptor.

mod attach;
mod cgroup;
mod cpu;
mod error;
mod firewall;
mod host;
mod link;
mod ruleset;
mod sys;
mod tap;

pub use attach::{Live, apply, attach, detach, live};
pub use cgroup::{Cgroup, CgroupLimits, CgroupParent, CgroupProbe, Controller};
pub use cpu::{host_cpus, pin};
pub use error::NetError;
pub use firewall::{Ensured, Firewall};
pub use host::{Forwarding, Uplink, check_range, effective_mtu, enable_forwarding, host_nameservers, uplink};
pub use tap::{Tap, TapOptions, delete_tap, list_taps};
