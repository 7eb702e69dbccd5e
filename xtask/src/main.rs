//! Developer commands. `cargo xtask` lists them.

mod agent;
mod bench;
mod check;
mod golden;
mod surface;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

const HELP: &str = "\
usage: cargo xtask COMMAND

  agent [PROFILE]   build the static guest agent and put it where `torpor serve` of that profile (debug, release)
                    finds it; default: debug
  vmm               build torpor-vmm in release form as a static program, and say where it is: a third of a start is
                    the dynamic linker's otherwise
  guest             build the static program that is the guest in tests of machines, and say where it is
  bench boot        torpor-vmm beside QEMU in the box: process start to a bare payload's first byte and to /init
  bench disk        the same: direct I/O in the guest on an overlay, queue depth 1
  bench ready       `torpor create`, `suspend` and `resume` in the box, on both machines, from the command to its end
  bench gateway     20,000 sandboxes of the sim driver beside the project's goals (TORPOR_BENCH_SANDBOXES: another number)
  bench kubernetes  20,000 Sandbox objects and 1,000 suspends on a cluster in memory: times, requests by verb, memory
  bench memory      the same: the process's memory beside its guest's, and its work while the guest idles
  check             arrows between crates, file lengths, SAFETY comments, licenses of dependencies, breaks of the API
  golden            record additions to the .proto files in proto/golden/api.txt, which `check` compares with;
                    --breaking: what breaks clients, too
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["agent"] => agent::build("debug"),
        ["agent", profile @ ("debug" | "release")] => agent::build(profile),
        ["vmm"] => agent::static_program("torpor-vmm").map(|path| println!("{}", path.display())),
        ["guest"] => agent::static_program("torpor-test-guest").map(|path| println!("{}", path.display())),
        ["bench", what @ ("boot" | "disk" | "memory")] => bench::machines(what),
        ["bench", "ready"] => bench::ready(),
        ["bench", "gateway"] => bench::gateway(),
        ["bench", "kubernetes"] => bench::kubernetes(),
        ["check"] => check::run(),
        ["golden"] => golden::record(false),
        ["golden", "--breaking"] => golden::record(true),
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
