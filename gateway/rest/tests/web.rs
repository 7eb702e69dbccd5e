//! Browsers: origins, gRPC-Web. And gRPC itself, as it was.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use bytes::Bytes;
use common::{ask, framed, over_http2, request, rest};
use prost::Message as _;
use torpor_proto::v1;

const PAGE: (&str, &str) = ("origin", "https://console.example.com");

#[tokio::test]
async fn no_page_of_another_origin_may_ask_unless_it_is_listed() {
    for line in [
        "GET /v1/sandboxes/web",
        "POST /v1/sandboxes/web:suspend",
        "GET /openapi.json",
        "OPTIONS /v1/sandboxes",
    ] {
        let headers = [PAGE, ("access-control-request-method", "POST")];
        let answer = ask(&rest(&["https://other.example.com"]), request(line, &headers, "")).await;
        assert_eq!((answer.code, answer.error().0.as_str()), (403, "ORIGIN_NOT_ALLOWED"), "{line}");
        assert_eq!(answer.header("access-control-allow-origin"), "");
    }
    let headers = [PAGE, ("host", "console.example.com")];
    assert_eq!(ask(&rest(&[]), request("GET /v1/sandboxes/web", &headers, "")).await.code, 403);
}

#[tokio::test]
async fn a_listed_page_may_ask_and_read() {
    let rest = rest(&["https://Console.example.com/"]);
    let question = [
        PAGE,
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization"),
    ];
    let answer = ask(&rest, request("OPTIONS /v1/sandboxes/web:suspend", &question, "")).await;
    assert_eq!((answer.code, answer.header("access-control-allow-origin")), (204, PAGE.1));
    assert!(answer.header("access-control-allow-headers").contains("authorization"));
    assert!(answer.header("access-control-allow-methods").contains("DELETE"));
    let answer = ask(&rest, request("GET /v1/sandboxes/absent", &[PAGE], "")).await;
    assert_eq!((answer.code, answer.header("access-control-allow-origin")), (404, PAGE.1));
    assert_eq!((answer.header("vary"), answer.header("access-control-allow-credentials")), ("origin", ""));
    assert_eq!(ask(&common::rest(&["*"]), request("GET /v1/sandboxes/web", &[PAGE], "")).await.code, 200);
}

#[tokio::test]
async fn a_head_is_a_get_without_its_body() {
    for path in
        ["/v1/sandboxes/web", "/v1/sandboxes/absent", "/openapi.json", "/nothing", "/v1/sandboxes/web:stop"]
    {
        let get = ask(&rest(&[]), request(&format!("GET {path}"), &[], "")).await;
        let head = ask(&rest(&[]), request(&format!("HEAD {path}"), &[], "")).await;
        assert_eq!(
            (head.code, head.header("content-type")),
            (get.code, get.header("content-type")),
            "{path}"
        );
        assert_eq!(head.header("content-length"), get.body.len().to_string(), "{path}");
        assert!(head.body.is_empty() && !get.body.is_empty(), "{path}");
    }
    let wrong = ask(&rest(&[]), request("PUT /v1/sandboxes/web", &[], "")).await;
    assert!(
        wrong.header("allow").contains("GET") && wrong.header("allow").contains("HEAD"),
        "{}",
        wrong.header("allow")
    );
}

fn web(kind: &str, name: &str) -> http::Request<tonic::body::Body> {
    let asked = v1::GetSandboxRequest { sandbox: name.into() };
    http::Request::post("/torpor.v1.Sandboxes/Get").header("content-type", kind).body(framed(&asked)).unwrap()
}

/// The messages and the trailers of an answer in gRPC-Web: frames of a flag, a length and bytes.
fn frames(mut body: Bytes) -> (Vec<Bytes>, String) {
    let (mut messages, mut trailers) = (Vec::new(), String::new());
    while !body.is_empty() {
        let head = body.split_to(5);
        let piece = body.split_to(u32::from_be_bytes(head[1..].try_into().unwrap()) as usize);
        match head[0] {
            0 => messages.push(piece),
            0x80 => trailers.push_str(std::str::from_utf8(&piece).unwrap()),
            other => panic!("flag {other}"),
        }
    }
    (messages, trailers)
}

#[tokio::test]
async fn grpc_web_reaches_the_same_services() {
    let answer = ask(&rest(&[]), web("application/grpc-web+proto", "web")).await;
    assert_eq!((answer.code, answer.header("content-type")), (200, "application/grpc-web+proto"));
    let (messages, trailers) = frames(answer.body);
    assert_eq!(v1::Sandbox::decode(messages[0].clone()).unwrap().name, "web");
    assert!(trailers.contains("grpc-status:0"), "{trailers}");
    let answer = ask(&rest(&[]), web("application/grpc-web+proto", "absent")).await;
    assert_eq!(answer.header("grpc-status"), "5");
    let answer = ask(&rest(&[]), web("application/grpc-web+json", "web")).await;
    assert_eq!(answer.code, 400);
}

#[tokio::test]
async fn grpc_goes_through_as_it_is_and_not_over_http_1() {
    let answer = ask(&rest(&[]), over_http2(web("application/grpc", "web"))).await;
    assert_eq!((answer.code, answer.header("content-type")), (200, "application/grpc"));
    let answer = ask(&rest(&[]), web("application/grpc", "web")).await;
    assert_eq!((answer.code, answer.error().0.as_str()), (505, "HTTP2_NEEDED"));
}
