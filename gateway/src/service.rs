//! The verbs: validate, write the intent, wait. Wire types are not known here.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;
use torpor_images::{Catalog, Kernels};
use torpor_netpool::policy::Budget;
use torpor_sandbox::{
    ComputeDriver, DriverError, Egress, Endpoint, Event, Facts, Keep, Phase, Request, Resources,
    RestartPolicy, SandboxId, SandboxName, SandboxSpec, Volume,
    failpoint::hit,
    lifecycle::{Next, may_reach, next},
    spec::{DEFAULT_WORKSPACE, HostLimits, qualified, unqualified, validate_annotations, validate_labels},
};

use crate::{
    config::Defaults,
    drivers::Drivers,
    egress::{InForce, checked},
    endpoints::{Endpoints, Observation},
    error::{ApiError, Code},
    expose::{ExposeWish, Listeners},
    mainlog::MainLogs,
    maintenance::{Kind, Maintenance},
    pressure::{ADVICE, Pressure, Space},
    progress::{Now, Progress},
    sessions::Sessions,
    store::{Applied, NewSandbox, Record, RequestKey, Store, StoreError},
};

/// The service.
pub struct Service {
    /// Rows.
    pub store: Arc<Store>,
    /// Backends.
    pub drivers: Arc<Drivers>,
    /// Steps under way.
    pub progress: Arc<Progress>,
    /// Connections to running sandboxes.
    pub sessions: Arc<Sessions>,
    /// What main commands write.
    pub main_logs: Arc<MainLogs>,
    /// Operations on disks under way.
    pub maintenance: Arc<Maintenance>,
    /// How full the host's disk is.
    pub pressure: Arc<Pressure>,
    /// Images.
    pub images: Catalog,
    /// Guest kernels.
    pub kernels: Kernels,
    /// Held for reading while a create pins an image, for writing while one is removed.
    pub image_gate: tokio::sync::RwLock<()>,
    /// One image is built at a time.
    pub building: tokio::sync::Mutex<()>,
    /// What a request need not say.
    pub defaults: Defaults,
    /// Where what runs may send to.
    pub in_force: Arc<InForce>,
    /// Where sandboxes may send to that don't say it themselves.
    pub default_egress: Egress,
    /// What was seen of what sandboxes serve.
    pub endpoints: Endpoints,
    /// Whether sandboxes that are there may be changed.
    pub updates: bool,
    /// Exposed ports.
    pub listeners: Listeners,
    /// The host.
    pub host: HostLimits,
    /// What all sandboxes together may use.
    pub budget: Budget,
    /// Cancelled when the gateway ends: streams end then.
    pub end: CancellationToken,
}

/// A create as it came in; what is none gets a default.
#[derive(Clone, Debug, Default)]
pub struct Wish {
    /// Whoever wishes may speak of the host's files: administrators.
    pub trusted: bool,
    /// Generated when none.
    pub name: Option<String>,
    /// Where it shall be; the default one when none.
    pub workspace: Option<String>,
    /// The user's.
    pub labels: BTreeMap<String, String>,
    /// The user's.
    pub annotations: BTreeMap<String, String>,
    /// Name or digest.
    pub image: Option<String>,
    /// Main command.
    pub command: Vec<String>,
    /// Its environment.
    pub environment: BTreeMap<String, String>,
    /// Its folder.
    pub workdir: Option<String>,
    /// Its user.
    pub user: Option<String>,
    /// It has an input.
    pub stdin: bool,
    /// It has a terminal.
    pub tty: bool,
    /// Virtual CPUs.
    pub cpus: Option<u32>,
    /// Bytes.
    pub memory_bytes: Option<u64>,
    /// Bytes.
    pub disk_bytes: Option<u64>,
    /// At its end; never when none.
    pub restart: Option<RestartPolicy>,
    /// Which backend.
    pub driver: Option<String>,
    /// Which machine of the vm driver.
    pub machine: Option<String>,
    /// A kernel file.
    pub kernel: Option<String>,
    /// For its processes to end.
    pub stop_grace: Option<Duration>,
    /// Where it may send to.
    pub egress: Option<Egress>,
    /// What it mounts of the host.
    pub volumes: Vec<Volume>,
    /// Servers that are looked at.
    pub endpoints: Vec<Endpoint>,
    /// What its driver is told in the driver's own words.
    pub driver_config: Map<String, Value>,
    /// A template of its workspace that says what is left out here.
    pub template: Option<String>,
    /// Ports that are exposed from the beginning.
    pub expose: Vec<ExposeWish>,
    /// The caller's id of the request.
    pub request_id: Option<String>,
}

