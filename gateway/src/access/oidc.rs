//! Bearer tokens of an OIDC issuer, checked against its keys.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header, jwk::Jwk};
use serde_json::Value;

use crate::config::OidcConfig;

/// Keys are read anew after this long, and, for a token with an unknown key, after [`AT_MOST_EVERY`].
const FRESH: Duration = Duration::from_secs(600);
/// So that tokens with made-up keys don't make the gateway ask all the time.
const AT_MOST_EVERY: Duration = Duration::from_secs(10);
/// For the issuer to answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// A time far enough away, seconds since 1970.
const FAR: f64 = 1e11;
/// Most bytes of a key set.
const LARGEST: usize = 1 << 20;

/// What is wrong with a token or with the issuer's keys.
#[derive(Debug, thiserror::Error)]
pub enum OidcError {
    /// The token.
    #[error("the OIDC token is not accepted: {0}")]
    Token(#[from] jsonwebtoken::errors::Error),
    /// Not signed by a key that is known.
    #[error("the OIDC token is signed by key '{0}', which the issuer's key set doesn't hold")]
    Key(String),
    /// No algorithm with public keys.
    #[error("the OIDC token is signed with {0:?}; only signatures by public keys are accepted")]
    Algorithm(Algorithm),
    /// It says of nobody.
    #[error("the OIDC token has no '{0}'")]
    Claim(String),
    /// The keys.
    #[error("the OIDC issuer's keys ({from}) can't be read: {problem}")]
    Keys {
        /// The file or URL.
        from: String,
        /// Why.
        problem: String,
    },
}

impl OidcError {
    /// Whether it is no fault of the token's.
    pub fn is_ours(&self) -> bool {
        matches!(self, Self::Keys { .. })
    }
}

/// What was read of the issuer's keys.
#[derive(Default)]
struct Known {
    keys: Arc<Vec<Jwk>>,
    /// When they were read.
    read: Option<Instant>,
    /// When they were asked for, whatever came of it.
    tried: Option<Instant>,
}

/// A trusted issuer.
pub struct Oidc {
    config: OidcConfig,
    known: Arc<Mutex<Known>>,
    /// One asks at a time; the others go on with what is known, or wait for the answer when nothing is.
    asking: Arc<tokio::sync::Mutex<()>>,
}

impl Oidc {
    /// Trusts an issuer; its keys are read when they are needed.
    pub fn new(config: OidcConfig) -> Self {
        Self { config, known: Arc::default(), asking: Arc::default() }
    }

    /// The subject that a token speaks for, and when it expires.
    ///
    /// # Errors
    /// It is expired, for others, from another issuer, badly signed, or the issuer's keys can't be read.
    pub async fn subject(&self, token: &str) -> Result<(String, SystemTime), OidcError> {
        let header = decode_header(token)?;
        // A shared secret is none when the key set is public.
        if matches!(header.alg, Algorithm::HS256 | Algorithm::HS384 | Algorithm::HS512) {
            return Err(OidcError::Algorithm(header.alg));
        }
        let jwk = self.key(header.kid.as_deref()).await?;
        let mut validation = Validation::new(header.alg);
        validation.set_audience(&[&self.config.audience]);
        validation.set_issuer(&[&self.config.issuer]);
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        validation.validate_nbf = true;
        // A key that says what it is for is used for nothing else.
        if let Some(algorithm) = jwk.common.key_algorithm
            && algorithm.to_string() != format!("{:?}", header.alg)
        {
            return Err(OidcError::Algorithm(header.alg));
        }
        let claims = decode::<Value>(token, &DecodingKey::from_jwk(&jwk)?, &validation)?.claims;
        let claim = self.config.subject_claim.as_str();
        let subject = claims[claim].as_str().filter(|subject| {
            !subject.is_empty() && subject.len() <= 256 && !subject.contains(char::is_control)
        });
        let subject = subject.map(str::to_owned).ok_or_else(|| OidcError::Claim(claim.to_owned()))?;
        let seconds = claims["exp"].as_f64().filter(|at| (0.0..FAR).contains(at));
        let seconds = seconds.ok_or_else(|| OidcError::Claim("exp".to_owned()))?;
        Ok((subject, SystemTime::UNIX_EPOCH + Duration::from_secs_f64(seconds)))
    }

