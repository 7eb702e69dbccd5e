//! One request: into a message, through the very service that gRPC calls, and back.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt as _, stream};
use http::{
    HeaderMap, Method, Request, Response, StatusCode, header, request::Parts as Head, uri::PathAndQuery,
};
use http_body_util::BodyExt as _;
use prost_reflect::{DynamicMessage, MethodDescriptor};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tonic::{Code, Status, body::Body, client::Grpc, metadata::MetadataMap};
use tower::util::BoxCloneService;

use crate::{
    Rest,
    codec::Dynamic,
    input::{self, Parts, Problem, takes_none},
    reply::{self, Form, Messages},
    rules::{BodyRule, Found, Route},
    split::{SplitError, Splitter},
    status::{self, refusal},
};

/// Largest JSON object of a request, bytes: a message of 8 MiB in base64, and room for names.
pub const LARGEST_OBJECT: usize = 12 << 20;
/// Largest body of a request that takes none, bytes: some clients send an empty object.
const LARGEST_NONE: usize = 4096;
/// A body that is longer than this is held beside a few of its kind only, bytes.
const LARGE_BODY: usize = 1 << 20;
const LARGE_BODIES: usize = 16;
/// An object that is longer than this is read by a thread of its own, two at a time: it takes many times its size and a
/// while, and the threads that serve calls are few.
const LARGE_OBJECT: usize = 256 << 10;
const LARGE_OBJECTS: usize = 2;
/// Largest message of an answer, bytes.
const LARGEST_ANSWER: usize = 64 << 20;
/// How long a body that is waited for as a whole may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest time limit that may be asked for.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Headers that become metadata of the call, beside those that begin with [`OURS`].
const PASSED_ON: [&str; 5] = ["authorization", "user-agent", "x-request-id", "traceparent", "tracestate"];
const OURS: &str = "x-torpor-";
/// The header with a time limit in seconds.
const TIME_LIMIT: &str = "x-server-timeout";

/// The gRPC services, of whatever type.
pub type Boxed = BoxCloneService<Request<Body>, Response<Body>, Status>;

/// An answer that isn't the one hoped for.
pub enum Refused {
    /// With its own HTTP code.
    Status(Status),
    /// With a more telling one.
    Coded(StatusCode, Status),
    /// Known by another verb.
    WrongVerb(Vec<Method>),
}

impl From<Status> for Refused {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl From<Problem> for Refused {
    fn from(problem: Problem) -> Self {
        let field = problem.field.as_deref().map(|field| ("field", field));
        let metadata: Vec<_> = field.into_iter().collect();
        Self::Status(refusal(Code::InvalidArgument, "INVALID_ARGUMENT", problem.problem.clone(), &metadata))
    }
}

impl From<SplitError> for Refused {
    fn from(error: SplitError) -> Self {
        match error {
            SplitError::TooLong(_) => too_large(),
            other => Problem { field: None, problem: format!("the body: {other}") }.into(),
        }
    }
}

fn too_large() -> Refused {
    let message = format!("a JSON object of a request may have {LARGEST_OBJECT} bytes");
    let status = refusal(Code::InvalidArgument, "BODY_TOO_LARGE", message, &[]);
    Refused::Coded(StatusCode::PAYLOAD_TOO_LARGE, status)
}

impl Rest {
    /// Answers a request in JSON.
    pub async fn answer(&self, request: Request<Body>, service: Boxed) -> Response<Body> {
        let error = match self.try_answer(request, service).await {
            Ok(response) => return response,
            Err(error) => error,
        };
        match error {
            Refused::Status(error) => status::response(&error, &self.types),
            Refused::Coded(code, error) => status::with_code(&error, code, &self.types),
            Refused::WrongVerb(mut verbs) => {
                if verbs.contains(&Method::GET) {
                    verbs.push(Method::HEAD);
                }
                let verbs: Vec<&str> = verbs.iter().map(Method::as_str).collect();
                let allowed = verbs.join(", ");
                let message = format!("this path is for {allowed}");
                let error = refusal(Code::Unimplemented, "METHOD_NOT_ALLOWED", message, &[]);
                let mut response = status::with_code(&error, StatusCode::METHOD_NOT_ALLOWED, &self.types);
                if let Ok(allowed) = allowed.parse() {
                    response.headers_mut().insert(header::ALLOW, allowed);
                }
                response
            }
        }
    }

