//! The guest agent is a static program, so that it runs before any root file system is there.

use std::{fs, path::PathBuf, process::Command};

use crate::root;

/// The triple of the host, as the compiler has it.
fn host_triple() -> Result<String, String> {
    let out = Command::new("rustc").arg("-vV").output().map_err(|e| format!("rustc: {e}"))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let line = text.lines().find_map(|l| l.strip_prefix("host: "));
    line.map(str::to_owned).ok_or_else(|| "rustc -vV names no host".to_owned())
}

fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Builds it and puts it beside the programs of `profile`.
pub fn build(profile: &str) -> Result<(), String> {
    let triple = host_triple()?;
    let status = Command::new("cargo")
        .args(["build", "--locked", "--package", "torpor-agent", "--profile", "agent", "--target", &triple])
        // Only with an explicit --target do these flags spare build scripts and macros.
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .current_dir(root())
        .status()
        .map_err(|e| format!("cargo: {e}"))?;
    if !status.success() {
        return Err(format!("building the agent: {status}"));
    }
    let target = target_dir();
    let from = target.join(&triple).join("agent/torpor-agent");
    let dir = target.join(profile).join("guest");
    let to = dir.join("torpor-agent");
    fs::create_dir_all(&dir).map_err(|e| format!("make {}: {e}", dir.display()))?;
    // A name of its own first: a gateway may be reading the old one.
    let new = dir.join(".torpor-agent.new");
    fs::copy(&from, &new)
        .and_then(|_| fs::rename(&new, &to))
        .map_err(|e| format!("copy {}: {e}", from.display()))?;
    println!("{}", to.display());
    Ok(())
}
