//! What a user asks for.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{id::clip, words::said_within};

/// Smallest guest memory that a stock kernel with the agent's initramfs boots in, bytes.
pub const MIN_MEMORY: u64 = 96 << 20;
/// Smallest disk, bytes.
pub const MIN_DISK: u64 = 64 << 20;
/// Largest disk that the overlay's fixed layout is made for, bytes.
pub const MAX_DISK: u64 = 2 << 40;
/// Most virtual CPUs.
pub const MAX_CPUS: u32 = 32;
/// Longest environment, argument list or label set, bytes of all keys and values together.
const MAX_TEXT: usize = 256 << 10;
/// Longest driver_config, bytes of its JSON.
const MAX_DRIVER_CONFIG: usize = 16 << 10;
/// Labels and annotations with this prefix belong to Torpor.
pub const RESERVED_PREFIXES: [&str; 2] = ["torpor.dev/", "agents.x-k8s.io/"];

/// A sandbox as wished for. Everything has been chosen: defaults were filled in before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// The compute driver's name: "vm", "sim".
    pub driver: String,
    /// The workspace that it belongs to, for ever.
    #[serde(default = "default_workspace")]
    pub workspace: String,
    /// What the guest calls itself: the sandbox's name. Empty: its id.
    #[serde(default)]
    pub hostname: String,
    /// Image name or digest as asked for.
    pub image: String,
    /// Digest that `image` stood for when the sandbox was created, "sha256:…". The base of its disk for ever.
    pub image_digest: String,
    /// Main command; empty: the sandbox idles.
    #[serde(default)]
    pub command: Vec<String>,
    /// Environment of the main command and of every exec.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Where the main command starts; the user's home when none.
    #[serde(default)]
    pub workdir: Option<String>,
    /// Who runs the main command; root when none.
    #[serde(default)]
    pub user: Option<String>,
    /// The main command has an input that clients can attach to.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stdin: bool,
    /// The main command has a terminal.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tty: bool,
    /// CPUs, memory, disk.
    pub resources: Resources,
    /// What happens when the main command ends.
    #[serde(default)]
    pub restart: RestartPolicy,
    /// How long processes may take to end at suspend and stop. A delete asks nobody.
    pub stop_grace: Duration,
    /// "auto", or a machine of the vm driver.
    #[serde(default = "auto")]
    pub machine: String,
    /// A kernel file on the host in place of the gateway's own.
    #[serde(default)]
    pub kernel: Option<String>,
    /// Where it may send to; none: where the gateway's configuration says, as it is at the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// What it mounts of the host, beside its workspace. Never removed with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Volume>,
    /// Servers that are looked at while it is Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub endpoints: Vec<Endpoint>,
    /// What its driver is told in the driver's own words.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub driver_config: Map<String, Value>,
}

/// Something that a sandbox serves, as far as it is to be seen whether it does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Unique in its sandbox.
    pub name: String,
    /// On the sandbox's loopback address.
    pub port: u16,
    /// What is asked for by HTTP; none: it is enough that a connection is taken.
    #[serde(default)]
    pub http_path: Option<String>,
}

impl Endpoint {
    fn validate(&self) -> Result<(), InvalidSpec> {
        let name = self.name.escape_debug();
        if self.name.is_empty() || !word(&self.name, 63) {
            return wrong("endpoints", format!("name '{name}' is not valid: {SYNTAX}"));
        }
        if self.port == 0 {
            return wrong("endpoints", format!("'{name}': port 0 is none"));
        }
        let printable = |path: &str| path.bytes().all(|b| b.is_ascii_graphic());
        match &self.http_path {
            Some(path) if !path.starts_with('/') || path.len() > 1024 || !printable(path) => wrong(
                "endpoints",
                format!("'{name}': an HTTP path begins with '/', has no spaces and at most 1024 bytes"),
            ),
            _ => Ok(()),
        }
    }
}

