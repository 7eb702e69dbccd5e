//! Templates: the same as those of `torpor.v1`, with what only this interface knows kept beside them.

use std::collections::BTreeMap;

use prost::Message as _;
use prost_types::{Struct, Timestamp, Value, value::Kind as ValueKind};
use tonic::Status;
use torpor_proto::{
    openshell::{
        datamodel::v1::ObjectMeta,
        v1::{self as os, DeletionOutcome},
    },
    v1::{self, templates_server::Templates as _},
};

use super::{OpenShellApi, call::Call, page, sandboxes, wish};
use crate::{
    api::sandboxes::page_size,
    error::ApiError,
    store::{Kind, NewObject, Scope, Selector, StoreError},
};

/// What begins a page token of ours.
const PREFIX: &str = "t1.";
/// Workspaces that are looked through at once.
const WORKSPACES: usize = 1000;

/// A template as it was sent, and which template that was: one of the same name may have been made by others since then.
#[derive(Clone, PartialEq, prost::Message)]
struct Sent {
    #[prost(message, optional, tag = "1")]
    created: Option<Timestamp>,
    #[prost(uint64, tag = "2")]
    version: u64,
    #[prost(message, optional, tag = "3")]
    spec: Option<os::SandboxWorkloadTemplateSpec>,
}

/// A template in our words.
fn planned(from: &os::SandboxWorkloadTemplateSpec) -> Result<v1::SandboxSpec, ApiError> {
    let workload = from.workload.clone().unwrap_or_default();
    let resources = workload.resources.unwrap_or_default();
    let spec = os::SandboxSpec {
        template: Some(os::SandboxTemplate {
            image: workload.image,
            environment: workload.environment,
            driver_config: from.driver_config.clone(),
            ..os::SandboxTemplate::default()
        }),
        ..os::SandboxSpec::default()
    };
    let mut spec = wish::spec(&spec)?;
    if let Some(sizes) =
        wish::sizes(Some(resources.cpu), Some(resources.memory), "template.spec.workload.resources")?
    {
        let to = spec.resources.get_or_insert_default();
        (to.cpus, to.memory_bytes) = (sizes.cpus, sizes.memory_bytes);
    }
    Ok(spec)
}

fn shown(from: v1::Template, sent: Option<&[u8]>) -> os::SandboxWorkloadTemplate {
    let sent = sent.and_then(|body| Sent::decode(body).ok());
    let same = sent.filter(|sent| sent.created == from.created && sent.version == from.version);
    let now = from.spec.unwrap_or_default();
    let environment = now.environment.clone();
    let mut spec = same.and_then(|sent| sent.spec).unwrap_or_else(|| described(now));
    // What the caller may see of it: that was decided before.
    if let Some(workload) = &mut spec.workload {
        workload.environment = environment.into_iter().collect();
    }
    os::SandboxWorkloadTemplate {
        metadata: Some(ObjectMeta {
            id: format!("template-{}-{}", from.workspace, from.name),
            name: from.name,
            created_time: from.created,
            labels: from.labels.into_iter().collect(),
            resource_version: from.version,
            annotations: from.annotations.into_iter().collect(),
            workspace: from.workspace,
            deletion_time: None,
        }),
        spec: Some(spec),
    }
}

/// One that `torpor.v1` made or changed, in their words.
fn described(from: v1::SandboxSpec) -> os::SandboxWorkloadTemplateSpec {
    let resources = from.resources.unwrap_or_default();
    let text = |key: &str, text: String| {
        (!text.is_empty()).then(|| (key.to_owned(), Value { kind: Some(ValueKind::StringValue(text)) }))
    };
    let ours: BTreeMap<String, Value> = [
        text("driver", from.driver),
        text("machine", from.machine),
        text("kernel", from.kernel),
        text("user", from.user),
        text("workdir", from.workdir),
        text("disk", resources.disk_bytes.map_or_else(String::new, |bytes| bytes.to_string())),
        from.driver_config
            .map(|config| ("config".to_owned(), Value { kind: Some(ValueKind::StructValue(config)) })),
    ]
    .into_iter()
    .flatten()
    .collect();
    let driver_config = (!ours.is_empty()).then(|| {
        let ours = Value { kind: Some(ValueKind::StructValue(Struct { fields: ours })) };
        Struct { fields: [("torpor".to_owned(), ours)].into() }
    });
    os::SandboxWorkloadTemplateSpec {
        workload: Some(os::SandboxWorkloadConfig {
            image: from.image,
            environment: from.environment.into_iter().collect(),
            resources: Some(os::SandboxResources {
                cpu: resources.cpus.map_or_else(String::new, |cpus| cpus.to_string()),
                memory: resources.memory_bytes.map_or_else(String::new, |bytes| bytes.to_string()),
                gpu: None,
            }),
        }),
        driver_config,
        desired_service_level: None,
    }
}

