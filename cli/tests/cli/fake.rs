//! A gateway that only pretends: scripted answers on a Unix socket in a temporary folder.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use prost_types::Timestamp;
use tempfile::TempDir;
use tokio::{net::UnixListener, runtime::Runtime, sync::broadcast};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Code, Status, transport::Server};
use tonic_types::{ErrorDetails, StatusExt as _};
use torpor_sdk::v1::{
    self, Phase, gateway_server::GatewayServer, images_server::ImagesServer,
    sandboxes_server::SandboxesServer,
};

use crate::services::Service;

/// Rows in a page of the fake, whatever is asked for: clients must follow the tokens.
pub const PAGE: usize = 100;

/// A fake gateway and the means to run `torpor` against it.
pub struct Fake {
    pub state: Arc<State>,
    dir: TempDir,
    server: Option<Runtime>,
}

/// What the fake knows and what it was asked.
pub struct State {
    pub sandboxes: Mutex<BTreeMap<String, v1::Sandbox>>,
    /// Answers to give instead, by verb, each once.
    pub refusals: Mutex<HashMap<&'static str, VecDeque<Status>>>,
    /// States that follow a verb's answer, by verb.
    pub plans: Mutex<HashMap<&'static str, Vec<v1::SandboxStatus>>>,
    /// "verb sandbox request-id" of each call.
    pub calls: Mutex<Vec<String>>,
    pub log: Mutex<Vec<v1::SandboxEvent>>,
    pub events: broadcast::Sender<v1::SandboxEvent>,
    /// Cursors below are answered OUT_OF_RANGE.
    pub oldest: AtomicU64,
    /// Bytes of exec output handed to the network.
    pub sent: AtomicU64,
    /// Watches that were opened.
    pub watches: AtomicU64,
    /// The last create.
    pub created: Mutex<Option<v1::CreateSandboxRequest>>,
    /// The last exec.
    pub started: Mutex<Option<v1::ExecStart>>,
}

/// How `torpor` ended.
#[derive(Debug)]
pub struct Finished {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Finished {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().expect("ended by a signal"),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Fake {
    pub fn start() -> Self {
        let state = Arc::new(State {
            sandboxes: Mutex::default(),
            refusals: Mutex::default(),
            plans: Mutex::default(),
            calls: Mutex::default(),
            log: Mutex::default(),
            events: broadcast::channel(4096).0,
            oldest: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            watches: AtomicU64::new(0),
            created: Mutex::default(),
            started: Mutex::default(),
        });
        let mut fake = Self { state, dir: tempfile::tempdir().unwrap(), server: None };
        fake.serve();
        fake
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("gateway.sock")
    }

    fn serve(&mut self) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = {
            let _inside = runtime.enter();
            UnixListener::bind(self.socket()).unwrap()
        };
        let service = Service(Arc::clone(&self.state));
        let server = Server::builder()
            .add_service(SandboxesServer::new(service.clone()))
            .add_service(ImagesServer::new(service.clone()))
            .add_service(GatewayServer::new(service.clone()))
            .serve_with_incoming(UnixListenerStream::new(listener));
        runtime.spawn(server);
        self.server = Some(runtime);
    }

    /// As kill -9: all connections break.
    pub fn kill(&mut self) {
        self.server.take().unwrap().shutdown_background();
        std::fs::remove_file(self.socket()).unwrap();
    }

    pub fn serve_again(&mut self) {
        self.serve();
    }

    pub fn torpor(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_torpor"));
        command
            .args(args)
            .env("TORPOR_ENDPOINT", format!("unix://{}", self.socket().display()))
            .stdin(Stdio::null());
        command
    }

    pub fn run(&self, args: &[&str]) -> Finished {
        self.torpor(args).output().unwrap().into()
    }

    pub fn put(&self, sandbox: v1::Sandbox) {
        self.state.put(sandbox);
    }

    pub fn refuse(&self, verb: &'static str, status: Status) {
        self.state.refusals.lock().unwrap().entry(verb).or_default().push_back(status);
    }

    /// States that follow a verb: the first is its answer, the others come each 30 ms later.
    pub fn plan(&self, verb: &'static str, states: Vec<v1::SandboxStatus>) {
        self.state.plans.lock().unwrap().insert(verb, states);
    }

    pub fn calls(&self) -> Vec<String> {
        self.state.calls.lock().unwrap().clone()
    }
}

impl State {
    /// Stores a sandbox and tells the watchers.
    pub fn put(&self, mut sandbox: v1::Sandbox) -> v1::Sandbox {
        let mut all = self.sandboxes.lock().unwrap();
        sandbox.version = all.get(&sandbox.id).map_or(1, |s| s.version + 1);
        all.insert(sandbox.id.clone(), sandbox.clone());
        self.tell(v1::sandbox_event::Kind::Changed, sandbox.clone());
        sandbox
    }

