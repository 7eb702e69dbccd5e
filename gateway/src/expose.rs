//! Ports of sandboxes as ports of the host. The rows are the store's; here are the sockets. They listen while a sandbox
//! sleeps, too: whoever connects then is told the phase by HTTP, or wakes it, as the row says.

use std::{
    collections::{HashMap, HashSet},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, broadcast::error::RecvError},
    time::{Instant, sleep, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use torpor_sandbox::{Event, Phase, Request, SandboxId};

use crate::{
    error::{ApiError, Code},
    forward::{self, Forward, NoForward},
    http,
    service::Service,
    store::{Exposed, NewExposed, Record, StoreError},
};

/// Connections to all exposed ports at once; more are told to come again.
const CONNECTIONS: usize = 4096;
/// Of one port.
const CONNECTIONS_OF_PORT: u32 = 512;
/// How long a connection waits for the sandbox that it has woken.
const WAKE_LIMIT: Duration = Duration::from_secs(120);
/// How long a port of a sandbox that was just woken may stay closed: its server starts, too.
const SERVER_LIMIT: Duration = Duration::from_secs(20);
const SERVER_AGAIN: Duration = Duration::from_millis(100);
/// Ports that a create may ask for: as many as a sandbox can have.
const MOST_AT_CREATE: usize = 64;
/// After a failed accept, so that a lasting fault doesn't take the whole CPU.
const ACCEPT_AGAIN: Duration = Duration::from_millis(200);
/// How often addresses that can't be listened on are tried again.
const LISTEN_AGAIN: Duration = Duration::from_secs(15);

/// Where the host listens when nobody says where.
const FREE_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

type Key = (SandboxId, u16);

/// The sockets.
pub struct Listeners {
    open: Mutex<HashMap<Key, Listener>>,
    /// Held while a port is exposed or taken back: row and socket change together.
    changing: tokio::sync::Mutex<()>,
    /// For connections that are carried, of all ports.
    places: Semaphore,
}

impl Default for Listeners {
    fn default() -> Self {
        let places = Semaphore::new(CONNECTIONS);
        Self { open: Mutex::default(), changing: tokio::sync::Mutex::default(), places }
    }
}

struct Listener {
    connections: Arc<AtomicU32>,
    end: CancellationToken,
    /// Why there is no socket.
    problem: Option<String>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

/// An exposed port as it is shown.
#[derive(Clone, Debug)]
pub struct ExposedView {
    /// The row.
    pub row: Exposed,
    /// Connections now.
    pub connections: u32,
    /// Why the host doesn't listen.
    pub problem: Option<String>,
}

/// A port, of 1 to 65535.
///
/// # Errors
/// `INVALID_ARGUMENT`.
pub fn port_of(port: u32) -> Result<u16, ApiError> {
    let fits = u16::try_from(port).ok().filter(|port| *port > 0);
    fits.ok_or_else(|| ApiError::invalid("port", format!("{port} is not a port: 1 to 65535 are")))
}

impl Listeners {
    /// Whether the host listens for this port.
    fn is_open(&self, key: &Key) -> bool {
        self.lock().get(key).is_some_and(|open| open.problem.is_none())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Listener>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn view(&self, row: Exposed) -> ExposedView {
        let open = self.lock();
        let found = open.get(&(row.sandbox.clone(), row.port));
        let connections = found.map_or(0, |listener| listener.connections.load(Ordering::Relaxed));
        let problem = match found {
            Some(listener) => listener.problem.clone(),
            None => Some("the gateway does not listen there yet".to_owned()),
        };
        ExposedView { row, connections, problem }
    }
}

/// A port that a create wants exposed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExposeWish {
    /// The sandbox's.
    pub port: u32,
    /// Where the host listens; none: a free port of 127.0.0.1.
    pub host: Option<String>,
    /// A connection resumes the sandbox.
    pub wake: bool,
}

/// Sockets for the ports of a sandbox that is about to be made. While they are here, no row and no socket changes.
pub struct OpenPorts<'a> {
    open: Vec<(NewExposed, TcpListener)>,
    _changing: Option<tokio::sync::MutexGuard<'a, ()>>,
}

impl OpenPorts<'_> {
    /// As they are to be written.
    pub fn wanted(&self) -> Vec<NewExposed> {
        self.open.iter().map(|(port, _)| port.clone()).collect()
    }
}

