//! The verbs.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    sync::broadcast,
    time::{Instant, timeout},
};
use tonic::transport::Channel;
use torpor_driver_common::{Turn, Turns, turns::blocking};
use torpor_netpool::Ledger;
use torpor_sandbox::{
    Capabilities, Change, ComputeDriver, DiskCare, DriverError, Ended, Exit, Facts, Field, Observed, Run,
    SandboxId, SandboxSpec, Stopped,
    driver::{DiskFacts, HostFacts, Word, word_of},
    failpoint::hit,
    lifecycle::Keep,
};

use crate::{
    assets::Assets,
    config::{ConfigError, VmConfig},
    egress,
    host::Host,
    live::Live,
    machine::Machines,
    owner::Owner,
    probe::{self, Probe},
    rundir::{self, RunDir},
    store::Store,
    vm::Vm,
};

/// How long `observe` waits for an agent.
const AGENT_WAIT: Duration = Duration::from_millis(1200);
/// How long a killed process may take to go: longer means that it hangs in the kernel.
const KILL_WAIT: Duration = Duration::from_secs(10);
/// How long the console of a living VM is waited for.
const CONSOLE_WAIT: Duration = Duration::from_millis(500);
/// Hints that nobody has read yet; more are dropped, oldest first.
const HINTS: usize = 1024;

/// Runs sandboxes as virtual machines on this host.
pub struct VmDriver {
    pub(crate) config: VmConfig,
    pub(crate) host: Arc<Host>,
    probe: Probe,
    pub(crate) hints: broadcast::Sender<SandboxId>,
    /// Whose disks the host has no room for.
    pub(crate) shortages: broadcast::Sender<SandboxId>,
    pub(crate) live: Live,
    pub(crate) turns: Turns,
    /// Whose loan, process and TAP did not agree at the last sweep.
    pub(crate) odd: Mutex<BTreeSet<SandboxId>>,
    /// Last: given up when all else is. Not the host's, which outlives the driver in steps that nobody waits for any more.
    _owner: Owner,
}

impl std::fmt::Debug for VmDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmDriver")
            .field("config", &self.config)
            .field("probe", &self.probe)
            .finish_non_exhaustive()
    }
}

impl Drop for VmDriver {
    fn drop(&mut self) {
        let live = self.live.get_mut().unwrap_or_else(PoisonError::into_inner);
        live.values().for_each(|vm| vm.abandon());
    }
}

impl VmDriver {
    /// A driver for what is below the directories of `config`. Blocks for as long as the KVM probe takes, the first
    /// time on a booted host. Starts and stops nothing: [`VmDriver::sweep`] does.
    ///
    /// # Errors
    /// A value of the configuration that can't work, a folder that can't be made, or a run directory that is another
    /// gateway's.
    pub fn new(config: VmConfig, ledger: Arc<dyn Ledger>) -> Result<Arc<Self>, ConfigError> {
        config.validate()?;
        let folder = |path: &std::path::Path, source| ConfigError::Folder { path: path.to_owned(), source };
        let store = Store::open(&config.state_dir).map_err(|source| folder(&config.state_dir, source))?;
        std::fs::create_dir_all(&config.run_dir).map_err(|source| folder(&config.run_dir, source))?;
        let owner = Owner::claim(&config.run_dir, &config.state_dir)?;
        let assets = Assets::open(&config)?;
        let probe = match &config.probe {
            Some(program) => probe::cached(program, &config.state_dir),
            None => Probe::not_looked(),
        };
        let machines = Machines::open(&config, &probe)?;
        tracing::info!(machine = machines.choice(), "the machine of sandboxes that name none");
        let host = Arc::new(Host::new(&config, store, assets, ledger, machines));
        let ((hints, _), (shortages, _)) = (broadcast::channel(HINTS), broadcast::channel(HINTS));
        let (live, turns, odd) = Default::default();
        Ok(Arc::new(Self { config, host, probe, hints, shortages, live, turns, odd, _owner: owner }))
    }

    /// What was found out about this host's KVM.
    pub fn probe(&self) -> &Probe {
        &self.probe
    }

