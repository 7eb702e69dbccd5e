//! A driver that only pretends: scripted delays, faults and losses, no I/O. It also keeps watch: a verb that runs twice
//! at once for one sandbox, a second compute, or a start of an old run is noted as a violation.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use futures::{Stream, StreamExt as _};
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};
use tokio::sync::broadcast;

use crate::{
    driver::{
        Capabilities, Change, ComputeDriver, DiskFacts, DriverError, Ended, Exit, Facts, HostFacts, Observed,
        Stopped,
    },
    id::{Run, SandboxId},
    lifecycle::Keep,
    spec::SandboxSpec,
};

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
}

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

#[derive(Clone, Debug, Default)]
struct Compute {
    run: Run,
    agent: bool,
    exit: Option<Exit>,
}

#[derive(Clone, Debug, Default)]
struct World {
    storage: bool,
    disk_id: u64,
    memory: bool,
    compute: Option<Compute>,
    last_run: Run,
    busy: u32,
}

struct Inner {
    script: Script,
    rng: StdRng,
    worlds: BTreeMap<SandboxId, World>,
    disks: u64,
    planned: Vec<(Verb, DriverError)>,
    calls: BTreeMap<Verb, u64>,
    violations: Vec<String>,
}

/// See the module.
pub struct SimDriver {
    inner: Mutex<Inner>,
    hints: broadcast::Sender<SandboxId>,
}

/// Notes that a verb is no longer under way, also when its future is dropped.
struct Busy<'a> {
    driver: &'a SimDriver,
    id: SandboxId,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        if let Some(world) = self.driver.lock().worlds.get_mut(&self.id) {
            world.busy = world.busy.saturating_sub(1);
        }
    }
}

impl SimDriver {
    /// A world with nothing in it.
    pub fn new(script: Script) -> Arc<Self> {
        let rng = StdRng::seed_from_u64(script.seed);
        let inner = Inner {
            script,
            rng,
            worlds: BTreeMap::new(),
            disks: 0,
            planned: Vec::new(),
            calls: BTreeMap::new(),
            violations: Vec::new(),
        };
        Arc::new(Self { inner: Mutex::new(inner), hints: broadcast::channel(4096).0 })
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

    /// What went against the contract, so far.
    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    /// Sandboxes whose compute runs.
    pub fn running(&self) -> Vec<SandboxId> {
        let inner = self.lock();
        inner.worlds.iter().filter(|(_, w)| w.compute.is_some()).map(|(id, _)| id.clone()).collect()
    }

    /// Tells disks apart: the same number means the same disk.
    pub fn disk_id(&self, id: &SandboxId) -> Option<u64> {
        self.lock().worlds.get(id).filter(|w| w.storage).map(|w| w.disk_id)
    }

    /// The main command or the compute ends by itself.
    pub fn end(&self, id: &SandboxId, exit: Exit) {
        if let Some(compute) = self.lock().worlds.get_mut(id).and_then(|w| w.compute.as_mut()) {
            compute.exit.get_or_insert(exit);
        }
        self.hint(id);
    }

    /// Compute vanishes without a trace, as after a restart of the host.
    pub fn vanish(&self, id: &SandboxId) {
        if let Some(world) = self.lock().worlds.get_mut(id) {
            world.compute = None;
        }
        self.hint(id);
    }

    /// The disk vanishes.
    pub fn lose_storage(&self, id: &SandboxId) {
        if let Some(world) = self.lock().worlds.get_mut(id) {
            world.storage = false;
        }
        self.hint(id);
    }

    /// The memory image vanishes.
    pub fn lose_memory(&self, id: &SandboxId) {
        if let Some(world) = self.lock().worlds.get_mut(id) {
            world.memory = false;
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
            let planned = inner.planned.iter().position(|(v, _)| *v == verb);
            let planned = planned.map(|at| inner.planned.remove(at).1);
            let (low, high) = inner.script.delay;
            let delay = if high > low { inner.rng.random_range(low..high) } else { low };
            let fail = inner.rng.random_range(0..1000) < inner.script.fail_before;
            let world = inner.worlds.entry(id.clone()).or_default();
            world.busy += 1;
            if world.busy > 1 {
                inner.violations.push(format!("{verb:?} of {id} began while another verb was under way"));
            }
            (delay, planned, fail)
        };
        let busy = Busy { driver: self, id: id.clone() };
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
            updates: true,
            needs_loan: true,
            machine: "sim".to_owned(),
            notice: Some("nothing is run: a driver for tests".to_owned()),
        }
    }

