//! REST by the real curl over the gateway's socket, on sandboxes that only pretend.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{process::Stdio, time::Duration};

use common::World;
use serde_json::{Value, json};
use tokio::{io::AsyncBufReadExt as _, process::Command, time::timeout};
use torpor_sandbox::sim::Script;

const LIMIT: Duration = Duration::from_secs(60);

/// False, and said, when there is no curl and the run can do without.
async fn have_curl(test: &str) -> bool {
    let found = Command::new("curl").arg("--version").stdout(Stdio::null()).status().await.is_ok();
    if !found {
        let required = std::env::var("REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|word| word == "tools"), "{test}: there is no curl");
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIP {test}: there is no curl\n"),
        );
    }
    found
}

fn curl(world: &World, path: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("curl");
    command.args(["-sS", "--no-buffer", "--unix-socket"]).arg(world.socket());
    command.args(arguments).arg(format!("http://gateway{path}")).kill_on_drop(true);
    command
}

/// The HTTP status and the body.
async fn text(world: &World, path: &str, arguments: &[&str]) -> (u16, String) {
    let arguments = [arguments, &["-w", "%{http_code}"]].concat();
    let done = timeout(LIMIT, curl(world, path, &arguments).output()).await.expect("curl ends").unwrap();
    let all = String::from_utf8(done.stdout).unwrap();
    assert!(done.status.success(), "curl {path}: {} {all}", String::from_utf8_lossy(&done.stderr));
    let (body, code) = all.split_at(all.len() - 3);
    (code.parse().unwrap(), body.to_owned())
}

async fn ask(world: &World, path: &str, arguments: &[&str]) -> (u16, Value) {
    let (code, body) = text(world, path, arguments).await;
    (code, serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}")))
}

