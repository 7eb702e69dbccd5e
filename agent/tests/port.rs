//! The agent's own port in a pod: who is let in, who isn't, and what those can do who aren't.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::{Agent, Client, LIMIT};
use hyper_util::rt::TokioIo;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose as Usage, IsCa, KeyPair,
    date_time_ymd,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore, SupportedProtocolVersion,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
        version::{TLS12, TLS13},
    },
};
use tonic::{Code, Status, transport::Endpoint};
use torpor_proto::agent::v1::{EnrollRequest, EnrollResponse, StatusRequest, agent_client::AgentClient};

const HOST: &str = "gateway.test.internal";
const POD: &str = "pod.test.internal";
const DAY: i64 = 24 * 3600;

/// Signs for hosts and agents.
struct Authority(CertifiedIssuer<'static, KeyPair>);

struct Leaf {
    certificate: CertificateDer<'static>,
    key: KeyPair,
}

fn params(name: &str, from: i64, to: i64) -> CertificateParams {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
    let at = |offset: i64| date_time_ymd(1970, 1, 1) + Duration::from_secs((now + offset) as u64);
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    (params.not_before, params.not_after) = (at(from), at(to));
    params
}

impl Authority {
    fn new() -> Self {
        let mut params = params("authority.test.internal", -DAY, DAY);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn sign(&self, name: &str, usage: Usage, from: i64, to: i64) -> Leaf {
        let mut params = params(name, from, to);
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        Leaf { certificate: params.signed_by(&key, &self.0).unwrap().der().clone(), key }
    }

    fn host(&self) -> Leaf {
        self.sign(HOST, Usage::ClientAuth, -DAY, DAY)
    }

    fn trusting(&self, shows: Option<Leaf>, version: &'static SupportedProtocolVersion) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(roots);
        match shows {
            None => config.with_no_client_auth(),
            Some(leaf) => {
                let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(leaf.key.serialize_der()));
                config.with_client_auth_cert(vec![leaf.certificate], key).unwrap()
            }
        }
    }
}

/// A pod's agent on a loopback address of its own.
struct Pod {
    _agent: Agent,
    authority: Authority,
    address: SocketAddr,
}

fn request(authority: &Authority, address: SocketAddr) -> EnrollRequest {
    let leaf = authority.sign(POD, Usage::ServerAuth, -DAY, DAY);
    EnrollRequest {
        run: 1,
        certificate: leaf.certificate.to_vec().into(),
        key: leaf.key.serialize_der().into(),
        authority: authority.0.der().to_vec().into(),
        host_name: HOST.to_owned(),
        addresses: vec![address.ip().to_string()],
        port: address.port().into(),
    }
}

/// An address that is nobody else's, with a port that is free there.
fn address() -> SocketAddr {
    let ip = [127, 70, std::process::id() as u8, 1];
    std::net::TcpListener::bind((std::net::Ipv4Addr::from(ip), 0)).unwrap().local_addr().unwrap()
}

async fn enroll(client: &mut Client, request: EnrollRequest) -> Result<EnrollResponse, Status> {
    Ok(client.enroll(request).await?.into_inner())
}

impl Pod {
    async fn new() -> Self {
        let (agent, authority, address) = (Agent::by("--pod").await, Authority::new(), address());
        let mut client = agent.ready().await;
        let answer = enroll(&mut client, request(&authority, address)).await.unwrap();
        assert_eq!(answer.addresses, [address.ip().to_string()]);
        assert_eq!(answer.port, u32::from(address.port()));
        Self { _agent: agent, authority, address }
    }

    async fn host(&self) -> Client {
        let config = self.authority.trusting(Some(self.authority.host()), &TLS13);
        client(let_in(self.address, config).await.unwrap()).await
    }
}

/// The agent's first word, when there is one.
async fn let_in(address: SocketAddr, config: ClientConfig) -> io::Result<TlsStream<TcpStream>> {
    let work = async {
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from(POD).unwrap();
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        assert_eq!(stream.read_u8().await?, 1);
        Ok(stream)
    };
    timeout(LIMIT, work).await.unwrap()
}

async fn client(stream: TlsStream<TcpStream>) -> Client {
    let mut once = Some(stream);
    let endpoint = Endpoint::from_static("http://agent");
    let channel = endpoint.connect_with_connector(tower::service_fn(move |_| {
        let stream = once.take();
        async move { stream.map(TokioIo::new).ok_or_else(|| io::Error::other("it is over")) }
    }));
    AgentClient::new(channel.await.unwrap())
}

async fn run_of(client: &mut Client) -> u64 {
    timeout(LIMIT, client.status(StatusRequest {})).await.unwrap().unwrap().into_inner().run
}

#[tokio::test]
async fn the_host_is_let_in_and_nobody_else() {
    let pod = Pod::new().await;
    assert_eq!(run_of(&mut pod.host().await).await, 1);
    let (ours, strange) = (&pod.authority, Authority::new());
    let cases: [(&str, Option<Leaf>); 7] = [
        ("no certificate", None),
        ("somebody else's authority", Some(strange.host())),
        ("another agent's certificate", Some(ours.sign("other.test.internal", Usage::ServerAuth, -DAY, DAY))),
        ("an agent's certificate with the host's name", Some(ours.sign(HOST, Usage::ServerAuth, -DAY, DAY))),
        ("a client of another name", Some(ours.sign("other.test.internal", Usage::ClientAuth, -DAY, DAY))),
        ("expired", Some(ours.sign(HOST, Usage::ClientAuth, -2 * DAY, -DAY))),
        ("not yet good", Some(ours.sign(HOST, Usage::ClientAuth, DAY, 2 * DAY))),
    ];
    for (what, leaf) in cases {
        assert!(let_in(pod.address, ours.trusting(leaf, &TLS13)).await.is_err(), "{what}");
    }
    assert_eq!(run_of(&mut pod.host().await).await, 1, "the host still is");
}

#[tokio::test]
async fn what_is_no_tls_1_3_gets_no_answer() {
    let pod = Pod::new().await;
    let older = pod.authority.trusting(Some(pod.authority.host()), &TLS12);
    assert!(let_in(pod.address, older).await.is_err());
    for text in
        ["GET / HTTP/1.1\r\nHost: a\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\0", "\u{16}\u{3}\u{1}"]
    {
        let mut stream = TcpStream::connect(pod.address).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut said = Vec::new();
        // A reset is an end as well.
        let _ = timeout(LIMIT, stream.read_to_end(&mut said)).await.expect("it ends");
        // An alert of TLS at most.
        assert!(said.is_empty() || said[0] == 21 && said.len() < 16, "{text:?}: {said:?}");
    }
    assert_eq!(run_of(&mut pod.host().await).await, 1);
}

#[tokio::test]
async fn a_handshake_that_goes_nowhere_is_ended() {
    let pod = Pod::new().await;
    for first in [&b""[..], b"\x16\x03\x01\x02\x00\x01"] {
        let mut stream = TcpStream::connect(pod.address).await.unwrap();
        stream.write_all(first).await.unwrap();
        let mut said = Vec::new();
        let _ = timeout(LIMIT, stream.read_to_end(&mut said)).await.expect("it is ended");
        assert!(said.is_empty(), "{said:?}");
    }
}

#[tokio::test]
async fn a_flood_of_connections_keeps_nobody_out_and_cuts_nothing() {
    let pod = Pod::new().await;
    let mut before = pod.host().await;
    let mut flood = Vec::new();
    for _ in 0..200 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.99.99.99:0".parse().unwrap()).unwrap();
        flood.push(socket.connect(pod.address).await.unwrap());
    }
    assert_eq!(run_of(&mut before).await, 1, "what there was goes on");
    assert_eq!(run_of(&mut pod.host().await).await, 1, "and the host gets in from where it is");
    // From the host's own address, too, what there was goes on; and when they are gone the host gets in again.
    for _ in 0..200 {
        flood.push(TcpStream::connect(pod.address).await.unwrap());
    }
    assert_eq!(run_of(&mut before).await, 1);
    drop(flood);
    for _ in 0..600 {
        let config = pod.authority.trusting(Some(pod.authority.host()), &TLS13);
        if let Ok(stream) = let_in(pod.address, config).await {
            assert_eq!(run_of(&mut client(stream).await).await, 1);
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the host never gets in again");
}

#[tokio::test]
async fn other_credentials_take_the_place_and_the_port_may_move() {
    let pod = Pod::new().await;
    let mut before = pod.host().await;
    let other = Authority::new();
    enroll(&mut before, request(&other, pod.address)).await.unwrap();
    assert!(let_in(pod.address, other.trusting(Some(pod.authority.host()), &TLS13)).await.is_err());
    let mut after =
        client(let_in(pod.address, other.trusting(Some(other.host()), &TLS13)).await.unwrap()).await;
    assert_eq!(run_of(&mut after).await, 1);
    let moved = address();
    enroll(&mut after, request(&other, moved)).await.unwrap();
    assert!(TcpStream::connect(pod.address).await.is_err(), "nobody listens there any more");
    let_in(moved, other.trusting(Some(other.host()), &TLS13)).await.unwrap();
    assert_eq!((run_of(&mut before).await, run_of(&mut after).await), (1, 1), "connections stay");
}

#[tokio::test]
async fn credentials_are_for_a_configured_pods_present_run() {
    let (authority, address) = (Authority::new(), address());
    let wanted = request(&authority, address);
    let ordinary = Agent::start().await;
    let refused = enroll(&mut ordinary.ready().await, wanted.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let agent = Agent::by("--pod").await;
    let refused = enroll(&mut agent.dial().await, wanted.clone()).await.unwrap_err();
    assert!(
        refused.code() == Code::FailedPrecondition && refused.message().contains("Configure"),
        "{refused}"
    );
    let mut client = agent.ready().await;
    let refused = enroll(&mut client, EnrollRequest { run: 2, ..wanted.clone() }).await.unwrap_err();
    assert_eq!(refused.code(), Code::Aborted, "{refused}");
    let other = authority.sign(POD, Usage::ServerAuth, -DAY, DAY);
    let mixed = EnrollRequest { key: other.key.serialize_der().into(), ..wanted.clone() };
    let refused = enroll(&mut client, mixed).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(TcpStream::connect(address).await.is_err(), "nothing was opened");
}

#[tokio::test]
async fn a_port_that_is_taken_is_said_and_every_address_that_can_be_is_listened_on() {
    let agent = Agent::by("--pod").await;
    let mut client = agent.ready().await;
    let (authority, address) = (Authority::new(), address());
    let taken = std::net::TcpListener::bind(address).unwrap();
    let refused = enroll(&mut client, request(&authority, address)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains(&address.to_string()), "{refused}");
    let six = std::net::TcpListener::bind(("::1", address.port())).is_ok();
    let both = EnrollRequest {
        addresses: vec![address.ip().to_string(), "::1".to_owned()],
        ..request(&authority, address)
    };
    if six {
        let answer = enroll(&mut client, both.clone()).await.unwrap();
        assert_eq!(answer.addresses, ["::1"], "the other one is taken");
        let config = authority.trusting(Some(authority.host()), &TLS13);
        let_in(SocketAddr::new("::1".parse().unwrap(), address.port()), config).await.unwrap();
    }
    drop(taken);
    let answer = enroll(&mut client, both).await.unwrap();
    assert_eq!(answer.addresses.len(), 1 + usize::from(six));
    let_in(address, authority.trusting(Some(authority.host()), &TLS13)).await.unwrap();
}

/// Whether a process of root that may not trace others opens the memory of another one.
fn is_open_to_others(process: u32) -> bool {
    let file = format!("if=/proc/{process}/mem");
    let mut dd = std::process::Command::new("setpriv");
    dd.args(&UNTRACED[1..]).args(["dd", &file, "of=/dev/null", "count=0"]).output().unwrap().status.success()
}

const UNTRACED: [&str; 4] = ["setpriv", "--bounding-set", "-sys_ptrace", "--"];

/// In a pod the first process and those of its user are root with the same capabilities.
#[tokio::test]
async fn no_process_beside_it_reads_its_memory() {
    if !common::is_root("no_process_beside_it_reads_its_memory") {
        return;
    }
    let ordinary = Agent::within(&UNTRACED, "--serve-unix").await;
    let pods = Agent::within(&UNTRACED, "--pod").await;
    assert!(is_open_to_others(ordinary.process.id()), "such a one can be looked into");
    assert!(!is_open_to_others(pods.process.id()));
}
