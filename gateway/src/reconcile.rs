//! Makes what is written come true. The only caller of driver verbs.
//!
//! One worker per sandbox that has something to do. One turn: load the record, observe the backend, ask the table, then
//! either write what has happened (compare-and-swap) or do one verb. A verb that is no longer wanted, since the user
//! has turned round, is dropped; the next turn sees what is there. Hints and committed changes only say "look".

mod news;

use std::{
    collections::{HashMap, HashSet},
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use futures::{FutureExt as _, StreamExt as _};
use rand::Rng as _;
use tokio::sync::{Notify, broadcast};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use torpor_netpool::policy::Want;
use torpor_sandbox::{
    Change, ComputeDriver, DriverError, Event, Exit, Failure, Keep, Observed, Phase, Run, SandboxId, State,
    Step, failpoint::hit, lifecycle::step, words::said_within,
};

use self::news::{Done, News, log_change};
use crate::{
    drivers::Drivers,
    egress::InForce,
    error::with_causes,
    maintenance::Maintenance,
    metrics::DriverCalls,
    pools::{Call, Load, Pool, verb_name},
    pressure::Pressure,
    progress::{Progress, Trouble},
    service::Service,
    sessions::Sessions,
    store::{Applied, Record, Store, StoreError},
};

/// A start whose failures may pass is tried again so often at least, and for so long at least, before the sandbox is in Error:
/// whatever is restarted on a host is back by then.
const START_ATTEMPTS: u32 = 5;
const START_PATIENCE: Duration = Duration::from_secs(60);
/// Starts at once, per host CPU.
const BOOTS_PER_CPU: usize = 4;
/// Starts at once of what is not of this host: they wait for others.
const REMOTE_BOOTS: usize = 256;
/// Stops at once.
const STOPS: usize = 256;
/// Creates and deletes at once.
const OTHERS: usize = 64;
/// Of those that wait for something of the host, so many look when something is given back.
const FED_AT_ONCE: usize = 32;
/// Longest message of a failure, characters.
const LONGEST_MESSAGE: usize = 2000;
/// Console kept with a failure, bytes.
const CONSOLE_TAIL: usize = 4096;
/// For an orphan's processes to end.
const ORPHAN_GRACE: Duration = Duration::from_secs(10);
const FIRST_DELAY: Duration = Duration::from_millis(200);
const LONGEST_DELAY: Duration = Duration::from_secs(30);
/// Ready sandboxes are looked at this often even when no hint comes.
const RESYNC: Duration = Duration::from_secs(60);

/// See the module.
pub struct Reconciler {
    store: Arc<Store>,
    drivers: Arc<Drivers>,
    progress: Arc<Progress>,
    sessions: Arc<Sessions>,
    maintenance: Arc<Maintenance>,
    pressure: Arc<Pressure>,
    in_force: Arc<InForce>,
    workers: Mutex<HashMap<SandboxId, Arc<Worker>>>,
    /// Those that wait for something of the host.
    hungry: Mutex<HashSet<SandboxId>>,
    /// Sandboxes that their drivers have deleted, until that is written.
    emptied: Mutex<HashSet<SandboxId>>,
    boots: Pool,
    remote_boots: Pool,
    stops: Pool,
    others: Pool,
    /// What drivers were asked for.
    pub driver_calls: DriverCalls,
    tasks: TaskTracker,
    end: CancellationToken,
}

#[derive(Default)]
struct Worker {
    dirty: AtomicBool,
    poke: Notify,
}

/// What a turn leads to.
enum Turn {
    Again,
    Rest,
    Later(Duration),
}

/// Backoff of one worker.
#[derive(Default)]
struct Backoff {
    failures: u32,
    /// Starts of a run that failed in a way that a repeat may mend: how many, since when.
    starts: Option<(Run, u32, Instant)>,
    /// A run is not started again before this, whoever else has something to say meanwhile.
    not_before: Option<(Run, Instant)>,
}

impl Backoff {
    /// One more failed start of `run`; whether it is worth another one.
    fn start_failed(&mut self, run: Run) -> bool {
        let known = self.starts.filter(|(of, ..)| *of == run);
        let (before, since) = known.map_or((0, Instant::now()), |(_, count, since)| (count, since));
        self.starts = Some((run, before + 1, since));
        before + 1 < START_ATTEMPTS || since.elapsed() < START_PATIENCE
    }

    /// What is left of the pause before a start of `run`.
    fn pause(&self, run: Run) -> Option<Duration> {
        let (_, until) = self.not_before.filter(|(of, _)| *of == run)?;
        Some(until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
    }

    fn next(&mut self) -> Duration {
        let factor = 1_u32 << self.failures.min(10);
        self.failures = self.failures.saturating_add(1);
        let delay = FIRST_DELAY.saturating_mul(factor).min(LONGEST_DELAY);
        delay.mul_f64(rand::rng().random_range(0.75..1.25))
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reconciler {
    /// For the same world as `service`. Nothing happens before [`Reconciler::run`].
    pub fn new(service: &Service) -> Arc<Self> {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Arc::new(Self {
            store: service.store.clone(),
            drivers: service.drivers.clone(),
            progress: service.progress.clone(),
            sessions: service.sessions.clone(),
            maintenance: service.maintenance.clone(),
            pressure: service.pressure.clone(),
            in_force: service.in_force.clone(),
            workers: Mutex::default(),
            hungry: Mutex::default(),
            emptied: Mutex::default(),
            boots: Pool::new("start", cpus * BOOTS_PER_CPU),
            remote_boots: Pool::new("start_remote", REMOTE_BOOTS),
            stops: Pool::new("stop", STOPS),
            others: Pool::new("other", OTHERS),
            driver_calls: DriverCalls::default(),
            tasks: TaskTracker::new(),
            end: service.end.clone(),
        })
    }

    /// What there is to do now.
    pub fn load(&self) -> Load {
        Load {
            active: locked(&self.workers).len(),
            hungry: locked(&self.hungry).len(),
            pools: [&self.boots, &self.remote_boots, &self.stops, &self.others].map(Pool::load),
        }
    }

    /// Follows changes and hints until the gateway ends.
    pub async fn run(self: Arc<Self>) {
        let changes = self.store.subscribe();
        let hints = futures::stream::select_all(self.drivers.all().map(|d| d.hints()));
        let shortages = futures::stream::select_all(self.drivers.all().map(|d| d.shortages()));
        self.look_at_unsettled().await;
        tokio::join!(
            self.follow_changes(changes),
            self.follow_hints(hints),
            self.follow_shortages(shortages),
            self.resync()
        );
    }

    /// Waits until no turn is under way any more; call after `end` was cancelled.
    pub async fn finish(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    async fn look_at_unsettled(self: &Arc<Self>) {
        match self.store.unsettled().await {
            Ok(ids) => ids.iter().for_each(|id| self.look(id)),
            Err(error) => tracing::error!(%error, "cannot read which sandboxes need attention"),
        }
    }

    async fn follow_changes(self: &Arc<Self>, mut changes: broadcast::Receiver<crate::store::Change>) {
        loop {
            let change = tokio::select! {
                change = changes.recv() => change,
                () = self.end.cancelled() => return,
            };
            match change {
                Ok(change) => {
                    let state = &change.record.state;
                    if change.gone || state.phase != Phase::Ready {
                        self.sessions.revoke(&change.record.id);
                    }
                    let asleep =
                        matches!(state.phase, Phase::Suspended | Phase::Stopped) && state.then.is_none();
                    if !change.gone && !asleep {
                        self.look(&change.record.id);
                    }
                }
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    tracing::warn!(missed, "fell behind: looking at everything that is not at rest");
                    self.revoke_those_not_ready().await;
                    self.look_at_unsettled().await;
                }
                Err(broadcast::error::RecvError::Closed) => return,
            }
        }
    }

    async fn revoke_those_not_ready(&self) {
        for id in self.sessions.ids() {
            let ready =
                self.store.get(id.as_str()).await.is_ok_and(|record| record.state.phase == Phase::Ready);
            if !ready {
                self.sessions.revoke(&id);
            }
        }
    }

    async fn follow_hints(self: &Arc<Self>, mut hints: impl futures::Stream<Item = SandboxId> + Unpin) {
        loop {
            tokio::select! {
                hint = hints.next() => match hint {
                    Some(id) => self.look(&id),
                    None => return,
                },
                () = self.end.cancelled() => return,
            }
        }
    }

    /// What running sandboxes find out about the host's disk before anybody else does.
    async fn follow_shortages(&self, mut shortages: impl futures::Stream<Item = SandboxId> + Unpin) {
        loop {
            tokio::select! {
                short = shortages.next() => match short {
                    Some(id) => {
                        tracing::warn!(%id, "the host has no room for what this sandbox writes");
                        self.pressure.note_failure();
                    }
                    None => return,
                },
                () = self.end.cancelled() => return,
            }
        }
    }

    async fn resync(self: &Arc<Self>) {
        let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + RESYNC, RESYNC);
        loop {
            tokio::select! {
                _ = tick.tick() => self.look_at_unsettled().await,
                () = self.end.cancelled() => return,
            }
        }
    }

    /// Sees to it that a turn is taken for `id`.
    pub fn look(self: &Arc<Self>, id: &SandboxId) {
        if self.end.is_cancelled() {
            return;
        }
        let mut workers = locked(&self.workers);
        if let Some(worker) = workers.get(id) {
            worker.dirty.store(true, Ordering::SeqCst);
            worker.poke.notify_one();
            return;
        }
        let worker = Arc::new(Worker::default());
        workers.insert(id.clone(), worker.clone());
        let (this, id) = (self.clone(), id.clone());
        self.tasks.spawn(async move {
            let end = this.end.clone();
            // A gateway that ends drops what is under way, as a killed one would; the next one goes on from there.
            let work = AssertUnwindSafe(this.work(&id, &worker)).catch_unwind();
            let panicked = tokio::select! {
                done = work => done.is_err(),
                () = end.cancelled() => false,
            };
            if panicked {
                tracing::error!(%id, "a turn panicked; it is taken again in a while");
                locked(&this.workers).remove(&id);
                tokio::select! {
                    () = tokio::time::sleep(LONGEST_DELAY) => this.look(&id),
                    () = end.cancelled() => {}
                }
            }
        });
    }

    async fn work(self: &Arc<Self>, id: &SandboxId, worker: &Worker) {
        let mut backoff = Backoff::default();
        loop {
            worker.dirty.store(false, Ordering::SeqCst);
            match self.turn(id, worker, &mut backoff).await {
                Turn::Again => {}
                Turn::Later(delay) => {
                    tokio::select! {
                        () = tokio::time::sleep(delay) => {}
                        () = worker.poke.notified() => {}
                    }
                }
                Turn::Rest => {
                    let mut workers = locked(&self.workers);
                    if !worker.dirty.load(Ordering::SeqCst) {
                        workers.remove(id);
                        self.progress.clear(id);
                        return;
                    }
                }
            }
        }
    }

    async fn turn(&self, id: &SandboxId, worker: &Worker, backoff: &mut Backoff) -> Turn {
        let record = match self.store.get(id.as_str()).await {
            Ok(record) => record,
            Err(StoreError::NotFound(_)) => return Turn::Rest,
            Err(error) => {
                tracing::error!(%id, %error, "cannot read the sandbox");
                return Turn::Later(backoff.next());
            }
        };
        let Some(driver) = self.drivers.get(&record.spec.driver) else {
            let message = format!("driver '{}' is not among this gateway's `drivers`", record.spec.driver);
            tracing::warn!(%id, message);
            self.progress.trouble(id, Trouble::new("DRIVER_MISSING", message));
            return Turn::Later(LONGEST_DELAY);
        };
        if let Some(delay) = restart_delay(&record) {
            return Turn::Later(delay);
        }
        if hit("reconcile.turn").is_err() {
            return Turn::Later(backoff.next());
        }
        let call = Call::begin(&self.driver_calls, &record.spec.driver, "observe");
        let observed = driver.observe(id).await;
        call.end(observed.as_ref().err().map(DriverError::reason));
        let observed = observed.unwrap_or_else(|error| Observed::Unknown(error.to_string()));
        let nothing_runs = matches!(observed, Observed::Stopped { .. } | Observed::Missing);
        match self.asked_first(&record, driver.as_ref(), step(&record.state, &observed)) {
            Step::Rest if nothing_runs => self.rest(&record, backoff).await,
            // A guest that silences its agent gets no other policy by that.
            Step::Rest => match self.adjust(&record, driver.as_ref(), backoff).await {
                Turn::Rest if matches!(observed, Observed::Running { agent: false, .. }) => {
                    let text = "the compute runs, its agent does not answer";
                    self.progress.trouble(id, Trouble::new("AGENT_UNREACHABLE", text));
                    Turn::Later(backoff.next())
                }
                turn => turn,
            },
            Step::Wait => {
                if let Observed::Unknown(why) = observed {
                    self.progress.trouble(id, Trouble::new("BACKEND_UNKNOWN", why));
                }
                Turn::Later(backoff.next())
            }
            Step::Happened(event) => {
                let release = nothing_runs;
                self.write(&record, driver.as_ref(), News::of(event, release), backoff).await
            }
            verb @ (Step::Start(_) | Step::Create) => match backoff.pause(record.state.run) {
                Some(left) => Turn::Later(left),
                None => self.act(&record, driver.as_ref(), verb, worker, backoff).await,
            },
            verb => self.act(&record, driver.as_ref(), verb, worker, backoff).await,
        }
    }

    /// What runs goes by what its record says now, also when whoever changed it could not see to that.
    async fn adjust(&self, record: &Record, driver: &dyn ComputeDriver, backoff: &mut Backoff) -> Turn {
        match self.in_force.see_to(driver, &record.id).await {
            Ok(change) => {
                if change == Change::Done {
                    tracing::info!(id = %record.id, "its run goes by the changed spec now");
                }
                Turn::Rest
            }
            Err(error) => {
                let delay = backoff.next();
                tracing::warn!(id = %record.id, error = words(&error), ?delay, "its run does not go by the changed spec yet");
                self.progress.trouble(&record.id, Trouble::new(error.reason(), words(&error)));
                Turn::Later(delay)
            }
        }
    }

    /// At rest with nothing running: nothing may be lent either (an Error or Completed row that held a loan).
    async fn rest(&self, record: &Record, backoff: &mut Backoff) -> Turn {
        if matches!(record.state.phase, Phase::Error | Phase::Completed) {
            if hit("reconcile.rest").is_err() {
                return Turn::Later(backoff.next());
            }
            match self.store.release(&record.id).await {
                Ok(true) => self.feed_the_hungry(),
                Ok(false) => {}
                Err(error) => {
                    tracing::error!(id = %record.id, %error, "cannot give back the loan");
                    return Turn::Later(backoff.next());
                }
            }
        }
        Turn::Rest
    }

    /// Writes what has happened; a stale version means that somebody asked for something meanwhile: look again.
    async fn write(
        &self,
        record: &Record,
        driver: &dyn ComputeDriver,
        News { event, release, why }: News,
        backoff: &mut Backoff,
    ) -> Turn {
        if hit("reconcile.write").is_err() {
            return Turn::Later(backoff.next());
        }
        let console = match &event {
            Event::Ended(ended)
                if matches!(ended.exit, Exit::Panic(_) | Exit::Lost(_) | Exit::Interrupted(_)) =>
            {
                tail(driver, &record.id).await
            }
            _ => String::new(),
        };
        let written =
            self.store.happened(&record.id, record.version, event.clone(), why, release, console).await;
        if hit("reconcile.written").is_err() {
            return Turn::Later(backoff.next());
        }
        match written {
            Ok(Applied { gone: true, .. }) => {
                tracing::info!(id = %record.id, name = record.name, "deleted");
                self.feed_the_hungry();
                Turn::Rest
            }
            Ok(applied) => {
                if applied.changed {
                    log_change(record, &applied.record, &event);
                    backoff.failures = 0;
                    self.progress.clear(&record.id);
                }
                if release {
                    self.feed_the_hungry();
                }
                if applied.changed { Turn::Again } else { Turn::Rest }
            }
            Err(StoreError::Stale { .. }) => Turn::Again,
            Err(StoreError::NotFound(_)) => Turn::Rest,
            Err(error) => {
                tracing::error!(id = %record.id, %error, "cannot write what has happened");
                Turn::Later(backoff.next())
            }
        }
    }

    fn feed_the_hungry(&self) {
        // A few: the rest is fed by what comes after, or looks by itself.
        let hungry: Vec<SandboxId> = {
            let mut hungry = locked(&self.hungry);
            let few = hungry.iter().take(FED_AT_ONCE).cloned().collect::<Vec<_>>();
            hungry.retain(|id| !few.contains(id));
            few
        };
        let workers = locked(&self.workers);
        for id in hungry {
            if let Some(worker) = workers.get(&id) {
                worker.poke.notify_one();
            }
        }
    }

    /// Ends compute that no record knows; its storage stays.
    pub async fn end_orphan(&self, driver: &dyn ComputeDriver, id: &SandboxId) {
        match driver.stop(id, Keep::Disk, ORPHAN_GRACE).await {
            Ok(_) => {
                tracing::warn!(%id, "compute that no record knows was ended; its disk is left where it is")
            }
            Err(error) => {
                tracing::error!(%id, error = words(&error), "compute that no record knows can't be ended")
            }
        }
    }

    /// Does one verb, unless it stops being wanted.
    async fn act(
        &self,
        record: &Record,
        driver: &dyn ComputeDriver,
        verb: Step,
        worker: &Worker,
        backoff: &mut Backoff,
    ) -> Turn {
        self.progress.step(&record.id, step_name(&verb));
        // While it waits for its turn a worker is small.
        let mut place = Box::pin(async {
            self.past_operations(record, &verb).await;
            self.pool(&verb, driver).place().await
        });
        let permit = loop {
            tokio::select! {
                permit = &mut place => break permit,
                () = worker.poke.notified() => {
                    if !self.still_wanted(record, &verb).await {
                        return Turn::Again;
                    }
                }
            }
        };
        drop(place);
        let Ok(permit) = permit else { return Turn::Later(backoff.next()) };
        let call = Call::begin(&self.driver_calls, &record.spec.driver, verb_name(&verb));
        let mut doing = Box::pin(self.perform(record, driver, &verb));
        let result = loop {
            tokio::select! {
                result = &mut doing => break result,
                () = worker.poke.notified() => {
                    if !self.still_wanted(record, &verb).await {
                        tracing::info!(id = %record.id, verb = step_name(&verb), "turned round: dropped");
                        return Turn::Again;
                    }
                }
            }
        };
        drop((doing, permit));
        call.end(result.as_ref().err().map(DriverError::reason));
        match result {
            Ok(Done::Look) => Turn::Again,
            Ok(Done::News(news)) => self.write_latest(record, driver, &verb, news, backoff).await,
            Err(error) => self.failed(record, driver, &verb, error, backoff).await,
        }
    }

    /// The verb is done, so its result holds for whatever version the record has by now, if it still wants it.
    async fn write_latest(
        &self,
        record: &Record,
        driver: &dyn ComputeDriver,
        verb: &Step,
        news: News,
        backoff: &mut Backoff,
    ) -> Turn {
        match self.store.get(record.id.as_str()).await {
            Ok(latest) if wants(&latest.state, &record.state, verb) => {
                match self.write(&latest, driver, news, backoff).await {
                    // The verb was a step on the way (an older life put down): look what is there now, at once, and
                    // slower each time if that goes on without a change.
                    Turn::Rest if backoff.failures == 0 => {
                        backoff.failures = 1;
                        Turn::Again
                    }
                    Turn::Rest => Turn::Later(backoff.next()),
                    turn => turn,
                }
            }
            Ok(_) => Turn::Again,
            Err(StoreError::NotFound(_)) => Turn::Rest,
            Err(_) => Turn::Later(backoff.next()),
        }
    }

    async fn still_wanted(&self, record: &Record, verb: &Step) -> bool {
        match self.store.get(record.id.as_str()).await {
            Ok(latest) => wants(&latest.state, &record.state, verb),
            Err(StoreError::NotFound(_)) => false,
            Err(_) => true,
        }
    }

    /// How many verbs of a kind are done at once.
    fn pool(&self, verb: &Step, driver: &dyn ComputeDriver) -> &Pool {
        match verb {
            Step::Start(_) if driver.is_of_this_host() => &self.boots,
            Step::Start(_) => &self.remote_boots,
            // Stops wait for guests, which may take their time: they have places of their own.
            Step::Stop(_) => &self.stops,
            _ => &self.others,
        }
    }

    async fn perform(
        &self,
        record: &Record,
        driver: &dyn ComputeDriver,
        verb: &Step,
    ) -> Result<Done, DriverError> {
        let (id, spec, state) = (&record.id, &record.spec, &record.state);
        match verb {
            Step::Create => {
                hit("reconcile.create")?;
                driver.create(id, spec, state.run).await?;
                hit("reconcile.created")?;
                Ok(Done::News(News::of(Event::Created, false)))
            }
            Step::Start(from) => {
                hit("reconcile.start")?;
                if driver.capabilities().needs_loan {
                    let want = Want { cpus: spec.resources.cpus, memory_bytes: spec.resources.memory_bytes };
                    // Hungry first: what is given back from now on is not missed.
                    locked(&self.hungry).insert(id.clone());
                    self.store.lend(id, state.run, want).await.map_err(|e| match e {
                        StoreError::Exhausted(what) => DriverError::Exhausted(what),
                        StoreError::NeverFits(what) => DriverError::Invalid(what),
                        other => DriverError::backend("writing the loan", other),
                    })?;
                    locked(&self.hungry).remove(id);
                }
                hit("reconcile.lent")?;
                // Who changes it from now on sees to that itself.
                self.in_force.see_to(driver, id).await?;
                driver.start(id, *from, state.run).await?;
                hit("reconcile.started")?;
                Ok(Done::News(News::of(Event::Started(state.run), false)))
            }
            Step::Stop(keep) => {
                hit("reconcile.stop")?;
                let stopped = driver.stop(id, *keep, spec.stop_grace).await?;
                hit("reconcile.stopped")?;
                if let Some(detail) = &stopped.detail {
                    tracing::warn!(%id, flushed = stopped.flushed, detail, "stopped, but not as asked");
                }
                let event = Event::Stopped { flushed: Some(stopped.flushed), kept: stopped.kept };
                let mut news = News::of(event, true);
                if let (Keep::Memory, Keep::Disk, Some(detail)) = (*keep, stopped.kept, stopped.detail) {
                    news.why = format!("{}; {}", news.why, said_within(&detail, LONGEST_MESSAGE));
                }
                Ok(Done::News(news))
            }
            Step::Delete => {
                hit("reconcile.delete")?;
                driver.delete(id).await?;
                hit("reconcile.deleted")?;
                // The record goes with the next turn, which sees that nothing is left.
                self.store.release(id).await.map_err(|e| DriverError::backend("giving back the loan", e))?;
                hit("reconcile.delete_released")?;
                locked(&self.emptied).insert(id.clone());
                Ok(Done::Look)
            }
            Step::Rest | Step::Wait | Step::Happened(_) => Ok(Done::Look),
        }
    }

    /// What is elsewhere and isn't seen may be there all the same, when what is noted of it here is lost: a deletion is
    /// believed of a driver that has looked for it.
    fn asked_first(&self, record: &Record, driver: &dyn ComputeDriver, step: Step) -> Step {
        match step {
            Step::Happened(Event::Deleted)
                if !locked(&self.emptied).remove(&record.id)
                    && record.state.created
                    && !driver.is_of_this_host() =>
            {
                Step::Delete
            }
            step => step,
        }
    }

    /// Waits until no operation works on the sandbox's disk.
    async fn past_operations(&self, record: &Record, verb: &Step) {
        let (id, mut waited) = (&record.id, false);
        let asked = match record.state.phase {
            Phase::Deleting => "delete",
            Phase::Resuming => "resume",
            Phase::Suspending | Phase::Stopping => "stop",
            _ => "start",
        };
        let tell = |text| {
            waited = true;
            self.progress.step(id, text);
        };
        self.maintenance.make_way(id, asked, tell).await;
        if waited {
            self.progress.step(id, step_name(verb));
        }
    }

    async fn failed(
        &self,
        record: &Record,
        driver: &dyn ComputeDriver,
        verb: &Step,
        error: DriverError,
        backoff: &mut Backoff,
    ) -> Turn {
        let id = &record.id;
        let reason = error.reason();
        let message = words(&error);
        let exhausted = error.waits_for_host();
        if matches!(error, DriverError::NoSpace(_)) {
            self.pressure.note_failure();
        }
        let retry = match verb {
            // What is to be stopped or removed is stopped or removed, however long it takes; what can't work by
            // its nature is given up.
            Step::Delete => true,
            Step::Stop(_) => !matches!(error, DriverError::Unsupported(_)) || record.state.phase.is_settled(),
            _ => exhausted || (error.is_transient() && backoff.start_failed(record.state.run)),
        };
        self.progress.trouble(id, Trouble::new(reason, message.clone()));
        if retry {
            let delay = backoff.next();
            // What the host lacks may be given back at any moment.
            if !exhausted && matches!(verb, Step::Start(_) | Step::Create) {
                backoff.not_before = Some((record.state.run, Instant::now() + delay));
            }
            if matches!(error, DriverError::Pending(_)) {
                tracing::info!(%id, verb = step_name(verb), message, ?delay, "is waited for");
            } else {
                tracing::warn!(%id, verb = step_name(verb), reason, error = message, ?delay, "failed, will be tried again");
            }
            return Turn::Later(delay);
        }
        let console = match error {
            DriverError::Failed { console, .. } => console,
            _ => String::new(),
        };
        let failure = Failure {
            step: step_name(verb).to_owned(),
            reason: reason.to_owned(),
            message,
            console,
            at: SystemTime::now(),
        };
        self.write_latest(record, driver, verb, News::of(Event::Failed(failure), false), backoff).await
    }
}

/// Whether a verb that was begun for `then` is still what `now` wants.
fn wants(now: &State, then: &State, verb: &Step) -> bool {
    match verb {
        Step::Create => !now.created && now.phase != Phase::Deleting,
        Step::Start(_) => now.phase.is_booting() && now.run == then.run && now.keep == then.keep,
        // A stop that became a suspend, or the other way round, is the same work while it keeps the same.
        Step::Stop(keep) => {
            let stopping = matches!(now.phase, Phase::Suspending | Phase::Stopping);
            (now.phase == then.phase || stopping)
                && now.run == then.run
                && (!stopping || now.keep == *keep || *keep == Keep::Disk)
        }
        Step::Delete => now.phase == Phase::Deleting,
        Step::Rest | Step::Wait | Step::Happened(_) => false,
    }
}

/// Restarts by policy come slower and slower while the runs before them don't last.
fn restart_delay(record: &Record) -> Option<Duration> {
    if record.state.phase != Phase::Starting || record.state.streak == 0 {
        return None;
    }
    let factor = 1_u32 << (record.state.streak - 1).min(6);
    let pause = Duration::from_secs(1).saturating_mul(factor).min(Duration::from_secs(60));
    let left = (record.since + pause).duration_since(SystemTime::now()).ok().filter(|d| !d.is_zero());
    // A clock that was set back must not make it longer.
    left.map(|left| left.min(pause))
}

fn step_name(step: &Step) -> &'static str {
    match step {
        Step::Create => "create disk",
        Step::Start(Keep::Disk) => "start",
        Step::Start(Keep::Memory) => "restore",
        Step::Stop(_) => "stop",
        Step::Delete => "delete",
        Step::Rest | Step::Wait | Step::Happened(_) => "look",
    }
}

async fn tail(driver: &dyn ComputeDriver, id: &SandboxId) -> String {
    String::from_utf8_lossy(&driver.console(id, CONSOLE_TAIL).await).into_owned()
}

/// What is written of an error: with its causes, printable and of bounded length.
fn words(error: &DriverError) -> String {
    // Some of it may be a guest's words.
    said_within(&with_causes(error), LONGEST_MESSAGE)
}
