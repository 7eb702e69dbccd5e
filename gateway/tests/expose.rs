//! Exposed ports and forwards: real connections through the gateway, over sandboxes that only pretend.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{io::ErrorKind, net::SocketAddr, time::Duration};

use common::{World, create, error_info, phase, target};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use torpor_proto::v1::{self, Phase, forward_input, forward_output::Kind};
use torpor_sandbox::sim::{Script, Verb};

const LIMIT: Duration = Duration::from_secs(30);

/// A server "in the sandbox": gives back what it gets, and a last word when the client has ended.
async fn server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut piece = [0; 4096];
                while let Ok(length) = stream.read(&mut piece).await {
                    if length == 0 {
                        let _ = stream.write_all(b"bye").await;
                        return;
                    }
                    let _ = stream.write_all(&piece[..length]).await;
                }
            });
        }
    });
    port
}

async fn expose(world: &World, name: &str, port: u16, host: &str, wake: bool) -> v1::ExposedPort {
    try_expose(world, name, port, host, wake).await.unwrap()
}

async fn try_expose(
    world: &World,
    name: &str,
    port: u16,
    host: &str,
    wake: bool,
) -> Result<v1::ExposedPort, tonic::Status> {
    let request = v1::ExposeRequest { sandbox: name.into(), port: port.into(), host: host.into(), wake };
    world.sandboxes().await.expose(request).await.map(tonic::Response::into_inner)
}

async fn exposed(world: &World, name: &str) -> Vec<v1::ExposedPort> {
    let request = v1::ListExposedRequest { sandbox: name.into() };
    world.sandboxes().await.list_exposed(request).await.unwrap().into_inner().ports
}

async fn connect(host: &str) -> TcpStream {
    timeout(LIMIT, TcpStream::connect(host.parse::<SocketAddr>().unwrap())).await.unwrap().unwrap()
}

/// What is answered to a request, to the end.
async fn answer(host: &str) -> String {
    let mut stream = connect(host).await;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut text = String::new();
    timeout(LIMIT, stream.read_to_string(&mut text)).await.unwrap().unwrap();
    text
}

/// Sends, ends its half, and reads all that comes back.
async fn round(host: &str, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect(host).await;
    let (mut read, mut write) = stream.split();
    let sending = async {
        write.write_all(bytes).await.unwrap();
        write.shutdown().await.unwrap();
    };
    let mut back = Vec::new();
    let receiving = async { timeout(LIMIT, read.read_to_end(&mut back)).await.unwrap().unwrap() };
    tokio::join!(sending, receiving);
    back
}

async fn suspend(world: &World, name: &str) {
    let request = v1::SuspendRequest { target: target(name), keep: 0 };
    world.sandboxes().await.suspend(request).await.unwrap();
}

async fn resume(world: &World, name: &str) {
    let request = v1::ResumeRequest { target: target(name), ..Default::default() };
    world.sandboxes().await.resume(request).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exposed_port_carries_bytes_both_ways_and_answers_503_with_the_phase_while_its_sandbox_sleeps() {
    let mut world = World::with_agent(Script::default()).await;
    world.sandboxes().await.create(create("web")).await.unwrap();
    let port = server().await;
    let made = expose(&world, "web", port, "", false).await;
    assert!(made.host.starts_with("127.0.0.1:") && made.problem.is_empty(), "{made:?}");
    let sent: Vec<u8> = (0..2_000_000_u32).map(|n| (n % 251) as u8).collect();
    let back = round(&made.host, &sent).await;
    assert!(back == [&sent[..], b"bye"].concat(), "{} of {}", back.len(), sent.len());

    // A connection ends with the run, as a broken one.
    let mut open = connect(&made.host).await;
    open.write_all(b"x").await.unwrap();
    assert_eq!(open.read(&mut [0; 4]).await.unwrap(), 1);
    assert_eq!(exposed(&world, "web").await[0].connections, 1);
    suspend(&world, "web").await;
    let end = timeout(LIMIT, open.read(&mut [0; 4])).await.unwrap();
    assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset);

    for restarted in [false, true] {
        if restarted {
            world.restart().await;
        }
        let text = eventually(&made.host).await;
        assert!(text.starts_with("HTTP/1.1 503 "), "{text}");
        assert!(text.contains("\r\nx-torpor-phase: Suspended\r\n"), "{text}");
        assert!(text.ends_with("next: torpor resume web\n"), "{text}");
    }
    assert_eq!(phase(&get(&world, "web").await), Phase::Suspended, "nobody has woken it");
    resume(&world, "web").await;
    assert_eq!(round(&made.host, b"again").await, b"againbye");
}