/// Longest path, bytes: the kernel's own limit is one more.
const MAX_PATH: usize = 4095;
/// Longest name of an image, bytes.
const MAX_IMAGE: usize = 1024;
/// Longest argument, and longest variable with its name and what is between them, bytes: Linux's own limit is one more.
pub const MAX_WORD: usize = 131_071;
/// What each argument and variable counts beside its bytes, as for the kernel.
const EACH: usize = 8;

/// Most endpoints of a sandbox.
const MAX_ENDPOINTS: usize = 16;

/// A volume of a container engine or a folder of the host in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// The name of a volume, which is made when it isn't there, or the absolute path of a folder or file, which must be.
    pub source: String,
    /// Where, in the sandbox: an absolute path.
    pub target: String,
    /// It can't be written to there.
    #[serde(default)]
    pub read_only: bool,
}

/// A path as it is without doubled and trailing slashes and without "." parts: two that lead to the same place by their
/// words are the same text. What begins without a slash, and "..", stays.
pub fn plain_path(path: &str) -> String {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    let root = if path.starts_with('/') { "/" } else { "" };
    format!("{root}{}", parts.join("/"))
}

impl Volume {
    /// Whether it is a folder or file of the host, and not a volume by name.
    pub fn is_bind(&self) -> bool {
        self.source.starts_with('/')
    }

    fn validate(&self) -> Result<(), InvalidSpec> {
        let quoted = |text: &str| text.escape_debug().to_string();
        let named = || {
            let first = self.source.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
            first
                && self.source.len() <= 128
                && self.source.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
        };
        let clean = |path: &str| {
            path.len() <= 4096
                && !path.chars().any(char::is_control)
                && !path.split('/').any(|part| part == "..")
        };
        if !(self.is_bind() && clean(&self.source) || named()) {
            return wrong(
                "volumes",
                format!("'{}' is neither an absolute path nor the name of a volume", quoted(&self.source)),
            );
        }
        if !self.target.starts_with('/') || !clean(&self.target) || plain_path(&self.target) == "/" {
            return wrong(
                "volumes",
                format!("'{}' is no absolute path below the sandbox's root", quoted(&self.target)),
            );
        }
        Ok(())
    }
}

/// Most volumes of a sandbox.
const MAX_VOLUMES: usize = 32;

/// Where a sandbox may send to. What the rules of an allow-list mean is the network's to say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Egress {
    /// Everywhere but to the host, to other sandboxes and to metadata services.
    Open,
    /// As open, without private networks.
    Public,
    /// Nowhere.
    None,
    /// To what a rule names.
    Allow {
        /// "192.0.2.0/24", "192.0.2.7:443/tcp".
        rules: Vec<String>,
        /// To name servers, too.
        names: bool,
    },
}

/// The workspace that is always there.
pub const DEFAULT_WORKSPACE: &str = "default";

fn default_workspace() -> String {
    DEFAULT_WORKSPACE.to_owned()
}

/// A name with its workspace, as it is typed and as it is unique: "team/box"; in the default workspace the name alone.
pub fn qualified(workspace: &str, name: &str) -> String {
    if workspace == DEFAULT_WORKSPACE { name.to_owned() } else { format!("{workspace}/{name}") }
}

/// Workspace and name of a qualified name.
pub fn unqualified(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or((DEFAULT_WORKSPACE, name))
}

fn auto() -> String {
    "auto".to_owned()
}

/// Keys of the kubernetes driver's `driver_config` whose values are names: written without quotes, whatever they look like.
pub const NAMES_IN_DRIVER_CONFIG: [&str; 7] = [
    "dnsPolicy",
    "preemptionPolicy",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "serviceAccountName",
    "storageClassName",
];

/// What a sandbox may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Virtual CPUs.
    pub cpus: u32,
    /// Guest memory, bytes.
    pub memory_bytes: u64,
    /// Virtual size of the root disk, bytes; 0: the driver gives it none of its own, and no limit.
    pub disk_bytes: u64,
}

