//! Runs commands and says how they ended.

pub mod cgroup;
mod input;
mod output;
pub mod spawn;
pub mod users;

use std::{collections::HashMap, io, path::Path, sync::Arc, time::Duration};

pub use input::Inbound;
use input::Stdin;
use nix::unistd::Pid;
use output::{Sink, Source};
use spawn::{Child, Ends, Plan, SpawnError};
use tokio::{
    net::unix::pipe,
    sync::{oneshot, watch},
    time::sleep,
};
use torpor_proto::agent::v1::{
    ExecError, ExecExit, ExecOutput, ExecStart, ExecStarted, WindowSize, exec_error, exec_output::Kind,
};

use self::cgroup::Tree;
use crate::{agent::Agent, reaper::Exit};

/// Between TERM and KILL when the request names nothing.
const DEFAULT_GRACE: Duration = Duration::from_secs(2);

/// Runs one command to its end, whoever still listens to `sink`. The end of `inbound` ends the command's input.
pub async fn run(agent: Arc<Agent>, start: ExecStart, inbound: Inbound, sink: Sink) {
    let limit = start.timeout.and_then(|limit| Duration::try_from(limit).ok());
    let grace = start.kill_grace.and_then(|grace| Duration::try_from(grace).ok()).unwrap_or(DEFAULT_GRACE);
    let started =
        launch(&agent, start).await.and_then(|child| Running::attach(child, &agent, inbound, &sink));
    let last = match started {
        Ok(running) => {
            let pid = running.pid.as_raw();
            // A reader that left changes nothing for the command.
            let _ = sink.send(Ok(ExecOutput { kind: Some(Kind::Started(ExecStarted { pid })) })).await;
            Kind::Exit(running.finish(&agent, &sink, limit, grace).await)
        }
        Err(error) => Kind::Error(ExecError { kind: error.kind.into(), message: error.message }),
    };
    let _ = sink.send(Ok(ExecOutput { kind: Some(last) })).await;
}

async fn launch(agent: &Arc<Agent>, start: ExecStart) -> Result<Child, SpawnError> {
    let agent = agent.clone();
    // Forks and waits for the exec, which may read a slow disk.
    tokio::task::spawn_blocking(move || {
        let plan = plan(start, agent.environment())?;
        spawn::spawn(&plan, &agent.reaper, &agent.cgroups)
    })
    .await
    .map_err(|error| SpawnError::new(exec_error::Kind::Other, format!("start the command: {error}")))?
}

fn plan(start: ExecStart, configured: HashMap<String, String>) -> Result<Plan, SpawnError> {
    let invalid = |message: String| SpawnError::new(exec_error::Kind::Invalid, message);
    for name in start.environment.keys().chain(configured.keys()) {
        if name.is_empty() || name.contains('=') {
            return Err(invalid(format!("environment variable {name:?} has no usable name")));
        }
    }
    let identity = users::find(Path::new("/"), &start.user)
        .map_err(|error| SpawnError::new(exec_error::Kind::NoSuchUser, error.to_string()))?;
    let mut environment = HashMap::from([
        ("PATH".to_owned(), spawn::DEFAULT_PATH.to_owned()),
        ("HOME".to_owned(), identity.home.clone()),
    ]);
    if let Some(name) = &identity.name {
        environment.insert("USER".to_owned(), name.clone());
    }
    if start.tty {
        environment.insert("TERM".to_owned(), "xterm-256color".to_owned());
    }
    environment.extend(configured);
    environment.extend(start.environment);
    let workdir = match start.workdir {
        named if !named.is_empty() => named,
        _ if Path::new(&identity.home).is_dir() => identity.home.clone(),
        _ => "/".to_owned(),
    };
    let tty = start.tty.then(|| start.size.unwrap_or(WindowSize { cols: 0, rows: 0 }));
    Ok(Plan { argv: start.argv, environment, workdir, identity, stdin: start.stdin, tty })
}

/// A command with its streams attached.
struct Running {
    pid: Pid,
    tree: Tree,
    exit: oneshot::Receiver<Exit>,
    ended: watch::Sender<bool>,
    pumps: Vec<tokio::task::JoinHandle<()>>,
    feeding: tokio::task::JoinHandle<()>,
}

impl Running {
    fn attach(child: Child, agent: &Agent, inbound: Inbound, sink: &Sink) -> Result<Self, SpawnError> {
        let (stdin, sources) = streams(child.ends).map_err(|error| {
            SpawnError::new(exec_error::Kind::Other, format!("attach to the streams of the command: {error}"))
        })?;
        let (ended, watched) = watch::channel(false);
        let pumps = sources
            .into_iter()
            .map(|(source, kind)| tokio::spawn(output::pump(source, kind, sink.clone(), watched.clone())))
            .collect();
        let feeding = tokio::spawn(input::feed(inbound, stdin, child.pid, agent.reaper.clone()));
        Ok(Self {
            pid: child.pid,
            tree: Tree::new(child.pid, child.cgroup),
            exit: child.exit,
            ended,
            pumps,
            feeding,
        })
    }

    async fn finish(
        mut self,
        agent: &Agent,
        sink: &Sink,
        limit: Option<Duration>,
        grace: Duration,
    ) -> ExecExit {
        let running = agent.count_exec();
        let in_time = tokio::select! {
            exit = &mut self.exit => Some(exit),
            () = expiry(limit) => None,
        };
        let timed_out = in_time.is_none();
        let exit = match in_time {
            Some(exit) => exit,
            None => {
                self.tree.end(grace).await;
                self.exit.await
            }
        };
        drop(running);
        self.ended.send_replace(true);
        self.feeding.abort();
        for pump in self.pumps {
            tokio::select! {
                _ = pump => {}
                () = sink.closed() => {}
            }
        }
        if let Some(cgroup) = self.tree.into_cgroup() {
            agent.cgroups.retire(cgroup);
        }
        // The reaper answers everybody it knows; without it there is no code to tell.
        let exit = exit.unwrap_or(Exit { code: 255, signal: 0 });
        ExecExit { code: exit.code, signal: exit.signal, timed_out }
    }
}

async fn expiry(limit: Option<Duration>) {
    match limit {
        Some(limit) => sleep(limit).await,
        None => std::future::pending().await,
    }
}

type Sources = Vec<(Source, fn(bytes::Bytes) -> Kind)>;

fn streams(ends: Ends) -> io::Result<(Stdin, Sources)> {
    match ends {
        Ends::Tty(fd) => {
            let (source, stdin) = output::terminal(fd)?;
            Ok((stdin, vec![(source, Kind::Stdout)]))
        }
        Ends::Pipes { stdin, stdout, stderr } => {
            let stdin = match stdin {
                Some(fd) => Stdin::Pipe(pipe::Sender::from_owned_fd(fd)?),
                None => Stdin::Null,
            };
            let sources: Sources =
                vec![(Source::pipe(stdout)?, Kind::Stdout), (Source::pipe(stderr)?, Kind::Stderr)];
            Ok((stdin, sources))
        }
    }
}
