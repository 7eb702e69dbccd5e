//! Who gets a request: gRPC as it is, gRPC-Web by translation, everything else as JSON.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, Version, header};
use http_body::Body as _;
use tonic::{Code, Status, body::Body};
use tower::{Layer, Service, ServiceExt as _};

use crate::{
    Rest,
    cors::{Cors, Origin},
    status::{self, refusal},
};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Puts JSON and gRPC-Web before a service that speaks gRPC.
#[derive(Clone)]
pub struct FrontLayer(pub(crate) Arc<Rest>);

/// See [`FrontLayer`].
#[derive(Clone)]
pub struct Front<S> {
    rest: Arc<Rest>,
    inner: S,
}

impl<S> Layer<S> for FrontLayer {
    type Service = Front<S>;

    fn layer(&self, inner: S) -> Front<S> {
        Front { rest: self.0.clone(), inner }
    }
}

/// What a request speaks.
#[derive(Debug, PartialEq, Eq)]
enum Speech {
    Grpc,
    GrpcWeb,
    Json,
}

fn speech(headers: &HeaderMap) -> Speech {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let value = value.to_ascii_lowercase();
    match value.strip_prefix("application/grpc") {
        Some(rest) if rest.starts_with("-web") => Speech::GrpcWeb,
        Some(rest) if rest.is_empty() || rest.starts_with(['+', ';']) => Speech::Grpc,
        _ => Speech::Json,
    }
}

impl<S, B, R> Service<Request<B>> for Front<S>
where
    S: Service<Request<Body>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<Error> + Send,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Error>,
    R: http_body::Body<Data = Bytes> + Send + 'static,
    R::Error: Into<Error> + std::fmt::Display + Send,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        // Whoever is called is waited for then.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (rest, inner) = (self.rest.clone(), self.inner.clone());
        let request = request.map(Body::new);
        Box::pin(async move { rest.dispatch(request, inner).await })
    }
}

impl Rest {
    async fn dispatch<S, R>(&self, mut request: Request<Body>, inner: S) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<R>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<Error> + Send,
        R: http_body::Body<Data = Bytes> + Send + 'static,
        R::Error: Into<Error> + std::fmt::Display + Send,
    {
        let origin = match self.cors.origin(request.headers()) {
            Origin::None => None,
            Origin::Allowed(origin) => Some(origin),
            Origin::Refused(origin) => return Ok(self.refuse_origin(&origin)),
        };
        // As GET, without the body of its answer (RFC 9110 9.3.2).
        let headless = request.method() == Method::HEAD;
        if headless {
            *request.method_mut() = Method::GET;
        }
        let speech = if headless { Speech::Json } else { speech(request.headers()) };
        if let Some(origin) = origin.clone().filter(|_| Cors::is_question(&request)) {
            return Ok(Cors::answer(origin));
        }
        let mut response = match speech {
            Speech::Grpc if request.version() == Version::HTTP_2 => {
                let answered = inner.oneshot(request).await?;
                answered.map(Body::new)
            }
            Speech::Grpc => self.needs_http2(),
            Speech::GrpcWeb => tonic_web::GrpcWebLayer::new().layer(inner).oneshot(request).await?,
            Speech::Json => {
                let plain = inner
                    .map_response(|response: Response<R>| response.map(Body::new))
                    .map_err(|error: S::Error| Status::unavailable(error.into().to_string()));
                self.answer(request, plain.boxed_clone()).await
            }
        };
        if let Some(origin) = origin {
            Cors::mark(response.headers_mut(), origin);
        }
        Ok(if headless { head_only(response) } else { response })
    }

    fn refuse_origin(&self, origin: &str) -> Response<Body> {
        let message = format!("pages of origin '{}' may not use this gateway", origin.escape_debug());
        let next = "list the origin under `origins` in the gateway's configuration";
        let error = refusal(Code::PermissionDenied, "ORIGIN_NOT_ALLOWED", message, &[("next", next)]);
        status::response(&error, &self.types)
    }

    fn needs_http2(&self) -> Response<Body> {
        let message = "gRPC needs HTTP/2; over HTTP/1.1 there are gRPC-Web and JSON";
        let error = refusal(Code::InvalidArgument, "HTTP2_NEEDED", message, &[]);
        status::with_code(&error, StatusCode::HTTP_VERSION_NOT_SUPPORTED, &self.types)
    }
}

/// What is said of a body, without the body.
fn head_only(mut response: Response<Body>) -> Response<Body> {
    if let Some(length) = response.body().size_hint().exact() {
        response.headers_mut().insert(header::CONTENT_LENGTH, length.into());
    }
    response.map(|_| Body::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_type_says_what_is_spoken() {
        let of =
            |value: &str| speech(&HeaderMap::from_iter([(header::CONTENT_TYPE, value.parse().unwrap())]));
        assert_eq!(of("application/grpc"), Speech::Grpc);
        assert_eq!(of("application/grpc+proto"), Speech::Grpc);
        assert_eq!(of("application/grpc-web-text+proto"), Speech::GrpcWeb);
        assert_eq!(of("application/grpcish"), Speech::Json);
        assert_eq!(of("application/json"), Speech::Json);
        assert_eq!(speech(&HeaderMap::new()), Speech::Json);
    }
}
