//! Start: the Sandbox is told to run, and the agent of its new pod configured for the run.
//!
//! Who is told to wait ([`DriverError::Pending`] and the like) asks again: nothing of it stands in others' way meanwhile.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
    time::{Duration, SystemTime},
};

use kube::api::{Patch, PatchParams};
use serde_json::{Map, json};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::Code;
use torpor_driver_common::{Turn, agent::main_command};
use torpor_proto::agent::v1::{ConfigureRequest, agent_client::AgentClient};
use torpor_sandbox::{Change, DriverError, Run, SandboxId, SandboxSpec, failpoint::hit, words};

use crate::{
    cache::News,
    client::{LIMIT, Lane, MANAGER},
    driver::{Failures, Inner},
    live::Live,
    manifest,
    store::Record,
    types::{Mode, Phase, RUN, Sandbox, Seen, SeenPod, claim_name, name},
    wait::{self, Came},
};

/// Pauses between two tries of a first call.
pub(crate) const AGAIN: Duration = Duration::from_millis(100);
const LONG_AGAIN: Duration = Duration::from_secs(2);
/// How long one first call may take before it is tried anew.
const CONFIGURE: Duration = Duration::from_secs(30);
/// What of the console goes with a failure, bytes.
const CONSOLE: usize = 4096;
/// Pods that fail again within this time are started slower each time, up to this pause.
const STEADY: Duration = Duration::from_secs(600);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Of which so much is waited for in the start itself.
const SHORT_PAUSE: Duration = Duration::from_secs(2);
/// How long a start waits itself for the pod of the last run to go.
const NO_POD: Duration = Duration::from_secs(10);
/// How often a patch is tried again after somebody else's.
pub(crate) const PATCHES: u32 = 8;

/// Why what ran is put down again.
enum Down {
    /// By itself: a repeat would end the same.
    Failed(String),
    /// Its node, or somebody, has ended it.
    Taken(String),
    Error(DriverError),
}

impl Inner {
    pub(crate) async fn start(self: &Arc<Self>, id: &SandboxId, run: Run) -> Result<Change, DriverError> {
        let turn = self.turns.turn(id).await;
        let spec = self.store.specs.read(id)?;
        let Some(found) = self.get_sandbox(id).await? else {
            return Err(self.absence(id, "start").await);
        };
        let seen = Seen::from(&found);
        if seen.deleting {
            let text = format!("{} is being deleted by somebody else", name(id));
            return Err(DriverError::backend("start", text));
        }
        let record = self.store.record(id)?;
        if seen.mode == Mode::Running {
            let ours = record.filter(|record| record.run == run && seen.run == run.0);
            let record = ours.ok_or_else(|| {
                let text =
                    format!("another start of the sandbox is there; it must be stopped before run {run}");
                DriverError::Invalid(text)
            })?;
            self.bring_up(id, &spec, &found, record, &turn).await?;
            return Ok(Change::Already);
        }
        self.pause_after_failures(id).await?;
        self.check_data(id, &found).await?;
        self.see_no_pod(id).await?;
        let (inner, wanted) = (self.clone(), id.clone());
        let record = self.turns.step(id, &turn, async move { inner.wake(&wanted, run).await }).await?;
        hit("kubernetes.start.woken")?;
        self.bring_up(id, &spec, &found, record, &turn).await?;
        Ok(Change::Done)
    }

    /// Notes which claims the controller has made, so that others in their place are told from them.
    async fn note_claims(&self, id: &SandboxId, found: &Sandbox) -> Result<(), DriverError> {
        let api = self.cluster.claims(&self.namespace_of(id)?);
        let mut claims = BTreeMap::new();
        for object in found.spec.made_claims(&name(id)) {
            if let Some(uid) = self.get_claim(&api, &object).await?.and_then(|claim| claim.metadata.uid) {
                claims.insert(object, uid);
            }
        }
        let noted = self.store.claims(id)?;
        if noted.unwrap_or_default() == claims { Ok(()) } else { self.store.note_claims(id, &claims) }
    }

