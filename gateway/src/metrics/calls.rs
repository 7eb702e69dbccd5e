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

const CANCELLED: usize = 1;
const UNKNOWN: usize = 2;

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
    /// As it was told.
    code: Option<usize>,
    /// The answer has come to its end: one without a status is no call that was broken off.
    ended: bool,
}

impl Told {
    fn hear(&mut self, headers: &HeaderMap) {
        let code = headers.get("grpc-status").and_then(|code| code.to_str().ok()?.parse().ok());
        self.code = code.or(self.code);
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let code = self.code.unwrap_or(if self.ended { UNKNOWN } else { CANCELLED });
        let code = CODES.get(code).copied().unwrap_or("UNKNOWN");
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
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(trailers) = frame.trailers_ref() {
                    self.told.hear(trailers);
                    self.told.ended = true;
                }
            }
            Poll::Ready(Some(Err(broken))) => {
                self.told.code = self.told.code.or(usize::try_from(i32::from(broken.code())).ok());
                self.told.ended = true;
            }
            Poll::Ready(None) => self.told.ended = true,
            Poll::Pending => {}
        }
        // Nobody asks for more behind the last frame.
        self.told.ended |= self.inner.is_end_stream();
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
        let mut told =
            Told { calls: self.calls.clone(), method, begun: Instant::now(), code: None, ended: false };
        let answer = self.inner.call(request);
        Box::pin(async move {
            let response = answer.await?;
            told.hear(response.headers());
            told.ended = http_body::Body::is_end_stream(response.body());
            Ok(response.map(|inner| Body::new(Heard { inner, told })))
        })
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::{BodyExt as _, Full, StreamBody};

    use super::*;

    /// What a call is counted as whose answer is this one, read to its end or dropped before.
    async fn counted(answer: Response<Body>, read: bool) -> String {
        let calls = Arc::<Calls>::default();
        let answer = std::sync::Mutex::new(Some(answer));
        let answer = Arc::new(answer);
        let inner = tower::service_fn(move |_: Request<Body>| {
            let answer = answer.lock().unwrap().take().unwrap();
            async move { Ok::<_, Infallible>(answer) }
        });
        let mut service = Counted::new(inner, calls.clone());
        let response = service.call(Request::new(Body::empty())).await.unwrap();
        if read {
            let _ = response.into_body().collect().await;
        } else {
            drop(response);
        }
        let mut text = Text::default();
        calls.write(&mut text);
        let text = text.finish();
        let line = text.lines().find(|line| line.starts_with("torpor_requests_total{")).unwrap();
        let (_, code) = line.split_once("code=\"").unwrap();
        code.split('"').next().unwrap().to_owned()
    }

    fn frames(all: Vec<Result<Frame<Bytes>, Status>>) -> Response<Body> {
        Response::new(Body::new(StreamBody::new(futures::stream::iter(all))))
    }

    #[tokio::test]
    async fn an_answer_without_a_status_is_unknown_and_cancelled_only_when_it_is_left() {
        let data = || Ok(Frame::data(Bytes::from_static(b"x")));
        let status =
            |code: &str| HeaderMap::from_iter([("grpc-status".parse().unwrap(), code.parse().unwrap())]);
        let unsupported = || Response::builder().status(415).body(Body::empty()).unwrap();
        assert_eq!(counted(unsupported(), true).await, "UNKNOWN");
        assert_eq!(counted(unsupported(), false).await, "UNKNOWN", "there is nothing to read of it");
        let whole = || Response::new(Body::new(Full::new(Bytes::from_static(b"x"))));
        assert_eq!(counted(whole(), true).await, "UNKNOWN");
        assert_eq!(counted(whole(), false).await, "CANCELLED");
        assert_eq!(counted(frames(vec![data()]), true).await, "UNKNOWN");
        assert_eq!(counted(frames(vec![data()]), false).await, "CANCELLED");
        assert_eq!(counted(frames(vec![data(), Err(Status::data_loss("x"))]), true).await, "DATA_LOSS");
        let with = || frames(vec![data(), Ok(Frame::trailers(status("0")))]);
        assert_eq!(counted(with(), true).await, "OK");
        assert_eq!(counted(with(), false).await, "CANCELLED");
        assert_eq!(counted(frames(vec![data(), Ok(Frame::trailers(status("99")))]), true).await, "UNKNOWN");
        let mut refused = Response::new(Body::empty());
        *refused.headers_mut() = status("5");
        assert_eq!(counted(refused, false).await, "NOT_FOUND");
    }
}
