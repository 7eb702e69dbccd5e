//! The manifests of deploy/kubernetes against the published types of the API: what these don't know is a mistake.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{collections::BTreeSet, fs, path::PathBuf};

use k8s_openapi::api::{apps::v1 as apps, core::v1 as core, networking::v1 as networking, rbac::v1 as rbac};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes")
}

/// Every object of every manifest, with the name of its file.
fn objects() -> Vec<(String, Value)> {
    let mut all = Vec::new();
    let folders = [folder(), folder().join("workspace")];
    for entry in folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap()) {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "yaml") {
            continue;
        }
        let name = path.strip_prefix(folder()).unwrap().to_str().unwrap().to_owned();
        for text in fs::read_to_string(&path).unwrap().split("\n---\n") {
            all.push((name.clone(), serde_saphyr::from_str(text).unwrap_or_else(|e| panic!("{name}: {e}"))));
        }
    }
    assert!(all.len() > 8, "{} objects", all.len());
    all
}

fn of_kind(kind: &str) -> Vec<Value> {
    objects().into_iter().map(|(_, object)| object).filter(|object| object["kind"] == kind).collect()
}

/// What of a manifest its published type has no place for.
fn lost(given: &Value, kept: &Value, at: &str, all: &mut Vec<String>) {
    match (given, kept) {
        (Value::Object(given), Value::Object(kept)) => {
            for (key, value) in given {
                let at = format!("{at}.{key}");
                match kept.get(key) {
                    Some(kept) => lost(value, kept, &at, all),
                    // Empty lists and maps aren't written.
                    None if value.as_object().is_some_and(|map| map.is_empty()) => {}
                    None => all.push(at),
                }
            }
        }
        (Value::Array(given), Value::Array(kept)) if given.len() == kept.len() => {
            for (n, (given, kept)) in given.iter().zip(kept).enumerate() {
                lost(given, kept, &format!("{at}[{n}]"), all);
            }
        }
        (given, kept) if given == kept => {}
        _ => all.push(format!("{at}: {given} is read as {kept}")),
    }
}

fn check<T: DeserializeOwned + Serialize>(file: &str, object: &Value) {
    let typed: T =
        serde_json::from_value(object.clone()).unwrap_or_else(|e| panic!("{file}: {}: {e}", object["kind"]));
    let mut all = Vec::new();
    lost(object, &serde_json::to_value(&typed).unwrap(), "", &mut all);
    assert!(all.is_empty(), "{file}: {} {}: {all:?}", object["kind"], object["metadata"]["name"]);
}

#[test]
fn every_manifest_is_of_its_published_type_to_the_last_field() {
    for (file, object) in objects() {
        let kind = format!("{} {}", object["apiVersion"].as_str().unwrap(), object["kind"].as_str().unwrap());
        match kind.as_str() {
            "v1 Namespace" => check::<core::Namespace>(&file, &object),
            "v1 ServiceAccount" => check::<core::ServiceAccount>(&file, &object),
            "v1 ConfigMap" => check::<core::ConfigMap>(&file, &object),
            "v1 Service" => check::<core::Service>(&file, &object),
            "networking.k8s.io/v1 NetworkPolicy" => check::<networking::NetworkPolicy>(&file, &object),
            "apps/v1 StatefulSet" => check::<apps::StatefulSet>(&file, &object),
            "rbac.authorization.k8s.io/v1 RoleBinding" => check::<rbac::RoleBinding>(&file, &object),
            "rbac.authorization.k8s.io/v1 ClusterRole" => check::<rbac::ClusterRole>(&file, &object),
            "rbac.authorization.k8s.io/v1 ClusterRoleBinding" => {
                check::<rbac::ClusterRoleBinding>(&file, &object)
            }
            "kustomize.config.k8s.io/v1beta1 Kustomization" => {
                for resource in object["resources"].as_array().unwrap() {
                    let of = folder().join(&file);
                    assert!(of.with_file_name(resource.as_str().unwrap()).is_file(), "{file}: {resource}");
                }
            }
            other => panic!("{file}: {other} is not checked"),
        }
    }
}

#[test]
fn the_check_finds_a_field_that_the_type_does_not_have() {
    let mut role = of_kind("ClusterRole").pop().unwrap();
    role["rules"][0]["verb"] = "get".into();
    let typed: rbac::ClusterRole = serde_json::from_value(role.clone()).unwrap();
    let mut all = Vec::new();
    lost(&role, &serde_json::to_value(typed).unwrap(), "", &mut all);
    assert_eq!(all, [".rules[0].verb"]);
}

fn named(kind: &str, name: &str) -> Value {
    let mut all = of_kind(kind);
    all.retain(|object| object["metadata"]["name"] == name);
    assert_eq!(all.len(), 1, "{kind} {name}");
    all.remove(0)
}

