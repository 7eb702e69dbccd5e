//! The network calls of `torpor.v1.Sandboxes`.

use std::sync::Arc;

use tonic::Status;
use torpor_proto::v1;
use torpor_sandbox::{Egress, spec::unqualified};

use super::{Shared, convert, sandboxes::allowed, to_its_end};
use crate::{access::Caller, error::ApiError, expose::ExposedView, store::Record};

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

pub async fn set_egress(
    service: &Shared,
    caller: &Caller,
    request: v1::SetEgressRequest,
) -> Result<Arc<Record>, Status> {
    let (target, _) = allowed(caller, request.target).await?;
    let egress = egress(request.egress)?;
    // In a task of its own: what is written shall be in force, whether or not the caller waits.
    let service = service.clone();
    Ok(to_its_end(async move { service.set_egress(target, egress).await }).await?.record)
}

/// Where somebody may have the gateway's host listen: administrators anywhere, others on loopback, on ports that any
/// user of the host could take.
///
/// # Errors
/// `PERMISSION_DENIED`.
pub fn may_listen(caller: &Caller, host: Option<&str>) -> Result<(), ApiError> {
    let Some(host) = host.filter(|host| !host.is_empty() && !caller.is_admin()) else { return Ok(()) };
    // What is no address is refused by whoever reads it.
    let Ok(address) = host.parse::<std::net::SocketAddr>() else { return Ok(()) };
    if address.ip().is_loopback() && (address.port() == 0 || address.port() >= 1024) {
        return Ok(());
    }
    let message = format!(
        "{address}: only loopback addresses and ports from 1024 on are for others than administrators"
    );
    Err(ApiError::new(crate::error::Code::PermissionDenied, "PERMISSION_DENIED", message))
}

async fn named(caller: &Caller, sandbox: &str) -> Result<String, Status> {
    match sandbox {
        "" => Err(ApiError::invalid("sandbox", "a name or id is needed").into()),
        name => Ok(caller.key(name).await?),
    }
}

pub async fn expose(
    service: &Shared,
    caller: &Caller,
    request: v1::ExposeRequest,
) -> Result<v1::ExposedPort, Status> {
    let key = named(caller, &request.sandbox).await?;
    may_listen(caller, Some(&request.host))?;
    // In a task of its own: row and socket belong together.
    let service = service.clone();
    let exposed = to_its_end(async move {
        let host = Some(request.host.as_str()).filter(|host| !host.is_empty());
        service.expose(&key, request.port, host, request.wake).await
    });
    exposed.await.map(port)
}

pub async fn list(
    service: &Shared,
    caller: &Caller,
    request: v1::ListExposedRequest,
) -> Result<v1::ListExposedResponse, Status> {
    if !request.sandbox.is_empty() {
        let key = named(caller, &request.sandbox).await?;
        let views = service.exposed(Some(&key)).await?;
        return Ok(v1::ListExposedResponse { ports: views.into_iter().map(port).collect() });
    }
    let scope = caller.scope(false)?;
    let views = service.exposed(None).await?.into_iter();
    let seen = views.filter(|view| scope.has(unqualified(&view.row.name).0));
    Ok(v1::ListExposedResponse { ports: seen.map(port).collect() })
}

pub async fn unexpose(
    service: &Shared,
    caller: &Caller,
    request: v1::UnexposeRequest,
) -> Result<v1::UnexposeResponse, Status> {
    let key = named(caller, &request.sandbox).await?;
    let service = service.clone();
    let removing = async move { service.unexpose(&key, request.port, request.allow_missing).await };
    let removed = to_its_end(removing).await?;
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
