//! The gateway: verbs over gRPC, a store, and a reconciler that makes what is written come true.
//!
//! ```text
//! api/ ──▶ service ──intent──▶ store ──changes──▶ reconcile ──verbs──▶ drivers
//! ```
//! Only `store/` knows SQL, only `reconcile` calls a driver's verbs, only `api/` knows wire types.

mod access;
pub mod admin;
mod api;
mod authority;
mod byid;
pub mod config;
pub mod containers;
mod disks;
pub mod doctor;
mod drivers;
mod egress;
mod endpoints;
mod engines;
mod error;
mod expose;
pub mod fixes;
mod forward;
mod http;
pub mod kubernetes;
mod listen;
mod mainlog;
mod maintenance;
mod metrics;
mod orphans;
mod places;
mod pools;
mod pressure;
mod progress;
mod reconcile;
mod reflect;
mod serve;
mod service;
mod sessions;
pub mod simworld;
mod ssh;
mod store;
mod templates;
mod update;
mod web;

pub use config::{Config, ConfigError};
pub use drivers::Drivers;
pub use error::{ApiError, Code};
pub use serve::{Gateway, ServeError, serve};
pub use store::StoreError;

/// The child process of the KVM probe; never returns.
pub fn kvm_probe_child() -> ! {
    torpor_driver_vm::probe::child_main()
}