/// Which sandbox, and the caller's guards.
#[derive(Clone, Debug, Default)]
pub struct Target {
    /// Name or id.
    pub sandbox: String,
    /// The version it must be at.
    pub expected_version: Option<u64>,
    /// The caller's id of the request.
    pub request_id: Option<String>,
}

/// A record with what can be seen of it now.
#[derive(Clone, Debug)]
pub struct View {
    /// As written.
    pub record: Arc<Record>,
    /// As seen.
    pub facts: Facts,
    /// As being done.
    pub now: Option<Now>,
    /// What is being done with its disk.
    pub operation: Option<Kind>,
    /// What was seen last of each of its endpoints, in their order.
    pub endpoints: Vec<Option<Observation>>,
    /// The file system of the disks, when it is nearly full.
    pub pressed: Option<Space>,
    /// Where it may send to: its own policy, or the default; none where no policy is in force.
    pub egress: Option<Egress>,
}

/// What a delete came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// Everything is gone.
    Completed(SandboxId),
    /// It will be.
    Accepted(SandboxId),
    /// There was nothing.
    AlreadyAbsent,
}

/// Begins the names of volumes of workspaces other than the default one.
const WORKSPACE_VOLUME: &str = "torpor-ws.";
/// Tries at a generated name.
const GENERATED_NAMES: usize = 4;
/// Longest request id, bytes.
const REQUEST_ID: usize = 128;

/// `place` keeps the ids of different workspaces apart: a workspace, or the key of a sandbox. `asked` is whatever makes the
/// request what it is.
pub(crate) fn request_key(
    place: &str,
    id: Option<String>,
    verb: &'static str,
    asked: &str,
) -> Result<Option<RequestKey>, ApiError> {
    match id {
        Some(id) if id.len() > REQUEST_ID || id.contains(char::is_control) => {
            Err(ApiError::invalid("request_id", format!("at most {REQUEST_ID} printable bytes")))
        }
        id => Ok(id.filter(|id| !id.is_empty()).map(|id| {
            let fingerprint = format!("{:x}", Sha256::digest(asked));
            RequestKey::new(place, &id, verb, fingerprint)
        })),
    }
}

/// The place of requests about a sandbox: its workspace where it is called by its name, else itself.
pub(crate) fn place_of(sandbox: &str) -> &str {
    if sandbox.parse::<SandboxId>().is_ok() { sandbox } else { unqualified(sandbox).0 }
}

impl Service {
    /// Writes a new sandbox.
    ///
    /// # Errors
    /// Bad input (the field is named), a taken name, an unknown image.
    pub async fn create(self: &Arc<Self>, mut wish: Wish) -> Result<Arc<Record>, ApiError> {
        let request = {
            let workspace = wish.workspace.as_deref().unwrap_or(DEFAULT_WORKSPACE);
            request_key(workspace, wish.request_id.clone(), "create", &format!("{wish:?}"))?
        };
        if let Some(before) = self.made_before(request.clone()).await? {
            return Ok(before);
        }
        let given = wish.name.as_deref().filter(|n| !n.is_empty());
        let given =
            given.map(|n| n.parse::<SandboxName>().map_err(|e| ApiError::invalid("name", e))).transpose()?;
        let generated = given.is_none();
        let mut name = given.unwrap_or_else(SandboxName::generate);
        validate_labels(&wish.labels)?;
        validate_annotations(&wish.annotations)?;
        self.fill_in(&mut wish).await?;
        self.host_files(&mut wish)?;
        let expose = std::mem::take(&mut wish.expose);
        let (labels, annotations) = (wish.labels.clone(), wish.annotations.clone());
        // Before the gate: it may take minutes, and no image of the catalog is meant.
        let pulled = self.fetch_image(&wish).await?;
        let _pinned = self.image_gate.read().await;
        let spec = self.resolve(wish, &name, pulled).await?;
        let driver = self.driver(&spec.driver)?;
        self.could_run(&spec, &driver)?;
        if driver.disks().is_some() {
            self.room_for_disk()?;
        }
        hit("service.create").map_err(StoreError::from)?;
        let qualify = |name: &SandboxName, spec: &SandboxSpec| qualified(&spec.workspace, name.as_str());
        let mut new =
            NewSandbox { id: SandboxId::generate(), name: qualify(&name, &spec), labels, annotations, spec };
        let ports = match self.open_ports(expose).await {
            Ok(ports) => ports,
            // The first of two equal requests may have taken them.
            Err(error) => return self.made_before(request).await?.ok_or(error),
        };
        let mut tries = 0..GENERATED_NAMES;
        let made = loop {
            match self.store.create(new.clone(), ports.wanted(), request.clone()).await {
                Err(StoreError::NameTaken(_)) if generated && tries.next().is_some() => {
                    name = SandboxName::generate();
                    (new.name, new.spec.hostname) = (qualify(&name, &new.spec), name.to_string());
                }
                made => break made?,
            }
        };
        if made.id == new.id {
            self.listen_for(&made, ports);
        }
        Ok(made)
    }

