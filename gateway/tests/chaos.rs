//! Random requests of several clients against a backend that fails, forgets, dies and starts things by itself, with gateways
//! that are ended in the middle: nothing illegal, nothing leaked, and everything ends where its last accepted request wanted
//! it. A seed says which requests and faults there are; when it fails, what happened is printed and
//! `TORPOR_SEED=N cargo test -p torpor-gateway --test chaos one_seed` does the same again. The order of threads is their own,
//! so that a rare failure may need `TORPOR_REPEAT=100` (docs/decisions/0090).
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::{World, no_wait, phase};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use tonic::{Code, transport::Channel};
use torpor_proto::v1::{self, Phase, egress::Policy, sandboxes_client::SandboxesClient};
use torpor_sandbox::{
    Egress, Exit, SandboxId,
    sim::{Script, SimDriver},
};

const CLIENTS: usize = 3;
const NAMES: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Wish {
    Ready,
    Suspended,
    Stopped,
    Gone,
}

/// What happened, printed when the test fails.
struct Trace {
    seed: u64,
    lines: Mutex<Vec<String>>,
}

impl Trace {
    fn add(&self, line: String) {
        self.lines.lock().unwrap().push(line);
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let lines = self.lines.lock().map(|lines| lines.join("\n")).unwrap_or_default();
            eprintln!("--- seed {}\n{lines}\n--- TORPOR_SEED={} does the same again", self.seed, self.seed);
        }
    }
}

/// One client: it alone asks for its sandboxes, so that the order of what was accepted is known.
struct Client {
    number: usize,
    rng: StdRng,
    wishes: BTreeMap<String, Wish>,
    versions: BTreeMap<String, u64>,
}

impl Client {
    async fn ask(&mut self, client: &mut SandboxesClient<Channel>, sim: &SimDriver, trace: &Trace) {
        let name = format!("c{}-{}", self.number, self.rng.random_range(0..NAMES));
        let target = no_wait(&name);
        let which = self.rng.random_range(0..16);
        let keep = self.rng.random_range(0..3);
        if which >= 14 {
            return policy(client, sim, &name, keep, trace).await;
        }
        if which >= 12 {
            return disk(client, &name, which, keep, trace).await;
        }
        let (result, wish) = match which {
            0..3 => {
                let request = v1::CreateSandboxRequest { name: name.clone(), ..Default::default() };
                (client.create(request).await.map(Some), Wish::Ready)
            }
            3..6 => (client.suspend(v1::SuspendRequest { target, keep }).await.map(Some), Wish::Suspended),
            6..8 => (
                client.resume(v1::ResumeRequest { target, restart_if_restore_fails: true }).await.map(Some),
                Wish::Ready,
            ),
            8..9 => (client.stop(v1::StopRequest { target }).await.map(Some), Wish::Stopped),
            9..11 => (client.start(v1::StartRequest { target }).await.map(Some), Wish::Ready),
            _ => (
                client.delete(v1::DeleteSandboxRequest { target, allow_missing: true }).await.map(|_| None),
                Wish::Gone,
            ),
        };
        let said = result.as_ref().map(drop).map_err(tonic::Status::code);
        trace.add(format!("{name} {which} ({keep}) wants {wish:?}: {said:?}"));
        match result {
            Ok(answer) => {
                self.wishes.insert(name.clone(), wish);
                if let Some(sandbox) = answer.map(tonic::Response::into_inner) {
                    let key = sandbox.id.clone();
                    let before = self.versions.insert(key, sandbox.version).unwrap_or_default();
                    assert!(before <= sandbox.version, "{name}: version {} after {before}", sandbox.version);
                }
            }
            Err(status) => {
                let expected = [Code::NotFound, Code::AlreadyExists, Code::FailedPrecondition];
                assert!(expected.contains(&status.code()), "{name}: {status:?}");
            }
        }
    }
}

