//! JSON to gRPC and back.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use bytes::Bytes;
use common::{ask, get, request, rest, send};
use http_body::Frame;
use http_body_util::StreamBody;
use serde_json::json;
use tonic::body::Body;

const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test]
async fn a_path_names_a_field_and_who_asks_goes_along() {
    let headers = [("authorization", "Bearer t"), ("x-torpor-workspace", "team"), ("cookie", "no")];
    let answer = ask(&rest(&[]), request("GET /v1/sandboxes/my%2Fweb", &headers, "")).await;
    assert_eq!((answer.code, answer.header("content-type")), (200, "application/json"));
    let sandbox = answer.json();
    assert_eq!(sandbox["name"], "my/web");
    let expected =
        json!({"authorization": "Bearer t", "x-torpor-workspace": "team", "cookie": "", "peer": "somebody"});
    assert_eq!(sandbox["labels"], expected);
    // 64 bits are text, enums are names, and what has no presence is there.
    assert_eq!(sandbox["version"], u64::MAX.to_string());
    assert_eq!(sandbox["status"]["phase"], "PHASE_READY");
    assert_eq!(sandbox["status"]["restartCount"], 0);
}

#[tokio::test]
async fn an_error_is_a_status_with_its_details() {
    let answer = get("/v1/sandboxes/absent").await;
    assert_eq!((answer.code, answer.header("content-type")), (404, "application/json"));
    let expected = json!({"code": 5, "message": "no sandbox 'absent'", "details": [{
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "NOT_FOUND", "domain": "torpor", "metadata": {"next": "torpor list"},
    }]});
    assert_eq!(answer.json(), expected);
}

#[tokio::test]
async fn a_query_holds_what_the_path_does_not() {
    let answer = get("/v1/sandboxes?pageSize=7&label_selector=a%3Db+c").await;
    assert_eq!(answer.json()["nextPageToken"], "7 a=b c");
    let answer = send("DELETE /v1/sandboxes/web?target.wait=true&allowMissing=true", "").await;
    assert_eq!(answer.json()["id"], "web true true");
    for (query, about) in [
        ("pageSize=many", "pageSize: "),
        ("pageSiz=1", "pageSiz"),
        ("pageSize=1&pageSize=2", "twice"),
        ("pageSize=99999999999", "pageSize: "),
        ("a.b=1", "a.b"),
        ("pageSize.x=1", "pageSize"),
        ("labelSelector=%ff", "UTF-8"),
    ] {
        let answer = get(&format!("/v1/sandboxes?{query}")).await;
        let (reason, message) = answer.error();
        assert_eq!((answer.code, reason.as_str()), (400, "INVALID_ARGUMENT"), "{query}: {message}");
        assert!(message.contains(about), "{query}: {message}");
    }
}

