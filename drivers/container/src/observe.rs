//! What is there of a sandbox, as the engine and the agent show it now.

use std::{sync::Arc, time::Duration};

use tonic::transport::Channel;
use torpor_sandbox::{DriverError, Ended, Exit, Observed, Run, SandboxId};

use crate::{
    driver::Inner,
    engine::Engine,
    live::Live,
    run::{Record, RunDir, host_boot},
    types::Inspect,
};

/// How long `observe` waits for an agent.
const AGENT_WAIT: Duration = Duration::from_millis(1200);
/// What the agent ends with when the engine told it to: 128 + TERM.
const TOLD: i64 = 143;

impl Inner {
    pub(crate) async fn observe(self: &Arc<Self>, id: &SandboxId) -> Result<Observed, DriverError> {
        let Some(quiet) = self.turns.quiet(id).await else {
            return Ok(Observed::Unknown("a step is still under way".to_owned()));
        };
        let found = match self.inspect(id).await {
            Ok(found) => found,
            // What has no folder here has nothing in the engine.
            Err(error)
                if error.is_absence() && !self.store.specs.exists(id) && !self.run_dir(id).exists() =>
            {
                return Ok(Observed::Missing);
            }
            Err(error) if error.is_absence() => {
                return Ok(Observed::Unknown(DriverError::from(error).to_string()));
            }
            Err(error) => return Err(error.into()),
        };
        let dir = self.run_dir(id);
        let record = dir.record()?;
        let Some(found) = found else { return Ok(self.without_container(id, &dir, record)) };
        let Some(record) = record else {
            // Started by somebody else, or nobody's run at all.
            let outside = Observed::Running { run: Run(0), agent: false };
            if found.state.is_up() {
                return Ok(outside);
            }
            let note = self.memory_of(id, &found).await?;
            return Ok(Observed::Stopped { memory: note.is_some_and(|note| note.used.is_none()) });
        };
        if record.is_replaced(&found) {
            return Ok(interrupted(record.run, "the container was started anew from outside"));
        }
        if !found.state.is_up() {
            return Ok(if record.is_pending(&found) {
                // A start that was cut short: the next start of that run goes on.
                Observed::Running { run: record.run, agent: false }
            } else {
                Observed::Ended(Ended { run: record.run, exit: exit_of(&record, &found, &dir) })
            });
        }
        let live = self.hear(id, &record)?;
        live.seen(&found, &dir);
        drop(quiet);
        Ok(running(&live, &found).await)
    }

    fn without_container(&self, id: &SandboxId, dir: &RunDir, record: Option<Record>) -> Observed {
        match record {
            Some(record) => {
                let text = "its container was removed from outside, and its workspace with it";
                Observed::Ended(Ended { run: record.run, exit: Exit::Lost(text.to_owned()) })
            }
            // A start says what is missing; a delete removes what is left.
            None if self.store.specs.exists(id) || dir.exists() => Observed::Stopped { memory: false },
            None => Observed::Missing,
        }
    }

    /// The channel to the agent of what runs.
    pub(crate) async fn agent(self: &Arc<Self>, id: &SandboxId) -> Result<Channel, DriverError> {
        if let Some(live) = self.heard(id) {
            return Ok(live.channel());
        }
        // While its memory is written out nobody may listen for its agent.
        if self.store.note(id)?.is_some_and(|note| !note.kept) {
            return Err(DriverError::backend(
                "reach the agent",
                "the container's memory is being written out",
            ));
        }
        let found = self.inspect(id).await?.filter(|found| found.state.is_up());
        match (found, self.run_dir(id).record()?) {
            (Some(found), Some(record)) if !record.is_replaced(&found) => {
                Ok(self.hear(id, &record)?.channel())
            }
            _ => Err(DriverError::Missing),
        }
    }
}

/// A container with a process of this run.
async fn running(live: &Arc<Live>, found: &Inspect) -> Observed {
    let run = live.run;
    if found.state.paused {
        return Observed::Running { run, agent: false };
    }
    match live.status(AGENT_WAIT).await {
        Some(status) if status.run == run.0 => match status.main_exit {
            Some(main) => Observed::Ended(Ended { run, exit: Exit::Code(main.code) }),
            None => Observed::Running { run, agent: status.configured },
        },
        _ => Observed::Running { run, agent: false },
    }
}

fn interrupted(run: Run, text: &str) -> Observed {
    Observed::Ended(Ended { run, exit: Exit::Interrupted(text.to_owned()) })
}

/// How a run ended whose container is not up any more.
fn exit_of(record: &Record, found: &Inspect, dir: &RunDir) -> Exit {
    let state = &found.state;
    if record.host_boot != host_boot() {
        return Exit::Interrupted("the host was restarted".to_owned());
    }
    if state.exit_code == Engine::LOST || state.status == "created" {
        return Exit::Interrupted("the engine lost it: it or its host ended without a stop".to_owned());
    }
    if state.exit_code == TOLD {
        return Exit::Interrupted("the engine was told to stop it, or ended itself".to_owned());
    }
    if state.exit_code == 0 && dir.flushed(record.run) {
        return Exit::PowerOff;
    }
    let oom = if state.oom_killed { ": out of memory" } else { "" };
    let error = crate::client::said(&state.error);
    let error = if error.is_empty() { String::new() } else { format!(": {error}") };
    Exit::Lost(format!("the container ended with code {}{oom}{error}", state.exit_code))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(code: i64, status: &str, oom: bool) -> Exit {
        let mut found = Inspect::default();
        (found.state.exit_code, found.state.oom_killed) = (code, oom);
        found.state.status = status.to_owned();
        let record = Record::new(Run(1), &found);
        exit_of(&record, &found, &RunDir::new("/nonexistent".into()))
    }

    #[test]
    fn what_the_engine_did_is_told_from_what_the_container_did() {
        for exit in [ended(255, "exited", false), ended(0, "created", false), ended(143, "exited", false)] {
            assert!(matches!(exit, Exit::Interrupted(_)), "{exit:?}");
        }
        let killed = ended(137, "exited", true);
        assert!(matches!(&killed, Exit::Lost(text) if text.contains("137: out of memory")), "{killed:?}");
        assert!(matches!(ended(0, "exited", false), Exit::Lost(_)), "nobody asked it to end");
    }

    #[test]
    fn a_run_of_an_earlier_boot_of_the_host_was_interrupted() {
        let found = Inspect::default();
        let mut record = Record::new(Run(1), &found);
        record.host_boot = "an earlier one".to_owned();
        record.started_at = Some(String::new());
        let exit = exit_of(&record, &found, &RunDir::new("/nonexistent".into()));
        assert!(matches!(exit, Exit::Interrupted(text) if text.contains("host")));
    }
}
