//! Requests to the API server: each bounded in time, in lanes, and with its failures told apart.
//!
//! kube's client tries 429, 503 and 504 again by itself, also creations: one that "exists already" under our own labels
//! is our own.

use std::{
    future::Future,
    sync::{
        PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kube::{
    Api, Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
    core::{ApiResource, GroupVersionKind, Status},
};
use serde_json::Value;
use tokio::{
    sync::{OnceCell, Semaphore},
    time::timeout,
};
use torpor_sandbox::{DriverError, words};

use crate::{
    config::{ConfigError, KubernetesConfig},
    types::{Claim, Pod, Sandbox},
};

/// The group of the Sandbox kind.
pub(crate) const GROUP: &str = "agents.x-k8s.io";
/// Whom our fields belong to.
pub(crate) const MANAGER: &str = "torpor";
/// For one request with all its repeats.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);
/// For a page of a list.
pub(crate) const PAGE_LIMIT: Duration = Duration::from_secs(120);
/// Requests at once of each lane.
const FAST: usize = 48;
const LOOK: usize = 16;
const CREATE: usize = 16;
const LIST: usize = 2;
/// Execs that are being opened.
const EXEC: usize = 32;

/// Requests wait among their own kind only: what ends or wakes a sandbox never stands behind creations and lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Suspend, resume, delete.
    Fast,
    /// Looks that no verb stands behind, the opening of watches, and logs.
    Look,
    Create,
    List,
}

/// Why the cluster did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("{what}: {} ({})", words::said(&status.message), status.code)]
    Refused { what: String, status: Box<Status> },
    #[error("the cluster's API server did not answer within {} s: {what}", after.as_secs())]
    Silent { what: String, after: Duration },
    #[error("the cluster's API server is not reached: {what}: {}", causes(source))]
    Unreachable { what: String, source: Box<kube::Error> },
    #[error("what the cluster answers can't be read: {what}: {source}")]
    Garbled { what: String, source: Box<kube::Error> },
    #[error(
        "agent-sandbox is not installed in the cluster: it serves no version of {GROUP}; install its release manifests"
    )]
    Absent,
    #[error(
        "what answers at {url} is no API server of a cluster: it knows neither {GROUP} nor the core API; look at `kubeconfig` under [kubernetes], and at what stands before the cluster"
    )]
    NoCluster { url: String },
}

/// An error with everything under it, in one line.
fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        next = cause.source();
    }
    words::said(&text)
}

impl ApiError {
    fn new(what: &str, error: kube::Error) -> Self {
        let what = what.to_owned();
        match error {
            kube::Error::Api(status) => Self::Refused { what, status },
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) | kube::Error::BuildRequest(_) => {
                Self::Garbled { what, source: Box::new(error) }
            }
            other => Self::Unreachable { what, source: Box::new(other) },
        }
    }

    fn code(&self) -> u16 {
        match self {
            Self::Refused { status, .. } => status.code,
            _ => 0,
        }
    }

    fn reason(&self) -> &str {
        match self {
            Self::Refused { status, .. } => &status.reason,
            _ => "",
        }
    }

    /// The object is not there.
    pub(crate) fn is_not_found(&self) -> bool {
        self.code() == 404 && self.reason() == "NotFound"
    }

    /// The group or version is not served: told in plain text, which is no Status.
    pub(crate) fn is_unknown_version(&self) -> bool {
        self.code() == 404 && self.reason() != "NotFound"
    }

    pub(crate) fn is_exists(&self) -> bool {
        self.code() == 409 && self.reason() == "AlreadyExists"
    }

    pub(crate) fn is_conflict(&self) -> bool {
        self.code() == 409 && self.reason() != "AlreadyExists"
    }

    pub(crate) fn is_forbidden(&self) -> bool {
        self.code() == 403
    }

    pub(crate) fn is_expired(&self) -> bool {
        self.code() == 410
    }

    /// The API server is down, on its way up or down, overloaded, or hangs.
    pub(crate) fn is_absence(&self) -> bool {
        match self {
            Self::Silent { .. } | Self::Unreachable { .. } | Self::NoCluster { .. } => true,
            Self::Refused { status, .. } => matches!(status.code, 429 | 500 | 502..=504),
            Self::Garbled { .. } | Self::Absent => false,
        }
    }
}