#[tokio::test]
async fn a_body_holds_all_the_rest() {
    let body = r#"{"keep": "KEEP_MEMORY", "target": {"wait": true}}"#;
    let answer = send("POST /v1/sandboxes/web:suspend", body).await;
    assert_eq!(answer.json()["name"], "web true Memory");
    let answer = send("POST /v1/sandboxes/web:suspend?keep=2&target.wait=1", "").await;
    assert_eq!(answer.json()["name"], "web true Memory");
    let body = r#"{"name": "web", "spec": {"stop_grace": "1.5s", "resources": {"memoryBytes": 1024, "diskBytes": "9"}}}"#;
    let spec = send("POST /v1/sandboxes", body).await.json()["spec"].clone();
    assert_eq!(spec["stopGrace"], "1.500s");
    assert_eq!(spec["resources"], json!({"memoryBytes": "1024", "diskBytes": "9"}));
    for (line, body, about) in [
        ("POST /v1/sandboxes/web:suspend", r#"{"target": {"sandbox": "other"}}"#, "target.sandbox"),
        ("POST /v1/sandboxes/web:suspend", r#"{"target": 5}"#, "target: "),
        ("POST /v1/sandboxes", r#"{"nam": "web"}"#, "nam"),
        ("POST /v1/sandboxes", r#"{"name": 5}"#, "name: "),
        ("POST /v1/sandboxes", r#"{"spec": {"stopGrace": "soon"}}"#, "spec.stopGrace: "),
        ("POST /v1/sandboxes", r#"{"spec": {"restartPolicy": "SOMETIMES"}}"#, "spec.restartPolicy: "),
        ("POST /v1/sandboxes", r#"{"spec": {"resources": {"cpus": -1}}}"#, "spec.resources.cpus: "),
        ("POST /v1/sandboxes", "[]", "object"),
        ("POST /v1/sandboxes", "{", "JSON"),
        ("POST /v1/sandboxes", "{} {}", "JSON"),
        ("GET /v1/sandboxes/web", r#"{"sandbox": "web"}"#, "no body"),
    ] {
        let answer = send(line, body).await;
        let (reason, message) = answer.error();
        assert_eq!((answer.code, reason.as_str()), (400, "INVALID_ARGUMENT"), "{line} {body}: {message}");
        assert!(message.contains(about), "{line} {body}: {message}");
    }
}

#[tokio::test]
async fn every_method_has_a_uniform_path_as_well() {
    let answer = send("POST /v1/Sandboxes/Get", r#"{"sandbox": "web"}"#).await;
    assert_eq!(answer.json()["name"], "web");
    let answer = send("DELETE /v1/images/docker.io/library/alpine:3", "").await;
    assert_eq!(answer.json(), json!({"removed": true, "freedBytes": "26"}));
}

#[tokio::test]
async fn a_stream_is_one_object_a_line_and_its_failure_is_the_last() {
    let answer = get("/v1/sandboxes/web:watch?cursor=9").await;
    assert_eq!((answer.code, answer.header("content-type")), (200, "application/x-ndjson"));
    assert_eq!(answer.lines().len(), 1);
    assert_eq!(answer.lines()[0]["cursor"], "9+1");
    let lines = get("/v1/sandboxes/gone:watch").await.lines();
    assert_eq!(lines[1]["error"]["code"], 5);
    assert_eq!(lines[1]["error"]["details"][0]["reason"], "NOT_FOUND");
    assert_eq!(lines.len(), 2);
}

#[tokio::test]
async fn browsers_get_server_sent_events_that_go_on_where_they_broke() {
    let headers = [("accept", "text/event-stream"), ("last-event-id", "41")];
    let answer = ask(&rest(&[]), request("GET /v1/sandboxes/web:watch", &headers, "")).await;
    assert_eq!(answer.header("content-type"), "text/event-stream");
    let text = answer.text();
    assert!(text.starts_with("id: 41+1\ndata: {"), "{text}");
    assert!(text.ends_with("\n\nevent: end\ndata: {}\n\n"), "{text}");
    let answer = ask(&rest(&[]), request("GET /v1/sandboxes/gone:watch", &headers, "")).await;
    assert!(answer.text().contains("\nevent: error\ndata: {\"code\":5,"), "{}", answer.text());
}

#[tokio::test]
async fn inputs_follow_each_other_in_a_body() {
    let answer = send("POST /v1/sandboxes/web:exec", r#"{"argv": ["cat", "-"]}"#).await;
    let expected =
        [json!({"stdout": "d2ViOiBjYXQgLQ=="}), json!({"exit": {"code": 7, "signal": 0, "timedOut": false}})];
    assert_eq!(answer.lines(), expected);
    let body = "{\"argv\": [\"cat\"], \"stdin\": true}\n{\"stdin\": \"aGk=\"}\n{\"signal\": 2}";
    let lines = send("POST /v1/sandboxes/web:exec", body).await.lines();
    assert_eq!(lines[1], json!({"stdout": "aGk="}));
    assert_eq!(lines.len(), 4);
}

#[tokio::test]
async fn a_bad_first_input_is_an_answer_and_a_later_one_the_last_line() {
    for body in [r#"{"argv": 5}"#, "5", r#"{"argv": ["#] {
        let answer = send("POST /v1/sandboxes/web:exec", body).await;
        assert_eq!(answer.code, 400, "{body}: {}", answer.text());
    }
    for later in ["{\"stdin\": 5}", "nonsense", "{\"stdin\": \""] {
        let lines =
            send("POST /v1/sandboxes/web:exec", &format!("{{\"argv\": [\"cat\"]}}\n{later}")).await.lines();
        let last = lines.last().unwrap();
        assert_eq!(last["error"]["details"][0]["reason"], "INVALID_ARGUMENT", "{later}: {lines:?}");
        // Half of an input is no whole one: the command must not see an end.
        assert!(lines.iter().all(|line| line["exit"].is_null()), "{later}: {lines:?}");
    }
}

#[tokio::test]
async fn outputs_come_while_inputs_are_still_sent() {
    use futures::StreamExt as _;
    use http_body_util::BodyExt as _;
    use tower::{Layer as _, ServiceExt as _};
    let (tx, rx) = tokio::sync::mpsc::unbounded_channel::<&str>();
    let pieces = futures::stream::unfold(rx, |mut rx| async move { Some((rx.recv().await?, rx)) });
    let frames = pieces.map(|text| Ok::<_, std::convert::Infallible>(Frame::data(Bytes::from(text))));
    let request =
        http::Request::post("/v1/sandboxes/web:exec").body(Body::new(StreamBody::new(frames))).unwrap();
    tx.send("{\"argv\": [\"ca").unwrap();
    tx.send("t\"]}").unwrap();
    let service = rest(&[]).layer().layer(common::service());
    let mut body = service.oneshot(request).await.unwrap().into_body();
    let line = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(line, "{\"stdout\":\"d2ViOiBjYXQ=\"}\n");
    tx.send("{\"stdin\": \"aGk=\"}").unwrap();
    let line = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(line, "{\"stdout\":\"aGk=\"}\n");
    drop(tx);
    let rest = body.collect().await.unwrap().to_bytes();
    assert!(rest.starts_with(b"{\"exit\":"), "{rest:?}");
}

#[tokio::test]
async fn what_leads_nowhere_says_what_would() {
    let answer = get("/v1/sandbox").await;
    assert_eq!((answer.code, answer.error().0.as_str()), (404, "NO_SUCH_PATH"));
    assert!(answer.text().contains("/openapi.json"));
    for path in
        ["/", "/v1/sandboxes/", "/v1/sandboxes/a/b/c", "/v1/sandboxes/%ff", "//", "/v1/sandboxes/web:fly"]
    {
        let code = get(path).await.code;
        // A verb that isn't one is part of a name.
        assert_eq!(code, if path.ends_with("fly") { 200 } else { 404 }, "{path}");
    }
    let answer = send("PATCH /v1/sandboxes", "{}").await;
    assert_eq!((answer.code, answer.header("allow")), (405, "GET, POST, HEAD"));
}

#[tokio::test]
async fn bodies_of_other_kinds_and_sizes_are_refused() {
    for kind in ["text/plain", "multipart/form-data; boundary=x", "application/xml", "application/jsonp"] {
        let answer = ask(&rest(&[]), request("POST /v1/sandboxes", &[("content-type", kind)], "{}")).await;
        assert_eq!((answer.code, answer.error().0.as_str()), (415, "UNSUPPORTED_MEDIA_TYPE"), "{kind}");
    }
    // What curl says of -d.
    let curl = [("content-type", "application/x-www-form-urlencoded")];
    let answer = ask(&rest(&[]), request("POST /v1/sandboxes", &curl, r#"{"name":"a"}"#)).await;
    assert_eq!(answer.json()["name"], "a");
    let zipped = [JSON, ("content-encoding", "gzip")];
    assert_eq!(ask(&rest(&[]), request("POST /v1/sandboxes", &zipped, "{}")).await.code, 415);
    let large = format!(r#"{{"name": "{}"}}"#, "x".repeat(torpor_rest::LARGEST_OBJECT));
    for path in ["/v1/sandboxes", "/v1/sandboxes/web:exec"] {
        let answer = send(&format!("POST {path}"), &large).await;
        assert_eq!((answer.code, answer.error().0.as_str()), (413, "BODY_TOO_LARGE"), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_ends_at_its_time_limit() {
    let limited = [JSON, ("x-server-timeout", "1.5")];
    let answer = ask(&rest(&[]), request("POST /v1/sandboxes/web:resume", &limited, "{}")).await;
    assert_eq!((answer.code, answer.error().0.as_str()), (504, "DEADLINE_EXCEEDED"));
    for wrong in ["soon", "-1", "0", "1e99", "NaN", "inf"] {
        let headers = [JSON, ("x-server-timeout", wrong)];
        let answer = ask(&rest(&[]), request("POST /v1/sandboxes/web:resume", &headers, "{}")).await;
        assert_eq!(answer.code, 400, "{wrong}");
    }
}

#[tokio::test]
async fn a_json_nest_is_refused_and_not_followed_down() {
    let deep = "[".repeat(100_000);
    let answer = send("POST /v1/sandboxes", &format!("{{\"name\": {deep}")).await;
    assert_eq!(answer.code, 400, "{}", answer.text());
}
