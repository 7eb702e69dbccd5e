//! Services: ports of sandboxes under names, exposed on the gateway's host.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;
use tonic::Status;
use torpor_proto::{
    openshell::{
        datamodel::v1::ObjectMeta,
        v1::{self as os, DeletionOutcome},
    },
    v1::{self, sandboxes_server::Sandboxes as _},
};
use torpor_sandbox::{SandboxId, spec::unqualified};

use super::{OpenShellApi, call::Call, page};
use crate::{
    api::convert::time,
    error::ApiError,
    expose::{ExposedView, port_of},
    store::{Foreign, Kind, Listing, NewObject, Object, Problem, Record, StoreError},
};

/// Longest name, bytes.
const LONGEST_NAME: usize = 63;

/// A service that is to be.
#[derive(Clone, Debug)]
pub struct Planned {
    name: String,
    body: os::ServiceEndpoint,
}

fn plan(name: String, port: u32, domain: bool, mode: i32) -> Result<Planned, ApiError> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.len() > LONGEST_NAME || !name.chars().all(fits) || name.starts_with('-') || name.ends_with('-') {
        let problem = format!("'{}' is no DNS label", name.escape_debug());
        return Err(ApiError::invalid("service", problem));
    }
    port_of(port)?;
    if os::ServiceAuthorizationMode::try_from(mode).is_err() {
        return Err(ApiError::invalid("authorization_mode", format!("{mode} is not known")));
    }
    let body = os::ServiceEndpoint {
        target_port: port,
        domain,
        authorization_mode: mode,
        ..os::ServiceEndpoint::default()
    };
    Ok(Planned { name, body })
}

/// The services of a create.
///
/// # Errors
/// `INVALID_ARGUMENT`.
pub fn planned(exposures: &[os::SandboxServiceExposure]) -> Result<Vec<Planned>, ApiError> {
    let plans = exposures
        .iter()
        .map(|e| plan(e.service.clone(), e.target_port, false, e.authorization_mode))
        .collect::<Result<Vec<_>, _>>()?;
    let names: BTreeSet<&str> = plans.iter().map(|plan| plan.name.as_str()).collect();
    if names.len() < plans.len() {
        return Err(ApiError::invalid("service_exposures", "two services have the same name"));
    }
    Ok(plans)
}

/// The ports of these, each once.
pub fn ports(services: &[Planned]) -> Vec<v1::ExposeAtCreate> {
    let ports: BTreeSet<u32> = services.iter().map(|service| service.body.target_port).collect();
    ports.into_iter().map(|port| v1::ExposeAtCreate { port, ..v1::ExposeAtCreate::default() }).collect()
}

/// Writes the services of a new sandbox.
///
/// # Errors
/// The store's.
pub fn add_all(
    tables: &Foreign<'_>,
    workspace: &str,
    id: &SandboxId,
    services: Vec<Planned>,
) -> Result<(), StoreError> {
    services.into_iter().try_for_each(|service| add(tables, workspace, id, service).map(drop))
}

fn add(
    tables: &Foreign<'_>,
    workspace: &str,
    id: &SandboxId,
    service: Planned,
) -> Result<Object, StoreError> {
    let new = NewObject {
        workspace: workspace.to_owned(),
        sandbox: Some(id.clone()),
        name: service.name,
        labels: BTreeMap::new(),
        body: service.body.encode_to_vec(),
    };
    tables.add(Kind::Service, new)
}

fn endpoint(object: &Object) -> os::ServiceEndpoint {
    // What can't be read was written by another version; its name is shown all the same.
    os::ServiceEndpoint::decode(object.body.as_slice()).unwrap_or_default()
}

/// By port, where the host listens for a sandbox.
async fn hosts(api: &OpenShellApi, id: &str) -> Result<BTreeMap<u32, ExposedView>, ApiError> {
    let views = api.service.exposed(Some(id)).await?;
    Ok(views.into_iter().map(|view| (view.row.port.into(), view)).collect())
}

