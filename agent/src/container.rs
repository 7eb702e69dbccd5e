//! The first process of a container: what the engine leaves to it.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    time::Duration,
};

use nix::unistd::syncfs;
use tokio::signal::unix::{SignalKind, signal};

use crate::{agent::Agent, boot::say, shutdown};

/// The exit code after an engine's stop: 128 + TERM, which no other end of this program has. It tells the host that
/// somebody asked the engine to stop the container, and that it did not fail.
pub const TOLD: u8 = 143;
/// For processes to end and files to be written when the engine says stop: engines kill 10 s after it.
pub const STOP_GRACE: Duration = Duration::from_secs(6);
/// File systems that hold nothing to be written.
const VOLATILE: &[&str] =
    &["proc", "sysfs", "tmpfs", "devpts", "devtmpfs", "mqueue", "cgroup", "cgroup2", "nsfs", "ramfs"];

/// Images without /tmp are rare, programs that need it are not.
pub fn prepare() {
    if !Path::new("/tmp").exists() && fs::create_dir("/tmp").is_ok() {
        let _ = fs::set_permissions("/tmp", Permissions::from_mode(0o1777));
    }
}

/// Waits for the engine's TERM, then ends every process within the grace and brings the files to rest.
///
/// # Errors
/// When signals can't be waited for.
pub async fn end_when_told(agent: &Agent, grace: Duration) -> io::Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    if term.recv().await.is_none() {
        return Err(io::Error::other("signals can't be waited for any more"));
    }
    let _turn = agent.turn.lock().await;
    agent.state().ending = true;
    let (flushed, detail) = shutdown::quiesce(agent, grace).await;
    if !flushed {
        say(detail);
    }
    agent.cgroups.close();
    Ok(())
}

/// Writes out every file system that is mounted here, and no other of the host.
///
/// # Errors
/// The mounts that could not be written, in words.
pub fn sync_mounts() -> Result<(), String> {
    let mounts = fs::read_to_string("/proc/self/mounts").map_err(|error| format!("list mounts: {error}"))?;
    let mut failed = Vec::new();
    for target in targets(&mounts) {
        // A mount that another one hides or that is a file: the file system is the same as some directory's.
        let Ok(folder) = File::open(&target) else { continue };
        if let Err(errno) = syncfs(&folder) {
            failed.push(format!("sync {target}: {}", errno.desc()));
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// Where something durable is mounted; names are as in proc(5), with octal for what would part fields.
fn targets(mounts: &str) -> Vec<String> {
    let durable = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (target, kind) = (fields.next()?, fields.next()?);
        (!VOLATILE.contains(&kind)).then(|| unescape(target))
    });
    durable.filter(|target| Path::new(target).is_dir()).collect()
}

fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_durable_directories_are_synced() {
        let mounts = "overlay / overlay rw 0 0\nproc /proc proc rw 0 0\n/dev/vda /etc/hostname ext4 rw 0 0\n\
                      tmpfs /dev/shm tmpfs rw 0 0\n/dev/vda /no\\040such\\040folder ext4 rw 0 0\n";
        assert_eq!(targets(mounts), ["/"]);
        assert_eq!(unescape("/a\\040b\\134c"), "/a b\\c");
    }

    #[test]
    fn what_is_mounted_here_can_be_synced() {
        assert_eq!(sync_mounts(), Ok(()));
    }
}
