//! Exposed ports by host name: `PORT--NAME.DOMAIN` leads to that port of that sandbox, `PORT--NAME--WORKSPACE.DOMAIN` to
//! one of another workspace. Each request has a connection of its own to the server in the sandbox.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};
use hyper::{client::conn::http1, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use tokio::{io::DuplexStream, sync::Semaphore};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::body::Body;
use torpor_sandbox::spec::{DEFAULT_WORKSPACE, qualified, unqualified};

use crate::{
    access::{Peer, SECRET_PREFIX},
    error::{ApiError, Code},
    forward,
    http::Said,
    service::Service,
    store::{Exposed, StoreError},
};

/// Requests at once; more are told to come again.
const MOST: usize = 4096;
/// What waits between the two halves of a connection, bytes.
const BETWEEN: usize = 64 << 10;
/// For the server in the sandbox to take a connection's first bytes.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Headers about one connection only (RFC 9110, 7.6.1).
const OF_CONNECTION: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];
/// What only this proxy says.
const FORWARDED: [HeaderName; 4] = [
    header::FORWARDED,
    HeaderName::from_static("x-forwarded-for"),
    HeaderName::from_static("x-forwarded-host"),
    HeaderName::from_static("x-forwarded-proto"),
];

/// Who leads host names to sandboxes.
pub struct Hosts {
    service: Weak<Service>,
    /// With a dot before it.
    domain: String,
    places: Arc<Semaphore>,
}

/// What a host name asks for.
#[derive(Debug, PartialEq, Eq)]
pub struct Wanted {
    port: u16,
    /// What follows the port: NAME or NAME--WORKSPACE.
    rest: String,
}

impl Wanted {
    fn parse(label: &str) -> Option<Self> {
        let (port, rest) = label.split_once("--")?;
        let port = port.bytes().all(|byte| byte.is_ascii_digit()).then_some(port)?;
        let port = port.parse().ok().filter(|port| *port > 0)?;
        (!rest.is_empty() && !rest.contains('.')).then(|| Self { port, rest: rest.to_owned() })
    }

    /// The sandboxes that may be meant, most likely first: a name may hold two dashes itself. What may be another
    /// workspace's comes first: nobody takes over its host names by a name with two dashes.
    fn names(&self) -> impl Iterator<Item = String> {
        let in_default = qualified(DEFAULT_WORKSPACE, &self.rest);
        let in_other =
            self.rest.rsplit_once("--").filter(|(name, workspace)| !name.is_empty() && !workspace.is_empty());
        let in_other = in_other.map(|(name, workspace)| qualified(workspace, name));
        [in_other, Some(in_default)].into_iter().flatten()
    }
}

fn host_of<B>(request: &Request<B>) -> Option<String> {
    let header = || request.headers().get(header::HOST)?.to_str().ok()?.parse::<http::uri::Authority>().ok();
    let host = match request.uri().host() {
        Some(host) => host.to_owned(),
        None => header()?.host().to_owned(),
    };
    Some(host.trim_end_matches('.').to_ascii_lowercase())
}

impl Hosts {
    /// For host names below a domain.
    pub fn new(service: &Arc<Service>, domain: &str) -> Self {
        let domain = format!(".{}", domain.to_ascii_lowercase());
        Self { service: Arc::downgrade(service), domain, places: Arc::new(Semaphore::new(MOST)) }
    }

    /// The port that a request is for; none: it is for the gateway itself.
    pub fn port_of<B>(&self, request: &Request<B>) -> Option<Wanted> {
        let host = host_of(request)?;
        Wanted::parse(host.strip_suffix(&self.domain)?)
    }

    /// Has the server in the sandbox answer, or says why it doesn't.
    pub async fn answer(&self, wanted: &Wanted, request: Request<Body>) -> Response<Body> {
        match self.carry(wanted, request).await {
            Ok(response) => response,
            Err(error) => refused(&error),
        }
    }

