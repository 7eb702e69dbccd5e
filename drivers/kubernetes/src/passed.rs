//! What of a pod can be said from outside: by the configuration for all, and by a sandbox's `driver_config` as far as the
//! configuration lets it.

use k8s_openapi::api::core::v1::PodSpec;
use serde_json::{Map, Value, json};
use torpor_sandbox::spec::NAMES_IN_DRIVER_CONFIG;

use crate::config::{KubernetesConfig, is_subdomain};

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

/// An entry of the administrator's list: a key, with the only value that it may have when one is named ("KEY=VALUE", the value
/// a name or JSON).
///
/// # Errors
/// No such key, or no value that it can have.
pub(crate) fn entry(text: &str) -> Result<(&str, Option<Value>), String> {
    let (key, value) = text.split_once('=').map_or((text, None), |(key, value)| (key, Some(value)));
    if !is_sayable(key) {
        let shown = key.escape_debug();
        return Err(format!("'{shown}' is not among what a sandbox can be let say: {}", SAYABLE.join(", ")));
    }
    let Some(value) = value else { return Ok((key, None)) };
    let value = if NAMES_IN_DRIVER_CONFIG.contains(&key) {
        Value::String(value.to_owned())
    } else {
        serde_json::from_str(value).map_err(|error| format!("the value of {key} is no JSON: {error}"))?
    };
    well_formed(key, &value).map_err(|problem| format!("{key}: {problem}"))?;
    Ok((key, Some(value)))
}

/// What the administrator's list says of a key and a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum May {
    Not,
    AnyValue,
    /// Named with the key.
    ThisValue,
}

fn allowed(config: &KubernetesConfig, key: &str, value: &Value) -> May {
    let entries = config.driver_config.iter().filter_map(|text| entry(text).ok());
    let mut may = May::Not;
    for (_, named) in entries.filter(|(of, _)| *of == key) {
        match named {
            Some(named) if named == *value => return May::ThisValue,
            Some(_) => {}
            None => may = May::AnyValue,
        }
    }
    may
}

