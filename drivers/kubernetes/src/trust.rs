//! Who is who between the gateway and the agents that have a port of their own: a certificate authority of this state
//! directory, the gateway's certificate, and one for each run of a sandbox. Nobody else ever trusts the authority, and
//! nothing of it is in the cluster; when its file is lost, agents are given credentials of another one.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose as Usage, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};
use tokio_rustls::rustls::{
    ClientConfig, RootCertStore,
    client::Resumption,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject as _},
    version::TLS13,
};
use torpor_driver_common::files::{OWNERS_FILE, write_whole};
use torpor_sandbox::SandboxId;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::config::{ConfigError, is_label};

/// The authority's file in the driver's folder: its key and its certificate, PEM.
pub(crate) const FILE: &str = "agents-ca.pem";
/// The gateway's name to agents, and the end of theirs.
pub(crate) const GATEWAY_NAME: &str = "gateway.agents.torpor.internal";
const AGENTS: &str = "agents.torpor.internal";

const DAY: Duration = Duration::from_secs(24 * 3600);
/// How far clocks of nodes may be behind.
const SKEW: Duration = DAY;
/// How long certificates hold, and what of that is left when others take their place.
const AUTHORITY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
const AUTHORITY_LEFT: Duration = Duration::from_secs(365 * 24 * 3600);
const LEAF: Duration = Duration::from_secs(90 * 24 * 3600);
const LEAF_LEFT: Duration = Duration::from_secs(30 * 24 * 3600);

/// What goes wrong with certificates.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrustError {
    #[error("make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    #[error("the gateway's certificate can't be used: {0}")]
    Use(#[from] tokio_rustls::rustls::Error),
    #[error("the pod's uid '{0}' can't be part of a name")]
    Uid(String),
}

/// What an agent is given for one run.
pub(crate) struct Credentials {
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
    pub(crate) authority: Vec<u8>,
}

pub(crate) struct Trust {
    issuer: Issuer<'static, KeyPair>,
    authority: CertificateDer<'static>,
    /// What agents are dialed with, until when it is good.
    client: Mutex<Option<(Arc<ClientConfig>, SystemTime)>>,
}

impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trust").finish_non_exhaustive()
    }
}

/// The name of the agent of one pod of a sandbox.
///
/// # Errors
/// A uid that is none.
pub(crate) fn agent_name(id: &SandboxId, pod: &str) -> Result<String, TrustError> {
    if !is_label(pod) {
        return Err(TrustError::Uid(pod.escape_debug().to_string()));
    }
    Ok(format!("{pod}.{id}.{AGENTS}"))
}

/// Until when a certificate holds; none when it can't be read.
pub(crate) fn holds_until(certificate: &[u8]) -> Option<SystemTime> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let seconds = u64::try_from(certificate.validity().not_after.timestamp()).ok()?;
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

/// Whether another certificate should take its place.
pub(crate) fn is_short(until: SystemTime) -> bool {
    until.duration_since(SystemTime::now()).is_ok_and(|left| left < LEAF_LEFT)
}

/// What an authority's file has.
pub(crate) enum Found {
    Nothing,
    /// It can't be used: why.
    Useless(String),
    Good(Box<Kept>),
}

/// An authority as it is kept.
pub(crate) struct Kept {
    key: KeyPair,
    certificate: CertificateDer<'static>,
    name: String,
    pub(crate) until: SystemTime,
}

/// Looks at an authority's file and changes nothing.
///
/// # Errors
/// When it is there and can't be read.
pub(crate) fn look(path: &Path) -> io::Result<Found> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return Ok(Found::Useless("it is no text".to_owned()));
        }
        Err(error) => return Err(error),
    };
    // Group bits are set by clusters on volumes of pods that have a file system group.
    if fs::metadata(path)?.permissions().mode() & 0o007 != 0 {
        return Ok(Found::Useless("everybody on the host may read or write it".to_owned()));
    }
    Ok(parse(&text).map_or_else(Found::Useless, |kept| Found::Good(Box::new(kept))))
}

