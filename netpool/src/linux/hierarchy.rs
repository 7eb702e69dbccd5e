//! The trees of cgroups that a host has: one of version 2, or one for each controller of version 1, or both ("hybrid").

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::sys::statfs::{CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, FsType, statfs};

use super::cgroup::{CgroupLimits, Controller};
use super::error::NetError;
use crate::CpuSet;

/// Where version 2 is mounted: alone, or beside version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Where a controller of version 1 is mounted, or a link to where it is mounted with others.
const MOUNTS_V1: &str = "/sys/fs/cgroup";
/// `cpu.shares` of version 1 for `cpu.weight` of version 2: both have a default, 1024 and 100.
const SHARES_PER_WEIGHT: f64 = 10.24;

/// The pool's parent in one tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hierarchy {
    pub(super) parent: PathBuf,
    pub(super) controllers: Vec<Controller>,
    version_1: bool,
}

impl Hierarchy {
    /// All trees that can be written, that of version 2 first; or why there is none.
    pub(super) fn all(name: &str) -> Result<Vec<Hierarchy>, String> {
        let (mut found, mut reasons) = (Vec::new(), Vec::new());
        for mount in MOUNTS.map(Path::new) {
            match mounted(mount, CGROUP2_SUPER_MAGIC) {
                Err(reason) => reasons.push(format!("{} is not cgroup version 2: {reason}", mount.display())),
                Ok(()) if found.is_empty() => match Hierarchy::version_2(mount, name) {
                    Ok(hierarchy) => found.push(hierarchy),
                    Err(error) => reasons.push(error.to_string()),
                },
                Ok(()) => {}
            }
        }
        for controller in Controller::ALL {
            let offered =
                found.iter().any(|hierarchy: &Hierarchy| hierarchy.controllers.contains(&controller));
            let mount = Path::new(MOUNTS_V1).join(controller.to_string());
            if offered || mounted(&mount, CGROUP_SUPER_MAGIC).is_err() {
                continue;
            }
            match Hierarchy::version_1(&mount, name, controller) {
                Ok(hierarchy) => found.push(hierarchy),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        if found.is_empty() { Err(reasons.join("; ")) } else { Ok(found) }
    }

    /// Makes (or finds) the parent in the tree at `root`, and hands down the controllers that `root` offers.
    pub(super) fn version_2(root: &Path, name: &str) -> Result<Hierarchy, NetError> {
        let parent = root.join(name);
        make(&parent)?;
        let handed = |c: &Controller| hand_down(root, *c) && hand_down(&parent, *c);
        let controllers = Controller::ALL.into_iter().filter(handed).collect();
        Ok(Hierarchy { parent, controllers, version_1: false })
    }

    /// Makes (or finds) the parent in the tree of one controller.
    pub(super) fn version_1(root: &Path, name: &str, controller: Controller) -> Result<Hierarchy, NetError> {
        let parent = root.join(name);
        make(&parent)?;
        if controller == Controller::Cpuset {
            inherit_cpuset(root, &parent)?;
        }
        Ok(Hierarchy { parent, controllers: vec![controller], version_1: true })
    }

    /// Makes the cgroup `name` here, or finds it, and sets the limits of this tree's controllers.
    pub(super) fn create(&self, name: &str, limits: &CgroupLimits) -> Result<PathBuf, NetError> {
        let path = self.parent.join(name);
        make(&path)?;
        if self.version_1 && self.controllers.contains(&Controller::Cpuset) {
            inherit_cpuset(&self.parent, &path)?;
        }
        for (controller, file, value) in if self.version_1 { values_1(limits) } else { values_2(limits) } {
            if let Some(value) = value.filter(|_| self.controllers.contains(&controller)) {
                write(&path.join(file), &value)?;
            }
        }
        Ok(path)
    }
}

type Value = (Controller, &'static str, Option<String>);

fn values_2(limits: &CgroupLimits) -> Vec<Value> {
    let max = limits.cpu_max.map(|max| format!("{} {}", max.quota_us, max.period_us));
    vec![
        (Controller::Cpuset, "cpuset.cpus", limits.cpus.as_ref().map(CpuSet::to_string)),
        (Controller::Cpuset, "cpuset.mems", limits.memory_nodes.as_ref().map(CpuSet::to_string)),
        (Controller::Memory, "memory.max", limits.memory_max.map(|max| max.to_string())),
        (Controller::Pids, "pids.max", limits.pids_max.map(|max| max.to_string())),
        (Controller::Cpu, "cpu.max", max),
        (Controller::Cpu, "cpu.weight", limits.cpu_weight.map(|weight| weight.clamp(1, 10_000).to_string())),
    ]
}

fn values_1(limits: &CgroupLimits) -> Vec<Value> {
    let shares = |weight: u32| (f64::from(weight.clamp(1, 10_000)) * SHARES_PER_WEIGHT).round().max(2.0);
    vec![
        (Controller::Cpuset, "cpuset.cpus", limits.cpus.as_ref().map(CpuSet::to_string)),
        (Controller::Cpuset, "cpuset.mems", limits.memory_nodes.as_ref().map(CpuSet::to_string)),
        (Controller::Memory, "memory.limit_in_bytes", limits.memory_max.map(|max| max.to_string())),
        (Controller::Pids, "pids.max", limits.pids_max.map(|max| max.to_string())),
        (Controller::Cpu, "cpu.cfs_period_us", limits.cpu_max.map(|max| max.period_us.to_string())),
        (Controller::Cpu, "cpu.cfs_quota_us", limits.cpu_max.map(|max| max.quota_us.to_string())),
        (Controller::Cpu, "cpu.shares", limits.cpu_weight.map(|weight| shares(weight).to_string())),
    ]
}

/// In version 1 a new cpuset is empty, and no process can be put into it.
fn inherit_cpuset(from: &Path, to: &Path) -> Result<(), NetError> {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let (from, to) = (from.join(file), to.join(file));
        if read(&to)?.trim().is_empty() {
            write(&to, read(&from)?.trim())?;
        }
    }
    Ok(())
}

fn mounted(path: &Path, kind: FsType) -> Result<(), String> {
    match statfs(path) {
        Ok(found) if found.filesystem_type() == kind => Ok(()),
        Ok(_) => Err("another file system".to_string()),
        Err(errno) => Err(errno.to_string()),
    }
}

pub(super) fn make(path: &Path) -> Result<(), NetError> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(NetError::file("create", path)(error))
        }
        _ => Ok(()),
    }
}

