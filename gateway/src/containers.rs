//! The container drivers' part of the configuration, and what their doctor finds.

use std::path::PathBuf;

use torpor_driver_container::{ContainerConfig, Engine, diagnose};

use crate::{Config, config::EngineConfig, doctor::Check};

impl EngineConfig {
    /// What the driver is told.
    pub fn for_driver(&self, engine: Engine, config: &Config, agent: PathBuf) -> ContainerConfig {
        let given = |path: &PathBuf| (!path.as_os_str().is_empty()).then(|| path.clone());
        ContainerConfig {
            socket: given(&self.socket).unwrap_or_else(|| engine.default_socket()),
            start_timeout: std::time::Duration::from_secs(config.boot_timeout_seconds),
            pids: self.pids,
            auth_file: given(&self.auth_file),
            ..ContainerConfig::new(engine, &config.state_dir, &config.run_dir, agent)
        }
    }
}

/// Looks at the engine that the configuration names: "docker" or "podman".
pub async fn doctor(config: &Config, name: &str) -> Vec<Check> {
    let (engine, of) = match name {
        "docker" => (Engine::Docker, &config.docker),
        _ => (Engine::Podman, &config.podman),
    };
    // Which agent it is doesn't matter to the engine.
    let agent = config.find_agent();
    let mut checks: Vec<Check> = diagnose(&of.for_driver(engine, config, agent.clone().unwrap_or_default()))
        .await
        .into_iter()
        .map(Check::from)
        .collect();
    checks.push(match agent.filter(|agent| crate::config::is_static(agent)) {
        Some(agent) => Check::ok("agent", agent.display().to_string()),
        None => Check::fail("agent", "no static torpor-agent", "name one in the configuration: agent = PATH"),
    });
    checks
}
