//! The server: requests over HTTP/1.1, as kube's client speaks it.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::BoxBody};
use hyper::{Request, Response, StatusCode, body::Frame, server::conn::http1};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinSet};

use crate::{
    convert::{inward, outward, warning},
    discovery, exec,
    lists::{self, Query},
    patch,
    resources::{Key, NAMESPACES, PODS, RESOURCES, SANDBOXES, find},
    rights,
    status::{Refusal, status},
    store::{Deletion, Part, deleting, text},
    world::{Asked, Trouble, World},
};

/// Of an answer.
pub type Body = BoxBody<Bytes, Infallible>;
/// Largest body of a request, bytes, as etcd has it.
const LARGEST: usize = 3 << 20;

/// What an answer is.
pub(crate) enum Answer {
    One(u16, Value),
    Text(String),
    Stream(tokio::sync::mpsc::Receiver<Value>),
    Upgrade(Response<Body>),
}

/// Serves until it is dropped.
pub(crate) async fn serve(listener: TcpListener, world: Arc<World>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                // Small answers one after another must not wait for each other's acknowledgements.
                let _slower = stream.set_nodelay(true).is_err();
                let world = world.clone();
                connections.spawn(async move {
                    let service = TowerToHyperService::new(Service(world));
                    let served = http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service);
                    // A client that goes away is no fault.
                    let _ = served.with_upgrades().await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// The API, which can be asked in process as well, by whatever speaks to a `tower::Service`. (For exec there must be a
/// connection.)
#[derive(Clone, Debug)]
pub struct Service(pub(crate) Arc<World>);

impl<B> tower::Service<Request<B>> for Service
where
    B: hyper::body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<Body>;
    type Error = Cut;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Cut>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Cut>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        Box::pin(answer(self.0.clone(), request))
    }
}

async fn answer<B>(world: Arc<World>, mut request: Request<B>) -> Result<Response<Body>, Cut>
where
    B: hyper::body::Body,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let upgrade =
        request.headers().contains_key("sec-websocket-key").then(|| hyper::upgrade::on(&mut request));
    let (parts, body) = request.into_parts();
    let header =
        |name: &str| parts.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    let content_type = header("content-type");
    let query = parts.uri.query().unwrap_or_default().to_owned();
    let path = parts.uri.path().to_owned();
    let method = parts.method.as_str().to_owned();
    let mut asked = Asked { method, path, query, content_type, body: Value::Null, code: 0 };
    let bytes = match http_body_util::Limited::new(body, LARGEST).collect().await {
        Ok(bytes) => bytes.to_bytes(),
        Err(_) => Bytes::new(),
    };
    let whole = format!("{}?{}", asked.path, asked.query);
    let trouble = world.troubled(&asked.method, &whole);
    let (mut cut, mut later) = (false, None);
    let early = match trouble {
        Some(Trouble::TooMany) => Some(Refusal::too_many()),
        Some(Trouble::Broken) => {
            Some(Refusal::new(500, "InternalError", "an error on the server", json!({})))
        }
        Some(Trouble::Stale) => Some(Refusal::conflict("objects", "x", "the object has been modified")),
        Some(Trouble::Forbidden) => {
            let text = "forbidden: User \"system:serviceaccount:torpor:torpor\" cannot do that here";
            Some(Refusal::new(403, "Forbidden", text, json!({})))
        }
        Some(Trouble::Late(time)) => {
            tokio::time::sleep(time).await;
            None
        }
        Some(Trouble::CutAfter) => {
            cut = true;
            None
        }
        Some(Trouble::AnswerLate(time)) => {
            later = Some(time);
            None
        }
        None => None,
    };
    let done = match early {
        Some(refusal) => Err(refusal),
        None if !world.knows(&header("authorization")) => Err(Refusal::unauthorized()),
        None => match read_body(&asked.content_type, &bytes) {
            Ok(value) => {
                asked.body = value;
                route(
                    &world,
                    &asked,
                    upgrade,
                    &header("sec-websocket-key"),
                    &header("sec-websocket-protocol"),
                )
            }
            Err(refusal) => Err(refusal),
        },
    };
    let warned = match crumbs(&asked.path) {
        Some(Place { resource: Some(resource), version, .. }) => {
            warning(resource, &version, world.generation())
        }
        _ => None,
    };
    let response = respond(done, warned);
    asked.code = response.status().as_u16();
    world.record(asked);
    if let Some(time) = later {
        tokio::time::sleep(time).await;
    }
    if cut { Err(Cut) } else { Ok(response) }
}

