//! The folder of a run: what a later gateway must know of it, and the socket that its agent dials.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use torpor_driver_common::files::{failed, make_folder, read_json, remove_tree, write_json};
use torpor_sandbox::{DriverError, Run};

use crate::types::Inspect;

/// What is noted of a run, first before the engine is asked to start it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) run: Run,
    /// The engine's time stamp of the start before this one: as long as it shows that, this run has not begun.
    pub(crate) before: String,
    /// Its time stamp of this start, once that was seen. Another one is a start from outside.
    pub(crate) started_at: Option<String>,
    /// Its agent was configured: there is something to flush.
    pub(crate) configured: bool,
    pub(crate) boot_id: Option<String>,
    /// The host's boot that it runs in.
    pub(crate) host_boot: String,
}

impl Record {
    pub(crate) fn new(run: Run, before: &Inspect) -> Self {
        Self {
            run,
            before: before.state.started_at.clone(),
            started_at: None,
            configured: false,
            boot_id: None,
            host_boot: host_boot(),
        }
    }

    /// Somebody else has started the container since.
    pub(crate) fn is_replaced(&self, found: &Inspect) -> bool {
        self.started_at.as_ref().is_some_and(|ours| *ours != found.state.started_at)
    }

    /// Asked for, and not begun.
    pub(crate) fn is_pending(&self, found: &Inspect) -> bool {
        self.started_at.is_none() && self.before == found.state.started_at && self.host_boot == host_boot()
    }
}

/// One folder below the run directory.
#[derive(Clone, Debug)]
pub(crate) struct RunDir(PathBuf);

impl RunDir {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn exists(&self) -> bool {
        self.0.exists()
    }

    /// All that the container sees of it.
    pub(crate) fn agent_dir(&self) -> PathBuf {
        self.0.join("agent")
    }

    pub(crate) fn make(&self) -> Result<(), DriverError> {
        let folder = self.agent_dir();
        make_folder(&folder).map_err(|error| failed("make", &folder, error))
    }

    pub(crate) fn record(&self) -> Result<Option<Record>, DriverError> {
        read_json(&self.0.join("run.json"))
    }

    pub(crate) fn write(&self, record: &Record) -> Result<(), DriverError> {
        write_json(&self.0.join("run.json"), record)
    }

    /// The agent has said that this run's files are written out.
    pub(crate) fn write_flushed(&self, run: Run) -> Result<(), DriverError> {
        let path = self.0.join("flushed");
        fs::write(&path, run.to_string()).map_err(|error| failed("write", &path, error))
    }

    pub(crate) fn flushed(&self, run: Run) -> bool {
        fs::read_to_string(self.0.join("flushed")).is_ok_and(|text| text == run.to_string())
    }

    /// Gone when nothing runs. The record goes first: half a folder is no run.
    pub(crate) fn remove(&self) -> Result<bool, DriverError> {
        match fs::remove_file(self.0.join("run.json")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("remove", &self.0.join("run.json"), error));
            }
            _ => {}
        }
        remove_tree(&self.0)
    }
}

/// Names the host's boot; empty when it can't be told.
pub(crate) fn host_boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(started_at: &str) -> Inspect {
        let mut found = Inspect::default();
        found.state.started_at = started_at.to_owned();
        found
    }

    #[test]
    fn a_start_from_outside_and_one_that_never_came_about_are_told_from_our_own() {
        let mut record = Record::new(Run(4), &found("monday"));
        assert!(record.is_pending(&found("monday")) && !record.is_pending(&found("tuesday")));
        assert!(!record.is_replaced(&found("tuesday")));
        record.started_at = Some("tuesday".to_owned());
        assert!(!record.is_replaced(&found("tuesday")) && record.is_replaced(&found("wednesday")));
        assert!(!record.is_pending(&found("monday")));
    }

    #[test]
    fn flushed_is_said_of_one_run_only_and_goes_with_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let dir = RunDir::new(folder.path().join("x"));
        dir.make().unwrap();
        let record = Record::new(Run(2), &found(""));
        dir.write(&record).unwrap();
        assert_eq!(dir.record().unwrap(), Some(record));
        dir.write_flushed(Run(2)).unwrap();
        assert!(dir.flushed(Run(2)) && !dir.flushed(Run(3)));
        assert!(dir.remove().unwrap() && !dir.remove().unwrap() && !dir.exists());
        assert_eq!(dir.record().unwrap(), None);
    }
}
