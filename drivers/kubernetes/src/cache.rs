//! What the cluster has of us, kept by one watch for each kind and namespace. It wakes whoever waits for a sandbox, so
//! that nobody polls; as watches can be lost without a sign, everything is listed and compared again now and then.

use std::{
    collections::{HashMap, HashSet},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
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
/// A watch that ends sooner was none.
const BRIEF: Duration = Duration::from_secs(1);
/// Failures of a watch after which everything is listed again: a server that was restored doesn't know its version.
const FAILURES: u32 = 3;
/// A waiter that hears nothing asks the server itself: with watches, and without, then slower each time.
const DOUBT: Duration = Duration::from_secs(20);
const BLIND: Duration = Duration::from_secs(1);
const LONG_BLIND: Duration = Duration::from_secs(10);
/// How long a first look waits for the first list, which saves it two requests.
const FIRST: Duration = Duration::from_secs(30);

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

/// How a watch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Watch {
    /// Everything is listed for the first time.
    First,
    Open,
    Shut,
}

#[derive(Debug, Default)]
struct Known {
    entries: HashMap<SandboxId, Entry>,
    waiters: HashMap<SandboxId, Arc<Notify>>,
    /// The version up to which the watch of a kind in a namespace has told everything.
    heard: HashMap<(&'static str, Arc<str>), u64>,
    /// Those of each namespace, by kind.
    watches: HashMap<Arc<str>, [Watch; 2]>,
    /// What has gone while a kind in a namespace is being listed beside its watch: the list may still have it.
    gone: HashMap<(&'static str, Arc<str>), HashSet<SandboxId>>,
}

#[derive(Debug, Default)]
pub(crate) struct Cache {
    known: Mutex<Known>,
    /// A watch has opened or shut.
    turned: Notify,
}

impl Cache {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every watch is open: what is here is what there is.
    pub(crate) fn is_all_live(&self) -> bool {
        let known = self.lock();
        !known.watches.is_empty() && known.watches.values().flatten().all(|watch| *watch == Watch::Open)
    }

    /// Those of this namespace are.
    pub(crate) fn is_live(&self, namespace: &str) -> bool {
        self.lock().watches.get(namespace).is_some_and(|both| *both == [Watch::Open; 2])
    }

    fn turn(&self, namespace: &Arc<str>, kind: usize, to: Watch) {
        self.lock().watches.entry(namespace.clone()).or_insert([Watch::First; 2])[kind] = to;
        self.turned.notify_waiters();
    }

    /// Waits until a namespace was listed for the first time, or that has failed.
    async fn past_first(&self, namespace: &str) {
        let past = async {
            loop {
                let turned = self.turned.notified();
                tokio::pin!(turned);
                turned.as_mut().enable();
                let first = self
                    .lock()
                    .watches
                    .get(namespace)
                    .is_some_and(|both| both.contains(&Watch::First) && !both.contains(&Watch::Shut));
                if !first {
                    return;
                }
                turned.await;
            }
        };
        // Then it is asked for.
        let _late = timeout(FIRST, past).await.is_err();
    }

    pub(crate) fn view(&self, id: &SandboxId) -> View {
        self.lock().entries.get(id).map(|entry| entry.view.clone()).unwrap_or_default()
    }

    pub(crate) fn ids_in(&self, namespace: &str) -> Vec<SandboxId> {
        let known = self.lock();
        let there = known.entries.iter().filter(|(_, entry)| *entry.namespace == *namespace);
        there.map(|(id, _)| id.clone()).collect()
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

    fn told(&self, kind: &'static str, namespace: &Arc<str>) -> u64 {
        self.lock().heard.get(&(kind, namespace.clone())).copied().unwrap_or_default()
    }

    /// The server counts from an earlier version on: whatever it says from now on is newer than what is here.
    fn set_back<K: Kind>(&self, namespace: &Arc<str>) {
        let mut known = self.lock();
        known.heard.remove(&(K::NAME, namespace.clone()));
        for entry in known.entries.values_mut().filter(|entry| entry.namespace == *namespace) {
            K::set_back(&mut entry.view);
        }
    }

    /// What a list says of one, beside a watch: not what has gone meanwhile.
    fn listed(&self, id: &SandboxId, namespace: &Arc<str>, news: News) -> bool {
        let mut known = self.lock();
        let gone = known.gone.get(&(news.kind(), namespace.clone())).is_some_and(|all| all.contains(id));
        !gone && known.take(id, namespace, news)
    }
}

/// Notes what goes while a list is under way.
struct Noting<'a>(&'a Cache, &'static str, Arc<str>);

impl<'a> Noting<'a> {
    fn begin(cache: &'a Cache, kind: &'static str, namespace: &Arc<str>) -> Self {
        cache.lock().gone.insert((kind, namespace.clone()), HashSet::new());
        Self(cache, kind, namespace.clone())
    }
}

impl Drop for Noting<'_> {
    fn drop(&mut self) {
        self.0.lock().gone.remove(&(self.1, self.2.clone()));
    }
}

impl Known {
    fn take(&mut self, id: &SandboxId, namespace: &Arc<str>, news: News) -> bool {
        let entry = self
            .entries
            .entry(id.clone())
            .or_insert_with(|| Entry { view: View::default(), namespace: namespace.clone() });
        if matches!(news, News::NoSandbox(_) | News::NoPod(_))
            && let Some(gone) = self.gone.get_mut(&(news.kind(), namespace.clone()))
        {
            gone.insert(id.clone());
        }
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
    /// Its place among a namespace's watches.
    const AT: usize;
    fn news(&self) -> News;
    fn gone(version: u64) -> News;
    fn is_there(view: &View) -> bool;
    /// Makes what is known older than anything.
    fn set_back(view: &mut View);
    fn api(inner: &Inner, namespace: &str) -> impl Future<Output = Result<Api<Self>, ApiError>> + Send;
}

impl Kind for Sandbox {
    const NAME: &'static str = "sandboxes";
    const AT: usize = 0;
    fn news(&self) -> News {
        News::Sandbox(self.into())
    }
    fn gone(version: u64) -> News {
        News::NoSandbox(version)
    }
    fn is_there(view: &View) -> bool {
        view.sandbox.is_some()
    }
    fn set_back(view: &mut View) {
        view.sandbox.iter_mut().for_each(|seen| seen.version = 0);
    }
    async fn api(inner: &Inner, namespace: &str) -> Result<Api<Self>, ApiError> {
        inner.cluster.sandboxes(namespace).await
    }
}

impl Kind for Pod {
    const NAME: &'static str = "pods";
    const AT: usize = 1;
    fn news(&self) -> News {
        News::Pod(self.into())
    }
    fn gone(version: u64) -> News {
        News::NoPod(version)
    }
    fn is_there(view: &View) -> bool {
        view.pod.is_some()
    }
    fn set_back(view: &mut View) {
        view.pod.iter_mut().for_each(|seen| seen.version = 0);
    }
    async fn api(inner: &Inner, namespace: &str) -> Result<Api<Self>, ApiError> {
        Ok(inner.cluster.pods(namespace))
    }
}

/// Begins to watch every namespace.
pub(crate) fn watch_all(inner: &Arc<Inner>) -> Vec<tokio::task::AbortHandle> {
    let mut tasks = Vec::new();
    for namespace in inner.namespaces() {
        let namespace: Arc<str> = Arc::from(namespace);
        inner.cache.turn(&namespace, Sandbox::AT, Watch::First);
        tasks.push(tokio::spawn(follow::<Sandbox>(inner.clone(), namespace.clone())).abort_handle());
        tasks.push(tokio::spawn(follow::<Pod>(inner.clone(), namespace)).abort_handle());
    }
    tasks
}

/// Why a watch is over.
enum Over {
    /// As it does after some minutes, or to go on in another version of its kind.
    Ended,
    /// Its version is none of the server's any more: list again.
    Expired,
}

/// Follows one kind in one namespace for as long as the driver lives.
async fn follow<K: Kind>(inner: Arc<Inner>, namespace: Arc<str>) {
    let shut = || inner.cache.turn(&namespace, K::AT, Watch::Shut);
    let mut pause = AGAIN;
    let mut heard = true;
    loop {
        let mut at = match list::<K>(&inner, &namespace).await {
            Ok(version) => version,
            Err(error) => {
                shut();
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
        let mut due = next_comparison::<K>(&inner, &namespace);
        let mut failures = 0;
        loop {
            let begun = Instant::now();
            let (relist, brief) = match watch::<K>(&inner, &namespace, &mut at, &mut due).await {
                Ok(Over::Ended) => (false, begun.elapsed() < BRIEF),
                Ok(Over::Expired) => (true, true),
                Err(error) => {
                    tracing::debug!(%error, kind = K::NAME, %namespace, "a watch failed");
                    failures += 1;
                    let unknown = error.is_unknown_version() || matches!(error, ApiError::Absent);
                    (unknown || failures >= FAILURES, true)
                }
            };
            if brief {
                // Also one that a proxy ends at once: nothing was heard by it.
                shut();
                sleep(pause).await;
                pause = (pause * 2).min(LONG_AGAIN);
            } else {
                (pause, failures) = (AGAIN, 0);
            }
            if relist {
                break;
            }
        }
    }
}

/// Not all watchers at the same moment.
fn next_comparison<K: Kind>(inner: &Inner, namespace: &str) -> Instant {
    Instant::now() + inner.config.compare_every.mul_f64(0.9 + 0.1 * spread(namespace, K::NAME))
}

/// A number from 0 to 1 for a watch.
fn spread(namespace: &str, kind: &str) -> f64 {
    let sum = namespace.bytes().chain(kind.bytes()).fold(0_u32, |sum, b| sum.wrapping_mul(31) + u32::from(b));
    f64::from(sum % 1000) / 1000.0
}

/// Lists everything in pages of one version; what is known here and not there is gone. The version of the list.
async fn list<K: Kind>(inner: &Inner, namespace: &Arc<str>) -> Result<String, ApiError> {
    let told = inner.cache.told(K::NAME, namespace);
    let version = pages::<K>(inner, namespace, |version| {
        // Lists are never older than what was told before them, but by a server that was restored.
        if version.parse().is_ok_and(|version: u64| version < told) {
            tracing::warn!(kind = K::NAME, %namespace, version, told, "the cluster counts from an earlier version: it was restored");
            inner.cache.set_back::<K>(namespace);
        }
        true
    });
    let version = version.await?.unwrap_or_default();
    inner.cache.heard(K::NAME, namespace, &version);
    Ok(version)
}

/// The same beside a watch that goes on. None when that must begin anew.
async fn compare<K: Kind>(inner: &Inner, namespace: &Arc<str>) -> Result<Option<String>, ApiError> {
    let spoken = inner.cluster.found();
    // A newer version may be served beside the one that is spoken.
    if let Err(error) = inner.cluster.discover().await {
        tracing::debug!(%error, "versions are not known anew");
    }
    let moved = inner.cluster.found() != spoken;
    let told = inner.cache.told(K::NAME, namespace);
    let _noting = Noting::begin(&inner.cache, K::NAME, namespace);
    let fits = |version: &str| version.parse().map_or(true, |version: u64| version >= told);
    Ok(pages::<K>(inner, namespace, fits).await?.filter(|_| !moved))
}

/// Takes all pages in, unless the version of the first is not to be gone on with.
async fn pages<K: Kind>(
    inner: &Inner,
    namespace: &Arc<str>,
    fits: impl Fn(&str) -> bool,
) -> Result<Option<String>, ApiError> {
    let mut params = ListParams::default().labels(&inner.selector()).limit(PAGE);
    let mut there = HashSet::new();
    let what = format!("list {} in {namespace}", K::NAME);
    loop {
        let api = K::api(inner, namespace).await?;
        let page = inner.cluster.call(Lane::List, PAGE_LIMIT, &what, api.list(&params)).await?;
        let version = page.metadata.resource_version.unwrap_or_default();
        if params.continue_token.is_none() && !fits(&version) {
            return Ok(None);
        }
        for object in &page.items {
            if let Some(id) = id_of(object.meta(), &inner.store.identity) {
                if inner.cache.listed(&id, namespace, object.news()) {
                    inner.hint(&id);
                }
                there.insert(id);
            }
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => {
                forget::<K>(inner, namespace, &there, &version);
                return Ok(Some(version));
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

/// A comparison under way.
type Comparison<'a> = Pin<Box<dyn Future<Output = Result<Option<String>, ApiError>> + Send + 'a>>;

async fn done(comparison: &mut Option<Comparison<'_>>) -> Result<Option<String>, ApiError> {
    match comparison {
        Some(comparison) => comparison.await,
        None => std::future::pending().await,
    }
}

/// One watch, to its end. When it is time to compare, that is done beside it: nothing goes unheard meanwhile.
async fn watch<K: Kind>(
    inner: &Inner,
    namespace: &Arc<str>,
    at: &mut String,
    due: &mut Instant,
) -> Result<Over, ApiError> {
    let params = WatchParams::default().labels(&inner.selector()).timeout(WATCH);
    let what = format!("watch {} in {namespace}", K::NAME);
    let api = K::api(inner, namespace).await?;
    // Never behind the lists of others.
    let events = inner.cluster.call(Lane::Look, PAGE_LIMIT, &what, api.watch(&params, at)).await;
    let events = match events {
        Err(error) if error.is_expired() => return Ok(Over::Expired),
        events => events?,
    };
    let mut events = events.boxed();
    let idle = Duration::from_secs(u64::from(WATCH)) + WATCH_MARGIN;
    inner.cache.turn(namespace, K::AT, Watch::Open);
    let mut comparison: Option<Comparison<'_>> = None;
    loop {
        let next = tokio::select! {
            next = timeout(idle, events.try_next()) => next,
            () = tokio::time::sleep_until(*due), if comparison.is_none() => {
                comparison = Some(Box::pin(compare::<K>(inner, namespace)));
                continue;
            }
            compared = done(&mut comparison), if comparison.is_some() => {
                comparison = None;
                *due = next_comparison::<K>(inner, namespace);
                match compared {
                    Ok(Some(_)) => {}
                    Ok(None) => return Ok(Over::Expired),
                    Err(error) => {
                        tracing::debug!(%error, kind = K::NAME, %namespace, "a comparison failed");
                        *due = (*due).min(Instant::now() + LONG_AGAIN);
                    }
                }
                continue;
            }
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
        let live = self.cache.is_live(&self.place_of(id));
        if live { Ok(self.cache.view(id)) } else { self.ask_in(Lane::Look, id).await }
    }

    /// Waits until the watches have told everything for the first time, for a while.
    pub(crate) async fn see_first_list(&self, id: &SandboxId) {
        self.cache.past_first(&self.place_of(id)).await;
    }

    fn place_of(&self, id: &SandboxId) -> String {
        self.namespace_of(id).unwrap_or_else(|_| self.cluster.namespace.clone())
    }

    /// The same, asked for.
    pub(crate) async fn ask(&self, id: &SandboxId) -> Result<View, ApiError> {
        self.ask_in(Lane::Fast, id).await
    }

    async fn ask_in(&self, lane: Lane, id: &SandboxId) -> Result<View, ApiError> {
        let sandbox = self.get_sandbox_in(lane, id).await?;
        // As the watches, which see our own only.
        let pod = self.get_pod_in(lane, id).await?.filter(|pod| self.is_labelled(&pod.metadata, id));
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
        let (mut doubt, mut blind) = (false, BLIND);
        let said = loop {
            let woken = waiter.notified();
            tokio::pin!(woken);
            woken.as_mut().enable();
            let view = if doubt { self.ask_in(Lane::Look, id).await } else { self.view(id).await };
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
            let look = if self.cache.is_live(&self.place_of(id)) {
                DOUBT
            } else {
                let slower = (blind * 2).min(LONG_BLIND);
                std::mem::replace(&mut blind, slower)
            };
            doubt = timeout(look.min(left), woken).await.is_err();
        };
        self.cache.let_go(id, waiter);
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Mode;

    fn seen(version: u64) -> News {
        News::Sandbox(Seen {
            uid: "s".into(),
            version,
            generation: 1,
            mode: Mode::Running,
            run: 1,
            deleting: false,
            oldest: false,
            ready: None,
            suspended: None,
        })
    }

    #[test]
    fn a_server_that_was_restored_is_believed_though_it_counts_from_an_earlier_version() {
        let (cache, id, place) = (Cache::default(), SandboxId::generate(), Arc::from("a"));
        assert!(cache.take(&id, &place, seen(900)));
        cache.heard(Sandbox::NAME, &place, "1000");
        assert!(!cache.listed(&id, &place, seen(300)), "as it is without a restore");
        cache.set_back::<Sandbox>(&place);
        assert!(cache.listed(&id, &place, seen(300)));
        assert_eq!(cache.view(&id).sandbox.map(|seen| seen.version), Some(300));
        let other = SandboxId::generate();
        assert!(cache.answered(&other, &place, seen(310)), "what was told before counts no more");
    }

    #[test]
    fn what_has_gone_while_everything_is_listed_is_not_brought_back_and_what_was_never_told_is() {
        let (cache, id, place) = (Cache::default(), SandboxId::generate(), Arc::from("a"));
        let unheard = SandboxId::generate();
        assert!(cache.take(&id, &place, seen(5)));
        cache.heard(Sandbox::NAME, &place, "20");
        let noting = Noting::begin(&cache, Sandbox::NAME, &place);
        assert!(cache.take(&id, &place, News::NoSandbox(21)));
        assert!(!cache.listed(&id, &place, seen(5)), "the list is of before");
        assert!(cache.listed(&unheard, &place, seen(7)), "that is what lists are for");
        drop(noting);
        assert!(cache.lock().gone.is_empty());
        assert_eq!(cache.ids_in("a"), [unheard]);
    }

    #[tokio::test]
    async fn one_namespace_that_is_not_heard_makes_no_other_one_blind() {
        let (cache, here, there): (_, Arc<str>, Arc<str>) =
            (Cache::default(), Arc::from("here"), Arc::from("there"));
        for place in [&here, &there] {
            cache.turn(place, 0, Watch::First);
        }
        let waits = timeout(Duration::from_millis(50), cache.past_first("here")).await;
        assert!(waits.is_err(), "everything is still listed");
        cache.turn(&here, 0, Watch::Open);
        cache.turn(&here, 1, Watch::Open);
        cache.turn(&there, 0, Watch::Shut);
        assert!(cache.is_live("here") && !cache.is_live("there") && !cache.is_all_live());
        for place in ["here", "there", "nowhere"] {
            timeout(Duration::from_secs(5), cache.past_first(place)).await.unwrap();
        }
    }
}
