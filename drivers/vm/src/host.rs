//! The blocking half: what a start takes from the host and what a stop gives back.

use std::{
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, PoisonError, RwLock},
    thread,
};

use torpor_netpool::{
    Egress, GuestNet, Ledger, Loan, PoolConfig, Topology,
    linux::{
        Cgroup, CgroupLimits, CgroupParent, CgroupProbe, CpuMax, Forwarding, Network, TapOptions,
        effective_mtu, enable_forwarding, keep_open_in_child, pin, uplink,
    },
};
use torpor_overlay::Lock;
use torpor_sandbox::{Change, DriverError, Egress as OwnEgress, Run, SandboxId, SandboxSpec, failpoint::hit};

use crate::{
    assets::{Assets, BootFiles},
    config::VmConfig,
    egress, errors,
    machine::{Launch, Machine, Machines},
    names::Names,
    process::{self, Handle, Identity},
    rundir::{Record, RunDir, host_boot},
    store::Store,
    vm::{Vm, note_unseen_end},
};

/// Threads of a VM process beyond one per CPU: main loop, block workers, RCU.
const THREADS: u64 = 128;
/// CPU time for the devices of a VM, in percent of a host's CPU, beside that of its virtual CPUs.
const DEVICES_PERCENT: u32 = 25;
/// What of a console outlives its run, bytes.
const KEPT_CONSOLE: usize = 64 << 10;

/// What a run is started with; all of it was checked.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) spec: SandboxSpec,
    pub(crate) loan: Loan,
    pub(crate) net: GuestNet,
    base: PathBuf,
    boot: BootFiles,
    machine: Arc<dyn Machine>,
}

/// The host, as far as VMs borrow from it.
pub(crate) struct Host {
    run_dir: PathBuf,
    pool: PoolConfig,
    names: Names,
    pub(crate) store: Store,
    pub(crate) assets: Assets,
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) machines: Machines,
    first_uid: u32,
    cpu_quota_percent: u32,
    pin: bool,
    topology: Option<Topology>,
    pub(crate) network: Network,
    pub(crate) cgroups: Option<CgroupParent>,
    /// The firewall's table and forwarding were seen to be there.
    ready: Mutex<bool>,
    /// Held for reading while objects of a run are made or removed, for writing by a sweep: what it sees and what it
    /// removes is nobody's at the time.
    pub(crate) objects: RwLock<()>,
}

impl Host {
    pub(crate) fn new(
        config: &VmConfig,
        store: Store,
        assets: Assets,
        ledger: Arc<dyn Ledger>,
        machines: Machines,
    ) -> Self {
        let cgroups = match CgroupParent::probe(&config.pool) {
            CgroupProbe::Ready(parent) => Some(parent),
            CgroupProbe::Unavailable(reason) => {
                tracing::info!(%reason, "VMs run without cgroups of their own");
                None
            }
        };
        Self {
            run_dir: config.run_dir.clone(),
            pool: config.pool.clone(),
            names: Names::new(&config.pool, &config.nameservers),
            store,
            assets,
            ledger,
            machines,
            first_uid: config.first_uid,
            cpu_quota_percent: config.cpu_quota_percent,
            pin: config.pin,
            topology: config.topology.clone(),
            network: Network::new(&config.pool),
            cgroups,
            ready: Mutex::new(false),
            objects: RwLock::new(()),
        }
    }

    pub(crate) fn pool(&self) -> &PoolConfig {
        &self.pool
    }

    pub(crate) fn run_dir(&self, id: &SandboxId) -> RunDir {
        RunDir::new(&self.run_dir, id)
    }

    /// Where the folders of runs are.
    pub(crate) fn run_root(&self) -> &Path {
        &self.run_dir
    }

    /// The guest's MTU, bytes.
    pub(crate) fn mtu(&self) -> u32 {
        effective_mtu(&self.pool, uplink(&self.pool).ok().flatten().as_ref())
    }

    /// Name servers for the guest behind this gateway address.
    pub(crate) fn nameservers(&self, gateway: Ipv4Addr) -> Vec<String> {
        self.names.of_guest(gateway)
    }