/// A gateway that has just started may need a moment to listen.
async fn eventually(host: &str) -> String {
    for _ in 0..200 {
        if TcpStream::connect(host).await.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    answer(host).await
}

async fn get(world: &World, name: &str) -> v1::Sandbox {
    world.sandboxes().await.get(v1::GetSandboxRequest { sandbox: name.into() }).await.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread")]
async fn many_who_connect_to_a_port_that_wakes_share_one_resume_and_a_stopped_sandbox_is_not_woken() {
    let world = World::with_agent(common::slow()).await;
    world.sandboxes().await.create(create("web")).await.unwrap();
    let port = server().await;
    let made = expose(&world, "web", port, "", true).await;
    suspend(&world, "web").await;
    let starts = world.sim.calls(Verb::Start);
    let asked = (0..40).map(|n| {
        let host = made.host.clone();
        tokio::spawn(async move { round(&host, format!("{n}").as_bytes()).await })
    });
    for (n, back) in futures::future::join_all(asked.collect::<Vec<_>>()).await.into_iter().enumerate() {
        assert_eq!(String::from_utf8(back.unwrap()).unwrap(), format!("{n}bye"));
    }
    assert_eq!(world.sim.calls(Verb::Start), starts + 1);
    assert_eq!(get(&world, "web").await.status.unwrap().run, 2);
    let history = v1::HistoryRequest { sandbox: "web".into(), ..Default::default() };
    let history = world.sandboxes().await.history(history).await.unwrap().into_inner().transitions;
    assert!(history.iter().any(|t| t.why.contains(&format!("a connection to port {port}"))), "{history:?}");

    world.sandboxes().await.stop(v1::StopRequest { target: target("web") }).await.unwrap();
    let text = answer(&made.host).await;
    assert!(text.contains("x-torpor-phase: Stopped"), "{text}");
    assert_eq!(phase(&get(&world, "web").await), Phase::Stopped);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_where_nothing_listens_is_a_bad_gateway_and_what_is_taken_back_is_closed() {
    let world = World::with_agent(Script::default()).await;
    for name in ["a", "b"] {
        world.sandboxes().await.create(create(name)).await.unwrap();
    }
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let made = expose(&world, "a", closed, "", false).await;
    let text = answer(&made.host).await;
    assert!(text.starts_with("HTTP/1.1 502 ") && text.contains(&closed.to_string()), "{text}");

    // The same address, whatever else is said; another one moves it.
    assert_eq!(expose(&world, "a", closed, "", true).await.host, made.host);
    assert!(exposed(&world, "a").await[0].wake);
    let moved = expose(&world, "a", closed, "127.0.0.2:0", true).await;
    assert!(moved.host.starts_with("127.0.0.2:"), "{moved:?}");
    assert!(TcpStream::connect(&made.host).await.is_err(), "the old address is closed");

    let error = try_expose(&world, "b", 80, &moved.host, false).await.unwrap_err();
    assert_eq!((error.code(), error_info(&error).0.as_str()), (Code::AlreadyExists, "HOST_PORT_TAKEN"));
    for (port, host) in [(80, "localhost:80"), (80, "203.0.113.1:80"), (80, "127.0.0.1"), (0, "")] {
        let error = try_expose(&world, "b", port, host, false).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{host}: {error}");
    }
    assert!(exposed(&world, "b").await.is_empty(), "nothing was written");
    assert_eq!(exposed(&world, "").await.len(), 1);

    let mut client = world.sandboxes().await;
    let request = v1::UnexposeRequest { sandbox: "a".into(), port: closed.into(), allow_missing: false };
    assert!(client.unexpose(request.clone()).await.unwrap().into_inner().removed);
    assert!(TcpStream::connect(&moved.host).await.is_err());
    let error = client.unexpose(request).await.unwrap_err();
    assert_eq!((error.code(), error_info(&error).0.as_str()), (Code::NotFound, "PORT_NOT_EXPOSED"));

    // A sandbox takes its ports with it.
    let last = expose(&world, "b", 80, "", false).await;
    let request = v1::DeleteSandboxRequest { target: target("b"), allow_missing: false };
    client.delete(request).await.unwrap();
    for _ in 0..200 {
        if TcpStream::connect(&last.host).await.is_err() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(TcpStream::connect(&last.host).await.is_err());
    assert!(exposed(&world, "").await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_somebody_else_took_meanwhile_is_told_and_keeps_no_gateway_from_starting() {
    let mut world = World::with_agent(Script::default()).await;
    world.sandboxes().await.create(create("web")).await.unwrap();
    let port = server().await;
    let made = expose(&world, "web", port, "", false).await;
    world.stop().await;
    let taken = TcpListener::bind(&made.host).await.unwrap();
    world.start().await;
    let row = loop {
        let row = exposed(&world, "web").await.remove(0);
        if !row.problem.contains("yet") {
            break row;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert!(row.problem.contains(&made.host), "{row:?}");
    drop(taken);
    // Whoever asks for it again need not wait for the next try.
    assert_eq!(expose(&world, "web", port, "", false).await.problem, "");
    assert_eq!(round(&made.host, b"x").await, b"xbye");
}

struct Forward {
    input: mpsc::Sender<v1::ForwardInput>,
    output: tonic::Streaming<v1::ForwardOutput>,
}

async fn forward(world: &World, name: &str, port: u16) -> Result<Forward, tonic::Status> {
    let (input, inputs) = mpsc::channel(4);
    let start = v1::ForwardStart { sandbox: name.into(), port: port.into() };
    input.send(v1::ForwardInput { kind: Some(forward_input::Kind::Start(start)) }).await.unwrap();
    let output = world.sandboxes().await.forward(ReceiverStream::new(inputs)).await?.into_inner();
    Ok(Forward { input, output })
}

impl Forward {
    async fn next(&mut self) -> Result<Option<Kind>, tonic::Status> {
        let message = timeout(LIMIT, self.output.message()).await.expect("it hangs")?;
        Ok(message.and_then(|message| message.kind))
    }

    async fn send(&self, kind: forward_input::Kind) {
        self.input.send(v1::ForwardInput { kind: Some(kind) }).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forward_is_of_one_run_and_ends_with_it() {
    let world = World::with_agent(Script::default()).await;
    world.sandboxes().await.create(create("web")).await.unwrap();
    let port = server().await;
    let mut first = forward(&world, "web", port).await.unwrap();
    assert_eq!(first.next().await.unwrap(), Some(Kind::Connected(v1::ForwardConnected { run: 1 })));
    first.send(forward_input::Kind::Data("hello".into())).await;
    assert_eq!(first.next().await.unwrap(), Some(Kind::Data("hello".into())));
    first.send(forward_input::Kind::Close(v1::ForwardClose {})).await;
    assert_eq!(first.next().await.unwrap(), Some(Kind::Data("bye".into())));
    assert_eq!(first.next().await.unwrap(), Some(Kind::Close(v1::ForwardClose {})));
    assert_eq!(first.next().await.unwrap(), None);

    let mut second = forward(&world, "web", port).await.unwrap();
    second.next().await.unwrap();
    suspend(&world, "web").await;
    let error = second.next().await.unwrap_err();
    assert_eq!((error.code(), error_info(&error).0.as_str()), (Code::FailedPrecondition, "SUSPENDED"));
    let error = forward(&world, "web", port).await.err().unwrap();
    assert_eq!(error_info(&error), ("SUSPENDED".to_owned(), "torpor resume web".to_owned()));
    resume(&world, "web").await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let error = forward(&world, "web", closed).await.err().unwrap();
    assert_eq!((error.code(), error_info(&error).0.as_str()), (Code::FailedPrecondition, "PORT_CLOSED"));
}
