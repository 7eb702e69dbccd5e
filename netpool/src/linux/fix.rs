//! The smallest changes of the host that make sandboxes work, recorded so that they can be taken back.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::NetError;
use super::firewall::{first_line, is_missing, nft};

/// A change of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fix {
    /// Sets a value of the kernel's, until the host boots again.
    Sysctl {
        /// The file below `/proc/sys`.
        path: PathBuf,
        /// The value.
        value: String,
    },
    /// Accepts what guests send and get, first of all in a chain of somebody else's. What guests may do is decided before, in
    /// the pool's own table.
    Accept {
        /// The family of the table.
        family: String,
        /// The table.
        table: String,
        /// The chain.
        chain: String,
        /// What the names of the pool's TAPs begin with.
        tap_prefix: String,
    },
    /// Loads a module of the kernel's. Undoing leaves it: others may use it by then.
    Module {
        /// The module.
        name: String,
    },
}

impl fmt::Display for Fix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fix::Sysctl { path, value } => write!(f, "write {value} to {}", path.display()),
            Fix::Accept { family, table, chain, tap_prefix } => {
                write!(f, "accept the packets of {tap_prefix}* in chain {chain} of table {family} {table}")
            }
            Fix::Module { name } => write!(f, "load the module {name}"),
        }
    }
}

/// A change that was made, or was about to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// The change.
    pub fix: Fix,
    /// What was there before, for a change that replaces something.
    pub before: Option<String>,
}

/// A change that was to be taken back.
#[derive(Debug)]
pub struct Undone {
    /// The change.
    pub applied: Applied,
    /// Whether it is taken back; if not, it stays recorded.
    pub result: Result<(), NetError>,
}

/// Makes a change, and records it in the file first. Repeating it changes nothing.
///
/// # Errors
/// The host refused, or the record can't be read or written.
pub fn apply_fix(fix: &Fix, record: &Path) -> Result<(), NetError> {
    let mut all = applied(record)?;
    // The first value counts: a second writing must not take the fix for what was there before.
    if !all.iter().any(|done| done.fix == *fix) {
        let before = match fix {
            Fix::Sysctl { path, .. } => Some(read(path)?),
            Fix::Accept { .. } | Fix::Module { .. } => None,
        };
        all.push(Applied { fix: fix.clone(), before });
        write_record(record, &all)?;
    }
    match fix {
        Fix::Sysctl { path, value } => {
            if read(path)? != *value {
                fs::write(path, value).map_err(NetError::file("write", path))?;
            }
            Ok(())
        }
        Fix::Accept { family, table, chain, tap_prefix } => {
            let place = Chain { family, table, chain };
            if !place.rules_with(&comment(tap_prefix))?.is_empty() {
                return Ok(());
            }
            let rule = |direction: &str| {
                let mark = comment(tap_prefix);
                format!(
                    "insert rule {place} {direction} \"{tap_prefix}*\" counter accept comment \"{mark}\"\n"
                )
            };
            place.run(&[rule("oifname"), rule("iifname")].concat())
        }
        Fix::Module { name } => command("modprobe", &[name]),
    }
}

/// Takes back all recorded changes, the last one first, and removes the record when none is left. A value that somebody has changed
/// since stays; so does a chain that is gone.
///
/// # Errors
/// The record can't be read or written. What can't be taken back stays recorded, with the reason in its result.
pub fn undo_fixes(record: &Path) -> Result<Vec<Undone>, NetError> {
    let all = applied(record)?;
    let results: Vec<Undone> =
        all.into_iter().rev().map(|applied| Undone { result: undo(&applied), applied }).collect();
    let failed = results.iter().rev().filter(|undone| undone.result.is_err());
    let left: Vec<Applied> = failed.map(|undone| undone.applied.clone()).collect();
    if !left.is_empty() {
        write_record(record, &left)?;
    } else if !results.is_empty() {
        fs::remove_file(record).map_err(NetError::file("remove", record))?;
    }
    Ok(results)
}

