//! The default image: a small Debian of the host's own release, from the host's own package sources.

use std::fs;
use std::path::{Path, PathBuf};

use super::clean;
use crate::error::At;
use crate::staging::Staging;
use crate::tool::Tool;
use crate::{Error, OnProgress, tell};

const MMDEBSTRAP: Tool = Tool::new("mmdebstrap", "mmdebstrap");
/// A build that takes longer than this hangs: on 2 slow cores it takes about 40 seconds.
const TIMEOUT: Tool = Tool::new("timeout", "coreutils");
const LIMIT_SECONDS: &str = "1800";

/// What a minbase system lacks to be pleasant to work in.
const PACKAGES: &[&str] = &["ca-certificates", "curl", "iproute2", "iputils-ping", "procps"];

/// Not wanted in a sandbox; also left out of packages that are installed later.
const LEFT_OUT: &[&str] = &[
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "path-exclude=/usr/share/lintian/*",
];

/// On hosts that aren't Debian.
const FALLBACK_SUITE: &str = "bookworm";

/// What the builder and the package manager leave about the build itself.
const BUILD_FILES: &[&str] = &[
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/apt/auth.conf",
    "var/cache/debconf/config.dat-old",
    "var/cache/debconf/templates.dat-old",
    "var/lib/dpkg/available",
    "var/lib/dpkg/status-old",
    "var/lib/dpkg/diversions-old",
    "var/lib/dpkg/statoverride-old",
];

/// Builds the tree in the scratch directory.
pub(crate) fn build(extra: &[String], staging: &Staging, progress: OnProgress<'_>) -> Result<PathBuf, Error> {
    for package in extra {
        check_package(package)?;
    }
    // Looked for first, so that the message names what is really missing.
    let builder = MMDEBSTRAP.find()?;
    let suite = host_suite();
    let tree = staging.join("tree");
    let packages: Vec<&str> = PACKAGES.iter().copied().chain(extra.iter().map(String::as_str)).collect();
    tell(
        progress,
        "install packages",
        format!("debian {} with {}", suite.as_deref().unwrap_or(FALLBACK_SUITE), packages.join(", ")),
    );

    let mut command = TIMEOUT.command_in(staging)?;
    command.arg("--kill-after=10").arg(LIMIT_SECONDS).arg(builder);
    command.args(["--mode=root", "--variant=minbase", "--format=directory"]);
    command.arg(format!("--include={}", packages.join(",")));
    command.args(LEFT_OUT.iter().map(|option| format!("--dpkgopt={option}")));
    command.arg("--").arg(suite.as_deref().unwrap_or(FALLBACK_SUITE)).arg(&tree);
    if let Some(suite) = &suite {
        command.args(host_sources(Path::new("/etc/apt"), suite)?);
    }
    let mut each = |line: &str| tell(progress, "install packages", line.trim_start_matches("I: "));
    MMDEBSTRAP.run(&mut command, "install a Debian root file system", &mut each)?;
    for file in BUILD_FILES {
        clean::remove(&tree, file)?;
    }
    Ok(tree)
}

fn check_package(name: &str) -> Result<(), Error> {
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let all = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b));
    if first && all { Ok(()) } else { Err(Error::BadPackage(name.into())) }
}

/// The host's release if it is a Debian.
fn host_suite() -> Option<String> {
    let text = fs::read_to_string("/etc/os-release").ok()?;
    let value = |key: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            .map(|v| v.trim_matches('"').to_owned())
    };
    if value("ID")? == "debian" { value("VERSION_CODENAME") } else { None }
}

/// The host's package sources for `suite`, as one-line entries; empty means the builder's default. Other sources of
/// the host (its own tools) have nothing to do in a guest.
fn host_sources(apt: &Path, suite: &str) -> Result<Vec<String>, Error> {
    let mut files = vec![apt.join("sources.list")];
    let parts = apt.join("sources.list.d");
    if parts.is_dir() {
        files.extend(crate::fsutil::sorted_entries(&parts)?);
    }
    let mut lines = Vec::new();
    for file in files.iter().filter(|file| file.is_file()) {
        let text = fs::read_to_string(file).at("read", file)?;
        match file.extension().and_then(|e| e.to_str()) {
            Some("sources") => lines.extend(from_stanzas(&text, suite)),
            Some("list") => lines.extend(text.lines().filter_map(|line| from_line(line, suite))),
            _ => {}
        }
    }
    lines.dedup();
    // Updates alone don't make a system.
    let complete = lines.iter().any(|line| line.split(' ').any(|word| word == suite));
    Ok(if complete { lines } else { Vec::new() })
}

