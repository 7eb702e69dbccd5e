//! What keeps a pod from coming up, and what becomes of its sandbox: waited for, tried again, or told as a failure.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{sync::Arc, time::Duration};

use common::{Bench, object, spec, until};
use serde_json::json;
use torpor_driver_kubernetes::KubernetesDriver;
use torpor_sandbox::{Change, ComputeDriver, DriverError, Keep, Observed, Run, SandboxId};
use torpor_test_kube::{Behaviour, Generation, Trouble};

const GRACE: Duration = Duration::from_secs(5);
const UP: Observed = Observed::Running { run: Run(1), agent: true };

async fn created(bench: &Bench, driver: &KubernetesDriver) -> SandboxId {
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    until("watched", async || driver.watched().is_some()).await;
    bench.server.forget();
    id
}

/// Asks until something else than to wait is answered, as the gateway does.
async fn start(driver: &KubernetesDriver, id: &SandboxId) -> Result<Change, DriverError> {
    for _ in 0..60 {
        match driver.start(id, Keep::Disk, Run(1)).await {
            Err(error) if error.waits_for_host() => tokio::time::sleep(Duration::from_millis(50)).await,
            done => return done,
        }
    }
    driver.start(id, Keep::Disk, Run(1)).await
}

fn with(patience: u64) -> impl FnOnce(&mut torpor_driver_kubernetes::KubernetesConfig) {
    move |config| {
        config.patience = Duration::from_millis(patience);
        config.start_timeout = Duration::from_secs(2);
    }
}

fn begun(
    driver: &Arc<KubernetesDriver>,
    id: &SandboxId,
) -> tokio::task::JoinHandle<Result<Change, DriverError>> {
    let (driver, id) = (driver.clone(), id.clone());
    tokio::spawn(async move { driver.start(&id, Keep::Disk, Run(1)).await })
}

#[tokio::test]
async fn a_pod_that_is_drained_or_evicted_while_it_comes_up_is_started_again() {
    type Hand = (&'static str, fn(&Bench, &str));
    let hands: [Hand; 3] = [
        ("drained", |bench, name| assert!(bench.server.delete("pods", name))),
        ("evicted", |bench, name| bench.server.evict_pod(name)),
        ("suspended by somebody", |bench, name| {
            bench.server.change("sandboxes", name, |o| o["spec"]["operatingMode"] = json!("Suspended"));
        }),
    ];
    for (what, hand) in hands {
        let behaviour = Behaviour { stuck: Some(""), ..Behaviour::default() };
        let (bench, driver) = Bench::with(Generation::Stable, behaviour, |_| {}).await;
        let id = created(&bench, &driver).await;
        let starting = begun(&driver, &id);
        until("its pod is there", async || bench.server.object("pods", &object(&id)).is_some()).await;
        until("and waits", async || {
            let pod = bench.server.object("pods", &object(&id)).unwrap();
            pod["status"]["containerStatuses"].is_array()
        })
        .await;
        hand(&bench, &object(&id));
        let interrupted = starting.await.unwrap();
        assert!(
            matches!(&interrupted, Err(error @ DriverError::Interrupted(_)) if error.waits_for_host()),
            "{what}: {interrupted:?}"
        );
        bench.server.behave(|b| b.stuck = None);
        assert_eq!(start(&driver, &id).await.unwrap(), Change::Done, "{what}");
        assert_eq!(driver.observe(&id).await.unwrap(), UP, "{what}");
    }
}

#[tokio::test]
async fn a_pod_that_is_being_made_is_waited_for_beyond_the_time_of_a_boot() {
    let behaviour = Behaviour { stuck: Some(""), ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, with(300)).await;
    let id = created(&bench, &driver).await;
    let began = std::time::Instant::now();
    while began.elapsed() < Duration::from_millis(2500) {
        let waits = driver.start(&id, Keep::Disk, Run(1)).await;
        assert!(
            matches!(&waits, Err(DriverError::Pending(text)) if text.contains("node-1") && text.contains("kubectl -n sandboxes describe pod")),
            "{waits:?}"
        );
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Running { run: Run(1), agent: false });
    }
    bench.server.behave(|b| b.stuck = None);
    assert_eq!(start(&driver, &id).await.unwrap(), Change::Already);
    assert_eq!(driver.observe(&id).await.unwrap(), UP);
}

#[tokio::test]
async fn one_pull_that_fails_is_not_the_sandboxs_failure() {
    let behaviour = Behaviour { no_image: true, ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, |_| {}).await;
    let id = created(&bench, &driver).await;
    let starting = begun(&driver, &id);
    until("the pull has failed", async || {
        let pod = bench.server.object("pods", &object(&id));
        pod.is_some_and(|pod| pod["status"]["containerStatuses"][0]["state"]["waiting"].is_object())
    })
    .await;
    bench.server.behave(|b| b.no_image = false);
    assert_eq!(starting.await.unwrap().unwrap(), Change::Done);
}