/// What happens when the main command ends by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestartPolicy {
    /// The sandbox is Completed.
    #[default]
    Never,
    /// Started again unless it ended with code 0.
    OnFailure,
    /// Started again.
    Always,
}

/// A field of a spec that breaks its rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct InvalidSpec {
    /// The field, as it is called in the API ("resources.cpus").
    pub field: &'static str,
    /// What is wrong and what is allowed.
    pub problem: String,
}

/// What the host offers, for a check at create.
#[derive(Clone, Copy, Debug)]
pub struct HostLimits {
    /// All memory of the host, bytes.
    pub memory_bytes: u64,
    /// CPUs of the host.
    pub cpus: u32,
}

impl HostLimits {
    /// Of nothing that is known here: of a cluster.
    pub const UNKNOWN: Self = Self { memory_bytes: u64::MAX, cpus: u32::MAX };
}

fn wrong<T>(field: &'static str, problem: impl Into<String>) -> Result<T, InvalidSpec> {
    // What it quotes may be of any length.
    Err(InvalidSpec { field, problem: said_within(&problem.into(), 500) })
}

impl SandboxSpec {
    /// One that says nothing else: no command, in the default workspace, ten seconds to end.
    pub fn of(driver: &str, image: &str, image_digest: &str, resources: Resources) -> Self {
        Self {
            driver: driver.to_owned(),
            workspace: default_workspace(),
            hostname: String::new(),
            image: image.to_owned(),
            image_digest: image_digest.to_owned(),
            command: Vec::new(),
            environment: BTreeMap::new(),
            workdir: None,
            user: None,
            stdin: false,
            tty: false,
            resources,
            restart: RestartPolicy::Never,
            stop_grace: Duration::from_secs(10),
            machine: auto(),
            kernel: None,
            egress: None,
            volumes: Vec::new(),
            endpoints: Vec::new(),
            driver_config: Map::new(),
        }
    }

    /// Checks every field by itself and against the host.
    ///
    /// # Errors
    /// The first field that breaks its rule.
    pub fn validate(&self, host: HostLimits) -> Result<(), InvalidSpec> {
        self.resources.validate(host)?;
        if self.image.is_empty() {
            return wrong("image", "an image name or digest is needed; `torpor image list` shows them");
        }
        if !is_line(&self.image, MAX_IMAGE) {
            let problem = format!("a name has no control characters and at most {MAX_IMAGE} bytes");
            return wrong("image", problem);
        }
        self.validate_command()?;
        validate_environment("environment", &self.environment)?;
        if let Some(dir) = &self.workdir {
            validate_path("workdir", dir)?;
        }
        if let Some(user) = &self.user
            && (user.is_empty()
                || user.len() > 64
                || user.contains(|c: char| c.is_control() || c.is_whitespace()))
        {
            return wrong("user", "a user is a name or number, with an optional ':group'");
        }
        if !matches!(self.machine.as_str(), "auto" | "qemu" | "kvm") {
            return wrong(
                "machine",
                format!("'{}' is not one of auto, qemu, kvm", self.machine.escape_debug()),
            );
        }
        if let Some(kernel) = &self.kernel {
            validate_path("kernel", kernel)?;
        }
        if self.volumes.len() > MAX_VOLUMES {
            return wrong(
                "volumes",
                format!("{} volumes; at most {MAX_VOLUMES} are possible", self.volumes.len()),
            );
        }
        self.volumes.iter().try_for_each(Volume::validate)?;
        let mut targets: Vec<String> = self.volumes.iter().map(|one| plain_path(&one.target)).collect();
        targets.sort_unstable();
        if let Some(twice) = targets.windows(2).find(|pair| pair[0] == pair[1]) {
            return wrong("volumes", format!("two of them lead to '{}'", twice[0].escape_debug()));
        }
        if self.endpoints.len() > MAX_ENDPOINTS {
            let problem = format!("{} endpoints; at most {MAX_ENDPOINTS} are possible", self.endpoints.len());
            return wrong("endpoints", problem);
        }
        self.endpoints.iter().try_for_each(Endpoint::validate)?;
        let mut names: Vec<&str> = self.endpoints.iter().map(|endpoint| endpoint.name.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return wrong("endpoints", format!("'{}' is named twice", twice[0]));
        }
        let said: usize =
            self.driver_config.iter().map(|(key, value)| key.len() + value.to_string().len()).sum();
        if said > MAX_DRIVER_CONFIG {
            return wrong("driver_config", format!("{said} bytes; at most {MAX_DRIVER_CONFIG} are possible"));
        }
        if self.stop_grace > Duration::from_secs(3600) {
            return wrong("stop_grace", "at most one hour");
        }
        Ok(())
    }

