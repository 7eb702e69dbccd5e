//! The OpenAPI 3.1 document, of the same routes that requests are matched with.

use prost_reflect::{DescriptorPool, Kind, MessageDescriptor};
use serde_json::{Map, Value, json};

use crate::{
    Options,
    comments::Comments,
    rules::{BodyRule, Route, Routes},
    schema::Schemas,
    template::{FieldPath, short},
};

/// How deep fields of fields are listed as parameters.
const DEPTH: usize = 3;

/// The whole document.
pub fn document(pool: &DescriptorPool, routes: &Routes, options: &Options) -> Value {
    let comments = Comments::read(pool);
    let mut schemas = Schemas::new(&comments, &options.package);
    let mut paths: Map<String, Value> = Map::new();
    for route in routes.iter() {
        let item = paths.entry(route.template.shown()).or_insert_with(|| json!({}));
        if let Value::Object(item) = item {
            item.insert(route.verb.as_str().to_ascii_lowercase(), operation(route, &comments, &mut schemas));
        }
    }
    let tags: Vec<Value> = pool
        .services()
        .filter(|service| service.package_name() == options.package)
        .map(|service| {
            let about = comments.of(service.parent_file().name(), service.path());
            match about {
                Some(about) => json!({"name": service.name(), "description": about}),
                None => json!({"name": service.name()}),
            }
        })
        .collect();
    let mut schemas = schemas.into_map();
    schemas.insert("google.rpc.Status".to_owned(), status_schema());
    json!({
        "openapi": "3.1.0",
        "info": {"title": options.title, "version": options.version},
        "tags": tags,
        "paths": paths,
        "security": [{}, {"bearer": []}],
        "components": {
            "schemas": schemas,
            "responses": {"Error": {
                "description": "What went wrong: google.rpc.Status. `details` holds google.rpc.ErrorInfo with the reason, and metadata such as `next`, the command to type next. 429 and 503 may have `Retry-After`.",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/google.rpc.Status"}}},
            }},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    })
}

fn status_schema() -> Value {
    json!({
        "type": "object",
        "description": "An error.",
        "properties": {
            "code": {"type": "integer", "format": "int32", "description": "google.rpc.Code"},
            "message": {"type": "string"},
            "details": {"type": "array", "items": {
                "type": "object",
                "properties": {"@type": {"type": "string"}},
                "required": ["@type"],
            }},
        },
        "required": ["code", "message", "details"],
    })
}

fn operation(route: &Route, comments: &Comments, schemas: &mut Schemas<'_>) -> Value {
    let method = &route.method;
    let service = method.parent_service();
    let about = comments.of(service.parent_file().name(), method.path());
    let mut operation = json!({
        "operationId": route.operation,
        "tags": [service.name()],
        "parameters": parameters(route, schemas),
        "responses": {
            "200": {"description": if method.is_server_streaming() { STREAMED } else { "Done." }, "content": answer(route, schemas)},
            "default": {"$ref": "#/components/responses/Error"},
        },
    });
    if let Value::Object(operation) = &mut operation {
        let summary = format!("{}.{}", service.name(), method.name());
        operation.insert("summary".to_owned(), Value::String(summary));
        if let Some(about) = about {
            operation.insert("description".to_owned(), Value::String(about.to_owned()));
        }
        if let Some(body) = body(route, schemas) {
            operation.insert("requestBody".to_owned(), body);
        }
    }
    operation
}

const STREAMED: &str = "A stream: one such object a line. What fails after the beginning is the last line, {\"error\": google.rpc.Status}.";

fn answer(route: &Route, schemas: &mut Schemas<'_>) -> Value {
    let schema = schemas.message(&route.method.output());
    if route.method.is_server_streaming() {
        return json!({"application/x-ndjson": {"schema": schema.clone()}, "text/event-stream": {"schema": schema}});
    }
    json!({"application/json": {"schema": schema}})
}

fn body(route: &Route, schemas: &mut Schemas<'_>) -> Option<Value> {
    let input = route.method.input();
    let schema = match &route.body {
        BodyRule::Nothing => return None,
        BodyRule::Everything => schemas.message(&input),
        BodyRule::Field(name) => schemas.field(&input.get_field_by_name(name)?),
    };
    if !route.method.is_client_streaming() {
        return Some(json!({"content": {"application/json": {"schema": schema}}}));
    }
    let whole = schemas.message(&input);
    let (about, line) = match &route.body {
        BodyRule::Field(name) => (
            format!("The first object is `{name}`; each one after it is a whole {}.", input.name()),
            json!({"anyOf": [schema.clone(), whole]}),
        ),
        _ => (format!("Each object is one {}.", input.name()), whole),
    };
    Some(json!({
        "description": format!("One object, or several one after the other. {about} The end of the body is the end of the input."),
        "content": {"application/json": {"schema": schema}, "application/x-ndjson": {"schema": line}},
    }))
}

fn parameters(route: &Route, schemas: &mut Schemas<'_>) -> Vec<Value> {
    let input = route.method.input();
    let mut all = Vec::new();
    for path in route.template.fields() {
        let schema =
            field(&input, path).map_or_else(|| json!({"type": "string"}), |field| schemas.field(&field));
        all.push(json!({"name": short(path), "in": "path", "required": true, "schema": schema}));
    }
    if route.body == BodyRule::Nothing {
        let taken: Vec<&FieldPath> = route.template.fields().collect();
        query(&input, &FieldPath::new(), String::new(), &taken, schemas, &mut all);
    }
    all
}

fn field(of: &MessageDescriptor, path: &FieldPath) -> Option<prost_reflect::FieldDescriptor> {
    let (last, way) = path.split_last()?;
    let mut message = of.clone();
    for name in way {
        message = message.get_field_by_name(name)?.kind().as_message()?.clone();
    }
    message.get_field_by_name(last)
}

/// Every field that a query can hold: scalars, and those of messages below.
fn query(
    of: &MessageDescriptor,
    way: &FieldPath,
    shown: String,
    taken: &[&FieldPath],
    schemas: &mut Schemas<'_>,
    all: &mut Vec<Value>,
) {
    for field in of.fields().filter(|field| !field.is_map()) {
        let path: FieldPath = way.iter().cloned().chain([field.name().to_owned()]).collect();
        let name = format!("{shown}{}", field.json_name());
        if taken.contains(&&path) {
            continue;
        }
        match field.kind() {
            Kind::Message(inner) if !inner.full_name().starts_with("google.protobuf.") => {
                if path.len() < DEPTH && !field.is_list() {
                    query(&inner, &path, format!("{name}."), taken, schemas, all);
                }
            }
            _ => all.push(json!({"name": name, "in": "query", "schema": schemas.field(&field)})),
        }
    }
}
