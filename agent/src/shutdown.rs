//! The end: processes first, then the disk, then the power.

use std::{fs, path::Path, sync::Arc, thread, time::Duration};

use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::{
        reboot::{RebootMode, reboot},
        signal::Signal,
    },
    unistd::{Pid, sync},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use crate::{
    agent::{Agent, Mode},
    boot::say,
    container, pod, proc, reaper,
};

const LOOK: Duration = Duration::from_millis(10);
/// After KILL, for processes to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(2);
/// For the root to become read-only.
const READ_ONLY_WITHIN: Duration = Duration::from_secs(1);
/// For the host to read the answer and close.
const ANSWERED_WITHIN: Duration = Duration::from_millis(500);

/// Ends every process and brings the disk to rest; whether it is, and what stands in the way.
pub async fn quiesce(agent: &Agent, grace: Duration) -> (bool, String) {
    let mut notes = Vec::new();
    agent.transfers.end().await;
    let stubborn = end_processes(agent.mode, grace).await;
    if stubborn > 0 {
        notes.push(format!("{stubborn} processes could not be ended"));
    }
    // Writes what may be gigabytes: not on the thread that serves.
    let mode = agent.mode;
    let synced = tokio::task::spawn_blocking(move || match mode {
        Mode::Container => container::sync_mounts(),
        Mode::Machine | Mode::Process => {
            sync();
            Ok(())
        }
    });
    let synced = synced.await.unwrap_or_else(|error| Err(error.to_string()));
    let mut flushed = synced.is_ok();
    notes.extend(synced.err());
    if agent.mode == Mode::Machine {
        unmount_others();
        if let Err(errno) = remount_read_only().await {
            notes.push(format!("root file system synced, but not read-only: {}", errno.desc()));
            flushed = false;
        }
    }
    (flushed, notes.join("; "))
}

/// TERM, and KILL at half of the grace; how many are still there.
async fn end_processes(mode: Mode, grace: Duration) -> usize {
    if !grace.is_zero() {
        reaper::signal_all(&victims(mode), Signal::SIGTERM);
        if gone(mode, grace / 2, None).await == 0 {
            return 0;
        }
    }
    gone(mode, GONE_WITHIN, Some(Signal::SIGKILL)).await
}

/// Waits until no process is left, giving each of them `signal` again and again; how many are left.
async fn gone(mode: Mode, within: Duration, signal: Option<Signal>) -> usize {
    let limit = Instant::now() + within;
    loop {
        let left = victims(mode);
        if let Some(signal) = signal {
            reaper::signal_all(&left, signal);
        }
        if left.is_empty() || Instant::now() >= limit {
            return left.len();
        }
        sleep(LOOK).await;
    }
}

fn victims(mode: Mode) -> Vec<Pid> {
    match mode {
        Mode::Machine => proc::others(),
        Mode::Container if std::process::id() == 1 => {
            let mut all = proc::others();
            all.retain(|pid| !pod::is_way_in(*pid));
            all
        }
        Mode::Container | Mode::Process => proc::descendants(Pid::this()),
    }
}

/// Unmounts what was mounted on disks besides the root, last first. What refuses is synced all the same.
fn unmount_others() {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let targets = mounts.lines().filter_map(|line| {
        let (device, rest) = line.split_once(' ')?;
        let target = rest.split(' ').next()?;
        (device.starts_with('/') && target != "/").then_some(target)
    });
    for target in targets.collect::<Vec<_>>().into_iter().rev() {
        let _ = umount2(target, MntFlags::empty());
    }
}

async fn remount_read_only() -> Result<(), Errno> {
    let limit = Instant::now() + READ_ONLY_WITHIN;
    loop {
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        let remounted =
            tokio::task::spawn_blocking(move || mount(None::<&str>, "/", None::<&str>, flags, None::<&str>))
                .await
                .unwrap_or(Err(Errno::ECANCELED));
        match remounted {
            // Files of processes that are just being torn down.
            Err(Errno::EBUSY) if Instant::now() < limit => sleep(LOOK).await,
            result => return result,
        }
    }
}

/// Leaves once the host has the answer: it closes the connection, or some time goes by.
pub async fn leave(agent: Arc<Agent>, mut connected: watch::Receiver<()>) {
    tokio::select! {
        _ = connected.changed() => {}
        () = sleep(ANSWERED_WITHIN) => {}
    }
    match agent.mode {
        Mode::Machine => power_off(),
        Mode::Container | Mode::Process => {
            agent.cgroups.close();
            std::process::exit(0);
        }
    }
}

/// Ends the machine; a reset where power can't be switched off.
pub fn power_off() -> ! {
    // Without ACPI the kernel would take "power off" for "halt" and stand still for ever.
    if !Path::new("/sys/firmware/acpi").exists() {
        let _ = reboot(RebootMode::RB_AUTOBOOT);
    }
    // The call ends the calling thread when it comes back: this one stays for the second way.
    thread::spawn(|| reboot(RebootMode::RB_POWER_OFF));
    thread::sleep(Duration::from_secs(2));
    say("power can't be switched off, resetting");
    // Nothing is left to do when this fails too: the end of the first process makes the kernel panic and reset.
    let _ = reboot(RebootMode::RB_AUTOBOOT);
    std::process::exit(1)
}
