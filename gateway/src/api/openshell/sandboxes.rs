//! Sandboxes: made, shown, put to rest and woken, deleted.

use prost::Message as _;
use tonic::Status;
use torpor_proto::{
    openshell::v1::{self as os, DeletionOutcome},
    v1::{self, sandboxes_server::Sandboxes as _},
};
use torpor_sandbox::{SandboxId, id::clip};

use super::{
    OpenShellApi,
    call::{Call, Named},
    config,
    convert::{self, Extras},
    services, templates, wish,
};
use crate::{
    error::{ApiError, Code},
    store::{Kind, Object, Rest, StoreError},
};

/// Most providers that a create names.
const MOST_PROVIDERS: usize = 64;
/// Largest spec that is kept, bytes; its own part of [`crate::store::Foreign`]'s bound.
const LARGEST_SPEC: usize = 1 << 20;

impl OpenShellApi {
    /// Sandboxes with what is kept of them beside their records.
    async fn show_all(&self, sandboxes: Vec<v1::Sandbox>) -> Result<Vec<os::Sandbox>, Status> {
        let ids: Vec<Option<SandboxId>> = sandboxes.iter().map(|sandbox| sandbox.id.parse().ok()).collect();
        let extras = self.service.store.foreign(move |tables| {
            let one = |id: Option<SandboxId>| {
                let Some(id) = id else { return Ok(Extras::default()) };
                Ok(Extras {
                    rest: tables.kept(id.as_str())?,
                    policy_version: config::policy_version(tables.config(Some(&id))?),
                    providers: tables.attached_names(&id)?,
                })
            };
            ids.into_iter().map(one).collect::<Result<Vec<_>, StoreError>>()
        });
        let shown = sandboxes.into_iter().zip(extras.await?);
        Ok(shown.map(|(sandbox, extras)| convert::sandbox(sandbox, extras)).collect())
    }

    /// One of them.
    pub(super) async fn show(&self, sandbox: v1::Sandbox) -> Result<os::Sandbox, Status> {
        let mut shown = self.show_all(vec![sandbox]).await?;
        Ok(shown.pop().unwrap_or_default())
    }

    /// The present state of a sandbox.
    pub(super) async fn present(&self, call: &Call, named: &Named) -> Result<v1::Sandbox, Status> {
        let request = v1::GetSandboxRequest { sandbox: named.key.clone() };
        Ok(self.sandboxes().get(call.ask(&named.workspace, request)).await?.into_inner())
    }

    async fn respond(&self, sandbox: v1::Sandbox) -> Result<os::SandboxResponse, Status> {
        let sandbox = Some(self.show(sandbox).await?);
        Ok(os::SandboxResponse { sandbox, service_urls: Default::default() })
    }
}

/// The workspace, then checks of all that can be checked, then the record, then what is kept beside it.
pub async fn create(
    api: &OpenShellApi,
    call: Call,
    mut message: os::CreateSandboxRequest,
) -> Result<os::SandboxResponse, Status> {
    let store = &api.service.store;
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id.clone(), "openshell create", &message)?;
    let workspace = call.present(&api.service, message.workspace_scope.take()).await?;
    if let Some(id) = store.answered(key.as_ref()).await? {
        let named = Named { workspace, key: String::from_utf8_lossy(&id).into_owned() };
        let sandbox = api.present(&call, &named).await?;
        return with_urls(api, sandbox).await;
    }
    if message.await_main_process_attachment {
        let text =
            "await_main_process_attachment: main commands start with their sandbox and wait for nobody";
        return Err(ApiError::new(Code::Unimplemented, "ATTACHMENT_NOT_AWAITED", text).into());
    }
    unqualified(&message.name)?;
    let spec = message.spec.take().unwrap_or_default();
    let services = services::planned(&message.service_exposures)?;
    let (origin, spec_v1) = planned(api, &call, &workspace, &message.workload_template, &spec).await?;
    let providers = providers_of(api, &workspace, &spec.providers).await?;

    let request = v1::CreateSandboxRequest {
        name: message.name,
        labels: message.labels.into_iter().collect(),
        annotations: message.annotations.into_iter().collect(),
        spec: Some(spec_v1),
        template: message.workload_template,
        expose: services::ports(&services),
        request_id,
        wait: false,
    };
    let sandbox = api.sandboxes().create(call.ask(&workspace, request)).await?.into_inner();
    let id: SandboxId = sandbox.id.parse().map_err(ApiError::internal)?;
    let rest = Rest { spec: spec.encode_to_vec(), origin };
    let (kept, policy) = (id.clone(), spec.policy);
    let written = store.foreign_once(key, move |tables| {
        tables.keep(&kept, &rest)?;
        for provider in &providers {
            tables.attach(&kept, provider)?;
        }
        if let Some(policy) = policy {
            config::begin(tables, &kept, &policy)?;
        }
        services::add_all(tables, &workspace, &kept, services)?;
        Ok(kept.as_str().as_bytes().to_vec())
    });
    if let Err(error) = written.await {
        // Half of what was asked for is worse than nothing.
        let gone = v1::Target { sandbox: id.to_string(), ..v1::Target::default() };
        let request = v1::DeleteSandboxRequest { target: Some(gone), allow_missing: true };
        api.sandboxes().delete(call.ask(call.caller.current(), request)).await?;
        return Err(error.into());
    }
    with_urls(api, sandbox).await
}