    async fn create(&self, id: &SandboxId, _spec: &SandboxSpec, _run: Run) -> Result<Change, DriverError> {
        let busy = self.begin(Verb::Create, id).await?;
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
                Change::Done
            }
        };
        drop(busy);
        self.end_verb(done)
    }

    async fn start(&self, id: &SandboxId, from: Keep, run: Run) -> Result<Change, DriverError> {
        let busy = self.begin(Verb::Start, id).await?;
        let done = {
            let mut inner = self.lock();
            let world = inner.worlds.entry(id.clone()).or_default();
            if !world.storage {
                return Err(DriverError::DataMissing(format!("disk of {id}")));
            }
            match &mut world.compute {
                Some(c) if c.run == run && c.exit.is_none() => {
                    c.agent = true;
                    Change::Already
                }
                Some(c) => {
                    let text = format!("start of run {run} of {id} while run {} is there", c.run);
                    inner.violations.push(text.clone());
                    return Err(DriverError::Invalid(text));
                }
                None if run < world.last_run => {
                    let text = format!("start of run {run} of {id} after run {}", world.last_run);
                    inner.violations.push(text.clone());
                    return Err(DriverError::Invalid(text));
                }
                None if from == Keep::Memory && !world.memory => {
                    return Err(DriverError::DataMissing(format!("memory image of {id}")));
                }
                None => {
                    world.compute = Some(Compute { run, agent: true, exit: None });
                    world.last_run = run;
                    world.memory = false;
                    Change::Done
                }
            }
        };
        drop(busy);
        self.end_verb(done)
    }

    async fn stop(&self, id: &SandboxId, keep: Keep, _deadline: Duration) -> Result<Stopped, DriverError> {
        let busy = self.begin(Verb::Stop, id).await?;
        if keep == Keep::Memory && !self.lock().script.keeps_memory {
            return Err(DriverError::Unsupported("memory images".to_owned()));
        }
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
            Stopped { flushed: alive, kept, detail: None }
        };
        drop(busy);
        self.end_verb(done)
    }

    async fn delete(&self, id: &SandboxId) -> Result<Change, DriverError> {
        let busy = self.begin(Verb::Delete, id).await?;
        let done = {
            let mut inner = self.lock();
            match inner.worlds.get_mut(id) {
                Some(w) if w.storage || w.compute.is_some() => {
                    *w = World { busy: w.busy, ..World::default() };
                    Change::Done
                }
                _ => Change::Already,
            }
        };
        drop(busy);
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
            Some(Compute { run, agent, exit: None }) => Observed::Running { run: *run, agent: *agent },
            None if world.storage => Observed::Stopped { memory: world.memory },
            None => Observed::Missing,
        })
    }

    async fn list(&self) -> Result<Vec<SandboxId>, DriverError> {
        let inner = self.lock();
        let there = inner.worlds.iter().filter(|(_, w)| w.storage || w.compute.is_some());
        Ok(there.map(|(id, _)| id.clone()).collect())
    }

    fn hints(&self) -> Pin<Box<dyn Stream<Item = SandboxId> + Send>> {
        let stream = tokio_stream::wrappers::BroadcastStream::new(self.hints.subscribe());
        // A listener that lags has lost hints, as anybody may.
        Box::pin(stream.filter_map(|hint| async { hint.ok() }))
    }

    async fn agent(&self, _id: &SandboxId) -> Result<tonic::transport::Channel, DriverError> {
        Err(DriverError::Unsupported("the sim driver has no agent".to_owned()))
    }

    async fn facts(&self, id: &SandboxId) -> Facts {
        let inner = self.lock();
        let Some(world) = inner.worlds.get(id) else { return Facts::default() };
        Facts {
            host: world.compute.as_ref().map(|_| HostFacts::default()),
            disk: world.storage.then(DiskFacts::default),
            machine: Some("sim".to_owned()),
            boot_id: world.compute.as_ref().map(|c| format!("boot-{}", c.run)),
        }
    }

    async fn console(&self, _id: &SandboxId, _bytes: usize) -> Vec<u8> {
        Vec::new()
    }
}
