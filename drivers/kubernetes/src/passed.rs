//! What of a pod can be said from outside: by the configuration for all, and by a sandbox's `driver_config` as far as the
//! configuration lets it.

use k8s_openapi::api::core::v1::PodSpec;
use serde_json::{Map, Value, json};

use crate::config::KubernetesConfig;

/// Fields of a pod that a configuration may set beside what the driver sets itself. Nothing among them gives a sandbox
/// the node's file system, processes or network, or takes its confinement away.
pub const PASSED: [&str; 10] = [
    "affinity",
    "dnsConfig",
    "dnsPolicy",
    "hostAliases",
    "imagePullSecrets",
    "preemptionPolicy",
    "priorityClassName",
    "schedulerName",
    "tolerations",
    "topologySpreadConstraints",
];

/// What a configuration may let a sandbox say: [`PASSED`], and what has a key of its own there.
pub const SAYABLE: [&str; 15] = [
    "affinity",
    "claimTemplates",
    "dnsConfig",
    "dnsPolicy",
    "hostAliases",
    "imagePullSecrets",
    "nodeSelector",
    "preemptionPolicy",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "serviceAccountName",
    "storageClassName",
    "tolerations",
    "topologySpreadConstraints",
];

pub(crate) fn is_sayable(key: &str) -> bool {
    SAYABLE.contains(&key)
}

/// Refuses a `driver_config` that says what it may not, or what can't be.
///
/// # Errors
/// The key, why, and what is allowed.
pub(crate) fn check(config: &KubernetesConfig, said: &Map<String, Value>) -> Result<(), String> {
    for (key, value) in said {
        let shown = key.escape_debug();
        if !is_sayable(key) {
            return Err(format!(
                "driver_config.{shown}: not a field that a sandbox can say; there are {}",
                SAYABLE.join(", ")
            ));
        }
        if !config.driver_config.contains(key) {
            let allowed: Vec<&str> = config.driver_config.iter().map(String::as_str).collect();
            let allowed = if allowed.is_empty() { "nothing".to_owned() } else { allowed.join(", ") };
            return Err(format!(
                "driver_config.{shown}: this gateway lets a sandbox say {allowed} (`driver_config` under [kubernetes] of its configuration)"
            ));
        }
        well_formed(key, value).map_err(|problem| format!("driver_config.{shown}: {problem}"))?;
        if key == "nodeSelector" {
            keeps(config, value)?;
        }
    }
    Ok(())
}

/// A sandbox may choose among the nodes that all are meant for, and no others.
fn keeps(config: &KubernetesConfig, said: &Value) -> Result<(), String> {
    for (label, value) in said.as_object().into_iter().flatten() {
        if let Some(fixed) = config.node_selector.get(label)
            && value.as_str() != Some(fixed)
        {
            return Err(format!(
                "driver_config.nodeSelector: '{}' is '{fixed}' for every sandbox of this gateway",
                label.escape_debug()
            ));
        }
    }
    Ok(())
}

/// Whether a value is one that a field can have.
///
/// # Errors
/// What is wrong.
pub(crate) fn well_formed(key: &str, value: &Value) -> Result<(), String> {
    if value.is_null() {
        return Err("null says nothing: leave the key out".to_owned());
    }
    match key {
        "claimTemplates" => match value {
            Value::Bool(_) => Ok(()),
            _ => Err("true or false is needed".to_owned()),
        },
        "storageClassName" => subdomain(value),
        "runtimeClassName" | "serviceAccountName" | "priorityClassName" | "schedulerName" => subdomain(value),
        _ => of_a_pod(key, value),
    }
}

/// RFC 1123 subdomain, as names of classes and accounts are.
fn subdomain(value: &Value) -> Result<(), String> {
    let Some(name) = value.as_str() else { return Err("a name is needed".to_owned()) };
    let part = |part: &str| crate::config::is_label(part);
    if name.len() <= 253 && name.split('.').all(part) {
        return Ok(());
    }
    Err(format!("'{}' is no name: a-z, 0-9, '-' and '.'", name.escape_debug()))
}

/// As the published type of a pod has it, to the last field: the API server would drop one that it doesn't know, and with it
/// what was meant.
fn of_a_pod(key: &str, value: &Value) -> Result<(), String> {
    let read = serde_json::from_value::<PodSpec>(json!({"containers": [], key: value}));
    let kept = read.and_then(serde_json::to_value).map_err(|error| format!("no pod has that: {error}"))?;
    if &kept[key] == value {
        return Ok(());
    }
    Err("it says something that no pod has, or says nothing".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn what_is_not_allowed_is_refused_by_its_name_with_what_is() {
        let mut config = KubernetesConfig::new("/s", "agent:1");
        let kata = said(json!({"runtimeClassName": "kata"}));
        let refused = check(&config, &kata).unwrap_err();
        assert!(
            refused.starts_with("driver_config.runtimeClassName") && refused.contains("nothing"),
            "{refused}"
        );
        config.driver_config.insert("runtimeClassName".to_owned());
        check(&config, &kata).unwrap();
        for open in
            ["hostNetwork", "containers", "volumes", "securityContext", "automountServiceAccountToken", ""]
        {
            config.driver_config.insert(open.to_owned());
            let refused = check(&config, &said(json!({open: true}))).unwrap_err();
            assert!(refused.contains(&format!("driver_config.{open}:")), "{refused}");
        }
    }

    #[test]
    fn values_are_those_that_a_pod_can_have() {
        let mut config = KubernetesConfig::new("/s", "agent:1");
        config.driver_config = SAYABLE.iter().map(|&key| key.to_owned()).collect();
        config.node_selector.insert("pool".to_owned(), "sandboxes".to_owned());
        for good in [
            json!({"tolerations": [{"key": "a", "operator": "Exists", "tolerationSeconds": 30}]}),
            json!({"nodeSelector": {"disk": "ssd", "pool": "sandboxes"}}),
            json!({"claimTemplates": true, "storageClassName": "fast.example"}),
            json!({"imagePullSecrets": [{"name": "registry"}]}),
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
                {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}]}}}}),
        ] {
            check(&config, &said(good.clone())).unwrap_or_else(|why| panic!("{good}: {why}"));
        }
        for bad in [
            json!({"tolerations": {"key": "a"}}),
            json!({"tolerations": [{"kye": "a"}]}),
            json!({"tolerations": null}),
            json!({"nodeSelector": {"pool": "others"}}),
            json!({"nodeSelector": {"disk": 1}}),
            json!({"runtimeClassName": "Kata!"}),
            json!({"runtimeClassName": ""}),
            json!({"serviceAccountName": ["a"]}),
            json!({"claimTemplates": "yes"}),
            json!({"dnsPolicy": 1}),
        ] {
            let (key, _) = bad.as_object().unwrap().iter().next().unwrap();
            let refused = check(&config, &said(bad.clone())).unwrap_err();
            assert!(refused.starts_with(&format!("driver_config.{key}")), "{bad}: {refused}");
        }
    }
}
