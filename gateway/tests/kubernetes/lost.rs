//! The database, the driver's folder, or both are lost, or are of another time: nothing of the cluster is taken for gone.

use std::{fs, time::Duration};

use serde_json::json;
use tonic::transport::Channel;
use torpor_gateway::{Gateway, admin};
use torpor_proto::v1::{self, Phase, sandboxes_client::SandboxesClient};
use torpor_sandbox::SandboxId;
use torpor_test_kube::Generation;

use super::{Host, common::no_wait, config, until};

const CLAIMS: &str = "persistentvolumeclaims";

async fn create(channel: &Channel, name: &str) {
    let spec = Some(v1::SandboxSpec { image: "tiny:1".into(), ..Default::default() });
    let request = v1::CreateSandboxRequest { name: name.into(), spec, ..Default::default() };
    SandboxesClient::new(channel.clone()).create(request).await.unwrap();
    until(channel, &[Some(Phase::Ready)], "create").await.unwrap();
}

async fn delete(channel: &Channel, host: &Host) {
    let request = v1::DeleteSandboxRequest { target: no_wait("a"), allow_missing: false };
    SandboxesClient::new(channel.clone()).delete(request).await.unwrap();
    until(channel, &[None], "delete").await.unwrap();
    for kind in ["sandboxes", "pods", CLAIMS] {
        assert!(host.cluster.names(kind).is_empty(), "{kind} are left");
    }
}

/// A host with one sandbox that is Ready.
async fn with_one() -> (Host, Channel) {
    let mut host = Host::new(Generation::Stable).await;
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    create(&channel, "a").await;
    (host, channel)
}

fn uid(host: &Host, kind: &str) -> serde_json::Value {
    let name = host.cluster.names(kind).pop().unwrap();
    host.cluster.object(kind, &name).unwrap()["metadata"]["uid"].clone()
}

