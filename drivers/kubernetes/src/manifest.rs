//! How a sandbox is a Sandbox object and a claim: what the cluster is told at its creation, once and for all.

use std::borrow::Cow;

use serde_json::{Value, json};
use torpor_sandbox::{
    SandboxId, SandboxSpec,
    spec::{Endpoint, plain_path},
};

use crate::{
    client::Served,
    config::{AgentLink, KubernetesConfig, is_subdomain},
    types::{GATEWAY, SANDBOX, claim_name, name},
};

/// The container that is the sandbox.
pub(crate) const CONTAINER: &str = "sandbox";
/// Where it finds the agent, and where the agent listens.
const AGENT: &str = "/.torpor/torpor-agent";
pub(crate) const SOCKET: &str = "/.torpor/agent.sock";
const FOLDER: &str = "/.torpor";
/// Where it is when its image is a volume.
const VOLUME: &str = "/.torpor-agent";
const AGENT_IN_VOLUME: &str = "/.torpor-agent/torpor-agent";
/// That volume's name.
pub(crate) const AGENT_VOLUME: &str = "agent";
/// A pod's grace, by its name.
const GRACE: &str = "terminationGracePeriodSeconds";
/// The init container that copies the agent.
pub(crate) const CARRIER: &str = "agent";
/// Tells the agent the pod's grace in seconds. A variable: agents of before ignore it.
const TOLD_GRACE: &str = "TORPOR_GRACE_SECONDS";
/// The least that a pod's grace is: the agent ends processes and syncs within it, also when nobody but the kubelet asks.
const LEAST_GRACE: u64 = 10;
/// The workspace among a pod's volumes, and its claim template.
const WORKSPACE: &str = "workspace";
/// What root in a container needs to set up users, packages and services, and no more of what engines give.
const CAPABILITIES: [&str; 8] =
    ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID"];

/// The agent's program in a pod, by the way it came there.
pub(crate) fn program(by_volume: bool) -> &'static str {
    if by_volume { AGENT_IN_VOLUME } else { AGENT }
}

/// The configuration as it is for a sandbox that says something of it.
fn of<'a>(config: &'a KubernetesConfig, spec: &SandboxSpec) -> Cow<'a, KubernetesConfig> {
    if spec.driver_config.is_empty() {
        return Cow::Borrowed(config);
    }
    let mut config = config.clone();
    for (key, value) in &spec.driver_config {
        let text = || value.as_str().map(str::to_owned);
        match key.as_str() {
            "claimTemplates" => config.claim_templates = value == &Value::Bool(true),
            "runtimeClassName" => config.runtime_class = text(),
            "serviceAccountName" => config.service_account = text(),
            "storageClassName" => config.storage_class = text(),
            "nodeSelector" => {
                let all = value.as_object().into_iter().flatten();
                let said = all.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
                for (key, value) in said {
                    // Nobody leaves the nodes that all are meant for.
                    config.node_selector.entry(key).or_insert(value);
                }
            }
            _ => drop(config.pod.insert(key.clone(), value.clone())),
        }
    }
    Cow::Owned(config)
}

/// Refuses what no pod can be, by the name of the field.
///
/// # Errors
/// The field and why.
pub(crate) fn check(config: &KubernetesConfig, spec: &SandboxSpec) -> Result<(), String> {
    if spec.kernel.is_some() {
        return Err("kernel: a pod's kernel is its node's or its runtime class's".to_owned());
    }
    if spec.machine != "auto" {
        return Err(
            "machine: a pod has none; a runtime class of microVMs is set by `runtime_class`".to_owned()
        );
    }
    if spec.egress.is_some() {
        return Err("egress: where a pod may send to is the cluster's network policies' to say".to_owned());
    }
    let of_agent = |endpoint: &&Endpoint| endpoint.port == config.agent_port;
    if config.agent_link == AgentLink::Mtls
        && let Some(endpoint) = spec.endpoints.iter().find(of_agent)
    {
        return Err(format!(
            "endpoints: '{}': port {} is where the agent itself answers in every pod; serve on another one, or have an administrator change `agent_port` under [kubernetes]",
            endpoint.name, endpoint.port
        ));
    }
    for volume in &spec.volumes {
        let (claim, path) = claim_of(&volume.source);
        if !is_subdomain(claim) {
            return Err(format!(
                "volumes: '{}' names no claim: 'CLAIM' is one of the namespace, '/CLAIM/FOLDER' a folder in it; folders of nodes are not mounted",
                volume.source.escape_debug()
            ));
        }
        if claim.starts_with("torpor-") || claim.starts_with("workspace-torpor-") {
            return Err(format!("volumes: '{claim}' is named as the workspace of a sandbox, and its alone"));
        }
        if path.is_some_and(|path| path.split('/').any(|part| part.is_empty() || part == "..")) {
            return Err(format!("volumes: '{}' names no folder", volume.source.escape_debug()));
        }
        let target = plain_path(&volume.target);
        if target.contains(':') {
            return Err(format!("volumes: '{}': no pod mounts where a ':' is", target.escape_debug()));
        }
        let inside = |folder: &str| target == folder || target.starts_with(&format!("{folder}/"));
        if inside(FOLDER) || inside(VOLUME) {
            return Err(format!("volumes: '{}' is where the agent is", target.escape_debug()));
        }
        if target == config.mount_path && volume.read_only {
            return Err(format!("volumes: the workspace at '{target}' must be writable"));
        }
    }
    Ok(())
}

