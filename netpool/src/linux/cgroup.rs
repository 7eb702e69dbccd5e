//! Cgroups of VM processes: version 2, version 1 where a host has only that, or both. Where the host has none that can be
//! written, VMs run without: that is a value here, not an error.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::error::NetError;
use super::hierarchy::{Hierarchy, write};
use crate::{CpuSet, PoolConfig};

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
    /// CPU time.
    Cpu,
}

impl Controller {
    pub(super) const ALL: [Controller; 4] =
        [Controller::Cpuset, Controller::Memory, Controller::Pids, Controller::Cpu];
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Controller::Cpuset => "cpuset",
            Controller::Memory => "memory",
            Controller::Pids => "pids",
            Controller::Cpu => "cpu",
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

/// The cgroup that those of all VMs of a pool lie in: one in each tree that the host has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupParent {
    first: Hierarchy,
    others: Vec<Hierarchy>,
}

/// CPU time: so many microseconds in each period of so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuMax {
    /// Time that the processes may use together, microseconds.
    pub quota_us: u64,
    /// The period, microseconds.
    pub period_us: u64,
}

impl CpuMax {
    /// So many percent of one CPU: 250 is two and a half. The kernel takes no less than 1.
    pub fn percent(percent: u32) -> CpuMax {
        const PERIOD: u64 = 100_000;
        CpuMax { quota_us: PERIOD * u64::from(percent.max(1)) / 100, period_us: PERIOD }
    }
}

/// Limits of a VM's processes. A limit whose controller the host doesn't offer is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CgroupLimits {
    /// The CPUs that the processes may run on.
    pub cpus: Option<CpuSet>,
    /// The NUMA nodes that their memory may come from.
    pub memory_nodes: Option<CpuSet>,
    /// The most memory in bytes: guest memory and what the VM process needs besides.
    pub memory_max: Option<u64>,
    /// The most processes and threads.
    pub pids_max: Option<u64>,
    /// The most CPU time.
    pub cpu_max: Option<CpuMax>,
    /// The share of CPU time when there is not enough for all: 1 to 10,000, where 100 is the kernel's default.
    pub cpu_weight: Option<u32>,
}

/// The cgroup of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    path: PathBuf,
    others: Vec<PathBuf>,
}

impl CgroupParent {
    /// Makes the pool's parent in every tree of cgroups that can be written. That of version 2 comes first, also where it has no
    /// controllers ("hybrid"): it kills all processes of a cgroup at once.
    pub fn probe(config: &PoolConfig) -> CgroupProbe {
        match Hierarchy::all(&config.table_name()).map(|all| CgroupParent::of(all.into_iter())) {
            Ok(Some(parent)) => CgroupProbe::Ready(parent),
            Ok(None) => CgroupProbe::Unavailable("no cgroups are mounted".to_string()),
            Err(reasons) => CgroupProbe::Unavailable(reasons),
        }
    }

    /// Makes (or finds) the parent `name` in the cgroup of version 2 at `root`, and hands down the controllers that `root` offers.
    ///
    /// # Errors
    /// The parent can't be made.
    pub fn at(root: &Path, name: &str) -> Result<CgroupParent, NetError> {
        let first = Hierarchy::version_2(root, check_name(name)?)?;
        Ok(CgroupParent { first, others: Vec::new() })
    }

    /// Makes (or finds) the parent `name` in trees of version 1: for each, where it is mounted. `None` when there are none.
    ///
    /// # Errors
    /// A parent can't be made.
    pub fn at_version_1(trees: &[(Controller, &Path)], name: &str) -> Result<Option<CgroupParent>, NetError> {
        let name = check_name(name)?;
        let made = trees.iter().map(|(controller, root)| Hierarchy::version_1(root, name, *controller));
        Ok(CgroupParent::of(made.collect::<Result<Vec<_>, _>>()?.into_iter()))
    }

    fn of(mut all: impl Iterator<Item = Hierarchy>) -> Option<CgroupParent> {
        let first = all.next()?;
        Some(CgroupParent { first, others: all.collect() })
    }

    fn all(&self) -> impl Iterator<Item = &Hierarchy> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// The parent's directory in the first tree.
    pub fn path(&self) -> &Path {
        &self.first.parent
    }

    /// The controllers whose limits work here.
    pub fn controllers(&self) -> Vec<Controller> {
        let all: BTreeSet<Controller> =
            self.all().flat_map(|tree| tree.controllers.iter().copied()).collect();
        all.into_iter().collect()
    }

