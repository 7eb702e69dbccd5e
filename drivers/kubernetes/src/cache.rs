//! What the cluster has of us, kept by one watch for each kind and namespace. It wakes whoever waits for a sandbox, so
//! that nobody polls; as watches can be lost without a sign, everything is listed and compared again now and then.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt as _, TryStreamExt as _};
use kube::{
    Api, Resource,
    api::{ListParams, WatchEvent, WatchParams},
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};
use torpor_sandbox::SandboxId;

use crate::{
    client::{ApiError, Lane, PAGE_LIMIT},
    driver::Inner,
    types::{GATEWAY, Pod, Sandbox, Seen, SeenPod, id_of},
};

/// Objects of one page.
pub(crate) const PAGE: u32 = 500;
/// How long the server is asked to keep a watch open, seconds, and how much longer it is believed to be.
const WATCH: u32 = 290;
const WATCH_MARGIN: Duration = Duration::from_secs(10);
/// Pauses after failures.
const AGAIN: Duration = Duration::from_millis(200);
const LONG_AGAIN: Duration = Duration::from_secs(30);
/// A waiter that hears nothing asks the server itself: with watches, and without.
const DOUBT: Duration = Duration::from_secs(20);
const BLIND: Duration = Duration::from_secs(1);

/// A sandbox's objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct View {
    pub(crate) sandbox: Option<Seen>,
    pub(crate) pod: Option<SeenPod>,
}

/// What is known of a sandbox, and the namespace that it was first heard of in.
#[derive(Debug)]
struct Entry {
    view: View,
    namespace: Arc<str>,
}

#[derive(Debug, Default)]
struct Known {
    entries: HashMap<SandboxId, Entry>,
    waiters: HashMap<SandboxId, Arc<Notify>>,
    /// The version up to which the watch of a kind in a namespace has told everything.
    heard: HashMap<(&'static str, Arc<str>), u64>,
}

#[derive(Debug, Default)]
pub(crate) struct Cache {
    known: Mutex<Known>,
    /// Watches that there are, and those that are open.
    all: AtomicUsize,
    open: AtomicUsize,
}

impl Cache {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every watch is open: what is here is what there is.
    pub(crate) fn is_live(&self) -> bool {
        let all = self.all.load(Ordering::Acquire);
        all > 0 && self.open.load(Ordering::Acquire) == all
    }

    pub(crate) fn view(&self, id: &SandboxId) -> View {
        self.lock().entries.get(id).map(|entry| entry.view.clone()).unwrap_or_default()
    }

    pub(crate) fn ids(&self) -> Vec<SandboxId> {
        self.lock().entries.keys().cloned().collect()
    }

    pub(crate) fn namespace(&self, id: &SandboxId) -> Option<Arc<str>> {
        self.lock().entries.get(id).map(|entry| entry.namespace.clone())
    }

    /// How many sandboxes are known.
    pub(crate) fn len(&self) -> usize {
        self.lock().entries.len()
    }

    fn waiter(&self, id: &SandboxId) -> Arc<Notify> {
        self.lock().waiters.entry(id.clone()).or_default().clone()
    }

    fn let_go(&self, id: &SandboxId, waiter: Arc<Notify>) {
        let mut known = self.lock();
        // Ours and the map's.
        if Arc::strong_count(&waiter) <= 2 {
            known.waiters.remove(id);
        }
    }

    /// Puts a piece of news in, unless it is older than what is known. True when something is new.
    fn take(&self, id: &SandboxId, namespace: &Arc<str>, news: News) -> bool {
        self.lock().take(id, namespace, news)
    }

    /// The same of what a request of ours was answered, which may be older than what the watch has told since: what this
    /// one has told up to a later version and is not here was deleted by then, and nobody would say so again.
    fn answered(&self, id: &SandboxId, namespace: &Arc<str>, news: News) -> bool {
        let mut known = self.lock();
        let there = known.entries.get(id).is_some_and(|entry| news.is_of(&entry.view));
        let told = known.heard.get(&(news.kind(), namespace.clone())).copied().unwrap_or_default();
        if !there && news.version() <= told {
            return false;
        }
        known.take(id, namespace, news)
    }

