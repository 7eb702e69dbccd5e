//! Debian's cloud kernel, from the host's package sources but not installed.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::At;
use crate::fsutil::sorted_entries;
use crate::staging::Staging;
use crate::tool::Tool;
use crate::{Error, OnProgress, tell};

const APT_CACHE: Tool = Tool::new("apt-cache", "apt");
const APT_GET: Tool = Tool::new("apt-get", "apt");
const DPKG_DEB: Tool = Tool::new("dpkg-deb", "dpkg");

/// An unpacked kernel package.
pub(crate) struct Unpacked {
    pub(crate) vmlinuz: PathBuf,
    pub(crate) modules: PathBuf,
    pub(crate) release: String,
}

/// Fetches and unpacks the kernel package in the scratch directory.
pub(crate) fn fetch(staging: &Staging, progress: OnProgress<'_>) -> Result<Unpacked, Error> {
    let meta = format!("linux-image-cloud-{}", debian_arch());
    let package = real_package(&meta, staging)?;
    tell(progress, "fetch kernel", &package);
    let dir = staging.join("package");
    fs::create_dir(&dir).at("create directory", &dir)?;
    let mut command = APT_GET.command_in(staging)?;
    // The unprivileged user of apt can't write to a directory of ours; the package is checked by its hash all the same.
    command.args(["-q", "-o", "APT::Sandbox::User=root", "download", &package]).current_dir(&dir);
    APT_GET.run(
        &mut command,
        "fetch the guest kernel; if the package lists are old, run: apt-get update",
        &mut |line| {
            tell(progress, "fetch kernel", line);
        },
    )?;
    let deb = sorted_entries(&dir)?.into_iter().find(|path| path.extension().is_some_and(|e| e == "deb"));
    let deb = deb.ok_or_else(|| no_package(&package, "the download left no package"))?;
    tell(progress, "unpack kernel", &package);
    let root = staging.join("unpacked");
    let mut command = DPKG_DEB.command_in(staging)?;
    command.arg("-x").arg(&deb).arg(&root);
    DPKG_DEB.run(&mut command, "unpack the guest kernel", &mut |_| ())?;
    find(&root)
}

fn debian_arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The package with the kernel in it, which the meta package depends on.
fn real_package(meta: &str, staging: &Staging) -> Result<String, Error> {
    let mut command = APT_CACHE.command_in(staging)?;
    command.args(["depends", "--important", meta]);
    let output = match APT_CACHE.run(&mut command, "find the guest kernel's package", &mut |_| ()) {
        Err(Error::ToolFailed { output, .. }) => return Err(no_package(meta, &output)),
        output => output?,
    };
    let text = String::from_utf8_lossy(&output);
    dependency(&text).ok_or_else(|| no_package(meta, "it has no candidate"))
}

fn dependency(text: &str) -> Option<String> {
    let names = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    names.map(str::trim).find(|name| name.starts_with("linux-image-")).map(str::to_owned)
}

fn no_package(package: &str, why: &str) -> Error {
    Error::NoKernelPackage { package: package.into(), why: why.into() }
}

fn find(root: &Path) -> Result<Unpacked, Error> {
    let boot = root.join("boot");
    let vmlinuz = sorted_entries(&boot)?
        .into_iter()
        .find(|path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"vmlinuz-")))
        .ok_or(Error::BadKernel { path: boot, why: "the package holds no vmlinuz" })?;
    let release =
        vmlinuz.file_name().and_then(|name| name.to_str()?.strip_prefix("vmlinuz-")).unwrap_or_default();
    let below = |prefix: &str| root.join(prefix).join(release);
    // Packages of merged-usr releases have their modules below usr.
    let modules = ["lib/modules", "usr/lib/modules"].map(below).into_iter().find(|path| path.is_dir());
    let modules = modules.ok_or_else(|| Error::BadKernel {
        path: root.join("lib/modules"),
        why: "the package holds no modules",
    })?;
    Ok(Unpacked { release: release.into(), vmlinuz, modules })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_what_the_meta_package_depends_on() {
        let text = "linux-image-cloud-amd64\n  PreDepends: x\n  Depends: linux-image-6.1.0-1-cloud-amd64\n";
        assert_eq!(dependency(text).as_deref(), Some("linux-image-6.1.0-1-cloud-amd64"));
        assert_eq!(dependency("linux-image-cloud-amd64\n"), None);
    }
}
