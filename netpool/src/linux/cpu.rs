//! The host's CPUs, and the affinity of VM processes to them.

use std::fs;
use std::io;
use std::path::Path;

use nix::errno::Errno;
use nix::sched::{sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::error::NetError;
use crate::{Core, CpuSet, Topology};

/// The CPUs that this process may run on: what a VM that it starts can be given.
///
/// # Errors
/// The kernel doesn't tell (more than 1024 CPUs).
pub fn host_cpus() -> Result<CpuSet, NetError> {
    let mask = sched_getaffinity(Pid::from_raw(0)).map_err(|errno| NetError::File {
        what: "read the CPU affinity of",
        path: "/proc/self".into(),
        source: errno.into(),
    })?;
    Ok((0..nix::sched::CpuSet::count())
        .filter(|cpu| mask.is_set(*cpu) == Ok(true))
        .map(|cpu| cpu as u32)
        .collect())
}

/// How the CPUs that this process may run on lie together.
///
/// # Errors
/// The CPUs aren't known. Where the kernel doesn't tell how they lie, each is a core of its own.
pub fn host_topology() -> Result<Topology, NetError> {
    Ok(read_topology(Path::new("/sys/devices/system"), &host_cpus()?))
}

/// How `cpus` lie together, read below `system`, normally `/sys/devices/system`.
pub fn read_topology(system: &Path, cpus: &CpuSet) -> Topology {
    let set = |path: &Path| fs::read_to_string(path).ok().and_then(|text| text.parse::<CpuSet>().ok());
    let nodes: Vec<(u32, CpuSet)> = fs::read_dir(system.join("node"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            Some((number, set(&entry.path().join("cpulist"))?))
        })
        .collect();
    let mut cores: Vec<Core> = Vec::new();
    for cpu in cpus.iter() {
        if cores.iter().any(|core| core.cpus.contains(cpu)) {
            continue;
        }
        let folder = system.join(format!("cpu/cpu{cpu}/topology"));
        // The older name is still there on kernels that have the newer one.
        let siblings =
            set(&folder.join("core_cpus_list")).or_else(|| set(&folder.join("thread_siblings_list")));
        let siblings: CpuSet = siblings
            .into_iter()
            .flat_map(|all| all.iter().collect::<Vec<_>>())
            .filter(|c| cpus.contains(*c))
            .collect();
        let own = if siblings.contains(cpu) { siblings } else { [cpu].into_iter().collect() };
        let node = nodes.iter().find(|(_, cpus)| cpus.contains(cpu)).map_or(0, |(number, _)| *number);
        cores.push(Core { cpus: own, node });
    }
    Topology { cores }
}

/// Lets all present threads of a process, and those that they start, run on `cpus` only. Threads that end meanwhile don't matter.
///
/// # Errors
/// There is no such process, or none of the CPUs is the host's.
pub fn pin(pid: i32, cpus: &CpuSet) -> Result<(), NetError> {
    let error = |source: io::Error| NetError::Affinity { pid, cpus: cpus.to_string(), source };
    let mut mask = nix::sched::CpuSet::new();
    for cpu in cpus.iter() {
        mask.set(cpu as usize).map_err(|errno| error(errno.into()))?;
    }
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_err(error)?;
    for thread in threads {
        let name = thread.map_err(error)?.file_name();
        let Some(thread) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        match sched_setaffinity(Pid::from_raw(thread), &mask) {
            Err(Errno::ESRCH) if thread != pid => {}
            result => result.map_err(|errno| error(errno.into()))?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_and_nodes_are_read_as_the_kernel_shows_them() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for cpu in 0..4 {
            write(
                &format!("cpu/cpu{cpu}/topology/core_cpus_list"),
                &format!("{},{}\n", cpu % 2, cpu % 2 + 2),
            );
        }
        write("cpu/cpu4/topology/thread_siblings_list", "4-5\n");
        write("node/node0/cpulist", "0-3\n");
        write("node/node1/cpulist", "4-5\n");
        write("node/possible", "0-1\n");
        let found = read_topology(folder.path(), &"0-4,9".parse().unwrap());
        let shown: Vec<String> =
            found.cores.iter().map(|core| format!("{}@{}", core.cpus, core.node)).collect();
        assert_eq!(
            shown,
            ["0,2@0", "1,3@0", "4@1", "9@0"],
            "CPU 5 is not to be used, of CPU 9 nothing is known"
        );
    }

    #[test]
    fn the_hosts_own_topology_has_each_cpu_once() {
        let mut seen: Vec<u32> =
            host_topology().unwrap().cores.iter().flat_map(|c| c.cpus.iter().collect::<Vec<_>>()).collect();
        seen.sort_unstable();
        assert_eq!(seen, host_cpus().unwrap().iter().collect::<Vec<_>>());
    }
}
