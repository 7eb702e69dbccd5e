//! What the kubernetes driver is told at its start.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use serde_json::{Map, Value};
use torpor_sandbox::spec::plain_path;

use crate::passed::{self, PASSED};

/// How agents are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentLink {
    /// By the API server's exec, from wherever that can be reached.
    Exec,
    /// On a port of their own by mutual TLS, which the gateway must be able to connect to; where it isn't, by exec.
    Mtls,
}

/// The configuration of the kubernetes driver.
#[derive(Clone, Debug)]
pub struct KubernetesConfig {
    /// Durable: `kubernetes/`.
    pub state_dir: PathBuf,
    /// The label that its objects have (`torpor.dev/gateway`); none: that of the state directory, made when there is none.
    pub identity: Option<String>,
    /// A kubeconfig file; none: what `KUBECONFIG` or ~/.kube/config says, else the pod's own service account.
    pub kubeconfig: Option<PathBuf>,
    /// A context of it; none: the current one.
    pub context: Option<String>,
    /// Where sandboxes are made; none: the context's namespace.
    pub namespace: Option<String>,
    /// Namespaces of workspaces that have their own, by the workspace's name.
    pub namespaces: BTreeMap<String, String>,
    /// The image whose program /torpor-agent is the static agent.
    pub agent_image: String,
    /// Of the claims that the driver makes; none: the cluster's default.
    pub storage_class: Option<String>,
    /// Of every pod ("kata"); none: the cluster's default.
    pub runtime_class: Option<String>,
    /// Of every pod.
    pub node_selector: BTreeMap<String, String>,
    /// Of every pod; its token is not mounted. None: the namespace's default.
    pub service_account: Option<String>,
    /// Where the workspace is mounted: all that lasts of a sandbox.
    pub mount_path: String,
    /// Size of a workspace that asks for none, bytes.
    pub workspace_bytes: u64,
    /// The workspace is a claim template of the Sandbox object: owned by it, and gone when anybody deletes it.
    pub claim_templates: bool,
    /// Fields that every pod has beside: those of [`PASSED`] only.
    pub pod: Map<String, Value>,
    /// What a sandbox's or template's `driver_config` may say: of [`crate::SAYABLE`], each as a key or as "KEY=VALUE",
    /// which lets it have this value only.
    pub driver_config: BTreeSet<String>,
    /// The agent's image is mounted as a volume (Kubernetes 1.33 with its ImageVolume feature, or later) instead of being
    /// copied from by an init container.
    pub agent_volume: bool,
    /// How agents are reached.
    pub agent_link: AgentLink,
    /// Their own port, on the addresses of their pods.
    pub agent_port: u16,
    /// How long an agent whose port can't be used is reached by exec before the port is tried again, at first.
    pub dial_pause: Duration,
    /// A connection to an agent that nobody has used for so long is let go: by exec, each is one of the API server's.
    pub idle: Duration,
    /// How long a pod may take from its container's run to an agent that answers, and the controller to say anything.
    pub start_timeout: Duration,
    /// How long an image that can't be pulled, or a container that can't be made, is tried again by the pod's node before
    /// that is the sandbox's failure. One that was never asked for again after a hiccup of a registry would be one too few.
    pub patience: Duration,
    /// How long a pod may take to be gone after its grace has run out.
    pub stop_margin: Duration,
    /// How often what the watches have told is compared with all that there is.
    pub compare_every: Duration,
}

impl KubernetesConfig {
    /// A configuration with the defaults for everything but the paths and the agent's image.
    pub fn new(state_dir: impl Into<PathBuf>, agent_image: impl Into<String>) -> Self {
        Self {
            state_dir: state_dir.into(),
            identity: None,
            kubeconfig: None,
            context: None,
            namespace: None,
            namespaces: BTreeMap::new(),
            agent_image: agent_image.into(),
            storage_class: None,
            runtime_class: None,
            node_selector: BTreeMap::new(),
            service_account: None,
            mount_path: "/workspace".to_owned(),
            workspace_bytes: 10 << 30,
            claim_templates: false,
            pod: Map::new(),
            driver_config: BTreeSet::new(),
            agent_volume: false,
            agent_link: AgentLink::Exec,
            agent_port: 7443,
            dial_pause: Duration::from_secs(30),
            idle: Duration::from_secs(90),
            start_timeout: Duration::from_secs(120),
            patience: Duration::from_secs(90),
            stop_margin: Duration::from_secs(30),
            compare_every: Duration::from_secs(300),
        }
    }

