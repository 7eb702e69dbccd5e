//! Messages and enums as JSON schemas, in proto3's JSON form.

use std::collections::BTreeMap;

use prost_reflect::{EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor};
use serde_json::{Map, Value, json};

use crate::comments::Comments;

/// The schemas that something refers to, made as they are met.
pub struct Schemas<'a> {
    comments: &'a Comments,
    /// Its types have short names.
    package: &'a str,
    made: BTreeMap<String, Value>,
}

impl<'a> Schemas<'a> {
    /// None yet.
    pub fn new(comments: &'a Comments, package: &'a str) -> Self {
        Self { comments, package, made: BTreeMap::new() }
    }

    /// All that were met.
    pub fn into_map(self) -> Map<String, Value> {
        self.made.into_iter().collect()
    }

    fn name(&self, full: &str) -> String {
        let inner = full.strip_prefix(self.package).and_then(|rest| rest.strip_prefix('.'));
        inner.unwrap_or(full).to_owned()
    }

    /// The schema of a message: a reference, or what a well-known type is in JSON.
    pub fn message(&mut self, message: &MessageDescriptor) -> Value {
        if let Some(known) = well_known(message.full_name()) {
            return known;
        }
        let name = self.name(message.full_name());
        if !self.made.contains_key(&name) {
            // Before its fields: a message may hold itself.
            self.made.insert(name.clone(), Value::Null);
            let schema = self.object(message);
            self.made.insert(name.clone(), schema);
        }
        reference(&name)
    }

    fn object(&mut self, message: &MessageDescriptor) -> Value {
        let mut properties = Map::new();
        for field in message.fields() {
            properties.insert(field.json_name().to_owned(), self.field(&field));
        }
        let file = message.parent_file();
        let mut about: Vec<String> =
            self.comments.of(file.name(), message.path()).map(str::to_owned).into_iter().collect();
        for oneof in message.oneofs().filter(|oneof| !oneof.is_synthetic()) {
            let names: Vec<String> = oneof.fields().map(|field| format!("`{}`", field.json_name())).collect();
            about.push(format!("At most one of {}.", names.join(", ")));
        }
        let mut schema = json!({"type": "object", "properties": properties});
        describe(&mut schema, Some(about.join("\n\n")).filter(|text| !text.is_empty()).as_deref());
        schema
    }

    /// The schema of a field, with its comment.
    pub fn field(&mut self, field: &FieldDescriptor) -> Value {
        let mut schema = if field.is_map() {
            let value = field.kind().as_message().and_then(|entry| entry.get_field_by_name("value"));
            let values = value.map_or_else(|| json!({}), |value| self.kind(&value.kind()));
            json!({"type": "object", "additionalProperties": values})
        } else if field.is_list() {
            json!({"type": "array", "items": self.kind(&field.kind())})
        } else {
            self.kind(&field.kind())
        };
        let comment = self.comments.of(field.parent_message().parent_file().name(), field.path());
        describe(&mut schema, comment);
        schema
    }

    fn kind(&mut self, kind: &Kind) -> Value {
        match kind {
            Kind::Bool => json!({"type": "boolean"}),
            Kind::String => json!({"type": "string"}),
            Kind::Bytes => json!({"type": "string", "contentEncoding": "base64"}),
            Kind::Double | Kind::Float => json!({"type": "number"}),
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => json!({"type": "integer", "format": "int32"}),
            Kind::Uint32 | Kind::Fixed32 => json!({"type": "integer", "format": "uint32", "minimum": 0}),
            // JSON numbers of many programs end at 2^53.
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => json!({"type": "string", "format": "int64"}),
            Kind::Uint64 | Kind::Fixed64 => json!({"type": "string", "format": "uint64"}),
            Kind::Message(message) => self.message(message),
            Kind::Enum(of) => self.enumeration(of),
        }
    }

    fn enumeration(&mut self, of: &EnumDescriptor) -> Value {
        let name = self.name(of.full_name());
        if !self.made.contains_key(&name) {
            let values: Vec<String> = of.values().map(|value| value.name().to_owned()).collect();
            let file = of.parent_file();
            let about = self.comments.of(file.name(), of.path()).map(str::to_owned);
            let of_values = of.values().filter_map(|value| {
                let comment = self.comments.of(file.name(), value.path())?;
                Some(format!("`{}`: {comment}", value.name()))
            });
            let about: Vec<String> = about.into_iter().chain(of_values).collect();
            let mut schema = json!({"type": "string", "enum": values});
            describe(&mut schema, Some(about.join("\n\n")).filter(|text| !text.is_empty()).as_deref());
            self.made.insert(name.clone(), schema);
        }
        reference(&name)
    }
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn describe(schema: &mut Value, text: Option<&str>) {
    if let (Some(text), Value::Object(schema)) = (text, schema) {
        schema.insert("description".to_owned(), Value::String(text.to_owned()));
    }
}

/// The types with a JSON form of their own.
fn well_known(name: &str) -> Option<Value> {
    let schema = match name.strip_prefix("google.protobuf.")? {
        "Timestamp" => json!({"type": "string", "format": "date-time"}),
        "Duration" => json!({"type": "string", "pattern": "^-?[0-9]+(\\.[0-9]{1,9})?s$"}),
        "FieldMask" => json!({"type": "string"}),
        "Empty" | "Struct" => json!({"type": "object"}),
        "ListValue" => json!({"type": "array", "items": {}}),
        "Value" => json!({}),
        "Any" => json!({"type": "object", "properties": {"@type": {"type": "string"}}}),
        "BoolValue" => json!({"type": ["boolean", "null"]}),
        "StringValue" | "BytesValue" | "Int64Value" | "UInt64Value" => json!({"type": ["string", "null"]}),
        "DoubleValue" | "FloatValue" => json!({"type": ["number", "null"]}),
        "Int32Value" | "UInt32Value" => json!({"type": ["integer", "null"]}),
        _ => return None,
    };
    Some(schema)
}
