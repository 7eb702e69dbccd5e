//! The gateway, and who asks.

use tonic::Status;
use torpor_proto::openshell::v1 as os;

use super::{OpenShellApi, call::Call};
use crate::service::Service;

async fn status(service: &Service) -> i32 {
    // A database that can't be written is the one thing without which nothing works.
    match service.store.ping().await {
        Ok(()) => os::ServiceStatus::Healthy,
        Err(_) => os::ServiceStatus::Unhealthy,
    }
    .into()
}

pub async fn health_of(api: &OpenShellApi) -> os::HealthResponse {
    os::HealthResponse { status: status(&api.service).await, version: env!("CARGO_PKG_VERSION").to_owned() }
}

pub async fn gateway(api: &OpenShellApi) -> Result<os::GetGatewayInfoResponse, Status> {
    let drivers = api.service.drivers.all().map(|driver| {
        let can = driver.capabilities();
        os::ComputeDriverInfo {
            name: can.name.clone(),
            capabilities: Some(os::ComputeDriverCapabilities {
                driver_name: can.name,
                driver_version: can.version,
                resource_capabilities: Some(os::ResourceCapabilities {
                    cpu: Some(os::CpuResourceCapabilities { limit_supported: true }),
                    memory: Some(os::MemoryResourceCapabilities { limit_supported: true }),
                    gpu: Some(os::GpuResourceCapabilities::default()),
                }),
            }),
        }
    });
    Ok(os::GetGatewayInfoResponse {
        status: status(&api.service).await,
        gateway_version: env!("CARGO_PKG_VERSION").to_owned(),
        compute_drivers: drivers.collect(),
        extensions: Vec::new(),
    })
}

pub fn user(call: &Call) -> os::GetCurrentUserResponse {
    let identity = call.caller.identity();
    let roles = match call.caller.is_admin() {
        true => vec!["admin".to_owned()],
        false => {
            call.caller.memberships().into_iter().map(|(place, role)| format!("{place}:{role}")).collect()
        }
    };
    os::GetCurrentUserResponse {
        subject: identity.subject.clone(),
        display_name: identity.subject.clone(),
        roles,
        scopes: Vec::new(),
        identity_provider: identity.by.as_str().to_owned(),
    }
}
