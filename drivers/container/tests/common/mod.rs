//! Real engines, one of each kind for a test program, and drivers on state directories of their own.
#![allow(dead_code, reason = "each test program uses its part")]

use std::{
    fs,
    os::unix::fs::symlink,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::StreamExt as _;
use torpor_driver_container::{ContainerConfig, ContainerDriver, Engine};
use torpor_proto::agent::v1::{ExecInput, ExecStart, agent_client::AgentClient, exec_input, exec_output};
use torpor_sandbox::{ComputeDriver, ImageSource, Resources, SandboxId, SandboxSpec};

/// An engine that this program started.
pub struct Running {
    pub engine: Engine,
    host: torpor_tests::engine::Engine,
    /// Where it has the program that makes checkpoints.
    criu: Option<PathBuf>,
    /// The digest of "tiny", a root file system of busybox.
    image: OnceLock<String>,
}

pub fn which(tool: &str) -> Option<PathBuf> {
    let mut path = std::env::var_os("PATH")?;
    path.push(":/usr/local/sbin:/usr/sbin:/sbin");
    std::env::split_paths(&path).map(|dir| dir.join(tool)).find(|file| file.is_file())
}

fn agent() -> Option<PathBuf> {
    std::env::var_os("TORPOR_TEST_AGENT").map(PathBuf::from).filter(|path| path.is_file())
}

/// Whether this machine can run what a test needs.
fn can_run(test: &str, engine: Engine) -> bool {
    let reason = "needs TORPOR_TEST_AGENT=PATH of a static torpor-agent";
    torpor_tests::engine::can_run(test, engine.name())
        && torpor_tests::need(test, "root", agent().is_some(), reason)
}

/// The program's engine of this kind, or none when the test is to be skipped. It ends with the program: its input does.
pub fn running(test: &str, engine: Engine) -> Option<&'static Running> {
    static ALL: [OnceLock<Running>; 2] = [OnceLock::new(), OnceLock::new()];
    can_run(test, engine).then(|| ALL[usize::from(engine == Engine::Podman)].get_or_init(|| begin(engine)))
}

/// One that is the caller's alone, for tests that end it.
pub fn own(test: &str, engine: Engine) -> Option<Running> {
    can_run(test, engine).then(|| begin(engine))
}

fn begin(engine: Engine) -> Running {
    Running {
        engine,
        host: torpor_tests::engine::Engine::start(engine.name()),
        criu: None,
        image: OnceLock::new(),
    }
}

/// One of the caller's alone that makes checkpoints.
pub fn with_criu(test: &str, engine: Engine) -> Option<Running> {
    if !can_run(test, engine) {
        return None;
    }
    let criu = torpor_tests::engine::criu(test)?;
    let host = torpor_tests::engine::Engine::start_with(engine.name(), Some(&criu));
    Some(Running { engine, host, criu: Some(criu), image: OnceLock::new() })
}

impl std::ops::Deref for Running {
    type Target = torpor_tests::engine::Engine;

    fn deref(&self) -> &Self::Target {
        &self.host
    }
}

impl Running {
    pub async fn image(&self, driver: &dyn ComputeDriver) -> String {
        if let Some(image) = self.image.get() {
            return image.clone();
        }
        let tree = busybox_tree();
        let source = ImageSource::Dir(tree.path().to_owned());
        let made = driver.images().unwrap().import("tiny", &source, &|_, _| ()).await.unwrap();
        // Another test may have been first; the name has moved then, and both are there.
        self.image.get_or_init(|| made.digest).clone()
    }
}

pub fn busybox_tree() -> tempfile::TempDir {
    let tree = tempfile::tempdir().unwrap();
    let root = tree.path();
    for dir in ["bin", "dev", "etc", "proc", "sys", "root", "run", "var"] {
        fs::create_dir(root.join(dir)).unwrap();
    }
    fs::copy(which("busybox").unwrap(), root.join("bin/busybox")).unwrap();
    for applet in
        ["sh", "cat", "echo", "sleep", "ip", "ls", "touch", "true", "id", "grep", "mkdir", "hostname", "kill"]
    {
        symlink("busybox", root.join("bin").join(applet)).unwrap();
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/:/bin/sh\n")
        .unwrap();
    fs::write(root.join("etc/group"), "root:x:0:\nann:x:1000:\n").unwrap();
    tree
}

/// Waits until the driver has found out that it does.
pub async fn keeps_memory(driver: &ContainerDriver) {
    for _ in 0..1200 {
        if driver.capabilities().keeps_memory {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{:?}", driver.capabilities().no_memory);
}

/// A state directory and a run directory of a gateway's own.
pub struct Bench {
    pub engine: Engine,
    pub config: ContainerConfig,
    pub image: String,
    pub folder: tempfile::TempDir,
}

impl Bench {
    pub async fn new(running: &Running) -> (Self, Arc<ContainerDriver>) {
        let folder = tempfile::Builder::new().prefix("tc").tempdir_in("/tmp").unwrap();
        let (state, run) = (folder.path().join("state"), folder.path().join("run"));
        let mut config = ContainerConfig::new(running.engine, state, run, agent().unwrap());
        config.socket = running.socket();
        config.criu = running.criu.as_ref().map_or("no-criu-here".into(), |folder| folder.join("criu"));
        let driver = ContainerDriver::new(config.clone()).unwrap();
        if running.criu.is_some() {
            keeps_memory(driver.as_ref()).await;
        }
        let image = running.image(driver.as_ref()).await;
        (Self { engine: running.engine, config, image, folder }, driver)
    }

    pub fn driver(&self) -> Arc<ContainerDriver> {
        ContainerDriver::new(self.config.clone()).unwrap()
    }

    pub fn spec(&self) -> SandboxSpec {
        SandboxSpec {
            hostname: "web".into(),
            environment: [("GREETING".to_owned(), "hello".to_owned())].into(),
            stop_grace: Duration::from_secs(5),
            ..SandboxSpec::of(
                self.engine.name(),
                "tiny",
                &self.image,
                Resources { cpus: 1, memory_bytes: 96 << 20, disk_bytes: 0 },
            )
        }
    }

    /// What is left of a sandbox beside its container.
    pub fn leftovers(&self, id: &SandboxId) -> Vec<PathBuf> {
        let run = self.config.run_dir.join(self.engine.name()).join(id.as_str());
        run.exists().then_some(run).into_iter().collect()
    }
}

/// Runs a command in the container: exit code and output.
pub async fn exec(driver: &dyn ComputeDriver, id: &SandboxId, command: &str) -> (i32, String) {
    let mut client = AgentClient::new(driver.agent(id).await.unwrap());
    let argv = ["/bin/sh", "-c", command].map(str::to_owned).to_vec();
    let start = ExecStart { argv, ..ExecStart::default() };
    let input = ExecInput { kind: Some(exec_input::Kind::Start(start)) };
    // Open until the end: a closed request stream would be a client that went away.
    let requests = futures::stream::once(async { input }).chain(futures::stream::pending());
    let mut output = client.exec(requests).await.unwrap().into_inner();
    let mut text = Vec::new();
    while let Some(message) = output.message().await.unwrap() {
        match message.kind {
            Some(exec_output::Kind::Stdout(bytes) | exec_output::Kind::Stderr(bytes)) => {
                text.extend_from_slice(&bytes)
            }
            Some(exec_output::Kind::Exit(exit)) => {
                return (exit.code, String::from_utf8_lossy(&text).into_owned());
            }
            Some(exec_output::Kind::Error(error)) => panic!("{error:?}"),
            _ => {}
        }
    }
    panic!("the output ended without an exit");
}
