//! `torpor`: the command line of Torpor.

mod args;
mod commands;
mod failure;
mod input;
mod output;
mod parse;
mod progress;
mod session;
mod terminal;

use std::process::ExitCode;

use clap::Parser as _;

use crate::{args::Cli, session::Session};

fn main() -> ExitCode {
    #[cfg(feature = "gateway")]
    if std::env::args_os().nth(1).is_some_and(|a| a == "__kvm-probe") {
        // The probe's guest runs in a process of its own, so that a hang or crash of KVM ends that process only.
        commands::doctor::kvm_probe_child();
    }
    let cli = Cli::parse();
    let session = Session::new(&cli.global);
    match commands::run(&session, cli.command) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            failure.print("");
            ExitCode::from(failure.code)
        }
    }
}
