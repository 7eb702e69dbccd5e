//! The objects: versions, generations, deletion with owners and finalizers, and the log that watches read.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

use crate::{
    resources::{CLAIMS, Key, PODS, RESOURCES, SANDBOXES},
    status::Refusal,
};

/// The finalizer of a foreground deletion.
const FOREGROUND: &str = "foregroundDeletion";
/// Changes that watches can still begin after.
const LOG: usize = 200_000;

/// One change.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) version: u64,
    pub(crate) key: Key,
    /// None: it was made by this change.
    pub(crate) old: Option<Arc<Value>>,
    pub(crate) new: Arc<Value>,
    pub(crate) gone: bool,
}

/// Which part of an object a write is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Main,
    Status,
}

/// What a deletion says.
#[derive(Clone, Debug, Default)]
pub(crate) struct Deletion {
    pub(crate) uid: Option<String>,
    pub(crate) version: Option<String>,
    pub(crate) foreground: bool,
    pub(crate) grace: Option<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct Objects {
    /// A part of every uid, so that those of two clusters are different.
    cluster: u32,
    pub(crate) version: u64,
    /// Watches can't begin before it.
    pub(crate) floor: u64,
    pub(crate) all: BTreeMap<Key, Arc<Value>>,
    pub(crate) log: VecDeque<Entry>,
    /// Dependents by their owner's uid.
    owned: HashMap<String, BTreeSet<Key>>,
    by_uid: HashMap<String, Key>,
    made: u64,
}

pub(crate) fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

pub(crate) fn number(value: &Value, pointer: &str) -> u64 {
    value.pointer(pointer).and_then(Value::as_u64).unwrap_or_default()
}

pub(crate) fn deleting(value: &Value) -> bool {
    !text(value, "/metadata/deletionTimestamp").is_empty()
}

/// RFC 3339 in whole seconds, as every time of the API.
pub(crate) fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Civil date of a day count: the era of 400 years has 146,097 days.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

fn finalizers(value: &Value) -> Vec<String> {
    let all = value.pointer("/metadata/finalizers").and_then(Value::as_array);
    all.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn owners(value: &Value) -> Vec<String> {
    let all = value.pointer("/metadata/ownerReferences").and_then(Value::as_array);
    all.into_iter().flatten().map(|owner| text(owner, "/uid").to_owned()).collect()
}

/// What counts as another generation: everything but metadata and status.
fn body(value: &Value) -> Value {
    let mut value = value.clone();
    if let Some(map) = value.as_object_mut() {
        for key in ["metadata", "status", "apiVersion", "kind"] {
            map.remove(key);
        }
    }
    value
}

impl Objects {
    /// Those of a cluster of this number.
    pub(crate) fn of(cluster: u32) -> Self {
        Self { cluster, ..Self::default() }
    }

    pub(crate) fn get(&self, key: &Key) -> Result<Arc<Value>, Refusal> {
        let resource = &RESOURCES[key.0];
        self.all.get(key).cloned().ok_or_else(|| Refusal::not_found(resource.group, resource.plural, &key.2))
    }

    /// Whether it could be made.
    pub(crate) fn would_create(&self, key: &Key, value: &Value) -> Result<(), Refusal> {
        let resource = &RESOURCES[key.0];
        if let Some(old) = self.all.get(key) {
            return Err(Refusal::exists(resource.group, resource.plural, &key.2, deleting(old)));
        }
        validate(key, value, None)
    }

    /// A new object; what the server sets is set.
    pub(crate) fn create(&mut self, key: &Key, mut value: Value) -> Result<Arc<Value>, Refusal> {
        self.would_create(key, &value)?;
        let resource = &RESOURCES[key.0];
        self.made += 1;
        let meta = &mut value["metadata"];
        meta["uid"] = json!(format!("{:08x}-0000-4000-8000-{:012x}", self.cluster, self.made));
        meta["creationTimestamp"] = json!(now());
        meta["name"] = json!(key.2);
        if resource.namespaced {
            meta["namespace"] = json!(key.1);
        }
        if resource.status {
            meta["generation"] = json!(1);
            if let Some(map) = value.as_object_mut() {
                map.remove("status");
            }
        }
        if key.0 == SANDBOXES {
            for (field, default) in [("operatingMode", "Running"), ("shutdownPolicy", "Retain")] {
                if value["spec"][field].is_null() {
                    value["spec"][field] = json!(default);
                }
            }
        }
        if key.0 == PODS {
            if value["spec"]["terminationGracePeriodSeconds"].is_null() {
                value["spec"]["terminationGracePeriodSeconds"] = json!(30);
            }
            value["status"] = json!({"phase": "Pending"});
        }
        if key.0 == CLAIMS {
            value["status"] = json!({"phase": "Bound"});
        }
        Ok(self.put(key, None, value))
    }

    /// Another content for an object; a change that changes nothing leaves its version as it is.
    pub(crate) fn update(&mut self, key: &Key, mut new: Value, part: Part) -> Result<Arc<Value>, Refusal> {
        let old = self.get(key)?;
        let resource = &RESOURCES[key.0];
        let given = text(&new, "/metadata/resourceVersion");
        if !given.is_empty() && given != text(&old, "/metadata/resourceVersion") {
            let why =
                "the object has been modified; please apply your changes to the latest version and try again";
            return Err(Refusal::conflict(resource.plural, &key.2, why));
        }
        if resource.status {
            match part {
                Part::Main => new["status"] = old["status"].clone(),
                Part::Status => {
                    let (status, fields) = (new["status"].take(), new["metadata"]["managedFields"].take());
                    new = (*old).clone();
                    new["status"] = status;
                    if !fields.is_null() {
                        new["metadata"]["managedFields"] = fields;
                    }
                }
            }
            if new["status"].is_null()
                && let Some(map) = new.as_object_mut()
            {
                map.remove("status");
            }
        }
        for field in [
            "uid",
            "name",
            "namespace",
            "creationTimestamp",
            "generation",
            "resourceVersion",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
        ] {
            match old["metadata"].get(field) {
                Some(kept) => new["metadata"][field] = kept.clone(),
                None => {
                    if let Some(map) = new["metadata"].as_object_mut() {
                        map.remove(field);
                    }
                }
            }
        }
        validate(key, &new, Some(&old))?;
        let unmanaged = |value: &Value| {
            let mut value = value.clone();
            if let Some(map) = value["metadata"].as_object_mut() {
                map.remove("managedFields");
            }
            value
        };
        if new == *old || (unmanaged(&new) == unmanaged(&old) && same_managers(&new, &old)) {
            return Ok(old);
        }
        if resource.status && body(&new) != body(&old) {
            new["metadata"]["generation"] = json!(number(&old, "/metadata/generation") + 1);
        }
        if deleting(&new) && finalizers(&new).is_empty() && key.0 != PODS {
            return Ok(self.remove(key));
        }
        Ok(self.put(key, Some(old), new))
    }

    /// What the deletion answers: the object when it is still there, and whether it is.
    pub(crate) fn delete(&mut self, key: &Key, deletion: &Deletion) -> Result<(Arc<Value>, bool), Refusal> {
        let old = self.get(key)?;
        let resource = &RESOURCES[key.0];
        let checks = [
            (&deletion.uid, "/metadata/uid", "UID"),
            (&deletion.version, "/metadata/resourceVersion", "ResourceVersion"),
        ];
        for (wanted, pointer, name) in checks {
            if let Some(wanted) = wanted
                && wanted != text(&old, pointer)
            {
                let why = format!(
                    "Precondition failed: {name} in precondition: {wanted}, {name} in object meta: {}",
                    text(&old, pointer)
                );
                return Err(Refusal::conflict(resource.plural, &key.2, &why));
            }
        }
        let mut new = (*old).clone();
        let mut kept = finalizers(&old);
        let dependents = self.owned.get(text(&old, "/metadata/uid")).is_some_and(|all| !all.is_empty());
        if deletion.foreground && dependents && !kept.iter().any(|f| f == FOREGROUND) {
            kept.push(FOREGROUND.to_owned());
        }
        let grace = match key.0 {
            PODS => deletion.grace.unwrap_or_else(|| number(&old, "/spec/terminationGracePeriodSeconds")),
            _ => 0,
        };
        let scheduled = key.0 == PODS && !text(&old, "/spec/nodeName").is_empty();
        let graceful = key.0 == PODS && grace > 0 && (scheduled || !kept.is_empty());
        if kept.is_empty() && !graceful {
            return Ok((self.remove(key), false));
        }
        if !deleting(&old) {
            new["metadata"]["deletionTimestamp"] = json!(now());
            new["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
            new["metadata"]["generation"] = json!(number(&old, "/metadata/generation") + 1);
        }
        if !kept.is_empty() {
            new["metadata"]["finalizers"] = json!(kept);
        }
        let new = if new == *old { old } else { self.put(key, Some(old), new) };
        if kept.iter().any(|f| f == FOREGROUND) {
            self.delete_dependents(text(&new, "/metadata/uid"));
            self.end_foreground(text(&new, "/metadata/uid"));
        }
        Ok((self.all.get(key).cloned().unwrap_or(new), true))
    }

    /// Takes an object out and leaves what it owned, which nobody owns then.
    pub(crate) fn orphan(&mut self, key: &Key) {
        let Some(object) = self.all.get(key) else { return };
        let uid = text(object, "/metadata/uid").to_owned();
        for owned in self.owned.remove(&uid).into_iter().flatten() {
            let Some(old) = self.all.get(&owned).cloned() else { continue };
            let mut new = (*old).clone();
            if let Some(meta) = new["metadata"].as_object_mut() {
                meta.remove("ownerReferences");
            }
            self.put(&owned, Some(old), new);
        }
        self.remove(key);
    }

    /// Counts from an earlier version on, and so do all objects.
    pub(crate) fn set_back(&mut self, by: u64) {
        let earlier = |version: u64| version.saturating_sub(by).max(1);
        self.version = earlier(self.version);
        self.floor = self.version;
        self.log.clear();
        for value in self.all.values_mut() {
            let version = text(value, "/metadata/resourceVersion").parse().unwrap_or_default();
            Arc::make_mut(value)["metadata"]["resourceVersion"] = json!(earlier(version).to_string());
        }
    }

    /// Takes an object out, whatever holds it; what it owned follows.
    pub(crate) fn remove(&mut self, key: &Key) -> Arc<Value> {
        let Some(old) = self.all.remove(key) else { return Arc::default() };
        let uid = text(&old, "/metadata/uid").to_owned();
        self.by_uid.remove(&uid);
        let owners = owners(&old);
        for owner in &owners {
            if let Some(all) = self.owned.get_mut(owner) {
                all.remove(key);
            }
        }
        self.version += 1;
        let mut last = (*old).clone();
        last["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let last = Arc::new(last);
        self.note(Entry {
            version: self.version,
            key: key.clone(),
            old: Some(old),
            new: last.clone(),
            gone: true,
        });
        self.delete_dependents(&uid);
        self.owned.remove(&uid);
        for owner in owners {
            self.end_foreground(&owner);
        }
        last
    }

    fn delete_dependents(&mut self, uid: &str) {
        let all: Vec<Key> = self.owned.get(uid).into_iter().flatten().cloned().collect();
        for key in all {
            // Held by its own finalizers or a kubelet: gone later.
            let _later = self.delete(&key, &Deletion::default()).is_err();
        }
    }

    /// The owner goes when nothing of it is left.
    fn end_foreground(&mut self, uid: &str) {
        if self.owned.get(uid).is_some_and(|all| !all.is_empty()) {
            return;
        }
        let Some(key) = self.by_uid.get(uid).cloned() else { return };
        let Some(owner) = self.all.get(&key).cloned() else { return };
        let mut left = finalizers(&owner);
        if !deleting(&owner) || !left.iter().any(|f| f == FOREGROUND) {
            return;
        }
        left.retain(|f| f != FOREGROUND);
        if left.is_empty() {
            self.remove(&key);
        } else {
            let mut new = (*owner).clone();
            new["metadata"]["finalizers"] = json!(left);
            self.put(&key, Some(owner), new);
        }
    }

    fn put(&mut self, key: &Key, old: Option<Arc<Value>>, mut new: Value) -> Arc<Value> {
        self.version += 1;
        new["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let new = Arc::new(new);
        let uid = text(&new, "/metadata/uid").to_owned();
        for owner in owners(&new) {
            self.owned.entry(owner).or_default().insert(key.clone());
        }
        self.by_uid.insert(uid, key.clone());
        self.all.insert(key.clone(), new.clone());
        self.note(Entry { version: self.version, key: key.clone(), old, new: new.clone(), gone: false });
        new
    }

    fn note(&mut self, entry: Entry) {
        self.log.push_back(entry);
        if self.log.len() > LOG
            && let Some(oldest) = self.log.pop_front()
        {
            self.floor = oldest.version;
        }
    }

    /// The changes after a version.
    pub(crate) fn since(&self, version: u64) -> impl Iterator<Item = &Entry> {
        let first = self.log.partition_point(|entry| entry.version <= version);
        self.log.range(first..)
    }

    /// Forgets the log, as a server that was started anew or compacted.
    pub(crate) fn compact(&mut self) {
        self.version += 1;
        self.floor = self.version;
        self.log.clear();
    }
}

/// Whether the same managers have the same fields, whenever they wrote them.
fn same_managers(a: &Value, b: &Value) -> bool {
    let of = |value: &Value| {
        let all = value.pointer("/metadata/managedFields").and_then(Value::as_array).cloned();
        let all = all.unwrap_or_default().into_iter().map(|mut one| {
            if let Some(map) = one.as_object_mut() {
                map.remove("time");
            }
            one
        });
        all.collect::<Vec<_>>()
    };
    of(a) == of(b)
}

fn validate(key: &Key, new: &Value, old: Option<&Value>) -> Result<(), Refusal> {
    let kind = RESOURCES[key.0].kind;
    let wrong = |field: &str, message: &str| Err(Refusal::invalid(kind, &key.2, field, message));
    let letters = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    if key.2.is_empty() || key.2.len() > 253 || !key.2.bytes().all(letters) {
        return wrong("metadata.name", "a lowercase RFC 1123 subdomain must consist of lower case letters");
    }
    match key.0 {
        SANDBOXES => {
            if !new["spec"]["podTemplate"]["spec"]["containers"].is_array() {
                return wrong("spec.podTemplate.spec.containers", "Required value");
            }
            let mode = &new["spec"]["operatingMode"];
            if !mode.is_null() && !matches!(mode.as_str(), Some("Running" | "Suspended")) {
                return wrong(
                    "spec.operatingMode",
                    "Unsupported value: supported values: Running, Suspended",
                );
            }
            if let Some(old) = old
                && old["spec"]["volumeClaimTemplates"] != new["spec"]["volumeClaimTemplates"]
            {
                return wrong("spec.volumeClaimTemplates", "field is immutable");
            }
        }
        PODS if new["spec"]["containers"].as_array().is_none_or(Vec::is_empty) => {
            return wrong("spec.containers", "Required value");
        }
        CLAIMS if text(new, "/spec/resources/requests/storage").is_empty() => {
            return wrong("spec.resources[storage]", "Required value");
        }
        _ => {}
    }
    Ok(())
}
