//! The services of the fake gateway.

use std::sync::{Arc, atomic::Ordering};

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming, async_trait};
use torpor_sdk::v1::{
    self, exec_input, exec_output, gateway_server::Gateway, images_server::Images, sandbox_event::Kind,
    sandboxes_server::Sandboxes,
};

use crate::{
    disk,
    fake::{PAGE, State, count},
};

type Answer<T> = Result<Response<T>, Status>;
type Stream<T> = ReceiverStream<Result<T, Status>>;

/// Chunk of scripted exec output.
pub const CHUNK: usize = 32 << 10;

fn target(target: Option<v1::Target>) -> v1::Target {
    target.expect("a verb needs a target")
}

macro_rules! verb {
    ($self:ident, $verb:literal, $request:expr) => {{
        let target = target($request.into_inner().target);
        $self.note($verb, &target.sandbox, &target.request_id)?;
        let sandbox = $self.find(&target.sandbox)?;
        Ok(Response::new($self.0.change($verb, sandbox)))
    }};
}

/// The shared state, as a service.
#[derive(Clone)]
pub struct Service(pub Arc<State>);

impl std::ops::Deref for Service {
    type Target = State;

    fn deref(&self) -> &State {
        &self.0
    }
}

#[async_trait]
impl Sandboxes for Service {
    type WatchStream = Stream<v1::SandboxEvent>;
    type ExecStream = Stream<v1::ExecOutput>;
    type AttachStream = Stream<v1::ExecOutput>;
    type LogsStream = Stream<v1::LogChunk>;
    type ForwardStream = Stream<v1::ForwardOutput>;
    type SshStream = Stream<v1::ForwardOutput>;
    type CompactDiskStream = Stream<v1::CompactDiskProgress>;
    type ExportDiskStream = Stream<v1::ExportDiskChunk>;

    async fn create(&self, request: Request<v1::CreateSandboxRequest>) -> Answer<v1::Sandbox> {
        let request = request.into_inner();
        self.note("create", &request.name, &request.request_id)?;
        let name = if request.name.is_empty() { "made-up-1".to_owned() } else { request.name.clone() };
        let sandbox = v1::Sandbox {
            id: format!("sb-{name}"),
            name,
            labels: request.labels.clone(),
            spec: request.spec.clone(),
            ..Default::default()
        };
        *self.created.lock().unwrap() = Some(request);
        Ok(Response::new(self.0.change("create", sandbox)))
    }

    async fn get(&self, request: Request<v1::GetSandboxRequest>) -> Answer<v1::Sandbox> {
        let name = request.into_inner().sandbox;
        self.note("get", &name, "")?;
        Ok(Response::new(self.find(&name)?))
    }

    async fn list(&self, request: Request<v1::ListSandboxesRequest>) -> Answer<v1::ListSandboxesResponse> {
        let request = request.into_inner();
        self.note("list", &request.label_selector, "")?;
        let from: usize = if request.page_token.is_empty() { 0 } else { request.page_token.parse().unwrap() };
        let all = self.sandboxes.lock().unwrap();
        let sandboxes: Vec<_> = all.values().skip(from).take(PAGE).cloned().collect();
        let end = from + sandboxes.len();
        let next_page_token = if end < all.len() { end.to_string() } else { String::new() };
        Ok(Response::new(v1::ListSandboxesResponse { sandboxes, next_page_token }))
    }

