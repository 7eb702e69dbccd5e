//! An issuer of OIDC tokens whose keys are at a URL: read when they are needed, anew when they are changed, and no more often
//! than that, whatever tokens come in.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{
    fs,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use common::process::Process;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, pki_types::PrivateKeyDer},
};
use tonic::{Code, Request, Status, transport::Channel};
use torpor_gateway::{Config, config::OidcConfig};
use torpor_proto::v1::{self, access_client::AccessClient};

const PATIENCE: Duration = Duration::from_secs(60);
const ISSUER: &str = "https://issuer.example";

/// Not a test: the gateway's own process, started by the test below with the certificate that it trusts.
#[test]
fn the_gateway_process() {
    common::process::serve(config);
}

fn config(dir: &Path) -> Config {
    let jwks = fs::read_to_string(dir.join("url")).unwrap_or_else(|_| "https://localhost:1/".into());
    Config {
        state_dir: dir.join("state"),
        run_dir: dir.join("run"),
        listen: format!("unix://{}/gateway.sock", dir.display()),
        drivers: vec!["sim".into()],
        oidc: Some(OidcConfig {
            issuer: ISSUER.into(),
            audience: "torpor".into(),
            jwks,
            subject_claim: "sub".into(),
        }),
        ..Config::default()
    }
}

/// What the issuer answers at present: keys, or a failure.
#[derive(Clone, Default)]
struct Keys {
    answer: Arc<Mutex<Option<Value>>>,
    asked: Arc<AtomicU32>,
}

impl Keys {
    fn set(&self, keys: &[(&str, &rcgen::KeyPair)]) {
        let text = |bytes: &[u8]| base64::Engine::encode(&base64::prelude::BASE64_URL_SAFE_NO_PAD, bytes);
        let keys: Vec<Value> = keys
            .iter()
            .map(|(kid, key)| {
                let point = rcgen::PublicKeyData::der_bytes(*key).to_vec();
                json!({"kty": "EC", "crv": "P-256", "kid": kid, "x": text(&point[1..33]), "y": text(&point[33..65])})
            })
            .collect();
        *self.answer.lock().unwrap() = Some(json!({ "keys": keys }));
    }

    fn fail(&self) {
        *self.answer.lock().unwrap() = None;
    }

    fn asked(&self) -> u32 {
        self.asked.load(Ordering::SeqCst)
    }

    /// Serves them over TLS for as long as the test lasts; the port.
    async fn serve(&self, tls: ServerConfig) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (this, acceptor) = (self.clone(), TlsAcceptor::from(Arc::new(tls)));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (this, acceptor) = (this.clone(), acceptor.clone());
                tokio::spawn(async move {
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let _ = stream.read(&mut [0; 4096]).await;
                    this.asked.fetch_add(1, Ordering::SeqCst);
                    let answer = this.answer.lock().unwrap().clone();
                    let (status, body) = match answer {
                        Some(keys) => ("200 OK", keys.to_string()),
                        None => ("500 Broken", String::new()),
                    };
                    let length = body.len();
                    let all = format!(
                        "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
                    );
                    let _ = stream.write_all(all.as_bytes()).await;
                    let _ = stream.shutdown().await;
                });
            }
        });
        port
    }
}

fn tls(folder: &Path) -> ServerConfig {
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = rcgen::CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap()).unwrap();
    fs::write(folder.join("roots.pem"), authority.pem()).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    let private = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], private)
        .unwrap()
}

fn signed(kid: Option<&str>, key: &rcgen::KeyPair) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let claims = json!({ "sub": "alice", "iss": ISSUER, "aud": ["other", "torpor"], "exp": now + 300 });
    let header = Header { kid: kid.map(str::to_owned), ..Header::new(Algorithm::ES256) };
    jsonwebtoken::encode(&header, &claims, &EncodingKey::from_ec_der(&key.serialize_der())).unwrap()
}

async fn who(channel: &Channel, token: &str) -> Result<String, Status> {
    let mut request = Request::new(v1::WhoAmIRequest {});
    request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    let known = AccessClient::new(channel.clone()).who_am_i(request).await?.into_inner();
    Ok(known.subject)
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_at_a_url_are_read_anew_when_they_change_and_no_token_makes_the_gateway_ask_all_the_time() {
    let mut gateway = Process::new(config, PATIENCE);
    let keys = Keys::default();
    let port = keys.serve(tls(gateway.dir.path())).await;
    fs::write(gateway.dir.path().join("url"), format!("https://localhost:{port}/keys")).unwrap();
    gateway.set("SSL_CERT_FILE", gateway.dir.path().join("roots.pem"));
    let [one, two, three] = [(); 3].map(|()| rcgen::KeyPair::generate().unwrap());
    keys.set(&[("one", &one)]);
    gateway.start(None);
    let channel = gateway.connect().await.unwrap();
    assert_eq!(who(&channel, &signed(Some("one"), &one)).await.unwrap(), "oidc:alice");
    // The only key there is needs no name; another one of its name is none.
    assert_eq!(who(&channel, &signed(None, &one)).await.unwrap(), "oidc:alice");
    assert_eq!(who(&channel, &signed(Some("one"), &two)).await.unwrap_err().code(), Code::Unauthenticated);
    assert_eq!(keys.asked(), 1);

    // Keys that nobody has heard of, by whom and how many ever: asked once in a while.
    keys.set(&[("two", &two), ("three", &three)]);
    let begun = Instant::now();
    for n in 0..50 {
        let error = who(&channel, &signed(Some(&format!("made-up-{n}")), &one)).await.unwrap_err();
        assert_eq!(error.code(), Code::Unauthenticated);
    }
    let taken = loop {
        match who(&channel, &signed(Some("two"), &two)).await {
            Ok(subject) => break subject,
            Err(error) => assert_eq!(error.code(), Code::Unauthenticated),
        }
        assert!(begun.elapsed() < PATIENCE, "the new key is not read");
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    assert_eq!((taken.as_str(), keys.asked()), ("oidc:alice", 2));
    // One that was taken away is good for nothing, and with two of them a token must say which.
    assert_eq!(who(&channel, &signed(Some("one"), &one)).await.unwrap_err().code(), Code::Unauthenticated);
    assert_eq!(who(&channel, &signed(None, &two)).await.unwrap_err().code(), Code::Unauthenticated);

    // An issuer that fails takes nothing away from what is known, and tells nobody how it fails.
    keys.fail();
    assert_eq!(who(&channel, &signed(Some("three"), &three)).await.unwrap(), "oidc:alice");
    gateway.kill();
    gateway.start(None);
    let channel = gateway.connect().await.unwrap();
    let error = who(&channel, &signed(Some("two"), &two)).await.unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated);
    assert!(!error.message().contains("localhost"), "{error:?}");
    gateway.kill();
}
