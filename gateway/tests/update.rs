//! Updates of sandboxes that are there, through real gRPC, over the driver that only pretends.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::{World, create, error_info, map, no_wait, phase, refused, target};
use futures::StreamExt as _;
use tonic::{Code, Status, transport::Channel};
use torpor_gateway::Config;
use torpor_proto::v1::{self, Phase, sandbox_event::Kind, sandboxes_client::SandboxesClient};
use torpor_sandbox::{
    DriverError, Exit, SandboxId,
    sim::{Script, Verb},
};

type Client = SandboxesClient<Channel>;

const GIB: u64 = 1 << 30;

async fn world() -> World {
    World::with(Script::default(), on).await
}

fn on(config: &mut Config) {
    config.enable_sandbox_updates = true;
}

/// A stopped sandbox "web" with a label, an annotation and a variable.
async fn stopped() -> (World, Client, v1::Sandbox) {
    let world = world().await;
    let mut client = world.sandboxes().await;
    let spec =
        v1::SandboxSpec { environment: map(&[("A", "1")]), workdir: "/srv".into(), ..Default::default() };
    let request = v1::CreateSandboxRequest {
        labels: map(&[("team", "blue")]),
        annotations: map(&[("note", "first")]),
        spec: Some(spec),
        ..create("web")
    };
    client.create(request).await.unwrap();
    let at_rest = client.stop(v1::StopRequest { target: target("web") }).await.unwrap().into_inner();
    (world, client, at_rest)
}

fn words(pairs: &[(&str, &str)]) -> Option<v1::StringMap> {
    Some(v1::StringMap { values: map(pairs) })
}

fn list(words: &[&str]) -> Option<v1::StringList> {
    Some(v1::StringList { values: words.iter().map(|word| (*word).to_owned()).collect() })
}

fn served(all: &[(&str, u32, &str)]) -> Option<v1::EndpointList> {
    let one = |(name, port, path): &(&str, u32, &str)| v1::Endpoint {
        name: (*name).to_owned(),
        port: *port,
        http_path: (*path).to_owned(),
    };
    Some(v1::EndpointList { values: all.iter().map(one).collect() })
}

fn at(sandbox: &v1::Sandbox) -> Option<v1::Target> {
    let (sandbox, expected_version) = (sandbox.name.clone(), sandbox.version);
    Some(v1::Target { sandbox, expected_version, ..Default::default() })
}

/// With a request id.
fn once(sandbox: &v1::Sandbox, id: &str) -> Option<v1::Target> {
    Some(v1::Target { request_id: id.into(), ..at(sandbox).unwrap() })
}

async fn update(client: &mut Client, request: v1::UpdateSandboxRequest) -> Result<v1::Sandbox, Status> {
    client.update(request).await.map(tonic::Response::into_inner)
}

async fn finish(client: &mut Client, name: &str, abandon: bool) -> Result<v1::Sandbox, Status> {
    let request = v1::ResumePendingUpdateRequest { target: no_wait(name), abandon };
    client.resume_pending_update(request).await.map(tonic::Response::into_inner)
}

async fn get(client: &mut Client, name: &str) -> v1::Sandbox {
    client.get(v1::GetSandboxRequest { sandbox: name.into() }).await.unwrap().into_inner()
}

async fn start(client: &mut Client, name: &str) -> Result<v1::Sandbox, Status> {
    client.start(v1::StartRequest { target: target(name) }).await.map(tonic::Response::into_inner)
}

fn id(sandbox: &v1::Sandbox) -> SandboxId {
    sandbox.id.parse().unwrap()
}

fn spec(sandbox: &v1::Sandbox) -> &v1::SandboxSpec {
    sandbox.spec.as_ref().unwrap()
}

