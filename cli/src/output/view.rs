//! The stable form of what the gateway sends: snake_case, what is absent is null, enums are words.

use std::collections::BTreeMap;

use prost_types::Timestamp;
use serde::Serialize;
use torpor_sdk::{phase, v1};

use super::{disk::HostDisk, network::Egress};

pub fn text(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

pub(super) fn time(time: Option<&Timestamp>) -> Option<String> {
    time.map(ToString::to_string)
}

/// A sandbox as `get -o json` shows it.
#[derive(Serialize)]
pub struct Sandbox {
    id: String,
    name: String,
    phase: &'static str,
    retained: Option<&'static str>,
    driver: Option<String>,
    machine: Option<String>,
    run: u64,
    version: u64,
    image: Image,
    workspace: String,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    created: Option<String>,
    phase_since: Option<String>,
    command: Vec<String>,
    environment: BTreeMap<String, String>,
    stdin: bool,
    tty: bool,
    restart_policy: &'static str,
    resources: Resources,
    egress: Option<Egress>,
    volumes: Vec<Volume>,
    endpoints: Vec<Endpoint>,
    driver_config: serde_json::Map<String, serde_json::Value>,
    host: Option<Host>,
    disk: Option<Disk>,
    failure: Option<Failure>,
    conditions: Vec<Condition>,
    exit_code: Option<i32>,
    restart_count: u32,
    flushed: Option<bool>,
    boot_id: Option<String>,
    then: Option<String>,
    step: Option<String>,
}

/// Something that a sandbox serves, and how it was seen last.
#[derive(Serialize)]
struct Endpoint {
    name: String,
    port: u32,
    http_path: Option<String>,
    result: &'static str,
    http_status: Option<u32>,
    message: Option<String>,
    observed: Option<String>,
    since: Option<String>,
}

#[derive(Serialize)]
struct Volume {
    source: String,
    target: String,
    read_only: bool,
}

#[derive(Serialize)]
struct Image {
    name: Option<String>,
    digest: Option<String>,
}

#[derive(Serialize)]
struct Resources {
    cpus: Option<u32>,
    memory_bytes: Option<u64>,
    disk_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Host {
    pid: i32,
    tap: Option<String>,
    ip: Option<String>,
    mac: Option<String>,
    cid: u32,
    cpus: Option<String>,
    memory_bytes: u64,
    resident_bytes: u64,
    run_dir: Option<String>,
}

#[derive(Serialize)]
struct Disk {
    virtual_bytes: u64,
    used_bytes: u64,
    path: Option<String>,
}

#[derive(Serialize)]
struct Failure {
    step: Option<String>,
    reason: Option<String>,
    message: Option<String>,
    console_tail: Option<String>,
    next: Option<String>,
    time: Option<String>,
}

#[derive(Serialize)]
struct Condition {
    r#type: String,
    status: bool,
    reason: Option<String>,
    message: Option<String>,
    since: Option<String>,
}

/// What a suspend keeps, as a word.
pub fn retained(status: &v1::SandboxStatus) -> Option<&'static str> {
    match status.retained() {
        v1::Keep::Unspecified => None,
        v1::Keep::Disk => Some("disk"),
        v1::Keep::Memory => Some("memory"),
    }
}

/// A restart policy, as it is typed.
pub fn restart_policy(spec: &v1::SandboxSpec) -> &'static str {
    match spec.restart_policy() {
        v1::RestartPolicy::Unspecified | v1::RestartPolicy::Never => "never",
        v1::RestartPolicy::OnFailure => "on-failure",
        v1::RestartPolicy::Always => "always",
    }
}

