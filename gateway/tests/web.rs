//! Other ways in: reflection by a client that knows no .proto file, gRPC-Web by hand over HTTP/1.1, pages of other
//! origins, and exposed ports by host name.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
#[path = "web/metrics.rs"]
mod metrics;
#[path = "web/openshell.rs"]
mod openshell;

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use common::{World, create, target};
use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, UnixStream},
    time::timeout,
};
use tonic::Code;
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};
use torpor_proto::v1;
use torpor_rest::Dynamic;
use torpor_sandbox::sim::Script;

const LIMIT: Duration = Duration::from_secs(30);

async fn reflect(world: &World, asked: MessageRequest) -> MessageResponse {
    let mut client = ServerReflectionClient::new(world.channel().await);
    let request = ServerReflectionRequest { host: String::new(), message_request: Some(asked) };
    let mut answers =
        client.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
    answers.message().await.unwrap().unwrap().message_response.unwrap()
}

/// What grpcurl does: the services, then the files of one symbol with all that they import, then a call.
#[tokio::test]
async fn a_client_that_knows_nothing_learns_all_by_reflection() {
    let world = World::new(Script::default()).await;
    world.sandboxes().await.create(create("web")).await.unwrap();
    let MessageResponse::ListServicesResponse(services) =
        reflect(&world, MessageRequest::ListServices(String::new())).await
    else {
        panic!("no services");
    };
    let names: Vec<String> = services.service.into_iter().map(|service| service.name).collect();
    for expected in ["torpor.v1.Sandboxes", "torpor.v1.Images", "torpor.v1.Gateway", "grpc.health.v1.Health"]
    {
        assert!(names.iter().any(|name| name == expected), "{expected} is not among {names:?}");
    }

    let mut files: BTreeMap<String, prost_types::FileDescriptorProto> = BTreeMap::new();
    let mut wanted = vec![MessageRequest::FileContainingSymbol("torpor.v1.Sandboxes".into())];
    while let Some(asked) = wanted.pop() {
        let MessageResponse::FileDescriptorResponse(found) = reflect(&world, asked).await else {
            panic!("no file");
        };
        for bytes in found.file_descriptor_proto {
            let file = prost_types::FileDescriptorProto::decode(bytes.as_slice()).unwrap();
            let more = file.dependency.iter().filter(|name| !files.contains_key(*name));
            wanted.extend(more.cloned().map(MessageRequest::FileByFilename));
            files.insert(file.name().to_owned(), file);
        }
    }
    let set = prost_types::FileDescriptorSet { file: files.into_values().collect() };
    let pool = DescriptorPool::from_file_descriptor_set(set).unwrap();
    let get = pool.get_service_by_name("torpor.v1.Sandboxes").unwrap();
    let get = get.methods().find(|method| method.name() == "Get").unwrap();
    let ask = async |name: &str| {
        let mut request = DynamicMessage::new(get.input());
        request.set_field_by_name("sandbox", prost_reflect::Value::String(name.into()));
        let mut client = tonic::client::Grpc::new(world.channel().await);
        client.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/torpor.v1.Sandboxes/Get");
        client.unary(tonic::Request::new(request), path, Dynamic(get.output())).await
    };
    let found = ask("web").await.unwrap().into_inner();
    assert_eq!(found.get_field_by_name("name").unwrap().as_str(), Some("web"));
    assert_eq!(ask("none").await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_question_that_has_no_answer_is_not_the_end_of_the_others() {
    let world = World::new(Script::default()).await;
    let asked = |one| ServerReflectionRequest { host: String::new(), message_request: Some(one) };
    let questions = [
        asked(MessageRequest::FileContainingSymbol("nope".into())),
        ServerReflectionRequest::default(),
        asked(MessageRequest::FileByFilename("nope.proto".into())),
        asked(MessageRequest::ListServices(String::new())),
    ];
    // Both versions are the same but for their package.
    for package in ["v1", "v1alpha"] {
        let path = format!("/grpc.reflection.{package}.ServerReflection/ServerReflectionInfo");
        let there = move |mut request: http::Request<tonic::body::Body>| {
            *request.uri_mut() = path.parse().unwrap();
            request
        };
        let channel = tower::ServiceExt::map_request(world.channel().await, there);
        let asked = tokio_stream::iter(questions.clone());
        let answers = ServerReflectionClient::new(channel).server_reflection_info(asked).await;
        let mut answers = answers.unwrap().into_inner();
        for code in [Code::NotFound, Code::InvalidArgument, Code::NotFound] {
            let answer = answers.message().await.unwrap().unwrap().message_response.unwrap();
            let MessageResponse::ErrorResponse(error) = answer else { panic!("{answer:?}") };
            assert_eq!(Code::from(error.error_code), code, "{error:?}");
        }
        let last = answers.message().await.unwrap().unwrap().message_response.unwrap();
        let MessageResponse::ListServicesResponse(all) = last else { panic!("{last:?}") };
        let names: Vec<String> = all.service.into_iter().map(|service| service.name).collect();
        assert!(names.iter().any(|name| name == "openshell.v1.OpenShell"), "{names:?}");
        assert!(names.iter().any(|name| name.contains("v1alpha")), "{names:?}");
        assert!(!names.iter().any(|name| name.contains("Agent")), "{names:?}");
        assert!(answers.message().await.unwrap().is_none());
    }
}

/// A whole answer over a fresh connection: status line and headers, and the body without its chunks.
async fn exchange(socket: PathBuf, head: &str, body: &[u8]) -> (String, Vec<u8>) {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    let head = format!("{head}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body).await.unwrap();
    let mut all = Vec::new();
    timeout(LIMIT, stream.read_to_end(&mut all)).await.expect("the answer ends").unwrap();
    let end = all.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let (head, body) = (String::from_utf8_lossy(&all[..end]).to_lowercase(), &all[end + 4..]);
    if !head.contains("transfer-encoding: chunked") {
        return (head, body.to_vec());
    }
    let (mut whole, mut rest) = (Vec::new(), body);
    loop {
        let line = rest.windows(2).position(|two| two == b"\r\n").unwrap();
        let length = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
        if length == 0 {
            return (head, whole);
        }
        whole.extend_from_slice(&rest[line + 2..][..length]);
        rest = &rest[line + 2 + length + 2..];
    }
}

fn framed(message: &impl prost::Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    [&[0][..], &u32::try_from(bytes.len()).unwrap().to_be_bytes(), &bytes].concat()
}

#[tokio::test]
async fn grpc_web_by_hand_over_http_1() {
    let world = World::new(Script::default()).await;
    world.sandboxes().await.create(create("web")).await.unwrap();
    let head = "POST /torpor.v1.Sandboxes/Get HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/grpc-web+proto\r\nx-grpc-web: 1";
    let asked = v1::GetSandboxRequest { sandbox: "web".into() };
    let (answer, body) = exchange(world.socket(), head, &framed(&asked)).await;
    assert!(answer.starts_with("http/1.1 200"), "{answer}");
    assert!(answer.contains("content-type: application/grpc-web+proto"), "{answer}");
    assert_eq!(body[0], 0);
    let length = u32::from_be_bytes(body[1..5].try_into().unwrap()) as usize;
    assert_eq!(v1::Sandbox::decode(&body[5..5 + length]).unwrap().name, "web");
    let trailers = &body[5 + length..];
    assert_eq!(trailers[0], 0x80);
    assert!(String::from_utf8_lossy(trailers).contains("grpc-status:0"));
    // In text form, as browsers that can't read bytes ask for it, and an error.
    let head = head.replace("grpc-web+proto", "grpc-web-text");
    let asked = v1::GetSandboxRequest { sandbox: "none".into() };
    let text = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, framed(&asked));
    let (answer, _) = exchange(world.socket(), &head, text.as_bytes()).await;
    assert!(answer.contains("grpc-status: 5"), "{answer}");
}

#[tokio::test]
async fn only_pages_of_listed_origins_may_ask() {
    let world = World::with(Script::default(), |config| {
        config.http.origins = vec!["https://console.example.com".into()];
    })
    .await;
    let question = |origin: &str| {
        format!(
            "OPTIONS /v1/sandboxes HTTP/1.1\r\nhost: gateway\r\norigin: {origin}\r\naccess-control-request-method: POST"
        )
    };
    let (answer, _) = exchange(world.socket(), &question("https://console.example.com"), b"").await;
    assert!(answer.starts_with("http/1.1 204"), "{answer}");
    assert!(answer.contains("access-control-allow-origin: https://console.example.com"), "{answer}");
    let (answer, _) = exchange(world.socket(), &question("https://evil.example.com"), b"").await;
    assert!(answer.starts_with("http/1.1 403") && !answer.contains("allow-origin"), "{answer}");
}

/// A server "in the sandbox" that says what it was asked, and switches protocols when it is asked to.
async fn server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut head, mut byte) = (Vec::new(), [0]);
                while !head.ends_with(b"\r\n\r\n") {
                    if stream.read(&mut byte).await.unwrap_or(0) == 0 {
                        return;
                    }
                    head.push(byte[0]);
                }
                let head = String::from_utf8(head).unwrap().to_lowercase();
                if head.contains("upgrade: websocket") {
                    let switch = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n";
                    stream.write_all(switch).await.unwrap();
                    let mut piece = [0; 100];
                    while let Ok(length @ 1..) = stream.read(&mut piece).await {
                        stream.write_all(&piece[..length]).await.unwrap();
                    }
                    return;
                }
                let text = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{head}", head.len());
                let _ = stream.write_all(text.as_bytes()).await;
            });
        }
    });
    port
}

