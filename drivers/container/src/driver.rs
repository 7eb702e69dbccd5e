//! The driver: what its verbs share, and the trait.

use std::{path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use hyper::Method;
use tokio::{sync::broadcast, task::AbortHandle};
use tonic::transport::Channel;
use torpor_driver_common::{
    Turns,
    files::{failed, ids as ids_in},
};
use torpor_sandbox::{
    Capabilities, Change, ComputeDriver, DriverError, Facts, Field, ImageCare, Keep, Observed, Run,
    SandboxId, SandboxSpec, Stopped,
    driver::{Word, word_of},
    failpoint::hit,
};

use crate::{
    client::{Carries, Client, EngineError, WORK, encoded},
    config::{ConfigError, ContainerConfig},
    container::{self, GATEWAY, SANDBOX},
    engine::Engine,
    events, limits, live, logs,
    run::RunDir,
    store::Store,
    types::{Inspect, Listed},
};

/// Hints that nobody has read yet; more are dropped, oldest first.
const HINTS: usize = 1024;

/// What the verbs and their steps share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) config: ContainerConfig,
    pub(crate) client: Client,
    pub(crate) store: Store,
    pub(crate) hints: broadcast::Sender<SandboxId>,
    pub(crate) live: live::Map,
    pub(crate) turns: Turns,
}

/// Runs sandboxes as containers of one engine.
#[derive(Debug)]
pub struct ContainerDriver {
    inner: Arc<Inner>,
    events: AbortHandle,
}

impl Drop for ContainerDriver {
    fn drop(&mut self) {
        self.events.abort();
        // Containers go on; another driver hears their agents.
        self.inner.unhear_all();
    }
}

impl ContainerDriver {
    /// A driver for the containers that belong to the state directory of `config`. The engine need not be there yet.
    /// Starts and stops nothing. Must be called within the runtime.
    ///
    /// # Errors
    /// A value of the configuration that can't work, or a file or folder that can't be made.
    pub fn new(config: ContainerConfig) -> Result<Arc<Self>, ConfigError> {
        let inner = Arc::new(Inner::new(config)?);
        let events = tokio::spawn(events::follow(inner.clone())).abort_handle();
        Ok(Arc::new(Self { inner, events }))
    }
}

impl Inner {
    pub(crate) fn new(config: ContainerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let store = Store::open(&config.state_dir, config.engine, &config.agent)?;
        let client = Client::new(config.engine, &config.socket);
        let (hints, _) = broadcast::channel(HINTS);
        let (live, turns) = Default::default();
        Ok(Self { config, client, store, hints, live, turns })
    }

    pub(crate) fn run_dir(&self, id: &SandboxId) -> RunDir {
        RunDir::new(self.runs().join(id.as_str()))
    }

    pub(crate) fn runs(&self) -> std::path::PathBuf {
        self.config.run_dir.join(self.config.engine.name())
    }

