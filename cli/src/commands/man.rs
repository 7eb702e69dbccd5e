//! `torpor man`, for packagers.

use std::{fs, path::PathBuf};

use clap::{Args, CommandFactory as _};

use super::Outcome;
use crate::{
    args::Cli,
    failure::{FAILED, Failure},
};

#[derive(Args)]
pub struct ManArgs {
    /// The folder; made when it isn't there.
    dir: PathBuf,
}

/// Writes one page for each command.
pub fn run(args: &ManArgs) -> Outcome {
    let shown = args.dir.display();
    fs::create_dir_all(&args.dir)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), &args.dir))
        .map_err(|e| Failure::new(FAILED, format!("can't write manual pages into '{shown}': {e}")))?;
    Ok(0)
}