fn wanted(uri: &str, name: &str, suite: &str) -> bool {
    // Credentials would end up in the image; local paths mean nothing in it.
    let usable = (uri.starts_with("http://") || uri.starts_with("https://")) && !uri.contains('@');
    let ours = name == suite || name.strip_prefix(suite).is_some_and(|rest| rest.starts_with(['-', '/']));
    usable && ours
}

fn from_line(line: &str, suite: &str) -> Option<String> {
    let line = line.split('#').next()?.trim();
    let rest = line.strip_prefix("deb ")?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map(|(options, rest)| (Some(options.trim()), rest))?,
        None => (None, rest),
    };
    let mut words = rest.split_whitespace();
    let (uri, name) = (words.next()?, words.next()?);
    let signed =
        options.and_then(|options| options.split_whitespace().find_map(|o| o.strip_prefix("signed-by=")));
    wanted(uri, name, suite).then(|| entry(signed, uri, name, &words.collect::<Vec<_>>().join(" ")))
}

fn entry(signed: Option<&str>, uri: &str, name: &str, components: &str) -> String {
    let signed = signed.map(|key| format!("[signed-by={key}] ")).unwrap_or_default();
    format!("deb {signed}{uri} {name} {components}").trim_end().to_owned()
}

/// Entries of a deb822 file: paragraphs of `Key: value` lines.
fn from_stanzas(text: &str, suite: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for stanza in text.split("\n\n") {
        let value = |key: &str| {
            stanza
                .lines()
                .filter_map(|line| line.split_once(':'))
                .find(|(name, _)| name.eq_ignore_ascii_case(key))
                .map_or("", |(_, value)| value.trim())
        };
        let binary = value("Types").split_whitespace().any(|kind| kind == "deb");
        if !binary || value("Enabled").eq_ignore_ascii_case("no") {
            continue;
        }
        // A key written into the stanza itself can't stand in one line; the builder finds the keyring itself then.
        let signed = Some(value("Signed-By")).filter(|key| key.starts_with('/'));
        for uri in value("URIs").split_whitespace() {
            for name in value("Suites").split_whitespace().filter(|name| wanted(uri, name, suite)) {
                lines.push(entry(signed, uri, name, value("Components")));
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_sources_of_the_release_are_taken_and_no_credentials() {
        let dir = tempfile::tempdir().unwrap();
        let parts = dir.path().join("sources.list.d");
        fs::create_dir(&parts).unwrap();
        let old = "# deb http://a.invalid/debian bookworm main\n\
                   deb [arch=amd64 signed-by=/k.gpg] http://b.invalid/debian bookworm main contrib # text\n\
                   deb-src http://b.invalid/debian bookworm main\n\
                   deb http://user:secret@c.invalid/debian bookworm main\n\
                   deb cdrom:[Debian]/ bookworm main\n\
                   deb https://d.invalid/apt cloud-sdk-bookworm main\n";
        let new = "Types: deb deb-src\nURIs: http://e.invalid/debian\nSuites: bookworm bookworm-updates trixie\n\
                   Components: main\nSigned-By: /keys/debian.gpg\n\n\
                   Types: deb\nEnabled: no\nURIs: http://f.invalid/\nSuites: bookworm\n";
        fs::write(dir.path().join("sources.list"), old).unwrap();
        fs::write(parts.join("debian.sources"), new).unwrap();
        assert_eq!(
            host_sources(dir.path(), "bookworm").unwrap(),
            [
                "deb [signed-by=/k.gpg] http://b.invalid/debian bookworm main contrib",
                "deb [signed-by=/keys/debian.gpg] http://e.invalid/debian bookworm main",
                "deb [signed-by=/keys/debian.gpg] http://e.invalid/debian bookworm-updates main",
            ]
        );
        assert!(host_sources(dir.path(), "sid").unwrap().is_empty());
    }

    #[test]
    fn package_names_can_not_be_options() {
        check_package("g++").unwrap();
        for bad in ["", "-x", "a,b", "a b", "A", "?essential", "a/sid"] {
            assert!(matches!(check_package(bad), Err(Error::BadPackage(_))), "{bad}");
        }
    }
}
