//! A port of the agent's own, in a pod that its host can reach: TLS 1.3 in which both sides show a certificate. What the
//! agent shows and whom it lets in is handed over by the host for each run (`Enroll`) and stays in memory.
//!
//! Everybody in the sandbox and in its network may connect. Nobody gets an answer but the host, and nobody can keep the
//! host from getting in: handshakes are bounded in time, in number, and in number from one address.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        self, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme,
        client::{danger::HandshakeSignatureValid, verify_server_name},
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
        server::{
            NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier,
            danger::{ClientCertVerified, ClientCertVerifier},
        },
        version::TLS13,
    },
};
use tonic::Status;
use torpor_proto::agent::v1::{EnrollRequest, EnrollResponse};

use crate::{agent::Agent, serve};

/// Handshakes at once, of all and of one address.
const HANDSHAKES: usize = 64;
const OF_ONE: usize = 4;
/// For one handshake.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// Connections of hosts at once: there is one, and what an earlier one has left.
const CONNECTIONS: usize = 32;
/// A host that answers no ping for so long twice over is gone.
const ALIVE: Duration = Duration::from_secs(30);
/// Written when a connection has been let in: in TLS 1.3 a client that was refused would not know otherwise.
const LET_IN: u8 = 1;
/// After a failed accept, so that a lasting fault doesn't take the whole CPU.
const PAUSE: Duration = Duration::from_millis(200);
/// Addresses of one pod.
const ADDRESSES: usize = 8;

/// The port, closed until credentials come.
#[derive(Default)]
pub struct Port {
    open: tokio::sync::Mutex<Option<Open>>,
}

struct Open {
    at: Vec<SocketAddr>,
    credentials: watch::Sender<Arc<ServerConfig>>,
    listeners: Vec<JoinHandle<()>>,
}

impl Open {
    /// Returns when the port is free.
    async fn close(self) {
        for listener in self.listeners {
            listener.abort();
            // Cancelled is what it was to be.
            let _ = listener.await;
        }
    }
}

impl Port {
    /// Answers by these credentials from now on.
    ///
    /// # Errors
    /// Credentials or addresses that make no sense; an address where nothing can be listened on.
    pub async fn open(&self, agent: &Arc<Agent>, asked: EnrollRequest) -> Result<EnrollResponse, Status> {
        let wanted = addresses(&asked).map_err(Status::invalid_argument)?;
        let config = credentials(&asked).map_err(Status::invalid_argument)?;
        let mut open = self.open.lock().await;
        if let Some(open) = open.as_ref().filter(|open| open.at == wanted) {
            open.credentials.send_replace(config);
            return Ok(answer(&wanted));
        }
        if let Some(before) = open.take() {
            before.close().await;
        }
        let (credentials, _) = watch::channel(config);
        let gate = Arc::new(Gate::new());
        let (mut at, mut listeners, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for address in wanted {
            match TcpListener::bind(address).await {
                Ok(listener) => {
                    let served = serve(agent.clone(), listener, credentials.subscribe(), gate.clone());
                    listeners.push(tokio::spawn(served));
                    at.push(address);
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    failed.push(format!("{address} is taken by a program of the sandbox"));
                }
                Err(error) => failed.push(format!("{address}: {error}")),
            }
        }
        if at.is_empty() {
            return Err(Status::failed_precondition(failed.join("; ")));
        }
        let answer = answer(&at);
        *open = Some(Open { at, credentials, listeners });
        Ok(answer)
    }
}

fn answer(at: &[SocketAddr]) -> EnrollResponse {
    EnrollResponse {
        addresses: at.iter().map(|address| address.ip().to_string()).collect(),
        port: at.first().map_or(0, |address| address.port().into()),
    }
}

fn addresses(asked: &EnrollRequest) -> Result<Vec<SocketAddr>, String> {
    let port = u16::try_from(asked.port).ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| format!("{} is not a port", asked.port))?;
    if !(1..=ADDRESSES).contains(&asked.addresses.len()) {
        return Err(format!("{} addresses: 1 to {ADDRESSES} are possible", asked.addresses.len()));
    }
    let all = asked.addresses.iter().map(|text| {
        let address =
            text.parse::<IpAddr>().map_err(|error| format!("'{}': {error}", text.escape_debug()))?;
        if address.is_unspecified() || address.is_multicast() {
            return Err(format!("{address} is not an address of a pod"));
        }
        Ok(SocketAddr::new(address, port))
    });
    all.collect()
}

fn credentials(asked: &EnrollRequest) -> Result<Arc<ServerConfig>, String> {
    let wrong = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
    let name = ServerName::try_from(asked.host_name.clone()).map_err(|error| wrong("host_name", &error))?;
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from(asked.authority.to_vec());
    roots.add(authority).map_err(|error| wrong("authority", &error))?;
    let provider = Arc::new(ring::default_provider());
    let chain = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let chain = chain.build().map_err(|error| wrong("authority", &error))?;
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(asked.key.to_vec()));
    let certificates = vec![CertificateDer::from(asked.certificate.to_vec())];
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(|error| wrong("TLS 1.3", &error))?
        .with_client_cert_verifier(Arc::new(OnlyTheHost { chain, name }))
        .with_single_cert(certificates, key)
        .map_err(|error| wrong("certificate and key", &error))?;
    // Every connection shows its certificate: one that was good for other credentials is no ticket for these.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// Lets in who has a certificate for clients, signed by the host's authority, with the host's name: those of agents have
