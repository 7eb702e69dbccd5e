//! Every node at once: pods are given a place, their agents run, and they end when they are told to.

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use tokio::{
    io::DuplexStream,
    process::{Child, Command},
    sync::watch,
};

use crate::{
    agent::{Local, until_some},
    resources::{Key, PODS},
    store::{Part, deleting, number, text},
    world::World,
};

/// What runs in a pod.
#[derive(Debug)]
pub(crate) struct Running {
    agent: Agent,
    /// The code that it ended with.
    ended: watch::Sender<Option<i32>>,
}

#[derive(Debug)]
enum Agent {
    Local(Arc<Local>),
    Process { pid: i32, folder: tempfile::TempDir, program: PathBuf },
}

/// The pods that run, by uid.
#[derive(Debug)]
pub(crate) struct Kubelet {
    pods: Mutex<HashMap<String, Arc<Running>>>,
    /// The beginning of the addresses of its pods, and how many there were.
    network: [u8; 2],
    made: AtomicU64,
}

impl Default for Kubelet {
    fn default() -> Self {
        // Others on this machine have pods, too.
        let [a, b, ..] = RandomState::new().build_hasher().finish().to_le_bytes();
        Self { pods: Mutex::default(), network: [64 + a % 64, b], made: AtomicU64::new(0) }
    }
}

impl Kubelet {
    /// An address that an agent on this machine can listen on.
    fn address(&self) -> String {
        let ([a, b], made) = (self.network, self.made.fetch_add(1, Ordering::Relaxed));
        format!("127.{a}.{b}.{}", 1 + made % 254)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Running>>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn log(&self, uid: &str) -> String {
        let runs = self.lock().contains_key(uid);
        if runs { "torpor-agent: ready\n".to_owned() } else { String::new() }
    }

    pub(crate) fn kill(&self, uid: &str) {
        if let Some(running) = self.lock().remove(uid) {
            running.signal(Signal::SIGKILL);
        }
    }

    /// A stream to what listens in the pod; none when nothing runs there.
    pub(crate) fn connect(&self, uid: &str) -> Option<Connection> {
        let running = self.lock().get(uid)?.clone();
        match &running.agent {
            Agent::Local(local) => {
                let (ours, theirs) = tokio::io::duplex(256 << 10);
                local.clone().serve(theirs);
                Some(Connection::Local(ours))
            }
            Agent::Process { folder, program, .. } => {
                let socket = folder.path().join("agent.sock");
                let child = Command::new(program)
                    .arg("--connect")
                    .arg(socket)
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::null())
                    .kill_on_drop(true)
                    .spawn();
                child.ok().map(|child| Connection::Process(Box::new(child)))
            }
        }
    }

    pub(crate) fn end(&self) {
        self.lock().drain().for_each(|(_, running)| running.signal(Signal::SIGKILL));
    }
}

/// What an exec in a pod is connected with.
pub(crate) enum Connection {
    Local(DuplexStream),
    Process(Box<Child>),
}

impl Running {
    fn signal(&self, signal: Signal) {
        match &self.agent {
            Agent::Process { pid, .. } => {
                // Gone already is as good.
                let _ = kill(Pid::from_raw(*pid), signal);
            }
            Agent::Local(local) if signal == Signal::SIGKILL => local.end(137),
            Agent::Local(local) => local.end(143),
        }
    }
}

