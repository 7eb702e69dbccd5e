//! What earlier lives of the gateway left.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, PoisonError},
};

use futures::StreamExt as _;
use torpor_driver_common::turns::blocking;
use torpor_netpool::{Live, Process, Sweep, linux, sweep};
use torpor_sandbox::{ComputeDriver as _, DriverError, SandboxId};

use crate::{
    driver::VmDriver,
    errors,
    host::Host,
    process,
    rundir::{self, host_boot},
    vm::Vm,
};

/// Runs that are looked at side by side.
const SWEPT_AT_ONCE: usize = 32;

/// What a guest may take to flush and end that should not be running.
const GRACE: std::time::Duration = std::time::Duration::from_secs(10);

/// What the records say of a sandbox that something is there of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It has a loan: it may run.
    Runs,
    /// It has a record and no loan.
    AtRest,
    /// There is no record of it.
    Unknown,
}

impl VmDriver {
    /// Once, when the gateway starts and before it serves: takes up the VMs that run, ends those that should not
    /// by what `standing` says (a running one of no record is left: whoever restored an old database may want to say
    /// something first), gives back what is left of runs whose VM is gone with an earlier boot of the host and of TAPs,
    /// firewall elements and cgroups without a loan, and finishes deletes that were cut short. Returns lines for the log.
    ///
    /// # Errors
    /// What can't be listed; what can't be repaired is a line.
    pub async fn sweep(
        self: &Arc<Self>,
        standing: &(dyn Fn(&SandboxId) -> Standing + Sync),
    ) -> Result<Vec<String>, DriverError> {
        let mut lines = Vec::new();
        let host = Arc::clone(&self.host);
        let ids =
            rundir::all(host.run_root()).map_err(|source| DriverError::backend("list the runs", source))?;
        // Side by side: one whose guest takes its time to end keeps no other from being taken up.
        let swept = futures::stream::iter(ids).map(|id| async move {
            let line = self.sweep_run(&id, standing(&id)).await;
            line.unwrap_or_else(|error| Some(format!("{id}: {error}")))
        });
        lines.extend(
            swept.buffer_unordered(SWEPT_AT_ONCE).filter_map(std::future::ready).collect::<Vec<_>>().await,
        );
        let repairs = tokio::task::spawn_blocking(move || {
            let emptied = host.store.empty_trash();
            let mut lines =
                emptied.map_err(|source| DriverError::backend("list deleted sandboxes", source))?;
            // Which VMs run is looked at one by one, above and by the gateway. What a start needs it sees to itself, so
            // that a firewall that doesn't answer keeps nobody from what needs none.
            match repair(&host, None) {
                Ok(repaired) => lines.extend(repaired.lines),
                Err(error) => {
                    lines.push(format!("what earlier runs left of the network stays for now: {error}"))
                }
            }
            Ok::<_, DriverError>(lines)
        });
        lines.extend(repairs.await.map_err(|error| DriverError::backend("sweep", error))??);
        Ok(lines)
    }

    /// Every few minutes: compares what is lent with what the kernel has and with the VM processes that live, each with
    /// each, and repairs what can be repaired. Of the rest hints are given. Returns a line for each.
    ///
    /// # Errors
    /// What can't be listed.
    pub async fn sweep_kernel(&self) -> Result<Vec<String>, DriverError> {
        let host = Arc::clone(&self.host);
        let found = blocking(move || {
            let processes = processes(&host)?;
            repair(&host, Some(processes))
        })
        .await?;
        let mut lines = found.lines;
        let odd: BTreeMap<SandboxId, String> = found.odd.into_iter().collect();
        let known = odd.keys().cloned().collect();
        let before = std::mem::replace(&mut *self.odd.lock().unwrap_or_else(PoisonError::into_inner), known);
        for (id, line) in &odd {
            // A start or a stop that is under way looks just like that, and is over by the next time.
            if before.contains(id) && !self.turns.is_busy(id) {
                lines.push(line.clone());
                let _nobody = self.hints.send(id.clone()).is_err();
            }
        }
        Ok(lines)
    }

    /// Now and then: puts back the firewall's table and the elements of running VMs, which others may have flushed away. A
    /// guest without its element is cut off, and without the table it is let through to the host. Returns lines for the
    /// log.
    ///
    /// # Errors
    /// What can't be listed or put back.
    pub async fn tend(&self) -> Result<Vec<String>, DriverError> {
        let host = Arc::clone(&self.host);
        let (tended, there) = blocking(move || {
            // What can't be mended of the rest keeps no guest's element from being put back.
            // Name servers may have changed, and with them whom guests may ask.
            let ready = host.ready();
            let tended = host.network.tend().map_err(errors::net("look after the network"));
            let tended = ready.and(tended);
            let there =
                host.network.firewall().list().map_err(errors::net("list the firewall's elements"))?;
            Ok((tended, there))
        })
        .await?;
        let mut lines = self.put_elements_back(&there).await?;
        let tended = tended?;
        if tended.forgotten == linux::Forgotten::Unsupported {
            static ONCE: std::sync::Once = std::sync::Once::new();
            ONCE.call_once(|| {
                tracing::warn!(
                    "this kernel can't delete connections (CONFIG_NF_CT_NETLINK): those of a suspended sandbox end by \
                     their timeout; give `quarantine_seconds` of the pool a larger value"
                );
            });
        }
        if tended.table != linux::Ensured::Already {
            lines.push("the firewall's table was gone or changed: made right again".to_owned());
        }
        Ok(lines)
    }

