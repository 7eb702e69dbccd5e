//! Rules of the house that no compiler knows.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::{golden, root};

/// Which crate may use which (ARCHITECTURE.md). Dev-dependencies of the same kind are allowed as well.
const ARROWS: &[(&str, &[&str])] = &[
    ("torpor-proto", &[]),
    ("torpor-sandbox", &[]),
    ("torpor-overlay", &[]),
    ("torpor-netpool", &[]),
    ("torpor-images", &[]),
    ("torpor-agent-channel", &[]),
    ("torpor-agent-files", &[]),
    ("torpor-agent", &["torpor-proto", "torpor-agent-channel", "torpor-agent-files"]),
    // What the drivers do alike.
    ("torpor-driver-common", &["torpor-sandbox", "torpor-proto"]),
    (
        "torpor-driver-vm",
        &[
            "torpor-driver-common",
            "torpor-sandbox",
            "torpor-proto",
            "torpor-overlay",
            "torpor-netpool",
            "torpor-images",
            "torpor-agent-channel",
            "torpor-vmm-api",
        ],
    ),
    (
        "torpor-driver-container",
        // The last for tests: it starts engines.
        &["torpor-driver-common", "torpor-sandbox", "torpor-proto", "torpor-agent-channel", "torpor-tests"],
    ),
    (
        "torpor-driver-kubernetes",
        // The last for tests: a cluster in memory.
        &[
            "torpor-driver-common",
            "torpor-sandbox",
            "torpor-proto",
            "torpor-agent-channel",
            "torpor-test-kube",
        ],
    ),
    ("torpor-test-kube", &["torpor-proto", "torpor-agent-channel"]),
    ("torpor-vmm-api", &[]),
    ("torpor-vmm-devices", &["torpor-overlay", "torpor-vmm-api"]),
    ("torpor-vmm-jail", &["torpor-vmm-api"]),
    ("torpor-vmm", &["torpor-overlay", "torpor-vmm-api", "torpor-vmm-devices", "torpor-vmm-jail"]),
    (
        "torpor-gateway",
        &[
            "torpor-sandbox",
            "torpor-proto",
            "torpor-rest",
            "torpor-netpool",
            "torpor-images",
            "torpor-driver-common",
            "torpor-driver-vm",
            "torpor-driver-container",
            "torpor-driver-kubernetes",
            // For tests: a cluster in memory.
            "torpor-test-kube",
        ],
    ),
    ("torpor-rest", &["torpor-proto"]),
    ("torpor-sdk", &["torpor-proto"]),
    ("torpor-cli", &["torpor-proto", "torpor-sdk", "torpor-sandbox", "torpor-gateway", "torpor-agent-files"]),
    ("torpor-test-guest", &[]),
    ("xtask", &[]),
];
/// It may use everything.
const UNBOUND: &str = "torpor-tests";
/// Longest source file, lines.
const LONGEST: usize = 800;
/// Where unsafe code may stand.
const UNSAFE: &[&str] = &[
    "vmm/",
    "netpool/src/linux/",
    "overlay/src/lock",
    "agent/",
    "drivers/vm/src/probe",
    "drivers/vm/src/sys",
    "fuzz/fuzz_targets/vmm_",
];
/// Licenses that dependencies may have; deny.toml holds the same list for cargo-deny.
const LICENSES: &[&str] = &[
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Unicode-3.0",
    "Zlib",
    "0BSD",
    "CC0-1.0",
    "Unlicense",
    "BSL-1.0",
    "MPL-2.0",
];

pub fn run() -> Result<(), String> {
    let metadata = metadata()?;
    let mut faults = Vec::new();
    arrows(&metadata, &mut faults);
    licenses(&metadata, &mut faults);
    for file in sources()? {
        source(&file, &mut faults)?;
    }
    faults.extend(golden::faults()?);
    if faults.is_empty() {
        println!("xtask check: arrows, licenses, file lengths, unsafe blocks and the API are in order");
        return Ok(());
    }
    Err(format!("{} faults\n  {}", faults.len(), faults.join("\n  ")))
}

fn metadata() -> Result<Value, String> {
    let out = Command::new("cargo")
        // What is built for other systems is none of ours; deny.toml says the same.
        .args([
            "metadata",
            "--format-version",
            "1",
            "--locked",
            "--filter-platform",
            "x86_64-unknown-linux-gnu",
        ])
        .current_dir(root())
        .output()
        .map_err(|e| format!("cargo metadata: {e}"))?;
    if !out.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&out.stderr)));
    }
    serde_json::from_slice(&out.stdout).map_err(|e| format!("cargo metadata: {e}"))
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn arrows(metadata: &Value, faults: &mut Vec<String>) {
    let allowed: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ours = packages.iter().filter(|p| p["source"].is_null());
    let names: BTreeSet<&str> = ours.clone().map(|p| text(p, "name")).collect();
    for package in ours {
        let name = text(package, "name");
        if name == UNBOUND {
            continue;
        }
        let Some(may) = allowed.get(name) else {
            faults.push(format!("crate {name} is not in xtask's table of arrows"));
            continue;
        };
        for dependency in package["dependencies"].as_array().map(Vec::as_slice).unwrap_or_default() {
            let to = text(dependency, "name");
            if names.contains(to) && to != name && !may.contains(&to) {
                faults.push(format!("{name} may not use {to} (ARCHITECTURE.md)"));
            }
        }
    }
}

fn licenses(metadata: &Value, faults: &mut Vec<String>) {
    for package in metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default() {
        let license = text(package, "license");
        let fits = license.split(" OR ").any(|choice| {
            choice
                .trim_matches(['(', ')'])
                .split(" AND ")
                .all(|one| LICENSES.contains(&one.trim_matches(['(', ')'])))
        });
        // Written with a slash in old crates: the same as OR.
        let fits = fits || license.split('/').any(|one| LICENSES.contains(&one.trim()));
        if !fits {
            faults.push(format!("license of {} is '{license}'", text(package, "name")));
        }
    }
}

/// Every Rust file that git knows, or would.
fn sources() -> Result<Vec<PathBuf>, String> {
    let out = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "*.rs"])
        .current_dir(root())
        .output()
        .map_err(|e| format!("git ls-files: {e}"))?;
    Ok(String::from_utf8_lossy(&out.stdout).lines().map(PathBuf::from).collect())
}

fn source(file: &Path, faults: &mut Vec<String>) -> Result<(), String> {
    let path = root().join(file);
    if !path.exists() {
        return Ok(());
    }
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", file.display()))?;
    let lines: Vec<&str> = text.lines().collect();
    if lines.len() > LONGEST {
        faults.push(format!("{}: {} lines; at most {LONGEST}", file.display(), lines.len()));
    }
    let shown = file.to_string_lossy();
    for (at, line) in lines.iter().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        if !code.contains(concat!("unsafe", " {")) {
            continue;
        }
        if !UNSAFE.iter().any(|place| shown.starts_with(place)) {
            faults.push(format!("{shown}:{}: unsafe code outside the crates that may have it", at + 1));
        }
        let above = lines[..at]
            .iter()
            .rev()
            .take_while(|l| l.trim_start().starts_with("//") || l.trim_end().ends_with('='));
        if !above.into_iter().any(|l| l.contains("SAFETY:")) {
            faults.push(format!("{shown}:{}: an unsafe block without a SAFETY comment right above", at + 1));
        }
    }
    Ok(())
}