    async fn watch(&self, request: Request<v1::WatchSandboxesRequest>) -> Answer<Self::WatchStream> {
        let request = request.into_inner();
        self.note("watch", &request.sandbox, &request.cursor)?;
        self.watches.fetch_add(1, Ordering::Relaxed);
        let mut events = self.events.subscribe();
        let mut backlog = Vec::new();
        let chosen = move |s: &v1::Sandbox| {
            request.sandbox.is_empty() || s.id == request.sandbox || s.name == request.sandbox
        };
        if request.cursor.is_empty() {
            let all = self.sandboxes.lock().unwrap();
            let cursor = self.log.lock().unwrap().len().to_string();
            let snapshot = |s: &v1::Sandbox| v1::SandboxEvent {
                kind: Kind::Snapshot.into(),
                sandbox: Some(s.clone()),
                cursor: cursor.clone(),
            };
            backlog.extend(all.values().map(snapshot));
            backlog.push(v1::SandboxEvent { kind: Kind::Synced.into(), sandbox: None, cursor });
        } else {
            let from: u64 = request.cursor.parse().unwrap();
            if from < self.oldest.load(Ordering::Relaxed) {
                return Err(Status::out_of_range("the cursor is too old"));
            }
            backlog.extend(self.log.lock().unwrap().iter().skip(from as usize).cloned());
        }
        let (sender, receiver) = mpsc::channel(16);
        tokio::spawn(async move {
            for event in backlog {
                if event.sandbox.as_ref().is_none_or(&chosen) && sender.send(Ok(event)).await.is_err() {
                    return;
                }
            }
            while let Ok(event) = events.recv().await {
                if event.sandbox.as_ref().is_none_or(&chosen) && sender.send(Ok(event)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn suspend(&self, request: Request<v1::SuspendRequest>) -> Answer<v1::Sandbox> {
        verb!(self, "suspend", request)
    }

    async fn resume(&self, request: Request<v1::ResumeRequest>) -> Answer<v1::Sandbox> {
        verb!(self, "resume", request)
    }

    async fn stop(&self, request: Request<v1::StopRequest>) -> Answer<v1::Sandbox> {
        verb!(self, "stop", request)
    }

    async fn start(&self, request: Request<v1::StartRequest>) -> Answer<v1::Sandbox> {
        verb!(self, "start", request)
    }

    async fn delete(&self, request: Request<v1::DeleteSandboxRequest>) -> Answer<v1::DeleteSandboxResponse> {
        use v1::delete_sandbox_response::Outcome;
        let request = request.into_inner();
        let target = target(request.target);
        self.note("delete", &target.sandbox, &target.request_id)?;
        let answer = |outcome: Outcome, id: &str| {
            Ok(Response::new(v1::DeleteSandboxResponse { outcome: outcome.into(), id: id.to_owned() }))
        };
        let sandbox = match self.find(&target.sandbox) {
            Err(_) if request.allow_missing => return answer(Outcome::AlreadyAbsent, ""),
            other => other?,
        };
        let state = Arc::clone(&self.0);
        let id = sandbox.id.clone();
        let deleting = crate::fake::at(v1::Phase::Deleting);
        self.put(v1::Sandbox { status: Some(deleting), ..sandbox });
        tokio::spawn(async move {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            state.remove(&id);
        });
        answer(Outcome::Accepted, &format!("sb-{}", target.sandbox))
    }

    async fn exec(&self, request: Request<Streaming<v1::ExecInput>>) -> Answer<Self::ExecStream> {
        let mut inputs = request.into_inner();
        let first = inputs.message().await?.and_then(|m| m.kind);
        let Some(exec_input::Kind::Start(start)) = first else {
            return Err(Status::invalid_argument("the first input must be start"));
        };
        self.note("exec", &start.sandbox, "")?;
        *self.started.lock().unwrap() = Some(start.clone());
        let (sender, receiver) = mpsc::channel(4);
        tokio::spawn(perform(Arc::clone(&self.0), start, inputs, sender));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn attach(&self, _: Request<Streaming<v1::ExecInput>>) -> Answer<Self::AttachStream> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Answer<Self::LogsStream> {
        self.note("logs", &request.into_inner().sandbox, "")?;
        let (sender, receiver) = mpsc::channel(4);
        for part in ["one\ntw", "o\n"] {
            sender.send(Ok(v1::LogChunk { data: Bytes::from(part), ..Default::default() })).await.unwrap();
        }
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn history(&self, request: Request<v1::HistoryRequest>) -> Answer<v1::HistoryResponse> {
        let request = request.into_inner();
        let from: u64 = if request.page_token.is_empty() { 0 } else { request.page_token.parse().unwrap() };
        let to = (from + request.page_size as u64).min(1200);
        let row = |n: u64| v1::Transition {
            from: if n == 1199 { 0 } else { v1::Phase::Ready.into() },
            to: v1::Phase::Suspending.into(),
            why: "suspend was asked for".into(),
            run: 1200 - n,
            version: 1200 - n,
            ..Default::default()
        };
        let next_page_token = if to < 1200 { to.to_string() } else { String::new() };
        Ok(Response::new(v1::HistoryResponse { transitions: (from..to).map(row).collect(), next_page_token }))
    }

    async fn set_egress(&self, request: Request<v1::SetEgressRequest>) -> Answer<v1::Sandbox> {
        let request = request.into_inner();
        let target = target(request.target);
        self.note("egress", &target.sandbox, &target.request_id)?;
        let sandbox = self.find(&target.sandbox)?;
        let spec = v1::SandboxSpec { egress: request.egress, ..sandbox.spec.clone().unwrap_or_default() };
        Ok(Response::new(self.put(v1::Sandbox { spec: Some(spec), ..sandbox })))
    }

    async fn update(&self, request: Request<v1::UpdateSandboxRequest>) -> Answer<v1::Sandbox> {
        let request = request.into_inner();
        let target = target(request.target);
        self.note("update", &target.sandbox, &target.request_id)?;
        let sandbox = self.find(&target.sandbox)?;
        if target.expected_version != sandbox.version {
            return Err(Status::aborted("stale"));
        }
        let labels = request.labels.map_or(sandbox.labels.clone(), |labels| labels.values);
        let mut spec = sandbox.spec.clone().unwrap_or_default();
        if let Some(environment) = request.environment {
            spec.environment = environment.values;
        }
        Ok(Response::new(self.put(v1::Sandbox { spec: Some(spec), labels, ..sandbox })))
    }

    async fn resume_pending_update(
        &self,
        request: Request<v1::ResumePendingUpdateRequest>,
    ) -> Answer<v1::Sandbox> {
        let request = request.into_inner();
        let target = target(request.target);
        let verb = if request.abandon { "abandon update" } else { "resume update" };
        self.note(verb, &target.sandbox, &target.request_id)?;
        Ok(Response::new(self.find(&target.sandbox)?))
    }

    async fn expose(&self, request: Request<v1::ExposeRequest>) -> Answer<v1::ExposedPort> {
        let request = request.into_inner();
        self.note("expose", &request.sandbox, &request.host)?;
        Ok(Response::new(exposed(&self.find(&request.sandbox)?, request.port, request.wake)))
    }

    async fn list_exposed(
        &self,
        request: Request<v1::ListExposedRequest>,
    ) -> Answer<v1::ListExposedResponse> {
        let name = request.into_inner().sandbox;
        self.note("exposed", &name, "")?;
        let ports = match name.as_str() {
            "" => Vec::new(),
            name => vec![exposed(&self.find(name)?, 80, true)],
        };
        Ok(Response::new(v1::ListExposedResponse { ports }))
    }

    async fn unexpose(&self, request: Request<v1::UnexposeRequest>) -> Answer<v1::UnexposeResponse> {
        let request = request.into_inner();
        self.note("unexpose", &request.sandbox, &request.port.to_string())?;
        Ok(Response::new(v1::UnexposeResponse { removed: request.port == 80 }))
    }

    /// Gives back what it gets, in upper case.
    async fn forward(&self, request: Request<Streaming<v1::ForwardInput>>) -> Answer<Self::ForwardStream> {
        use v1::{forward_input, forward_output::Kind};
        let mut inputs = request.into_inner();
        let first = inputs.message().await?.and_then(|m| m.kind);
        let Some(forward_input::Kind::Start(start)) = first else {
            return Err(Status::invalid_argument("the first input must be start"));
        };
        self.note("forward", &start.sandbox, &start.port.to_string())?;
        let (sender, receiver) = mpsc::channel(4);
        tokio::spawn(async move {
            let say = |kind| sender.send(Ok(v1::ForwardOutput { kind: Some(kind) }));
            let _ = say(Kind::Connected(v1::ForwardConnected { run: 1 })).await;
            while let Some(Ok(message)) = inputs.next().await {
                match message.kind {
                    Some(forward_input::Kind::Data(data)) => {
                        let _ = say(Kind::Data(data.to_ascii_uppercase().into())).await;
                    }
                    Some(forward_input::Kind::Close(_)) => {
                        let _ = say(Kind::Data("the end".into())).await;
                        let _ = say(Kind::Close(v1::ForwardClose {})).await;
                        return;
                    }
                    _ => {}
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn create_ssh_session(
        &self,
        request: Request<v1::CreateSshSessionRequest>,
    ) -> Answer<v1::SshSession> {
        let request = request.into_inner();
        assert!(request.public_key.starts_with("ssh-ed25519 "), "{}", request.public_key);
        self.note("ssh", &request.sandbox, "")?;
        Err(Status::failed_precondition("the image has no sshd"))
    }

    async fn revoke_ssh_session(
        &self,
        _: Request<v1::RevokeSshSessionRequest>,
    ) -> Answer<v1::RevokeSshSessionResponse> {
        Ok(Response::new(v1::RevokeSshSessionResponse { revoked: false }))
    }

    async fn ssh(&self, _: Request<Streaming<v1::SshInput>>) -> Answer<Self::SshStream> {
        Err(Status::not_found("no such session"))
    }

    async fn get_disk(&self, request: Request<v1::GetDiskRequest>) -> Answer<v1::DiskReport> {
        let request = request.into_inner();
        self.note("disk", &request.sandbox, if request.check { "check" } else { "" })?;
        Ok(Response::new(disk::report(&self.find(&request.sandbox)?, request.check)))
    }

    async fn grow_disk(&self, request: Request<v1::GrowDiskRequest>) -> Answer<v1::Sandbox> {
        let request = request.into_inner();
        let target = target(request.target);
        self.note("grow", &target.sandbox, &target.request_id)?;
        let resources = v1::Resources { disk_bytes: Some(request.size_bytes), ..Default::default() };
        let spec = v1::SandboxSpec { resources: Some(resources), ..Default::default() };
        let sandbox = v1::Sandbox { spec: Some(spec), ..self.find(&target.sandbox)? };
        Ok(Response::new(self.put(sandbox)))
    }

    async fn compact_disk(
        &self,
        request: Request<v1::CompactDiskRequest>,
    ) -> Answer<Self::CompactDiskStream> {
        let request = request.into_inner();
        let target = target(request.target);
        self.note("compact", &target.sandbox, if request.rewrite { "rewrite" } else { "" })?;
        self.find(&target.sandbox)?;
        Ok(Response::new(disk::send(disk::compaction())))
    }

    async fn export_disk(&self, request: Request<v1::ExportDiskRequest>) -> Answer<Self::ExportDiskStream> {
        let request = request.into_inner();
        self.note("export", &request.sandbox, request.format().as_str_name())?;
        let sandbox = self.find(&request.sandbox)?;
        Ok(Response::new(disk::send(disk::export(&sandbox.name))))
    }
}

fn exposed(sandbox: &v1::Sandbox, port: u32, wake: bool) -> v1::ExposedPort {
    v1::ExposedPort {
        sandbox_id: sandbox.id.clone(),
        sandbox: sandbox.name.clone(),
        port,
        host: "127.0.0.1:40000".into(),
        wake,
        ..Default::default()
    }
}

type ToClient = mpsc::Sender<Result<v1::ExecOutput, Status>>;

async fn say(to: &ToClient, kind: exec_output::Kind) -> bool {
    to.send(Ok(v1::ExecOutput { kind: Some(kind) })).await.is_ok()
}

async fn perform(
    state: Arc<State>,
    start: v1::ExecStart,
    mut inputs: Streaming<v1::ExecInput>,
    to: ToClient,
) {
    use exec_output::Kind::{Exit, Started, Stderr, Stdout};
    let argument = |n: usize| start.argv.get(n).cloned().unwrap_or_default();
    let exit = |code: i32| Exit(v1::ExecExit { code, ..Default::default() });
    say(&to, Started(v1::ExecStarted { pid: 42, run: 1 })).await;
    match argument(0).as_str() {
        "echo" => {
            say(&to, Stdout(format!("{}\n", start.argv[1..].join(" ")).into())).await;
            say(&to, exit(0)).await;
        }
        "both" => {
            say(&to, Stdout("out\n".into())).await;
            say(&to, Stderr("err\n".into())).await;
            say(&to, exit(argument(1).parse().unwrap())).await;
        }
        "killed" => {
            say(&to, Exit(v1::ExecExit { code: 137, signal: 9, timed_out: false })).await;
        }
        "overtime" => {
            say(&to, Exit(v1::ExecExit { code: 124, signal: 0, timed_out: true })).await;
        }
        "flood" => {
            let total: usize = argument(1).parse().unwrap();
            let mut done = 0;
            while done < total {
                let chunk = pattern(done, CHUNK.min(total - done));
                if !say(&to, Stdout(chunk.clone().into())).await {
                    return;
                }
                count(&state, chunk.len());
                done += chunk.len();
            }
            say(&to, exit(0)).await;
        }
        "cat" => {
            while let Some(Ok(message)) = inputs.next().await {
                match message.kind {
                    Some(exec_input::Kind::Stdin(bytes)) => drop(say(&to, Stdout(bytes)).await),
                    Some(exec_input::Kind::StdinClose(_)) => break,
                    _ => {}
                }
            }
            say(&to, exit(0)).await;
        }
        "signals" => {
            say(&to, Stdout("waiting\n".into())).await;
            while let Some(Ok(message)) = inputs.next().await {
                if let Some(exec_input::Kind::Signal(number)) = message.kind {
                    say(&to, Stdout(format!("signal {number}\n").into())).await;
                    say(&to, exit(128 + number)).await;
                    return;
                }
            }
        }
        "deaf" => {
            say(&to, Stdout("waiting\n".into())).await;
            while inputs.next().await.is_some() {}
        }
        "size" => {
            let size = start.size.unwrap_or_default();
            say(&to, Stdout(format!("{}x{}\r\n", size.cols, size.rows).into())).await;
            while let Some(Ok(message)) = inputs.next().await {
                match message.kind {
                    Some(exec_input::Kind::Resize(s)) => {
                        say(&to, Stdout(format!("{}x{}\r\n", s.cols, s.rows).into())).await;
                    }
                    Some(exec_input::Kind::Stdin(b)) if b.contains(&b'q') => break,
                    _ => {}
                }
            }
            say(&to, exit(0)).await;
        }
        "break" => {
            say(&to, Stdout("partial\n".into())).await;
        }
        other => panic!("not scripted: {other}"),
    }
}

/// Bytes that tell their own place.
pub fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

#[async_trait]
impl Images for Service {
    type BuildStream = Stream<v1::ImageProgress>;
    type ImportStream = Stream<v1::ImageProgress>;
    type PullStream = Stream<v1::ImageProgress>;

    async fn list(&self, _: Request<v1::ListImagesRequest>) -> Answer<v1::ListImagesResponse> {
        Ok(Response::new(v1::ListImagesResponse { images: vec![image("debian")] }))
    }

    async fn build(&self, request: Request<v1::BuildImageRequest>) -> Answer<Self::BuildStream> {
        let request = request.into_inner();
        self.note("build", &request.recipe, &request.packages.join(","))?;
        Ok(Response::new(steps(image(&request.recipe)).await))
    }

    async fn pull(&self, request: Request<v1::PullImageRequest>) -> Answer<Self::PullStream> {
        let request = request.into_inner();
        self.note("pull", &request.image, &request.driver)?;
        Ok(Response::new(steps(image(&request.image)).await))
    }

    async fn import(&self, request: Request<v1::ImportImageRequest>) -> Answer<Self::ImportStream> {
        let request = request.into_inner();
        self.note("import", &request.name, &request.path)?;
        Ok(Response::new(steps(image(&request.name)).await))
    }

    async fn remove(&self, request: Request<v1::RemoveImageRequest>) -> Answer<v1::RemoveImageResponse> {
        self.note("remove", &request.into_inner().image, "")?;
        Ok(Response::new(v1::RemoveImageResponse { removed: true, freed_bytes: 3 << 20 }))
    }
}

fn image(name: &str) -> v1::Image {
    v1::Image {
        name: name.into(),
        digest: "sha256:0123456789abcdef0123".into(),
        size_bytes: 1 << 30,
        used_bytes: 300 << 20,
        created: None,
        sandboxes: 2,
    }
}

async fn steps(image: v1::Image) -> Stream<v1::ImageProgress> {
    let (sender, receiver) = mpsc::channel(4);
    let step = v1::ImageProgress { step: "unpacking".into(), ..Default::default() };
    sender.send(Ok(step)).await.unwrap();
    sender.send(Ok(v1::ImageProgress { image: Some(image), ..Default::default() })).await.unwrap();
    ReceiverStream::new(receiver)
}

#[async_trait]
impl Gateway for Service {
    async fn info(&self, _: Request<v1::InfoRequest>) -> Answer<v1::InfoResponse> {
        let driver = v1::Driver { name: "vm".into(), version: "0.1.0".into(), ..Default::default() };
        let capacity = v1::Capacity { slots_total: 16, slots_used: 1, ..Default::default() };
        Ok(Response::new(v1::InfoResponse {
            version: "0.1.0".into(),
            gateway_id: "gw-1".into(),
            drivers: vec![driver],
            capacity: Some(capacity),
            ..Default::default()
        }))
    }

    async fn health(&self, _: Request<v1::HealthRequest>) -> Answer<v1::HealthResponse> {
        let status = v1::health_response::Status::Serving.into();
        Ok(Response::new(v1::HealthResponse { status, message: String::new() }))
    }
}
