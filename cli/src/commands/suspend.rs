//! `torpor suspend`

use clap::Args;
use torpor_sdk::{Client, Goal, v1};

use super::{
    Outcome,
    verb::{Patience, change_each},
};
use crate::session::Session;

#[derive(Args)]
pub struct SuspendArgs {
    /// Names or ids.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Keep the memory too, so that processes go on where they were.
    #[arg(long)]
    memory: bool,
    #[command(flatten)]
    patience: Patience,
}

/// Frees the compute of sandboxes.
pub async fn run(session: &Session, args: SuspendArgs) -> Outcome {
    let keep = if args.memory { v1::Keep::Memory } else { v1::Keep::Disk };
    let goal = Goal::Phase(v1::Phase::Suspended);
    let ask = async |client: &Client, name: &str| client.suspend(name, keep).await;
    let outcome = change_each(session, &args.names, goal, &args.patience, ask).await?;
    if args.memory && outcome == 0 && !session.quiet {
        tell_of_lost_memory(session, &args.names).await;
    }
    Ok(outcome)
}

/// A suspend is done also where the memory could not be written: its user should hear of that now, not at the resume.
async fn tell_of_lost_memory(session: &Session, names: &[String]) {
    let Ok(client) = session.connect().await else { return };
    for name in names {
        let status = client.get(name).await.ok().and_then(|sandbox| sandbox.status);
        let Some(status) = status else { continue };
        if status.phase() == v1::Phase::Suspended && status.retained() == v1::Keep::Disk {
            eprintln!("{name}: the memory could not be kept, the disk is: `torpor history {name}` says why");
        }
    }
}
