//! What is looked at in every namespace of sandboxes, by the rights that the gateway has there.

use kube::{
    Api,
    api::{ListParams, PostParams},
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde_json::Value;
use torpor_sandbox::{Finding, Level, Resources, SandboxId, SandboxSpec};

use super::{NEEDED, NICE, right};
use crate::{
    client::{ApiError, Cluster, LIMIT, Lane, Served, claim_resource},
    config::KubernetesConfig,
    manifest, passed,
};

/// Sandboxes that are looked at for a word of the controller.
const SOME: u32 = 50;
/// A controller that works has said something of a Sandbox by then, seconds.
const SOON: i64 = 60;

/// One thing that was found in each namespace, told as one: the worst first.
struct Told {
    name: &'static str,
    all: Vec<(Level, String, String)>,
}

impl Told {
    fn of(name: &'static str) -> Self {
        Self { name, all: Vec::new() }
    }

    fn add(&mut self, level: Level, text: String, advice: impl Into<String>) {
        self.all.push((level, text, advice.into()));
    }

    fn finding(mut self) -> Finding {
        self.all.sort_by_key(|(level, ..)| std::cmp::Reverse(*level));
        let level = self.all.first().map_or(Level::Ok, |(level, ..)| *level);
        let texts: Vec<String> = self.all.iter().map(|(_, text, _)| text.clone()).collect();
        let mut advice: Vec<String> = Vec::new();
        for (_, _, one) in self.all {
            if !one.is_empty() && !advice.contains(&one) {
                advice.push(one);
            }
        }
        Finding::new(self.name, level, texts.join("; "), advice.join("; "))
    }
}

/// Everything about the namespaces of a configuration.
pub(super) async fn look(
    cluster: &Cluster,
    config: &KubernetesConfig,
    served: Option<Served>,
) -> Vec<Finding> {
    let mut rights = Told::of("rights");
    let mut tried = Told::of("namespaces");
    let mut accounts = Told::of("service-accounts");
    let mut controller = Told::of("controller");
    for namespace in &config.all_namespaces(&cluster.namespace) {
        rights_in(cluster, namespace, &mut rights).await;
        dry_run(cluster, config, served, namespace, &mut tried).await;
        accounts_in(cluster, config, namespace, &mut accounts).await;
        if let Some(served) = served {
            said_in(cluster, served, namespace, &mut controller).await;
        }
    }
    let mut all = vec![rights.finding(), tried.finding(), accounts.finding()];
    if served.is_some() {
        all.push(controller.finding());
    }
    all
}

/// Every right, asked for one by one: nothing else tells what a role comes to.
async fn rights_in(cluster: &Cluster, namespace: &str, told: &mut Told) {
    let mut missing = Vec::new();
    let mut missed = Vec::new();
    let (mut asked, mut failed) = (0, None);
    for (needed, of) in [(true, NEEDED.as_slice()), (false, NICE.as_slice())] {
        for (group, resource, sub, verbs) in of {
            for verb in *verbs {
                asked += 1;
                match super::may(cluster, namespace, group, resource, sub, verb).await {
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
    let advice = format!(
        "bind the ClusterRole torpor-sandboxes (deploy/kubernetes/rbac.yaml) in {namespace} to the gateway's account by a RoleBinding, as deploy/kubernetes/workspace does"
    );
    if let Some(failed) = failed {
        told.add(Level::Warn, format!("not known in {namespace}: {failed}"), advice);
    } else if !missing.is_empty() {
        told.add(Level::Fail, format!("missing in {namespace}: {}", missing.join(", ")), advice);
    } else if !missed.is_empty() {
        let text = format!("missing in {namespace}, for consoles and this look only: {}", missed.join(", "));
        told.add(Level::Warn, text, advice);
    } else {
        told.add(Level::Ok, format!("all {asked} are there in {namespace}"), "");
    }
}

/// Lets the server go through the making of a sandbox's objects without making them: that shows whether the namespace is
/// there, and what its quota and the cluster's admission say.
async fn dry_run(
    cluster: &Cluster,
    config: &KubernetesConfig,
    served: Option<Served>,
    namespace: &str,
    told: &mut Told,
) {
    let resources = Resources { cpus: 1, memory_bytes: 128 << 20, disk_bytes: 0 };
    let (id, spec) = (SandboxId::generate(), SandboxSpec::of("kubernetes", "doctor", "doctor", resources));
    let mut objects = vec![("claim", claim_resource(), manifest::claim(config, &id, "doctor", &spec))];
    if let Some(served) = served {
        objects.push(("sandbox", served.resource(), manifest::sandbox(served, config, &id, "doctor", &spec)));
    }
    for (kind, resource, object) in objects {
        if let Err(error) = try_one(cluster, namespace, &resource, object).await {
            let advice = if error.is_not_found() {
                format!("make the namespace {namespace}: deploy/kubernetes/workspace has all that it needs")
            } else {
                format!(
                    "see what keeps a {kind} out of {namespace}: its quota, its limits, or an admission policy"
                )
            };
            told.add(Level::Fail, format!("{namespace} takes no {kind}: {error}"), advice);
            return;
        }
    }
    told.add(Level::Ok, format!("{namespace} would take a sandbox (tried without making any)"), "");
}

async fn try_one(
    cluster: &Cluster,
    namespace: &str,
    resource: &ApiResource,
    object: Value,
) -> Result<(), ApiError> {
    let what = format!("try to make a {} in {namespace}", resource.kind);
    let object: DynamicObject = serde_json::from_value(object).map_err(|error| ApiError::Garbled {
        what: what.clone(),
        source: Box::new(kube::Error::SerdeError(error)),
    })?;
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), namespace, resource);
    let params = PostParams { dry_run: true, ..PostParams::default() };
    cluster.call(Lane::Create, LIMIT, &what, api.create(&params, &object)).await.map(drop)
}

/// Whether the accounts that pods may name are there: a pod of one that isn't is refused to the controller.
async fn accounts_in(cluster: &Cluster, config: &KubernetesConfig, namespace: &str, told: &mut Told) {
    let mut wanted: Vec<(String, Level)> =
        config.service_account.iter().map(|name| (name.clone(), Level::Fail)).collect();
    wanted.extend(named(config, "serviceAccountName").map(|name| (name, Level::Warn)));
    if wanted.is_empty() {
        told.add(Level::Ok, format!("none is named: pods of {namespace} have its default one"), "");
    }
    let kind = ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("", "v1", "ServiceAccount"),
        "serviceaccounts",
    );
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), namespace, &kind);
    for (name, level) in wanted {
        match cluster.call(Lane::Fast, LIMIT, &format!("get the account {name}"), api.get(&name)).await {
            Ok(_) => told.add(Level::Ok, format!("{name} is there in {namespace}"), ""),
            Err(error) if error.is_not_found() => {
                let text = format!("{name} is not there in {namespace}: pods that have it are refused");
                told.add(level, text, format!("kubectl -n {namespace} create serviceaccount {name}"));
            }
            Err(error) => {
                let text = format!("{name} was not looked at in {namespace}: {error}");
                told.add(
                    Level::Warn,
                    text,
                    "let the gateway's account get service accounts, or ask an admin",
                );
            }
        }
    }
}