    /// Everything that can be checked before anything is borrowed. May take long: a base that changed its time stamps
    /// is hashed.
    pub(crate) fn prepare(&self, id: &SandboxId, run: Run) -> Result<Prepared, DriverError> {
        let spec = self.store.spec(id)?;
        let overlay = self.store.overlay(id);
        if !overlay.exists() {
            return Err(DriverError::DataMissing(format!("{} is missing", overlay.display())));
        }
        let base = self.assets.base_path(&spec.image_digest);
        torpor_overlay::verify_base(&overlay, &base).map_err(errors::overlay)?;
        let loan = self.loan(id)?.ok_or_else(|| {
            DriverError::Exhausted(format!(
                "nothing was lent to {id}: no address, CPUs and memory to start it with"
            ))
        })?;
        if loan.run != run.0 {
            let text = format!("what was lent to {id} is for run {}, not for run {run}", loan.run);
            return Err(DriverError::Exhausted(text));
        }
        let egress = Some(egress::of_spec(&self.pool, &spec)?);
        let net = GuestNet { egress, ..self.net_of(&loan)? };
        let boot = self.assets.boot(spec.kernel.as_deref().map(Path::new))?;
        let machine = self.machines.get(&spec.machine, spec.resources.cpus)?;
        Ok(Prepared { spec, loan, net, base, boot, machine })
    }

    fn loan(&self, id: &SandboxId) -> Result<Option<Loan>, DriverError> {
        self.ledger.loan(id.as_str()).map_err(errors::ledger)
    }

    fn net_of(&self, loan: &Loan) -> Result<GuestNet, DriverError> {
        self.pool
            .guest_net(&loan.sandbox_id, loan.slot)
            .map_err(|error| DriverError::Invalid(error.to_string()))
    }

    /// The egress policy that the loan's run was started with; none that is known: the pool's.
    pub(crate) fn egress(&self, loan: &Loan) -> Option<Egress> {
        let id = loan.sandbox_id.parse().ok()?;
        self.record(&self.run_dir(&id)).ok().flatten()?.net?.egress
    }

    /// Lets what runs go by a policy: its record first, so that a sweep puts nothing older back, then the firewall, which
    /// is told even when the record can't be written. `settles`: the spec's own policy, when that is noted.
    pub(crate) fn let_go_by(
        &self,
        vm: &Vm,
        wanted: Egress,
        settles: Option<Option<OwnEgress>>,
    ) -> Result<Change, DriverError> {
        // A stop, or a start that failed, may have given everything back meanwhile, which it does when the process is gone.
        let Some(net) = vm.net().filter(|_| !vm.seen().gone && !vm.handle.has_ended()) else {
            return Ok(Change::Already);
        };
        let change = if net.egress.as_ref() == Some(&wanted) { Change::Already } else { Change::Done };
        let net = GuestNet { egress: Some(wanted.clone()), ..net };
        // A sweep must not see the new record beside the old element.
        let _objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        let written = vm.dir.write_record(&Record { net: Some(net.clone()), ..vm.record_now() });
        if change == Change::Done {
            hit("vm.adjust.recorded")?;
        }
        self.network.firewall().add(&net.guest()).map_err(errors::net("replace the egress policy"))?;
        vm.set_egress(wanted);
        if change == Change::Done {
            hit("vm.adjust.replaced")?;
        }
        written?;
        vm.set_settled(settles);
        Ok(change)
    }

    /// The record of a start. One that knows of no policy was written when all had the pool's.
    fn record(&self, dir: &RunDir) -> Result<Option<Record>, DriverError> {
        let mut record = dir.record()?;
        if let Some(net) = record.as_mut().and_then(|record| record.net.as_mut()) {
            net.egress.get_or_insert_with(|| self.pool.egress.clone());
        }
        Ok(record)
    }

