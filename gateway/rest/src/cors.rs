//! What pages of other origins may do: nothing, unless the origin is listed. Refused is refused, not merely unreadable:
//! a browser sends simple requests without asking first.

use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};

/// For how long a browser may remember a permission, seconds.
const REMEMBERED: &str = "600";
const METHODS: &str = "GET, POST, PUT, PATCH, DELETE, OPTIONS";
const HEADERS: &str = "authorization, content-type, accept, x-grpc-web, x-user-agent, grpc-timeout, last-event-id, \
    x-request-id, x-server-timeout, x-torpor-workspace";
const EXPOSED: &str = "grpc-status, grpc-message, grpc-status-details-bin, retry-after";

/// The origins that may.
#[derive(Clone, Debug, Default)]
pub struct Cors(Vec<String>);

/// What a request's origin means.
#[derive(Debug, PartialEq, Eq)]
pub enum Origin {
    /// No page of another origin asks.
    None,
    /// It may.
    Allowed(HeaderValue),
    /// It may not.
    Refused(String),
}

impl Cors {
    /// `*`, or whole origins as in `https://console.example.com`.
    pub fn new(origins: Vec<String>) -> Self {
        Self(origins.into_iter().map(|origin| origin.trim_end_matches('/').to_ascii_lowercase()).collect())
    }

    /// Who asks.
    pub fn origin(&self, headers: &HeaderMap) -> Origin {
        let Some(origin) = headers.get(header::ORIGIN) else { return Origin::None };
        let text = origin.to_str().unwrap_or_default().to_ascii_lowercase();
        if self.0.iter().any(|one| one == "*" || *one == text) {
            return Origin::Allowed(origin.clone());
        }
        Origin::Refused(text)
    }

    /// Whether it is a browser's question before the request itself.
    pub fn is_question<B>(request: &Request<B>) -> bool {
        request.method() == Method::OPTIONS
            && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
    }

    /// The answer to that question.
    pub fn answer(origin: HeaderValue) -> http::Response<tonic::body::Body> {
        let mut response = http::Response::new(tonic::body::Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(METHODS));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static(HEADERS));
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(REMEMBERED));
        Self::mark(headers, origin);
        response
    }

    /// Lets the page read an answer.
    pub fn mark(headers: &mut HeaderMap, origin: HeaderValue) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
}