    async fn carry(&self, wanted: &Wanted, request: Request<Body>) -> Result<Response<Body>, ApiError> {
        let closing = || ApiError::from(StoreError::Closed);
        let service = self.service.upgrade().ok_or_else(closing)?;
        let Ok(place) = self.places.clone().try_acquire_owned() else {
            let message = "too many requests at once";
            return Err(ApiError::new(Code::ResourceExhausted, "TOO_MANY_CONNECTIONS", message));
        };
        if request.method() == Method::CONNECT {
            return Err(ApiError::invalid("method", "CONNECT is not for exposed ports"));
        }
        let row = find(&service, wanted).await?;
        let why = format!("a request to port {}", wanted.port);
        let (record, forward, session) =
            service.reach_port(&row.sandbox, wanted.port, row.wake, &why).await?;
        let (ours, theirs) = tokio::io::duplex(BETWEEN);
        // The connection in the sandbox ends with the exchange, also when its server would keep it open.
        let end = session.child_token();
        let open = Arc::new(end.clone().drop_guard());
        tokio::spawn(async move {
            forward::carry_stream(theirs, forward, &end).await;
            drop(place);
        });
        let answered = exchange(ours, request, open, session.clone()).await;
        match answered {
            Ok(response) => Ok(response),
            Err(_) if session.is_cancelled() => {
                Err(ApiError::not_ready(&service.store.get(row.sandbox.as_str()).await?))
            }
            Err(error) => {
                let message = format!(
                    "what listens on port {} of sandbox '{}' gave no answer in HTTP: {error}",
                    wanted.port, record.name
                );
                Err(ApiError::new(Code::Unavailable, "BAD_GATEWAY", message).about(&record))
            }
        }
    }
}