fn read(path: &Path) -> Result<String, NetError> {
    fs::read_to_string(path).map_err(NetError::file("read", path))
}

pub(super) fn write(path: &Path, value: &str) -> Result<(), NetError> {
    fs::write(path, value).map_err(NetError::file("write", path))
}

/// Whether the children of the cgroup have the controller, after asking for it if need be.
fn hand_down(cgroup: &Path, controller: Controller) -> bool {
    let name = controller.to_string();
    let file = cgroup.join("cgroup.subtree_control");
    let has = || fs::read_to_string(&file).is_ok_and(|text| text.split_whitespace().any(|word| word == name));
    has() || (fs::write(&file, format!("+{name}")).is_ok() && has())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linux::CpuMax;

    #[test]
    fn both_versions_are_told_the_same_limits() {
        let limits = CgroupLimits {
            cpus: Some("0-1".parse().unwrap()),
            memory_nodes: Some("0".parse().unwrap()),
            memory_max: Some(64),
            pids_max: Some(7),
            cpu_max: Some(CpuMax::percent(150)),
            cpu_weight: Some(100),
        };
        let shown = |values: Vec<Value>| {
            let set = values.into_iter().filter_map(|(_, file, value)| value.map(|v| format!("{file}={v}")));
            set.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            shown(values_2(&limits)),
            "cpuset.cpus=0-1 cpuset.mems=0 memory.max=64 pids.max=7 cpu.max=150000 100000 cpu.weight=100"
        );
        assert_eq!(
            shown(values_1(&limits)),
            "cpuset.cpus=0-1 cpuset.mems=0 memory.limit_in_bytes=64 pids.max=7 cpu.cfs_period_us=100000 \
             cpu.cfs_quota_us=150000 cpu.shares=1024"
        );
        assert_eq!(shown(values_2(&CgroupLimits::default())), "");
    }
}
