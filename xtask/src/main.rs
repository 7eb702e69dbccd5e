//! Developer commands. `cargo xtask` lists them.

mod agent;
mod check;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

const HELP: &str = "\
usage: cargo xtask COMMAND

  agent [PROFILE]   build the static guest agent and put it where `torpor serve` of that profile (debug, release)
                    finds it; default: debug
  check             arrows between crates, file lengths, SAFETY comments, licenses of dependencies
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["agent"] => agent::build("debug"),
        ["agent", profile @ ("debug" | "release")] => agent::build(profile),
        ["check"] => check::run(),
        [] | ["help" | "--help"] => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(format!("unknown command '{}'\n{HELP}", other.join(" "))),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The repository's top folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned()
}
