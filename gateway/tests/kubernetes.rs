//! The gateway over a cluster in memory, killed at every failpoint of the kubernetes driver with each release of the
//! controller, and started again: it comes to rest in the phase that the last acknowledged request wants, on the same claim,
//! with one pod at most, and nothing is left in the end.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
#[path = "kubernetes/lost.rs"]
mod lost;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::{Duration, Instant},
};

use common::{no_wait, phase, process::Process};
use serde_json::json;
use tonic::{Code, transport::Channel};
use torpor_gateway::{Config, kubernetes::KubernetesSection};
use torpor_proto::v1::{self, Phase, sandboxes_client::SandboxesClient};
use torpor_test_kube::{Behaviour, Generation, NAMESPACE, Server};

const PATIENCE: Duration = Duration::from_secs(60);

/// Not a test: the gateway's own process, started by the tests below.
#[test]
fn the_gateway_process() {
    common::process::serve(config);
}

fn config(dir: &Path) -> Config {
    Config {
        state_dir: dir.join("state"),
        run_dir: dir.join("run"),
        listen: format!("unix://{}/gateway.sock", dir.display()),
        drivers: vec!["kubernetes".into()],
        enable_sandbox_updates: true,
        orphan_grace_seconds: if dir.join("look-soon").exists() { 2 } else { 600 },
        kubernetes: KubernetesSection {
            kubeconfig: dir.join("kubeconfig"),
            driver_config: ["nodeSelector", "runtimeClassName"].map(str::to_owned).into(),
            namespaces: [("team".to_owned(), "default".to_owned())].into(),
            ..KubernetesSection::default()
        },
        ..Config::default()
    }
}

/// A cluster, and a gateway in a process of its own, which ends first.
struct Host {
    gateway: Process,
    cluster: Server,
}

