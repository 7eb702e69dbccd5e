//! What suspend, resume, stop and start have in common: ask for all, then wait for each.

use std::time::{Duration, Instant};

use clap::Args;
use torpor_sdk::{Client, Error, Goal, phase, v1};

use super::Outcome;
use crate::{failure::Failure, output, parse, progress::Progress, session::Session};

/// Options of every verb that waits.
#[derive(Args)]
pub struct Patience {
    /// Return as soon as the gateway has written down what is wanted.
    #[arg(long)]
    pub no_wait: bool,
    /// How long to wait for all together, as in 90s or 5m; 0 waits without end. What was asked for goes on after it.
    #[arg(long, value_name = "TIME", value_parser = parse::duration, default_value = "10m")]
    pub timeout: Duration,
}

/// The rest of a limit that began earlier; a limit that is used up leaves one look.
pub fn remaining(limit: Option<Duration>, began: Instant) -> Option<Duration> {
    limit.map(|l| l.saturating_sub(began.elapsed()).max(Duration::from_millis(1)))
}

/// Asks for a change of each sandbox, then waits for each; tells the result of each as it comes.
pub async fn change_each(
    session: &Session,
    names: &[String],
    goal: Goal,
    patience: &Patience,
    ask: impl AsyncFn(&Client, &str) -> Result<v1::Sandbox, Error>,
) -> Outcome {
    let client = session.connect().await?;
    let began = Instant::now();
    // All are asked first, so that the gateway works on them at the same time.
    let mut asked = Vec::with_capacity(names.len());
    for name in names {
        asked.push(ask(&client, name).await);
    }
    let mut results = Results::new(session, names.len());
    for (name, answer) in names.iter().zip(asked) {
        let result = match answer {
            Ok(sandbox) if !patience.no_wait => {
                let limit = remaining(parse::limit(patience.timeout), began);
                await_one(session, &client, &sandbox, goal, limit).await
            }
            other => other.map_err(Failure::from),
        };
        results.add(name, result)?;
    }
    results.finish()
}

/// Waits for one sandbox with progress.
pub async fn await_one(
    session: &Session,
    client: &Client,
    sandbox: &v1::Sandbox,
    goal: Goal,
    limit: Option<Duration>,
) -> Result<v1::Sandbox, Failure> {
    let progress = Progress::new(session.shows_progress(), &sandbox.name);
    let end = client.wait_for(&sandbox.id, goal, limit, |s| progress.see(s)).await;
    drop(progress);
    Ok(end?.unwrap_or_else(|| sandbox.clone()))
}

/// Gathers results by name and prints them.
pub struct Results<'a> {
    session: &'a Session,
    one: bool,
    done: Vec<v1::Sandbox>,
    code: u8,
}

impl<'a> Results<'a> {
    pub fn new(session: &'a Session, asked: usize) -> Self {
        Self { session, one: asked == 1, done: Vec::new(), code: 0 }
    }

    /// Takes one result: failures, and in table form successes, are printed at once.
    pub fn add(&mut self, name: &str, result: Result<v1::Sandbox, Failure>) -> Result<(), Failure> {
        match result {
            Ok(sandbox) => {
                if self.is_lines() {
                    self.session.print_sandboxes(std::slice::from_ref(&sandbox), true, summary)?;
                }
                self.done.push(sandbox);
            }
            Err(failure) => {
                // The first failure decides how the program ends.
                self.code = if self.code == 0 { failure.code } else { self.code };
                failure.print(if self.one { "" } else { name });
            }
        }
        Ok(())
    }

    /// Prints what must stand in one document, and gives the exit code.
    pub fn finish(self) -> Outcome {
        let nothing = self.one && self.done.is_empty();
        if !self.is_lines() && !nothing {
            self.session.print_sandboxes(&self.done, self.one, summary)?;
        }
        Ok(self.code)
    }

    /// The exit code so far.
    pub fn code(&self) -> u8 {
        self.code
    }

    fn is_lines(&self) -> bool {
        matches!(self.session.format, output::Format::Table | output::Format::Name)
    }
}

/// One line for each: "web Suspended".
fn summary(sandboxes: &[v1::Sandbox]) -> String {
    let line = |s: &v1::Sandbox| {
        let exit = s.status.as_ref().and_then(|s| s.exit_code);
        let exit = exit.map(|c| format!(" (the main command ended with code {c})")).unwrap_or_default();
        format!("{} {}{exit}\n", output::clean(&s.name), phase::name(phase::of(s)))
    };
    sandboxes.iter().map(line).collect()
}