impl From<&v1::Sandbox> for Sandbox {
    fn from(sandbox: &v1::Sandbox) -> Self {
        let spec = sandbox.spec.clone().unwrap_or_default();
        let status = sandbox.status.clone().unwrap_or_default();
        let resources = spec.resources.unwrap_or_default();
        let egress = Egress::of(&spec, &status);
        Self {
            id: sandbox.id.clone(),
            name: sandbox.name.clone(),
            workspace: sandbox.workspace.clone(),
            phase: phase::name(phase::of(sandbox)),
            retained: retained(&status),
            driver: text(&status.driver).or_else(|| text(&spec.driver)),
            machine: text(&status.machine),
            run: status.run,
            version: sandbox.version,
            image: Image { name: text(&spec.image), digest: text(&status.image_digest) },
            labels: sandbox.labels.clone().into_iter().collect(),
            annotations: sandbox.annotations.clone().into_iter().collect(),
            created: time(sandbox.created.as_ref()),
            phase_since: time(status.phase_since.as_ref()),
            restart_policy: restart_policy(&spec),
            command: spec.command,
            environment: spec.environment.into_iter().collect(),
            stdin: spec.stdin,
            tty: spec.tty,
            resources: Resources {
                cpus: resources.cpus,
                memory_bytes: resources.memory_bytes,
                disk_bytes: resources.disk_bytes,
            },
            egress,
            volumes: spec.volumes.into_iter().map(Volume::from).collect(),
            endpoints: endpoints(&spec.endpoints, &status.endpoints),
            driver_config: driver_config(spec.driver_config.as_ref()),
            host: status.host.as_ref().map(Host::from),
            disk: status.disk.as_ref().map(Disk::from),
            failure: status.failure.as_ref().map(Failure::from),
            conditions: status.conditions.iter().map(Condition::from).collect(),
            exit_code: status.exit_code,
            restart_count: status.restart_count,
            flushed: status.flushed,
            boot_id: text(&status.boot_id),
            then: text(&status.then),
            step: text(&status.step),
        }
    }
}

/// What a sandbox's or template's driver is told.
pub fn driver_config(said: Option<&prost_types::Struct>) -> serde_json::Map<String, serde_json::Value> {
    let all = said.into_iter().flat_map(|said| &said.fields);
    all.map(|(key, value)| (key.clone(), crate::parse::json(value))).collect()
}

fn endpoints(declared: &[v1::Endpoint], seen: &[v1::EndpointStatus]) -> Vec<Endpoint> {
    let one = |endpoint: &v1::Endpoint| {
        let seen = seen.iter().find(|seen| seen.name == endpoint.name).cloned().unwrap_or_default();
        Endpoint {
            name: endpoint.name.clone(),
            port: endpoint.port,
            http_path: text(&endpoint.http_path),
            result: endpoint_result(&seen),
            http_status: (seen.http_status > 0).then_some(seen.http_status),
            message: text(&seen.message),
            observed: time(seen.observed.as_ref()),
            since: time(seen.since.as_ref()),
        }
    };
    declared.iter().map(one).collect()
}

/// What was seen of an endpoint, in a word.
pub fn endpoint_result(seen: &v1::EndpointStatus) -> &'static str {
    use v1::endpoint_status::Result as Found;
    match seen.result() {
        Found::Unspecified => "unseen",
        Found::Ok => "ok",
        Found::Refused => "refused",
        Found::Timeout => "timeout",
        Found::Reset => "reset",
        Found::BadHttp => "bad_http",
        Found::HttpError => "http_error",
        Found::Unknown => "unknown",
    }
}

impl From<v1::Volume> for Volume {
    fn from(volume: v1::Volume) -> Self {
        Self { source: volume.source, target: volume.target, read_only: volume.read_only }
    }
}

impl From<&v1::HostResources> for Host {
    fn from(host: &v1::HostResources) -> Self {
        Self {
            pid: host.pid,
            tap: text(&host.tap),
            ip: text(&host.ip),
            mac: text(&host.mac),
            cid: host.cid,
            cpus: text(&host.cpus),
            memory_bytes: host.memory_bytes,
            resident_bytes: host.resident_bytes,
            run_dir: text(&host.run_dir),
        }
    }
}

impl From<&v1::Disk> for Disk {
    fn from(disk: &v1::Disk) -> Self {
        Self { virtual_bytes: disk.virtual_bytes, used_bytes: disk.used_bytes, path: text(&disk.path) }
    }
}

impl From<&v1::Failure> for Failure {
    fn from(failure: &v1::Failure) -> Self {
        Self {
            step: text(&failure.step),
            reason: text(&failure.reason),
            message: text(&failure.message),
            console_tail: text(&failure.console_tail),
            next: text(&failure.next),
            time: time(failure.time.as_ref()),
        }
    }
}

impl From<&v1::Condition> for Condition {
    fn from(condition: &v1::Condition) -> Self {
        Self {
            r#type: condition.r#type.clone(),
            status: condition.status,
            reason: text(&condition.reason),
            message: text(&condition.message),
            since: time(condition.since.as_ref()),
        }
    }
}