impl Host {
    async fn new(generation: Generation) -> Self {
        let cluster = Server::start(generation, Behaviour::default()).await.unwrap();
        for text in include_str!("../../deploy/kubernetes/rbac.yaml").split("\n---\n") {
            let object: serde_json::Value = serde_saphyr::from_str(text).unwrap();
            match object["metadata"]["name"].as_str() {
                Some("torpor-sandboxes") => {
                    for name in [NAMESPACE, "default"] {
                        cluster.grant(Some(name), &object["rules"]);
                    }
                }
                _ => cluster.grant(None, &object["rules"]),
            }
        }
        let gateway = Process::new(config, PATIENCE);
        cluster.kubeconfig(gateway.dir.path()).unwrap();
        Self { gateway, cluster }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Create,
    Suspend,
    Resume,
    Stop,
    Start,
    Delete,
}

const STORY: [Act; 8] =
    [Act::Create, Act::Suspend, Act::Resume, Act::Stop, Act::Start, Act::Suspend, Act::Resume, Act::Delete];

fn wish(act: Act) -> Option<Phase> {
    match act {
        Act::Create | Act::Resume | Act::Start => Some(Phase::Ready),
        Act::Suspend => Some(Phase::Suspended),
        Act::Stop => Some(Phase::Stopped),
        Act::Delete => None,
    }
}

async fn ask(channel: &Channel, at: usize) -> Result<(), tonic::Status> {
    let mut client = SandboxesClient::new(channel.clone());
    let request_id = format!("step {at}");
    let target = no_wait("a").map(|t| v1::Target { request_id: request_id.clone(), ..t });
    match STORY[at] {
        Act::Create => {
            let spec = Some(v1::SandboxSpec { image: "tiny:1".into(), ..Default::default() });
            let request =
                v1::CreateSandboxRequest { name: "a".into(), spec, request_id, ..Default::default() };
            client.create(request).await.map(drop)
        }
        Act::Suspend => client.suspend(v1::SuspendRequest { target, keep: 0 }).await.map(drop),
        Act::Resume => client.resume(v1::ResumeRequest { target, ..Default::default() }).await.map(drop),
        Act::Stop => client.stop(v1::StopRequest { target }).await.map(drop),
        Act::Start => client.start(v1::StartRequest { target }).await.map(drop),
        Act::Delete => {
            client.delete(v1::DeleteSandboxRequest { target, allow_missing: true }).await.map(drop)
        }
    }
}

/// The phase at rest; none: it is gone. `Err`: the gateway has ended.
async fn rest(channel: &Channel) -> Result<Option<Phase>, ()> {
    let mut client = SandboxesClient::new(channel.clone());
    let end = Instant::now() + PATIENCE;
    let mut last = None;
    while Instant::now() < end {
        match client.get(v1::GetSandboxRequest { sandbox: "a".into() }).await {
            Ok(found) => {
                let found = found.into_inner();
                let moving = found.status.as_ref().is_none_or(|s| !s.then.is_empty());
                let now = phase(&found);
                use Phase::*;
                if !moving && matches!(now, Ready | Suspended | Stopped | Completed | Error) {
                    return Ok(Some(now));
                }
                last = found.status;
            }
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(_) => return Err(()),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it never came to rest: {last:?}");
}

async fn until(channel: &Channel, wanted: &[Option<Phase>], what: &str) -> Result<(), ()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let now = rest(channel).await?;
        if wanted.contains(&now) {
            return Ok(());
        }
        assert!(Instant::now() < end, "{what}: rests in {now:?}, wanted {wanted:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Steps from `at` on, until the gateway ends or the story does. `Err`: where to go on.
async fn go_on(channel: &Channel, mut at: usize, what: &str) -> Result<(), usize> {
    while let Some(&act) = STORY.get(at) {
        if let Err(status) = ask(channel, at).await {
            let down =
                matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal);
            assert!(down, "{what}: {act:?}: {status:?}");
            return Err(at);
        }
        until(channel, &[wish(act)], what).await.map_err(|()| at)?;
        at += 1;
    }
    Ok(())
}

/// What must hold of the cluster when the gateway is at rest.
fn look_over(host: &Host, now: Option<Phase>, claims: &mut BTreeSet<String>, what: &str) {
    let uid = |name: &String| {
        let claim = host.cluster.object("persistentvolumeclaims", name).unwrap();
        claim["metadata"]["uid"].as_str().unwrap().to_owned()
    };
    claims.extend(host.cluster.names("persistentvolumeclaims").iter().map(uid));
    assert!(claims.len() <= 1, "{what}: a second claim: {claims:?}");
    let sizes = host.cluster.sizes();
    let count = |plural: &str| sizes.get(plural).copied().unwrap_or_default();
    let there = usize::from(now.is_some());
    assert_eq!((count("sandboxes"), count("persistentvolumeclaims")), (there, there), "{what}: {now:?}");
    assert_eq!(count("pods"), usize::from(now == Some(Phase::Ready)), "{what}: {now:?}");
}

/// Tells the story with a gateway that ends at `failpoint`, and goes on with one that doesn't. Whether it was reached.
async fn crash_at(generation: Generation, failpoint: &str, nth: u32) -> bool {
    let what = format!("{generation:?} {failpoint}@{nth}");
    let mut host = Host::new(generation).await;
    let mut claims = BTreeSet::new();
    host.gateway.start(Some(&format!("{failpoint}=abort*1@{nth}")));
    let mut at = match host.gateway.connect().await {
        None => Err(0),
        Some(channel) => go_on(&channel, 0, &what).await,
    };
    let end = Instant::now() + if at.is_ok() { Duration::from_millis(300) } else { PATIENCE };
    while !host.gateway.is_dead() && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let reached = host.gateway.is_dead();
    if at.is_ok() && reached {
        at = Err(STORY.len());
    }
    host.gateway.kill();
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap_or_else(|| panic!("{what}: it does not start again"));
    if let Err(at) = at {
        // What was acknowledged, or what was asked for when it ended, which may or may not have been written.
        let before = at.checked_sub(1).and_then(|at| wish(STORY[at]));
        let asked = STORY.get(at).map_or(before, |act| wish(*act));
        until(&channel, &[before, asked], &what).await.expect("the second gateway lives");
        look_over(&host, rest(&channel).await.unwrap(), &mut claims, &what);
        go_on(&channel, at, &what)
            .await
            .unwrap_or_else(|at| panic!("{what}: step {at} of the second gateway"));
    }
    look_over(&host, rest(&channel).await.unwrap(), &mut claims, &what);
    assert!(host.cluster.names("persistentvolumeclaims").is_empty(), "{what}: something is left");
    reached
}

/// Every name in a `hit("…")` of the driver.
fn failpoints() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../drivers/kubernetes/src");
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        for piece in text.split("hit(\"").skip(1) {
            names.extend(piece.split('"').next().map(str::to_owned));
        }
    }
    names.into_iter().collect()
}

async fn all_of(generation: Generation) {
    use futures::StreamExt as _;
    let names = failpoints();
    assert!(names.len() > 10, "{names:?}");
    // A few at once: most of the time is waiting.
    let run = async |name: String| {
        assert!(
            crash_at(generation, &name, 1).await,
            "'{name}' is never reached: the story has to be longer"
        );
    };
    futures::stream::iter(names).for_each_concurrent(3, run).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_killed_at_any_failpoint_of_v0_4_ends_where_it_should() {
    all_of(Generation::Alpha).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_killed_at_any_failpoint_of_v0_5_0_ends_where_it_should() {
    all_of(Generation::Early).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_killed_at_any_failpoint_of_v1_0_ends_where_it_should() {
    all_of(Generation::Stable).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "slow: every time that every failpoint is reached"]
async fn a_gateway_killed_at_every_pass_of_every_failpoint_ends_where_it_should() {
    let mut kills = 0;
    for generation in [Generation::Alpha, Generation::Early, Generation::Stable] {
        for name in failpoints() {
            let mut nth = 1;
            while crash_at(generation, &name, nth).await {
                (nth, kills) = (nth + 1, kills + 1);
                assert!(nth < 100, "{name} has no end");
            }
        }
    }
    println!("{kills} kills");
}

/// What the gateway says and does where nobody asks it to.
#[tokio::test(flavor = "multi_thread")]
async fn drains_are_mended_and_memory_and_a_missing_kind_are_refused() {
    let mut host = Host::new(Generation::Stable).await;
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    let mut client = SandboxesClient::new(channel.clone());
    ask(&channel, 0).await.unwrap();
    until(&channel, &[Some(Phase::Ready)], "create").await.unwrap();

    let keep = v1::Keep::Memory.into();
    let refused = client.suspend(v1::SuspendRequest { target: no_wait("a"), keep }).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert!(refused.message().contains("no pod at all that could keep it"), "{refused:?}");
    assert!(refused.message().contains("nothing was changed"), "{refused:?}");

    let pod = host.cluster.names("pods").pop().unwrap();
    let before = host.cluster.object("pods", &pod).unwrap()["metadata"]["uid"].clone();
    host.cluster.evict_pod(&pod);
    let end = Instant::now() + PATIENCE;
    loop {
        let after = host.cluster.object("pods", &pod).map(|pod| pod["metadata"]["uid"].clone());
        let ready = rest(&channel).await.unwrap() == Some(Phase::Ready);
        if ready && after.is_some_and(|after| after != before) {
            break;
        }
        assert!(Instant::now() < end, "it was never mended:\n{}", host.gateway.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    // Somebody deletes the object: told as missing, never made anew, and the claim goes with the sandbox only.
    let object = host.cluster.names("sandboxes").pop().unwrap();
    host.cluster.delete("sandboxes", &object);
    let end = Instant::now() + PATIENCE;
    loop {
        let found = client.get(v1::GetSandboxRequest { sandbox: "a".into() }).await.unwrap().into_inner();
        let reason = found.status.as_ref().and_then(|s| s.failure.as_ref()).map(|f| f.reason.clone());
        if phase(&found) == Phase::Error && reason.as_deref() == Some("DATA_MISSING") {
            break;
        }
        assert!(Instant::now() < end, "{:?}", found.status);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(host.cluster.names("persistentvolumeclaims").len(), 1);
    let delete = v1::DeleteSandboxRequest { target: common::target("a"), allow_missing: false };
    client.delete(delete).await.unwrap();
    until(&channel, &[None], "delete").await.unwrap();
    assert!(host.cluster.names("persistentvolumeclaims").is_empty());

    let spec = Some(v1::SandboxSpec { image: "tiny:1".into(), ..Default::default() });
    client.create(v1::CreateSandboxRequest { spec, ..common::create("a") }).await.unwrap();
    host.cluster.upgrade(Generation::Absent);
    let spec = Some(v1::SandboxSpec { image: "tiny:1".into(), ..Default::default() });
    let create = v1::CreateSandboxRequest { name: "b".into(), spec, ..Default::default() };
    let end = Instant::now() + PATIENCE;
    while client.create(create.clone()).await.is_ok() {
        // Known at the latest by the next look at the cluster.
        let target = no_wait("b");
        client.delete(v1::DeleteSandboxRequest { target, allow_missing: true }).await.unwrap();
        assert!(Instant::now() < end, "a create was never refused");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // So is every other verb of one that is there, and nothing is written; a repeat when the kind is back is done.
    let get = || v1::GetSandboxRequest { sandbox: "a".into() };
    let before = client.get(get()).await.unwrap().into_inner();
    let suspend = || v1::SuspendRequest { target: no_wait("a"), keep: 0 };
    let refused = client.suspend(suspend()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert!(refused.message().contains("agent-sandbox is not installed"), "{refused:?}");
    assert_eq!(client.get(get()).await.unwrap().into_inner().version, before.version);
    host.cluster.upgrade(Generation::Stable);
    let end = Instant::now() + PATIENCE;
    while client.suspend(suspend()).await.is_err() {
        assert!(Instant::now() < end, "it is never allowed again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    until(&channel, &[Some(Phase::Suspended)], "suspend").await.unwrap();
}

/// Looks until a sandbox is so.
async fn see(
    client: &mut SandboxesClient<Channel>,
    name: &str,
    what: &str,
    test: impl Fn(&v1::Sandbox, &v1::SandboxStatus) -> bool,
) -> v1::SandboxStatus {
    let end = Instant::now() + PATIENCE;
    loop {
        let found = client.get(v1::GetSandboxRequest { sandbox: name.into() }).await.unwrap().into_inner();
        let status = found.status.clone().unwrap_or_default();
        if test(&found, &status) {
            return status;
        }
        assert!(Instant::now() < end, "{what}: {status:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// What becomes of a pod is the sandbox's failure only where it is its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_is_drained_goes_on_and_a_pod_that_fails_goes_by_the_policy() {
    let mut host = Host::new(Generation::Stable).await;
    host.cluster.behave(|b| b.stuck = Some(""));
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    let mut client = SandboxesClient::new(channel.clone());
    ask(&channel, 0).await.unwrap();
    let mut last = serde_json::Value::Null;
    for _ in 0..3 {
        let end = Instant::now() + PATIENCE;
        let pod = loop {
            let pod = host.cluster.names("pods").pop().and_then(|name| {
                let pod = host.cluster.object("pods", &name)?;
                let up = pod["status"]["containerStatuses"].is_array() && pod["metadata"]["uid"] != last;
                up.then(|| (name, pod["metadata"]["uid"].clone()))
            });
            if let Some((name, uid)) = pod {
                last = uid;
                break name;
            }
            assert!(Instant::now() < end, "no other pod came:\n{}", host.gateway.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        assert!(host.cluster.delete("pods", &pod));
    }
    let retrying = |status: &v1::SandboxStatus, reason: &str| {
        status.conditions.iter().any(|one| one.r#type == "Retrying" && one.reason == reason)
    };
    see(&mut client, "a", "what it waits for is told", |_, status| retrying(status, "PENDING")).await;
    host.cluster.behave(|b| b.stuck = None);
    let status = see(&mut client, "a", "it comes up", |found, _| phase(found) == Phase::Ready).await;
    assert!(status.restart_count == 0 && status.failure.is_none(), "{status:?}");

    let pod = host.cluster.names("pods").pop().unwrap();
    host.cluster.kill_pod(&pod);
    let status = see(&mut client, "a", "never", |found, _| phase(found) == Phase::Error).await;
    let failure = status.failure.unwrap();
    assert!(failure.reason == "COMPUTE_LOST" && failure.message.contains("code 137"), "{failure:?}");
    ask(&channel, 2).await.unwrap();
    see(&mut client, "a", "resumed", |found, _| phase(found) == Phase::Ready).await;

    let restart_policy = v1::RestartPolicy::OnFailure.into();
    let spec = v1::SandboxSpec { image: "tiny:1".into(), restart_policy, ..Default::default() };
    client
        .create(v1::CreateSandboxRequest { spec: Some(spec), wait: true, ..common::create("b") })
        .await
        .unwrap();
    let of = client.get(v1::GetSandboxRequest { sandbox: "b".into() }).await.unwrap().into_inner();
    host.cluster.kill_pod(&format!("torpor-{}", of.id));
    let again = |found: &v1::Sandbox, status: &v1::SandboxStatus| {
        phase(found) == Phase::Ready && status.restart_count == 1
    };
    see(&mut client, "b", "started again, and counted", again).await;
}

fn said(pairs: &[(&str, &str)]) -> Option<prost_types::Struct> {
    use prost_types::{Struct, Value, value::Kind};
    let value = |text: &str| match text.split_once('=') {
        Some((key, inner)) => {
            let inner = Value { kind: Some(Kind::StringValue(inner.into())) };
            Value { kind: Some(Kind::StructValue(Struct { fields: [(key.to_owned(), inner)].into() })) }
        }
        None => Value { kind: Some(Kind::StringValue(text.into())) },
    };
    Some(Struct { fields: pairs.iter().map(|(key, text)| ((*key).to_owned(), value(text))).collect() })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_and_a_sandbox_say_what_is_allowed_and_nothing_is_written_of_anything_else() {
    use torpor_proto::v1::templates_client::TemplatesClient;
    let mut host = Host::new(Generation::Stable).await;
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    let mut client = SandboxesClient::new(channel.clone());
    let mut templates = TemplatesClient::new(channel.clone());
    let spec = |pairs: &[(&str, &str)]| {
        Some(v1::SandboxSpec { image: "tiny:1".into(), driver_config: said(pairs), ..Default::default() })
    };
    let template = |name: &str, pairs: &[(&str, &str)]| v1::CreateTemplateRequest {
        name: name.into(),
        spec: spec(pairs),
        ..Default::default()
    };
    templates
        .create(template("t", &[("runtimeClassName", "kata"), ("nodeSelector", "disk=ssd")]))
        .await
        .unwrap();
    let refused = templates.create(template("u", &[("priorityClassName", "high")])).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    assert!(refused.message().contains("driver_config.priorityClassName"), "{refused:?}");

    let create = v1::CreateSandboxRequest {
        name: "a".into(),
        template: "t".into(),
        spec: Some(v1::SandboxSpec {
            driver_config: said(&[("nodeSelector", "disk=hdd")]),
            ..Default::default()
        }),
        wait: true,
        ..Default::default()
    };
    let made = client.create(create).await.unwrap().into_inner();
    assert_eq!(
        made.spec.unwrap().driver_config,
        said(&[("runtimeClassName", "kata"), ("nodeSelector", "disk=hdd")]),
        "the keys of both, the create's where it has one"
    );
    let pod = host.cluster.object("pods", &host.cluster.names("pods")[0]).unwrap();
    assert_eq!(pod["spec"]["runtimeClassName"], json!("kata"));
    assert_eq!(pod["spec"]["nodeSelector"], json!({"disk": "hdd"}));

    for key in ["hostNetwork", "serviceAccountName", "", "runtime_class"] {
        let create =
            v1::CreateSandboxRequest { name: "b".into(), spec: spec(&[(key, "x")]), ..Default::default() };
        let refused = client.create(create).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
        assert!(refused.message().contains(&format!("driver_config.{key}:")), "{refused:?}");
    }
    assert_eq!(host.cluster.names("sandboxes").len(), 1);
    let missing = client.get(v1::GetSandboxRequest { sandbox: "b".into() }).await.unwrap_err();
    assert_eq!(missing.code(), Code::NotFound);
}

/// What an update says, by the field that it names.
fn changes() -> Vec<(&'static str, v1::UpdateSandboxRequest)> {
    let plain = v1::UpdateSandboxRequest::default;
    let words = |words: &[&str]| Some(v1::StringList { values: words.iter().map(|w| (*w).into()).collect() });
    let resources = |cpus, memory_bytes, disk_bytes| Some(v1::Resources { cpus, memory_bytes, disk_bytes });
    let endpoint = v1::Endpoint { name: "web".into(), port: 80, http_path: String::new() };
    let egress = v1::Egress { policy: v1::egress::Policy::None.into(), ..Default::default() };
    let values = common::map(&[("WHO", "changed")]);
    vec![
        ("command", v1::UpdateSandboxRequest { command: words(&["sleep", "4343"]), ..plain() }),
        ("environment", v1::UpdateSandboxRequest { environment: Some(v1::StringMap { values }), ..plain() }),
        ("workdir", v1::UpdateSandboxRequest { workdir: Some("/etc".into()), ..plain() }),
        ("user", v1::UpdateSandboxRequest { user: Some("worker".into()), ..plain() }),
        ("resources.cpus", v1::UpdateSandboxRequest { resources: resources(Some(3), None, None), ..plain() }),
        (
            "resources.memory_bytes",
            v1::UpdateSandboxRequest { resources: resources(None, Some(320 << 20), None), ..plain() },
        ),
        (
            "resources.disk_bytes",
            v1::UpdateSandboxRequest { resources: resources(None, None, Some(1 << 40)), ..plain() },
        ),
        ("egress", v1::UpdateSandboxRequest { egress: Some(egress), ..plain() }),
        (
            "restart_policy",
            v1::UpdateSandboxRequest { restart_policy: v1::RestartPolicy::Always.into(), ..plain() },
        ),
        (
            "stop_grace",
            v1::UpdateSandboxRequest {
                stop_grace: Some(prost_types::Duration { seconds: 77, nanos: 0 }),
                ..plain()
            },
        ),
        (
            "endpoints",
            v1::UpdateSandboxRequest {
                endpoints: Some(v1::EndpointList { values: vec![endpoint] }),
                ..plain()
            },
        ),
        ("stdin", v1::UpdateSandboxRequest { stdin: Some(true), ..plain() }),
        ("tty", v1::UpdateSandboxRequest { tty: Some(true), ..plain() }),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn each_field_of_an_update_is_done_or_refused_with_the_reason() {
    let fields: Vec<&str> = torpor_sandbox::Field::ALL.iter().map(|field| field.as_str()).collect();
    assert_eq!(changes().iter().map(|(field, _)| *field).collect::<Vec<_>>(), fields);
    for generation in [Generation::Alpha, Generation::Stable] {
        let mut host = Host::new(generation).await;
        host.gateway.start(None);
        let channel = host.gateway.connect().await.unwrap();
        let mut client = SandboxesClient::new(channel);
        let environment = common::map(&[("SECRET", "marked-value-of-a-variable")]);
        let spec = Some(v1::SandboxSpec { image: "tiny:1".into(), environment, ..Default::default() });
        client.create(v1::CreateSandboxRequest { spec, ..common::create("a") }).await.unwrap();
        let object = host.cluster.names("sandboxes")[0].clone();
        for plural in ["sandboxes", "pods"] {
            let text = host.cluster.object(plural, &object).unwrap().to_string();
            assert!(!text.contains("marked-value"), "who may look at {plural} sees a variable: {text}");
        }
        // Others' additions to the pod template stay.
        host.cluster.change("sandboxes", &object, |sandbox| {
            let containers = sandbox["spec"]["podTemplate"]["spec"]["containers"].as_array_mut().unwrap();
            containers.push(json!({"name": "theirs", "image": "theirs:1"}));
        });
        client.stop(v1::StopRequest { target: common::target("a") }).await.unwrap();
        for (field, change) in changes() {
            let get = v1::GetSandboxRequest { sandbox: "a".into() };
            let before = client.get(get.clone()).await.unwrap().into_inner();
            let target = no_wait("a").map(|target| v1::Target { expected_version: before.version, ..target });
            let done = client.update(v1::UpdateSandboxRequest { target, ..change }).await;
            if ["resources.disk_bytes", "egress"].contains(&field) {
                let error = done.unwrap_err();
                common::refused(&error, Code::Unimplemented, "UPDATE_NOT_SUPPORTED");
                assert!(error.message().starts_with(&format!("{field}: ")), "{error:?}");
                let reason = if field == "egress" { "network policies" } else { "storage class" };
                assert!(error.message().contains(reason), "{error:?}");
                assert_eq!(client.get(get).await.unwrap().into_inner().version, before.version);
            } else {
                assert!(done.unwrap().into_inner().version > before.version, "{field}");
            }
        }
        client.start(v1::StartRequest { target: common::target("a") }).await.unwrap();
        let pod = host.cluster.object("pods", &object).unwrap();
        assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], json!(77), "{generation:?}");
        let containers = pod["spec"]["containers"].as_array().unwrap();
        assert_eq!(containers[1], json!({"name": "theirs", "image": "theirs:1"}), "{generation:?}");
        let limits = json!({"cpu": "3", "memory": (320_u64 << 20).to_string()});
        assert_eq!(containers[0]["resources"], json!({"limits": limits, "requests": limits}));
        let folders = fs::read_dir(host.gateway.state().join("kubernetes")).unwrap();
        let stored = folders.flatten().map(|one| one.path().join("spec.json")).find(|p| p.is_file()).unwrap();
        let stored: serde_json::Value = serde_json::from_str(&fs::read_to_string(stored).unwrap()).unwrap();
        assert_eq!(
            (&stored["workdir"], &stored["user"], &stored["tty"]),
            (&json!("/etc"), &json!("worker"), &json!(true))
        );
        assert_eq!(
            (&stored["command"], &stored["environment"]),
            (&json!(["sleep", "4343"]), &json!({"WHO": "changed"}))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_of_a_workspaces_namespace_are_mounted_by_their_own_names() {
    use torpor_proto::v1::{access_client::AccessClient, workspaces_client::WorkspacesClient};
    let mut host = Host::new(Generation::Stable).await;
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    let mut client = SandboxesClient::new(channel.clone());
    let volume = |source: &str| v1::Volume { source: source.into(), target: "/data".into(), read_only: true };
    // "team" has a namespace of its own; "other" and the default workspace share one, and neither has the other's claims.
    for (workspace, allowed) in [("team", true), ("other", false), ("default", false)] {
        if workspace != "default" {
            let make = v1::CreateWorkspaceRequest { name: workspace.into(), ..Default::default() };
            WorkspacesClient::new(channel.clone()).create(make).await.unwrap();
        }
        let role = v1::Role::Editor.into();
        let token = v1::CreateTokenRequest {
            name: "test".into(),
            workspace: workspace.into(),
            role,
            ..Default::default()
        };
        let token = AccessClient::new(channel.clone()).create_token(token).await.unwrap().into_inner().secret;
        for (n, source) in ["/data/sets", "data"].into_iter().enumerate() {
            let spec = v1::SandboxSpec {
                image: "tiny:1".into(),
                volumes: vec![volume(source)],
                ..Default::default()
            };
            let name = format!("{workspace}/a{n}");
            let create = v1::CreateSandboxRequest { name, spec: Some(spec), ..Default::default() };
            let mut asked = tonic::Request::new(create);
            asked.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
            let code = client.create(asked).await.err().map(|status| status.code());
            let wanted = (!allowed).then_some(Code::PermissionDenied);
            assert_eq!(code, wanted, "{source} in {workspace}");
        }
    }
    // An administrator may, wherever.
    let spec =
        v1::SandboxSpec { image: "tiny:1".into(), volumes: vec![volume("data")], ..Default::default() };
    client
        .create(v1::CreateSandboxRequest { name: "mine".into(), spec: Some(spec), ..Default::default() })
        .await
        .unwrap();
    // It is in the namespace "default", where there is no such claim.
    let end = Instant::now() + PATIENCE;
    loop {
        let found =
            client.get(v1::GetSandboxRequest { sandbox: "team/a0".into() }).await.unwrap().into_inner();
        let failure = found.status.as_ref().and_then(|s| s.failure.clone());
        if let Some(failure) = failure {
            assert_eq!(failure.reason, "MOUNT_MISSING", "{failure:?}");
            assert!(failure.message.contains("'data'") && failure.message.contains("default"), "{failure:?}");
            break;
        }
        assert!(Instant::now() < end, "{:?}", found.status);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The workspace of another sandbox is no volume, whatever the caller may.
    let spec = v1::SandboxSpec {
        image: "tiny:1".into(),
        volumes: vec![volume("torpor-x-workspace")],
        ..Default::default()
    };
    let create = v1::CreateSandboxRequest { name: "thief".into(), spec: Some(spec), ..Default::default() };
    let refused = client.create(create).await.unwrap_err();
    assert!(refused.message().contains("workspace of a sandbox"), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_moves_to_another_node_leaves_its_pods_as_they_are() {
    let mut host = Host::new(Generation::Stable).await;
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    ask(&channel, 0).await.unwrap();
    until(&channel, &[Some(Phase::Ready)], "create").await.unwrap();
    let pod = host.cluster.names("pods").pop().unwrap();
    let uid = |host: &Host| host.cluster.object("pods", &pod).unwrap()["metadata"]["uid"].clone();
    let before = uid(&host);
    host.gateway.kill();
    common::pretend_host_restart(&host.gateway.state());
    host.gateway.start(None);
    let channel = host.gateway.connect().await.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    until(&channel, &[Some(Phase::Ready)], "after the move").await.unwrap();
    assert_eq!(uid(&host), before, "nobody asked for another one");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_names_versions_rights_and_classes() {
    let host = Host::new(Generation::Early).await;
    let mut config = config(host.gateway.dir.path());
    let by_name = |checks: Vec<torpor_gateway::doctor::Check>| -> BTreeMap<&'static str, (String, String)> {
        let of = |c: torpor_gateway::doctor::Check| (c.name, (format!("{:?}", c.level), c.finding));
        checks.into_iter().map(of).collect()
    };
    let checks = by_name(torpor_gateway::kubernetes::doctor(&config).await);
    let is = |name: &str, level: &str, words: &str| {
        let (found, text) = &checks[name];
        assert!(found == level && text.contains(words), "{name}: {found} {text}");
    };
    is("cluster", "Ok", "v1.36.2");
    is("agent-sandbox", "Ok", "v1beta1 and v1alpha1; v1beta1 is used");
    is("rights", "Ok", NAMESPACE);
    is("storage-class", "Ok", "standard");
    is("runtime-class", "Warn", "kata");

    host.cluster.deny("create", "pods/exec");
    host.cluster.deny("patch", "sandboxes");
    host.cluster.upgrade(Generation::Absent);
    config.kubernetes.runtime_class = "gvisor".into();
    let checks = by_name(torpor_gateway::kubernetes::doctor(&config).await);
    let is = |name: &str, level: &str, words: &str| {
        let (found, text) = &checks[name];
        assert!(found == level && text.contains(words), "{name}: {found} {text}");
    };
    is("agent-sandbox", "Fail", "not installed");
    is("rights", "Fail", "patch sandboxes, create pods/exec");
    is("runtime-class", "Fail", "'gvisor' is not there");

    config.kubernetes.kubeconfig = "/nonexistent".into();
    let checks = torpor_gateway::kubernetes::doctor(&config).await;
    assert!(checks[0].finding.contains("/nonexistent"), "{checks:?}");
}

/// The configuration of deploy/kubernetes is one that the gateway takes.
#[test]
fn the_deployments_configuration_is_valid() {
    let text = include_str!("../../deploy/kubernetes/gateway.yaml");
    let map: serde_json::Value = serde_saphyr::from_str(text.split("\n---\n").next().unwrap()).unwrap();
    let config: Config = toml::from_str(map["data"]["torpor.toml"].as_str().unwrap()).unwrap();
    config.validate().unwrap();
    assert_eq!(json!(config.drivers), json!(["kubernetes"]));
    // Probes and scrapers are told of the address that there is.
    let port = config.metrics.listen().unwrap().unwrap().port();
    let set = text.split("\n---\n").last().unwrap();
    let set: serde_json::Value = serde_saphyr::from_str(set).unwrap();
    let template = &set["spec"]["template"];
    let container = &template["spec"]["containers"][0];
    assert_eq!(container["ports"][0]["containerPort"], json!(port));
    assert_eq!(template["metadata"]["annotations"]["prometheus.io/port"], json!(port.to_string()));
    for (probe, path) in
        [("startupProbe", "/readyz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")]
    {
        let get = &container[probe]["httpGet"];
        assert_eq!((&get["path"], &get["port"]), (&json!(path), &container["ports"][0]["name"]), "{probe}");
    }
    config.kubernetes.for_driver(&config).unwrap();
}
