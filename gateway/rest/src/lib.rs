//! REST, gRPC-Web and an OpenAPI document for tonic services, all of it from their descriptors.
//!
//! ```text
//! application/grpc ───────────────────────────────▶ ┐
//! application/grpc-web ── tonic-web ──────────────▶ ├─ the same services, in the same process
//! everything else ── JSON ─ rules ─ tonic client ─▶ ┘
//! ```
//! Nothing here knows a method or a message by name. A method is found by its google.api.http rule or by the uniform path
//! `POST /v1/SERVICE/METHOD`; its messages are proto3's JSON.

mod call;
mod codec;
mod comments;
mod cors;
mod front;
mod input;
mod openapi;
mod reply;
mod rules;
mod schema;
mod split;
mod status;
mod template;

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, OnceLock},
};

use bytes::Bytes;
use http::{Extensions, HeaderMap};
use prost_reflect::DescriptorPool;
use tonic::Status;

pub use call::LARGEST_OBJECT;
pub use codec::Dynamic;
pub use front::{Front, FrontLayer};

use cors::Cors;
use rules::Routes;

/// What is served.
#[derive(Clone, Debug)]
pub struct Options {
    /// The package whose services have REST, "torpor.v1".
    pub package: String,
    /// The title of the OpenAPI document.
    pub title: String,
    /// Its version.
    pub version: String,
    /// Origins whose pages may ask, as in `https://console.example.com`; `*`: all. None by default.
    pub origins: Vec<String>,
}

/// Why there is no REST.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestError {
    /// Descriptors that can't be read.
    #[error("the API's descriptors can't be read: {0}")]
    Descriptors(#[from] prost_reflect::DescriptorError),
    /// A google.api.http rule that isn't understood.
    #[error("HTTP rule of {method}: {problem}")]
    Rule {
        /// The method.
        method: String,
        /// What is wrong.
        problem: String,
    },
    /// An output whose JSON could be taken for an error at a stream's end.
    #[error(
        "{method} streams {message}, which has a field 'error': lines of it could be taken for a failure"
    )]
    Ambiguous {
        /// The method.
        method: String,
        /// Its output.
        message: String,
    },
}

/// Asks whether a call may be made, by its gRPC path, headers and the connection's extensions, before anything of its body
/// is read.
pub type Admit = Arc<
    dyn Fn(String, HeaderMap, Extensions) -> Pin<Box<dyn Future<Output = Result<(), Status>> + Send>>
        + Send
        + Sync,
>;

/// The ways to all methods, and how they are described.
pub struct Rest {
    admit: Option<Admit>,
    routes: Routes,
    types: Arc<DescriptorPool>,
    cors: Cors,
    pool: DescriptorPool,
    options: Options,
    room: call::Room,
    /// Made when somebody asks for it.
    document: OnceLock<Bytes>,
}

impl Rest {
    /// Reads the descriptors of the services that will be called: a FileDescriptorSet with its imports, best with source
    /// info, which holds the comments.
    ///
    /// # Errors
    /// See [`RestError`].
    pub fn new(descriptors: &[u8], options: Options) -> Result<Arc<Self>, RestError> {
        Self::guarded(descriptors, options, None)
    }

    /// The same; strangers are refused before their bodies are read.
    ///
    /// # Errors
    /// See [`RestError`].
    pub fn guarded(
        descriptors: &[u8],
        options: Options,
        admit: Option<Admit>,
    ) -> Result<Arc<Self>, RestError> {
        let pool = DescriptorPool::decode(descriptors)?;
        let routes = Routes::read(&pool, &options.package)?;
        for route in routes.iter().filter(|route| route.method.is_server_streaming()) {
            let output = route.method.output();
            if output.get_field_by_json_name("error").is_some() {
                let (method, message) = (route.method.full_name().to_owned(), output.full_name().to_owned());
                return Err(RestError::Ambiguous { method, message });
            }
        }
        let types = Arc::new(status::types()?);
        let cors = Cors::new(options.origins.clone());
        Ok(Arc::new(Self {
            admit,
            routes,
            types,
            cors,
            pool,
            options,
            room: call::Room::default(),
            document: OnceLock::new(),
        }))
    }

    /// To put before the gRPC services: of tonic's server (with `accept_http1`) or of any other.
    pub fn layer(self: &Arc<Self>) -> FrontLayer {
        FrontLayer(self.clone())
    }

    /// The OpenAPI 3.1 document, JSON.
    pub fn openapi(&self) -> &Bytes {
        self.document.get_or_init(|| {
            let document = openapi::document(&self.pool, &self.routes, &self.options);
            Bytes::from(format!("{document:#}\n"))
        })
    }

    /// Every way, as (verb, path in OpenAPI's form, full name of the method).
    pub fn paths(&self) -> impl Iterator<Item = (&str, String, &str)> {
        self.routes
            .iter()
            .map(|route| (route.verb.as_str(), route.template.shown(), route.method.full_name()))
    }
}