fn undo(done: &Applied) -> Result<(), NetError> {
    match (&done.fix, &done.before) {
        (Fix::Sysctl { path, value }, Some(before)) => {
            if read(path)? == *value && before != value {
                fs::write(path, before).map_err(NetError::file("write", path))?;
            }
            Ok(())
        }
        (Fix::Accept { family, table, chain, tap_prefix }, _) => {
            let place = Chain { family, table, chain };
            let handles = place.rules_with(&comment(tap_prefix))?;
            let lines = handles.iter().map(|handle| format!("delete rule {place} handle {handle}\n"));
            if handles.is_empty() { Ok(()) } else { place.run(&lines.collect::<String>()) }
        }
        (Fix::Sysctl { .. } | Fix::Module { .. }, _) => Ok(()),
    }
}

/// The changes that are recorded; none when there is no file.
///
/// # Errors
/// The file can't be read.
pub fn applied(record: &Path) -> Result<Vec<Applied>, NetError> {
    let text = match fs::read_to_string(record) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        result => result.map_err(NetError::file("read", record))?,
    };
    serde_json::from_str(&text)
        .map_err(|error| NetError::FixRecord { path: record.to_path_buf(), reason: error.to_string() })
}

/// Replaces the record as a whole, so that a kill leaves the old one or the new one.
fn write_record(record: &Path, all: &[Applied]) -> Result<(), NetError> {
    let failed = |error: serde_json::Error| NetError::FixRecord {
        path: record.to_path_buf(),
        reason: error.to_string(),
    };
    let text = serde_json::to_string_pretty(all).map_err(failed)?;
    let draft = record.with_extension("new");
    let written = fs::File::create(&draft).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(&draft, record)).map_err(NetError::file("write", record))
}

/// What the rules of a pool are found by.
fn comment(tap_prefix: &str) -> String {
    format!("torpor {tap_prefix}")
}

/// A chain of somebody else's.
pub(super) struct Chain<'a> {
    pub(super) family: &'a str,
    pub(super) table: &'a str,
    pub(super) chain: &'a str,
}

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.family, self.table, self.chain)
    }
}

impl Chain<'_> {
    /// The rules, as libnftables-json(5) has them; none when the chain is gone.
    pub(super) fn rules(&self) -> Result<Vec<Value>, NetError> {
        let arguments = ["--json", "--handle", "list", "chain", self.family, self.table, self.chain];
        let output = nft(&arguments, "")?;
        if !output.status.success() {
            return if is_missing(&output) {
                Ok(Vec::new())
            } else {
                Err(failed(&arguments.join(" "), &first_line(&output)))
            };
        }
        let mut listed: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| failed(&arguments.join(" "), &error.to_string()))?;
        let objects = listed["nftables"].as_array_mut().map(std::mem::take).unwrap_or_default();
        Ok(objects.into_iter().filter_map(|mut object| object.get_mut("rule").map(Value::take)).collect())
    }

    /// The handles of the rules that carry a comment.
    fn rules_with(&self, comment: &str) -> Result<Vec<u64>, NetError> {
        let rules = self.rules()?;
        let ours = rules.iter().filter(|rule| rule["comment"].as_str() == Some(comment));
        Ok(ours.filter_map(|rule| rule["handle"].as_u64()).collect())
    }

    /// Whether the pool's packets are accepted here already.
    pub(super) fn accepts(&self, tap_prefix: &str) -> Result<bool, NetError> {
        Ok(!self.rules_with(&comment(tap_prefix))?.is_empty())
    }

    fn run(&self, script: &str) -> Result<(), NetError> {
        let output = nft(&["--file", "-"], script)?;
        if output.status.success() { Ok(()) } else { Err(failed(script.trim(), &first_line(&output))) }
    }
}

pub(super) fn failed(command: &str, reason: &str) -> NetError {
    NetError::Command { command: command.to_string(), reason: reason.to_string() }
}

fn command(program: &str, arguments: &[&str]) -> Result<(), NetError> {
    let shown = [&[program], arguments].concat().join(" ");
    match Command::new(program).args(arguments).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(failed(&shown, &first_line(&output))),
        Err(error) => Err(failed(&shown, &error.to_string())),
    }
}

fn read(path: &Path) -> Result<String, NetError> {
    let text = fs::read_to_string(path).map_err(NetError::file("read", path))?;
    Ok(text.trim().to_string())
}