#[tokio::test]
async fn what_a_container_waits_for_is_told_and_then_a_failure() {
    let behaviour = Behaviour { stuck: Some("CreateContainerConfigError"), ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, with(300)).await;
    let id = created(&bench, &driver).await;
    let waits = driver.start(&id, Keep::Disk, Run(1)).await;
    assert!(
        matches!(&waits, Err(DriverError::Pending(text)) if text.contains("CreateContainerConfigError")),
        "{waits:?}"
    );
    let failed = start(&driver, &id).await;
    assert!(
        matches!(&failed, Err(DriverError::Failed { cause, .. }) if cause.contains("CreateContainerConfigError")),
        "{failed:?}"
    );
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
}

#[tokio::test]
async fn a_quota_is_waited_for_and_the_sandbox_goes_on_by_itself() {
    let text =
        "pods \"x\" is forbidden: exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1";
    for generation in [Generation::Alpha, Generation::Stable] {
        let behaviour = Behaviour { refuse_pods: Some(text), ..Behaviour::default() };
        let (bench, driver) = Bench::with(generation, behaviour, with(300)).await;
        let id = created(&bench, &driver).await;
        let full = driver.start(&id, Keep::Disk, Run(1)).await;
        assert!(
            matches!(&full, Err(DriverError::Exhausted(text)) if text.contains("quota: small")),
            "{full:?}"
        );
        bench.server.behave(|b| b.refuse_pods = None);
        assert_eq!(start(&driver, &id).await.unwrap(), Change::Already);
    }
}

#[tokio::test]
async fn why_the_controller_makes_no_pod_is_the_cause_of_the_failure() {
    let text = "pods \"x\" is forbidden: error looking up service account sandboxes/nobody: serviceaccount \"nobody\" not found";
    let behaviour = Behaviour { refuse_pods: Some(text), ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, with(300)).await;
    let id = created(&bench, &driver).await;
    let refused = start(&driver, &id).await;
    assert!(
        matches!(&refused, Err(DriverError::Failed { cause, .. }) if cause.contains("serviceaccount \"nobody\" not found")),
        "{refused:?}"
    );
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
}

