//! What a real API server was seen to do, each line of it once. With `TORPOR_TEST_CLUSTER=URL` the same is asked of a real
//! one: `https://` with `TORPOR_TEST_CLUSTER_CA=FILE` (PEM), `http://` as `kubectl proxy` gives, with
//! `TORPOR_TEST_CLUSTER_TOKEN` where it wants one, in the namespace "sandboxes" or `TORPOR_TEST_CLUSTER_NAMESPACE`.
//!
//! There, others work in the same namespace, a controller writes into the same objects, and a test can't look for what is
//! not served: names and labels are each test's own, and what was made is deleted, also when a test fails.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "semantics/controllers.rs"]
mod controllers;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{Request, client::conn::http1, header::HeaderMap};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::{
    TlsConnector,
    rustls::{self, ClientConfig, RootCertStore},
};
use torpor_test_kube::{Behaviour, Generation, Server};

const MERGE: &str = "application/merge-patch+json";
const JSON: &str = "application/json-patch+json";
const APPLY: &str = "application/apply-patch+yaml";

/// A cluster and what is asked of it.
struct Cluster {
    server: Option<Server>,
    url: String,
    token: Option<String>,
    /// Paths of what was made on a real one.
    made: Mutex<Vec<String>>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let made = std::mem::take(&mut *self.made.lock().unwrap());
        let made_nothing = made.is_empty();
        let (url, token) = (self.url.clone(), self.token.clone());
        let clean = move || {
            let cluster = Self { server: None, url, token, made: Mutex::default() };
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                for path in made {
                    cluster.ask("DELETE", &path, "", Value::Null).await;
                }
            });
        };
        if !made_nothing {
            // This thread has a runtime already, and may be on its way down.
            let _ = std::thread::spawn(clean).join();
        }
    }
}

struct Reply {
    code: u16,
    headers: HeaderMap,
    text: String,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("{}: {}", self.code, self.text))
    }

    fn reason(&self) -> String {
        self.json()["reason"].as_str().unwrap_or_default().to_owned()
    }

    fn version(&self) -> String {
        self.json()["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
    }
}

impl Cluster {
    async fn new() -> Self {
        Self::with(Generation::Early).await
    }

    async fn with(generation: Generation) -> Self {
        if let Ok(url) = std::env::var("TORPOR_TEST_CLUSTER") {
            let token = std::env::var("TORPOR_TEST_CLUSTER_TOKEN").ok();
            return Self { server: None, url, token, made: Mutex::default() };
        }
        let behaviour = Behaviour { bookmark: Duration::from_millis(100), ..Behaviour::default() };
        let server = Server::start(generation, behaviour).await.unwrap();
        Self { url: server.url(), server: Some(server), token: None, made: Mutex::default() }
    }

    /// One that serves these versions of the Sandbox kind; none where a real one doesn't.
    async fn serving(test: &str, versions: &[&str]) -> Option<Self> {
        let cluster = Self::new().await;
        let group = cluster.get("/apis/agents.x-k8s.io").await;
        let served: Vec<String> = match group.code {
            200 => group.json()["versions"]
                .as_array()
                .unwrap()
                .iter()
                .map(|v| v["version"].as_str().unwrap().to_owned())
                .collect(),
            _ => Vec::new(),
        };
        let missing: Vec<_> = versions.iter().filter(|one| !served.iter().any(|v| v == *one)).collect();
        if !missing.is_empty() {
            skip(test, &format!("the cluster serves {served:?} and not {missing:?}"));
            return None;
        }
        Some(cluster)
    }

    /// An object when nobody has written into it for a moment: a controller may still be at it.
    async fn settled(&self, path: &str) -> Reply {
        let pause = Duration::from_millis(if self.server.is_some() { 40 } else { 1000 });
        let mut last = self.get(path).await;
        for _ in 0..60 {
            tokio::time::sleep(pause).await;
            let next = self.get(path).await;
            if next.version() == last.version() {
                return next;
            }
            last = next;
        }
        panic!("{path} never settles");
    }

