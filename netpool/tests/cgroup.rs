//! Cgroups and CPU affinity of real processes.
#![allow(clippy::unwrap_used, reason = "a test that can't go on panics")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::statfs::{CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, statfs};
use torpor_netpool::linux::{
    CgroupLimits, CgroupParent, CgroupProbe, Controller, CpuMax, NetError, host_cpus, pin,
};
use torpor_netpool::{CpuSet, PoolConfig};

/// A writable cgroup version 2 mount, or a skip.
fn mount(test: &str) -> Option<PathBuf> {
    let is_v2 = |path: &&str| statfs(*path).is_ok_and(|found| found.filesystem_type() == CGROUP2_SUPER_MAGIC);
    let found =
        ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].iter().find(|path| is_v2(path)).map(PathBuf::from);
    let reason = match (&found, nix::unistd::geteuid().is_root()) {
        (Some(_), true) => return found,
        (Some(_), false) => "needs root",
        (None, _) => "needs cgroup version 2",
    };
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|need| need == "root"), "{test}: {reason}");
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: {reason}\n"));
    None
}

/// Whether the parent has every controller, or a skip.
fn has_all(parent: &CgroupParent, test: &str) -> bool {
    let all = [Controller::Cpuset, Controller::Memory, Controller::Pids, Controller::Cpu];
    if all.iter().all(|controller| parent.controllers().contains(controller)) {
        return true;
    }
    let reason = format!("needs the controllers {all:?}, found {:?}", parent.controllers());
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|need| need == "box"), "{test}: {reason}");
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: {reason}\n"));
    false
}

/// A parent of this test's own that is removed at the end.
struct Parent(CgroupParent);

impl Parent {
    fn new(root: &Path, test: &str) -> Parent {
        Parent(CgroupParent::at(root, &format!("torpor-test-{}-{test}", std::process::id())).unwrap())
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        for name in self.0.list().unwrap_or_default() {
            if let Ok(Some(cgroup)) = self.0.open(&name) {
                let _ = (cgroup.kill(), cgroup.remove());
            }
        }
        let _ = self.0.remove();
    }
}

fn sleeper() -> Child {
    Command::new("sleep").arg("60").spawn().unwrap()
}

#[test]
fn a_cgroup_holds_a_vms_processes_kills_them_and_goes() {
    let Some(root) = mount("a_cgroup_holds_a_vms_processes_kills_them_and_goes") else { return };
    let parent = Parent::new(&root, "kill");
    let limits = CgroupLimits {
        cpus: Some("0".parse().unwrap()),
        memory_max: Some(64 << 20),
        pids_max: Some(32),
        ..CgroupLimits::default()
    };
    let cgroup = parent.0.create("sb-1", &limits).unwrap();
    assert_eq!(parent.0.create("sb-1", &limits).unwrap(), cgroup, "repeating finds it");
    if parent.0.controllers().contains(&Controller::Memory) {
        let max = std::fs::read_to_string(cgroup.path().join("memory.max")).unwrap();
        assert_eq!(max.trim(), (64 << 20).to_string());
    }
    let mut children = [sleeper(), sleeper()];
    for child in &children {
        cgroup.add(child.id() as i32).unwrap();
    }
    let mut pids = cgroup.pids().unwrap();
    pids.sort_unstable();
    let mut expected = children.each_ref().map(|child| child.id() as i32);
    expected.sort_unstable();
    assert_eq!(pids, expected);
    assert_eq!(parent.0.list().unwrap(), ["sb-1"]);

    cgroup.kill().unwrap();
    for child in &mut children {
        assert!(!child.wait().unwrap().success());
    }
    cgroup.remove().unwrap();
    cgroup.remove().unwrap();
    assert_eq!(cgroup.pids().unwrap(), [0; 0]);
    cgroup.kill().unwrap();
    assert_eq!(parent.0.list().unwrap(), [""; 0]);
    assert_eq!(parent.0.open("sb-1").unwrap(), None);
}

