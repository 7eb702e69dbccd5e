//! What is asked of a cluster, word for word, and what becomes of answers that are no success.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
#[path = "requests/late.rs"]
mod late;
#[path = "requests/others.rs"]
mod others;
#[path = "requests/places.rs"]
mod places;
#[path = "requests/rights.rs"]
mod rights;
#[path = "requests/secure.rs"]
mod secure;
#[path = "requests/watches.rs"]
mod watches;

use std::time::Duration;

use common::{Bench, claim, object, spec, until};
use serde_json::{Value, json};
use torpor_sandbox::{
    ComputeDriver, DriverError, Egress, Keep, Observed, Run, SandboxId, SandboxSpec, spec::Volume,
};
use torpor_test_kube::{Asked, Behaviour, Generation, Trouble};

const GRACE: Duration = Duration::from_secs(5);

fn patches(bench: &Bench) -> Vec<Asked> {
    bench.server.asked().into_iter().filter(|asked| asked.method == "PATCH").collect()
}

#[tokio::test]
async fn only_our_field_is_patched_in_either_version() {
    for (generation, version, asleep, awake) in [
        (Generation::Alpha, "v1alpha1", json!({"replicas": 0}), json!({"replicas": 1})),
        (
            Generation::Early,
            "v1beta1",
            json!({"operatingMode": "Suspended"}),
            json!({"operatingMode": "Running"}),
        ),
        (
            Generation::Stable,
            "v1beta1",
            json!({"operatingMode": "Suspended"}),
            json!({"operatingMode": "Running"}),
        ),
    ] {
        let (bench, driver) = Bench::new(generation).await;
        let id = SandboxId::generate();
        driver.create(&id, &spec(), Run(1)).await.unwrap();
        driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
        driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
        let mut patches = patches(&bench);
        let path = format!("/apis/agents.x-k8s.io/{version}/namespaces/sandboxes/sandboxes/{}", object(&id));
        for patch in &patches {
            assert_eq!(patch.path, path);
            // The controller writes at the same time: a conflict is read again and tried again.
            assert!([200, 409].contains(&patch.code), "{}", patch.code);
            assert_eq!(patch.content_type, "application/merge-patch+json");
            assert!(patch.query.contains("fieldManager=torpor"), "{}", patch.query);
            assert!(patch.body["metadata"]["resourceVersion"].is_string());
        }
        patches.retain(|patch| patch.code == 200);
        let [woken, put_down] = patches.as_slice() else { panic!("{patches:?}") };
        assert_eq!(woken.body["spec"], awake);
        assert_eq!(woken.body["metadata"]["annotations"], json!({"torpor.dev/run": "1"}));
        assert_eq!(put_down.body["spec"], asleep);
        assert_eq!(put_down.body["metadata"].as_object().unwrap().len(), 1, "{}", put_down.body);
        let posts: Vec<Asked> = bench
            .server
            .asked()
            .into_iter()
            .filter(|a| a.method == "POST" && !a.path.ends_with("exec"))
            .collect();
        let kinds: Vec<&str> = posts.iter().map(|a| a.body["kind"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["PersistentVolumeClaim", "Sandbox"]);
        assert_eq!(posts[1].body["apiVersion"], json!(format!("agents.x-k8s.io/{version}")));
        let (field, value) = asleep.as_object().unwrap().iter().next().unwrap();
        assert_eq!(&posts[1].body["spec"][field], value, "made asleep");
    }
}

/// A gateway looks at everything that is Ready each minute.
#[tokio::test]
async fn looking_at_what_is_not_used_opens_no_exec() {
    let idle = Duration::from_millis(100);
    // One with a main command has a connection for the word of its end, and one only.
    for (command, kept) in [(vec![], 0), (vec!["serve".to_owned()], 1)] {
        let (bench, driver) =
            Bench::with(Generation::Stable, Behaviour::default(), |config| config.idle = idle).await;
        let id = SandboxId::generate();
        driver.create(&id, &SandboxSpec { command, ..spec() }, Run(1)).await.unwrap();
        driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
        let execs = || bench.server.counts().get("exec pods").copied().unwrap_or_default();
        assert_eq!(execs(), 1);
        let ready = Observed::Running { run: Run(1), agent: true };
        for _ in 0..20 {
            assert_eq!(driver.observe(&id).await.unwrap(), ready);
            tokio::time::sleep(idle / 4).await;
        }
        assert_eq!(execs(), 1);
        drop(driver);
        let driver = bench.driver().await;
        until("watched", async || driver.watched() == Some(1)).await;
        bench.server.forget();
        for _ in 0..20 {
            assert_eq!(driver.observe(&id).await.unwrap(), ready);
            tokio::time::sleep(idle / 4).await;
        }
        assert_eq!(
            (execs(), bench.server.counts().values().sum()),
            (kept, kept),
            "and nothing else is asked"
        );
        bench.server.kill_pod(&object(&id));
        until("its end is seen without it", async || {
            matches!(driver.observe(&id).await.unwrap(), Observed::Ended(_))
        })
        .await;
    }
}

#[tokio::test]
async fn a_pod_is_what_spec_and_configuration_say_and_nothing_of_the_node_is_open_to_it() {
    let (bench, driver) = Bench::with(Generation::Stable, Behaviour::default(), |config| {
        config.runtime_class = Some("kata".into());
        config.storage_class = Some("fast".into());
        config.service_account = Some("sandbox".into());
        config.node_selector.insert("pool".into(), "sandboxes".into());
        config.pod.insert("tolerations".into(), json!([{"key": "sandboxes", "operator": "Exists"}]));
        config.mount_path = "/home/agent".into();
    })
    .await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    let made = bench.server.object("sandboxes", &object(&id)).unwrap();
    let pod = &made["spec"]["podTemplate"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(container["image"], json!("registry.test/tiny:1"));
    assert_eq!(container["command"], json!(["/.torpor/torpor-agent", "--pod", "/.torpor/agent.sock"]));
    assert_eq!(container["resources"]["limits"], json!({"cpu": "1", "memory": (96 << 20).to_string()}));
    assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], json!(false));
    let grace = json!([{"name": "TORPOR_GRACE_SECONDS", "value": "10"}]);
    assert_eq!(container["env"], grace, "an environment may hold secrets, and goes by the agent");
    assert_eq!(pod["initContainers"][0]["image"], json!("registry.test/torpor-agent:1"));
    assert_eq!(pod["runtimeClassName"], json!("kata"));
    assert_eq!(pod["serviceAccountName"], json!("sandbox"));
    assert_eq!(pod["automountServiceAccountToken"], json!(false));
    assert_eq!(pod["nodeSelector"], json!({"pool": "sandboxes"}));
    assert_eq!(pod["tolerations"][0]["key"], json!("sandboxes"));
    assert_eq!(pod["restartPolicy"], json!("Never"));
    for open in ["hostNetwork", "hostPID", "hostIPC"] {
        assert!(pod[open].is_null());
    }
    let mounts = container["volumeMounts"].as_array().unwrap();
    assert!(mounts.contains(&json!({"name": "workspace", "mountPath": "/home/agent"})), "{mounts:?}");
    let claim = bench.server.object("persistentvolumeclaims", &claim(&id)).unwrap();
    assert_eq!(claim["spec"]["storageClassName"], json!("fast"));
    assert_eq!(claim["spec"]["resources"]["requests"]["storage"], json!((1_u64 << 30).to_string()));
    assert_eq!(claim["metadata"]["labels"]["torpor.dev/sandbox"], json!(id.as_str()));
}

