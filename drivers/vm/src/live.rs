//! The VMs that are watched: who is known, and how one that runs is taken up.

use std::{
    collections::HashMap,
    sync::{Arc, MutexGuard, PoisonError},
};

use torpor_driver_common::turns::blocking;
use torpor_sandbox::{DriverError, Exit, SandboxId};

use crate::{driver::VmDriver, process::Handle, rundir::Record, vm::Vm};

/// The VMs that are watched. Never held over a wait.
pub(crate) type Live = std::sync::Mutex<HashMap<SandboxId, Arc<Vm>>>;

impl VmDriver {
    fn map(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<Vm>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The VM of a sandbox, if it is watched and not gone. Looks at nothing but what is known.
    pub(crate) fn watched(&self, id: &SandboxId) -> Option<Arc<Vm>> {
        let mut live = self.map();
        if live.get(id)?.seen().gone {
            live.remove(id);
            return None;
        }
        live.get(id).cloned()
    }

    /// Every VM that is watched and not gone.
    pub(crate) fn all_watched(&self) -> Vec<Arc<Vm>> {
        self.map().values().filter(|vm| !vm.seen().gone).cloned().collect()
    }

    /// Forgets this VM, whose process is gone.
    pub(crate) fn forget(&self, vm: &Arc<Vm>) {
        let mut live = self.map();
        if live.get(&vm.record.sandbox).is_some_and(|known| Arc::ptr_eq(known, vm)) {
            live.remove(&vm.record.sandbox);
        }
    }

    /// The running VM of a sandbox, taken up when it isn't watched yet.
    pub(crate) async fn live(&self, id: &SandboxId) -> Result<Option<Arc<Vm>>, DriverError> {
        if let Some(vm) = self.watched(id) {
            return Ok(Some(vm));
        }
        // Looking takes a while and must not keep anybody from the others; but this one gets one watcher only.
        let _held = self.turns.adopting(id).await;
        if let Some(vm) = self.watched(id) {
            return Ok(Some(vm));
        }
        let (host, wanted) = (Arc::clone(&self.host), id.clone());
        let found = blocking(move || {
            let found = host.find(&wanted)?;
            Ok(found.map(|(record, handle)| (host.run_dir(&wanted).exit(record.run), record, handle)))
        });
        let Some((exit, record, handle)) = found.await? else { return Ok(None) };
        tracing::info!(sandbox = %id, run = %record.run, pid = handle.identity().pid, "adopted");
        Ok(Some(self.watch(record, handle, exit)))
    }

    /// The VM that was just started, which an observer may have taken up meanwhile.
    pub(crate) async fn started(&self, record: Record, handle: Handle) -> Arc<Vm> {
        let _held = self.turns.adopting(&record.sandbox).await;
        match self.watched(&record.sandbox) {
            Some(vm) => vm,
            None => self.watch(record, handle, None),
        }
    }

    /// Only under the sandbox's adoption lock.
    fn watch(&self, record: Record, handle: Handle, exit: Option<Exit>) -> Arc<Vm> {
        let id = record.sandbox.clone();
        let dir = self.host.run_dir(&id);
        let machine = self.host.machines.of_record(&record.machine);
        let vm = Vm::watch(record, dir, handle, exit, machine, self.hints.clone(), self.shortages.clone());
        self.map().insert(id, Arc::clone(&vm));
        vm
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use torpor_netpool::{
        Ledger, LedgerError, Loan, PoolConfig,
        linux::{CgroupParent, CgroupProbe},
    };
    use torpor_sandbox::{ComputeDriver as _, Run};

    use super::*;
    use crate::{VmConfig, process};

    struct NoLoans;

    impl Ledger for NoLoans {
        fn loan(&self, _id: &str) -> Result<Option<Loan>, LedgerError> {
            Ok(None)
        }

        fn all(&self) -> Result<Vec<Loan>, LedgerError> {
            Ok(Vec::new())
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_vm_that_many_ask_for_at_once_gets_one_watcher_and_facts_take_up_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name| folder.path().join(name);
        let mut config = VmConfig::new(path("state"), path("run"), path("agent"));
        config.pool = PoolConfig { instance: "zlv0".parse().unwrap(), ..PoolConfig::default() };
        let pool = config.pool.clone();
        let driver = VmDriver::new(config, Arc::new(NoLoans)).unwrap();
        let id = SandboxId::generate();
        driver.host.run_dir(&id).make().unwrap();
        let mut vm = Command::new("sh")
            .args(["-c", "read end", "-name", &process::marker(&id, Run(1))])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        while process::find(&id).unwrap().is_none() {
            tokio::task::yield_now().await;
        }

        assert_eq!(driver.console(&id, 100).await, b"");
        assert!(driver.facts(&id).await.host.is_none(), "facts are what is known");
        let asked = (0..16).map(|_| {
            let (driver, id) = (Arc::clone(&driver), id.clone());
            tokio::spawn(async move { driver.live(&id).await.unwrap().unwrap() })
        });
        let found = futures::future::join_all(asked.collect::<Vec<_>>()).await;
        let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
        assert!(found.iter().all(|vm| Arc::ptr_eq(vm, &found[0])));
        assert_eq!(driver.facts(&id).await.host.unwrap().pid, vm.id());

        vm.kill().unwrap();
        found[0].gone().await;
        assert!(driver.watched(&id).is_none() && driver.live(&id).await.unwrap().is_none());
        let _reaped = vm.wait();
        if let CgroupProbe::Ready(parent) = CgroupParent::probe(&pool) {
            parent.remove().unwrap();
        }
    }
}
