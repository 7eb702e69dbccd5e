//! `torpor.v1` over the service: conversions and streams, no decisions.

mod convert;
mod disks;
mod exec;
mod forward;
mod gateway;
mod images;
mod logs;
mod network;
mod sandboxes;
mod status;
mod watch;

use std::sync::Arc;

pub use gateway::GatewayApi;
pub use images::ImagesApi;
pub use sandboxes::SandboxesApi;
pub use status::to_status;

use crate::service::Service;

/// What every service of the API holds.
pub type Shared = Arc<Service>;
