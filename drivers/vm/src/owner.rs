//! Whose a run directory is: one driver's at a time, and one state directory's for as long as that exists. A driver ends the VMs
//! that it has no record of, so it must never look into the run directory of another.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions, TryLockError},
    io,
    os::unix::{
        ffi::{OsStrExt as _, OsStringExt as _},
        fs::OpenOptionsExt as _,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use torpor_driver_common::files::{OWNERS_FILE, write_whole};

use crate::{config::ConfigError, process, rundir};

/// How long a gateway that is about to end is waited for.
const ENDING: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(20);

/// The hold on a run directory, to its drop. VMs don't inherit it: std opens every file close-on-exec.
#[derive(Debug)]
pub(crate) struct Owner {
    lock: File,
}

impl Owner {
    /// Takes the run directory for this state directory; both exist. Blocks for up to a second.
    pub(crate) fn claim(run_dir: &Path, state_dir: &Path) -> Result<Self, ConfigError> {
        let path = run_dir.join("driver.lock");
        let failed = |source| ConfigError::Claim { path: path.clone(), source };
        // Only its owner may open it: whoever can open it can lock it.
        let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let lock = opened.map_err(failed)?;
        let until = Instant::now() + ENDING;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(AGAIN),
                Err(TryLockError::WouldBlock) => {
                    return Err(ConfigError::RunDirInUse { path: run_dir.to_owned() });
                }
                Err(TryLockError::Error(source)) => return Err(failed(source)),
            }
        }
        let owner = Self { lock };
        owner.sign(run_dir, state_dir)?;
        Ok(owner)
    }

    fn sign(&self, run_dir: &Path, state_dir: &Path) -> Result<(), ConfigError> {
        let path = run_dir.join("owner");
        let failed = |source| ConfigError::Claim { path: path.clone(), source };
        let state_dir = fs::canonicalize(state_dir).map_err(failed)?;
        let signed = match fs::read(&path) {
            Ok(bytes) => Some(PathBuf::from(OsString::from_vec(bytes))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        match signed {
            Some(owner) if owner == state_dir => return Ok(()),
            // What can't be told is taken to be there.
            Some(owner) if owner.try_exists().unwrap_or(true) || has_vms(run_dir).map_err(failed)? => {
                return Err(ConfigError::RunDirOwned { path: run_dir.to_owned(), owner, state_dir });
            }
            _ => {}
        }
        write_whole(&path, state_dir.as_os_str().as_bytes(), OWNERS_FILE).map_err(failed)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Not left to the descriptor's end: a process that another thread is just starting has a copy of it for a moment.
        let _ = self.lock.unlock();
    }
}

fn has_vms(run_dir: &Path) -> io::Result<bool> {
    for id in rundir::all(run_dir)? {
        if process::find(&id)?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use torpor_sandbox::{Run, SandboxId};

    use super::*;

    /// A run directory and two state directories.
    fn folders() -> (tempfile::TempDir, [PathBuf; 3]) {
        let root = tempfile::tempdir().unwrap();
        let paths = ["run", "one", "two"].map(|name| root.path().join(name));
        paths.iter().for_each(|path| fs::create_dir(path).unwrap());
        (root, paths)
    }

    #[test]
    fn a_run_directory_has_one_driver_at_a_time() {
        let (_root, [run, one, two]) = folders();
        let first = Owner::claim(&run, &one).unwrap();
        // Processes that the holder starts don't keep the lock.
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        for state in [&one, &two] {
            let error = Owner::claim(&run, state).unwrap_err();
            assert!(matches!(&error, ConfigError::RunDirInUse { path } if *path == run), "{error}");
            assert!(error.to_string().contains("--run-dir"), "{error}");
        }
        drop(first);
        Owner::claim(&run, &one).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_run_directory_is_one_state_directorys_until_that_and_its_vms_are_gone() {
        let (_root, [run, one, two]) = folders();
        drop(Owner::claim(&run, &one).unwrap());
        // Whatever way it is named.
        drop(Owner::claim(&run, &one.join("../one")).unwrap());
        let error = Owner::claim(&run, &two).unwrap_err().to_string();
        let named = [&run, &one, &two].map(|path| error.contains(path.to_str().unwrap()));
        assert_eq!(named, [true; 3], "{error}");

        fs::remove_dir(&one).unwrap();
        let id = SandboxId::generate();
        fs::create_dir(run.join(id.as_str())).unwrap();
        let mut vm = Command::new("sh")
            .args(["-c", "read end", "-name", &process::marker(&id, Run(1))])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        while process::find(&id).unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(matches!(Owner::claim(&run, &two), Err(ConfigError::RunDirOwned { .. })));
        vm.kill().unwrap();
        vm.wait().unwrap();
        drop(Owner::claim(&run, &two).unwrap());
        assert_eq!(fs::read(run.join("owner")).unwrap(), two.canonicalize().unwrap().as_os_str().as_bytes());
    }
}
