//! The cluster: its objects, what was asked of it, and what a test makes go wrong.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::{
    kubelet::Kubelet,
    resources::{Generation, Key, NAMESPACES, RESOURCES, RUNTIME_CLASSES, SANDBOXES, STORAGE_CLASSES},
    rights::Rule,
    status::Refusal,
    store::{Deletion, Objects, Part, text},
};

/// Requests whose bodies are kept.
const KEPT: usize = 50_000;

/// One request, as it came.
#[derive(Clone, Debug)]
pub struct Asked {
    /// "GET".
    pub method: String,
    /// Without the query.
    pub path: String,
    /// As it was sent.
    pub query: String,
    /// Of the body.
    pub content_type: String,
    /// Null when there was none.
    pub body: Value,
    /// What was answered.
    pub code: u16,
}

impl Asked {
    /// What clients call it: "get", "list", "watch", "create", "patch", "delete", "exec", and of what.
    pub fn verb(&self) -> String {
        let parts: Vec<&str> = self.path.trim_matches('/').split('/').collect();
        let parts: &[&str] = match parts.as_slice() {
            ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] => rest,
            _ => return format!("discover {}", self.path),
        };
        let parts = if parts.len() >= 3 && parts[0] == "namespaces" { &parts[2..] } else { parts };
        let what = parts.first().copied().unwrap_or("");
        let verb = match (self.method.as_str(), parts.len()) {
            ("GET", 0) => "discover",
            ("GET", 1) if self.query.contains("watch=true") => "watch",
            ("GET", 1) => "list",
            ("GET", 2) => "get",
            ("GET" | "POST", 3) => parts[2],
            ("POST", _) => "create",
            ("PATCH", _) => "patch",
            ("PUT", _) => "update",
            ("DELETE", 1) => "deletecollection",
            ("DELETE", _) => "delete",
            _ => "other",
        };
        format!("{verb} {what}")
    }
}

/// What becomes of some requests.
#[derive(Clone, Debug)]
pub enum Trouble {
    /// 429 as plain text with Retry-After: 1.
    TooMany,
    /// 500.
    Broken,
    /// 409 of a stale version.
    Stale,
    /// 403.
    Forbidden,
    /// Done, and then the connection is cut before the answer.
    CutAfter,
    /// Done after this time.
    Late(Duration),
    /// Done, and answered after this time: by then it may be old.
    AnswerLate(Duration),
}

#[derive(Debug)]
struct Fault {
    method: &'static str,
    within: String,
    left: u32,
    trouble: Trouble,
}

#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) version: u64,
    pub(crate) rest: VecDeque<(Key, Arc<Value>)>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) objects: Objects,
    pub(crate) generation: Generation,
    pub(crate) asked: VecDeque<Asked>,
    pub(crate) counts: BTreeMap<String, u64>,
    faults: Vec<Fault>,
    pub(crate) pages: HashMap<String, Snapshot>,
    pub(crate) made_pages: u64,
    /// None: everything is allowed.
    pub(crate) rules: Option<Vec<Rule>>,
    pub(crate) denied: Vec<(String, String)>,
    token: Option<String>,
    pub(crate) keep_bodies: bool,
}

/// How the simulated controller and kubelets behave.
#[derive(Clone, Debug)]
pub struct Behaviour {
    /// Between a change and the controller's look at it.
    pub reconcile: Duration,
    /// From a pod's making to its containers' run.
    pub boot: Duration,
    /// From a pod's deletion to its end, when its agent has not ended by itself.
    pub linger: Duration,
    /// How often a quiet watch gets a bookmark.
    pub bookmark: Duration,
    /// A static torpor-agent: pods run it as a process of this machine. None: an agent within this program.
    pub agent: Option<std::path::PathBuf>,
    /// Addresses of pods that run one. None: each has one of the loopback's of its own.
    pub pod_ips: Vec<String>,
    /// Pods stay Pending: no node has room.
    pub unschedulable: bool,
    /// Their image can't be pulled: tried again, with what the kubelet says.
    pub no_image: bool,
    /// A container waits for what it is: "CreateContainerConfigError". Empty: it is being created, for ever.
    pub stuck: Option<&'static str>,
    /// The API server lets the controller make no pod, and says this.
    pub refuse_pods: Option<&'static str>,
    /// Watches end as soon as they have begun.
    pub brief_watches: bool,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            reconcile: Duration::from_millis(5),
            boot: Duration::from_millis(10),
            linger: Duration::from_millis(20),
            bookmark: Duration::from_secs(1),
            agent: None,
            pod_ips: Vec::new(),
            unschedulable: false,
            no_image: false,
            stuck: None,
            refuse_pods: None,
            brief_watches: false,
        }
    }
}

