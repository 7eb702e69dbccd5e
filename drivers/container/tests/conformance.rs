//! The suite that every driver passes, over real engines.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::sync::{Arc, Mutex, OnceLock};

use async_trait::async_trait;
use common::{Bench, Running, running, with_criu};
use torpor_driver_container::{ContainerDriver, Engine};
use torpor_sandbox::{ComputeDriver, Run, SandboxId, SandboxSpec, conformance, conformance::Harness};

struct Containers {
    bench: Bench,
    running: &'static Running,
    /// None only while one takes the place of the other.
    driver: Mutex<Option<Arc<ContainerDriver>>>,
}

#[async_trait]
impl Harness for Containers {
    fn driver(&self) -> Arc<dyn ComputeDriver> {
        self.driver.lock().unwrap().clone().unwrap()
    }

    fn spec(&self) -> SandboxSpec {
        self.bench.spec()
    }

    async fn lend(&self, _id: &SandboxId, _run: Run) {}

    async fn take_back(&self, id: &SandboxId) {
        assert!(self.bench.leftovers(id).is_empty());
        assert_eq!(self.running.held(id.as_str()), Vec::<String>::new());
    }

    async fn restart(&self) {
        let mut driver = self.driver.lock().unwrap();
        drop(driver.take());
        *driver = Some(self.bench.driver());
    }

    async fn kill(&self, id: &SandboxId) {
        self.running.container(id.as_str(), "kill");
    }

    async fn lose_storage(&self, id: &SandboxId) {
        self.running.remove(id.as_str());
    }
}

async fn containers(engine: Engine) -> Option<Containers> {
    Some(on(running("conformance", engine)?).await)
}

async fn on(running: &'static Running) -> Containers {
    let (bench, driver) = Bench::new(running).await;
    Containers { bench, running, driver: Mutex::new(Some(driver)) }
}

conformance!(docker, containers(Engine::Docker));
conformance!(podman, containers(Engine::Podman));

/// The case about memory once more, on an engine that makes checkpoints; it ends with the program.
async fn memory_is_kept(engine: Engine) {
    static ALL: [OnceLock<Option<Running>>; 2] = [OnceLock::new(), OnceLock::new()];
    let running =
        ALL[usize::from(engine == Engine::Podman)].get_or_init(|| with_criu("memory_is_kept", engine));
    if let Some(running) = running {
        conformance::memory_is_kept_or_refused(&on(running).await).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn docker_with_criu_keeps_memory() {
    memory_is_kept(Engine::Docker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn podman_with_criu_keeps_memory() {
    memory_is_kept(Engine::Podman).await;
}