    async fn try_answer(&self, request: Request<Body>, service: Boxed) -> Result<Response<Body>, Refused> {
        let (head, body) = request.into_parts();
        if head.method == Method::GET && head.uri.path() == "/openapi.json" {
            return Ok(status::json(StatusCode::OK, self.openapi().clone()));
        }
        let (route, fields) = match self.routes.find(&head.method, head.uri.path()) {
            Found::Route(route, fields) => (route, fields),
            Found::WrongVerb(verbs) => return Err(Refused::WrongVerb(verbs)),
            Found::Nothing => {
                let message = format!("there is nothing at {} {}", head.method, head.uri.path());
                let next = [("next", "GET /openapi.json lists all paths")];
                return Err(refusal(Code::NotFound, "NO_SUCH_PATH", message, &next).into());
            }
        };
        if let Some(admit) = &self.admit {
            let grpc = path(&route.method)?.as_str().to_owned();
            admit(grpc, head.headers.clone(), head.extensions.clone()).await?;
        }
        check_content(&head.headers)?;
        let limit = time_limit(&head.headers)?;
        let until = limit.map(|limit| tokio::time::Instant::now() + limit);
        let call = Call { rest: self, route, head, fields, until };
        let Some(until) = until else { return call.run(body, service).await };
        tokio::time::timeout_at(until, call.run(body, service)).await.map_err(|_| too_late())?
    }
}

fn too_late() -> Status {
    let message = format!("it took longer than the request's {TIME_LIMIT}");
    refusal(Code::DeadlineExceeded, "DEADLINE_EXCEEDED", message, &[])
}

/// Streams end at their time limit, too.
fn end_at(messages: Messages, until: Option<tokio::time::Instant>) -> Messages {
    let Some(until) = until else { return messages };
    let end = stream::once(async move {
        tokio::time::sleep_until(until).await;
        Err(too_late())
    });
    Box::pin(stream::unfold(Some((messages, Box::pin(end))), |state| async move {
        let (mut messages, mut end) = state?;
        tokio::select! {
            next = messages.next() => Some((next?, Some((messages, end)))),
            late = end.next() => Some((late?, None)),
        }
    }))
}

/// JSON, or what curl says when it isn't told: those that say so are no pages of other origins, which were refused.
fn check_content(headers: &HeaderMap) -> Result<(), Refused> {
    let unfit = |problem: String| {
        let status = refusal(Code::InvalidArgument, "UNSUPPORTED_MEDIA_TYPE", problem, &[]);
        Refused::Coded(StatusCode::UNSUPPORTED_MEDIA_TYPE, status)
    };
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING).filter(|value| *value != "identity") {
        return Err(unfit(format!("bodies are taken without content-encoding, not as {encoding:?}")));
    }
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let essence =
        value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let known = [
        "application/json",
        "application/x-ndjson",
        "application/ndjson",
        "application/x-www-form-urlencoded",
    ];
    if known.contains(&essence.as_str()) {
        return Ok(());
    }
    Err(unfit(format!("the body has to be application/json (streams: application/x-ndjson), not {value:?}")))
}

fn time_limit(headers: &HeaderMap) -> Result<Option<Duration>, Refused> {
    let Some(value) = headers.get(TIME_LIMIT) else { return Ok(None) };
    let seconds = value.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok());
    let limit = seconds.filter(|s| *s > 0.0).and_then(|s| Duration::try_from_secs_f64(s).ok());
    let limit = limit.filter(|limit| *limit <= LONGEST);
    let problem = || Problem {
        field: Some(TIME_LIMIT.to_owned()),
        problem: format!("{TIME_LIMIT}: a number of seconds up to {} is expected", LONGEST.as_secs()),
    };
    limit.map(Some).ok_or_else(|| problem().into())
}

fn metadata(headers: &HeaderMap) -> MetadataMap {
    let passed = headers.iter().filter(|(name, _)| {
        let name = name.as_str();
        PASSED_ON.contains(&name) || (name.starts_with(OURS) && !name.ends_with("-bin"))
    });
    let mut kept = HeaderMap::new();
    for (name, value) in passed {
        kept.append(name.clone(), value.clone());
    }
    MetadataMap::from_headers(kept)
}

/// A request that has found its method.
struct Call<'a> {
    rest: &'a Rest,
    route: &'a Route,
    head: Head,
    fields: Vec<(crate::template::FieldPath, String)>,
    until: Option<tokio::time::Instant>,
}

