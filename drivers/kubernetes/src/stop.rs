//! Stop: processes end, files are written out, the Sandbox is told to suspend, and its pod is seen to be gone.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, timeout_at};
use torpor_driver_common::Turn;
use torpor_proto::agent::v1::{ShutdownRequest, agent_client::AgentClient};
use torpor_sandbox::{DriverError, Keep, SandboxId, Stopped, failpoint::hit, words};

use crate::{
    cache::View,
    driver::Inner,
    live::Live,
    store::Record,
    types::{Mode, Phase, STOPPED, Seen, name},
};

/// How long an agent of which nothing was heard is asked whether it has begun to work.
const BEGUN: Duration = Duration::from_secs(1);
/// What of a deadline is kept back for the way to the agent and back.
const RESERVE: Duration = Duration::from_millis(500);
/// A controller that doesn't say for which generation it has seen the end is believed after so long without a pod.
const UNSAID: Duration = Duration::from_secs(5);

/// How a suspended sandbox stands.
enum Stands {
    /// No pod, and the controller says so of this generation.
    Still,
    /// No pod, and a controller of the oldest kind, that has no condition of its own for this, has said nothing since.
    Unsaid,
    /// Somebody else's pod has its name.
    Foreign,
    /// The object is gone, and the pod with it.
    Gone,
}

impl Inner {
    /// Ends whatever runs and sees it ended. With a deadline of zero nobody is asked.
    pub(crate) async fn put_down(
        self: &Arc<Self>,
        id: &SandboxId,
        turn: &Turn,
        deadline: Duration,
    ) -> Result<Stopped, DriverError> {
        let mut stopped = Stopped { flushed: false, kept: Keep::Disk, detail: None };
        let until = Instant::now() + deadline;
        let record = self.store.record(id)?;
        self.waits.over(id);
        let view = self.ask(id).await?;
        let Some(sandbox) = &view.sandbox else {
            self.is_gone(id, "suspend").await?;
            if let Some(pod) = &view.pod {
                // Its workspace is still mounted there.
                if let (Some(record), true) = (&record, pod.owner.is_empty()) {
                    stopped.flushed = self.flush(id, turn, record, &view, until, deadline).await.is_ok();
                }
                self.end_orphan(id).await?;
            }
            self.unhear(id);
            if view.pod.is_some() {
                self.see_down(id, 0, &view).await?;
            }
            self.forget(id, turn).await?;
            stopped.detail =
                record.is_some().then(|| "its Sandbox object was deleted by somebody else".to_owned());
            return Ok(stopped);
        };
        let at_rest = sandbox.mode == Mode::Suspended && view.pod.is_none() && record.is_none();
        if at_rest {
            return Ok(stopped);
        }
        if let Some(record) = &record {
            match self.flush(id, turn, record, &view, until, deadline).await {
                Ok(()) => stopped.flushed = true,
                Err(why) => stopped.detail = Some(why),
            }
        }
        hit("kubernetes.stop.flushed")?;
        let (inner, wanted) = (self.clone(), id.clone());
        // A wake whose answer was never read may still be under way: at another version of the object it comes to nothing.
        let fence = record.filter(|record| record.pod.is_none() && sandbox.run != record.run.0);
        let told = self.turns.step(id, turn, async move {
            inner.patch_mode(&wanted, false, fence.map(|record| (STOPPED, record.run))).await
        });
        let told = told.await?;
        hit("kubernetes.stop.asked")?;
        let generation = told.as_ref().map(|told| Seen::from(told).generation).unwrap_or_default();
        self.see_down(id, generation, &view).await?;
        hit("kubernetes.stop.ended")?;
        self.unhear(id);
        self.forget(id, turn).await?;
        hit("kubernetes.stop.released")?;
        Ok(stopped)
    }

    async fn forget(self: &Arc<Self>, id: &SandboxId, turn: &Turn) -> Result<(), DriverError> {
        let (inner, wanted) = (self.clone(), id.clone());
        self.turns.step(id, turn, async move { inner.store.forget_run(&wanted) }).await
    }

