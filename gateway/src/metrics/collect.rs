//! Everything that a scrape tells.

use std::{sync::Arc, time::Instant};

use torpor_sandbox::Phase;

use super::{Label, Name, calls::Calls, text::Text};
use crate::{reconcile::Reconciler, service::Service, store::StoreError};

/// Where figures come from.
pub struct Sources {
    /// Records, drivers, the disk.
    pub service: Arc<Service>,
    /// What is being done.
    pub reconciler: Arc<Reconciler>,
    /// What clients ask.
    pub calls: Arc<Calls>,
    /// Since when.
    pub started: Instant,
}

impl Sources {
    /// A scrape.
    ///
    /// # Errors
    /// The database's.
    pub async fn scrape(&self) -> Result<String, StoreError> {
        let mut text = Text::default();
        let name =
            Name { name: "torpor_build_info", help: "Always 1; which version this is.", labels: ["version"] };
        text.gauges(&name, [([env!("CARGO_PKG_VERSION").into()], 1.0)]);
        self.drivers(&mut text);
        self.records(&mut text).await?;
        self.service.store.phases.write(&mut text);
        self.work(&mut text);
        self.calls.write(&mut text);
        self.host(&mut text);
        Ok(text.finish())
    }

    fn drivers(&self, text: &mut Text) {
        let help = "Always 1; the drivers and what they run on.";
        let name = Name { name: "torpor_driver_info", help, labels: ["driver", "version", "machine"] };
        let all = self.service.drivers.all().map(|driver| {
            let can = driver.capabilities();
            ([can.name.into(), can.version.into(), can.machine.into()], 1.0)
        });
        text.gauges(&name, all);
        let help = "Agents by the way that they are reached, of drivers that have more than one.";
        let name = Name { name: "torpor_agent_links", help, labels: ["driver", "link"] };
        let mut links = Vec::new();
        for driver in self.service.drivers.all() {
            let of: Label = driver.capabilities().name.into();
            let all = driver.agent_links().into_iter();
            links.extend(all.map(|(link, count)| ([of.clone(), link.into()], count as f64)));
        }
        if !links.is_empty() {
            text.gauges(&name, links);
        }
    }

    async fn records(&self, text: &mut Text) -> Result<(), StoreError> {
        let counts = self.service.store.by_phase().await?;
        let name = Name { name: "torpor_sandboxes", help: "Sandboxes by phase.", labels: ["phase"] };
        let all = Phase::ALL.map(|phase| {
            let count = counts.get(phase.as_str()).copied().unwrap_or_default();
            ([phase.as_str().into()], count as f64)
        });
        text.gauges(&name, all);
        let pool = self.service.store.counters().await?.pool;
        let rows = [("network_slots", pool.slots), ("cpus", pool.cpus), ("memory_bytes", pool.memory)];
        let name =
            Name { name: "torpor_pool_capacity", help: "What the host's pool has.", labels: ["resource"] };
        text.gauges(&name, rows.map(|(row, counter)| ([row.into()], counter.capacity as f64)));
        let name =
            Name { name: "torpor_pool_used", help: "What of the host's pool is lent.", labels: ["resource"] };
        text.gauges(&name, rows.map(|(row, counter)| ([row.into()], counter.used as f64)));
        Ok(())
    }

    fn work(&self, text: &mut Text) {
        let work = self.reconciler.load();
        let help = "Sandboxes that something is being done for, or that wait for it.";
        text.gauge("torpor_reconcile_active", help, work.active as f64);
        let help = "Those that wait for something of the host.";
        text.gauge("torpor_reconcile_hungry", help, work.hungry as f64);
        let name = Name {
            name: "torpor_reconcile_queue",
            help: "Verbs that wait for a place among those of their kind.",
            labels: ["pool"],
        };
        text.gauges(&name, work.pools.map(|pool| ([pool.name.into()], pool.waiting as f64)));
        let help = "Verbs that are being done.";
        let name = Name { name: "torpor_reconcile_running", help, labels: ["pool"] };
        text.gauges(&name, work.pools.map(|pool| ([pool.name.into()], pool.running as f64)));
        self.reconciler.driver_calls.write(text);
        let help = "Requests of clients that wait for the database's writer.";
        text.gauge("torpor_store_queue", help, self.service.store.queue() as f64);
    }

    fn host(&self, text: &mut Text) {
        if let Some(space) = self.service.pressure.look() {
            let help = "Free space on the state directory's file system.";
            text.gauge("torpor_disk_free_bytes", help, space.free as f64);
            let help = "1 while there is disk pressure.";
            text.gauge("torpor_disk_pressure", help, f64::from(u8::from(space.is_low())));
        }
        let help = "How long the gateway has been serving.";
        text.gauge("torpor_uptime_seconds", help, self.started.elapsed().as_secs_f64());
        if let Some(bytes) = resident() {
            text.gauge("process_resident_memory_bytes", "Resident memory size in bytes.", bytes as f64);
        }
        if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
            text.gauge("process_open_fds", "Number of open file descriptors.", open.count() as f64);
        }
    }
}

fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? << 10)
}
