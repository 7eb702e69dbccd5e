//! How a sandbox is a container: what the engine is told at its creation, once and for all.

use std::{collections::BTreeMap, path::Path, time::Duration};

use serde_json::{Map, Value, json};
use torpor_sandbox::{Run, SandboxId, SandboxSpec};

use crate::{config::ContainerConfig, run::RunDir, store::Store, types::Info};

/// Which sandbox a container is.
pub(crate) const SANDBOX: &str = "torpor.dev/sandbox";
/// Whose: the identity of a state directory.
pub(crate) const GATEWAY: &str = "torpor.dev/gateway";
/// The run that it was created for.
const RUN: &str = "torpor.dev/run";
/// The image that it was created of.
pub(crate) const IMAGE: &str = "torpor.dev/image";

/// Where the container finds the agent, and the socket that it dials. Both are read-only there.
const AGENT: &str = "/.torpor/torpor-agent";
const HOST: &str = "/.torpor/host";

/// What root in a container needs to set up users, packages and services, and no more of what engines give.
const CAPABILITIES: [&str; 8] =
    ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID"];
/// What the agent's own words may take in the engine's log.
const LOG: [(&str, &str); 2] = [("max-size", "1m"), ("max-file", "2")];

/// The container of a sandbox, as its name.
pub(crate) fn name(id: &SandboxId) -> String {
    format!("torpor-{id}")
}

/// The sandbox that a container's name says.
pub(crate) fn named(name: &str) -> Option<SandboxId> {
    name.trim_start_matches('/').strip_prefix("torpor-")?.parse().ok()
}

/// Refuses what no container can be, by the name of the field.
///
/// # Errors
/// The field and why.
pub(crate) fn check(config: &ContainerConfig, spec: &SandboxSpec) -> Result<(), String> {
    let engine = config.engine.name();
    if spec.kernel.is_some() {
        return Err(format!("kernel: a container of {engine} runs on the host's kernel"));
    }
    if spec.machine != "auto" {
        return Err(format!("machine: a container of {engine} has none"));
    }
    if spec.egress.is_some() {
        return Err(format!(
            "egress: where a container of {engine} may send to is the engine's network's to say; use the vm driver"
        ));
    }
    Ok(())
}

/// The body of the request that creates the container.
pub(crate) fn body(
    id: &SandboxId,
    spec: &SandboxSpec,
    run: Run,
    config: &ContainerConfig,
    store: &Store,
    dir: &RunDir,
    info: &Info,
) -> Value {
    let hostname = if spec.hostname.is_empty() { id.as_str() } else { &spec.hostname };
    json!({
        "Image": spec.image_digest,
        "Entrypoint": [AGENT, "--container", format!("{HOST}/sock")],
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": hostname,
        "Tty": false,
        "OpenStdin": false,
        "StopSignal": "SIGTERM",
        "StopTimeout": grace(spec.stop_grace),
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": {
            SANDBOX: id.as_str(), GATEWAY: store.identity, RUN: run.to_string(), IMAGE: spec.image_digest,
        },
        "HostConfig": host_config(spec, config, &store.agent_of(id), dir, info),
    })
}

fn host_config(
    spec: &SandboxSpec,
    config: &ContainerConfig,
    agent: &Path,
    dir: &RunDir,
    info: &Info,
) -> Value {
    let mut all = json!({
        // What becomes of a container that ends is decided by the sandbox's record, and by nobody else.
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "AutoRemove": false,
        "Init": false,
        "Privileged": false,
        "CapDrop": ["ALL"],
        "CapAdd": CAPABILITIES,
        "SecurityOpt": ["no-new-privileges"],
        "LogConfig": {"Type": "json-file", "Config": BTreeMap::from(LOG)},
        "Mounts": mounts(spec, agent, dir),
    });
    if info.pids_limit {
        all["PidsLimit"] = json!(config.pids);
    }
    for (key, value) in limits(spec, info) {
        all[key] = value;
    }
    all
}

/// The limits that the sandbox itself says. An engine refuses one that its host has no means for; `capabilities` says so to
/// people.
pub(crate) fn limits(spec: &SandboxSpec, info: &Info) -> Map<String, Value> {
    let mut all = Map::new();
    let memory = i64::try_from(spec.resources.memory_bytes).unwrap_or(i64::MAX);
    if info.memory_limit {
        all.insert("Memory".to_owned(), json!(memory));
        if info.swap_limit {
            // Of both together: no swap.
            all.insert("MemorySwap".to_owned(), json!(memory));
        }
    }
    if info.cpu_cfs_quota {
        let cpus = spec.resources.cpus.min(info.cpus.max(1));
        all.insert("NanoCpus".to_owned(), json!(i64::from(cpus) * 1_000_000_000));
    }
    all
}

fn mounts(spec: &SandboxSpec, agent: &Path, dir: &RunDir) -> Vec<Value> {
    let bind = |source: &Path, target: &str| json!({"Type": "bind", "Source": source, "Target": target, "ReadOnly": true});
    let ours = [bind(agent, AGENT), bind(&dir.agent_dir(), HOST)];
    let theirs = spec.volumes.iter().map(|volume| {
        let kind = if volume.is_bind() { "bind" } else { "volume" };
        json!({
            "Type": kind, "Source": volume.source, "Target": volume.target, "ReadOnly": volume.read_only,
        })
    });
    ours.into_iter().chain(theirs).collect()
}

/// For an engine, which counts in whole seconds.
pub(crate) fn grace(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_containers_name_says_its_sandbox_and_others_say_none() {
        let id = SandboxId::generate();
        assert_eq!(named(&format!("/{}", name(&id))), Some(id));
        assert!(["web", "/torpor-web", "torpor-", "/"].into_iter().all(|other| named(other).is_none()));
    }

    #[test]
    fn an_engine_counts_a_grace_in_whole_seconds_and_never_less() {
        let of = |millis| grace(Duration::from_millis(millis));
        assert_eq!([of(0), of(1), of(1000), of(1001)], [0, 1, 1, 2]);
    }
}