#[tokio::test]
async fn a_workspace_by_template_is_the_objects_own() {
    let (bench, driver) =
        Bench::with(Generation::Stable, Behaviour::default(), |config| config.claim_templates = true).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    assert_eq!(bench.server.names("persistentvolumeclaims"), [format!("workspace-{}", object(&id))]);
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    assert_eq!(bench.server.names("persistentvolumeclaims").len(), 1);
    driver.delete(&id).await.unwrap();
    assert!(bench.server.names("persistentvolumeclaims").is_empty());
}

#[tokio::test]
async fn what_a_sandbox_says_of_its_pod_is_in_it_as_far_as_it_is_allowed() {
    let (bench, driver) = Bench::with(Generation::Stable, Behaviour::default(), |config| {
        config.runtime_class = Some("kata".into());
        config.node_selector.insert("pool".into(), "sandboxes".into());
        for key in
            ["runtimeClassName=gvisor", "nodeSelector", "storageClassName", "tolerations", "claimTemplates"]
        {
            config.driver_config.insert(key.into());
        }
    })
    .await;
    let with = |value: Value| SandboxSpec { driver_config: value.as_object().unwrap().clone(), ..spec() };
    let id = SandboxId::generate();
    let said = with(json!({
        "runtimeClassName": "gvisor", "nodeSelector": {"disk": "ssd"}, "storageClassName": "fast",
        "tolerations": [{"key": "gpu", "operator": "Exists", "tolerationSeconds": 30}],
    }));
    driver.check(&said).unwrap();
    driver.create(&id, &said, Run(1)).await.unwrap();
    let made = bench.server.object("sandboxes", &object(&id)).unwrap();
    let pod = &made["spec"]["podTemplate"]["spec"];
    assert_eq!(pod["runtimeClassName"], json!("gvisor"));
    assert_eq!(pod["nodeSelector"], json!({"disk": "ssd", "pool": "sandboxes"}));
    assert_eq!(pod["tolerations"][0]["tolerationSeconds"], json!(30));
    assert!(pod["storageClassName"].is_null(), "that is the claim's");
    let own = bench.server.object("persistentvolumeclaims", &claim(&id)).unwrap();
    assert_eq!(own["spec"]["storageClassName"], json!("fast"));

    let id = SandboxId::generate();
    driver.create(&id, &with(json!({"claimTemplates": true})), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    let there = bench.server.names("persistentvolumeclaims");
    assert!(
        there.contains(&format!("workspace-{}", object(&id))) && !there.contains(&claim(&id)),
        "{there:?}"
    );

    bench.server.forget();
    for (key, bad) in [
        ("hostNetwork", json!({"hostNetwork": true})),
        ("serviceAccountName", json!({"serviceAccountName": "admin"})),
        ("runtimeClassName", json!({"runtimeClassName": "runc"})),
        ("nodeSelector", json!({"nodeSelector": {"pool": "control-plane"}})),
        ("tolerations", json!({"tolerations": "all"})),
    ] {
        let id = SandboxId::generate();
        for refused in
            [driver.check(&with(bad.clone())), driver.create(&id, &with(bad), Run(1)).await.map(drop)]
        {
            assert!(
                matches!(&refused, Err(DriverError::Invalid(text)) if text.starts_with(&format!("driver_config.{key}:"))),
                "{refused:?}"
            );
        }
    }
    assert!(bench.server.asked().iter().all(|asked| asked.method == "GET"), "nothing is written");
}

#[tokio::test]
async fn an_agent_may_come_by_an_image_volume_and_pods_of_before_are_still_reached() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let before = SandboxId::generate();
    driver.create(&before, &spec(), Run(1)).await.unwrap();
    driver.start(&before, Keep::Disk, Run(1)).await.unwrap();
    drop(driver);
    let mut config = bench.config.clone();
    config.agent_volume = true;
    let driver = torpor_driver_kubernetes::KubernetesDriver::new(config).await.unwrap();
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    let pod = bench.server.object("pods", &object(&id)).unwrap();
    assert!(pod["spec"]["initContainers"].is_null());
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let image = json!({"reference": "registry.test/torpor-agent:1", "pullPolicy": "IfNotPresent"});
    assert!(volumes.contains(&json!({"name": "agent", "image": image})), "{volumes:?}");
    assert_eq!(pod["spec"]["containers"][0]["command"][0], json!("/.torpor-agent/torpor-agent"));
    for (id, run) in [(&id, 1), (&before, 1)] {
        assert_eq!(driver.observe(id).await.unwrap(), Observed::Running { run: Run(run), agent: true });
        assert!(driver.stop(id, Keep::Disk, GRACE).await.unwrap().flushed);
    }
}

