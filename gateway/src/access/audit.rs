//! Who changed what: one line of JSON for every call that changes something, or was refused to.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use serde::Serialize;

use super::{Caller, Identity};
use crate::error::ApiError;

/// When a file is this large it makes room for the next, bytes. One old one is kept.
const LARGEST: u64 = 16 << 20;

/// The log. Messages of calls are not in it: they may hold secrets.
#[derive(Debug)]
pub struct Audit {
    path: PathBuf,
    file: Mutex<Option<(File, u64)>>,
}

#[derive(Serialize)]
struct Line<'a> {
    time_ms: u64,
    subject: &'a str,
    by: &'a str,
    from: &'a str,
    method: &'a str,
    workspace: &'a str,
    about: &'a str,
    outcome: &'a str,
    took_ms: u64,
}

fn open(path: &Path) -> io::Result<(File, u64)> {
    let file = File::options().create(true).append(true).mode(0o600).open(path)?;
    let length = file.metadata()?.len();
    Ok((file, length))
}

impl Audit {
    /// The log of a state directory: audit.log, and audit.log.1 before it.
    pub fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join("audit.log"), file: Mutex::default() }
    }

    pub(super) fn called(&self, caller: &Caller, from: &str, about: &str, outcome: &str, took: Duration) {
        self.write(&Line {
            time_ms: now(),
            subject: &caller.identity.subject,
            by: caller.identity.by.as_str(),
            from,
            method: caller.method.path,
            workspace: &caller.workspace,
            about,
            outcome,
            took_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        });
    }

    pub(super) fn refused(&self, path: &str, from: &str, whose: &Identity, error: &ApiError) {
        self.write(&Line {
            time_ms: now(),
            subject: &whose.subject,
            by: whose.by.as_str(),
            from,
            method: path.trim_start_matches('/'),
            workspace: "",
            about: &error.message,
            outcome: &error.reason,
            took_ms: 0,
        });
    }

    /// A log that can't be written stops nobody: it is said in the gateway's own log.
    fn write(&self, line: &Line<'_>) {
        let Ok(mut text) = serde_json::to_vec(line) else { return };
        text.push(b'\n');
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let written = append(&mut file, &self.path, &text);
        if let Err(error) = written {
            *file = None;
            tracing::error!(%error, path = %self.path.display(), "the audit log can't be written");
        }
    }
}

fn append(held: &mut Option<(File, u64)>, path: &Path, text: &[u8]) -> io::Result<()> {
    if held.as_ref().is_some_and(|(_, length)| *length >= LARGEST) {
        *held = None;
        let mut old = path.as_os_str().to_owned();
        old.push(".1");
        fs::rename(path, old)?;
    }
    let (file, length) = match held {
        Some(open) => open,
        None => held.insert(open(path)?),
    };
    file.write_all(text)?;
    *length += text.len() as u64;
    Ok(())
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_bounded_and_private() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        let mut held = None;
        append(&mut held, &path, &vec![b'a'; LARGEST as usize]).unwrap();
        append(&mut held, &path, b"next\n").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"next\n");
        assert_eq!(fs::metadata(dir.path().join("audit.log.1")).unwrap().len(), LARGEST);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