    /// A claim that is gone is never made anew. Which there must be is told by the object: the configuration may be another
    /// one by now.
    async fn check_data(&self, id: &SandboxId, found: &Sandbox) -> Result<(), DriverError> {
        let namespace = self.namespace_of(id)?;
        let api = self.cluster.claims(&namespace);
        let (own, others): (Vec<&str>, Vec<&str>) =
            found.spec.claims().partition(|claim| *claim == claim_name(id));
        let mut own: Vec<String> = own.into_iter().map(str::to_owned).collect();
        // The controller makes those of templates, and would make an empty one in the place of one that is gone. There are
        // those that a run has had; where that was never noted, those that it must have had.
        let noted = match self.store.claims(id)? {
            Some(noted) => {
                own.extend(noted.keys().cloned());
                noted
            }
            None if Seen::from(found).run > 0 => {
                own.extend(found.spec.made_claims(&name(id)));
                BTreeMap::new()
            }
            None if !found.spec.made_claims(&name(id)).is_empty() => {
                self.store.note_claims(id, &BTreeMap::new())?;
                BTreeMap::new()
            }
            None => BTreeMap::new(),
        };
        for object in own {
            match self.get_claim(&api, &object).await? {
                Some(claim) if claim.metadata.deletion_timestamp.is_none() => {
                    let meta = &claim.metadata;
                    let another = noted.get(&object).is_some_and(|uid| meta.uid.as_ref() != Some(uid));
                    // One that somebody has put there, from a backup, is nobody's.
                    let made = meta.owner_references.iter().flatten().any(|o| o.controller == Some(true));
                    if another && made {
                        let text = format!(
                            "the claim {object} was deleted, and the controller has made an empty one"
                        );
                        return Err(DriverError::DataMissing(text));
                    }
                }
                Some(_) => {
                    let text = format!("the claim {object} is being deleted by somebody else");
                    return Err(DriverError::DataMissing(text));
                }
                None => return Err(DriverError::DataMissing(format!("the claim {object} is gone"))),
            }
        }
        for claim in others {
            if self.get_claim(&api, claim).await?.is_none() {
                let text = format!("there is no claim '{claim}' in the namespace {namespace}");
                return Err(DriverError::MountMissing(text));
            }
        }
        Ok(())
    }

    /// The controller takes any pod of the name for a new one, also one that is on its way out: not before it is gone.
    async fn see_no_pod(&self, id: &SandboxId) -> Result<(), DriverError> {
        let limit = self.config.stop_margin.min(NO_POD);
        self.until(id, limit, |view| view.pod.is_none().then_some(())).await?;
        let Some(pod) = self.get_pod(id).await? else { return Ok(()) };
        let object = name(id);
        let mut owners = pod.metadata.owner_references.iter().flatten();
        if !self.is_labelled(&pod.metadata, id) {
            let owner = owners.next().map(|owner| format!("{} {}", owner.kind, owner.name));
            let owner = owner.unwrap_or_else(|| "somebody else".to_owned());
            return Err(DriverError::Invalid(format!(
                "the pod {object} belongs to {}; it must be deleted or renamed by its owner",
                words::said(&owner)
            )));
        }
        let seen = SeenPod::from(&pod);
        let state = if seen.deleting { "still terminating" } else { "still there" };
        let node = if seen.node.is_empty() { "no node" } else { &seen.node };
        let mut text = format!("the pod {object} of its last run (uid {}) is {state} on {node}", seen.uid);
        if !seen.deleting && seen.owner.is_empty() {
            let namespace = self.namespace_of(id)?;
            text.push_str(&format!(
                " and nobody owns it: `kubectl -n {namespace} delete pod {object}` ends it"
            ));
        }
        Err(DriverError::Pending(text))
    }

