//! The gateway's configuration: one TOML file. Unknown keys are refused.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use torpor_netpool::PoolConfig;

/// What can stand in `drivers`.
const DRIVERS: [&str; 5] = ["vm", "docker", "podman", "kubernetes", "sim"];

/// Everything that can be configured. Every key has a default; docs/guide/configuration.md lists them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Database, disks and images.
    pub state_dir: PathBuf,
    /// Sockets and pid files of what runs; best on a tmpfs.
    pub run_dir: PathBuf,
    /// Where clients connect: "unix:///PATH".
    pub listen: String,
    /// Who may connect there: the socket's mode, octal.
    pub socket_mode: String,
    /// Who may do everything, beside root and the gateway's own user: "uid:1000", "cert:NAME", "oidc:SUBJECT".
    pub admins: std::collections::BTreeSet<String>,
    /// Where clients connect by TCP.
    pub tcp: Vec<TcpConfig>,
    /// What is said in HTTP beside gRPC.
    pub http: HttpConfig,
    /// Figures for Prometheus, and probes.
    pub metrics: MetricsConfig,
    /// Whose bearer tokens are trusted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oidc: Option<OidcConfig>,
    /// Drivers to offer: "vm", "docker", "podman", "kubernetes", "sim" (runs nothing; for tests).
    pub drivers: Vec<String>,
    /// The driver of requests that name none; the first of `drivers` when empty.
    pub default_driver: String,
    /// The guest agent; found beside the executable or in /usr/lib/torpor when empty.
    pub agent: PathBuf,
    /// The program of the kvm machine, torpor-vmm; found beside the executable, in /usr/lib/torpor or in PATH when empty.
    pub vmm: PathBuf,
    /// First of the user ids that VM processes of the kvm machine run under, one for each slot; 0: as the gateway.
    pub first_uid: u32,
    /// The vm driver's machine: "auto", "qemu" or "kvm".
    pub machine: String,
    /// How long a guest may take from its start to its agent's answer, seconds.
    pub boot_timeout_seconds: u64,
    /// How long compute that no record knows may be there before it is ended, seconds; its storage stays.
    pub orphan_grace_seconds: u64,
    /// Whether sandboxes that are there may be changed.
    pub enable_sandbox_updates: bool,
    /// Name servers for guests; the host's own when empty.
    pub nameservers: Vec<std::net::Ipv4Addr>,
    /// What a create need not say.
    pub defaults: Defaults,
    /// Addresses and devices of guests.
    pub network: PoolConfig,
    /// What all sandboxes together may use.
    pub limits: Limits,
    /// The docker driver.
    pub docker: EngineConfig,
    /// The podman driver.
    pub podman: EngineConfig,
    /// The kubernetes driver.
    pub kubernetes: crate::kubernetes::KubernetesSection,
    /// Changes that share a commit, at most; 0: as many as is good. For measurements, not in files.
    #[serde(skip)]
    pub commit_group: usize,
}

/// A TCP listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TcpConfig {
    /// "ADDRESS:PORT".
    pub address: std::net::SocketAddr,
    /// The server's certificate with those between it and its root, PEM.
    #[serde(default)]
    pub certificate: PathBuf,
    /// Its key, PEM.
    #[serde(default)]
    pub key: PathBuf,
    /// Whose client certificates are trusted, PEM; empty: no client shows one.
    #[serde(default)]
    pub client_ca: PathBuf,
    /// Without TLS; on a loopback address only.
    #[serde(default)]
    pub plaintext: bool,
    /// What clients without a token may do there; with plaintext only.
    #[serde(default)]
    pub anonymous: Anonymous,
}

/// What clients of a plaintext listener may do without a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Anonymous {
    /// Nothing.
    #[default]
    None,
    /// See everything.
    Viewer,
    /// Use everything.
    Editor,
    /// Everything.
    Admin,
}

