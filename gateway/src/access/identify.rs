//! Who is it?

use std::{net::SocketAddr, time::SystemTime};

use http::{HeaderMap, header::AUTHORIZATION};
use rand::RngCore as _;
use sha2::{Digest as _, Sha256};

use super::{Access, By, Grant, Identity, TOKEN, grant_of};
use crate::{
    config::Anonymous,
    error::{ApiError, Code},
};

/// What a connection says of its other end.
#[derive(Clone, Debug)]
pub enum Peer {
    /// The unix socket's.
    Unix {
        /// User.
        uid: u32,
    },
    /// Nothing.
    Plain {
        /// Where it comes from.
        from: SocketAddr,
        /// What it may do.
        anonymous: Anonymous,
    },
    /// A TLS client.
    Tls {
        /// Where it comes from.
        from: SocketAddr,
        /// Of its certificate, if it has shown one that we trust.
        subject: Option<String>,
    },
}

impl Peer {
    /// For the audit log.
    pub fn address(&self) -> String {
        match self {
            Self::Unix { uid } => format!("unix uid {uid}"),
            Self::Plain { from, .. } | Self::Tls { from, .. } => from.to_string(),
        }
    }
}

/// Begins every secret, so that scanners of leaks know it.
pub const PREFIX: &str = "tpr_";
/// Random bytes of a secret, and of a token's id.
const SECRET: usize = 32;
const ID: usize = 8;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The hash of a secret.
pub fn hash_of(secret: &str) -> String {
    hex(&Sha256::digest(secret))
}

/// A new token's id and secret, which holds the id.
pub fn new_secret() -> (String, String) {
    let mut bytes = [0; SECRET + ID];
    rand::rng().fill_bytes(&mut bytes);
    let id = hex(&bytes[..ID]);
    let secret = format!("{PREFIX}{id}_{}", hex(&bytes[ID..]));
    (id, secret)
}

/// Compares without telling by the time it takes where two hashes part.
fn same(one: &str, other: &str) -> bool {
    let differ = one.bytes().zip(other.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b));
    one.len() == other.len() && differ == 0
}

/// The name in a certificate: its common name, else the first DNS name or URI among its alternative names.
pub fn certificate_subject(der: &[u8]) -> Option<String> {
    use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let common = certificate.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
    let others = certificate.subject_alternative_name().ok().flatten();
    let other = others.as_ref().and_then(|names| {
        names.value.general_names.iter().find_map(|name| match name {
            GeneralName::DNSName(name) | GeneralName::URI(name) => Some(*name),
            _ => None,
        })
    });
    let name = common.filter(|name| !name.is_empty()).or(other)?;
    (!name.contains(char::is_control)).then(|| name.to_owned())
}

fn unknown(message: impl Into<String>) -> ApiError {
    ApiError::new(Code::Unauthenticated, "UNAUTHENTICATED", message)
}

impl Access {
    /// Whoever makes a call: the token that comes with it counts for more than the connection.
    ///
    /// # Errors
    /// `UNAUTHENTICATED`: a token that isn't good; none: nothing says who it is.
    pub(super) async fn identify(
        &self,
        headers: &HeaderMap,
        peer: &Peer,
    ) -> Result<Option<Identity>, ApiError> {
        if let Some(value) = headers.get(AUTHORIZATION) {
            let text = value.to_str().unwrap_or_default();
            let scheme = text.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("bearer "));
            let Some(token) = scheme.map(|_| text[7..].trim()).filter(|token| !token.is_empty()) else {
                return Err(unknown("the authorization is no bearer token"));
            };
            return self.of_token(token).await.map(Some);
        }
        Ok(match peer {
            // Who may open the socket's owner's files may do what the gateway may.
            Peer::Unix { uid } => {
                let ours = [0, nix::unistd::geteuid().as_raw()].contains(uid);
                Some(self.member(format!("uid:{uid}"), By::Peer, ours))
            }
            Peer::Tls { subject: Some(subject), .. } => {
                Some(self.member(format!("cert:{subject}"), By::Certificate, false))
            }
            Peer::Tls { subject: None, .. } => None,
            Peer::Plain { anonymous, .. } => anonymous.grant().map(|grant| Identity {
                subject: "anonymous".to_owned(),
                by: By::Plaintext,
                grant,
                home: None,
                expires: None,
            }),
        })
    }

    fn member(&self, subject: String, by: By, admin: bool) -> Identity {
        let admin = admin || self.admins.contains(&subject);
        let grant = if admin { Grant::Admin } else { Grant::Membership };
        Identity { subject, by, grant, home: None, expires: None }
    }

    async fn of_token(&self, token: &str) -> Result<Identity, ApiError> {
        if !token.starts_with(PREFIX) {
            return match &self.oidc {
                Some(oidc) => {
                    let (subject, expires) = oidc.subject(token).await.map_err(|error| {
                        // What is wrong with the issuer's keys is the administrator's to read.
                        if error.is_ours() {
                            tracing::error!(%error, "OIDC tokens can't be checked");
                            return unknown("the token can't be checked now; the gateway's log says why");
                        }
                        unknown(error.to_string())
                    })?;
                    let known = self.member(format!("oidc:{subject}"), By::Oidc, false);
                    Ok(Identity { expires: Some(expires), ..known })
                }
                None => Err(unknown("the token is none of this gateway's, and no OIDC issuer is configured")),
            };
        }
        let id = token[PREFIX.len()..].split('_').next().unwrap_or_default();
        // One answer for all that is wrong with it: who guesses learns nothing.
        let wrong = || unknown("the token is not known, or was revoked");
        let found = self.store.token(id).await?.ok_or_else(wrong)?;
        if !same(&found.hash, &hash_of(token)) {
            return Err(wrong());
        }
        if found.expires.is_some_and(|expires| expires <= SystemTime::now()) {
            return Err(ApiError::new(
                Code::Unauthenticated,
                "TOKEN_EXPIRED",
                format!("token '{}' has expired", found.name),
            ));
        }
        // Names of tokens are for people, and not unique.
        let subject = format!("{TOKEN}{}", found.id);
        let home = found.workspace.clone();
        let grant = match &found.sandbox {
            Some(sandbox) => Grant::Sandbox(sandbox.parse().map_err(|_| wrong())?),
            None => grant_of(found.role, found.workspace),
        };
        Ok(Identity { subject, by: By::Token, grant, home, expires: found.expires })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_names_its_token_and_its_hash_tells_nothing_of_it() {
        let (id, secret) = new_secret();
        assert_eq!(secret.split('_').nth(1), Some(id.as_str()));
        assert!(secret.len() > 70, "{}", secret.len());
        assert_eq!(hash_of(&secret).len(), 64);
        assert!(same(&hash_of(&secret), &hash_of(&secret)));
        assert!(!same(&hash_of(&secret), &hash_of(&new_secret().1)));
        assert!(!same("", &hash_of(&secret)));
    }
}