/// The connection ends without an answer.
#[derive(Debug)]
pub struct Cut;

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cut by the test")
    }
}

impl std::error::Error for Cut {}

fn read_body(content_type: &str, bytes: &Bytes) -> Result<Value, Refusal> {
    if bytes.is_empty() {
        return Ok(Value::Null);
    }
    let kind = content_type.split(';').next().unwrap_or_default();
    let known = [
        "",
        "application/json",
        "application/merge-patch+json",
        "application/json-patch+json",
        "application/apply-patch+yaml",
        "application/strategic-merge-patch+json",
    ];
    if !known.contains(&kind) {
        let message = "the body of the request was in an unknown format";
        return Err(Refusal::new(415, "UnsupportedMediaType", message, json!({})));
    }
    // JSON is YAML; nobody sends any other here.
    serde_json::from_slice(bytes).map_err(|error| Refusal::bad(format!("the body can't be read: {error}")))
}

fn respond(done: Result<Answer, Refusal>, warned: Option<String>) -> Response<Body> {
    let mut builder = Response::builder();
    if let Some(warned) = warned {
        builder = builder.header("Warning", warned);
    }
    let whole = |text: String| Full::new(Bytes::from(text)).boxed();
    let built = match done {
        Ok(Answer::Upgrade(response)) => return response,
        Ok(Answer::One(code, value)) => {
            builder.status(code).header("Content-Type", "application/json").body(whole(value.to_string()))
        }
        Ok(Answer::Text(text)) => builder.header("Content-Type", "text/plain").body(whole(text)),
        Ok(Answer::Stream(events)) => {
            let lines = stream::unfold(events, |mut events| async move {
                let value = events.recv().await?;
                Some((Ok(Frame::data(Bytes::from(format!("{value}\n")))), events))
            });
            builder.header("Content-Type", "application/json").body(StreamBody::new(lines).boxed())
        }
        Err(refusal) => {
            if let Some(seconds) = refusal.retry_after {
                builder = builder.header("Retry-After", seconds);
            }
            let builder = builder.status(refusal.code);
            match refusal.body {
                Ok(value) => {
                    builder.header("Content-Type", "application/json").body(whole(value.to_string()))
                }
                Err(text) => builder.header("Content-Type", "text/plain; charset=utf-8").body(whole(text)),
            }
        }
    };
    built.unwrap_or_else(|_| {
        let mut broken = Response::new(whole(String::new()));
        *broken.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        broken
    })
}

/// What a path names.
#[derive(Debug, Default)]
pub(crate) struct Place {
    pub(crate) group: String,
    pub(crate) version: String,
    pub(crate) namespace: Option<String>,
    pub(crate) plural: String,
    pub(crate) name: Option<String>,
    pub(crate) sub: Option<String>,
    /// By kind alone, served or not.
    pub(crate) resource: Option<usize>,
}

impl Place {
    /// Where the object of that name is.
    fn key(&self, resource: usize, name: String) -> Key {
        let namespace = self.namespace.clone().filter(|_| RESOURCES[resource].namespaced);
        (resource, namespace.unwrap_or_default(), name)
    }
}

fn crumbs(path: &str) -> Option<Place> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let (group, version, rest) = match parts.as_slice() {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return None,
    };
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (Some((*namespace).to_owned()), rest),
        rest => (None, rest),
    };
    let at = |n: usize| rest.get(n).map(|part| (*part).to_owned());
    let plural = at(0).unwrap_or_default();
    let resource = RESOURCES.iter().position(|r| r.group == group && r.plural == plural);
    Some(Place {
        group: group.to_owned(),
        version: version.to_owned(),
        namespace,
        plural,
        name: at(1),
        sub: at(2),
        resource,
    })
}