    /// Every namespace that has sandboxes; `own` is where those are whose workspace has none of its own.
    pub(crate) fn all_namespaces(&self, own: &str) -> BTreeSet<String> {
        self.namespaces.values().cloned().chain([own.to_owned()]).collect()
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let wrong = |key, problem: String| Err(ConfigError::Value { key, problem });
        if !self.state_dir.is_absolute() {
            return wrong("state_dir", format!("'{}' is not an absolute path", self.state_dir.display()));
        }
        let image = &self.agent_image;
        if image.is_empty() || image.contains(|c: char| !c.is_ascii_graphic()) || image.starts_with('-') {
            return wrong(
                "agent_image",
                "the name of an image with the static agent as /torpor-agent is needed".to_owned(),
            );
        }
        let path = &self.mount_path;
        let plain = plain_path(path);
        let clean = path.starts_with('/') && plain != "/" && !path.split('/').any(|part| part == "..");
        if !clean || path.contains(':') || plain.starts_with("/.torpor") {
            return wrong("mount_path", format!("'{}' is no folder below the root", path.escape_debug()));
        }
        if self.agent_port < 1024 {
            return wrong("agent_port", format!("{} is below 1024", self.agent_port));
        }
        if self.workspace_bytes == 0 {
            return wrong("workspace_bytes", "at least one byte".to_owned());
        }
        for namespace in self.namespaces.values().chain(&self.namespace) {
            if !is_label(namespace) {
                let problem = format!("'{}' is not the name of a namespace", namespace.escape_debug());
                return wrong("namespace", problem);
            }
        }
        for workspace in self.namespaces.keys() {
            if !is_label(workspace) {
                let problem = format!("'{}' is not the name of a workspace", workspace.escape_debug());
                return wrong("namespaces", problem);
            }
        }
        let names = [
            ("storage_class", &self.storage_class),
            ("runtime_class", &self.runtime_class),
            ("service_account", &self.service_account),
        ];
        for (key, name) in names {
            if let Some(name) = name.as_ref().filter(|name| !is_subdomain(name)) {
                return wrong(key, format!("'{}' is no name: a-z, 0-9, '-' and '.'", name.escape_debug()));
            }
        }
        let selector = self.node_selector.iter().map(|(key, value)| (key.clone(), value.clone().into()));
        if let Err(problem) = passed::well_formed("nodeSelector", &Value::Object(selector.collect())) {
            return wrong("node_selector", problem);
        }
        if let Some(problem) = self.driver_config.iter().find_map(|text| passed::entry(text).err()) {
            return wrong("driver_config", problem);
        }
        for (key, value) in &self.pod {
            if !PASSED.contains(&key.as_str()) {
                let problem =
                    format!("'{key}' is not among the fields that are passed on: {}", PASSED.join(", "));
                return wrong("pod", problem);
            }
            if let Err(problem) = passed::well_formed(key, value) {
                return wrong("pod", format!("{key}: {problem}"));
            }
        }
        Ok(())
    }
}

/// RFC 1123 label, as names of namespaces and claims are.
pub(crate) fn is_label(text: &str) -> bool {
    let letter = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    (1..=63).contains(&bytes.len())
        && bytes.iter().all(|b| letter(b) || *b == b'-')
        && bytes.first().is_some_and(letter)
        && bytes.last().is_some_and(letter)
}

/// RFC 1123 subdomain, as names of most objects are.
pub(crate) fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

/// Why the driver can't be made from its configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A value is not possible.
    #[error("[kubernetes] {key}: {problem}")]
    Value {
        /// The key.
        key: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },
    /// No cluster is named anywhere.
    #[error(
        "no cluster is configured: name a kubeconfig file by `kubeconfig` under [kubernetes], or run the gateway in the cluster: {source}"
    )]
    NoCluster {
        /// What was tried.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The kubeconfig file can't be used.
    #[error("kubeconfig {}: {source}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No client can be made for the cluster.
    #[error("client of the cluster: {0}")]
    Client(#[source] Box<kube::Error>),
    /// It can't be read which sandboxes there are.
    #[error("where the objects of sandboxes are: {source}")]
    Places {
        /// Why.
        source: torpor_sandbox::DriverError,
    },
    /// A file or folder can't be made.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// What was attempted.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_that_would_open_the_node_is_not_passed_on() {
        let mut config = KubernetesConfig::new("/s", "agent:1");
        config.validate().unwrap();
        config.pod.insert("tolerations".to_owned(), serde_json::json!([]));
        config.validate().unwrap();
        for key in
            ["hostNetwork", "hostPID", "containers", "volumes", "securityContext", "serviceAccountName"]
        {
            let mut config = config.clone();
            config.pod.insert(key.to_owned(), Value::Bool(true));
            assert!(!passed::is_sayable(key) || key == "serviceAccountName", "{key}");
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("tolerations"), "{error}");
        }
    }

    #[test]
    fn values_that_can_not_work_are_refused_by_their_key() {
        type Case = (&'static str, fn(&mut KubernetesConfig));
        let cases: [Case; 18] = [
            ("storage_class", |c| c.storage_class = Some("Fast".into())),
            ("runtime_class", |c| c.runtime_class = Some("kata qemu".into())),
            ("service_account", |c| c.service_account = Some("a/b".into())),
            ("node_selector", |c| drop(c.node_selector.insert("disk".into(), "a b".into()))),
            ("node_selector", |c| drop(c.node_selector.insert("-disk".into(), "ssd".into()))),
            ("namespaces", |c| drop(c.namespaces.insert("Team A".into(), "team".into()))),
            ("agent_image", |c| c.agent_image = "a b".into()),
            ("agent_port", |c| c.agent_port = 1023),
            ("agent_port", |c| c.agent_port = 0),
            ("driver_config", |c| c.driver_config = ["runtimeClassName=No!".to_owned()].into()),
            ("driver_config", |c| c.driver_config = ["hostNetwork".to_owned()].into()),
            ("tolerations", |c| drop(c.pod.insert("tolerations".into(), serde_json::json!([{"kye": "a"}])))),
            ("state_dir", |c| c.state_dir = "relative".into()),
            ("agent_image", |c| c.agent_image = " ".into()),
            ("mount_path", |c| c.mount_path = "/".into()),
            ("mount_path", |c| c.mount_path = "/a/../b".into()),
            ("mount_path", |c| c.mount_path = "/.torpor".into()),
            ("namespace", |c| c.namespace = Some("Not_a_label".into())),
        ];
        for (key, spoil) in cases {
            let mut config = KubernetesConfig::new("/s", "agent:1");
            spoil(&mut config);
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
    }
}
