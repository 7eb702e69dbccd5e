//! The roles of deploy/kubernetes against what is asked for, which the cluster in memory holds every test to.

use std::{collections::BTreeSet, time::Duration};

use serde_json::{Value, json};
use torpor_driver_kubernetes::diagnose;
use torpor_sandbox::{ComputeDriver, DriverError, Keep, Level, Run, SandboxId};
use torpor_test_kube::{Behaviour, Generation};

use crate::common::{Bench, object, rules, spec, until};

const GRACE: Duration = Duration::from_secs(5);

fn given(rules: &Value) -> BTreeSet<String> {
    let words = |value: &Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
    };
    let mut all = BTreeSet::new();
    for rule in rules.as_array().unwrap() {
        for (group, resource) in words(&rule["apiGroups"]).iter().zip(words(&rule["resources"])) {
            all.extend(words(&rule["verbs"]).iter().map(|verb| format!("{verb} {group}/{resource}")));
        }
    }
    all
}

#[tokio::test]
async fn the_roles_give_what_is_asked_for_and_nothing_more() {
    let (bench, driver) = Bench::with(Generation::Stable, Behaviour::default(), |config| {
        config.service_account = Some("sandbox".into());
    })
    .await;
    bench.server.make("serviceaccounts", "sandbox", json!({"metadata": {"name": "sandbox"}}));
    // Before the watches are open, so that it is asked for.
    driver.list().await.unwrap();
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    until("watched", async || driver.watched() == Some(1)).await;
    driver.observe(&id).await.unwrap();
    assert!(!driver.console(&id, 1000).await.is_empty());
    let findings = diagnose(&bench.config).await.unwrap();
    let bad: Vec<_> = findings.iter().filter(|one| one.level == Level::Fail).collect();
    assert!(bad.is_empty(), "{bad:?}");
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    driver.delete(&id).await.unwrap();
    // The only pods that are ever deleted: those that were left alone.
    let alone = SandboxId::generate();
    driver.create(&alone, &spec(), Run(1)).await.unwrap();
    driver.start(&alone, Keep::Disk, Run(1)).await.unwrap();
    bench.server.orphan(&object(&alone));
    driver.delete(&alone).await.unwrap();

    let (mut inside, mut outside) = (BTreeSet::new(), BTreeSet::new());
    for asked in bench.server.asked() {
        assert_ne!(asked.code, 403, "{asked:?}");
        for right in asked.rights() {
            let list = if right.namespace.is_empty() { &mut outside } else { &mut inside };
            list.insert(format!("{} {}/{}", right.verb, right.group, right.resource));
        }
    }
    let (sandboxes, cluster) = rules();
    assert_eq!(given(&sandboxes), inside);
    assert_eq!(given(&cluster), outside);
}

#[tokio::test]
async fn a_right_that_is_missing_is_refused_by_the_cluster_and_told_with_the_next_command() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    bench.server.deny("patch", "sandboxes");
    let refused = driver.start(&id, Keep::Disk, Run(1)).await;
    let Err(refused @ DriverError::Backend { .. }) = refused else { panic!("{refused:?}") };
    let mut text = refused.to_string();
    let mut cause = std::error::Error::source(&refused);
    while let Some(next) = cause {
        text.push_str(&next.to_string());
        cause = next.source();
    }
    assert!(text.contains("torpor doctor") && text.contains("cannot patch"), "{text}");
}

/// A namespace that is not there, one that takes no more, an account that is missing, and a class that is none's default.
#[tokio::test]
async fn the_doctor_tries_what_it_calls_good() {
    let (bench, _driver) = Bench::with(Generation::Stable, Behaviour::default(), |config| {
        config.service_account = Some("sandbox".into());
        config.namespaces.insert("team".into(), "nowhere".into());
        config.driver_config.insert("runtimeClassName=gvisor".into());
    })
    .await;
    bench.server.grant(Some("nowhere"), &rules().0);
    bench.server.change("storageclasses", "standard", |class| class["metadata"]["annotations"] = json!({}));
    let findings = diagnose(&bench.config).await.unwrap();
    let is = |name: &str, level: Level, words: &[&str]| {
        let found: Vec<_> = findings.iter().filter(|one| one.name == name).collect();
        let [found] = found.as_slice() else { panic!("{name}: {findings:?}") };
        let text = format!("{} {}", found.finding, found.advice);
        assert!(found.level == level && words.iter().all(|word| text.contains(word)), "{found:?}");
    };
    is("rights", Level::Ok, &["sandboxes", "nowhere"]);
    is(
        "namespaces",
        Level::Fail,
        &["nowhere takes no claim", "sandboxes would take", "deploy/kubernetes/workspace"],
    );
    is(
        "service-accounts",
        Level::Fail,
        &["sandbox is not there in sandboxes", "create serviceaccount sandbox"],
    );
    is("storage-class", Level::Fail, &["is the cluster's default", "standard"]);
    is("runtime-class", Level::Warn, &["gvisor is not there"]);
    is("agent-image", Level::Ok, &["not looked at"]);
    is("controller", Level::Ok, &["not known"]);
    let writes = |a: &&torpor_test_kube::Asked| a.method == "POST" && !a.path.contains("selfsubject");
    let writes: Vec<_> = bench.server.asked().into_iter().filter(|a| writes(&a)).collect();
    assert!(!writes.is_empty() && writes.iter().all(|a| a.query.contains("dryRun=All")), "{writes:?}");
    assert!(
        bench.server.names("persistentvolumeclaims").is_empty() && bench.server.names("sandboxes").is_empty()
    );

    bench.server.trouble(
        "POST",
        "/sandboxes/persistentvolumeclaims?",
        1,
        torpor_test_kube::Trouble::Forbidden,
    );
    let findings = diagnose(&bench.config).await.unwrap();
    let found = findings.iter().find(|one| one.name == "namespaces").unwrap();
    assert!(
        found.finding.contains("sandboxes takes no claim") && found.advice.contains("quota"),
        "{found:?}"
    );
}
