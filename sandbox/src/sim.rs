//! A driver that only pretends: scripted delays, faults and losses, no I/O. It also keeps watch: a verb that runs twice
//! at once for one sandbox, a second compute, or a start of an old run is noted as a violation.

mod kept;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;

use crate::{
    disk::{
        Compacted, Compaction, DiskCare, DiskCheck, DiskFormat, DiskPiece, DiskReport, DiskSink, DiskWatch,
    },
    driver::{
        Capabilities, Change, ComputeDriver, DiskFacts, DriverError, Ended, Exit, Facts, HostFacts, Observed,
        Stopped, Word, word_of,
    },
    failpoint::hit,
    id::{Run, SandboxId},
    lifecycle::Keep,
    spec::{Egress, SandboxSpec},
    update::Field,
};

pub use self::kept::Kept;
use self::kept::KeptPiece;

/// The verbs that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verb {
    /// `create`
    Create,
    /// `start`
    Start,
    /// `stop`
    Stop,
    /// `delete`
    Delete,
    /// `observe`
    Observe,
    /// Any operation on a disk
    Disk,
    /// `update`
    Update,
}

/// How often an operation on a disk that is held up asks whether to go on.
const HELD_UP: Duration = Duration::from_millis(5);

/// How the pretended world behaves.
#[derive(Clone, Debug)]
pub struct Script {
    /// Seed of every choice below.
    pub seed: u64,
    /// How long a verb takes.
    pub delay: (Duration, Duration),
    /// Of 1000 verbs, how many fail with a transient error before doing anything.
    pub fail_before: u32,
    /// … after having done all of it.
    pub fail_after: u32,
    /// Of 1000 observations, how many can't tell.
    pub unknown: u32,
    /// Of 1000 hints, how many are lost; as many are doubled.
    pub lost_hints: u32,
    /// Whether memory images can be made.
    pub keeps_memory: bool,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            seed: 0,
            delay: (Duration::ZERO, Duration::ZERO),
            fail_before: 0,
            fail_after: 0,
            unknown: 0,
            lost_hints: 0,
            keeps_memory: true,
        }
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Compute {
    run: Run,
    agent: bool,
    exit: Option<Exit>,
    /// Somebody else started it, perhaps in the middle of a verb: not the caller's fault.
    foreign: bool,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct World {
    storage: bool,
    disk_id: u64,
    disk_bytes: u64,
    memory: bool,
    compute: Option<Compute>,
    last_run: Run,
    /// How a run ends as soon as it is up.
    ends: Option<Exit>,
    #[serde(default)]
    egress: Option<Egress>,
    /// What the next start goes by.
    #[serde(default)]
    spec: Option<Box<SandboxSpec>>,
    #[serde(skip)]
    busy: u32,
}

/// Puts a piece where the next process finds it.
pub type Keeper = Box<dyn FnMut(&Kept) + Send>;

struct Inner {
    script: Script,
    rng: StdRng,
    worlds: BTreeMap<SandboxId, World>,
    disks: u64,
    planned: Vec<(Verb, DriverError)>,
    calls: BTreeMap<Verb, u64>,
    /// Calls under way, and the most there were at once.
    at_once: BTreeMap<Verb, (u64, u64)>,
    violations: Vec<String>,
    keeper: Option<Keeper>,
}

impl Inner {
    /// What `id` has come to outlives the process from now on.
    fn keep(&mut self, id: &SandboxId) {
        if let Some(keeper) = &mut self.keeper {
            let world = self.worlds.get(id).cloned().unwrap_or_default();
            keeper(&Kept(KeptPiece::World(id.clone(), world)));
        }
    }

    fn violation(&mut self, text: String) {
        if let Some(keeper) = &mut self.keeper {
            keeper(&Kept(KeptPiece::Violation(text.clone())));
        }
        self.violations.push(text);
    }
}

/// See the module.
pub struct SimDriver {
    inner: Mutex<Inner>,
    hints: broadcast::Sender<SandboxId>,
    shortages: broadcast::Sender<SandboxId>,
    disks_held: AtomicBool,
    grows_running: AtomicBool,
    updates_nothing: AtomicBool,
}

/// Notes that a verb is no longer under way, also when its future is dropped.
struct Busy<'a> {
    driver: &'a SimDriver,
    id: SandboxId,
    verb: Verb,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut inner = self.driver.lock();
        if let Some(world) = inner.worlds.get_mut(&self.id) {
            world.busy = world.busy.saturating_sub(1);
        }
        if let Some((now, _)) = inner.at_once.get_mut(&self.verb) {
            *now = now.saturating_sub(1);
        }
    }
}

