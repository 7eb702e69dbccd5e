//! Where clients connect: the unix socket, and TCP with TLS. What a connection says of its other end goes with every
//! call that comes by it.

use std::{
    convert::Infallible,
    fs,
    io::{self, BufReader},
    net::{IpAddr, SocketAddr},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto::Builder, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, UnixListener},
    sync::Semaphore,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{self, RootCertStore, ServerConfig, server::WebPkiClientVerifier},
};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tower::{Service, ServiceExt as _};

use crate::{
    access::{Peer, certificate_subject},
    authority::Authorities,
    config::{Anonymous, TcpConfig},
    places::Places,
    serve::ServeError,
};

/// What may wait unread in one call of a client, bytes.
const STREAM_WINDOW: u32 = 1 << 20;
/// In all calls of a connection: far more than is ever reached, so that no call stops the others.
const CONNECTION_WINDOW: u32 = 1 << 30;
/// Calls of one connection at once.
pub const MOST_CALLS: u32 = 2000;
/// Connections of one listener at once.
const MOST_CONNECTIONS: usize = 4096;
/// Of one user of this host, or of one address of others: nobody who can merely connect keeps all others out.
const MOST_OF_ONE: usize = MOST_CONNECTIONS / 4 * 3;
/// What an HTTP/2 client says first, bytes; an HTTP/1 client's first line and `host` are longer.
const PREFACE: usize = 24;
/// For a TLS client to say who it is, for an HTTP/2 client to say that it is one, and for an HTTP/1 client to send its header.
const GREETING: Duration = Duration::from_secs(10);
/// A TCP client that doesn't answer for two of these is gone.
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// After a failed accept, for descriptors to come free.
const PAUSE: Duration = Duration::from_millis(100);

/// A listener that is open.
pub enum Listener {
    /// The unix socket.
    Unix(UnixListener),
    /// TCP.
    Tcp {
        /// Open.
        listener: TcpListener,
        /// How it is used.
        config: TcpConfig,
        /// None: plaintext.
        tls: Option<TlsAcceptor>,
    },
}

/// A socket with this mode. The state directory's lock is held, so a socket that is there already is a leftover.
pub fn unix(path: &Path, mode: u32) -> Result<Listener, ServeError> {
    let failed = |source| ServeError::Listen { at: path.display().to_string(), source };
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(failed)?;
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => {
            let busy = "another gateway answers there; choose another --listen";
            return Err(failed(io::Error::new(io::ErrorKind::AddrInUse, busy)));
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            // A file that is no socket refuses as well.
            let leftover = fs::symlink_metadata(path).map_err(failed)?;
            if !std::os::unix::fs::FileTypeExt::is_socket(&leftover.file_type()) {
                let message = "it is there and is no socket";
                return Err(failed(io::Error::new(io::ErrorKind::AlreadyExists, message)));
            }
            fs::remove_file(path).map_err(failed)?;
        }
        Err(_) => {}
    }
    // Narrow before it appears: nobody connects in between.
    let old = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o177));
    let listener = UnixListener::bind(path);
    nix::sys::stat::umask(old);
    let listener = listener.map_err(failed)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed)?;
    Ok(Listener::Unix(listener))
}

/// A TCP listener.
pub async fn tcp(config: &TcpConfig) -> Result<Listener, ServeError> {
    let failed = |source| ServeError::Listen { at: config.address.to_string(), source };
    let tls = match config.plaintext {
        true => None,
        false => Some(TlsAcceptor::from(Arc::new(tls(config).map_err(failed)?))),
    };
    let listener = TcpListener::bind(config.address).await.map_err(failed)?;
    Ok(Listener::Tcp { listener, config: config.clone(), tls })
}

fn certificates(path: &Path) -> io::Result<Vec<rustls::pki_types::CertificateDer<'static>>> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("certificate '{}': {e}", path.display()));
    let mut file = BufReader::new(fs::File::open(path).map_err(named)?);
    let all = rustls_pemfile::certs(&mut file).collect::<io::Result<Vec<_>>>().map_err(named)?;
    if all.is_empty() {
        return Err(named(io::Error::other("it holds no certificate in PEM form")));
    }
    Ok(all)
}

fn tls(config: &TcpConfig) -> io::Result<ServerConfig> {
    let chain = certificates(&config.certificate)?;
    let path: &PathBuf = &config.key;
    let named = |e: io::Error| io::Error::new(e.kind(), format!("key '{}': {e}", path.display()));
    let mut file = BufReader::new(fs::File::open(path).map_err(named)?);
    let key = rustls_pemfile::private_key(&mut file).map_err(named)?;
    let key = key.ok_or_else(|| named(io::Error::other("it holds no private key in PEM form")))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?;
    let builder = if config.client_ca.as_os_str().is_empty() {
        builder.with_no_client_auth()
    } else {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&config.client_ca)? {
            roots.add(certificate).map_err(io::Error::other)?;
        }
        // Without one a client may still come with a token.
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .allow_unauthenticated()
            .build()
            .map_err(io::Error::other)?;
        builder.with_client_cert_verifier(verifier)
    };
    let mut tls = builder.with_single_cert(chain, key).map_err(io::Error::other)?;
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(tls)
}

