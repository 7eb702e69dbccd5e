//! VM processes: who they are, whether they live, how they are ended. A process is known by pid *and* start time, and
//! is signalled through a pidfd only, so that a number that the kernel gave to somebody else is never hit.

use std::{fs, io, os::fd::OwnedFd, sync::Arc, time::Duration};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use serde::{Deserialize, Serialize};
use torpor_sandbox::{Run, SandboxId};

use crate::sys;

/// Pause before a process that can't be watched is looked at again.
const LOOK: Duration = Duration::from_millis(200);

/// What names one process for ever (until the host is restarted).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// Process id.
    pub(crate) pid: u32,
    /// When it was started, in clock ticks since the host's boot: field 22 of /proc/PID/stat (proc(5)).
    pub(crate) start_time: u64,
}

impl Identity {
    /// The identity of a living process; none when there is none or it is only waiting to be reaped.
    ///
    /// # Errors
    /// It can't be told, as without a free descriptor: the process may live.
    pub(crate) fn of(pid: u32) -> io::Result<Option<Self>> {
        let Some(text) = read_of(pid, "stat")? else { return Ok(None) };
        let Some((state, start_time)) = parse_stat(&String::from_utf8_lossy(&text)) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat is damaged")));
        };
        Ok((!matches!(state, 'Z' | 'X' | 'x')).then_some(Self { pid, start_time }))
    }

    /// Whether this very process lives.
    pub(crate) fn is_alive(self) -> io::Result<bool> {
        Ok(Self::of(self.pid)? == Some(self))
    }

    /// Resident memory, bytes; 0 when it can't be told.
    pub(crate) fn resident_bytes(self) -> u64 {
        let pages = fs::read_to_string(format!("/proc/{}/statm", self.pid))
            .ok()
            .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
        pages.unwrap_or_default() * rustix::param::page_size() as u64
    }
}

/// A file of a process in /proc; none when the process is gone or is hidden from us, and so none of ours.
fn read_of(pid: u32, name: &str) -> io::Result<Option<Vec<u8>>> {
    use io::ErrorKind::{NotFound, PermissionDenied};
    match fs::read(format!("/proc/{pid}/{name}")) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if matches!(error.kind(), NotFound | PermissionDenied) => Ok(None),
        // It went between the open and the read (proc(5)).
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => Ok(None),
        Err(error) => Err(error),
    }
}

/// State and start time out of /proc/PID/stat. The name in parentheses may hold anything, parentheses too.
fn parse_stat(text: &str) -> Option<(char, u64)> {
    let rest = &text[text.rfind(')')? + 1..];
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    // Field 22, where the state is field 3.
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// The argument that marks the VM process of a run in /proc.
pub(crate) fn marker(id: &SandboxId, run: Run) -> String {
    format!("torpor-{id}-run-{run}")
}

/// The sandbox and the run that a VM process's arguments name: the marker follows `-name`.
fn marked(arguments: &[u8]) -> Option<(SandboxId, Run)> {
    let mut words =
        arguments.split(|byte| *byte == 0).map(|word| std::str::from_utf8(word).unwrap_or_default());
    words.by_ref().find(|word| *word == "-name")?;
    let (id, run) = words.next()?.strip_prefix("torpor-")?.rsplit_once("-run-")?;
    Some((id.parse().ok()?, Run(run.parse().ok()?)))
}

/// The run that a process's arguments name, when it is a VM process of this sandbox.
fn run_in_arguments(id: &SandboxId, arguments: &[u8]) -> Option<Run> {
    marked(arguments).filter(|(found, _)| found == id).map(|(_, run)| run)
}

/// The run of the sandbox's VM that `pid` is, if it is one.
pub(crate) fn run_of(id: &SandboxId, pid: u32) -> io::Result<Option<Run>> {
    Ok(read_of(pid, "cmdline")?.and_then(|arguments| run_in_arguments(id, &arguments)))
}

/// The VM processes on the host, of whatever gateway. Reads all of /proc, as far as the caller goes on.
fn vms() -> io::Result<impl Iterator<Item = io::Result<(Identity, SandboxId, Run)>>> {
    let vm = |pid| {
        let Some((id, run)) = read_of(pid, "cmdline")?.and_then(|arguments| marked(&arguments)) else {
            return Ok(None);
        };
        Ok(Identity::of(pid)?.map(|identity| (identity, id, run)))
    };
    Ok(fs::read_dir("/proc")?.filter_map(move |entry| match entry {
        Ok(entry) => vm(entry.file_name().to_str()?.parse().ok()?).transpose(),
        Err(error) => Some(Err(error)),
    }))
}

/// Looks through all processes for a VM of this sandbox. Needed only where the record of its start is missing or
/// half-made: it reads all of /proc.
///
/// # Errors
/// Not every process could be looked at: one of them may be it.
pub(crate) fn find(id: &SandboxId) -> io::Result<Option<(Identity, Run)>> {
    for vm in vms()? {
        let (identity, found, run) = vm?;
        if found == *id {
            return Ok(Some((identity, run)));
        }
    }
    Ok(None)
}

/// Every VM process on the host, of whatever gateway: its sandbox and pid.
///
/// # Errors
/// /proc can't be listed, or a process in it can't be looked at.
pub(crate) fn all() -> io::Result<Vec<(SandboxId, u32)>> {
    vms()?.map(|vm| vm.map(|(identity, id, _)| (id, identity.pid))).collect()
}

/// A process that was seen to be the one that is meant, held by a descriptor.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    identity: Identity,
    pidfd: Arc<OwnedFd>,
}