    /// What only a cluster of our own can be made to do.
    fn own(&self, test: &str) -> Option<&Server> {
        if self.server.is_none() {
            skip(test, "a real cluster can't be made to do that");
        }
        self.server.as_ref()
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        kind: &str,
        body: &Value,
    ) -> hyper::Response<hyper::body::Incoming> {
        let (mut sender, address) = connect(&self.url).await;
        let namespace = std::env::var("TORPOR_TEST_CLUSTER_NAMESPACE").unwrap_or("sandboxes".to_owned());
        let path = &path.replace("/namespaces/sandboxes/", &format!("/namespaces/{namespace}/"));
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let mut request = Request::builder().method(method).uri(path).header("Host", address);
        if !body.is_empty() {
            request = request.header("Content-Type", kind);
        }
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        sender.send_request(request.body(Full::new(Bytes::from(body))).unwrap()).await.unwrap()
    }

    async fn ask(&self, method: &str, path: &str, kind: &str, body: Value) -> Reply {
        let answer = self.send(method, path, kind, &body).await;
        let (code, headers) = (answer.status().as_u16(), answer.headers().clone());
        let text =
            String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap();
        let reply = Reply { code, headers, text };
        if code == 201 && self.server.is_none() {
            let named = path.split('?').next().unwrap_or_default();
            let made = match (method, reply.json()["metadata"]["name"].as_str()) {
                ("POST", Some(name)) => Some(format!("{named}/{name}")),
                ("PATCH", _) => Some(named.to_owned()),
                _ => None,
            };
            self.made.lock().unwrap().extend(made);
        }
        reply
    }

    async fn get(&self, path: &str) -> Reply {
        self.ask("GET", path, "", Value::Null).await
    }

    async fn post(&self, path: &str, body: Value) -> Reply {
        self.ask("POST", path, "application/json", body).await
    }

    /// The first events of a watch.
    async fn events(&self, path: &str, count: usize) -> Vec<Value> {
        self.events_until(path, |events| events.len() == count).await
    }

    /// Events of a watch until there are enough, or it ends.
    async fn events_until(&self, path: &str, enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let answer = self.send("GET", path, "", &Value::Null).await;
        assert_eq!(answer.status().as_u16(), 200);
        let (mut body, mut text) = (answer.into_body(), String::new());
        let mut events = Vec::new();
        let read = async {
            while let Some(Ok(frame)) = body.frame().await {
                text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
                while let Some((line, rest)) = text.split_once('\n') {
                    events.push(serde_json::from_str(line).unwrap());
                    text = rest.to_owned();
                    if enough(&events) {
                        return;
                    }
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(20), read).await.expect("events");
        events
    }
}

fn skip(test: &str, reason: &str) {
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: {reason}\n"));
}

type Sender = http1::SendRequest<Full<Bytes>>;

async fn greet(stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static) -> Sender {
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// A connection, and the host that it is to.
async fn connect(url: &str) -> (Sender, String) {
    let (scheme, rest) = url.split_once("://").expect("TORPOR_TEST_CLUSTER=http(s)://HOST[:PORT]");
    let host = rest.trim_end_matches('/').to_owned();
    let name =
        host.rsplit_once(':').map_or(host.as_str(), |(name, _)| name).trim_matches(['[', ']']).to_owned();
    let tls = scheme == "https";
    let ported = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let address = if ported { host.clone() } else { format!("{host}:{}", if tls { 443 } else { 80 }) };
    let stream = TcpStream::connect(&address).await.unwrap();
    if !tls {
        return (greet(stream).await, host);
    }
    let file =
        std::env::var("TORPOR_TEST_CLUSTER_CA").expect("TORPOR_TEST_CLUSTER_CA=FILE of the cluster's CA");
    let mut file = std::io::BufReader::new(std::fs::File::open(file).unwrap());
    let mut roots = RootCertStore::empty();
    for certificate in rustls_pemfile::certs(&mut file) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream =
        TlsConnector::from(Arc::new(config)).connect(name.try_into().unwrap(), stream).await.unwrap();
    (greet(stream).await, host)
}

fn name(of: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("t-{}-{}-{of}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

const BETA: &str = "/apis/agents.x-k8s.io/v1beta1/namespaces/sandboxes/sandboxes";
const ALPHA: &str = "/apis/agents.x-k8s.io/v1alpha1/namespaces/sandboxes/sandboxes";
const CLAIMS: &str = "/api/v1/namespaces/sandboxes/persistentvolumeclaims";

fn sandbox(name: &str, mode: &str) -> Value {
    json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": name},
        "spec": {"operatingMode": mode, "podTemplate": {"spec": {"containers": [{"name": "c", "image": "i"}]}}},
    })
}

fn claim(name: &str, labels: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "labels": labels},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}}},
    })
}

