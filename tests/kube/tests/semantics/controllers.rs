//! The simulated controller, as each of its generations was seen to behave.

use std::time::Duration;

use serde_json::{Value, json};
use torpor_test_kube::{Behaviour, Generation, Server};

const ALL: [Generation; 4] = [Generation::Alpha, Generation::Early, Generation::Late, Generation::Stable];

async fn cluster(generation: Generation, linger: u64) -> Server {
    let behaviour = Behaviour { linger: Duration::from_millis(linger), ..Behaviour::default() };
    Server::start(generation, behaviour).await.unwrap()
}

fn make(server: &Server) {
    let spec = json!({"operatingMode": "Running", "podTemplate": {"spec": {
        "terminationGracePeriodSeconds": 1, "containers": [{"name": "sandbox", "image": "i"}]}}});
    assert!(server.make("sandboxes", "a", json!({"metadata": {"name": "a"}, "spec": spec})));
}

fn wish(server: &Server, mode: &str) {
    assert!(server.change("sandboxes", "a", |object| object["spec"]["operatingMode"] = json!(mode)));
}

/// A condition's status, when it is of the present generation; "": there is none.
fn condition(server: &Server, kind: &str) -> String {
    let object = server.object("sandboxes", "a").unwrap();
    let all = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = all.into_iter().find(|one| one["type"] == kind);
    let found = found.filter(|one| one["observedGeneration"] == object["metadata"]["generation"]);
    found.map(|one| one["status"].as_str().unwrap().to_owned()).unwrap_or_default()
}

fn pod(server: &Server) -> Option<Value> {
    server.object("pods", "a").map(|pod| (*pod).clone())
}

async fn until(what: &str, mut test: impl FnMut() -> bool) {
    for _ in 0..600 {
        if test() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it never came about: {what}");
}

#[tokio::test]
async fn v0_4_has_no_suspended_condition_and_no_pod_is_ready_to_it() {
    let server = cluster(Generation::Alpha, 10).await;
    make(&server);
    until("ready", || condition(&server, "Ready") == "True").await;
    wish(&server, "Suspended");
    until("no pod", || pod(&server).is_none()).await;
    until("as it should be", || condition(&server, "Ready") == "True").await;
    assert_eq!(condition(&server, "Suspended"), "");
}

#[tokio::test]
async fn v0_5_0_says_suspended_before_the_pod_is_gone_and_goes_on_saying_it_after_a_resume() {
    let server = cluster(Generation::Early, 600).await;
    make(&server);
    until("ready", || condition(&server, "Ready") == "True").await;
    assert_eq!(condition(&server, "Suspended"), "", "only while suspended");
    wish(&server, "Suspended");
    until("early", || condition(&server, "Suspended") == "True").await;
    assert!(pod(&server).is_some(), "that early");
    until("no pod", || pod(&server).is_none()).await;
    wish(&server, "Running");
    until("ready", || condition(&server, "Ready") == "True").await;
    let object = server.object("sandboxes", "a").unwrap();
    let stale = object["status"]["conditions"].as_array().unwrap().iter().any(|one| {
        one["type"] == "Suspended"
            && one["status"] == "True"
            && one["observedGeneration"] != object["metadata"]["generation"]
    });
    assert!(stale, "{:?}", object["status"]);
}

#[tokio::test]
async fn v1_0_says_suspended_of_a_pod_that_is_gone_only_and_takes_it_back() {
    let server = cluster(Generation::Stable, 400).await;
    make(&server);
    until("ready", || condition(&server, "Ready") == "True").await;
    assert_eq!(condition(&server, "Suspended"), "False");
    wish(&server, "Suspended");
    until("on its way out", || {
        pod(&server).is_some_and(|pod| pod["metadata"]["deletionTimestamp"].is_string())
    })
    .await;
    until("the controller's word", || condition(&server, "Suspended") == "False").await;
    until("at last", || condition(&server, "Suspended") == "True").await;
    assert!(pod(&server).is_none());
    wish(&server, "Running");
    until("ready", || condition(&server, "Ready") == "True").await;
    assert_eq!(condition(&server, "Suspended"), "False");
}

#[tokio::test]
async fn a_resume_before_the_old_pod_is_gone_is_called_ready_with_the_dying_pod() {
    for generation in ALL {
        let server = cluster(generation, 800).await;
        make(&server);
        until("ready", || condition(&server, "Ready") == "True").await;
        let old = pod(&server).unwrap()["metadata"]["uid"].clone();
        wish(&server, "Suspended");
        until("on its way out", || {
            pod(&server).is_some_and(|pod| pod["metadata"]["deletionTimestamp"].is_string())
        })
        .await;
        // Its conditions still say Ready in this simulation, as a kubelet's do until its containers have ended.
        server.change_status("pods", "a", |pod| {
            pod["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
            pod["status"]["phase"] = json!("Running");
        });
        wish(&server, "Running");
        until("ready of this generation", || condition(&server, "Ready") == "True").await;
        assert_eq!(pod(&server).unwrap()["metadata"]["uid"], old, "{generation:?}: the old pod");
        until("a new one in the end", || {
            pod(&server)
                .is_some_and(|pod| pod["metadata"]["uid"] != old && condition(&server, "Ready") == "True")
        })
        .await;
    }
}

#[tokio::test]
async fn a_failed_pod_stays_until_a_flip_and_one_that_was_deleted_comes_anew() {
    for generation in ALL {
        let server = cluster(generation, 10).await;
        make(&server);
        until("ready", || condition(&server, "Ready") == "True").await;
        let uid = || pod(&server).map(|pod| pod["metadata"]["uid"].clone());
        let first = uid();
        server.kill_pod("a");
        until("seen", || condition(&server, "Ready") == "False").await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(uid(), first, "{generation:?}: nobody makes another one");
        wish(&server, "Suspended");
        until("no pod", || pod(&server).is_none()).await;
        wish(&server, "Running");
        until("another one", || uid().is_some_and(|uid| Some(uid) != first)).await;
        let second = uid();
        server.delete("pods", "a");
        until("a third", || uid().is_some_and(|uid| Some(uid) != second)).await;
    }
}

#[tokio::test]
async fn conditions_of_before_stand_until_the_controller_has_looked() {
    let behaviour = Behaviour { reconcile: Duration::from_millis(300), ..Behaviour::default() };
    let server = Server::start(Generation::Stable, behaviour).await.unwrap();
    make(&server);
    until("ready", || condition(&server, "Ready") == "True").await;
    let before = server.object("sandboxes", "a").unwrap()["metadata"]["generation"].as_u64().unwrap();
    wish(&server, "Suspended");
    let object = server.object("sandboxes", "a").unwrap();
    assert_eq!(object["metadata"]["generation"].as_u64(), Some(before + 1));
    let ready =
        object["status"]["conditions"].as_array().unwrap().iter().find(|one| one["type"] == "Ready").cloned();
    let ready = ready.unwrap();
    assert_eq!((&ready["status"], ready["observedGeneration"].as_u64()), (&json!("True"), Some(before)));
}