impl Anonymous {
    /// The rights.
    pub fn grant(self) -> Option<crate::access::Grant> {
        use crate::{access::Grant, store::Role};
        match self {
            Self::None => None,
            Self::Viewer => Some(Grant::Fixed { role: Role::Viewer, workspace: None }),
            Self::Editor => Some(Grant::Fixed { role: Role::Editor, workspace: None }),
            Self::Admin => Some(Grant::Admin),
        }
    }
}

/// What is said in HTTP beside gRPC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HttpConfig {
    /// Origins whose pages may use the API, `https://console.example.com`; `*`: all.
    pub origins: Vec<String>,
    /// The domain below which exposed ports have names, "PORT--NAME.DOMAIN"; empty: they have none.
    pub expose_domain: String,
}

impl HttpConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        let wrong = |key, problem| Err(ConfigError::Value { key, problem });
        let is_origin = |text: &str| {
            let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
            host.is_some_and(|host| {
                host.parse::<http::uri::Authority>().is_ok_and(|a| !a.as_str().contains('@'))
            })
        };
        if let Some(odd) = self.origins.iter().find(|one| *one != "*" && !is_origin(one)) {
            let problem = format!("'{odd}' is neither \"*\" nor an origin like https://console.example.com");
            return wrong("http.origins", problem);
        }
        let label = |label: &str| {
            let whole = label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
            whole && (1..=63).contains(&label.len()) && !label.starts_with('-') && !label.ends_with('-')
        };
        if !self.expose_domain.is_empty() && !self.expose_domain.split('.').all(label) {
            return wrong("http.expose_domain", format!("'{}' is no domain name", self.expose_domain));
        }
        Ok(())
    }
}

/// Figures for Prometheus, and probes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricsConfig {
    /// "ADDRESS:PORT"; empty: nowhere.
    pub address: String,
    /// Others than this host may reach it, though nobody is asked who they are there.
    pub public: bool,
}

impl MetricsConfig {
    /// Where it is, if anywhere.
    ///
    /// # Errors
    /// No address, or one that others reach when that isn't meant.
    pub fn listen(&self) -> Result<Option<std::net::SocketAddr>, ConfigError> {
        let wrong = |problem| Err(ConfigError::Value { key: "metrics.address", problem });
        if self.address.is_empty() {
            return Ok(None);
        }
        let Ok(address) = self.address.parse::<std::net::SocketAddr>() else {
            return wrong(format!("'{}' is no ADDRESS:PORT", self.address.escape_debug()));
        };
        if !self.public && !address.ip().is_loopback() {
            let problem = format!(
                "others reach {address}, and nobody is asked who they are there; `public = true` allows that"
            );
            return wrong(problem);
        }
        Ok(Some(address))
    }
}

/// An OIDC issuer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OidcConfig {
    /// What tokens must have as `iss`.
    pub issuer: String,
    /// What they must have as `aud`.
    pub audience: String,
    /// Its JSON Web Key Set: a file, or an https:// URL.
    pub jwks: String,
    /// The claim that names the subject.
    #[serde(default = "subject_claim")]
    pub subject_claim: String,
}

fn subject_claim() -> String {
    "sub".to_owned()
}

/// A container engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// The socket of its API; where the engine has it by default when empty.
    pub socket: PathBuf,
    /// Most processes and threads of one container.
    pub pids: u32,
    /// Credentials of registries, as `docker login` leaves them; where the engine's clients look when empty.
    pub auth_file: PathBuf,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { socket: PathBuf::new(), pids: 4096, auth_file: PathBuf::new() }
    }
}

/// What a create need not say.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Defaults {
    /// Image name.
    pub image: String,
    /// Virtual CPUs.
    pub cpus: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes of disk; at least the image's size is taken.
    pub disk_bytes: u64,
    /// For processes to end at suspend and stop, seconds.
    pub stop_grace_seconds: u64,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            image: "debian".to_owned(),
            cpus: 1,
            memory_bytes: 512 << 20,
            disk_bytes: 10 << 30,
            stop_grace_seconds: 10,
        }
    }
}