/// Why the gateway does not start.
async fn refused(host: &Host) -> String {
    match Gateway::start(config(host.gateway.dir.path())).await {
        Err(error) => error.to_string(),
        Ok(_) => panic!("it started"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_the_database_finds_the_clusters_sandboxes_again_from_a_new_volume() {
    for asleep in [true, false] {
        let (mut host, channel) = with_one().await;
        if asleep {
            let request = v1::SuspendRequest { target: no_wait("a"), keep: 0 };
            SandboxesClient::new(channel.clone()).suspend(request).await.unwrap();
            until(&channel, &[Some(Phase::Suspended)], "suspend").await.unwrap();
        }
        let claim = uid(&host, CLAIMS);
        let pod = (!asleep).then(|| uid(&host, "pods"));
        let (state, copy) = (host.gateway.state(), host.gateway.dir.path().join("copy.db"));
        admin::backup(&state, &copy).unwrap();
        host.gateway.kill();
        fs::remove_dir_all(&state).unwrap();
        // The new one was started once before anybody thought of the copy.
        host.gateway.start(None);
        host.gateway.connect().await.unwrap();
        host.gateway.kill();
        assert_eq!(admin::restore(&state, &copy).unwrap().0, 1);
        host.gateway.start(None);
        let channel = host.gateway.connect().await.unwrap();
        let rest = if asleep { Phase::Suspended } else { Phase::Ready };
        until(&channel, &[Some(rest)], "as it was").await.unwrap();
        let request = v1::ResumeRequest { target: no_wait("a"), ..Default::default() };
        SandboxesClient::new(channel.clone()).resume(request).await.unwrap();
        until(&channel, &[Some(Phase::Ready)], "resume").await.unwrap();
        assert_eq!(uid(&host, CLAIMS), claim, "the same workspace");
        tokio::time::sleep(Duration::from_millis(500)).await;
        until(&channel, &[Some(Phase::Ready)], "it stays so").await.unwrap();
        assert!(pod.is_none_or(|pod| uid(&host, "pods") == pod), "what ran goes on");
        delete(&channel, &host).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_does_not_know_which_objects_are_its_own_does_not_start() {
    let (mut host, _) = with_one().await;
    host.gateway.kill();
    let folder = host.gateway.state().join("kubernetes");
    let identity = fs::read_to_string(folder.join("identity")).unwrap();
    // A database of before it kept the identity, beside a folder that is gone.
    let database = rusqlite::Connection::open(host.gateway.state().join("torpor.db")).unwrap();
    database.execute("DELETE FROM meta WHERE key = 'kubernetes_identity'", []).unwrap();
    drop(database);
    fs::remove_dir_all(&folder).unwrap();
    let told = refused(&host).await;
    assert!(told.contains("kubectl") && told.contains("torpor.dev/gateway"), "{told}");
    assert!(told.contains("kubernetes/identity"), "{told}");
    assert!(!folder.join("identity").exists(), "no new one was made");
    assert_eq!(host.cluster.names("pods").len(), 1);
    // What the text says is enough.
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("identity"), identity.trim()).unwrap();
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    until(&channel, &[Some(Phase::Ready)], "as it was").await.unwrap();
    host.gateway.kill();

    // A folder of another gateway's with sandboxes that the database doesn't know.
    fs::write(folder.join("identity"), "another").unwrap();
    let theirs = folder.join(SandboxId::generate().as_str());
    fs::create_dir(&theirs).unwrap();
    let told = refused(&host).await;
    assert!(told.contains("'another'") && told.contains(identity.trim()), "{told}");
    fs::remove_dir(&theirs).unwrap();
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    until(&channel, &[Some(Phase::Ready)], "as it was").await.unwrap();
    delete(&channel, &host).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_database_beside_sandboxes_of_the_cluster_is_seen_and_made_anew() {
    let (mut host, _) = with_one().await;
    host.gateway.kill();
    let (state, run) = (host.gateway.state(), host.gateway.dir.path().join("run"));
    let (pod, claim) = (uid(&host, "pods"), uid(&host, CLAIMS));
    for name in ["torpor.db", "torpor.db-wal", "torpor.db-shm"] {
        let _ = fs::remove_file(state.join(name));
    }
    let told = refused(&host).await;
    assert!(told.contains("1 sandboxes") && told.contains("torpor admin rebuild"), "{told}");
    let rebuilt = admin::rebuild(&state, &run, false).unwrap();
    assert_eq!((rebuilt.ready, rebuilt.left_out), (vec!["a".to_owned()], Vec::<String>::new()));
    // One that no record knows.
    let orphan = SandboxId::generate();
    let folder = state.join("kubernetes").join(orphan.as_str());
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("place.json"), r#"{"namespace": "team-boxes", "server": "s"}"#).unwrap();
    let orphans = admin::orphans(&state, &run).unwrap();
    let [found] = orphans.as_slice() else { panic!("{orphans:?}") };
    assert_eq!((&found.id, found.disk.as_deref()), (&orphan, Some(folder.as_path())));
    let objects = found.objects.as_ref().unwrap();
    assert!(objects.contains("-n team-boxes") && objects.contains(orphan.as_str()), "{objects}");
    fs::remove_dir_all(&folder).unwrap();

    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    until(&channel, &[Some(Phase::Ready)], "it goes on").await.unwrap();
    assert_eq!((uid(&host, "pods"), uid(&host, CLAIMS)), (pod, claim), "nothing was started anew");
    delete(&channel, &host).await;
}

/// The sandbox's own folder is lost, and its objects have another label: nobody says that it is deleted while they are there.
#[tokio::test(flavor = "multi_thread")]
async fn a_delete_is_not_done_while_objects_of_its_name_are_there_under_another_label() {
    let (mut host, channel) = with_one().await;
    let get = v1::GetSandboxRequest { sandbox: "a".into() };
    let id = SandboxesClient::new(channel).get(get.clone()).await.unwrap().into_inner().id;
    host.gateway.kill();
    let folder = host.gateway.state().join("kubernetes");
    let identity = fs::read_to_string(folder.join("identity")).unwrap();
    fs::remove_dir_all(folder.join(&id)).unwrap();
    let label = |to: &str| {
        for kind in ["sandboxes", CLAIMS] {
            for name in host.cluster.names(kind) {
                let label =
                    |o: &mut serde_json::Value| o["metadata"]["labels"]["torpor.dev/gateway"] = json!(to);
                assert!(host.cluster.change(kind, &name, label));
            }
        }
    };
    label("another");
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    let mut client = SandboxesClient::new(channel.clone());
    let request = v1::DeleteSandboxRequest { target: no_wait("a"), allow_missing: false };
    client.delete(request).await.unwrap();
    // Told between two tries.
    let mut told = false;
    for _ in 0..400 {
        let status = client.get(get.clone()).await.expect("it is not gone").into_inner().status.unwrap();
        assert_eq!(status.phase(), Phase::Deleting);
        told |= format!("{status:?}").contains("kubectl -n sandboxes label sandbox");
        tokio::time::sleep(Duration::from_millis(if told { 1 } else { 25 })).await;
    }
    assert!(told);
    assert_eq!((host.cluster.names("sandboxes").len(), host.cluster.names(CLAIMS).len()), (1, 1));
    label(identity.trim());
    until(&channel, &[None], "delete").await.unwrap();
    assert!(host.cluster.names("sandboxes").is_empty() && host.cluster.names(CLAIMS).is_empty());
}

/// The cluster carries out a request that was given up, after the sandbox was deleted.
#[tokio::test(flavor = "multi_thread")]
async fn what_comes_late_of_a_deleted_sandbox_is_removed() {
    let mut host = Host::new(Generation::Stable).await;
    fs::write(host.gateway.dir.path().join("look-soon"), "").unwrap();
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    create(&channel, "a").await;
    let [object] = host.cluster.names("sandboxes").try_into().unwrap();
    let sandbox = host.cluster.object("sandboxes", &object).unwrap();
    let labels = sandbox["metadata"]["labels"].clone();
    delete(&channel, &host).await;
    let mut spec = sandbox["spec"].clone();
    spec["operatingMode"] = json!("Suspended");
    let claim = format!("{object}-workspace");
    let storage = json!({"resources": {"requests": {"storage": "1Gi"}}});
    let others = json!({"torpor.dev/gateway": labels["torpor.dev/gateway"], "torpor.dev/sandbox": SandboxId::generate().as_str()});
    host.cluster.make(CLAIMS, "unknown", json!({"metadata": {"labels": others}, "spec": storage.clone()}));
    // In another namespace than the usual one: nothing is noted any more of where it was.
    let late = json!({"metadata": {"labels": labels.clone()}, "spec": storage});
    assert!(host.cluster.make_in("default", CLAIMS, &claim, late));
    host.cluster.make("sandboxes", &object, json!({"metadata": {"labels": labels}, "spec": spec}));
    for _ in 0..1200 {
        if host.cluster.names("sandboxes").is_empty() && host.cluster.names(CLAIMS) == ["unknown"] {
            return;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("it is left: {:?}\n{}", host.cluster.names(CLAIMS), host.gateway.log());
}
