//! The engine's API over its socket: one connection for each request, nothing kept.
//!
//! Facts of the engines that shape this: 404 is reliable on both; most other refusals are 409 on Docker and 500 on Podman,
//! so that after any of them the caller looks at the container and decides by what it sees. 304 means "so already".

use std::{
    io,
    path::{Path, PathBuf},
    sync::{PoisonError, RwLock},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};
use hyper::{
    Method, Request, Response, StatusCode, body::Incoming, client::conn::http1, header::CONTENT_TYPE,
};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::{net::UnixStream, time::timeout};
use torpor_sandbox::{DriverError, words};

use crate::{
    engine::Engine,
    types::{Info, Refusal, Version},
};

/// The version of the API that this is written for; engines that have left it behind are asked in their oldest.
const API: (u32, u32) = (1, 41);
/// For an answer that needs no work.
pub(crate) const QUICK: Duration = Duration::from_secs(if cfg!(test) { 4 } else { 20 });
/// For an answer that needs some: to make, start or remove a container.
pub(crate) const WORK: Duration = Duration::from_secs(120);
/// Largest answer that is read, bytes.
const LARGEST: usize = 16 << 20;

pub(crate) type Body = BoxBody<Bytes, io::Error>;

/// Why the engine did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineError {
    #[error("{} is not reached at {}", .0.name(), .1.display())]
    Unreachable(Engine, PathBuf, #[source] io::Error),
    #[error("{} did not answer within {} s: {what}", engine.name(), after.as_secs())]
    Silent { engine: Engine, what: String, after: Duration },
    #[error("{} broke off its answer: {what}", engine.name())]
    Broken {
        engine: Engine,
        what: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{}: {what}: {message} ({status})", engine.name())]
    Refused { engine: Engine, what: String, status: StatusCode, message: String },
    #[error("what {} answers can't be read: {what}", engine.name())]
    Garbled {
        engine: Engine,
        what: String,
        #[source]
        source: serde_json::Error,
    },
}

impl EngineError {
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { status, .. } if *status == StatusCode::NOT_FOUND)
    }

    /// The engine is down, on its way up or down, or hangs.
    pub(crate) fn is_absence(&self) -> bool {
        match self {
            Self::Unreachable(..) | Self::Silent { .. } | Self::Broken { .. } => true,
            Self::Refused { status, .. } => *status == StatusCode::SERVICE_UNAVAILABLE,
            Self::Garbled { .. } => false,
        }
    }
}

impl From<EngineError> for DriverError {
    fn from(error: EngineError) -> Self {
        let full =
            |text: &str| text.contains("no space left on device") || text.contains("disk quota exceeded");
        match &error {
            _ if error.is_absence() => {
                let cause = std::error::Error::source(&error).map(|c| format!(": {c}")).unwrap_or_default();
                Self::Unreachable(format!("{error}{cause}"))
            }
            EngineError::Refused { message, .. } if full(message) => Self::NoSpace(error.to_string()),
            EngineError::Refused { status, .. } if *status == StatusCode::BAD_REQUEST => {
                Self::Invalid(error.to_string())
            }
            _ => Self::backend("ask the engine", error),
        }
    }
}

/// What is known of the engine behind the socket since it was reached last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    pub(crate) version: String,
    pub(crate) info: Info,
    /// Whether it keeps memory, once that was looked at.
    pub(crate) can_keep: Option<Result<(), String>>,
    pub(crate) prefix: String,
}

#[derive(Debug)]
pub(crate) struct Client {
    engine: Engine,
    socket: PathBuf,
    known: RwLock<Option<Known>>,
    /// Held while it is asked what it is: a later answer must not take away what was found out after an earlier one.
    learning: tokio::sync::Mutex<()>,
}

/// What a request carries.
pub(crate) enum Carries {
    Nothing,
    Json(Value),
    /// A tar archive as a stream.
    Tar(Body),
}

impl Client {
    pub(crate) fn new(engine: Engine, socket: &Path) -> Self {
        Self { engine, socket: socket.to_owned(), known: RwLock::default(), learning: Default::default() }
    }