/// An event of `watch -o json`.
#[derive(Serialize)]
pub struct Event {
    /// "snapshot", "changed", "deleted", "synced" or "reset".
    pub kind: &'static str,
    /// To go on from here later.
    pub cursor: Option<String>,
    /// None for "synced" and "reset".
    pub sandbox: Option<Sandbox>,
}

/// A row of `history -o json`.
#[derive(Serialize)]
pub struct Transition {
    time: Option<String>,
    from: Option<&'static str>,
    to: &'static str,
    why: Option<String>,
    after_seconds: Option<f64>,
    run: u64,
    version: u64,
}

impl From<&v1::Transition> for Transition {
    fn from(t: &v1::Transition) -> Self {
        let from = phase::from_wire(t.from);
        Self {
            time: time(t.time.as_ref()),
            from: (from != v1::Phase::Unspecified).then(|| phase::name(from)),
            to: phase::name(phase::from_wire(t.to)),
            why: text(&t.why),
            after_seconds: t.after.as_ref().map(|d| d.seconds as f64 + f64::from(d.nanos) / 1e9),
            run: t.run,
            version: t.version,
        }
    }
}

/// An image of `image list -o json`.
#[derive(Serialize)]
pub struct ImageRow {
    name: String,
    digest: String,
    size_bytes: u64,
    used_bytes: u64,
    created: Option<String>,
    sandboxes: u32,
}

impl From<&v1::Image> for ImageRow {
    fn from(image: &v1::Image) -> Self {
        Self {
            name: image.name.clone(),
            digest: image.digest.clone(),
            size_bytes: image.size_bytes,
            used_bytes: image.used_bytes,
            created: time(image.created.as_ref()),
            sandboxes: image.sandboxes,
        }
    }
}

/// A driver of `info -o json`.
#[derive(Serialize)]
struct Driver {
    name: String,
    version: Option<String>,
    keeps_memory: bool,
    machine: Option<String>,
    notice: Option<String>,
}

#[derive(Serialize)]
struct Capacity {
    slots_total: u32,
    slots_used: u32,
    slots_quarantined: u32,
    memory_total_bytes: u64,
    memory_used_bytes: u64,
    cpus_total: u32,
    sandboxes: u64,
    resources: Vec<Resource>,
}

#[derive(Serialize)]
struct Resource {
    name: String,
    capacity: u64,
    used: u64,
    free: u64,
    quarantined: u64,
}

/// `info -o json`.
#[derive(Serialize)]
pub struct Info {
    version: String,
    client_version: &'static str,
    gateway_id: String,
    drivers: Vec<Driver>,
    default_driver: Option<String>,
    default_image: Option<String>,
    capacity: Option<Capacity>,
    state_dir: String,
    run_dir: String,
    started: Option<String>,
    disk: Option<HostDisk>,
}

impl From<&v1::InfoResponse> for Info {
    fn from(info: &v1::InfoResponse) -> Self {
        let driver = |d: &v1::Driver| Driver {
            name: d.name.clone(),
            version: text(&d.version),
            keeps_memory: d.keeps_memory,
            machine: text(&d.machine),
            notice: text(&d.notice),
        };
        let resource = |r: &v1::Resource| Resource {
            name: r.name.clone(),
            capacity: r.capacity,
            used: r.used,
            free: r.free,
            quarantined: r.quarantined,
        };
        let capacity = |c: &v1::Capacity| Capacity {
            slots_total: c.slots_total,
            slots_used: c.slots_used,
            slots_quarantined: c.slots_quarantined,
            memory_total_bytes: c.memory_total_bytes,
            memory_used_bytes: c.memory_used_bytes,
            cpus_total: c.cpus_total,
            sandboxes: c.sandboxes,
            resources: c.resources.iter().map(resource).collect(),
        };
        Self {
            version: info.version.clone(),
            client_version: env!("CARGO_PKG_VERSION"),
            gateway_id: info.gateway_id.clone(),
            drivers: info.drivers.iter().map(driver).collect(),
            default_driver: text(&info.default_driver),
            default_image: text(&info.default_image),
            capacity: info.capacity.as_ref().map(capacity),
            state_dir: info.state_dir.clone(),
            run_dir: info.run_dir.clone(),
            started: time(info.started.as_ref()),
            disk: info.disk.as_ref().map(HostDisk::from),
        }
    }
}
