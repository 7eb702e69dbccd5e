//! What is there of a sandbox, as the cluster and the agent show it now.

use std::{sync::Arc, time::Duration};

use tonic::transport::Channel;
use torpor_sandbox::{DriverError, Ended, Exit, Observed, Run, SandboxId, words};

use crate::{
    cache::View,
    client::ApiError,
    driver::Inner,
    live::Live,
    store::Record,
    types::{Mode, Phase, Seen, SeenPod},
};

/// How long `observe` waits for an agent: it may have to connect first.
const AGENT_WAIT: Duration = Duration::from_secs(3);

impl Inner {
    pub(crate) async fn observe(self: &Arc<Self>, id: &SandboxId) -> Result<Observed, DriverError> {
        // Nobody's step waits for the first list with it.
        self.see_first_list(id).await;
        let Some(quiet) = self.turns.quiet(id).await else {
            return Ok(Observed::Unknown("a step is still under way".to_owned()));
        };
        let known = self.store.specs.exists(id);
        let view = match self.view(id).await {
            Ok(view) => view,
            // What has no folder here has nothing in the cluster.
            Err(error) if error.is_absence() || matches!(error, ApiError::Absent) => {
                return Ok(if known { Observed::Unknown(error.to_string()) } else { Observed::Missing });
            }
            Err(error) => return Err(error.into()),
        };
        let record = self.store.record(id)?;
        let Some(sandbox) = &view.sandbox else {
            match self.elsewhere(id).await {
                Ok(None) => {}
                Ok(Some(text)) => return Ok(Observed::Unknown(text)),
                Err(error) => return Ok(Observed::Unknown(error.to_string())),
            }
            return Ok(match (&view.pod, record) {
                // Left alone: nobody but a stop or delete takes it away.
                (Some(pod), record) if pod.owner.is_empty() && !pod.deleting => match record {
                    Some(record) => {
                        let text = "its Sandbox object was deleted by somebody else, and its pod left alone";
                        let exit = Exit::Interrupted(text.to_owned());
                        Observed::Ended(Ended { run: record.run, exit })
                    }
                    None => Observed::Running { run: Run(0), agent: false },
                },
                // Its object is gone, and its pod will be in a moment; or it is no more ours.
                (Some(pod), _) => {
                    let text = if pod.deleting { None } else { self.unlabelled(id).await.ok().flatten() };
                    Observed::Unknown(text.unwrap_or_else(|| "its pod is on its way out".to_owned()))
                }
                (None, Some(record)) => {
                    if let Some(text) = self.unlabelled(id).await.ok().flatten() {
                        return Ok(Observed::Unknown(text));
                    }
                    let text = "its Sandbox object was deleted by somebody else";
                    Observed::Ended(Ended { run: record.run, exit: Exit::Interrupted(text.to_owned()) })
                }
                // A start says what is missing; a delete removes what is left: the workspace.
                (None, None) if known => Observed::Stopped { memory: false },
                (None, None) => Observed::Missing,
            });
        };
        if sandbox.deleting {
            return Ok(Observed::Unknown("its Sandbox object is being deleted".to_owned()));
        }
        let seen = compute(sandbox, view.pod.as_ref(), record.as_ref());
        let (record, pod) = match seen {
            Compute::Known(observed) => {
                if let (Observed::Ended(ended), Some(pod)) = (&observed, &view.pod)
                    && pod.phase == Phase::Failed
                    && matches!(ended.exit, Exit::Interrupted(_))
                {
                    self.note_failure(id, &pod.uid);
                }
                return Ok(observed);
            }
            Compute::Ask(record, pod) => (record, pod),
        };
        let live = self.hear(id, record, &pod.uid);
        if record.restored {
            // No step writes another record meanwhile.
            return self.find_again(&live, record).await;
        }
        drop(quiet);
        Ok(self.running(&live).await)
    }

