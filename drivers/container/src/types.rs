//! What engines answer, as far as it is used. Own types, since the same field is now a list, now null, and statuses of one
//! engine are unknown to the other's clients.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Map, Value};

/// `GET /version`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct Version {
    pub(crate) version: String,
    pub(crate) api_version: String,
    #[serde(rename = "MinAPIVersion")]
    pub(crate) min_api_version: String,
}

/// `GET /info`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct Info {
    #[serde(rename = "NCPU")]
    pub(crate) cpus: u32,
    pub(crate) memory_limit: bool,
    pub(crate) swap_limit: bool,
    pub(crate) pids_limit: bool,
    pub(crate) cpu_cfs_quota: bool,
    pub(crate) default_runtime: String,
    pub(crate) experimental_build: bool,
    /// Podman's.
    pub(crate) rootless: bool,
    pub(crate) security_options: Option<Vec<String>>,
    /// Of images and layers.
    pub(crate) driver: String,
    pub(crate) cgroup_driver: String,
    pub(crate) cgroup_version: String,
    pub(crate) live_restore_enabled: bool,
}

impl Info {
    /// Runs as a user of the host.
    pub(crate) fn is_rootless(&self) -> bool {
        self.rootless || self.security_options.iter().flatten().any(|option| option == "name=rootless")
    }

    /// As it is, and not as it is said: on cgroups of the first version nobody but root holds any limit.
    pub(crate) fn truthful(mut self) -> Self {
        if self.is_rootless() && self.cgroup_version == "1" {
            (self.memory_limit, self.swap_limit) = (false, false);
            (self.pids_limit, self.cpu_cfs_quota) = (false, false);
        }
        self
    }

    /// The limits that its cgroups can't hold.
    pub(crate) fn missing_limits(&self) -> Vec<&'static str> {
        let all =
            [(self.memory_limit, "memory"), (self.pids_limit, "processes"), (self.cpu_cfs_quota, "CPUs")];
        all.iter().filter(|(there, _)| !there).map(|(_, name)| *name).collect()
    }
}

