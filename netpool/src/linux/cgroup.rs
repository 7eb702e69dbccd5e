//! Cgroups (version 2) of VM processes. Where the host has none that can be written, VMs run without: that is a value here,
//! not an error.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use nix::unistd::Pid;

use super::error::NetError;
use crate::{CpuSet, PoolConfig};

/// Where version 2 is mounted: alone, or beside version 1 ("hybrid").
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// A cgroup of killed processes is empty within milliseconds; a process in an uninterruptible wait takes longer.
const REMOVE_TRIES: u32 = 100;
const REMOVE_PAUSE: Duration = Duration::from_millis(20);

/// A controller that this crate uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Controller {
    /// CPU sets.
    Cpuset,
    /// Memory limits.
    Memory,
    /// Process number limits.
    Pids,
}

impl Controller {
    const ALL: [Controller; 3] = [Controller::Cpuset, Controller::Memory, Controller::Pids];
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Controller::Cpuset => "cpuset",
            Controller::Memory => "memory",
            Controller::Pids => "pids",
        })
    }
}

/// Whether VMs can have cgroups here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CgroupProbe {
    /// They can, below this one.
    Ready(CgroupParent),
    /// They can't, for this reason.
    Unavailable(String),
}

/// The cgroup that those of all VMs of a pool lie in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupParent {
    path: PathBuf,
    controllers: Vec<Controller>,
}

/// Limits of a VM's processes. A limit whose controller the host doesn't offer is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CgroupLimits {
    /// The CPUs that the processes may run on.
    pub cpus: Option<CpuSet>,
    /// The most memory in bytes: guest memory and what the VM process needs besides.
    pub memory_max: Option<u64>,
    /// The most processes and threads.
    pub pids_max: Option<u64>,
}

/// The cgroup of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    path: PathBuf,
}

impl CgroupParent {
    /// Finds a writable cgroup version 2 mount and makes the pool's parent in it.
    pub fn probe(config: &PoolConfig) -> CgroupProbe {
        let mut reasons = Vec::new();
        for mount in MOUNTS.map(Path::new) {
            match statfs(mount) {
                Ok(found) if found.filesystem_type() == CGROUP2_SUPER_MAGIC => {}
                Ok(_) => {
                    reasons.push(format!("{} is not cgroup version 2", mount.display()));
                    continue;
                }
                Err(errno) => {
                    reasons.push(format!("{}: {errno}", mount.display()));
                    continue;
                }
            }
            match CgroupParent::at(mount, &config.table_name()) {
                Ok(parent) => return CgroupProbe::Ready(parent),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        CgroupProbe::Unavailable(reasons.join("; "))
    }

    /// Makes (or finds) the parent `name` in the cgroup at `root`, and hands down the controllers that `root` offers.
    ///
    /// # Errors
    /// The parent can't be made.
    pub fn at(root: &Path, name: &str) -> Result<CgroupParent, NetError> {
        let path = root.join(check_name(name)?);
        make(&path)?;
        let controllers: Vec<Controller> =
            Controller::ALL.into_iter().filter(|c| hand_down(root, *c) && hand_down(&path, *c)).collect();
        Ok(CgroupParent { path, controllers })
    }

    /// The parent's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The controllers whose limits work here.
    pub fn controllers(&self) -> &[Controller] {
        &self.controllers
    }

    /// Makes the cgroup `name`, or finds it, and sets its limits.
    ///
    /// # Errors
    /// The name is no good, or the kernel refused the cgroup or a limit.
    pub fn create(&self, name: &str, limits: &CgroupLimits) -> Result<Cgroup, NetError> {
        let path = self.path.join(check_name(name)?);
        make(&path)?;
        let values = [
            (Controller::Cpuset, "cpuset.cpus", limits.cpus.as_ref().map(CpuSet::to_string)),
            (Controller::Memory, "memory.max", limits.memory_max.map(|max| max.to_string())),
            (Controller::Pids, "pids.max", limits.pids_max.map(|max| max.to_string())),
        ];
        for (controller, file, value) in values {
            if let Some(value) = value.filter(|_| self.controllers.contains(&controller)) {
                write(&path.join(file), &value)?;
            }
        }
        Ok(Cgroup { path })
    }

    /// The cgroup `name`, or `None` when there is none.
    ///
    /// # Errors
    /// The name is no good.
    pub fn open(&self, name: &str) -> Result<Option<Cgroup>, NetError> {
        let path = self.path.join(check_name(name)?);
        Ok(path.is_dir().then_some(Cgroup { path }))
    }

    /// The names of the cgroups below the parent, sorted.
    ///
    /// # Errors
    /// The parent can't be read.
    pub fn list(&self) -> Result<Vec<String>, NetError> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(NetError::file("list", &self.path))? {
            let entry = entry.map_err(NetError::file("list", &self.path))?;
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                names.extend(entry.file_name().into_string().ok());
            }
        }
        names.sort();
        Ok(names)
    }

