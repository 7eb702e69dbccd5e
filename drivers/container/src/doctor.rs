//! What a container engine lacks for running sandboxes, and what to do about it. Looks only.

use std::path::Path;

use torpor_sandbox::{Finding, Level};

use crate::{
    checkpoint,
    client::{Client, EngineError, Known},
    config::ContainerConfig,
    engine::Engine,
};

/// Asks the engine that the configuration names what it is and what it can do.
pub async fn diagnose(config: &ContainerConfig) -> Vec<Finding> {
    let engine = config.engine;
    let client = Client::new(engine, &config.socket);
    let known = match client.learn().await {
        Ok(known) => known,
        Err(error) => return vec![unreached(engine, &config.socket, &error)],
    };
    let mut found = facts(engine, &config.socket, &known);
    let can = checkpoint::probe(engine, &known.info, &config.criu).await;
    found.push(match can {
        Ok(()) => Finding::new("checkpoints", Level::Ok, "CRIU works here: suspend --memory does", ""),
        Err(cannot) => {
            let advice =
                "suspend --memory is refused; a suspend that keeps the workspace needs no checkpoints";
            Finding::new("checkpoints", Level::Warn, cannot.why, advice)
        }
    });
    found
}

fn unreached(engine: Engine, socket: &Path, error: &EngineError) -> Finding {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    let name = engine.name();
    let service = match engine {
        Engine::Docker => "systemctl start docker",
        Engine::Podman => "systemctl start podman.socket (with --user for your own)",
    };
    let advice = match error {
        EngineError::Unreachable(_, _, cause) if cause.kind() == std::io::ErrorKind::PermissionDenied => {
            format!("run this as root, or as a user who may use {}", socket.display())
        }
        _ => format!(
            "install and start {name}: {service}; or name its socket in [{name}] of the configuration"
        ),
    };
    Finding::new("engine", Level::Fail, format!("{error}{cause}"), &advice)
}

/// What the engine says of itself.
fn facts(engine: Engine, socket: &Path, known: &Known) -> Vec<Finding> {
    let (name, info) = (engine.name(), &known.info);
    let said = |text: &str| if text.is_empty() { "not said".to_owned() } else { crate::client::said(text) };
    let mut found = vec![
        Finding::new(
            "engine",
            Level::Ok,
            format!("{name} {} at {}", said(&known.version), socket.display()),
            "",
        ),
        Finding::new("runtime", Level::Ok, said(&info.default_runtime), ""),
    ];
    found.push(if info.is_rootless() {
        let text = "without root: containers are of this user's namespace, and so are their addresses";
        Finding::new("privileges", Level::Ok, text, "")
    } else {
        Finding::new("privileges", Level::Ok, "with root", "")
    });
    found.push(match info.driver.as_str() {
        "vfs" => {
            let advice =
                "it copies the whole image for every container: install fuse-overlayfs, or use overlay";
            Finding::new("storage", Level::Warn, "vfs", advice)
        }
        driver => Finding::new("storage", Level::Ok, said(driver), ""),
    });
    let cgroups = format!("version {}, by {}", said(&info.cgroup_version), said(&info.cgroup_driver));
    let missing = info.missing_limits();
    found.push(if missing.is_empty() {
        Finding::new("limits", Level::Ok, format!("memory, CPUs and processes (cgroups {cgroups})"), "")
    } else {
        let text = format!("no limit of {} (cgroups {cgroups})", missing.join(", "));
        let advice = match info.is_rootless() {
            true => "give the user's slice the controllers: Delegate=cpu memory pids for user@.service, on cgroup v2",
            false => "the host's cgroups lack the controllers: boot with them on",
        };
        Finding::new("limits", Level::Warn, text, advice)
    });
    if engine == Engine::Docker && !info.live_restore_enabled {
        let text = "its containers end when the daemon does, and are started again afterwards";
        let advice =
            "set \"live-restore\": true in /etc/docker/daemon.json to have them run through its upgrades";
        found.push(Finding::new("live-restore", Level::Ok, text, advice));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Info;

    #[tokio::test]
    async fn an_engine_that_is_not_there_is_a_failure_that_says_where_it_was_looked_for() {
        let mut config = ContainerConfig::new(Engine::Podman, "/s", "/r", "/a");
        config.socket = "/nonexistent/podman.sock".into();
        let found = diagnose(&config).await;
        assert_eq!((found.len(), found[0].level), (1, Level::Fail));
        assert!(found[0].finding.contains("/nonexistent/podman.sock"), "{found:?}");
        assert!(found[0].advice.contains("podman.socket"), "{found:?}");
    }

    #[test]
    fn limits_that_nothing_holds_and_slow_storage_are_warned_of() {
        let info = Info { driver: "vfs".into(), rootless: true, memory_limit: true, ..Info::default() };
        let known = Known { info, ..Known::default() };
        let found = facts(Engine::Podman, Path::new("/x"), &known);
        let of = |name: &str| found.iter().find(|one| one.name == name).unwrap();
        assert!(
            of("limits").finding.contains("no limit of processes, CPUs") && of("limits").level == Level::Warn
        );
        assert!(of("limits").advice.contains("Delegate"));
        assert_eq!(of("storage").level, Level::Warn);
        assert!(of("privileges").finding.contains("without root"));
    }
}