    /// Lets the agent end the processes and write out the files, and notes that it has: a stop that is cut short after it
    /// is asked again.
    async fn flush(
        self: &Arc<Self>,
        id: &SandboxId,
        turn: &Turn,
        record: &Record,
        view: &View,
        until: Instant,
        deadline: Duration,
    ) -> Result<(), String> {
        if record.flushed {
            return Ok(());
        }
        if deadline.is_zero() {
            return Err("it was not asked to end".to_owned());
        }
        let running = view.pod.as_ref().filter(|pod| pod.phase == Phase::Running);
        let Some(pod) = running else { return Err("it had ended before".to_owned()) };
        if record.pod.as_ref().is_some_and(|ours| *ours != pod.uid) {
            return Err("its pod was replaced before".to_owned());
        }
        let live = self.hear(id, record, &pod.uid);
        self.shut_down(&live, until).await?;
        if let Err(error) = self.note(id, turn, Record { flushed: true, ..record.clone() }).await {
            tracing::warn!(sandbox = %id, %error, "that the files are written out is not noted");
        }
        Ok(())
    }

    /// Asks the agent to end every process and to write out the files, until then at the latest.
    async fn shut_down(self: &Arc<Self>, live: &Arc<Live>, until: Instant) -> Result<(), String> {
        let left = until.saturating_duration_since(Instant::now());
        // An agent that has not come so far holds nothing worth waiting for; one that has may use the whole deadline.
        if !live.is_configured() {
            let status = live.status(self, BEGUN.min(left)).await;
            if !status.is_some_and(|status| status.configured) {
                return Err("its agent had not answered yet".to_owned());
            }
        }
        let ask = until.checked_sub(RESERVE.min(left / 4)).unwrap_or(until);
        // The agent kills at half of its grace, and needs the rest to sync.
        let grace = ask.saturating_duration_since(Instant::now()).mul_f64(0.8);
        let request = ShutdownRequest { grace: grace.try_into().ok() };
        let mut client = AgentClient::new(live.channel(self));
        match timeout_at(ask, client.shutdown(request)).await {
            Ok(Ok(answer)) => {
                let answer = answer.into_inner();
                if answer.flushed {
                    Ok(())
                } else {
                    Err(format!("the files are not all written out: {}", words::said(&answer.detail)))
                }
            }
            Ok(Err(status)) => Err(format!("the agent did not shut down: {}", words::said(status.message()))),
            Err(_) => Err(format!("the agent did not answer within {:.1} s", left.as_secs_f64())),
        }
    }

    /// Waits until the pod is gone and the controller has seen this generation, and sees it. A pod may take its grace and
    /// some more; after that it goes on being waited for by whoever asks again.
    async fn see_down(&self, id: &SandboxId, generation: i64, before: &View) -> Result<(), DriverError> {
        let grace = before.pod.as_ref().map_or(30, |pod| pod.grace);
        let limit = Duration::from_secs(grace) + self.config.stop_margin;
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.until(id, left, |view| stands(view, generation)).await? {
                Some(Stands::Foreign) => {
                    let text = format!(
                        "the pod {} belongs to somebody else; it must be deleted or renamed by its owner",
                        name(id)
                    );
                    return Err(DriverError::Invalid(text));
                }
                Some(Stands::Unsaid) => {
                    let said =
                        |view: &View| stands(view, generation).filter(|now| !matches!(now, Stands::Unsaid));
                    if self.until(id, UNSAID.min(left), said).await?.is_none() && self.has_no_pod(id).await? {
                        return Ok(());
                    }
                }
                Some(Stands::Still | Stands::Gone) if self.has_no_pod(id).await? => return Ok(()),
                Some(_) => {}
                None => {
                    let view = self.ask(id).await?;
                    return Err(DriverError::backend("suspend", why_not(id, &view, limit)));
                }
            }
        }
    }

    async fn has_no_pod(&self, id: &SandboxId) -> Result<bool, DriverError> {
        Ok(self.get_pod(id).await?.is_none_or(|pod| !self.is_labelled(&pod.metadata, id)))
    }
}

fn stands(view: &View, generation: i64) -> Option<Stands> {
    let Some(sandbox) = &view.sandbox else { return view.pod.is_none().then_some(Stands::Gone) };
    // One of an earlier object of that name goes by itself.
    let foreign = view.pod.as_ref().is_some_and(|pod| pod.owner != sandbox.uid && !pod.deleting)
        || sandbox
            .suspended
            .as_ref()
            .is_some_and(|one| one.reason == "PodNotOwned" && one.generation >= generation);
    if foreign {
        return Some(Stands::Foreign);
    }
    if view.pod.is_some() || sandbox.mode == Mode::Running {
        return None;
    }
    // Where the condition is, it must say so of this generation. Where it isn't, a word about this generation shows that
    // the controller makes no more pods.
    let said = match (&sandbox.suspended, &sandbox.ready) {
        (Some(suspended), _) => suspended.holds && suspended.generation >= generation,
        (None, Some(ready)) => {
            ready.generation >= generation && (sandbox.oldest || ready.reason == "SandboxSuspended")
        }
        (None, None) => false,
    };
    match said {
        true => Some(Stands::Still),
        false if sandbox.oldest && sandbox.suspended.is_none() => Some(Stands::Unsaid),
        false => None,
    }
}

