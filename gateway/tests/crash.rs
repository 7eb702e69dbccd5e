//! The gateway is killed at every failpoint in turn, over a pretended world that outlives it, and started again: it comes to
//! rest in the phase that the last acknowledged request wants, on the same disk, with one compute at most, nothing leaked
//! and a history without a gap. The failpoints are listed from the source, so that a new one can't be forgotten.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::Path,
    time::{Duration, Instant},
};

use common::{no_wait, phase, process::Process};
use tonic::{Code, transport::Channel};
use torpor_gateway::{Config, simworld};
use torpor_proto::v1::{
    self, Phase, egress::Policy, gateway_client::GatewayClient, sandboxes_client::SandboxesClient,
};
use torpor_sandbox::Egress;

const PATIENCE: Duration = Duration::from_secs(30);

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
        drivers: vec!["sim".into()],
        enable_sandbox_updates: true,
        ..Config::default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Create(&'static [&'static str]),
    Suspend,
    SuspendMemory,
    Resume,
    Stop,
    Start,
    Update,
    /// Where it may send to.
    Egress(Policy),
    Delete,
}

/// Every verb from every phase that it changes, each with its sandbox. `a` goes the whole way, `b` fails.
const STORY: &[(&str, Act)] = &[
    ("a", Act::Create(&[])),
    ("a", Act::Egress(Policy::None)),
    ("a", Act::Suspend),
    ("a", Act::Egress(Policy::Open)),
    ("a", Act::Resume),
    ("a", Act::SuspendMemory),
    ("a", Act::Resume),
    ("b", Act::Create(&["panic"])),
    ("b", Act::Suspend),
    ("b", Act::Delete),
    ("a", Act::Stop),
    ("a", Act::Update),
    ("a", Act::Start),
    ("a", Act::Suspend),
    ("a", Act::Start),
    ("a", Act::Delete),
];

fn wish(act: Act) -> Option<Phase> {
    match act {
        // A main command that panics comes to Error by itself.
        Act::Create([_, ..]) => Some(Phase::Error),
        Act::Create([]) | Act::Resume | Act::Start | Act::Egress(Policy::None) => Some(Phase::Ready),
        Act::Suspend | Act::SuspendMemory | Act::Egress(_) => Some(Phase::Suspended),
        Act::Stop | Act::Update => Some(Phase::Stopped),
        Act::Delete => None,
    }
}

/// What the client knows.
#[derive(Default)]
struct Known {
    /// What was acknowledged last, by name; none: it is to be gone.
    wishes: BTreeMap<&'static str, Option<Phase>>,
    disks: BTreeMap<String, u64>,
    ids: BTreeMap<&'static str, String>,
}

async fn ask(channel: &Channel, at: usize, name: &str, act: Act) -> Result<Option<String>, tonic::Status> {
    let mut client = SandboxesClient::new(channel.clone());
    let request_id = format!("step {at}");
    let target = no_wait(name).map(|t| v1::Target { request_id: request_id.clone(), ..t });
    let sandbox = match act {
        Act::Create(command) => {
            let command = command.iter().map(|&word| word.to_owned()).collect();
            let spec = Some(v1::SandboxSpec { command, ..Default::default() });
            client
                .create(v1::CreateSandboxRequest {
                    name: name.into(),
                    spec,
                    request_id,
                    ..Default::default()
                })
                .await
        }
        Act::Suspend => client.suspend(v1::SuspendRequest { target, keep: 0 }).await,
        Act::SuspendMemory => {
            client.suspend(v1::SuspendRequest { target, keep: v1::Keep::Memory.into() }).await
        }
        Act::Resume => client.resume(v1::ResumeRequest { target, restart_if_restore_fails: true }).await,
        Act::Stop => client.stop(v1::StopRequest { target }).await,
        Act::Start => client.start(v1::StartRequest { target }).await,
        Act::Update => update(&mut client, target.unwrap()).await,
        Act::Egress(policy) => {
            let egress = Some(v1::Egress { policy: policy.into(), ..Default::default() });
            client.set_egress(v1::SetEgressRequest { target, egress }).await
        }
        Act::Delete => {
            client.delete(v1::DeleteSandboxRequest { target, allow_missing: true }).await?;
            return Ok(None);
        }
    };
    sandbox.map(|sandbox| Some(sandbox.into_inner().id))
}

