//! The kubernetes driver: sandboxes as Sandbox objects of agent-sandbox, suspended to zero pods.
//!
//! The controller of agent-sandbox makes the pods; the driver says which sandboxes are to run and keeps their workspaces,
//! as claims that it makes and deletes itself. Whether one is suspended is judged by what is wanted of it and by its pod,
//! never by a condition alone, as releases of the controller differ in these. The static agent is copied into each pod by
//! an init container, is its first process, and is reached by the API server's exec or on a port of its own, so that
//! commands, files, forwards and readiness are the same as for virtual machines.

#![forbid(unsafe_code)]

mod cache;
mod client;
mod config;
mod create;
mod dial;
mod doctor;
mod driver;
pub mod folder;
mod images;
mod link;
mod live;
mod manifest;
mod observe;
mod orphan;
mod passed;
mod place;
mod start;
mod stop;
mod store;
mod trust;
mod types;
mod update;
mod wait;
mod way;

pub use config::{AgentLink, ConfigError, KubernetesConfig};
pub use doctor::{diagnose, rights};
pub use driver::KubernetesDriver;
pub use passed::{PASSED, SAYABLE};
