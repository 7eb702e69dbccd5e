//! A service that answers gRPC's own frames, and requests to what stands before it.
#![allow(dead_code, reason = "each test file uses what it needs")]

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures::StreamExt as _;
use http::{HeaderMap, Request, Response, Version};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use prost::Message;
use serde_json::Value;
use tonic::{Code, Status, body::Body};
use tonic_types::{ErrorDetails, StatusExt as _};
use torpor_proto::v1;
use torpor_rest::{Options, Rest};
use tower::{Layer as _, ServiceExt as _};

/// What the listener knows of a connection, for the test.
#[derive(Clone)]
pub struct Peer(pub &'static str);

pub fn rest(origins: &[&str]) -> Arc<Rest> {
    let options = Options {
        package: "torpor.v1".into(),
        title: "Torpor".into(),
        version: "0".into(),
        origins: origins.iter().map(|origin| (*origin).to_owned()).collect(),
    };
    Rest::new(torpor_proto::DESCRIPTORS, options).unwrap()
}

pub struct Answer {
    pub code: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub fn lines(&self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map(|value| value.to_str().unwrap()).unwrap_or_default()
    }

    /// Reason and message of the error.
    pub fn error(&self) -> (String, String) {
        let error = self.json();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (text(&error["details"][0]["reason"]), text(&error["message"]))
    }
}

pub async fn ask(rest: &Arc<Rest>, request: Request<Body>) -> Answer {
    let response = rest.layer().layer(service()).oneshot(request).await.unwrap();
    let (head, body) = response.into_parts();
    let body = tokio::time::timeout(Duration::from_secs(20), body.collect()).await.expect("the answer ends");
    Answer { code: head.status.as_u16(), headers: head.headers, body: body.unwrap().to_bytes() }
}

/// The service alone.
pub fn service() -> impl tower::Service<
    Request<Body>,
    Response = Response<Body>,
    Error = Infallible,
    Future = impl Future<Output = Result<Response<Body>, Infallible>> + Send,
> + Clone
+ Send {
    tower::service_fn(fake)
}

pub fn request(line: &str, headers: &[(&str, &str)], body: &str) -> Request<Body> {
    let (verb, path) = line.split_once(' ').unwrap();
    let mut request = Request::builder().method(verb).uri(path).extension(Peer("somebody"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Body::new(Full::new(Bytes::from(body.to_owned())))).unwrap()
}

pub async fn get(path: &str) -> Answer {
    ask(&rest(&[]), request(&format!("GET {path}"), &[], "")).await
}

pub async fn send(line: &str, body: &str) -> Answer {
    ask(&rest(&[]), request(line, &[("content-type", "application/json")], body)).await
}

fn frame(message: &impl Message) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(message.encoded_len()).unwrap());
    message.encode(&mut bytes).unwrap();
    bytes.freeze()
}

fn trailers(status: &Status) -> HeaderMap {
    let response: Response<()> = status.clone().into_http();
    response.headers().clone()
}

fn answer(pieces: impl futures::Stream<Item = Result<Bytes, Status>> + Send + 'static) -> Response<Body> {
    let frames =
        pieces.chain(futures::stream::once(async { Err(Status::ok("")) })).scan(false, |over, piece| {
            let next = match piece {
                _ if *over => None,
                Ok(bytes) => Some(Frame::data(bytes)),
                Err(status) => {
                    *over = true;
                    Some(Frame::trailers(trailers(&status)))
                }
            };
            futures::future::ready(next.map(Ok::<_, Infallible>))
        });
    let mut response = Response::new(Body::new(StreamBody::new(frames)));
    response.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
    response
}

fn one(message: &impl Message) -> Response<Body> {
    answer(futures::stream::iter([Ok(frame(message))]))
}

async fn input<M: Message + Default>(body: Body) -> M {
    let mut bytes = body.collect().await.unwrap().to_bytes();
    bytes.advance(5);
    M::decode(bytes).unwrap()
}

fn missing(name: &str) -> Status {
    let metadata = [("next".to_owned(), "torpor list".to_owned())];
    let details = ErrorDetails::with_error_info("NOT_FOUND", "torpor", metadata);
    Status::with_error_details(Code::NotFound, format!("no sandbox '{name}'"), details)
}

fn sandbox(name: &str, head: &http::request::Parts) -> v1::Sandbox {
    let text = |name: &str| {
        let value = head.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
        (name.to_owned(), value.unwrap_or_default())
    };
    let peer = head.extensions.get::<Peer>().map_or("nobody", |peer| peer.0).to_owned();
    let labels = ["authorization", "x-torpor-workspace", "cookie"].map(text).into_iter();
    let status = v1::SandboxStatus { phase: v1::Phase::Ready.into(), ..Default::default() };
    v1::Sandbox {
        name: name.to_owned(),
        version: u64::MAX,
        labels: labels.chain([("peer".to_owned(), peer)]).collect(),
        status: Some(status),
        ..Default::default()
    }
}

