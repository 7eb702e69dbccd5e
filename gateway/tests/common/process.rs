//! A gateway in a process of its own, which ends at a failpoint or is killed, and is started again.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use tempfile::TempDir;
use tonic::transport::Channel;
use torpor_gateway::{Config, Gateway};

/// Where the process finds its folder; nobody else sets it.
const FOLDER: &str = "TORPOR_CRASH_FOLDER";

/// What the test `the_gateway_process` is: that process, when it was started as one.
pub fn serve(config: impl FnOnce(&Path) -> Config) {
    let Some(dir) = std::env::var_os(FOLDER) else { return };
    let config = config(Path::new(&dir));
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let gateway = Gateway::start(config).await.expect("it starts");
        // Ended by its failpoint or by its parent.
        tokio::time::sleep(Duration::from_secs(600)).await;
        gateway.end().await;
    });
}

/// A folder with such a gateway.
pub struct Process {
    pub dir: TempDir,
    socket: PathBuf,
    patience: Duration,
    variables: Vec<(String, PathBuf)>,
    child: Option<Child>,
}

impl Process {
    /// Not started yet; `patience`: for it to listen.
    pub fn new(config: impl FnOnce(&Path) -> Config, patience: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = config(dir.path()).socket().unwrap();
        Self { dir, socket, patience, variables: Vec::new(), child: None }
    }

    /// A variable of its environment.
    pub fn set(&mut self, name: &str, value: PathBuf) {
        self.variables.push((name.to_owned(), value));
    }

    pub fn start(&mut self, failpoint: Option<&str>) {
        let log = fs::File::options().create(true).append(true).open(self.dir.path().join("log")).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "the_gateway_process", "--nocapture"])
            .env(FOLDER, self.dir.path())
            .env_remove("TORPOR_FAILPOINT")
            .envs(self.variables.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        if let Some(failpoint) = failpoint {
            command.env("TORPOR_FAILPOINT", failpoint);
        }
        self.child = Some(command.spawn().unwrap());
    }

    pub fn is_dead(&mut self) -> bool {
        self.child.as_mut().is_none_or(|child| child.try_wait().unwrap().is_some())
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Fails when it is gone already.
            let _ = child.kill();
            child.wait().unwrap();
        }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// None: the process has ended.
    pub async fn connect(&mut self) -> Option<Channel> {
        let end = Instant::now() + self.patience;
        while !self.is_dead() {
            if let Ok(channel) = super::try_channel(self.socket.clone()).await {
                return Some(channel);
            }
            assert!(Instant::now() < end, "it never listened:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        None
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log\n{}", self.log());
        }
        self.kill();
    }
}