/// Why a sandbox is not suspended yet, and what to do.
fn why_not(id: &SandboxId, view: &View, limit: Duration) -> String {
    let waited = format!("after {} s", limit.as_secs());
    match &view.pod {
        Some(pod) if pod.deleting => {
            let node = if pod.node.is_empty() { "no node" } else { &pod.node };
            format!(
                "the pod {} is still terminating on {node} {waited}; when that node is gone for good, remove it or the pod by force",
                name(id)
            )
        }
        Some(_) => {
            format!("the pod {} is still there {waited}: is agent-sandbox's controller running?", name(id))
        }
        None => {
            let object = name(id);
            format!("agent-sandbox's controller has said nothing of {object} {waited}: is it running?")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Condition, SeenPod};

    fn seen(mode: Mode, suspended: Option<(bool, i64)>, ready: Option<(bool, i64)>) -> Seen {
        let condition = |(holds, generation)| Condition {
            holds,
            reason: String::new(),
            generation,
            message: String::new(),
        };
        Seen {
            uid: "s".into(),
            version: 1,
            generation: 5,
            mode,
            run: 1,
            deleting: false,
            oldest: true,
            ready: ready.map(condition),
            suspended: suspended.map(condition),
        }
    }

    fn pod(owner: &str) -> SeenPod {
        SeenPod {
            uid: "p".into(),
            version: 1,
            owner: owner.into(),
            deleting: true,
            phase: Phase::Running,
            grace: 40,
            node: "node-1".into(),
            ip: String::new(),
            other_ips: Vec::new(),
            why: String::new(),
            waiting: None,
            own_end: false,
            unheard: false,
            unschedulable: None,
            agent_volume: false,
        }
    }

    #[test]
    fn a_condition_alone_suspends_nothing() {
        let of = |sandbox, pod| stands(&View { sandbox: Some(sandbox), pod }, 5);
        let early = seen(Mode::Suspended, Some((true, 5)), None);
        assert!(of(early.clone(), Some(pod("s"))).is_none(), "its pod is there");
        assert!(matches!(of(early, None), Some(Stands::Still)));
        let stale = seen(Mode::Suspended, Some((true, 4)), None);
        assert!(of(stale, None).is_none(), "that is of an earlier generation");
        let woken = seen(Mode::Running, Some((true, 5)), Some((true, 5)));
        assert!(of(woken, None).is_none());
    }

    #[test]
    fn without_the_condition_any_word_about_the_generation_counts() {
        let of = |sandbox| stands(&View { sandbox: Some(sandbox), pod: None }, 5);
        assert!(matches!(of(seen(Mode::Suspended, None, Some((true, 4)))), Some(Stands::Unsaid)));
        assert!(matches!(of(seen(Mode::Suspended, None, Some((true, 5)))), Some(Stands::Still)));
    }

    #[test]
    fn silence_is_believed_of_the_oldest_controllers_only() {
        let of = |sandbox| stands(&View { sandbox: Some(sandbox), pod: None }, 5);
        let newer = Seen { oldest: false, ..seen(Mode::Suspended, None, Some((true, 5))) };
        assert!(of(newer.clone()).is_none(), "that is no word of a suspend");
        assert!(of(Seen { ready: None, ..newer.clone() }).is_none());
        let said = newer.ready.map(|ready| Condition { reason: "SandboxSuspended".into(), ..ready });
        assert!(matches!(of(Seen { ready: said, ..newer }), Some(Stands::Still)));
    }

    #[test]
    fn somebody_elses_pod_is_told_and_a_slow_one_names_its_node() {
        let foreign = SeenPod { deleting: false, ..pod("x") };
        let view = View { sandbox: Some(seen(Mode::Suspended, None, None)), pod: Some(foreign) };
        assert!(matches!(stands(&view, 5), Some(Stands::Foreign)));
        let view = View { pod: Some(pod("x")), ..view };
        assert!(stands(&view, 5).is_none(), "that one goes by itself");
        let text = why_not(&SandboxId::generate(), &view, Duration::from_secs(70));
        assert!(text.contains("node-1") && text.contains("70 s"), "{text}");
    }
}