/// What all running sandboxes together may use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Guest memory of all that run, bytes; 0: nine tenths of the host's.
    pub memory_bytes: u64,
    /// Virtual CPUs of all that run, in percent of the host's.
    pub cpu_percent: u32,
    /// CPU time that a sandbox may use for each of its virtual CPUs, in percent of a host's CPU; 0: as much as there is.
    pub cpu_quota_percent: u32,
    /// Which of the host's CPUs a sandbox runs on.
    pub cpu_pinning: Pinning,
    /// Free space on the state directory's file system below which there is disk pressure, bytes; 0: 2 % of it, at least
    /// 1 GiB.
    pub disk_reserve_bytes: u64,
}

/// Which of the host's CPUs a sandbox runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pinning {
    /// On any.
    Off,
    /// On as many as it has virtual ones: those that carry the fewest sandboxes.
    #[default]
    Spread,
    /// The same, by whole cores of one NUMA node where that is possible; its memory comes from there.
    Topology,
}

impl Limits {
    /// The reserve, when one is configured.
    pub fn disk_reserve(&self) -> Option<u64> {
        (self.disk_reserve_bytes > 0).then_some(self.disk_reserve_bytes)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory_bytes: 0,
            cpu_percent: 1600,
            cpu_quota_percent: 100,
            cpu_pinning: Pinning::default(),
            disk_reserve_bytes: 0,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            state_dir: "/var/lib/torpor".into(),
            run_dir: "/run/torpor".into(),
            listen: "unix:///run/torpor/gateway.sock".to_owned(),
            socket_mode: "0600".to_owned(),
            admins: std::collections::BTreeSet::new(),
            tcp: Vec::new(),
            http: HttpConfig::default(),
            metrics: MetricsConfig::default(),
            oidc: None,
            drivers: vec!["vm".to_owned()],
            default_driver: String::new(),
            agent: PathBuf::new(),
            vmm: PathBuf::new(),
            first_uid: torpor_driver_vm::FIRST_UID,
            machine: "auto".to_owned(),
            boot_timeout_seconds: 60,
            enable_sandbox_updates: false,
            nameservers: Vec::new(),
            defaults: Defaults::default(),
            network: PoolConfig::default(),
            limits: Limits::default(),
            docker: EngineConfig::default(),
            podman: EngineConfig::default(),
            kubernetes: crate::kubernetes::KubernetesSection::default(),
            orphan_grace_seconds: 600,
            commit_group: 0,
        }
    }
}

/// A configuration that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("configuration file '{}': {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("configuration file '{}': {source}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: toml::de::Error,
    },
    /// A value is not possible.
    #[error("configuration: {key}: {problem}")]
    Value {
        /// The key.
        key: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },
}