    /// One step that changes something on the host, which blocks. It runs to its end even when the caller is dropped.
    pub(crate) async fn step<T: Send + 'static>(
        &self,
        id: &SandboxId,
        turn: &Turn,
        work: impl FnOnce(&Host) -> Result<T, DriverError> + Send + 'static,
    ) -> Result<T, DriverError> {
        let host = Arc::clone(&self.host);
        self.turns.blocking_step(id, turn, move || work(&host)).await
    }

    /// Checks, borrows and starts; the VM runs afterwards, its guest boots.
    async fn launch(
        &self,
        id: &SandboxId,
        run: Run,
        turn: &Turn,
    ) -> Result<(Arc<Vm>, SandboxSpec), DriverError> {
        let (host, wanted) = (Arc::clone(&self.host), id.clone());
        let mut prepared = blocking(move || host.prepare(&wanted, run)).await?;
        let wanted = id.clone();
        let launched = self.step(id, turn, move |host| {
            // As it is now: it may have been changed since, and from now on whoever changes it finds the run.
            let egress = host.store.spec(&wanted)?.egress;
            prepared.spec.egress = egress;
            prepared.net.egress = Some(egress::of_spec(host.pool(), &prepared.spec)?);
            let launched = host.launch(&wanted, run, &prepared);
            if launched.is_err()
                && let Err(error) = host.release(&wanted)
            {
                tracing::warn!(sandbox = %wanted, %error, "a failed start left something; stop will find it");
            }
            launched.map(|(record, handle)| (record, handle, prepared.spec))
        });
        let (record, handle, spec) = launched.await?;
        Ok((self.started(record, handle).await, spec))
    }

    /// Ends the VM without asking its guest, and sees it gone.
    pub(crate) async fn kill(&self, vm: &Vm) -> Result<(), DriverError> {
        let pid = vm.handle.identity().pid;
        vm.handle
            .kill()
            .map_err(|source| DriverError::backend(format!("kill the VM process {pid}"), source))?;
        timeout(KILL_WAIT, vm.gone()).await.map_err(|_| {
            let text = format!("it is still there {} s after SIGKILL", KILL_WAIT.as_secs());
            DriverError::backend(format!("end the VM process {pid}"), text)
        })
    }

    /// Ends whatever runs and gives everything back. `deadline` none: the guest isn't asked.
    async fn put_down(
        &self,
        id: &SandboxId,
        turn: &Turn,
        deadline: Option<Duration>,
    ) -> Result<Stopped, DriverError> {
        let mut stopped = Stopped { flushed: false, kept: Keep::Disk, detail: None };
        if let Some(vm) = self.live(id).await? {
            let until = Instant::now() + deadline.unwrap_or_default();
            let flushed = match deadline {
                Some(_) => self.flush(&vm, turn, until).await,
                None => Err("it was not asked to end".to_owned()),
            };
            match flushed {
                Ok(()) => stopped.flushed = true,
                Err(why) => stopped.detail = Some(why),
            }
            hit("vm.stop.flushed")?;
            vm.end_process(stopped.flushed, deadline.is_some()).await;
            // A disk that its machine could not close is not flushed, whatever the guest was told.
            if let Some(why) = vm.seen().disk_error {
                (stopped.flushed, stopped.detail) = (false, Some(why));
            }
            if !vm.seen().gone {
                self.kill(&vm).await?;
            }
            self.forget(&vm);
        } else {
            match self.leftovers(id, ended_flushed).await? {
                Some(true) => stopped.flushed = true,
                Some(false) => stopped.detail = Some("it had ended before".to_owned()),
                None => {}
            }
        }
        hit("vm.stop.ended")?;
        let (wanted, flushed) = (id.clone(), stopped.flushed);
        let release = move |host: &Host| {
            if flushed {
                host.close_overlay(&wanted);
            }
            host.release(&wanted)
        };
        self.step(id, turn, release).await?;
        Ok(stopped)
    }

    /// Lets the guest flush and end, and notes that it has flushed: a stop that is cut short after it is asked again.
    async fn flush(&self, vm: &Vm, turn: &Turn, until: Instant) -> Result<(), String> {
        let run = vm.record.run;
        if vm.on_disk(move |dir| Ok(dir.flushed(run))).await.unwrap_or_default() {
            return Ok(());
        }
        vm.shut_down(until).await?;
        let (id, dir) = (&vm.record.sandbox, vm.dir.clone());
        if let Err(error) = self.step(id, turn, move |_| dir.write_flushed(run)).await {
            tracing::warn!(sandbox = %id, %error, "that the guest has flushed is not noted");
        }
        Ok(())
    }

    /// What can be read from the folder of a run whose process is gone, if there is one.
    async fn leftovers<T: Send + 'static>(
        &self,
        id: &SandboxId,
        read: fn(&RunDir) -> T,
    ) -> Result<Option<T>, DriverError> {
        let (host, dir) = (Arc::clone(&self.host), self.host.run_dir(id));
        blocking(move || {
            if !dir.exists() {
                return Ok(None);
            }
            host.hear_out(&dir);
            Ok(Some(read(&dir)))
        })
        .await
    }

    fn failed(step: &str, cause: String, console: &[u8]) -> DriverError {
        let console = String::from_utf8_lossy(console).into_owned();
        DriverError::Failed { step: step.to_owned(), cause, console }
    }

    /// Waits for the agent; what doesn't come up is put down again.
    async fn bring_up(&self, vm: &Arc<Vm>, spec: &SandboxSpec, turn: &Turn) -> Result<(), DriverError> {
        let id = &vm.record.sandbox;
        let (host, of) = (Arc::clone(&self.host), Arc::clone(vm));
        let network = blocking(move || Ok(of.network(&host))).await?;
        let Err(cause) = vm.wait_ready(spec, network, self.config.boot_timeout).await else {
            // A later gateway must know that there is something to flush before anybody hears that it is ready.
            let vm = Arc::clone(vm);
            let write = move |_: &Host| vm.news().map_or(Ok(()), |record| vm.dir.write_record(&record));
            return self.step(id, turn, write).await;
        };
        vm.drain(CONSOLE_WAIT).await;
        let console = vm.on_disk(|dir| Ok(dir.console(4096))).await.unwrap_or_default();
        self.put_down(id, turn, None).await?;
        Err(Self::failed("boot", cause, &console))
    }

    async fn observe_live(&self, vm: &Vm) -> Observed {
        let run = vm.record.run;
        let seen = vm.seen();
        if let Some(exit) = seen.exit {
            return Observed::Ended(Ended { run, exit });
        }
        match vm.status(AGENT_WAIT).await {
            Some(status) if status.run == run.0 => match status.main_exit {
                Some(main) => Observed::Ended(Ended { run, exit: Exit::Code(main.code) }),
                None => Observed::Running { run, agent: status.configured },
            },
            _ => match vm.seen().exit {
                Some(exit) => Observed::Ended(Ended { run, exit }),
                None => Observed::Running { run, agent: false },
            },
        }
    }
}

