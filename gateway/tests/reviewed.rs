//! Faults that a review found, each pinned.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{collections::BTreeSet, time::Duration};

use common::{World, create, error_info, no_wait, phase, target};
use futures::StreamExt as _;
use tonic::Code;
use torpor_proto::v1::{self, Phase, sandbox_event::Kind};
use torpor_sandbox::sim::Script;

fn suspend(name: &str) -> v1::SuspendRequest {
    v1::SuspendRequest { target: target(name), keep: 0 }
}

fn resume(name: &str) -> v1::ResumeRequest {
    v1::ResumeRequest { target: target(name), ..Default::default() }
}

async fn until(world: &World, name: &str, wanted: Phase) {
    let mut client = world.sandboxes().await;
    for _ in 0..500 {
        let now = client.get(v1::GetSandboxRequest { sandbox: name.into() }).await.unwrap().into_inner();
        if phase(&now) == wanted {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{name} never came to {wanted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_round_that_a_killed_gateway_had_only_written_is_carried_out_by_the_next() {
    let mut world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    client.create(create("a")).await.unwrap();
    client.suspend(suspend("a")).await.unwrap();
    world.stop().await;
    let db = rusqlite::Connection::open(world.config.state_dir.join("torpor.db")).unwrap();
    let changed =
        db.execute(r#"UPDATE sandboxes SET state = json_set(state, '$.then', 'Resume')"#, []).unwrap();
    assert_eq!(changed, 1);
    drop(db);
    world.start().await;
    until(&world, "a", Phase::Ready).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_id_is_good_for_one_request_and_its_retry_never_fails() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    client.create(create("a")).await.unwrap();
    client.create(create("b")).await.unwrap();
    let with_id = |name: &str| v1::SuspendRequest {
        target: Some(v1::Target { request_id: "r".into(), ..target(name).unwrap() }),
        keep: 0,
    };
    client.suspend(with_id("a")).await.unwrap();
    let reused = client.suspend(with_id("b")).await.unwrap_err();
    assert_eq!(error_info(&reused).0, "REQUEST_ID_REUSED");
    client.resume(resume("a")).await.unwrap();
    let retried = client.suspend(with_id("a")).await.unwrap().into_inner();
    assert_eq!(phase(&retried), Phase::Ready, "it was done once, and is not done again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_waits_for_resources_can_be_suspended() {
    let world = World::with(Script::default(), |c| c.network.range = "10.99.0.0/30".parse().unwrap()).await;
    let mut client = world.sandboxes().await;
    client.create(create("first")).await.unwrap();
    client.create(create("second")).await.unwrap_err();
    let asleep = client.suspend(suspend("second")).await.unwrap().into_inner();
    assert_eq!(phase(&asleep), Phase::Suspended);
    client.suspend(suspend("first")).await.unwrap();
    client.resume(resume("second")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn more_than_can_ever_be_lent_is_refused_at_once() {
    let world = World::with(Script::default(), |c| c.limits.memory_bytes = 1 << 30).await;
    let mut client = world.sandboxes().await;
    let resources = v1::Resources { memory_bytes: Some(2 << 30), ..Default::default() };
    let spec = v1::SandboxSpec { resources: Some(resources), ..Default::default() };
    let error =
        client.create(v1::CreateSandboxRequest { spec: Some(spec), ..create("a") }).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(
        error.message().contains("resources.memory_bytes") && error.message().contains("limits.memory_bytes")
    );
    assert_eq!(world.info().await.capacity.unwrap().sandboxes, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_ends_a_create_that_hangs() {
    let for_ever = (Duration::from_secs(3600), Duration::from_secs(3601));
    let world = World::new(Script { delay: for_ever, ..Script::default() }).await;
    let mut client = world.sandboxes().await;
    client.create(v1::CreateSandboxRequest { wait: false, ..create("a") }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    world.sim.set_script(Script::default());
    let delete = v1::DeleteSandboxRequest { target: target("a"), allow_missing: false };
    let gone = tokio::time::timeout(Duration::from_secs(30), client.delete(delete)).await;
    assert!(gone.expect("the delete waits for the create").is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn large_environments_make_short_pages_and_break_no_list() {
    let world = World::with(Script::default(), |c| {
        (c.limits.cpu_percent, c.limits.memory_bytes) = (100_000, 1 << 50);
    })
    .await;
    let mut client = world.sandboxes().await;
    for n in 0..20 {
        let large = |name: &str| (name.to_owned(), "x".repeat(125 << 10));
        let environment = [large("ONE"), large("OTHER")].into();
        let spec = v1::SandboxSpec { environment, ..Default::default() };
        client
            .create(v1::CreateSandboxRequest { spec: Some(spec), ..create(&format!("s{n}")) })
            .await
            .unwrap();
    }
    let (mut names, mut page_token) = (BTreeSet::new(), String::new());
    loop {
        let page = client
            .list(v1::ListSandboxesRequest { page_token, ..Default::default() })
            .await
            .unwrap()
            .into_inner();
        names.extend(page.sandboxes.into_iter().map(|s| s.name));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(names.len(), 20);
    let beyond = v1::ListSandboxesRequest { page_token: format!("p1.{}", u64::MAX), ..Default::default() };
    assert_eq!(client.list(beyond).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_breaks_while_it_catches_up_skips_nothing() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    for name in ["a", "b", "c"] {
        client.create(create(name)).await.unwrap();
    }
    let mut watch = client.watch(v1::WatchSandboxesRequest::default()).await.unwrap().into_inner();
    let first = watch.next().await.unwrap().unwrap();
    drop(watch);
    let mut watch = client
        .watch(v1::WatchSandboxesRequest { cursor: first.cursor, ..Default::default() })
        .await
        .unwrap()
        .into_inner();
    let mut seen = BTreeSet::new();
    while let Some(event) = watch.next().await {
        let event = event.unwrap();
        if event.kind() == Kind::Synced {
            break;
        }
        seen.insert(event.sandbox.unwrap().name);
    }
    assert_eq!(seen.len(), 3, "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_ends_tells_its_watchers() {
    let mut world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let mut watch = client.watch(v1::WatchSandboxesRequest::default()).await.unwrap().into_inner();
    assert_eq!(watch.next().await.unwrap().unwrap().kind(), Kind::Synced);
    world.stop().await;
    let end = watch.next().await.expect("a last word").unwrap_err();
    assert_eq!((end.code(), error_info(&end).0.as_str()), (Code::Unavailable, "SHUTTING_DOWN"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_no_socket_is_not_taken_for_a_leftover() {
    let mut world = World::new(Script::default()).await;
    world.stop().await;
    let file = world.dir.path().join("precious");
    std::fs::write(&file, "data").unwrap();
    let config =
        torpor_gateway::Config { listen: format!("unix://{}", file.display()), ..world.config.clone() };
    assert!(torpor_gateway::Gateway::start(config).await.is_err());
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "data");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_else_may_look_into_the_state() {
    let world = World::new(Script::default()).await;
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(&world.config.state_dir).unwrap().permissions(),
    );
    assert_eq!(mode & 0o777, 0o700);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_verb_that_waits_is_answered_even_when_a_turn_round_follows_at_once() {
    let delay = (Duration::from_millis(50), Duration::from_millis(51));
    let world = World::new(Script { delay, ..Script::default() }).await;
    let client = world.sandboxes().await;
    client.clone().create(create("a")).await.unwrap();
    for _ in 0..10 {
        let (mut one, mut other) = (client.clone(), client.clone());
        let asleep = tokio::spawn(async move { one.suspend(suspend("a")).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        let back = other.resume(v1::ResumeRequest { target: no_wait("a"), ..Default::default() }).await;
        back.unwrap();
        let asleep = asleep.await.unwrap();
        assert!(asleep.is_ok(), "{asleep:?}");
        until(&world, "a", Phase::Ready).await;
    }
}
