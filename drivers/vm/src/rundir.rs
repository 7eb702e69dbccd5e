//! The folder of a run: what is needed to find its VM again and to give back what it borrowed. It is the first thing
//! that a start makes and the last that a stop removes.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use torpor_driver_common::files::{create, read_json, remove_tree, write_json};
use torpor_netpool::GuestNet;
use torpor_sandbox::{DriverError, Exit, Run, SandboxId};

use crate::process::Identity;

/// What is kept of a console when it is cut, bytes.
pub(crate) const CONSOLE_KEPT: u64 = 128 << 10;
/// A console file that grew beyond this is cut.
const CONSOLE_LIMIT: u64 = 2 * CONSOLE_KEPT;

/// The record of a start (`vm.json`): written without the process before anything is borrowed, and again with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) sandbox: SandboxId,
    pub(crate) run: Run,
    /// The machine's name, as in the spec.
    pub(crate) machine: String,
    /// How it runs, for people.
    pub(crate) label: String,
    /// /proc/sys/kernel/random/boot_id of the host: after a restart of the host nothing of this is left.
    pub(crate) host_boot: String,
    /// None: it was about to be started.
    pub(crate) process: Option<Identity>,
    /// None: the record was lost, and this one made from what the process says.
    pub(crate) net: Option<GuestNet>,
    pub(crate) cpus: String,
    pub(crate) memory_bytes: u64,
    /// Its agent has taken its configuration: the guest works, and has something to flush.
    #[serde(default)]
    pub(crate) configured: bool,
    /// The guest's boot, once it is configured.
    #[serde(default)]
    pub(crate) boot_id: Option<String>,
}

/// The sandboxes that have a folder of a run.
pub(crate) fn all(run_dir: &Path) -> io::Result<Vec<SandboxId>> {
    let names = fs::read_dir(run_dir)?.map(|entry| Ok(entry?.file_name()));
    let names: Vec<_> = names.collect::<io::Result<_>>()?;
    Ok(names.iter().filter_map(|name| name.to_str()?.parse().ok()).collect())
}

/// How a run ended by itself (`exit.json`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Ending {
    run: Run,
    exit: Exit,
}

/// `<run_dir>/<id>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RunDir {
    path: PathBuf,
}

impl RunDir {
    pub(crate) fn new(run_dir: &Path, id: &SandboxId) -> Self {
        Self { path: run_dir.join(id.as_str()) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn exists(&self) -> bool {
        self.path.exists()
    }

    /// Makes the folder, for nobody but its owner: whoever reaches its sockets commands the VM.
    pub(crate) fn make(&self) -> Result<(), DriverError> {
        DirBuilder::new()
            .mode(0o700)
            .create(&self.path)
            .map_err(|error| DriverError::backend(format!("make {}", self.path.display()), error))
    }

    pub(crate) fn remove(&self) -> Result<(), DriverError> {
        remove_tree(&self.path).map(drop)
    }

    /// The record of the start; none when there is none.
    pub(crate) fn record(&self) -> Result<Option<Record>, DriverError> {
        read_json(&self.path.join("vm.json"))
    }

    pub(crate) fn write_record(&self, record: &Record) -> Result<(), DriverError> {
        write_json(&self.path.join("vm.json"), record)
    }

    /// How the run ended, if somebody saw it.
    pub(crate) fn exit(&self, run: Run) -> Option<Exit> {
        let ending: Ending = read_json(&self.path.join("exit.json")).ok()??;
        (ending.run == run).then_some(ending.exit)
    }

    pub(crate) fn write_exit(&self, run: Run, exit: &Exit) -> Result<(), DriverError> {
        write_json(&self.path.join("exit.json"), &Ending { run, exit: exit.clone() })
    }

    /// Whether the guest of this run has said that its disk is flushed.
    pub(crate) fn flushed(&self, run: Run) -> bool {
        read_json(&self.path.join("flushed.json")).is_ok_and(|noted| noted == Some(run))
    }

    /// Notes it: the stop may end here and go on in a later life of the gateway.
    pub(crate) fn write_flushed(&self, run: Run) -> Result<(), DriverError> {
        write_json(&self.path.join("flushed.json"), &run)
    }

    /// The file that takes what the VM process itself says.
    pub(crate) fn log(&self) -> io::Result<File> {
        OpenOptions::new().create(true).append(true).mode(0o600).open(self.path.join("vmm.log"))
    }

    /// The end of what the VM process itself said.
    pub(crate) fn log_tail(&self) -> String {
        let bytes = tail(&self.path.join("vmm.log"), 2048).unwrap_or_default();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }

    fn console_path(&self) -> PathBuf {
        self.path.join("console.log")
    }

    /// Adds to the console; the beginning is forgotten when it grows too long.
    pub(crate) fn add_console(&self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let path = self.console_path();
        let mut file = OpenOptions::new().create(true).append(true).mode(0o600).open(&path)?;
        file.write_all(bytes)?;
        if file.metadata()?.len() > CONSOLE_LIMIT {
            let kept = tail(&path, CONSOLE_KEPT)?;
            let cut = path.with_extension("tmp");
            create(&cut)?.write_all(&kept)?;
            fs::rename(cut, path)?;
        }
        Ok(())
    }

    /// The end of the console, at most `bytes`.
    pub(crate) fn console(&self, bytes: usize) -> Vec<u8> {
        tail(&self.console_path(), bytes as u64).unwrap_or_default()
    }
}

fn tail(path: &Path, bytes: u64) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let skipped = file.metadata()?.len().saturating_sub(bytes);
    file.seek(io::SeekFrom::Start(skipped))?;
    let mut text = Vec::new();
    file.take(bytes).read_to_end(&mut text)?;
    Ok(text)
}

/// The host's present boot.
pub(crate) fn host_boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use torpor_netpool::{PoolConfig, Slot};

