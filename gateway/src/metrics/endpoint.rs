//! `/metrics`, `/healthz` and `/readyz`, on an address of their own: nobody is asked who they are there, and nothing can be
//! changed.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::IpAddr,
    sync::{Arc, Mutex},
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

use super::{Sources, locked};
use crate::store::StoreError;

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

/// Who is connected, by address.
#[derive(Default)]
struct Places(Mutex<HashMap<IpAddr, usize>>);

/// One connection's, until it is dropped.
struct Place {
    all: Arc<Places>,
    peer: IpAddr,
}

impl Places {
    /// None: there is none for this one.
    fn take(self: &Arc<Self>, peer: IpAddr) -> Option<Place> {
        let mut all = locked(&self.0);
        let total: usize = all.values().sum();
        let here = all.get(&peer).copied().unwrap_or_default();
        if here >= EACH || total >= MOST {
            return None;
        }
        all.insert(peer, here + 1);
        Some(Place { all: self.clone(), peer })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = locked(&self.all.0);
        if let Some(count) = all.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.peer);
            }
        }
    }
}

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
    let places = Arc::<Places>::default();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_has_some_places_all_have_more_and_all_come_back() {
        let places = Arc::<Places>::default();
        let peer = |n: usize| IpAddr::from([10, 0, 0, u8::try_from(n).unwrap()]);
        let mut taken: Vec<Place> = (0..EACH).map(|_| places.take(peer(1)).unwrap()).collect();
        assert!(places.take(peer(1)).is_none());
        taken.push(places.take(peer(2)).unwrap());
        taken.remove(0);
        taken.push(places.take(peer(1)).unwrap());
        for n in (3..).take(MOST / EACH) {
            taken.extend((0..EACH).filter_map(|_| places.take(peer(n))));
        }
        assert_eq!(taken.len(), MOST);
        assert!(places.take(peer(200)).is_none());
        drop(taken);
        assert!(places.0.lock().unwrap().is_empty());
    }
}
