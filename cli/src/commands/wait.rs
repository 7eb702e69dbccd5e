//! `torpor wait`

use std::time::{Duration, Instant};

use clap::Args;
use torpor_sdk::{Client, Goal, phase, v1};

use super::{
    Outcome,
    verb::{Results, remaining},
};
use crate::{failure::Failure, parse, progress::Progress, session::Session};

#[derive(Args)]
pub struct WaitArgs {
    /// Names or ids. A name is looked up once: a new sandbox of the same name isn't meant.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// A phase (ready, suspended, stopped, completed, error …), or deleted.
    #[arg(long = "for", value_name = "PHASE", value_parser = goal, default_value = "ready")]
    goal: Goal,
    /// How long to wait for all together, as in 90s or 5m; 0 waits without end.
    #[arg(long, value_name = "TIME", value_parser = parse::duration, default_value = "0")]
    timeout: Duration,
}

fn goal(text: &str) -> Result<Goal, String> {
    if text.eq_ignore_ascii_case("deleted") {
        return Ok(Goal::Deleted);
    }
    phase::parse(text).map(Goal::Phase).ok_or_else(|| {
        let names: Vec<_> = phase::ALL.into_iter().map(|p| phase::name(p).to_lowercase()).collect();
        format!("it must be one of {}, deleted", names.join(", "))
    })
}

/// Waits for each; ends at once for one that can't come to the phase.
pub async fn run(session: &Session, args: WaitArgs) -> Outcome {
    let client = session.connect().await?;
    let began = Instant::now();
    let mut results = Results::new(session, args.names.len());
    for name in &args.names {
        let limit = remaining(parse::limit(args.timeout), began);
        match wait_one(session, &client, name, args.goal, limit).await {
            Ok(Some(sandbox)) => results.add(name, Ok(sandbox))?,
            Ok(None) => {}
            Err(failure) => results.add(name, Err(failure))?,
        }
    }
    // What is deleted has no state to print.
    if args.goal == Goal::Deleted { Ok(results.code()) } else { results.finish() }
}

async fn wait_one(
    session: &Session,
    client: &Client,
    name: &str,
    goal: Goal,
    limit: Option<Duration>,
) -> Result<Option<v1::Sandbox>, Failure> {
    let progress = Progress::new(session.shows_progress(), name);
    let result = client.wait_for(name, goal, limit, |s| progress.see(s)).await;
    drop(progress);
    Ok(result?)
}