    use super::*;

    fn folder() -> (tempfile::TempDir, RunDir, SandboxId) {
        let root = tempfile::tempdir().unwrap();
        let id = SandboxId::generate();
        let dir = RunDir::new(root.path(), &id);
        dir.make().unwrap();
        (root, dir, id)
    }

    #[test]
    fn a_record_is_read_back_and_a_damaged_one_is_named() {
        let (_root, dir, id) = folder();
        assert_eq!(dir.record().unwrap(), None);
        let net = PoolConfig::default().guest_net(id.as_str(), Slot(3)).unwrap();
        let record = Record {
            sandbox: id,
            run: Run(4),
            machine: "qemu".into(),
            label: "qemu (tcg)".into(),
            host_boot: host_boot(),
            process: Some(Identity { pid: 5, start_time: 6 }),
            net: Some(net),
            cpus: "0-1".into(),
            memory_bytes: 1 << 28,
            configured: true,
            boot_id: Some(host_boot()),
        };
        dir.write_record(&record).unwrap();
        assert_eq!(dir.record().unwrap(), Some(record));
        fs::write(dir.path().join("vm.json"), "{").unwrap();
        assert!(dir.record().unwrap_err().to_string().contains("vm.json is damaged"));
    }

    #[test]
    fn the_ending_of_another_run_is_not_this_runs() {
        let (_root, dir, _) = folder();
        dir.write_exit(Run(2), &Exit::PowerOff).unwrap();
        assert_eq!((dir.exit(Run(2)), dir.exit(Run(3))), (Some(Exit::PowerOff), None));
        assert!(!dir.flushed(Run(2)));
        dir.write_flushed(Run(2)).unwrap();
        assert_eq!((dir.flushed(Run(2)), dir.flushed(Run(3))), (true, false));
    }

    #[test]
    fn a_console_stays_bounded_and_keeps_its_end() {
        let (_root, dir, _) = folder();
        for n in 0..64 {
            dir.add_console(&vec![b'a' + n % 26; 16 << 10]).unwrap();
            let file = fs::metadata(dir.console_path()).unwrap();
            assert!(file.len() <= CONSOLE_LIMIT);
            assert_eq!(file.permissions().mode() & 0o777, 0o600);
        }
        dir.add_console(b"the end").unwrap();
        assert!(dir.console(100).ends_with(b"the end"));
        assert_eq!(dir.console(3), b"end");
    }
}
