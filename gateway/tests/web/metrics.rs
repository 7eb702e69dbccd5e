//! Figures and probes: what a scraper and a cluster ask for, over HTTP as they ask.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use torpor_gateway::config::MetricsConfig;
use torpor_proto::v1;
use torpor_sandbox::sim::Script;

use crate::common::{self, World, create, no_wait, target};

/// None: it was not heard.
async fn asked(mut stream: TcpStream, method: &str, path: &str) -> Option<(u16, String, String)> {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: gateway\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    Some((code, head.to_lowercase(), body.to_owned()))
}

async fn ask(address: &str, method: &str, path: &str) -> (u16, String, String) {
    asked(TcpStream::connect(address).await.unwrap(), method, path).await.unwrap()
}

/// A connection from this address of the host's own.
async fn from(own: &str, address: &str) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(format!("{own}:0").parse().unwrap()).unwrap();
    socket.connect(address.parse().unwrap()).await.unwrap()
}

/// The gateway's database as somebody else has it open.
fn database(world: &World) -> rusqlite::Connection {
    rusqlite::Connection::open(world.config.state_dir.join("torpor.db")).unwrap()
}

/// The value of a sample, by its name with its labels.
fn value(text: &str, sample: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    line.map(|value| value.parse().unwrap())
}

async fn world() -> (World, String) {
    world_at("127.0.0.1:0").await
}

async fn world_at(address: &str) -> (World, String) {
    let metrics = MetricsConfig { address: address.to_owned(), public: false };
    let world = World::with(Script::default(), |config| config.metrics = metrics).await;
    let address = world.figures();
    (world, address)
}

#[tokio::test]
async fn phases_verbs_and_calls_are_counted() {
    let (world, address) = world().await;
    let mut client = world.sandboxes().await;
    client.create(create("a")).await.unwrap();
    client.create(create("b")).await.unwrap();
    client.suspend(v1::SuspendRequest { target: target("a"), keep: 0 }).await.unwrap();
    client.delete(v1::DeleteSandboxRequest { target: target("b"), allow_missing: false }).await.unwrap();
    client.get(v1::GetSandboxRequest { sandbox: "nobody".into() }).await.unwrap_err();
    let (code, head, text) = ask(&address, "GET", "/metrics").await;
    assert_eq!(code, 200);
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    let is = |sample: &str, wanted: f64| assert_eq!(value(&text, sample), Some(wanted), "{sample}\n{text}");
    is("torpor_sandboxes{phase=\"Suspended\"}", 1.0);
    is("torpor_sandboxes{phase=\"Ready\"}", 0.0);
    is("torpor_phase_seconds_count{from=\"Suspending\",to=\"Suspended\"}", 1.0);
    is("torpor_phase_seconds_count{from=\"Provisioning\",to=\"Ready\"}", 2.0);
    is("torpor_phase_seconds_count{from=\"Deleting\",to=\"\"}", 1.0);
    is("torpor_driver_call_seconds_count{driver=\"sim\",verb=\"create\"}", 2.0);
    is("torpor_driver_call_seconds_count{driver=\"sim\",verb=\"stop\"}", 1.0);
    is("torpor_requests_total{method=\"torpor.v1.Sandboxes/Create\",code=\"OK\"}", 2.0);
    is("torpor_requests_total{method=\"torpor.v1.Sandboxes/Get\",code=\"NOT_FOUND\"}", 1.0);
    is("torpor_request_seconds_count{method=\"torpor.v1.Sandboxes/Suspend\"}", 1.0);
    is("torpor_reconcile_queue{pool=\"start\"}", 0.0);
    is("torpor_reconcile_hungry", 0.0);
    is("torpor_store_queue", 0.0);
    is(&format!("torpor_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")), 1.0);
    assert!(value(&text, "process_resident_memory_bytes").unwrap() > 1e6);
}

/// As a scraper reads it: each family said once, its samples behind it, nothing else.
#[tokio::test]
async fn every_line_is_of_the_text_format() {
    let (world, address) = world().await;
    world.sandboxes().await.create(create("a")).await.unwrap();
    let (_, _, text) = ask(&address, "GET", "/metrics").await;
    let (mut family, mut seen) = (String::new(), std::collections::BTreeSet::new());
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(seen.insert(name.to_owned()), "{name} twice");
            assert!(!help.is_empty());
            family = name.to_owned();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(name, family);
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
        } else {
            let (sample, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
            let name = sample.split('{').next().unwrap();
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            assert!(name == family || base == Some(family.as_str()), "{line} in {family}");
        }
    }
    let page = include_str!("../../../docs/reference/metrics.md");
    for name in seen {
        assert!(page.contains(&format!("`{name}`")), "{name} is not on the page");
    }
}

