//! How a refusal looks on the wire.

use serde_json::{Value, json};

/// A refusal: a Status object or, as some are, plain text.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) code: u16,
    pub(crate) body: Result<Value, String>,
    pub(crate) retry_after: Option<u32>,
}

pub(crate) fn status(code: u16, reason: &str, message: &str, details: Value) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "details": details, "code": code,
    })
}

impl Refusal {
    pub(crate) fn new(code: u16, reason: &str, message: impl AsRef<str>, details: Value) -> Self {
        Self { code, body: Ok(status(code, reason, message.as_ref(), details)), retry_after: None }
    }

    /// An unknown group, version or path is told in plain text.
    pub(crate) fn unknown_path() -> Self {
        Self { code: 404, body: Err("404 page not found\n".to_owned()), retry_after: None }
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized", json!({}))
    }

    pub(crate) fn too_many() -> Self {
        let text = "Too many requests, please try again later.\n".to_owned();
        Self { code: 429, body: Err(text), retry_after: Some(1) }
    }

    pub(crate) fn not_found(group: &str, plural: &str, name: &str) -> Self {
        let kind = if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") };
        let details = json!({"name": name, "group": group, "kind": plural});
        Self::new(404, "NotFound", format!("{kind} \"{name}\" not found"), details)
    }

    pub(crate) fn exists(group: &str, plural: &str, name: &str, deleting: bool) -> Self {
        let kind = if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") };
        let details = json!({"name": name, "group": group, "kind": plural});
        let message = if deleting {
            format!("object is being deleted: {kind} \"{name}\" already exists")
        } else {
            format!("{kind} \"{name}\" already exists")
        };
        Self::new(409, "AlreadyExists", message, details)
    }

    pub(crate) fn conflict(plural: &str, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {plural} \"{name}\": {why}");
        Self::new(409, "Conflict", message, json!({"name": name, "kind": plural}))
    }

    pub(crate) fn invalid(kind: &str, name: &str, field: &str, message: &str) -> Self {
        let causes = json!([{"reason": "FieldValueInvalid", "message": message, "field": field}]);
        let details = json!({"name": name, "kind": kind, "causes": causes});
        Self::new(422, "Invalid", format!("{kind} \"{name}\" is invalid: {field}: {message}"), details)
    }

    pub(crate) fn wrong_method() -> Self {
        Self::new(405, "MethodNotAllowed", "the server does not allow this method", json!({}))
    }

    pub(crate) fn bad(message: impl AsRef<str>) -> Self {
        Self::new(400, "BadRequest", message, json!({}))
    }
}
