//! What is read of the cluster's objects. Own types: both versions of a Sandbox are one, and what isn't used isn't kept.

use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::Object;
use serde::{Deserialize, Serialize};
use torpor_sandbox::SandboxId;

use crate::manifest::{AGENT_VOLUME, CONTAINER};

/// Whose: the identity of a state directory.
pub(crate) const GATEWAY: &str = "torpor.dev/gateway";
/// Which sandbox an object is of.
pub(crate) const SANDBOX: &str = "torpor.dev/sandbox";
/// The run that a Sandbox was told to run for last.
pub(crate) const RUN: &str = "torpor.dev/run";

/// Kept of a pod's addresses beside its first; there is one of each family.
const OTHER_IPS: usize = 3;

pub(crate) type Sandbox = Object<SandboxSpec, SandboxStatus>;
pub(crate) type Pod = Object<PodSpec, PodStatus>;
pub(crate) type Claim = Object<Nothing, Nothing>;

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Nothing {}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct SandboxSpec {
    /// v1beta1.
    operating_mode: Option<String>,
    /// v1alpha1.
    replicas: Option<u32>,
    pod_template: Template,
    volume_claim_templates: Vec<ClaimTemplate>,
}

impl SandboxSpec {
    /// The claims that its pods mount by their names.
    pub(crate) fn claims(&self) -> impl Iterator<Item = &str> {
        let volumes = self.pod_template.spec.volumes.iter();
        volumes.filter_map(|volume| Some(volume.persistent_volume_claim.as_ref()?.claim_name.as_str()))
    }

