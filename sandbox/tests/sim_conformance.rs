//! The conformance list over the driver that only pretends: the suite is tested by it, and it by the suite.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use torpor_sandbox::{
    ComputeDriver, Exit, Resources, Run, SandboxId, SandboxSpec,
    conformance::Harness,
    sim::{Script, SimDriver},
};

struct Sim(Mutex<Arc<SimDriver>>);

impl Sim {
    fn sim(&self) -> Arc<SimDriver> {
        self.0.lock().unwrap().clone()
    }
}

#[async_trait]
impl Harness for Sim {
    fn driver(&self) -> Arc<dyn ComputeDriver> {
        self.sim()
    }

    fn spec(&self) -> SandboxSpec {
        SandboxSpec {
            stop_grace: Duration::from_secs(1),
            ..SandboxSpec::of(
                "sim",
                "any",
                "sha256:any",
                Resources { cpus: 1, memory_bytes: 128 << 20, disk_bytes: 1 << 30 },
            )
        }
    }

    async fn lend(&self, _id: &SandboxId, _run: Run) {}
    async fn take_back(&self, _id: &SandboxId) {}
    async fn restart(&self) {}

    async fn kill(&self, id: &SandboxId) {
        self.sim().end(id, Exit::Lost("killed".into()));
    }

    async fn lose_storage(&self, id: &SandboxId) {
        self.sim().lose_storage(id);
    }
}

async fn with_memory() -> Option<Sim> {
    Some(Sim(Mutex::new(SimDriver::new(Script::default()))))
}

async fn slow_without_memory() -> Option<Sim> {
    let delay = (Duration::from_millis(1), Duration::from_millis(20));
    let script = Script { delay, keeps_memory: false, ..Script::default() };
    Some(Sim(Mutex::new(SimDriver::new(script))))
}

torpor_sandbox::conformance!(with_memory_images, with_memory());
torpor_sandbox::conformance!(slow_and_without_memory_images, slow_without_memory());
