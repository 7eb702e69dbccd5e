//! What can be changed of a sandbox that is there, and a change that is not done yet.

use std::{collections::BTreeMap, time::Duration, time::SystemTime};

use serde::{Deserialize, Serialize};

use crate::spec::{Egress, Endpoint, RestartPolicy, SandboxSpec};

/// A part of a spec that can be changed while nothing runs, by drivers that can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// Main command.
    Command,
    /// Environment of the main command and of every exec.
    Environment,
    /// Where the main command starts.
    Workdir,
    /// Who runs the main command.
    User,
    /// Virtual CPUs.
    Cpus,
    /// Guest memory.
    Memory,
    /// Size of the workspace disk.
    Disk,
    /// Where it may send to.
    Egress,
    /// What happens when the main command ends.
    Restart,
    /// How long processes may take to end.
    StopGrace,
    /// What it serves.
    Endpoints,
    /// Whether the main command has an input.
    Stdin,
    /// Whether the main command has a terminal.
    Tty,
}

impl Field {
    /// Every one.
    pub const ALL: &'static [Self] = &[
        Self::Command,
        Self::Environment,
        Self::Workdir,
        Self::User,
        Self::Cpus,
        Self::Memory,
        Self::Disk,
        Self::Egress,
        Self::Restart,
        Self::StopGrace,
        Self::Endpoints,
        Self::Stdin,
        Self::Tty,
    ];

    /// As it is called in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Command => "command",
            Self::Environment => "environment",
            Self::Workdir => "workdir",
            Self::User => "user",
            Self::Cpus => "resources.cpus",
            Self::Memory => "resources.memory_bytes",
            Self::Disk => "resources.disk_bytes",
            Self::Egress => "egress",
            Self::Restart => "restart_policy",
            Self::StopGrace => "stop_grace",
            Self::Endpoints => "endpoints",
            Self::Stdin => "stdin",
            Self::Tty => "tty",
        }
    }
}

/// A change of a spec. What is none is left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpecChange {
    /// Empty: none, the sandbox idles.
    pub command: Option<Vec<String>>,
    /// In place of the whole present one.
    pub environment: Option<BTreeMap<String, String>>,
    /// Empty: the user's home.
    pub workdir: Option<String>,
    /// Empty: root.
    pub user: Option<String>,
    /// Virtual CPUs.
    pub cpus: Option<u32>,
    /// Bytes.
    pub memory_bytes: Option<u64>,
    /// Bytes; never fewer.
    pub disk_bytes: Option<u64>,
    /// Where it may send to.
    pub egress: Option<EgressChange>,
    /// At the end of the main command.
    pub restart: Option<RestartPolicy>,
    /// For processes to end.
    pub stop_grace: Option<Duration>,
    /// In place of all present ones.
    pub endpoints: Option<Vec<Endpoint>>,
    /// An input of the main command.
    pub stdin: Option<bool>,
    /// A terminal of the main command.
    pub tty: Option<bool>,
}

/// Another egress policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EgressChange {
    /// Where the gateway's configuration says, as it is at the time.
    Default,
    /// This one.
    Own(Egress),
}

impl SpecChange {
    /// Nothing is named.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Makes of a spec what the change says.
    pub fn apply(&self, spec: &mut SandboxSpec) {
        fn set<T: Clone>(to: &mut T, from: &Option<T>) {
            if let Some(from) = from {
                to.clone_from(from);
            }
        }
        let text =
            |from: &Option<String>| from.clone().map(|text| Some(text).filter(|text| !text.is_empty()));
        set(&mut spec.command, &self.command);
        set(&mut spec.environment, &self.environment);
        set(&mut spec.workdir, &text(&self.workdir));
        set(&mut spec.user, &text(&self.user));
        set(&mut spec.resources.cpus, &self.cpus);
        set(&mut spec.resources.memory_bytes, &self.memory_bytes);
        set(&mut spec.resources.disk_bytes, &self.disk_bytes);
        set(&mut spec.restart, &self.restart);
        set(&mut spec.stop_grace, &self.stop_grace);
        set(&mut spec.endpoints, &self.endpoints);
        set(&mut spec.stdin, &self.stdin);
        set(&mut spec.tty, &self.tty);
        match &self.egress {
            None => {}
            Some(EgressChange::Default) => spec.egress = None,
            Some(EgressChange::Own(egress)) => spec.egress = Some(egress.clone()),
        }
    }

