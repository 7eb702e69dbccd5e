//! How a sandbox of ours looks to clients of `openshell.v1`.

use std::collections::BTreeMap;

use prost::Message as _;
use prost_types::Timestamp;
use torpor_proto::{
    openshell::{datamodel::v1::ObjectMeta, v1 as os},
    v1,
};

use crate::store::Rest;

/// The condition that tells a suspended sandbox from a stopped one.
const SUSPENDED: &str = "Suspended";

/// What is shown of a sandbox that its record doesn't know.
#[derive(Debug, Default)]
pub struct Extras {
    /// As it was created, by this interface.
    pub rest: Option<Rest>,
    /// How often its policy was set.
    pub policy_version: u32,
    /// Names of what is attached to it.
    pub providers: Vec<String>,
}

/// Ours as theirs.
pub fn phase(phase: v1::Phase) -> os::SandboxPhase {
    use os::SandboxPhase as To;
    use v1::Phase as From;
    match phase {
        From::Unspecified => To::Unspecified,
        From::Unknown => To::Unknown,
        From::Provisioning => To::Provisioning,
        From::Ready => To::Ready,
        From::Suspending | From::Stopping => To::Stopping,
        From::Suspended | From::Stopped => To::Stopped,
        From::Resuming | From::Starting => To::Starting,
        From::Completed => To::Completed,
        From::Error => To::Error,
        From::Deleting => To::Deleting,
    }
}

/// A whole sandbox.
pub fn sandbox(from: v1::Sandbox, extras: Extras) -> os::Sandbox {
    let status = from.status.unwrap_or_default();
    let spec = from.spec.unwrap_or_default();
    let rest = extras.rest.unwrap_or_default();
    let metadata = ObjectMeta {
        id: from.id.clone(),
        name: from.name,
        created_time: from.created,
        labels: ordered(from.labels),
        resource_version: from.version,
        annotations: ordered(from.annotations),
        workspace: from.workspace,
        deletion_time: status.phase_since.filter(|_| status.phase() == v1::Phase::Deleting),
    };
    os::Sandbox {
        metadata: Some(metadata),
        status: Some(status_of(&from.id, &spec, status, extras.policy_version)),
        spec: Some(spec_of(spec, &rest.spec, extras.providers)),
        host_key_fingerprint: String::new(),
        created_from_workload_template: (!rest.origin.is_empty())
            .then(|| os::SandboxWorkloadTemplateProvenance::decode(rest.origin.as_slice()).ok())
            .flatten(),
    }
}

fn ordered<K: Ord, V>(map: impl IntoIterator<Item = (K, V)>) -> BTreeMap<K, V> {
    map.into_iter().collect()
}

/// As it was sent, where the record still says the same; what was changed since then as it is now.
fn spec_of(now: v1::SandboxSpec, sent: &[u8], providers: Vec<String>) -> os::SandboxSpec {
    // What can't be read was written by another version: then the record alone counts.
    let mut spec = os::SandboxSpec::decode(sent).unwrap_or_default();
    let environment = ordered(now.environment);
    let template = spec.template.get_or_insert_default();
    let mut asked = template.environment.clone();
    asked.extend(spec.environment.clone());
    if asked != environment {
        template.environment.clear();
        spec.environment = environment;
    }
    template.image = now.image;
    spec.command = now.command;
    spec.providers = providers;
    spec.restart_policy = match v1::RestartPolicy::try_from(now.restart_policy) {
        Ok(v1::RestartPolicy::OnFailure) => os::SandboxRestartPolicy::OnFailure,
        Ok(v1::RestartPolicy::Always) => os::SandboxRestartPolicy::Always,
        // One that was never named stays so.
        _ if spec.restart_policy == 0 => os::SandboxRestartPolicy::Unspecified,
        _ => os::SandboxRestartPolicy::Never,
    }
    .into();
    spec
}

fn status_of(id: &str, spec: &v1::SandboxSpec, from: v1::SandboxStatus, policy: u32) -> os::SandboxStatus {
    let ready = from.phase() == v1::Phase::Ready;
    let main = !spec.command.is_empty();
    os::SandboxStatus {
        phase: phase(from.phase()).into(),
        conditions: conditions(&from),
        current_policy_version: policy,
        main_process_instance_id: if ready && main { format!("{id}-{}", from.run) } else { String::new() },
        main_process_started_time: from.phase_since.filter(|_| ready && main),
        exit_code: from.exit_code,
        restart_count: from.restart_count,
        endpoint_statuses: from.endpoints.into_iter().map(|seen| endpoint(spec, seen)).collect(),
        ..os::SandboxStatus::default()
    }
}

