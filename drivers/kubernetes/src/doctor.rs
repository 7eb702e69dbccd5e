//! What a cluster lacks for running sandboxes, and what to do about it. Looks only.

use kube::{
    Api,
    api::ListParams,
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde_json::{Value, json};

use torpor_sandbox::{Finding, Level};

use crate::{
    client::{ApiError, Cluster, GROUP, LIMIT, Lane, Served},
    config::{ConfigError, KubernetesConfig},
};

/// The rights without which sandboxes can't run: group, resource, subresource, verbs.
const NEEDED: [(&str, &str, &str, &[&str]); 4] = [
    (GROUP, "sandboxes", "", &["get", "list", "watch", "create", "patch", "delete"]),
    ("", "pods", "", &["get", "list", "watch", "delete"]),
    ("", "persistentvolumeclaims", "", &["get", "list", "create", "delete"]),
    ("", "pods", "exec", &["get", "create"]),
];
/// Those that are missed by people only.
const NICE: [(&str, &str, &str, &[&str]); 1] = [("", "pods", "log", &["get"])];

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
    all.push(versions(&cluster).await);
    for namespace in config.all_namespaces(&cluster.namespace) {
        all.push(rights_in(&cluster, &namespace).await);
    }
    let storage = ("storage.k8s.io", "StorageClass", "storageclasses");
    all.push(class(&cluster, "storage-class", storage, config.storage_class.as_deref()).await);
    let runtime = ("node.k8s.io", "RuntimeClass", "runtimeclasses");
    all.push(class(&cluster, "runtime-class", runtime, config.runtime_class.as_deref()).await);
    if config.agent_volume {
        let text = "whether nodes let programs of image volumes run is not looked at: Kubernetes up to 1.35 has them mounted noexec, and then no pod comes up";
        let advice = "try one sandbox; set `agent_volume = false` under [kubernetes] when it ends with StartError or code 126";
        all.push(Finding::new("agent-volume", Level::Warn, text.to_owned(), advice));
    }
    all.push(Finding::new("agent-image", Level::Ok, config.agent_image.clone(), ""));
    Ok(all)
}

async fn versions(cluster: &Cluster) -> Finding {
    let name = "agent-sandbox";
    let all = match cluster.versions().await {
        Ok(all) => all,
        Err(error) => return Finding::new(name, Level::Fail, error.to_string(), ""),
    };
    let Some(served) = Served::best(&all) else {
        let advice = "kubectl apply -f the release's manifest.yaml";
        return Finding::new(name, Level::Fail, ApiError::Absent.to_string(), advice);
    };
    let text = format!("serves {}; {} is used", all.join(" and "), served.name());
    match served {
        Served::V1beta1 => Finding::new(name, Level::Ok, text, ""),
        Served::V1alpha1 => {
            let advice = "update agent-sandbox to 0.5.4 or later: v1alpha1 is gone from 1.0 on";
            Finding::new(name, Level::Warn, text, advice)
        }
    }
}

/// Every right, asked for one by one: nothing else tells what a role comes to.
async fn rights_in(cluster: &Cluster, namespace: &str) -> Finding {
    let name = "rights";
    let mut missing = Vec::new();
    let mut missed = Vec::new();
    let (mut asked, mut failed) = (0, None);
    for (needed, of) in [(true, NEEDED.as_slice()), (false, NICE.as_slice())] {
        for (group, resource, sub, verbs) in of {
            for verb in *verbs {
                asked += 1;
                match may(cluster, namespace, group, resource, sub, verb).await {
                    Ok(true) => {}
                    Ok(false) => {
                        let list = if needed { &mut missing } else { &mut missed };
                        list.push(right(verb, resource, sub));
                    }
                    Err(error) => failed = Some(error.to_string()),
                }
            }
        }
    }
    let advice =
        format!("bind the Role of deploy/kubernetes/rbac.yaml in {namespace} to the gateway's account");
    if let Some(failed) = failed {
        return Finding::new(name, Level::Warn, format!("not known in {namespace}: {failed}"), advice);
    }
    if !missing.is_empty() {
        return Finding::new(
            name,
            Level::Fail,
            format!("missing in {namespace}: {}", missing.join(", ")),
            advice,
        );
    }
    if !missed.is_empty() {
        let text = format!("missing in {namespace}, for consoles only: {}", missed.join(", "));
        return Finding::new(name, Level::Warn, text, advice);
    }
    Finding::new(name, Level::Ok, format!("all {asked} are there in {namespace}"), "")
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

/// Whether a class that is named is there.
async fn class(
    cluster: &Cluster,
    name: &'static str,
    (group, kind, plural): (&str, &str, &str),
    wanted: Option<&str>,
) -> Finding {
    let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, "v1", kind), plural);
    let api: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource);
    let listed =
        cluster.call(Lane::List, LIMIT, &format!("list {plural}"), api.list(&ListParams::default())).await;
    let there: Vec<String> = match listed {
        Ok(list) => list.items.into_iter().filter_map(|one| one.metadata.name).collect(),
        Err(error) => {
            let text = format!("not known: {error}");
            return match wanted {
                Some(_) => Finding::new(
                    name,
                    Level::Warn,
                    text,
                    "let the gateway's account list them, or ask an admin",
                ),
                None => Finding::new(name, Level::Ok, text, ""),
            };
        }
    };
    let shown = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    match wanted {
        Some(wanted) if there.iter().any(|one| one == wanted) => {
            Finding::new(name, Level::Ok, format!("{wanted}, of {shown}"), "")
        }
        Some(wanted) => Finding::new(
            name,
            Level::Fail,
            format!("'{wanted}' is not there: {shown}"),
            "install it, or name another one",
        ),
        None if name == "runtime-class" => {
            let advice = "pods share their nodes' kernels; name a class of microVMs by `runtime_class` (Kata Containers)";
            Finding::new(name, Level::Warn, format!("none is named; there: {shown}"), advice)
        }
        None if there.is_empty() => Finding::new(
            name,
            Level::Warn,
            "none is there: workspaces stay unbound",
            "install a storage provisioner",
        ),
        None => Finding::new(name, Level::Ok, format!("the cluster's default; there: {shown}"), ""),
    }
}