impl SimDriver {
    /// Where a sandbox may send to, as far as it was told.
    pub fn egress(&self, id: &SandboxId) -> Option<Egress> {
        self.lock().worlds.get(id)?.egress.clone()
    }

    /// The spec that the next start goes by.
    pub fn spec(&self, id: &SandboxId) -> Option<SandboxSpec> {
        self.lock().worlds.get(id)?.spec.as_deref().cloned()
    }

    /// What the backend can't make another of, from now on.
    pub fn cannot_update(&self, cannot: bool) {
        self.updates_nothing.store(cannot, Ordering::SeqCst);
    }

    /// A world with nothing in it.
    pub fn new(script: Script) -> Arc<Self> {
        Self::with(script, [], None)
    }

    /// The world that an earlier process has kept, piece by piece, and that is kept on.
    pub fn outliving(script: Script, kept: impl IntoIterator<Item = Kept>, keeper: Keeper) -> Arc<Self> {
        Self::with(script, kept, Some(keeper))
    }

    fn with(script: Script, kept: impl IntoIterator<Item = Kept>, keeper: Option<Keeper>) -> Arc<Self> {
        let (mut worlds, mut violations) = (BTreeMap::new(), Vec::new());
        for piece in kept {
            match piece.0 {
                KeptPiece::World(id, world) => drop(worlds.insert(id, world)),
                KeptPiece::Violation(text) => violations.push(text),
            }
        }
        let disks = worlds.values().map(|world| world.disk_id).max().unwrap_or_default();
        let rng = StdRng::seed_from_u64(script.seed);
        let inner = Inner {
            script,
            rng,
            worlds,
            disks,
            planned: Vec::new(),
            calls: BTreeMap::new(),
            at_once: BTreeMap::new(),
            violations,
            keeper,
        };
        let (hints, shortages) = (broadcast::channel(4096).0, broadcast::channel(16).0);
        let (disks_held, grows_running, updates_nothing) = Default::default();
        let inner = Mutex::new(inner);
        Arc::new(Self { inner, hints, shortages, disks_held, grows_running, updates_nothing })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes delays and faults from now on.
    pub fn set_script(&self, script: Script) {
        self.lock().script = script;
    }

    /// The next call of `verb` fails with `error`.
    pub fn fail_next(&self, verb: Verb, error: DriverError) {
        self.lock().planned.push((verb, error));
    }

    /// How often `verb` was called.
    pub fn calls(&self, verb: Verb) -> u64 {
        self.lock().calls.get(&verb).copied().unwrap_or_default()
    }

    /// How many calls of `verb` were under way at once, at most.
    pub fn most_at_once(&self, verb: Verb) -> u64 {
        self.lock().at_once.get(&verb).map_or(0, |(_, most)| *most)
    }

    /// A hint about nothing: somebody looks.
    pub fn poke(&self, id: &SandboxId) {
        self.hint(id);
    }

    /// Compute of the last run appears that nobody asked for, where there is a disk and none runs.
    pub fn intrude(&self, id: &SandboxId) {
        let mut inner = self.lock();
        if let Some(world) =
            inner.worlds.get_mut(id).filter(|w| w.storage && w.compute.is_none() && w.busy == 0)
        {
            world.compute = Some(Compute { run: world.last_run, agent: true, exit: None, foreign: true });
        }
        inner.keep(id);
        drop(inner);
        self.hint(id);
    }

    /// What went against the contract, so far.
    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    /// Sandboxes whose compute runs.
    pub fn running(&self) -> Vec<SandboxId> {
        let inner = self.lock();
        inner.worlds.iter().filter(|(_, w)| w.compute.is_some()).map(|(id, _)| id.clone()).collect()
    }

    /// Sandboxes that have storage.
    pub fn stored(&self) -> Vec<SandboxId> {
        let inner = self.lock();
        inner.worlds.iter().filter(|(_, w)| w.storage).map(|(id, _)| id.clone()).collect()
    }

    /// Tells disks apart: the same number means the same disk.
    pub fn disk_id(&self, id: &SandboxId) -> Option<u64> {
        self.lock().worlds.get(id).filter(|w| w.storage).map(|w| w.disk_id)
    }

    /// The main command or the compute ends by itself.
    pub fn end(&self, id: &SandboxId, exit: Exit) {
        let mut inner = self.lock();
        if let Some(compute) = inner.worlds.get_mut(id).and_then(|w| w.compute.as_mut()) {
            compute.exit.get_or_insert(exit);
        }
        inner.keep(id);
        drop(inner);
        self.hint(id);
    }

    /// Compute vanishes without a trace, as after a restart of the host.
    pub fn vanish(&self, id: &SandboxId) {
        let mut inner = self.lock();
        if let Some(world) = inner.worlds.get_mut(id) {
            world.compute = None;
        }
        inner.keep(id);
        drop(inner);
        self.hint(id);
    }

    /// The disk vanishes.
    pub fn lose_storage(&self, id: &SandboxId) {
        let mut inner = self.lock();
        if let Some(world) = inner.worlds.get_mut(id) {
            world.storage = false;
        }
        inner.keep(id);
        drop(inner);
        self.hint(id);
    }

    /// The agent answers no more, the compute goes on.
    pub fn lose_agent(&self, id: &SandboxId) {
        let mut inner = self.lock();
        if let Some(compute) = inner.worlds.get_mut(id).and_then(|world| world.compute.as_mut()) {
            compute.agent = false;
        }
        inner.keep(id);
        drop(inner);
        self.hint(id);
    }

    /// The memory image vanishes.
    pub fn lose_memory(&self, id: &SandboxId) {
        let mut inner = self.lock();
        if let Some(world) = inner.worlds.get_mut(id) {
            world.memory = false;
        }
        inner.keep(id);
    }

    /// Operations on disks come to no end from now on, or do so again. Those that can be cancelled still can.
    pub fn hold_disks(&self, hold: bool) {
        self.disks_held.store(hold, Ordering::SeqCst);
    }

    /// Disks can grow while something runs on them from now on, or can't.
    pub fn grow_running(&self, can: bool) {
        self.grows_running.store(can, Ordering::SeqCst);
    }

    /// The host has no room for what this one writes. False: nobody listens.
    pub fn starve(&self, id: &SandboxId) -> bool {
        self.shortages.send(id.clone()).is_ok()
    }

    /// Waits while disks are held. False: cancelled.
    async fn held(&self, mut go_on: impl FnMut() -> bool) -> bool {
        while self.disks_held.load(Ordering::SeqCst) {
            if !go_on() {
                return false;
            }
            tokio::time::sleep(HELD_UP).await;
        }
        go_on()
    }

    fn disk(&self, id: &SandboxId) -> Result<(u64, u64), DriverError> {
        let inner = self.lock();
        let world = inner.worlds.get(id).ok_or(DriverError::Missing)?;
        match world.storage {
            true if world.compute.is_some() => {
                Err(DriverError::Locked { holder: None, detail: format!("disk of {id}") })
            }
            true => Ok((world.disk_id, world.disk_bytes)),
            false => Err(DriverError::DataMissing(format!("disk of {id}"))),
        }
    }

    fn hint(&self, id: &SandboxId) {
        let copies = {
            let mut inner = self.lock();
            let lost = inner.script.lost_hints;
            match inner.rng.random_range(0..1000) {
                n if n < lost => 0,
                n if n < 2 * lost => 2,
                _ => 1,
            }
        };
        for _ in 0..copies {
            // Nobody listens: as good as a lost hint.
            let _ = self.hints.send(id.clone());
        }
    }

    /// Counts the call, takes its time and perhaps fails. The guard lives as long as the verb.
    async fn begin(&self, verb: Verb, id: &SandboxId) -> Result<Busy<'_>, DriverError> {
        let (delay, planned, fail) = {
            let mut inner = self.lock();
            *inner.calls.entry(verb).or_default() += 1;
            let (now, most) = inner.at_once.entry(verb).or_default();
            (*now, *most) = (*now + 1, (*most).max(*now + 1));
            let planned = inner.planned.iter().position(|(v, _)| *v == verb);
            let planned = planned.map(|at| inner.planned.remove(at).1);
            let (low, high) = inner.script.delay;
            let delay = if high > low { inner.rng.random_range(low..high) } else { low };
            let fail = inner.rng.random_range(0..1000) < inner.script.fail_before;
            let world = inner.worlds.entry(id.clone()).or_default();
            world.busy += 1;
            if world.busy > 1 {
                inner.violation(format!("{verb:?} of {id} began while another verb was under way"));
            }
            (delay, planned, fail)
        };
        let busy = Busy { driver: self, id: id.clone(), verb };
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        match planned {
            Some(error) => Err(error),
            None if fail => Err(DriverError::backend("simulated backend", "scripted fault before the work")),
            None => Ok(busy),
        }
    }