#[test]
fn the_roles_give_what_the_doctor_asks_for() {
    let words = |value: &Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    let mut given = BTreeSet::new();
    for rule in named("ClusterRole", "torpor-sandboxes")["rules"].as_array().unwrap() {
        for resource in words(&rule["resources"]) {
            for verb in words(&rule["verbs"]) {
                given.insert(format!("{verb} {resource}"));
            }
        }
    }
    assert_eq!(given, torpor_driver_kubernetes::rights().into_iter().collect::<BTreeSet<String>>());
}

#[test]
fn whatever_is_bound_can_be_bound_where_it_is_and_every_namespace_has_all_that_its_pods_need() {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let roles: BTreeSet<String> =
        of_kind("ClusterRole").iter().map(|role| text(&role["metadata"]["name"])).collect();
    let bindings = of_kind("RoleBinding");
    for binding in bindings.iter().chain(&of_kind("ClusterRoleBinding")) {
        // A Role is of one namespace, and can be bound in no other.
        assert_eq!(binding["roleRef"]["kind"], "ClusterRole", "{binding}");
        assert!(roles.contains(&text(&binding["roleRef"]["name"])), "{binding}");
        let subject = &binding["subjects"][0];
        assert_eq!((&subject["name"], &subject["namespace"]), (&"torpor".into(), &"torpor".into()));
    }
    let account = {
        let config = named("ConfigMap", "torpor");
        let config = Lines::from(config["data"]["torpor.toml"].as_str().unwrap());
        (config.value("service_account"), config.value("namespace"))
    };
    let mut namespaces = of_kind("Namespace");
    namespaces.retain(|namespace| namespace["metadata"]["name"] != "torpor");
    assert!(namespaces.iter().any(|namespace| text(&namespace["metadata"]["name"]) == account.1));
    assert_eq!(namespaces.len(), 2, "the usual one, and that of a workspace");
    for namespace in namespaces {
        let name = &namespace["metadata"]["name"];
        let here = |object: &&Value| object["metadata"]["namespace"] == *name;
        assert!(bindings.iter().any(|one| here(&one) && one["roleRef"]["name"] == "torpor-sandboxes"));
        let accounts = of_kind("ServiceAccount");
        let accounts = accounts.iter().filter(here);
        let tokenless = |one: &Value| one["automountServiceAccountToken"] == false;
        assert!(accounts.clone().any(|one| text(&one["metadata"]["name"]) == account.0 && tokenless(one)));
        assert_eq!(namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"], "baseline");
    }
}

/// A volume's root belongs to root: what has to be closed to others is a folder below it.
#[test]
fn the_state_is_in_a_folder_of_its_own_below_the_volume() {
    let config = named("ConfigMap", "torpor");
    let config = Lines::from(config["data"]["torpor.toml"].as_str().unwrap());
    let state = PathBuf::from(config.value("state_dir"));
    let sets = of_kind("StatefulSet");
    let pod = &sets[0]["spec"]["template"]["spec"];
    let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
    let mount = mounts.iter().find(|mount| mount["name"] == "state").unwrap();
    let root = PathBuf::from(mount["mountPath"].as_str().unwrap());
    assert!(state.starts_with(&root) && state != root, "{}", state.display());
    assert_eq!(pod["securityContext"]["fsGroupChangePolicy"], "OnRootMismatch");
}

/// As much of TOML as is needed here.
struct Lines(String);

impl From<&str> for Lines {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl Lines {
    fn value(&self, key: &str) -> String {
        let of = |line: &str| {
            let (found, value) = line.split_once('=')?;
            (found.trim() == key).then(|| value.trim().trim_matches('"').to_owned())
        };
        self.0.lines().find_map(of).unwrap_or_else(|| panic!("no {key}"))
    }
}

#[test]
fn names_and_labels_fit_together_and_nothing_runs_as_root() {
    let sets = of_kind("StatefulSet");
    let [gateway] = sets.as_slice() else { panic!("{sets:?}") };
    let template = &gateway["spec"]["template"];
    assert_eq!(gateway["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]);
    let services = of_kind("Service");
    assert_eq!(services[0]["spec"]["selector"], template["metadata"]["labels"]);
    assert_eq!(services[0]["metadata"]["name"], gateway["spec"]["serviceName"]);
    assert_eq!(gateway["spec"]["replicas"], 1, "two would fight for one database");
    assert_eq!(template["spec"]["securityContext"]["runAsNonRoot"], true);
    let account = &template["spec"]["serviceAccountName"];
    assert!(of_kind("RoleBinding").iter().all(|binding| binding["subjects"][0]["name"] == *account));
    let volumes = template["spec"]["volumes"].as_array().unwrap().iter().map(|v| &v["name"]);
    let claims =
        gateway["spec"]["volumeClaimTemplates"].as_array().unwrap().iter().map(|v| &v["metadata"]["name"]);
    let there: Vec<&Value> = volumes.chain(claims).collect();
    for mount in template["spec"]["containers"][0]["volumeMounts"].as_array().unwrap() {
        assert!(there.contains(&&mount["name"]), "{mount}");
    }
}

#[test]
fn pods_of_sandboxes_do_not_reach_the_gateway() {
    let (policies, sets) = (of_kind("NetworkPolicy"), of_kind("StatefulSet"));
    let gateways = |policy: &&Value| policy["metadata"]["namespace"] == sets[0]["metadata"]["namespace"];
    let policy = policies.iter().find(gateways).expect("one for the gateway's namespace");
    let labels = &sets[0]["spec"]["template"]["metadata"]["labels"];
    assert_eq!(policy["spec"]["podSelector"]["matchLabels"], *labels);
    assert_eq!(policy["spec"]["policyTypes"], serde_json::json!(["Ingress"]));
    // Only namespaces with a label are let in, and none of ours has it.
    let rules = policy["spec"]["ingress"].as_array().unwrap();
    assert!(!rules.is_empty());
    for from in rules.iter().flat_map(|rule| rule["from"].as_array().expect("no rule is for all")) {
        assert_eq!(from.as_object().unwrap().len(), 1, "{from}");
        let wanted = from["namespaceSelector"]["matchLabels"].as_object().unwrap();
        assert!(!wanted.is_empty());
        for namespace in of_kind("Namespace") {
            let has =
                |(key, value): (&String, &Value)| namespace["metadata"]["labels"].get(key) == Some(value);
            assert!(!wanted.iter().all(has), "{namespace}");
        }
    }
    for rule in rules {
        assert_eq!(
            rule["ports"][0]["port"],
            sets[0]["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
        );
    }
}

#[test]
fn only_the_gateways_pods_reach_the_agents_port_and_all_others_stay_as_they_were() {
    let (policies, sets, maps) = (of_kind("NetworkPolicy"), of_kind("StatefulSet"), of_kind("ConfigMap"));
    let config = maps[0]["data"]["torpor.toml"].as_str().unwrap();
    assert!(config.contains("agent_link = \"mtls\""));
    let line = config.lines().find_map(|line| line.trim().strip_prefix("agent_port = ")).unwrap();
    let port: u64 = line.parse().unwrap();
    let sandboxes = config.lines().find_map(|line| line.trim().strip_prefix("namespace = ")).unwrap();
    let of_agents = |policy: &&Value| policy["metadata"]["name"] == "torpor-agents";
    let of_agents: Vec<&Value> = policies.iter().filter(of_agents).collect();
    let places: Vec<&str> =
        of_agents.iter().map(|one| one["metadata"]["namespace"].as_str().unwrap()).collect();
    assert!(
        places.contains(&sandboxes.trim_matches('"')) && places.contains(&"team-sandboxes"),
        "{places:?}"
    );
    assert!(of_agents.iter().all(|one| one["spec"] == of_agents[0]["spec"]), "{of_agents:?}");
    let policy = of_agents[0];
    // As the driver labels pods, see types.rs and manifest.rs.
    let labels = serde_json::json!({"app.kubernetes.io/managed-by": "torpor"});
    assert_eq!(policy["spec"]["podSelector"]["matchLabels"], labels);
    let rules = policy["spec"]["ingress"].as_array().unwrap();
    let [gateway, others] = rules.as_slice() else { panic!("{rules:?}") };
    let [from] = gateway["from"].as_array().unwrap().as_slice() else { panic!("{gateway}") };
    assert_eq!(from["podSelector"]["matchLabels"], sets[0]["spec"]["template"]["metadata"]["labels"]);
    let namespace = &from["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"];
    assert_eq!(namespace, &sets[0]["metadata"]["namespace"]);
    assert_eq!(gateway["ports"], serde_json::json!([{"protocol": "TCP", "port": port}]));
    // Everybody reaches every port but that one.
    assert!(others["from"].is_null());
    let open = |protocol: &str, port: u64| {
        others["ports"].as_array().unwrap().iter().any(|range| {
            let (first, last) = (range["port"].as_u64().unwrap(), range["endPort"].as_u64().unwrap());
            range["protocol"] == protocol && (first..=last).contains(&port)
        })
    };
    for protocol in ["TCP", "UDP", "SCTP"] {
        for one in [1, 22, port - 1, port + 1, 8080, 65535] {
            assert!(open(protocol, one), "{protocol} {one}");
        }
    }
    assert!(!open("TCP", port));
}
