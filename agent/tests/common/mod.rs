//! A real agent process on a Unix socket, and a host that talks to it.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::{
    collections::HashMap,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};
use torpor_agent_channel::host;
use torpor_proto::agent::v1::{
    ConfigureRequest, ConfigureResponse, ExecError, ExecExit, ExecInput, ExecOutput, ExecStart, MainCommand,
    agent_client::AgentClient, exec_input, exec_output,
};

/// Nothing that a test waits for takes this long unless it hangs.
pub const LIMIT: Duration = Duration::from_secs(60);

pub type Client = AgentClient<Channel>;

/// Skips or, when REQUIRE says so, fails a test that needs root.
pub fn is_root(test: &str) -> bool {
    if nix::unistd::geteuid().is_root() {
        return true;
    }
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|need| need == "root"), "{test} needs root");
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: needs root\n"));
    false
}

/// gRPC over one session; when the session is over, so is the channel.
pub async fn channel(stream: host::Stream) -> Channel {
    let mut once = Some(stream);
    Endpoint::from_static("http://agent")
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(1 << 21)
        .connect_with_connector(tower::service_fn(move |_| {
            let stream = once.take();
            async move { stream.map(TokioIo::new).ok_or_else(|| std::io::Error::other("session is over")) }
        }))
        .await
        .unwrap()
}

/// A running agent, killed at the end of its test.
pub struct Agent {
    pub process: Child,
    _folder: tempfile::TempDir,
    socket: PathBuf,
}

impl Agent {
    pub async fn start() -> Self {
        Self::by("--serve-unix").await
    }

    /// One that was started with this flag and the path of its socket.
    pub async fn by(flag: &str) -> Self {
        Self::within(&[], flag).await
    }

    /// The same within another command.
    pub async fn within(command: &[&str], flag: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let line: Vec<&str> =
            command.iter().copied().chain([env!("CARGO_BIN_EXE_torpor-agent"), flag]).collect();
        let process =
            Command::new(line[0]).args(&line[1..]).arg(&socket).stdin(Stdio::null()).spawn().unwrap();
        for _ in 0..500 {
            if UnixStream::connect(&socket).await.is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Self { process, _folder: folder, socket }
    }

    /// A new session, not yet configured.
    pub async fn dial(&self) -> Client {
        let stream = UnixStream::connect(&self.socket).await.unwrap();
        let stream = host::connect(stream, LIMIT).await.unwrap();
        AgentClient::new(channel(stream).await)
    }

    /// A new session of run 1.
    pub async fn ready(&self) -> Client {
        let mut client = self.dial().await;
        configure(&mut client, 1, None).await.unwrap();
        client
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let agent = nix::unistd::Pid::from_raw(self.process.id() as i32);
        // What tests leave running is a child of the agent.
        let children =
            std::fs::read_to_string(format!("/proc/{agent}/task/{agent}/children")).unwrap_or_default();
        let _ = self.process.kill();
        for child in children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()) {
            let _ =
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(child), nix::sys::signal::Signal::SIGKILL);
        }
        let _ = self.process.wait();
        remove_cgroups(agent.as_raw());
    }
}

/// The agent was killed and could not tidy up.
fn remove_cgroups(agent: i32) {
    for mount in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
        let base = PathBuf::from(mount).join(format!("torpor-agent-{agent}"));
        for entry in std::fs::read_dir(&base).into_iter().flatten().flatten() {
            let _ = std::fs::write(entry.path().join("cgroup.kill"), "1");
            for _ in 0..100 {
                if !entry.path().is_dir() || std::fs::remove_dir(entry.path()).is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        let _ = std::fs::remove_dir(base);
    }
}

pub async fn configure(
    client: &mut Client,
    run: u64,
    main: Option<MainCommand>,
) -> Result<ConfigureResponse, tonic::Status> {
    let environment = HashMap::from([("FROM_CONFIG".to_owned(), "config".to_owned())]);
    let request = ConfigureRequest { run, main, environment, ..ConfigureRequest::default() };
    client.configure(request).await.map(tonic::Response::into_inner)
}

pub fn sh(script: &str) -> ExecStart {
    command(&["sh", "-c", script])
}

pub fn command(argv: &[&str]) -> ExecStart {
    ExecStart { argv: argv.iter().map(|word| (*word).to_owned()).collect(), ..ExecStart::default() }
}

/// A command under way.
pub struct Exec {
    pub input: mpsc::Sender<ExecInput>,
    pub output: Streaming<ExecOutput>,
}

impl Exec {
    pub async fn start(client: &mut Client, start: ExecStart) -> Self {
        let (input, inputs) = mpsc::channel(16);
        let first = ExecInput { kind: Some(exec_input::Kind::Start(start)) };
        input.send(first).await.unwrap();
        let output = client.exec(ReceiverStream::new(inputs)).await.unwrap().into_inner();
        Self { input, output }
    }

    pub async fn send(&self, kind: exec_input::Kind) {
        self.input.send(ExecInput { kind: Some(kind) }).await.unwrap();
    }

    pub async fn next(&mut self) -> Option<exec_output::Kind> {
        timeout(LIMIT, self.output.message()).await.expect("the command hangs").unwrap()?.kind
    }

    /// Waits until stdout has `text`, and returns what was read.
    pub async fn until(&mut self, text: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(text) {
            match self.next().await {
                Some(exec_output::Kind::Stdout(data)) => seen.push_str(&String::from_utf8_lossy(&data)),
                Some(exec_output::Kind::Started(_)) => {}
                other => panic!("{other:?} after {seen:?}, waiting for {text:?}"),
            }
        }
        seen
    }

    pub async fn finish(mut self) -> Outcome {
        let mut outcome = Outcome::default();
        while let Some(kind) = self.next().await {
            match kind {
                exec_output::Kind::Stdout(data) => outcome.stdout.extend_from_slice(&data),
                exec_output::Kind::Stderr(data) => outcome.stderr.extend_from_slice(&data),
                exec_output::Kind::Exit(exit) => outcome.exit = Some(exit),
                exec_output::Kind::Error(error) => outcome.error = Some(error),
                exec_output::Kind::Started(started) => outcome.pid = started.pid,
            }
        }
        outcome
    }
}

#[derive(Debug, Default)]
pub struct Outcome {
    pub pid: i32,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub exit: Option<ExecExit>,
    pub error: Option<ExecError>,
}

impl Outcome {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub fn code(&self) -> i32 {
        self.exit.as_ref().unwrap_or_else(|| panic!("no exit: {self:?}")).code
    }
}

pub async fn run(client: &mut Client, start: ExecStart) -> Outcome {
    Exec::start(client, start).await.finish().await
}

/// True while the process is there and no zombie.
pub fn lives(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
}

/// Waits for `condition`; whether it came true.
pub async fn eventually(condition: impl Fn() -> bool) -> bool {
    for _ in 0..500 {
        if condition() {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    false
}
