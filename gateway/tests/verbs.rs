//! The verbs through real gRPC, over the driver that only pretends.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::{World, create, error_info, no_wait, phase, slow, target};
use futures::StreamExt as _;
use tonic::Code;
use torpor_proto::v1::{self, Phase};
use torpor_sandbox::{
    DriverError, Exit, SandboxId,
    sim::{Script, Verb},
};

fn id(sandbox: &v1::Sandbox) -> SandboxId {
    sandbox.id.parse().unwrap()
}

async fn wait_for(world: &World, name: &str, wanted: Phase) -> v1::Sandbox {
    let mut client = world.sandboxes().await;
    for _ in 0..500 {
        let now = client.get(v1::GetSandboxRequest { sandbox: name.into() }).await.unwrap().into_inner();
        if phase(&now) == wanted {
            return now;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{name} never came to {wanted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_created_suspended_resumed_stopped_started_and_deleted() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let made = client.create(create("web")).await.unwrap().into_inner();
    assert_eq!(phase(&made), Phase::Ready);
    let disk = world.sim.disk_id(&id(&made));
    assert_eq!(world.info().await.capacity.unwrap().slots_used, 1);

    for _ in 0..2 {
        let asleep =
            client.suspend(v1::SuspendRequest { target: target("web"), keep: 0 }).await.unwrap().into_inner();
        assert_eq!(phase(&asleep), Phase::Suspended);
        assert_eq!(asleep.status.as_ref().unwrap().retained(), v1::Keep::Disk);
        assert_eq!(asleep.status.unwrap().host, None);
        assert!(world.sim.running().is_empty());
        assert_eq!(world.info().await.capacity.unwrap().slots_used, 0);
    }
    for _ in 0..2 {
        let awake = client
            .resume(v1::ResumeRequest { target: target("web"), ..Default::default() })
            .await
            .unwrap()
            .into_inner();
        assert_eq!((phase(&awake), awake.status.unwrap().run), (Phase::Ready, 2));
    }
    let stopped = client.stop(v1::StopRequest { target: target("web") }).await.unwrap().into_inner();
    assert_eq!(phase(&stopped), Phase::Stopped);
    let started = client.start(v1::StartRequest { target: target("web") }).await.unwrap().into_inner();
    assert_eq!(phase(&started), Phase::Ready);
    assert_eq!(world.sim.disk_id(&id(&made)), disk, "the same disk all the way");

    let history = client
        .history(v1::HistoryRequest { sandbox: "web".into(), ..Default::default() })
        .await
        .unwrap()
        .into_inner();
    let path: Vec<Phase> = history.transitions.iter().rev().map(|t| t.to()).collect();
    use Phase::*;
    assert_eq!(
        path,
        [Provisioning, Ready, Suspending, Suspended, Resuming, Ready, Stopping, Stopped, Starting, Ready]
    );
    assert!(history.transitions.iter().all(|t| !t.why.is_empty()));

    let gone = client
        .delete(v1::DeleteSandboxRequest { target: target("web"), allow_missing: false })
        .await
        .unwrap()
        .into_inner();
    assert_eq!((gone.outcome(), gone.id), (v1::delete_sandbox_response::Outcome::Completed, made.id));
    assert_eq!(world.info().await.capacity.unwrap().sandboxes, 0);
    assert!(world.sim.violations().is_empty(), "{:?}", world.sim.violations());
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_say_why_and_what_to_do_instead() {
    let world = World::new(Script { keeps_memory: false, ..Script::default() }).await;
    let mut client = world.sandboxes().await;
    client.create(create("a")).await.unwrap();

    let taken = client.create(create("a")).await.unwrap_err();
    assert_eq!(
        (taken.code(), error_info(&taken)),
        (Code::AlreadyExists, ("NAME_TAKEN".into(), "torpor get a".into()))
    );
    let unknown = client.get(v1::GetSandboxRequest { sandbox: "nobody".into() }).await.unwrap_err();
    assert_eq!((unknown.code(), error_info(&unknown).0.as_str()), (Code::NotFound, "SANDBOX_NOT_FOUND"));
    let bad = client.create(create("Not A Name")).await.unwrap_err();
    assert_eq!(bad.code(), Code::InvalidArgument);
    assert!(bad.message().starts_with("name:"), "{}", bad.message());

    let resources = v1::Resources { cpus: Some(0), ..Default::default() };
    let spec = v1::SandboxSpec { resources: Some(resources), ..Default::default() };
    let zero = client.create(v1::CreateSandboxRequest { spec: Some(spec), ..create("b") }).await.unwrap_err();
    assert!(zero.message().starts_with("resources.cpus:"), "{}", zero.message());

    let before = client.get(v1::GetSandboxRequest { sandbox: "a".into() }).await.unwrap().into_inner();
    let memory = v1::SuspendRequest { target: target("a"), keep: v1::Keep::Memory.into() };
    let refused = client.suspend(memory).await.unwrap_err();
    assert_eq!(
        (refused.code(), error_info(&refused).0.as_str()),
        (Code::FailedPrecondition, "MEMORY_NOT_SUPPORTED")
    );
    let after = client.get(v1::GetSandboxRequest { sandbox: "a".into() }).await.unwrap().into_inner();
    assert_eq!(before.version, after.version, "nothing was written");

    client.stop(v1::StopRequest { target: target("a") }).await.unwrap();
    let resume =
        client.resume(v1::ResumeRequest { target: target("a"), ..Default::default() }).await.unwrap_err();
    assert_eq!(
        (resume.code(), error_info(&resume)),
        (Code::FailedPrecondition, ("WRONG_PHASE".into(), "torpor start a".into()))
    );

    let start = v1::ExecStart { sandbox: "a".into(), argv: vec!["true".into()], ..Default::default() };
    let input = v1::ExecInput { kind: Some(v1::exec_input::Kind::Start(start)) };
    let exec = client.exec(futures::stream::iter([input])).await.unwrap_err();
    assert_eq!(
        (exec.code(), error_info(&exec)),
        (Code::FailedPrecondition, ("STOPPED".into(), "torpor start a".into()))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_with_the_same_request_id_returns_the_first_result() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let request = v1::CreateSandboxRequest { request_id: "r1".into(), ..create("") };
    let first = client.create(request.clone()).await.unwrap().into_inner();
    let second = client.create(request).await.unwrap().into_inner();
    assert_eq!(first.id, second.id);
    assert_eq!(world.info().await.capacity.unwrap().sandboxes, 1);

    let reused = v1::Target { request_id: "r1".into(), ..target(&first.name).unwrap() };
    let error = client.stop(v1::StopRequest { target: Some(reused) }).await.unwrap_err();
    assert_eq!(error_info(&error).0, "REQUEST_ID_REUSED");

    let delete = v1::Target { request_id: "r2".into(), ..target(&first.name).unwrap() };
    let delete = v1::DeleteSandboxRequest { target: Some(delete), allow_missing: false };
    for _ in 0..2 {
        let gone = client.delete(delete.clone()).await.unwrap().into_inner();
        assert_eq!((gone.outcome(), &gone.id), (v1::delete_sandbox_response::Outcome::Completed, &first.id));
    }
    let missing = v1::DeleteSandboxRequest { target: target("nobody"), allow_missing: true };
    let absent = client.delete(missing).await.unwrap().into_inner();
    assert_eq!(absent.outcome(), v1::delete_sandbox_response::Outcome::AlreadyAbsent);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspend_that_was_taken_is_repeated_whatever_the_backend_can_do_by_then() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    client.create(create("a")).await.unwrap();
    let with = |request_id: &str| v1::SuspendRequest {
        target: Some(v1::Target { request_id: request_id.into(), ..target("a").unwrap() }),
        keep: v1::Keep::Memory.into(),
    };
    client.suspend(with("first")).await.unwrap();
    let slept = wait_for(&world, "a", Phase::Suspended).await;
    world.sim.set_script(Script { keeps_memory: false, ..Script::default() });
    for request_id in ["first", "", "second"] {
        let again = client.suspend(with(request_id)).await.unwrap().into_inner();
        assert_eq!(again.version, slept.version, "{request_id}");
    }
    client.resume(v1::ResumeRequest { target: target("a"), ..Default::default() }).await.unwrap();
    wait_for(&world, "a", Phase::Ready).await;
    client.suspend(with("first")).await.unwrap();
    let refused = client.suspend(with("third")).await.unwrap_err();
    assert_eq!(error_info(&refused).0, "MEMORY_NOT_SUPPORTED");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_version_is_aborted_and_changes_nothing() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let made = client.create(create("a")).await.unwrap().into_inner();
    let stale = v1::Target { expected_version: made.version + 7, ..target("a").unwrap() };
    let error = client.stop(v1::StopRequest { target: Some(stale) }).await.unwrap_err();
    assert_eq!((error.code(), error_info(&error).0.as_str()), (Code::Aborted, "STALE_VERSION"));
    let right = v1::Target { expected_version: made.version, ..target("a").unwrap() };
    client.stop(v1::StopRequest { target: Some(right) }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_call_strands_nothing() {
    let world = World::new(slow()).await;
    let mut client = world.sandboxes().await;
    for millis in [0, 1, 2, 5, 10, 20] {
        let name = format!("a{millis}");
        let call = client.create(create(&name));
        let _ = tokio::time::timeout(Duration::from_millis(millis), call).await;
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    let list = client.list(v1::ListSandboxesRequest::default()).await.unwrap().into_inner();
    for made in list.sandboxes {
        wait_for(&world, &made.name, Phase::Ready).await;
        let call = client.suspend(v1::SuspendRequest { target: target(&made.name), keep: 0 });
        let cancelled = tokio::time::timeout(Duration::from_millis(8), call).await;
        let then =
            client.get(v1::GetSandboxRequest { sandbox: made.name.clone() }).await.unwrap().into_inner();
        if cancelled.is_err() && phase(&then) != Phase::Ready {
            wait_for(&world, &made.name, Phase::Suspended).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn turning_round_is_carried_out_in_order_and_waits_for_nothing() {
    let delay = (Duration::from_millis(300), Duration::from_millis(301));
    let world = World::new(Script { delay, ..Script::default() }).await;
    let mut client = world.sandboxes().await;
    client.create(create("a")).await.unwrap();
    // Resume during Suspending: the suspend is finished first, then it comes back.
    client.suspend(v1::SuspendRequest { target: no_wait("a"), keep: 0 }).await.unwrap();
    let turned = client
        .resume(v1::ResumeRequest { target: no_wait("a"), ..Default::default() })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (phase(&turned), turned.status.as_ref().unwrap().then.as_str()),
        (Phase::Suspending, "resume")
    );
    let back = wait_for(&world, "a", Phase::Ready).await;
    assert_eq!(back.status.unwrap().run, 2);
    // Suspend during Resuming: the start is dropped.
    client.suspend(v1::SuspendRequest { target: target("a"), keep: 0 }).await.unwrap();
    client.resume(v1::ResumeRequest { target: no_wait("a"), ..Default::default() }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let asleep =
        client.suspend(v1::SuspendRequest { target: target("a"), keep: 0 }).await.unwrap().into_inner();
    assert_eq!(phase(&asleep), Phase::Suspended);
    assert!(world.sim.running().is_empty());
    assert!(world.sim.violations().is_empty(), "{:?}", world.sim.violations());
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_works_while_a_start_never_ends() {
    let delay = (Duration::from_millis(5), Duration::from_millis(6));
    let world = World::new(Script { delay, ..Script::default() }).await;
    let mut client = world.sandboxes().await;
    client.create(create("a")).await.unwrap();
    client.suspend(v1::SuspendRequest { target: target("a"), keep: 0 }).await.unwrap();
    let for_ever = (Duration::from_secs(3600), Duration::from_secs(3601));
    world.sim.set_script(Script { delay: for_ever, ..Script::default() });
    client.resume(v1::ResumeRequest { target: no_wait("a"), ..Default::default() }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    world.sim.set_script(Script::default());
    let gone = client
        .delete(v1::DeleteSandboxRequest { target: target("a"), allow_missing: false })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(gone.outcome(), v1::delete_sandbox_response::Outcome::Completed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_start_is_an_error_that_says_how_to_go_on_and_gives_everything_back() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    client.create(create("a")).await.unwrap();
    client.suspend(v1::SuspendRequest { target: target("a"), keep: 0 }).await.unwrap();
    world.sim.fail_next(Verb::Start, DriverError::BaseChanged("/images/x".into()));
    let error =
        client.resume(v1::ResumeRequest { target: target("a"), ..Default::default() }).await.unwrap_err();
    let (reason, next) = error_info(&error);
    assert_eq!((error.code(), reason.as_str()), (Code::FailedPrecondition, "BASE_CHANGED"));
    assert!(next.contains("torpor resume a"), "{next}");
    let failed = wait_for(&world, "a", Phase::Error).await;
    assert_eq!(failed.status.unwrap().failure.unwrap().step, "start");
    for _ in 0..100 {
        if world.info().await.capacity.unwrap().slots_used == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(world.info().await.capacity.unwrap().slots_used, 0, "an Error holds no loan");
    let back = client
        .resume(v1::ResumeRequest { target: target("a"), ..Default::default() })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(back.status.unwrap().failure, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn transient_faults_heal_by_themselves() {
    let world =
        World::new(Script { fail_before: 200, fail_after: 200, unknown: 100, seed: 7, ..Script::default() })
            .await;
    let mut client = world.sandboxes().await;
    for n in 0..5 {
        let name = format!("a{n}");
        client.create(create(&name)).await.unwrap();
        client.suspend(v1::SuspendRequest { target: target(&name), keep: 0 }).await.unwrap();
        client
            .delete(v1::DeleteSandboxRequest { target: target(&name), allow_missing: false })
            .await
            .unwrap();
    }
    assert!(world.sim.violations().is_empty(), "{:?}", world.sim.violations());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_that_is_away_for_seconds_is_waited_for_whoever_asks_for_something_meanwhile() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    for _ in 0..5 {
        world.sim.fail_next(Verb::Start, DriverError::backend("start it", "the backend is being restarted"));
    }
    let request = v1::CreateSandboxRequest { wait: false, ..create("a") };
    let made = client.create(request).await.unwrap().into_inner();
    let (id, begin) = (made.id.parse().unwrap(), std::time::Instant::now());
    while world.sim.calls(Verb::Start) == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    while begin.elapsed() < std::time::Duration::from_millis(400) {
        world.sim.poke(&id);
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let tries = world.sim.calls(Verb::Start);
    assert!(tries <= 3, "{tries} tries: those who ask for something else took the pauses away");
    // The pauses grow to seconds.
    tokio::time::sleep(Duration::from_secs(3)).await;
    wait_for(&world, "a", Phase::Ready).await;
    assert_eq!(world.sim.calls(Verb::Start), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_host_has_nothing_left_the_sandbox_waits_and_goes_on_by_itself() {
    let world = World::with(Script::default(), |c| c.network.range = "10.99.0.0/30".parse().unwrap()).await;
    let mut client = world.sandboxes().await;
    client.create(create("first")).await.unwrap();
    let full = client.create(create("second")).await.unwrap_err();
    assert_eq!((full.code(), error_info(&full).0.as_str()), (Code::ResourceExhausted, "EXHAUSTED"));
    wait_for(&world, "second", Phase::Provisioning).await;
    client.suspend(v1::SuspendRequest { target: target("first"), keep: 0 }).await.unwrap();
    wait_for(&world, "second", Phase::Ready).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_restart_policy_is_kept_and_a_suspend_disarms_it() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let spec = v1::SandboxSpec { restart_policy: v1::RestartPolicy::OnFailure.into(), ..Default::default() };
    let made = client
        .create(v1::CreateSandboxRequest { spec: Some(spec), ..create("a") })
        .await
        .unwrap()
        .into_inner();
    world.sim.end(&id(&made), Exit::Code(3));
    wait_for(&world, "a", Phase::Starting).await;
    let back = wait_for(&world, "a", Phase::Ready).await.status.unwrap();
    assert_eq!((back.run, back.restart_count), (2, 1));
    world.sim.end(&id(&made), Exit::Code(0));
    let done = wait_for(&world, "a", Phase::Completed).await.status.unwrap();
    assert_eq!(done.exit_code, Some(0));
    client.suspend(v1::SuspendRequest { target: target("a"), keep: 0 }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    wait_for(&world, "a", Phase::Suspended).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settled_world_is_left_alone() {
    let mut world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    for name in ["a", "b", "c"] {
        client.create(create(name)).await.unwrap();
    }
    client.suspend(v1::SuspendRequest { target: target("b"), keep: 0 }).await.unwrap();
    client.stop(v1::StopRequest { target: target("c") }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let count = |w: &World| [Verb::Create, Verb::Start, Verb::Stop, Verb::Delete].map(|v| w.sim.calls(v));
    let versions =
        |list: v1::ListSandboxesResponse| list.sandboxes.into_iter().map(|s| s.version).collect::<Vec<_>>();
    let (calls, before) = (
        count(&world),
        versions(client.list(v1::ListSandboxesRequest::default()).await.unwrap().into_inner()),
    );
    world.restart().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut client = world.sandboxes().await;
    assert_eq!(count(&world), calls, "no verb");
    assert_eq!(
        versions(client.list(v1::ListSandboxesRequest::default()).await.unwrap().into_inner()),
        before,
        "no write"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_hold_every_sandbox_once_and_selectors_choose() {
    let world = World::with(Script::default(), |c| {
        (c.limits.cpu_percent, c.limits.memory_bytes) = (100_000, 1 << 50)
    })
    .await;
    let client = world.sandboxes().await;
    let creates = (0..57).map(|n| {
        let mut client = client.clone();
        async move {
            let labels = [("parity".to_owned(), if n % 2 == 0 { "even" } else { "odd" }.to_owned())].into();
            client.create(v1::CreateSandboxRequest { labels, ..create(&format!("s{n}")) }).await.unwrap()
        }
    });
    futures::future::join_all(creates).await;
    let mut client = client;
    for (selector, expected) in
        [("", 57), ("parity=even", 29), ("parity!=even", 28), ("parity", 57), ("!parity", 0)]
    {
        let (mut names, mut page_token) = (std::collections::BTreeSet::new(), String::new());
        loop {
            let request = v1::ListSandboxesRequest {
                page_size: 10,
                page_token,
                label_selector: selector.into(),
                ..Default::default()
            };
            let page = client.list(request).await.unwrap().into_inner();
            assert!(page.sandboxes.len() <= 10);
            for sandbox in page.sandboxes {
                assert!(names.insert(sandbox.name), "twice");
            }
            page_token = page.next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        assert_eq!(names.len(), expected, "{selector}");
    }
    let bad = client
        .list(v1::ListSandboxesRequest { page_token: "x".into(), ..Default::default() })
        .await
        .unwrap_err();
    assert_eq!(bad.code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_goes_on_from_its_cursor_after_a_restart_and_hears_of_deletions() {
    use v1::sandbox_event::Kind;
    let mut world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    client.create(create("a")).await.unwrap();
    client.create(create("b")).await.unwrap();
    let mut watch = client.watch(v1::WatchSandboxesRequest::default()).await.unwrap().into_inner();
    let mut cursor = String::new();
    let mut snapshot = Vec::new();
    while let Some(event) = watch.next().await {
        let event = event.unwrap();
        cursor = event.cursor.clone();
        if event.kind() == Kind::Synced {
            break;
        }
        assert_eq!(event.kind(), Kind::Snapshot);
        snapshot.push(event.sandbox.unwrap().name);
    }
    assert_eq!(snapshot, ["a", "b"]);
    client.suspend(v1::SuspendRequest { target: target("a"), keep: 0 }).await.unwrap();
    let mut phases = Vec::new();
    while let Some(event) = watch.next().await {
        let sandbox = event.unwrap().sandbox.unwrap();
        assert_eq!(sandbox.name, "a");
        if phases.last() != Some(&phase(&sandbox)) {
            phases.push(phase(&sandbox));
        }
        if phase(&sandbox) == Phase::Suspended {
            break;
        }
    }
    assert_eq!(phases, [Phase::Suspending, Phase::Suspended]);
    drop(watch);
    client.delete(v1::DeleteSandboxRequest { target: target("b"), allow_missing: false }).await.unwrap();
    world.restart().await;
    let mut client = world.sandboxes().await;
    let mut watch =
        client.watch(v1::WatchSandboxesRequest { cursor, ..Default::default() }).await.unwrap().into_inner();
    let mut heard = Vec::new();
    while let Some(event) = watch.next().await {
        let event = event.unwrap();
        if event.kind() == Kind::Synced {
            break;
        }
        heard.push((event.kind(), event.sandbox.unwrap().name));
    }
    assert_eq!(heard, [(Kind::Changed, "a".to_owned()), (Kind::Deleted, "b".to_owned())]);
    let bad = client
        .watch(v1::WatchSandboxesRequest { cursor: "c1.999999".into(), ..Default::default() })
        .await
        .unwrap_err();
    assert_eq!((bad.code(), error_info(&bad).0.as_str()), (Code::OutOfRange, "CURSOR_TOO_OLD"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_gateway_is_refused_and_told_who_holds_the_state() {
    let world = World::new(Script::default()).await;
    let again = torpor_gateway::Gateway::start(world.config.clone()).await;
    let error = again.err().expect("the state directory is in use").to_string();
    assert!(
        error.contains(&format!("process {}", std::process::id())) && error.contains("--state-dir"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn compute_lost_while_ready_is_an_error_and_resume_brings_it_back() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let made = client.create(create("a")).await.unwrap().into_inner();
    world.sim.vanish(&id(&made));
    let failed = wait_for(&world, "a", Phase::Error).await.status.unwrap().failure.unwrap();
    assert_eq!(failed.reason, "COMPUTE_LOST");
    client.resume(v1::ResumeRequest { target: target("a"), ..Default::default() }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn reflection_and_health_are_served() {
    let world = World::new(Script::default()).await;
    let channel = common::channel(world.socket()).await;
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
    let request = tonic_health::pb::HealthCheckRequest { service: "torpor.v1.Sandboxes".into() };
    let answer = health.check(request).await.unwrap().into_inner();
    assert_eq!(answer.status, tonic_health::pb::health_check_response::ServingStatus::Serving as i32);
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(world.socket()).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
}
