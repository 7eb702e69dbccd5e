//! One Sandbox as either version shows it: v1alpha1 has `replicas` where v1beta1 has `operatingMode`.

use serde_json::{Value, json};

use crate::{
    resources::{GROUP, Generation, RESOURCES, SANDBOXES},
    store::text,
};

/// An object as it is answered in `version`.
pub(crate) fn outward(resource: usize, version: &str, generation: Generation, stored: &Value) -> Value {
    let mut value = stored.clone();
    let of = &RESOURCES[resource];
    value["kind"] = json!(of.kind);
    value["apiVersion"] =
        if of.group.is_empty() { json!(version) } else { json!(format!("{}/{version}", of.group)) };
    if resource == SANDBOXES && version == "v1alpha1" {
        let running = text(&value, "/spec/operatingMode") != "Suspended";
        if let Some(spec) = value["spec"].as_object_mut() {
            spec.remove("operatingMode");
            spec.insert("replicas".to_owned(), json!(u8::from(running)));
        }
        // Through the webhook the count is not to be relied on; 0 is never written.
        if generation == Generation::Alpha && running && !stored["status"].is_null() {
            value["status"]["replicas"] = json!(1);
        }
    }
    value
}

/// What a request in `version` says, as it is stored. A patch is a part of an object and is turned in the same way.
pub(crate) fn inward(resource: usize, version: &str, mut value: Value) -> Value {
    if resource == SANDBOXES && version == "v1alpha1" {
        let replicas = value.pointer("/spec/replicas").cloned();
        if let Some(spec) = value.get_mut("spec").and_then(Value::as_object_mut) {
            spec.remove("replicas");
            if let Some(replicas) = replicas {
                let mode = match replicas.as_u64() {
                    Some(0) => json!("Suspended"),
                    Some(1) => json!("Running"),
                    // Refused by the validation, as more than one is.
                    _ => replicas,
                };
                spec.insert("operatingMode".to_owned(), mode);
            }
        }
    }
    value
}

/// The warning that every answer in a deprecated version carries.
pub(crate) fn warning(resource: usize, version: &str, generation: Generation) -> Option<String> {
    (resource == SANDBOXES && version == "v1alpha1" && generation != Generation::Alpha)
        .then(|| format!("299 - \"{GROUP}/v1alpha1 Sandbox is deprecated; use {GROUP}/v1beta1 Sandbox\""))
}
