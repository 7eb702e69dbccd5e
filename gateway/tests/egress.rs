//! Where sandboxes may send to: checked, written, told to the driver, and told again.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::{World, create, error_info, phase, target};
use tonic::Code;
use torpor_proto::v1::{self, Phase, egress::Policy};
use torpor_sandbox::{Egress, SandboxId, sim::Script};

fn allow(rules: &[&str]) -> v1::Egress {
    let allow = rules.iter().map(ToString::to_string).collect();
    v1::Egress { policy: Policy::Allow.into(), allow, allow_names: true }
}

fn policy(policy: Policy) -> v1::Egress {
    v1::Egress { policy: policy.into(), ..Default::default() }
}

fn with(name: &str, egress: v1::Egress) -> v1::CreateSandboxRequest {
    let spec = Some(v1::SandboxSpec { egress: Some(egress), ..Default::default() });
    v1::CreateSandboxRequest { spec, ..create(name) }
}

fn id(sandbox: &v1::Sandbox) -> SandboxId {
    sandbox.id.parse().unwrap()
}

/// Its own policy, and the one in force.
fn shown(sandbox: &v1::Sandbox) -> (Option<v1::Egress>, v1::Egress) {
    let own = sandbox.spec.as_ref().unwrap().egress.clone();
    (own, sandbox.status.as_ref().unwrap().egress.clone().unwrap())
}

async fn get(world: &World, name: &str) -> v1::Sandbox {
    world.sandboxes().await.get(v1::GetSandboxRequest { sandbox: name.into() }).await.unwrap().into_inner()
}