    /// The sandbox that the same request made before.
    async fn made_before(&self, request: Option<RequestKey>) -> Result<Option<Arc<Record>>, ApiError> {
        let Some(key) = request else { return Ok(None) };
        let Some(id) = self.store.replayed(key).await? else { return Ok(None) };
        Ok(Some(Arc::new(self.store.get(&id).await?)))
    }

    /// Refuses a spec that could never run, however long it waited.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`, naming the field, or the driver's.
    pub(crate) fn could_run(
        &self,
        spec: &SandboxSpec,
        driver: &Arc<dyn ComputeDriver>,
    ) -> Result<(), ApiError> {
        if !spec.driver_config.is_empty() && !driver.takes_config() {
            let problem = format!("the {} driver takes none", spec.driver);
            return Err(ApiError::invalid("driver_config", problem));
        }
        if driver.is_of_this_host() {
            spec.validate(self.host)?;
            self.fits(spec)?;
        } else {
            spec.validate(HostLimits::UNKNOWN)?;
        }
        match driver.check(spec) {
            Err(DriverError::Invalid(text)) if text.starts_with("driver_config.") => {
                let (field, problem) = text.split_once(": ").unwrap_or((&text, "not possible"));
                Err(ApiError::invalid(field, problem))
            }
            checked => Ok(checked?),
        }
    }

    /// Refuses what could never be lent, however long it waited.
    fn fits(&self, spec: &SandboxSpec) -> Result<(), ApiError> {
        let size = torpor_sandbox::spec::size;
        let (memory, most) = (spec.resources.memory_bytes, self.budget.memory_bytes);
        if memory > most {
            let problem = format!(
                "{} asked for; all sandboxes together may use {} (`limits.memory_bytes`)",
                size(memory),
                size(most)
            );
            return Err(ApiError::invalid("resources.memory_bytes", problem));
        }
        let (cpus, most) = (u64::from(spec.resources.cpus), self.budget.cpu_capacity());
        if cpus.min(self.budget.cpus.len() as u64) > most {
            let problem = format!(
                "{cpus} CPUs asked for; all sandboxes together may use {most} (`limits.cpu_percent`)"
            );
            return Err(ApiError::invalid("resources.cpus", problem));
        }
        Ok(())
    }