impl Service {
    /// Listens for the ports of a sandbox that is about to be made.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a port or address that is none, or is named twice; `ALREADY_EXISTS` for one that is in use.
    pub(crate) async fn open_ports(&self, wishes: Vec<ExposeWish>) -> Result<OpenPorts<'_>, ApiError> {
        let mut ports = OpenPorts { open: Vec::new(), _changing: None };
        if wishes.is_empty() {
            return Ok(ports);
        }
        // Before a socket is opened.
        if wishes.len() > MOST_AT_CREATE {
            return Err(ApiError::invalid("expose", format!("at most {MOST_AT_CREATE} ports")));
        }
        ports._changing = Some(self.listeners.changing.lock().await);
        for ExposeWish { port, host, wake } in wishes {
            let port = port_of(port).map_err(|error| ApiError::invalid("expose", error))?;
            if ports.open.iter().any(|(other, _)| other.port == port) {
                return Err(ApiError::invalid("expose", format!("port {port} is named twice")));
            }
            let address = host.as_deref().map(parse_host).transpose()?.unwrap_or(FREE_PORT);
            let (socket, host) = open(address).await?;
            ports.open.push((NewExposed { port, host, wake }, socket));
        }
        Ok(ports)
    }

    /// Takes connections for a sandbox that was just made.
    pub(crate) fn listen_for(self: &Arc<Self>, record: &Record, ports: OpenPorts<'_>) {
        for (NewExposed { port, host, wake }, socket) in ports.open {
            let (sandbox, name, created) = (record.id.clone(), record.name.clone(), record.created);
            self.listen(&Exposed { sandbox, name, port, host, wake, created }, Ok(socket));
        }
    }

    /// Exposes a port, or changes how it is exposed.
    ///
    /// # Errors
    /// `NOT_FOUND`; `INVALID_ARGUMENT` for a port or address that is none; `ALREADY_EXISTS` for an address that is in use;
    /// `FAILED_PRECONDITION` while the sandbox is being deleted.
    pub async fn expose(
        self: &Arc<Self>,
        sandbox: &str,
        port: u32,
        host: Option<&str>,
        wake: bool,
    ) -> Result<ExposedView, ApiError> {
        let port = port_of(port)?;
        let wanted = host.map(parse_host).transpose()?;
        let _changing = self.listeners.changing.lock().await;
        let id = self.store.get(sandbox).await?.id;
        let present = self.store.exposed_port(&id, port).await?;
        let key = (id.clone(), port);
        let kept = present.as_ref().map(|row| row.host).filter(|kept| fits(wanted, *kept));
        if let Some(kept) = kept
            && self.listeners.is_open(&key)
        {
            let row = self.store.expose(&id, port, kept, wake).await?;
            return Ok(self.listeners.view(row));
        }
        let (socket, address) = open(kept.or(wanted).unwrap_or(FREE_PORT)).await?;
        let row = self.store.expose(&id, port, address, wake).await?;
        self.listen(&row, Ok(socket));
        Ok(self.listeners.view(row))
    }

    /// Takes a port back; its connections end. True when it was exposed.
    ///
    /// # Errors
    /// `NOT_FOUND` for the sandbox, or for the port unless `allow_missing`.
    pub async fn unexpose(&self, sandbox: &str, port: u32, allow_missing: bool) -> Result<bool, ApiError> {
        let port = port_of(port)?;
        let _changing = self.listeners.changing.lock().await;
        let record = match self.store.get(sandbox).await {
            Err(StoreError::NotFound(_)) if allow_missing => return Ok(false),
            found => found?,
        };
        let removed = self.store.unexpose(&record.id, port).await?;
        self.listeners.lock().remove(&(record.id.clone(), port));
        if removed || allow_missing {
            return Ok(removed);
        }
        let message = format!("port {port} of sandbox '{}' is not exposed", record.name);
        let next = format!("torpor expose list {}", record.name);
        Err(ApiError::new(Code::NotFound, "PORT_NOT_EXPOSED", message).about(&record).with("next", next))
    }

    /// The exposed ports of a sandbox, or of all when none is named.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub async fn exposed(&self, sandbox: Option<&str>) -> Result<Vec<ExposedView>, ApiError> {
        let id = match sandbox {
            Some(name) => Some(self.store.get(name).await?.id),
            None => None,
        };
        let rows = self.store.exposed(id.as_ref()).await?;
        Ok(rows.into_iter().map(|row| self.listeners.view(row)).collect())
    }

    /// Listens for every row until the gateway ends; ports of sandboxes that are deleted are given up.
    pub async fn look_after_ports(self: Arc<Self>) {
        let mut changes = self.store.subscribe();
        let mut next = Instant::now();
        loop {
            tokio::select! {
                () = self.end.cancelled() => break,
                () = tokio::time::sleep_until(next) => {
                    self.listen_for_all().await;
                    next = Instant::now() + LISTEN_AGAIN;
                }
                change = changes.recv() => match change {
                    Ok(change) if change.gone => {
                        let id = &change.record.id;
                        self.listeners.lock().retain(|(sandbox, _), _| sandbox != id);
                    }
                    Ok(_) => {}
                    Err(RecvError::Lagged(_)) => next = Instant::now(),
                    Err(RecvError::Closed) => break,
                },
            }
        }
        self.listeners.lock().clear();
    }

    /// Opens what is not open, and closes what has no row.
    async fn listen_for_all(self: &Arc<Self>) {
        let _changing = self.listeners.changing.lock().await;
        let rows = match self.store.exposed(None).await {
            Ok(rows) => rows,
            Err(error) => return tracing::error!(%error, "the exposed ports can't be read"),
        };
        let known: HashSet<Key> = rows.iter().map(|row| (row.sandbox.clone(), row.port)).collect();
        self.listeners.lock().retain(|key, _| known.contains(key));
        for row in &rows {
            let key = (row.sandbox.clone(), row.port);
            if self.listeners.is_open(&key) {
                continue;
            }
            let bound = TcpListener::bind(row.host).await;
            if let Err(error) = &bound {
                let (name, port, host) = (&row.name, row.port, row.host);
                tracing::warn!(name, port, %host, %error, "an exposed port can't be listened for; it is tried again");
            }
            self.listen(row, bound);
        }
    }

    /// Takes connections from now on, in place of those who did before.
    fn listen(self: &Arc<Self>, row: &Exposed, socket: io::Result<TcpListener>) {
        let (connections, end) = (Arc::<AtomicU32>::default(), self.end.child_token());
        let problem = socket.as_ref().err().map(|error| format!("listen on {}: {error}", row.host));
        if let Ok(socket) = socket {
            let port = Port {
                service: Arc::downgrade(self),
                id: row.sandbox.clone(),
                port: row.port,
                connections: connections.clone(),
                end: end.clone(),
            };
            tokio::spawn(port.accept(socket));
        }
        let listener = Listener { connections, end, problem };
        self.listeners.lock().insert((row.sandbox.clone(), row.port), listener);
    }

    /// The way to the agent of a sandbox, which is resumed when it is suspended and `wake` says so; true: it was waited
    /// for. Many who ask at the same time share one resume.
    ///
    /// # Errors
    /// As [`Service::connect`], and what kept it from becoming Ready.
    pub async fn reach(
        &self,
        id: &SandboxId,
        wake: bool,
        why: &str,
    ) -> Result<(Record, Channel, CancellationToken, bool), ApiError> {
        let until = Instant::now() + WAKE_LIMIT;
        let mut waited = false;
        loop {
            let error = match self.connect(id.as_str()).await {
                Ok((record, channel, session)) => return Ok((record, channel, session, waited)),
                Err(error) => error,
            };
            let record = self.store.get(id.as_str()).await?;
            match record.state.phase {
                Phase::Suspended | Phase::Suspending if wake => {
                    let event = Event::Request(Request::Resume { cold_if_needed: false });
                    let why = format!("resume: {why}");
                    self.store.request(id.to_string(), event, why, None, None).await?;
                }
                phase if wake && phase.is_booting() => {}
                // It may have become Ready in between.
                Phase::Ready if !waited && error.code == Code::FailedPrecondition => {}
                _ => return Err(error),
            }
            waited = true;
            match timeout_at(until, self.wait(id, Phase::Ready)).await {
                Ok(ready) => drop(ready?),
                Err(_) => return Err(ApiError::not_ready(&self.store.get(id.as_str()).await?)),
            }
        }
    }

    /// A connection to a port of a sandbox, as [`Service::reach`] leads there, and the session that it ends with.
    ///
    /// # Errors
    /// Those of [`Service::reach`], that the sandbox left Ready meanwhile, and why the port takes no connection.
    pub async fn reach_port(
        &self,
        id: &SandboxId,
        port: u16,
        wake: bool,
        why: &str,
    ) -> Result<(Record, Forward, CancellationToken), ApiError> {
        let (record, channel, session, woken) = self.reach(id, wake, why).await?;
        let opened = tokio::select! {
            opened = connect(channel, port, woken) => Some(opened),
            () = session.cancelled() => None,
        };
        match opened {
            Some(Ok(forward)) => Ok((record, forward, session)),
            Some(Err(error)) if !session.is_cancelled() => Err(error.answer(&record, port)),
            _ => Err(ApiError::not_ready(&self.store.get(id.as_str()).await?)),
        }
    }
}