#[tokio::test]
async fn a_template_claim_that_is_gone_is_missing_and_not_made_anew() {
    let (bench, driver) =
        Bench::with(Generation::Stable, Behaviour::default(), |config| config.claim_templates = true).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    let claim = format!("workspace-{}", object(&id));
    bench.server.remove("persistentvolumeclaims", &claim);
    let missing = driver.start(&id, Keep::Disk, Run(2)).await;
    assert!(matches!(&missing, Err(DriverError::DataMissing(text)) if text.contains(&claim)), "{missing:?}");
    // The controller may have made another one by then, or makes it now: it is no workspace of this sandbox.
    bench
        .server
        .change("sandboxes", &object(&id), |object| object["metadata"]["annotations"]["x"] = json!("y"));
    until("an empty one", async || bench.server.object("persistentvolumeclaims", &claim).is_some()).await;
    let missing = driver.start(&id, Keep::Disk, Run(2)).await;
    assert!(matches!(&missing, Err(DriverError::DataMissing(text)) if text.contains(&claim)), "{missing:?}");
    assert!(bench.server.names("pods").is_empty());
    // One from a backup is.
    bench
        .server
        .change("persistentvolumeclaims", &claim, |claim| claim["metadata"]["ownerReferences"] = json!([]));
    driver.start(&id, Keep::Disk, Run(2)).await.unwrap();
}