    /// One more pod of a sandbox was ended by its node.
    pub(crate) fn note_failure(&self, id: &SandboxId, pod: &str) {
        let mut all = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let fresh = || Failures { count: 0, pod: String::new(), last: now };
        let known = all.entry(id.clone()).or_insert_with(fresh);
        if known.pod == pod {
            return;
        }
        let count = if known.last.elapsed() < STEADY { known.count.saturating_add(1) } else { 1 };
        *known = Failures { count, pod: pod.to_owned(), last: now };
    }

    /// The first recovery is at once, the ones after it slower each time.
    async fn pause_after_failures(&self, id: &SandboxId) -> Result<(), DriverError> {
        let failures = {
            let all = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
            all.get(id).cloned().filter(|known| known.last.elapsed() < STEADY)
        };
        let Some(failures) = failures.filter(|failures| failures.count > 1) else { return Ok(()) };
        let left = pause_after(failures.count).saturating_sub(failures.last.elapsed());
        if left > SHORT_PAUSE {
            return Err(DriverError::Pending(format!(
                "{} of its pods were ended one after the other by their nodes: the next one is asked for in {} s",
                failures.count,
                left.as_secs()
            )));
        }
        sleep(left).await;
        Ok(())
    }

    /// Tells the Sandbox to run, and notes it before.
    async fn wake(&self, id: &SandboxId, run: Run) -> Result<Record, DriverError> {
        let record = Record::new(run);
        self.store.note(id, &record)?;
        hit("kubernetes.wake.noted")?;
        self.patch_mode(id, true, Some((RUN, run))).await?;
        hit("kubernetes.wake.asked")?;
        Ok(record)
    }

