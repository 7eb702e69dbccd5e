//! Whether this host's KVM runs a stock kernel.
//!
//! A /dev/kvm that opens proves nothing: a paravirtual one runs guest kernel code in an instruction emulator that doesn't know all
//! instructions. So a small 64-bit guest does what any kernel does early, in a child process under a time limit.

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "guest memory and the guest's code; each block says why it is sound")]
mod guest;

use std::{
    io::Read as _,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use torpor_driver_common::files::{read_json, write_json};

use crate::rundir::host_boot;

/// The hidden argument with which the program runs [`child_main`] and nothing else.
pub const ARGUMENT: &str = "__kvm-probe";
/// The guest needs milliseconds on a KVM that is worth using.
const LIMIT: Duration = Duration::from_secs(3);
/// The child's last line when all went well.
const DONE: &str = "done";
/// Begins the child's line about what went wrong.
const FAILED: &str = "failed: ";
/// Begins the reason when there is no KVM to look at; it may come, so that is not remembered.
const NO_KVM: &str = "no KVM: ";

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// A stock kernel runs.
    pub usable: bool,
    /// Why, or why not.
    pub reason: String,
    /// How long it took, milliseconds.
    pub elapsed_ms: u64,
}

impl Probe {
    /// Nobody looked.
    pub(crate) fn not_looked() -> Self {
        Self { usable: false, reason: "KVM was not looked for".to_owned(), elapsed_ms: 0 }
    }

    fn of_report(report: &str, ended: bool, elapsed: Duration) -> Self {
        let last = report.lines().last().unwrap_or_default();
        let elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let (usable, reason) = match last.strip_prefix(FAILED) {
            Some(why) => (false, why.to_owned()),
            None if last == DONE => (true, "the test guest ran".to_owned()),
            None => {
                let at =
                    if last.is_empty() { "before its first step".to_owned() } else { format!("at '{last}'") };
                let how = if ended { "ended" } else { "hung" };
                (false, format!("KVM can't run a stock kernel: the test guest {how} {at}"))
            }
        };
        Self { usable, reason, elapsed_ms }
    }
}

/// Runs the test guest in a child: `program` with [`ARGUMENT`]. Takes at most about three seconds.
pub fn run(program: &Path) -> Probe {
    let begin = Instant::now();
    let spawned = Command::new(program)
        .arg(ARGUMENT)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    match spawned {
        Ok(child) => {
            let (report, ended) = follow(child, LIMIT);
            Probe::of_report(&report, ended, begin.elapsed())
        }
        Err(error) => {
            let reason = format!("{NO_KVM}the probe {} can't be started: {error}", program.display());
            Probe { usable: false, reason, elapsed_ms: 0 }
        }
    }
}

/// What the child said, and whether it ended by itself. It is gone afterwards.
fn follow(mut child: Child, limit: Duration) -> (String, bool) {
    let (said, heard) = mpsc::channel();
    let output = child.stdout.take();
    let reader = std::thread::spawn(move || {
        let mut bytes = [0; 256];
        let Some(mut output) = output else { return };
        while let Ok(count @ 1..) = output.read(&mut bytes) {
            if said.send(String::from_utf8_lossy(&bytes[..count]).into_owned()).is_err() {
                return;
            }
        }
    });
    let until = Instant::now() + limit;
    let mut report = String::new();
    let ended = loop {
        match heard.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(text) => report += &text,
            Err(mpsc::RecvTimeoutError::Disconnected) => break true,
            Err(mpsc::RecvTimeoutError::Timeout) => break false,
        }
    };
    // Both fail only when it is gone already.
    let _ = child.kill();
    let _ = child.wait();
    let _ = reader.join();
    (report, ended)
}

/// What the probe found on a host's boot.
#[derive(Debug, Serialize, Deserialize)]
struct Remembered {
    host_boot: String,
    /// KVM modules can be loaded again with other options: when it was made tells.
    device_made: i64,
    probe: Probe,
}

/// [`run`], once per boot of the host.
pub(crate) fn cached(program: &Path, state_dir: &Path) -> Probe {
    use std::os::unix::fs::MetadataExt as _;
    let file = state_dir.join("kvm-probe.json");
    let host_boot = host_boot();
    let device_made = std::fs::metadata("/dev/kvm").map_or(0, |metadata| metadata.ctime());
    if let Ok(Some(known)) = read_json::<Remembered>(&file)
        && known.host_boot == host_boot
        && known.device_made == device_made
    {
        return known.probe;
    }
    let probe = run(program);
    if !probe.reason.starts_with(NO_KVM)
        && let Err(error) = write_json(&file, &Remembered { host_boot, device_made, probe: probe.clone() })
    {
        tracing::debug!(%error, "the probe will run again");
    }
    probe
}

/// The child's side: runs the guest, reports its steps on standard output, and exits.
pub fn child_main() -> ! {
    let mut report = |line: &str| println!("{line}");
    match steps(&mut report) {
        Ok(()) => report(DONE),
        Err(why) => report(&format!("{FAILED}{why}")),
    }
    std::process::exit(0)
}

#[cfg(target_arch = "x86_64")]
fn steps(report: &mut dyn FnMut(&str)) -> Result<(), String> {
    guest::run(report)
}

#[cfg(not(target_arch = "x86_64"))]
fn steps(_report: &mut dyn FnMut(&str)) -> Result<(), String> {
    Err(format!("{NO_KVM}the test guest is written for x86_64 only"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_report_gives_its_verdict_and_reason() {
        let cases = [
            ("long mode\ndone\n", true, true, "the test guest ran"),
            ("long mode\nint3\n", true, false, "the test guest ended at 'int3'"),
            ("long mode\nint3\n", false, false, "the test guest hung at 'int3'"),
            ("", false, false, "hung before its first step"),
            ("long mode\nfailed: KVM gave up at 'int3'\n", true, false, "KVM gave up at 'int3'"),
        ];
        for (report, ended, usable, reason) in cases {
            let probe = Probe::of_report(report, ended, Duration::ZERO);
            assert_eq!(probe.usable, usable, "{report}");
            assert!(probe.reason.contains(reason), "{}", probe.reason);
        }
    }

    #[test]
    fn a_child_that_hangs_is_ended_at_the_limit_with_its_last_step() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo xrstor; exec sleep 1000"]).stdout(Stdio::piped());
        let child = command.spawn().unwrap();
        let pid = child.id();
        let (report, ended) = follow(child, Duration::from_millis(500));
        assert_eq!((report.as_str(), ended), ("xrstor\n", false));
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn a_missing_program_is_no_kvm_and_not_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let probe = cached(Path::new("/nonexistent/probe"), folder.path());
        assert!(!probe.usable && probe.reason.starts_with(NO_KVM), "{probe:?}");
        assert!(!folder.path().join("kvm-probe.json").exists());
    }

    #[test]
    fn a_verdict_is_remembered_for_this_boot_of_the_host_only() {
        let folder = tempfile::tempdir().unwrap();
        // `false` says nothing: a definite, bad answer.
        let probe = cached(Path::new("/bin/false"), folder.path());
        assert!(!probe.usable);
        assert_eq!(cached(Path::new("/nonexistent/probe"), folder.path()), probe);
        let file = folder.path().join("kvm-probe.json");
        let other = std::fs::read_to_string(&file).unwrap().replace(&host_boot(), "another-boot");
        std::fs::write(&file, other).unwrap();
        assert_ne!(cached(Path::new("/nonexistent/probe"), folder.path()), probe);
    }
}
