//! `/metrics`, `/healthz` and `/readyz`, on an address of their own: nobody is asked who they are there, and nothing can be
//! changed.

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::TcpListener,
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::Sources;

/// Connections at once; more wait.
const MOST: usize = 64;
/// For a client to send its header, and for a whole connection that says no more.
const GREETING: Duration = Duration::from_secs(10);
/// For the database's writer to answer.
const PING: Duration = Duration::from_secs(5);
/// After a failed accept, for descriptors to come free.
const PAUSE: Duration = Duration::from_millis(100);
/// What a scraper is told that it gets.
const FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers until the gateway ends.
pub async fn serve(listener: TcpListener, sources: Arc<Sources>, end: CancellationToken) {
    let places = Arc::new(Semaphore::new(MOST));
    let connections = TaskTracker::new();
    loop {
        let next = async {
            let place = places.clone().acquire_owned().await.map_err(io::Error::other)?;
            Ok::<_, io::Error>((listener.accept().await?, place))
        };
        let accepted = tokio::select! {
            accepted = next => accepted,
            () = end.cancelled() => break,
        };
        let ((stream, _), place) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection for metrics could not be accepted");
                sleep(PAUSE).await;
                continue;
            }
        };
        let (sources, end) = (sources.clone(), end.clone());
        connections.spawn(async move {
            let answers = service_fn(|request| {
                let sources = sources.clone();
                async move { Ok::<_, Infallible>(answer(&sources, &request).await) }
            });
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(GREETING);
            tokio::select! {
                // A client that breaks off has its reasons.
                _ = builder.serve_connection(TokioIo::new(stream), answers) => {}
                () = end.cancelled() => {}
            }
            drop(place);
        });
    }
    connections.close();
    connections.wait().await;
}

async fn answer(sources: &Sources, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return told(StatusCode::METHOD_NOT_ALLOWED, "only GET is answered here\n".to_owned());
    }
    match request.uri().path() {
        "/metrics" => match sources.scrape().await {
            Ok(text) => told(StatusCode::OK, text),
            Err(error) => {
                tracing::error!(%error, "metrics can't be told");
                told(StatusCode::SERVICE_UNAVAILABLE, "the database can't be read\n".to_owned())
            }
        },
        // A full disk is not mended by another process: only one that hangs is better begun anew.
        "/healthz" => match timeout(PING, sources.service.store.ping()).await {
            Ok(_) => told(StatusCode::OK, "ok\n".to_owned()),
            Err(_) => told(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("the database's writer has not answered for {} s\n", PING.as_secs()),
            ),
        },
        "/readyz" => match timeout(PING, sources.service.store.ping()).await {
            Ok(Ok(())) => told(StatusCode::OK, "ok\n".to_owned()),
            _ => told(StatusCode::SERVICE_UNAVAILABLE, "the database can't be written\n".to_owned()),
        },
        _ => told(StatusCode::NOT_FOUND, "there are /metrics, /healthz and /readyz\n".to_owned()),
    }
}

fn told(code: StatusCode, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(FORMAT));
    response.headers_mut().insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}