/// Names that the administrator's list lets sandboxes say.
pub(super) fn named<'a>(config: &'a KubernetesConfig, key: &'a str) -> impl Iterator<Item = String> + 'a {
    config.driver_config.iter().filter_map(move |text| match passed::entry(text) {
        Ok((found, Some(Value::String(name)))) if found == key => Some(name),
        _ => None,
    })
}

/// Whether there is a controller that says something of the Sandboxes that there are.
async fn said_in(cluster: &Cluster, served: Served, namespace: &str, told: &mut Told) {
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), namespace, &served.resource());
    let what = format!("list some sandboxes of {namespace}");
    let listed = cluster.call(Lane::List, LIMIT, &what, api.list(&ListParams::default().limit(SOME))).await;
    let list = match listed {
        Ok(list) => list.items,
        Err(error) => {
            told.add(Level::Warn, format!("not looked at in {namespace}: {error}"), "");
            return;
        }
    };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX));
    let old = |object: &&DynamicObject| {
        object.metadata.creation_timestamp.as_ref().is_some_and(|made| made.0.as_second() + SOON < now)
    };
    let silent = |object: &&DynamicObject| {
        object.data["status"]["conditions"].as_array().is_none_or(|all| all.is_empty())
    };
    let said = list.iter().filter(|object| !silent(object)).count();
    let unsaid = list.iter().filter(old).filter(silent).count();
    if unsaid > 0 {
        let text = format!(
            "nothing was said of {unsaid} of the {} sandboxes of {namespace} that were looked at",
            list.len()
        );
        told.add(
            Level::Fail,
            text,
            "see whether agent-sandbox's controller runs: kubectl -n agent-sandbox-system get pods",
        );
    } else if said > 0 {
        told.add(Level::Ok, format!("it has said something of {said} sandboxes of {namespace}"), "");
    } else {
        let text = format!("{namespace} has no sandbox yet, so whether it runs is not known");
        told.add(Level::Ok, text, "");
    }
}
