//! `torpor start`

use clap::Args;
use torpor_sdk::{Client, Goal};

use super::{
    Outcome,
    verb::{Patience, change_each},
};
use crate::session::Session;

#[derive(Args)]
pub struct StartArgs {
    /// Names or ids.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    patience: Patience,
}

/// Boots sandboxes from their disks.
pub async fn run(session: &Session, args: StartArgs) -> Outcome {
    let ask = async |client: &Client, name: &str| client.start(name).await;
    change_each(session, &args.names, Goal::Running, &args.patience, ask).await
}