#[test]
fn the_kernel_holds_processes_to_the_limits() {
    const TEST: &str = "the_kernel_holds_processes_to_the_limits";
    let Some(root) = mount(TEST) else { return };
    let parent = Parent::new(&root, "limits");
    if !has_all(&parent.0, TEST) {
        return;
    }
    let limits = CgroupLimits {
        cpus: Some("0".parse().unwrap()),
        memory_max: Some(32 << 20),
        pids_max: Some(3),
        ..CgroupLimits::default()
    };
    let cgroup = parent.0.create("sb-1", &limits).unwrap();
    // It waits for a line, so that it is in the cgroup when it begins; `tail` keeps what it is asked for in memory.
    let begun = |script: &str| {
        let mut child = Command::new("sh")
            .args(["-c", &format!("read line; {script}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        cgroup.add(child.id() as i32).unwrap();
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        let output = child.wait_with_output().unwrap();
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    let shown = begun("grep Cpus_allowed_list /proc/self/status");
    assert_eq!(shown, "Cpus_allowed_list:\t0\n");
    begun("head -c 128M /dev/zero | tail -c 100M >/dev/null");
    let events = std::fs::read_to_string(cgroup.path().join("memory.events")).unwrap();
    assert!(events.lines().any(|line| line.starts_with("oom_kill ") && line != "oom_kill 0"), "{events}");
    let shown = begun("sleep 1 & sleep 1 & sleep 1 & wait");
    assert!(shown.to_lowercase().contains("fork"), "{shown}");
    cgroup.kill().unwrap();
    cgroup.remove().unwrap();
}

/// The controllers of version 1 that are mounted here, or a skip.
fn version_1(test: &str) -> Vec<(Controller, PathBuf)> {
    let all = [Controller::Cpuset, Controller::Memory, Controller::Pids, Controller::Cpu];
    let mounts = all.map(|controller| (controller, Path::new("/sys/fs/cgroup").join(controller.to_string())));
    let is_v1 = |path: &Path| statfs(path).is_ok_and(|found| found.filesystem_type() == CGROUP_SUPER_MAGIC);
    let found: Vec<_> = mounts.into_iter().filter(|(_, path)| is_v1(path)).collect();
    if found.is_empty() || !nix::unistd::geteuid().is_root() {
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIP {test}: needs root and cgroups of version 1\n"),
        );
        return Vec::new();
    }
    found
}

#[test]
fn version_1_holds_processes_to_the_limits_in_every_tree() {
    let trees = version_1("version_1_holds_processes_to_the_limits_in_every_tree");
    let borrowed: Vec<(Controller, &Path)> =
        trees.iter().map(|(controller, path)| (*controller, path.as_path())).collect();
    let name = format!("torpor-test-{}-v1", std::process::id());
    let Some(parent) = CgroupParent::at_version_1(&borrowed, &name).unwrap() else { return };
    let parent = Parent(parent);
    let limits = CgroupLimits {
        cpus: Some("0".parse().unwrap()),
        memory_max: Some(32 << 20),
        pids_max: Some(3),
        cpu_max: Some(CpuMax::percent(150)),
        cpu_weight: Some(200),
        ..CgroupLimits::default()
    };
    let cgroup = parent.0.create("sb-1", &limits).unwrap();
    assert_eq!(parent.0.create("sb-1", &limits).unwrap(), cgroup, "repeating finds it");
    assert_eq!(parent.0.controllers().len(), trees.len());
    let shown = |controller: Controller, file: &str| {
        let tree = trees.iter().find(|(found, _)| *found == controller)?;
        Some(std::fs::read_to_string(tree.1.join(&name).join("sb-1").join(file)).unwrap().trim().to_string())
    };
    for (controller, file, value) in [
        (Controller::Cpuset, "cpuset.cpus", "0"),
        (Controller::Memory, "memory.limit_in_bytes", "33554432"),
        (Controller::Pids, "pids.max", "3"),
        (Controller::Cpu, "cpu.cfs_quota_us", "150000"),
        (Controller::Cpu, "cpu.shares", "2048"),
    ] {
        assert!(shown(controller, file).is_none_or(|shown| shown == value), "{file}");
    }
    let mut child = sleeper();
    cgroup.add(child.id() as i32).unwrap();
    assert_eq!(cgroup.pids().unwrap(), [child.id() as i32]);
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    if trees.iter().any(|(controller, _)| *controller == Controller::Cpuset) {
        assert!(status.contains("Cpus_allowed_list:\t0\n"), "{status}");
    }
    assert_eq!(parent.0.list().unwrap(), ["sb-1"]);
    cgroup.kill().unwrap();
    assert!(!child.wait().unwrap().success());
    cgroup.remove().unwrap();
    cgroup.remove().unwrap();
    assert_eq!(parent.0.list().unwrap(), [""; 0]);
    assert_eq!(parent.0.open("sb-1").unwrap(), None);
}

#[test]
fn a_busy_cgroup_names_the_processes_that_hold_it() {
    let Some(root) = mount("a_busy_cgroup_names_the_processes_that_hold_it") else { return };
    let parent = Parent::new(&root, "busy");
    let cgroup = parent.0.create("sb-1", &CgroupLimits::default()).unwrap();
    let mut child = sleeper();
    cgroup.add(child.id() as i32).unwrap();
    let error = cgroup.remove().unwrap_err();
    child.kill().unwrap();
    child.wait().unwrap();
    match error {
        NetError::CgroupBusy { pids, .. } => assert_eq!(pids, [child.id() as i32]),
        error => panic!("{error}"),
    }
    cgroup.remove().unwrap();
}

#[test]
fn the_probe_finds_the_mount_or_says_why_not() {
    let Some(root) = mount("the_probe_finds_the_mount_or_says_why_not") else { return };
    let config = PoolConfig { instance: "tst0".parse().unwrap(), ..PoolConfig::default() };
    match CgroupParent::probe(&config) {
        CgroupProbe::Ready(parent) => {
            assert_eq!(parent.path(), root.join("torpor_tst0"));
            parent.remove().unwrap();
            assert!(!root.join("torpor_tst0").exists());
        }
        CgroupProbe::Unavailable(reason) => assert!(reason.contains("/sys/fs/cgroup"), "{reason}"),
    }
}

#[test]
fn a_pinned_process_runs_on_its_cpus_only() {
    let host = host_cpus().unwrap();
    let one: CpuSet = host.iter().take(1).collect();
    let mut child = sleeper();
    let pid = child.id() as i32;
    let result = pin(pid, &one);
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let nothing = pin(pid, &CpuSet::default());
    child.kill().unwrap();
    child.wait().unwrap();
    result.unwrap();
    assert!(status.contains(&format!("Cpus_allowed_list:\t{one}\n")), "{status}");
    assert!(nothing.unwrap_err().to_string().contains(&pid.to_string()));
    assert!(pin(pid, &one).is_err(), "the process is gone");
}