    /// Those that the controller makes for the object of this name.
    pub(crate) fn made_claims(&self, object: &str) -> Vec<String> {
        let of = |template: &ClaimTemplate| format!("{}-{object}", template.metadata.name);
        self.volume_claim_templates.iter().map(of).collect()
    }
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Template {
    spec: TemplateSpec,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct TemplateSpec {
    volumes: Vec<Volume>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
struct Volume {
    name: String,
    persistent_volume_claim: Option<ClaimSource>,
    image: Option<Nothing>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
struct ClaimSource {
    claim_name: String,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct ClaimTemplate {
    metadata: Named,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Named {
    name: String,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct SandboxStatus {
    conditions: Vec<RawCondition>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
struct RawCondition {
    r#type: String,
    status: String,
    reason: String,
    message: String,
    observed_generation: i64,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodSpec {
    node_name: Option<String>,
    termination_grace_period_seconds: Option<u64>,
    volumes: Vec<Volume>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodStatus {
    phase: String,
    reason: String,
    message: String,
    #[serde(rename = "podIP")]
    pod_ip: String,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodAddress>,
    conditions: Vec<RawCondition>,
    container_statuses: Vec<ContainerStatus>,
    init_container_statuses: Vec<ContainerStatus>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct PodAddress {
    ip: String,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct ContainerStatus {
    name: String,
    state: ContainerState,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct ContainerState {
    waiting: Option<Why>,
    terminated: Option<Terminated>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Why {
    reason: String,
    message: String,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
struct Terminated {
    exit_code: i32,
    reason: String,
}

/// What is wanted of a Sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Running,
    Suspended,
}

/// A condition, for the generation that it was written for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Condition {
    pub(crate) holds: bool,
    pub(crate) reason: String,
    pub(crate) generation: i64,
}

/// A Sandbox object, as far as it counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) uid: String,
    pub(crate) version: u64,
    pub(crate) generation: i64,
    pub(crate) mode: Mode,
    pub(crate) run: u64,
    pub(crate) deleting: bool,
    pub(crate) ready: Option<Condition>,
    pub(crate) suspended: Option<Condition>,
}

/// How a pod is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Pending,
    Running,
    Succeeded,
    Failed,
}

/// A pod, as far as it counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeenPod {
    pub(crate) uid: String,
    pub(crate) version: u64,
    /// The uid of the Sandbox that owns it.
    pub(crate) owner: String,
    pub(crate) deleting: bool,
    pub(crate) phase: Phase,
    pub(crate) grace: u64,
    pub(crate) node: String,
    pub(crate) ip: String,
    /// Those beside it, of a pod in two families.
    pub(crate) other_ips: Vec<String>,
    /// Why it is as it is: "Evicted: …".
    pub(crate) why: String,
    /// Its image can't be had.
    pub(crate) no_image: Option<String>,
    /// No node has room.
    pub(crate) unschedulable: Option<String>,
    /// Its agent came by an image volume.
    pub(crate) agent_volume: bool,
}

impl SeenPod {
    /// Where something of the pod's can be reached: no address of everybody or of many.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        let all = std::iter::once(&self.ip).chain(&self.other_ips);
        all.filter_map(|text| text.parse().ok())
            .filter(|ip: &IpAddr| !ip.is_unspecified() && !ip.is_multicast())
            .collect()
    }
}

/// The name of a sandbox's objects.
pub(crate) fn name(id: &SandboxId) -> String {
    format!("torpor-{id}")
}

/// The name of its workspace's claim.
pub(crate) fn claim_name(id: &SandboxId) -> String {
    format!("torpor-{id}-workspace")
}

/// The sandbox that an object of ours is of.
pub(crate) fn id_of(meta: &ObjectMeta, identity: &str) -> Option<SandboxId> {
    let labels = meta.labels.as_ref()?;
    (labels.get(GATEWAY)? == identity).then(|| labels.get(SANDBOX)?.parse().ok())?
}

fn version(meta: &ObjectMeta) -> u64 {
    meta.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or_default()
}

fn condition(all: &[RawCondition], kind: &str) -> Option<Condition> {
    let found = all.iter().find(|one| one.r#type == kind)?;
    Some(Condition {
        holds: found.status == "True",
        reason: found.reason.clone(),
        generation: found.observed_generation,
    })
}

impl From<&Sandbox> for Seen {
    fn from(object: &Sandbox) -> Self {
        let meta = &object.metadata;
        let suspended = match (&object.spec.operating_mode, object.spec.replicas) {
            (Some(mode), _) => mode == "Suspended",
            (None, replicas) => replicas == Some(0),
        };
        let conditions = object.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
        let run = meta.annotations.as_ref().and_then(|all| all.get(RUN)?.parse().ok());
        Self {
            uid: meta.uid.clone().unwrap_or_default(),
            version: version(meta),
            generation: meta.generation.unwrap_or_default(),
            mode: if suspended { Mode::Suspended } else { Mode::Running },
            run: run.unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            ready: condition(conditions, "Ready"),
            suspended: condition(conditions, "Suspended"),
        }
    }
}

impl From<&Pod> for SeenPod {
    fn from(object: &Pod) -> Self {
        let (meta, nothing) = (&object.metadata, PodStatus::default());
        let status = object.status.as_ref().unwrap_or(&nothing);
        let owner = meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
        let states = || status.container_statuses.iter().chain(&status.init_container_statuses);
        let said = |reason: &str, message: &str| match (reason.is_empty(), message.is_empty()) {
            (false, false) => format!("{reason}: {message}"),
            (true, _) => message.to_owned(),
            (false, true) => reason.to_owned(),
        };
        let waiting: Vec<String> = states()
            .filter_map(|one| one.state.waiting.as_ref())
            .filter(|why| why.reason != "ContainerCreating" && why.reason != "PodInitializing")
            .map(|why| said(&why.reason, &why.message))
            .collect();
        let images = ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"];
        let no_image = waiting.iter().find(|text| images.iter().any(|one| text.starts_with(one))).cloned();
        let mut ends = states().filter_map(|one| one.state.terminated.as_ref());
        let end = ends.find(|end| end.exit_code != 0).or_else(|| {
            let mut own = status.container_statuses.iter().filter(|one| one.name == CONTAINER);
            own.find_map(|one| one.state.terminated.as_ref())
        });
        let mut why = said(&status.reason, &status.message);
        if why.is_empty() {
            why = waiting.into_iter().next().unwrap_or_default();
        }
        if why.is_empty()
            && let Some(end) = end
        {
            why = said(&end.reason, &format!("its container ended with code {}", end.exit_code));
        }
        let scheduled = status.conditions.iter().find(|one| one.r#type == "PodScheduled");
        Self {
            uid: meta.uid.clone().unwrap_or_default(),
            version: version(meta),
            owner: owner.map(|owner| owner.uid.clone()).unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            phase: match status.phase.as_str() {
                "Running" => Phase::Running,
                "Succeeded" => Phase::Succeeded,
                "Failed" => Phase::Failed,
                _ => Phase::Pending,
            },
            grace: object.spec.termination_grace_period_seconds.unwrap_or(30),
            node: object.spec.node_name.clone().unwrap_or_default(),
            ip: status.pod_ip.clone(),
            other_ips: status
                .pod_ips
                .iter()
                .filter(|one| one.ip != status.pod_ip)
                .take(OTHER_IPS)
                .map(|one| one.ip.clone())
                .collect(),
            why,
            no_image,
            agent_volume: object
                .spec
                .volumes
                .iter()
                .any(|volume| volume.name == AGENT_VOLUME && volume.image.is_some()),
            unschedulable: scheduled
                .filter(|one| one.status == "False" && one.reason == "Unschedulable")
                .map(|one| one.message.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_say_what_is_wanted_and_conditions_their_generation() {
        let read = |text: &str| Seen::from(&serde_json::from_str::<Sandbox>(text).unwrap());
        let beta = read(
            r#"{"apiVersion":"agents.x-k8s.io/v1beta1","kind":"Sandbox","metadata":{"name":"a","uid":"u","generation":4,
                "resourceVersion":"17","annotations":{"torpor.dev/run":"3"}},"spec":{"operatingMode":"Suspended"},
                "status":{"conditions":[{"type":"Suspended","status":"True","reason":"PodTerminated","observedGeneration":3}]}}"#,
        );
        assert_eq!((beta.mode, beta.run, beta.version, beta.generation), (Mode::Suspended, 3, 17, 4));
        let held = Condition { holds: true, reason: "PodTerminated".into(), generation: 3 };
        assert_eq!(beta.suspended, Some(held));
        for (replicas, mode) in
            [(r#""replicas":0"#, Mode::Suspended), (r#""replicas":1"#, Mode::Running), ("", Mode::Running)]
        {
            assert_eq!(read(&format!(r#"{{"metadata":{{}},"spec":{{{replicas}}}}}"#)).mode, mode);
        }
    }

    #[test]
    fn a_pod_has_an_address_of_each_family_none_or_no_good_one() {
        let read = |status: &str| {
            let text = format!(r#"{{"metadata":{{"uid":"p"}},"spec":{{}},"status":{status}}}"#);
            SeenPod::from(&serde_json::from_str::<Pod>(&text).unwrap()).addresses()
        };
        let both = read(r#"{"podIP":"10.1.0.3","podIPs":[{"ip":"10.1.0.3"},{"ip":"fd00::3"}]}"#);
        assert_eq!(both, ["10.1.0.3".parse::<IpAddr>().unwrap(), "fd00::3".parse().unwrap()]);
        assert_eq!(read(r#"{"podIP":"fd00::3"}"#).len(), 1);
        for none in [
            "{}",
            r#"{"podIP":""}"#,
            r#"{"podIP":"0.0.0.0"}"#,
            r#"{"podIP":"::"}"#,
            r#"{"podIP":"224.0.0.1"}"#,
            r#"{"podIP":"host"}"#,
        ] {
            assert!(read(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn why_a_pod_does_not_run_is_found_wherever_it_stands() {
        let read = |status: &str| {
            let text = format!(r#"{{"metadata":{{"uid":"p"}},"spec":{{}},"status":{status}}}"#);
            SeenPod::from(&serde_json::from_str::<Pod>(&text).unwrap())
        };
        let evicted = read(r#"{"phase":"Failed","reason":"Evicted","message":"low on memory"}"#);
        assert_eq!((evicted.phase, evicted.why.as_str()), (Phase::Failed, "Evicted: low on memory"));
        let pull = read(
            r#"{"phase":"Pending","containerStatuses":[{"name":"sandbox","state":{"waiting":{"reason":"ImagePullBackOff"}}}]}"#,
        );
        assert!(pull.no_image.is_some());
        let full = read(
            r#"{"phase":"Pending","conditions":[{"type":"PodScheduled","status":"False","reason":"Unschedulable","message":"0/3"}]}"#,
        );
        assert_eq!(full.unschedulable.as_deref(), Some("0/3"));
        let oom = read(
            r#"{"phase":"Failed","containerStatuses":[{"name":"sandbox","state":{"terminated":{"exitCode":137,"reason":"OOMKilled"}}}]}"#,
        );
        assert_eq!(oom.why, "OOMKilled: its container ended with code 137");
    }
}
