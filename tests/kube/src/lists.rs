//! Lists in pages of one version, and watches.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::{
    convert::outward,
    resources::{Key, RESOURCES},
    status::{Refusal, status},
    store::{Entry, text},
    world::{Snapshot, World},
};

/// A parsed query.
#[derive(Clone, Debug, Default)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    pub(crate) fn parse(text: &str) -> Self {
        let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(key), decoded(value))
        });
        Self(pairs.collect())
    }

    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(k, v)| k == key && !v.is_empty()).map(|(_, v)| v.as_str())
    }

    pub(crate) fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    pub(crate) fn flag(&self, key: &str) -> bool {
        matches!(self.get(key), Some("true" | "1"))
    }
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digit =
                    |b: Option<u8>| b.and_then(|b| char::from(b).to_digit(16)).unwrap_or_default() as u8;
                let high = digit(rest.next());
                high * 16 + digit(rest.next())
            }
            other => other,
        });
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Which objects are meant.
#[derive(Clone, Debug)]
struct Meant {
    resource: usize,
    namespace: Option<String>,
    labels: Vec<(String, Test)>,
    fields: Vec<(String, String)>,
}

#[derive(Clone, Debug)]
enum Test {
    Is(String),
    IsNot(String),
    There,
}

impl Meant {
    fn new(resource: usize, namespace: Option<String>, query: &Query) -> Self {
        let labels = query.get("labelSelector").unwrap_or_default();
        let labels = labels.split(',').filter(|one| !one.is_empty()).map(|one| {
            if let Some((key, value)) = one.split_once("!=") {
                return (key.to_owned(), Test::IsNot(value.to_owned()));
            }
            match one.split_once('=') {
                Some((key, value)) => (key.to_owned(), Test::Is(value.trim_start_matches('=').to_owned())),
                None => (one.to_owned(), Test::There),
            }
        });
        let fields = query.get("fieldSelector").unwrap_or_default();
        let fields = fields.split(',').filter_map(|one| {
            let (key, value) = one.split_once('=')?;
            Some((format!("/{}", key.replace('.', "/")), value.trim_start_matches('=').to_owned()))
        });
        Self { resource, namespace, labels: labels.collect(), fields: fields.collect() }
    }

    fn fits(&self, key: &Key, value: &Value) -> bool {
        let label = |name: &str| value["metadata"]["labels"][name].as_str();
        key.0 == self.resource
            && self.namespace.as_ref().is_none_or(|namespace| *namespace == key.1)
            && self.labels.iter().all(|(name, test)| match test {
                Test::Is(wanted) => label(name) == Some(wanted),
                Test::IsNot(unwanted) => label(name) != Some(unwanted),
                Test::There => label(name).is_some(),
            })
            && self.fields.iter().all(|(pointer, wanted)| text(value, pointer) == wanted)
    }
}

/// One page, or all.
pub(crate) fn list(
    world: &World,
    resource: usize,
    version: &str,
    namespace: Option<&str>,
    query: &Query,
) -> Result<Value, Refusal> {
    let meant = Meant::new(resource, namespace.map(str::to_owned), query);
    // An answer from the cache knows no pages.
    let cached = query.get("resourceVersion") == Some("0");
    let limit = query.get("limit").and_then(|n| n.parse::<usize>().ok()).filter(|n| *n > 0 && !cached);
    let mut inner = world.lock();
    let generation = inner.generation;
    let mut snapshot = match query.get("continue") {
        Some(token) => match inner.pages.remove(token) {
            Some(snapshot) => snapshot,
            None => return Err(expired(&mut inner, &meant, token)),
        },
        None => {
            let all = inner.objects.all.iter().filter(|(key, value)| meant.fits(key, value));
            let rest = all.map(|(key, value)| (key.clone(), value.clone())).collect();
            Snapshot { version: inner.objects.version, rest }
        }
    };
    let count = limit.unwrap_or(usize::MAX).min(snapshot.rest.len());
    let page: Vec<(Key, Arc<Value>)> = snapshot.rest.drain(..count).collect();
    let mut meta = json!({"resourceVersion": snapshot.version.to_string()});
    if !snapshot.rest.is_empty() {
        if meant.labels.is_empty() && meant.fields.is_empty() {
            meta["remainingItemCount"] = json!(snapshot.rest.len());
        }
        let last = page.last().map(|(key, _)| (key.1.clone(), key.2.clone())).unwrap_or_default();
        let token = token(&mut inner.made_pages, &last);
        meta["continue"] = json!(token);
        inner.pages.insert(token, snapshot);
    }
    drop(inner);
    let items: Vec<Value> =
        page.iter().map(|(_, value)| outward(resource, version, generation, value)).collect();
    let of = &RESOURCES[resource];
    let at = if of.group.is_empty() { version.to_owned() } else { format!("{}/{version}", of.group) };
    Ok(json!({"kind": format!("{}List", of.kind), "apiVersion": at, "metadata": meta, "items": items}))
}