/// What the configuration itself says of a key, for every pod or claim.
fn fixed(config: &KubernetesConfig, key: &str) -> Option<Value> {
    let name = |name: &Option<String>| name.as_deref().map(Value::from);
    match key {
        "runtimeClassName" => name(&config.runtime_class),
        "serviceAccountName" => name(&config.service_account),
        "storageClassName" => name(&config.storage_class),
        _ => config.pod.get(key).cloned(),
    }
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
        let may = allowed(config, key, value);
        if may == May::Not {
            let allowed: Vec<&str> = config.driver_config.iter().map(String::as_str).collect();
            let allowed = if allowed.is_empty() { "nothing".to_owned() } else { allowed.join(", ") };
            return Err(format!(
                "driver_config.{shown}: this gateway lets a sandbox say {allowed} (`driver_config` under [kubernetes] of its configuration)"
            ));
        }
        well_formed(key, value).map_err(|problem| format!("driver_config.{shown}: {problem}"))?;
        if key == "nodeSelector" {
            keeps(config, value)?;
        } else if may != May::ThisValue && fixed(config, key).is_some_and(|fixed| fixed != *value) {
            return Err(format!(
                "driver_config.{shown}: this gateway's configuration has it for every sandbox; another value is possible only where its `driver_config` names that one, as {shown}=VALUE"
            ));
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
    if is_subdomain(name) {
        return Ok(());
    }
    Err(format!("'{}' is no name: a-z, 0-9, '-' and '.'", name.escape_debug()))
}

/// As the published type of a pod has it, to the last field: the API server would drop one that it doesn't know, and with it
/// what was meant.
fn of_a_pod(key: &str, value: &Value) -> Result<(), String> {
    let read = serde_json::from_value::<PodSpec>(json!({"containers": [], key: value}));
    let kept = read.and_then(serde_json::to_value).map_err(|error| format!("no pod has that: {error}"))?;
    if &kept[key] != value {
        return Err("it says something that no pod has, or says nothing".to_owned());
    }
    let labels = key == "nodeSelector";
    leaves(key, value, labels)
}

/// What the types don't tell: words of which there are some only, and labels. To the last leaf.
fn leaves(key: &str, value: &Value, labels: bool) -> Result<(), String> {
    match value {
        Value::Object(fields) => fields.iter().try_for_each(|(field, value)| {
            if labels && !is_label_key(field) {
                return Err(format!("'{}' is no key of a label", field.escape_debug()));
            }
            let name = if labels { "value" } else { field };
            leaves(name, value, field == "matchLabels")
        }),
        Value::Array(all) => all.iter().try_for_each(|value| leaves(key, value, false)),
        Value::String(text) => leaf(key, text),
        Value::Number(number)
            if key == "weight" && !number.as_u64().is_some_and(|n| (1..=100).contains(&n)) =>
        {
            Err(format!("weight: {number}: 1 to 100 are possible"))
        }
        Value::Number(number) if key == "maxSkew" && number.as_u64().is_none_or(|n| n == 0) => {
            Err(format!("maxSkew: {number}: at least 1"))
        }
        _ => Ok(()),
    }
}

fn leaf(key: &str, text: &str) -> Result<(), String> {
    let among: &[&str] = match key {
        // Of a toleration, and of a label's expression.
        "operator" => &["Equal", "Exists", "In", "NotIn", "DoesNotExist", "Gt", "Lt"],
        "effect" => &["NoSchedule", "PreferNoSchedule", "NoExecute"],
        "dnsPolicy" => &["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"],
        "preemptionPolicy" => &["PreemptLowerPriority", "Never"],
        "whenUnsatisfiable" => &["DoNotSchedule", "ScheduleAnyway"],
        "nodeAffinityPolicy" | "nodeTaintsPolicy" => &["Honor", "Ignore"],
        _ => &[],
    };
    let shown = text.escape_debug();
    if !among.is_empty() && !among.contains(&text) {
        return Err(format!("{key}: '{shown}' is none of {}", among.join(", ")));
    }
    let fits = match key {
        "value" | "values" => is_label_value(text),
        "key" => text.is_empty() || is_label_key(text),
        "topologyKey" => is_label_key(text),
        "ip" | "nameservers" => text.parse::<std::net::IpAddr>().is_ok(),
        _ => true,
    };
    if fits { Ok(()) } else { Err(format!("{key}: '{shown}' can't be one")) }
}

/// At most 63 letters, digits, '-', '_' and '.', that begin and end with a letter or digit.
fn is_label_value(text: &str) -> bool {
    let end = |b: Option<u8>| b.is_none_or(|b| b.is_ascii_alphanumeric());
    text.len() <= 63
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && end(text.bytes().next())
        && end(text.bytes().last())
}

/// A name as of a label's value, with the domain that it is of, if it is of any.
fn is_label_key(text: &str) -> bool {
    let (domain, name) = text.rsplit_once('/').map_or((None, text), |(domain, name)| (Some(domain), name));
    !name.is_empty() && is_label_value(name) && domain.is_none_or(is_subdomain)
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
    fn a_value_that_is_named_is_the_only_one_and_may_replace_the_configurations() {
        let mut config = KubernetesConfig::new("/s", "agent:1");
        let list = |all: &[&str]| all.iter().map(|&text| text.to_owned()).collect();
        let gvisor = said(json!({"runtimeClassName": "gvisor"}));
        let kata = said(json!({"runtimeClassName": "kata"}));
        let tolerant = said(json!({"tolerations": [{"key": "gpu", "operator": "Exists"}]}));
        config.driver_config = list(&["runtimeClassName=gvisor", "runtimeClassName=runc"]);
        check(&config, &gvisor).unwrap();
        let refused = check(&config, &kata).unwrap_err();
        assert!(refused.contains("runtimeClassName=gvisor, runtimeClassName=runc"), "{refused}");

        // What the configuration sets for all is not left by a mere key.
        config.runtime_class = Some("kata".to_owned());
        config.pod = said(json!({"tolerations": [{"key": "sandboxes", "operator": "Exists"}]}));
        config.driver_config = list(&["runtimeClassName", "tolerations"]);
        check(&config, &kata).unwrap();
        for (key, other) in [("runtimeClassName", &gvisor), ("tolerations", &tolerant)] {
            let refused = check(&config, other).unwrap_err();
            assert!(
                refused.starts_with(&format!("driver_config.{key}: "))
                    && refused.contains("for every sandbox"),
                "{refused}"
            );
        }
        config.driver_config = list(&[
            "runtimeClassName",
            "runtimeClassName=gvisor",
            r#"tolerations=[{"operator":"Exists","key":"gpu"}]"#,
        ]);
        check(&config, &gvisor).unwrap();
        check(&config, &kata).unwrap();
        check(&config, &tolerant).unwrap();
        for (key, other) in [("service_account", "serviceAccountName"), ("storage_class", "storageClassName")]
        {
            let mut config = config.clone();
            config.driver_config = list(&[other]);
            let text = said(json!({other: "mine"}));
            check(&config, &text).unwrap();
            config.service_account = Some("sandbox".to_owned());
            config.storage_class = Some("slow".to_owned());
            assert!(check(&config, &text).is_err(), "{key}");
        }
    }

    #[test]
    fn an_entry_of_the_list_is_a_key_or_a_key_with_a_value_that_it_can_have() {
        assert_eq!(entry("tolerations"), Ok(("tolerations", None)));
        assert_eq!(entry("priorityClassName=1"), Ok(("priorityClassName", Some(json!("1")))));
        assert_eq!(entry("claimTemplates=true"), Ok(("claimTemplates", Some(json!(true)))));
        for bad in [
            "",
            "=",
            "hostNetwork=true",
            "runtimeClassName=",
            "runtimeClassName=No!",
            "tolerations=gpu",
            "claimTemplates=1",
        ] {
            assert!(entry(bad).is_err(), "{bad}");
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
            json!({"dnsPolicy": "Default"}),
            json!({"nodeSelector": {"example.org/disk": "", "kubernetes.io/arch": "amd64"}}),
            json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": {"example.org/a": "b"}}}]}),
            json!({"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution":
                [{"weight": 100, "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname"}}]}}}),
            json!({"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a.example"]}]}),
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
            json!({"dnsPolicy": "Foo"}),
            json!({"preemptionPolicy": "Sometimes"}),
            json!({"nodeSelector": {"disk": "s s d"}}),
            json!({"nodeSelector": {"disk": "a".repeat(64)}}),
            json!({"nodeSelector": {"-disk": "ssd"}}),
            json!({"nodeSelector": {"/disk": "ssd"}}),
            json!({"tolerations": [{"key": "a", "operator": "Exist"}]}),
            json!({"tolerations": [{"key": "a", "operator": "Exists", "effect": "Never"}]}),
            json!({"tolerations": [{"key": "a b", "operator": "Exists"}]}),
            json!({"topologySpreadConstraints": [{"maxSkew": 0, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]}),
            json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "Perhaps"}]}),
            json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
                [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b c"}}}]}}}),
            json!({"hostAliases": [{"ip": "here", "hostnames": ["a"]}]}),
        ] {
            let (key, _) = bad.as_object().unwrap().iter().next().unwrap();
            let refused = check(&config, &said(bad.clone())).unwrap_err();
            assert!(refused.starts_with(&format!("driver_config.{key}")), "{bad}: {refused}");
        }
    }
}
