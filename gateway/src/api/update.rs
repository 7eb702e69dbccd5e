//! The calls of `torpor.v1.Sandboxes` that change a sandbox which is there.

use std::{collections::BTreeMap, sync::Arc};

use tonic::Status;
use torpor_proto::v1;
use torpor_sandbox::{EgressChange, SpecChange};

use super::{Shared, convert, endpoints, network, sandboxes::allowed, to_its_end};
use crate::{access::Caller, error::ApiError, store::Record, update::UpdateWish};

/// A map of a request, if there is one.
pub fn words(map: Option<v1::StringMap>) -> Option<BTreeMap<String, String>> {
    map.map(|map| map.values.into_iter().collect())
}

fn wish(request: v1::UpdateSandboxRequest) -> Result<UpdateWish, ApiError> {
    let resources = request.resources.unwrap_or_default();
    let egress = match request.egress {
        None => None,
        wanted => Some(network::egress(wanted)?.map_or(EgressChange::Default, EgressChange::Own)),
    };
    Ok(UpdateWish {
        image: request.image,
        labels: words(request.labels),
        annotations: words(request.annotations),
        change: SpecChange {
            command: request.command.map(|command| command.values),
            environment: words(request.environment),
            workdir: request.workdir,
            user: request.user,
            cpus: resources.cpus,
            memory_bytes: resources.memory_bytes,
            disk_bytes: resources.disk_bytes,
            egress,
            restart: convert::wanted_restart(request.restart_policy)?,
            stop_grace: convert::given(request.stop_grace, "stop_grace")?,
            endpoints: request.endpoints.map(|list| endpoints::wanted(list.values)).transpose()?,
            stdin: request.stdin,
            tty: request.tty,
        },
    })
}

pub async fn update(
    service: &Shared,
    caller: &Caller,
    mut request: v1::UpdateSandboxRequest,
) -> Result<Arc<Record>, Status> {
    let (target, _) = allowed(caller, request.target.take()).await?;
    let wish = wish(request)?;
    // In a task of its own: a caller that goes away must not stop it on the way.
    let service = service.clone();
    to_its_end(async move { service.update(target, wish).await }).await
}

pub async fn resume(
    service: &Shared,
    caller: &Caller,
    request: v1::ResumePendingUpdateRequest,
) -> Result<Arc<Record>, Status> {
    let (target, _) = allowed(caller, request.target).await?;
    let service = service.clone();
    to_its_end(async move { service.resume_update(target, request.abandon).await }).await
}
