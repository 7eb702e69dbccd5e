//! What is different between engines, as data.

use std::path::PathBuf;

/// An engine that speaks Docker's API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// Docker, or another daemon of the Moby project.
    Docker,
    /// Podman's service, of root or of a user.
    Podman,
}

impl Engine {
    /// The name of its driver.
    pub fn name(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
        }
    }

    /// Where its socket is unless somebody says otherwise: of Podman, that of this user's own service.
    pub fn default_socket(self) -> PathBuf {
        match self {
            Self::Docker => "/run/docker.sock".into(),
            Self::Podman => match std::env::var_os("XDG_RUNTIME_DIR") {
                Some(dir) if std::env::var_os("USER").is_some_and(|user| user != "root") => {
                    PathBuf::from(dir).join("podman/podman.sock")
                }
                _ => "/run/podman/podman.sock".into(),
            },
        }
    }

    /// How its clients say where it listens and who they are to a registry.
    pub(crate) fn auth_files(self) -> Vec<PathBuf> {
        let home = |name: &str, rest: &str| std::env::var_os(name).map(|dir| PathBuf::from(dir).join(rest));
        let files = match self {
            Self::Docker => [home("DOCKER_CONFIG", "config.json"), home("HOME", ".docker/config.json")],
            // Podman's service reads its own where it is given nothing.
            Self::Podman => [None, None],
        };
        files.into_iter().flatten().collect()
    }

    /// Containers that the engine lost with its host: Docker gives them this exit code when it is back, Podman the status
    /// "created" again.
    pub(crate) const LOST: i64 = 255;
}
