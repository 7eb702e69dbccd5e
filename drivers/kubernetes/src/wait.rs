//! Waiting for a pod: what has become of it, and when what it waits for is a failure.
//!
//! A pod that is drained, evicted or lost with its node is no failure of its sandbox, however often that happens; nor is one
//! that no node has room for, whose image takes its time or whose volume is still attached elsewhere. These are told and
//! waited for; the time that a start may take counts from the container's run.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use torpor_sandbox::{DriverError, SandboxId, SandboxSpec, words};

use crate::{
    cache::View,
    driver::Inner,
    store::Record,
    types::{Mode, Phase, Seen, SeenPod, Waiting, name},
};

/// A pod that no node has room for, or that is refused, is reported after this time.
const ROOM: Duration = Duration::from_secs(5);
/// How long one call waits for more before it says what there is to wait for.
const LOOK: Duration = Duration::from_secs(10);

/// What has become of a pod that is waited for.
pub(crate) enum Came {
    /// The pod's uid, and the generation that it is of.
    Up(String, i64),
    /// It ended by itself, or can't be made.
    Failed(String),
    /// Its node, or somebody, has ended it.
    Taken(String),
    NoImage(Waiting),
    NoRoom(String),
    Stopped,
    Gone,
}

/// Since when sandboxes wait for what they wait for now.
#[derive(Debug, Default)]
pub(crate) struct Waits(Mutex<HashMap<SandboxId, (String, Instant)>>);

impl Waits {
    /// How long this one has waited for this, by all calls.
    fn since(&self, id: &SandboxId, what: String) -> Duration {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = all.entry(id.clone()).or_insert_with(|| (what.clone(), Instant::now()));
        if entry.0 != what {
            *entry = (what, Instant::now());
        }
        entry.1.elapsed()
    }

    /// It waits no more.
    pub(crate) fn over(&self, id: &SandboxId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }
}

impl Inner {
    /// Waits for the pod of a run for as long as a call may.
    ///
    /// # Errors
    /// What is to be waited for: the pod is left as it is, and the start is to be asked for again.
    pub(crate) async fn wait_for_pod(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        record: &Record,
    ) -> Result<Came, DriverError> {
        let patience = self.config.patience;
        // Looked at twice: what takes a moment is not worth telling before.
        for (limit, at_last) in [(ROOM, false), (LOOK, true)] {
            let came = self.until(id, limit.min(patience), |view| came(view, record, at_last)).await?;
            if let Some(came) = came {
                return Ok(came);
            }
        }
        let view = self.view(id).await?;
        match came(&view, record, true) {
            Some(came) => Ok(came),
            None => self.still_waiting(id, spec, record, &view),
        }
    }

    fn still_waiting(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        record: &Record,
        view: &View,
    ) -> Result<Came, DriverError> {
        let object = name(id);
        let Some(pod) = &view.pod else {
            let waited = self.waits.since(id, format!("a pod of run {}", record.run));
            let said = view.sandbox.as_ref().and_then(refusal).unwrap_or_default();
            let late = waited >= self.config.start_timeout;
            return match (said.is_empty(), late) {
                (false, true) => Ok(Came::Failed(format!("no pod could be made: {said}"))),
                (false, false) => Err(DriverError::Pending(format!("no pod was made yet: {said}"))),
                (true, true) => Err(DriverError::Unreachable(format!(
                    "agent-sandbox's controller has made no pod of {object} in {} s: is it running?",
                    waited.as_secs()
                ))),
                (true, false) => Err(DriverError::Pending("its pod is not made yet".to_owned())),
            };
        };
        let place = if pod.node.is_empty() {
            "waits for the scheduler".to_owned()
        } else {
            format!("waits on {}", pod.node)
        };
        let Some(waiting) = &pod.waiting else {
            let namespace = self.namespace_of(id)?;
            return Err(DriverError::Pending(format!(
                "its pod {place}: its images may still be pulled, or its volume be attached elsewhere; `kubectl -n {namespace} describe pod {object}` says more"
            )));
        };
        let whose = if waiting.image { "image" } else { "container" };
        let text = if waiting.image { self.image_missing(waiting, spec) } else { waiting.text.clone() };
        if self.waits.since(id, format!("the {whose} of pod {}", pod.uid)) < self.config.patience {
            return Err(DriverError::Pending(format!("its pod {place}: {text}; its node tries again")));
        }
        Ok(if waiting.image { Came::NoImage(waiting.clone()) } else { Came::Failed(text) })
    }

    /// Which image it is that a pod waits for, and why.
    pub(crate) fn image_missing(&self, waiting: &Waiting, spec: &SandboxSpec) -> String {
        let agents = waiting.carrier || waiting.text.contains(&self.config.agent_image);
        if agents {
            format!("the agent's image {}: {}", self.config.agent_image, waiting.text)
        } else {
            format!("{}: {}", spec.image, waiting.text)
        }
    }
}