fn pending(sandbox: &v1::Sandbox) -> Option<&v1::Condition> {
    sandbox.status.as_ref().unwrap().conditions.iter().find(|c| c.r#type == "UpdatePending")
}

fn backend() -> DriverError {
    DriverError::backend("write the record", "the disk of the pretended host is full")
}

#[tokio::test(flavor = "multi_thread")]
async fn updates_are_refused_where_the_configuration_does_not_allow_them() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let made = client.create(create("web")).await.unwrap().into_inner();
    let labels =
        v1::UpdateSandboxRequest { target: at(&made), labels: words(&[("a", "b")]), ..Default::default() };
    refused(&update(&mut client, labels).await.unwrap_err(), Code::Unimplemented, "UPDATES_DISABLED");
    let error = finish(&mut client, "web", false).await.unwrap_err();
    refused(&error, Code::Unimplemented, "UPDATES_DISABLED");
    assert!(error_info(&error).1.contains("enable_sandbox_updates"));
    assert_eq!(get(&mut client, "web").await.version, made.version);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_absent_is_left_alone_and_what_is_empty_replaces() {
    let (world, mut client, before) = stopped().await;
    let request = v1::UpdateSandboxRequest {
        target: at(&before),
        command: list(&["serve", "--fast"]),
        environment: words(&[("B", "2")]),
        resources: Some(v1::Resources { memory_bytes: Some(GIB), disk_bytes: Some(20 * GIB), cpus: None }),
        egress: Some(v1::Egress { policy: v1::egress::Policy::None.into(), ..Default::default() }),
        restart_policy: v1::RestartPolicy::OnFailure.into(),
        user: Some("www".into()),
        endpoints: served(&[("web", 80, "/health"), ("db", 5432, "")]),
        stdin: Some(true),
        tty: Some(true),
        ..Default::default()
    };
    let after = update(&mut client, request).await.unwrap();
    assert!(after.version > before.version && pending(&after).is_none());
    assert_eq!(phase(&after), Phase::Stopped);
    let (old, new) = (spec(&before), spec(&after));
    assert_eq!(new.command, ["serve", "--fast"]);
    assert_eq!(new.environment, map(&[("B", "2")]), "a map is taken whole");
    assert_eq!((new.workdir.as_str(), new.user.as_str()), ("/srv", "www"));
    assert_eq!((new.stdin, new.tty), (true, true));
    assert_eq!(new.endpoints, served(&[("web", 80, "/health"), ("db", 5432, "")]).unwrap().values);
    let declared = &after.status.as_ref().unwrap().endpoints;
    assert_eq!(declared.iter().map(|one| one.port).collect::<Vec<_>>(), [80, 5432]);
    let resources = new.resources.unwrap();
    assert_eq!((resources.memory_bytes, resources.disk_bytes), (Some(GIB), Some(20 * GIB)));
    assert_eq!(resources.cpus, old.resources.unwrap().cpus);
    assert_eq!(new.restart_policy(), v1::RestartPolicy::OnFailure);
    assert_eq!((new.image.as_str(), new.stop_grace), (old.image.as_str(), old.stop_grace));
    assert_eq!((&after.labels, &after.annotations), (&before.labels, &before.annotations));
    // The driver goes by it, too, and the sandbox starts.
    let stored = world.sim.spec(&id(&after)).unwrap();
    assert_eq!((stored.command.len(), stored.resources.memory_bytes), (2, GIB));
    assert_eq!(world.sim.egress(&id(&after)), Some(torpor_sandbox::Egress::None));
    let running = start(&mut client, "web").await.unwrap();
    assert_eq!(
        (phase(&running), running.status.unwrap().disk.unwrap().virtual_bytes),
        (Phase::Ready, 20 * GIB)
    );

    let stop = v1::StopRequest { target: target("web") };
    let before = client.stop(stop).await.unwrap().into_inner();
    let request = v1::UpdateSandboxRequest {
        target: at(&before),
        command: list(&[]),
        environment: words(&[]),
        labels: words(&[]),
        annotations: words(&[]),
        egress: Some(v1::Egress::default()),
        workdir: Some(String::new()),
        user: Some(String::new()),
        endpoints: served(&[]),
        stdin: Some(false),
        tty: Some(false),
        ..Default::default()
    };
    let after = update(&mut client, request).await.unwrap();
    let new = spec(&after);
    assert!(new.command.is_empty() && new.environment.is_empty() && new.egress.is_none());
    assert!(new.workdir.is_empty() && new.user.is_empty());
    assert!(new.endpoints.is_empty() && !new.stdin && !new.tty);
    assert!(after.labels.is_empty() && after.annotations.is_empty());
    assert_eq!(new.restart_policy(), v1::RestartPolicy::OnFailure);

    let mut world = world;
    world.restart().await;
    assert_eq!(get(&mut world.sandboxes().await, "web").await.spec, after.spec);
    assert_eq!(world.sim.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_and_annotations_change_in_every_phase_and_those_who_watch_hear_of_it() {
    let world = world().await;
    let mut client = world.sandboxes().await;
    let labels = map(&[("team", "blue")]);
    let made = v1::CreateSandboxRequest { labels, ..create("web") };
    let ready = client.create(made).await.unwrap().into_inner();
    let watch = |selector: &str, cursor: &str| v1::WatchSandboxesRequest {
        label_selector: selector.into(),
        cursor: cursor.into(),
        ..Default::default()
    };
    let mut blue = client.watch(watch("team=blue", "")).await.unwrap().into_inner();
    let mut red = client.watch(watch("team=red", "")).await.unwrap().into_inner();
    let next = async |events: &mut tonic::Streaming<v1::SandboxEvent>, wanted: Kind| {
        let found = async {
            loop {
                let event = events.next().await.unwrap().unwrap();
                if event.kind() == wanted {
                    return event;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(20), found).await.unwrap()
    };
    let cursor = next(&mut blue, Kind::Synced).await.cursor;
    next(&mut red, Kind::Synced).await;

    let request = v1::UpdateSandboxRequest {
        target: at(&ready),
        labels: words(&[("team", "red")]),
        annotations: words(&[("note", "any text, even\n=this, of any length")]),
        ..Default::default()
    };
    let after = update(&mut client, request).await.unwrap();
    assert_eq!((phase(&after), &after.labels), (Phase::Ready, &map(&[("team", "red")])));
    assert_eq!(
        next(&mut blue, Kind::Deleted).await.sandbox.unwrap().id,
        ready.id,
        "it is none of theirs now"
    );
    assert_eq!(next(&mut red, Kind::Changed).await.sandbox.unwrap().labels, after.labels);
    // Also who was away meanwhile; and who wants all of them does not take it for deleted.
    let mut away = client.watch(watch("team=blue", &cursor)).await.unwrap().into_inner();
    assert_eq!(next(&mut away, Kind::Deleted).await.sandbox.unwrap().id, ready.id);
    let mut all = client.watch(watch("", &cursor)).await.unwrap().into_inner();
    let event = all.next().await.unwrap().unwrap();
    assert_eq!((event.kind(), event.sandbox.unwrap().labels), (Kind::Changed, after.labels.clone()));
    assert_eq!(all.next().await.unwrap().unwrap().kind(), Kind::Synced);
    let chosen =
        |selector: &str| v1::ListSandboxesRequest { label_selector: selector.into(), ..Default::default() };
    assert_eq!(client.list(chosen("team=red")).await.unwrap().into_inner().sandboxes.len(), 1);
    assert_eq!(client.list(chosen("team=blue")).await.unwrap().into_inner().sandboxes.len(), 0);

    // The same again writes nothing.
    let request = v1::UpdateSandboxRequest {
        target: at(&after),
        labels: words(&[("team", "red")]),
        ..Default::default()
    };
    assert_eq!(update(&mut client, request).await.unwrap().version, after.version);
    assert_eq!(world.sim.calls(Verb::Update), 0);

    // All else needs rest.
    let request =
        v1::UpdateSandboxRequest { target: at(&after), command: list(&["x"]), ..Default::default() };
    let error = update(&mut client, request).await.unwrap_err();
    refused(&error, Code::FailedPrecondition, "NOT_AT_REST");
    assert_eq!(error_info(&error).1, "torpor stop web");
}

#[tokio::test(flavor = "multi_thread")]
async fn reserved_and_impossible_values_are_refused_by_their_field_and_nothing_is_written() {
    let (world, mut client, before) = stopped().await;
    let blank = || v1::UpdateSandboxRequest { target: at(&before), ..Default::default() };
    let resources = |cpus, memory_bytes, disk_bytes| Some(v1::Resources { cpus, memory_bytes, disk_bytes });
    let long = "x".repeat(64);
    let bad = [
        ("labels:", v1::UpdateSandboxRequest { labels: words(&[("torpor.dev/x", "y")]), ..blank() }),
        ("labels:", v1::UpdateSandboxRequest { labels: words(&[("agents.x-k8s.io/x", "y")]), ..blank() }),
        ("labels:", v1::UpdateSandboxRequest { labels: words(&[("a", &long)]), ..blank() }),
        ("labels:", v1::UpdateSandboxRequest { labels: words(&[("-a", "")]), ..blank() }),
        (
            "annotations:",
            v1::UpdateSandboxRequest { annotations: words(&[("torpor.dev/template", "y")]), ..blank() },
        ),
        ("command:", v1::UpdateSandboxRequest { command: list(&["a\0b"]), ..blank() }),
        ("command:", v1::UpdateSandboxRequest { command: list(&[""]), ..blank() }),
        ("environment:", v1::UpdateSandboxRequest { environment: words(&[("A=B", "")]), ..blank() }),
        ("workdir:", v1::UpdateSandboxRequest { workdir: Some("relative".into()), ..blank() }),
        ("endpoints:", v1::UpdateSandboxRequest { endpoints: served(&[("web", 0, "")]), ..blank() }),
        ("endpoints:", v1::UpdateSandboxRequest { endpoints: served(&[("web", 70_000, "")]), ..blank() }),
        ("endpoints:", v1::UpdateSandboxRequest { endpoints: served(&[("a b", 80, "")]), ..blank() }),
        ("endpoints:", v1::UpdateSandboxRequest { endpoints: served(&[("a", 80, "x")]), ..blank() }),
        (
            "endpoints:",
            v1::UpdateSandboxRequest { endpoints: served(&[("a", 1, ""), ("a", 2, "")]), ..blank() },
        ),
        ("stdin:", v1::UpdateSandboxRequest { stdin: Some(true), ..blank() }),
        ("tty:", v1::UpdateSandboxRequest { tty: Some(true), ..blank() }),
        ("user:", v1::UpdateSandboxRequest { user: Some("a b".into()), ..blank() }),
        (
            "resources.cpus:",
            v1::UpdateSandboxRequest { resources: resources(Some(0), None, None), ..blank() },
        ),
        (
            "resources.memory_bytes:",
            v1::UpdateSandboxRequest { resources: resources(None, Some(1), None), ..blank() },
        ),
        (
            "resources.disk_bytes:",
            v1::UpdateSandboxRequest { resources: resources(None, None, Some(GIB)), ..blank() },
        ),
        ("restart_policy:", v1::UpdateSandboxRequest { restart_policy: 77, ..blank() }),
        (
            "stop_grace:",
            v1::UpdateSandboxRequest {
                stop_grace: Some(prost_types::Duration { seconds: -1, nanos: 0 }),
                ..blank()
            },
        ),
        (
            "egress.allow:",
            v1::UpdateSandboxRequest {
                egress: Some(v1::Egress {
                    policy: v1::egress::Policy::Allow.into(),
                    allow: vec!["nonsense".into()],
                    ..Default::default()
                }),
                ..blank()
            },
        ),
        (
            "target.expected_version:",
            v1::UpdateSandboxRequest { target: no_wait("web"), labels: words(&[]), ..Default::default() },
        ),
    ];
    for (field, request) in bad {
        let error = update(&mut client, request).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{field} {error:?}");
        assert!(error.message().starts_with(field), "{field} {error:?}");
    }
    let image = v1::UpdateSandboxRequest { image: Some("other".into()), ..blank() };
    let error = update(&mut client, image).await.unwrap_err();
    refused(&error, Code::Unimplemented, "IMAGE_UPDATE_NOT_SUPPORTED");
    assert!(error_info(&error).1.contains("torpor create"));
    let its_own = Some(spec(&before).image.clone());
    let same = update(&mut client, v1::UpdateSandboxRequest { image: its_own, ..blank() }).await.unwrap();
    assert_eq!(same.version, before.version, "the image that it has is no change");
    let stale = v1::UpdateSandboxRequest {
        target: Some(v1::Target { expected_version: before.version - 1, ..at(&before).unwrap() }),
        ..Default::default()
    };
    for request in [
        v1::UpdateSandboxRequest { labels: words(&[]), ..stale.clone() },
        v1::UpdateSandboxRequest { command: list(&["x"]), ..stale },
    ] {
        refused(&update(&mut client, request).await.unwrap_err(), Code::Aborted, "STALE_VERSION");
    }
    let after = get(&mut client, "web").await;
    assert_eq!((after.version, &after.spec, &after.labels), (before.version, &before.spec, &before.labels));
    assert_eq!((world.sim.calls(Verb::Update), world.sim.calls(Verb::Disk)), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_driver_cannot_change_is_refused_before_anything_is_written() {
    let (world, mut client, before) = stopped().await;
    world.sim.cannot_update(true);
    let request = v1::UpdateSandboxRequest {
        target: at(&before),
        command: list(&["x"]),
        resources: Some(v1::Resources { memory_bytes: Some(GIB), ..Default::default() }),
        ..Default::default()
    };
    let error = update(&mut client, request).await.unwrap_err();
    refused(&error, Code::Unimplemented, "UPDATE_NOT_SUPPORTED");
    assert!(error.message().starts_with("resources.memory_bytes:"), "{error:?}");
    assert!(error.message().ends_with("it can change command"), "{error:?}");
    assert_eq!(get(&mut client, "web").await.version, before.version);
    let request =
        v1::UpdateSandboxRequest { target: at(&before), command: list(&["x"]), ..Default::default() };
    assert_eq!(spec(&update(&mut client, request).await.unwrap()).command, ["x"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_that_stops_on_the_way_blocks_start_until_it_is_finished() {
    let (mut world, mut client, before) = stopped().await;
    world.sim.fail_next(Verb::Update, backend());
    let request = v1::UpdateSandboxRequest {
        target: once(&before, "u1"),
        environment: words(&[("B", "2")]),
        labels: words(&[("team", "red")]),
        resources: Some(v1::Resources { disk_bytes: Some(30 * GIB), ..Default::default() }),
        ..Default::default()
    };
    let error = update(&mut client, request.clone()).await.unwrap_err();
    let (reason, next) = error_info(&error);
    assert_eq!((reason.as_str(), next.as_str()), ("UPDATE_PENDING", "torpor update --resume-pending web"));
    assert_ne!(error.code(), Code::Unavailable, "a repeat by itself would not help");
    assert!(error.message().contains("pretended host is full"), "{error:?}");

    // It lasts, over a restart of the gateway.
    for _ in 0..2 {
        let now = get(&mut client, "web").await;
        let condition = pending(&now).expect("it shows");
        assert_eq!((condition.status, condition.reason.as_str()), (true, "BACKEND_FAILED"));
        assert!(condition.message.contains("pretended host is full"), "{condition:?}");
        assert_eq!((&spec(&now).environment, &now.labels), (&map(&[("A", "1")]), &before.labels));
        let error = start(&mut client, "web").await.unwrap_err();
        refused(&error, Code::FailedPrecondition, "UPDATE_PENDING");
        assert_eq!(error_info(&error).1, "torpor update --resume-pending web");
        // The same request again is not done twice; another one has to wait.
        refused(
            &update(&mut client, request.clone()).await.unwrap_err(),
            Code::FailedPrecondition,
            "UPDATE_PENDING",
        );
        let other =
            v1::UpdateSandboxRequest { target: at(&now), command: list(&["x"]), ..Default::default() };
        refused(&update(&mut client, other).await.unwrap_err(), Code::FailedPrecondition, "UPDATE_PENDING");
        world.restart().await;
        client = world.sandboxes().await;
    }
    assert_eq!(get(&mut client, "web").await.status.unwrap().disk.unwrap().virtual_bytes, 30 * GIB);
    // Suspend and resume are no way round it, nor is a policy; the rest of the lifecycle works.
    let resume = v1::ResumeRequest { target: target("web"), ..Default::default() };
    refused(&client.resume(resume).await.unwrap_err(), Code::FailedPrecondition, "UPDATE_PENDING");
    client.stop(v1::StopRequest { target: target("web") }).await.unwrap();

    // What was set meanwhile stays, what was not asked for is not undone.
    let egress = Some(v1::Egress { policy: v1::egress::Policy::None.into(), ..Default::default() });
    client.set_egress(v1::SetEgressRequest { target: no_wait("web"), egress: egress.clone() }).await.unwrap();
    let done = finish(&mut client, "web", false).await.unwrap();
    assert!(pending(&done).is_none());
    assert_eq!((&spec(&done).environment, &done.labels), (&map(&[("B", "2")]), &map(&[("team", "red")])));
    assert_eq!(spec(&done).egress, egress);
    assert_eq!(spec(&done).resources.unwrap().disk_bytes, Some(30 * GIB));
    assert_eq!(
        finish(&mut client, "web", false).await.unwrap().version,
        done.version,
        "there is nothing to do"
    );
    // Now the first request has come to this.
    assert_eq!(update(&mut client, request).await.unwrap().version, done.version);
    let running = start(&mut client, "web").await.unwrap();
    assert_eq!(phase(&running), Phase::Ready);
    assert_eq!(world.sim.spec(&id(&running)).unwrap().environment.get("B").map(String::as_str), Some("2"));
    assert_eq!(world.sim.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pending_update_does_not_undo_what_was_written_after_it() {
    let (world, mut client, before) = stopped().await;
    world.sim.fail_next(Verb::Update, backend());
    let request = v1::UpdateSandboxRequest {
        target: at(&before),
        environment: words(&[("B", "2")]),
        labels: words(&[("by", "older")]),
        annotations: words(&[("by", "older")]),
        ..Default::default()
    };
    refused(&update(&mut client, request).await.unwrap_err(), Code::Internal, "UPDATE_PENDING");
    let now = get(&mut client, "web").await;
    let newer = v1::UpdateSandboxRequest {
        target: at(&now),
        labels: words(&[("by", "newer")]),
        ..Default::default()
    };
    let newer = update(&mut client, newer).await.unwrap();
    assert_eq!(newer.labels, map(&[("by", "newer")]));
    assert!(pending(&newer).is_some(), "the rest goes on being pending");
    let done = finish(&mut client, "web", false).await.unwrap();
    assert_eq!(done.labels, map(&[("by", "newer")]), "of the one that was answered last");
    assert_eq!(done.annotations, map(&[("by", "older")]), "nobody has written others");
    assert_eq!(spec(&done).environment, map(&[("B", "2")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pending_update_can_be_given_up_and_what_was_done_of_it_stays() {
    let (world, mut client, before) = stopped().await;
    world.sim.fail_next(Verb::Update, backend());
    let request = v1::UpdateSandboxRequest {
        target: at(&before),
        environment: words(&[("B", "2")]),
        labels: words(&[]),
        resources: Some(v1::Resources { disk_bytes: Some(30 * GIB), ..Default::default() }),
        ..Default::default()
    };
    refused(&update(&mut client, request).await.unwrap_err(), Code::Internal, "UPDATE_PENDING");
    // It may fail as well; then it goes on being pending.
    world.sim.fail_next(Verb::Update, backend());
    refused(&finish(&mut client, "web", true).await.unwrap_err(), Code::Internal, "UPDATE_PENDING");
    refused(&start(&mut client, "web").await.unwrap_err(), Code::FailedPrecondition, "UPDATE_PENDING");
    let done = finish(&mut client, "web", true).await.unwrap();
    assert!(pending(&done).is_none());
    assert_eq!((&spec(&done).environment, &done.labels), (&map(&[("A", "1")]), &before.labels));
    assert_eq!(spec(&done).resources.unwrap().disk_bytes, Some(30 * GIB), "a disk never shrinks");
    assert_eq!(phase(&start(&mut client, "web").await.unwrap()), Phase::Ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_step_that_is_refused_for_good_leaves_nothing_pending() {
    let (world, mut client, before) = stopped().await;
    world.sim.fail_next(Verb::Disk, DriverError::Invalid("its tables hold no more".into()));
    let request = v1::UpdateSandboxRequest {
        target: once(&before, "u1"),
        resources: Some(v1::Resources { disk_bytes: Some(30 * GIB), ..Default::default() }),
        ..Default::default()
    };
    let error = update(&mut client, request.clone()).await.unwrap_err();
    refused(&error, Code::InvalidArgument, "INVALID");
    assert!(error.message().contains("nothing was changed"), "{error:?}");
    let now = get(&mut client, "web").await;
    assert!(pending(&now).is_none());
    // Nothing came of the request: with the version of now it can be made again.
    let again = v1::UpdateSandboxRequest { target: once(&now, "u1"), ..request };
    let grown = update(&mut client, again).await.unwrap();
    assert_eq!(spec(&grown).resources.unwrap().disk_bytes, Some(30 * GIB));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_id_is_good_for_one_update() {
    let (world, mut client, before) = stopped().await;
    let request = |value: &str| v1::UpdateSandboxRequest {
        target: once(&before, "u1"),
        environment: words(&[("B", value)]),
        ..Default::default()
    };
    let first = update(&mut client, request("2")).await.unwrap();
    let again = update(&mut client, request("2")).await.unwrap();
    assert_eq!((first.version, world.sim.calls(Verb::Update)), (again.version, 1));
    refused(
        &update(&mut client, request("3")).await.unwrap_err(),
        Code::InvalidArgument,
        "REQUEST_ID_REUSED",
    );
    // Many at once are one.
    let now = get(&mut client, "web").await;
    let many = (0..8).map(|_| {
        let (mut client, target) = (client.clone(), once(&now, "u2"));
        async move {
            let environment = words(&[("B", "4")]);
            update(&mut client, v1::UpdateSandboxRequest { target, environment, ..Default::default() }).await
        }
    });
    for answer in futures::future::join_all(many).await {
        match answer {
            Ok(done) => assert_eq!(spec(&done).environment, map(&[("B", "4")])),
            // The first one was at it, before or after it was written down.
            Err(error) => {
                let reason = error_info(&error).0;
                assert_eq!(error.code(), Code::FailedPrecondition, "{error:?}");
                assert!(["DISK_BUSY", "UPDATE_PENDING"].contains(&reason.as_str()), "{error:?}");
            }
        }
    }
    assert_eq!(world.sim.calls(Verb::Update), 2);
    assert_eq!(world.sim.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn verbs_wait_for_an_update_under_way_and_of_two_updates_one_is_refused() {
    let (world, mut client, before) = stopped().await;
    world.sim.hold_disks(true);
    let request =
        v1::UpdateSandboxRequest { target: at(&before), command: list(&["x"]), ..Default::default() };
    let (mut other, asked) = (client.clone(), request.clone());
    let updating = tokio::spawn(async move { update(&mut other, asked).await });
    let under_way = async {
        loop {
            let now = get(&mut client, "web").await;
            if pending(&now).is_some_and(|c| c.reason == "IN_PROGRESS") {
                return now;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let now = tokio::time::timeout(Duration::from_secs(20), under_way).await.unwrap();
    refused(&update(&mut client, request).await.unwrap_err(), Code::FailedPrecondition, "DISK_BUSY");
    refused(&start(&mut client, "web").await.unwrap_err(), Code::FailedPrecondition, "UPDATE_PENDING");
    let delete = v1::DeleteSandboxRequest { target: no_wait("web"), allow_missing: false };
    client.delete(delete).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(world.sim.stored().len(), 1, "the delete waits");
    world.sim.hold_disks(false);
    let done = updating.await.unwrap();
    assert!(done.is_ok_and(|done| done.id == now.id));
    for _ in 0..500 {
        if world.sim.stored().is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(world.sim.stored().is_empty() && world.sim.violations().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_phase_at_rest_takes_an_update_and_no_memory_image_is_lost_to_one() {
    let world = world().await;
    let mut client = world.sandboxes().await;
    let exits = |command: &[&str]| v1::SandboxSpec {
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        ..Default::default()
    };
    client
        .create(v1::CreateSandboxRequest { spec: Some(exits(&["exit", "3"])), ..create("done") })
        .await
        .unwrap();
    client
        .create(v1::CreateSandboxRequest { spec: Some(exits(&["panic"])), wait: false, ..create("broken") })
        .await
        .unwrap();
    client.create(create("asleep")).await.unwrap();
    client.suspend(v1::SuspendRequest { target: target("asleep"), keep: 0 }).await.unwrap();
    client.create(create("dreams")).await.unwrap();
    let keep = v1::Keep::Memory.into();
    client.suspend(v1::SuspendRequest { target: target("dreams"), keep }).await.unwrap();
    for (name, wanted) in [("done", Phase::Completed), ("broken", Phase::Error), ("asleep", Phase::Suspended)]
    {
        let mut done = None;
        // What is left of a run that failed is given back a moment later.
        for _ in 0..500 {
            let now = get(&mut client, name).await;
            let request = v1::UpdateSandboxRequest {
                target: at(&now),
                command: list(&["serve"]),
                ..Default::default()
            };
            if phase(&now) == wanted
                && let Ok(after) = update(&mut client, request).await
            {
                done = Some(after);
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let done = done.unwrap_or_else(|| panic!("{name} takes no update"));
        assert_eq!((phase(&done), spec(&done).command.len()), (wanted, 1));
        // What kept it from running is gone with the command.
        assert_eq!(phase(&start(&mut client, name).await.unwrap()), Phase::Ready, "{name}");
    }
    let dreams = get(&mut client, "dreams").await;
    let request =
        v1::UpdateSandboxRequest { target: at(&dreams), command: list(&["x"]), ..Default::default() };
    let error = update(&mut client, request).await.unwrap_err();
    refused(&error, Code::FailedPrecondition, "MEMORY_KEPT");
    world.sim.end(&id(&get(&mut client, "asleep").await), Exit::Code(0));
}