    /// Makes the VM process and all that it needs. When it fails, [`Host::release`] gives back what was made.
    pub(crate) fn launch(
        &self,
        id: &SandboxId,
        run: Run,
        prepared: &Prepared,
    ) -> Result<(Record, Handle), DriverError> {
        self.warm_up_cgroups();
        let dir = self.run_dir(id);
        let mut record = Record {
            sandbox: id.clone(),
            run,
            machine: prepared.machine.name().to_owned(),
            label: prepared.machine.label().to_owned(),
            host_boot: host_boot(),
            process: None,
            net: Some(prepared.net.clone()),
            cpus: prepared.loan.cpus.to_string(),
            memory_bytes: prepared.loan.memory_bytes,
            configured: false,
            boot_id: None,
        };
        dir.make()?;
        // The intent goes first: a process without a record is found by its marker, and only looked for with an intent.
        dir.write_record(&record)?;
        hit("vm.launch.intent")?;
        let lock = Lock::acquire(&self.store.overlay(id)).map_err(errors::overlay)?;
        // Reads all of its tables: a damaged disk is refused here, before anything writes to it.
        let generation = torpor_overlay::raise_generation(&lock).map_err(errors::overlay)?;
        tracing::debug!(sandbox = %id, %run, generation, "disk in order");
        hit("vm.launch.disk")?;
        self.ready()?;
        let objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        let (mtu, uid) = (self.mtu(), self.uid(&prepared.loan));
        let options = TapOptions { owner_uid: uid, mtu: Some(mtu), vnet_hdr: true, ..TapOptions::default() };
        let tap = self.network.attach(&prepared.net, &options).map_err(errors::net("attach the network"))?;
        hit("vm.launch.network")?;
        let (memory, disk) = (prepared.loan.memory_bytes, prepared.spec.resources.disk_bytes);
        let headroom = prepared.machine.headroom(memory, disk);
        let cgroup = self.make_cgroup(id, &prepared.loan, prepared.spec.resources.cpus, headroom)?;
        drop(objects);
        hit("vm.launch.cgroup")?;
        // The program's arguments need the TAP's number, which is known once the command has the TAP.
        let mut command = command(&dir, lock)?;
        let tap_fd = tap.hand_to(&mut command);
        let marker = process::marker(id, run);
        let overlay = self.store.overlay(id);
        let plan = prepared.machine.plan(&Launch {
            marker: &marker,
            run_dir: dir.path(),
            kernel: &prepared.boot.kernel,
            unpacked_kernel: prepared.boot.unpacked.as_deref(),
            initramfs: &prepared.boot.initramfs,
            overlay: &overlay,
            base: &prepared.base,
            cpus: prepared.spec.resources.cpus,
            memory_bytes: prepared.loan.memory_bytes,
            net: &prepared.net,
            mtu,
            uid,
            tap_fd,
        })?;
        command.arg(&plan.program).args(&plan.args);
        plan.inherited.into_iter().for_each(|fd| keep_open_in_child(&mut command, fd));
        let spawned = command.spawn();
        // The command holds the lock and the TAP as well: only the child shall.
        drop(command);
        let mut child = spawned.map_err(|source| {
            DriverError::backend(format!("start {} (is it installed?)", plan.program.display()), source)
        })?;
        self.settle(&dir, &mut record, &mut child, cgroup.as_ref(), &prepared.loan)
            .inspect_err(|_| end(&mut child))
            .map(|handle| (record, handle))
    }

    /// While all else is prepared. Nothing but time is lost without it.
    fn warm_up_cgroups(&self) {
        let Some(parent) = self.cgroups.clone() else { return };
        let spawned = thread::Builder::new().name("cgroups".to_owned()).spawn(move || parent.warm_up());
        if let Err(error) = spawned {
            tracing::debug!(%error, "no thread to warm cgroups up");
        }
    }

    /// Everything after the process was made.
    fn settle(
        &self,
        dir: &RunDir,
        record: &mut Record,
        child: &mut Child,
        cgroup: Option<&Cgroup>,
        loan: &Loan,
    ) -> Result<Handle, DriverError> {
        hit("vm.launch.spawned")?;
        let unseen = |source| DriverError::backend("watch the VM process", source);
        let identity = Identity::of(child.id()).map_err(unseen)?;
        record.process = identity;
        let handle = match identity {
            Some(identity) => Handle::of_child(identity).map_err(unseen)?,
            None => None,
        };
        let handle = handle.ok_or_else(|| {
            let how = child
                .try_wait()
                .ok()
                .flatten()
                .map_or("nobody saw how".to_owned(), |status| status.to_string());
            DriverError::Failed {
                step: "launch".to_owned(),
                cause: format!("the VM process ended at once ({how}): {}", dir.log_tail()),
                console: String::new(),
            }
        })?;
        dir.write_record(record)?;
        hit("vm.launch.recorded")?;
        let pid = i32::try_from(child.id()).unwrap_or_default();
        if let Some(cgroup) = cgroup {
            cgroup.add(pid).map_err(errors::net("put the VM into its cgroup"))?;
        }
        if self.pin
            && !loan.cpus.is_empty()
            && let Err(error) = pin(pid, &loan.cpus)
        {
            tracing::warn!(sandbox = %record.sandbox, %error, "the VM runs on any CPU");
        }
        Ok(handle)
    }