/// A volume's claim and the folder in it.
pub(crate) fn claim_of(source: &str) -> (&str, Option<&str>) {
    match source.strip_prefix('/') {
        None => (source, None),
        Some(rest) => match rest.split_once('/') {
            None => (rest, None),
            Some((claim, path)) => (claim, Some(path)),
        },
    }
}

/// The claims of others that a sandbox mounts.
pub(crate) fn claims_of(spec: &SandboxSpec) -> Vec<&str> {
    let mut all: Vec<&str> = spec.volumes.iter().map(|volume| claim_of(&volume.source).0).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Whether the workspace is a claim that the driver makes: not when the sandbox brings one for that place.
pub(crate) fn has_own_claim(config: &KubernetesConfig, spec: &SandboxSpec) -> bool {
    !of(config, spec).claim_templates && !brings_workspace(config, spec)
}

fn brings_workspace(config: &KubernetesConfig, spec: &SandboxSpec) -> bool {
    spec.volumes.iter().any(|volume| plain_path(&volume.target) == config.mount_path)
}

fn labels(id: &SandboxId, identity: &str) -> Value {
    json!({GATEWAY: identity, SANDBOX: id.as_str(), "app.kubernetes.io/managed-by": "torpor"})
}

fn claim_spec(config: &KubernetesConfig, spec: &SandboxSpec) -> Value {
    let bytes =
        if spec.resources.disk_bytes == 0 { config.workspace_bytes } else { spec.resources.disk_bytes };
    let mut claim = json!({
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": bytes.to_string()}},
    });
    if let Some(class) = &config.storage_class {
        claim["storageClassName"] = json!(class);
    }
    claim
}

/// The claim of the workspace. Nobody owns it, so that nobody's deletion of the Sandbox object takes the data along.
pub(crate) fn claim(config: &KubernetesConfig, id: &SandboxId, identity: &str, spec: &SandboxSpec) -> Value {
    let config = &of(config, spec);
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim_name(id), "labels": labels(id, identity)},
        "spec": claim_spec(config, spec),
    })
}

/// The field that wakes a Sandbox or puts it to sleep.
pub(crate) fn mode(served: Served, running: bool) -> (&'static str, Value) {
    match served {
        Served::V1beta1 => ("operatingMode", json!(if running { "Running" } else { "Suspended" })),
        Served::V1alpha1 => ("replicas", json!(u8::from(running))),
    }
}

/// The Sandbox object, asleep.
pub(crate) fn sandbox(
    served: Served,
    config: &KubernetesConfig,
    id: &SandboxId,
    identity: &str,
    spec: &SandboxSpec,
) -> Value {
    let config = &of(config, spec);
    let (field, asleep) = mode(served, false);
    let mut wanted = json!({
        "podTemplate": {"metadata": {"labels": labels(id, identity)}, "spec": pod(config, id, spec)},
        // Whatever the gateway's fate: nothing ends a sandbox but a delete.
        "shutdownPolicy": "Retain",
    });
    wanted[field] = asleep;
    if config.claim_templates && !brings_workspace(config, spec) {
        let template = json!({"metadata": {"name": WORKSPACE}, "spec": claim_spec(config, spec)});
        wanted["volumeClaimTemplates"] = json!([template]);
    }
    json!({
        "apiVersion": format!("{}/{}", crate::client::GROUP, served.name()),
        "kind": "Sandbox",
        "metadata": {"name": name(id), "labels": labels(id, identity)},
        "spec": wanted,
    })
}