fn url(hosts: &BTreeMap<u32, ExposedView>, port: u32) -> String {
    let open = hosts.get(&port).filter(|view| view.problem.is_none());
    open.map_or_else(String::new, |view| format!("http://{}/", view.row.host))
}

/// The addresses of a sandbox's services by their names.
///
/// # Errors
/// The store's.
pub async fn urls(api: &OpenShellApi, id: &str) -> Result<BTreeMap<String, String>, Status> {
    let id: SandboxId = id.parse().map_err(ApiError::internal)?;
    let objects = all_of(api, &id).await?;
    if objects.is_empty() {
        return Ok(BTreeMap::new());
    }
    let hosts = hosts(api, id.as_str()).await?;
    Ok(objects
        .into_iter()
        .map(|object| (object.name.clone(), url(&hosts, endpoint(&object).target_port)))
        .collect())
}

async fn all_of(api: &OpenShellApi, id: &SandboxId) -> Result<Vec<Object>, StoreError> {
    let listing = Listing {
        kind: Kind::Service,
        sandbox: Some(id.clone()),
        selector: Default::default(),
        size: usize::MAX,
        after: None,
    };
    Ok(api.service.store.foreign(move |tables| tables.list(&listing)).await?.0)
}

fn shown(object: Object, sandbox: &str, hosts: &BTreeMap<u32, ExposedView>) -> os::ServiceEndpointResponse {
    let mut endpoint = endpoint(&object);
    endpoint.sandbox_id = object.sandbox.unwrap_or_default();
    endpoint.sandbox = sandbox.to_owned();
    endpoint.name.clone_from(&object.name);
    endpoint.metadata = Some(ObjectMeta {
        id: object.id,
        name: object.name,
        created_time: time(object.created),
        resource_version: object.version,
        workspace: object.workspace,
        ..ObjectMeta::default()
    });
    let url = url(hosts, endpoint.target_port);
    os::ServiceEndpointResponse { endpoint: Some(endpoint), url }
}

async fn show(
    api: &OpenShellApi,
    record: &Record,
    object: Object,
) -> Result<os::ServiceEndpointResponse, Status> {
    let hosts = hosts(api, record.id.as_str()).await?;
    Ok(shown(object, unqualified(&record.name).1, &hosts))
}

/// The host listens first: a name without an address would be of no use.
pub async fn expose(
    api: &OpenShellApi,
    call: Call,
    mut message: os::ExposeServiceRequest,
) -> Result<os::ServiceEndpointResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell expose", &message)?;
    let record = call.record(&api.service, message.workspace_scope, &message.sandbox).await?;
    let plan = plan(message.name, message.target_port, message.domain, message.authorization_mode)?;
    let port = plan.body.target_port;
    if api.service.store.answered(key.as_ref()).await?.is_none() {
        let kept = hosts(api, record.id.as_str()).await?.remove(&port);
        let request = v1::ExposeRequest {
            sandbox: record.id.to_string(),
            port,
            host: String::new(),
            wake: kept.is_some_and(|view| view.row.wake),
        };
        api.sandboxes().expose(call.ask(call.caller.current(), request)).await?;
    }
    let (id, name, workspace) = (record.id.clone(), plan.name.clone(), record.spec.workspace.clone());
    let written = api.service.store.foreign_once(key, move |tables| {
        match tables.find(Kind::Service, &workspace, Some(&id), &plan.name)? {
            Some(mut present) => {
                present.body = plan.body.encode_to_vec();
                tables.replace(present)?;
            }
            None => drop(add(tables, &workspace, &id, plan)?),
        }
        Ok(Vec::new())
    });
    written.await?;
    let object = find(api, &record, name).await?;
    show(api, &record, object).await
}

async fn find(api: &OpenShellApi, record: &Record, name: String) -> Result<Object, StoreError> {
    let (id, workspace) = (record.id.clone(), record.spec.workspace.clone());
    let found = api.service.store.foreign(move |t| t.get(Kind::Service, &workspace, Some(&id), &name));
    found.await
}

