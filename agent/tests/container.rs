//! The agent as a container's first process: it dials its host, again when the host comes back, and ends when the engine
//! says stop.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{
    os::unix::process::ExitStatusExt as _,
    process::{Child, Command, Stdio},
    time::Duration,
};

use common::{Client, LIMIT, channel, configure};
use nix::{sys::signal::Signal, unistd::Pid};
use tokio::{net::UnixListener, time::timeout};
use torpor_agent_channel::host;
use torpor_proto::agent::v1::{MainCommand, ShutdownRequest, StatusRequest, agent_client::AgentClient};

/// A host's folder with an agent that dials it.
struct Container {
    agent: Child,
    folder: tempfile::TempDir,
}

impl Container {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let agent = Command::new(env!("CARGO_BIN_EXE_torpor-agent"))
            .arg("--container")
            .arg(folder.path().join("agent.sock"))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self { agent, folder }
    }

    /// What a gateway that begins does: its socket takes the place of the one before.
    fn listen(&self) -> UnixListener {
        let path = self.folder.path().join("agent.sock");
        let _ = std::fs::remove_file(&path);
        UnixListener::bind(path).unwrap()
    }

    async fn wait(&mut self) -> std::process::ExitStatus {
        for _ in 0..600 {
            if let Some(status) = self.agent.try_wait().unwrap() {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the agent did not end");
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

async fn accept(listener: &UnixListener) -> Client {
    let (stream, _) = timeout(LIMIT, listener.accept()).await.unwrap().unwrap();
    AgentClient::new(channel(host::connect(stream, LIMIT).await.unwrap()).await)
}

#[tokio::test]
async fn the_agent_dials_every_host_that_comes_and_is_the_same_to_each() {
    let mut container = Container::start();
    let listener = container.listen();
    let mut first = accept(&listener).await;
    let configured = configure(&mut first, 3, None).await.unwrap();
    drop((first, listener));
    let listener = container.listen();
    let mut second = accept(&listener).await;
    let status = second.status(StatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.run, status.configured, &status.boot_id), (3, true, &configured.boot_id));
    let ended = second.shutdown(ShutdownRequest { grace: None }).await.unwrap().into_inner();
    assert!(ended.flushed, "{}", ended.detail);
    drop(second);
    assert_eq!(container.wait().await.code(), Some(0));
}

#[tokio::test]
async fn each_start_of_a_container_has_a_name_of_its_own() {
    let mut names = Vec::new();
    for _ in 0..2 {
        let container = Container::start();
        let listener = container.listen();
        names.push(configure(&mut accept(&listener).await, 1, None).await.unwrap().boot_id);
    }
    assert_ne!(names[0], names[1]);
}

#[tokio::test]
async fn an_engines_stop_ends_the_processes_and_is_told_from_a_failure() {
    let mut container = Container::start();
    let listener = container.listen();
    let mut client = accept(&listener).await;
    let marker = container.folder.path().join("ended");
    let script = format!(
        "trap 'touch {}; exit 0' TERM; touch {}/up; while :; do sleep 0.05; done",
        marker.display(),
        container.folder.path().display()
    );
    let argv = ["sh", "-c", &script].map(str::to_owned).to_vec();
    configure(&mut client, 1, Some(MainCommand { argv, ..MainCommand::default() })).await.unwrap();
    for _ in 0..600 {
        if container.folder.path().join("up").exists() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    nix::sys::signal::kill(Pid::from_raw(container.agent.id() as i32), Signal::SIGTERM).unwrap();
    let status = container.wait().await;
    assert_eq!((status.code(), status.signal()), (Some(143), None));
    assert!(marker.exists(), "the main command was not told");
}