/// A cluster in memory.
#[derive(Debug)]
pub struct World {
    inner: Mutex<Inner>,
    behaviour: Mutex<Behaviour>,
    pub(crate) changed: watch::Sender<u64>,
    pub(crate) kubelet: Kubelet,
}

/// Of clusters.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// The namespace that exists from the beginning.
pub const NAMESPACE: &str = "sandboxes";

impl World {
    pub(crate) fn new(generation: Generation, behaviour: Behaviour) -> Arc<Self> {
        let inner = Inner {
            objects: Objects::of(NEXT.fetch_add(1, Ordering::Relaxed)),
            generation,
            asked: VecDeque::new(),
            counts: BTreeMap::new(),
            faults: Vec::new(),
            pages: HashMap::new(),
            made_pages: 0,
            rules: None,
            denied: Vec::new(),
            token: None,
            keep_bodies: true,
        };
        let world = Self {
            inner: Mutex::new(inner),
            behaviour: Mutex::new(behaviour),
            changed: watch::channel(0).0,
            kubelet: Kubelet::default(),
        };
        for (resource, name) in [
            (NAMESPACES, NAMESPACE),
            (NAMESPACES, "default"),
            (NAMESPACES, "kube-system"),
            (STORAGE_CLASSES, "standard"),
            (RUNTIME_CLASSES, "kata"),
        ] {
            let key = (resource, String::new(), name.to_owned());
            world.put(&key, json!({"metadata": {"name": name}}));
        }
        world.change("storageclasses", "standard", |class| {
            class["metadata"]["annotations"] = json!({"storageclass.kubernetes.io/is-default-class": "true"});
        });
        Arc::new(world)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How controller and kubelets behave now.
    pub fn behaviour(&self) -> Behaviour {
        self.behaviour.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes how they behave from now on.
    pub fn behave(&self, change: impl FnOnce(&mut Behaviour)) {
        change(&mut self.behaviour.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Wakes whoever waits for changes.
    pub(crate) fn announce(&self) {
        let version = self.lock().objects.version;
        self.changed.send_replace(version);
    }

    /// A change of the objects; whoever waits is woken.
    pub(crate) fn write<T>(
        &self,
        work: impl FnOnce(&mut Objects) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let done = work(&mut self.lock().objects);
        self.announce();
        done
    }

    fn put(&self, key: &Key, value: Value) {
        let _there = self.write(|objects| objects.create(key, value)).is_err();
    }

    /// Makes an object as somebody else would; false when there is one already or it is not valid.
    pub fn make(&self, plural: &str, name: &str, value: Value) -> bool {
        self.make_in(NAMESPACE, plural, name, value)
    }

    /// The same in another namespace.
    pub fn make_in(&self, namespace: &str, plural: &str, name: &str, value: Value) -> bool {
        let mut key = key(plural, name);
        if !key.1.is_empty() {
            namespace.clone_into(&mut key.1);
        }
        self.write(|objects| objects.create(&key, value)).is_ok()
    }

    /// An object as it is stored.
    pub fn object(&self, plural: &str, name: &str) -> Option<Arc<Value>> {
        self.lock().objects.all.get(&key(plural, name)).cloned()
    }

    /// Names of all objects of a kind.
    pub fn names(&self, plural: &str) -> Vec<String> {
        let wanted = key(plural, "").0;
        self.lock().objects.all.keys().filter(|key| key.0 == wanted).map(|key| key.2.clone()).collect()
    }

    /// Changes an object as somebody else would (no version is checked); false when it isn't there.
    pub fn change(&self, plural: &str, name: &str, change: impl FnOnce(&mut Value)) -> bool {
        self.edit(&key(plural, name), Part::Main, change)
    }

    /// The same of its status.
    pub fn change_status(&self, plural: &str, name: &str, change: impl FnOnce(&mut Value)) -> bool {
        self.edit(&key(plural, name), Part::Status, change)
    }

    pub(crate) fn edit(&self, key: &Key, part: Part, change: impl FnOnce(&mut Value)) -> bool {
        self.write(|objects| {
            let mut value = (*objects.get(key)?).clone();
            change(&mut value);
            objects.update(key, value, part)
        })
        .is_ok()
    }

    /// Deletes an object as `kubectl delete` does.
    pub fn delete(&self, plural: &str, name: &str) -> bool {
        self.write(|objects| objects.delete(&key(plural, name), &Deletion::default())).is_ok()
    }

    /// Takes an object out at once, as a forced deletion.
    pub fn remove(&self, plural: &str, name: &str) {
        self.lock().objects.remove(&key(plural, name));
        self.announce();
    }

    /// Takes an object out and tells no watch: as one that has silently lost an event.
    pub fn lose(&self, plural: &str, name: &str) {
        self.lock().objects.all.remove(&key(plural, name));
    }

    /// A pod's containers are killed: the pod is Failed.
    pub fn kill_pod(&self, name: &str) {
        self.fail_pod(name, json!({}));
    }

    fn fail_pod(&self, name: &str, more: Value) {
        let uid = self.object("pods", name).map(|pod| text(&pod, "/metadata/uid").to_owned());
        if let Some(uid) = uid {
            self.kubelet.kill(&uid);
        }
        self.change_status("pods", name, |pod| {
            pod["status"]["phase"] = json!("Failed");
            pod["status"]["containerStatuses"] = json!([{"name": "sandbox", "ready": false,
                "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}]);
            pod["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
            for (field, value) in more.as_object().into_iter().flatten() {
                pod["status"][field] = value.clone();
            }
        });
    }

    /// A Sandbox is deleted as by `kubectl delete --cascade=orphan`: what it owned stays, and nobody owns it.
    pub fn orphan(&self, name: &str) {
        self.lock().objects.orphan(&key("sandboxes", name));
        self.announce();
    }

    /// Every version is an earlier one, as after a restore from a backup: nothing that clients know of it holds.
    pub fn set_back(&self, by: u64) {
        self.lock().objects.set_back(by);
        self.announce();
    }

    /// A pod is evicted: Failed by the kubelet's own word, and left for the controller.
    pub fn evict_pod(&self, name: &str) {
        let message = "The node was low on resource: memory.";
        self.fail_pod(name, json!({"reason": "Evicted", "message": message}));
    }

    /// The controller's release, and the versions that are served with it, change under everybody.
    pub fn upgrade(&self, generation: Generation) {
        let mut inner = self.lock();
        inner.generation = generation;
        // Streams of a version that is gone end.
        inner.objects.compact();
        drop(inner);
        self.announce();
    }

    /// The release now.
    pub fn generation(&self) -> Generation {
        self.lock().generation
    }

    /// Versions before now can't be watched from any more, and pages can't be gone on with.
    pub fn compact(&self) {
        let mut inner = self.lock();
        inner.objects.compact();
        inner.pages.clear();
        drop(inner);
        self.announce();
    }

    /// The next `times` requests whose method and path (with query) fit have trouble.
    pub fn trouble(&self, method: &'static str, within: &str, times: u32, trouble: Trouble) {
        self.lock().faults.push(Fault { method, within: within.to_owned(), left: times, trouble });
    }

    /// Troubles that nobody has had yet.
    pub fn troubles(&self) -> u32 {
        self.lock().faults.iter().map(|fault| fault.left).sum()
    }

    pub(crate) fn troubled(&self, method: &str, path: &str) -> Option<Trouble> {
        let mut inner = self.lock();
        let at =
            inner.faults.iter().position(|fault| fault.method == method && path.contains(&fault.within))?;
        let trouble = inner.faults[at].trouble.clone();
        inner.faults[at].left -= 1;
        if inner.faults[at].left == 0 {
            inner.faults.remove(at);
        }
        Some(trouble)
    }

    pub(crate) fn want_token(&self, token: &str) {
        self.lock().token = Some(token.to_owned());
    }

    /// Whether a header names whom it must.
    pub(crate) fn knows(&self, authorization: &str) -> bool {
        self.lock().token.as_ref().is_none_or(|token| authorization == format!("Bearer {token}"))
    }

    /// Every request so far, oldest first.
    pub fn asked(&self) -> Vec<Asked> {
        self.lock().asked.iter().cloned().collect()
    }

    /// How many requests there were of each verb.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.lock().counts.clone()
    }

    /// Forgets what was asked.
    pub fn forget(&self) {
        let mut inner = self.lock();
        inner.asked.clear();
        inner.counts.clear();
    }

    /// For measurements of many: requests are counted and not kept.
    pub fn count_only(&self) {
        self.lock().keep_bodies = false;
    }

    pub(crate) fn record(&self, asked: Asked) {
        let mut inner = self.lock();
        *inner.counts.entry(asked.verb()).or_default() += 1;
        if inner.keep_bodies {
            inner.asked.push_back(asked);
            if inner.asked.len() > KEPT {
                inner.asked.pop_front();
            }
        }
    }
}

fn key(plural: &str, name: &str) -> Key {
    let resource = RESOURCES.iter().position(|r| r.plural == plural).unwrap_or(SANDBOXES);
    let namespace = if RESOURCES[resource].namespaced { NAMESPACE } else { "" };
    (resource, namespace.to_owned(), name.to_owned())
}