    /// The container of a sandbox as it is now; none when there is none that is ours.
    pub(crate) async fn inspect(&self, id: &SandboxId) -> Result<Option<Inspect>, EngineError> {
        let found = self.client.get::<Inspect>(&format!("/containers/{}/json", container::name(id))).await;
        match found {
            Ok(found) if self.is_ours(&found, id) => self.without_old_pid(id, found).await,
            Ok(_) => {
                tracing::warn!(%id, "a container with the sandbox's name is another gateway's");
                Ok(None)
            }
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Podman shows the process of a container that it has written out as if it were there.
    async fn without_old_pid(
        &self,
        id: &SandboxId,
        mut found: Inspect,
    ) -> Result<Option<Inspect>, EngineError> {
        let state = &mut found.state;
        let doubtful = state.pid > 0 && !state.running && state.status == "exited";
        if doubtful && self.config.engine == Engine::Podman {
            let seen = match self.checkpointed(id).await {
                Ok(seen) => seen.state,
                // Removed in between.
                Err(error) if error.is_not_found() => return Ok(None),
                Err(error) => return Err(error),
            };
            if seen.checkpointed && !seen.running {
                state.pid = 0;
            }
        }
        Ok(Some(found))
    }

    fn is_ours(&self, found: &Inspect, id: &SandboxId) -> bool {
        found.label(GATEWAY) == Some(self.store.identity.as_str())
            && found.label(SANDBOX) == Some(id.as_str())
    }

    /// Asks the engine for something about the container of a sandbox.
    pub(crate) async fn ask(
        &self,
        method: Method,
        id: &SandboxId,
        what: &str,
        limit: Duration,
    ) -> Result<(), EngineError> {
        let path = format!("/containers/{}{what}", container::name(id));
        self.client.call(method, &path, Carries::Nothing, limit).await.map(drop)
    }

    async fn create(
        self: &Arc<Self>,
        id: &SandboxId,
        spec: &SandboxSpec,
        run: Run,
    ) -> Result<Change, DriverError> {
        self.check(spec)?;
        let turn = self.turns.turn(id).await;
        let (inner, wanted, spec) = (self.clone(), id.clone(), spec.clone());
        self.turns.step(id, &turn, async move { inner.make(&wanted, &spec, run).await }).await
    }

    async fn make(&self, id: &SandboxId, spec: &SandboxSpec, run: Run) -> Result<Change, DriverError> {
        let noted = self.store.specs.write(id, spec)?;
        hit("container.create.noted")?;
        if self.inspect(id).await?.is_some() {
            return Ok(noted);
        }
        let known = self.client.learn().await?;
        let dir = self.run_dir(id);
        // Docker wants to see what it will mount.
        dir.make()?;
        self.store.link_agent(id)?;
        let body = container::body(id, spec, run, &self.config, &self.store, &dir, &known.info);
        let path = format!("/containers/create?name={}", container::name(id));
        let made = self.client.call(Method::POST, &path, Carries::Json(body), WORK).await;
        hit("container.create.made")?;
        let there = dir.record()?.is_some();
        if !there {
            dir.remove()?;
        }
        match made {
            Ok(_) => Ok(Change::Done),
            // Whatever the refusal says: a repeat of what was done before.
            Err(error) => match self.inspect(id).await {
                Ok(Some(_)) => Ok(noted),
                _ => Err(self.not_made(spec, error)),
            },
        }
    }

    fn not_made(&self, spec: &SandboxSpec, error: EngineError) -> DriverError {
        if error.is_not_found() {
            return DriverError::BaseMissing(format!("{} ({}): {error}", spec.image, spec.image_digest));
        }
        match &error {
            EngineError::Refused { message, .. } if message.contains("bind source path does not exist") => {
                DriverError::MountMissing(error.to_string())
            }
            _ => error.into(),
        }
    }

    fn check(&self, spec: &SandboxSpec) -> Result<(), DriverError> {
        container::check(&self.config, spec).map_err(DriverError::Unsupported)?;
        let missing = spec.volumes.iter().find(|v| v.is_bind() && !Path::new(&v.source).exists());
        match missing {
            Some(volume) => Err(DriverError::Invalid(format!("volumes: '{}' is not there", volume.source))),
            None => Ok(()),
        }
    }

    /// Every container of this state directory, by its label.
    pub(crate) async fn labelled(&self) -> Result<Vec<SandboxId>, EngineError> {
        let filter = serde_json::json!({"label": [format!("{GATEWAY}={}", self.store.identity)]});
        let path = format!("/containers/json?all=true&filters={}", encoded(&filter.to_string()));
        let listed: Vec<Listed> = self.client.get(&path).await?;
        let ids = listed.iter().filter_map(|one| one.labels.as_ref()?.get(SANDBOX)?.parse().ok());
        Ok(ids.collect())
    }
}

#[async_trait]
impl ComputeDriver for ContainerDriver {
    fn capabilities(&self) -> Capabilities {
        let engine = self.inner.config.engine.name();
        let known = self.inner.client.known();
        let version = known.as_ref().map_or_else(String::new, |known| known.version.clone());
        let machine = match &known {
            Some(known) => format!("{engine} {} ({})", known.version, known.info.default_runtime),
            None => format!("{engine} (not reached yet)"),
        };
        let no_memory = match known.as_ref().map(|known| known.can_keep.clone()) {
            None => Some(format!("{engine} is not reached yet")),
            Some(None) => Some("whether it can is being found out; try again".to_owned()),
            Some(Some(can)) => can.err(),
        };
        let notice = known.and_then(|known| missing_limits(&known.info));
        Capabilities {
            name: engine.to_owned(),
            version,
            keeps_memory: no_memory.is_none(),
            no_memory,
            updates: true,
            needs_loan: false,
            machine,
            notice,
        }
    }

    fn check(&self, spec: &SandboxSpec) -> Result<(), DriverError> {
        self.inner.check(spec)
    }

    fn images(&self) -> Option<&dyn ImageCare> {
        Some(&*self.inner)
    }

    async fn create(&self, id: &SandboxId, spec: &SandboxSpec, run: Run) -> Result<Change, DriverError> {
        self.inner.create(id, spec, run).await
    }

    fn updates(&self) -> &'static [Field] {
        limits::updates(self.inner.config.engine)
    }

    fn why_not(&self, field: Field) -> Option<&'static str> {
        limits::why_not(field)
    }

