//! `torpor completions`

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use super::Outcome;
use crate::{args::Cli, output};

#[derive(Args)]
pub struct CompletionsArgs {
    /// Whose script.
    shell: Shell,
}

/// Prints a completion script.
pub fn run(args: &CompletionsArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "torpor", &mut script);
    output::bytes(&script)?;
    Ok(0)
}
