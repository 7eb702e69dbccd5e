//! `torpor stop`

use clap::Args;
use torpor_sdk::{Client, Goal, v1};

use super::{
    Outcome,
    verb::{Patience, change_each},
};
use crate::session::Session;

#[derive(Args)]
pub struct StopArgs {
    /// Names or ids.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    patience: Patience,
}

/// Frees the compute of sandboxes until somebody starts them.
pub async fn run(session: &Session, args: StopArgs) -> Outcome {
    let goal = Goal::Phase(v1::Phase::Stopped);
    let ask = async |client: &Client, name: &str| client.stop(name).await;
    change_each(session, &args.names, goal, &args.patience, ask).await
}