/// Another policy: what runs goes by it when it is answered, and from then on.
async fn policy(
    client: &mut SandboxesClient<Channel>,
    sim: &SimDriver,
    name: &str,
    which: i32,
    trace: &Trace,
) {
    let (wire, own) = match which {
        0 => (Some(Policy::None), Some(Egress::None)),
        1 => (Some(Policy::Open), Some(Egress::Open)),
        _ => (None, None),
    };
    let egress = wire.map(|policy| v1::Egress { policy: policy.into(), ..Default::default() });
    let said = client.set_egress(v1::SetEgressRequest { target: no_wait(name), egress }).await;
    trace.add(format!("{name} network {own:?}: {:?}", said.as_ref().map(drop).map_err(tonic::Status::code)));
    match said {
        Ok(sandbox) => {
            let id: SandboxId = sandbox.into_inner().id.parse().unwrap();
            for _ in 0..3 {
                // One whose disk is gone is made anew, if at all, before anything of it runs.
                if sim.running().contains(&id) {
                    assert_eq!(sim.egress(&id), own, "{name}: not the policy that was acknowledged");
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
        Err(status) => {
            let expected = [Code::NotFound, Code::FailedPrecondition];
            assert!(expected.contains(&status.code()), "{name}: {status:?}");
        }
    }
}

/// Something is done with a disk, perhaps for somebody who doesn't wait for its end. Verbs end it or wait for it.
async fn disk(client: &mut SandboxesClient<Channel>, name: &str, which: i32, keep: i32, trace: &Trace) {
    let rewrite = keep == 1;
    let said = if which == 12 {
        let request = v1::CompactDiskRequest { target: no_wait(name), rewrite };
        match client.compact_disk(request).await {
            Ok(steps) if keep == 0 => read(steps.into_inner()).await,
            other => other.map(drop),
        }
    } else {
        let request = v1::ExportDiskRequest { sandbox: name.into(), format: v1::DiskFormat::Raw.into() };
        match client.export_disk(request).await {
            Ok(pieces) if keep == 0 => read(pieces.into_inner()).await,
            other => other.map(drop),
        }
    };
    let said = said.map_err(|status| status.code());
    trace.add(format!(
        "{name} {} ({keep}): {said:?}",
        if which == 12 { "disk compact" } else { "disk export" }
    ));
    let refusals = [Code::NotFound, Code::FailedPrecondition, Code::ResourceExhausted];
    let expected = [&refusals[..], &[Code::Aborted, Code::Unavailable]].concat();
    assert!(said.err().is_none_or(|code| expected.contains(&code)), "{name}: {said:?}");
}

/// To its end, if that comes soon.
async fn read<T>(mut stream: tonic::Streaming<T>) -> Result<(), tonic::Status> {
    let all = async {
        while stream.message().await?.is_some() {}
        Ok(())
    };
    tokio::time::timeout(Duration::from_millis(50), all).await.unwrap_or(Ok(()))
}

async fn settle(world: &World) -> BTreeMap<String, v1::Sandbox> {
    let mut client = world.sandboxes().await;
    let mut last = Vec::new();
    for _ in 0..3000 {
        let list = client
            .list(v1::ListSandboxesRequest { page_size: 1000, ..Default::default() })
            .await
            .unwrap()
            .into_inner();
        use Phase::*;
        last = list
            .sandboxes
            .iter()
            .filter(|s| {
                let turns = s.status.as_ref().is_some_and(|s| !s.then.is_empty());
                turns || !matches!(phase(s), Ready | Suspended | Stopped | Completed | Error)
            })
            .map(|s| (s.name.clone(), phase(s)))
            .collect();
        if last.is_empty() && list.sandboxes.len() == world.info().await.capacity.unwrap().sandboxes as usize
        {
            return list.sandboxes.into_iter().map(|s| (s.name.clone(), s)).collect();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("never at rest: {last:?}");
}

/// Something happens behind the gateway's back; to whom.
fn meddle(world: &World, rng: &mut StdRng, trace: &Trace) -> Option<SandboxId> {
    let running = world.sim.running();
    let all = world.sim.stored();
    let pick = |ids: &[SandboxId], rng: &mut StdRng| ids.get(rng.random_range(0..ids.len().max(1))).cloned();
    let (what, victim) = match rng.random_range(0..8) {
        0 => ("vanishes", pick(&running, rng)),
        1 => ("ends", pick(&running, rng)),
        2 => ("panics", pick(&running, rng)),
        3 => ("loses its agent", pick(&running, rng)),
        4 => ("loses its disk", pick(&all, rng)),
        5 | 6 => {
            let held = rng.random();
            trace.add(format!("disks are {}", if held { "slow" } else { "quick" }));
            world.sim.hold_disks(held);
            return None;
        }
        _ => ("is started by somebody else", pick(&all, rng)),
    };
    let victim = victim?;
    trace.add(format!("{victim} {what}"));
    match what {
        "vanishes" => world.sim.vanish(&victim),
        "ends" => world.sim.end(&victim, Exit::Code(1)),
        "panics" => world.sim.end(&victim, Exit::Panic("scripted".into())),
        "loses its agent" => world.sim.lose_agent(&victim),
        "loses its disk" => world.sim.lose_storage(&victim),
        _ => world.sim.intrude(&victim),
    }
    Some(victim)
}

/// One piece of the story: every client asks so many times, while somebody meddles now and then.
async fn round(
    world: &World,
    clients: &mut [Client],
    rng: &mut StdRng,
    requests: usize,
    trace: &Trace,
) -> BTreeSet<SandboxId> {
    let asked = clients.iter_mut().map(|client| async move {
        let mut channel = world.sandboxes().await;
        for _ in 0..requests {
            client.ask(&mut channel, &world.sim, trace).await;
        }
    });
    let mut hurt = BTreeSet::new();
    let meddling = async {
        for _ in 0..requests / 20 {
            tokio::time::sleep(Duration::from_millis(rng.random_range(1..30))).await;
            hurt.extend(meddle(world, rng, trace));
        }
    };
    tokio::join!(futures::future::join_all(asked), meddling);
    hurt
}

async fn run(seed: u64, rounds: usize, requests: usize) {
    let trace = Arc::new(Trace { seed, lines: Mutex::default() });
    let mut rng = StdRng::seed_from_u64(seed);
    let faulty = Script {
        seed,
        delay: (Duration::ZERO, Duration::from_millis(rng.random_range(1..8))),
        fail_before: rng.random_range(0..50),
        fail_after: rng.random_range(0..50),
        unknown: rng.random_range(0..40),
        lost_hints: rng.random_range(0..400),
        keeps_memory: true,
    };
    trace.add(format!("{faulty:?}"));
    let mut world = World::new(faulty).await;
    let mut clients: Vec<Client> = (0..CLIENTS)
        .map(|number| Client {
            number,
            rng: StdRng::seed_from_u64(seed ^ (number as u64 + 1) << 32),
            wishes: BTreeMap::new(),
            versions: BTreeMap::new(),
        })
        .collect();
    let mut hurt = BTreeSet::new();
    for n in 0..rounds {
        hurt.extend(round(&world, &mut clients, &mut rng, requests, &trace).await);
        trace.add(format!("gateway {n} is ended, another started"));
        world.restart().await;
    }
    world.sim.set_script(Script::default());
    world.sim.hold_disks(false);
    settle(&world).await;
    // Hints may have been lost and the last look may be a while off: a new gateway looks at everything that is not asleep, and
    // word comes about the rest.
    world.restart().await;
    let mut rest = BTreeMap::new();
    for _ in 0..100 {
        // The gateway may not listen yet: the word is given again until it was heard.
        world.sim.stored().iter().for_each(|id| world.sim.poke(id));
        tokio::time::sleep(Duration::from_millis(100)).await;
        rest = settle(&world).await;
        if rest.values().filter(|s| phase(s) == Phase::Ready).count() == world.sim.running().len() {
            break;
        }
    }
    judge(&world, &rest, &clients, &hurt, seed).await;
    // A gateway that is only dropped goes on in its tasks: thousands of them have no descriptors left.
    world.stop().await;
}

async fn judge(
    world: &World,
    rest: &BTreeMap<String, v1::Sandbox>,
    clients: &[Client],
    hurt: &BTreeSet<SandboxId>,
    seed: u64,
) {
    assert!(world.sim.violations().is_empty(), "seed {seed}: {:?}", world.sim.violations());
    let mut running = 0;
    for (name, sandbox) in rest {
        let id: SandboxId = sandbox.id.parse().unwrap();
        let is_running = world.sim.running().contains(&id);
        let now = phase(sandbox);
        assert_eq!(is_running, now == Phase::Ready, "seed {seed}: {name} {now:?}");
        running += u32::from(is_running);
        let wish = clients.iter().find_map(|client| client.wishes.get(name));
        let expected = match wish {
            Some(Wish::Ready) => now == Phase::Ready,
            Some(Wish::Suspended) => now == Phase::Suspended,
            Some(Wish::Stopped) => now == Phase::Stopped,
            Some(Wish::Gone) | None => false,
        };
        let ended = matches!(now, Phase::Error | Phase::Completed) && hurt.contains(&id);
        let status = sandbox.status.as_ref();
        assert!(
            expected || ended,
            "seed {seed}: {name} ({id}) wanted {wish:?}, is {now:?}: {:?}",
            status.and_then(|s| s.failure.as_ref())
        );
        if now == Phase::Error {
            let failure = status.and_then(|s| s.failure.clone()).expect("an Error says why");
            let said = [&failure.step, &failure.reason, &failure.message, &failure.next];
            assert!(said.iter().all(|text| !text.is_empty()), "seed {seed}: {failure:?}");
        }
        history(world, sandbox, seed).await;
    }
    for client in clients {
        for (name, wish) in &client.wishes {
            assert!(
                *wish == Wish::Gone || rest.contains_key(name),
                "seed {seed}: {name} is gone, wanted {wish:?}"
            );
        }
    }
    let capacity = world.info().await.capacity.unwrap();
    assert_eq!(capacity.slots_used, running, "seed {seed}: one loan for each that runs");
    assert_eq!(world.sim.running().len(), running as usize, "seed {seed}: compute without a record");
    for id in world.sim.stored() {
        assert!(rest.values().any(|s| s.id == id.as_str()), "seed {seed}: {id} has storage and no record");
    }
}

async fn history(world: &World, sandbox: &v1::Sandbox, seed: u64) {
    let request = v1::HistoryRequest { sandbox: sandbox.id.clone(), page_size: 1000, ..Default::default() };
    let rows = world.sandboxes().await.history(request).await.unwrap().into_inner().transitions;
    for pair in rows.windows(2) {
        assert_eq!(pair[0].from(), pair[1].to(), "seed {seed}: a gap in the history of {}", sandbox.name);
        assert!(
            pair[0].version > pair[1].version && pair[0].run >= pair[1].run,
            "seed {seed}: {}",
            sandbox.name
        );
    }
    assert_eq!(rows.first().map(v1::Transition::to), Some(phase(sandbox)), "seed {seed}: {}", sandbox.name);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fixed_slice_of_seeds_leaves_no_illegal_state_and_no_leak() {
    for seed in 1..=5 {
        run(seed, 3, 40).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_seed() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    if let Some(seed) = number("TORPOR_SEED") {
        for _ in 0..number("TORPOR_REPEAT").unwrap_or(1) {
            run(seed, 3, 40).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "slow: as many seeds as TORPOR_SEEDS says (2000), for TORPOR_SEED_SECONDS at most"]
async fn thousands_of_seeds_leave_no_illegal_state_and_no_leak() {
    let number =
        |name: &str, usual: u64| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    let (first, seeds) = (number("TORPOR_FIRST_SEED", 1000), number("TORPOR_SEEDS", 2000));
    let end = Instant::now() + Duration::from_secs(number("TORPOR_SEED_SECONDS", 24 * 3600));
    let mut done = 0;
    use futures::StreamExt as _;
    let mut running = futures::stream::iter(first..first + seeds)
        .take_while(|_| std::future::ready(Instant::now() < end))
        .map(|seed| tokio::spawn(run(seed, 3, 40)))
        .buffer_unordered(6);
    while let Some(one) = running.next().await {
        one.unwrap();
        done += 1;
    }
    println!("{done} seeds clean");
}
