//! The driver: what its verbs share, and the trait.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::{
    sync::{Semaphore, broadcast},
    task::AbortHandle,
    time::Instant,
};
use tonic::transport::Channel;
use torpor_driver_common::{Turns, files::in_place};
use torpor_sandbox::{
    Capabilities, Change, ComputeDriver, DriverError, Facts, Field, ImageCare, Keep, Observed, Run,
    SandboxId, SandboxSpec, Stopped,
    driver::{HostFacts, Word, word_of},
    spec::plain_path,
};

use crate::{
    cache::{self, Cache, News},
    client::{ApiError, Cluster, Found, GROUP, LIMIT, Lane, if_there},
    config::{AgentLink, ConfigError, KubernetesConfig},
    folder, live, manifest, passed,
    place::Place,
    store::Store,
    trust::Trust,
    types::{Pod, Sandbox, name},
    update,
    wait::Waits,
    way::ENROLLING,
};

/// Hints that nobody has read yet; more are dropped, oldest first.
const HINTS: usize = 65_536;
/// The end of a pod's log that is asked for, bytes at most.
const LOG_LIMIT: usize = 64 << 10;
/// A node that is lost answers for none of its pods, and nobody's stop may wait for a log.
const LOG_WAIT: Duration = Duration::from_secs(5);

/// Pods of a sandbox that their nodes ended, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Failures {
    pub(crate) count: u32,
    /// The last one.
    pub(crate) pod: String,
    pub(crate) last: Instant,
}

/// What the verbs and their steps share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) config: KubernetesConfig,
    pub(crate) cluster: Cluster,
    pub(crate) cache: Cache,
    pub(crate) store: Store,
    /// Where agents may have ports of their own.
    pub(crate) trust: Option<Trust>,
    pub(crate) enrolling: Semaphore,
    pub(crate) hints: broadcast::Sender<SandboxId>,
    pub(crate) live: live::Map,
    pub(crate) failures: Mutex<HashMap<SandboxId, Failures>>,
    pub(crate) waits: Waits,
    pub(crate) turns: Turns,
}

/// Runs sandboxes as Sandbox objects of one cluster.
#[derive(Debug)]
pub struct KubernetesDriver {
    inner: Arc<Inner>,
    tasks: Vec<AbortHandle>,
}

impl Drop for KubernetesDriver {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        // Pods go on; another driver hears their agents.
        self.inner.unhear_all();
    }
}

impl KubernetesDriver {
    /// A driver for the objects that belong to the state directory of `config`. The cluster need not be there yet.
    /// Starts and stops nothing.
    ///
    /// # Errors
    /// A value of the configuration that can't work, no cluster that is named, or a file that can't be read or made.
    pub async fn new(mut config: KubernetesConfig) -> Result<Arc<Self>, ConfigError> {
        config.validate()?;
        config.mount_path = plain_path(&config.mount_path);
        let cluster = Cluster::open(&config).await?;
        let store = Store::open(&config)?;
        let trust = match config.agent_link {
            AgentLink::Exec => None,
            AgentLink::Mtls => Some(Trust::open(&folder::path(&config.state_dir), &store.identity)?),
        };
        let (hints, _) = broadcast::channel(HINTS);
        let inner = Arc::new(Inner {
            config,
            cluster,
            cache: Cache::default(),
            store,
            trust,
            enrolling: Semaphore::new(ENROLLING),
            hints,
            live: live::Map::default(),
            failures: Mutex::default(),
            waits: Waits::default(),
            turns: Turns::default(),
        });
        inner.find_places()?;
        let mut tasks = cache::watch_all(&inner);
        tasks.push(tokio::spawn(live::tidy(inner.clone())).abort_handle());
        Ok(Arc::new(Self { inner, tasks }))
    }

    /// The label of its objects.
    pub fn identity(&self) -> &str {
        &self.inner.store.identity
    }

    /// How many sandboxes the watches have told of, when all of them are open: for measurements.
    pub fn watched(&self) -> Option<usize> {
        self.inner.cache.is_all_live().then(|| self.inner.cache.len())
    }
}

impl Inner {
    pub(crate) fn hint(&self, id: &SandboxId) {
        let _nobody = self.hints.send(id.clone()).is_err();
    }

    /// Every namespace that has sandboxes, or will have.
    pub(crate) fn namespaces(&self) -> BTreeSet<String> {
        let mut all = self.config.all_namespaces(&self.cluster.namespace);
        all.append(&mut self.store.all_namespaces());
        all
    }

    /// Of those that were made before it was noted, it is as the configuration says.
    fn find_places(&self) -> Result<(), ConfigError> {
        let of = |workspace: &str| Place {
            namespace: self.namespace_for(workspace),
            cluster: None,
            server: self.cluster.url.clone(),
            taken: false,
        };
        in_place(|| self.store.find_places(of)).map_err(|source| ConfigError::Places { source })
    }

    pub(crate) fn namespace_for(&self, workspace: &str) -> String {
        self.config.namespaces.get(workspace).unwrap_or(&self.cluster.namespace).clone()
    }

