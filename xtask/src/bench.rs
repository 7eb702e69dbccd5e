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
    run(cargo().args(["build", "--quiet", "--locked", "--release", "--package", "torpor-vmm"]))?;
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
    let target = agent::target_dir();
    let vmm = target.join("release/torpor-vmm");
    let mut command = Command::new(root().join("tests/box/box"));
    command.args(["--timeout", "900", "--mem", "3072"]);
    for folder in [root(), target.clone()] {
        if folder.starts_with("/tmp") || folder.starts_with("/run") {
            command.arg("--show").arg(folder);
        }
    }
    for (name, path) in [("VMM", &vmm), ("GUEST", &guest), ("KERNEL", &kernel()?)] {
        command.args(["--env", &format!("TORPOR_BENCH_{name}={}", path.display())]);
    }
    command.arg("--").arg(program).arg(what);
    let status = command.status().map_err(|e| format!("tests/box/box: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("the benchmark in the box: {status}")) }
}

/// Builds and runs gateway/benches/gateway.rs; the figures go to standard output as they come.
pub fn gateway() -> Result<(), String> {
    let mut cargo = Command::new("cargo");
    cargo.args(["bench", "--quiet", "--locked", "--package", "torpor-gateway", "--bench", "gateway"]);
    let status = cargo.current_dir(root()).status().map_err(|e| format!("cargo bench: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("cargo bench: {status}")) }
}