    fn end_verb<T>(&self, done: T) -> Result<T, DriverError> {
        let mut inner = self.lock();
        let share = inner.script.fail_after;
        if inner.rng.random_range(0..1000) < share {
            return Err(DriverError::backend("simulated backend", "scripted fault after the work"));
        }
        Ok(done)
    }
}

#[async_trait]
impl ComputeDriver for SimDriver {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "sim".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            keeps_memory: self.lock().script.keeps_memory,
            no_memory: None,
            updates: true,
            needs_loan: true,
            machine: "sim".to_owned(),
            notice: Some("nothing is run: a driver for tests".to_owned()),
        }
    }

    fn disks(&self) -> Option<&dyn DiskCare> {
        Some(self)
    }

    async fn create(&self, id: &SandboxId, spec: &SandboxSpec, _run: Run) -> Result<Change, DriverError> {
        let busy = self.begin(Verb::Create, id).await?;
        hit("sim.create.before")?;
        let done = {
            let mut inner = self.lock();
            inner.disks += 1;
            let disk_id = inner.disks;
            let world = inner.worlds.entry(id.clone()).or_default();
            if world.storage {
                Change::Already
            } else {
                world.storage = true;
                world.disk_id = disk_id;
                world.disk_bytes = spec.resources.disk_bytes;
                world.ends = ends(&spec.command);
                world.egress = spec.egress.clone();
                world.spec = Some(Box::new(spec.clone()));
                inner.keep(id);
                Change::Done
            }
        };
        drop(busy);
        hit("sim.create.made")?;
        self.end_verb(done)
    }

    async fn adjust(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        if self.egress(id) == spec.egress {
            return Ok(Change::Already);
        }
        hit("sim.adjust.before")?;
        {
            let mut inner = self.lock();
            let Some(world) = inner.worlds.get_mut(id) else { return Ok(Change::Already) };
            world.egress = spec.egress.clone();
            inner.keep(id);
        }
        hit("sim.adjust.done")?;
        Ok(Change::Done)
    }

    fn updates(&self) -> &'static [Field] {
        if self.updates_nothing.load(Ordering::SeqCst) { &[Field::Command] } else { Field::ALL }
    }

    async fn update(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        let busy = self.begin(Verb::Update, id).await?;
        hit("sim.update.before")?;
        self.disk(id)?;
        self.held(|| true).await;
        let done = {
            let mut inner = self.lock();
            let world = inner.worlds.entry(id.clone()).or_default();
            let known = world.spec.as_deref() == Some(spec);
            (world.ends, world.egress) = (ends(&spec.command), spec.egress.clone());
            world.spec = Some(Box::new(spec.clone()));
            inner.keep(id);
            if known { Change::Already } else { Change::Done }
        };
        drop(busy);
        hit("sim.update.made")?;
        self.end_verb(done)
    }

    async fn start(&self, id: &SandboxId, from: Keep, run: Run) -> Result<Change, DriverError> {
        let busy = self.begin(Verb::Start, id).await?;
        hit("sim.start.before")?;
        let done = {
            let mut inner = self.lock();
            let world = inner.worlds.entry(id.clone()).or_default();
            if !world.storage {
                return Err(DriverError::DataMissing(format!("disk of {id}")));
            }
            match &mut world.compute {
                Some(c) if c.run == run && c.exit.is_none() => Change::Already,
                Some(c) if c.foreign => {
                    return Err(DriverError::backend("start", "compute is there that somebody else started"));
                }
                Some(c) => {
                    let text = format!("start of run {run} of {id} while run {} is there", c.run);
                    inner.violation(text.clone());
                    return Err(DriverError::Invalid(text));
                }
                None if run < world.last_run => {
                    let text = format!("start of run {run} of {id} after run {}", world.last_run);
                    inner.violation(text.clone());
                    return Err(DriverError::Invalid(text));
                }
                None if from == Keep::Memory && !world.memory => {
                    return Err(DriverError::DataMissing(format!("memory image of {id}")));
                }
                None => {
                    world.compute = Some(Compute { run, agent: false, exit: None, foreign: false });
                    world.last_run = run;
                    world.memory = false;
                    inner.keep(id);
                    Change::Done
                }
            }
        };
        hit("sim.start.launched")?;
        let ended = {
            let mut inner = self.lock();
            let Some(world) = inner.worlds.get_mut(id) else { return Err(DriverError::Missing) };
            let ends = world.ends.clone();
            // It may have ended or vanished meanwhile: whoever looks next sees it.
            if let Some(compute) = &mut world.compute {
                compute.agent = true;
                compute.exit = compute.exit.take().or(ends.clone());
            }
            inner.keep(id);
            ends.is_some()
        };
        drop(busy);
        if ended {
            self.hint(id);
        }
        hit("sim.start.ready")?;
        self.end_verb(done)
    }

    async fn stop(&self, id: &SandboxId, keep: Keep, _deadline: Duration) -> Result<Stopped, DriverError> {
        let busy = self.begin(Verb::Stop, id).await?;
        if keep == Keep::Memory && !self.lock().script.keeps_memory {
            return Err(DriverError::Unsupported("memory images".to_owned()));
        }
        hit("sim.stop.before")?;
        let done = {
            let mut inner = self.lock();
            let world = inner.worlds.entry(id.clone()).or_default();
            let compute = world.compute.take();
            let alive = compute.as_ref().is_some_and(|c| c.exit.is_none());
            if keep == Keep::Memory && alive {
                world.memory = true;
            } else if keep == Keep::Disk {
                world.memory = false;
            }
            let kept = if world.memory { Keep::Memory } else { Keep::Disk };
            inner.keep(id);
            Stopped { flushed: alive, kept, detail: None }
        };
        drop(busy);
        hit("sim.stop.gone")?;
        self.end_verb(done)
    }

    async fn delete(&self, id: &SandboxId) -> Result<Change, DriverError> {
        let busy = self.begin(Verb::Delete, id).await?;
        hit("sim.delete.before")?;
        {
            let mut inner = self.lock();
            if let Some(compute) = inner.worlds.get_mut(id).map(|world| &mut world.compute) {
                *compute = None;
            }
            inner.keep(id);
        }
        hit("sim.delete.compute_gone")?;
        let done = {
            let mut inner = self.lock();
            let done = match inner.worlds.get_mut(id) {
                Some(w) if w.storage => {
                    *w = World { busy: w.busy, ..World::default() };
                    Change::Done
                }
                _ => Change::Already,
            };
            inner.keep(id);
            done
        };
        drop(busy);
        hit("sim.delete.gone")?;
        self.end_verb(done)
    }

    async fn observe(&self, id: &SandboxId) -> Result<Observed, DriverError> {
        let mut inner = self.lock();
        *inner.calls.entry(Verb::Observe).or_default() += 1;
        if let Some(at) = inner.planned.iter().position(|(v, _)| *v == Verb::Observe) {
            return Err(inner.planned.remove(at).1);
        }
        let share = inner.script.unknown;
        if inner.rng.random_range(0..1000) < share {
            return Ok(Observed::Unknown("scripted".to_owned()));
        }
        let Some(world) = inner.worlds.get(id) else { return Ok(Observed::Missing) };
        Ok(match &world.compute {
            Some(Compute { run, exit: Some(exit), .. }) => {
                Observed::Ended(Ended { run: *run, exit: exit.clone() })
            }
            Some(Compute { run, agent, exit: None, .. }) => Observed::Running { run: *run, agent: *agent },
            None if world.storage => Observed::Stopped { memory: world.memory },
            None => Observed::Missing,
        })
    }

    async fn list(&self) -> Result<Vec<SandboxId>, DriverError> {
        let inner = self.lock();
        let there = inner.worlds.iter().filter(|(_, w)| w.storage || w.compute.is_some());
        Ok(there.map(|(id, _)| id.clone()).collect())
    }

    fn hints(&self) -> Word {
        word_of(&self.hints)
    }

    fn shortages(&self) -> Word {
        word_of(&self.shortages)
    }

    async fn agent(&self, _id: &SandboxId) -> Result<tonic::transport::Channel, DriverError> {
        Err(DriverError::Unsupported("the sim driver has no agent".to_owned()))
    }

    async fn facts(&self, id: &SandboxId) -> Facts {
        let inner = self.lock();
        let Some(world) = inner.worlds.get(id) else { return Facts::default() };
        Facts {
            host: world.compute.as_ref().map(|_| HostFacts::default()),
            disk: world
                .storage
                .then(|| DiskFacts { virtual_bytes: world.disk_bytes, ..DiskFacts::default() }),
            machine: Some("sim".to_owned()),
            boot_id: world.compute.as_ref().map(|c| format!("boot-{}", c.run)),
        }
    }

    async fn console(&self, _id: &SandboxId, _bytes: usize) -> Vec<u8> {
        Vec::new()
    }
}

