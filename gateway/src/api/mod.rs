//! `torpor.v1` over the service: conversions and streams, no decisions.

mod access;
mod attach;
mod convert;
mod disks;
mod endpoints;
mod exec;
mod files;
mod forward;
mod gateway;
mod images;
mod json;
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

use std::{future::Future, sync::Arc};

use tonic::Status;

pub use access::AccessApi;
pub use files::FilesApi;
pub use gateway::GatewayApi;
pub use images::ImagesApi;
pub use openshell::{OpenShellApi, refused};
pub use sandboxes::SandboxesApi;
pub use status::to_status;
pub use templates::TemplatesApi;
pub use workspaces::WorkspacesApi;

use crate::{error::ApiError, service::Service};

/// What every service of the API holds.
pub type Shared = Arc<Service>;

/// Does work in a task of its own: it goes on to its end when the caller goes away.
async fn to_its_end<T, E>(work: impl Future<Output = Result<T, E>> + Send + 'static) -> Result<T, Status>
where
    T: Send + 'static,
    E: Into<Status> + Send + 'static,
{
    tokio::spawn(work).await.map_err(ApiError::internal)?.map_err(Into::into)
}