#[async_trait]
impl ComputeDriver for VmDriver {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "vm".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            keeps_memory: false,
            no_memory: None,
            updates: true,
            needs_loan: true,
            machine: self.host.machines.default().label().to_owned(),
            notice: self.host.machines.default().notice(),
        }
    }

    fn check(&self, spec: &SandboxSpec) -> Result<(), DriverError> {
        egress::of_spec(self.host.pool(), spec)?;
        self.host.machines.get(&spec.machine, spec.resources.cpus)?;
        if !spec.volumes.is_empty() {
            return Err(DriverError::Unsupported(
                "volumes: a virtual machine mounts nothing of the host".into(),
            ));
        }
        match spec.kernel.as_deref().map(std::fs::metadata) {
            Some(Err(error)) => Err(DriverError::Invalid(format!(
                "kernel: '{}': {error}",
                spec.kernel.as_deref().unwrap_or_default()
            ))),
            Some(Ok(found)) if !found.is_file() => Err(DriverError::Invalid("kernel: not a file".to_owned())),
            _ => Ok(()),
        }
    }

    fn disks(&self) -> Option<&dyn DiskCare> {
        Some(self)
    }

    async fn create(&self, id: &SandboxId, spec: &SandboxSpec, _run: Run) -> Result<Change, DriverError> {
        let turn = self.turns.turn(id).await;
        let (wanted, spec) = (id.clone(), spec.clone());
        self.step(id, &turn, move |host| {
            let base = host.assets.base(&spec.image_digest)?;
            host.store.create(&wanted, &spec, &base)
        })
        .await
    }

    async fn adjust(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        let (wanted, own) = (egress::of_spec(self.host.pool(), spec)?, spec.egress.clone());
        // Asked for again and again: what all of it goes by already is not looked at.
        let watched = self.watched(id);
        if watched.as_ref().is_some_and(|vm| vm.goes_by(&own)) {
            return Ok(Change::Already);
        }
        // Whoever drops this half-way leaves it to the next one to find out.
        if let Some(vm) = watched {
            vm.set_settled(None);
        }
        let (host, wanted_id, noting) = (Arc::clone(&self.host), id.clone(), own.clone());
        // First, so that a start that finds nothing of this run yet goes by it.
        let noted = self.turns.aside(id, move || host.store.note_egress(&wanted_id, &noting)).await;
        if matches!(noted, Ok(Change::Done)) {
            hit("vm.adjust.noted")?;
        }
        let Some(vm) = self.live(id).await?.filter(|vm| !vm.seen().gone) else { return noted };
        // What runs is told even when a disk is too full to note it.
        let (host, of) = (Arc::clone(&self.host), Arc::clone(&vm));
        let settles = noted.is_ok().then_some(own);
        let told = self.turns.aside(id, move || host.let_go_by(&of, wanted, settles)).await?;
        Ok(if noted? == Change::Done { Change::Done } else { told })
    }

    fn updates(&self) -> &'static [Field] {
        Field::ALL
    }

    async fn update(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        let turn = self.turns.turn(id).await;
        let (wanted, spec) = (id.clone(), spec.clone());
        self.step(id, &turn, move |host| host.store.update(&wanted, &spec)).await
    }

    async fn start(&self, id: &SandboxId, from: Keep, run: Run) -> Result<Change, DriverError> {
        if from == Keep::Memory {
            return Err(DriverError::Unsupported(
                "this driver keeps no memory images; start from the disk".into(),
            ));
        }
        let turn = self.turns.turn(id).await;
        if let Some(vm) = self.live(id).await? {
            if vm.record.run != run {
                let text = format!(
                    "run {} is still there; it must be stopped before run {run} starts",
                    vm.record.run
                );
                return Err(DriverError::Invalid(text));
            }
            let (host, wanted) = (Arc::clone(&self.host), id.clone());
            let spec = blocking(move || host.store.spec(&wanted)).await?;
            self.bring_up(&vm, &spec, &turn).await?;
            return Ok(Change::Already);
        }
        if self.leftovers(id, |_| ()).await?.is_some() {
            let wanted = id.clone();
            self.step(id, &turn, move |host| host.release(&wanted)).await?;
        }
        let (vm, spec) = self.launch(id, run, &turn).await?;
        hit("vm.start.launched")?;
        self.bring_up(&vm, &spec, &turn).await?;
        Ok(Change::Done)
    }

    async fn stop(&self, id: &SandboxId, keep: Keep, deadline: Duration) -> Result<Stopped, DriverError> {
        if keep == Keep::Memory {
            return Err(DriverError::Unsupported("this driver can't keep memory; suspend without it".into()));
        }
        let turn = self.turns.turn(id).await;
        self.put_down(id, &turn, Some(deadline)).await
    }

    async fn delete(&self, id: &SandboxId) -> Result<Change, DriverError> {
        let turn = self.turns.turn(id).await;
        let ran = self.live(id).await?.is_some() || self.leftovers(id, |_| ()).await?.is_some();
        self.put_down(id, &turn, None).await?;
        hit("vm.delete.ended")?;
        let wanted = id.clone();
        let change = self.step(id, &turn, move |host| host.store.delete(&wanted)).await?;
        Ok(if ran { Change::Done } else { change })
    }

    async fn observe(&self, id: &SandboxId) -> Result<Observed, DriverError> {
        let Some(quiet) = self.turns.quiet(id).await else {
            return Ok(Observed::Unknown("a step is still under way".to_owned()));
        };
        let vm = self.live(id).await?;
        if let Some(vm) = vm {
            drop(quiet);
            return Ok(self.observe_live(&vm).await);
        }
        if let Some(seen) = self.leftovers(id, observe_leftovers).await? {
            return Ok(seen);
        }
        let (host, wanted) = (Arc::clone(&self.host), id.clone());
        let stored = blocking(move || Ok(host.store.exists(&wanted))).await?;
        Ok(if stored { Observed::Stopped { memory: false } } else { Observed::Missing })
    }

    async fn list(&self) -> Result<Vec<SandboxId>, DriverError> {
        let host = Arc::clone(&self.host);
        blocking(move || {
            let failed = |source| DriverError::backend("list the sandboxes", source);
            let mut ids = host.store.list().map_err(failed)?;
            ids.extend(rundir::all(host.run_root()).map_err(failed)?);
            ids.sort();
            ids.dedup();
            Ok(ids)
        })
        .await
    }

    fn hints(&self) -> Word {
        word_of(&self.hints)
    }

    fn shortages(&self) -> Word {
        word_of(&self.shortages)
    }

    async fn agent(&self, id: &SandboxId) -> Result<Channel, DriverError> {
        self.live(id).await?.map(|vm| vm.channel.clone()).ok_or(DriverError::Missing)
    }

    async fn facts(&self, id: &SandboxId) -> Facts {
        let vm = self.watched(id);
        let overlay = self.host.store.overlay(id);
        let looked = blocking(move || {
            let disk = torpor_overlay::inspect(&overlay).ok().map(|info| DiskFacts {
                virtual_bytes: info.virtual_bytes,
                used_bytes: info.used_bytes,
                path: overlay.display().to_string(),
            });
            let machine = vm.as_ref().map(|vm| vm.record.label.clone());
            let boot_id = vm.as_ref().and_then(|vm| vm.boot_id());
            Ok(Facts { host: vm.map(|vm| host_facts(&vm)), disk, machine, boot_id })
        });
        looked.await.unwrap_or_default()
    }

    async fn console(&self, id: &SandboxId, bytes: usize) -> Vec<u8> {
        if let Some(vm) = self.watched(id) {
            vm.drain(CONSOLE_WAIT).await;
        }
        let (host, wanted) = (Arc::clone(&self.host), id.clone());
        let read = blocking(move || {
            let dir = host.run_dir(&wanted);
            Ok(if dir.exists() { dir.console(bytes) } else { host.store.console(&wanted) })
        });
        let text = read.await.unwrap_or_default();
        text[text.len().saturating_sub(bytes)..].to_vec()
    }
}