impl TcpConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        let wrong = |problem: String| {
            Err(ConfigError::Value { key: "tcp", problem: format!("{}: {problem}", self.address) })
        };
        let given = |path: &Path| !path.as_os_str().is_empty();
        if self.plaintext {
            if !self.address.ip().is_loopback() {
                return wrong(
                    "plaintext is for loopback addresses; give a `certificate` and `key`".to_owned(),
                );
            }
            if given(&self.certificate) || given(&self.key) || given(&self.client_ca) {
                return wrong("certificates mean nothing with `plaintext = true`".to_owned());
            }
            return Ok(());
        }
        if !given(&self.certificate) || !given(&self.key) {
            return wrong(
                "a `certificate` and a `key` are needed (or `plaintext = true` on loopback)".to_owned(),
            );
        }
        if self.anonymous != Anonymous::None {
            return wrong("`anonymous` is for plaintext listeners".to_owned());
        }
        Ok(())
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// Unreadable, not TOML, or with a key that is not known.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        toml::from_str(&text).map_err(|source| ConfigError::Parse { path: path.to_owned(), source })
    }

    /// Checks what no type can.
    ///
    /// # Errors
    /// The key and what is wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let wrong = |key, problem: String| Err(ConfigError::Value { key, problem });
        if !self.state_dir.is_absolute() || !self.run_dir.is_absolute() {
            return wrong("state_dir", "state_dir and run_dir must be absolute paths".to_owned());
        }
        if self.socket().is_none() {
            return wrong("listen", format!("'{}' is not unix:///PATH", self.listen));
        }
        if self.mode().is_none() {
            return wrong("socket_mode", format!("'{}' is no octal mode like 0600", self.socket_mode));
        }
        self.tcp.iter().try_for_each(TcpConfig::validate)?;
        self.http.validate()?;
        self.metrics.listen()?;
        if let Some(oidc) = &self.oidc
            && !(oidc.jwks.starts_with("https://") || oidc.jwks.starts_with('/'))
        {
            return wrong("oidc.jwks", format!("'{}' is neither an absolute path nor https://", oidc.jwks));
        }
        if self.drivers.is_empty() {
            return wrong("drivers", format!("at least one is needed: {}", DRIVERS.join(", ")));
        }
        if let Some(unknown) = self.drivers.iter().find(|d| !DRIVERS.contains(&d.as_str())) {
            return wrong("drivers", format!("'{unknown}' is not one of {}", DRIVERS.join(", ")));
        }
        if !self.drivers.contains(&self.default_driver().to_owned()) {
            return wrong("default_driver", format!("'{}' is not among drivers", self.default_driver));
        }
        if !["auto", "qemu", "kvm"].contains(&self.machine.as_str()) {
            return wrong("machine", format!("'{}' is not one of auto, qemu, kvm", self.machine));
        }
        if self.boot_timeout_seconds == 0 {
            return wrong("boot_timeout_seconds", "at least 1".to_owned());
        }
        self.network.validate().map_err(|e| ConfigError::Value { key: "network", problem: e.to_string() })
    }

    /// The default driver.
    pub fn default_driver(&self) -> &str {
        match self.default_driver.as_str() {
            "" => self.drivers.first().map_or("", String::as_str),
            name => name,
        }
    }

    /// The socket's mode.
    pub fn mode(&self) -> Option<u32> {
        u32::from_str_radix(&self.socket_mode, 8).ok().filter(|mode| *mode <= 0o777)
    }

    /// The socket's path.
    pub fn socket(&self) -> Option<PathBuf> {
        self.listen.strip_prefix("unix://").filter(|p| p.starts_with('/')).map(PathBuf::from)
    }

    /// The guest agent: as configured, else the first static one of those beside the executable and where packages
    /// put it. (An agent that needs a dynamic loader can't be the first program of a guest.)
    pub fn find_agent(&self) -> Option<PathBuf> {
        let beside = beside_executable().map(|dir| [dir.join("guest"), dir]);
        let folders = beside.into_iter().flatten().chain([PathBuf::from(PACKAGED)]);
        find(&self.agent, folders, "torpor-agent", is_static)
    }

    /// torpor-vmm: as configured, else the first of those beside the executable, where packages put it, and in PATH.
    pub fn find_vmm(&self) -> Option<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = beside_executable().into_iter().chain([PathBuf::from(PACKAGED)]);
        find(&self.vmm, folders.chain(std::env::split_paths(&path)), "torpor-vmm", Path::is_file)
    }
}

/// Where packages put the programs that the gateway starts.
const PACKAGED: &str = "/usr/lib/torpor";

fn beside_executable() -> Option<PathBuf> {
    std::env::current_exe().ok()?.parent().map(Path::to_owned)
}

