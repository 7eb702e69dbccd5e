//! Between wire types and ours.

use std::time::{Duration, SystemTime};

use torpor_proto::v1;
use torpor_sandbox::{
    Exit, Failure, Keep, Phase, RestartPolicy, State, Volume,
    spec::{plain_path, unqualified},
};

use super::{endpoints, json, network};
use crate::{
    error::{ApiError, next_command},
    expose::ExposeWish,
    maintenance::Kind,
    pressure::Space,
    service::{Target, View, Wish},
    store::{Record, Transition},
    templates::TemplateSpec,
    update,
};

pub fn time(at: SystemTime) -> Option<prost_types::Timestamp> {
    Some(at.into())
}

pub fn duration(d: Duration) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(d).ok()
}

/// A text from a client; none when it is empty.
pub fn text(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// A duration from a client: none, or not negative.
pub fn given(d: Option<prost_types::Duration>, field: &'static str) -> Result<Option<Duration>, ApiError> {
    d.map(|d| Duration::try_from(d).map_err(|_| ApiError::invalid(field, "a duration can't be negative")))
        .transpose()
}

pub fn phase(phase: Phase) -> v1::Phase {
    match phase {
        Phase::Provisioning => v1::Phase::Provisioning,
        Phase::Ready => v1::Phase::Ready,
        Phase::Suspending => v1::Phase::Suspending,
        Phase::Suspended => v1::Phase::Suspended,
        Phase::Resuming => v1::Phase::Resuming,
        Phase::Stopping => v1::Phase::Stopping,
        Phase::Stopped => v1::Phase::Stopped,
        Phase::Starting => v1::Phase::Starting,
        Phase::Completed => v1::Phase::Completed,
        Phase::Error => v1::Phase::Error,
        Phase::Deleting => v1::Phase::Deleting,
    }
}

pub fn keep(keep: Keep) -> v1::Keep {
    match keep {
        Keep::Disk => v1::Keep::Disk,
        Keep::Memory => v1::Keep::Memory,
    }
}

pub fn wanted_keep(keep: i32) -> Result<Keep, ApiError> {
    match v1::Keep::try_from(keep) {
        Ok(v1::Keep::Unspecified | v1::Keep::Disk) => Ok(Keep::Disk),
        Ok(v1::Keep::Memory) => Ok(Keep::Memory),
        Err(_) => Err(ApiError::invalid("keep", format!("{keep} is not known"))),
    }
}

pub fn restart_policy(policy: RestartPolicy) -> v1::RestartPolicy {
    match policy {
        RestartPolicy::Never => v1::RestartPolicy::Never,
        RestartPolicy::OnFailure => v1::RestartPolicy::OnFailure,
        RestartPolicy::Always => v1::RestartPolicy::Always,
    }
}

/// A restart policy from a client; none: it says nothing.
pub fn wanted_restart(policy: i32) -> Result<Option<RestartPolicy>, ApiError> {
    match v1::RestartPolicy::try_from(policy) {
        Ok(v1::RestartPolicy::Unspecified) => Ok(None),
        Ok(v1::RestartPolicy::Never) => Ok(Some(RestartPolicy::Never)),
        Ok(v1::RestartPolicy::OnFailure) => Ok(Some(RestartPolicy::OnFailure)),
        Ok(v1::RestartPolicy::Always) => Ok(Some(RestartPolicy::Always)),
        Err(_) => Err(ApiError::invalid("restart_policy", format!("{policy} is not known"))),
    }
}

pub fn target(target: Option<v1::Target>) -> Result<(Target, bool), ApiError> {
    let target = target.filter(|t| !t.sandbox.is_empty());
    let target = target.ok_or_else(|| ApiError::invalid("target.sandbox", "a name or id is needed"))?;
    let wait = target.wait;
    let target = Target {
        sandbox: target.sandbox,
        expected_version: Some(target.expected_version).filter(|&v| v > 0),
        request_id: text(target.request_id),
    };
    Ok((target, wait))
}

/// What a client says of a sandbox or a template.
pub fn spec(spec: v1::SandboxSpec) -> Result<TemplateSpec, ApiError> {
    let resources = spec.resources.unwrap_or_default();
    Ok(TemplateSpec {
        image: text(spec.image),
        command: spec.command,
        environment: spec.environment.into_iter().collect(),
        workdir: text(spec.workdir),
        user: text(spec.user),
        stdin: spec.stdin,
        tty: spec.tty,
        cpus: resources.cpus,
        memory_bytes: resources.memory_bytes,
        disk_bytes: resources.disk_bytes,
        restart: wanted_restart(spec.restart_policy)?,
        driver: text(spec.driver),
        machine: text(spec.machine),
        kernel: text(spec.kernel),
        stop_grace: given(spec.stop_grace, "stop_grace")?,
        egress: network::egress(spec.egress)?,
        volumes: spec.volumes.into_iter().map(volume).collect(),
        endpoints: endpoints::wanted(spec.endpoints)?,
        driver_config: json::map(spec.driver_config.unwrap_or_default(), "driver_config")?,
    })
}

pub fn wish(request: v1::CreateSandboxRequest) -> Result<Wish, ApiError> {
    let mut wish = Wish {
        name: text(request.name),
        labels: request.labels.into_iter().collect(),
        annotations: request.annotations.into_iter().collect(),
        template: text(request.template),
        expose: request.expose.into_iter().map(port).collect(),
        request_id: text(request.request_id),
        ..Wish::default()
    };
    spec(request.spec.unwrap_or_default())?.fill(&mut wish);
    Ok(wish)
}

fn port(port: v1::ExposeAtCreate) -> ExposeWish {
    ExposeWish { port: port.port, host: text(port.host), wake: port.wake }
}

pub fn volume(volume: v1::Volume) -> Volume {
    Volume { source: volume.source, target: plain_path(&volume.target), read_only: volume.read_only }
}

pub fn shown_volume(volume: &Volume) -> v1::Volume {
    v1::Volume { source: volume.source.clone(), target: volume.target.clone(), read_only: volume.read_only }
}

/// What its main command ended with, where that is a code.
pub fn exit_code(state: &State) -> Option<i32> {
    match state.exit {
        Some(Exit::Code(code)) => Some(code),
        Some(Exit::PowerOff) => Some(0),
        _ => None,
    }
}

pub fn sandbox(view: &View) -> v1::Sandbox {
    let record = &view.record;
    let spec = &record.spec;
    v1::Sandbox {
        id: record.id.to_string(),
        name: unqualified(&record.name).1.to_owned(),
        workspace: spec.workspace.clone(),
        version: record.version,
        labels: record.labels.clone().into_iter().collect(),
        annotations: record.annotations.clone().into_iter().collect(),
        spec: Some(v1::SandboxSpec {
            image: spec.image.clone(),
            command: spec.command.clone(),
            environment: spec.environment.clone().into_iter().collect(),
            workdir: spec.workdir.clone().unwrap_or_default(),
            user: spec.user.clone().unwrap_or_default(),
            stdin: spec.stdin,
            tty: spec.tty,
            resources: Some(v1::Resources {
                cpus: Some(spec.resources.cpus),
                memory_bytes: Some(spec.resources.memory_bytes),
                disk_bytes: Some(spec.resources.disk_bytes).filter(|&bytes| bytes > 0),
            }),
            restart_policy: restart_policy(spec.restart).into(),
            driver: spec.driver.clone(),
            machine: spec.machine.clone(),
            kernel: spec.kernel.clone().unwrap_or_default(),
            stop_grace: duration(spec.stop_grace),
            egress: spec.egress.as_ref().map(network::shown),
            volumes: spec.volumes.iter().map(shown_volume).collect(),
            endpoints: spec.endpoints.iter().map(endpoints::shown).collect(),
            driver_config: json::shown(&spec.driver_config),
        }),
        status: Some(status(view)),
        created: time(record.created),
    }
}

/// What a watcher hears of a sandbox that is gone.
pub fn buried(id: String, name: &str) -> v1::Sandbox {
    let (workspace, name) = unqualified(name);
    v1::Sandbox { id, name: name.to_owned(), workspace: workspace.to_owned(), ..v1::Sandbox::default() }
}

fn status(view: &View) -> v1::SandboxStatus {
    let record = &view.record;
    let state: &State = &record.state;
    let facts = &view.facts;
    v1::SandboxStatus {
        phase: phase(state.phase).into(),
        phase_since: time(record.since),
        retained: if state.phase == Phase::Suspended { keep(state.keep).into() } else { 0 },
        driver: record.spec.driver.clone(),
        machine: facts.machine.clone().unwrap_or_default(),
        run: state.run.0,
        image_digest: record.spec.image_digest.clone(),
        host: facts.host.as_ref().map(|host| v1::HostResources {
            pid: i32::try_from(host.pid).unwrap_or_default(),
            tap: host.tap.clone(),
            ip: host.ip.clone(),
            mac: host.mac.clone(),
            cpus: host.cpus.clone(),
            memory_bytes: host.memory_bytes,
            resident_bytes: host.resident_bytes,
            cid: host.cid,
            run_dir: host.run_dir.clone(),
        }),
        disk: facts.disk.as_ref().map(|disk| v1::Disk {
            virtual_bytes: disk.virtual_bytes,
            used_bytes: disk.used_bytes,
            path: disk.path.clone(),
        }),
        failure: state.failure.as_ref().map(|f| failure(f, record)),
        conditions: conditions(view),
        exit_code: exit_code(state),
        restart_count: state.restarts,
        step: view.now.as_ref().map_or_else(String::new, |now| now.step.to_owned()),
        flushed: state.flushed,
        then: state.then.map_or_else(String::new, |then| then.to_string()),
        boot_id: facts.boot_id.clone().unwrap_or_default(),
        egress: view.egress.as_ref().map(network::shown),
        endpoints: endpoints::statuses(view),
    }
}

fn failure(failure: &Failure, record: &Record) -> v1::Failure {
    v1::Failure {
        step: failure.step.clone(),
        reason: failure.reason.clone(),
        message: failure.message.clone(),
        console_tail: failure.console.clone(),
        next: next_command(&failure.reason, record),
        time: time(failure.at),
    }
}

fn conditions(view: &View) -> Vec<v1::Condition> {
    let ready = view.record.state.phase == Phase::Ready;
    let mut all = vec![v1::Condition {
        r#type: "Ready".to_owned(),
        status: ready,
        reason: view.record.state.phase.to_string(),
        message: String::new(),
        since: time(view.record.since),
    }];
    if let Some(trouble) = view.now.as_ref().and_then(|now| now.trouble.as_ref()) {
        all.push(v1::Condition {
            r#type: "Retrying".to_owned(),
            status: true,
            reason: trouble.reason.clone(),
            message: trouble.message.clone(),
            since: None,
        });
    }
    if let Some(pending) = &view.record.state.update {
        let (reason, message) =
            update::condition(&view.record.spec, pending, view.operation == Some(Kind::Update));
        all.push(v1::Condition {
            r#type: "UpdatePending".to_owned(),
            status: true,
            reason: reason.to_owned(),
            message,
            since: time(pending.since),
        });
    }
    if let Some(space) = &view.pressed {
        all.push(v1::Condition {
            r#type: "DiskPressure".to_owned(),
            status: true,
            reason: if space.free < space.reserve { "LOW_SPACE" } else { "NO_SPACE" }.to_owned(),
            message: space.words(),
            since: None,
        });
    }
    all
}

pub fn host_disk(space: &Space) -> v1::HostDisk {
    v1::HostDisk {
        path: space.dir.display().to_string(),
        free_bytes: space.free,
        total_bytes: space.total,
        reserve_bytes: space.reserve,
        pressure: space.is_low(),
    }
}

pub fn transition(row: Transition) -> v1::Transition {
    v1::Transition {
        time: time(row.at),
        from: row.from.map_or(0, |p| phase(p).into()),
        to: row.to.map_or(0, |p| phase(p).into()),
        why: row.why,
        after: duration(row.after),
        run: row.run,
        version: row.version,
    }
}