#[tokio::test]
async fn a_workspace_is_where_it_was_made_whatever_the_configuration_says_since() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    drop(driver);
    for templates in [true, false] {
        let mut config = bench.config.clone();
        (config.claim_templates, config.mount_path) = (templates, "/elsewhere".to_owned());
        let driver = torpor_driver_kubernetes::KubernetesDriver::new(config).await.unwrap();
        let run = Run(1 + u64::from(templates));
        driver.start(&id, Keep::Disk, run).await.unwrap();
        driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
        if !templates {
            bench.server.remove("persistentvolumeclaims", &claim(&id));
            let missing = driver.start(&id, Keep::Disk, Run(3)).await;
            assert!(matches!(missing, Err(DriverError::DataMissing(_))), "{missing:?}");
        }
    }
}

#[tokio::test]
async fn workspaces_have_their_namespaces() {
    let (bench, driver) = Bench::with(Generation::Stable, Behaviour::default(), |config| {
        config.namespaces.insert("team".into(), "default".into());
    })
    .await;
    let id = SandboxId::generate();
    let spec = SandboxSpec { workspace: "team".into(), ..spec() };
    driver.create(&id, &spec, Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    let posts = bench.server.asked().into_iter().filter(|a| a.method == "POST" && a.code == 201);
    assert!(posts.clone().count() == 2 && posts.into_iter().all(|a| a.path.contains("/namespaces/default/")));
    assert!(driver.has_place_of_its_own("team") && !driver.has_place_of_its_own("default"));
    driver.delete(&id).await.unwrap();
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Missing);
}

#[tokio::test]
async fn somebody_elses_write_is_read_again_and_an_overload_is_waited_out() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    bench.server.trouble("POST", "/sandboxes", 2, Trouble::TooMany);
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    bench.server.trouble("PATCH", "/sandboxes/", 3, Trouble::Stale);
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    let codes: Vec<u16> = patches(&bench).iter().map(|asked| asked.code).collect();
    assert_eq!(codes, [409, 409, 409, 200]);
    bench.server.trouble("PATCH", "/sandboxes/", 1, Trouble::TooMany);
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
}

#[tokio::test]
async fn a_creation_whose_answer_was_lost_is_our_own_and_anothers_is_refused() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    for path in ["/persistentvolumeclaims?", "/sandboxes?"] {
        bench.server.trouble("POST", path, 1, Trouble::CutAfter);
        let cut = driver.create(&id, &spec(), Run(1)).await;
        assert!(matches!(cut, Err(DriverError::Unreachable(_))), "{path}: {cut:?}");
    }
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    assert_eq!(bench.server.names("sandboxes").len(), 1);

    let id = SandboxId::generate();
    let theirs =
        json!({"metadata": {"name": claim(&id)}, "spec": {"resources": {"requests": {"storage": "1Gi"}}}});
    bench.server.make("persistentvolumeclaims", &claim(&id), theirs);
    let refused = driver.create(&id, &spec(), Run(1)).await;
    assert!(
        matches!(&refused, Err(DriverError::Invalid(text)) if text.contains("somebody else")),
        "{refused:?}"
    );
    driver.delete(&id).await.unwrap();
    assert!(bench.server.object("persistentvolumeclaims", &claim(&id)).is_some(), "it is not ours to delete");
}