/// Why there is no pod, in the controller's words of this generation.
fn refusal(sandbox: &Seen) -> Option<String> {
    let ready = sandbox.ready.as_ref().filter(|one| one.generation >= sandbox.generation)?;
    (!ready.message.is_empty()).then(|| words::said_within(&ready.message, 500))
}

/// A pod of this run that counts: another one than any before it, and not on its way out.
fn came(view: &View, record: &Record, at_last: bool) -> Option<Came> {
    let Some(sandbox) = &view.sandbox else { return Some(Came::Gone) };
    if sandbox.run != record.run.0 {
        // Not our start yet; or somebody else's by now.
        return None;
    }
    if sandbox.mode == Mode::Suspended {
        return Some(Came::Stopped);
    }
    let Some(pod) = view.pod.as_ref().filter(|pod| pod.owner == sandbox.uid) else {
        if record.pod.is_some() {
            return Some(Came::Taken("its pod is gone: drained, evicted or deleted".to_owned()));
        }
        return refusal(sandbox).filter(|_| at_last).and_then(refused);
    };
    if record.pod.as_ref().is_some_and(|known| *known != pod.uid) {
        return Some(Came::Taken("its pod was replaced: drained, evicted or deleted".to_owned()));
    }
    if pod.deleting {
        let text = "its pod is being deleted: a drain, an eviction or somebody's hand";
        return Some(Came::Taken(text.to_owned()));
    }
    match pod.phase {
        Phase::Running => Some(Came::Up(pod.uid.clone(), sandbox.generation)),
        Phase::Failed | Phase::Succeeded => Some(ended(pod)),
        Phase::Pending => match &pod.waiting {
            Some(waiting) if waiting.for_good => Some(Came::NoImage(waiting.clone())),
            _ => pod
                .unschedulable
                .as_ref()
                .filter(|_| at_last)
                .map(|why| Came::NoRoom(format!("no node has room: {}", words::said(why)))),
        },
    }
}

/// A pod that has ended before it was of use.
pub(crate) fn ended(pod: &SeenPod) -> Came {
    let why = words::said_within(&pod.why, 500);
    if pod.own_end { Came::Failed(why) } else { Came::Taken(format!("its pod ended: {why}")) }
}

/// What is sure to be refused again, or waits for room in a quota. All else the controller tries again, and may come through.
fn refused(said: String) -> Option<Came> {
    let refused = ["forbidden", " is invalid", "denied the request"].iter().any(|one| said.contains(one));
    if said.contains("exceeded quota") {
        Some(Came::NoRoom(format!("the namespace has no room: {said}")))
    } else {
        refused.then(|| Came::Failed(format!("no pod can be made: {said}")))
    }
}

#[cfg(test)]
mod tests {
    use torpor_sandbox::Run;

    use super::*;
    use crate::types::Condition;

    fn view(message: &str, generation: i64) -> View {
        let ready =
            Condition { holds: false, reason: "ReconcilerError".into(), generation, message: message.into() };
        let sandbox = Seen {
            uid: "s".into(),
            version: 9,
            generation: 3,
            mode: Mode::Running,
            run: 2,
            deleting: false,
            oldest: false,
            ready: Some(ready),
            suspended: None,
        };
        View { sandbox: Some(sandbox), pod: None }
    }

    #[test]
    fn a_quota_is_waited_for_a_refusal_is_told_and_an_older_word_is_none() {
        let record = Record::new(Run(2));
        let quota = view("Error seen: pods \"x\" is forbidden: exceeded quota: small, requested: pods=1", 3);
        assert!(matches!(came(&quota, &record, true), Some(Came::NoRoom(text)) if text.contains("small")));
        assert!(came(&quota, &record, false).is_none(), "not at the first look");
        let account = view("Error seen: pods \"x\" is forbidden: serviceaccount \"sandbox\" not found", 3);
        assert!(
            matches!(came(&account, &record, true), Some(Came::Failed(text)) if text.contains("sandbox"))
        );
        let old = view("Error seen: pods \"x\" is forbidden: exceeded quota: small", 2);
        assert!(came(&old, &record, true).is_none());
        let busy = view("Error seen: the object has been modified", 3);
        assert!(came(&busy, &record, true).is_none(), "the controller tries again");
    }

    #[test]
    fn a_wait_begins_anew_with_what_is_waited_for() {
        let (waits, id) = (Waits::default(), SandboxId::generate());
        waits.since(&id, "a".to_owned());
        std::thread::sleep(Duration::from_millis(20));
        let known = waits.since(&id, "a".to_owned());
        assert!(known >= Duration::from_millis(20));
        assert!(waits.since(&id, "b".to_owned()) < known);
        waits.over(&id);
        assert!(waits.since(&id, "b".to_owned()) < known);
    }
}