/// What is kept of templates beside them.
async fn show(
    api: &OpenShellApi,
    templates: Vec<v1::Template>,
) -> Result<Vec<os::SandboxWorkloadTemplate>, StoreError> {
    let names: Vec<_> =
        templates.iter().map(|template| (template.workspace.clone(), template.name.clone())).collect();
    let kept = api.service.store.foreign(move |tables| {
        let one = |(workspace, name): &(String, String)| tables.find(Kind::Template, workspace, None, name);
        names.iter().map(one).collect::<Result<Vec<_>, _>>()
    });
    let kept = kept.await?.into_iter();
    Ok(templates
        .into_iter()
        .zip(kept)
        .map(|(template, kept)| shown(template, kept.as_ref().map(|object| object.body.as_slice())))
        .collect())
}

async fn one(api: &OpenShellApi, template: v1::Template) -> Result<os::SandboxWorkloadTemplate, StoreError> {
    Ok(show(api, vec![template]).await?.pop().unwrap_or_default())
}

/// A slash would name another workspace.
fn qualified(workspace: &str, name: &str) -> Result<String, ApiError> {
    if name.is_empty() {
        return Err(ApiError::invalid("name", "the name of a template is needed"));
    }
    if name.contains('/') {
        return Err(StoreError::NoTemplate(torpor_sandbox::id::clip(name)).into());
    }
    Ok(format!("{workspace}/{name}"))
}

/// One template.
///
/// # Errors
/// `NOT_FOUND`, and as [`Call::workspace`].
pub async fn find(
    api: &OpenShellApi,
    call: &Call,
    workspace: &str,
    name: &str,
) -> Result<os::SandboxWorkloadTemplate, Status> {
    let request = v1::GetTemplateRequest { template: qualified(workspace, name)? };
    let found = api.templates().get(call.ask(workspace, request)).await?.into_inner();
    Ok(one(api, found).await?)
}

pub async fn create(
    api: &OpenShellApi,
    call: Call,
    message: os::CreateSandboxTemplateRequest,
) -> Result<os::SandboxTemplateResponse, Status> {
    let workspace = call.present(&api.service, message.workspace_scope).await?;
    let template = message.template.ok_or_else(|| ApiError::invalid("template", "a template is needed"))?;
    let metadata = template.metadata.unwrap_or_default();
    sandboxes::unqualified(&metadata.name)?;
    let spec = template.spec.unwrap_or_default();
    let request = v1::CreateTemplateRequest {
        name: metadata.name,
        labels: metadata.labels.into_iter().collect(),
        annotations: metadata.annotations.into_iter().collect(),
        spec: Some(planned(&spec)?),
        request_id: message.request_id,
    };
    let made = api.templates().create(call.ask(&workspace, request)).await?.into_inner();
    let sent = Sent { created: made.created, version: made.version, spec: Some(spec) };
    let (body, name) = (sent.encode_to_vec(), made.name.clone());
    let kept = api.service.store.foreign_once(None, move |tables| {
        match tables.find(Kind::Template, &workspace, None, &name)? {
            // Of one that is gone, or of this one when it is asked for again.
            Some(mut old) => {
                old.body = body;
                tables.replace(old)?;
            }
            None => {
                let labels = BTreeMap::new();
                tables.add(Kind::Template, NewObject { workspace, sandbox: None, name, labels, body })?;
            }
        }
        Ok(Vec::new())
    });
    kept.await?;
    Ok(os::SandboxTemplateResponse { template: Some(one(api, made).await?) })
}

pub async fn get(
    api: &OpenShellApi,
    call: Call,
    message: os::GetSandboxTemplateRequest,
) -> Result<os::SandboxTemplateResponse, Status> {
    let workspace = call.present(&api.service, message.workspace_scope).await?;
    let template = find(api, &call, &workspace, &message.name).await?;
    Ok(os::SandboxTemplateResponse { template: Some(template) })
}

