//! The suite that every driver passes, over real VMs.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{fs, path::PathBuf, process::Command, sync::Arc, sync::Mutex};

use async_trait::async_trait;
use common::{Bench, IN_NAMESPACE, bench, signal};
use torpor_driver_vm::VmDriver;
use torpor_sandbox::{ComputeDriver, Run, SandboxId, SandboxSpec, conformance, conformance::Harness};

struct Vms {
    bench: Bench,
    /// None only while one takes the place of the other.
    driver: Mutex<Option<Arc<VmDriver>>>,
}

#[async_trait]
impl Harness for Vms {
    fn driver(&self) -> Arc<dyn ComputeDriver> {
        self.driver.lock().unwrap().clone().unwrap()
    }

    fn spec(&self) -> SandboxSpec {
        self.bench.spec()
    }

    async fn lend(&self, id: &SandboxId, run: Run) {
        self.bench.loans.lend(id, run);
    }

    async fn take_back(&self, id: &SandboxId) {
        self.bench.loans.release(id);
        assert_eq!(self.bench.leftovers(id), Vec::<String>::new(), "the loan goes back while it is in use");
    }

    async fn restart(&self) {
        let mut driver = self.driver.lock().unwrap();
        drop(driver.take());
        *driver = Some(self.bench.driver());
    }

    async fn kill(&self, id: &SandboxId) {
        signal(self.driver().facts(id).await.host.unwrap().pid, "-9");
    }

    async fn lose_storage(&self, id: &SandboxId) {
        let overlay: PathBuf = self.bench.state(id).join("overlay.qcow2");
        fs::remove_file(overlay).unwrap();
    }
}

/// The macro's tests make their threads before they come here: their namespace has to be there already.
async fn vms() -> Option<Vms> {
    if std::env::var_os(IN_NAMESPACE).is_none() {
        println!("runs inside of the_suite_passes_in_a_namespace_of_its_own");
        return None;
    }
    let bench = bench("the_suite_passes_in_a_namespace_of_its_own")?;
    let driver = Mutex::new(Some(bench.driver()));
    Some(Vms { bench, driver })
}

conformance!(vm, vms());

#[test]
fn the_suite_passes_in_a_namespace_of_its_own() {
    if std::env::var_os(IN_NAMESPACE).is_some()
        || bench("the_suite_passes_in_a_namespace_of_its_own").is_none()
    {
        return;
    }
    let own = std::env::current_exe().unwrap();
    let status = Command::new("unshare")
        .arg("--net")
        .arg(own)
        .args(["--test-threads=2", "vm::"])
        .env(IN_NAMESPACE, "1")
        .status()
        .unwrap();
    assert!(status.success());
}
