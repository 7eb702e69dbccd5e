//! A request's message, of its body, the fields of its path and its query.

use prost_reflect::{
    Cardinality, DeserializeOptions, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor,
};
use serde_json::{Map, Value};

use crate::{
    rules::BodyRule,
    template::{FieldPath, decode},
};

/// What is wrong with a request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct Problem {
    /// The field, when it is about one.
    pub field: Option<String>,
    /// For people.
    pub problem: String,
}

impl Problem {
    fn new(problem: impl Into<String>) -> Self {
        Self { field: None, problem: problem.into() }
    }

    fn of(field: &str, problem: impl std::fmt::Display) -> Self {
        let field = field.escape_debug().to_string();
        Self { problem: format!("{field}: {problem}"), field: Some(field) }
    }
}

/// Messages that are one JSON string.
fn is_text(message: &MessageDescriptor) -> bool {
    let name = message.full_name();
    let scalar = name.strip_prefix("google.protobuf.");
    scalar.is_some_and(|name| {
        ["Duration", "Timestamp", "FieldMask"].contains(&name)
            || name.ends_with("Value") && name != "ListValue"
    })
}

/// The JSON object in a body; none when it is blank.
///
/// # Errors
/// Not JSON, or not an object.
pub fn object(body: &[u8]) -> Result<Option<Value>, Problem> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    match serde_json::from_slice(body) {
        Ok(value @ Value::Object(_)) => Ok(Some(value)),
        Ok(_) => Err(Problem::new("the body is JSON, but no object")),
        Err(error) => Err(Problem::new(format!("the body is not JSON: {error}"))),
    }
}

/// Where the parts of a request go.
pub struct Parts<'a> {
    /// The body's object.
    pub body: Option<Value>,
    /// What the body is.
    pub rule: &'a BodyRule,
    /// Of the path.
    pub fields: &'a [(FieldPath, String)],
    /// After the question mark.
    pub query: Option<&'a str>,
    /// The position of the last event that was seen, for messages with a `cursor`.
    pub last_event: Option<&'a str>,
}

/// A body came with a request that has none.
pub fn takes_none() -> Problem {
    Problem::new("this request takes no body: give its fields in the query, as in ?name=value")
}

/// Puts a message together.
///
/// # Errors
/// What doesn't fit, by its field.
pub fn message(of: &MessageDescriptor, parts: Parts<'_>) -> Result<DynamicMessage, Problem> {
    let mut root = Map::new();
    match (parts.rule, parts.body) {
        (BodyRule::Nothing, Some(Value::Object(body))) if !body.is_empty() => {
            return Err(takes_none());
        }
        (BodyRule::Everything, Some(Value::Object(body))) => root = body,
        (BodyRule::Field(name), Some(body)) => {
            let json =
                of.get_field_by_name(name).map_or_else(|| name.clone(), |field| field.json_name().to_owned());
            root.insert(json, body);
        }
        _ => {}
    }
    for (path, value) in parts.fields {
        set(of, &mut root, path, &path.join("."), value)?;
    }
    for (name, value) in query(parts.query)? {
        let path: FieldPath = name.split('.').map(str::to_owned).collect();
        set(of, &mut root, &path, &name, &value)?;
    }
    if let Some(last) = parts.last_event.filter(|_| !root.contains_key("cursor"))
        && of.get_field_by_name("cursor").is_some_and(|field| field.kind() == Kind::String)
    {
        root.insert("cursor".to_owned(), Value::String(last.to_owned()));
    }
    parse(of, Value::Object(root))
}

/// A message of its JSON form; unknown fields are refused by their name.
///
/// # Errors
/// What doesn't fit.
pub fn parse(of: &MessageDescriptor, value: Value) -> Result<DynamicMessage, Problem> {
    let options = DeserializeOptions::new().deny_unknown_fields(true);
    let mut track = serde_path_to_error::Track::new();
    let tracked = serde_path_to_error::Deserializer::new(value, &mut track);
    let parsed = DynamicMessage::deserialize_with_options(of.clone(), tracked, &options);
    parsed.map_err(|error| match (track.path().to_string().as_str(), without_value(&error.to_string())) {
        // The message itself.
        (".", error) => Problem::new(format!("{}: {error}", of.name())),
        (path, error) => Problem::of(path, error),
    })
}

