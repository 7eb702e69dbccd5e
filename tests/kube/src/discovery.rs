//! What is served.

use serde_json::{Value, json};

use crate::{
    resources::{GROUP, RESOURCES},
    status::Refusal,
    world::{Asked, World},
};

fn group(name: &str, versions: &[&str]) -> Value {
    let of = |version: &str| json!({"groupVersion": format!("{name}/{version}"), "version": version});
    json!({
        "kind": "APIGroup", "apiVersion": "v1", "name": name,
        "versions": versions.iter().map(|v| of(v)).collect::<Vec<_>>(),
        "preferredVersion": of(versions.first().copied().unwrap_or("v1")),
    })
}

/// Discovery documents; none when the path is about objects.
pub(crate) fn answer(world: &World, asked: &Asked) -> Result<Option<Value>, Refusal> {
    if asked.method != "GET" {
        return Ok(None);
    }
    let served = world.generation().versions();
    let others = ["storage.k8s.io", "node.k8s.io"];
    let parts: Vec<&str> = asked.path.trim_matches('/').split('/').collect();
    let found = match parts.as_slice() {
        ["version"] => json!({
            "major": "1", "minor": "36", "gitVersion": "v1.36.2", "gitCommit": "", "gitTreeState": "clean",
            "buildDate": "", "goVersion": "", "compiler": "gc", "platform": "linux/amd64",
        }),
        ["api"] => json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}),
        ["apis"] => {
            let mut groups: Vec<Value> = others.iter().map(|name| group(name, &["v1"])).collect();
            if !served.is_empty() {
                groups.push(group(GROUP, served));
            }
            json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        }
        ["apis", name] if *name == GROUP && !served.is_empty() => group(GROUP, served),
        ["apis", name] if others.contains(name) => group(name, &["v1"]),
        ["api", version] => kinds("", version),
        ["apis", name, version] if *name == GROUP && served.contains(version) => kinds(name, version),
        ["apis", name, version] if others.contains(name) => kinds(name, version),
        ["apis", _] | ["apis", _, _] => return Err(Refusal::unknown_path()),
        _ => return Ok(None),
    };
    Ok(Some(found))
}

fn kinds(name: &str, version: &str) -> Value {
    let mut all = Vec::new();
    for r in RESOURCES.iter().filter(|r| r.group == name) {
        let mut push = |plural: String| {
            all.push(json!({
                "name": plural, "singularName": r.kind.to_lowercase(), "namespaced": r.namespaced, "kind": r.kind,
                "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
            }));
        };
        push(r.plural.to_owned());
        if r.status {
            push(format!("{}/status", r.plural));
        }
        if name == GROUP && version == "v1alpha1" {
            push(format!("{}/scale", r.plural));
        }
    }
    let at = if name.is_empty() { version.to_owned() } else { format!("{name}/{version}") };
    json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": at, "resources": all})
}