    /// Fills in the defaults and pins the image: one of a driver that keeps its own was found before.
    async fn resolve(
        &self,
        wish: Wish,
        name: &SandboxName,
        pulled: Option<String>,
    ) -> Result<SandboxSpec, ApiError> {
        let driver =
            wish.driver.filter(|d| !d.is_empty()).unwrap_or_else(|| self.drivers.default_name().to_owned());
        let backend = self.driver(&driver)?;
        let image = wish.image.filter(|i| !i.is_empty()).unwrap_or_else(|| self.defaults.image.clone());
        if wish.disk_bytes == Some(0) {
            return Err(ApiError::invalid("resources.disk_bytes", "at least one byte is needed"));
        }
        let mut default_disk = self.defaults.disk_bytes;
        let (image_digest, image_bytes) = if driver == "sim" {
            ("sha256:sim".to_owned(), 0)
        } else if let Some(digest) = pulled {
            let sizes = backend.images().is_some_and(|images| images.sizes_disks());
            if wish.disk_bytes.is_some() && !sizes {
                let problem = format!("the {driver} driver can't limit what a container writes");
                return Err(ApiError::invalid("resources.disk_bytes", problem));
            }
            default_disk = 0;
            (digest, 0)
        } else {
            let (catalog, wanted) = (self.images.clone(), image.clone());
            let found = tokio::task::spawn_blocking(move || catalog.resolve(&wanted)).await;
            let found = found.map_err(ApiError::internal)?.map_err(|e| {
                let error = match e {
                    torpor_images::Error::UnknownImage { .. } => {
                        ApiError::new(Code::NotFound, "IMAGE_NOT_FOUND", e.to_string())
                    }
                    torpor_images::Error::Ambiguous { .. } => ApiError::invalid("image", e),
                    _ => ApiError::new(Code::Internal, "IMAGE_FAILED", e.to_string()),
                };
                error.with("field", "image").with("next", "torpor image list")
            })?;
            (found.digest, found.size_bytes)
        };
        let disk_bytes = wish.disk_bytes.unwrap_or_else(|| default_disk.max(image_bytes));
        if disk_bytes < image_bytes {
            let size = torpor_sandbox::spec::size;
            let problem =
                format!("{} asked for; image '{image}' alone has {}", size(disk_bytes), size(image_bytes));
            return Err(ApiError::invalid("resources.disk_bytes", problem));
        }
        Ok(SandboxSpec {
            driver,
            workspace: wish.workspace.unwrap_or_else(|| DEFAULT_WORKSPACE.to_owned()),
            hostname: name.to_string(),
            image,
            image_digest,
            command: wish.command,
            environment: wish.environment,
            workdir: wish.workdir.filter(|w| !w.is_empty()),
            user: wish.user.filter(|u| !u.is_empty()),
            stdin: wish.stdin,
            tty: wish.tty,
            resources: Resources {
                cpus: wish.cpus.unwrap_or(self.defaults.cpus),
                memory_bytes: wish.memory_bytes.unwrap_or(self.defaults.memory_bytes),
                disk_bytes,
            },
            restart: wish.restart.unwrap_or_default(),
            stop_grace: wish.stop_grace.unwrap_or(Duration::from_secs(self.defaults.stop_grace_seconds)),
            machine: wish.machine.filter(|m| !m.is_empty()).unwrap_or_else(|| "auto".to_owned()),
            kernel: wish.kernel.filter(|k| !k.is_empty()),
            egress: checked(wish.egress)?,
            volumes: wish.volumes,
            endpoints: wish.endpoints,
            driver_config: wish.driver_config,
        })
    }

    /// Files of the host are for those who may do everything: a folder of it in a container, or a kernel of it that is
    /// copied. Volumes by name belong to a workspace.
    fn host_files(&self, wish: &mut Wish) -> Result<(), ApiError> {
        let refused = |field: &str, whose: &str| {
            let message = format!("{field}: {whose} are for its administrators");
            ApiError::new(Code::PermissionDenied, "PERMISSION_DENIED", message)
        };
        let files = "files of the gateway's host";
        if wish.kernel.is_some() && !wish.trusted {
            return Err(refused("kernel", files));
        }
        if wish.volumes.is_empty() {
            return Ok(());
        }
        let workspace = wish.workspace.as_deref().unwrap_or(DEFAULT_WORKSPACE);
        let name = wish.driver.as_deref().filter(|name| !name.is_empty());
        let driver = self.driver(name.unwrap_or_else(|| self.drivers.default_name()))?;
        if !driver.is_of_this_host() {
            // Names there are the cluster's, and a path is a folder in one of them. In a place that is not the workspace's
            // alone others have theirs, or will as soon as somebody makes a workspace: members of the default one are no
            // exception.
            let own = driver.has_place_of_its_own(workspace);
            let shared = "volumes where several workspaces have theirs";
            return if own || wish.trusted { Ok(()) } else { Err(refused("volumes", shared)) };
        }
        if !wish.trusted && wish.volumes.iter().any(Volume::is_bind) {
            return Err(refused("volumes", files));
        }
        for volume in wish.volumes.iter_mut().filter(|volume| !volume.is_bind()) {
            if volume.source.starts_with(WORKSPACE_VOLUME) {
                let problem = format!("names under '{WORKSPACE_VOLUME}' are those of workspaces");
                return Err(ApiError::invalid("volumes", problem));
            }
            if workspace != DEFAULT_WORKSPACE {
                volume.source = format!("{WORKSPACE_VOLUME}{workspace}.{}", volume.source);
            }
        }
        Ok(())
    }