fn parse(text: &str) -> Result<Kept, String> {
    let key = KeyPair::from_pem(text).map_err(|error| format!("its key: {error}"))?;
    let certificate = CertificateDer::from_pem_slice(text.as_bytes())
        .map_err(|error| format!("its certificate: {error}"))?
        .into_owned();
    let unreadable = || "its certificate can't be read".to_owned();
    let until = holds_until(&certificate).ok_or_else(unreadable)?;
    let (_, read) = X509Certificate::from_der(&certificate).map_err(|_| unreadable())?;
    if read.public_key().subject_public_key.data.as_ref() != key.public_key_raw() {
        return Err("its certificate is of another key".to_owned());
    }
    let name = read.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
    let name = name.ok_or("its certificate has no name")?.to_owned();
    if until.duration_since(SystemTime::now()).is_ok_and(|left| left > AUTHORITY_LEFT) {
        Ok(Kept { key, certificate, name, until })
    } else {
        Err("it expires soon or has expired".to_owned())
    }
}

fn params(name: &str, holds: Duration) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + now.saturating_sub(SKEW);
    params.not_after = epoch + now + holds;
    params
}

fn authority_params(name: &str) -> CertificateParams {
    let mut params = params(name, AUTHORITY);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

/// A new one, and what its file is to have.
fn make(identity: &str) -> Result<(Kept, String), rcgen::Error> {
    let name = format!("agents of torpor {identity}");
    let key = KeyPair::generate()?;
    let made = authority_params(&name).self_signed(&key)?;
    let text = key.serialize_pem() + &made.pem();
    let until = SystemTime::now() + AUTHORITY;
    Ok((Kept { key, certificate: made.der().clone(), name, until }, text))
}

impl Trust {
    /// The authority that is kept in this folder; another one is made where there is none that can be used.
    ///
    /// # Errors
    /// A file that can't be read or written.
    pub(crate) fn open(folder: &Path, identity: &str) -> Result<Self, ConfigError> {
        let path = folder.join(FILE);
        let failed = |what: &'static str| {
            let path = path.clone();
            move |source| ConfigError::File { what, path, source }
        };
        let kept = match look(&path).map_err(failed("read"))? {
            Found::Good(kept) => {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(failed("close"))?;
                *kept
            }
            found => {
                if let Found::Useless(why) = found {
                    tracing::warn!(path = %path.display(), why, "another authority for agents is made");
                }
                let (kept, text) = make(identity).map_err(|error| failed("make")(io::Error::other(error)))?;
                write_whole(&path, text.as_bytes(), OWNERS_FILE).map_err(failed("write"))?;
                kept
            }
        };
        let issuer = Issuer::new(authority_params(&kept.name), kept.key);
        Ok(Self { issuer, authority: kept.certificate, client: Mutex::default() })
    }

    fn sign(&self, name: &str, usage: Usage) -> Result<(CertificateDer<'static>, KeyPair), TrustError> {
        let mut params = params(name, LEAF);
        // Names that are longer than this are only among the alternative ones.
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.subject_alt_names = vec![SanType::DnsName(name.try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate()?;
        Ok((params.signed_by(&key, &self.issuer)?.der().clone(), key))
    }

    /// Credentials for the agent of that name.
    ///
    /// # Errors
    /// When they can't be made.
    pub(crate) fn credentials(&self, name: &str) -> Result<Credentials, TrustError> {
        let (certificate, key) = self.sign(name, Usage::ServerAuth)?;
        Ok(Credentials {
            certificate: certificate.to_vec(),
            key: key.serialize_der(),
            authority: self.authority.to_vec(),
        })
    }

    /// What to dial agents with.
    ///
    /// # Errors
    /// When the gateway's certificate can't be made.
    pub(crate) fn client(&self) -> Result<Arc<ClientConfig>, TrustError> {
        let mut kept = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((config, until)) = kept.as_ref()
            && until.duration_since(SystemTime::now()).is_ok_and(|left| left > LEAF_LEFT)
        {
            return Ok(config.clone());
        }
        let (certificate, key) = self.sign(GATEWAY_NAME, Usage::ClientAuth)?;
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.clone())?;
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)?;
        // Both sides show their certificates each time.
        config.resumption = Resumption::disabled();
        let config = Arc::new(config);
        *kept = Some((config.clone(), SystemTime::now() + LEAF));
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn an_authority_is_kept_for_its_owner_only_and_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        assert!(matches!(look(&path).unwrap(), Found::Nothing));
        let first = Trust::open(folder.path(), "me").unwrap();
        assert_eq!(mode(&path), 0o600);
        // As a cluster does to volumes of pods with a file system group.
        chmod(&path, 0o660);
        let again = Trust::open(folder.path(), "me").unwrap();
        assert_eq!(first.authority, again.authority);
        assert_eq!(mode(&path), 0o600);
        let Found::Good(kept) = look(&path).unwrap() else { panic!("it is not good") };
        let left = kept.until.duration_since(SystemTime::now()).unwrap();
        assert!((left.as_secs_f64() - AUTHORITY.as_secs_f64()).abs() < 60.0, "{left:?}");
    }

    #[test]
    fn one_that_others_may_read_that_is_broken_or_not_whole_is_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let first = Trust::open(folder.path(), "me").unwrap().authority;
        chmod(&path, 0o604);
        let second = Trust::open(folder.path(), "me").unwrap().authority;
        assert_ne!(first, second);
        let other = tempfile::tempdir().unwrap();
        Trust::open(other.path(), "me").unwrap();
        let (ours, theirs) =
            (fs::read_to_string(&path).unwrap(), fs::read_to_string(other.path().join(FILE)).unwrap());
        let certificate = ours.find("-----BEGIN CERTIFICATE").unwrap();
        let swapped =
            format!("{}{}", &theirs[..theirs.find("-----BEGIN CERT").unwrap()], &ours[certificate..]);
        for text in ["", "nonsense", &ours[..certificate], &ours[certificate..], &swapped] {
            fs::write(&path, text).unwrap();
            chmod(&path, 0o600);
            assert!(matches!(look(&path).unwrap(), Found::Useless(_)), "{text}");
            let made = Trust::open(folder.path(), "me").unwrap().authority;
            assert_ne!(made, second);
        }
    }

    #[test]
    fn a_name_is_of_one_pod_of_one_sandbox_and_never_the_gateways() {
        let id = SandboxId::generate();
        let name = agent_name(&id, "00000000-0000-4000-8000-000000000001").unwrap();
        assert!(name.contains(id.as_str()) && name.ends_with(AGENTS));
        assert_ne!(name, agent_name(&id, "00000000-0000-4000-8000-000000000002").unwrap());
        for uid in ["", "gateway.x", "*", "a b", "a\0"] {
            assert!(agent_name(&id, uid).is_err(), "{uid:?}");
        }
    }

    #[test]
    fn certificates_hold_from_before_now_and_are_replaced_before_their_end() {
        let folder = tempfile::tempdir().unwrap();
        let trust = Trust::open(folder.path(), "me").unwrap();
        let made = trust.credentials("a.b.agents.torpor.internal").unwrap();
        let (_, read) = X509Certificate::from_der(&made.certificate).unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
        assert!(read.validity().not_before.timestamp() <= now - 23 * 3600, "a node's clock may be behind");
        let until = holds_until(&made.certificate).unwrap();
        assert!(!is_short(until) && is_short(SystemTime::now() + LEAF_LEFT / 2));
        assert!(Arc::ptr_eq(&trust.client().unwrap(), &trust.client().unwrap()));
        trust.client.lock().unwrap().as_mut().unwrap().1 = SystemTime::now() + LEAF_LEFT / 2;
        let before = trust.client.lock().unwrap().as_ref().unwrap().0.clone();
        assert!(!Arc::ptr_eq(&before, &trust.client().unwrap()));
    }
}