/// Workspace after workspace, each by name. A token is a workspace and, behind a slash, its own token there.
pub async fn list(
    api: &OpenShellApi,
    call: Call,
    message: os::ListSandboxTemplatesRequest,
) -> Result<os::ListSandboxTemplatesResponse, Status> {
    let (scope, workspace, all) = call.scope(&api.service, message.workspace_scope).await?;
    let mut left = page_size(message.page_size)?;
    let (mut begin, mut inner) = (String::new(), String::new());
    if !message.page_token.is_empty() {
        let token = message.page_token.strip_prefix(PREFIX).and_then(|token| token.split_once('/'));
        let (workspace, token) = token.ok_or_else(|| page::not_ours(&message.page_token))?;
        (begin, inner) = (workspace.to_owned(), token.to_owned());
    }
    let mut workspaces = if all { names(api, scope).await? } else { vec![workspace] };
    workspaces.retain(|name| *name >= begin);
    let (mut found, mut next_page_token) = (Vec::new(), String::new());
    for workspace in workspaces {
        if left == 0 {
            next_page_token = format!("{PREFIX}{workspace}/");
            break;
        }
        let request = v1::ListTemplatesRequest {
            page_size: i32::try_from(left).unwrap_or(i32::MAX),
            page_token: if workspace == begin { std::mem::take(&mut inner) } else { String::new() },
            label_selector: message.label_selector.clone(),
        };
        let page = api.templates().list(call.ask(&workspace, request)).await?.into_inner();
        left = left.saturating_sub(page.templates.len());
        found.extend(page.templates);
        if !page.next_page_token.is_empty() {
            next_page_token = format!("{PREFIX}{workspace}/{}", page.next_page_token);
            break;
        }
    }
    Ok(os::ListSandboxTemplatesResponse { templates: show(api, found).await?, next_page_token })
}

/// The workspaces of a scope, by name.
async fn names(api: &OpenShellApi, scope: Scope) -> Result<Vec<String>, StoreError> {
    let (mut names, mut token) = (Vec::new(), None);
    loop {
        let selector = Selector::default().within(scope.clone());
        let page = api.service.store.workspaces(WORKSPACES, token, selector).await?;
        names.extend(page.rows.into_iter().map(|workspace| workspace.name));
        token = page.next;
        if token.is_none() {
            break;
        }
    }
    names.sort();
    Ok(names)
}

pub async fn delete(
    api: &OpenShellApi,
    call: Call,
    mut message: os::DeleteSandboxTemplateRequest,
) -> Result<os::DeleteSandboxTemplateResponse, Status> {
    let request_id = std::mem::take(&mut message.request_id);
    let key = call.once(request_id, "openshell delete template", &message)?;
    let workspace = call.present(&api.service, message.workspace_scope).await?;
    let request = v1::DeleteTemplateRequest {
        template: qualified(&workspace, &message.name)?,
        allow_missing: message.allow_missing,
        ..v1::DeleteTemplateRequest::default()
    };
    // The first one has deleted it: a retry is not told that it was absent.
    if api.service.store.answered(key.as_ref()).await?.is_some() {
        return Ok(os::DeleteSandboxTemplateResponse { outcome: DeletionOutcome::Completed.into() });
    }
    let removed = api.templates().delete(call.ask(&workspace, request)).await?.into_inner().removed;
    let (outcome, key) = match removed {
        true => (DeletionOutcome::Completed, key),
        false => (DeletionOutcome::AlreadyAbsent, None),
    };
    let forgotten = api.service.store.foreign_once(key, move |tables| {
        if let Some(kept) = tables.find(Kind::Template, &workspace, None, &message.name)? {
            tables.remove(Kind::Template, &kept)?;
        }
        Ok(Vec::new())
    });
    forgotten.await?;
    Ok(os::DeleteSandboxTemplateResponse { outcome: outcome.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_of_others_is_described_so_that_it_makes_the_same() {
        let ours = v1::SandboxSpec {
            image: "debian".into(),
            machine: "qemu".into(),
            environment: [("A".to_owned(), "1".to_owned())].into(),
            resources: Some(v1::Resources {
                cpus: Some(2),
                memory_bytes: Some(1 << 30),
                disk_bytes: Some(3 << 30),
            }),
            driver_config: Some(Struct {
                fields: [("a".to_owned(), Value { kind: Some(ValueKind::BoolValue(true)) })].into(),
            }),
            ..v1::SandboxSpec::default()
        };
        assert_eq!(planned(&described(ours.clone())).unwrap(), ours);
    }

    #[test]
    fn what_was_sent_is_not_shown_of_another_template_with_the_same_name() {
        let spec = os::SandboxWorkloadTemplateSpec {
            workload: Some(os::SandboxWorkloadConfig { image: "sent".into(), ..Default::default() }),
            ..Default::default()
        };
        let sent = Sent { created: Some(Timestamp::default()), version: 1, spec: Some(spec) }.encode_to_vec();
        let template = |version| v1::Template {
            version,
            created: Some(Timestamp::default()),
            spec: Some(v1::SandboxSpec { image: "now".into(), ..Default::default() }),
            ..Default::default()
        };
        let image = |shown: os::SandboxWorkloadTemplate| shown.spec.unwrap().workload.unwrap().image;
        assert_eq!(image(shown(template(1), Some(&sent))), "sent");
        assert_eq!(image(shown(template(2), Some(&sent))), "now");
        assert_eq!(image(shown(template(1), None)), "now");
    }
}