fn route(
    world: &Arc<World>,
    asked: &Asked,
    upgrade: Option<hyper::upgrade::OnUpgrade>,
    websocket: &str,
    protocols: &str,
) -> Result<Answer, Refusal> {
    if let Some(found) = discovery::answer(world, asked)? {
        return Ok(Answer::One(200, found));
    }
    let place = crumbs(&asked.path).ok_or_else(Refusal::unknown_path)?;
    if place.plural == "selfsubjectaccessreviews" && asked.method == "POST" {
        return Ok(Answer::One(201, rights::review(world, &asked.body)));
    }
    let generation = world.generation();
    rights::check(world, asked)?;
    let resource =
        find(&place.group, &place.version, &place.plural, generation).ok_or_else(Refusal::unknown_path)?;
    let query = Query::parse(&asked.query);
    let Some(name) = place.name.clone() else {
        return match asked.method.as_str() {
            "GET" if query.flag("watch") => {
                lists::watch(world, resource, &place.version, place.namespace, query).map(Answer::Stream)
            }
            "GET" => lists::list(world, resource, &place.version, place.namespace.as_deref(), &query)
                .map(|value| Answer::One(200, value)),
            "POST" => create(world, resource, &place, &query, asked),
            _ => Err(Refusal::wrong_method()),
        };
    };
    let key = place.key(resource, name);
    let show = |value: &Value| outward(resource, &place.version, generation, value);
    let part = match place.sub.as_deref() {
        None => Part::Main,
        Some("status") if RESOURCES[resource].status => Part::Status,
        Some("scale") if resource == SANDBOXES && place.version == "v1alpha1" => {
            return scale(world, &key, asked);
        }
        Some("exec") if resource == PODS => {
            world.lock().objects.get(&key)?;
            let upgrade = upgrade.ok_or_else(|| Refusal::bad("Upgrade request required"))?;
            return exec::start(world, &key, &query, upgrade, websocket, protocols).map(Answer::Upgrade);
        }
        Some("log") if resource == PODS => {
            let pod = world.lock().objects.get(&key)?;
            return Ok(Answer::Text(world.kubelet.log(text(&pod, "/metadata/uid"))));
        }
        Some(_) => return Err(Refusal::unknown_path()),
    };
    match asked.method.as_str() {
        "GET" => Ok(Answer::One(200, show(&*world.lock().objects.get(&key)?))),
        "PATCH" => patched(world, &key, &place, part, &query, asked),
        "PUT" => {
            let mut new = inward(resource, &place.version, asked.body.clone());
            let done = world.write(|objects| {
                let old = objects.get(&key)?;
                patch::note_update(&old, &mut new, query.get("fieldManager").unwrap_or("unknown"));
                objects.update(&key, new, part)
            })?;
            Ok(Answer::One(200, show(&done)))
        }
        "DELETE" => delete(world, &key, &place, &query, &asked.body),
        _ => Err(Refusal::wrong_method()),
    }
}

fn create(
    world: &Arc<World>,
    resource: usize,
    place: &Place,
    query: &Query,
    asked: &Asked,
) -> Result<Answer, Refusal> {
    let mut value = inward(resource, &place.version, asked.body.clone());
    let name = text(&value, "/metadata/name").to_owned();
    let key = place.key(resource, name);
    if RESOURCES[resource].namespaced {
        world.lock().objects.get(&(NAMESPACES, String::new(), key.1.clone()))?;
    }
    if query.get("dryRun") == Some("All") {
        world.lock().objects.would_create(&key, &value)?;
        return Ok(Answer::One(201, outward(resource, &place.version, world.generation(), &value)));
    }
    let made = world.write(|objects| {
        patch::note_update(&json!({}), &mut value, query.get("fieldManager").unwrap_or("unknown"));
        objects.create(&key, value)
    })?;
    Ok(Answer::One(201, outward(resource, &place.version, world.generation(), &made)))
}

