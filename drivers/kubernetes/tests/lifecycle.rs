//! What a sandbox goes through in a cluster: slow pods, stale words of the controller, drains, and other people's hands.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::time::Duration;

use common::{Bench, claim, object, spec, until};
use futures::StreamExt as _;
use serde_json::{Value, json};
use torpor_sandbox::{
    Change, ComputeDriver, DriverError, Ended, Exit, Keep, Observed, Run, SandboxId, SandboxSpec,
    spec::Volume,
};
use torpor_test_kube::{Behaviour, Generation};

const GRACE: Duration = Duration::from_secs(5);
const ALL: [Generation; 4] = [Generation::Alpha, Generation::Early, Generation::Late, Generation::Stable];

async fn ready(driver: &dyn ComputeDriver, spec: &SandboxSpec) -> SandboxId {
    let id = SandboxId::generate();
    driver.create(&id, spec, Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    id
}

fn condition(object: &Value, kind: &str) -> Value {
    let all = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|one| one["type"] == kind).unwrap_or_default()["status"].clone()
}

fn interrupted(seen: &Observed) -> bool {
    matches!(seen, Observed::Ended(Ended { exit: Exit::Interrupted(_), .. }))
}

#[tokio::test]
async fn a_stale_suspended_beside_ready_ends_in_ready() {
    let (bench, driver) = Bench::new(Generation::Early).await;
    let id = ready(&*driver, &spec()).await;
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    driver.start(&id, Keep::Disk, Run(2)).await.unwrap();
    let stored = bench.server.object("sandboxes", &object(&id)).unwrap();
    assert_eq!(
        [condition(&stored, "Suspended"), condition(&stored, "Ready")],
        ["True", "True"],
        "as that release is"
    );
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Running { run: Run(2), agent: true });
}

#[tokio::test]
async fn a_suspended_condition_with_the_pod_still_there_is_not_believed() {
    let (bench, driver) = Bench::new(Generation::Early).await;
    let id = ready(&*driver, &spec()).await;
    bench.server.behave(|b| b.linger = Duration::from_millis(1500));
    let (other, wanted) = (driver.clone(), id.clone());
    let stop = tokio::spawn(async move { other.stop(&wanted, Keep::Disk, GRACE).await });
    until("the controller calls it suspended", async || {
        bench.server.object("sandboxes", &object(&id)).is_some_and(|o| condition(&o, "Suspended") == "True")
    })
    .await;
    assert!(bench.server.object("pods", &object(&id)).is_some(), "that release says so early");
    assert!(!stop.is_finished(), "its pod is there");
    assert!(!matches!(driver.observe(&id).await.unwrap(), Observed::Stopped { .. }));
    assert!(stop.await.unwrap().unwrap().flushed);
    assert!(bench.server.object("pods", &object(&id)).is_none());
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
}

#[tokio::test]
async fn a_pod_with_a_long_grace_may_use_it_whatever_the_deadline() {
    for generation in ALL {
        let (bench, driver) = Bench::new(generation).await;
        let id = ready(&*driver, &SandboxSpec { stop_grace: Duration::from_secs(40), ..spec() }).await;
        let pod = bench.server.object("pods", &object(&id)).unwrap();
        assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], json!(40));
        bench.server.behave(|b| b.linger = Duration::from_millis(2500));
        bench.server.forget();
        driver.stop(&id, Keep::Disk, Duration::from_secs(1)).await.unwrap();
        let patches: Vec<Value> =
            bench.server.asked().into_iter().filter(|a| a.method == "PATCH").map(|a| a.body).collect();
        assert_eq!(patches.len(), 1, "{generation:?}: told once, and nothing taken back: {patches:?}");
    }
}

#[tokio::test]
async fn a_pod_that_does_not_go_leaves_the_sandbox_suspending_with_the_reason() {
    let (bench, driver) = Bench::with(Generation::Stable, Behaviour::default(), |c| {
        c.stop_margin = Duration::from_millis(300);
    })
    .await;
    let id = ready(&*driver, &spec()).await;
    bench.server.change("pods", &object(&id), |pod| pod["spec"]["terminationGracePeriodSeconds"] = json!(1));
    bench.server.behave(|b| b.linger = Duration::from_secs(4));
    let error = driver.stop(&id, Keep::Disk, GRACE).await.unwrap_err();
    assert!(matches!(&error, DriverError::Backend { .. }) && error.is_transient(), "{error:?}");
    assert!(error.to_string().contains("terminating") && error.to_string().contains("node-1"), "{error}");
    let stored = bench.server.object("sandboxes", &object(&id)).unwrap();
    assert_eq!(stored["spec"]["operatingMode"], json!("Suspended"), "nothing is rolled back");
    assert!(!matches!(driver.observe(&id).await.unwrap(), Observed::Stopped { .. }));
    bench.server.behave(|b| b.linger = Duration::ZERO);
    until("it goes at last", async || driver.stop(&id, Keep::Disk, GRACE).await.is_ok()).await;
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
}