/// A slash would name another workspace.
pub(super) fn unqualified(name: &str) -> Result<(), ApiError> {
    let problem = || format!("'{}': a name has no slash", clip(name).escape_debug());
    if name.contains('/') { Err(ApiError::invalid("name", problem())) } else { Ok(()) }
}

/// What it is made from, and the spec in our words.
async fn planned(
    api: &OpenShellApi,
    call: &Call,
    workspace: &str,
    template: &str,
    spec: &os::SandboxSpec,
) -> Result<(Vec<u8>, v1::SandboxSpec), Status> {
    if spec.encoded_len() > LARGEST_SPEC {
        let problem = format!("{} bytes; at most {LARGEST_SPEC} are kept", spec.encoded_len());
        return Err(ApiError::invalid("spec", problem).into());
    }
    let mut wished = wish::spec(spec)?;
    let class = spec.template.as_ref().map_or("", |template| &template.runtime_class_name);
    // A template may name the driver; what can't have one is refused with its spec then.
    let usual = if template.is_empty() { api.service.drivers.default_name() } else { wish::WITH_CLASSES };
    wish::runtime_class(class, usual, &mut wished)?;
    if template.is_empty() {
        return Ok((Vec::new(), wished));
    }
    let template = templates::find(api, call, workspace, template).await?;
    let resources = template.spec.and_then(|spec| spec.workload).and_then(|workload| workload.resources);
    if resources.is_some_and(|resources| resources.gpu.is_some()) {
        return Err(wish::no_gpu("workload_template.resources.gpu").into());
    }
    let metadata = template.metadata.unwrap_or_default();
    let origin = os::SandboxWorkloadTemplateProvenance {
        name: metadata.name,
        resource_version: metadata.resource_version.to_string(),
    };
    Ok((origin.encode_to_vec(), wished))
}

async fn providers_of(
    api: &OpenShellApi,
    workspace: &str,
    names: &[String],
) -> Result<Vec<Object>, ApiError> {
    if names.len() > MOST_PROVIDERS {
        let problem = format!("{} are named; at most {MOST_PROVIDERS} are possible", names.len());
        return Err(ApiError::invalid("spec.providers", problem));
    }
    let (workspace, names) = (workspace.to_owned(), names.to_vec());
    let found = api.service.store.foreign(move |tables| {
        names.iter().map(|name| tables.get(Kind::Provider, &workspace, None, name)).collect()
    });
    Ok(found.await?)
}

async fn with_urls(api: &OpenShellApi, sandbox: v1::Sandbox) -> Result<os::SandboxResponse, Status> {
    let service_urls = services::urls(api, &sandbox.id).await?;
    Ok(os::SandboxResponse { service_urls, ..api.respond(sandbox).await? })
}

pub async fn get(
    api: &OpenShellApi,
    call: Call,
    message: os::GetSandboxRequest,
) -> Result<os::SandboxResponse, Status> {
    let named = call.sandbox(&api.service, message.workspace_scope, &message.name).await?;
    let sandbox = api.present(&call, &named).await?;
    api.respond(sandbox).await
}

