//! What rests costs nothing, what a restart of the host took comes back a few at a time, and too much at once is refused.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::{World, create, error_info, no_wait, phase};
use futures::StreamExt as _;
use tonic::Code;
use torpor_proto::v1::{self, Phase};
use torpor_sandbox::{
    Exit, SandboxId,
    sim::{Script, Verb},
};

async fn roomy(script: Script) -> World {
    World::with(script, |c| (c.limits.cpu_percent, c.limits.memory_bytes) = (1_000_000, 1 << 50)).await
}

async fn all(world: &World) -> Vec<v1::Sandbox> {
    let (mut client, mut found, mut page_token) = (world.sandboxes().await, Vec::new(), String::new());
    loop {
        let request = v1::ListSandboxesRequest { page_size: 1000, page_token, ..Default::default() };
        let page = client.list(request).await.unwrap().into_inner();
        found.extend(page.sandboxes);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return found;
        }
    }
}

async fn until(world: &World, what: &str, wanted: impl Fn(&v1::Sandbox) -> bool) {
    for _ in 0..1500 {
        if all(world).await.iter().all(&wanted) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let left: Vec<_> =
        all(world).await.into_iter().filter(|s| !wanted(s)).map(|s| (s.name, s.status)).collect();
    panic!("{what}: {left:?}");
}

/// So many, of which every third sleeps, one in ten is stopped and one in ten has ended.
async fn populate(world: &World, count: usize) {
    let client = world.sandboxes().await;
    futures::stream::iter(0..count)
        .for_each_concurrent(64, |n| {
            let mut client = client.clone();
            async move {
                let name = format!("s{n}");
                let command = if n % 10 == 4 { vec!["exit".to_owned(), "0".to_owned()] } else { Vec::new() };
                let spec = Some(v1::SandboxSpec { command, ..Default::default() });
                client.create(v1::CreateSandboxRequest { spec, ..create(&name) }).await.unwrap();
                match n % 10 {
                    0 | 3 | 6 => {
                        drop(client.suspend(v1::SuspendRequest { target: no_wait(&name), keep: 0 }).await)
                    }
                    1 => drop(client.stop(v1::StopRequest { target: no_wait(&name) }).await),
                    _ => {}
                }
            }
        })
        .await;
    until(world, "settled", |s| {
        let n: usize = s.name[1..].parse().unwrap();
        let wanted = match n % 10 {
            0 | 3 | 6 => Phase::Suspended,
            1 => Phase::Stopped,
            4 => Phase::Completed,
            _ => Phase::Ready,
        };
        phase(s) == wanted
    })
    .await;
}

fn verbs(world: &World) -> [u64; 4] {
    [Verb::Create, Verb::Start, Verb::Stop, Verb::Delete].map(|verb| world.sim.calls(verb))
}

/// Changes with every commit of anybody else.
fn commits(db: &rusqlite::Connection) -> i64 {
    db.query_row("PRAGMA data_version", [], |row| row.get(0)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_pass_over_a_settled_world_writes_nothing_and_calls_no_verb() {
    second_pass(400).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "slow: makes 20,000 sandboxes"]
async fn a_second_pass_over_twenty_thousand_settled_sandboxes_writes_nothing_and_calls_no_verb() {
    second_pass(20_000).await;
}

async fn second_pass(count: usize) {
    let mut world = roomy(Script::default()).await;
    populate(&world, count).await;
    // A gateway that starts looks at everything that is not asleep.
    world.restart().await;
    let looked_at = |world: &World| world.sim.calls(Verb::Observe);
    let ids: Vec<SandboxId> = all(&world).await.iter().map(|s| s.id.parse().unwrap()).collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let db = rusqlite::Connection::open(world.config.state_dir.join("torpor.db")).unwrap();
    let (before, written, seen) = (verbs(&world), commits(&db), looked_at(&world));
    // Word about every single one, asleep or not; not too much at once, for hints may be lost.
    for (done, some) in (1..).zip(ids.chunks(200)) {
        some.iter().for_each(|id| world.sim.poke(id));
        let wanted = seen + (200 * done).min(ids.len()) as u64;
        for _ in 0..500 {
            if looked_at(&world) >= wanted {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(looked_at(&world) >= wanted, "not everything was looked at");
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(verbs(&world), before, "a verb was called");
    assert_eq!(commits(&db), written, "something was written");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_starts_looks_at_nothing_that_sleeps() {
    let mut world = roomy(Script::default()).await;
    populate(&world, 100).await;
    let awake = all(&world).await.iter().filter(|s| phase(s) == Phase::Ready).count() as u64;
    world.stop().await;
    let before = world.sim.calls(Verb::Observe);
    world.start().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(world.sim.calls(Verb::Observe) - before, awake);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_of_the_host_what_ran_comes_back_a_few_at_a_time_and_what_slept_sleeps() {
    let mut world = roomy(Script::default()).await;
    populate(&world, 200).await;
    let before = all(&world).await;
    let disks: Vec<_> = before.iter().map(|s| world.sim.disk_id(&s.id.parse().unwrap())).collect();
    world.stop().await;
    common::pretend_host_restart(&world.config.state_dir);
    world.sim.running().iter().for_each(|id| world.sim.vanish(id));
    let delay = (Duration::from_millis(5), Duration::from_millis(15));
    world.sim.set_script(Script { delay, ..Script::default() });
    world.start().await;
    let was = |name: &str| before.iter().find(|s| s.name == name).map(phase).unwrap();
    until(&world, "as before", |s| phase(s) == was(&s.name)).await;
    let after = all(&world).await;
    for (now, then) in after.iter().zip(&before) {
        let more = u64::from(phase(then) == Phase::Ready);
        let run = |s: &v1::Sandbox| s.status.as_ref().unwrap().run;
        assert_eq!(run(now), run(then) + more, "{}", now.name);
    }
    let disks_after: Vec<_> = after.iter().map(|s| world.sim.disk_id(&s.id.parse().unwrap())).collect();
    assert_eq!(disks, disks_after);
    let cpus = std::thread::available_parallelism().unwrap().get() as u64;
    assert!(
        world.sim.most_at_once(Verb::Start) <= 4 * cpus,
        "{} at once",
        world.sim.most_at_once(Verb::Start)
    );
    assert!(world.sim.violations().is_empty(), "{:?}", world.sim.violations());
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_by_policy_come_slower_and_slower_until_a_run_lasts() {
    let mut world = World::new(Script::default()).await;
    let spec = v1::SandboxSpec { restart_policy: v1::RestartPolicy::Always.into(), ..Default::default() };
    let request = v1::CreateSandboxRequest { spec: Some(spec), ..create("a") };
    let made = world.sandboxes().await.create(request).await.unwrap().into_inner();
    let id: SandboxId = made.id.parse().unwrap();
    let ready = async |world: &World, run| {
        until(world, "it runs", |s| phase(s) == Phase::Ready && s.status.as_ref().unwrap().run == run).await;
    };
    let pause = |world: &World, run| {
        // Between the end of the run before and this one's start, as the history has it.
        let db = rusqlite::Connection::open(world.config.state_dir.join("torpor.db")).unwrap();
        let time = |to: &str| {
            let sql = "SELECT at_ms FROM history WHERE sandbox_id = ?1 AND run = ?2 AND to_phase = ?3";
            db.query_row(sql, (id.as_str(), run, to), |row| row.get::<_, i64>(0)).unwrap()
        };
        time("Ready") - time("Starting")
    };
    world.sim.end(&id, Exit::Code(0));
    ready(&world, 2).await;
    world.sim.end(&id, Exit::Code(0));
    ready(&world, 3).await;
    assert!(pause(&world, 2) >= 900 && pause(&world, 3) >= 1900, "{} {}", pause(&world, 2), pause(&world, 3));
    // It has been Ready for long.
    world.stop().await;
    let db = rusqlite::Connection::open(world.config.state_dir.join("torpor.db")).unwrap();
    assert_eq!(db.execute("UPDATE sandboxes SET since_ms = since_ms - 600000", []).unwrap(), 1);
    world.start().await;
    world.sim.end(&id, Exit::Code(0));
    ready(&world, 4).await;
    let after = &all(&world).await[0];
    assert_eq!(after.status.as_ref().unwrap().restart_count, 3, "all are counted");
    assert!(pause(&world, 4) < 3900, "{}", pause(&world, 4));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_answers_no_more_is_told_and_its_sandbox_can_be_put_to_sleep() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let id = client.create(create("a")).await.unwrap().into_inner().id.parse().unwrap();
    world.sim.lose_agent(&id);
    until(&world, "told", |s| {
        let conditions = &s.status.as_ref().unwrap().conditions;
        conditions.iter().any(|c| c.status && c.reason == "AGENT_UNREACHABLE")
    })
    .await;
    assert_eq!(phase(&all(&world).await[0]), Phase::Ready, "what runs is not given up");
    let target = || Some(v1::Target { wait: true, ..no_wait("a").unwrap() });
    client.suspend(v1::SuspendRequest { target: target(), keep: 0 }).await.unwrap();
    assert!(world.sim.running().is_empty());
    let awake = client.resume(v1::ResumeRequest { target: target(), ..Default::default() }).await.unwrap();
    let conditions = awake.into_inner().status.unwrap().conditions;
    assert!(conditions.iter().all(|c| c.reason != "AGENT_UNREACHABLE"), "{conditions:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_requests_at_once_are_refused_with_a_hint_when_to_come_again() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    client.create(create("a")).await.unwrap();
    // Somebody else holds the database: nothing can be written.
    let db = rusqlite::Connection::open(world.config.state_dir.join("torpor.db")).unwrap();
    db.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut asked = tokio::task::JoinSet::new();
    for _ in 0..32 {
        let client = world.sandboxes().await;
        for _ in 0..150 {
            let mut client = client.clone();
            asked.spawn(async move { client.stop(v1::StopRequest { target: no_wait("a") }).await });
        }
    }
    // Nothing can be written, so the first answer is a refusal.
    let refused = asked.join_next().await.expect("some are refused").unwrap().unwrap_err();
    assert_eq!((refused.code(), error_info(&refused).0.as_str()), (Code::ResourceExhausted, "OVERLOADED"));
    use tonic_types::StatusExt as _;
    let hint = refused.get_details_retry_info().and_then(|info| info.retry_delay);
    assert!(hint.is_some_and(|delay| !delay.is_zero()), "{refused:?}");
    // Reads go on meanwhile.
    client.get(v1::GetSandboxRequest { sandbox: "a".into() }).await.unwrap();
    db.execute_batch("COMMIT").unwrap();
    while let Some(done) = asked.join_next().await {
        if let Err(status) = done.unwrap() {
            assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
        }
    }
    until(&world, "stopped", |s| phase(s) == Phase::Stopped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn compute_that_no_record_knows_is_ended_after_a_while_and_its_disk_stays() {
    let mut world = World::with(Script::default(), |c| c.orphan_grace_seconds = 1).await;
    let mut client = world.sandboxes().await;
    for name in ["lost", "kept"] {
        client.create(create(name)).await.unwrap();
    }
    let ids: Vec<SandboxId> = all(&world).await.iter().map(|s| s.id.parse().unwrap()).collect();
    world.stop().await;
    let db = rusqlite::Connection::open(world.config.state_dir.join("torpor.db")).unwrap();
    db.execute_batch("DELETE FROM leases WHERE sandbox_id = (SELECT id FROM sandboxes WHERE name = 'lost')")
        .unwrap();
    db.execute_batch("DELETE FROM sandboxes WHERE name = 'lost'").unwrap();
    drop(db);
    world.start().await;
    let disk = world.sim.disk_id(&ids[0]);
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(world.sim.running().len(), 2, "not before the time is up");
    for _ in 0..500 {
        if world.sim.running().len() == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(world.sim.running(), [ids[1].clone()]);
    assert_eq!(world.sim.disk_id(&ids[0]), disk);
}