/// Who listens for one exposed port.
#[derive(Clone)]
struct Port {
    service: Weak<Service>,
    id: SandboxId,
    port: u16,
    connections: Arc<AtomicU32>,
    end: CancellationToken,
}

impl Port {
    async fn accept(self, socket: TcpListener) {
        loop {
            let accepted = tokio::select! {
                accepted = socket.accept() => accepted,
                () = self.end.cancelled() => return,
            };
            match accepted {
                Ok((stream, _)) => drop(tokio::spawn(self.clone().serve(stream))),
                // Mostly no descriptor left.
                Err(_) => sleep(ACCEPT_AGAIN).await,
            }
        }
    }

    async fn serve(self, mut stream: TcpStream) {
        let Some(service) = self.service.upgrade() else { return };
        let counted = Counted::one_more(&self.connections);
        let place = service.listeners.places.try_acquire();
        let served = if place.is_err() || counted.number > CONNECTIONS_OF_PORT {
            Err(ApiError::new(
                Code::ResourceExhausted,
                "TOO_MANY_CONNECTIONS",
                "too many connections at once",
            ))
        } else {
            tokio::select! {
                served = self.carry(&service, &mut stream) => served,
                () = self.end.cancelled() => {
                    forward::reset(&stream);
                    Ok(())
                }
            }
        };
        if let Err(error) = served {
            tracing::debug!(id = %self.id, port = self.port, %error, "a connection was answered");
            tokio::select! {
                () = http::answer(&mut stream, &error) => {}
                () = self.end.cancelled() => {}
            }
        }
    }