/// other names.
#[derive(Debug)]
struct OnlyTheHost {
    chain: Arc<dyn ClientCertVerifier>,
    name: ServerName<'static>,
}

impl ClientCertVerifier for OnlyTheHost {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.chain.verify_client_cert(end_entity, intermediates, now)?;
        verify_server_name(&ParsedCertificate::try_from(end_entity)?, &self.name)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

/// Handshakes that are under way, and connections.
struct Gate {
    under_way: Mutex<HashMap<IpAddr, usize>>,
    connections: Semaphore,
}

impl Gate {
    fn new() -> Self {
        Self { under_way: Mutex::default(), connections: Semaphore::new(CONNECTIONS) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a handshake, while there are some.
    fn enter(self: &Arc<Self>, peer: IpAddr) -> Option<Place> {
        let mut all = self.lock();
        let full = all.values().sum::<usize>() >= HANDSHAKES;
        let of_one = all.get(&peer).copied().unwrap_or_default();
        if full || of_one >= OF_ONE {
            return None;
        }
        all.insert(peer, of_one + 1);
        Some(Place { gate: self.clone(), peer })
    }
}

struct Place {
    gate: Arc<Gate>,
    peer: IpAddr,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.gate.lock();
        match all.get_mut(&self.peer) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(all.remove(&self.peer)),
        }
    }
}

async fn serve(
    agent: Arc<Agent>,
    listener: TcpListener,
    credentials: watch::Receiver<Arc<ServerConfig>>,
    gate: Arc<Gate>,
) {
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            sleep(PAUSE).await;
            continue;
        };
        // Without a place it is closed: the host tries again, or comes another way.
        let Some(place) = gate.enter(peer.ip()) else { continue };
        let config = credentials.borrow().clone();
        tokio::spawn(connection(agent.clone(), stream, config, gate.clone(), place));
    }
}

async fn connection(
    agent: Arc<Agent>,
    stream: TcpStream,
    config: Arc<ServerConfig>,
    gate: Arc<Gate>,
    place: Place,
) {
    // Only slower when it can't be set.
    let _ = stream.set_nodelay(true);
    let greet = async {
        let mut stream = TlsAcceptor::from(config).accept(stream).await?;
        let connected = gate.connections.try_acquire().map_err(io::Error::other)?;
        stream.write_all(&[LET_IN]).await?;
        stream.flush().await?;
        io::Result::Ok((stream, connected))
    };
    let greeted = timeout(HANDSHAKE, greet).await;
    drop(place);
    let Ok(Ok((stream, _connected))) = greeted else { return };
    serve::connection(agent, stream, Some(ALIVE)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_can_not_take_every_place() {
        let gate = Arc::new(Gate::new());
        let (one, other) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let places: Vec<Place> = (0..100).filter_map(|_| gate.enter(one)).collect();
        assert_eq!(places.len(), OF_ONE);
        let _others = gate.enter(other).unwrap();
        drop(places);
        assert_eq!(gate.lock().len(), 1);
        assert!(gate.enter(one).is_some());
    }

    #[test]
    fn all_addresses_together_have_so_many_places() {
        let gate = Arc::new(Gate::new());
        let places: Vec<Place> = (0..255).filter_map(|n| gate.enter([10, 0, 0, n].into())).collect();
        assert_eq!(places.len(), HANDSHAKES);
    }

    #[test]
    fn only_addresses_of_pods_are_listened_on() {
        let asked = |addresses: &[&str], port| EnrollRequest {
            addresses: addresses.iter().map(|text| (*text).to_owned()).collect(),
            port,
            ..EnrollRequest::default()
        };
        let both = addresses(&asked(&["10.1.2.3", "fd00::3"], 7443)).unwrap();
        assert_eq!(both, ["10.1.2.3:7443".parse().unwrap(), "[fd00::3]:7443".parse().unwrap()]);
        for (addresses_, port) in [
            (&["0.0.0.0"][..], 7443),
            (&["::"], 7443),
            (&["224.0.0.1"], 7443),
            (&["name"], 7443),
            (&[], 7443),
            (&["10.0.0.1"; 9], 7443),
            (&["10.0.0.1"], 0),
            (&["10.0.0.1"], 70_000),
        ] {
            assert!(addresses(&asked(addresses_, port)).is_err(), "{addresses_:?} {port}");
        }
    }

    #[test]
    fn credentials_that_make_no_sense_are_refused() {
        let asked = EnrollRequest { host_name: "host.invalid".to_owned(), ..EnrollRequest::default() };
        let refused = credentials(&asked).unwrap_err();
        assert!(refused.contains("authority"), "{refused}");
        let refused =
            credentials(&EnrollRequest { host_name: "not a name".to_owned(), ..asked }).unwrap_err();
        assert!(refused.contains("host_name"), "{refused}");
    }
}