    /// Removes the parent, when the pool is taken down. Does nothing when it isn't there.
    ///
    /// # Errors
    /// There are cgroups of VMs in it.
    pub fn remove(&self) -> Result<(), NetError> {
        Cgroup { path: self.path.clone() }.remove()
    }
}

impl Cgroup {
    /// The cgroup's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves a process, with all its threads, into the cgroup.
    ///
    /// # Errors
    /// There is no such process, or the kernel refused.
    pub fn add(&self, pid: i32) -> Result<(), NetError> {
        write(&self.path.join("cgroup.procs"), &pid.to_string())
    }

    /// The processes in the cgroup; none when it is gone.
    ///
    /// # Errors
    /// The list can't be read.
    pub fn pids(&self) -> Result<Vec<i32>, NetError> {
        let path = self.path.join("cgroup.procs");
        match fs::read_to_string(&path) {
            Ok(text) => Ok(text.lines().filter_map(|line| line.parse().ok()).collect()),
            Err(error) if is_gone(&error) => Ok(Vec::new()),
            Err(error) => Err(NetError::file("read", path)(error)),
        }
    }

    /// Kills all processes in the cgroup, also those that are being forked. They are gone a little later: see
    /// [`Cgroup::remove`].
    ///
    /// # Errors
    /// The kernel refused.
    pub fn kill(&self) -> Result<(), NetError> {
        let path = self.path.join("cgroup.kill");
        match fs::OpenOptions::new().write(true).open(&path) {
            Ok(_) => write(&path, "1"),
            // A kernel before 5.14: one by one. Pid 0 stands for a process of another pid namespace.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                for pid in self.pids()?.into_iter().filter(|pid| *pid > 0) {
                    // A process that is gone is what is wanted.
                    let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                }
                Ok(())
            }
            Err(error) => Err(NetError::file("write", path)(error)),
        }
    }

    /// Removes the cgroup; tries again for about two seconds while it is busy. Does nothing when it is gone.
    ///
    /// # Errors
    /// [`NetError::CgroupBusy`] names the processes that are still in it.
    pub fn remove(&self) -> Result<(), NetError> {
        for _ in 0..REMOVE_TRIES {
            match fs::remove_dir(&self.path) {
                Ok(()) => return Ok(()),
                Err(error) if is_gone(&error) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => thread::sleep(REMOVE_PAUSE),
                Err(error) => return Err(NetError::file("remove", &self.path)(error)),
            }
        }
        Err(NetError::CgroupBusy { path: self.path.clone(), pids: self.pids()? })
    }
}

/// A cgroup that is removed while its files are open answers ENODEV.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ENODEV)
}

fn make(path: &Path) -> Result<(), NetError> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(NetError::file("create", path)(error))
        }
        _ => Ok(()),
    }
}

fn write(path: &Path, value: &str) -> Result<(), NetError> {
    fs::write(path, value).map_err(NetError::file("write", path))
}

/// Whether the children of the cgroup have the controller, after asking for it if need be.
fn hand_down(cgroup: &Path, controller: Controller) -> bool {
    let name = controller.to_string();
    let file = cgroup.join("cgroup.subtree_control");
    let has = || fs::read_to_string(&file).is_ok_and(|text| text.split_whitespace().any(|word| word == name));
    has() || (fs::write(&file, format!("+{name}")).is_ok() && has())
}

/// A name is one path component that can't be taken for a file of the kernel's or for a way out.
fn check_name(name: &str) -> Result<&str, NetError> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    let good = (1..=200).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(allowed);
    if good { Ok(name) } else { Err(NetError::CgroupName(name.to_string())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let parent = CgroupParent::at(directory.path(), "torpor").unwrap();
        for name in ["", ".", "..", "a/b", "../x", ".hidden", "a b"] {
            assert!(matches!(parent.open(name), Err(NetError::CgroupName(_))), "{name}");
        }
        assert_eq!(parent.open("sb-1").unwrap(), None);
        assert!(parent.controllers().is_empty(), "a directory that is no cgroup offers no controller");
    }
}