impl Handle {
    /// Takes hold of a process, if it lives and is the VM of this sandbox.
    ///
    /// # Errors
    /// The kernel has no pidfds (older than 5.3) or no descriptor left: the process may live.
    pub(crate) fn open(id: &SandboxId, identity: Identity) -> io::Result<Option<Self>> {
        // Its arguments are checked after the descriptor was taken: from then on it can't be another's.
        let held = Self::of_child(identity)?;
        Ok(if run_of(id, identity.pid)?.is_some() { held } else { None })
    }

    /// Takes hold of a child of this process that nobody has waited for, if it lives. Its arguments need no look, and can't
    /// always be read: while it becomes another program, /proc shows none.
    ///
    /// # Errors
    /// As [`Handle::open`].
    pub(crate) fn of_child(identity: Identity) -> io::Result<Option<Self>> {
        let Some(pid) = i32::try_from(identity.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let pidfd = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(pidfd) => Arc::new(pidfd),
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        Ok(identity.is_alive()?.then_some(Self { identity, pidfd }))
    }

    /// Who it is.
    pub(crate) fn identity(&self) -> Identity {
        self.identity
    }

    /// SIGKILL. No error when it has ended already.
    pub(crate) fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&*self.pidfd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits until it has ended, and reaps it if it is a child of this process. What its status says, if it was.
    pub(crate) async fn ended(&self) -> Option<String> {
        self.ended_as_told_by(|| self.readable()).await
    }

    /// What `told` says is only a reason to look: an error of the watch, as without a free descriptor, is no end of a process.
    async fn ended_as_told_by<F: Future<Output = io::Result<()>>>(
        &self,
        told: impl Fn() -> F,
    ) -> Option<String> {
        loop {
            let told = told().await;
            if self.has_ended() {
                return self.reap();
            }
            if let Err(error) = told {
                let pid = self.identity.pid;
                tracing::debug!(pid, %error, "the process can't be watched; it is looked at from time to time");
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn readable(&self) -> io::Result<()> {
        sys::watch_readable(Arc::clone(&self.pidfd))?.readable().await.map(drop)
    }

    /// Asks the descriptor itself, which needs neither another one nor /proc. What can't be told is no end.
    pub(crate) fn has_ended(&self) -> bool {
        use std::os::fd::AsFd as _;
        let mut fds = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    fn reap(&self) -> Option<String> {
        use std::os::fd::AsFd as _;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        // An adopted process is init's child: ECHILD, and nothing to do.
        let status = waitid(WaitId::PidFd(self.pidfd.as_fd()), options).ok()??;
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Some(format!("exit code {code}")),
            (_, Some(signal)) => Some(format!("killed by signal {signal}")),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> SandboxId {
        SandboxId::generate()
    }

    #[test]
    fn a_name_with_parentheses_and_blanks_does_not_confuse_the_start_time() {
        let fields = (4..=52).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        assert_eq!(parse_stat(&format!("77 (a) R (b) S {fields}")), Some(('S', 22)));
        assert_eq!(parse_stat("77 (x"), None);
        assert_eq!(parse_stat("77 (x) S 1 2"), None);
    }

    #[test]
    fn only_the_argument_after_name_marks_a_vm_and_only_of_its_sandbox() {
        let (id, other) = (id(), id());
        let line = |words: &[&str]| words.join("\0").into_bytes();
        let mine = marker(&id, Run(7));
        assert_eq!(run_in_arguments(&id, &line(&["qemu", "-name", &mine, "-M", "x"])), Some(Run(7)));
        assert_eq!(run_in_arguments(&other, &line(&["qemu", "-name", &mine])), None);
        assert_eq!(run_in_arguments(&id, &line(&["grep", &mine])), None);
        assert_eq!(run_in_arguments(&id, &line(&["qemu", "-name"])), None);
    }

    #[test]
    fn a_child_is_taken_hold_of_whatever_its_arguments_are_and_only_while_it_lives() {
        // What a start does: the child becomes another program twice, and its arguments can't be read in between.
        for _ in 0..50 {
            let mut child = std::process::Command::new("setsid").args(["sleep", "60"]).spawn().unwrap();
            let identity = Identity::of(child.id()).unwrap().unwrap();
            let handle = Handle::of_child(identity).unwrap().expect("it lives");
            handle.kill().unwrap();
            child.wait().unwrap();
            assert!(Handle::of_child(identity).unwrap().is_none());
        }
    }

    #[test]
    fn a_process_with_a_reused_pid_or_without_the_marker_is_never_taken_hold_of() {
        let own = Identity::of(std::process::id()).unwrap().unwrap();
        assert!(own.is_alive().unwrap());
        // Ours by pid and start time, but no VM.
        assert!(Handle::open(&id(), own).unwrap().is_none());
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sleep 60; :", "-name", &marker(&id(), Run(1))])
            .spawn()
            .unwrap();
        let alive = Identity::of(child.id()).unwrap().unwrap();
        let former = Identity { start_time: alive.start_time + 1, ..alive };
        assert!(!former.is_alive().unwrap());
        assert!(Handle::open(&id(), former).unwrap().is_none());
        assert!(child.try_wait().unwrap().is_none(), "the stranger must live");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[tokio::test]
    async fn a_marked_process_is_found_killed_seen_to_end_and_reaped() {
        let id = id();
        let script = "sleep 60; :";
        let child =
            std::process::Command::new("sh").args(["-c", script, "-name", &marker(&id, Run(3))]).spawn();
        let pid = child.unwrap().id();
        // The new process shows its arguments once it has executed the program.
        let found = loop {
            if let Some(found) = find(&id).unwrap() {
                break found;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        };
        assert_eq!((found.0.pid, found.1), (pid, Run(3)));
        let handle = Handle::open(&id, found.0).unwrap().unwrap();
        handle.kill().unwrap();
        assert_eq!(handle.ended().await.as_deref(), Some("killed by signal 9"));
        assert!(!found.0.is_alive().unwrap());
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "it was reaped");
    }

    #[tokio::test]
    async fn a_process_that_can_not_be_watched_is_not_taken_for_ended() {
        let id = id();
        let mut child = std::process::Command::new("sh")
            .args(["-c", "read end", "-name", &marker(&id, Run(1))])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let handle = loop {
            if let Some((identity, _)) = find(&id).unwrap() {
                break Handle::open(&id, identity).unwrap().unwrap();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let ended = handle.ended_as_told_by(async || Err(io::Error::other("no descriptor left")));
        tokio::pin!(ended);
        assert!(tokio::time::timeout(LOOK * 3, &mut ended).await.is_err(), "it lives");
        assert!(child.try_wait().unwrap().is_none(), "it was reaped");
        handle.kill().unwrap();
        assert_eq!(ended.await.as_deref(), Some("killed by signal 9"));
    }
}