    fn look(&self, id: Option<&str>) -> (Option<Jwk>, bool, bool) {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let keys = &known.keys;
        let found = match id {
            Some(id) => keys.iter().find(|key| key.common.key_id.as_deref() == Some(id)),
            // Without a name there must be no doubt.
            None => keys.first().filter(|_| keys.len() == 1),
        };
        let recent = |at: Option<Instant>, within| at.is_some_and(|at: Instant| at.elapsed() < within);
        (found.cloned(), recent(known.read, FRESH), recent(known.tried, AT_MOST_EVERY))
    }

    async fn key(&self, id: Option<&str>) -> Result<Jwk, OidcError> {
        let unknown = || OidcError::Key(id.unwrap_or("(none)").to_owned());
        match self.look(id) {
            (Some(key), true, _) => return Ok(key),
            // Old keys are better than none while the issuer is asked.
            (Some(key), false, tried) => {
                if !tried {
                    tokio::spawn(read(self.config.jwks.clone(), self.known.clone(), self.asking.clone()));
                }
                return Ok(key);
            }
            (None, _, true) => return Err(unknown()),
            (None, _, false) => {}
        }
        read(self.config.jwks.clone(), self.known.clone(), self.asking.clone()).await?;
        self.look(id).0.ok_or_else(unknown)
    }
}

/// Reads the keys, unless somebody has just done so.
async fn read(
    from: String,
    known: Arc<Mutex<Known>>,
    asking: Arc<tokio::sync::Mutex<()>>,
) -> Result<(), OidcError> {
    let _asking = asking.lock().await;
    {
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.tried.is_some_and(|at| at.elapsed() < AT_MOST_EVERY) {
            return Ok(());
        }
        known.tried = Some(Instant::now());
    }
    let keys = keys(&from).await.map_err(|problem| OidcError::Keys { from: from.clone(), problem });
    let keys = keys.inspect_err(|error| tracing::warn!(%error, "the keys that were read before stay"))?;
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    (known.keys, known.read) = (Arc::new(keys), Some(Instant::now()));
    Ok(())
}

async fn keys(from: &str) -> Result<Vec<Jwk>, String> {
    let bytes = if from.starts_with("https://") {
        let fetched = tokio::time::timeout(TIMEOUT, fetch(from)).await;
        fetched.map_err(|_| format!("no answer within {TIMEOUT:?}"))??
    } else {
        tokio::fs::read(from).await.map_err(|e| e.to_string())?
    };
    let set: Value = serde_json::from_slice(&bytes).map_err(|e| format!("not a JSON Web Key Set: {e}"))?;
    let keys = set["keys"].as_array().ok_or("not a JSON Web Key Set: it has no keys")?;
    // Keys for encryption, and of kinds that are not known here, are none of ours.
    let ours = keys.iter().filter(|key| key["use"].as_str().is_none_or(|purpose| purpose == "sig"));
    Ok(ours.filter_map(|key| serde_json::from_value(key.clone()).ok()).collect())
}

async fn fetch(url: &str) -> Result<Vec<u8>, String> {
    let uri: http::Uri = url.parse().map_err(|e: http::uri::InvalidUri| e.to_string())?;
    let connector = hyper_rustls::HttpsConnectorBuilder::new()
        .with_native_roots()
        .map_err(|e| e.to_string())?
        .https_only()
        .enable_http1()
        .build();
    let client: Client<_, Empty<bytes::Bytes>> = Client::builder(TokioExecutor::new()).build(connector);
    let response = client.get(uri).await.map_err(|e| crate::error::with_causes(&e))?;
    if !response.status().is_success() {
        return Err(format!("the answer is {}", response.status()));
    }
    let body = Limited::new(response.into_body(), LARGEST).collect().await.map_err(|e| e.to_string())?;
    Ok(body.to_bytes().to_vec())
}