#[tokio::test]
async fn a_controller_that_is_away_is_waited_for_and_named() {
    let behaviour = Behaviour { reconcile: Duration::from_secs(6), ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, with(300)).await;
    let id = created(&bench, &driver).await;
    let mut said = String::new();
    for _ in 0..12 {
        match driver.start(&id, Keep::Disk, Run(1)).await {
            Err(DriverError::Pending(_)) => {}
            Err(DriverError::Unreachable(text)) => {
                said = text;
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(said.contains("controller") && said.contains("running?"), "{said}");
    bench.server.behave(|b| b.reconcile = Duration::from_millis(5));
    assert_eq!(start(&driver, &id).await.unwrap(), Change::Already);
}

#[tokio::test]
async fn a_controller_that_says_nothing_leaves_it_suspending() {
    let (bench, driver) = Bench::with(Generation::Stable, Behaviour::default(), |c| {
        c.stop_margin = Duration::from_secs(6);
    })
    .await;
    let id = created(&bench, &driver).await;
    start(&driver, &id).await.unwrap();
    bench.server.change("pods", &object(&id), |pod| pod["spec"]["terminationGracePeriodSeconds"] = json!(1));
    until("the controller has looked", async || driver.observe(&id).await.unwrap() == UP).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    bench.server.behave(|b| b.reconcile = Duration::from_secs(20));
    let (other, wanted) = (driver.clone(), id.clone());
    let stop = tokio::spawn(async move { other.stop(&wanted, Keep::Disk, GRACE).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    bench.server.remove("pods", &object(&id));
    let waits = stop.await.unwrap().unwrap_err();
    assert!(waits.is_transient() && waits.to_string().contains("has said nothing"), "{waits}");
}

#[tokio::test]
async fn a_wake_whose_fate_is_unknown_can_not_come_true_after_a_stop() {
    for generation in [Generation::Alpha, Generation::Early, Generation::Stable] {
        let (bench, driver) = Bench::new(generation).await;
        let id = created(&bench, &driver).await;
        bench.server.trouble("PATCH", &object(&id), 1, Trouble::Forbidden);
        assert!(driver.start(&id, Keep::Disk, Run(1)).await.is_err());
        let version = |bench: &Bench| {
            let stored = bench.server.object("sandboxes", &object(&id)).unwrap();
            stored["metadata"]["resourceVersion"].clone()
        };
        let before = version(&bench);
        driver.stop(&id, Keep::Disk, Duration::ZERO).await.unwrap();
        assert_ne!(version(&bench), before, "{generation:?}: a patch of before is stale");
        let after = version(&bench);
        driver.stop(&id, Keep::Disk, Duration::ZERO).await.unwrap();
        assert_eq!(version(&bench), after, "at rest nothing is written");
        assert_eq!(driver.start(&id, Keep::Disk, Run(2)).await.unwrap(), Change::Done);
    }
}

#[tokio::test]
async fn a_strangers_pod_of_its_name_is_told_at_once() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = created(&bench, &driver).await;
    let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "theirs", "uid": "u"}]);
    let theirs = json!({"metadata": {"ownerReferences": owner}, "spec": {"containers": [{"name": "a", "image": "b"}]}});
    assert!(bench.server.make("pods", &object(&id), theirs));
    let refused = driver.start(&id, Keep::Disk, Run(1)).await;
    assert!(
        matches!(&refused, Err(DriverError::Invalid(text)) if text.contains("ReplicaSet theirs")),
        "{refused:?}"
    );
}

#[tokio::test]
async fn a_pod_that_was_left_alone_is_written_out_and_ended() {
    let (bench, driver) =
        Bench::with(Generation::Stable, Behaviour::default(), |c| c.claim_templates = true).await;
    let id = created(&bench, &driver).await;
    start(&driver, &id).await.unwrap();
    bench.server.orphan(&object(&id));
    until(
        "it is seen",
        async || matches!(driver.observe(&id).await.unwrap(), Observed::Ended(ended) if ended.run == Run(1)),
    )
    .await;
    assert!(bench.server.object("pods", &object(&id)).is_some());
    assert!(driver.stop(&id, Keep::Disk, GRACE).await.unwrap().flushed, "its files are written out");
    assert!(bench.server.names("pods").is_empty());
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
    assert_eq!(bench.server.names("persistentvolumeclaims").len(), 1, "its workspace is there");
    assert_eq!(driver.delete(&id).await.unwrap(), Change::Done);
    assert!(bench.server.names("persistentvolumeclaims").is_empty(), "and goes with the sandbox");
}

#[tokio::test]
async fn a_delete_takes_a_pod_that_was_left_alone_along() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = created(&bench, &driver).await;
    start(&driver, &id).await.unwrap();
    bench.server.orphan(&object(&id));
    driver.delete(&id).await.unwrap();
    assert!(bench.server.names("pods").is_empty());
    let asked = bench.server.asked();
    let deleted = asked.iter().find(|one| one.method == "DELETE" && one.path.contains("/pods/")).unwrap();
    assert!(deleted.body["preconditions"]["uid"].is_string(), "{:?}", deleted.body);
}

#[tokio::test]
async fn a_pod_that_may_not_be_ended_names_the_command_that_does() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = created(&bench, &driver).await;
    start(&driver, &id).await.unwrap();
    bench.server.orphan(&object(&id));
    bench.server.trouble("DELETE", "/pods/", 1, Trouble::Forbidden);
    let refused = driver.delete(&id).await.unwrap_err().to_string();
    assert!(refused.contains(&format!("kubectl -n sandboxes delete pod {}", object(&id))), "{refused}");
    driver.delete(&id).await.unwrap();
}

#[tokio::test]
async fn a_sandbox_object_without_our_labels_is_not_touched_and_the_command_is_named() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = created(&bench, &driver).await;
    start(&driver, &id).await.unwrap();
    let labels = bench.server.object("sandboxes", &object(&id)).unwrap()["metadata"]["labels"].clone();
    bench.server.change("sandboxes", &object(&id), |o| o["metadata"]["labels"] = json!({}));
    let command = format!("kubectl -n sandboxes label sandbox {} --overwrite", object(&id));
    until("it is seen", async || {
        matches!(driver.observe(&id).await.unwrap(), Observed::Unknown(text) if text.contains(&command))
    })
    .await;
    let refused = driver.delete(&id).await.unwrap_err().to_string();
    assert!(refused.contains(&command), "{refused}");
    assert!(bench.server.object("pods", &object(&id)).is_some());
    bench.server.change("sandboxes", &object(&id), |o| o["metadata"]["labels"] = labels);
    driver.delete(&id).await.unwrap();
    assert!(bench.server.names("pods").is_empty());
}