#[tokio::test]
async fn a_server_that_hangs_or_fails_is_waited_for_and_a_missing_right_is_told() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    bench.server.trouble("POST", "/sandboxes", 1, Trouble::Broken);
    let broken = driver.create(&id, &spec(), Run(1)).await.unwrap_err();
    assert!(broken.waits_for_host(), "{broken:?}");
    bench.server.trouble("POST", "/sandboxes", 1, Trouble::Forbidden);
    let forbidden = driver.create(&id, &spec(), Run(1)).await.unwrap_err().to_string();
    assert!(forbidden.contains("torpor doctor --driver kubernetes"), "{forbidden}");
    bench.server.trouble("POST", "/sandboxes", 1, Trouble::Late(Duration::from_millis(500)));
    driver.create(&id, &spec(), Run(1)).await.unwrap();
}

#[tokio::test]
async fn an_overload_of_lists_and_watches_is_waited_out() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    driver.create(&SandboxId::generate(), &spec(), Run(1)).await.unwrap();
    until("watched", async || driver.watched() == Some(1)).await;
    drop(driver);
    bench.server.forget();
    bench.server.trouble("GET", "/sandboxes?", 2, Trouble::TooMany);
    bench.server.trouble("GET", "/pods?", 1, Trouble::TooMany);
    let driver = bench.driver().await;
    until("watched", async || driver.watched() == Some(1)).await;
    let lists = |what: &str| -> Vec<u16> {
        let asked = bench.server.asked().into_iter();
        asked.filter(|asked| asked.verb() == format!("list {what}")).map(|asked| asked.code).collect()
    };
    assert_eq!(lists("sandboxes"), [429, 429, 200], "asked again, and no more than that");
    assert_eq!(lists("pods"), [429, 200]);
}

/// The cluster in memory is a service, too: what is asked in process is answered as over HTTP.
#[tokio::test]
async fn a_client_asks_the_same_cluster_in_process() {
    use k8s_openapi::api::core::v1::PersistentVolumeClaim;
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    let client = kube::Client::new(bench.server.service(), torpor_test_kube::NAMESPACE);
    let claims: kube::Api<PersistentVolumeClaim> = kube::Api::default_namespaced(client);
    assert_eq!(claims.get(&claim(&id)).await.unwrap().metadata.name, Some(claim(&id)));
    let missing = claims.get_opt("nobody").await.unwrap();
    assert!(missing.is_none());
}

#[tokio::test]
async fn a_watch_that_was_lost_is_made_good_by_another_list() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    until("watched", async || driver.watched() == Some(1)).await;
    bench.server.forget();
    bench.server.compact();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    until("listed again", async || {
        let counts = bench.server.counts();
        ["list sandboxes", "list pods"].iter().all(|verb| counts.get(*verb) == Some(&1))
    })
    .await;
}

#[tokio::test]
async fn all_is_compared_now_and_then_and_what_was_missed_is_hinted_at() {
    let (bench, driver) = Bench::with(Generation::Stable, Behaviour::default(), |config| {
        config.compare_every = Duration::from_millis(300);
    })
    .await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    bench.server.forget();
    until("three lists", async || bench.server.counts().get("list sandboxes").is_some_and(|n| *n >= 3)).await;
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
}

#[tokio::test]
async fn a_wait_asks_nothing_while_the_watch_is_open() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    until("watched", async || driver.watched() == Some(1)).await;
    bench.server.behave(|b| b.linger = Duration::from_secs(2));
    bench.server.forget();
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    let counts = bench.server.counts();
    let gets: u64 = counts.iter().filter(|(verb, _)| verb.starts_with("get ")).map(|(_, n)| n).sum();
    assert!(gets <= 5, "{counts:?}");
}

#[tokio::test]
async fn a_cluster_that_is_upgraded_under_us_is_spoken_to_in_its_new_version() {
    let (bench, driver) = Bench::new(Generation::Alpha).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    assert_eq!(driver.capabilities().version, "agents.x-k8s.io/v1alpha1");
    bench.server.upgrade(Generation::Stable);
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    assert_eq!(driver.capabilities().version, "agents.x-k8s.io/v1beta1");
    let last = patches(&bench).pop().unwrap();
    assert_eq!((last.code, &last.body["spec"]), (200, &json!({"operatingMode": "Suspended"})));
    driver.start(&id, Keep::Disk, Run(2)).await.unwrap();
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Running { run: Run(2), agent: true });
}

