//! The agent-sandbox controller, as each of its releases behaves.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use serde_json::{Value, json};

use crate::{
    resources::{CLAIMS, GROUP, Generation, Key, PODS, SANDBOXES, SERVICES},
    store::{Deletion, Part, deleting, now, number, text},
    world::World,
};

const AGAIN: Duration = Duration::from_millis(50);

/// Follows the changes until it is dropped.
pub(crate) async fn run(world: Arc<World>) {
    let mut changes = world.changed.subscribe();
    let mut at = 0;
    loop {
        let (keys, reached) = touched(&world, at);
        at = reached;
        if keys.is_empty() {
            if changes.changed().await.is_err() {
                return;
            }
            continue;
        }
        tokio::time::sleep(world.behaviour().reconcile).await;
        if world.generation() == Generation::Absent {
            continue;
        }
        for key in keys {
            reconcile(&world, &key);
        }
    }
}

/// The sandboxes that changes are about, themselves or their pods.
fn touched(world: &World, at: u64) -> (BTreeSet<Key>, u64) {
    let inner = world.lock();
    let keys = inner
        .objects
        .since(at)
        .filter(|entry| entry.key.0 == SANDBOXES || entry.key.0 == PODS)
        .map(|entry| (SANDBOXES, entry.key.1.clone(), entry.key.2.clone()));
    (keys.collect(), inner.objects.version)
}

/// As a controller tries again what has failed.
async fn again(world: Arc<World>, key: Key) {
    tokio::time::sleep(AGAIN).await;
    reconcile(&world, &key);
}