fn token(made: &mut u64, last: &(String, String)) -> String {
    *made += 1;
    URL_SAFE_NO_PAD.encode(json!({"n": *made, "namespace": last.0, "name": last.1}).to_string())
}

/// 410 with a fresh token, which goes on after the same place in what there is now.
fn expired(inner: &mut crate::world::Inner, meant: &Meant, old: &str) -> Refusal {
    let read =
        URL_SAFE_NO_PAD.decode(old).ok().and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
    let Some(place) = read else { return Refusal::bad("continue key is not valid") };
    let last = (text(&place, "/namespace").to_owned(), text(&place, "/name").to_owned());
    let all = inner.objects.all.iter().filter(|(key, value)| {
        meant.fits(key, value) && (key.1.as_str(), key.2.as_str()) > (last.0.as_str(), last.1.as_str())
    });
    let rest = all.map(|(key, value)| (key.clone(), value.clone())).collect();
    let snapshot = Snapshot { version: inner.objects.version, rest };
    let fresh = token(&mut inner.made_pages, &last);
    inner.pages.insert(fresh.clone(), snapshot);
    let message = "The provided continue parameter is too old to display a consistent list result.";
    let mut refusal = status(410, "Expired", message, json!({}));
    refusal["metadata"] = json!({"continue": fresh});
    Refusal { code: 410, body: Ok(refusal), retry_after: None }
}

/// Events from a version on.
pub(crate) fn watch(
    world: &Arc<World>,
    resource: usize,
    version: &str,
    namespace: Option<String>,
    query: Query,
) -> Result<mpsc::Receiver<Value>, Refusal> {
    let meant = Meant::new(resource, namespace, &query);
    let from = query.get("resourceVersion").map(str::parse::<u64>).transpose();
    let from = from.map_err(|_| Refusal::bad("resourceVersion: Invalid value"))?.filter(|n| *n > 0);
    let limit = query.get("timeoutSeconds").and_then(|n| n.parse().ok()).map(Duration::from_secs);
    let limit = if world.behaviour().brief_watches { Some(Duration::ZERO) } else { limit };
    let initial = query.flag("sendInitialEvents");
    if initial && query.get("resourceVersionMatch") != Some("NotOlderThan") {
        return Err(Refusal::invalid(
            "ListOptions",
            "",
            "resourceVersionMatch",
            "Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
        ));
    }
    let (events, receiver) = mpsc::channel(64);
    let watcher = Watcher {
        world: world.clone(),
        meant,
        version: version.to_owned(),
        events,
        bookmarks: query.flag("allowWatchBookmarks"),
    };
    tokio::spawn(async move {
        let follow = watcher.follow(from, initial);
        match limit {
            Some(limit) => drop(tokio::time::timeout(limit, follow).await),
            None => drop(follow.await),
        }
    });
    Ok(receiver)
}

struct Watcher {
    world: Arc<World>,
    meant: Meant,
    version: String,
    events: mpsc::Sender<Value>,
    bookmarks: bool,
}

/// The client went away, or the watch is over.
struct Over;