async fn lines(world: &World, path: &str, arguments: &[&str]) -> Vec<Value> {
    let (code, body) = text(world, path, arguments).await;
    assert_eq!(code, 200, "{body}");
    body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn reason(error: &Value) -> &str {
    error["details"][0]["reason"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn curl_takes_a_sandbox_through_its_life() {
    if !have_curl("curl_takes_a_sandbox_through_its_life").await {
        return;
    }
    let world = World::with_agent(Script::default()).await;
    let wish =
        r#"{"name": "web", "wait": true, "labels": {"tier": "front"}, "spec": {"resources": {"cpus": 2}}}"#;
    let (code, made) = ask(&world, "/v1/sandboxes", &["-d", wish]).await;
    assert_eq!((code, &made["status"]["phase"]), (200, &json!("PHASE_READY")), "{made}");
    let (code, same) = ask(&world, "/v1/sandboxes/web", &[]).await;
    assert_eq!((code, &same["id"], &same["spec"]["resources"]["cpus"]), (200, &made["id"], &json!(2)));
    let by_id = format!("/v1/sandboxes/{}", made["id"].as_str().unwrap());
    assert_eq!(ask(&world, &by_id, &[]).await.1["name"], "web");

    let (code, again) = ask(&world, "/v1/sandboxes", &["--json", r#"{"name": "web"}"#]).await;
    assert_eq!((code, &again["code"]), (409, &json!(6)), "{again}");
    ask(&world, "/v1/sandboxes", &["-d", r#"{"name": "other", "wait": true}"#]).await;
    let (_, listed) = ask(&world, "/v1/sandboxes?labelSelector=tier%3Dfront", &[]).await;
    let names = |listed: &Value| -> Vec<String> {
        let all = listed["sandboxes"].as_array().unwrap();
        all.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&listed), ["web"]);
    let (_, page) = ask(&world, "/v1/sandboxes?pageSize=1", &[]).await;
    let next = page["nextPageToken"].as_str().unwrap();
    let (_, rest) = ask(&world, &format!("/v1/sandboxes?pageSize=1&pageToken={next}"), &[]).await;
    assert_eq!([names(&page), names(&rest)].concat(), ["web", "other"]);

    let run = r#"{"argv": ["echo", "hello"]}"#;
    let outputs = lines(&world, "/v1/sandboxes/web:exec", &["-d", run]).await;
    assert_eq!(outputs[1], json!({"stdout": "ZWNobyBoZWxsbw=="}));
    assert_eq!(outputs[2]["exit"]["code"], 0);
    let run = "{\"argv\": [\"cat\"], \"stdin\": true}\n{\"stdin\": \"aGk=\"}\n";
    let outputs = lines(&world, "/v1/sandboxes/web:exec", &["--data-binary", run]).await;
    assert_eq!(outputs[1], json!({"stdout": "aGk="}));

    let wait = r#"{"target": {"wait": true}}"#;
    let (code, asleep) = ask(&world, "/v1/sandboxes/web:suspend", &["-d", wait]).await;
    assert_eq!((code, &asleep["status"]["phase"]), (200, &json!("PHASE_SUSPENDED")), "{asleep}");
    let (code, error) = ask(&world, "/v1/sandboxes/web:exec", &["-d", r#"{"argv": ["true"]}"#]).await;
    assert_eq!((code, reason(&error)), (400, "SUSPENDED"), "{error}");
    assert_eq!(error["details"][0]["metadata"]["next"], "torpor resume web");
    let (code, awake) = ask(&world, "/v1/sandboxes/web:resume?target.wait=true", &["-X", "POST"]).await;
    assert_eq!((code, &awake["status"]["phase"]), (200, &json!("PHASE_READY")));
    let (_, history) = ask(&world, "/v1/sandboxes/web/history?pageSize=2", &[]).await;
    assert_eq!(history["transitions"][0]["to"], "PHASE_READY");

    let (code, gone) = ask(&world, "/v1/sandboxes/web?target.wait=true", &["-X", "DELETE"]).await;
    assert_eq!((code, &gone["outcome"], &gone["id"]), (200, &json!("OUTCOME_COMPLETED"), &made["id"]));
    let (code, error) = ask(&world, "/v1/sandboxes/web", &[]).await;
    assert_eq!((code, &error["code"]), (404, &json!(5)));
    let (code, absent) = ask(&world, "/v1/sandboxes/web?allowMissing=true", &["-X", "DELETE"]).await;
    assert_eq!((code, &absent["outcome"]), (200, &json!("OUTCOME_ALREADY_ABSENT")));
}

#[tokio::test]
async fn curl_asks_for_heads_alone_over_both_versions_of_http() {
    if !have_curl("curl_asks_for_heads_alone_over_both_versions_of_http").await {
        return;
    }
    let world = World::new(Script::default()).await;
    for version in ["--http1.1", "--http2-prior-knowledge"] {
        for (path, code) in [("/v1/health", 200), ("/v1/sandboxes/none", 404), ("/openapi.json", 200)] {
            let (found, head) = text(&world, path, &["-I", version]).await;
            assert_eq!(found, code, "{version} {path}: {head}");
            assert!(head.contains("application/json"), "{version} {path}: {head}");
        }
    }
}

#[tokio::test]
async fn curl_sees_changes_as_they_happen() {
    if !have_curl("curl_sees_changes_as_they_happen").await {
        return;
    }
    let world = World::new(Script::default()).await;
    ask(&world, "/v1/sandboxes", &["-d", r#"{"name": "web", "wait": true}"#]).await;
    let watching = |arguments: &[&str]| {
        let mut child =
            curl(&world, "/v1/sandboxes:watch", arguments).stdout(Stdio::piped()).spawn().unwrap();
        let lines = tokio::io::BufReader::new(child.stdout.take().unwrap()).lines();
        (child, lines)
    };
    let (_child, mut seen) = watching(&[]);
    let mut kinds = Vec::new();
    let mut next = async || -> Value {
        let line = timeout(LIMIT, seen.next_line()).await.expect("a line comes").unwrap().unwrap();
        serde_json::from_str(&line).unwrap()
    };
    while kinds.last().is_none_or(|kind| kind != "KIND_SYNCED") {
        kinds.push(next().await["kind"].as_str().unwrap().to_owned());
    }
    assert_eq!(kinds, ["KIND_SNAPSHOT", "KIND_SYNCED"]);
    ask(&world, "/v1/sandboxes/web:suspend", &["-d", r#"{"target": {"wait": true}}"#]).await;
    let cursor = loop {
        let event = next().await;
        assert_eq!(event["kind"], "KIND_CHANGED");
        if event["sandbox"]["status"]["phase"] == "PHASE_SUSPENDED" {
            break event["cursor"].as_str().unwrap().to_owned();
        }
    };
    ask(&world, "/v1/sandboxes/web?target.wait=true", &["-X", "DELETE"]).await;
    // A browser's EventSource that comes again.
    let last = format!("last-event-id: {cursor}");
    let (_child, mut seen) = watching(&["-H", "accept: text/event-stream", "-H", &last]);
    let mut text = String::new();
    while !text.contains("KIND_DELETED") {
        let line = timeout(LIMIT, seen.next_line()).await.expect("a line comes").unwrap().unwrap();
        let fits = ["data: ", "id: ", "event: "].iter().any(|begin| line.starts_with(begin));
        assert!(fits || line.is_empty(), "{line}");
        text.push_str(&line);
    }
    assert!(!text.contains("KIND_SNAPSHOT"), "{text}");
}

#[tokio::test]
async fn curl_is_told_what_is_wrong() {
    if !have_curl("curl_is_told_what_is_wrong").await {
        return;
    }
    let world = World::new(Script::default()).await;
    ask(&world, "/v1/sandboxes", &["-d", r#"{"name": "web", "wait": true}"#]).await;
    let wrong: &[(&str, &[&str], u16, &str)] = &[
        ("/v1/sandboxes/none", &[], 404, "none"),
        ("/v1/sandboxes", &["-d", r#"{"name": "Web!"}"#], 400, "name"),
        ("/v1/sandboxes", &["-d", r#"{"spec": {"resources": {"cpus": 0}}}"#], 400, "cpus"),
        ("/v1/sandboxes", &["-d", r#"{"spec": {"cpu": 1}}"#], 400, "cpu"),
        (
            "/v1/sandboxes",
            &["-d", r#"{"spec": {"driverConfig": {"hostNetwork": true}}}"#],
            400,
            "driver_config",
        ),
        ("/v1/sandboxes", &["-d", r#"{"spec": {"driverConfig": ["hostNetwork"]}}"#], 400, "driverConfig"),
        ("/v1/sandboxes", &["-d", "{nonsense"], 400, "JSON"),
        ("/v1/sandboxes?pageSize=100000", &[], 400, "page_size"),
        ("/v1/sandboxes?pageToken=%00", &[], 400, "token"),
        ("/v1/sandboxes/web:suspend", &["-d", r#"{"keep": "KEEP_EVERYTHING"}"#], 400, "keep"),
        ("/v1/sandboxes/web:suspend", &["-d", r#"{"target": {"expectedVersion": 1}}"#], 409, "version"),
        ("/v1/sandboxes/web:watch?cursor=x", &[], 400, "x"),
        ("/v1/sandboxes/web:exec", &["-d", r#"{"argv": []}"#], 400, "argv"),
        ("/v1/sandboxes/web", &["-X", "PUT", "-d", "{}"], 405, "GET"),
        ("/v2/sandboxes", &[], 404, "/openapi.json"),
        ("/v1/sandboxes/..%2f..%2fetc", &[], 404, "etc"),
        ("/v1/sandboxes/web", &["-H", "authorization: Bearer nonsense"], 401, "token"),
        ("/v1/sandboxes/web", &["-H", "origin: https://evil.example.com"], 403, "evil.example.com"),
        ("/v1/sandboxes", &["-F", "name=web"], 415, "application/json"),
        ("/torpor.v1.Sandboxes/Get", &["-H", "content-type: application/grpc", "-d", ""], 505, "HTTP/2"),
    ];
    for (path, arguments, expected, about) in wrong {
        let (code, body) = ask(&world, path, arguments).await;
        assert_eq!(code, *expected, "{path} {arguments:?}: {body}");
        assert!(body["code"].is_i64() && body["details"].is_array(), "{path} {arguments:?}: {body}");
        assert!(!reason(&body).is_empty(), "{path} {arguments:?}: {body}");
        assert!(body.to_string().contains(about), "{path} {arguments:?}: {body}");
    }
}

#[tokio::test]
async fn the_rest_of_the_api_has_paths_too() {
    if !have_curl("the_rest_of_the_api_has_paths_too").await {
        return;
    }
    let world = World::new(Script::default()).await;
    assert_eq!(ask(&world, "/v1/health", &[]).await.1["status"], "STATUS_SERVING");
    assert_eq!(ask(&world, "/v1/info", &[]).await.1["defaultDriver"], "sim");
    assert!(ask(&world, "/v1/whoami", &[]).await.1["admin"].as_bool().unwrap());
    assert!(ask(&world, "/v1/images", &[]).await.1["images"].is_array());
    assert_eq!(ask(&world, "/v1/Gateway/Health", &["-d", "{}"]).await.1["status"], "STATUS_SERVING");
    let (code, document) = ask(&world, "/openapi.json", &[]).await;
    assert_eq!((code, &document["openapi"]), (200, &json!("3.1.0")));

    let (code, made) = ask(&world, "/v1/workspaces", &["-d", r#"{"name": "team"}"#]).await;
    assert_eq!((code, &made["name"]), (200, &json!("team")), "{made}");
    let here = ["-H", "x-torpor-workspace: team"];
    let wish = [&here[..], &["-d", r#"{"name": "web", "wait": true}"#]].concat();
    assert_eq!(ask(&world, "/v1/sandboxes", &wish).await.1["workspace"], "team");
    assert_eq!(ask(&world, "/v1/sandboxes/web", &here).await.0, 200);
    assert_eq!(ask(&world, "/v1/sandboxes/web", &[]).await.0, 404);
    assert_eq!(ask(&world, "/v1/sandboxes/team%2Fweb", &[]).await.0, 200);

    // A token that may only look, by the header that every HTTP client knows.
    let wish = [&here[..], &["-d", r#"{"name": "look", "role": "ROLE_VIEWER"}"#]].concat();
    let (code, token) = ask(&world, "/v1/tokens", &wish).await;
    assert_eq!(code, 200, "{token}");
    let bearer = format!("authorization: Bearer {}", token["secret"].as_str().unwrap());
    assert_eq!(ask(&world, "/v1/sandboxes/web", &["-H", &bearer]).await.0, 200);
    let (code, error) = ask(&world, "/v1/sandboxes/web:suspend", &["-H", &bearer, "-d", "{}"]).await;
    assert_eq!((code, &error["code"]), (403, &json!(7)), "{error}");
}

#[tokio::test]
async fn a_hundred_curls_at_once_are_all_answered() {
    if !have_curl("a_hundred_curls_at_once_are_all_answered").await {
        return;
    }
    let world = World::new(Script::default()).await;
    ask(&world, "/v1/sandboxes", &["-d", r#"{"name": "web", "wait": true}"#]).await;
    let asked = (0..100).map(|_| ask(&world, "/v1/sandboxes/web", &[]));
    for (code, sandbox) in futures::future::join_all(asked).await {
        assert_eq!((code, &sandbox["name"]), (200, &json!("web")));
    }
}
