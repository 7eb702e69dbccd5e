//! An engine for tests that shows one container and answers what it is told to.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    os::unix::{
        fs::symlink,
        net::{UnixListener, UnixStream},
    },
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::Duration,
};

use torpor_sandbox::{Resources, Run, SandboxId, SandboxSpec};

use crate::{ContainerConfig, Engine, driver::Inner, run::Record, types::Inspect};

/// How requests are answered whose line holds these words, and what the container's state is from then on.
pub(crate) struct Rule {
    pub(crate) request: &'static str,
    pub(crate) status: u16,
    pub(crate) body: String,
    pub(crate) then: Option<&'static str>,
}

#[derive(Default)]
pub(crate) struct World {
    /// The container's State as JSON, and its address.
    pub(crate) state: &'static str,
    pub(crate) address: &'static str,
    /// The first one that fits counts.
    pub(crate) rules: Vec<Rule>,
    /// The first line of every request.
    asked: Vec<String>,
    labels: String,
}

pub(crate) struct Fake {
    pub(crate) inner: Arc<Inner>,
    pub(crate) id: SandboxId,
    pub(crate) folder: tempfile::TempDir,
    world: Arc<Mutex<World>>,
}

impl Fake {
    /// An engine with a container in this state. `criu` is the program that says whether checkpoints work.
    pub(crate) fn new(engine: Engine, state: &'static str, criu: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("tf").tempdir_in("/tmp").unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("agent"), "agent").unwrap();
        // A program that was just written may still be open in the processes of another test.
        symlink(criu, path("criu")).unwrap();
        let mut config = ContainerConfig::new(engine, path("state"), path("run"), path("agent"));
        (config.socket, config.criu) = (path("sock"), path("criu"));
        let inner = Arc::new(Inner::new(config).unwrap());
        let id = SandboxId::generate();
        inner.store.specs.write(&id, &spec(engine)).unwrap();
        let labels =
            format!(r#"{{"torpor.dev/gateway":"{}","torpor.dev/sandbox":"{id}"}}"#, inner.store.identity);
        let world = Arc::new(Mutex::new(World { state, labels, ..World::default() }));
        let (listener, served) = (UnixListener::bind(path("sock")).unwrap(), world.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _gone = answer(stream, &served);
            }
        });
        let fake = Self { inner, id, folder, world };
        fake.rule("GET /info", 200, r#"{"DefaultRuntime":"runc","ExperimentalBuild":true}"#, None);
        fake
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    pub(crate) fn rule(
        &self,
        request: &'static str,
        status: u16,
        body: impl Into<String>,
        then: Option<&'static str>,
    ) {
        self.world().rules.push(Rule { request, status, body: body.into(), then });
    }

    pub(crate) fn was_asked(&self, words: &str) -> bool {
        self.world().asked.iter().any(|line| line.contains(words))
    }

    /// The container as it is shown now.
    pub(crate) fn found(&self) -> Inspect {
        serde_json::from_str(&shown(&self.world())).unwrap()
    }

    /// Notes that this run is the one that is shown.
    pub(crate) fn runs(&self, run: Run) {
        let (dir, found) = (self.inner.run_dir(&self.id), self.found());
        let started_at = Some(found.state.started_at.clone());
        dir.make().unwrap();
        dir.write(&Record { started_at, ..Record::new(run, &Inspect::default()) }).unwrap();
    }

    /// The container's state becomes this one in a moment.
    pub(crate) fn becomes(&self, state: &'static str) {
        let world = self.world.clone();
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            world.lock().unwrap().state = state;
        });
    }
}

fn shown(world: &World) -> String {
    format!(
        r#"{{"Id":"c","Image":"sha256:0","State":{},"Config":{{"Labels":{}}},
            "NetworkSettings":{{"IPAddress":"{}"}},"GraphDriver":{{"Data":{{"UpperDir":"/tmp"}}}}}}"#,
        world.state, world.labels, world.address
    )
}

fn answer(mut stream: UnixStream, world: &Mutex<World>) -> io::Result<()> {
    let mut request = [0; 8192];
    let read = stream.read(&mut request)?;
    let text = String::from_utf8_lossy(&request[..read]).into_owned();
    let line = text.lines().next().unwrap_or_default().replace("/v1.41", "");
    let (status, body) = {
        let mut world = world.lock().unwrap();
        world.asked.push(line.clone());
        let (status, body, then) = match world.rules.iter().find(|rule| line.contains(rule.request)) {
            Some(rule) => (rule.status, rule.body.clone(), rule.then),
            None if line.starts_with("GET /containers/torpor-") && line.contains("/json ") => {
                (200, shown(&world), None)
            }
            None if line.starts_with("GET ") => (200, "{}".to_owned(), None),
            None => (204, String::new(), None),
        };
        world.state = then.unwrap_or(world.state);
        (status, body)
    };
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}")
}

fn spec(engine: Engine) -> SandboxSpec {
    SandboxSpec {
        hostname: "web".into(),
        stop_grace: Duration::from_secs(5),
        ..SandboxSpec::of(
            engine.name(),
            "tiny",
            "sha256:0",
            Resources { cpus: 1, memory_bytes: 96 << 20, disk_bytes: 0 },
        )
    }
}