impl Watcher {
    async fn follow(self, from: Option<u64>, initial: bool) -> Result<(), Over> {
        let mut changes = self.world.changed.subscribe();
        let began = self.world.generation();
        let mut at = match from {
            Some(version) if version < self.world.lock().objects.floor => return self.too_old().await,
            Some(version) if !initial => version,
            _ => self.present(initial).await?,
        };
        let every = self.world.behaviour().bookmark;
        loop {
            let (batch, reached, floor, generation) = self.batch(at);
            // Of a server that was restored meanwhile.
            if at > reached {
                return self.too_old().await;
            }
            if generation != began {
                return Ok(());
            }
            if at < floor {
                return self.too_old().await;
            }
            for event in batch {
                self.say(event).await?;
            }
            at = reached;
            tokio::select! {
                changed = changes.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                }
                () = self.events.closed() => return Err(Over),
                () = tokio::time::sleep(every) => {
                    if self.bookmarks {
                        self.say(self.bookmark(at, json!({}))).await?;
                    }
                }
            }
        }
    }

    /// All that is there, as if it were new.
    async fn present(&self, marked: bool) -> Result<u64, Over> {
        let (all, version, generation) = {
            let inner = self.world.lock();
            let all = inner.objects.all.iter().filter(|(key, value)| self.meant.fits(key, value));
            (all.map(|(_, value)| value.clone()).collect::<Vec<_>>(), inner.objects.version, inner.generation)
        };
        for value in all {
            let object = outward(self.meant.resource, &self.version, generation, &value);
            self.say(json!({"type": "ADDED", "object": object})).await?;
        }
        if marked {
            self.say(self.bookmark(version, json!({"k8s.io/initial-events-end": "true"}))).await?;
        }
        Ok(version)
    }

    fn bookmark(&self, version: u64, annotations: Value) -> Value {
        let of = &RESOURCES[self.meant.resource];
        let mut object =
            outward(self.meant.resource, &self.version, self.world.generation(), &json!({"metadata": {}}));
        object["metadata"] = json!({"resourceVersion": version.to_string(), "annotations": annotations});
        object["kind"] = json!(of.kind);
        // As the real one, which fills required fields with nothing.
        object["spec"] = json!({});
        json!({"type": "BOOKMARK", "object": object})
    }

    fn batch(&self, at: u64) -> (Vec<Value>, u64, u64, crate::resources::Generation) {
        let inner = self.world.lock();
        let events =
            inner.objects.since(at).filter_map(|entry| self.event(entry, inner.generation)).collect();
        (events, inner.objects.version, inner.objects.floor, inner.generation)
    }

    /// What of a change this watch sees: an object that leaves the selector is gone for it.
    fn event(&self, entry: &Entry, generation: crate::resources::Generation) -> Option<Value> {
        let was = entry.old.as_ref().is_some_and(|old| self.meant.fits(&entry.key, old));
        let is = !entry.gone && self.meant.fits(&entry.key, &entry.new);
        let (kind, value) = match (was, is) {
            (false, false) => return None,
            (false, true) => ("ADDED", &entry.new),
            (true, true) => ("MODIFIED", &entry.new),
            (true, false) if entry.gone => ("DELETED", &entry.new),
            (true, false) => ("DELETED", entry.old.as_ref().unwrap_or(&entry.new)),
        };
        let mut object = outward(self.meant.resource, &self.version, generation, value);
        object["metadata"]["resourceVersion"] = json!(entry.version.to_string());
        Some(json!({"type": kind, "object": object}))
    }

    async fn too_old(&self) -> Result<(), Over> {
        let object = status(410, "Expired", "too old resource version", json!({}));
        self.say(json!({"type": "ERROR", "object": object})).await
    }

    async fn say(&self, event: Value) -> Result<(), Over> {
        self.events.send(event).await.map_err(|_| Over)
    }
}

/// How many objects of each kind there are: for measurements.
impl World {
    /// Objects by plural.
    pub fn sizes(&self) -> BTreeMap<&'static str, usize> {
        let mut all = BTreeMap::new();
        for key in self.lock().objects.all.keys() {
            *all.entry(RESOURCES[key.0].plural).or_default() += 1;
        }
        all
    }
}