impl Call<'_> {
    async fn run(self, body: Body, service: Boxed) -> Result<Response<Body>, Refused> {
        let method = self.route.method.clone();
        let mut grpc = Grpc::new(service).max_decoding_message_size(LARGEST_ANSWER);
        let away = |error| Status::unavailable(format!("the service is not ready: {error}"));
        grpc.ready().await.map_err(away)?;
        let (path, codec) = (path(&method)?, Dynamic(method.output()));
        let form = Form::wanted(&self.head.headers);
        let types = self.rest.types.clone();
        if method.is_client_streaming() {
            let (inputs, fault) = self.inputs(body).await?;
            let request = self.request(inputs);
            if !method.is_server_streaming() {
                let answer = tokio::select! {
                    answer = grpc.client_streaming(request, path, codec) => answer?,
                    refused = fault.wait() => return Err(refused.into()),
                };
                return Ok(reply::one(answer.get_ref())?);
            }
            let answer = tokio::select! {
                answer = grpc.streaming(request, path, codec) => answer?,
                refused = fault.wait() => return Err(refused.into()),
            };
            let outputs = end_at(until_fault(answer.into_inner(), fault), self.until);
            return Ok(reply::many(outputs, form, types));
        }
        let most = if matches!(self.route.body, BodyRule::Nothing) { LARGEST_NONE } else { LARGEST_OBJECT };
        let (body, large) = whole(body, most, &self.rest.room.bodies).await?;
        let message = self.rest.room.read(body, self.first()).await?;
        drop(large);
        let request = self.request(message);
        if method.is_server_streaming() {
            let answer = grpc.server_streaming(request, path, codec).await?;
            let outputs = end_at(Box::pin(answer.into_inner()), self.until);
            return Ok(reply::many(outputs, form, types));
        }
        let answer = grpc.unary(request, path, codec).await?;
        Ok(reply::one(answer.get_ref())?)
    }

    /// What the first message is made of, beside the body.
    fn first(&self) -> impl FnOnce(&[u8]) -> Result<DynamicMessage, Problem> + Send + 'static {
        let last_event = self.head.headers.get("last-event-id").and_then(|value| value.to_str().ok());
        let (last_event, of) = (last_event.map(str::to_owned), self.route.method.input());
        let (rule, fields) = (self.route.body.clone(), self.fields.clone());
        let query = self.head.uri.query().map(str::to_owned);
        move |body| {
            let (query, last_event) = (query.as_deref(), last_event.as_deref());
            let body = input::object(body)?;
            input::message(&of, Parts { body, rule: &rule, fields: &fields, query, last_event })
        }
    }

    /// With who asks: what the listener knows of the connection goes along with the headers.
    fn request<T>(&self, message: T) -> tonic::Request<T> {
        let extensions = self.head.extensions.clone();
        tonic::Request::from_parts(metadata(&self.head.headers), extensions, message)
    }

    /// The objects of a body as messages. The first one has the fields of path and query; it is waited for, so that
    /// what is wrong with it is an answer of its own.
    async fn inputs(
        &self,
        body: Body,
    ) -> Result<(impl Stream<Item = DynamicMessage> + Send + 'static, Arc<Fault>), Refused> {
        let of = self.route.method.input();
        let mut objects = Objects { body, splitter: Splitter::new(LARGEST_OBJECT), over: false };
        let first = objects.next().await?.unwrap_or_default();
        let room = self.rest.room.clone();
        let first = room.read(first, self.first()).await?;
        let fault = Arc::new(Fault::default());
        let state = (objects, of, room, fault.clone());
        let rest = stream::unfold(state, |(mut objects, of, room, fault)| async move {
            let next = match objects.next().await {
                Ok(None) => return None,
                Ok(Some(object)) => {
                    let of = of.clone();
                    let parse = move |object: &[u8]| {
                        input::object(object).and_then(|value| input::parse(&of, value.unwrap_or_default()))
                    };
                    room.read(object, parse).await
                }
                Err(refused) => Err(refused),
            };
            match next {
                Ok(message) => Some((message, (objects, of, room, fault))),
                Err(refused) => {
                    fault.set(refused);
                    // No end either: half of the input must not be taken for the whole.
                    std::future::pending().await
                }
            }
        });
        Ok((stream::once(async { first }).chain(rest), fault))
    }
}

fn path(method: &MethodDescriptor) -> Result<PathAndQuery, Status> {
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    PathAndQuery::try_from(path).map_err(|error| Status::internal(error.to_string()))
}

