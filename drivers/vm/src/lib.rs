//! The vm driver: sandboxes as virtual machines on this host.
//!
//! One process is one running VM. It is started in a session of its own and outlives the gateway; it holds the lock of its
//! disk and its TAP device for as long as it lives, so that both are free the moment it is gone, however it goes. What a
//! later gateway needs to know of it stands in the folder of its run.

#![deny(unsafe_code)]

mod agent;
mod assets;
mod config;
mod disk;
mod driver;
pub mod egress;
mod errors;
mod guest;
mod host;
mod live;
mod machine;
mod names;
mod owner;
pub mod probe;
mod process;
mod rundir;
mod store;
mod sweep;
mod sys;
mod vm;

pub use config::{ConfigError, FIRST_UID, VmConfig};
pub use driver::VmDriver;
pub use sweep::Standing;
