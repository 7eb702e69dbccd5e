//! What a cluster lacks for running sandboxes, and what to do about it. Looks only.

use std::time::SystemTime;

use kube::{
    Api,
    api::ListParams,
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde_json::{Value, json};

use torpor_sandbox::{Finding, Level};

mod each;

use crate::{
    client::{ApiError, Cluster, GROUP, LIMIT, Lane, Served},
    config::{AgentLink, ConfigError, KubernetesConfig},
    folder,
    trust::{self, Found},
};

/// The rights without which sandboxes can't run: group, resource, subresource, verbs.
const NEEDED: [(&str, &str, &str, &[&str]); 4] = [
    (GROUP, "sandboxes", "", &["get", "list", "watch", "create", "patch", "delete"]),
    ("", "pods", "", &["get", "list", "watch", "delete"]),
    ("", "persistentvolumeclaims", "", &["get", "list", "create", "delete"]),
    ("", "pods", "exec", &["get", "create"]),
];
/// Those that are missed by people only.
const NICE: [(&str, &str, &str, &[&str]); 2] =
    [("", "pods", "log", &["get"]), ("", "serviceaccounts", "", &["get"])];

/// Every right that the driver uses: "create sandboxes".
pub fn rights() -> Vec<String> {
    let all = NEEDED
        .iter()
        .chain(&NICE)
        .flat_map(|(_, resource, sub, verbs)| verbs.iter().map(move |verb| right(verb, resource, sub)));
    all.collect()
}

fn right(verb: &str, resource: &str, sub: &str) -> String {
    if sub.is_empty() { format!("{verb} {resource}") } else { format!("{verb} {resource}/{sub}") }
}

/// Looks at everything that the driver needs of a cluster.
///
/// # Errors
/// As `KubernetesDriver::new`.
pub async fn diagnose(config: &KubernetesConfig) -> Result<Vec<Finding>, ConfigError> {
    config.validate()?;
    let cluster = Cluster::open(config).await?;
    let mut all = Vec::new();
    match cluster.raw::<Value>(Lane::Fast, "/version").await {
        Ok(version) => {
            let text = version["gitVersion"].as_str().unwrap_or("an unknown version");
            all.push(Finding::new("cluster", Level::Ok, format!("{text} at {}", cluster.url), ""));
        }
        Err(error) => {
            let advice = "look at `kubeconfig` and `context` under [kubernetes], or at the cluster";
            all.push(Finding::new("cluster", Level::Fail, error.to_string(), advice));
            return Ok(all);
        }
    }
    let (finding, served) = versions(&cluster).await;
    all.push(finding);
    all.extend(each::look(&cluster, config, served).await);
    let storage = ("storage.k8s.io", "StorageClass", "storageclasses");
    let named = each::named(config, "storageClassName").collect();
    all.push(class(&cluster, "storage-class", storage, config.storage_class.as_deref(), named).await);
    let runtime = ("node.k8s.io", "RuntimeClass", "runtimeclasses");
    let named = each::named(config, "runtimeClassName").collect();
    all.push(class(&cluster, "runtime-class", runtime, config.runtime_class.as_deref(), named).await);
    all.push(agent_link(config));
    if config.agent_volume {
        let text = "whether nodes let programs of image volumes run is not looked at: Kubernetes up to 1.35 has them mounted noexec, and then no pod comes up";
        let advice = "try one sandbox; set `agent_volume = false` under [kubernetes] when it ends with StartError or code 126";
        all.push(Finding::new("agent-volume", Level::Warn, text.to_owned(), advice));
    }
    all.push(agent_image(&config.agent_image));
    Ok(all)
}

/// Which way agents are reached, and what for that is kept here.
fn agent_link(config: &KubernetesConfig) -> Finding {
    let name = "agent-link";
    if config.agent_link == AgentLink::Exec {
        return Finding::new(name, Level::Ok, "exec, by the API server", "");
    }
    let path = folder::path(&config.state_dir).join(trust::FILE);
    let (port, file) = (config.agent_port, path.display());
    let again = "the gateway makes another one when it starts, and gives agents new credentials by exec";
    match trust::look(&path) {
        Ok(Found::Nothing) => {
            let text = format!(
                "mtls on port {port} of pods; the authority {file} is made when the gateway first starts"
            );
            Finding::new(name, Level::Ok, text, "")
        }
        Ok(Found::Good(kept)) => {
            let left = kept.until.duration_since(SystemTime::now()).unwrap_or_default();
            let days = left.as_secs() / (24 * 3600);
            let text = format!("mtls on port {port} of pods; the authority {file} expires in {days} days");
            Finding::new(name, Level::Ok, text, "")
        }
        Ok(Found::Useless(why)) => {
            let text = format!("mtls on port {port} of pods; the authority {file} can't be used: {why}");
            Finding::new(name, Level::Warn, text, again)
        }
        Err(error) => {
            let text = format!("mtls on port {port} of pods; the authority {file} is not known: {error}");
            Finding::new(name, Level::Warn, text, "ask as the user that the gateway runs as")
        }
    }
}

/// Nobody but a node can tell whether an image is there.
fn agent_image(image: &str) -> Finding {
    let text = format!("{image}: not looked at, as only nodes can pull it");
    let registry = image.split_once('/').map_or("", |(first, _)| first);
    if registry.contains(['.', ':']) || registry == "localhost" {
        return Finding::new("agent-image", Level::Ok, text, "");
    }
    let advice = "it names no registry: push the image of deploy/kubernetes/Containerfile.agent to one and name it whole, unless every node has it already";
    Finding::new("agent-image", Level::Warn, text, advice)
}

async fn versions(cluster: &Cluster) -> (Finding, Option<Served>) {
    let name = "agent-sandbox";
    let all = match cluster.versions().await {
        Ok(all) => all,
        Err(error) => return (Finding::new(name, Level::Fail, error.to_string(), ""), None),
    };
    let Some(served) = Served::best(&all) else {
        let advice = "kubectl apply -f the release's manifest.yaml";
        return (Finding::new(name, Level::Fail, ApiError::Absent.to_string(), advice), None);
    };
    let text = format!("serves {}; {} is used", all.join(" and "), served.name());
    let finding = match served {
        Served::V1beta1 => Finding::new(name, Level::Ok, text, ""),
        Served::V1alpha1 => {
            let advice = "update agent-sandbox to 0.5.4 or later: v1alpha1 is gone from 1.0 on";
            Finding::new(name, Level::Warn, text, advice)
        }
    };
    (finding, Some(served))
}

async fn may(
    cluster: &Cluster,
    namespace: &str,
    group: &str,
    resource: &str,
    sub: &str,
    verb: &str,
) -> Result<bool, ApiError> {
    let what = format!("ask for the right to {verb} {resource}");
    let body = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "metadata": {},
        "spec": {"resourceAttributes": {
            "namespace": namespace, "group": group, "resource": resource, "subresource": sub, "verb": verb,
        }},
    });
    let request = hyper::Request::post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews")
        .header("Content-Type", "application/json")
        .body(body.to_string().into_bytes())
        .map_err(|error| ApiError::Unreachable {
            what: what.clone(),
            source: Box::new(kube::Error::HttpError(error)),
        })?;
    let answer: Value = cluster.call(Lane::Fast, LIMIT, &what, cluster.client.request(request)).await?;
    Ok(answer["status"]["allowed"] == json!(true))
}