    /// Writes our one field, and a run by an annotation, at the version that was read; reads again when somebody else was
    /// faster. What is there then; none when the object is gone. A pod that is woken has the agent of today.
    pub(crate) async fn patch_mode(
        &self,
        id: &SandboxId,
        running: bool,
        run: Option<(&str, Run)>,
    ) -> Result<Option<Sandbox>, DriverError> {
        let namespace = self.namespace_of(id)?;
        let object = name(id);
        let what = format!("tell {object} to {}", if running { "run" } else { "suspend" });
        for attempt in 1.. {
            let Some(found) = self.get_sandbox(id).await? else { return Ok(None) };
            let served = self.cluster.served().await?;
            let seen = Seen::from(&found);
            let wanted = if running { Mode::Running } else { Mode::Suspended };
            let noted = |key: &str| found.metadata.annotations.as_ref()?.get(key).cloned();
            if seen.mode == wanted && run.is_none_or(|(key, run)| noted(key) == Some(run.to_string())) {
                return Ok(Some(found));
            }
            let (field, value) = manifest::mode(served, running);
            let mut patch = json!({
                "metadata": {"resourceVersion": found.metadata.resource_version},
                "spec": {field: value},
            });
            if let Some((key, run)) = run {
                patch["metadata"]["annotations"] = json!({key: run.to_string()});
            }
            let agent = if running { found.spec.agent_from(&self.config.agent_image) } else { Map::new() };
            if !agent.is_empty() {
                patch["spec"]["podTemplate"] = json!({"spec": agent});
            }
            let params = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
            // Of the version that the field is of.
            let api = self.cluster.sandboxes_in(served, &namespace);
            let patch = Patch::Merge(&patch);
            let done = self.cluster.call(Lane::Fast, LIMIT, &what, api.patch(&object, &params, &patch)).await;
            match done {
                Ok(now) => {
                    self.saw(id, &namespace, News::Sandbox((&now).into()));
                    return Ok(Some(now));
                }
                Err(error) if error.is_not_found() => return Ok(None),
                // Somebody else's write, or another version of the kind by now.
                Err(error) if (error.is_conflict() || error.is_unknown_version()) && attempt < PATCHES => {
                    sleep(AGAIN / 4 * attempt).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(DriverError::backend(what, "somebody else changes it all the time"))
    }

    /// Waits for the pod and its agent; what doesn't come up is put down again.
    async fn bring_up(
        self: &Arc<Self>,
        id: &SandboxId,
        spec: &SandboxSpec,
        found: &Sandbox,
        record: Record,
        turn: &Turn,
    ) -> Result<(), DriverError> {
        let down = match self.wait_for_pod(id, spec, &record).await? {
            Came::Up(pod, generation) => {
                self.waits.over(id);
                let until = Instant::now() + self.config.start_timeout;
                let record = Record { pod: Some(pod.clone()), restored: false, ..record };
                // It runs, so that its claims are there; before it is noted that it does.
                self.note_claims(id, found).await?;
                let live = self.hear(id, &record, &pod);
                self.note(id, turn, record.clone()).await?;
                hit("kubernetes.start.pod")?;
                match self.hello(&live, spec, until, generation).await {
                    Ok(()) => {
                        let news = Record { configured: true, boot_id: live.boot_id(), ..record };
                        return self.note(id, turn, news).await;
                    }
                    Err(down) => down,
                }
            }
            Came::NoImage(waiting) => {
                self.put_down(id, turn, Duration::ZERO).await?;
                return Err(DriverError::BaseMissing(self.image_missing(&waiting, spec)));
            }
            // It goes on by itself when there is room.
            Came::NoRoom(why) => return Err(DriverError::Exhausted(why)),
            Came::Failed(why) => Down::Failed(format!("its pod failed: {why}")),
            Came::Taken(why) => Down::Taken(why),
            Came::Stopped => Down::Taken("somebody else has suspended it meanwhile".to_owned()),
            Came::Gone => return Err(self.absence(id, "start").await),
        };
        match down {
            Down::Error(error) => Err(error),
            Down::Failed(cause) => {
                let console = self.log(id, CONSOLE).await;
                self.put_down(id, turn, Duration::ZERO).await?;
                let console = String::from_utf8_lossy(&console).into_owned();
                Err(DriverError::Failed { step: "boot".to_owned(), cause, console })
            }
            Down::Taken(why) => {
                if let Some(pod) = self.cache.view(id).pod {
                    self.note_failure(id, &pod.uid);
                }
                match self.put_down(id, turn, Duration::ZERO).await {
                    Ok(_) => Err(DriverError::Interrupted(why)),
                    // A node that is lost keeps its pod for a while: the stop goes on.
                    Err(error @ DriverError::Backend { .. }) => {
                        Err(DriverError::Interrupted(format!("{why}; {error}")))
                    }
                    Err(error) => Err(error),
                }
            }
        }
    }

    /// Notes what is known of a run.
    pub(crate) async fn note(
        self: &Arc<Self>,
        id: &SandboxId,
        turn: &Turn,
        record: Record,
    ) -> Result<(), DriverError> {
        let (inner, wanted) = (self.clone(), id.clone());
        self.turns.step(id, turn, async move { inner.store.note(&wanted, &record) }).await
    }

    /// The agent's answer for this run, and the controller's word that it is Ready.
    async fn hello(
        self: &Arc<Self>,
        live: &Arc<Live>,
        spec: &SandboxSpec,
        until: Instant,
        generation: i64,
    ) -> Result<(), Down> {
        let id = &live.id;
        tokio::select! {
            ready = timeout_at(until, self.configure(live, spec)) => match ready {
                Ok(ready) => ready.map_err(Down::Failed),
                Err(_) if self.cache.view(id).pod.is_some_and(|pod| pod.unheard) => {
                    Err(Down::Taken("its node is heard no more".to_owned()))
                }
                Err(_) => Err(Down::Failed("the agent did not answer in time".to_owned())),
            },
            down = self.lost(live, until) => Err(down),
        }?;
        let left = until.saturating_duration_since(Instant::now());
        let ready = self.until(id, left, |view| {
            let pod = view.pod.as_ref().filter(|pod| pod.uid == live.pod && !pod.deleting);
            if pod.is_none() {
                return Some(Err(Down::Taken("its pod was taken away".to_owned())));
            }
            let ready = view.sandbox.as_ref()?.ready.as_ref()?;
            (ready.holds && ready.generation >= generation).then_some(Ok(()))
        });
        match ready.await {
            Ok(Some(ready)) => ready,
            Ok(None) => Err(Down::Failed("its controller did not call it Ready in time".to_owned())),
            Err(error) => Err(Down::Error(error.into())),
        }
    }

    /// Ends when the pod does.
    async fn lost(&self, live: &Live, until: Instant) -> Down {
        let left = until.saturating_duration_since(Instant::now());
        let taken = |text: &str| Some(Down::Taken(text.to_owned()));
        let lost = self.until(&live.id, left, |view| match &view.pod {
            Some(pod) if pod.uid != live.pod => taken("its pod was replaced: drained, evicted or deleted"),
            Some(pod) if pod.deleting => {
                taken("its pod is being deleted: a drain, an eviction or somebody's hand")
            }
            Some(pod) if matches!(pod.phase, Phase::Failed | Phase::Succeeded) => match wait::ended(pod) {
                Came::Failed(why) => Some(Down::Failed(format!("its pod ended: {why}"))),
                _ => taken(&format!("its pod ended: {}", words::said(&pod.why))),
            },
            Some(_) => None,
            None => taken("its pod is gone: drained, evicted or deleted"),
        });
        match lost.await {
            Ok(Some(down)) => down,
            _ => std::future::pending().await,
        }
    }

    /// Configures the agent as soon as it answers.
    async fn configure(self: &Arc<Self>, live: &Arc<Live>, spec: &SandboxSpec) -> Result<(), String> {
        let mut pause = AGAIN;
        loop {
            let mut client = AgentClient::new(live.channel(self));
            match timeout(CONFIGURE, client.configure(request(live, spec))).await {
                Ok(Ok(answer)) => {
                    let answer = answer.into_inner();
                    if answer.run != live.run.0 {
                        return Err(format!(
                            "the agent answered for run {} instead of {}",
                            answer.run, live.run
                        ));
                    }
                    live.set_configured(self, &answer.boot_id);
                    return Ok(());
                }
                // No connection yet, or it was lost.
                Ok(Err(status))
                    if matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled) =>
                {
                    tracing::debug!(sandbox = %live.id, code = ?status.code(), "the agent is not there yet");
                }
                Ok(Err(status)) => {
                    return Err(format!(
                        "the agent refused its configuration: {}",
                        words::said(status.message())
                    ));
                }
                Err(_) => {}
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONG_AGAIN);
        }
    }
}

/// How long after so many pods that failed one after the other the next one is asked for: the first at once.
fn pause_after(failures: u32) -> Duration {
    match failures {
        0 | 1 => Duration::ZERO,
        more => Duration::from_secs(1 << (more - 2).min(6)).min(LONGEST_PAUSE),
    }
}

/// The object is gone, and never made anew: somebody wanted it so.
pub(crate) fn missing(id: &SandboxId) -> DriverError {
    DriverError::DataMissing(format!(
        "the Sandbox object {} was deleted by somebody else; the claim of its workspace, if the driver made one, is there until the sandbox is deleted",
        name(id)
    ))
}

fn request(live: &Live, spec: &SandboxSpec) -> ConfigureRequest {
    ConfigureRequest {
        run: live.run.0,
        sandbox_id: live.id.to_string(),
        hostname: spec.hostname.clone(),
        time: Some(SystemTime::now().into()),
        environment: spec.environment.clone().into_iter().collect(),
        main: main_command(spec),
        ..ConfigureRequest::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_that_fail_one_after_the_other_are_asked_for_slower_each_time() {
        let pauses: Vec<u64> = (0..10).map(|count| pause_after(count).as_secs()).collect();
        assert_eq!(pauses, [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pause_after(u32::MAX), LONGEST_PAUSE);
    }
}
