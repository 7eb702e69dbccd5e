//! The suite that every driver passes, over a cluster in memory with each release of the controller.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use common::{Bench, claim, object};
use torpor_driver_kubernetes::KubernetesDriver;
use torpor_sandbox::{ComputeDriver, Run, SandboxId, SandboxSpec, conformance, conformance::Harness};
use torpor_test_kube::{Behaviour, Generation};

struct Pods {
    bench: Bench,
    /// None only while one takes the place of the other.
    driver: Mutex<Option<Arc<KubernetesDriver>>>,
}

#[async_trait]
impl Harness for Pods {
    fn driver(&self) -> Arc<dyn ComputeDriver> {
        self.driver.lock().unwrap().clone().unwrap()
    }

    fn spec(&self) -> SandboxSpec {
        common::spec()
    }

    async fn lend(&self, _id: &SandboxId, _run: Run) {}

    async fn take_back(&self, id: &SandboxId) {
        assert_eq!(self.bench.server.object("pods", &object(id)), None, "a pod is left");
    }

    async fn restart(&self) {
        drop(self.driver.lock().unwrap().take());
        let driver = self.bench.driver().await;
        *self.driver.lock().unwrap() = Some(driver);
    }

    async fn kill(&self, id: &SandboxId) {
        self.bench.server.kill_pod(&object(id));
    }

    async fn lose_storage(&self, id: &SandboxId) {
        self.bench.server.remove("persistentvolumeclaims", &claim(id));
    }
}

async fn pods(generation: Generation) -> Option<Pods> {
    let (bench, driver) = Bench::new(generation).await;
    Some(Pods { bench, driver: Mutex::new(Some(driver)) })
}

conformance!(v0_4, pods(Generation::Alpha));
conformance!(v0_5_0, pods(Generation::Early));
conformance!(v1_0, pods(Generation::Stable));

/// The same with the real agent as a process of this machine.
async fn with_agents() -> Option<Pods> {
    let agent = common::agent("conformance with real agents")?;
    let behaviour = Behaviour { agent: Some(agent), ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, |_| {}).await;
    Some(Pods { bench, driver: Mutex::new(Some(driver)) })
}

conformance!(real_agents, with_agents());