    /// Everything of a kind in a namespace was told up to this version.
    fn heard(&self, kind: &'static str, namespace: &Arc<str>, version: &str) {
        if let Ok(version) = version.parse() {
            // Also a smaller one: a server that was restored from a backup counts from there.
            self.lock().heard.insert((kind, namespace.clone()), version);
        }
    }
}

impl Known {
    fn take(&mut self, id: &SandboxId, namespace: &Arc<str>, news: News) -> bool {
        let entry = self
            .entries
            .entry(id.clone())
            .or_insert_with(|| Entry { view: View::default(), namespace: namespace.clone() });
        let new = news.put(&mut entry.view);
        if entry.view == View::default() {
            self.entries.remove(id);
        }
        if new && let Some(waiter) = self.waiters.get(id) {
            waiter.notify_waiters();
        }
        new
    }
}

/// What was heard of one object.
pub(crate) enum News {
    Sandbox(Seen),
    Pod(SeenPod),
    /// Gone at this version.
    NoSandbox(u64),
    NoPod(u64),
}

impl News {
    fn kind(&self) -> &'static str {
        match self {
            Self::Sandbox(_) | Self::NoSandbox(_) => Sandbox::NAME,
            Self::Pod(_) | Self::NoPod(_) => Pod::NAME,
        }
    }

    fn version(&self) -> u64 {
        match self {
            Self::Sandbox(seen) => seen.version,
            Self::Pod(seen) => seen.version,
            Self::NoSandbox(version) | Self::NoPod(version) => *version,
        }
    }

    /// Whether an object of its kind is known there.
    fn is_of(&self, view: &View) -> bool {
        match self {
            Self::Sandbox(_) | Self::NoSandbox(_) => view.sandbox.is_some(),
            Self::Pod(_) | Self::NoPod(_) => view.pod.is_some(),
        }
    }

    fn put(self, view: &mut View) -> bool {
        match self {
            Self::Sandbox(new) => {
                let newer = view.sandbox.as_ref().is_none_or(|old| old.version < new.version);
                if newer {
                    view.sandbox = Some(new);
                }
                newer
            }
            Self::Pod(new) => {
                let newer = view.pod.as_ref().is_none_or(|old| old.version < new.version);
                if newer {
                    view.pod = Some(new);
                }
                newer
            }
            Self::NoSandbox(version) => view.sandbox.take_if(|old| old.version <= version).is_some(),
            Self::NoPod(version) => view.pod.take_if(|old| old.version <= version).is_some(),
        }
    }
}

/// A kind that is watched.
pub(crate) trait Kind: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static {
    const NAME: &'static str;
    fn news(&self) -> News;
    fn gone(version: u64) -> News;
    fn is_there(view: &View) -> bool;
    fn api(inner: &Inner, namespace: &str) -> impl Future<Output = Result<Api<Self>, ApiError>> + Send;
}

impl Kind for Sandbox {
    const NAME: &'static str = "sandboxes";
    fn news(&self) -> News {
        News::Sandbox(self.into())
    }
    fn gone(version: u64) -> News {
        News::NoSandbox(version)
    }
    fn is_there(view: &View) -> bool {
        view.sandbox.is_some()
    }
    async fn api(inner: &Inner, namespace: &str) -> Result<Api<Self>, ApiError> {
        inner.cluster.sandboxes(namespace).await
    }
}

impl Kind for Pod {
    const NAME: &'static str = "pods";
    fn news(&self) -> News {
        News::Pod(self.into())
    }
    fn gone(version: u64) -> News {
        News::NoPod(version)
    }
    fn is_there(view: &View) -> bool {
        view.pod.is_some()
    }
    async fn api(inner: &Inner, namespace: &str) -> Result<Api<Self>, ApiError> {
        Ok(inner.cluster.pods(namespace))
    }
}

/// Begins to watch every namespace.
pub(crate) fn watch_all(inner: &Arc<Inner>) -> Vec<tokio::task::AbortHandle> {
    let mut tasks = Vec::new();
    let namespaces = inner.namespaces();
    // Before the first of them is open: some are not all.
    inner.cache.all.store(2 * namespaces.len(), Ordering::Release);
    for namespace in namespaces {
        let namespace: Arc<str> = Arc::from(namespace);
        tasks.push(tokio::spawn(follow::<Sandbox>(inner.clone(), namespace.clone())).abort_handle());
        tasks.push(tokio::spawn(follow::<Pod>(inner.clone(), namespace)).abort_handle());
    }
    tasks
}

/// Counts one watch as open, or not.
struct Open<'a>(&'a Cache, bool);