/// Whether the guest of a run whose process isn't there had flushed.
fn ended_flushed(dir: &RunDir) -> bool {
    dir.record().ok().flatten().is_some_and(|record| dir.flushed(record.run))
}

/// What the folder of a run says when its process isn't there.
fn observe_leftovers(dir: &RunDir) -> Observed {
    let lost = |run, text: &str| Observed::Ended(Ended { run, exit: Exit::Lost(text.to_owned()) });
    match dir.record() {
        Ok(Some(record)) => match (dir.exit(record.run), record.process) {
            (Some(exit), _) => Observed::Ended(Ended { run: record.run, exit }),
            // A start that was cut short before there was a process: the next start of that run goes on.
            (None, None) => Observed::Running { run: record.run, agent: false },
            (None, Some(process)) => {
                lost(record.run, &format!("the VM process {} is gone; nobody saw it end", process.pid))
            }
        },
        Ok(None) => lost(Run(0), "a start was cut short"),
        Err(error) => lost(Run(0), &error.to_string()),
    }
}

/// Reads the process's memory use, which blocks.
fn host_facts(vm: &Vm) -> HostFacts {
    let record = &vm.record;
    let net = vm.net();
    let net = net.as_ref();
    HostFacts {
        pid: vm.handle.identity().pid,
        tap: net.map(|net| net.tap.clone()).unwrap_or_default(),
        ip: net.map(|net| net.guest_ip.to_string()).unwrap_or_default(),
        mac: net.map(|net| net.mac.to_string()).unwrap_or_default(),
        cpus: record.cpus.clone(),
        memory_bytes: record.memory_bytes,
        resident_bytes: vm.handle.identity().resident_bytes(),
        cid: net.map_or(0, |net| net.cid),
        run_dir: vm.dir.path().display().to_string(),
    }
}