/// What it says when the API server lets it make no pod.
fn refused(world: &World, key: &Key, sandbox: &Value, why: &str) {
    let generation = number(sandbox, "/metadata/generation");
    world.edit(key, Part::Status, |value| {
        let mut conditions = value["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let mut ready = condition("Ready", "False", "ReconcilerError", generation);
        ready["message"] = json!(format!("Error seen: {why}"));
        set(&mut conditions, ready);
        value["status"]["conditions"] = json!(conditions);
    });
}

fn reconcile(world: &Arc<World>, key: &Key) {
    let Ok(sandbox) = world.lock().objects.get(key) else { return };
    if deleting(&sandbox) {
        return;
    }
    let generation = world.generation();
    let uid = text(&sandbox, "/metadata/uid").to_owned();
    make_claims(world, key, &sandbox);
    if generation != Generation::Stable || sandbox["spec"]["service"] == json!(true) {
        let service = json!({"metadata": owned(key, &sandbox), "spec": {"clusterIP": "None"}});
        make(world, SERVICES, &key.1, &key.2, service);
    }
    let pod_key: Key = (PODS, key.1.clone(), key.2.clone());
    let pod = world.lock().objects.get(&pod_key).ok();
    let ours = pod.as_ref().is_some_and(|pod| text(pod, "/metadata/ownerReferences/0/uid") == uid);
    if text(&sandbox, "/spec/operatingMode") == "Suspended" {
        if let Some(pod) = &pod
            && ours
            && !deleting(pod)
        {
            let _gone = world.write(|objects| objects.delete(&pod_key, &Deletion::default())).is_err();
        }
        let pod = world.lock().objects.get(&pod_key).ok();
        suspended(world, key, &sandbox, pod.as_deref(), ours, generation);
        return;
    }
    if pod.is_none() {
        if let Some(why) = world.behaviour().refuse_pods {
            refused(world, key, &sandbox, why);
            tokio::spawn(again(world.clone(), key.clone()));
            return;
        }
        make(world, PODS, &key.1, &key.2, new_pod(key, &sandbox));
    }
    // The race of the real one: a pod that is on its way out is as good as any other.
    let pod = world.lock().objects.get(&pod_key).ok();
    running(world, key, &sandbox, pod.as_deref(), generation);
}

fn make(world: &World, resource: usize, namespace: &str, name: &str, value: Value) {
    let key: Key = (resource, namespace.to_owned(), name.to_owned());
    if world.lock().objects.all.contains_key(&key) {
        return;
    }
    let _there = world.write(|objects| objects.create(&key, value)).is_err();
}

fn owned(key: &Key, sandbox: &Value) -> Value {
    json!({
        "name": key.2, "namespace": key.1,
        "ownerReferences": [{
            "apiVersion": format!("{GROUP}/v1beta1"), "kind": "Sandbox", "name": key.2,
            "uid": sandbox["metadata"]["uid"], "controller": true, "blockOwnerDeletion": true,
        }],
    })
}

fn make_claims(world: &World, key: &Key, sandbox: &Value) {
    let templates = sandbox["spec"]["volumeClaimTemplates"].as_array().cloned().unwrap_or_default();
    for template in templates {
        let name = format!("{}-{}", text(&template, "/metadata/name"), key.2);
        let mut meta = owned(key, sandbox);
        meta["name"] = json!(name);
        make(world, CLAIMS, &key.1, &name, json!({"metadata": meta, "spec": template["spec"]}));
    }
}

fn new_pod(key: &Key, sandbox: &Value) -> Value {
    let template = &sandbox["spec"]["podTemplate"];
    let mut meta = owned(key, sandbox);
    for field in ["labels", "annotations"] {
        let all = template["metadata"][field].as_object().cloned().unwrap_or_default();
        // Its own names there are not the template's to set.
        let theirs = all.into_iter().filter(|(name, _)| !name.starts_with("agents.x-k8s.io/"));
        meta[field] = Value::Object(theirs.collect());
    }
    meta["labels"]["agents.x-k8s.io/sandbox-name-hash"] = json!("0");
    let mut spec = template["spec"].clone();
    let mut volumes = spec["volumes"].as_array().cloned().unwrap_or_default();
    for claim in sandbox["spec"]["volumeClaimTemplates"].as_array().into_iter().flatten() {
        let name = text(claim, "/metadata/name");
        let of = format!("{name}-{}", key.2);
        volumes.push(json!({"name": name, "persistentVolumeClaim": {"claimName": of}}));
    }
    spec["volumes"] = json!(volumes);
    json!({"metadata": meta, "spec": spec})
}

fn condition(kind: &str, status: &str, reason: &str, generation: u64) -> Value {
    json!({
        "type": kind, "status": status, "reason": reason, "message": "",
        "lastTransitionTime": now(), "observedGeneration": generation,
    })
}

fn set(conditions: &mut Vec<Value>, new: Value) {
    let kind = text(&new, "/type").to_owned();
    match conditions.iter_mut().find(|one| text(one, "/type") == kind) {
        Some(old) => {
            let kept = if old["status"] == new["status"] {
                old["lastTransitionTime"].clone()
            } else {
                new["lastTransitionTime"].clone()
            };
            *old = new;
            old["lastTransitionTime"] = kept;
        }
        None => conditions.push(new),
    }
}

fn suspended(
    world: &World,
    key: &Key,
    sandbox: &Value,
    pod: Option<&Value>,
    ours: bool,
    release: Generation,
) {
    let generation = number(sandbox, "/metadata/generation");
    world.edit(key, Part::Status, |value| {
        let mut conditions = value["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let gone = pod.is_none();
        match release {
            // To the oldest, no pod is as it should be: nothing depends on it.
            Generation::Alpha => {
                let (status, reason) =
                    if gone { ("True", "DependenciesReady") } else { ("False", "DependenciesNotReady") };
                set(&mut conditions, condition("Ready", status, reason, generation));
            }
            Generation::Early => {
                // Before the pod is gone.
                set(&mut conditions, condition("Suspended", "True", "PodTerminated", generation));
                set(&mut conditions, condition("Ready", "False", "SandboxSuspended", generation));
            }
            _ => {
                let (status, reason) = match (gone, ours) {
                    (true, _) => ("True", "PodTerminated"),
                    (false, true) => ("False", "PodTerminating"),
                    (false, false) => ("False", "PodNotOwned"),
                };
                set(&mut conditions, condition("Suspended", status, reason, generation));
                set(&mut conditions, condition("Ready", "False", "SandboxSuspended", generation));
            }
        }
        conditions.retain(|one| text(one, "/type") != "Finished");
        value["status"]["conditions"] = json!(conditions);
        if gone && let Some(status) = value["status"].as_object_mut() {
            status.remove("podIPs");
            status.remove("nodeName");
        }
    });
}

fn running(world: &World, key: &Key, sandbox: &Value, pod: Option<&Value>, release: Generation) {
    let generation = number(sandbox, "/metadata/generation");
    let phase = pod.map(|pod| text(pod, "/status/phase")).unwrap_or_default();
    let up = pod.is_some_and(|pod| {
        let conditions = pod["status"]["conditions"].as_array();
        conditions.is_some_and(|all| {
            all.iter().any(|one| text(one, "/type") == "Ready" && text(one, "/status") == "True")
        })
    });
    world.edit(key, Part::Status, |value| {
        let mut conditions = value["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let (status, reason) = match phase {
            "Failed" => ("False", "PodFailed"),
            "Succeeded" => ("False", "PodSucceeded"),
            _ if up => ("True", "DependenciesReady"),
            _ => ("False", "DependenciesNotReady"),
        };
        set(&mut conditions, condition("Ready", status, reason, generation));
        if matches!(phase, "Failed" | "Succeeded") {
            set(&mut conditions, condition("Finished", "True", reason, generation));
        }
        if matches!(release, Generation::Late | Generation::Stable) {
            set(&mut conditions, condition("Suspended", "False", "NotSuspended", generation));
        }
        value["status"]["conditions"] = json!(conditions);
        if let Some(pod) = pod {
            value["status"]["podIPs"] = json!([text(pod, "/status/podIP")]);
            value["status"]["nodeName"] = pod["spec"]["nodeName"].clone();
        }
    });
}