/// Serves a listener's connections until the end, then lets their calls end.
pub async fn serve<S>(listener: Listener, service: S, end: CancellationToken)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send,
{
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    // How many there are in all is bounded by the places.
    let shares = Places::new(usize::MAX, MOST_OF_ONE);
    loop {
        let next = async {
            let place = places.clone().acquire_owned().await.map_err(io::Error::other)?;
            Ok::<_, io::Error>((accept(&listener).await?, place))
        };
        let accepted = tokio::select! {
            accepted = next => accepted,
            () = end.cancelled() => break,
        };
        let ((stream, peer), place) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let Some(share) = shares.take(Whose::of(&peer)) else {
            tracing::debug!(?peer, "a connection too many of one peer is closed");
            continue;
        };
        let (service, watcher) = (service.clone(), graceful.watcher());
        let tls = match &listener {
            Listener::Tcp { tls, .. } => tls.clone(),
            Listener::Unix(_) => None,
        };
        tokio::spawn(async move {
            match (stream, tls) {
                (Stream::Unix(stream), _) => carry(stream, peer, service, watcher).await,
                (Stream::Tcp(stream), None) => carry(stream, peer, service, watcher).await,
                (Stream::Tcp(stream), Some(tls)) => {
                    let greeted = tokio::time::timeout(GREETING, tls.accept(stream)).await;
                    // Scanners and the like: nobody of ours.
                    let Ok(Ok(stream)) = greeted else { return };
                    let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
                    let subject = shown.and_then(|certificate| certificate_subject(certificate));
                    let Peer::Plain { from, .. } = peer else { return };
                    carry(stream, Peer::Tls { from, subject }, service, watcher).await;
                }
            }
            drop((place, share));
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

enum Stream {
    Unix(tokio::net::UnixStream),
    Tcp(tokio::net::TcpStream),
}

async fn accept(listener: &Listener) -> io::Result<(Stream, Peer)> {
    match listener {
        Listener::Unix(listener) => {
            let (stream, _) = listener.accept().await?;
            let uid = stream.peer_cred()?.uid();
            Ok((Stream::Unix(stream), Peer::Unix { uid }))
        }
        Listener::Tcp { listener, config, .. } => {
            let (stream, from): (_, SocketAddr) = listener.accept().await?;
            stream.set_nodelay(true)?;
            Ok((Stream::Tcp(stream), Peer::Plain { from, anonymous: config.anonymous }))
        }
    }
}

/// Whose share of the places a connection takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Whose {
    User(u32),
    Address(IpAddr),
}

impl Whose {
    fn of(peer: &Peer) -> Self {
        match peer {
            Peer::Unix { uid } => Self::User(*uid),
            Peer::Plain { from, .. } | Peer::Tls { from, .. } => Self::Address(from.ip().to_canonical()),
        }
    }
}

/// A connection that counts what its client has said, up to [`PREFACE`].
struct Heard<S> {
    inner: S,
    heard: Arc<AtomicUsize>,
    /// Of a unix connection: it has them changed.
    authorities: Option<Authorities>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Heard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(context, buffer);
        let fresh = buffer.filled().len() - before;
        if fresh > 0 && self.heard.load(Ordering::Relaxed) < PREFACE {
            self.heard.fetch_add(fresh, Ordering::Relaxed);
        }
        if fresh > 0
            && let Some(authorities) = &mut self.authorities
        {
            authorities.mend(&mut buffer.filled_mut()[before..]);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Heard<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

/// Whether a request names a loopback address as its host. A page in somebody's browser whose own name was made to
/// point here names that one, and gets no rights from having been let in to the machine.
fn speaks_of_this_machine<B>(request: &Request<B>) -> bool {
    let header = || request.headers().get(http::header::HOST)?.to_str().ok()?.parse().ok();
    let Some(authority) = request.uri().authority().cloned().or_else(header) else { return false };
    let host = authority.host().trim_matches(['[', ']']);
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

async fn carry<S>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: Peer,
    service: S,
    watcher: hyper_util::server::graceful::Watcher,
) where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send,
{
    let heard = Arc::new(AtomicUsize::new(0));
    let asked = heard.clone();
    let authorities = matches!(peer, Peer::Unix { .. }).then(Authorities::default);
    let named = tower::service_fn(move |mut request: Request<Incoming>| {
        asked.store(PREFACE, Ordering::Relaxed);
        let mut peer = peer.clone();
        if let Peer::Plain { anonymous, .. } = &mut peer
            && !speaks_of_this_machine(&request)
        {
            *anonymous = Anonymous::None;
        }
        request.extensions_mut().insert(peer);
        service.clone().oneshot(request.map(Body::new))
    });
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(MOST_CALLS)
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE);
    builder.http1().timer(TokioTimer::new()).header_read_timeout(GREETING);
    let stream = Heard { inner: stream, heard: heard.clone(), authorities };
    let connection =
        builder.serve_connection_with_upgrades(TokioIo::new(stream), TowerToHyperService::new(named));
    let silent = async {
        tokio::time::sleep(GREETING).await;
        if heard.load(Ordering::Relaxed) >= PREFACE {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        // A client that breaks off has its reasons.
        _ = watcher.watch(connection) => {}
        // One that doesn't even say how it speaks holds a place that others could use.
        () = silent => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_to_a_loopback_name_speak_of_this_machine() {
        let named = |host: &str| Request::builder().uri("/x").header("host", host).body(()).unwrap();
        for ours in ["127.0.0.1:7080", "localhost", "LOCALHOST:1", "[::1]:7080", "127.9.9.9"] {
            assert!(speaks_of_this_machine(&named(ours)), "{ours}");
        }
        for other in
            ["evil.example:7080", "127.0.0.1.evil.example", "localhost.evil.example", "", "192.0.2.1"]
        {
            assert!(!speaks_of_this_machine(&named(other)), "{other}");
        }
        let second =
            Request::builder().uri("http://evil.example/x").header("host", "localhost").body(()).unwrap();
        assert!(!speaks_of_this_machine(&second));
        assert!(!speaks_of_this_machine(&Request::builder().uri("/x").body(()).unwrap()));
    }
}
