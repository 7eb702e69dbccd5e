//! The OpenAPI document of torpor.v1.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeSet;

use common::{get, rest};
use serde_json::Value;

fn walk(value: &Value, visit: &mut impl FnMut(&str, &Value)) {
    match value {
        Value::Object(object) => object.iter().for_each(|(key, value)| {
            visit(key, value);
            walk(value, visit);
        }),
        Value::Array(list) => list.iter().for_each(|value| walk(value, visit)),
        _ => {}
    }
}

fn operations(document: &Value) -> Vec<(String, String, &Value)> {
    let paths = document["paths"].as_object().unwrap();
    let all = paths.iter().flat_map(|(path, item)| {
        let item = item.as_object().unwrap();
        item.iter().map(move |(verb, operation)| (path.clone(), verb.to_uppercase(), operation))
    });
    all.collect()
}

#[tokio::test]
async fn the_document_is_whole() {
    let document = get("/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    assert!(document["info"]["title"].is_string() && document["info"]["version"].is_string());
    walk(&document, &mut |key, value| {
        if key == "$ref" {
            let path = value.as_str().unwrap().strip_prefix('#').unwrap();
            assert!(document.pointer(path).is_some_and(Value::is_object), "{path} leads nowhere");
        }
    });
    for name in document["components"]["schemas"].as_object().unwrap().keys() {
        assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)), "{name}");
    }
    let tags: BTreeSet<&str> =
        document["tags"].as_array().unwrap().iter().map(|tag| tag["name"].as_str().unwrap()).collect();
    let mut ids = BTreeSet::new();
    for (path, verb, operation) in operations(&document) {
        let id = operation["operationId"].as_str().unwrap();
        assert!(ids.insert(id), "{id} is there twice");
        assert!(tags.contains(operation["tags"][0].as_str().unwrap()));
        assert!(operation["responses"]["200"]["content"].is_object(), "{verb} {path}");
        assert!(operation["responses"]["default"].is_object(), "{verb} {path}");
        assert!(verb != "GET" || operation.get("requestBody").is_none(), "{verb} {path} has a body");
        let parameters = operation["parameters"].as_array().unwrap();
        let named: BTreeSet<(&str, &str)> = parameters
            .iter()
            .map(|one| (one["in"].as_str().unwrap(), one["name"].as_str().unwrap()))
            .collect();
        assert_eq!(named.len(), parameters.len(), "{verb} {path}: a parameter is there twice");
        let holes: BTreeSet<&str> =
            path.split('{').skip(1).map(|rest| rest.split('}').next().unwrap()).collect();
        let in_path: BTreeSet<&str> = named.iter().filter(|one| one.0 == "path").map(|one| one.1).collect();
        assert_eq!(holes, in_path, "{verb} {path}");
        assert!(parameters.iter().all(|one| one["schema"].is_object()));
    }
}

#[test]
fn every_route_is_described_and_every_method_has_one() {
    let rest = rest(&[]);
    let document: Value = serde_json::from_slice(rest.openapi()).unwrap();
    let described: BTreeSet<(String, String)> =
        operations(&document).into_iter().map(|(path, verb, _)| (verb, path)).collect();
    let routes: BTreeSet<(String, String)> =
        rest.paths().map(|(verb, path, _)| (verb.to_owned(), path)).collect();
    assert_eq!(described, routes);
    let methods: BTreeSet<&str> = rest.paths().map(|(_, _, method)| method).collect();
    assert!(methods.contains("torpor.v1.Sandboxes.Create") && methods.contains("torpor.v1.Sandboxes.Exec"));
    // What is a dialogue of bytes needs no path of its own.
    for method in methods.into_iter().filter(|method| *method != "torpor.v1.Sandboxes.Ssh") {
        let ways = rest.paths().filter(|(_, _, of)| *of == method).count();
        assert!(ways >= 2, "{method} has no google.api.http rule");
    }
    // Paths that differ in the names of their holes only are one path, by OpenAPI's rules.
    let blank = |path: &str| {
        path.split('{')
            .map(|part| part.split_once('}').map_or(part, |(_, rest)| rest))
            .collect::<Vec<_>>()
            .join("{}")
    };
    let paths: BTreeSet<&String> = described.iter().map(|(_, path)| path).collect();
    assert_eq!(paths.iter().map(|path| blank(path)).collect::<BTreeSet<_>>().len(), paths.len());
}

#[tokio::test]
async fn comments_and_types_are_in_it() {
    let document = get("/openapi.json").await.json();
    let suspend = &document["paths"]["/v1/sandboxes/{sandbox}:suspend"]["post"];
    assert!(suspend["description"].as_str().unwrap().starts_with("Frees compute"), "{suspend}");
    let sandbox = &document["components"]["schemas"]["Sandbox"]["properties"];
    assert_eq!(sandbox["version"]["format"], "uint64");
    assert_eq!(sandbox["created"]["format"], "date-time");
    assert_eq!(sandbox["labels"]["additionalProperties"]["type"], "string");
    assert_eq!(sandbox["version"]["description"], "Grows with every change of the record.");
    let phases = document["components"]["schemas"]["Phase"]["enum"].as_array().unwrap();
    assert!(phases.contains(&"PHASE_SUSPENDED".into()));
    let delete = &document["paths"]["/v1/sandboxes/{sandbox}"]["delete"]["parameters"];
    assert!(
        delete.as_array().unwrap().iter().any(|one| one["name"] == "target.wait" && one["in"] == "query")
    );
    let exec = &document["paths"]["/v1/sandboxes/{sandbox}:exec"]["post"]["requestBody"]["content"];
    assert_eq!(exec["application/json"]["schema"]["$ref"], "#/components/schemas/ExecStart");
}