#[tokio::test]
async fn somebody_elses_claim_survives_and_ours_is_gone() {
    for generation in ALL {
        let (bench, driver) = Bench::new(generation).await;
        let theirs =
            json!({"metadata": {"name": "shared"}, "spec": {"resources": {"requests": {"storage": "1Gi"}}}});
        bench.server.make("persistentvolumeclaims", "shared", theirs);
        let volumes =
            vec![Volume { source: "/shared/team/data".into(), target: "/data".into(), read_only: true }];
        let id = ready(&*driver, &SandboxSpec { volumes, ..spec() }).await;
        let pod = bench.server.object("pods", &object(&id)).unwrap();
        let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().unwrap();
        let mount =
            json!({"name": "claim-0", "mountPath": "/data", "subPath": "team/data", "readOnly": true});
        assert!(mounts.contains(&mount), "{mounts:?}");
        let own = bench.server.object("persistentvolumeclaims", &claim(&id)).unwrap();
        assert!(own["metadata"]["ownerReferences"].is_null(), "nobody owns the workspace");
        driver.delete(&id).await.unwrap();
        assert_eq!(bench.server.names("persistentvolumeclaims"), ["shared"]);
        assert!(bench.server.names("sandboxes").is_empty() && bench.server.names("pods").is_empty());
    }
}

#[tokio::test]
async fn a_claim_of_somebodys_at_the_workspaces_place_takes_its_place() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let volumes = vec![Volume { source: "mine".into(), target: "/workspace".into(), read_only: false }];
    let spec = SandboxSpec { volumes, ..spec() };
    let id = SandboxId::generate();
    driver.create(&id, &spec, Run(1)).await.unwrap();
    let missing = driver.start(&id, Keep::Disk, Run(1)).await;
    assert!(matches!(&missing, Err(DriverError::MountMissing(text)) if text.contains("mine")), "{missing:?}");
    let theirs =
        json!({"metadata": {"name": "mine"}, "spec": {"resources": {"requests": {"storage": "1Gi"}}}});
    bench.server.make("persistentvolumeclaims", "mine", theirs);
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    driver.delete(&id).await.unwrap();
    assert_eq!(bench.server.names("persistentvolumeclaims"), ["mine"]);
}

#[tokio::test]
async fn a_start_waits_for_the_old_pod_and_has_one_of_its_own() {
    for generation in ALL {
        let (bench, driver) = Bench::new(generation).await;
        let id = ready(&*driver, &spec()).await;
        let old = bench.server.object("pods", &object(&id)).unwrap()["metadata"]["uid"].clone();
        bench.server.behave(|b| b.linger = Duration::from_millis(900));
        // The gateway turns round: the stop is dropped when the cluster has heard of it.
        let _ = tokio::time::timeout(Duration::from_millis(300), driver.stop(&id, Keep::Disk, GRACE)).await;
        bench.server.forget();
        driver.start(&id, Keep::Disk, Run(2)).await.unwrap();
        let pod = bench.server.object("pods", &object(&id)).unwrap();
        assert!(pod["metadata"]["uid"] != old && pod["metadata"]["deletionTimestamp"].is_null());
        let asked = bench.server.asked();
        let woken = asked.iter().position(|a| a.method == "PATCH").unwrap();
        let looked = asked[..woken].iter().rev().find(|a| a.path.contains("/pods/")).unwrap();
        assert_eq!(looked.code, 404, "{generation:?}: the pod was seen to be gone before");
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Running { run: Run(2), agent: true });
    }
}

#[tokio::test]
async fn drains_and_evictions_are_not_the_sandboxs_own_failures_are_and_a_flip_mends_them() {
    for generation in ALL {
        let (bench, driver) = Bench::new(generation).await;
        let id = ready(&*driver, &spec()).await;
        let name = object(&id);
        type Hand = (&'static str, fn(&Bench, &str));
        let hands: [Hand; 3] = [
            ("eviction", |bench, name| bench.server.evict_pod(name)),
            ("drain", |bench, name| assert!(bench.server.delete("pods", name))),
            ("failure", |bench, name| bench.server.kill_pod(name)),
        ];
        for (run, (what, hand)) in (2..).zip(hands) {
            hand(&bench, &name);
            until(what, async || {
                let seen = driver.observe(&id).await.unwrap();
                let own = matches!(&seen, Observed::Ended(Ended { exit: Exit::Lost(_), .. }));
                if what == "failure" { own } else { interrupted(&seen) }
            })
            .await;
            let stopped = driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
            assert!(!stopped.flushed, "{what}");
            driver.start(&id, Keep::Disk, Run(run)).await.unwrap();
            assert_eq!(
                driver.observe(&id).await.unwrap(),
                Observed::Running { run: Run(run), agent: true },
                "{what}"
            );
        }
        assert!(bench.server.object("persistentvolumeclaims", &claim(&id)).is_some());
    }
}

#[tokio::test]
async fn a_sandbox_object_that_others_delete_is_missing_and_its_workspace_is_not() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = ready(&*driver, &spec()).await;
    let mut hints = driver.hints();
    bench.server.delete("sandboxes", &object(&id));
    assert!(hints.next().await.is_some());
    until("its end", async || interrupted(&driver.observe(&id).await.unwrap())).await;
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    assert!(bench.server.object("persistentvolumeclaims", &claim(&id)).is_some());
    let missing = driver.start(&id, Keep::Disk, Run(2)).await;
    assert!(
        matches!(&missing, Err(DriverError::DataMissing(text)) if text.contains(&object(&id))),
        "{missing:?}"
    );
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false }, "there is storage");
    assert_eq!(driver.delete(&id).await.unwrap(), Change::Done);
    assert!(bench.server.names("persistentvolumeclaims").is_empty());
}