/// Every part of an update; one that was cut short is resumed.
async fn update(
    client: &mut SandboxesClient<Channel>,
    target: v1::Target,
) -> Result<tonic::Response<v1::Sandbox>, tonic::Status> {
    let get = v1::GetSandboxRequest { sandbox: target.sandbox.clone() };
    let expected_version = client.get(get).await?.into_inner().version;
    let words = |key: &str| Some(v1::StringMap { values: [(key.to_owned(), "new".to_owned())].into() });
    let disk_bytes = Some(20 << 30);
    let request = v1::UpdateSandboxRequest {
        target: Some(v1::Target { expected_version, ..target.clone() }),
        environment: words("UPDATED"),
        labels: words("updated"),
        resources: Some(v1::Resources { disk_bytes, ..Default::default() }),
        ..Default::default()
    };
    let done = match client.update(request).await {
        Err(status) if status.message().contains("an update is pending") => {
            let start = v1::StartRequest { target: no_wait(&target.sandbox) };
            assert_eq!(client.start(start).await.unwrap_err().code(), Code::FailedPrecondition);
            let target = Some(target);
            client.resume_pending_update(v1::ResumePendingUpdateRequest { target, abandon: false }).await?
        }
        other => other?,
    };
    let spec = done.get_ref().spec.clone().unwrap();
    assert_eq!(spec.environment.get("UPDATED").map(String::as_str), Some("new"));
    assert_eq!((done.get_ref().labels.len(), spec.resources.unwrap().disk_bytes), (1, disk_bytes));
    assert!(!is_pending(done.get_ref()));
    Ok(done)
}

