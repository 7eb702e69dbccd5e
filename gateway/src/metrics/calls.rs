//! Calls of clients, counted by method and the status that they end with.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

use http::{HeaderMap, Request, Response};
use http_body::Frame;
use tonic::{Status, body::Body};
use tower::Service;

use super::{Counters, Histograms, Name, QUICK, text::Text};
use crate::access::method_of_path;

/// Statuses by their numbers.
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// What was asked so far.
#[derive(Debug)]
pub struct Calls {
    seconds: Histograms<1>,
    all: Counters<2>,
}

impl Default for Calls {
    fn default() -> Self {
        let help = "How long calls of clients took, streams to their end.";
        let seconds = Name { name: "torpor_request_seconds", help, labels: ["method"] };
        let help = "Calls of clients, by the status that they ended with.";
        let all = Name { name: "torpor_requests_total", help, labels: ["method", "code"] };
        Self { seconds: Histograms::new(seconds, QUICK), all: Counters::new(all) }
    }
}

impl Calls {
    pub(super) fn write(&self, text: &mut Text) {
        self.seconds.write(text);
        self.all.write(text);
    }
}

/// A service whose calls are counted.
#[derive(Clone)]
pub struct Counted<S> {
    inner: S,
    calls: Arc<Calls>,
}

impl<S> Counted<S> {
    /// Counts a service's calls.
    pub fn new(inner: S, calls: Arc<Calls>) -> Self {
        Self { inner, calls }
    }
}

/// A call under way, counted when it is dropped.
struct Told {
    calls: Arc<Calls>,
    method: &'static str,
    begun: Instant,
    /// One whose caller goes away has none.
    code: Option<usize>,
}

impl Told {
    fn hear(&mut self, headers: &HeaderMap) {
        let code = headers.get("grpc-status").and_then(|code| code.to_str().ok()?.parse().ok());
        self.code = code.or(self.code);
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let code = CODES.get(self.code.unwrap_or(1)).copied().unwrap_or("UNKNOWN");
        self.calls.all.add([self.method.into(), code.into()]);
        self.calls.seconds.observe([self.method.into()], self.begun.elapsed());
    }
}

/// An answer that is listened to for its status.
struct Heard {
    inner: Body,
    told: Told,
}

impl http_body::Body for Heard {
    type Data = bytes::Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<bytes::Bytes>, Status>>> {
        let frame = Pin::new(&mut self.inner).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            self.told.hear(trailers);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.inner.size_hint()
    }
}

impl<S> Service<Request<Body>> for Counted<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // Names are those of the table: strangers can't make new ones.
        let method = method_of_path(request.uri().path()).unwrap_or("other");
        let mut told = Told { calls: self.calls.clone(), method, begun: Instant::now(), code: None };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let response = answer.await?;
            told.hear(response.headers());
            Ok(response.map(|inner| Body::new(Heard { inner, told })))
        })
    }
}