/// Says which storage class those have that name none.
const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";

/// Whether the class that all have is there, and those that sandboxes may name.
async fn class(
    cluster: &Cluster,
    name: &'static str,
    (group, kind, plural): (&str, &str, &str),
    wanted: Option<&str>,
    sayable: Vec<String>,
) -> Finding {
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, "v1", kind), plural);
    let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource);
    let listed =
        cluster.call(Lane::List, LIMIT, &format!("list {plural}"), api.list(&ListParams::default())).await;
    let list = match listed {
        Ok(list) => list.items,
        Err(error) => {
            let text = format!("not looked at: {error}");
            let advice =
                "let the gateway's account list them (the ClusterRole torpor-cluster), or ask an admin";
            return Finding::new(name, Level::Warn, text, advice);
        }
    };
    let there: Vec<&str> = list.iter().filter_map(|one| one.metadata.name.as_deref()).collect();
    let is_default = |one: &&DynamicObject| {
        one.metadata
            .annotations
            .as_ref()
            .and_then(|all| all.get(DEFAULT_CLASS))
            .is_some_and(|is| is == "true")
    };
    let default = list.iter().find(is_default).and_then(|one| one.metadata.name.as_deref());
    let shown = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    let missing = |one: &&String| !there.contains(&one.as_str());
    let missing: Vec<&str> = sayable.iter().filter(missing).map(String::as_str).collect();
    match (wanted, default) {
        (Some(wanted), _) if !there.contains(&wanted) => Finding::new(
            name,
            Level::Fail,
            format!("'{wanted}' is not there: {shown}"),
            "install it, or name another one",
        ),
        _ if !missing.is_empty() => Finding::new(
            name,
            Level::Warn,
            format!(
                "of those that sandboxes may name by `driver_config`, {} is not there: {shown}",
                missing.join(", ")
            ),
            "install it, or take it out of the list",
        ),
        (Some(wanted), _) => Finding::new(name, Level::Ok, format!("{wanted}, of {shown}"), ""),
        (None, _) if name == "runtime-class" => {
            let advice = "pods share their nodes' kernels; name a class of microVMs by `runtime_class` (Kata Containers)";
            Finding::new(name, Level::Warn, format!("none is named; there: {shown}"), advice)
        }
        (None, Some(default)) => {
            Finding::new(name, Level::Ok, format!("the cluster's default, {default}, of {shown}"), "")
        }
        (None, None) => Finding::new(
            name,
            Level::Fail,
            format!(
                "none is named, and none is the cluster's default: workspaces stay unbound; there: {shown}"
            ),
            format!("name one by `storage_class` under [kubernetes], or annotate one: {DEFAULT_CLASS}=true"),
        ),
    }
}