    /// The elements of watched VMs that are not among those that are there.
    async fn put_elements_back(&self, there: &[torpor_netpool::Guest]) -> Result<Vec<String>, DriverError> {
        let (mut lines, there): (_, HashSet<_>) = (Vec::new(), there.iter().collect());
        for vm in self.all_watched() {
            let guest = |vm: &Vm| vm.net().as_ref().map(torpor_netpool::GuestNet::guest);
            let id = &vm.record.sandbox;
            let before = guest(&vm);
            if before.as_ref().is_none_or(|guest| there.contains(guest)) {
                continue;
            }
            // A step that is under way sees to the element itself.
            let Some(quiet) = self.turns.quiet(id).await else { continue };
            let (host, vm) = (Arc::clone(&self.host), Arc::clone(&vm));
            let put_back = blocking(move || {
                let _held = quiet;
                // What it may do may have changed since the elements were listed; who changed that has put the new one there.
                let same = guest(&vm).filter(|now| before.as_ref() == Some(now));
                let Some(guest) = same.filter(|_| !vm.seen().gone && !vm.handle.has_ended()) else {
                    return Ok(false);
                };
                let _objects = host.objects.read().unwrap_or_else(PoisonError::into_inner);
                host.network.firewall().add(&guest).map_err(errors::net("put back the element"))?;
                Ok(true)
            });
            if put_back.await? {
                lines.push(format!("{id}: its firewall element was gone: put back"));
            }
        }
        Ok(lines)
    }

    async fn sweep_run(&self, id: &SandboxId, standing: Standing) -> Result<Option<String>, DriverError> {
        match standing {
            // Whoever restored an old database may want to say something first.
            Standing::Unknown if self.live(id).await?.is_some() => {
                return Ok(Some(format!("{id}: no record knows it; it is left for the grace of orphans")));
            }
            // Storage is left alone: only a delete that somebody asked for removes it.
            Standing::AtRest | Standing::Unknown => {
                let stopped = self.stop(id, torpor_sandbox::Keep::Disk, GRACE).await?;
                let detail = stopped.detail.map(|detail| format!(" ({detail})")).unwrap_or_default();
                return Ok(Some(format!("{id}: ended, as it should not be running{detail}")));
            }
            Standing::Runs => {}
        }
        if let Some(vm) = self.live(id).await? {
            let pid = vm.handle.identity().pid;
            return Ok(Some(format!("{id}: run {} goes on in process {pid}", vm.record.run)));
        }
        let record = self.host.run_dir(id).record().ok().flatten();
        if record.is_none_or(|record| record.host_boot == host_boot()) {
            return Ok(None);
        }
        let (turn, wanted) = (self.turns.turn(id).await, id.clone());
        self.step(id, &turn, move |host| host.release(&wanted)).await?;
        Ok(Some(format!("{id}: its run ended with the host's")))
    }
}

/// What a comparison came to.
struct Repaired {
    /// A line for each repair, and for each loan that can't be told.
    lines: Vec<String>,
    /// Sandboxes whose VM process or TAP is not what their loan says, with a line for each.
    odd: Vec<(SandboxId, String)>,
}

/// The VM processes of this driver's sandboxes.
fn processes(host: &Host) -> Result<Vec<Process>, DriverError> {
    let all = process::all().map_err(|source| DriverError::backend("look for VM processes", source))?;
    let ours = all.into_iter().filter(|(id, _)| host.run_dir(id).exists() || host.store.exists(id));
    let process = |(id, pid): (SandboxId, u32)| Process {
        sandbox_id: id.to_string(),
        pid: i32::try_from(pid).unwrap_or_default(),
    };
    Ok(ours.map(process).collect())
}

/// Objects of the kernel, and processes where these are known, against the loans.
fn repair(host: &Host, processes: Option<Vec<Process>>) -> Result<Repaired, DriverError> {
    host.ready()?;
    let failed = |context| errors::net(context);
    let cgroups = host.cgroups.as_ref();
    // No run makes or removes objects meanwhile.
    let _objects = host.objects.write().unwrap_or_else(PoisonError::into_inner);
    // Objects first: a start writes its loan before it makes any.
    let live =
        linux::live(host.pool(), &host.network, cgroups).map_err(failed("list the network's objects"))?;
    let live = Live { processes, ..live };
    let loans = host.ledger.all().map_err(errors::ledger)?;
    let mut found = sweep(host.pool(), &loans, &live, &|loan| host.egress(loan));
    let done = linux::apply(
        host.pool(),
        &host.network,
        cgroups,
        host.ledger.as_ref(),
        std::mem::take(&mut found.repairs),
    );
    let mut lines: Vec<String> = done
        .iter()
        .map(|(repair, result)| match result {
            Ok(()) => repair.to_string(),
            Err(error) => format!("{repair}: failed: {error}"),
        })
        .collect();
    let mut odd = Vec::new();
    let mut one = |id: &str, line: String| odd.extend(id.parse().ok().map(|id: SandboxId| (id, line)));
    for loan in &found.without_tap {
        let tap = host.pool().tap_name(loan.slot);
        one(&loan.sandbox_id, format!("{}: has slot {}, but no tap {tap}", loan.sandbox_id, loan.slot.0));
    }
    // The words for these are the pool's own.
    let ended = std::mem::take(&mut found.without_process);
    let unknown = std::mem::take(&mut found.without_loan);
    for loan in ended {
        let id = loan.sandbox_id.clone();
        let only = Sweep { without_process: vec![loan], ..Sweep::default() };
        one(&id, only.lines().concat());
    }
    for process in unknown {
        let id = process.sandbox_id.clone();
        let only = Sweep { without_loan: vec![process], ..Sweep::default() };
        one(&id, only.lines().concat());
    }
    lines.extend(found.lines());
    Ok(Repaired { lines, odd })
}