    /// What it makes another of `spec`.
    pub fn fields(&self, spec: &SandboxSpec) -> Vec<Field> {
        let mut after = spec.clone();
        self.apply(&mut after);
        let (old, new) = (&spec.resources, &after.resources);
        let differs = |field: &Field| match field {
            Field::Command => spec.command != after.command,
            Field::Environment => spec.environment != after.environment,
            Field::Workdir => spec.workdir != after.workdir,
            Field::User => spec.user != after.user,
            Field::Cpus => old.cpus != new.cpus,
            Field::Memory => old.memory_bytes != new.memory_bytes,
            Field::Disk => old.disk_bytes != new.disk_bytes,
            Field::Egress => spec.egress != after.egress,
            Field::Restart => spec.restart != after.restart,
            Field::StopGrace => spec.stop_grace != after.stop_grace,
            Field::Endpoints => spec.endpoints != after.endpoints,
            Field::Stdin => spec.stdin != after.stdin,
            Field::Tty => spec.tty != after.tty,
        };
        Field::ALL.iter().copied().filter(differs).collect()
    }
}

/// A change that was accepted and is not done, or not wholly. As long as it is there, the sandbox is not started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingUpdate {
    /// Of the spec.
    pub change: SpecChange,
    /// The labels that it shall have then.
    #[serde(default)]
    pub labels: Option<BTreeMap<String, String>>,
    /// The annotations that it shall have then; without those of Torpor's own, which stay.
    #[serde(default)]
    pub annotations: Option<BTreeMap<String, String>>,
    /// The caller's id of the request that asked for it.
    #[serde(default)]
    pub request: Option<String>,
    /// When it was asked for.
    pub since: SystemTime,
    /// Why it is not done; none: it is under way, or the gateway ended in the middle of it.
    #[serde(default)]
    pub failure: Option<UpdateFailure>,
}

/// Where an update stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateFailure {
    /// The step that failed ("grow the disk").
    pub step: String,
    /// Code for programs ("NO_SPACE").
    pub reason: String,
    /// Cause for people.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::spec;

    #[test]
    fn what_is_none_is_left_alone_and_what_is_empty_replaces() {
        let mut before = spec();
        before.command = vec!["sleep".into(), "1".into()];
        before.environment.insert("A".into(), "1".into());
        (before.workdir, before.user) = (Some("/srv".into()), Some("www".into()));
        before.egress = Some(crate::Egress::None);
        before.endpoints = vec![Endpoint { name: "web".into(), port: 80, http_path: None }];
        (before.stdin, before.tty) = (true, true);

        let nothing = SpecChange::default();
        let mut after = before.clone();
        nothing.apply(&mut after);
        assert!(nothing.is_empty() && nothing.fields(&before).is_empty());
        assert_eq!(after, before);

        let empty = SpecChange {
            command: Some(vec![]),
            environment: Some(BTreeMap::new()),
            workdir: Some(String::new()),
            user: Some(String::new()),
            egress: Some(EgressChange::Default),
            endpoints: Some(vec![]),
            stdin: Some(false),
            tty: Some(false),
            ..SpecChange::default()
        };
        use Field::*;
        let all = [Command, Environment, Workdir, User, Egress, Endpoints, Stdin, Tty];
        assert_eq!(empty.fields(&before), all);
        empty.apply(&mut after);
        assert_eq!(after, SandboxSpec { hostname: before.hostname.clone(), ..spec() });
        // As it is kept.
        let kept = serde_json::to_string(&empty).unwrap();
        assert_eq!(serde_json::from_str::<SpecChange>(&kept).unwrap(), empty);
    }

    #[test]
    fn each_field_of_a_change_changes_one_field_of_a_spec() {
        let all = SpecChange {
            command: Some(vec!["a".into()]),
            environment: Some(BTreeMap::from([("A".into(), "1".into())])),
            workdir: Some("/a".into()),
            user: Some("a".into()),
            cpus: Some(7),
            memory_bytes: Some(1 << 30),
            disk_bytes: Some(2 << 30),
            egress: Some(EgressChange::Own(Egress::Open)),
            restart: Some(RestartPolicy::Always),
            stop_grace: Some(Duration::from_secs(77)),
            endpoints: Some(vec![Endpoint { name: "a".into(), port: 1, http_path: None }]),
            stdin: Some(true),
            tty: Some(true),
        };
        assert_eq!(all.fields(&spec()), Field::ALL);
        let mut after = spec();
        all.apply(&mut after);
        assert!(all.fields(&after).is_empty());
        assert_eq!((after.resources.cpus, after.egress), (7, Some(Egress::Open)));
    }
}
