//! Sandboxes stay where they were made, whatever the configuration names since, and nothing is believed of another cluster.

use std::{fs, time::Duration};

use serde_json::json;
use torpor_driver_kubernetes::{KubernetesConfig, KubernetesDriver};
use torpor_sandbox::{Change, ComputeDriver, DriverError, Keep, Observed, Run, SandboxId, SandboxSpec};
use torpor_test_kube::{Behaviour, Generation, Server};

use crate::common::{Bench, claim, object, spec, until};

const GRACE: Duration = Duration::from_secs(5);

async fn driver(config: &KubernetesConfig) -> std::sync::Arc<KubernetesDriver> {
    KubernetesDriver::new(config.clone()).await.unwrap()
}

/// Of the team's namespace, and of the usual one.
#[tokio::test]
async fn a_sandbox_stays_in_the_namespace_where_it_was_made() {
    type Change = fn(&mut KubernetesConfig);
    let cases: [(&str, Change); 3] = [
        ("team", |config| config.namespaces.clear()),
        ("team", |config| drop(config.namespaces.insert("team".into(), "sandboxes".into()))),
        ("default", |config| config.namespace = Some("default".into())),
    ];
    for (workspace, change) in cases {
        let (bench, first) = Bench::with(Generation::Stable, Behaviour::default(), |config| {
            config.namespaces.insert("team".into(), "default".into());
        })
        .await;
        let id = SandboxId::generate();
        let spec = SandboxSpec { workspace: workspace.into(), ..spec() };
        first.create(&id, &spec, Run(1)).await.unwrap();
        first.start(&id, Keep::Disk, Run(1)).await.unwrap();
        drop(first);
        let mut config = bench.config.clone();
        change(&mut config);
        let second = driver(&config).await;
        until("it runs on", async || {
            second.observe(&id).await.unwrap() == (Observed::Running { run: Run(1), agent: true })
        })
        .await;
        until("its namespace is watched", async || second.watched() == Some(1)).await;
        assert_eq!(second.observe(&id).await.unwrap(), Observed::Running { run: Run(1), agent: true });
        second.stop(&id, Keep::Disk, GRACE).await.unwrap();
        second.start(&id, Keep::Disk, Run(2)).await.unwrap();
        assert_eq!(second.list().await.unwrap(), std::slice::from_ref(&id), "{workspace}");
        assert_eq!(second.delete(&id).await.unwrap(), torpor_sandbox::Change::Done);
        for kind in ["sandboxes", "pods", "persistentvolumeclaims"] {
            assert!(bench.server.names(kind).is_empty(), "{workspace}: {kind} are left");
        }
        assert!(second.list().await.unwrap().is_empty());
    }
}

/// A folder of before places were noted, and a configuration that changes after the gateway was started once.
#[tokio::test]
async fn a_place_that_was_never_noted_is_noted_by_the_next_driver() {
    let (bench, first) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    first.create(&id, &spec(), Run(1)).await.unwrap();
    drop(first);
    let place = bench.config.state_dir.join("kubernetes").join(id.as_str()).join("place.json");
    fs::remove_file(&place).unwrap();
    drop(bench.driver().await);
    assert!(place.is_file());
    let mut config = bench.config.clone();
    config.namespace = Some("default".into());
    let third = driver(&config).await;
    third.start(&id, Keep::Disk, Run(1)).await.unwrap();
    third.delete(&id).await.unwrap();
    assert!(bench.server.names("persistentvolumeclaims").is_empty());
}

#[tokio::test]
async fn another_cluster_is_not_taken_for_one_in_which_everything_is_gone() {
    // Known by the uid of its kube-system, or by its address alone where that may not be read.
    for readable in [true, false] {
        let (bench, first) = Bench::new(Generation::Stable).await;
        let other = Server::start(Generation::Stable, Behaviour::default()).await.unwrap();
        if !readable {
            bench.server.deny("get", "namespaces");
            other.deny("get", "namespaces");
        }
        let id = SandboxId::generate();
        first.create(&id, &spec(), Run(1)).await.unwrap();
        first.start(&id, Keep::Disk, Run(1)).await.unwrap();
        drop(first);
        let folder = tempfile::tempdir().unwrap();
        let mut config = bench.config.clone();
        config.kubeconfig = Some(other.kubeconfig(folder.path()).unwrap());
        let lost = driver(&config).await;
        let told = |text: &str| text.contains(&bench.server.url()) && text.contains("another one");
        let seen = lost.observe(&id).await.unwrap();
        assert!(matches!(&seen, Observed::Unknown(text) if told(text)), "{seen:?}");
        for refused in [
            lost.start(&id, Keep::Disk, Run(2)).await.map(drop),
            lost.stop(&id, Keep::Disk, GRACE).await.map(drop),
            lost.create(&id, &spec(), Run(1)).await.map(drop),
            lost.delete(&id).await.map(drop),
        ] {
            let refused = refused.unwrap_err();
            assert!(refused.is_transient() && told(&refused.to_string()), "{refused:?}");
        }
        assert!(other.names("sandboxes").is_empty() && other.names("persistentvolumeclaims").is_empty());
        drop(lost);
        // It is there still, with its run.
        let back = bench.driver().await;
        until("it runs", async || {
            back.observe(&id).await.unwrap() == (Observed::Running { run: Run(1), agent: true })
        })
        .await;
        assert_eq!(back.delete(&id).await.unwrap(), Change::Done);
        assert!(bench.server.names("sandboxes").is_empty());
    }
}