    async fn update(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        let turn = self.inner.turns.turn(id).await;
        let (inner, wanted, spec) = (self.inner.clone(), id.clone(), spec.clone());
        let write = async move {
            inner.store.specs.read(&wanted)?;
            inner.store.specs.write(&wanted, &spec)
        };
        self.inner.turns.step(id, &turn, write).await
    }

    async fn start(&self, id: &SandboxId, from: Keep, run: Run) -> Result<Change, DriverError> {
        self.inner.start(id, from, run).await
    }

    async fn stop(&self, id: &SandboxId, keep: Keep, deadline: Duration) -> Result<Stopped, DriverError> {
        if keep == Keep::Memory {
            return self.inner.put_to_sleep(id, deadline).await;
        }
        let turn = self.inner.turns.turn(id).await;
        self.inner.put_down(id, &turn, Some(deadline)).await
    }

    async fn delete(&self, id: &SandboxId) -> Result<Change, DriverError> {
        self.inner.delete(id).await
    }

    async fn observe(&self, id: &SandboxId) -> Result<Observed, DriverError> {
        self.inner.observe(id).await
    }

    async fn list(&self) -> Result<Vec<SandboxId>, DriverError> {
        let mut ids = self.inner.labelled().await?;
        let runs = self.inner.runs();
        ids.extend(self.inner.store.specs.list()?);
        ids.extend(ids_in(&runs).map_err(|error| failed("list", &runs, error))?);
        ids.sort();
        ids.dedup();
        Ok(ids)
    }

    fn hints(&self) -> Word {
        word_of(&self.inner.hints)
    }

    async fn agent(&self, id: &SandboxId) -> Result<Channel, DriverError> {
        self.inner.agent(id).await
    }

    async fn facts(&self, id: &SandboxId) -> Facts {
        let Some(live) = self.inner.heard(id) else { return Facts::default() };
        let facts = live.facts();
        Facts {
            machine: Some(self.capabilities().machine),
            boot_id: live.boot_id(),
            host: (facts.pid > 0).then_some(facts),
            disk: None,
        }
    }

    async fn console(&self, id: &SandboxId, bytes: usize) -> Vec<u8> {
        logs::tail(&self.inner, id, bytes).await
    }
}

fn missing_limits(info: &crate::types::Info) -> Option<String> {
    let missing = info.missing_limits();
    let text =
        format!("the engine can't limit {} here: its cgroups lack the controllers", missing.join(", "));
    (!missing.is_empty()).then_some(text)
}