/// What requests may take of this program together.
#[derive(Clone)]
pub struct Room {
    bodies: Arc<Semaphore>,
    objects: Arc<Semaphore>,
}

impl Default for Room {
    fn default() -> Self {
        let of = |places| Arc::new(Semaphore::new(places));
        Self { bodies: of(LARGE_BODIES), objects: of(LARGE_OBJECTS) }
    }
}

impl Room {
    /// Makes a message of an object.
    async fn read(
        &self,
        object: Bytes,
        parse: impl FnOnce(&[u8]) -> Result<DynamicMessage, Problem> + Send + 'static,
    ) -> Result<DynamicMessage, Refused> {
        if object.len() <= LARGE_OBJECT {
            return Ok(parse(&object)?);
        }
        let ended = |error: String| Status::internal(format!("read an object: {error}"));
        let place = self.objects.clone().acquire_owned().await.map_err(|error| ended(error.to_string()))?;
        let reading = tokio::task::spawn_blocking(move || {
            // Also when the caller has gone by now.
            let _place = place;
            parse(&object)
        });
        Ok(reading.await.map_err(|error| ended(error.to_string()))??)
    }
}

/// A body that is one object, and, when it is a large one, its place among those that are held.
async fn whole(
    body: Body,
    most: usize,
    places: &Arc<Semaphore>,
) -> Result<(Bytes, Option<OwnedSemaphorePermit>), Refused> {
    let late = |_| {
        let message = format!("the body did not come within {} s", PATIENCE.as_secs());
        Refused::Coded(
            StatusCode::REQUEST_TIMEOUT,
            refusal(Code::DeadlineExceeded, "BODY_TOO_SLOW", message, &[]),
        )
    };
    tokio::time::timeout(PATIENCE, collect(body, most, places)).await.map_err(late)?
}

async fn collect(
    mut body: Body,
    most: usize,
    places: &Arc<Semaphore>,
) -> Result<(Bytes, Option<OwnedSemaphorePermit>), Refused> {
    let (mut whole, mut place) = (BytesMut::new(), None);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| broke_off(&error))?;
        let Some(data) = frame.data_ref() else { continue };
        if whole.len() + data.len() > most {
            return Err(if most == LARGEST_NONE { takes_none().into() } else { too_large() });
        }
        whole.extend_from_slice(data);
        if whole.len() > LARGE_BODY && place.is_none() {
            // What is not read meanwhile stays with the client.
            let there = places.clone().acquire_owned().await;
            place = Some(there.map_err(|error| Status::internal(error.to_string()))?);
        }
    }
    Ok((whole.freeze(), place))
}

fn broke_off(error: &dyn std::error::Error) -> Problem {
    Problem { field: None, problem: format!("the body broke off: {error}") }
}

/// The objects of a body.
struct Objects {
    body: Body,
    splitter: Splitter,
    over: bool,
}

impl Objects {
    async fn next(&mut self) -> Result<Option<Bytes>, Refused> {
        loop {
            if let Some(object) = self.splitter.next()? {
                return Ok(Some(object));
            }
            if self.over {
                return Ok(None);
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.splitter.push(data);
                    }
                }
                Some(Err(error)) => {
                    return Err(broke_off(&error).into());
                }
                None => {
                    self.splitter.end()?;
                    self.over = true;
                }
            }
        }
    }
}

/// What was wrong with an input after the call had begun.
#[derive(Default)]
struct Fault {
    status: Mutex<Option<Status>>,
    there: Notify,
}

impl Fault {
    fn set(&self, refused: Refused) {
        let (Refused::Status(status) | Refused::Coded(_, status)) = refused else { return };
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
        self.there.notify_one();
    }

    async fn wait(&self) -> Status {
        self.there.notified().await;
        let status = self.status.lock().unwrap_or_else(PoisonError::into_inner).take();
        status.unwrap_or_else(|| Status::internal("an input was refused"))
    }
}

/// The outputs of a call, which ends with what was wrong with its inputs.
fn until_fault(outputs: tonic::Streaming<DynamicMessage>, fault: Arc<Fault>) -> Messages {
    Box::pin(stream::unfold(Some((outputs, fault)), |state| async move {
        let (mut outputs, fault) = state?;
        tokio::select! {
            biased;
            next = outputs.next() => Some((next?, Some((outputs, fault)))),
            refused = fault.wait() => Some((Err(refused), None)),
        }
    }))
}