async fn by_name() -> (World, u16) {
    let mut world = World::with_agent(Script::default()).await;
    world.stop().await;
    world.config.http.expose_domain = "apps.test".into();
    world.start().await;
    let port = server().await;
    world.sandboxes().await.create(create("web")).await.unwrap();
    (world, port)
}

async fn expose(world: &World, port: u16, wake: bool) {
    let request = v1::ExposeRequest { sandbox: "web".into(), port: port.into(), wake, ..Default::default() };
    world.sandboxes().await.expose(request).await.unwrap();
}

async fn suspend(world: &World) {
    let request = v1::SuspendRequest { target: target("web"), ..Default::default() };
    world.sandboxes().await.suspend(request).await.unwrap();
}

#[tokio::test]
async fn a_host_name_leads_to_an_exposed_port() {
    let (world, port) = by_name().await;
    let head = format!(
        "POST /a/b?c=d HTTP/1.1\r\nhost: {port}--web.apps.test\r\nx-forwarded-for: 192.0.2.1\r\ncookie: k=v"
    );
    let (answer, body) = exchange(world.socket(), &head, b"").await;
    assert!(
        answer.starts_with("http/1.1 404") && answer.contains("x-torpor-reason: port_not_exposed"),
        "{answer}"
    );
    assert!(!String::from_utf8_lossy(&body).contains("web"), "{body:?}");
    expose(&world, port, false).await;
    let (answer, body) = exchange(world.socket(), &head, b"").await;
    assert!(answer.starts_with("http/1.1 200"), "{answer}");
    let seen = String::from_utf8(body).unwrap();
    assert!(seen.starts_with("post /a/b?c=d http/1.1\r\n"), "{seen}");
    assert!(
        seen.contains(&format!("\r\nhost: {port}--web.apps.test\r\n")) && seen.contains("cookie: k=v"),
        "{seen}"
    );
    assert!(!seen.contains("192.0.2.1") && seen.contains("x-forwarded-proto: http"), "{seen}");
    // The gateway's own names stay its own, and its API is on none of the others.
    let api = |host: &str| format!("GET /v1/health HTTP/1.1\r\nhost: {host}");
    assert!(exchange(world.socket(), &api("apps.test"), b"").await.0.starts_with("http/1.1 200"));
    let (_, body) = exchange(world.socket(), &api(&format!("{port}--web.apps.test")), b"").await;
    assert!(String::from_utf8_lossy(&body).starts_with("get /v1/health"));
}