/// Follows the changes of pods until it is dropped.
pub(crate) async fn run(world: Arc<World>) {
    let mut changes = world.changed.subscribe();
    let mut at = 0;
    loop {
        let (new, ending, reached) = {
            let inner = world.lock();
            let (mut new, mut ending) = (Vec::new(), Vec::new());
            for entry in inner.objects.since(at).filter(|entry| entry.key.0 == PODS) {
                let was_ending = entry.old.as_ref().is_some_and(|old| deleting(old));
                let uid = text(&entry.new, "/metadata/uid").to_owned();
                if entry.old.is_none() {
                    new.push((entry.key.clone(), uid));
                } else if entry.gone {
                    world.kubelet.kill(&uid);
                } else if deleting(&entry.new) && !was_ending {
                    ending.push((entry.key.clone(), entry.new.clone()));
                }
            }
            (new, ending, inner.objects.version)
        };
        at = reached;
        for (key, uid) in new {
            tokio::spawn(boot(world.clone(), key, uid));
        }
        for (key, pod) in ending {
            tokio::spawn(terminate(world.clone(), key, pod));
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

fn is_there(world: &World, key: &Key, uid: &str) -> bool {
    world.lock().objects.get(key).is_ok_and(|pod| text(&pod, "/metadata/uid") == uid && !deleting(&pod))
}

fn waits(world: &World) -> Option<(&'static str, &'static str)> {
    let behaviour = world.behaviour();
    match behaviour.stuck {
        _ if behaviour.no_image => Some(("ImagePullBackOff", "Back-off pulling image")),
        Some("") => Some(("ContainerCreating", "")),
        Some(reason) => Some((reason, "as the test wants it")),
        None => None,
    }
}

async fn boot(world: Arc<World>, key: Key, uid: String) {
    while world.behaviour().unschedulable {
        world.edit(&key, Part::Status, |pod| {
            pod["status"]["conditions"] = json!([{"type": "PodScheduled", "status": "False",
                "reason": "Unschedulable", "message": "0/3 nodes are available: 3 Insufficient memory."}]);
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        if !is_there(&world, &key, &uid) {
            return;
        }
    }
    if !is_there(&world, &key, &uid) {
        return;
    }
    world.edit(&key, Part::Main, |pod| pod["spec"]["nodeName"] = json!("node-1"));
    // It tries again what may go by.
    while let Some((reason, message)) = waits(&world) {
        world.edit(&key, Part::Status, |pod| {
            pod["status"]["containerStatuses"] = json!([{"name": "sandbox", "ready": false,
                "state": {"waiting": {"reason": reason, "message": message}}}]);
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        if !is_there(&world, &key, &uid) {
            return;
        }
    }
    let behaviour = world.behaviour();
    tokio::time::sleep(behaviour.boot).await;
    if !is_there(&world, &key, &uid) {
        return;
    }
    let (ended, mut end) = watch::channel(None);
    let agent = match &behaviour.agent {
        None => Agent::Local(Local::new(ended.clone())),
        Some(program) => match start(program, ended.clone()) {
            Ok(agent) => agent,
            Err(error) => {
                world.edit(&key, Part::Status, |pod| {
                    pod["status"] = json!({"phase": "Failed", "message": error.to_string()});
                });
                return;
            }
        },
    };
    let ips = match &agent {
        Agent::Local(_) => vec!["10.1.0.1".to_owned()],
        Agent::Process { .. } if behaviour.pod_ips.is_empty() => vec![world.kubelet.address()],
        Agent::Process { .. } => behaviour.pod_ips,
    };
    world.kubelet.lock().insert(uid.clone(), Arc::new(Running { agent, ended }));
    world.edit(&key, Part::Status, |pod| {
        pod["status"] = json!({
            "phase": "Running", "podIP": ips[0],
            "podIPs": ips.iter().map(|ip| json!({"ip": ip})).collect::<Vec<_>>(),
            "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "sandbox", "ready": true, "state": {"running": {}}}],
        });
    });
    until_some(&mut end).await;
    let code = end.borrow().unwrap_or_default();
    // One that was killed from outside has its end written by whoever did that.
    if world.kubelet.lock().remove(&uid).is_some() {
        world.edit(&key, Part::Status, |pod| {
            let phase = if code == 0 { "Succeeded" } else { "Failed" };
            pod["status"]["phase"] = json!(phase);
            pod["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
            pod["status"]["containerStatuses"] = json!([{"name": "sandbox", "ready": false,
                "state": {"terminated": {"exitCode": code, "reason": "Completed"}}}]);
        });
    }
}

/// The real agent as a process of this machine.
fn start(program: &Path, ended: watch::Sender<Option<i32>>) -> std::io::Result<Agent> {
    let folder = tempfile::Builder::new().prefix("tk").tempdir_in("/tmp")?;
    let mut child = Command::new(program)
        .arg("--pod")
        .arg(folder.path().join("agent.sock"))
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).unwrap_or_default();
    tokio::spawn(async move {
        let code = child.wait().await.ok().and_then(|status| status.code()).unwrap_or(137);
        ended.send_replace(Some(code));
    });
    Ok(Agent::Process { pid, folder, program: program.to_owned() })
}

async fn terminate(world: Arc<World>, key: Key, pod: Arc<Value>) {
    let uid = text(&pod, "/metadata/uid").to_owned();
    let grace = Duration::from_secs(number(&pod, "/metadata/deletionGracePeriodSeconds"));
    let running = world.kubelet.lock().get(&uid).cloned();
    if let Some(running) = running {
        let mut end = running.ended.subscribe();
        running.signal(Signal::SIGTERM);
        if tokio::time::timeout(grace, until_some(&mut end)).await.is_err() {
            running.signal(Signal::SIGKILL);
        }
    }
    tokio::time::sleep(world.behaviour().linger).await;
    world.kubelet.kill(&uid);
    let mut inner = world.lock();
    if inner.objects.get(&key).is_ok_and(|pod| text(&pod, "/metadata/uid") == uid) {
        inner.objects.remove(&key);
    }
    drop(inner);
    world.announce();
}