    /// What was learned of the engine; none when it was never reached.
    pub(crate) fn known(&self) -> Option<Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks the engine what it is, at first, and again after it was away.
    pub(crate) async fn learn(&self) -> Result<Known, EngineError> {
        if let Some(known) = self.known() {
            return Ok(known);
        }
        // Whoever is before may wait for an engine that hangs, and everybody would in turn.
        let Ok(_first) = timeout(QUICK, self.learning.lock()).await else {
            let what = "GET /version".to_owned();
            return Err(EngineError::Silent { engine: self.engine, what, after: QUICK });
        };
        if let Some(known) = self.known() {
            return Ok(known);
        }
        let version: Version = self.decode("version", self.raw(Method::GET, "/version", QUICK).await?)?;
        let prefix = prefix(&version);
        let info: Info =
            self.decode("info", self.raw(Method::GET, &format!("{prefix}/info"), QUICK).await?)?;
        let known = Known { version: version.version, info: info.truthful(), can_keep: None, prefix };
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = Some(known.clone());
        Ok(known)
    }

    pub(crate) fn can_keep(&self) -> Option<Result<(), String>> {
        self.known()?.can_keep
    }

    pub(crate) fn note_can_keep(&self, can: Result<(), String>) {
        if let Some(known) = self.known.write().unwrap_or_else(PoisonError::into_inner).as_mut() {
            known.can_keep = Some(can);
        }
    }

    /// It may be another version when it is back.
    pub(crate) fn forget(&self) {
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// A GET of JSON.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, EngineError> {
        let bytes = self.call(Method::GET, path, Carries::Nothing, QUICK).await?;
        self.decode(path, bytes)
    }

    /// A request that is answered in one piece.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        carries: Carries,
        limit: Duration,
    ) -> Result<Bytes, EngineError> {
        let path = format!("{}{path}", self.learn().await?.prefix);
        let what = format!("{method} {path}");
        let work = async {
            let answer = self.send(request(&method, &path, carries, None), &what).await?;
            self.collect(answer, &what).await
        };
        match timeout(limit, work).await {
            Ok(done) => done,
            Err(_) => Err(EngineError::Silent { engine: self.engine, what, after: limit }),
        }
    }

    /// A request whose answer is read as it comes.
    pub(crate) async fn stream(
        &self,
        method: Method,
        path: &str,
        carries: Carries,
        auth: Option<String>,
    ) -> Result<Incoming, EngineError> {
        let path = format!("{}{path}", self.learn().await?.prefix);
        let what = format!("{method} {path}");
        let answer = self.send(request(&method, &path, carries, auth), &what).await?;
        if answer.status().is_success() {
            return Ok(answer.into_body());
        }
        Err(match self.collect(answer, &what).await {
            Err(error) => error,
            Ok(_) => self.broken(&what, "a redirection"),
        })
    }

    async fn raw(&self, method: Method, path: &str, limit: Duration) -> Result<Bytes, EngineError> {
        let what = format!("{method} {path}");
        let work = async {
            let answer = self.send(request(&method, path, Carries::Nothing, None), &what).await?;
            self.collect(answer, &what).await
        };
        match timeout(limit, work).await {
            Ok(done) => done,
            Err(_) => Err(EngineError::Silent { engine: self.engine, what, after: limit }),
        }
    }

    async fn send(
        &self,
        request: Result<Request<Body>, hyper::http::Error>,
        what: &str,
    ) -> Result<Response<Incoming>, EngineError> {
        let request = request.map_err(|error| self.broken(what, error))?;
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| {
            self.forget();
            EngineError::Unreachable(self.engine, self.socket.clone(), error)
        })?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| self.broken(what, error))?;
        // Ends with the answer's body, which says when it broke.
        tokio::spawn(connection);
        sender.send_request(request).await.map_err(|error| self.broken(what, error))
    }

    async fn collect(&self, answer: Response<Incoming>, what: &str) -> Result<Bytes, EngineError> {
        let status = answer.status();
        let mut body = answer.into_body();
        let mut bytes = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| self.broken(what, error))?;
            if let Some(data) = frame.data_ref() {
                if bytes.len() + data.len() > LARGEST {
                    return Err(self.broken(what, "it is too long"));
                }
                bytes.extend_from_slice(data);
            }
        }
        if status.is_success() || status == StatusCode::NOT_MODIFIED {
            return Ok(bytes.freeze());
        }
        let message = match serde_json::from_slice::<Refusal>(&bytes) {
            Ok(refusal) => refusal.message,
            Err(_) => String::from_utf8_lossy(&bytes).trim().to_owned(),
        };
        let message = said(&message);
        Err(EngineError::Refused { engine: self.engine, what: what.to_owned(), status, message })
    }

    fn broken(&self, what: &str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> EngineError {
        EngineError::Broken { engine: self.engine, what: what.to_owned(), source: source.into() }
    }

    fn decode<T: DeserializeOwned>(&self, what: &str, bytes: Bytes) -> Result<T, EngineError> {
        serde_json::from_slice(&bytes).map_err(|source| EngineError::Garbled {
            engine: self.engine,
            what: what.to_owned(),
            source,
        })
    }
}

