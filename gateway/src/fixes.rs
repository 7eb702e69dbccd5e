//! What keeps sandboxes from the network on this host, and the changes that help: recorded, so that they can be taken
//! back.

use std::path::{Path, PathBuf};

use serde::Serialize;
use torpor_netpool::{
    PoolConfig,
    linux::{self, Finding},
};

use crate::{
    doctor::{Check, Level},
    error::with_causes,
};

/// Where changes are recorded, below the state directory.
const RECORD: &str = "host-changes.json";

/// A change of the host, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// The change, in words.
    pub change: String,
    /// It was made, or taken back.
    pub done: bool,
    /// Why not.
    pub problem: Option<String>,
}

/// The record of changes could not be used.
#[derive(Debug, thiserror::Error)]
pub enum FixError {
    /// It can't be read or written.
    #[error("the record of changes of the host '{}': {problem}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// Its folder can't be made.
    #[error("make '{}' for the record of changes of the host: {source}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

fn record(state_dir: &Path) -> PathBuf {
    state_dir.join(RECORD)
}

/// What is said where nothing is in the way.
const LOOKED_AT: [(linux::Check, &str, &str); 7] = [
    (linux::Check::Tun, "tun", "/dev/net/tun can be opened"),
    (linux::Check::Forwarding, "ip-forward", "on"),
    (linux::Check::Uplink, "uplink", "the host has a way out"),
    (linux::Check::ForeignForward, "firewall", "no other firewall drops forwarded packets by default"),
    (
        linux::Check::ForeignInput,
        "firewall-dns",
        "no other firewall drops what sandboxes ask the forwarder of names",
    ),
    (linux::Check::ReturnPath, "return-path", "replies come back to sandboxes"),
    (linux::Check::Connections, "connections", "the kernel's table of connections has room"),
];

/// One check for each thing that was looked at, and one for each that is in the way.
pub(crate) fn checks(pool: &PoolConfig) -> Vec<Check> {
    let found = linux::diagnose(pool);
    let mut checks = Vec::new();
    for (about, name, well) in LOOKED_AT {
        let mut ours = found.iter().filter(|finding| finding.check == about).peekable();
        if ours.peek().is_none() {
            checks.push(Check::ok(name, well));
        }
        checks.extend(ours.map(|finding| check(name, finding)));
    }
    checks
}

fn check(name: &'static str, finding: &Finding) -> Check {
    let fix = finding.fix.as_ref().map(ToString::to_string);
    let advice = match (&fix, finding.check) {
        (Some(fix), _) => format!("torpor doctor --fix: {fix}"),
        (None, linux::Check::Tun) => "run as root; in a container, pass the device through".to_owned(),
        (None, linux::Check::Uplink) => "see to the host's routes, or to `uplink` under [network]".to_owned(),
        (None, _) => "as it says: this is not changed by --fix".to_owned(),
    };
    let level = if finding.check == linux::Check::Tun { Level::Fail } else { Level::Warn };
    Check { level, fix, advice, ..Check::ok(name, &finding.message) }
}

/// Makes the smallest changes that help, recording each before it is made. A second call finds nothing to do.
///
/// # Errors
/// The record can't be written: nothing was changed. A change that fails is told in its place.
pub fn fix(state_dir: &Path, pool: &PoolConfig) -> Result<Vec<Changed>, FixError> {
    let path = record(state_dir);
    // A record that can't be read must not be written over.
    recorded(state_dir)?;
    std::fs::create_dir_all(state_dir)
        .map_err(|source| FixError::Folder { path: state_dir.to_owned(), source })?;
    let fixes = linux::diagnose(pool).into_iter().filter_map(|finding| finding.fix);
    let changed = fixes.map(|fix| {
        let problem = linux::apply_fix(&fix, &path).err().map(|error| with_causes(&error));
        Changed { change: fix.to_string(), done: problem.is_none(), problem }
    });
    Ok(changed.collect())
}

/// Takes back all changes that are recorded.
///
/// # Errors
/// The record can't be read or written. What can't be taken back is told in its place and stays recorded.
pub fn undo(state_dir: &Path) -> Result<Vec<Changed>, FixError> {
    let path = record(state_dir);
    let undone = linux::undo_fixes(&path)
        .map_err(|error| FixError::Record { path: path.clone(), problem: with_causes(&error) })?;
    let changed = undone.into_iter().map(|undone| {
        let problem = undone.result.err().map(|error| with_causes(&error));
        Changed { change: undone.applied.fix.to_string(), done: problem.is_none(), problem }
    });
    Ok(changed.collect())
}

/// The changes that are recorded, in words.
///
/// # Errors
/// The record can't be read.
pub fn recorded(state_dir: &Path) -> Result<Vec<String>, FixError> {
    let path = record(state_dir);
    let applied = linux::applied(&path)
        .map_err(|error| FixError::Record { path: path.clone(), problem: with_causes(&error) })?;
    Ok(applied.iter().map(|applied| applied.fix.to_string()).collect())
}