#[tokio::test]
async fn an_unknown_group_or_version_is_a_plain_404_and_an_unknown_object_a_status() {
    let Some(cluster) = Cluster::serving(
        "an_unknown_group_or_version_is_a_plain_404_and_an_unknown_object_a_status",
        &["v1beta1"],
    )
    .await
    else {
        return;
    };
    for path in
        ["/apis/no.such.group", "/apis/agents.x-k8s.io/v9", "/apis/agents.x-k8s.io/v9/namespaces/a/sandboxes"]
    {
        let reply = cluster.get(path).await;
        assert_eq!((reply.code, reply.text.trim()), (404, "404 page not found"), "{path}");
        assert!(reply.headers["content-type"].to_str().unwrap().starts_with("text/plain"));
    }
    let reply = cluster.get(&format!("{BETA}/nobody")).await;
    assert_eq!((reply.code, reply.reason().as_str()), (404, "NotFound"));
    assert_eq!(
        reply.json()["details"],
        json!({"name": "nobody", "group": "agents.x-k8s.io", "kind": "sandboxes"})
    );
}

#[tokio::test]
async fn a_duplicate_is_a_conflict_and_what_is_not_valid_names_its_causes() {
    let Some(cluster) =
        Cluster::serving("a_duplicate_is_a_conflict_and_what_is_not_valid_names_its_causes", &["v1beta1"])
            .await
    else {
        return;
    };
    let name = name("dup");
    assert_eq!(cluster.post(BETA, sandbox(&name, "Suspended")).await.code, 201);
    let twice = cluster.post(BETA, sandbox(&name, "Suspended")).await;
    assert_eq!((twice.code, twice.reason().as_str()), (409, "AlreadyExists"));
    let wrong = cluster.post(BETA, sandbox(&format!("{name}-x"), "Sleeping")).await;
    assert_eq!((wrong.code, wrong.reason().as_str()), (422, "Invalid"));
    assert!(!wrong.json()["details"]["causes"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn patches_are_merge_json_or_apply_and_nothing_else() {
    let Some(cluster) =
        Cluster::serving("patches_are_merge_json_or_apply_and_nothing_else", &["v1beta1"]).await
    else {
        return;
    };
    let name = name("patch");
    let path = format!("{BETA}/{name}");
    let made = cluster.post(BETA, sandbox(&name, "Suspended")).await;
    cluster.settled(&path).await;
    let strategic = "application/strategic-merge-patch+json";
    assert_eq!(cluster.ask("PATCH", &path, strategic, json!({})).await.code, 415);
    assert_eq!(cluster.ask("PATCH", &path, "text/html", json!({})).await.code, 415);

    let merged = cluster.ask("PATCH", &path, MERGE, json!({"metadata": {"annotations": {"a": "1"}}})).await;
    assert_eq!(
        (merged.code, &merged.json()["metadata"]["generation"]),
        (200, &json!(1)),
        "annotations are no spec"
    );
    let stepped = json!([{"op": "add", "path": "/metadata/annotations/b~1c", "value": "2"}]);
    let stepped = cluster.ask("PATCH", &path, JSON, stepped).await;
    assert_eq!(stepped.json()["metadata"]["annotations"], json!({"a": "1", "b/c": "2"}));

    let before = cluster.settled(&path).await;
    let again = cluster.ask("PATCH", &path, MERGE, json!({"metadata": {"annotations": {"a": "1"}}})).await;
    assert_eq!(again.version(), before.version(), "a patch that changes nothing");
    let asleep = cluster.ask("PATCH", &path, MERGE, json!({"spec": {"operatingMode": "Suspended"}})).await;
    assert_eq!(asleep.json()["metadata"]["generation"], json!(1), "nor is it another generation");
    let stale =
        json!({"metadata": {"resourceVersion": made.version()}, "spec": {"operatingMode": "Running"}});
    let stale = cluster.ask("PATCH", &path, MERGE, stale).await;
    assert_eq!((stale.code, stale.reason().as_str()), (409, "Conflict"));

    let woken = cluster.ask("PATCH", &path, MERGE, json!({"spec": {"operatingMode": "Running"}})).await;
    assert_eq!(woken.json()["metadata"]["generation"], json!(2));
}

#[tokio::test]
async fn status_is_ignored_on_the_object_and_spec_on_its_status() {
    let Some(cluster) =
        Cluster::serving("status_is_ignored_on_the_object_and_spec_on_its_status", &["v1beta1"]).await
    else {
        return;
    };
    let name = name("status");
    let path = format!("{BETA}/{name}");
    cluster.post(BETA, sandbox(&name, "Suspended")).await;
    let patch = json!({"spec": {"operatingMode": "Running"}, "status": {"selector": "x"}});
    let reply = cluster.ask("PATCH", &format!("{path}/status"), MERGE, patch.clone()).await.json();
    assert_eq!(
        (&reply["spec"]["operatingMode"], &reply["status"]["selector"]),
        (&json!("Suspended"), &json!("x"))
    );
    assert_eq!(reply["metadata"]["generation"], json!(1));
    let patch = json!({"spec": {"operatingMode": "Running"}, "status": {"selector": "y"}});
    let reply = cluster.ask("PATCH", &path, MERGE, patch).await.json();
    assert_eq!(reply["spec"]["operatingMode"], json!("Running"));
    // A controller may have put its own there meanwhile.
    assert_ne!(reply["status"]["selector"], json!("y"));
    if cluster.server.is_some() {
        assert_eq!(reply["status"]["selector"], json!("x"));
    }
}

#[tokio::test]
async fn apply_makes_owns_fights_and_is_forced() {
    let Some(cluster) = Cluster::serving("apply_makes_owns_fights_and_is_forced", &["v1beta1"]).await else {
        return;
    };
    let name = name("apply");
    let path = format!("{BETA}/{name}");
    let nobody = cluster.ask("PATCH", &path, APPLY, sandbox(&name, "Suspended")).await;
    assert_eq!(nobody.code, 422, "without a field manager");
    let mine = format!("{path}?fieldManager=mine");
    assert_eq!(cluster.ask("PATCH", &mine, APPLY, sandbox(&name, "Suspended")).await.code, 201);
    let again = cluster.ask("PATCH", &mine, APPLY, sandbox(&name, "Suspended")).await;
    assert_eq!(again.code, 200);

    let wish = json!({"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": name},
        "spec": {"operatingMode": "Running"}});
    let fought = cluster.ask("PATCH", &format!("{path}?fieldManager=theirs"), APPLY, wish.clone()).await;
    assert_eq!((fought.code, fought.reason().as_str()), (409, "Conflict"));
    let cause = &fought.json()["details"]["causes"][0];
    assert_eq!(
        (&cause["reason"], &cause["field"]),
        (&json!("FieldManagerConflict"), &json!(".spec.operatingMode"))
    );
    let forced =
        cluster.ask("PATCH", &format!("{path}?fieldManager=theirs&force=true"), APPLY, wish).await.json();
    assert_eq!(forced["spec"]["operatingMode"], json!("Running"));
    let managers: Vec<&str> = forced["metadata"]["managedFields"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["manager"].as_str().unwrap())
        .collect();
    assert!(managers.contains(&"mine") && managers.contains(&"theirs"), "{managers:?}");

    let labelled = |labels: Value| json!({"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": name, "labels": labels}});
    let other = format!("{path}?fieldManager=other");
    cluster.ask("PATCH", &other, APPLY, labelled(json!({"a": "1", "b": "2"}))).await;
    let less = cluster.ask("PATCH", &other, APPLY, labelled(json!({"a": "1"}))).await.json();
    assert_eq!(less["metadata"]["labels"], json!({"a": "1"}), "what its manager says no more is gone");
}

#[tokio::test]
async fn a_deletion_says_the_uid_minds_its_precondition_and_waits_in_the_foreground() {
    let test = "a_deletion_says_the_uid_minds_its_precondition_and_waits_in_the_foreground";
    let Some(cluster) = Cluster::serving(test, &["v1beta1"]).await else { return };
    let name = name("del");
    let path = format!("{CLAIMS}/{name}");
    let uid = cluster.post(CLAIMS, claim(&name, json!({}))).await.json()["metadata"]["uid"].clone();
    let other = json!({"preconditions": {"uid": "other"}});
    let refused = cluster.ask("DELETE", &path, "application/json", other).await;
    assert_eq!((refused.code, refused.reason().as_str()), (409, "Conflict"));
    if cluster.own("the rest").is_none() {
        return;
    }
    let done = cluster.ask("DELETE", &path, "application/json", json!({"preconditions": {"uid": uid}})).await;
    assert_eq!((done.code, &done.json()["details"]["uid"]), (200, &uid));

    // With a pod that takes its time.
    let server = cluster.server.as_ref().unwrap();
    server.behave(|b| b.linger = Duration::from_millis(600));
    let path = format!("{BETA}/{name}");
    cluster.post(BETA, sandbox(&name, "Running")).await;
    for _ in 0..100 {
        if server.object("pods", &name).is_some_and(|pod| pod["status"]["phase"] == "Running") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let foreground = json!({"propagationPolicy": "Foreground"});
    let held = cluster.ask("DELETE", &path, "application/json", foreground).await.json();
    assert_eq!(held["metadata"]["finalizers"], json!(["foregroundDeletion"]));
    assert_eq!(held["metadata"]["generation"], json!(2));
    let twice = cluster.post(BETA, sandbox(&name, "Running")).await;
    assert_eq!((twice.code, twice.reason().as_str()), (409, "AlreadyExists"));
    for _ in 0..200 {
        if cluster.get(&path).await.code == 404 {
            assert_eq!(server.object("pods", &name), None, "its pod went first");
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it is never gone");
}

#[tokio::test]
async fn what_an_object_owns_goes_with_it_and_what_others_own_stays() {
    let Some(cluster) =
        Cluster::serving("what_an_object_owns_goes_with_it_and_what_others_own_stays", &["v1beta1"]).await
    else {
        return;
    };
    let Some(server) = cluster.own("owners") else { return };
    let name = name("owner");
    let mut wanted = sandbox(&name, "Running");
    wanted["spec"]["volumeClaimTemplates"] = json!([{"metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}}}}]);
    assert_eq!(cluster.post(BETA, wanted).await.code, 201);
    cluster.post(CLAIMS, claim(&format!("{name}-own"), json!({}))).await;
    let there = |plural: &str, name: &str| server.object(plural, name).is_some();
    until("its pod, claim and service", || {
        there("pods", &name)
            && there("persistentvolumeclaims", &format!("data-{name}"))
            && there("services", &name)
    })
    .await;
    let done = cluster.ask("DELETE", &format!("{BETA}/{name}"), "", Value::Null).await;
    assert_eq!(done.json()["status"], json!("Success"), "not waited for");
    assert_eq!(cluster.get(&format!("{BETA}/{name}")).await.code, 404);
    until("the garbage", || {
        !there("pods", &name)
            && !there("persistentvolumeclaims", &format!("data-{name}"))
            && !there("services", &name)
    })
    .await;
    assert!(there("persistentvolumeclaims", &format!("{name}-own")));
}

#[tokio::test]
async fn claim_templates_of_a_sandbox_can_not_be_changed() {
    let Some(cluster) =
        Cluster::serving("claim_templates_of_a_sandbox_can_not_be_changed", &["v1beta1"]).await
    else {
        return;
    };
    let name = name("fixed");
    cluster.post(BETA, sandbox(&name, "Suspended")).await;
    let patch = json!({"spec": {"volumeClaimTemplates": [{"metadata": {"name": "late"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}}}}]}});
    let refused = cluster.ask("PATCH", &format!("{BETA}/{name}"), MERGE, patch).await;
    assert_eq!((refused.code, refused.reason().as_str()), (422, "Invalid"));
}

async fn until(what: &str, mut test: impl FnMut() -> bool) {
    for _ in 0..400 {
        if test() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it never came about: {what}");
}

#[tokio::test]
async fn lists_come_in_pages_of_one_version_and_an_old_token_brings_a_fresh_one() {
    let cluster = Cluster::new().await;
    let name = name("page");
    let labels = || json!({"team": name});
    let of = |rest: &str| format!("{CLAIMS}?labelSelector=team%3D{name}&limit=2{rest}");
    for n in 0..5 {
        assert_eq!(cluster.post(CLAIMS, claim(&format!("{name}-{n}"), labels())).await.code, 201);
    }
    let first = cluster.get(&of("")).await.json();
    assert_eq!(first["items"].as_array().unwrap().len(), 2);
    assert!(first["metadata"]["remainingItemCount"].is_null(), "it is not known of what a selector chooses");
    let of_all = cluster.get(&format!("{CLAIMS}?limit=2")).await.json();
    assert!(of_all["metadata"]["remainingItemCount"].as_u64().unwrap() >= 3, "{}", of_all["metadata"]);
    assert_eq!(cluster.post(CLAIMS, claim(&format!("{name}-9"), labels())).await.code, 201);
    let token = first["metadata"]["continue"].as_str().unwrap();
    let second = cluster.get(&of(&format!("&continue={token}"))).await.json();
    assert_eq!(second["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
    let token = second["metadata"]["continue"].as_str().unwrap();
    let third = cluster.get(&of(&format!("&continue={token}"))).await.json();
    assert_eq!(third["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
    assert!(third["metadata"]["continue"].as_str().unwrap_or_default().is_empty(), "it was the last");
    assert_eq!(third["items"].as_array().unwrap().len(), 1, "what came later is not of this version");
    // A list from the cache knows no pages, and may be a moment behind.
    let mut cached = 0;
    for _ in 0..100 {
        cached = cluster.get(&of("&resourceVersion=0")).await.json()["items"].as_array().unwrap().len();
        if cached == 6 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(cached, 6);

    let Some(server) = cluster.own("tokens that grow old") else { return };
    let first = cluster.get(&of("")).await.json();
    server.compact();
    let token = first["metadata"]["continue"].as_str().unwrap();
    let expired = cluster.get(&of(&format!("&continue={token}"))).await;
    assert_eq!((expired.code, expired.reason().as_str()), (410, "Expired"));
    let fresh = expired.json()["metadata"]["continue"].as_str().unwrap().to_owned();
    let rest = cluster.get(&of(&format!("&continue={fresh}"))).await.json();
    assert_eq!(rest["items"][0]["metadata"]["name"], json!(format!("{name}-2")));
}

#[tokio::test]
async fn a_watch_tells_what_enters_changes_and_leaves_its_selector() {
    let cluster = Cluster::new().await;
    let name = name("watch");
    let from = cluster.get(CLAIMS).await.version();
    let path = format!("{CLAIMS}/{name}");
    cluster.post(CLAIMS, claim(&name, json!({"team": name}))).await;
    cluster.ask("PATCH", &path, MERGE, json!({"metadata": {"annotations": {"a": "1"}}})).await;
    cluster.ask("PATCH", &path, MERGE, json!({"metadata": {"labels": {"team": null}}})).await;
    let watch = format!("{CLAIMS}?watch=true&labelSelector=team%3D{name}&resourceVersion={from}");
    let left = |events: &[Value]| events.iter().any(|event| event["type"] == "DELETED");
    let mut kinds: Vec<Value> =
        cluster.events_until(&watch, left).await.iter().map(|e| e["type"].clone()).collect();
    // A real one's controllers write into it as well.
    kinds.dedup();
    assert_eq!(kinds, ["ADDED", "MODIFIED", "DELETED"]);
}

#[tokio::test]
async fn a_watch_from_too_far_back_is_an_error_within_a_success() {
    let cluster = Cluster::new().await;
    let from = cluster.get(CLAIMS).await.version();
    let Some(server) = cluster.own("a compaction") else { return };
    server.compact();
    let events = cluster.events(&format!("{CLAIMS}?watch=true&resourceVersion={from}"), 2).await;
    assert_eq!(events.len(), 1, "one, and then the end: {events:?}");
    assert_eq!((&events[0]["type"], &events[0]["object"]["code"]), (&json!("ERROR"), &json!(410)));
}

#[tokio::test]
async fn bookmarks_tell_how_far_a_watch_is_and_where_the_initial_events_end() {
    let cluster = Cluster::new().await;
    let name = name("initial");
    cluster.post(CLAIMS, claim(&name, json!({"team": name}))).await;
    let initial = format!(
        "{CLAIMS}?watch=true&labelSelector=team%3D{name}&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    );
    let marked = |events: &[Value]| events.iter().any(|event| event["type"] == "BOOKMARK");
    let events = cluster.events_until(&initial, marked).await;
    assert_eq!(events[0]["type"], json!("ADDED"));
    let end = events.last().unwrap();
    assert_eq!(end["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], json!("true"));
    // A real one waits a minute with the next.
    if cluster.own("further bookmarks").is_some() {
        let events = cluster.events(&initial, 3).await;
        assert_eq!(events[2]["type"], json!("BOOKMARK"));
        assert!(events[2]["object"]["metadata"]["resourceVersion"].is_string());
    }
}

#[tokio::test]
async fn too_many_requests_are_told_in_plain_text_with_a_time() {
    let cluster = Cluster::new().await;
    let Some(server) = cluster.own("an overload") else { return };
    server.trouble("GET", "/persistentvolumeclaims", 1, torpor_test_kube::Trouble::TooMany);
    let reply = cluster.get(CLAIMS).await;
    assert_eq!((reply.code, reply.headers["retry-after"].to_str().unwrap()), (429, "1"));
    assert!(serde_json::from_str::<Value>(&reply.text).is_err(), "{}", reply.text);
    assert_eq!(cluster.get(CLAIMS).await.code, 200);
}

#[tokio::test]
async fn the_older_version_shows_the_same_object_and_warns() {
    let test = "the_older_version_shows_the_same_object_and_warns";
    let Some(cluster) = Cluster::serving(test, &["v1beta1", "v1alpha1"]).await else { return };
    let name = name("alpha");
    cluster.post(BETA, sandbox(&name, "Suspended")).await;
    let reply = cluster.get(&format!("{ALPHA}/{name}")).await;
    assert_eq!(reply.json()["spec"]["replicas"], json!(0));
    assert!(reply.headers.contains_key("warning"));
    cluster.ask("PATCH", &format!("{ALPHA}/{name}"), MERGE, json!({"spec": {"replicas": 1}})).await;
    assert_eq!(
        cluster.get(&format!("{BETA}/{name}")).await.json()["spec"]["operatingMode"],
        json!("Running")
    );
    let scale = cluster.get(&format!("{ALPHA}/{name}/scale")).await.json();
    assert_eq!(scale["spec"]["replicas"], json!(1));
    let two = cluster.ask("PATCH", &format!("{ALPHA}/{name}"), MERGE, json!({"spec": {"replicas": 2}})).await;
    assert_eq!(two.code, 422);
}

/// The whole suite by URL, CA and token alone, as a real cluster is asked, with all of its tests at once and another run after
/// the first; nothing of either is left. The cluster is of a release that serves both versions.
#[tokio::test]
async fn the_suite_passes_where_a_cluster_is_known_by_its_url_and_leaves_nothing() {
    if std::env::var_os("TORPOR_TEST_CLUSTER").is_some() {
        return;
    }
    let inner = Server::start(Generation::Late, Behaviour::default()).await.unwrap();
    let front = inner.secure("secret").await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, &front.ca).unwrap();
    for _ in 0..2 {
        // The suite's own process, since it is told by its environment.
        let suite = tokio::process::Command::new(std::env::current_exe().unwrap())
            .args(["--skip", "controllers::"])
            .env("TORPOR_TEST_CLUSTER", &front.url)
            .env("TORPOR_TEST_CLUSTER_CA", &ca)
            .env("TORPOR_TEST_CLUSTER_TOKEN", "secret")
            .env("TORPOR_TEST_CLUSTER_NAMESPACE", "default")
            .output()
            .await
            .unwrap();
        let said = String::from_utf8_lossy(&suite.stdout);
        assert!(suite.status.success() && !said.contains(" 0 passed"), "{said}");
    }
    for kind in ["sandboxes", "persistentvolumeclaims", "pods"] {
        until(&format!("{kind} are gone"), || inner.names(kind).is_empty()).await;
    }
    let of_namespace = |asked: &&torpor_test_kube::Asked| asked.path.contains("/namespaces/");
    let asked = inner.asked();
    assert!(asked.iter().filter(of_namespace).count() > 100);
    assert!(asked.iter().filter(of_namespace).all(|a| !a.path.contains("/namespaces/sandboxes/")));
    assert!(asked.iter().all(|asked| asked.code != 401), "every request has the token");
}

#[tokio::test]
async fn discovery_and_rights_are_answered() {
    let cluster = Cluster::with(Generation::Alpha).await;
    let Some(server) = cluster.own("an old release") else { return };
    let group = cluster.get("/apis/agents.x-k8s.io").await.json();
    assert_eq!(group["versions"].as_array().unwrap().len(), 1);
    let kinds = cluster.get("/apis/agents.x-k8s.io/v1alpha1").await.json();
    let names: Vec<&str> =
        kinds["resources"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["sandboxes", "sandboxes/status", "sandboxes/scale"]);
    server.deny("create", "pods/exec");
    let review = |verb: &str| json!({"spec": {"resourceAttributes": {"verb": verb, "resource": "pods", "subresource": "exec"}}});
    let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    assert_eq!(cluster.post(path, review("create")).await.json()["status"]["allowed"], json!(false));
    assert_eq!(cluster.post(path, review("get")).await.json()["status"]["allowed"], json!(true));
    server.upgrade(Generation::Absent);
    assert_eq!(cluster.get("/apis/agents.x-k8s.io").await.code, 404);
}
