//! The daemon: opens everything, serves until it is told to end, and leaves the VMs running.

use std::{
    collections::BTreeSet,
    fs::File,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use futures::{StreamExt as _, TryStreamExt as _};
use nix::fcntl::{Flock, FlockArg};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use torpor_driver_container::{ContainerDriver, Engine};
use torpor_driver_vm::{Standing, VmConfig, VmDriver};
use torpor_images::{Catalog, Kernels};
use torpor_netpool::{CpuSet, Topology, linux, policy::Budget};
use torpor_proto::openshell::v1::open_shell_server::OpenShellServer;
use torpor_proto::v1::{
    access_server::AccessServer, files_server::FilesServer, gateway_server::GatewayServer,
    images_server::ImagesServer, sandboxes_server::SandboxesServer, templates_server::TemplatesServer,
    workspaces_server::WorkspacesServer,
};
use torpor_sandbox::{
    ComputeDriver, Event, Phase, SandboxId,
    failpoint::{self, hit},
    sim::Script,
    spec::HostLimits,
};

use crate::{
    access::{Access, Audit, Guard, Oidc},
    api::{
        AccessApi, FilesApi, GatewayApi, ImagesApi, OpenShellApi, SandboxesApi, TemplatesApi, WorkspacesApi,
    },
    config::{Config, ConfigError, EngineConfig, Pinning},
    drivers::Drivers,
    egress::InForce,
    endpoints::Endpoints,
    expose::Listeners,
    kubernetes, listen,
    mainlog::MainLogs,
    metrics::{
        self,
        calls::{Calls, Counted},
    },
    orphans::Orphans,
    pressure::Pressure,
    progress::Progress,
    reconcile::Reconciler,
    reflect,
    service::Service,
    sessions::Sessions,
    simworld,
    store::{PoolLimits, Store, StoreError, rescue},
    web,
};

/// Largest message of a client, bytes; exec streams in pieces of their own.
const LARGEST_MESSAGE: usize = 8 << 20;
/// How often all that is lent is compared with what the kernel has.
const SWEEP: std::time::Duration = std::time::Duration::from_secs(180);
/// How often the network of running sandboxes is looked after.
const TEND: std::time::Duration = std::time::Duration::from_secs(5);
/// Ready sandboxes that a restart of the host is noted of at once.
const NOTED_AT_ONCE: usize = 256;
/// For requests and turns to end when the gateway does.
const DRAIN: std::time::Duration = std::time::Duration::from_secs(5);

/// Why the gateway can't serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The images.
    #[error("images: {0}")]
    Images(#[from] torpor_images::Error),
    /// The vm driver.
    #[error("vm driver: {0}")]
    Vm(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A container driver.
    #[error("{name} driver: {source}")]
    Engine {
        /// Its name.
        name: &'static str,
        /// Why.
        source: torpor_driver_container::ConfigError,
    },
    /// The kubernetes driver.
    #[error("kubernetes driver: {0}")]
    Kubernetes(#[from] torpor_driver_kubernetes::ConfigError),
    /// By which label its objects are found.
    #[error("kubernetes driver: {0}")]
    Identity(#[from] kubernetes::IdentityError),
    /// The sim driver's world.
    #[error("sim driver: its world below the state directory: {0}")]
    Sim(#[source] std::io::Error),
    /// The guest agent's program.
    #[error(
        "no static guest agent 'torpor-agent' was found where the configuration's `agent` says, beside the executable or in /usr/lib/torpor; build it with `cargo xtask agent`"
    )]
    NoAgent,
    /// The socket, or a TCP address.
    #[error("listen on '{at}': {source}")]
    Listen {
        /// Its path or address.
        at: String,
        /// Why.
        source: std::io::Error,
    },
    /// Another gateway works with the same names.
    #[error("another gateway on this host has network instance '{instance}' ({}); give each its own `instance`, `range` and `cid_base` under [network]", path.display())]
    InstanceInUse {
        /// The instance.
        instance: String,
        /// The lock.
        path: PathBuf,
    },
    /// A new database beside old disks.
    #[error("the database is new, but {} holds the disks of {count} sandboxes: restore torpor.db (with torpor.db-wal, if there is one), or a copy of it (torpor admin restore FILE), or make it anew from that folder (torpor admin rebuild), or move the folder away to begin anew", sandboxes.display())]
    LostDatabase {
        /// Disks.
        count: usize,
        /// The folder.
        sandboxes: PathBuf,
    },
    /// REST.
    #[error(transparent)]
    Rest(#[from] torpor_rest::RestError),
    /// The host's size.
    #[error("cannot read the host's size: {0}")]
    Host(std::io::Error),
}

/// Serves until SIGTERM or SIGINT. `ready` is called with the endpoint once requests are answered.
///
/// # Errors
/// Whatever keeps the gateway from starting; later faults are answered to those who asked and logged.
pub async fn serve(config: Config, ready: impl FnOnce(&str)) -> Result<(), ServeError> {
    let endpoint = config.listen.clone();
    let gateway = Gateway::start(config).await?;
    ready(&endpoint);
    wait_for_signal().await;
    tracing::info!("ending; sandboxes keep running");
    gateway.end().await;
    Ok(())
}

async fn wait_for_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let (term, int) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    match (term, int) {
        (Ok(mut term), Ok(mut int)) => {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
        }
        (Err(error), _) | (_, Err(error)) => tracing::error!(%error, "cannot wait for signals; ending"),
    }
}

/// A gateway that serves.
pub struct Gateway {
    end: CancellationToken,
    servers: Vec<JoinHandle<()>>,
    turns: JoinHandle<()>,
    ports: JoinHandle<()>,
    reconciler: Arc<Reconciler>,
    store: Arc<Store>,
    socket: PathBuf,
    figures_at: Option<SocketAddr>,
    _pool: Option<Flock<File>>,
}

impl Gateway {
    /// Opens the store, the drivers and the socket, and begins to serve.
    ///
    /// # Errors
    /// As [`serve`].
    pub async fn start(config: Config) -> Result<Self, ServeError> {
        config.validate()?;
        Self::start_with(config, None).await
    }

    /// As [`Gateway::start`] with drivers of the caller's own, for tests.
    ///
    /// # Errors
    /// As [`serve`].
    pub async fn start_with(
        config: Config,
        own: Option<Vec<Arc<dyn ComputeDriver>>>,
    ) -> Result<Self, ServeError> {
        let host = host_limits().map_err(ServeError::Host)?;
        let socket = config.socket().unwrap_or_default();
        let topology = topology(&config);
        let limits = pool_limits(&config, host, topology.clone());
        let budget = limits.budget.clone();
        let store = Arc::new(match config.commit_group {
            0 => Store::open(&config.state_dir, limits)?,
            group => Store::open_in_groups(&config.state_dir, limits, group)?,
        });
        hit("serve.store_opened").map_err(StoreError::from)?;
        // Before anything of the host is touched: another gateway may be there.
        let mut listeners = vec![listen::unix(&socket, config.mode().unwrap_or(0o600))?];
        for one in &config.tcp {
            listeners.push(listen::tcp(one).await?);
        }
        let figures = match config.metrics.listen()? {
            Some(address) => {
                let failed = |source| ServeError::Listen { at: address.to_string(), source };
                let listener = tokio::net::TcpListener::bind(address).await.map_err(&failed)?;
                let address = listener.local_addr().map_err(failed)?;
                tracing::info!(%address, "figures and probes are served");
                Some((listener, address))
            }
            None => None,
        };
        hit("serve.listening").map_err(StoreError::from)?;
        let end = CancellationToken::new();
        refuse_lost_database(&store, &config.state_dir).await?;
        let pool = match own {
            Some(_) => None,
            None => claim_pool(&config)?,
        };
        let drivers = match own {
            Some(drivers) => Drivers::new(drivers, config.default_driver()),
            None => open_drivers(&config, topology, &store, &end).await?,
        };
        hit("serve.drivers_opened").map_err(StoreError::from)?;
        let gateway_id = identify(&store).await?;
        hit("serve.identified").map_err(StoreError::from)?;
        notice_host_restart(&store, &drivers).await?;
        hit("serve.host_noticed").map_err(StoreError::from)?;
        let drivers = Arc::new(drivers);
        let service = Arc::new(Service {
            store: store.clone(),
            drivers: drivers.clone(),
            progress: Arc::new(Progress::default()),
            sessions: Arc::new(Sessions::default()),
            main_logs: Arc::new(MainLogs::new(&config.state_dir)),
            maintenance: Arc::default(),
            pressure: Arc::new(Pressure::new(config.state_dir.clone(), config.limits.disk_reserve())),
            images: Catalog::open(&config.state_dir)?,
            kernels: Kernels::open(&config.state_dir)?,
            image_gate: tokio::sync::RwLock::default(),
            building: tokio::sync::Mutex::default(),
            defaults: config.defaults.clone(),
            in_force: Arc::new(InForce::new(store.clone())),
            default_egress: torpor_driver_vm::egress::from_pool(&config.network.egress),
            endpoints: Endpoints::default(),
            updates: config.enable_sandbox_updates,
            listeners: Listeners::default(),
            host,
            budget,
            end: end.clone(),
        });
        let reconciler = Reconciler::new(&service);
        if let Some(armed) = failpoint::armed() {
            tracing::warn!(armed, "this gateway was built with failpoints, for tests");
        }
        let ports = tokio::spawn(service.clone().look_after_ports());
        tokio::spawn(service.clone().look_at_endpoints());
        tokio::spawn(service.clone().look_after_main_logs());
        let orphan_grace = config.orphan_grace_seconds;
        let access = Access::open(
            store.clone(),
            config.admins.clone(),
            config.oidc.clone().map(Oidc::new),
            Audit::new(&config.state_dir),
        );
        let access = Arc::new(access.await?);
        let routes = services(service.clone(), gateway_id, &config).await.prepare();
        let calls = Arc::<Calls>::default();
        let counted = Counted::new(Guard::new(routes, access.clone()), calls.clone());
        let front = web::front(counted, access, &service, &config.http)?;
        let servers = listeners.into_iter();
        let mut servers: Vec<_> = servers
            .map(|listener| tokio::spawn(listen::serve(listener, front.clone(), end.clone())))
            .collect();
        let figures_at = figures.as_ref().map(|(_, address)| *address);
        if let Some((listener, _)) = figures {
            let (service, reconciler, started) =
                (service.clone(), reconciler.clone(), std::time::Instant::now());
            let sources = Arc::new(metrics::Sources { service, reconciler, calls, started });
            servers.push(tokio::spawn(metrics::serve(listener, sources, end.clone())));
        }
        let turns = tokio::spawn(reconciler.clone().run());
        // It looks at every record and disk, so nobody waits for it.
        let orphans = Orphans {
            store: store.clone(),
            drivers,
            reconciler: reconciler.clone(),
            grace: std::time::Duration::from_secs(orphan_grace),
            end: end.clone(),
        };
        tokio::spawn(orphans.look_after());
        hit("serve.started").map_err(StoreError::from)?;
        Ok(Self { end, servers, turns, ports, reconciler, store, socket, figures_at, _pool: pool })
    }

    /// Answers no more requests, drops what is under way (the next gateway goes on from there) and closes the store.
    pub async fn end(self) {
        self.end.cancel();
        let drained = tokio::time::timeout(DRAIN, async {
            // Their own errors were logged where they happened.
            let _ = self.turns.await;
            let _ = self.ports.await;
            self.reconciler.finish().await;
            for server in self.servers {
                let _ = server.await;
            }
        });
        if drained.await.is_err() {
            tracing::warn!("some requests did not end in time");
        }
        let store = self.store.clone();
        // The writer thread is waited for away from the runtime's own threads.
        let _ = tokio::task::spawn_blocking(move || store.close()).await;
        let _ = std::fs::remove_file(&self.socket);
    }

    /// Where figures and probes are, if anywhere: with a port that was chosen when the configuration says 0.
    pub fn figures(&self) -> Option<SocketAddr> {
        self.figures_at
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

/// Every service of the API.
async fn services(service: Arc<Service>, gateway_id: String, config: &Config) -> Routes {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<SandboxesServer<SandboxesApi>>().await;
    reporter.set_serving::<ImagesServer<ImagesApi>>().await;
    reporter.set_serving::<TemplatesServer<TemplatesApi>>().await;
    reporter.set_serving::<WorkspacesServer<WorkspacesApi>>().await;
    reporter.set_serving::<AccessServer<AccessApi>>().await;
    reporter.set_serving::<FilesServer<FilesApi>>().await;
    reporter.set_serving::<OpenShellServer<OpenShellApi>>().await;
    reporter.set_serving::<GatewayServer<GatewayApi>>().await;
    let gateway = GatewayApi {
        service: service.clone(),
        gateway_id,
        state_dir: config.state_dir.clone(),
        run_dir: config.run_dir.clone(),
        started: SystemTime::now(),
    };
    let tcp = config.tcp.first().map(|tcp| (tcp.address, !tcp.plaintext));
    let openshell = OpenShellApi::new(service.clone(), tcp);
    let mut routes = Routes::new(health);
    match reflect::services(torpor_proto::DESCRIPTORS) {
        Ok((latest, alpha)) => routes = routes.add_service(latest).add_service(alpha),
        Err(error) => tracing::error!(%error, "gRPC reflection is off"),
    }
    let most = LARGEST_MESSAGE;
    routes
        .add_service(SandboxesServer::new(SandboxesApi(service.clone())).max_decoding_message_size(most))
        .add_service(OpenShellServer::new(openshell).max_decoding_message_size(most))
        .add_service(WorkspacesServer::new(WorkspacesApi(service.clone())).max_decoding_message_size(most))
        .add_service(AccessServer::new(AccessApi(service.clone())).max_decoding_message_size(most))
        .add_service(FilesServer::new(FilesApi(service.clone())).max_decoding_message_size(most))
        .add_service(TemplatesServer::new(TemplatesApi(service.clone())).max_decoding_message_size(most))
        .add_service(ImagesServer::new(ImagesApi(service)).max_decoding_message_size(most))
        .add_service(GatewayServer::new(gateway).max_decoding_message_size(most))
}

/// One arm per driver.
async fn open_drivers(
    config: &Config,
    topology: Option<Topology>,
    store: &Arc<Store>,
    end: &CancellationToken,
) -> Result<Drivers, ServeError> {
    let mut drivers: Vec<Arc<dyn ComputeDriver>> = Vec::new();
    for name in &config.drivers {
        match name.as_str() {
            "sim" => {
                drivers.push(simworld::open(&config.state_dir, Script::default()).map_err(ServeError::Sim)?)
            }
            "docker" => drivers.push(open_engine(config, Engine::Docker, &config.docker)?),
            "podman" => drivers.push(open_engine(config, Engine::Podman, &config.podman)?),
            "kubernetes" => {
                drivers.push(kubernetes::open(config, store).await?);
            }
            _ => {
                let driver = open_vm_driver(config, topology.clone(), store).await?;
                tokio::spawn(tend(driver.clone(), end.clone()));
                drivers.push(driver);
            }
        }
    }
    Ok(Drivers::new(drivers, config.default_driver()))
}

/// The engine need not be there: its sandboxes wait for it.
fn open_engine(
    config: &Config,
    engine: Engine,
    of: &EngineConfig,
) -> Result<Arc<dyn ComputeDriver>, ServeError> {
    let driver = of.for_driver(engine, config, agent(config)?);
    let failed = |error| ServeError::Engine { name: engine.name(), source: error };
    Ok(ContainerDriver::new(driver).map_err(failed)?)
}

/// The guest agent, for who needs one.
fn agent(config: &Config) -> Result<PathBuf, ServeError> {
    config.find_agent().filter(|agent| crate::config::is_static(agent)).ok_or(ServeError::NoAgent)
}

async fn open_vm_driver(
    config: &Config,
    topology: Option<Topology>,
    store: &Arc<Store>,
) -> Result<Arc<VmDriver>, ServeError> {
    let vm = VmConfig {
        state_dir: config.state_dir.clone(),
        run_dir: config.run_dir.clone(),
        agent: agent(config)?,
        machine: config.machine.clone(),
        vmm: config.find_vmm(),
        first_uid: config.first_uid,
        probe: std::env::current_exe().ok(),
        boot_timeout: std::time::Duration::from_secs(config.boot_timeout_seconds),
        nameservers: config.nameservers.clone(),
        pool: config.network.clone(),
        cpu_quota_percent: config.limits.cpu_quota_percent,
        pin: config.limits.cpu_pinning != Pinning::Off,
        topology,
        ..VmConfig::new("", "", "")
    };
    let ledger = store.clone();
    let opened = tokio::task::spawn_blocking(move || VmDriver::new(vm, ledger)).await;
    let driver = opened.map_err(|e| ServeError::Vm(e.into()))?.map_err(|e| ServeError::Vm(e.into()))?;
    let lent: BTreeSet<SandboxId> =
        store.loans().await?.into_iter().filter_map(|loan| loan.sandbox_id.parse().ok()).collect();
    let recorded = store.all_ids().await?;
    let standing = |id: &SandboxId| match (lent.contains(id), recorded.contains(id)) {
        (true, _) => Standing::Runs,
        (false, true) => Standing::AtRest,
        (false, false) => Standing::Unknown,
    };
    let repairs = driver.sweep(&standing).await.map_err(|e| ServeError::Vm(e.into()))?;
    for repair in repairs {
        tracing::warn!(repair, "leftover of an earlier gateway");
    }
    Ok(driver)
}

/// Looks after what others may take away under running sandboxes, and now and then after everything that is lent.
async fn tend(driver: Arc<VmDriver>, end: CancellationToken) {
    let mut sweep_at = tokio::time::Instant::now() + SWEEP;
    loop {
        tokio::select! {
            () = tokio::time::sleep(TEND) => {}
            () = end.cancelled() => return,
        }
        match driver.tend().await {
            Ok(lines) => lines.iter().for_each(|line| tracing::warn!(line, "network repaired")),
            Err(error) => tracing::error!(%error, "the network of running sandboxes can't be looked after"),
        }
        if tokio::time::Instant::now() < sweep_at {
            continue;
        }
        match driver.sweep_kernel().await {
            Ok(lines) => lines.iter().for_each(|line| tracing::warn!(line, "sweep")),
            Err(error) => tracing::error!(%error, "what is lent can't be compared with what there is"),
        }
        sweep_at = tokio::time::Instant::now() + SWEEP;
    }
}

/// Names of TAPs, tables and cgroups follow from the instance: two gateways with the same one in the same network
/// namespace would take each other's for leftovers.
fn claim_pool(config: &Config) -> Result<Option<Flock<File>>, ServeError> {
    if !config.drivers.iter().any(|d| d == "vm") {
        return Ok(None);
    }
    let namespace =
        std::fs::metadata("/proc/self/ns/net").map_or(0, |found| std::os::unix::fs::MetadataExt::ino(&found));
    let path = PathBuf::from(format!("/run/{}-{namespace}.lock", config.network.table_name()));
    let opened = File::options().write(true).create(true).truncate(false).open(&path);
    let file = opened.map_err(|source| ServeError::Listen { at: path.display().to_string(), source })?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err(_) => {
            Err(ServeError::InstanceInUse { instance: config.network.instance.as_str().to_owned(), path })
        }
    }
}

/// A database that was just made beside disks that are there already means that the old one is lost: going on would take
/// everything that runs for leftovers.
async fn refuse_lost_database(store: &Arc<Store>, state_dir: &Path) -> Result<(), ServeError> {
    // An old database answers without a look at the disks.
    if store.meta("gateway_id").await?.is_some() {
        return Ok(());
    }
    for crate::admin::Place { storage: sandboxes, .. } in crate::admin::places(state_dir, Path::new("")) {
        let disks = std::fs::read_dir(&sandboxes).into_iter().flatten().flatten();
        let count = disks.filter(|e| e.file_name().to_string_lossy().parse::<SandboxId>().is_ok()).count();
        if count > 0 {
            return Err(ServeError::LostDatabase { count, sandboxes });
        }
    }
    Ok(())
}

/// New with every state directory.
async fn identify(store: &Arc<Store>) -> Result<String, StoreError> {
    if let Some(id) = store.meta("gateway_id").await? {
        return Ok(id);
    }
    let id = rescue::gateway_id();
    store.set_meta("gateway_id", id.clone()).await?;
    Ok(id)
}

/// After a restart of the host everything that ran on it is gone through no fault of its own: it is started again. What
/// runs elsewhere, in a cluster, knows nothing of it.
async fn notice_host_restart(store: &Arc<Store>, drivers: &Drivers) -> Result<(), StoreError> {
    let Ok(boot) = std::fs::read_to_string("/proc/sys/kernel/random/boot_id") else { return Ok(()) };
    let boot = boot.trim().to_owned();
    let before = store.meta("boot_id").await?;
    if before.as_deref() == Some(boot.as_str()) {
        return Ok(());
    }
    if before.is_some() {
        let ready = store.in_phase(Phase::Ready).await?;
        // Only then must each be looked at.
        let elsewhere = drivers.all().any(|driver| !driver.is_of_this_host());
        // Side by side, so that they share commits.
        let noted = futures::stream::iter(ready).map(|id| async move {
            hit("serve.host_restart")?;
            if elsewhere {
                let driver = drivers.get(&store.get(id.as_str()).await?.spec.driver);
                if driver.is_some_and(|driver| !driver.is_of_this_host()) {
                    return Ok(());
                }
            }
            let why = "host was restarted".to_owned();
            store.note(id.to_string(), Event::HostRestarted, why).await.map(drop)
        });
        noted.buffer_unordered(NOTED_AT_ONCE).try_for_each(|_| async { Ok(()) }).await?;
    }
    store.set_meta("boot_id", boot).await
}

fn host_limits() -> std::io::Result<HostLimits> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    let kib = kib.ok_or_else(|| std::io::Error::other("/proc/meminfo has no MemTotal"))?;
    let cpus = std::thread::available_parallelism()?.get();
    Ok(HostLimits { memory_bytes: kib << 10, cpus: u32::try_from(cpus).unwrap_or(u32::MAX) })
}

fn pool_limits(config: &Config, host: HostLimits, topology: Option<Topology>) -> PoolLimits {
    let memory_bytes = match config.limits.memory_bytes {
        0 => host.memory_bytes / 10 * 9,
        bytes => bytes,
    };
    // Not every CPU below the highest need be ours.
    let cpus = linux::host_cpus().ok().filter(|cpus| !cpus.is_empty());
    let cpus: CpuSet = cpus.unwrap_or_else(|| (0..host.cpus).collect());
    PoolLimits {
        network: config.network.clone(),
        topology: topology.unwrap_or_else(|| Topology::flat(&cpus)),
        budget: Budget { cpus, cpu_percent: config.limits.cpu_percent, memory_bytes },
    }
}

/// How the host's CPUs lie together, where that is asked for and known.
fn topology(config: &Config) -> Option<Topology> {
    if config.limits.cpu_pinning != Pinning::Topology {
        return None;
    }
    let known = linux::host_topology();
    let known = known.inspect_err(|error| tracing::warn!(%error, "CPUs are chosen without their topology"));
    known.ok().filter(|topology| !topology.cores.is_empty())
}
