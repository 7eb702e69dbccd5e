//! The docker and podman drivers: sandboxes as containers of an engine on this host.
//!
//! The engine owns the container: its writable layer is the workspace, and the same container is started again at every
//! resume. The static agent is the container's first process and dials a socket of this driver, so that commands, files,
//! forwards and readiness are the same as for virtual machines. What a later gateway needs to know of a run stands in its
//! folder; what the engine says is always asked anew, and its events are hints.

#![forbid(unsafe_code)]

mod auth;
mod checkpoint;
mod client;
mod config;
mod container;
mod doctor;
mod driver;
mod engine;
mod events;
#[cfg(test)]
mod fake;
mod images;
mod limits;
mod link;
mod live;
mod logs;
mod memory;
mod observe;
mod run;
mod start;
mod stop;
mod store;
mod types;

pub use config::{ConfigError, ContainerConfig};
pub use doctor::diagnose;
pub use driver::ContainerDriver;
pub use engine::Engine;
