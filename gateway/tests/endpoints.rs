//! What sandboxes say that they serve, as it is seen from inside of them: over the driver that only pretends, whose agent
//! really connects.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::{Duration, Instant};

use common::{World, create, target};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};
use tonic::{Code, transport::Channel};
use torpor_proto::v1::{self, endpoint_status::Result as Found, sandboxes_client::SandboxesClient};
use torpor_sandbox::sim::Script;

fn endpoint(name: &str, port: u16, http_path: &str) -> v1::Endpoint {
    v1::Endpoint { name: name.into(), port: port.into(), http_path: http_path.into() }
}

fn declaring(name: &str, endpoints: Vec<v1::Endpoint>) -> v1::CreateSandboxRequest {
    v1::CreateSandboxRequest {
        spec: Some(v1::SandboxSpec { endpoints, ..Default::default() }),
        ..create(name)
    }
}

/// A server that answers every connection with these bytes; none: it says nothing and keeps the connection.
async fn server(answer: Option<&'static str>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let mut kept = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            match answer {
                None => kept.push(stream),
                Some(answer) => {
                    tokio::spawn(async move {
                        let mut request = [0; 1000];
                        let length = stream.read(&mut request).await.unwrap_or(0);
                        let asked = String::from_utf8_lossy(&request[..length]).into_owned();
                        let wrong = !asked.is_empty() && !asked.starts_with("GET /health HTTP/1.1\r\n");
                        let answer = if wrong { "HTTP/1.1 400 Bad\r\n\r\n" } else { answer };
                        let _ = stream.write_all(answer.as_bytes()).await;
                    });
                }
            }
        }
    });
    port
}

async fn statuses(client: &mut SandboxesClient<Channel>, name: &str) -> Vec<v1::EndpointStatus> {
    let sandbox = client.get(v1::GetSandboxRequest { sandbox: name.into() }).await.unwrap().into_inner();
    sandbox.status.unwrap().endpoints
}

async fn until(
    client: &mut SandboxesClient<Channel>,
    name: &str,
    what: impl Fn(&[v1::EndpointStatus]) -> bool,
) -> Vec<v1::EndpointStatus> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let seen = statuses(client, name).await;
        if what(&seen) {
            return seen;
        }
        assert!(Instant::now() < end, "{seen:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_endpoint_is_seen_as_what_it_is() {
    let world = World::with_agent(Script::default()).await;
    let mut client = world.sandboxes().await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let endpoints = vec![
        endpoint("tcp", server(None).await, ""),
        endpoint("http", server(Some("HTTP/1.1 204 No Content\r\n\r\n")).await, "/health"),
        endpoint("broken", server(Some("HTTP/1.1 503 Busy\r\n\r\n")).await, "/health"),
        endpoint("other", server(Some("SSH-2.0-other\r\n")).await, "/health"),
        endpoint("short", server(Some("")).await, "/health"),
        endpoint("silent", server(None).await, "/health"),
        endpoint("closed", closed, ""),
    ];
    let made = client.create(declaring("web", endpoints.clone())).await.unwrap().into_inner();
    assert_eq!(made.spec.unwrap().endpoints, endpoints);
    let seen = until(&mut client, "web", |all| all.iter().all(|one| one.observed.is_some())).await;
    let found: Vec<_> = seen.iter().map(|one| (one.name.as_str(), one.result(), one.http_status)).collect();
    assert_eq!(
        found,
        [
            ("tcp", Found::Ok, 0),
            ("http", Found::Ok, 204),
            ("broken", Found::HttpError, 503),
            ("other", Found::BadHttp, 0),
            ("short", Found::Reset, 0),
            ("silent", Found::Timeout, 0),
            ("closed", Found::Refused, 0),
        ]
    );
    assert!(seen.iter().all(|one| one.since.is_some() && one.port > 0));

    // A server that comes later is seen, and those who watch hear of it.
    let request = v1::WatchSandboxesRequest { sandbox: "web".into(), ..Default::default() };
    let mut events = client.watch(request).await.unwrap().into_inner();
    let _late = TcpListener::bind(("127.0.0.1", closed)).await.unwrap();
    let heard = async {
        while let Some(event) = events.message().await.unwrap() {
            let seen = event.sandbox.and_then(|sandbox| sandbox.status).unwrap_or_default().endpoints;
            if seen.last().is_some_and(|last| last.result() == Found::Ok) {
                return;
            }
        }
        panic!("the watch ended");
    };
    tokio::time::timeout(Duration::from_secs(60), heard).await.expect("nobody heard of it");

    // Asleep, nobody looks; what was seen last stays, with its time.
    client.suspend(v1::SuspendRequest { target: target("web"), keep: 0 }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let asleep = statuses(&mut client, "web").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(statuses(&mut client, "web").await, asleep);
    client.resume(v1::ResumeRequest { target: target("web"), ..Default::default() }).await.unwrap();
    let last = asleep[0].observed;
    until(&mut client, "web", |all| all[0].observed != last).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_cannot_be_is_refused_and_one_without_an_agent_is_unknown() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let long = format!("/{}", "x".repeat(1024));
    let bad = [
        vec![endpoint("", 80, "")],
        vec![endpoint("a b", 80, "")],
        vec![endpoint("web", 0, "")],
        vec![v1::Endpoint { port: 65536, ..endpoint("web", 1, "") }],
        vec![endpoint("web", 80, "health")],
        vec![endpoint("web", 80, "/a b")],
        vec![endpoint("web", 80, "/\r\nHost: x")],
        vec![endpoint("web", 80, &long)],
        vec![endpoint("web", 80, ""), endpoint("web", 81, "")],
        (1..=17).map(|port| endpoint(&format!("e{port}"), port, "")).collect(),
    ];
    for endpoints in bad {
        let error = client.create(declaring("web", endpoints.clone())).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{endpoints:?}");
        assert!(error.message().starts_with("endpoints:"), "{error:?}");
    }
    // The driver that only pretends has no agent.
    client.create(declaring("web", vec![endpoint("web", 80, "")])).await.unwrap();
    let seen = until(&mut client, "web", |all| all[0].observed.is_some()).await;
    assert_eq!(seen[0].result(), Found::Unknown);
    assert!(!seen[0].message.is_empty());
}