/// Served beside the older one, the newer is found by the next comparison: nothing is refused that would tell of it.
#[tokio::test]
async fn a_newer_version_beside_the_one_that_is_spoken_is_found_by_the_next_comparison() {
    let (bench, driver) = Bench::with(Generation::Alpha, Behaviour::default(), |config| {
        config.compare_every = Duration::from_millis(500);
    })
    .await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    bench.server.upgrade(Generation::Early);
    until("the newer one", async || driver.capabilities().version == "agents.x-k8s.io/v1beta1").await;
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    let last = patches(&bench).pop().unwrap();
    assert_eq!((last.code, &last.body["spec"]), (200, &json!({"operatingMode": "Suspended"})));
}

#[tokio::test]
async fn a_cluster_without_the_kind_is_refused_before_anything_is_written() {
    let (bench, driver) = Bench::new(Generation::Absent).await;
    let id = SandboxId::generate();
    let refused = driver.create(&id, &spec(), Run(1)).await;
    assert!(
        matches!(&refused, Err(DriverError::Unsupported(text)) if text.contains("install")),
        "{refused:?}"
    );
    assert!(matches!(driver.check(&spec()), Err(DriverError::Unsupported(_))));
    let writes: Vec<Asked> = bench.server.asked().into_iter().filter(|a| a.method != "GET").collect();
    assert!(writes.is_empty(), "{writes:?}");
    assert!(driver.list().await.unwrap().is_empty(), "and nothing is noted here");
    bench.server.upgrade(Generation::Stable);
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();

    // What was begun before waits until it is back.
    bench.server.upgrade(Generation::Absent);
    until("it is known to be gone", async || driver.lacks().is_some()).await;
    let waits = driver.stop(&id, Keep::Disk, GRACE).await.unwrap_err();
    assert!(waits.waits_for_host() && waits.to_string().contains("not installed"), "{waits:?}");
    bench.server.upgrade(Generation::Stable);
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    assert!(driver.lacks().is_none());
}

#[tokio::test]
async fn what_no_pod_can_be_is_refused_by_its_field() {
    let (_bench, driver) = Bench::new(Generation::Stable).await;
    let volume = |source: &str, target: &str| {
        vec![Volume { source: source.into(), target: target.into(), read_only: false }]
    };
    let cases: [(&str, SandboxSpec); 8] = [
        ("kernel", SandboxSpec { kernel: Some("/k".into()), ..spec() }),
        ("machine", SandboxSpec { machine: "kvm".into(), ..spec() }),
        ("egress", SandboxSpec { egress: Some(Egress::None), ..spec() }),
        ("volumes", SandboxSpec { volumes: volume("/Not/a claim", "/data"), ..spec() }),
        ("volumes", SandboxSpec { volumes: volume("/claim/../x", "/data"), ..spec() }),
        ("volumes", SandboxSpec { volumes: volume("claim", "/.torpor/x"), ..spec() }),
        ("volumes", SandboxSpec { volumes: volume("claim", "/.torpor-agent"), ..spec() }),
        ("volumes", SandboxSpec { volumes: volume("/torpor-other-workspace/a", "/data"), ..spec() }),
    ];
    for (field, bad) in cases {
        let refused = driver.check(&bad);
        assert!(
            matches!(&refused, Err(DriverError::Unsupported(text)) if text.starts_with(field)),
            "{field}: {refused:?}"
        );
    }
}

#[tokio::test]
async fn another_state_directory_has_other_sandboxes() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    let mut config = bench.config.clone();
    config.state_dir = bench.folder.path().join("other");
    let other = torpor_driver_kubernetes::KubernetesDriver::new(config).await.unwrap();
    assert!(other.list().await.unwrap().is_empty());
    assert_eq!(other.observe(&id).await.unwrap(), Observed::Missing);
    let refused = other.delete(&id).await.unwrap_err().to_string();
    assert!(refused.contains("label") && refused.contains(other.identity()), "{refused}");
    assert!(bench.server.object("sandboxes", &object(&id)).is_some());
    let labels = bench.server.object("sandboxes", &object(&id)).unwrap()["metadata"]["labels"].clone();
    assert_ne!(labels["torpor.dev/gateway"], Value::Null);
}