    pub fn remove(&self, id: &str) {
        if let Some(sandbox) = self.sandboxes.lock().unwrap().remove(id) {
            self.tell(v1::sandbox_event::Kind::Deleted, sandbox);
        }
    }

    fn tell(&self, kind: v1::sandbox_event::Kind, sandbox: v1::Sandbox) {
        let mut log = self.log.lock().unwrap();
        let cursor = (log.len() + 1).to_string();
        let event = v1::SandboxEvent { kind: kind.into(), sandbox: Some(sandbox), cursor };
        log.push(event.clone());
        let _ = self.events.send(event);
    }

    pub fn find(&self, name: &str) -> Result<v1::Sandbox, Status> {
        let all = self.sandboxes.lock().unwrap();
        let found = all.values().find(|s| s.id == name || s.name == name).cloned();
        found.ok_or_else(|| {
            refusal(Code::NotFound, &format!("no sandbox is called '{name}'"), "NOT_FOUND", "torpor list")
        })
    }

    /// Notes a call, and gives the answer that was prepared instead.
    pub fn note(&self, verb: &'static str, sandbox: &str, request_id: &str) -> Result<(), Status> {
        self.calls.lock().unwrap().push(format!("{verb} {sandbox} {request_id}"));
        match self.refusals.lock().unwrap().get_mut(verb).and_then(VecDeque::pop_front) {
            Some(status) => Err(status),
            None => Ok(()),
        }
    }

    /// Carries out a verb by its plan.
    pub fn change(self: &Arc<Self>, verb: &'static str, sandbox: v1::Sandbox) -> v1::Sandbox {
        let mut plan = self.plans.lock().unwrap().get(verb).cloned().unwrap_or_else(|| default_plan(verb));
        let set = |sandbox: &v1::Sandbox, status: v1::SandboxStatus| {
            let keep = sandbox.status.clone().unwrap_or_default();
            let status = v1::SandboxStatus { image_digest: keep.image_digest, ..status };
            v1::Sandbox { status: Some(status), ..sandbox.clone() }
        };
        let first = self.put(set(&sandbox, plan.remove(0)));
        let state = Arc::clone(self);
        tokio::spawn(async move {
            for status in plan {
                tokio::time::sleep(Duration::from_millis(30)).await;
                state.put(set(&sandbox, status));
            }
        });
        first
    }
}

fn default_plan(verb: &str) -> Vec<v1::SandboxStatus> {
    let (on_the_way, end) = match verb {
        "create" => (Phase::Provisioning, Phase::Ready),
        "suspend" => (Phase::Suspending, Phase::Suspended),
        "resume" => (Phase::Resuming, Phase::Ready),
        "stop" => (Phase::Stopping, Phase::Stopped),
        _ => (Phase::Starting, Phase::Ready),
    };
    vec![at(on_the_way), at(end)]
}

/// A status of nothing but a phase.
pub fn at(phase: Phase) -> v1::SandboxStatus {
    let since = Some(Timestamp { seconds: 1_700_000_000, nanos: 0 });
    v1::SandboxStatus { phase: phase.into(), phase_since: since, ..Default::default() }
}

/// A status of a failed boot.
pub fn failed() -> v1::SandboxStatus {
    let failure = v1::Failure {
        step: "boot".into(),
        reason: "RUN_FAILED".into(),
        message: "the kernel panicked".into(),
        console_tail: "[    0.9] \x1b[31mKernel panic\x1b[0m - not syncing\r\n[    0.9] end\n".into(),
        next: "torpor logs web --source console".into(),
        time: None,
    };
    v1::SandboxStatus { failure: Some(failure), ..at(Phase::Error) }
}

/// A sandbox of nothing but a name and a phase.
pub fn sandbox(name: &str, phase: Phase) -> v1::Sandbox {
    v1::Sandbox { id: format!("sb-{name}"), name: name.into(), status: Some(at(phase)), ..Default::default() }
}

/// An error with its ErrorInfo, as the gateway sends it.
pub fn refusal(code: Code, message: &str, reason: &str, next: &str) -> Status {
    let metadata = HashMap::from([("next".to_owned(), next.to_owned())]);
    Status::with_error_details(code, message, ErrorDetails::with_error_info(reason, "torpor", metadata))
}

/// Counts down the bytes that the network took.
pub fn count(state: &State, bytes: usize) {
    state.sent.fetch_add(bytes as u64, Ordering::Relaxed);
}