    pub(crate) fn driver(&self, name: &str) -> Result<Arc<dyn ComputeDriver>, ApiError> {
        self.drivers.get(name).ok_or_else(|| {
            let problem = format!(
                "'{}' is not one of this gateway's: {}",
                name.escape_debug(),
                self.drivers.names().join(", ")
            );
            ApiError::invalid("driver", problem)
        })
    }

    /// Writes what is asked for. Capabilities are checked before anything is written.
    ///
    /// # Errors
    /// `NOT_FOUND`, `ABORTED` (stale version), `FAILED_PRECONDITION` (phase or capability).
    pub async fn request(&self, target: Target, request: Request) -> Result<Applied, ApiError> {
        let asked = format!("{} {request:?}", target.sandbox);
        let key = request_key(place_of(&target.sandbox), target.request_id, request.verb(), &asked)?;
        let lacks = request != Request::Delete && self.drivers.all().any(|driver| driver.lacks().is_some());
        let memory = request == Request::Suspend(Keep::Memory);
        // What was taken before is answered as before, whatever has become of the backend.
        let taken = match key.clone().filter(|_| lacks || memory) {
            Some(key) => self.store.replayed(key).await?.is_some(),
            None => false,
        };
        // Most of the time no record need be read for that.
        if lacks && !taken {
            let record = self.store.get(&target.sandbox).await?;
            let done = next(&record.state, &Event::Request(request), record.spec.restart);
            let lack = self.driver(&record.spec.driver)?.lacks().filter(|_| done != Ok(Next::Same));
            if let Some(lack) = lack {
                return Err(ApiError::from(lack).about(&record).with("next", "torpor doctor"));
            }
        }
        if memory && !taken {
            let record = self.store.get(&target.sandbox).await?;
            let begun = matches!(record.state.phase, Phase::Suspending | Phase::Suspended);
            let capabilities = self.driver(&record.spec.driver)?.capabilities();
            if !begun && !capabilities.keeps_memory {
                let why = capabilities.no_memory.map(|why| format!(": {why}")).unwrap_or_default();
                let message = format!(
                    "sandbox '{}': the {} driver ({}) cannot keep memory{why}; nothing was changed",
                    record.name, capabilities.name, capabilities.machine
                );
                let error = ApiError::new(Code::FailedPrecondition, "MEMORY_NOT_SUPPORTED", message);
                return Err(error.about(&record).with("next", format!("torpor suspend {}", record.name)));
            }
        }
        hit("service.request").map_err(StoreError::from)?;
        let why = format!("{} requested", request.verb());
        let event = Event::Request(request);
        let applied = self.store.request(target.sandbox, event, why, target.expected_version, key).await?;
        hit("service.requested").map_err(StoreError::from)?;
        Ok(applied)
    }

    /// Writes that a sandbox is to be deleted.
    ///
    /// # Errors
    /// As [`Service::request`]; an unknown one is `AlreadyAbsent` with `allow_missing`.
    pub async fn delete(&self, target: Target, allow_missing: bool) -> Result<Deleted, ApiError> {
        let asked = format!("{} {:?}", target.sandbox, Request::Delete);
        let key = request_key(place_of(&target.sandbox), target.request_id.clone(), "delete", &asked)?;
        let replayed = match key.clone() {
            Some(key) => self.store.replayed(key).await?,
            None => None,
        };
        match self.request(target, Request::Delete).await {
            Ok(applied) => Ok(Deleted::Accepted(applied.record.id.clone())),
            // A retry after the first one has finished.
            Err(error) if error.code == Code::NotFound => match replayed.and_then(|id| id.parse().ok()) {
                Some(id) => Ok(Deleted::Completed(id)),
                None if allow_missing => {
                    if let Some(key) = key {
                        self.store.note_absent(key).await?;
                    }
                    Ok(Deleted::AlreadyAbsent)
                }
                None => Err(error),
            },
            Err(error) => Err(error),
        }
    }