#[tokio::test]
async fn the_same_cluster_by_another_address_is_told_so_and_is_believed_when_the_place_is_removed() {
    let (bench, first) = Bench::new(Generation::Stable).await;
    bench.server.deny("get", "namespaces");
    let id = SandboxId::generate();
    first.create(&id, &spec(), Run(1)).await.unwrap();
    drop(first);
    // Else these would show that it is the same one.
    bench.server.remove("sandboxes", &object(&id));
    bench.server.remove("persistentvolumeclaims", &claim(&id));
    let text = fs::read_to_string(bench.config.kubeconfig.as_ref().unwrap()).unwrap();
    let mut config = bench.config.clone();
    let path = bench.folder.path().join("other");
    fs::write(&path, text.replace("127.0.0.1", "localhost")).unwrap();
    config.kubeconfig = Some(path);
    let refused = driver(&config).await.delete(&id).await.unwrap_err().to_string();
    let place = bench.config.state_dir.join("kubernetes").join(id.as_str()).join("place.json");
    assert!(refused.contains("localhost") && refused.contains(place.to_str().unwrap()), "{refused}");
    fs::remove_file(&place).unwrap();
    assert_eq!(driver(&config).await.delete(&id).await.unwrap(), Change::Done);
}

#[tokio::test]
async fn a_deletion_is_not_done_while_there_is_an_object_of_its_name_under_another_label() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    let label = |kind: &str, name: &str, to: &str| {
        assert!(
            bench.server.change(kind, name, |o| o["metadata"]["labels"]["torpor.dev/gateway"] = json!(to))
        );
    };
    label("sandboxes", &object(&id), "another");
    until("it is seen to have left", async || driver.watched() == Some(0)).await;
    let refused = driver.delete(&id).await.unwrap_err();
    let text = refused.to_string();
    assert!(refused.is_transient() && text.contains("another"), "{refused:?}");
    assert!(text.contains(&format!("kubectl -n sandboxes label sandbox {}", object(&id))), "{text}");
    assert!(bench.server.object("persistentvolumeclaims", &claim(&id)).is_some());
    assert_eq!(driver.list().await.unwrap(), std::slice::from_ref(&id));

    label("sandboxes", &object(&id), driver.identity());
    label("persistentvolumeclaims", &claim(&id), "another");
    let refused = driver.delete(&id).await.unwrap_err().to_string();
    assert!(refused.contains(&format!("label pvc {}", claim(&id))), "{refused}");
    assert!(bench.server.object("sandboxes", &object(&id)).is_none());
    label("persistentvolumeclaims", &claim(&id), driver.identity());
    assert_eq!(driver.delete(&id).await.unwrap(), Change::Done);
    assert!(bench.server.names("persistentvolumeclaims").is_empty());
}

#[tokio::test]
async fn an_object_that_was_somebody_elses_before_keeps_no_deletion() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    let theirs = json!({"metadata": {"name": object(&id)}, "spec": {"operatingMode": "Suspended",
        "podTemplate": {"spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    assert!(bench.server.make("sandboxes", &object(&id), theirs));
    let refused = driver.create(&id, &spec(), Run(1)).await;
    assert!(matches!(&refused, Err(DriverError::Invalid(_))), "{refused:?}");
    assert_eq!(driver.delete(&id).await.unwrap(), Change::Done);
    assert!(bench.server.object("sandboxes", &object(&id)).is_some(), "it is not ours to delete");
    assert!(bench.server.names("persistentvolumeclaims").is_empty());
}