impl From<ApiError> for DriverError {
    fn from(error: ApiError) -> Self {
        match &error {
            _ if error.is_absence() => Self::Unreachable(error.to_string()),
            // It may come back: only what begins is refused.
            ApiError::Absent => Self::Unreachable(error.to_string()),
            ApiError::Refused { status, .. } if status.message.contains("exceeded quota") => {
                Self::Exhausted(error.to_string())
            }
            ApiError::Refused { status, .. } if matches!(status.code, 400 | 422) => {
                Self::Invalid(error.to_string())
            }
            // As the API server words a missing right. Others that forbid are webhooks, quotas, and namespaces that end.
            ApiError::Refused { status, .. }
                if status.code == 401 || (status.code == 403 && status.message.contains(" cannot ")) =>
            {
                Self::backend(
                    "the gateway's service account may not do this; `torpor doctor --driver kubernetes` says what is missing",
                    error,
                )
            }
            _ => Self::backend("ask the cluster", error),
        }
    }
}

/// A version of the Sandbox kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    V1beta1,
    V1alpha1,
}

impl Served {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::V1beta1 => "v1beta1",
            Self::V1alpha1 => "v1alpha1",
        }
    }

    pub(crate) fn resource(self) -> ApiResource {
        let kind = GroupVersionKind::gvk(GROUP, self.name(), "Sandbox");
        ApiResource::from_gvk_with_plural(&kind, "sandboxes")
    }

    /// The one to speak of those that a cluster serves.
    pub(crate) fn best(versions: &[String]) -> Option<Self> {
        [Self::V1beta1, Self::V1alpha1].into_iter().find(|one| versions.iter().any(|v| v == one.name()))
    }
}

/// A kind of Kubernetes itself.
fn built_in(kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", kind), plural)
}

pub(crate) fn claim_resource() -> ApiResource {
    built_in("PersistentVolumeClaim", "persistentvolumeclaims")
}

/// What discovery has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Version(Served),
    Nothing,
}

pub(crate) struct Cluster {
    pub(crate) client: Client,
    pub(crate) url: String,
    pub(crate) namespace: String,
    found: RwLock<Option<Found>>,
    id: OnceCell<Option<String>>,
    /// What was found is in doubt.
    doubted: AtomicBool,
    fast: Semaphore,
    look: Semaphore,
    create: Semaphore,
    list: Semaphore,
    pub(crate) exec: Semaphore,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster")
            .field("url", &self.url)
            .field("found", &self.found())
            .finish_non_exhaustive()
    }
}

impl Cluster {
    /// A client as the configuration says. Nothing is asked yet.
    pub(crate) async fn open(config: &KubernetesConfig) -> Result<Self, ConfigError> {
        let options = KubeConfigOptions { context: config.context.clone(), ..KubeConfigOptions::default() };
        let found = match &config.kubeconfig {
            Some(path) => {
                let failed = |source: Box<dyn std::error::Error + Send + Sync>| ConfigError::Kubeconfig {
                    path: path.clone(),
                    source,
                };
                let file = Kubeconfig::read_from(path).map_err(|error| failed(error.into()))?;
                Config::from_custom_kubeconfig(file, &options).await.map_err(|error| failed(error.into()))?
            }
            None if config.context.is_some() => Config::from_kubeconfig(&options)
                .await
                .map_err(|error| ConfigError::NoCluster { source: error.into() })?,
            None => Config::infer().await.map_err(|error| ConfigError::NoCluster { source: error.into() })?,
        };
        let url = found.cluster_url.to_string();
        let namespace = config.namespace.clone().unwrap_or_else(|| found.default_namespace.clone());
        let client = Client::try_from(found).map_err(|error| ConfigError::Client(Box::new(error)))?;
        Ok(Self {
            client,
            url,
            namespace,
            found: RwLock::default(),
            id: OnceCell::new(),
            doubted: AtomicBool::new(false),
            fast: Semaphore::new(FAST),
            look: Semaphore::new(LOOK),
            create: Semaphore::new(CREATE),
            list: Semaphore::new(LIST),
            exec: Semaphore::new(EXEC),
        })
    }

