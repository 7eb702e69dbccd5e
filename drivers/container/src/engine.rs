//! What is different between engines, as data.

use std::{ffi::OsString, os::unix::fs::MetadataExt as _, path::PathBuf};

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
        // The owner of this process, whatever a variable says.
        let user = std::fs::metadata("/proc/self").map_or(0, |me| me.uid());
        self.socket_of(user, std::env::var_os("XDG_RUNTIME_DIR"))
    }

    fn socket_of(self, user: u32, runtime_dir: Option<OsString>) -> PathBuf {
        let of_root = match self {
            Self::Docker => return "/run/docker.sock".into(),
            Self::Podman => "/run/podman/podman.sock",
        };
        if user == 0 {
            return of_root.into();
        }
        // Where systemd puts it, and where it is without the variable.
        let dir = runtime_dir.map_or_else(|| PathBuf::from(format!("/run/user/{user}")), PathBuf::from);
        dir.join("podman/podman.sock")
    }

    /// Where its clients keep who they are to a registry, the first first.
    pub(crate) fn auth_files(self) -> Vec<PathBuf> {
        self.auth_files_of(|name| std::env::var_os(name))
    }

    fn auth_files_of(self, variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
        let below = |name: &str, rest: &str| variable(name).map(|dir| PathBuf::from(dir).join(rest));
        let docker = || [below("DOCKER_CONFIG", "config.json"), below("HOME", ".docker/config.json")];
        let files = match self {
            Self::Docker => docker().to_vec(),
            // containers-auth.json(5). Podman's service reads its own where it is given nothing.
            Self::Podman => {
                let runtime = below("XDG_RUNTIME_DIR", "containers/auth.json");
                let config = below("XDG_CONFIG_HOME", "containers/auth.json");
                let config = config.or_else(|| below("HOME", ".config/containers/auth.json"));
                let own = [
                    variable("REGISTRY_AUTH_FILE").map(PathBuf::from),
                    runtime.or_else(|| Some("/run/containers/0/auth.json".into())),
                    config,
                ];
                own.into_iter().chain(docker()).collect()
            }
        };
        files.into_iter().flatten().collect()
    }

    /// Docker's are behind a switch of its daemon.
    pub(crate) fn checkpoints_are_experimental(self) -> bool {
        self == Self::Docker
    }

    /// Containers that the engine lost with its host: Docker gives them this exit code when it is back, Podman the status
    /// "created" again.
    pub(crate) const LOST: i64 = 255;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn podmans_socket_is_that_of_whose_process_it_is() {
        let of = |user, dir: Option<&str>| Engine::Podman.socket_of(user, dir.map(OsString::from));
        assert_eq!(of(0, Some("/run/user/0")), PathBuf::from("/run/podman/podman.sock"));
        assert_eq!(of(1000, Some("/x")), PathBuf::from("/x/podman/podman.sock"));
        assert_eq!(of(1000, None), PathBuf::from("/run/user/1000/podman/podman.sock"));
        assert_eq!(Engine::Docker.socket_of(1000, None), PathBuf::from("/run/docker.sock"));
    }

    #[test]
    fn credentials_are_where_each_engines_own_clients_keep_them() {
        let variable = |name: &str| match name {
            "HOME" => Some(OsString::from("/h")),
            "XDG_RUNTIME_DIR" => Some(OsString::from("/r")),
            _ => None,
        };
        let docker = Engine::Docker.auth_files_of(variable);
        assert_eq!(docker, [PathBuf::from("/h/.docker/config.json")]);
        let podman = ["/r/containers/auth.json", "/h/.config/containers/auth.json", "/h/.docker/config.json"];
        assert_eq!(Engine::Podman.auth_files_of(variable), podman.map(PathBuf::from));
    }
}