/// The pretended main commands: `exit N` and `panic` end as soon as the run is up.
fn ends(command: &[String]) -> Option<Exit> {
    match command {
        [exit, code] if exit == "exit" => code.parse().ok().map(Exit::Code),
        [panic] if panic == "panic" => Some(Exit::Panic("the pretended kernel panicked".to_owned())),
        _ => None,
    }
}

/// Disks of nothing but a size and a number.
#[async_trait]
impl DiskCare for SimDriver {
    async fn report(&self, id: &SandboxId, check: bool) -> Result<DiskReport, DriverError> {
        let virtual_bytes =
            self.lock().worlds.get(id).filter(|w| w.storage).ok_or(DriverError::Missing)?.disk_bytes;
        let check = check.then(DiskCheck::default);
        Ok(DiskReport { virtual_bytes, check, ..DiskReport::default() })
    }

    async fn grow(&self, id: &SandboxId, bytes: u64) -> Result<u64, DriverError> {
        let _busy = self.begin(Verb::Disk, id).await?;
        let present = match self.disk(id) {
            Err(DriverError::Locked { .. }) if self.grows_running.load(Ordering::SeqCst) => {
                self.lock().worlds.get(id).map_or(0, |world| world.disk_bytes)
            }
            Err(DriverError::Locked { .. }) => {
                return Err(DriverError::Unsupported("a disk that something runs on".to_owned()));
            }
            other => other?.1,
        };
        if bytes < present {
            return Err(DriverError::Invalid(format!("{bytes} bytes are less than the disk's {present}")));
        }
        self.held(|| true).await;
        let mut inner = self.lock();
        if let Some(world) = inner.worlds.get_mut(id) {
            world.disk_bytes = bytes;
        }
        inner.keep(id);
        Ok(bytes)
    }

