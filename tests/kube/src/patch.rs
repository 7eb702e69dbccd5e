//! Patches: merge (RFC 7386), JSON (RFC 6902) and server-side apply with the owners of fields.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::{
    status::Refusal,
    store::{now, text},
};

/// RFC 7386: null removes, objects are merged, everything else is replaced.
pub(crate) fn merge(target: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let Some(map) = target.as_object_mut() else { return };
    for (key, value) in patch {
        if value.is_null() {
            map.remove(key);
        } else {
            merge(map.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// RFC 6902: add, remove, replace and test.
pub(crate) fn json_patch(target: &mut Value, patch: &Value) -> Result<(), Refusal> {
    let Some(steps) = patch.as_array() else { return Err(Refusal::bad("a JSON patch is a list")) };
    for step in steps {
        let (op, path) = (text(step, "/op"), text(step, "/path"));
        let failed = |why: &str| {
            let message =
                format!("the server rejected our request due to an error in our request: {op} {path}: {why}");
            Refusal::new(422, "Invalid", message, json!({"causes": [{"field": path, "message": why}]}))
        };
        let (parent, last) = path.rsplit_once('/').ok_or_else(|| failed("no path"))?;
        let last = last.replace("~1", "/").replace("~0", "~");
        if op == "test" {
            if target.pointer(path) != Some(&step["value"]) {
                return Err(failed("testing value failed"));
            }
            continue;
        }
        let parent = target.pointer_mut(parent).ok_or_else(|| failed("the parent is missing"))?;
        match (op, parent) {
            ("add" | "replace", Value::Object(map)) => {
                if op == "replace" && !map.contains_key(&last) {
                    return Err(failed("the path is missing"));
                }
                map.insert(last, step["value"].clone());
            }
            ("remove", Value::Object(map)) => {
                map.remove(&last).ok_or_else(|| failed("the path is missing"))?;
            }
            ("add", Value::Array(list)) if last == "-" => list.push(step["value"].clone()),
            (_, Value::Array(list)) => {
                let at: usize = last.parse().map_err(|_| failed("not an index"))?;
                match op {
                    "add" if at <= list.len() => list.insert(at, step["value"].clone()),
                    "replace" if at < list.len() => list[at] = step["value"].clone(),
                    "remove" if at < list.len() => drop(list.remove(at)),
                    _ => return Err(failed("no such index")),
                }
            }
            _ => return Err(failed("it can't be done there")),
        }
    }
    Ok(())
}

type Path = Vec<String>;

/// The leaves of what a manager says; lists are one leaf.
fn leaves(value: &Value, at: &mut Path, all: &mut BTreeSet<Path>) {
    match value.as_object() {
        Some(map) if !map.is_empty() => {
            for (key, value) in map {
                let unowned = match at.as_slice() {
                    [] => matches!(key.as_str(), "apiVersion" | "kind" | "status"),
                    [first] if first == "metadata" => {
                        matches!(
                            key.as_str(),
                            "name" | "namespace" | "resourceVersion" | "uid" | "managedFields"
                        )
                    }
                    _ => false,
                };
                if !unowned {
                    at.push(key.clone());
                    leaves(value, at, all);
                    at.pop();
                }
            }
        }
        _ if at.is_empty() => {}
        _ => drop(all.insert(at.clone())),
    }
}

fn tree(paths: &BTreeSet<Path>) -> Value {
    let mut root = Map::new();
    for path in paths {
        let mut at = &mut root;
        for part in path {
            let next = at.entry(format!("f:{part}")).or_insert_with(|| json!({}));
            let Some(map) = next.as_object_mut() else { break };
            at = map;
        }
    }
    Value::Object(root)
}

fn paths(tree: &Value, at: &mut Path, all: &mut BTreeSet<Path>) {
    match tree.as_object() {
        Some(map) if !map.is_empty() => {
            for (key, value) in map {
                at.push(key.trim_start_matches("f:").to_owned());
                paths(value, at, all);
                at.pop();
            }
        }
        _ if at.is_empty() => {}
        _ => drop(all.insert(at.clone())),
    }
}

fn pointer(path: &Path) -> String {
    path.iter().map(|part| format!("/{}", part.replace('~', "~0").replace('/', "~1"))).collect()
}

fn managed(value: &Value) -> Vec<Value> {
    value.pointer("/metadata/managedFields").and_then(Value::as_array).cloned().unwrap_or_default()
}

fn fields_of(entry: &Value) -> BTreeSet<Path> {
    let mut all = BTreeSet::new();
    paths(&entry["fieldsV1"], &mut Vec::new(), &mut all);
    all
}

fn entry(manager: &str, operation: &str, version: &str, fields: &BTreeSet<Path>) -> Value {
    json!({
        "manager": manager, "operation": operation, "apiVersion": version, "time": now(),
        "fieldsType": "FieldsV1", "fieldsV1": tree(fields),
    })
}

/// Notes who wrote what, after any write but an apply.
pub(crate) fn note_update(old: &Value, new: &mut Value, manager: &str) {
    let (mut before, mut after) = (BTreeSet::new(), BTreeSet::new());
    leaves(old, &mut Vec::new(), &mut before);
    leaves(new, &mut Vec::new(), &mut after);
    let changed: BTreeSet<Path> =
        after.into_iter().filter(|path| old.pointer(&pointer(path)) != new.pointer(&pointer(path))).collect();
    if changed.is_empty() {
        return;
    }
    let version = text(new, "/apiVersion").to_owned();
    let mut kept = Vec::new();
    let mut mine = changed.clone();
    for one in managed(old) {
        let fields = fields_of(&one);
        if text(&one, "/manager") == manager && text(&one, "/operation") == "Update" {
            mine.extend(fields);
            continue;
        }
        // What somebody else writes over is theirs.
        let left: BTreeSet<Path> = fields.difference(&changed).cloned().collect();
        if !left.is_empty() {
            kept.push(json!({
                "manager": one["manager"], "operation": one["operation"], "apiVersion": one["apiVersion"],
                "time": one["time"], "fieldsType": "FieldsV1", "fieldsV1": tree(&left),
            }));
        }
    }
    kept.push(entry(manager, "Update", &version, &mine));
    new["metadata"]["managedFields"] = json!(kept);
}

/// Server-side apply: what the manager says becomes so, what it said before and says no more goes, and what others own
/// with another value is a conflict unless forced.
pub(crate) fn apply(old: Option<&Value>, said: &Value, manager: &str, force: bool) -> Result<Value, Refusal> {
    let mut wanted = BTreeSet::new();
    leaves(said, &mut Vec::new(), &mut wanted);
    let mut new = old.cloned().unwrap_or_else(|| json!({"metadata": {}}));
    let mut others = Vec::new();
    let mut before = BTreeSet::new();
    let mut causes = Vec::new();
    for one in managed(&new) {
        let mut fields = fields_of(&one);
        if text(&one, "/manager") == manager && text(&one, "/operation") == "Apply" {
            before = fields;
            continue;
        }
        let fought: Vec<Path> = fields
            .intersection(&wanted)
            .filter(|path| new.pointer(&pointer(path)) != said.pointer(&pointer(path)))
            .cloned()
            .collect();
        for path in fought {
            if force {
                fields.remove(&path);
            } else {
                let message = format!(
                    "conflict with \"{}\" using {}",
                    text(&one, "/manager"),
                    text(&one, "/apiVersion")
                );
                causes.push(json!({
                    "reason": "FieldManagerConflict", "message": message, "field": format!(".{}", path.join(".")),
                }));
            }
        }
        let mut one = one.clone();
        one["fieldsV1"] = tree(&fields);
        if !fields.is_empty() {
            others.push((one, fields));
        }
    }
    if !causes.is_empty() {
        let message = format!("Apply failed with {} conflict(s)", causes.len());
        return Err(Refusal::new(409, "Conflict", message, json!({"causes": causes})));
    }
    for path in before.difference(&wanted) {
        if !others.iter().any(|(_, fields)| fields.contains(path)) {
            remove(&mut new, path);
        }
    }
    for path in &wanted {
        set(&mut new, path, said.pointer(&pointer(path)).cloned().unwrap_or_default());
    }
    for (pointer, key) in [("/apiVersion", "apiVersion"), ("/kind", "kind")] {
        new[key] = said.pointer(pointer).cloned().unwrap_or_default();
    }
    let given = said["metadata"]["resourceVersion"].clone();
    if !given.is_null() {
        new["metadata"]["resourceVersion"] = given;
    }
    let mut all: Vec<Value> = others.into_iter().map(|(one, _)| one).collect();
    all.push(entry(manager, "Apply", text(said, "/apiVersion"), &wanted));
    new["metadata"]["managedFields"] = json!(all);
    Ok(new)
}

fn set(target: &mut Value, path: &Path, value: Value) {
    let mut at = target;
    for part in path {
        if !at.is_object() {
            *at = json!({});
        }
        at = &mut at[part.as_str()];
    }
    *at = value;
}

fn remove(target: &mut Value, path: &Path) {
    let Some((last, parents)) = path.split_last() else { return };
    let parent = pointer(&parents.to_vec());
    if let Some(map) = target.pointer_mut(&parent).and_then(Value::as_object_mut) {
        map.remove(last);
    }
}