async fn set(world: &World, name: &str, egress: Option<v1::Egress>) -> Result<v1::Sandbox, tonic::Status> {
    let request = v1::SetEgressRequest { target: target(name), egress };
    world.sandboxes().await.set_egress(request).await.map(tonic::Response::into_inner)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_rule_is_named_before_anything_is_written() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let many: Vec<String> = (0..300).map(|n| format!("192.0.2.7:{}", n + 1)).collect();
    let many = v1::Egress { allow: many, ..allow(&[]) };
    let wrong = v1::Egress { allow: vec!["192.0.2.7".into()], ..policy(Policy::Open) };
    let unknown = v1::Egress { policy: 77, ..Default::default() };
    let cases = [
        (allow(&["192.0.2.0/24", "192.0.2.7:http"]), "\"192.0.2.7:http\""),
        (allow(&["192.0.2.1/24"]), "did you mean 192.0.2.0/24"),
        (allow(&["::1"]), "\"::1\""),
        (many, "300"),
        (wrong, "egress.allow"),
        (unknown, "77"),
    ];
    let kept = client.create(create("kept")).await.unwrap().into_inner();
    for (egress, words) in cases {
        let error = client.create(with("web", egress.clone())).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains(words), "{error}");
        let error = set(&world, "kept", Some(egress)).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains(words), "{error}");
    }
    let all = client.list(v1::ListSandboxesRequest::default()).await.unwrap().into_inner().sandboxes;
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].version, kept.version);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_lasts_over_suspend_and_restart_and_a_new_one_is_in_force_when_it_is_answered() {
    let mut world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let made =
        client.create(with("web", allow(&["192.0.2.7:443", "10.0.0.0/8"]))).await.unwrap().into_inner();
    let usual = allow(&["192.0.2.7/32:443/tcp", "10.0.0.0/8"]);
    assert_eq!(shown(&made), (Some(usual.clone()), usual.clone()));
    let told = |rules: &[&str]| {
        Some(Egress::Allow { rules: rules.iter().map(ToString::to_string).collect(), names: true })
    };
    assert_eq!(world.sim.egress(&id(&made)), told(&["192.0.2.7/32:443/tcp", "10.0.0.0/8"]));
    client.suspend(v1::SuspendRequest { target: target("web"), keep: 0 }).await.unwrap();
    world.restart().await;
    assert_eq!(shown(&get(&world, "web").await).1, usual);

    // Of one that sleeps.
    let asleep = set(&world, "web", Some(policy(Policy::None))).await.unwrap();
    assert_eq!((phase(&asleep), shown(&asleep).1.policy()), (Phase::Suspended, Policy::None));
    assert_eq!(world.sim.egress(&id(&made)), Some(Egress::None), "noted with its disk, for a lost database");
    let mut client = world.sandboxes().await;
    client.resume(v1::ResumeRequest { target: target("web"), ..Default::default() }).await.unwrap();
    assert_eq!(world.sim.egress(&id(&made)), Some(Egress::None));

    // Of one that runs: at once.
    let open = set(&world, "web", Some(policy(Policy::Open))).await.unwrap();
    assert_eq!(world.sim.egress(&id(&made)), Some(Egress::Open));
    assert!(open.version > asleep.version);
    let again = set(&world, "web", Some(policy(Policy::Open))).await.unwrap();
    assert_eq!(again.version, open.version, "nothing has changed");
    let back = set(&world, "web", None).await.unwrap();
    assert_eq!(shown(&back), (None, policy(Policy::Public)));
    assert_eq!(world.sim.egress(&id(&made)), None);

    let stale = v1::Target { expected_version: open.version, ..target("web").unwrap() };
    let request = v1::SetEgressRequest { target: Some(stale), egress: Some(policy(Policy::None)) };
    let error = client.set_egress(request).await.unwrap_err();
    assert_eq!((error.code(), error_info(&error).0.as_str()), (Code::Aborted, "STALE_VERSION"));
    assert_eq!(set(&world, "nobody", None).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_gateway_had_written_and_not_told_is_told_by_the_next_one() {
    let mut world = World::new(Script::default()).await;
    let made = world.sandboxes().await.create(create("web")).await.unwrap().into_inner();
    world.stop().await;
    let db = rusqlite::Connection::open(world.config.state_dir.join("torpor.db")).unwrap();
    let changed = db
        .execute("UPDATE sandboxes SET spec = json_set(spec, '$.egress', 'none') WHERE name = 'web'", [])
        .unwrap();
    assert_eq!(changed, 1);
    drop(db);
    assert_eq!(world.sim.egress(&id(&made)), None);
    world.start().await;
    for _ in 0..500 {
        if world.sim.egress(&id(&made)) == Some(Egress::None) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(world.sim.egress(&id(&made)), Some(Egress::None));
    assert_eq!(get(&world, "web").await.status.unwrap().run, 1, "and nothing was started again");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_gateways_default_holds_for_all_that_have_no_policy_of_their_own() {
    let mut world = World::with(Script::default(), |config| {
        config.network.egress =
            toml::from_str::<torpor_gateway::Config>("[network]\negress = 'none'").unwrap().network.egress;
    })
    .await;
    let mut client = world.sandboxes().await;
    client.create(create("plain")).await.unwrap();
    client.create(with("own", policy(Policy::Open))).await.unwrap();
    assert_eq!(shown(&get(&world, "plain").await), (None, policy(Policy::None)));
    world.stop().await;
    world.config.network.egress = Default::default();
    world.start().await;
    assert_eq!(shown(&get(&world, "plain").await), (None, policy(Policy::Public)));
    assert_eq!(shown(&get(&world, "own").await).1, policy(Policy::Open));
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_silences_its_agent_is_cut_off_all_the_same() {
    let mut world = World::new(Script::default()).await;
    let made = world.sandboxes().await.create(with("web", policy(Policy::Open))).await.unwrap().into_inner();
    world.sim.lose_agent(&id(&made));
    // A gateway that was killed between its record and its driver.
    world.stop().await;
    let db = rusqlite::Connection::open(world.config.state_dir.join("torpor.db")).unwrap();
    db.execute("UPDATE sandboxes SET spec = json_set(spec, '$.egress', 'none') WHERE name = 'web'", [])
        .unwrap();
    drop(db);
    world.start().await;
    until("it is cut off", || world.sim.egress(&id(&made)) == Some(Egress::None)).await;
    let shown = get(&world, "web").await;
    assert_eq!(phase(&shown), Phase::Ready);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_is_in_force_when_it_is_answered_in_every_phase_and_no_older_look_puts_another_back() {
    let slow =
        Script { delay: (Duration::from_millis(150), Duration::from_millis(200)), ..Script::default() };
    let world = World::new(slow).await;
    let mut client = world.sandboxes().await;
    let made = client.create(create("web")).await.unwrap().into_inner();
    let id = id(&made);
    let policies = [(Policy::None, Egress::None), (Policy::Open, Egress::Open)];
    for (n, (wire, own)) in policies.iter().cycle().take(24).enumerate() {
        let target = common::no_wait("web");
        match n % 4 {
            0 => drop(client.suspend(v1::SuspendRequest { target, keep: 0 }).await.unwrap()),
            2 => drop(client.resume(v1::ResumeRequest { target, ..Default::default() }).await.unwrap()),
            _ => tokio::time::sleep(Duration::from_millis(60)).await,
        }
        set(&world, "web", Some(policy(*wire))).await.unwrap();
        for _ in 0..10 {
            assert_eq!(world.sim.egress(&id).as_ref(), Some(own), "{n}");
            world.sim.poke(&id);
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    }
    assert!(world.sim.violations().is_empty(), "{:?}", world.sim.violations());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_update_that_is_finished_later_widens_nothing() {
    let mut world = World::with(Script::default(), |config| config.enable_sandbox_updates = true).await;
    let mut client = world.sandboxes().await;
    let made = client.create(create("web")).await.unwrap().into_inner();
    let stopped = client.stop(v1::StopRequest { target: target("web") }).await.unwrap().into_inner();
    world.sim.fail_next(
        torpor_sandbox::sim::Verb::Update,
        torpor_sandbox::DriverError::backend("update", "it broke"),
    );
    let update = v1::UpdateSandboxRequest {
        target: Some(v1::Target { expected_version: stopped.version, ..target("web").unwrap() }),
        egress: Some(policy(Policy::Open)),
        ..Default::default()
    };
    assert_eq!(client.update(update).await.unwrap_err().code(), Code::Internal);
    set(&world, "web", Some(policy(Policy::None))).await.unwrap();

    // Also by a gateway that begins no updates any more: what was begun bars the start.
    world.stop().await;
    world.config.enable_sandbox_updates = false;
    world.start().await;
    let mut client = world.sandboxes().await;
    let start = v1::StartRequest { target: target("web") };
    assert_eq!(client.start(start.clone()).await.unwrap_err().code(), Code::FailedPrecondition);
    let finish = v1::ResumePendingUpdateRequest { target: target("web"), abandon: false };
    let done = client.resume_pending_update(finish).await.unwrap().into_inner();
    assert_eq!(shown(&done).1, policy(Policy::None));
    client.start(start).await.unwrap();
    assert_eq!(world.sim.egress(&id(&made)), Some(Egress::None));
}