fn pod(config: &KubernetesConfig, id: &SandboxId, spec: &SandboxSpec) -> Value {
    let hostname = if spec.hostname.is_empty() { id.as_str() } else { &spec.hostname };
    let limits = limits(spec);
    let (volumes, mounts) = volumes(config, id, spec);
    let confined = json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"], "add": CAPABILITIES},
        "privileged": false,
    });
    let mut pod = json!({
        "containers": [{
            "name": CONTAINER,
            "image": spec.image,
            "command": [program(config.agent_volume), "--pod", SOCKET],
            "args": [],
            "env": [{"name": TOLD_GRACE, "value": grace(spec).to_string()}],
            "workingDir": "/",
            "resources": {"limits": limits, "requests": limits},
            "securityContext": confined,
            "volumeMounts": mounts,
        }],
        "volumes": volumes,
        // What becomes of a pod that ends is decided by the sandbox's record, and by nobody else.
        "restartPolicy": "Never",
        "hostname": hostname,
        "securityContext": {
            "runAsUser": 0, "runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        GRACE: grace(spec),
    });
    if !config.agent_volume {
        pod["initContainers"] = json!([carrier(config)]);
    }
    for (key, value) in &config.pod {
        pod[key] = value.clone();
    }
    if let Some(class) = &config.runtime_class {
        pod["runtimeClassName"] = json!(class);
    }
    if !config.node_selector.is_empty() {
        pod["nodeSelector"] = json!(config.node_selector);
    }
    if let Some(account) = &config.service_account {
        pod["serviceAccountName"] = json!(account);
    }
    pod
}

fn limits(spec: &SandboxSpec) -> Value {
    json!({
        "cpu": spec.resources.cpus.to_string(), "memory": spec.resources.memory_bytes.to_string(),
    })
}

/// Makes of a pod's spec that is there what an update can change of it; false when the sandbox's container is missing.
pub(crate) fn fit(config: &KubernetesConfig, spec: &SandboxSpec, pod: &mut Value) -> bool {
    if !of(config, spec).pod.contains_key(GRACE) {
        pod[GRACE] = json!(grace(spec));
    }
    let containers = pod["containers"].as_array_mut().into_iter().flatten();
    let Some(ours) = containers.into_iter().find(|one| one["name"] == CONTAINER) else { return false };
    let variables = ours["env"].as_array_mut().into_iter().flatten();
    for told in variables.filter(|variable| variable["name"] == TOLD_GRACE) {
        told["value"] = json!(grace(spec).to_string());
    }
    for (key, value) in limits(spec).as_object().into_iter().flatten() {
        ours["resources"]["limits"][key] = value.clone();
        ours["resources"]["requests"][key] = value.clone();
    }
    true
}

/// What copies the agent into a pod.
fn carrier(config: &KubernetesConfig) -> Value {
    json!({
        "name": CARRIER,
        "image": config.agent_image,
        "command": ["/torpor-agent", "--install", FOLDER],
        "resources": {
            "limits": {"cpu": "1", "memory": "64Mi"}, "requests": {"cpu": "10m", "memory": "16Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "privileged": false,
        },
        "volumeMounts": [{"name": "torpor", "mountPath": FOLDER}],
    })
}

fn volumes(config: &KubernetesConfig, id: &SandboxId, spec: &SandboxSpec) -> (Vec<Value>, Vec<Value>) {
    let mut volumes = vec![json!({"name": "torpor", "emptyDir": {"sizeLimit": "64Mi"}})];
    let mut mounts = vec![json!({"name": "torpor", "mountPath": FOLDER})];
    if config.agent_volume {
        let image = json!({"reference": config.agent_image, "pullPolicy": "IfNotPresent"});
        volumes.push(json!({"name": AGENT_VOLUME, "image": image}));
        mounts.push(json!({"name": AGENT_VOLUME, "mountPath": VOLUME, "readOnly": true}));
    }
    if !brings_workspace(config, spec) {
        // One of a template is added to the pod by the controller.
        if !config.claim_templates {
            let claim = json!({"claimName": claim_name(id)});
            volumes.push(json!({"name": WORKSPACE, "persistentVolumeClaim": claim}));
        }
        mounts.push(json!({"name": WORKSPACE, "mountPath": config.mount_path}));
    }
    let claims = claims_of(spec);
    for (at, claim) in claims.iter().enumerate() {
        volumes.push(json!({"name": format!("claim-{at}"), "persistentVolumeClaim": {"claimName": claim}}));
    }
    for volume in &spec.volumes {
        let (claim, path) = claim_of(&volume.source);
        let at = claims.iter().position(|one| *one == claim).unwrap_or_default();
        let mut mount = json!({
            "name": format!("claim-{at}"), "mountPath": plain_path(&volume.target), "readOnly": volume.read_only,
        });
        if let Some(path) = path {
            mount["subPath"] = json!(path);
        }
        mounts.push(mount);
    }
    (volumes, mounts)
}

/// A pod's grace, in whole seconds.
fn grace(spec: &SandboxSpec) -> u64 {
    let time = spec.stop_grace;
    (time.as_secs() + u64::from(time.subsec_nanos() > 0)).max(LEAST_GRACE)
}