    /// Makes the moves of processes between cgroups that follow within some milliseconds quick. Blocks for two or three ticks of
    /// the kernel's clock, so it is for a thread of its own.
    ///
    /// The first writer of `cgroup.procs` waits for an RCU grace period, and so does KVM when it makes a VM, for it moves
    /// a thread of its own into the cgroups of the VM's process; those that follow soon don't
    /// (kernel/cgroup/cgroup.c, `cgroup_procs_write_start`; kernel/rcu/sync.c). The process that is written here can't exist:
    /// the kernel looks for it when it has waited, and nothing is moved. cgroup2's mount option `favordynmods` would do the
    /// same for good, but for the whole host.
    pub fn warm_up(&self) {
        // Beyond PID_MAX_LIMIT, 2^22. It fails by design.
        let _ = fs::write(self.first.parent.join("cgroup.procs"), i32::MAX.to_string());
    }

    /// Makes the cgroup `name`, or finds it, and sets its limits.
    ///
    /// # Errors
    /// The name is no good, or the kernel refused the cgroup or a limit.
    pub fn create(&self, name: &str, limits: &CgroupLimits) -> Result<Cgroup, NetError> {
        let name = check_name(name)?;
        let path = self.first.create(name, limits)?;
        let others = self.others.iter().map(|tree| tree.create(name, limits)).collect::<Result<_, _>>()?;
        Ok(Cgroup { path, others })
    }

    /// The cgroup `name`, or `None` when there is none in any tree.
    ///
    /// # Errors
    /// The name is no good.
    pub fn open(&self, name: &str) -> Result<Option<Cgroup>, NetError> {
        let name = check_name(name)?;
        let cgroup = Cgroup {
            path: self.first.parent.join(name),
            others: self.others.iter().map(|tree| tree.parent.join(name)).collect(),
        };
        let there = cgroup.all().any(|path| path.is_dir());
        Ok(there.then_some(cgroup))
    }

    /// The names of the cgroups below the parent, sorted.
    ///
    /// # Errors
    /// The parent can't be read.
    pub fn list(&self) -> Result<Vec<String>, NetError> {
        let mut names = BTreeSet::new();
        for tree in self.all() {
            for entry in fs::read_dir(&tree.parent).map_err(NetError::file("list", &tree.parent))? {
                let entry = entry.map_err(NetError::file("list", &tree.parent))?;
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    names.extend(entry.file_name().into_string().ok());
                }
            }
        }
        Ok(names.into_iter().collect())
    }

    /// Removes the parent, when the pool is taken down. Does nothing when it isn't there.
    ///
    /// # Errors
    /// There are cgroups of VMs in it.
    pub fn remove(&self) -> Result<(), NetError> {
        let others = self.others.iter().map(|tree| tree.parent.clone()).collect();
        Cgroup { path: self.first.parent.clone(), others }.remove()
    }
}

impl Cgroup {
    /// The cgroup's directory in the first tree.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn all(&self) -> impl Iterator<Item = &PathBuf> {
        std::iter::once(&self.path).chain(&self.others)
    }

    /// Moves a process, with all its threads, into the cgroup.
    ///
    /// # Errors
    /// There is no such process, or the kernel refused.
    pub fn add(&self, pid: i32) -> Result<(), NetError> {
        self.all().try_for_each(|path| write(&path.join("cgroup.procs"), &pid.to_string()))
    }

    /// The processes in the cgroup; none when it is gone.
    ///
    /// # Errors
    /// The list can't be read.
    pub fn pids(&self) -> Result<Vec<i32>, NetError> {
        // A process whose adding was cut short is in some trees only.
        let mut pids = BTreeSet::new();
        for path in self.all().map(|path| path.join("cgroup.procs")) {
            match fs::read_to_string(&path) {
                Ok(text) => pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok())),
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(NetError::file("read", path)(error)),
            }
        }
        Ok(pids.into_iter().collect())
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
            // Version 1, or a kernel before 5.14: one by one. Pid 0 stands for a process of another pid namespace.
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
        self.all().try_for_each(|path| self.remove_at(path))
    }

    fn remove_at(&self, path: &Path) -> Result<(), NetError> {
        for _ in 0..REMOVE_TRIES {
            match fs::remove_dir(path) {
                Ok(()) => return Ok(()),
                Err(error) if is_gone(&error) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => thread::sleep(REMOVE_PAUSE),
                Err(error) => return Err(NetError::file("remove", path)(error)),
            }
        }
        Err(NetError::CgroupBusy { path: path.to_path_buf(), pids: self.pids()? })
    }
}

/// A cgroup that is removed while its files are open answers ENODEV.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ENODEV)
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