    /// What discovery has found last; none when the cluster was never reached.
    pub(crate) fn found(&self) -> Option<Found> {
        *self.found.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next who needs it asks again. Until then it is what is known.
    fn doubt(&self) {
        self.doubted.store(true, Ordering::Release);
    }

    /// The version to speak.
    pub(crate) async fn served(&self) -> Result<Served, ApiError> {
        match self.found() {
            Some(Found::Version(served)) if !self.doubted.load(Ordering::Acquire) => Ok(served),
            // It may have been installed since.
            _ => self.discover().await,
        }
    }

    /// Which cluster it is, whatever address it has: the uid of its namespace kube-system. None where that may not be read.
    pub(crate) async fn id(&self) -> Result<Option<String>, ApiError> {
        let ask = || async {
            match self.raw::<Value>(Lane::Fast, "/api/v1/namespaces/kube-system").await {
                Ok(namespace) => Ok(namespace["metadata"]["uid"].as_str().map(str::to_owned)),
                Err(error) if matches!(error.code(), 403 | 404) => Ok(None),
                Err(error) => Err(error),
            }
        };
        self.id.get_or_try_init(ask).await.cloned()
    }

    /// The versions of the Sandbox kind that the cluster serves, as it names them; empty without the group.
    pub(crate) async fn versions(&self) -> Result<Vec<String>, ApiError> {
        match self.raw::<Value>(Lane::Fast, &format!("/apis/{GROUP}")).await {
            Ok(group) => {
                let all = group["versions"].as_array().into_iter().flatten();
                Ok(all.filter_map(|v| v["version"].as_str().map(str::to_owned)).collect())
            }
            // A proxy that answers for a cluster that is away, or a wrong path, has none of the others either.
            Err(error) if error.code() == 404 => match self.raw::<Value>(Lane::Fast, "/api/v1").await {
                Err(error) if error.code() == 404 => Err(ApiError::NoCluster { url: self.url.clone() }),
                Err(error) if error.is_absence() => Err(error),
                // Also one that hides it.
                _ => Ok(Vec::new()),
            },
            Err(error) => Err(error),
        }
    }

    /// Asks which version to speak.
    pub(crate) async fn discover(&self) -> Result<Served, ApiError> {
        let found = Served::best(&self.versions().await?).map_or(Found::Nothing, Found::Version);
        self.doubted.store(false, Ordering::Release);
        let before = self.found.write().unwrap_or_else(PoisonError::into_inner).replace(found);
        if before != Some(found) {
            match found {
                Found::Version(served) => {
                    tracing::info!(version = served.name(), "the cluster serves Sandboxes")
                }
                Found::Nothing => tracing::warn!("the cluster serves no version of {GROUP}"),
            }
        }
        match found {
            Found::Version(served) => Ok(served),
            Found::Nothing => Err(ApiError::Absent),
        }
    }

    /// A GET of a path.
    pub(crate) async fn raw<T: serde::de::DeserializeOwned>(
        &self,
        lane: Lane,
        path: &str,
    ) -> Result<T, ApiError> {
        let what = format!("GET {path}");
        let request = hyper::Request::get(path).body(Vec::new());
        let request = request.map_err(|error| ApiError::new(&what, kube::Error::HttpError(error)))?;
        self.call(lane, LIMIT, &what, self.client.request(request)).await
    }

    pub(crate) async fn sandboxes(&self, namespace: &str) -> Result<Api<Sandbox>, ApiError> {
        Ok(self.sandboxes_in(self.served().await?, namespace))
    }

    pub(crate) fn sandboxes_in(&self, served: Served, namespace: &str) -> Api<Sandbox> {
        Api::namespaced_with(self.client.clone(), namespace, &served.resource())
    }

    pub(crate) fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced_with(self.client.clone(), namespace, &built_in("Pod", "pods"))
    }

    pub(crate) fn claims(&self, namespace: &str) -> Api<Claim> {
        Api::namespaced_with(self.client.clone(), namespace, &claim_resource())
    }

    /// One request within its lane and its time. What is asked of a version that is gone makes the next look anew.
    pub(crate) async fn call<T>(
        &self,
        lane: Lane,
        limit: Duration,
        what: &str,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, ApiError> {
        let lane = match lane {
            Lane::Fast => &self.fast,
            Lane::Look => &self.look,
            Lane::Create => &self.create,
            Lane::List => &self.list,
        };
        let work = async {
            // Never closed.
            let _place = lane.acquire().await;
            request.await
        };
        let done = match timeout(limit, work).await {
            Ok(done) => done.map_err(|error| ApiError::new(what, error)),
            Err(_) => Err(ApiError::Silent { what: what.to_owned(), after: limit }),
        };
        if let Err(error) = &done
            && error.is_unknown_version()
        {
            self.doubt();
        }
        done
    }

    /// A request in the version that is served, asked again in the one that there is now when its own is gone.
    pub(crate) async fn in_version<T, F>(&self, ask: impl Fn(Served) -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        match ask(self.served().await?).await {
            Err(error) if error.is_unknown_version() => ask(self.served().await?).await,
            done => done,
        }
    }

    /// The same about the Sandboxes of a namespace.
    pub(crate) async fn on_sandboxes<T, F>(
        &self,
        lane: Lane,
        namespace: &str,
        what: &str,
        ask: impl Fn(Api<Sandbox>) -> F,
    ) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, kube::Error>>,
    {
        self.in_version(|served| self.call(lane, LIMIT, what, ask(self.sandboxes_in(served, namespace))))
            .await
    }
}

/// None for what is not there.
pub(crate) fn if_there<T>(done: Result<T, ApiError>) -> Result<Option<T>, ApiError> {
    match done {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}