    fn validate_command(&self) -> Result<(), InvalidSpec> {
        if self.command.is_empty() && (self.stdin || self.tty) {
            let field = if self.stdin { "stdin" } else { "tty" };
            return wrong(field, "it is the main command's, and there is none");
        }
        if self.command.first().is_some_and(String::is_empty) {
            return wrong("command", "the program's name is empty");
        }
        if self.command.iter().any(|a| a.contains('\0')) {
            return wrong("command", "an argument holds a NUL byte");
        }
        if self.command.iter().any(|argument| argument.len() > MAX_WORD) {
            return wrong("command", format!("an argument has more than {MAX_WORD} bytes"));
        }
        if self.command.iter().map(|argument| argument.len() + EACH).sum::<usize>() > MAX_TEXT {
            return wrong("command", format!("longer than {MAX_TEXT} bytes, with {EACH} for each argument"));
        }
        Ok(())
    }
}

/// A text of bounded length that can be shown as it is.
fn is_line(text: &str, longest: usize) -> bool {
    text.len() <= longest && !text.contains(char::is_control)
}

fn validate_path(field: &'static str, path: &str) -> Result<(), InvalidSpec> {
    if !path.starts_with('/') {
        return wrong(field, format!("'{}' is not an absolute path", clip(path).escape_debug()));
    }
    if !is_line(path, MAX_PATH) {
        return wrong(field, format!("a path has no control characters and at most {MAX_PATH} bytes"));
    }
    Ok(())
}

impl Resources {
    fn validate(&self, host: HostLimits) -> Result<(), InvalidSpec> {
        if self.cpus == 0 || self.cpus > MAX_CPUS {
            return wrong(
                "resources.cpus",
                format!("{} CPUs asked for; 1 to {MAX_CPUS} are possible", self.cpus),
            );
        }
        if self.cpus > host.cpus.saturating_mul(4) {
            let problem = format!(
                "{} CPUs asked for; the host has {}, at most four times that is allowed",
                self.cpus, host.cpus
            );
            return wrong("resources.cpus", problem);
        }
        if self.memory_bytes < MIN_MEMORY {
            let problem =
                format!("{} asked for; at least {} is needed", size(self.memory_bytes), size(MIN_MEMORY));
            return wrong("resources.memory_bytes", problem);
        }
        if self.memory_bytes > host.memory_bytes {
            let problem =
                format!("{} asked for; the host has {}", size(self.memory_bytes), size(host.memory_bytes));
            return wrong("resources.memory_bytes", problem);
        }
        if self.disk_bytes != 0 && !(MIN_DISK..=MAX_DISK).contains(&self.disk_bytes) {
            let problem = format!(
                "{} asked for; {} to {} are possible",
                size(self.disk_bytes),
                size(MIN_DISK),
                size(MAX_DISK)
            );
            return wrong("resources.disk_bytes", problem);
        }
        Ok(())
    }
}