#[tokio::test]
async fn what_others_do_to_the_mode_is_seen() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = ready(&*driver, &spec()).await;
    bench.server.change("sandboxes", &object(&id), |o| o["spec"]["operatingMode"] = json!("Suspended"));
    until("suspended by others", async || interrupted(&driver.observe(&id).await.unwrap())).await;
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    bench.server.change("sandboxes", &object(&id), |o| o["spec"]["operatingMode"] = json!("Running"));
    until("woken by others", async || {
        driver.observe(&id).await.unwrap() == (Observed::Running { run: Run(0), agent: false })
    })
    .await;
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
}

#[tokio::test]
async fn a_pod_without_room_waits_and_goes_on_by_itself() {
    let behaviour = Behaviour { unschedulable: true, ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, |_| {}).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    let full = driver.start(&id, Keep::Disk, Run(1)).await;
    assert!(
        matches!(&full, Err(DriverError::Exhausted(text)) if text.contains("Insufficient memory")),
        "{full:?}"
    );
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Running { run: Run(1), agent: false });
    bench.server.behave(|b| b.unschedulable = false);
    assert_eq!(driver.start(&id, Keep::Disk, Run(1)).await.unwrap(), Change::Already);
}

#[tokio::test]
async fn an_image_that_can_not_be_had_is_told_and_nothing_goes_on_trying() {
    let behaviour = Behaviour { no_image: true, ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, |c| {
        c.patience = Duration::from_millis(400);
    })
    .await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    let first = driver.start(&id, Keep::Disk, Run(1)).await;
    assert!(
        matches!(&first, Err(error @ DriverError::Pending(text)) if text.contains("tiny") && error.waits_for_host()),
        "its node tries again: {first:?}"
    );
    let mut missing = first;
    for _ in 0..20 {
        if !matches!(missing, Err(DriverError::Pending(_))) {
            break;
        }
        missing = driver.start(&id, Keep::Disk, Run(1)).await;
    }
    assert!(matches!(&missing, Err(DriverError::BaseMissing(text)) if text.contains("tiny")), "{missing:?}");
    assert!(bench.server.names("pods").is_empty());
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
}

#[tokio::test]
async fn a_main_command_that_ends_is_told_at_once_with_its_code() {
    let (_bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    let spec = SandboxSpec { command: vec!["exit".into(), "3".into()], ..spec() };
    driver.create(&id, &spec, Run(1)).await.unwrap();
    let mut hints = driver.hints();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    assert!(hints.next().await.is_some());
    let ended = Observed::Ended(Ended { run: Run(1), exit: Exit::Code(3) });
    assert_eq!(driver.observe(&id).await.unwrap(), ended);
}

#[tokio::test]
async fn commands_reach_the_agent_through_the_api_server() {
    let real = common::agent("commands of a real agent").map(Some);
    for agent in std::iter::once(None).chain(real) {
        let behaviour = Behaviour { agent, ..Behaviour::default() };
        let (_bench, driver) = Bench::with(Generation::Stable, behaviour, |_| {}).await;
        let id = ready(&*driver, &spec()).await;
        let (text, code) = common::exec(&*driver, &id, &["/bin/echo", "hello"]).await;
        assert_eq!(code, Some(0));
        assert!(text.ends_with("hello\n"));
        assert!(driver.stop(&id, Keep::Disk, GRACE).await.unwrap().flushed);
    }
}

#[tokio::test]
async fn memory_is_refused_with_the_reason() {
    let (_bench, driver) = Bench::new(Generation::Stable).await;
    let id = ready(&*driver, &spec()).await;
    let refused = driver.stop(&id, Keep::Memory, GRACE).await.unwrap_err();
    assert!(matches!(&refused, DriverError::Unsupported(text) if text.contains("no pod")), "{refused:?}");
}