fn patched(
    world: &Arc<World>,
    key: &Key,
    place: &Place,
    part: Part,
    query: &Query,
    asked: &Asked,
) -> Result<Answer, Refusal> {
    let manager = query.get("fieldManager").unwrap_or_default().to_owned();
    let (generation, resource) = (world.generation(), key.0);
    let kind = asked.content_type.split(';').next().unwrap_or_default();
    let built_in = RESOURCES[resource].group.is_empty();
    let mut code = 200;
    let done = match kind {
        "application/merge-patch+json" | "application/json-patch+json" => world.write(|objects| {
            let old = objects.get(key)?;
            let mut shown = outward(resource, &place.version, generation, &old);
            match kind {
                "application/merge-patch+json" => patch::merge(&mut shown, &asked.body),
                _ => patch::json_patch(&mut shown, &asked.body)?,
            }
            let mut new = inward(resource, &place.version, shown);
            let manager = if manager.is_empty() { "unknown" } else { &manager };
            patch::note_update(&old, &mut new, manager);
            objects.update(key, new, part)
        })?,
        "application/apply-patch+yaml" => {
            if manager.is_empty() {
                let field = "fieldManager";
                return Err(Refusal::invalid(
                    "PatchOptions",
                    "",
                    field,
                    "Required value: is required for apply patch",
                ));
            }
            let said = inward(resource, &place.version, asked.body.clone());
            world.write(|objects| {
                let old = objects.get(key).ok();
                let new = patch::apply(old.as_deref(), &said, &manager, query.flag("force"))?;
                if old.is_some() {
                    objects.update(key, new, part)
                } else {
                    code = 201;
                    objects.create(key, new)
                }
            })?
        }
        "application/strategic-merge-patch+json" if built_in => world.write(|objects| {
            let mut new = (*objects.get(key)?).clone();
            patch::merge(&mut new, &asked.body);
            objects.update(key, new, part)
        })?,
        _ => {
            let message = "the body of the request was in an unknown format - accepted media types include: \
                           application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";
            return Err(Refusal::new(415, "UnsupportedMediaType", message, json!({})));
        }
    };
    Ok(Answer::One(code, outward(resource, &place.version, generation, &done)))
}

fn delete(
    world: &Arc<World>,
    key: &Key,
    place: &Place,
    query: &Query,
    options: &Value,
) -> Result<Answer, Refusal> {
    let given = |pointer: &str| options.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    let policy = given("/propagationPolicy").or_else(|| query.get("propagationPolicy").map(str::to_owned));
    let deletion = Deletion {
        uid: given("/preconditions/uid"),
        version: given("/preconditions/resourceVersion"),
        foreground: policy.as_deref() == Some("Foreground"),
        grace: options["gracePeriodSeconds"].as_u64(),
    };
    let (object, there) = world.write(|objects| objects.delete(key, &deletion))?;
    let resource = &RESOURCES[key.0];
    if there && deleting(&object) {
        return Ok(Answer::One(200, outward(key.0, &place.version, world.generation(), &object)));
    }
    let details = json!({
        "name": key.2, "group": resource.group, "kind": resource.plural, "uid": text(&object, "/metadata/uid"),
    });
    let mut success = status(200, "", "", details);
    success["status"] = json!("Success");
    for field in ["reason", "message", "code"] {
        if let Some(map) = success.as_object_mut() {
            map.remove(field);
        }
    }
    Ok(Answer::One(200, success))
}

fn scale(world: &Arc<World>, key: &Key, asked: &Asked) -> Result<Answer, Refusal> {
    let show = |value: &Value| {
        let replicas = u8::from(text(value, "/spec/operatingMode") != "Suspended");
        json!({
            "kind": "Scale", "apiVersion": "autoscaling/v1",
            "metadata": {"name": key.2, "namespace": key.1, "resourceVersion": value["metadata"]["resourceVersion"]},
            "spec": {"replicas": replicas}, "status": {"replicas": replicas},
        })
    };
    if asked.method == "GET" {
        return Ok(Answer::One(200, show(&*world.lock().objects.get(key)?)));
    }
    let said = inward(SANDBOXES, "v1alpha1", json!({"spec": {"replicas": asked.body["spec"]["replicas"]}}));
    let done = world.write(|objects| {
        let mut new = (*objects.get(key)?).clone();
        patch::merge(&mut new, &said);
        objects.update(key, new, Part::Main)
    })?;
    Ok(Answer::One(200, show(&done)))
}