/// Checks an environment: names without '=', nothing with NUL, all of bounded size.
///
/// # Errors
/// Names `field` and the variable.
pub fn validate_environment(
    field: &'static str,
    environment: &BTreeMap<String, String>,
) -> Result<(), InvalidSpec> {
    for (key, value) in environment {
        if key.is_empty() || key.contains(['=', '\0']) || value.contains('\0') {
            return wrong(field, format!("variable '{}' is not valid", clip(key).escape_debug()));
        }
        if key.len() + 1 + value.len() > MAX_WORD {
            let problem = format!("variable '{}' has more than {MAX_WORD} bytes", clip(key).escape_debug());
            return wrong(field, problem);
        }
    }
    if environment.iter().map(|(k, v)| k.len() + v.len() + EACH).sum::<usize>() > MAX_TEXT {
        return wrong(field, format!("longer than {MAX_TEXT} bytes, with {EACH} for each variable"));
    }
    Ok(())
}

/// Most annotations, all together, bytes.
const MAX_ANNOTATIONS: usize = 256 << 10;

/// Checks annotations: keys as of labels, values of any text, all of bounded size.
///
/// # Errors
/// Names the annotation.
pub fn validate_annotations(annotations: &BTreeMap<String, String>) -> Result<(), InvalidSpec> {
    for (key, value) in annotations {
        validate_key("annotations", key)?;
        if value.contains('\0') {
            return wrong("annotations", format!("'{key}': the value holds a NUL byte"));
        }
    }
    if annotations.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>() > MAX_ANNOTATIONS {
        return wrong("annotations", format!("longer than {} in all", size(MAX_ANNOTATIONS as u64)));
    }
    Ok(())
}

/// Checks labels: keys of an optional DNS prefix and a name, values of at most 63 letters, as Kubernetes has them.
///
/// # Errors
/// Names the label.
pub fn validate_labels(labels: &BTreeMap<String, String>) -> Result<(), InvalidSpec> {
    if labels.len() > 64 {
        return wrong("labels", format!("{} labels; at most 64 are possible", labels.len()));
    }
    for (key, value) in labels {
        validate_key("labels", key)?;
        if !word(value, 63) {
            return wrong(
                "labels",
                format!("'{}={}' is not valid: {SYNTAX}", key.escape_debug(), value.escape_debug()),
            );
        }
    }
    Ok(())
}

const SYNTAX: &str =
    "letters, digits, '-', '_' and '.', at most 63, beginning and ending with a letter or digit";

/// Checks the key of a label or annotation.
fn validate_key(field: &'static str, key: &str) -> Result<(), InvalidSpec> {
    let (prefix, name) = key.rsplit_once('/').map_or((None, key), |(p, n)| (Some(p), n));
    if !word(name, 63) || name.is_empty() || !prefix.is_none_or(|p| !p.is_empty() && word(p, 253)) {
        return wrong(field, format!("key '{}' is not valid: {SYNTAX}", key.escape_debug()));
    }
    if let Some(reserved) = RESERVED_PREFIXES.iter().find(|reserved| key.starts_with(**reserved)) {
        return wrong(field, format!("'{key}': keys under '{reserved}' are not for users"));
    }
    Ok(())
}

fn word(text: &str, longest: usize) -> bool {
    let end = |b: Option<u8>| b.is_none_or(|b| b.is_ascii_alphanumeric());
    text.len() <= longest
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && end(text.bytes().next())
        && end(text.bytes().last())
}