pub async fn list(
    api: &OpenShellApi,
    call: Call,
    message: os::ListSandboxesRequest,
) -> Result<os::ListSandboxesResponse, Status> {
    let (_, workspace, all_workspaces) = call.scope(&api.service, message.workspace_scope).await?;
    let request = v1::ListSandboxesRequest {
        page_size: message.page_size,
        page_token: message.page_token,
        label_selector: message.label_selector,
        all_workspaces,
    };
    let page = api.sandboxes().list(call.ask(&workspace, request)).await?.into_inner();
    let sandboxes = api.show_all(page.sandboxes).await?;
    Ok(os::ListSandboxesResponse { sandboxes, next_page_token: page.next_page_token })
}

pub async fn delete(
    api: &OpenShellApi,
    call: Call,
    message: os::DeleteSandboxRequest,
) -> Result<os::DeleteSandboxResponse, Status> {
    use v1::delete_sandbox_response::Outcome;
    let named = match call.sandbox(&api.service, message.workspace_scope, &message.name).await {
        Err(error) if error.code == Code::NotFound && message.allow_missing => {
            let outcome = DeletionOutcome::AlreadyAbsent.into();
            return Ok(os::DeleteSandboxResponse { outcome, sandbox_id: String::new() });
        }
        named => named?,
    };
    let target = v1::Target { sandbox: named.key, request_id: message.request_id, ..v1::Target::default() };
    let request = v1::DeleteSandboxRequest { target: Some(target), allow_missing: message.allow_missing };
    let deleted = api.sandboxes().delete(call.ask(&named.workspace, request)).await?.into_inner();
    let outcome = match deleted.outcome() {
        Outcome::Completed => DeletionOutcome::Completed,
        Outcome::Accepted => DeletionOutcome::Accepted,
        Outcome::AlreadyAbsent => DeletionOutcome::AlreadyAbsent,
        Outcome::Unspecified => DeletionOutcome::Unspecified,
    };
    Ok(os::DeleteSandboxResponse { outcome: outcome.into(), sandbox_id: deleted.id })
}

/// What a stop or a start was asked for.
enum Verb {
    Stop,
    Start,
}

pub async fn stop(
    api: &OpenShellApi,
    call: Call,
    mut message: os::StopSandboxRequest,
) -> Result<os::SandboxResponse, Status> {
    let id = std::mem::take(&mut message.request_id);
    let key = call.once(id, "openshell stop", &message)?;
    let named = call.sandbox(&api.service, message.workspace_scope, &message.name).await?;
    verb(api, call, named, key, Verb::Stop).await
}

pub async fn start(
    api: &OpenShellApi,
    call: Call,
    mut message: os::StartSandboxRequest,
) -> Result<os::SandboxResponse, Status> {
    let id = std::mem::take(&mut message.request_id);
    let key = call.once(id, "openshell start", &message)?;
    let named = call.sandbox(&api.service, message.workspace_scope, &message.name).await?;
    verb(api, call, named, key, Verb::Start).await
}

async fn verb(
    api: &OpenShellApi,
    call: Call,
    named: Named,
    key: Option<crate::store::RequestKey>,
    verb: Verb,
) -> Result<os::SandboxResponse, Status> {
    // What was done once is not done again, whatever the sandbox came to since; another one of its name is not meant.
    if let Some(id) = api.service.store.answered(key.as_ref()).await? {
        let first = Named { key: String::from_utf8_lossy(&id).into_owned(), ..named };
        let sandbox = api.present(&call, &first).await?;
        return api.respond(sandbox).await;
    }
    let before = api.present(&call, &named).await?;
    let target = Some(v1::Target { sandbox: before.id.clone(), ..v1::Target::default() });
    let phase = before.status.map(|status| status.phase()).unwrap_or_default();
    let ask = call.caller.current().to_owned();
    let v1 = api.sandboxes();
    let after = match (verb, phase) {
        (Verb::Stop, _) => v1.stop(call.ask(&ask, v1::StopRequest { target })).await?,
        (Verb::Start, v1::Phase::Suspending | v1::Phase::Suspended | v1::Phase::Resuming) => {
            let request = v1::ResumeRequest { target, restart_if_restore_fails: false };
            v1.resume(call.ask(&ask, request)).await?
        }
        (Verb::Start, _) => v1.start(call.ask(&ask, v1::StartRequest { target })).await?,
    };
    let after = after.into_inner();
    let id = after.id.clone().into_bytes();
    api.service.store.foreign_once(key, move |_| Ok(id)).await?;
    api.respond(after).await
}