fn endpoint(spec: &v1::SandboxSpec, seen: v1::EndpointStatus) -> os::EndpointStatus {
    use os::EndpointResult as To;
    use v1::endpoint_status::Result as Seen;
    let result = match seen.result() {
        Seen::Unspecified | Seen::Unknown => To::NoObservedExchange,
        Seen::Ok | Seen::HttpError if seen.http_status > 0 => To::HttpResponseReceived,
        // A connection was taken, and no HTTP was asked for.
        Seen::Ok => To::Unspecified,
        _ => To::TransportFailed,
    };
    let declared = spec.endpoints.iter().find(|declared| declared.name == seen.name);
    os::EndpointStatus {
        endpoint_id: seen.name,
        host: "127.0.0.1".to_owned(),
        ports: vec![seen.port],
        path: declared.map_or_else(String::new, |declared| declared.http_path.clone()),
        last_result: result.into(),
        last_reported_time: seen.observed,
        last_failure: None,
    }
}

fn condition(
    kind: &str,
    holds: bool,
    reason: &str,
    message: String,
    since: Option<Timestamp>,
) -> os::SandboxCondition {
    let status = if holds { "True" } else { "False" };
    os::SandboxCondition {
        r#type: kind.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        transition_time: since,
    }
}

fn conditions(status: &v1::SandboxStatus) -> Vec<os::SandboxCondition> {
    let mut all: Vec<_> = status
        .conditions
        .iter()
        .map(|c| condition(&c.r#type, c.status, &c.reason, c.message.clone(), c.since))
        .collect();
    let since = status.phase_since;
    match status.phase() {
        v1::Phase::Suspended => {
            let memory = status.retained() == v1::Keep::Memory;
            let reason = if memory { "MemoryRetained" } else { "DiskRetained" };
            let message = "the sandbox is suspended; StartSandbox resumes it".to_owned();
            all.push(condition(SUSPENDED, true, reason, message, since));
        }
        v1::Phase::Suspending => {
            all.push(condition(SUSPENDED, false, "Suspending", status.step.clone(), since));
        }
        v1::Phase::Resuming => all.push(condition(SUSPENDED, false, "Resuming", status.step.clone(), since)),
        _ => {}
    }
    if let Some(failure) = &status.failure {
        let message = format!("{}: {}; next: {}", failure.step, failure.message, failure.next);
        all.push(condition("Failed", true, &failure.reason, message, failure.time));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suspended() -> v1::Sandbox {
        v1::Sandbox {
            id: "sb-1".into(),
            name: "box".into(),
            workspace: "default".into(),
            version: 7,
            spec: Some(v1::SandboxSpec {
                image: "debian".into(),
                environment: [("A".to_owned(), "1".to_owned()), ("B".to_owned(), "2".to_owned())].into(),
                ..v1::SandboxSpec::default()
            }),
            status: Some(v1::SandboxStatus {
                phase: v1::Phase::Suspended.into(),
                retained: v1::Keep::Memory.into(),
                ..v1::SandboxStatus::default()
            }),
            ..v1::Sandbox::default()
        }
    }

    #[test]
    fn a_suspended_sandbox_shows_as_stopped_with_a_condition_that_says_so() {
        let shown = sandbox(suspended(), Extras::default());
        let status = shown.status.unwrap();
        assert_eq!(status.phase(), os::SandboxPhase::Stopped);
        let found = status.conditions.iter().find(|c| c.r#type == SUSPENDED).unwrap();
        assert_eq!((found.status.as_str(), found.reason.as_str()), ("True", "MemoryRetained"));
        let mut stopped = suspended();
        stopped.status.as_mut().unwrap().phase = v1::Phase::Stopped.into();
        let status = sandbox(stopped, Extras::default()).status.unwrap();
        assert_eq!(status.phase(), os::SandboxPhase::Stopped);
        assert!(status.conditions.iter().all(|c| c.r#type != SUSPENDED));
    }

    #[test]
    fn a_spec_comes_back_as_it_was_sent_until_the_record_says_otherwise() {
        let sent = os::SandboxSpec {
            log_level: "debug".into(),
            tty: true,
            environment: [("B".to_owned(), "2".to_owned())].into(),
            policy: Some(vec![0x08, 1].into()),
            template: Some(os::SandboxTemplate {
                environment: [("A".to_owned(), "1".to_owned())].into(),
                runtime_class_name: "gvisor".into(),
                image: "debian".into(),
                ..os::SandboxTemplate::default()
            }),
            ..os::SandboxSpec::default()
        };
        let rest = Some(Rest { spec: sent.encode_to_vec(), origin: Vec::new() });
        let extras = Extras { rest: rest.clone(), ..Extras::default() };
        assert_eq!(sandbox(suspended(), extras).spec.unwrap(), sent);

        let mut changed = suspended();
        changed.spec.as_mut().unwrap().environment = [("C".to_owned(), "3".to_owned())].into();
        let spec = sandbox(changed, Extras { rest, ..Extras::default() }).spec.unwrap();
        assert_eq!(spec.environment, [("C".to_owned(), "3".to_owned())].into());
        assert!(spec.template.unwrap().environment.is_empty());
        assert_eq!(spec.log_level, "debug");
    }
}