/// Bytes as people read them: "10 GiB", "96 MiB".
pub fn size(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    for (unit, factor) in UNITS {
        if bytes >= factor {
            let tenths = u128::from(bytes) * 10 / u128::from(factor);
            return if tenths % 10 == 0 {
                format!("{} {unit}", tenths / 10)
            } else {
                format!("{}.{} {unit}", tenths / 10, tenths % 10)
            };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const HOST: HostLimits = HostLimits { memory_bytes: 4 << 30, cpus: 2 };

    pub(crate) fn spec() -> SandboxSpec {
        SandboxSpec {
            hostname: "web".into(),
            ..SandboxSpec::of(
                "sim",
                "debian",
                "sha256:0",
                Resources { cpus: 1, memory_bytes: 256 << 20, disk_bytes: 1 << 30 },
            )
        }
    }

    #[test]
    fn each_bad_field_is_refused_by_its_name() {
        type Case = (&'static str, fn(&mut SandboxSpec));
        let cases: [Case; 12] = [
            ("resources.cpus", |s| s.resources.cpus = 0),
            ("resources.cpus", |s| s.resources.cpus = 33),
            ("resources.cpus", |s| s.resources.cpus = 9),
            ("resources.memory_bytes", |s| s.resources.memory_bytes = 1 << 20),
            ("resources.memory_bytes", |s| s.resources.memory_bytes = 8 << 30),
            ("resources.disk_bytes", |s| s.resources.disk_bytes = u64::MAX),
            ("image", |s| s.image.clear()),
            ("command", |s| s.command = vec!["a\0".into()]),
            ("environment", |s| drop(s.environment.insert("A=B".into(), String::new()))),
            ("workdir", |s| s.workdir = Some("relative".into())),
            ("machine", |s| s.machine = "xen".into()),
            ("user", |s| s.user = Some("a b".into())),
        ];
        assert_eq!(spec().validate(HOST), Ok(()));
        for (field, spoil) in cases {
            let mut bad = spec();
            spoil(&mut bad);
            assert_eq!(bad.validate(HOST).unwrap_err().field, field);
        }
    }

    #[test]
    fn a_volume_is_a_name_or_a_path_and_leads_to_a_path_below_the_root() {
        let of = |source: &str, target: &str| {
            let volume = Volume { source: source.into(), target: target.into(), read_only: false };
            SandboxSpec { volumes: vec![volume], ..spec() }.validate(HOST).is_ok()
        };
        assert!(of("cache", "/var/cache") && of("/srv/data", "/data"));
        for (source, target) in [
            ("", "/a"),
            ("a b", "/a"),
            ("-a", "/a"),
            ("../a", "/a"),
            ("/a/../b", "/a"),
            ("a", "b"),
            ("a", "/"),
            ("a", "/b/.."),
            ("a", "/./"),
        ] {
            assert!(!of(source, target), "{source} at {target}");
        }
    }

    #[test]
    fn two_volumes_lead_to_two_places_however_these_are_written() {
        let of = |targets: [&str; 2]| {
            let volume =
                |target: &str| Volume { source: "a".into(), target: target.into(), read_only: false };
            SandboxSpec { volumes: targets.map(volume).to_vec(), ..spec() }.validate(HOST)
        };
        of(["/data", "/data/cache"]).unwrap();
        for (one, other) in [("/a", "/a"), ("/a/", "/a"), ("//a", "/a"), ("/a/./b", "/a/b/")] {
            let refused = of([one, other]).unwrap_err().to_string();
            assert!(refused.starts_with("volumes: ") && refused.contains("two of them"), "{refused}");
        }
        assert_eq!(["//a//b/.", "/", "a/"].map(plain_path), ["/a/b", "/", "a"]);
    }

    #[test]
    fn memory_beyond_the_host_says_both_sizes() {
        let mut bad = spec();
        bad.resources.memory_bytes = 64 << 30;
        assert_eq!(
            bad.validate(HOST).unwrap_err().to_string(),
            "resources.memory_bytes: 64 GiB asked for; the host has 4 GiB"
        );
    }

    #[test]
    fn labels_follow_the_kubernetes_rules_and_ours_are_reserved() {
        let one = |k: &str, v: &str| validate_labels(&BTreeMap::from([(k.to_owned(), v.to_owned())]));
        assert!(one("team", "blue").is_ok() && one("example.org/team", "").is_ok());
        for (k, v) in [("", "x"), ("-a", "x"), ("a", "b c"), ("/a", "x"), ("torpor.dev/x", "y")] {
            assert!(one(k, v).is_err(), "{k}={v}");
        }
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!([size(0), size(1536), size(10 << 30)], ["0 B", "1.5 KiB", "10 GiB"]);
    }
}
