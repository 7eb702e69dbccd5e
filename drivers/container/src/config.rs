//! What a container driver is told at its start.

use std::{path::PathBuf, time::Duration};

use crate::engine::Engine;

/// Longest path of a Unix socket, bytes (unix(7): sun_path has 108 with the closing NUL).
const MAX_SOCKET_PATH: usize = 107;
/// `/podman/sb-`, 16 letters and `/agent/sock`.
const BELOW_RUN_DIR: usize = 38;

/// The configuration of a container driver.
#[derive(Clone, Debug)]
pub struct ContainerConfig {
    /// Which engine.
    pub engine: Engine,
    /// The socket of its API.
    pub socket: PathBuf,
    /// Durable: `containers/`. The engine must see it under the same path, and may run programs from it.
    pub state_dir: PathBuf,
    /// One folder per running sandbox; best on a tmpfs. The engine must see it under the same path.
    pub run_dir: PathBuf,
    /// The static agent, which becomes the first process of containers.
    pub agent: PathBuf,
    /// How long a container may take from its start to an agent that answers.
    pub start_timeout: Duration,
    /// Most processes and threads of one container.
    pub pids: u32,
    /// Credentials of registries, as `docker login` leaves them; none: where the engine's own clients look.
    pub auth_file: Option<PathBuf>,
    /// The program that engines make checkpoints with, looked for on the path. Asked only whether it works here: which one
    /// an engine uses is the engine's to say.
    pub criu: PathBuf,
}

impl ContainerConfig {
    /// A configuration with the defaults for everything but the paths.
    pub fn new(
        engine: Engine,
        state_dir: impl Into<PathBuf>,
        run_dir: impl Into<PathBuf>,
        agent: impl Into<PathBuf>,
    ) -> Self {
        Self {
            engine,
            socket: engine.default_socket(),
            state_dir: state_dir.into(),
            run_dir: run_dir.into(),
            agent: agent.into(),
            start_timeout: Duration::from_secs(60),
            pids: 4096,
            auth_file: None,
            criu: "criu".into(),
        }
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        let all = [("state", &self.state_dir), ("run", &self.run_dir), ("socket", &self.socket)];
        if let Some((name, path)) = all.into_iter().find(|(_, path)| !path.is_absolute()) {
            return Err(ConfigError::Relative { name, path: path.clone() });
        }
        let longest = MAX_SOCKET_PATH - BELOW_RUN_DIR;
        if self.run_dir.as_os_str().len() > longest {
            return Err(ConfigError::RunDirTooLong { path: self.run_dir.clone(), longest });
        }
        Ok(())
    }
}

/// Why the driver can't be made from its configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A path must be named from the root on.
    #[error("the {name} path {} must be absolute", path.display())]
    Relative {
        /// "state", "run" or "socket".
        name: &'static str,
        /// As given.
        path: PathBuf,
    },
    /// Unix sockets have short names.
    #[error(
        "the run directory {} is too long: names of Unix sockets leave {longest} bytes for it; choose a shorter --run-dir",
        path.display()
    )]
    RunDirTooLong {
        /// As given.
        path: PathBuf,
        /// What is possible, bytes.
        longest: usize,
    },
    /// A file or folder can't be made.
    #[error("{what} {}", path.display())]
    File {
        /// What was attempted.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_directory_that_sockets_have_no_room_in_is_refused_with_the_limit() {
        let of = |run: String| ContainerConfig::new(Engine::Podman, "/s", run, "/a").validate();
        let error = of(format!("/{}", "x".repeat(69))).unwrap_err().to_string();
        assert!(error.contains("69 bytes") && error.contains("--run-dir"), "{error}");
        of(format!("/{}", "x".repeat(68))).unwrap();
        assert!(of("r".to_owned()).is_err());
    }
}
