//! `torpor delete`

use std::time::Instant;

use clap::Args;
use serde::Serialize;
use torpor_sdk::{Client, Goal, v1::delete_sandbox_response::Outcome as Wire};

use super::{
    Outcome,
    verb::{Patience, remaining},
};
use crate::{failure::Failure, output::clean, parse, progress::Progress, session::Session};

#[derive(Args)]
pub struct DeleteArgs {
    /// Names or ids.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// A sandbox that isn't there is no failure.
    #[arg(long)]
    allow_missing: bool,
    #[command(flatten)]
    patience: Patience,
}

/// What became of one name.
#[derive(Serialize)]
struct Deleted {
    name: String,
    id: Option<String>,
    outcome: &'static str,
}

/// Removes sandboxes.
pub async fn run(session: &Session, args: DeleteArgs) -> Outcome {
    let client = session.connect().await?;
    let began = Instant::now();
    let mut asked = Vec::with_capacity(args.names.len());
    for name in &args.names {
        asked.push(client.delete(name, args.allow_missing).await);
    }
    let mut code = 0;
    let mut done = Vec::new();
    for (name, answer) in args.names.iter().zip(asked) {
        let result = match answer {
            Ok(response) => {
                let deleted = Deleted {
                    name: name.clone(),
                    id: (!response.id.is_empty()).then(|| response.id.clone()),
                    outcome: word(response.outcome()),
                };
                finish(session, &client, deleted, &args.patience, began).await
            }
            Err(error) => Err(error.into()),
        };
        match result {
            Ok(deleted) => done.push(deleted),
            Err(failure) => {
                code = if code == 0 { failure.code } else { code };
                failure.print(if args.names.len() == 1 { "" } else { name });
            }
        }
    }
    print(session, &done, args.names.len() == 1)?;
    Ok(code)
}

async fn finish(
    session: &Session,
    client: &Client,
    mut deleted: Deleted,
    patience: &Patience,
    began: Instant,
) -> Result<Deleted, Failure> {
    let Some(id) = deleted.id.clone().filter(|_| deleted.outcome == "deleting" && !patience.no_wait) else {
        return Ok(deleted);
    };
    let progress = Progress::new(session.shows_progress(), &deleted.name);
    let limit = remaining(parse::limit(patience.timeout), began);
    client.wait_for(&id, Goal::Deleted, limit, |s| progress.see(s)).await?;
    deleted.outcome = "deleted";
    Ok(deleted)
}

fn word(outcome: Wire) -> &'static str {
    match outcome {
        Wire::Completed => "deleted",
        Wire::AlreadyAbsent => "absent",
        Wire::Accepted | Wire::Unspecified => "deleting",
    }
}

fn print(session: &Session, done: &[Deleted], one: bool) -> Result<(), Failure> {
    let names = || done.iter().map(|d| d.name.clone()).collect();
    let table = || done.iter().map(|d| format!("{} {}\n", clean(&d.name), d.outcome)).collect();
    match done {
        [] if one => Ok(()),
        [single] if one => session.print(single, names, table),
        _ => session.print(&done, names, table),
    }
}