#[tokio::test]
async fn a_host_name_of_a_sleeping_sandbox_says_so_or_wakes_it() {
    let (world, port) = by_name().await;
    expose(&world, port, false).await;
    suspend(&world).await;
    let head = format!("GET / HTTP/1.1\r\nhost: {port}--web.apps.test");
    let (answer, body) = exchange(world.socket(), &head, b"").await;
    assert!(answer.starts_with("http/1.1 503") && answer.contains("x-torpor-phase: suspended"), "{answer}");
    assert!(String::from_utf8_lossy(&body).contains("torpor resume web"));
    expose(&world, port, true).await;
    let (answer, _) = exchange(world.socket(), &head, b"").await;
    assert!(answer.starts_with("http/1.1 200"), "{answer}");
    expose(&world, 1, false).await;
    let (answer, _) = exchange(world.socket(), "GET / HTTP/1.1\r\nhost: 1--web.apps.test", b"").await;
    assert!(
        answer.starts_with("http/1.1 502") && answer.contains("x-torpor-reason: port_closed"),
        "{answer}"
    );
}

#[tokio::test]
async fn a_web_socket_goes_through_and_ends_with_the_session() {
    let (world, port) = by_name().await;
    expose(&world, port, false).await;
    let mut stream = UnixStream::connect(world.socket()).await.unwrap();
    let head = format!(
        "GET /ws HTTP/1.1\r\nhost: {port}--web.apps.test\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let (mut seen, mut byte) = (Vec::new(), [0]);
    while !seen.ends_with(b"\r\n\r\n") {
        assert_eq!(timeout(LIMIT, stream.read(&mut byte)).await.unwrap().unwrap(), 1);
        seen.push(byte[0]);
    }
    let seen = String::from_utf8(seen).unwrap().to_lowercase();
    assert!(seen.starts_with("http/1.1 101") && seen.contains("upgrade: websocket"), "{seen}");
    for word in [b"ping", b"pong"] {
        stream.write_all(word).await.unwrap();
        let mut back = [0; 4];
        timeout(LIMIT, stream.read_exact(&mut back)).await.unwrap().unwrap();
        assert_eq!(&back, word);
    }
    suspend(&world).await;
    let ended = timeout(LIMIT, stream.read(&mut byte)).await.expect("it ends with the session");
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
}