/// The row of an exposed port. An unknown sandbox and a port that isn't exposed are told apart to nobody.
async fn find(service: &Arc<Service>, wanted: &Wanted) -> Result<Exposed, ApiError> {
    for name in wanted.names() {
        let id = match service.store.get(&name).await {
            Ok(record) => record.id,
            Err(StoreError::NotFound(_)) => {
                // A workspace's host names are its own, also those that lead nowhere at present.
                let (workspace, _) = unqualified(&name);
                if workspace != DEFAULT_WORKSPACE && service.store.workspace(workspace).await.is_ok() {
                    break;
                }
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        if let Some(row) = service.store.exposed_port(&id, wanted.port).await? {
            return Ok(row);
        }
        break;
    }
    let message = format!("no sandbox with an exposed port {} has this host name", wanted.port);
    Err(ApiError::new(Code::NotFound, "PORT_NOT_EXPOSED", message))
}

/// One request and its answer over a fresh connection.
async fn exchange(
    stream: DuplexStream,
    mut request: Request<Body>,
    open: Arc<DropGuard>,
    session: CancellationToken,
) -> Result<Response<Body>, hyper::Error> {
    let switch = hyper::upgrade::on(&mut request);
    let upgrade = wanted_upgrade(&request);
    let request = rewritten(request, upgrade.as_ref());
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let (ended, held) = (session.clone(), open.clone());
    tokio::spawn(async move {
        tokio::select! {
            // Its faults are the request's as well.
            _ = connection.with_upgrades() => {}
            () = ended.cancelled() => {}
        }
        drop(held);
    });
    let mut response = sender.send_request(request).await?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS && upgrade.is_some() {
        let other = hyper::upgrade::on(&mut response);
        tokio::spawn(async move {
            carry_upgraded(switch, other, session).await;
            drop(open);
        });
        return Ok(response.map(|_| Body::empty()));
    }
    strip(response.headers_mut());
    Ok(response.map(Body::new))
}

/// What the Connection headers name.
fn of_connection(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

/// The protocol that the client wants to switch to; HTTP/1.1 only.
fn wanted_upgrade<B>(request: &Request<B>) -> Option<HeaderValue> {
    let asks = of_connection(request.headers()).any(|one| one.eq_ignore_ascii_case("upgrade"));
    let protocol = request.headers().get(header::UPGRADE)?;
    (asks && request.version() == Version::HTTP_11).then(|| protocol.clone())
}

/// Bytes in both directions until one ends or the sandbox leaves Ready.
async fn carry_upgraded(client: OnUpgrade, server: OnUpgrade, session: CancellationToken) {
    let both = tokio::time::timeout(HANDSHAKE, async { tokio::try_join!(client, server) }).await;
    let Ok(Ok((client, server))) = both else { return };
    let (mut client, mut server) = (TokioIo::new(client), TokioIo::new(server));
    tokio::select! {
        // A side that breaks off ends the other, too.
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
        () = session.cancelled() => {}
    }
}

/// Without what was meant for the gateway's own connection.
fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = of_connection(headers).filter_map(|name| name.parse().ok()).collect();
    for name in named.iter().chain(&OF_CONNECTION) {
        headers.remove(name);
    }
}

/// As the server in the sandbox gets it: HTTP/1.1, the host that the client asked for, and who asks.
fn rewritten(mut request: Request<Body>, upgrade: Option<&HeaderValue>) -> Request<Body> {
    let authority = request.uri().authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
    let peer = request.extensions().get::<Peer>().cloned();
    let path = request.uri().path_and_query().cloned();
    *request.uri_mut() = path.map_or_else(Uri::default, Uri::from);
    *request.version_mut() = Version::HTTP_11;
    request.extensions_mut().clear();
    let headers = request.headers_mut();
    let host = headers.get(header::HOST).cloned();
    strip(headers);
    // A token of the gateway's is none of the sandbox's business.
    let secret = SECRET_PREFIX.as_bytes();
    let ours = |value: &HeaderValue| value.as_bytes().windows(secret.len()).any(|part| part == secret);
    if headers.get_all(header::AUTHORIZATION).iter().any(ours) {
        headers.remove(header::AUTHORIZATION);
    }
    for name in &FORWARDED {
        headers.remove(name);
    }
    // One, whatever else the client has sent.
    if let Some(host) = authority.or(host) {
        headers.insert(header::HOST, host);
    }
    // HTTP/2 may cut cookies in pieces (RFC 9113, 8.2.3).
    let cookies: Vec<&[u8]> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if cookies.len() > 1
        && let Ok(whole) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
    {
        headers.insert(header::COOKIE, whole);
    }
    if let Some(protocol) = upgrade {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, protocol.clone());
    }
    let (proto, from) = match &peer {
        Some(Peer::Tls { from, .. }) => ("https", Some(from.ip())),
        Some(Peer::Plain { from, .. }) => ("http", Some(from.ip())),
        _ => ("http", None),
    };
    headers.insert("x-forwarded-proto", HeaderValue::from_static(proto));
    if let Some(host) = headers.get(header::HOST).cloned() {
        headers.insert("x-forwarded-host", host);
    }
    if let Some(from) = from.and_then(|ip| HeaderValue::from_str(&ip.to_string()).ok()) {
        headers.insert("x-forwarded-for", from);
    }
    request
}

/// The same as a connection to an exposed port of the host is told.
fn refused(error: &ApiError) -> Response<Body> {
    let said = Said::of(error);
    let mut response = Response::new(Body::new(http_body_util::Full::new(bytes::Bytes::from(said.body))));
    *response.status_mut() = StatusCode::from_u16(said.status.0).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    for (name, value) in said.headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts() -> Hosts {
        let places = Arc::new(Semaphore::new(1));
        Hosts { service: Weak::new(), domain: ".apps.example.com".into(), places }
    }

    fn wanted(host: &str) -> Option<(u16, Vec<String>)> {
        let request = Request::get("/").header("host", host).body(()).unwrap();
        hosts().port_of(&request).map(|wanted| (wanted.port, wanted.names().collect()))
    }

    #[test]
    fn a_host_name_holds_port_name_and_workspace() {
        assert_eq!(wanted("8080--web.apps.example.com"), Some((8080, vec!["web".into()])));
        let both = vec!["b/a".to_owned(), "a--b".to_owned()];
        assert_eq!(wanted("80--A--B.Apps.Example.com.:8443"), Some((80, both)));
    }

    #[test]
    fn every_other_host_is_the_gateways_own() {
        for host in [
            "apps.example.com",
            "gateway.apps.example.com",
            "8080--web.example.com",
            "0--web.apps.example.com",
            "65536--web.apps.example.com",
            "+80--web.apps.example.com",
            "80--.apps.example.com",
            "80--x.y.apps.example.com",
            "--web.apps.example.com",
            "8080--webapps.example.com",
            "[::1]:80",
            "",
        ] {
            assert_eq!(wanted(host), None, "{host}");
        }
        let authority = Request::get("https://80--web.apps.example.com/x").body(()).unwrap();
        assert!(hosts().port_of(&authority).is_some());
    }

    #[test]
    fn what_is_about_the_clients_connection_ends_here() {
        let request = Request::get("http://80--web.apps.example.com/a?b=c")
            .version(Version::HTTP_2)
            .header("connection", "close, x-mine")
            .header("x-mine", "1")
            .header("te", "trailers")
            .header("x-forwarded-for", "192.0.2.1")
            .header("cookie", "a=1")
            .header("cookie", "b=2")
            .header("authorization", "Basic eA==")
            .extension(Peer::Tls { from: "198.51.100.7:9".parse().unwrap(), subject: None })
            .body(Body::empty())
            .unwrap();
        let request = rewritten(request, None);
        assert_eq!((request.uri().to_string().as_str(), request.version()), ("/a?b=c", Version::HTTP_11));
        let mut shown: Vec<String> = request
            .headers()
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        shown.sort();
        let expected = [
            "authorization: Basic eA==",
            "cookie: a=1; b=2",
            "host: 80--web.apps.example.com",
            "x-forwarded-for: 198.51.100.7",
            "x-forwarded-host: 80--web.apps.example.com",
            "x-forwarded-proto: https",
        ];
        assert_eq!(shown, expected);
    }
}
