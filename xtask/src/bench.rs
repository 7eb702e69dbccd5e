//! Benchmarks of machines, in the box: on its virtual clock a figure means the same on every host.

use std::{path::PathBuf, process::Command};

use crate::{agent, root};

fn run(command: &mut Command) -> Result<String, String> {
    let shown = format!("{command:?}");
    let out = command.stderr(std::process::Stdio::inherit()).output().map_err(|e| format!("{shown}: {e}"))?;
    if !out.status.success() {
        return Err(format!("{shown}: {}", out.status));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// The newest of the kernels that `./check` unpacks, or that the environment names.
fn kernel() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("TORPOR_TEST_KERNEL") {
        return Ok(path.into());
    }
    let boot = root().join("target/guest-kernel/boot");
    let found = std::fs::read_dir(&boot).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<_> = found.filter(|path| path.to_string_lossy().contains("/vmlinuz-")).collect();
    found.sort();
    found.pop().ok_or_else(|| {
        format!("no kernel in {}: run ./check 3 once, or set TORPOR_TEST_KERNEL", boot.display())
    })
}

/// Builds everything and runs one of the benchmarks of tests/benches/machines.
pub fn machines(what: &str) -> Result<(), String> {
    let cargo = || {
        let mut cargo = Command::new("cargo");
        cargo.current_dir(root());
        cargo
    };
    let vmm = agent::static_program("torpor-vmm")?;
    let guest = agent::static_program("torpor-test-guest")?;
    let built = run(cargo().args([
        "bench",
        "--quiet",
        "--locked",
        "--no-run",
        "--profile",
        "dev",
        "--package",
        "torpor-tests",
        "--bench",
        "machines",
        "--message-format",
        "json",
    ]))?;
    let program = built
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == "machines")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .ok_or("cargo did not say where the benchmark is")?;
    let mut command = in_box();
    for (name, path) in [("VMM", &vmm), ("GUEST", &guest), ("KERNEL", &kernel()?)] {
        command.args(["--env", &format!("TORPOR_BENCH_{name}={}", path.display())]);
    }
    command.arg("--").arg(program).arg(what);
    finish(command)
}

/// A box that sees the programs.
fn in_box() -> Command {
    let mut command = Command::new(root().join("tests/box/box"));
    command.args(["--timeout", "900", "--mem", "3072"]);
    for folder in [root(), agent::target_dir()] {
        if folder.starts_with("/tmp") || folder.starts_with("/run") {
            command.arg("--show").arg(folder);
        }
    }
    command
}

fn finish(mut command: Command) -> Result<(), String> {
    let status = command.status().map_err(|e| format!("tests/box/box: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("the benchmark in the box: {status}")) }
}

/// Builds the product in release form and runs tests/benches/ready.
pub fn ready() -> Result<(), String> {
    // There is no package source in the box: a kernel as the gateway keeps it is taken from the tests.
    let kernels = agent::target_dir().join("debug/torpor-tests/kernels");
    if !kernels.join("default.json").is_file() {
        return Err(format!("there is no guest kernel in {}: run ./check 2 once", kernels.display()));
    }
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--quiet", "--locked", "--release", "--package", "torpor-cli"]).current_dir(root());
    run(&mut cargo)?;
    agent::build("release")?;
    let vmm = agent::static_program("torpor-vmm")?;
    let mut command = in_box();
    command.arg("--").arg(root().join("tests/benches/ready"));
    command.args([agent::target_dir().join("release/torpor"), vmm, kernels]);
    finish(command)
}

/// Builds and runs gateway/benches/gateway.rs.
pub fn gateway() -> Result<(), String> {
    cargo("bench", "--package torpor-gateway --bench gateway")
}

/// Builds and runs the long test of drivers/kubernetes/tests/scale.rs.
pub fn kubernetes() -> Result<(), String> {
    let test = "--release --package torpor-driver-kubernetes --test scale";
    cargo("test", &format!("{test} -- --ignored --nocapture twenty_thousand"))
}

/// What it finds goes to standard output as it comes.
fn cargo(command: &str, arguments: &str) -> Result<(), String> {
    let mut cargo = Command::new("cargo");
    cargo.args([command, "--quiet", "--locked"]).args(arguments.split(' ')).current_dir(root());
    let status = cargo.status().map_err(|e| format!("cargo {command}: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("cargo {command}: {status}")) }
}
