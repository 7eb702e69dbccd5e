//! CPU affinity of VM processes.

use std::fs;
use std::io;

use nix::errno::Errno;
use nix::sched::{sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::error::NetError;
use crate::CpuSet;

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
