//! Bearer tokens of an OIDC issuer, checked against its keys.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use jsonwebtoken::{
    Algorithm, DecodingKey, Validation, decode, decode_header,
    jwk::{Jwk, JwkSet},
};
use serde_json::Value;
use tokio::sync::Mutex;

use crate::config::OidcConfig;

/// Keys are read anew after this long, and, for a token with an unknown key, after [`AT_MOST_EVERY`].
const FRESH: Duration = Duration::from_secs(600);
/// So that tokens with made-up keys don't make the gateway ask all the time.
const AT_MOST_EVERY: Duration = Duration::from_secs(10);
/// For the issuer to answer.
const TIMEOUT: Duration = Duration::from_secs(10);
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

/// A trusted issuer.
pub struct Oidc {
    config: OidcConfig,
    keys: Mutex<Option<(JwkSet, Instant)>>,
}

impl Oidc {
    /// Trusts an issuer; its keys are read when they are needed.
    pub fn new(config: OidcConfig) -> Self {
        Self { config, keys: Mutex::default() }
    }

    /// The subject that a token speaks for.
    ///
    /// # Errors
    /// It is expired, for others, from another issuer, badly signed, or the issuer's keys can't be read.
    pub async fn subject(&self, token: &str) -> Result<String, OidcError> {
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
        subject.map(str::to_owned).ok_or_else(|| OidcError::Claim(claim.to_owned()))
    }

    async fn key(&self, id: Option<&str>) -> Result<Jwk, OidcError> {
        let mut keys = self.keys.lock().await;
        let found = |set: &JwkSet| match id {
            Some(id) => set.find(id).cloned(),
            // Without a name there must be no doubt.
            None => (set.keys.len() == 1).then(|| set.keys[0].clone()),
        };
        if let Some((set, read)) = keys.as_ref() {
            let known = found(set);
            let age = read.elapsed();
            if (known.is_some() && age < FRESH) || age < AT_MOST_EVERY {
                return known.ok_or_else(|| OidcError::Key(id.unwrap_or("(none)").to_owned()));
            }
        }
        let set =
            self.read().await.map_err(|problem| OidcError::Keys { from: self.config.jwks.clone(), problem });
        let set = match (set, keys.take()) {
            (Ok(set), _) => set,
            // The old ones are better than none, for a while.
            (Err(error), Some((old, _))) => {
                tracing::warn!(%error, "going on with the keys that were read before");
                old
            }
            (Err(error), None) => return Err(error),
        };
        let known = found(&set);
        *keys = Some((set, Instant::now()));
        known.ok_or_else(|| OidcError::Key(id.unwrap_or("(none)").to_owned()))
    }

    async fn read(&self) -> Result<JwkSet, String> {
        let bytes = if self.config.jwks.starts_with("https://") {
            let fetched = tokio::time::timeout(TIMEOUT, fetch(&self.config.jwks)).await;
            fetched.map_err(|_| format!("no answer within {TIMEOUT:?}"))??
        } else {
            let path = PathBuf::from(&self.config.jwks);
            tokio::fs::read(path).await.map_err(|e| e.to_string())?
        };
        serde_json::from_slice(&bytes).map_err(|e| format!("not a JSON Web Key Set: {e}"))
    }
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