    /// Where a sandbox's objects are: where they were made, and else where the cluster shows them.
    pub(crate) fn namespace_of(&self, id: &SandboxId) -> Result<String, DriverError> {
        if let Some(known) = self.store.namespace(id).or_else(|| self.cache.namespace(id)) {
            return Ok(known.to_string());
        }
        if self.config.namespaces.is_empty() {
            return Ok(self.cluster.namespace.clone());
        }
        match self.store.specs.read(id) {
            Ok(spec) => Ok(self.namespace_for(&spec.workspace)),
            Err(DriverError::Missing) => Ok(self.cluster.namespace.clone()),
            Err(error) => Err(error),
        }
    }

    /// The Sandbox object as it is now; none when there is none that is ours.
    pub(crate) async fn get_sandbox(&self, id: &SandboxId) -> Result<Option<Sandbox>, ApiError> {
        self.get_sandbox_in(Lane::Fast, id).await
    }

    pub(crate) async fn get_sandbox_in(
        &self,
        lane: Lane,
        id: &SandboxId,
    ) -> Result<Option<Sandbox>, ApiError> {
        Ok(self.find_sandbox(lane, id).await?.filter(|found| self.is_ours(&found.metadata, id)))
    }

    /// The Sandbox object of its name, whosever it is.
    pub(crate) async fn find_sandbox(&self, lane: Lane, id: &SandboxId) -> Result<Option<Sandbox>, ApiError> {
        let namespace = self.namespace_of(id).unwrap_or_else(|_| self.cluster.namespace.clone());
        let object = name(id);
        let what = format!("get the sandbox {object}");
        let before = self.cache.view(id).sandbox.map(|seen| seen.version);
        let found = self.cluster.on_sandboxes(lane, &namespace, &what, |api| {
            let object = object.clone();
            async move { api.get(&object).await }
        });
        let found = if_there(found.await)?;
        if let (None, Some(version)) = (&found, before) {
            // What was known when it was asked for is gone, whether or not the watch says so.
            self.saw(id, &namespace, News::NoSandbox(version));
        }
        if let Some(found) = found.as_ref().filter(|found| self.is_labelled(&found.metadata, id)) {
            self.saw(id, &namespace, News::Sandbox(found.into()));
        }
        Ok(found)
    }

    /// The pod of its name, whosever it is.
    pub(crate) async fn get_pod(&self, id: &SandboxId) -> Result<Option<Pod>, ApiError> {
        self.get_pod_in(Lane::Fast, id).await
    }

    pub(crate) async fn get_pod_in(&self, lane: Lane, id: &SandboxId) -> Result<Option<Pod>, ApiError> {
        let namespace = self.namespace_of(id).unwrap_or_else(|_| self.cluster.namespace.clone());
        let (api, object) = (self.cluster.pods(&namespace), name(id));
        let what = format!("get the pod {object}");
        let before = self.cache.view(id).pod.map(|seen| seen.version);
        let found = if_there(self.cluster.call(lane, LIMIT, &what, api.get(&object)).await)?;
        if let (None, Some(version)) = (&found, before) {
            self.saw(id, &namespace, News::NoPod(version));
        }
        if let Some(found) = found.as_ref().filter(|found| self.is_labelled(&found.metadata, id)) {
            self.saw(id, &namespace, News::Pod(found.into()));
        }
        Ok(found)
    }

    pub(crate) fn is_labelled(&self, meta: &ObjectMeta, id: &SandboxId) -> bool {
        crate::types::id_of(meta, &self.store.identity).as_ref() == Some(id)
    }

    pub(crate) fn is_ours(&self, meta: &ObjectMeta, id: &SandboxId) -> bool {
        let ours = self.is_labelled(meta, id);
        if !ours {
            tracing::warn!(%id, "an object with the sandbox's name is another gateway's");
        }
        ours
    }

    fn check(&self, spec: &SandboxSpec) -> Result<(), DriverError> {
        self.lacks().map_or(Ok(()), Err)?;
        self.check_spec(spec)
    }

    fn lacks(&self) -> Option<DriverError> {
        (self.cluster.found() == Some(Found::Nothing)).then(no_kind)
    }

    /// What a configuration of today lets no pod be.
    fn check_spec(&self, spec: &SandboxSpec) -> Result<(), DriverError> {
        passed::check(&self.config, &spec.driver_config).map_err(DriverError::Invalid)?;
        manifest::check(&self.config, spec).map_err(DriverError::Unsupported)
    }
}

#[async_trait]
impl ComputeDriver for KubernetesDriver {
    fn capabilities(&self) -> Capabilities {
        let class = self.inner.config.runtime_class.as_deref().unwrap_or("the cluster's runtime");
        let (version, notice, of) = match self.inner.cluster.found() {
            Some(Found::Version(served)) => (format!("{GROUP}/{}", served.name()), None, class),
            Some(Found::Nothing) => {
                (String::new(), Some(ApiError::Absent.to_string()), "without agent-sandbox")
            }
            None => (String::new(), None, "not reached yet"),
        };
        Capabilities {
            name: "kubernetes".to_owned(),
            version,
            keeps_memory: false,
            no_memory: Some("a suspended sandbox has no pod at all that could keep it".to_owned()),
            updates: true,
            needs_loan: false,
            machine: format!("kubernetes ({of})"),
            notice,
        }
    }