#[tokio::test]
async fn agents_are_counted_by_the_way_that_they_are_reached() {
    let mut world = World::with_agent(Script::default()).await;
    world.stop().await;
    world.config.metrics = MetricsConfig { address: "127.0.0.1:0".to_owned(), public: false };
    world.start().await;
    let (_, _, text) = ask(&world.figures(), "GET", "/metrics").await;
    for (link, count) in [("exec", 1.0), ("mtls", 2.0)] {
        let sample = format!("torpor_agent_links{{driver=\"sim\",link=\"{link}\"}}");
        assert_eq!(value(&text, &sample), Some(count), "{text}");
    }
    assert!(include_str!("../../../docs/reference/metrics.md").contains("`torpor_agent_links`"));
}

#[tokio::test]
async fn a_call_that_drivers_fail_or_nobody_waits_for_is_told_apart() {
    let (world, address) = world().await;
    let mut client = world.sandboxes().await;
    let unknown = v1::CreateSandboxRequest {
        spec: Some(v1::SandboxSpec { driver: "none".into(), ..Default::default() }),
        ..create("x")
    };
    client.create(unknown).await.unwrap_err();
    // A stream that its reader leaves.
    let watch = v1::WatchSandboxesRequest::default();
    drop(client.watch(watch).await.unwrap());
    let mut counted = None;
    for _ in 0..200 {
        let (_, _, text) = ask(&address, "GET", "/metrics").await;
        counted =
            value(&text, "torpor_requests_total{method=\"torpor.v1.Sandboxes/Watch\",code=\"CANCELLED\"}");
        let refused =
            "torpor_requests_total{method=\"torpor.v1.Sandboxes/Create\",code=\"INVALID_ARGUMENT\"}";
        assert_eq!(value(&text, refused), Some(1.0), "{text}");
        if counted.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(counted, Some(1.0));
}

#[tokio::test]
async fn probes_are_answered_and_nothing_else_is() {
    // An address of its own, so that nobody else is on the port when it ends.
    let (mut world, address) = world_at("127.0.0.77:0").await;
    for path in ["/healthz", "/readyz"] {
        let (code, _, body) = ask(&address, "GET", path).await;
        assert_eq!((code, body.as_str()), (200, "ok\n"), "{path}");
    }
    assert_eq!(ask(&address, "GET", "/v1/sandboxes").await.0, 404, "the API is not here");
    assert_eq!(ask(&address, "POST", "/metrics").await.0, 405);
    assert_eq!(ask(&address, "HEAD", "/metrics").await.0, 200);
    // Garbage and half a request harm nobody.
    for odd in ["\r\n\r\n", "GET", "\u{1}\u{2}\u{3}\r\n\r\n", "GET /metrics HTTP/9.9\r\n\r\n"] {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        stream.write_all(odd.as_bytes()).await.unwrap();
    }
    assert_eq!(ask(&address, "GET", "/metrics").await.0, 200);
    world.stop().await;
    assert!(TcpStream::connect(&address).await.is_err(), "it ends with the gateway");
    world.start().await;
    assert_eq!(ask(&world.figures(), "GET", "/readyz").await.0, 200);
}

/// Whoever reaches the port may be anybody, and a liveness probe comes to it.
#[tokio::test]
async fn one_address_can_not_keep_others_from_the_probes() {
    let (_world, address) = world().await;
    let mut held = Vec::new();
    for _ in 0..100 {
        held.push(from("127.0.0.2", &address).await);
    }
    let late = from("127.0.0.2", &address).await;
    assert_eq!(asked(late, "GET", "/healthz").await, None, "one too many");
    for path in ["/healthz", "/readyz", "/metrics"] {
        let (code, ..) = asked(from("127.0.0.3", &address).await, "GET", path).await.unwrap();
        assert_eq!(code, 200, "{path}");
    }
    drop(held);
    let mut again = None;
    for _ in 0..200 {
        again = asked(from("127.0.0.2", &address).await, "GET", "/healthz").await;
        if again.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(again.unwrap().0, 200);
}

#[tokio::test]
async fn a_connection_is_one_request_and_one_that_says_nothing_ends() {
    let (_world, address) = world().await;
    let mut stream = TcpStream::connect(&address).await.unwrap();
    let mut silent = TcpStream::connect(&address).await.unwrap();
    stream.write_all("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n".repeat(50).as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    // What it was sent beyond the first may make it a reset.
    let _ = stream.read_to_end(&mut bytes).await;
    let text = String::from_utf8(bytes).unwrap();
    assert_eq!(text.matches("HTTP/1.1 200").count(), 1, "{text}");
    assert!(text.to_lowercase().contains("connection: close"), "{text}");
    silent.write_all(b"GET /healthz HTTP/1.1\r\n").await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(60), silent.read_to_end(&mut Vec::new())).await;
    assert!(ended.is_ok(), "half a request is waited for without end");
}

#[tokio::test]
async fn a_database_that_takes_no_row_is_not_ready_and_alive() {
    let (world, address) = world().await;
    assert_eq!(ask(&address, "GET", "/readyz").await.0, 200);
    let database = database(&world);
    let full = "CREATE TRIGGER no_insert BEFORE INSERT ON meta BEGIN SELECT RAISE(ABORT, 'no'); END;
                CREATE TRIGGER no_update BEFORE UPDATE ON meta BEGIN SELECT RAISE(ABORT, 'no'); END;";
    database.execute_batch(full).unwrap();
    let until = async |wanted: u16| {
        for _ in 0..200 {
            if ask(&address, "GET", "/readyz").await.0 == wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("/readyz never answers {wanted}");
    };
    until(503).await;
    let (code, _, body) = ask(&address, "GET", "/healthz").await;
    assert_eq!((code, body.as_str()), (200, "ok\n"), "another process would not mend it");
    database.execute_batch("DROP TRIGGER no_insert; DROP TRIGGER no_update;").unwrap();
    until(200).await;
}

#[tokio::test]
async fn probes_share_what_they_write() {
    let (world, address) = world().await;
    let database = database(&world);
    let count = "CREATE TABLE pings (n INTEGER);
                 CREATE TRIGGER counts BEFORE INSERT ON meta WHEN NEW.key = 'pinged'
                 BEGIN INSERT INTO pings VALUES (1); END;";
    database.execute_batch(count).unwrap();
    let begun = std::time::Instant::now();
    for _ in 0..20 {
        let probes = (0..4).map(|_| ask(&address, "GET", "/readyz"));
        assert!(futures::future::join_all(probes).await.iter().all(|answer| answer.0 == 200));
    }
    let most = begun.elapsed().as_secs() + 1;
    let written: u64 = database.query_row("SELECT count(*) FROM pings", [], |row| row.get(0)).unwrap();
    assert!((1..=most).contains(&written), "{written} in {most} s");
}

/// The writer waits for somebody who has the database: probes give up, and leave one attempt among them.
#[tokio::test]
async fn a_writer_that_hangs_is_not_alive_until_it_goes_on() {
    let (world, address) = world().await;
    let database = database(&world);
    database.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (health, ready) = tokio::join!(ask(&address, "GET", "/healthz"), ask(&address, "GET", "/readyz"));
    assert_eq!((health.0, ready.0), (503, 503), "{health:?} {ready:?}");
    database.execute_batch("ROLLBACK").unwrap();
    let mut code = 0;
    for _ in 0..200 {
        code = ask(&address, "GET", "/readyz").await.0;
        if code == 200 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(code, 200);
    assert_eq!(ask(&address, "GET", "/healthz").await.0, 200);
}

#[tokio::test]
async fn a_driver_that_takes_no_config_refuses_one_by_name_and_nothing_is_written() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let kata = prost_types::Value { kind: Some(prost_types::value::Kind::StringValue("kata".into())) };
    let driver_config = prost_types::Struct { fields: [("runtimeClassName".to_owned(), kata)].into() };
    let spec = v1::SandboxSpec { driver_config: Some(driver_config), ..Default::default() };
    let refused =
        client.create(v1::CreateSandboxRequest { spec: Some(spec), ..create("a") }).await.unwrap_err();
    common::refused(&refused, tonic::Code::InvalidArgument, "INVALID_ARGUMENT");
    assert!(refused.message().contains("driver_config: the sim driver takes none"), "{refused:?}");
    let missing = client.get(v1::GetSandboxRequest { sandbox: "a".into() }).await.unwrap_err();
    assert_eq!(missing.code(), tonic::Code::NotFound);
    // Nothing said is nothing to refuse.
    let spec = v1::SandboxSpec { driver_config: Some(prost_types::Struct::default()), ..Default::default() };
    client.create(v1::CreateSandboxRequest { spec: Some(spec), ..create("a") }).await.unwrap();
    client.stop(v1::StopRequest { target: no_wait("a") }).await.unwrap();
}
