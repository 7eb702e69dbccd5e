//! `/metrics`, `/healthz` and `/readyz`, on an address of their own: nobody is asked who they are there, and nothing can be
//! changed.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::Sources;
use crate::{places::Places, store::StoreError};

/// Connections at once; more are closed unheard.
const MOST: usize = 256;
/// Of one address, which so can't keep others out: whoever asks here is not known.
const EACH: usize = 8;
/// For a client to send its header.
const GREETING: Duration = Duration::from_secs(10);
/// For a connection from its first byte to the last: one request and its answer.
const WHOLE: Duration = Duration::from_secs(30);
/// How old the figures may be that somebody else has just asked for.
const FRESH: Duration = Duration::from_secs(1);
/// For the database's writer to answer.
const PING: Duration = Duration::from_secs(5);
/// After a failed accept, for descriptors to come free.
const PAUSE: Duration = Duration::from_millis(100);
/// What a scraper is told that it gets.
const FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What is told, and the last figures.
struct Desk {
    sources: Arc<Sources>,
    scraped: tokio::sync::Mutex<Option<(Instant, Bytes)>>,
}

impl Desk {
    /// Figures that are a second old at most: however many ask, the database is read once for all of them.
    async fn figures(&self) -> Result<Bytes, StoreError> {
        let mut last = self.scraped.lock().await;
        if let Some((when, text)) = &*last
            && when.elapsed() < FRESH
        {
            return Ok(text.clone());
        }
        let (begun, text) = (Instant::now(), Bytes::from(self.sources.scrape().await?));
        *last = Some((begun, text.clone()));
        Ok(text)
    }
}

/// Answers until the gateway ends.
pub async fn serve(listener: TcpListener, sources: Arc<Sources>, end: CancellationToken) {
    let places = Places::new(MOST, EACH);
    let desk = Arc::new(Desk { sources, scraped: tokio::sync::Mutex::default() });
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = end.cancelled() => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection for metrics could not be accepted");
                sleep(PAUSE).await;
                continue;
            }
        };
        let peer = peer.ip().to_canonical();
        let Some(place) = places.take(peer) else {
            tracing::debug!(%peer, "a connection for metrics too many is closed");
            continue;
        };
        let (desk, end) = (desk.clone(), end.clone());
        connections.spawn(async move {
            tokio::select! {
                () = attend(stream, &desk) => {}
                () = end.cancelled() => {}
            }
            drop(place);
        });
    }
    connections.close();
    connections.wait().await;
}

/// One request of one connection: neither slow words nor an answer that is not read hold a place for long.
async fn attend(stream: TcpStream, desk: &Arc<Desk>) {
    let answers = service_fn(|request| {
        let desk = desk.clone();
        async move { Ok::<_, Infallible>(answer(&desk, &request).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(GREETING).keep_alive(false);
    // A client that breaks off has its reasons.
    let _ = timeout(WHOLE, builder.serve_connection(TokioIo::new(stream), answers)).await;
}

async fn answer(desk: &Desk, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return told(StatusCode::METHOD_NOT_ALLOWED, "only GET is answered here\n".to_owned());
    }
    match request.uri().path() {
        "/metrics" => match desk.figures().await {
            Ok(text) => told(StatusCode::OK, text),
            Err(error) => {
                tracing::error!(%error, "metrics can't be told");
                told(StatusCode::SERVICE_UNAVAILABLE, "the database can't be read\n".to_owned())
            }
        },
        // A full disk is not mended by another process: only one that hangs is better begun anew.
        "/healthz" => match timeout(PING, desk.sources.service.store.ping()).await {
            Ok(_) => told(StatusCode::OK, "ok\n".to_owned()),
            Err(_) => told(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("the database's writer has not answered for {} s\n", PING.as_secs()),
            ),
        },
        "/readyz" => match timeout(PING, desk.sources.service.store.ping()).await {
            Ok(Ok(())) => told(StatusCode::OK, "ok\n".to_owned()),
            _ => told(StatusCode::SERVICE_UNAVAILABLE, "the database can't be written\n".to_owned()),
        },
        _ => told(StatusCode::NOT_FOUND, "there are /metrics, /healthz and /readyz\n".to_owned()),
    }
}

fn told(code: StatusCode, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(FORMAT));
    response.headers_mut().insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}