impl Open<'_> {
    fn set(&mut self, open: bool) {
        if open != self.1 {
            self.1 = open;
            if open {
                self.0.open.fetch_add(1, Ordering::AcqRel);
            } else {
                self.0.open.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

/// Why a watch is over.
enum Over {
    /// As it does after some minutes.
    Ended,
    /// Its version is too old: list again.
    Expired,
    /// It is time to compare.
    Due,
}

/// Follows one kind in one namespace for as long as the driver lives.
async fn follow<K: Kind>(inner: Arc<Inner>, namespace: Arc<str>) {
    let cache = &inner.cache;
    let mut open = Open(cache, false);
    let mut pause = AGAIN;
    let mut heard = true;
    loop {
        let listed = list::<K>(&inner, &namespace).await;
        let mut at = match listed {
            Ok(version) => version,
            Err(error) => {
                open.set(false);
                if heard {
                    tracing::warn!(%error, kind = K::NAME, %namespace, "the cluster can't be watched; its sandboxes wait");
                }
                heard = false;
                sleep(pause).await;
                pause = (pause * 2).min(LONG_AGAIN);
                continue;
            }
        };
        if !heard {
            tracing::info!(kind = K::NAME, %namespace, "the cluster is watched again");
        }
        heard = true;
        // Not all watchers at the same moment.
        let due =
            Instant::now() + inner.config.compare_every.mul_f64(0.9 + 0.1 * spread(&namespace, K::NAME));
        loop {
            match watch::<K>(&inner, &namespace, &mut at, due, &mut open).await {
                Ok(Over::Ended) => pause = AGAIN,
                Ok(Over::Due) => {
                    pause = AGAIN;
                    // A newer version may be served beside the one that is spoken.
                    if let Err(error) = inner.cluster.discover().await {
                        tracing::debug!(%error, "versions are not known anew");
                    }
                    break;
                }
                Ok(Over::Expired) => {
                    open.set(false);
                    sleep(pause).await;
                    pause = (pause * 2).min(LONG_AGAIN);
                    break;
                }
                Err(error) => {
                    open.set(false);
                    tracing::debug!(%error, kind = K::NAME, %namespace, "a watch failed");
                    let relist = error.is_unknown_version() || matches!(error, ApiError::Absent);
                    sleep(pause).await;
                    pause = (pause * 2).min(LONG_AGAIN);
                    if relist {
                        break;
                    }
                }
            }
        }
    }
}

/// A number from 0 to 1 for a watch.
fn spread(namespace: &str, kind: &str) -> f64 {
    let sum = namespace.bytes().chain(kind.bytes()).fold(0_u32, |sum, b| sum.wrapping_mul(31) + u32::from(b));
    f64::from(sum % 1000) / 1000.0
}

/// Lists everything in pages of one version; what is known here and not there is gone. The version of the list.
async fn list<K: Kind>(inner: &Inner, namespace: &Arc<str>) -> Result<String, ApiError> {
    let mut params = ListParams::default().labels(&inner.selector()).limit(PAGE);
    let mut there = HashSet::new();
    let what = format!("list {} in {namespace}", K::NAME);
    loop {
        let api = K::api(inner, namespace).await?;
        let page = inner.cluster.call(Lane::List, PAGE_LIMIT, &what, api.list(&params)).await?;
        for object in &page.items {
            if let Some(id) = id_of(object.meta(), &inner.store.identity) {
                if inner.cache.take(&id, namespace, object.news()) {
                    inner.hint(&id);
                }
                there.insert(id);
            }
        }
        let version = page.metadata.resource_version.unwrap_or_default();
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => {
                forget::<K>(inner, namespace, &there, &version);
                inner.cache.heard(K::NAME, namespace, &version);
                return Ok(version);
            }
        }
    }
}

fn forget<K: Kind>(inner: &Inner, namespace: &Arc<str>, there: &HashSet<SandboxId>, version: &str) {
    let version = version.parse().unwrap_or_default();
    let gone: Vec<SandboxId> = {
        let known = inner.cache.lock();
        let here = known.entries.iter().filter(|(id, entry)| {
            K::is_there(&entry.view) && !there.contains(*id) && entry.namespace == *namespace
        });
        here.map(|(id, _)| id.clone()).collect()
    };
    for id in gone {
        if inner.cache.take(&id, namespace, K::gone(version)) {
            inner.hint(&id);
        }
    }
}

/// One watch, to its end.
async fn watch<K: Kind>(
    inner: &Inner,
    namespace: &Arc<str>,
    at: &mut String,
    due: Instant,
    open: &mut Open<'_>,
) -> Result<Over, ApiError> {
    let params = WatchParams::default().labels(&inner.selector()).timeout(WATCH);
    let what = format!("watch {} in {namespace}", K::NAME);
    let api = K::api(inner, namespace).await?;
    let events = inner.cluster.call(Lane::List, PAGE_LIMIT, &what, api.watch(&params, at)).await;
    let events = match events {
        Err(error) if error.is_expired() => return Ok(Over::Expired),
        events => events?,
    };
    let mut events = events.boxed();
    let idle = Duration::from_secs(u64::from(WATCH)) + WATCH_MARGIN;
    open.set(true);
    loop {
        let next = tokio::select! {
            next = timeout(idle, events.try_next()) => next,
            () = tokio::time::sleep_until(due) => return Ok(Over::Due),
        };
        let event = match next {
            Err(_) | Ok(Ok(None)) => return Ok(Over::Ended),
            Ok(Ok(Some(event))) => event,
            Ok(Err(error)) => return Err(ApiError::Unreachable { what, source: Box::new(error) }),
        };
        let (object, gone) = match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, false),
            WatchEvent::Deleted(object) => (object, true),
            WatchEvent::Bookmark(mark) => {
                *at = mark.metadata.resource_version;
                inner.cache.heard(K::NAME, namespace, at);
                continue;
            }
            WatchEvent::Error(status) if status.code == 410 => return Ok(Over::Expired),
            WatchEvent::Error(status) => return Err(ApiError::Refused { what, status }),
        };
        let version = object.meta().resource_version.clone().unwrap_or_default();
        if let Some(id) = id_of(object.meta(), &inner.store.identity) {
            let news = if gone { K::gone(version.parse().unwrap_or_default()) } else { object.news() };
            if inner.cache.take(&id, namespace, news) {
                inner.hint(&id);
            }
        }
        inner.cache.heard(K::NAME, namespace, &version);
        *at = version;
    }
}