#[tokio::test]
async fn a_resume_takes_the_agents_image_of_today_and_the_missing_one_is_named() {
    for by_volume in [false, true] {
        for generation in [Generation::Alpha, Generation::Stable] {
            let (mut bench, driver) =
                Bench::with(generation, Behaviour::default(), |c| c.agent_volume = by_volume).await;
            let id = created(&bench, &driver).await;
            start(&driver, &id).await.unwrap();
            driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
            drop(driver);
            bench.config.agent_image = "registry.test/torpor-agent:2".to_owned();
            let driver = bench.driver().await;
            driver.start(&id, Keep::Disk, Run(2)).await.unwrap();
            let pod = bench.server.object("pods", &object(&id)).unwrap();
            let image = if by_volume {
                let volumes = pod["spec"]["volumes"].as_array().unwrap();
                volumes.iter().find(|one| one["name"] == "agent").unwrap()["image"]["reference"].clone()
            } else {
                pod["spec"]["initContainers"][0]["image"].clone()
            };
            assert_eq!(image, json!("registry.test/torpor-agent:2"), "{generation:?} by volume {by_volume}");
            assert_eq!(pod["spec"]["containers"][0]["image"], json!("registry.test/tiny:1"));
            driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
            bench.server.forget();
            driver.start(&id, Keep::Disk, Run(3)).await.unwrap();
            let asked = bench.server.asked();
            let patch = &asked.iter().find(|one| one.method == "PATCH").unwrap().body;
            assert_eq!(patch["spec"].as_object().unwrap().len(), 1, "our one field again: {patch}");
        }
    }
}

#[tokio::test]
async fn what_answers_for_a_cluster_and_is_none_does_not_make_it_one_without_sandboxes() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    drop(driver);
    let text = std::fs::read_to_string(bench.folder.path().join("kubeconfig")).unwrap();
    let text = text.replace(&bench.server.url(), &format!("{}/elsewhere", bench.server.url()));
    std::fs::write(bench.folder.path().join("kubeconfig"), text).unwrap();
    let driver = bench.driver().await;
    let refused = driver.create(&SandboxId::generate(), &spec(), Run(1)).await.unwrap_err();
    assert!(refused.waits_for_host() && refused.to_string().contains("no API server"), "{refused}");
    assert_eq!(driver.capabilities().notice, None, "nobody says that it lacks agent-sandbox");
}

#[tokio::test]
async fn a_mount_point_is_one_however_it_is_written() {
    let (bench, driver) = Bench::with(Generation::Stable, Behaviour::default(), |c| {
        c.mount_path = "/workspace/".to_owned();
    })
    .await;
    let theirs =
        json!({"metadata": {"name": "mine"}, "spec": {"resources": {"requests": {"storage": "1Gi"}}}});
    assert!(bench.server.make("persistentvolumeclaims", "data.team", theirs));
    let volume = |source: &str, target: &str, read_only| {
        let (source, target) = (source.to_owned(), target.to_owned());
        torpor_sandbox::SandboxSpec {
            volumes: vec![torpor_sandbox::spec::Volume { source, target, read_only }],
            ..spec()
        }
    };
    let id = SandboxId::generate();
    driver.create(&id, &volume("data.team", "//workspace/.", false), Run(1)).await.unwrap();
    assert_eq!(bench.server.names("persistentvolumeclaims"), ["data.team"], "it takes the workspace's place");
    start(&driver, &id).await.unwrap();
    let pod = bench.server.object("pods", &object(&id)).unwrap();
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().unwrap();
    let paths: Vec<&str> = mounts.iter().map(|one| one["mountPath"].as_str().unwrap()).collect();
    assert_eq!(paths, ["/.torpor", "/workspace"]);
    for (bad, why) in [
        (volume("mine", "/workspace//", true), "writable"),
        (volume("mine", "//.torpor", false), "the agent"),
        (volume("mine", "/a:b", false), "':'"),
        (volume("Mine_", "/a", false), "no claim"),
    ] {
        let refused = driver.check(&bad).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
}

#[tokio::test]
async fn a_name_that_no_image_can_have_fails_at_once() {
    let behaviour = Behaviour { stuck: Some("InvalidImageName"), ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, |_| {}).await;
    let id = created(&bench, &driver).await;
    let missing = driver.start(&id, Keep::Disk, Run(1)).await;
    assert!(
        matches!(&missing, Err(DriverError::BaseMissing(text)) if text.contains("tiny:1: InvalidImageName")),
        "{missing:?}"
    );
}

#[tokio::test]
async fn an_agents_image_that_can_not_be_had_is_not_called_the_sandboxs() {
    let behaviour = Behaviour { stuck: Some(""), ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, with(400)).await;
    let id = created(&bench, &driver).await;
    assert!(matches!(driver.start(&id, Keep::Disk, Run(1)).await, Err(DriverError::Pending(_))));
    bench.server.change_status("pods", &object(&id), |pod| {
        pod["status"]["initContainerStatuses"] = json!([{"name": "agent", "ready": false,
            "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}]);
    });
    let missing = start(&driver, &id).await;
    assert!(
        matches!(&missing, Err(DriverError::BaseMissing(text)) if text.contains("the agent's image registry.test/torpor-agent:1")),
        "{missing:?}"
    );
}