    async fn carry(&self, service: &Arc<Service>, stream: &mut TcpStream) -> Result<(), ApiError> {
        let row = service.store.exposed_port(&self.id, self.port).await?;
        let wake = row.is_some_and(|row| row.wake);
        let why = format!("a connection to port {}", self.port);
        let (_, forward, session) = service.reach_port(&self.id, self.port, wake, &why).await?;
        forward::carry(stream, forward, &session).await;
        Ok(())
    }
}

/// Connects to a port. A server in a sandbox that was just woken may take a while to listen.
async fn connect(channel: Channel, port: u16, woken: bool) -> Result<Forward, NoForward> {
    let until = Instant::now() + if woken { SERVER_LIMIT } else { Duration::ZERO };
    loop {
        match forward::open(channel.clone(), port).await {
            Err(NoForward::Refused(_)) if Instant::now() < until => sleep(SERVER_AGAIN).await,
            opened => return opened,
        }
    }
}

/// One of the connections, counted to its drop.
struct Counted<'a> {
    connections: &'a AtomicU32,
    number: u32,
}

impl<'a> Counted<'a> {
    fn one_more(connections: &'a AtomicU32) -> Self {
        Self { connections, number: connections.fetch_add(1, Ordering::Relaxed) + 1 }
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn open(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ApiError> {
    let socket = TcpListener::bind(address).await.map_err(|error| cannot_listen(address, &error))?;
    let address = socket.local_addr().map_err(ApiError::internal)?;
    Ok((socket, address))
}

fn parse_host(text: &str) -> Result<SocketAddr, ApiError> {
    text.parse().map_err(|_| {
        let problem = format!(
            "'{}' is not an address and a port of the host, as in 127.0.0.1:8080 or [::1]:8080",
            text.escape_debug()
        );
        ApiError::invalid("host", problem)
    })
}

/// Whether an address that is in use for a port already is what is wanted.
fn fits(wanted: Option<SocketAddr>, kept: SocketAddr) -> bool {
    wanted.is_none_or(|wanted| wanted == kept || (wanted.ip() == kept.ip() && wanted.port() == 0))
}

fn cannot_listen(address: SocketAddr, error: &io::Error) -> ApiError {
    let message = format!("host: listen on {address}: {error}");
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            let error = ApiError::new(Code::AlreadyExists, "HOST_PORT_TAKEN", message);
            error.with("field", "host").with("next", "another --host, or none for a free port")
        }
        _ => ApiError::new(Code::InvalidArgument, "INVALID_ARGUMENT", message).with("field", "host"),
    }
}
