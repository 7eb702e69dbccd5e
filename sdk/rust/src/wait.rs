//! Waits until a sandbox is where it is wanted.

use std::{fmt, time::Duration};

use tokio::time::{Instant, timeout_at};
use tonic::Code;
use torpor_proto::v1::{self, Phase};

use crate::{
    client::Client,
    error::Error,
    phase::{self, Outlook},
    watch::{Event, Watch},
};

/// What a wait is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// This phase.
    Phase(Phase),
    /// Ready, or Completed: a main command may end before anybody has looked.
    Running,
    /// That nothing of it is left.
    Deleted,
}

impl Goal {
    /// The phases that fulfil it; none for [`Goal::Deleted`].
    pub fn phases(&self) -> &[Phase] {
        match self {
            Self::Phase(phase) => std::slice::from_ref(phase),
            Self::Running => &[Phase::Ready, Phase::Completed],
            Self::Deleted => &[],
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Phase(phase) => phase::name(*phase),
            Self::Running => "Ready",
            Self::Deleted => "deleted",
        })
    }
}

impl Client {
    /// Waits until a sandbox has this phase. A name is resolved once: another sandbox that takes the name later isn't
    /// meant. Without a timeout it waits as long as the sandbox may still come there.
    ///
    /// # Errors
    /// [`Error::CannotReach`] at once when it can't, [`Error::Gone`], [`Error::WaitTimedOut`], or what the gateway answers.
    pub async fn wait(
        &self,
        sandbox: &str,
        phase: Phase,
        timeout: Option<Duration>,
    ) -> Result<v1::Sandbox, Error> {
        let goal = Goal::Phase(phase);
        self.wait_for(sandbox, goal, timeout, |_| {})
            .await?
            .ok_or(Error::Gone { sandbox: sandbox.to_owned(), goal })
    }

    /// As [`Client::wait`], for any goal, and tells `seen` every state on the way. None: it is deleted, as was wanted.
    ///
    /// # Errors
    /// As [`Client::wait`].
    pub async fn wait_for(
        &self,
        sandbox: &str,
        goal: Goal,
        timeout: Option<Duration>,
        seen: impl FnMut(&v1::Sandbox),
    ) -> Result<Option<v1::Sandbox>, Error> {
        let started = Instant::now();
        let present = match self.get(sandbox).await {
            Err(e) if goal == Goal::Deleted && e.code() == Some(Code::NotFound) => return Ok(None),
            other => other?,
        };
        let mut waiting = Waiting { goal, last: None, seen_since_reset: false, seen };
        if let Some(end) = waiting.look(present.clone())? {
            return Ok(Some(end));
        }
        let watch =
            self.watch(v1::WatchSandboxesRequest { sandbox: present.id.clone(), ..Default::default() });
        let Some(limit) = timeout else { return waiting.follow(watch, &present.id).await };
        match timeout_at(started + limit, waiting.follow(watch, &present.id)).await {
            Ok(result) => result,
            Err(_) => Err(waiting.timed_out(&present.name, limit)),
        }
    }
}

struct Waiting<F> {
    goal: Goal,
    last: Option<v1::Sandbox>,
    seen_since_reset: bool,
    seen: F,
}

impl<F: FnMut(&v1::Sandbox)> Waiting<F> {
    async fn follow(&mut self, mut watch: Watch, id: &str) -> Result<Option<v1::Sandbox>, Error> {
        loop {
            let event = match watch.next().await {
                Err(e) if e.code() == Some(Code::NotFound) => return self.gone(id),
                other => other?,
            };
            match event {
                Event::Reset => self.seen_since_reset = false,
                Event::Snapshot(sandbox) | Event::Changed(sandbox) if sandbox.id == id => {
                    if let Some(end) = self.look(sandbox)? {
                        return Ok(Some(end));
                    }
                }
                Event::Deleted(sandbox) if sandbox.id == id => return self.gone(id),
                Event::Synced if !self.seen_since_reset => return self.gone(id),
                _ => {}
            }
        }
    }

    fn look(&mut self, sandbox: v1::Sandbox) -> Result<Option<v1::Sandbox>, Error> {
        self.seen_since_reset = true;
        (self.seen)(&sandbox);
        match phase::outlook(&sandbox, self.goal) {
            Outlook::Arrived => Ok(Some(sandbox)),
            Outlook::Hopeless => Err(Error::CannotReach { sandbox: Box::new(sandbox), goal: self.goal }),
            Outlook::Underway => {
                self.last = Some(sandbox);
                Ok(None)
            }
        }
    }

    fn gone(&self, id: &str) -> Result<Option<v1::Sandbox>, Error> {
        if self.goal == Goal::Deleted {
            return Ok(None);
        }
        let name = self.last.as_ref().map_or(id, |s| &s.name);
        Err(Error::Gone { sandbox: name.to_owned(), goal: self.goal })
    }

    fn timed_out(self, name: &str, after: Duration) -> Error {
        let last = self.last.unwrap_or_default();
        Error::WaitTimedOut {
            name: name.to_owned(),
            phase: phase::name(phase::of(&last)).to_owned(),
            step: last.status.as_ref().map(|s| s.step.clone()).unwrap_or_default(),
            goal: self.goal,
            after,
            sandbox: last.status.is_some().then(|| Box::new(last)),
        }
    }
}
