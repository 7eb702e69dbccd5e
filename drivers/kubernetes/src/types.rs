//! What is read of the cluster's objects. Own types: both versions of a Sandbox are one, and what isn't used isn't kept.

use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::Object;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use torpor_sandbox::{SandboxId, words};

use crate::manifest::{AGENT_VOLUME, CARRIER, CONTAINER};

/// Whose: the identity of a state directory.
pub(crate) const GATEWAY: &str = "torpor.dev/gateway";
/// Which sandbox an object is of.
pub(crate) const SANDBOX: &str = "torpor.dev/sandbox";
/// The run that a Sandbox was told to run for last.
pub(crate) const RUN: &str = "torpor.dev/run";
/// The run whose start may not come any more, as it was given up before its fate was known.
pub(crate) const STOPPED: &str = "torpor.dev/stopped";
/// What the controller says of a sandbox that isn't up, characters.
const LONGEST: usize = 500;

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

    /// What of the pod's template must be another for its agent to come from this image, as lists that are written whole.
    pub(crate) fn agent_from(&self, image: &str) -> Map<String, Value> {
        let spec = &self.pod_template.spec;
        let mut fields = Map::new();
        let mut carriers = spec.init_containers.clone();
        let carrier = carriers.iter_mut().find(|one| one.name == CARRIER && one.image != image);
        if let Some(carrier) = carrier {
            image.clone_into(&mut carrier.image);
            fields.extend(serde_json::to_value(&carriers).ok().map(|all| ("initContainers".to_owned(), all)));
        }
        let mut volumes = spec.volumes.clone();
        let volume = volumes.iter_mut().find(|volume| volume.name == AGENT_VOLUME);
        if let Some(source) = volume.and_then(|volume| volume.image.as_mut())
            && source.reference != image
        {
            image.clone_into(&mut source.reference);
            fields.extend(serde_json::to_value(&volumes).ok().map(|all| ("volumes".to_owned(), all)));
        }
        fields
    }
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Template {
    spec: TemplateSpec,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
struct TemplateSpec {
    init_containers: Vec<InitContainer>,
    volumes: Vec<Volume>,
}

/// Also what is not looked at is kept: a list is written back as a whole.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct InitContainer {
    name: String,
    image: String,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
struct Volume {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    persistent_volume_claim: Option<ClaimSource>,
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<ImageSource>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
struct ClaimSource {
    claim_name: String,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct ImageSource {
    reference: String,
    #[serde(flatten)]
    rest: Map<String, Value>,
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
    message: String,
}

impl Terminated {
    /// Whether a process ended so by itself, and was not lost with its node or told to end: 143 is how the agent ends when
    /// its node says so.
    fn is_own(&self) -> bool {
        !matches!(self.exit_code, 0 | 143)
            && !matches!(self.reason.as_str(), "ContainerStatusUnknown" | "Unknown")
    }

    fn said(&self, agent_volume: bool) -> String {
        let code = self.exit_code;
        let mut text = said(&self.reason, &format!("its container ended with code {code}"));
        if !self.message.is_empty() {
            text = format!("{text}: {}", words::said(&self.message));
        }
        if code == 126 || matches!(self.reason.as_str(), "StartError" | "ContainerCannotRun") {
            text.push_str("; the agent, its first process, could not be run there");
            if agent_volume {
                text.push_str(
                    ": many runtimes mount image volumes noexec, and with these `agent_volume` must be false",
                );
            }
        }
        text
    }
}

fn said(reason: &str, message: &str) -> String {
    match (reason.is_empty(), message.is_empty()) {
        (false, false) => format!("{reason}: {message}"),
        (true, _) => message.to_owned(),
        (false, true) => reason.to_owned(),
    }
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
    /// Why there is no pod; kept of those reasons only that tell it.
    pub(crate) message: String,
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
    /// As `v1alpha1` has it, whose controllers know no Suspended condition.
    pub(crate) oldest: bool,
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

/// Why a container waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// For its image.
    pub(crate) image: bool,
    /// Nothing that may go by: no node will ever try again.
    pub(crate) for_good: bool,
    /// It is the one that brings the agent.
    pub(crate) carrier: bool,
    /// "ImagePullBackOff: …".
    pub(crate) text: String,
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
    /// What keeps a container from being started, beside the time that it takes.
    pub(crate) waiting: Option<Waiting>,
    /// Failed, and by what its own processes did: it was neither evicted nor lost with its node.
    pub(crate) own_end: bool,
    /// Running by the last word of a node that is heard no more.
    pub(crate) unheard: bool,
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
    let holds = found.status == "True";
    let tells = !holds && matches!(found.reason.as_str(), "ReconcilerError" | "DependenciesNotReady");
    Some(Condition {
        holds,
        message: if tells { words::said_within(&found.message, LONGEST) } else { String::new() },
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
            oldest: object.spec.operating_mode.is_none() && object.spec.replicas.is_some(),
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
        let phase = match status.phase.as_str() {
            "Running" => Phase::Running,
            "Succeeded" => Phase::Succeeded,
            "Failed" => Phase::Failed,
            _ => Phase::Pending,
        };
        let agent_volume =
            object.spec.volumes.iter().any(|one| one.name == AGENT_VOLUME && one.image.is_some());
        let holds = |kind: &str, value: &str| {
            status.conditions.iter().any(|one| one.r#type == kind && one.status == value)
        };
        let mut ends = states().filter_map(|one| one.state.terminated.as_ref());
        let end = ends.find(|end| end.exit_code != 0).or_else(|| {
            let mut own = status.container_statuses.iter().filter(|one| one.name == CONTAINER);
            own.find_map(|one| one.state.terminated.as_ref())
        });
        // The kubelet and the control plane say so of a pod that they have ended.
        let taken = !status.reason.is_empty() || holds("DisruptionTarget", "True");
        let waiting = states().find_map(waits);
        let mut why = said(&status.reason, &status.message);
        if why.is_empty() {
            why = waiting.as_ref().map(|waiting| waiting.text.clone()).unwrap_or_default();
        }
        if why.is_empty() {
            why = end.map(|end| end.said(agent_volume)).unwrap_or_default();
        }
        let scheduled = status.conditions.iter().find(|one| one.r#type == "PodScheduled");
        Self {
            uid: meta.uid.clone().unwrap_or_default(),
            version: version(meta),
            owner: owner.map(|owner| owner.uid.clone()).unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            phase,
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
            waiting,
            own_end: phase == Phase::Failed && !taken && end.is_some_and(Terminated::is_own),
            unheard: phase == Phase::Running && holds("Ready", "False"),
            agent_volume,
            unschedulable: scheduled
                .filter(|one| one.status == "False" && one.reason == "Unschedulable")
                .map(|one| one.message.clone()),
        }
    }
}

/// What a container waits for, when it is more than the time that it takes.
fn waits(one: &ContainerStatus) -> Option<Waiting> {
    let why = one.state.waiting.as_ref()?;
    if matches!(why.reason.as_str(), "" | "ContainerCreating" | "PodInitializing") {
        return None;
    }
    let for_good = matches!(why.reason.as_str(), "InvalidImageName" | "ErrImageNeverPull");
    let images = ["ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"];
    Some(Waiting {
        image: for_good || images.contains(&why.reason.as_str()),
        for_good,
        carrier: one.name == CARRIER,
        text: words::said(&said(&why.reason, &why.message)),
    })
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
        let held =
            Condition { holds: true, reason: "PodTerminated".into(), generation: 3, message: String::new() };
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
        assert!(pull.waiting.is_some_and(|waiting| waiting.image && !waiting.for_good && !waiting.carrier));
        let never = read(
            r#"{"phase":"Pending","initContainerStatuses":[{"name":"agent","state":{"waiting":{"reason":"InvalidImageName"}}}]}"#,
        );
        assert!(never.waiting.is_some_and(|waiting| waiting.for_good && waiting.carrier));
        let coming = read(
            r#"{"phase":"Pending","containerStatuses":[{"name":"sandbox","state":{"waiting":{"reason":"ContainerCreating"}}}]}"#,
        );
        assert_eq!(coming.waiting, None);
        let full = read(
            r#"{"phase":"Pending","conditions":[{"type":"PodScheduled","status":"False","reason":"Unschedulable","message":"0/3"}]}"#,
        );
        assert_eq!(full.unschedulable.as_deref(), Some("0/3"));
        let oom = read(
            r#"{"phase":"Failed","containerStatuses":[{"name":"sandbox","state":{"terminated":{"exitCode":137,"reason":"OOMKilled"}}}]}"#,
        );
        assert_eq!(oom.why, "OOMKilled: its container ended with code 137");
        assert!(oom.own_end && !evicted.own_end);
    }

    #[test]
    fn what_a_node_ended_is_no_end_of_the_pods_own() {
        let own = |status: &str| {
            let text = format!(r#"{{"metadata":{{"uid":"p"}},"spec":{{}},"status":{status}}}"#);
            SeenPod::from(&serde_json::from_str::<Pod>(&text).unwrap()).own_end
        };
        let of = |end: &str, more: &str| {
            format!(
                r#"{{"phase":"Failed"{more},"containerStatuses":[{{"name":"sandbox","state":{{"terminated":{end}}}}}]}}"#
            )
        };
        assert!(own(&of(r#"{"exitCode":137,"reason":"Error"}"#, "")));
        assert!(own(&of(r#"{"exitCode":1}"#, "")));
        for (end, more) in [
            (r#"{"exitCode":143,"reason":"Error"}"#, ""),
            (r#"{"exitCode":137,"reason":"ContainerStatusUnknown"}"#, ""),
            (r#"{"exitCode":255,"reason":"Unknown"}"#, ""),
            (r#"{"exitCode":137,"reason":"Error"}"#, r#","reason":"Evicted""#),
            (
                r#"{"exitCode":137,"reason":"Error"}"#,
                r#","conditions":[{"type":"DisruptionTarget","status":"True","reason":"DeletionByTaintManager"}]"#,
            ),
        ] {
            assert!(!own(&of(end, more)), "{end}{more}");
        }
        assert!(!own(r#"{"phase":"Failed","reason":"UnexpectedAdmissionError"}"#));
    }

    #[test]
    fn an_agent_that_can_not_be_run_is_told_as_such() {
        let text = r#"{"metadata":{},"spec":{"volumes":[{"name":"agent","image":{"reference":"a:1"}}]},"status":{"phase":"Failed",
            "containerStatuses":[{"name":"sandbox","state":{"terminated":{"exitCode":128,"reason":"StartError",
            "message":"exec: permission denied"}}}]}}"#;
        let pod = SeenPod::from(&serde_json::from_str::<Pod>(text).unwrap());
        assert!(pod.own_end, "nothing of its node's");
        for said in ["StartError", "code 128", "permission denied", "agent_volume"] {
            assert!(pod.why.contains(said), "{said}: {}", pod.why);
        }
    }

    #[test]
    fn the_agents_image_is_replaced_where_it_stands_and_nothing_else() {
        let text = r#"{"metadata":{},"spec":{"replicas":0,"podTemplate":{"spec":{
            "initContainers":[{"name":"agent","image":"a:1","command":["/x"],"resources":{"limits":{"cpu":"1"}}}],
            "volumes":[{"name":"torpor","emptyDir":{"sizeLimit":"64Mi"}},
                {"name":"w","persistentVolumeClaim":{"claimName":"c","readOnly":true}},
                {"name":"agent","image":{"reference":"a:1","pullPolicy":"Always"}}]}}}}"#;
        let spec = serde_json::from_str::<Sandbox>(text).unwrap().spec;
        assert!(spec.agent_from("a:1").is_empty());
        let wanted = serde_json::json!({
            "initContainers": [{"name": "agent", "image": "a:2", "command": ["/x"], "resources": {"limits": {"cpu": "1"}}}],
            "volumes": [{"name": "torpor", "emptyDir": {"sizeLimit": "64Mi"}},
                {"name": "w", "persistentVolumeClaim": {"claimName": "c", "readOnly": true}},
                {"name": "agent", "image": {"reference": "a:2", "pullPolicy": "Always"}}],
        });
        assert_eq!(Value::Object(spec.agent_from("a:2")), wanted);
    }
}
