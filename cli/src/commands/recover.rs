//! `torpor recover`

use clap::Args;
use torpor_sdk::{Client, Goal, phase, v1};

use super::{
    Outcome,
    verb::{Patience, change_each},
};
use crate::session::Session;

#[derive(Args)]
pub struct RecoverArgs {
    /// Names or ids.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    #[command(flatten)]
    patience: Patience,
}

/// Brings sandboxes out of Error: on the disk that is there, booted from it when a memory image can't be used. Those that are
/// Ready or on the way are left alone.
pub async fn run(session: &Session, args: RecoverArgs) -> Outcome {
    let ask = async |client: &Client, name: &str| {
        let found = client.get(name).await?;
        match phase::of(&found) {
            v1::Phase::Error => client.resume(&found.id, true).await,
            _ => Ok(found),
        }
    };
    change_each(session, &args.names, Goal::Running, &args.patience, ask).await
}