impl Inner {
    /// Of every object that is ours.
    pub(crate) fn selector(&self) -> String {
        format!("{GATEWAY}={}", self.store.identity)
    }

    /// What one of our own requests was answered: what was seen once is not unseen by a watch that lags behind.
    pub(crate) fn saw(&self, id: &SandboxId, namespace: &str, news: News) {
        if self.cache.answered(id, &Arc::from(namespace), news) {
            self.hint(id);
        }
    }

    /// A sandbox's objects as they are now: as the watches tell, or asked for when these are not open.
    pub(crate) async fn view(&self, id: &SandboxId) -> Result<View, ApiError> {
        if self.cache.is_live() { Ok(self.cache.view(id)) } else { self.ask(id).await }
    }

    /// The same, asked for.
    pub(crate) async fn ask(&self, id: &SandboxId) -> Result<View, ApiError> {
        let sandbox = self.get_sandbox(id).await?;
        // As the watches, which see our own only.
        let pod = self.get_pod(id).await?.filter(|pod| self.is_labelled(&pod.metadata, id));
        Ok(View { sandbox: sandbox.as_ref().map(Seen::from), pod: pod.as_ref().map(SeenPod::from) })
    }

    /// Waits until a test says something of a sandbox's objects; none when that takes too long.
    pub(crate) async fn until<T>(
        &self,
        id: &SandboxId,
        limit: Duration,
        test: impl Fn(&View) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let waiter = self.cache.waiter(id);
        let end = Instant::now() + limit;
        let mut doubt = false;
        let said = loop {
            let woken = waiter.notified();
            tokio::pin!(woken);
            woken.as_mut().enable();
            let view = if doubt { self.ask(id).await } else { self.view(id).await };
            match view {
                Ok(view) => {
                    if let Some(said) = test(&view) {
                        break Ok(Some(said));
                    }
                }
                // A server that is away may be back before the time is over.
                Err(error) if error.is_absence() => {}
                Err(error) => break Err(error),
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Ok(None);
            }
            let look = if self.cache.is_live() { DOUBT } else { BLIND };
            doubt = timeout(look.min(left), woken).await.is_err();
        };
        self.cache.let_go(id, waiter);
        said
    }
}