fn request(
    method: &Method,
    path: &str,
    carries: Carries,
    auth: Option<String>,
) -> Result<Request<Body>, hyper::http::Error> {
    // The name of the host means nothing on a socket, but HTTP wants one.
    let mut builder = Request::builder().method(method).uri(path).header("Host", "engine");
    if let Some(auth) = auth {
        builder = builder.header("X-Registry-Auth", auth);
    }
    let whole = |bytes: Bytes| Full::new(bytes).map_err(|never| match never {}).boxed();
    match carries {
        Carries::Nothing => builder.body(whole(Bytes::new())),
        Carries::Json(value) => {
            builder.header(CONTENT_TYPE, "application/json").body(whole(value.to_string().into()))
        }
        Carries::Tar(body) => builder.header(CONTENT_TYPE, "application/x-tar").body(body),
    }
}

/// The part of the path that names the version of the API.
fn prefix(version: &Version) -> String {
    let parse = |text: &str| {
        let (major, minor) = text.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let newest = parse(&version.api_version).unwrap_or(API);
    let oldest = parse(&version.min_api_version).unwrap_or(API);
    let (major, minor): (u32, u32) = API.min(newest).max(oldest);
    format!("/v{major}.{minor}")
}

/// A value of a query or a part of a path.
pub(crate) fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' | b':' | b'@' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// An engine's words, of bounded length and without anything that a terminal would act on.
pub(crate) fn said(text: &str) -> String {
    words::said_within(text.trim(), 600)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_asked_in_a_version_that_it_still_speaks() {
        let of = |newest: &str, oldest: &str| {
            prefix(&Version {
                api_version: newest.into(),
                min_api_version: oldest.into(),
                ..Version::default()
            })
        };
        assert_eq!(of("1.41", "1.12"), "/v1.41");
        assert_eq!(of("1.40", "1.12"), "/v1.40");
        assert_eq!(of("1.52", "1.44"), "/v1.44");
        assert_eq!(of("", ""), "/v1.41");
    }

    #[test]
    fn what_stands_in_a_path_or_query_can_end_neither() {
        assert_eq!(encoded("docker.io/library/a:1@sha256:0"), "docker.io/library/a:1@sha256:0");
        assert_eq!(encoded("a?b&c=d #/ä"), "a%3Fb%26c%3Dd%20%23/%C3%A4");
    }

    #[tokio::test]
    async fn an_engine_that_is_not_there_is_unreachable_and_nothing_else() {
        let client = Client::new(Engine::Docker, Path::new("/nonexistent/docker.sock"));
        let error = client.get::<Value>("/info").await.unwrap_err();
        assert!(error.is_absence() && !error.is_not_found());
        let error = DriverError::from(error);
        assert!(
            matches!(&error, DriverError::Unreachable(text) if text.contains("/nonexistent/docker.sock")),
            "{error}"
        );
        assert!(error.waits_for_host());
    }

    #[tokio::test]
    async fn nobody_waits_without_end_behind_who_waits_for_an_engine_that_hangs() {
        let client = Client::new(Engine::Docker, Path::new("/nonexistent/docker.sock"));
        let _hangs = client.learning.lock().await;
        let error = timeout(QUICK * 10, client.get::<Value>("/info")).await.unwrap().unwrap_err();
        assert!(matches!(error, EngineError::Silent { .. }), "{error}");
    }
}