    /// A run that is known from a copy of the database only: in its pod there is an agent that was configured for it, or
    /// it ended while nobody looked, and this is the next pod.
    async fn find_again(
        self: &Arc<Self>,
        live: &Arc<Live>,
        record: &Record,
    ) -> Result<Observed, DriverError> {
        let run = live.run;
        let Some(status) = live.status(self, AGENT_WAIT).await else {
            return Ok(Observed::Running { run, agent: false });
        };
        if !status.configured || status.run != run.0 {
            let exit = Exit::Interrupted("its pod was replaced before its state was restored".to_owned());
            return Ok(Observed::Ended(Ended { run, exit }));
        }
        let pod = Some(live.pod.clone());
        let found =
            Record { pod, configured: true, restored: false, boot_id: live.boot_id(), ..record.clone() };
        self.store.note(&live.id, &found)?;
        Ok(match status.main_exit {
            Some(main) => Observed::Ended(Ended { run, exit: Exit::Code(main.code) }),
            None => Observed::Running { run, agent: true },
        })
    }

    /// The channel to the agent of what runs.
    pub(crate) async fn agent(self: &Arc<Self>, id: &SandboxId) -> Result<Channel, DriverError> {
        if let Some(live) = self.heard(id) {
            return Ok(live.channel(self));
        }
        let View { sandbox: Some(sandbox), pod: Some(pod) } = self.view(id).await? else {
            return Err(DriverError::Missing);
        };
        match self.store.record(id)? {
            Some(record) if matches!(compute(&sandbox, Some(&pod), Some(&record)), Compute::Ask(..)) => {
                Ok(self.hear(id, &record, &pod.uid).channel(self))
            }
            _ => Err(DriverError::Missing),
        }
    }

    /// A pod with a process of this run.
    async fn running(self: &Arc<Self>, live: &Arc<Live>) -> Observed {
        let run = live.run;
        if !live.is_to_be_asked() {
            return Observed::Running { run, agent: true };
        }
        match live.status(self, AGENT_WAIT).await {
            Some(status) if status.run == run.0 => match status.main_exit {
                Some(main) => Observed::Ended(Ended { run, exit: Exit::Code(main.code) }),
                None => Observed::Running { run, agent: status.configured },
            },
            _ => Observed::Running { run, agent: false },
        }
    }
}

/// What object, pod and record say together.
enum Compute<'a> {
    Known(Observed),
    /// A pod that may be the run's: its agent tells.
    Ask(&'a Record, &'a SeenPod),
}

fn interrupted(run: Run, text: &str) -> Compute<'static> {
    let exit = Exit::Interrupted(words::said(text));
    Compute::Known(Observed::Ended(Ended { run, exit }))
}

