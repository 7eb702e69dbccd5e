//! `torpor resume`

use clap::Args;
use torpor_sdk::{Client, Goal};

use super::{
    Outcome,
    verb::{Patience, change_each},
};
use crate::session::Session;

#[derive(Args)]
pub struct ResumeArgs {
    /// Names or ids.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Boot from the disk when the memory image can't be used.
    #[arg(long)]
    restart_if_restore_fails: bool,
    #[command(flatten)]
    patience: Patience,
}

/// Brings suspended sandboxes back.
pub async fn run(session: &Session, args: ResumeArgs) -> Outcome {
    let cold = args.restart_if_restore_fails;
    let ask = async |client: &Client, name: &str| client.resume(name, cold).await;
    change_each(session, &args.names, Goal::Running, &args.patience, ask).await
}
