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

/// Where cargo puts what it builds.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// For a debug build the dev profile is used with these changes, not the `agent` profile: what only runs while building
/// (macros, build scripts) is then the same as for everything else, which saves a minute or more.
const QUICK: [(&str, &str); 6] = [
    ("CARGO_PROFILE_DEV_OPT_LEVEL", "s"),
    ("CARGO_PROFILE_DEV_DEBUG", "false"),
    ("CARGO_PROFILE_DEV_DEBUG_ASSERTIONS", "false"),
    ("CARGO_PROFILE_DEV_INCREMENTAL", "false"),
    ("CARGO_PROFILE_DEV_PANIC", "abort"),
    ("CARGO_PROFILE_DEV_STRIP", "symbols"),
];

/// Builds a small static program in release form; where it is.
pub fn static_program(package: &str) -> Result<PathBuf, String> {
    let triple = host_triple()?;
    let status = Command::new("cargo")
        .args(["build", "--quiet", "--locked", "--release", "--package", package, "--target", &triple])
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .current_dir(root())
        .status()
        .map_err(|e| format!("cargo: {e}"))?;
    match status.success() {
        true => Ok(target_dir().join(triple).join("release").join(package)),
        false => Err(format!("building {package}: {status}")),
    }
}

/// Builds it and puts it beside the programs of `profile`.
pub fn build(profile: &str) -> Result<(), String> {
    let triple = host_triple()?;
    let mut cargo = Command::new("cargo");
    cargo
        .args(["build", "--quiet", "--locked", "--package", "torpor-agent", "--target", &triple])
        // Only with an explicit --target do these flags spare build scripts and macros.
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .current_dir(root());
    let folder = if profile == "release" {
        cargo.args(["--profile", "agent"]);
        "agent"
    } else {
        cargo.envs(QUICK);
        "debug"
    };
    let status = cargo.status().map_err(|e| format!("cargo: {e}"))?;
    if !status.success() {
        return Err(format!("building the agent: {status}"));
    }
    let target = target_dir();
    let from = target.join(&triple).join(folder).join("torpor-agent");
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