fn is_pending(sandbox: &v1::Sandbox) -> bool {
    sandbox.status.as_ref().is_some_and(|s| s.conditions.iter().any(|c| c.r#type == "UpdatePending"))
}

/// The phase at rest; none: it is gone. `Err`: the gateway has ended.
async fn rest(channel: &Channel, name: &str) -> Result<Option<Phase>, ()> {
    let mut client = SandboxesClient::new(channel.clone());
    let end = Instant::now() + PATIENCE;
    let mut last = None;
    while Instant::now() < end {
        match client.get(v1::GetSandboxRequest { sandbox: name.into() }).await {
            Ok(found) => {
                let found = found.into_inner();
                let moving = found.status.as_ref().is_none_or(|s| !s.then.is_empty());
                let now = phase(&found);
                use Phase::*;
                if !moving && matches!(now, Ready | Suspended | Stopped | Completed | Error) {
                    return Ok(Some(now));
                }
                last = Some(now);
            }
            Err(status) if status.code() == Code::NotFound => return Ok(None),
            Err(_) => return Err(()),
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    panic!("{name} never came to rest: {last:?}");
}

/// Waits for the phase that an acknowledged request wants; `Err`: the gateway has ended.
async fn until(channel: &Channel, name: &str, wanted: Option<Phase>, what: &str) -> Result<(), ()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let now = rest(channel, name).await?;
        // A main command that ends is at rest in Ready for a moment.
        if now == wanted {
            return Ok(());
        }
        assert!(Instant::now() < end, "{what}: {name} rests in {now:?}, wanted {wanted:?}");
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

impl Known {
    /// Steps from `at` on, until the gateway ends or the story does. Where to go on.
    async fn go_on(&mut self, channel: &Channel, mut at: usize, what: &str) -> Result<(), usize> {
        while let Some(&(name, act)) = STORY.get(at) {
            match ask(channel, at, name, act).await {
                Ok(id) => {
                    self.wishes.insert(name, wish(act));
                    if let Some(id) = id {
                        let known = self.ids.entry(name).or_insert_with(|| id.clone());
                        assert_eq!(*known, id, "{what}: a request made a second sandbox");
                    }
                }
                Err(status) => {
                    let down = matches!(
                        status.code(),
                        Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Internal
                    );
                    assert!(down, "{what}: {act:?} of {name}: {status:?}");
                    return Err(at);
                }
            }
            until(channel, name, wish(act), what).await.map_err(|()| at)?;
            if wish(act) == Some(Phase::Error) {
                // What is left is given back before somebody asks for something.
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            at += 1;
        }
        Ok(())
    }
}

/// What the gateway says of its sandboxes, what is lent, and what there is.
type Seen = (Vec<v1::Sandbox>, usize, World);

async fn see(host: &Process, channel: &Channel) -> Seen {
    let request = v1::ListSandboxesRequest { page_size: 1000, ..Default::default() };
    let list = SandboxesClient::new(channel.clone()).list(request).await.unwrap().into_inner().sandboxes;
    let info = GatewayClient::new(channel.clone()).info(v1::InfoRequest {}).await.unwrap().into_inner();
    (list, info.capacity.unwrap().slots_used as usize, World::read(&host.state()))
}

/// All is at rest: nothing changes any more, and what is left of a failed run was given back, which follows an Error at once.
async fn at_rest(host: &Process, channel: &Channel) -> Seen {
    let end = Instant::now() + PATIENCE;
    let mut before = Vec::new();
    loop {
        let seen = see(host, channel).await;
        use Phase::*;
        let settled = |s: &v1::Sandbox| {
            matches!(phase(s), Ready | Suspended | Stopped | Completed | Error)
                && s.status.as_ref().is_some_and(|s| s.then.is_empty())
        };
        let ready = seen.0.iter().filter(|s| phase(s) == Ready).count();
        let versions: Vec<_> = seen.0.iter().map(|s| (s.id.clone(), s.version)).collect();
        let still = seen.0.iter().all(settled) && seen.1 == ready && seen.2.running.len() == ready;
        if (still && before == versions) || Instant::now() > end {
            return seen;
        }
        before = versions;
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
}

/// Everything that must hold of a gateway at rest, whatever happened before.
async fn look_over(host: &Process, channel: &Channel, known: &mut Known, what: &str) {
    let (list, lent, world) = at_rest(host, channel).await;
    let mut client = SandboxesClient::new(channel.clone());
    assert_eq!(world.violations, Vec::<String>::new(), "{what}");
    let ready: BTreeSet<String> =
        list.iter().filter(|s| phase(s) == Phase::Ready).map(|s| s.id.clone()).collect();
    assert_eq!(world.running, ready, "{what}: what runs is what is Ready");
    let all: BTreeSet<String> = list.iter().map(|s| s.id.clone()).collect();
    assert_eq!(
        world.disks.keys().cloned().collect::<BTreeSet<_>>(),
        all,
        "{what}: a disk for each sandbox, no other"
    );
    for (id, disk) in &world.disks {
        let first = known.disks.entry(id.clone()).or_insert(*disk);
        assert_eq!(first, disk, "{what}: another disk");
    }
    assert_eq!(lent, ready.len(), "{what}: a loan for each that runs");
    for sandbox in &list {
        let (theirs, ours) = (&world.environments[&sandbox.id], &sandbox.spec.as_ref().unwrap().environment);
        assert!(is_pending(sandbox) || theirs == ours, "{what}: the driver goes by {theirs:?}, not {ours:?}");
        let policy = sandbox.spec.as_ref().unwrap().egress.as_ref().map(v1::Egress::policy);
        assert_eq!(world.policies[&sandbox.id], policy, "{what}: where {} may send to", sandbox.name);
        let request =
            v1::HistoryRequest { sandbox: sandbox.id.clone(), page_size: 1000, ..Default::default() };
        let history = client.history(request).await.unwrap().into_inner().transitions;
        // Of a long history the oldest rows were let go.
        let mut at = history.last().map_or(Phase::Unspecified, |first| first.from());
        assert!(
            at == Phase::Unspecified || history.len() >= 500,
            "{what}: the history of {} begins late",
            sandbox.name
        );
        for step in history.iter().rev() {
            assert_eq!(step.from(), at, "{what}: a gap in the history of {}", sandbox.name);
            at = step.to();
        }
        assert_eq!(at, phase(sandbox), "{what}: the history of {} ends elsewhere", sandbox.name);
    }
}

/// The pretended world, as its file has it.
struct World {
    running: BTreeSet<String>,
    disks: BTreeMap<String, u64>,
    environments: BTreeMap<String, HashMap<String, String>>,
    policies: BTreeMap<String, Option<Policy>>,
    violations: Vec<String>,
}

impl World {
    fn read(state: &Path) -> Self {
        let mut world = Self {
            running: BTreeSet::new(),
            disks: BTreeMap::new(),
            environments: BTreeMap::new(),
            policies: BTreeMap::new(),
            violations: Vec::new(),
        };
        for piece in simworld::pieces(state).unwrap() {
            if let Some((id, spec)) = piece.spec() {
                world.environments.insert(id.to_string(), spec.environment.clone().into_iter().collect());
            }
            if let Some((id, egress)) = piece.egress() {
                let policy = egress.map(|egress| match egress {
                    Egress::None => Policy::None,
                    Egress::Open => Policy::Open,
                    Egress::Public => Policy::Public,
                    Egress::Allow { .. } => Policy::Allow,
                });
                world.policies.insert(id.to_string(), policy);
            }
            match piece.violation() {
                Some(text) => world.violations.push(text.to_owned()),
                None => {
                    let (id, disk, running) = piece.sandbox().unwrap();
                    let id = id.to_string();
                    match disk {
                        Some(disk) => drop(world.disks.insert(id.clone(), disk)),
                        None => drop(world.disks.remove(&id)),
                    }
                    if running {
                        world.running.insert(id);
                    } else {
                        world.running.remove(&id);
                    }
                }
            }
        }
        world
    }
}

/// Tells the story with a gateway that ends at `failpoint`, and goes on with one that doesn't. Whether it was reached.
async fn crash_at(failpoint: &str, nth: u32) -> bool {
    let what = format!("{failpoint}@{nth}");
    let mut host = Process::new(config, PATIENCE);
    let mut known = Known::default();
    if failpoint == "serve.host_restart" {
        before_a_host_restart(&mut host, &mut known).await;
    }
    host.start(Some(&format!("{failpoint}=abort*1@{nth}")));
    let begin = usize::from(failpoint == "serve.host_restart");
    let mut at = match host.connect().await {
        None => Err(begin),
        Some(channel) => known.go_on(&channel, begin, &what).await,
    };
    // Those after the last answer are reached a moment later; a process that ends is not gone at once.
    let end = Instant::now() + if at.is_ok() { Duration::from_millis(300) } else { PATIENCE };
    while !host.is_dead() && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let reached = host.is_dead();
    if at.is_ok() && reached {
        at = Err(STORY.len());
    }
    host.kill();
    host.start(None);
    let channel =
        host.connect().await.unwrap_or_else(|| panic!("{what}: it does not start again\n{}", host.log()));
    if let Err(at) = at {
        // First what was acknowledged, with nobody asking again …
        for (name, wanted) in known.wishes.clone() {
            let asked = STORY.get(at).filter(|(asked, _)| *asked == name).map(|(_, act)| wish(*act));
            let end = Instant::now() + PATIENCE;
            loop {
                let now = rest(&channel, name).await.expect("the second gateway lives");
                // … or what was asked for when it ended, which may or may not have been written.
                if now == wanted || asked == Some(now) {
                    break;
                }
                assert!(
                    Instant::now() < end,
                    "{what}: {name} rests in {now:?}, wanted {wanted:?} or {asked:?}"
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        look_over(&host, &channel, &mut known, &what).await;
        // … then the same request again, and the rest of the story.
        known
            .go_on(&channel, at, &what)
            .await
            .unwrap_or_else(|at| panic!("{what}: step {at} of the second gateway"));
    }
    look_over(&host, &channel, &mut known, &what).await;
    assert!(World::read(&host.state()).disks.is_empty(), "{what}: something is left after the deletes");
    reached
}

/// A Ready sandbox, of a host that has since been started anew.
async fn before_a_host_restart(host: &mut Process, known: &mut Known) {
    host.start(None);
    let channel = host.connect().await.unwrap();
    let id = ask(&channel, 0, "a", STORY[0].1).await.unwrap().unwrap();
    known.ids.insert("a", id);
    known.wishes.insert("a", Some(Phase::Ready));
    until(&channel, "a", Some(Phase::Ready), "before the restart").await.unwrap();
    host.kill();
    common::pretend_host_restart(&host.state());
}

/// Every name in a `hit("…")` of these folders.
fn failpoints() -> BTreeSet<String> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut names = BTreeSet::new();
    let mut folders = vec![top.join("gateway/src"), top.join("sandbox/src"), top.join("drivers")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                for piece in text.split("hit(\"").skip(1) {
                    names.extend(piece.split('"').next().map(str::to_owned));
                }
            }
        }
    }
    names
}

/// Those that a gateway over the sim driver can reach; tests/tests/crash.rs has the vm driver's, containers.rs the engines', kubernetes.rs the cluster's.
fn of_sim() -> Vec<String> {
    let elsewhere = ["vm.", "container.", "kubernetes."];
    failpoints().into_iter().filter(|name| !elsewhere.iter().any(|of| name.starts_with(of))).collect()
}

/// A few at once: most of the time is waiting.
async fn all_at_once<T: Send + 'static>(cases: impl IntoIterator<Item = T>, run: impl AsyncFn(T)) {
    use futures::StreamExt as _;
    futures::stream::iter(cases).for_each_concurrent(4, |case| run(case)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_killed_at_any_failpoint_ends_where_the_last_acknowledged_request_wants_it() {
    let names = of_sim();
    assert!(names.len() > 25, "{names:?}");
    all_at_once(names, async |name: String| {
        assert!(crash_at(&name, 1).await, "failpoint '{name}' is never reached: the story has to be longer");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_killed_at_a_failpoint_in_the_middle_of_the_story_goes_on() {
    let middle =
        ["reconcile.write", "reconcile.written", "store.commit", "store.committed", "reconcile.turn"];
    let cases: Vec<_> = middle.iter().flat_map(|name| [7, 16].map(|nth| (*name, nth))).collect();
    all_at_once(cases, async |(name, nth): (&str, u32)| {
        assert!(crash_at(name, nth).await, "{name}@{nth} is never reached");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "slow: every time that every failpoint is reached"]
async fn a_gateway_killed_at_every_pass_of_every_failpoint_ends_where_it_should() {
    let mut kills = 0;
    for name in of_sim() {
        let mut nth = 1;
        while crash_at(&name, nth).await {
            (nth, kills) = (nth + 1, kills + 1);
            assert!(nth < 500, "{name} has no end");
        }
    }
    println!("{kills} kills");
}

/// Requests without end; what was acknowledged, by id: the version.
async fn load(channel: Channel, number: usize, acknowledged: &std::sync::Mutex<BTreeMap<String, u64>>) {
    use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
    let mut rng = StdRng::from_os_rng();
    let mut client = SandboxesClient::new(channel);
    loop {
        let name = format!("c{number}-{}", rng.random_range(0..5));
        let target = no_wait(&name);
        let answer = match rng.random_range(0..8) {
            0 | 1 => client.create(v1::CreateSandboxRequest { wait: false, ..common::create(&name) }).await,
            2 | 3 => client.suspend(v1::SuspendRequest { target, keep: 0 }).await,
            4 => client.resume(v1::ResumeRequest { target, ..Default::default() }).await,
            5 => client.stop(v1::StopRequest { target }).await,
            _ => client.start(v1::StartRequest { target }).await,
        };
        match answer {
            Ok(sandbox) => {
                let sandbox = sandbox.into_inner();
                let mut all = acknowledged.lock().unwrap();
                let version = all.entry(sandbox.id).or_default();
                *version = sandbox.version.max(*version);
            }
            Err(status) if status.message().contains("transport") || status.code() == Code::Unavailable => {
                return;
            }
            Err(_) => {}
        }
    }
}

/// Kills the gateway so many times in the middle of requests.
async fn kill_under_load(times: usize) {
    use rand::Rng as _;
    let mut host = Process::new(config, PATIENCE);
    let acknowledged = std::sync::Mutex::default();
    let mut disks = BTreeMap::new();
    for n in 0..times {
        host.start(None);
        let channel = host.connect().await.unwrap();
        let asked = (0..4).map(|number| load(channel.clone(), number, &acknowledged));
        let pause = Duration::from_millis(rand::rng().random_range(20..250));
        let killed = async {
            tokio::time::sleep(pause).await;
            host.kill();
        };
        tokio::join!(killed, async {
            // Whoever still waits for an answer never gets one.
            let _ = tokio::time::timeout(pause * 2, futures::future::join_all(asked)).await;
        });
        let what = format!("kill {n}");
        host.start(None);
        let channel = host.connect().await.unwrap();
        let mut client = SandboxesClient::new(channel.clone());
        let list = client.list(v1::ListSandboxesRequest { page_size: 1000, ..Default::default() });
        let list = list.await.unwrap().into_inner().sandboxes;
        for (id, version) in acknowledged.lock().unwrap().iter() {
            let found = list.iter().find(|s| s.id == *id);
            assert!(
                found.is_some_and(|s| s.version >= *version),
                "{what}: version {version} of {id} is lost: {found:?}"
            );
        }
        for sandbox in &list {
            rest(&channel, &sandbox.name).await.expect("it lives");
        }
        let mut known = Known { disks: std::mem::take(&mut disks), ..Known::default() };
        look_over(&host, &channel, &mut known, &what).await;
        disks = known.disks;
        host.kill();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_killed_under_load_loses_no_acknowledged_write() {
    kill_under_load(4).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "slow: a hundred kills"]
async fn a_gateway_killed_a_hundred_times_under_load_loses_no_acknowledged_write() {
    kill_under_load(100).await;
}