    fn check(&self, spec: &SandboxSpec) -> Result<(), DriverError> {
        self.inner.check(spec)
    }

    fn is_of_this_host(&self) -> bool {
        false
    }

    fn lacks(&self) -> Option<DriverError> {
        self.inner.lacks()
    }

    fn takes_config(&self) -> bool {
        true
    }

    fn has_place_of_its_own(&self, workspace: &str) -> bool {
        let all = &self.inner.config.namespaces;
        all.get(workspace).is_some_and(|own| {
            *own != self.inner.cluster.namespace && all.values().filter(|one| *one == own).count() == 1
        })
    }

    fn images(&self) -> Option<&dyn ImageCare> {
        Some(&*self.inner)
    }

    async fn create(&self, id: &SandboxId, spec: &SandboxSpec, _run: Run) -> Result<Change, DriverError> {
        // Whether the cluster has the kind is asked anew there: it may have been installed since.
        self.inner.check_spec(spec)?;
        self.inner.create(id, spec).await
    }

    fn updates(&self) -> &'static [Field] {
        update::UPDATES
    }

    fn why_not(&self, field: Field) -> Option<&'static str> {
        update::why_not(field)
    }

    async fn update(&self, id: &SandboxId, spec: &SandboxSpec) -> Result<Change, DriverError> {
        self.inner.update(id, spec).await
    }

    async fn start(&self, id: &SandboxId, from: Keep, run: Run) -> Result<Change, DriverError> {
        if from == Keep::Memory {
            return Err(no_memory());
        }
        self.inner.start(id, run).await
    }

    async fn stop(&self, id: &SandboxId, keep: Keep, deadline: Duration) -> Result<Stopped, DriverError> {
        if keep == Keep::Memory {
            return Err(no_memory());
        }
        let turn = self.inner.turns.turn(id).await;
        self.inner.put_down(id, &turn, deadline).await
    }

    async fn delete(&self, id: &SandboxId) -> Result<Change, DriverError> {
        self.inner.delete(id).await
    }

    async fn observe(&self, id: &SandboxId) -> Result<Observed, DriverError> {
        self.inner.observe(id).await
    }

    async fn list(&self) -> Result<Vec<SandboxId>, DriverError> {
        self.inner.list().await
    }

    fn hints(&self) -> Word {
        word_of(&self.inner.hints)
    }

    async fn agent(&self, id: &SandboxId) -> Result<Channel, DriverError> {
        self.inner.agent(id).await
    }

    async fn facts(&self, id: &SandboxId) -> Facts {
        let Some(live) = self.inner.heard(id) else { return Facts::default() };
        let pod = self.inner.cache.view(id).pod.filter(|pod| pod.uid == live.pod);
        let host = pod.map(|pod| HostFacts { ip: pod.ip, run_dir: pod.node, ..HostFacts::default() });
        Facts { machine: Some(self.capabilities().machine), boot_id: live.boot_id(), host, disk: None }
    }

    fn agent_links(&self) -> Vec<(&'static str, usize)> {
        ["exec", "mtls"].into_iter().zip(self.inner.links()).collect()
    }

    async fn console(&self, id: &SandboxId, bytes: usize) -> Vec<u8> {
        self.inner.log(id, bytes).await
    }
}

impl Inner {
    /// The end of the pod's log; empty when it can't be had.
    pub(crate) async fn log(&self, id: &SandboxId, bytes: usize) -> Vec<u8> {
        let Ok(namespace) = self.namespace_of(id) else { return Vec::new() };
        let api: kube::Api<k8s_openapi::api::core::v1::Pod> =
            kube::Api::namespaced(self.cluster.client.clone(), &namespace);
        let params = kube::api::LogParams {
            container: Some(manifest::CONTAINER.to_owned()),
            tail_lines: Some(200),
            limit_bytes: i64::try_from(LOG_LIMIT).ok(),
            ..Default::default()
        };
        let object = name(id);
        let log =
            self.cluster.call(Lane::Look, LOG_WAIT, "read a pod's log", api.logs(&object, &params)).await;
        let log = log.unwrap_or_default().into_bytes();
        log[log.len().saturating_sub(bytes)..].to_vec()
    }
}

/// Nothing is begun in a cluster that has no such thing as a Sandbox.
pub(crate) fn no_kind() -> DriverError {
    DriverError::Unsupported(ApiError::Absent.to_string())
}

fn no_memory() -> DriverError {
    let text = "the kubernetes driver keeps no memory: a suspended sandbox has no pod at all; suspend without --memory";
    DriverError::Unsupported(text.to_owned())
}