/// What is wrong with a value, in serde's words, without the value itself: it may be a secret in a wrong place.
fn without_value(said: &str) -> String {
    let is_about_one = ["invalid type: ", "invalid value: "].iter().any(|begin| said.starts_with(begin));
    match (said.find(['"', '`']), said.rfind(", expected ")) {
        (Some(value), Some(expected)) if is_about_one && value < expected => {
            format!("{}{}", said[..value].trim_end(), &said[expected..])
        }
        _ => said.to_owned(),
    }
}

fn query(text: Option<&str>) -> Result<Vec<(String, String)>, Problem> {
    let pairs = text.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let plain = |text: &str| decode(&text.replace('+', " "));
            plain(name).zip(plain(value)).ok_or_else(|| Problem::new("the query is not UTF-8"))
        })
        .collect()
}

/// Sets a field by its path, in JSON names or those of the .proto file.
fn set(
    of: &MessageDescriptor,
    root: &mut Map<String, Value>,
    path: &[String],
    shown: &str,
    text: &str,
) -> Result<(), Problem> {
    let Some((first, rest)) = path.split_first() else { return Ok(()) };
    let field = of.get_field_by_json_name(first).or_else(|| of.get_field_by_name(first));
    let field = field.ok_or_else(|| Problem::of(shown, format!("{} has no such field", of.name())))?;
    let key = if root.contains_key(field.name()) { field.name() } else { field.json_name() };
    if rest.is_empty() {
        return put(&field, root, key, text, shown);
    }
    let inner = field.kind().as_message().filter(|_| field.cardinality() != Cardinality::Repeated).cloned();
    let inner = inner.ok_or_else(|| Problem::of(shown, format!("'{first}' has no fields of its own")))?;
    let slot = root.entry(key).or_insert_with(|| Value::Object(Map::new()));
    if slot.is_null() {
        *slot = Value::Object(Map::new());
    }
    let Value::Object(slot) = slot else {
        return Err(Problem::of(first, "an object is expected"));
    };
    set(&inner, slot, rest, shown, text)
}

fn put(
    field: &FieldDescriptor,
    root: &mut Map<String, Value>,
    key: &str,
    text: &str,
    shown: &str,
) -> Result<(), Problem> {
    let value = scalar(field, text, shown)?;
    if field.is_list() {
        let list = root.entry(key).or_insert_with(|| Value::Array(Vec::new()));
        if let Value::Array(list) = list {
            list.push(value);
        }
        return Ok(());
    }
    match root.get(key) {
        None | Some(Value::Null) => {}
        Some(present) if *present == value => {}
        // A number, where the path has its digits.
        Some(Value::Number(present)) if present.to_string() == text => {}
        Some(_) => return Err(Problem::of(shown, "it is given twice, with different values")),
    }
    root.insert(key.to_owned(), value);
    Ok(())
}

/// proto3's JSON takes everything as a string but truth values.
fn scalar(field: &FieldDescriptor, text: &str, shown: &str) -> Result<Value, Problem> {
    match field.kind() {
        _ if field.is_map() => Err(Problem::of(shown, "a map can only be given in a body")),
        Kind::Message(message) if !is_text(&message) => {
            Err(Problem::of(shown, "it is an object: name one of its fields"))
        }
        Kind::Bool => match text {
            "true" | "1" => Ok(Value::Bool(true)),
            "false" | "0" => Ok(Value::Bool(false)),
            other => Err(Problem::of(shown, format!("'{}' is neither true nor false", other.escape_debug()))),
        },
        // By number, too.
        Kind::Enum(_) if text.parse::<i32>().is_ok() => {
            Ok(Value::from(text.parse::<i32>().unwrap_or_default()))
        }
        _ => Ok(Value::String(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_with_a_value_does_not_show_it() {
        let cases = [
            (
                r#"invalid type: string "s3cret, expected x", expected a map"#,
                "invalid type: string, expected a map",
            ),
            ("invalid value: integer `7`, expected base64", "invalid value: integer, expected base64"),
            ("invalid type: sequence, expected a string", "invalid type: sequence, expected a string"),
            ("unrecognized field name 'x'", "unrecognized field name 'x'"),
        ];
        for (said, wanted) in cases {
            assert_eq!(without_value(said), wanted);
        }
    }
}