/// The configured program, else the first fitting one of that name in the folders.
fn find(
    configured: &Path,
    folders: impl Iterator<Item = PathBuf>,
    name: &str,
    fits: fn(&Path) -> bool,
) -> Option<PathBuf> {
    if !configured.as_os_str().is_empty() {
        return Some(configured.to_owned());
    }
    folders.map(|folder| folder.join(name)).find(|file| fits(file))
}

/// Whether a file is a 64-bit ELF program without an interpreter (elf(5): program header type 3 is PT_INTERP).
pub(crate) fn is_static(path: &Path) -> bool {
    const PT_INTERP: u32 = 3;
    let mut head = [0; 4096];
    let read = std::fs::File::open(path).and_then(|mut file| std::io::Read::read(&mut file, &mut head));
    let Ok(length) = read else { return false };
    let head = &head[..length];
    let number = |at: usize, bytes: usize| {
        let raw = head.get(at..at + bytes)?;
        Some(raw.iter().rev().fold(0_u64, |n, &b| n << 8 | u64::from(b)) as usize)
    };
    let (Some(table), Some(size), Some(count)) = (number(32, 8), number(54, 2), number(56, 2)) else {
        return false;
    };
    let interpreter =
        (0..count).any(|n| number(table.saturating_add(n * size), 4) == Some(PT_INTERP as usize));
    head.starts_with(b"\x7fELF\x02\x01") && count > 0 && !interpreter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_survive_a_round_trip() {
        let config = Config::default();
        config.validate().unwrap();
        let text = toml::to_string(&config).unwrap();
        assert_eq!(toml::from_str::<Config>(&text).unwrap(), config);
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let error = toml::from_str::<Config>("state_dirr = '/x'").unwrap_err().to_string();
        assert!(error.contains("state_dirr"), "{error}");
    }

    #[test]
    fn figures_are_shown_to_others_only_when_that_is_said() {
        let with = |address: &str, public| {
            let metrics = MetricsConfig { address: address.to_owned(), public };
            Config { metrics, ..Config::default() }.validate().map_err(|error| error.to_string())
        };
        with("127.0.0.1:9464", false).unwrap();
        with("[::1]:9464", false).unwrap();
        with("0.0.0.0:9464", true).unwrap();
        assert!(with("0.0.0.0:9464", false).unwrap_err().contains("public = true"));
        for odd in ["9464", ":9464", "localhost", "http://127.0.0.1:1"] {
            assert!(with(odd, true).unwrap_err().contains("metrics.address"), "{odd}");
        }
    }

    #[test]
    fn odd_origins_and_domains_are_refused() {
        let with = |origin: &str, domain: &str| {
            let http = HttpConfig { origins: vec![origin.to_owned()], expose_domain: domain.to_owned() };
            Config { http, ..Config::default() }.validate().map_err(|error| error.to_string())
        };
        for origin in ["*", "https://console.example.com", "http://localhost:3000"] {
            with(origin, "apps.example.com").unwrap();
        }
        for origin in ["console.example.com", "https://a/b", "https://", "https://u@a", "null"] {
            assert!(with(origin, "").unwrap_err().contains("http.origins"), "{origin}");
        }
        for domain in [".example.com", "a..b", "a_b.c", "-a.b", "*.example.com", "example.com:80"] {
            assert!(with("*", domain).unwrap_err().contains("http.expose_domain"), "{domain}");
        }
    }

    #[test]
    fn every_key_is_documented() {
        let page = include_str!("../../docs/guide/configuration.md");
        let all = toml::Value::try_from(Config {
            network: PoolConfig { uplink: Some("x".into()), mtu: Some(1), ..PoolConfig::default() },
            ..Config::default()
        })
        .unwrap();
        let mut tables = vec![&all];
        while let Some(table) = tables.pop() {
            for (key, value) in table.as_table().unwrap() {
                let shown = if value.is_table() { format!("`[{key}]`") } else { format!("`{key}`") };
                assert!(page.contains(&shown), "{shown} is not on the page");
                if value.is_table() {
                    tables.push(value);
                }
            }
        }
    }
}