    async fn compact(
        &self,
        id: &SandboxId,
        _how: Compaction,
        mut watch: DiskWatch,
    ) -> Result<Compacted, DriverError> {
        let _busy = self.begin(Verb::Disk, id).await?;
        let (_, all) = self.disk(id)?;
        if !self.held(|| watch(0, all).is_continue()).await {
            return Err(DriverError::Cancelled("disk compact"));
        }
        Ok(Compacted { used_before: 0, used_after: 0 })
    }

    /// The disk's number at its beginning, then zeros.
    async fn export(&self, id: &SandboxId, format: DiskFormat, sink: DiskSink) -> Result<(), DriverError> {
        let _busy = self.begin(Verb::Disk, id).await?;
        if format != DiskFormat::Raw {
            return Err(DriverError::Unsupported("the sim driver exports raw disks only".to_owned()));
        }
        let (number, all) = self.disk(id)?;
        let cancelled = |_| DriverError::Cancelled("disk export");
        sink.send(DiskPiece::Size(all)).await.map_err(cancelled)?;
        self.held(|| !sink.is_closed()).await;
        sink.send(DiskPiece::Data(0, number.to_le_bytes().to_vec())).await.map_err(cancelled)?;
        sink.send(DiskPiece::Reached(all)).await.map_err(cancelled)
    }
}