pub async fn get(
    api: &OpenShellApi,
    call: Call,
    message: os::GetServiceRequest,
) -> Result<os::ServiceEndpointResponse, Status> {
    let record = call.record(&api.service, message.workspace_scope, &message.sandbox).await?;
    let object = find(api, &record, message.name).await?;
    show(api, &record, object).await
}

/// Of one sandbox, or of those of the workspaces.
pub async fn list(
    api: &OpenShellApi,
    call: Call,
    message: os::ListServicesRequest,
) -> Result<os::ListServicesResponse, Status> {
    let (size, after) = page::asked(message.page_size, &message.page_token)?;
    let sandbox = match message.sandbox.as_str() {
        "" => None,
        name => Some(call.record(&api.service, message.workspace_scope.clone(), name).await?.id),
    };
    let selector = match sandbox {
        Some(_) => Default::default(),
        None => crate::store::Selector::default()
            .within(call.scope(&api.service, message.workspace_scope).await?.0),
    };
    let listing = Listing { kind: Kind::Service, sandbox, selector, size, after };
    let (objects, more) = api.service.store.foreign(move |tables| tables.list(&listing)).await?;
    let next_page_token = page::next(&objects, more);
    let mut services = Vec::with_capacity(objects.len());
    // They are in the order of their sandboxes: each of those is looked up once.
    let mut of: Option<(Record, BTreeMap<u32, ExposedView>)> = None;
    for object in objects {
        let id = object.sandbox.clone().unwrap_or_default();
        if of.as_ref().is_none_or(|(record, _)| record.id.as_str() != id) {
            // One that is deleted at this moment has no services any more.
            let Ok(record) = api.service.store.get(&id).await else { continue };
            of = Some((record, hosts(api, &id).await?));
        }
        if let Some((record, hosts)) = &of {
            services.push(shown(object, unqualified(&record.name).1, hosts));
        }
    }
    Ok(os::ListServicesResponse { services, next_page_token })
}

/// The port is taken back when no other service has it.
pub async fn delete(
    api: &OpenShellApi,
    call: Call,
    mut message: os::DeleteServiceRequest,
) -> Result<os::DeleteServiceResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell unexpose", &message)?;
    let absent = os::DeleteServiceResponse { outcome: DeletionOutcome::AlreadyAbsent.into() };
    let record = match call.record(&api.service, message.workspace_scope, &message.sandbox).await {
        Err(error) if error.code == crate::error::Code::NotFound && message.allow_missing => {
            return Ok(absent);
        }
        record => record?,
    };
    let before = find(api, &record, message.name.clone()).await;
    let (id, workspace) = (record.id.clone(), record.spec.workspace.clone());
    let written = api.service.store.foreign_once(key, move |tables| {
        let Some(object) = tables.find(Kind::Service, &workspace, Some(&id), &message.name)? else {
            if message.allow_missing {
                return Ok(absent.encode_to_vec());
            }
            return Err(Problem::Missing { kind: Kind::Service, name: message.name }.into());
        };
        tables.remove(Kind::Service, &object)?;
        Ok(os::DeleteServiceResponse { outcome: DeletionOutcome::Completed.into() }.encode_to_vec())
    });
    let answer = os::DeleteServiceResponse::decode(written.await?.as_slice()).map_err(ApiError::internal)?;
    if let Ok(gone) = before {
        let port = endpoint(&gone).target_port;
        if !all_of(api, &record.id).await?.iter().any(|other| endpoint(other).target_port == port) {
            api.service.unexpose(record.id.as_str(), port, true).await?;
        }
    }
    Ok(answer)
}

/// The port of a sandbox's service, by the service's id or name.
///
/// # Errors
/// `NOT_FOUND`.
pub async fn port_of_id(api: &OpenShellApi, id: &SandboxId, service: &str) -> Result<u32, ApiError> {
    let objects = all_of(api, id).await?;
    let found = objects.iter().find(|object| object.id == service || object.name == service);
    let missing = || Problem::Missing { kind: Kind::Service, name: torpor_sandbox::id::clip(service) };
    Ok(endpoint(found.ok_or_else(|| StoreError::from(missing()))?).target_port)
}