async fn fake(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    Ok(match path.trim_start_matches("/torpor.v1.") {
        "Sandboxes/Get" => {
            let asked: v1::GetSandboxRequest = input(body).await;
            match asked.sandbox.as_str() {
                "absent" => missing("absent").into_http(),
                name => one(&sandbox(name, &head)),
            }
        }
        "Sandboxes/List" => {
            let asked: v1::ListSandboxesRequest = input(body).await;
            let token = format!("{} {}", asked.page_size, asked.label_selector);
            one(&v1::ListSandboxesResponse { sandboxes: Vec::new(), next_page_token: token })
        }
        "Sandboxes/Create" => {
            let asked: v1::CreateSandboxRequest = input(body).await;
            let mut made = sandbox(&asked.name, &head);
            made.spec = asked.spec;
            one(&made)
        }
        "Sandboxes/Delete" => {
            let asked: v1::DeleteSandboxRequest = input(body).await;
            let target = asked.target.unwrap();
            let id = format!("{} {} {}", target.sandbox, target.wait, asked.allow_missing);
            one(&v1::DeleteSandboxResponse { outcome: 1, id })
        }
        "Sandboxes/Suspend" => {
            let asked: v1::SuspendRequest = input(body).await;
            let target = asked.target.clone().unwrap();
            one(&sandbox(&format!("{} {} {:?}", target.sandbox, target.wait, asked.keep()), &head))
        }
        "Sandboxes/Watch" => {
            let asked: v1::WatchSandboxesRequest = input(body).await;
            let event = v1::SandboxEvent { cursor: format!("{}+1", asked.cursor), ..Default::default() };
            let pieces = [Ok(frame(&event)), Err(missing(&asked.sandbox))];
            let count = if asked.sandbox == "web" { 1 } else { 2 };
            answer(futures::stream::iter(pieces).take(count))
        }
        "Sandboxes/Exec" => exec(body),
        "Sandboxes/Resume" => {
            tokio::time::sleep(Duration::from_secs(3600)).await;
            Status::internal("late").into_http()
        }
        "Images/Remove" => {
            let asked: v1::RemoveImageRequest = input(body).await;
            let freed_bytes = asked.image.len() as u64;
            one(&v1::RemoveImageResponse {
                removed: asked.image == "docker.io/library/alpine:3",
                freed_bytes,
            })
        }
        _ => Status::unimplemented(path).into_http(),
    })
}

/// Says what came, input by input; nothing more until the next input, and an exit at the end.
fn exec(body: Body) -> Response<Body> {
    use v1::{exec_input::Kind as In, exec_output::Kind as Out};
    let state = (body, BytesMut::new(), false);
    let pieces = futures::stream::unfold(state, |(mut body, mut buffer, over)| async move {
        if over {
            return None;
        }
        loop {
            if buffer.len() >= 5 {
                let length = u32::from_be_bytes(buffer[1..5].try_into().unwrap()) as usize;
                if buffer.len() >= 5 + length {
                    buffer.advance(5);
                    let asked = v1::ExecInput::decode(buffer.split_to(length)).unwrap();
                    let said = match asked.kind.unwrap() {
                        In::Start(start) => format!("{}: {}", start.sandbox, start.argv.join(" ")).into(),
                        In::Stdin(data) => data,
                        other => format!("{other:?}").into(),
                    };
                    let output = v1::ExecOutput { kind: Some(Out::Stdout(said)) };
                    return Some((Ok(frame(&output)), (body, buffer, false)));
                }
            }
            match body.frame().await {
                Some(piece) => buffer.extend_from_slice(piece.unwrap().data_ref().unwrap()),
                None => {
                    let exit = v1::ExecExit { code: 7, ..Default::default() };
                    let output = v1::ExecOutput { kind: Some(Out::Exit(exit)) };
                    return Some((Ok(frame(&output)), (body, buffer, true)));
                }
            }
        }
    });
    answer(pieces)
}

/// A request over HTTP/2, for gRPC.
pub fn over_http2(mut request: Request<Body>) -> Request<Body> {
    *request.version_mut() = Version::HTTP_2;
    request
}

/// One frame as a client sends it.
pub fn framed(message: &impl Message) -> Body {
    Body::new(Full::new(frame(message)))
}
