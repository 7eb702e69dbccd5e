//! The network calls of `torpor.v1.Sandboxes`.

use std::sync::Arc;

use tonic::Status;
use torpor_proto::v1;
use torpor_sandbox::Egress;

use super::{Shared, convert, to_status};
use crate::{error::ApiError, expose::ExposedView, store::Record};

/// A policy from a client; none: the default.
pub fn egress(wanted: Option<v1::Egress>) -> Result<Option<Egress>, ApiError> {
    use v1::egress::Policy;
    let wanted = wanted.unwrap_or_default();
    let policy = Policy::try_from(wanted.policy)
        .map_err(|_| ApiError::invalid("egress.policy", format!("{} is not known", wanted.policy)))?;
    if policy != Policy::Allow && (wanted.allow_names || !wanted.allow.is_empty()) {
        let problem = "rules, and whether names may be asked for, belong to the policy allow only";
        return Err(ApiError::invalid("egress.allow", problem));
    }
    Ok(match policy {
        Policy::Unspecified => None,
        Policy::Open => Some(Egress::Open),
        Policy::Public => Some(Egress::Public),
        Policy::None => Some(Egress::None),
        Policy::Allow => Some(Egress::Allow { rules: wanted.allow, names: wanted.allow_names }),
    })
}

/// The same, to a client.
pub fn shown(egress: &Egress) -> v1::Egress {
    use v1::egress::Policy;
    let (policy, allow, allow_names) = match egress {
        Egress::Open => (Policy::Open, Vec::new(), false),
        Egress::Public => (Policy::Public, Vec::new(), false),
        Egress::None => (Policy::None, Vec::new(), false),
        Egress::Allow { rules, names } => (Policy::Allow, rules.clone(), *names),
    };
    v1::Egress { policy: policy.into(), allow, allow_names }
}

pub async fn set_egress(service: &Shared, request: v1::SetEgressRequest) -> Result<Arc<Record>, Status> {
    let (target, _) = convert::target(request.target).map_err(to_status)?;
    let egress = egress(request.egress).map_err(to_status)?;
    // In a task of its own: what is written shall be in force, whether or not the caller waits.
    let service = service.clone();
    let set = tokio::spawn(async move { service.set_egress(target, egress).await }).await;
    Ok(set.map_err(|e| to_status(ApiError::internal(e)))?.map_err(to_status)?.record)
}

fn named(sandbox: &str) -> Result<&str, Status> {
    match sandbox {
        "" => Err(to_status(ApiError::invalid("sandbox", "a name or id is needed"))),
        name => Ok(name),
    }
}

pub async fn expose(service: &Shared, request: v1::ExposeRequest) -> Result<v1::ExposedPort, Status> {
    named(&request.sandbox)?;
    // In a task of its own: row and socket belong together.
    let service = service.clone();
    let exposed = tokio::spawn(async move {
        let host = Some(request.host.as_str()).filter(|host| !host.is_empty());
        service.expose(&request.sandbox, request.port, host, request.wake).await
    });
    let view = exposed.await.map_err(|e| to_status(ApiError::internal(e)))?.map_err(to_status)?;
    Ok(port(view))
}

pub async fn list(
    service: &Shared,
    request: v1::ListExposedRequest,
) -> Result<v1::ListExposedResponse, Status> {
    let sandbox = Some(request.sandbox.as_str()).filter(|name| !name.is_empty());
    let views = service.exposed(sandbox).await.map_err(to_status)?;
    Ok(v1::ListExposedResponse { ports: views.into_iter().map(port).collect() })
}

pub async fn unexpose(
    service: &Shared,
    request: v1::UnexposeRequest,
) -> Result<v1::UnexposeResponse, Status> {
    named(&request.sandbox)?;
    let service = service.clone();
    let removing =
        tokio::spawn(
            async move { service.unexpose(&request.sandbox, request.port, request.allow_missing).await },
        );
    let removed = removing.await.map_err(|e| to_status(ApiError::internal(e)))?.map_err(to_status)?;
    Ok(v1::UnexposeResponse { removed })
}

fn port(view: ExposedView) -> v1::ExposedPort {
    v1::ExposedPort {
        sandbox_id: view.row.sandbox.to_string(),
        sandbox: view.row.name,
        port: view.row.port.into(),
        host: view.row.host.to_string(),
        wake: view.row.wake,
        created: convert::time(view.row.created),
        connections: view.connections,
        problem: view.problem.unwrap_or_default(),
    }
}