    /// The firewall's table and forwarding, once per life of the gateway.
    pub(crate) fn ready(&self) -> Result<(), DriverError> {
        // Guests may ask the name servers that they are given, whatever network these are in.
        let names = self.names.look();
        let changed = self.network.firewall().set_names(&names.resolvers, names.port);
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if *ready && !changed {
            return Ok(());
        }
        self.network.firewall().ensure().map_err(errors::net("set up the firewall"))?;
        match enable_forwarding() {
            Ok(Forwarding::AlreadyOn) => {}
            Ok(Forwarding::TurnedOn) => {
                tracing::info!("IPv4 forwarding was off and is on now: guests need it")
            }
            Err(error) => {
                tracing::warn!(%error, "IPv4 forwarding can't be switched on: guests reach no network")
            }
        }
        *ready = true;
        Ok(())
    }

    /// The user that a VM process may become: one for each slot, so that no two share one.
    fn uid(&self, loan: &Loan) -> Option<u32> {
        (self.first_uid != 0).then(|| self.first_uid.saturating_add(loan.slot.0))
    }

    fn make_cgroup(
        &self,
        id: &SandboxId,
        loan: &Loan,
        cpus: u32,
        headroom: u64,
    ) -> Result<Option<Cgroup>, DriverError> {
        let Some(parent) = &self.cgroups else { return Ok(None) };
        let limits = self.limits(loan, cpus, headroom);
        parent.create(id.as_str(), &limits).map(Some).map_err(errors::net("make the VM's cgroup"))
    }

    fn limits(&self, loan: &Loan, cpus: u32, headroom: u64) -> CgroupLimits {
        let pinned = self.pin && !loan.cpus.is_empty();
        let nodes = self.topology.as_ref().map(|topology| topology.nodes_of(&loan.cpus));
        let quota = cpus.max(1).saturating_mul(self.cpu_quota_percent).saturating_add(DEVICES_PERCENT);
        CgroupLimits {
            cpus: pinned.then(|| loan.cpus.clone()),
            memory_nodes: nodes.filter(|nodes| pinned && !nodes.is_empty()),
            memory_max: Some(loan.memory_bytes.saturating_add(headroom)),
            pids_max: Some(THREADS + loan.cpus.len() as u64),
            cpu_max: (self.cpu_quota_percent > 0).then(|| CpuMax::percent(quota)),
            cpu_weight: None,
        }
    }

    /// Takes over what a process that went while no gateway watched has left: how its guest ended, and its console.
    pub(crate) fn hear_out(&self, dir: &RunDir) {
        let Ok(Some(record)) = dir.record() else { return };
        if record.process.is_none() || dir.exit(record.run).is_some() {
            return;
        }
        let machine = self.machines.of_record(&record.machine);
        if let Err(error) = note_unseen_end(dir, record.run, &*machine) {
            tracing::warn!(sandbox = %record.sandbox, %error, "what the VM process left can't be kept");
        }
    }

    /// Gives back all that a run borrowed, when its process is gone. Works on what is left of it, and again.
    pub(crate) fn release(&self, id: &SandboxId) -> Result<(), DriverError> {
        let dir = self.run_dir(id);
        let record = dir.record().unwrap_or_else(|error| {
            tracing::warn!(sandbox = %id, %error, "releasing by the loan alone");
            None
        });
        let net = match record.and_then(|record| record.net) {
            Some(net) => Some(net),
            None => self.loan(id)?.map(|loan| self.net_of(&loan)).transpose()?,
        };
        let objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(net) = net {
            self.network.detach(&net).map_err(errors::net("release the network"))?;
        }
        hit("vm.release.network")?;
        if let Some(parent) = &self.cgroups
            && let Some(cgroup) = parent.open(id.as_str()).map_err(errors::net("find the VM's cgroup"))?
        {
            cgroup.remove().map_err(errors::net("remove the VM's cgroup"))?;
        }
        drop(objects);
        hit("vm.release.cgroup")?;
        let console = dir.console(KEPT_CONSOLE);
        if !console.is_empty()
            && self.store.exists(id)
            && let Err(error) = self.store.keep_console(id, &console)
        {
            // A full disk must not keep a sandbox from stopping.
            tracing::warn!(sandbox = %id, %error, "the last console is not kept");
        }
        hit("vm.release.console")?;
        dir.remove()
    }

