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
    change_each(session, &args.names, goal, &args.patience, ask).await
}
