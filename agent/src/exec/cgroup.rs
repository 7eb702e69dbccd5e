//! The processes of one command, held together by a cgroup; by ancestry where there is no cgroup2.

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use nix::{sys::signal::Signal, unistd::Pid};
use tokio::time::{Instant, sleep};

use crate::{proc, reaper};

/// Between two looks at a tree that should end.
const LOOK: Duration = Duration::from_millis(20);

/// Makes one cgroup for every command.
pub struct Cgroups {
    base: Option<PathBuf>,
    next: AtomicU64,
    /// Of commands that ended and left processes.
    left: Mutex<Vec<PathBuf>>,
}

impl Cgroups {
    /// Makes the folder `name` on the cgroup2 mount. Without one, or without the right, trees are held by ancestry.
    pub fn new(name: &str) -> Self {
        let base = mount_point().map(|mount| mount.join(name)).filter(|base| make(base).is_ok());
        Self { base, next: AtomicU64::new(1), left: Mutex::new(Vec::new()) }
    }

    /// A fresh, empty cgroup, and its file of members for the child to write itself into.
    pub fn create(&self) -> Option<(PathBuf, File)> {
        self.sweep();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.base.as_ref()?.join(format!("exec-{number}"));
        make(&path).ok()?;
        let procs = OpenOptions::new().write(true).open(path.join("cgroup.procs")).ok()?;
        Some((path, procs))
    }

    /// Removes a cgroup now, or later when processes still live in it.
    pub fn retire(&self, path: PathBuf) {
        if fs::remove_dir(&path).is_err() {
            self.left.lock().unwrap_or_else(PoisonError::into_inner).push(path);
        }
    }

    fn sweep(&self) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain(|path| fs::remove_dir(path).is_err());
    }

    /// Removes what is empty, the base too.
    pub fn close(&self) {
        self.sweep();
        if let Some(base) = &self.base {
            // Refused while processes live in it: then it stays, as it must.
            let _ = fs::remove_dir(base);
        }
    }
}

fn make(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

fn mount_point() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(path))
    })
}

/// All processes that come from one command.
pub struct Tree {
    leader: Pid,
    cgroup: Option<PathBuf>,
}

impl Tree {
    pub fn new(leader: Pid, cgroup: Option<PathBuf>) -> Self {
        Self { leader, cgroup }
    }

    /// TERM to all, then KILL to what lives after `grace`. Returns when none is left.
    pub async fn end(&self, grace: Duration) {
        let mut known = self.living(&[]);
        reaper::signal_all(&known, Signal::SIGTERM);
        let limit = Instant::now() + grace;
        while Instant::now() < limit {
            known = self.living(&known);
            if known.is_empty() {
                return;
            }
            sleep(LOOK).await;
        }
        // More than one round: where there is no cgroup, a process may fork while it is looked for.
        for _ in 0..50 {
            known = self.living(&known);
            if known.is_empty() {
                return;
            }
            self.kill(&known);
            sleep(LOOK).await;
        }
    }

    fn kill(&self, known: &[Pid]) {
        let killed =
            self.cgroup.as_ref().is_some_and(|path| fs::write(path.join("cgroup.kill"), "1").is_ok());
        if !killed {
            reaper::signal_all(known, Signal::SIGKILL);
        }
    }

    /// What lives of the tree. `known` keeps those in sight that lost their parents.
    fn living(&self, known: &[Pid]) -> Vec<Pid> {
        if let Some(path) = &self.cgroup {
            let mut pids = Vec::new();
            members(path, &mut pids);
            return pids;
        }
        let all = proc::descendants(Pid::this());
        let mut pids = proc::descendants(self.leader);
        pids.push(self.leader);
        for pid in known {
            pids.push(*pid);
            pids.extend(proc::descendants(*pid));
        }
        pids.sort_unstable();
        pids.dedup();
        pids.retain(|pid| all.contains(pid));
        pids
    }

    /// The cgroup, to be retired.
    pub fn into_cgroup(self) -> Option<PathBuf> {
        self.cgroup
    }
}

/// Adds the processes of a cgroup and of those that were made inside it.
fn members(path: &Path, pids: &mut Vec<Pid>) {
    let text = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
    pids.extend(text.lines().filter_map(|line| line.parse().ok()).map(Pid::from_raw));
    let Ok(entries) = fs::read_dir(path) else {
        return;
    };
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        members(&entry.path(), pids);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[tokio::test]
    async fn without_a_cgroup_a_tree_is_ended_by_ancestry() {
        nix::sys::prctl::set_child_subreaper(true).unwrap();
        let script =
            "setsid sh -c 'trap \"\" TERM; while :; do sleep 0.1; done' & (sleep 55 & sleep 55) & wait; wait";
        let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let leader = Pid::from_raw(child.id() as i32);
        while proc::descendants(leader).len() < 4 {
            sleep(LOOK).await;
        }
        let all = proc::descendants(leader);
        Tree::new(leader, None).end(Duration::from_millis(300)).await;
        let left = proc::descendants(Pid::this());
        assert!(!all.iter().chain([&leader]).any(|pid| left.contains(pid)), "{left:?} of {all:?}");
        child.wait().unwrap();
    }
}