    /// Notes in the overlay that its last writer has ended in order. Only a note: a disk without it is looked over at the
    /// next start all the same.
    pub(crate) fn close_overlay(&self, id: &SandboxId) {
        let closed =
            Lock::acquire(&self.store.overlay(id)).and_then(|lock| torpor_overlay::mark_closed(&lock));
        if let Err(error) = closed {
            tracing::warn!(sandbox = %id, %error, "the disk is not marked as closed");
        }
    }

    /// The process of the sandbox, whatever the record says or doesn't say.
    pub(crate) fn find(&self, id: &SandboxId) -> Result<Option<(Record, Handle)>, DriverError> {
        let dir = self.run_dir(id);
        let record = self.record(&dir).ok().flatten();
        let same_boot = record.as_ref().is_some_and(|record| record.host_boot == host_boot());
        let known = record.as_ref().and_then(|record| record.process).filter(|_| same_boot);
        let found = match known {
            // A complete record is believed, alive or not.
            Some(identity) => Some((identity, None)),
            // Looking through all processes is for the rare cases: a half-made start, or a folder that somebody removed
            // under a VM, which still has the disk locked.
            None if dir.exists()
                || torpor_overlay::is_locked(&self.store.overlay(id)).unwrap_or_default() =>
            {
                let found = process::find(id);
                let found =
                    found.map_err(|source| DriverError::backend("look for the VM process", source))?;
                found.map(|(identity, run)| (identity, Some(run)))
            }
            None => None,
        };
        let Some((identity, run)) = found else { return Ok(None) };
        let handle = Handle::open(id, identity)
            .map_err(|source| DriverError::backend("watch the VM process", source))?;
        let record = record.filter(|record| same_boot && run.is_none_or(|run| run == record.run));
        let record = record.map(|record| Record { process: Some(identity), ..record });
        let record = record.unwrap_or_else(|| self.made_up(id, run.unwrap_or_default(), identity));
        Ok(handle.map(|handle| (record, handle)))
    }

    /// What is known of a process whose record is lost.
    fn made_up(&self, id: &SandboxId, run: Run, identity: Identity) -> Record {
        let loan = self.loan(id).ok().flatten();
        let spec = self.store.spec(id).ok();
        let own = spec.and_then(|spec| egress::of_spec(&self.pool, &spec).ok());
        let with_own = |net: GuestNet| GuestNet { egress: own.or_else(|| net.egress.clone()), ..net };
        let machine = self.machines.of_process(identity.pid);
        Record {
            sandbox: id.clone(),
            run,
            machine: machine.name().to_owned(),
            label: machine.label().to_owned(),
            host_boot: host_boot(),
            process: Some(identity),
            net: loan.as_ref().and_then(|loan| self.net_of(loan).ok()).map(with_own),
            cpus: loan.as_ref().map(|loan| loan.cpus.to_string()).unwrap_or_default(),
            memory_bytes: loan.map_or(0, |loan| loan.memory_bytes),
            // Not known: a guest that may hold data is given the time to save it.
            configured: true,
            boot_id: None,
        }
    }
}

/// The command without its program: a session of its own, so that neither the gateway's terminal nor its end reaches the VM; no
/// environment; and nothing inherited but the lock, the TAP and the log.
fn command(dir: &RunDir, lock: Lock) -> Result<Command, DriverError> {
    let log = || {
        let opened = dir.log();
        opened.map_err(|source| {
            DriverError::backend(format!("open the log in {}", dir.path().display()), source)
        })
    };
    // setsid(1) makes the session and becomes the program: same process, no unsafe code between fork and exec.
    let mut command = Command::new("setsid");
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .current_dir("/")
        // Standard input is never read: it holds the disk's lock for exactly as long as the process lives.
        .stdin(Stdio::from(lock.into_fd()))
        .stdout(Stdio::from(log()?))
        .stderr(Stdio::from(log()?));
    Ok(command)
}

impl Drop for Host {
    /// An orderly end leaves no TAPs in stock; after another one, the next gateway takes them over.
    fn drop(&mut self) {
        if let Err(error) = self.network.stock().clear() {
            tracing::warn!(%error, "TAPs in stock are left behind");
        }
    }
}

fn end(child: &mut Child) {
    // Both fail only when it is gone already.
    let _ = child.kill();
    let _ = child.wait();
}