fn compute<'a>(sandbox: &Seen, pod: Option<&'a SeenPod>, record: Option<&'a Record>) -> Compute<'a> {
    let starting = |run| Compute::Known(Observed::Running { run, agent: false });
    let pod = pod.filter(|pod| pod.owner == sandbox.uid);
    let Some(record) = record else {
        // Nobody's run of this driver: woken by somebody else, or a pod that has not gone.
        let stopped = sandbox.mode == Mode::Suspended && pod.is_none();
        let observed = if stopped {
            Observed::Stopped { memory: false }
        } else {
            Observed::Running { run: Run(0), agent: false }
        };
        return Compute::Known(observed);
    };
    let run = record.run;
    if sandbox.mode == Mode::Suspended {
        return match pod {
            // A start that was cut short before the cluster heard of it: the next start of that run goes on.
            None if sandbox.run != run.0 => starting(run),
            None => interrupted(run, "it was suspended in the cluster"),
            // On its way out.
            Some(_) => interrupted(run, "it is being suspended in the cluster"),
        };
    }
    if sandbox.run != run.0 {
        return starting(Run(sandbox.run));
    }
    let Some(pod) = pod else {
        return match &record.pod {
            Some(_) => interrupted(run, "its pod is gone: drained, evicted or deleted"),
            None => starting(run),
        };
    };
    if record.pod.as_ref().is_some_and(|ours| *ours != pod.uid) {
        return interrupted(run, "its pod was replaced: drained, evicted or deleted");
    }
    if pod.deleting {
        return interrupted(run, "its pod is being deleted: a drain, an eviction or somebody's hand");
    }
    match pod.phase {
        Phase::Pending => starting(run),
        Phase::Running => Compute::Ask(record, pod),
        // Its files are written out, so that it was switched off.
        Phase::Succeeded if record.flushed => {
            Compute::Known(Observed::Ended(Ended { run, exit: Exit::PowerOff }))
        }
        // The agent ends with success only when the driver asks it to; the kubelet's word of its node's end is the other
        // case. Neither is the sandbox's own fault.
        Phase::Succeeded => interrupted(run, "its pod ended"),
        // What its own processes did goes by its restart policy.
        Phase::Failed if pod.own_end => {
            let exit = Exit::Lost(words::said_within(&format!("its pod failed: {}", pod.why), 500));
            Compute::Known(Observed::Ended(Ended { run, exit }))
        }
        Phase::Failed => interrupted(run, &format!("its pod failed: {}", pod.why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(mode: Mode, run: u64) -> Seen {
        Seen {
            uid: "s".into(),
            version: 9,
            generation: 3,
            mode,
            run,
            deleting: false,
            oldest: false,
            ready: None,
            suspended: None,
        }
    }

    fn pod(phase: Phase) -> SeenPod {
        SeenPod {
            uid: "p".into(),
            version: 9,
            owner: "s".into(),
            deleting: false,
            phase,
            grace: 10,
            node: String::new(),
            ip: String::new(),
            other_ips: Vec::new(),
            why: "Evicted".into(),
            waiting: None,
            own_end: false,
            unheard: false,
            unschedulable: None,
            agent_volume: false,
        }
    }

    fn record(pod: Option<&str>) -> Record {
        Record { pod: pod.map(str::to_owned), ..Record::new(Run(2)) }
    }

    fn known(sandbox: &Seen, pod: Option<&SeenPod>, record: Option<&Record>) -> Observed {
        match compute(sandbox, pod, record) {
            Compute::Known(observed) => observed,
            Compute::Ask(..) => panic!("the agent is asked"),
        }
    }

    #[test]
    fn a_pod_that_ends_by_itself_is_lost_and_goes_by_the_policy() {
        let failed = SeenPod { own_end: true, why: "OOMKilled".into(), ..pod(Phase::Failed) };
        let seen = known(&sandbox(Mode::Running, 2), Some(&failed), Some(&record(Some("p"))));
        assert!(
            matches!(&seen, Observed::Ended(Ended { run: Run(2), exit: Exit::Lost(text) }) if text.contains("OOMKilled")),
            "{seen:?}"
        );
        let dying = SeenPod { deleting: true, ..failed };
        let seen = known(&sandbox(Mode::Running, 2), Some(&dying), Some(&record(Some("p"))));
        assert!(matches!(&seen, Observed::Ended(Ended { exit: Exit::Interrupted(_), .. })), "{seen:?}");
    }

    #[test]
    fn a_drained_or_evicted_pod_is_no_failure_of_the_sandbox() {
        let (running, ours) = (sandbox(Mode::Running, 2), record(Some("p")));
        let dying = SeenPod { deleting: true, ..pod(Phase::Running) };
        let other = SeenPod { uid: "q".into(), ..pod(Phase::Running) };
        for pod in [None, Some(&dying), Some(&other), Some(&pod(Phase::Failed))] {
            let seen = known(&running, pod, Some(&ours));
            assert!(
                matches!(&seen, Observed::Ended(Ended { run: Run(2), exit: Exit::Interrupted(_) })),
                "{seen:?}"
            );
        }
    }

    #[test]
    fn a_start_that_was_cut_short_goes_on_and_one_that_is_under_way_is_waited_for() {
        let before = known(&sandbox(Mode::Suspended, 1), None, Some(&record(None)));
        let after = known(&sandbox(Mode::Running, 2), None, Some(&record(None)));
        assert_eq!([before, after], [const { Observed::Running { run: Run(2), agent: false } }; 2]);
    }

    #[test]
    fn what_nobody_here_has_started_is_run_zero_and_a_foreign_pod_is_none() {
        assert_eq!(known(&sandbox(Mode::Suspended, 1), None, None), Observed::Stopped { memory: false });
        let woken = known(&sandbox(Mode::Running, 1), None, None);
        assert_eq!(woken, Observed::Running { run: Run(0), agent: false });
        let foreign = SeenPod { owner: "x".into(), ..pod(Phase::Running) };
        assert_eq!(
            known(&sandbox(Mode::Suspended, 1), Some(&foreign), None),
            Observed::Stopped { memory: false }
        );
    }
}
