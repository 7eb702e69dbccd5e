//! `torpor.v1.Templates`.

use prost::Message as _;
use tonic::{Request, Response, Status};
use torpor_proto::v1;

use super::{
    Shared, convert, endpoints, json, network,
    sandboxes::{PAGE_BYTES, page_size},
    update::words,
};
use crate::{
    access::{self, Caller},
    error::ApiError,
    store::{Selector, Template, TemplateKey, template_token},
    templates::TemplateChange,
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
    let workspace = caller.workspace(workspace)?;
    caller.speaks_of(&format!("{workspace}/{name}"));
    Ok(TemplateKey { workspace, name: name.to_owned() })
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
            stdin: spec.stdin,
            tty: spec.tty,
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
            driver_config: json::shown(&spec.driver_config),
        }),
        created: convert::time(template.created),
        changed: convert::time(template.changed),
    }
}

/// What of a template its caller may see.
fn veiled(caller: &Caller, mut template: v1::Template) -> v1::Template {
    if let Some(spec) = &mut template.spec {
        caller.veil(&template.workspace, &mut spec.environment);
    }
    template
}

#[tonic::async_trait]
impl v1::templates_server::Templates for TemplatesApi {
    async fn create(&self, request: Request<v1::CreateTemplateRequest>) -> Reply<v1::Template> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let key = key(&caller, &request.name)?;
        let change = TemplateChange {
            labels: Some(request.labels.into_iter().collect()),
            annotations: Some(request.annotations.into_iter().collect()),
            spec: Some(convert::spec(request.spec.unwrap_or_default())?),
        };
        let made = self.0.create_template(key, change, convert::text(request.request_id)).await;
        Ok(Response::new(shown(made?)))
    }

    async fn get(&self, request: Request<v1::GetTemplateRequest>) -> Reply<v1::Template> {
        let caller = access::caller(&request)?;
        let key = key(&caller, &request.into_inner().template)?;
        Ok(Response::new(veiled(&caller, shown(self.0.store.template(key).await?))))
    }

    async fn list(&self, request: Request<v1::ListTemplatesRequest>) -> Reply<v1::ListTemplatesResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let workspace = caller.workspace("")?;
        let size = page_size(request.page_size)?;
        let selector: Selector = request.label_selector.parse()?;
        let page =
            self.0.store.templates(workspace, size, convert::text(request.page_token), selector).await?;
        let mut answer = v1::ListTemplatesResponse {
            next_page_token: page.next.unwrap_or_default(),
            ..v1::ListTemplatesResponse::default()
        };
        let mut bytes = 0;
        for template in page.rows.into_iter().map(|row| veiled(&caller, shown(row))) {
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
        let key = key(&caller, &request.template)?;
        let change = TemplateChange {
            labels: words(request.labels),
            annotations: words(request.annotations),
            spec: request.spec.map(convert::spec).transpose()?,
        };
        let expected = Some(request.expected_version).filter(|&version| version > 0);
        let changed = self.0.update_template(key, expected, change, convert::text(request.request_id)).await;
        Ok(Response::new(shown(changed?)))
    }

    async fn delete(&self, request: Request<v1::DeleteTemplateRequest>) -> Reply<v1::DeleteTemplateResponse> {
        let caller = access::caller(&request)?;
        let request = request.into_inner();
        let key = key(&caller, &request.template)?;
        let expected = Some(request.expected_version).filter(|&version| version > 0);
        let removed = self.0.delete_template(key, expected, request.allow_missing).await?;
        Ok(Response::new(v1::DeleteTemplateResponse { removed }))
    }
}
