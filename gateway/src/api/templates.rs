//! `torpor.v1.Templates`.

use prost::Message as _;
use tonic::{Request, Response, Status};
use torpor_proto::v1;

use super::{
    Shared, convert, endpoints, network,
    sandboxes::{PAGE_BYTES, page_size, token},
    to_status,
    update::words,
};
use crate::{
    access::{self, Caller},
    error::ApiError,
    store::{Selector, StoreError, Template, TemplateKey, template_token},
    templates::{TemplateChange, TemplateSpec},
};

type Reply<T> = Result<Response<T>, Status>;

/// See the module.
pub struct TemplatesApi(pub Shared);

/// A template that was named by its name or as "WORKSPACE/NAME", when the caller may make this call there.
pub fn key(caller: &Caller, named: &str) -> Result<TemplateKey, ApiError> {
    let (workspace, name) = named.split_once('/').unwrap_or(("", named));
    if name.is_empty() {
        return Err(ApiError::invalid("template", "a name is needed"));
    }
    Ok(TemplateKey { workspace: caller.workspace(workspace)?, name: name.to_owned() })
}

fn spec(spec: v1::SandboxSpec) -> Result<TemplateSpec, ApiError> {
    let resources = spec.resources.unwrap_or_default();
    let text = |s: String| Some(s).filter(|s| !s.is_empty());
    Ok(TemplateSpec {
        image: text(spec.image),
        command: spec.command,
        environment: spec.environment.into_iter().collect(),
        workdir: text(spec.workdir),
        user: text(spec.user),
        cpus: resources.cpus,
        memory_bytes: resources.memory_bytes,
        disk_bytes: resources.disk_bytes,
        restart: convert::wanted_restart(spec.restart_policy)?,
        driver: text(spec.driver),
        machine: text(spec.machine),
        kernel: text(spec.kernel),
        stop_grace: convert::given(spec.stop_grace, "stop_grace")?,
        egress: network::egress(spec.egress)?,
        volumes: spec.volumes.into_iter().map(convert::volume).collect(),
        endpoints: endpoints::wanted(spec.endpoints)?,
    })
}

fn shown(template: Template) -> v1::Template {
    let spec = template.spec;
    v1::Template {
        name: template.name,
        workspace: template.workspace,
        version: template.version,
        labels: template.labels.into_iter().collect(),
        annotations: template.annotations.into_iter().collect(),
        spec: Some(v1::SandboxSpec {
            image: spec.image.unwrap_or_default(),
            command: spec.command,
            environment: spec.environment.into_iter().collect(),
            workdir: spec.workdir.unwrap_or_default(),
            user: spec.user.unwrap_or_default(),
            resources: Some(v1::Resources {
                cpus: spec.cpus,
                memory_bytes: spec.memory_bytes,
                disk_bytes: spec.disk_bytes,
            }),
            restart_policy: spec.restart.map_or(0, |policy| convert::restart_policy(policy).into()),
            driver: spec.driver.unwrap_or_default(),
            machine: spec.machine.unwrap_or_default(),
            kernel: spec.kernel.unwrap_or_default(),
            stop_grace: spec.stop_grace.and_then(convert::duration),
            egress: spec.egress.as_ref().map(network::shown),
            volumes: spec.volumes.iter().map(convert::shown_volume).collect(),
            endpoints: spec.endpoints.iter().map(endpoints::shown).collect(),
        }),
        created: convert::time(template.created),
        changed: convert::time(template.changed),
    }
}

fn given(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

#[tonic::async_trait]
impl v1::templates_server::Templates for TemplatesApi {
    async fn create(&self, request: Request<v1::CreateTemplateRequest>) -> Reply<v1::Template> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let key = key(&caller, &request.name).map_err(to_status)?;
        let change = TemplateChange {
            labels: Some(request.labels.into_iter().collect()),
            annotations: Some(request.annotations.into_iter().collect()),
            spec: Some(spec(request.spec.unwrap_or_default()).map_err(to_status)?),
        };
        let made = self.0.create_template(key, change, given(request.request_id)).await;
        made.map(shown).map(Response::new).map_err(to_status)
    }

    async fn get(&self, request: Request<v1::GetTemplateRequest>) -> Reply<v1::Template> {
        let caller = access::caller(&request)?;
        let key = key(&caller, &request.into_inner().template).map_err(to_status)?;
        let found = self.0.store.template(key).await;
        found.map(shown).map(Response::new).map_err(|error| to_status(error.into()))
    }

    async fn list(&self, request: Request<v1::ListTemplatesRequest>) -> Reply<v1::ListTemplatesResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let workspace = caller.workspace("").map_err(to_status)?;
        let size = page_size(request.page_size).map_err(to_status)?;
        let selector: Selector =
            request.label_selector.parse().map_err(|e: StoreError| to_status(e.into()))?;
        let page = self.0.store.templates(workspace, size, token(request.page_token), selector).await;
        let page = page.map_err(|error| to_status(error.into()))?;
        let mut answer = v1::ListTemplatesResponse {
            next_page_token: page.next.unwrap_or_default(),
            ..v1::ListTemplatesResponse::default()
        };
        let mut bytes = 0;
        for template in page.rows.into_iter().map(shown) {
            bytes += template.encoded_len();
            if let Some(last) = answer.templates.last().filter(|_| bytes > PAGE_BYTES) {
                answer.next_page_token = template_token(&last.name);
                break;
            }
            answer.templates.push(template);
        }
        Ok(Response::new(answer))
    }

    async fn update(&self, request: Request<v1::UpdateTemplateRequest>) -> Reply<v1::Template> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let key = key(&caller, &request.template).map_err(to_status)?;
        let change = TemplateChange {
            labels: words(request.labels),
            annotations: words(request.annotations),
            spec: request.spec.map(spec).transpose().map_err(to_status)?,
        };
        let expected = Some(request.expected_version).filter(|&version| version > 0);
        let changed = self.0.update_template(key, expected, change, given(request.request_id)).await;
        changed.map(shown).map(Response::new).map_err(to_status)
    }

    async fn delete(&self, request: Request<v1::DeleteTemplateRequest>) -> Reply<v1::DeleteTemplateResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let key = key(&caller, &request.template).map_err(to_status)?;
        let expected = Some(request.expected_version).filter(|&version| version > 0);
        let removed =
            self.0.delete_template(key, expected, request.allow_missing).await.map_err(to_status)?;
        Ok(Response::new(v1::DeleteTemplateResponse { removed }))
    }
}