/// `GET /containers/ID/json`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct Inspect {
    pub(crate) id: String,
    pub(crate) image: String,
    pub(crate) state: State,
    pub(crate) config: ContainerConfig,
    /// Its limits are among this.
    pub(crate) host_config: Option<Map<String, Value>>,
    pub(crate) network_settings: Option<NetworkSettings>,
    pub(crate) graph_driver: Option<GraphDriver>,
    pub(crate) mounts: Option<Vec<Mount>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct Mount {
    /// Its place on the host; empty where it has none.
    pub(crate) source: String,
    #[serde(rename = "RW")]
    pub(crate) writable: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct GraphDriver {
    pub(crate) data: Option<HashMap<String, String>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct State {
    /// "created", "running", "paused", "exited"; Podman also "stopped", "stopping", "removing".
    pub(crate) status: String,
    pub(crate) running: bool,
    pub(crate) paused: bool,
    pub(crate) restarting: bool,
    #[serde(rename = "OOMKilled")]
    pub(crate) oom_killed: bool,
    pub(crate) pid: i64,
    pub(crate) exit_code: i64,
    pub(crate) error: String,
    /// Compared, never read: it is another one after every start.
    pub(crate) started_at: String,
}

impl State {
    /// Something of it runs, or may in a moment.
    pub(crate) fn is_up(&self) -> bool {
        self.running || self.paused || self.restarting || self.pid > 0 || self.status == "stopping"
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct ContainerConfig {
    pub(crate) labels: Option<HashMap<String, String>>,
    pub(crate) env: Option<Vec<String>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct NetworkSettings {
    #[serde(rename = "IPAddress")]
    pub(crate) ip_address: String,
    pub(crate) mac_address: String,
    pub(crate) networks: Option<HashMap<String, Endpoint>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct Endpoint {
    #[serde(rename = "IPAddress")]
    pub(crate) ip_address: String,
    pub(crate) mac_address: String,
}

impl Inspect {
    /// Its addresses now, IP and hardware, empty when it has none.
    pub(crate) fn addresses(&self) -> (&str, &str) {
        let Some(network) = &self.network_settings else { return ("", "") };
        let named = network.networks.iter().flat_map(HashMap::values);
        let mut all = std::iter::once((network.ip_address.as_str(), network.mac_address.as_str()))
            .chain(named.map(|end| (end.ip_address.as_str(), end.mac_address.as_str())));
        all.find(|(ip, _)| !ip.is_empty()).unwrap_or_default()
    }

    /// The folder of its writable layer, where the engine says.
    pub(crate) fn layer(&self) -> Option<&str> {
        self.graph_driver.as_ref()?.data.as_ref()?.get("UpperDir").map(String::as_str)
    }

    /// The places on the host, beside its layer, that it can write to.
    pub(crate) fn writable(&self) -> impl Iterator<Item = &str> {
        let writable = self.mounts.iter().flatten().filter(|mount| mount.writable);
        writable.map(|mount| mount.source.as_str()).filter(|source| source.starts_with('/'))
    }

    pub(crate) fn label(&self, name: &str) -> Option<&str> {
        self.config.labels.as_ref()?.get(name).map(String::as_str)
    }
}

/// One of `GET /containers/ID/checkpoints`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct Checkpoint {
    pub(crate) name: String,
}

/// What `GET /libpod/containers/ID/json` says of checkpoints.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct CheckpointInspect {
    /// Where it keeps what it knows of the container.
    pub(crate) static_dir: String,
    pub(crate) state: Checkpointed,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct Checkpointed {
    pub(crate) running: bool,
    pub(crate) checkpointed: bool,
    pub(crate) checkpoint_path: String,
}

/// One of `GET /containers/json`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct Listed {
    pub(crate) labels: Option<HashMap<String, String>>,
}

/// `GET /images/NAME/json`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct ImageInspect {
    pub(crate) id: String,
    pub(crate) repo_tags: Option<Vec<String>>,
    pub(crate) size: u64,
}

/// One line of `GET /events`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Event {
    #[serde(rename = "Actor")]
    pub(crate) actor: Actor,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct Actor {
    pub(crate) attributes: Option<HashMap<String, String>>,
}

/// One line of `POST /images/create`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Pulled {
    pub(crate) status: String,
    pub(crate) id: String,
    pub(crate) error: String,
    #[serde(rename = "progressDetail")]
    pub(crate) progress: Option<Progress>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Progress {
    pub(crate) current: u64,
    pub(crate) total: u64,
}

/// What every refusal looks like.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Refusal {
    pub(crate) message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_that_only_one_engine_knows_and_lists_that_are_null_are_read() {
        let text = r#"{"Id":"a","State":{"Status":"stopped","Running":false,"Pid":0,"StartedAt":"x","Health":{}},
            "Config":{"Labels":null,"Env":null},"NetworkSettings":{"Networks":null,"IPAddress":""}}"#;
        let found: Inspect = serde_json::from_str(text).unwrap();
        assert!(!found.state.is_up());
        assert_eq!(found.addresses(), ("", ""));
        assert_eq!(found.label("x"), None);
    }

    #[test]
    fn limits_that_a_user_without_rights_can_not_set_are_none() {
        let of = |version: &str| {
            let text = format!(
                r#"{{"MemoryLimit":true,"PidsLimit":true,"CpuCfsQuota":true,"Rootless":true,"CgroupVersion":"{version}"}}"#
            );
            serde_json::from_str::<Info>(&text).unwrap().truthful().missing_limits()
        };
        assert_eq!(of("1"), ["memory", "processes", "CPUs"]);
        assert!(of("2").is_empty());
    }

    #[test]
    fn a_container_that_is_stopping_or_has_a_process_is_up() {
        let of = |text: &str| serde_json::from_str::<State>(text).unwrap().is_up();
        assert!(
            of(r#"{"Status":"stopping"}"#)
                && of(r#"{"Status":"exited","Pid":4}"#)
                && of(r#"{"Paused":true}"#)
        );
        assert!(!of(r#"{"Status":"exited"}"#));
    }

    #[test]
    fn files_that_a_container_writes_are_in_its_layer_and_its_mounts() {
        let text = r#"{"GraphDriver":{"Data":{"UpperDir":"/l"}},"Mounts":[
            {"Type":"bind","Source":"/a","RW":true},{"Type":"bind","Source":"/b","RW":false},
            {"Type":"volume","Name":"v","Source":"/v/_data","RW":true},{"Type":"tmpfs","Source":"","RW":true}]}"#;
        let found: Inspect = serde_json::from_str(text).unwrap();
        assert_eq!(found.layer(), Some("/l"));
        assert_eq!(found.writable().collect::<Vec<_>>(), ["/a", "/v/_data"]);
    }

    #[test]
    fn an_address_is_found_where_newer_engines_have_it_only() {
        let text =
            r#"{"NetworkSettings":{"Networks":{"bridge":{"IPAddress":"172.17.0.2","MacAddress":"02:42"}}}}"#;
        assert_eq!(serde_json::from_str::<Inspect>(text).unwrap().addresses(), ("172.17.0.2", "02:42"));
    }
}
