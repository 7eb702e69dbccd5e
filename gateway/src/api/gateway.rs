//! `torpor.v1.Gateway`.

use std::{path::PathBuf, time::SystemTime};

use tonic::{Request, Response, Status};
use torpor_netpool::policy;
use torpor_proto::v1;

use super::{Shared, convert, to_status};

/// See the module.
pub struct GatewayApi {
    /// The service.
    pub service: Shared,
    /// New with every state directory.
    pub gateway_id: String,
    /// For people.
    pub state_dir: PathBuf,
    /// For people.
    pub run_dir: PathBuf,
    /// Since when.
    pub started: SystemTime,
}

fn resources(pool: &policy::Counters) -> Vec<v1::Resource> {
    let resource = |name: &str, counter: policy::Counter| v1::Resource {
        name: name.to_owned(),
        capacity: counter.capacity,
        used: counter.used,
        free: counter.free,
        quarantined: counter.quarantined,
    };
    vec![
        resource("network slots", pool.slots),
        resource("cpus", pool.cpus),
        resource("memory bytes", pool.memory),
    ]
}

#[tonic::async_trait]
impl v1::gateway_server::Gateway for GatewayApi {
    async fn info(&self, _: Request<v1::InfoRequest>) -> Result<Response<v1::InfoResponse>, Status> {
        let counters = self.service.store.counters().await.map_err(|e| to_status(e.into()))?;
        let pool = counters.pool;
        let small = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        let drivers = self.service.drivers.all().map(|driver| {
            let can = driver.capabilities();
            v1::Driver {
                name: can.name,
                version: can.version,
                keeps_memory: can.keeps_memory,
                machine: can.machine,
                notice: can.notice.unwrap_or_default(),
            }
        });
        Ok(Response::new(v1::InfoResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            gateway_id: self.gateway_id.clone(),
            drivers: drivers.collect(),
            default_driver: self.service.drivers.default_name().to_owned(),
            default_image: self.service.defaults.image.clone(),
            capacity: Some(v1::Capacity {
                slots_total: small(pool.slots.capacity),
                slots_used: small(pool.slots.used),
                slots_quarantined: small(pool.slots.quarantined),
                memory_total_bytes: pool.memory.capacity,
                memory_used_bytes: pool.memory.used,
                cpus_total: counters.cpus_total,
                sandboxes: counters.sandboxes,
                resources: resources(&pool),
            }),
            state_dir: self.state_dir.display().to_string(),
            run_dir: self.run_dir.display().to_string(),
            started: convert::time(self.started),
            disk: self.service.pressure.look().as_ref().map(convert::host_disk),
        }))
    }

    async fn health(&self, _: Request<v1::HealthRequest>) -> Result<Response<v1::HealthResponse>, Status> {
        use v1::health_response::Status as Health;
        // A database that can't be written is the one thing without which nothing works.
        let (status, message) = match self.service.store.ping().await {
            Ok(()) => (Health::Serving, String::new()),
            Err(error) => (Health::NotServing, error.to_string()),
        };
        Ok(Response::new(v1::HealthResponse { status: status.into(), message }))
    }
}