    /// Waits until a sandbox is in `wanted`, or can't come there any more. Bound to the id.
    ///
    /// # Errors
    /// The failure that put it into Error, `ABORTED` when it was turned round, `RESOURCE_EXHAUSTED` while the host has
    /// nothing left for it, `NOT_FOUND` when it was deleted.
    pub async fn wait(&self, id: &SandboxId, wanted: Phase) -> Result<Arc<Record>, ApiError> {
        let mut changes = self.store.subscribe_to(id);
        let mut steps = self.progress.subscribe_to(id);
        loop {
            let record = Arc::new(self.store.get(id.as_str()).await?);
            if record.state.phase == wanted
                || (wanted == Phase::Ready && record.state.phase == Phase::Completed)
            {
                return Ok(record);
            }
            if !may_reach(&record.state, wanted) {
                return Err(cannot_reach(&record, wanted));
            }
            if record.state.phase.is_booting()
                && let Some(trouble) = self.progress.get(id).and_then(|now| now.trouble)
                && ["EXHAUSTED", "NO_SPACE"].contains(&trouble.reason.as_str())
            {
                let full = trouble.reason == "NO_SPACE";
                let message =
                    format!("{}; the sandbox goes on by itself when there is more", trouble.message);
                let error = ApiError::new(Code::ResourceExhausted, trouble.reason, message).about(&record);
                let next = if full { ADVICE } else { "torpor list; suspend what is not needed" };
                return Err(error.with("next", next));
            }
            tokio::select! {
                change = changes.recv() => match change {
                    // A phase that lasts but a moment, since a turn-round follows, is seen here and nowhere else.
                    Ok(change) if change.record.state.phase == wanted => return Ok(change.record),
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => changes = self.store.subscribe_to(id),
                },
                step = steps.recv() => if matches!(step, Err(RecvError::Closed)) {
                    steps = self.progress.subscribe_to(id);
                },
                () = self.end.cancelled() => return Err(StoreError::Closed.into()),
            }
        }
    }

    /// Waits until nothing of a sandbox is left.
    ///
    /// # Errors
    /// The database's.
    pub async fn wait_gone(&self, id: &SandboxId) -> Result<(), ApiError> {
        let mut changes = self.store.subscribe_to(id);
        loop {
            match self.store.get(id.as_str()).await {
                Err(StoreError::NotFound(_)) => return Ok(()),
                other => drop(other?),
            }
            tokio::select! {
                change = changes.recv() => match change {
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => changes = self.store.subscribe_to(id),
                },
                () = self.end.cancelled() => return Err(StoreError::Closed.into()),
            }
        }
    }

    /// A record with what can be seen of it now.
    pub async fn view(&self, record: Arc<Record>) -> View {
        let facts = match self.drivers.get(&record.spec.driver) {
            Some(driver) => driver.facts(&record.id).await,
            None => Facts::default(),
        };
        let now = self.progress.get(&record.id);
        let pressed = self.pressure.look().filter(Space::is_low);
        // Only the pool's networks have policies: an engine's is its own, and nothing is said of it.
        let pooled =
            self.drivers.get(&record.spec.driver).is_none_or(|driver| driver.capabilities().needs_loan);
        let usual = || pooled.then(|| self.default_egress.clone());
        let egress = record.spec.egress.clone().or_else(usual);
        let operation = self.maintenance.running(&record.id);
        let seen = |endpoint: &Endpoint| self.endpoints.get(&record.id, endpoint);
        let endpoints = record.spec.endpoints.iter().map(seen).collect();
        View { record, facts, now, operation, endpoints, pressed, egress }
    }

    /// The gRPC channel to the agent of a Ready sandbox, and the token that ends when it leaves Ready.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` with the phase and the next command outside Ready.
    pub async fn connect(
        &self,
        sandbox: &str,
    ) -> Result<(Record, tonic::transport::Channel, CancellationToken), ApiError> {
        let id = self.store.get(sandbox).await?.id;
        let session = self.sessions.join(&id);
        let record = self.store.get(id.as_str()).await?;
        if record.state.phase != Phase::Ready {
            return Err(ApiError::not_ready(&record));
        }
        let channel = self.driver(&record.spec.driver)?.agent(&id).await.map_err(|e| {
            ApiError::from(e).about(&record).with("next", format!("torpor get {}", record.name))
        })?;
        Ok((record, channel, session))
    }
}

fn cannot_reach(record: &Record, wanted: Phase) -> ApiError {
    if let (Phase::Error, Some(failure)) = (record.state.phase, &record.state.failure) {
        return ApiError::of_failure(record, failure);
    }
    let message = format!(
        "sandbox '{}' is {} and does not become {wanted} by itself: something else was asked for meanwhile",
        record.name, record.state.phase
    );
    ApiError::new(Code::Aborted, "TURNED_ROUND", message).about(record)
}
