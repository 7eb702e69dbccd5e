//! `torpor.v1` over the service: conversions and streams, no decisions.

mod access;
mod convert;
mod disks;
mod endpoints;
mod exec;
mod files;
mod forward;
mod gateway;
mod images;
mod logs;
mod network;
mod openshell;
mod sandboxes;
mod ssh;
mod status;
mod templates;
mod update;
mod watch;
mod workspaces;

use std::sync::Arc;

pub use access::AccessApi;
pub use files::FilesApi;
pub use gateway::GatewayApi;
pub use images::ImagesApi;
pub use openshell::{OpenShellApi, refused};
pub use sandboxes::SandboxesApi;
pub use status::to_status;
pub use templates::TemplatesApi;
pub use workspaces::WorkspacesApi;

use crate::service::Service;

/// What every service of the API holds.
pub type Shared = Arc<Service>;
