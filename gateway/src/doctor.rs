//! What a host lacks for running sandboxes, and what to do about it. Looks only: `fixes` changes what can be changed.

use std::{
    env, fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use nix::unistd::{AccessFlags, access};
use serde::Serialize;
use torpor_netpool::PoolConfig;
pub use torpor_sandbox::Level;
use torpor_sandbox::{Finding, spec::size};

use crate::{
    fixes,
    pressure::{ADVICE, Space},
};

/// How long a program that is asked for its version may take.
const ASK_LIMIT: Duration = Duration::from_secs(10);
/// Free space below which an image can't be built, bytes.
const SPACE_NEEDED: u64 = 2 << 30;
/// Free memory below which the default sandbox doesn't start, bytes.
const MEMORY_NEEDED: u64 = 768 << 20;
/// CAP_NET_ADMIN and CAP_SYS_ADMIN, by their numbers in linux/capability.h.
const CAPABILITIES: [(u32, &str); 2] = [(12, "CAP_NET_ADMIN"), (21, "CAP_SYS_ADMIN")];

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What ("kvm").
    pub name: &'static str,
    /// How bad.
    pub level: Level,
    /// What was found.
    pub finding: String,
    /// What to do; empty when nothing is to be done.
    pub advice: String,
    /// The change of the host that `torpor doctor --fix` makes.
    pub fix: Option<String>,
    /// What the gateway has to lend, where that was looked at.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub resources: Vec<Lent>,
}

/// How much of a resource is lent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Lent {
    /// "network slots".
    pub name: String,
    /// All that can be lent.
    pub capacity: u64,
    /// What is lent.
    pub used: u64,
    /// What can be lent at once.
    pub free: u64,
    /// What rests after its release.
    pub quarantined: u64,
}

impl Check {
    /// All is as it should be.
    pub fn ok(name: &'static str, finding: impl Into<String>) -> Self {
        let (finding, advice) = (finding.into(), String::new());
        Self { name, level: Level::Ok, finding, advice, fix: None, resources: Vec::new() }
    }

    /// It works, with less.
    pub fn warn(name: &'static str, finding: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Warn, advice: advice.into(), ..Self::ok(name, finding) }
    }

    /// Sandboxes can't run.
    pub fn fail(name: &'static str, finding: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Fail, advice: advice.into(), ..Self::ok(name, finding) }
    }
}

impl From<Finding> for Check {
    fn from(one: Finding) -> Self {
        Self { level: one.level, advice: one.advice, ..Self::ok(one.name, one.finding) }
    }
}

/// Looks at everything that the vm driver, the network and the images need. Takes seconds: it runs a small guest on KVM in a
/// process of its own.
pub fn run(state_dir: &Path, pool: &PoolConfig) -> Vec<Check> {
    let mut checks = vec![
        privileges(&fs::read_to_string("/proc/self/status").unwrap_or_default()),
        kvm(),
        vmm(),
        qemu(),
        nftables(),
        cgroup(&fs::read_to_string("/proc/self/mounts").unwrap_or_default()),
        image_tools(),
        kernel_tools(),
        disk_space(state_dir),
        memory(&fs::read_to_string("/proc/meminfo").unwrap_or_default()),
        agent(),
        changes(state_dir),
    ];
    checks.extend(fixes::checks(pool));
    checks
}

/// What `torpor doctor --fix` has changed, and what may be taken back.
fn changes(state_dir: &Path) -> Check {
    let name = "host-changes";
    match fixes::recorded(state_dir) {
        Ok(all) if all.is_empty() => Check::ok(name, "none by Torpor"),
        Ok(all) => Check::ok(name, format!("{} (torpor doctor --undo takes them back)", all.join("; "))),
        Err(error) => Check::warn(name, error.to_string(), "look at that file"),
    }
}

fn privileges(status: &str) -> Check {
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let bits = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or_default();
    let missing: Vec<_> =
        CAPABILITIES.iter().filter(|(n, _)| bits & (1 << n) == 0).map(|(_, name)| *name).collect();
    if missing.is_empty() {
        Check::ok("privileges", "may make network devices and mounts")
    } else {
        Check::fail(
            "privileges",
            format!("{} missing", missing.join(" and ")),
            "run the gateway, and this check, as root",
        )
    }
}

fn kvm() -> Check {
    let advice = "sandboxes run in software emulation, which is slow; on real hardware load kvm_intel or kvm_amd and turn \
                  virtualization on in the firmware, on a cloud take a machine with nested virtualization";
    if !Path::new("/dev/kvm").exists() {
        return Check::warn("kvm", "/dev/kvm is not there", advice);
    }
    let Ok(program) = env::current_exe() else {
        return Check::warn("kvm", "not probed: this program's own path is not known", advice);
    };
    let probe = torpor_driver_vm::probe::run(&program);
    if probe.usable {
        Check::ok("kvm", "runs a 64-bit guest: sandboxes run on the kvm machine unless they name another")
    } else {
        Check::warn("kvm", probe.reason, advice)
    }
}

/// The program of the kvm machine.
fn vmm() -> Check {
    let advice =
        "install torpor-vmm beside torpor or in /usr/lib/torpor, or name it by `vmm` in the configuration";
    let Some(program) = crate::Config::default().find_vmm() else {
        return Check::warn("torpor-vmm", "not found: there is no kvm machine", advice);
    };
    let path = program.display().to_string();
    match ask(&path, &["--version"]) {
        Ok(text) => Check::ok("torpor-vmm", format!("{}: {path}", text.lines().next().unwrap_or_default())),
        Err(problem) => Check::warn("torpor-vmm", problem, advice),
    }
}

/// Needed where KVM can't be used.
fn qemu() -> Check {
    let advice = "apt-get install qemu-system-x86, for hosts whose KVM can't run a stock kernel";
    match ask("qemu-system-x86_64", &["--version"]) {
        Ok(text) => Check::ok("qemu", text.lines().next().unwrap_or_default()),
        Err(problem) => Check::warn("qemu", problem, advice),
    }
}

fn nftables() -> Check {
    match ask("nft", &["-j", "list", "tables"]) {
        Ok(_) => Check::ok("nftables", "rules can be read"),
        Err(problem) if find("nft").is_none() => Check::fail("nftables", problem, "apt-get install nftables"),
        Err(problem) => {
            Check::fail("nftables", problem, "run as root; if the kernel lacks nf_tables: modprobe nf_tables")
        }
    }
}

fn cgroup(mounts: &str) -> Check {
    let name = "cgroup";
    let advice = "sandboxes run all the same, without these limits on their processes; boot with \
                  systemd.unified_cgroup_hierarchy=1, or in a container pass a writable cgroup v2";
    let fields = || mounts.lines().map(|l| l.split(' ').collect::<Vec<_>>());
    let wanted = ["cpuset", "memory", "pids", "cpu"];
    let mount = fields().find(|f| f.get(2) == Some(&"cgroup2"));
    let second = mount.as_ref().and_then(|fields| fields.get(1).map(PathBuf::from));
    let controllers = second.as_ref().map(|path| fs::read_to_string(path.join("cgroup.controllers")));
    let controllers = controllers.and_then(Result::ok).unwrap_or_default();
    // Each tree of version 1 names its controllers among the mount's options.
    let first = fields().filter(|f| f.get(2) == Some(&"cgroup"));
    let first: Vec<(PathBuf, Vec<String>)> = first
        .map(|f| {
            let options = f.get(3).copied().unwrap_or_default().split(',').map(str::to_owned).collect();
            (PathBuf::from(f.get(1).copied().unwrap_or_default()), options)
        })
        .collect();
    let has_first = |wanted: &str| first.iter().any(|(_, all)| all.iter().any(|one| one == wanted));
    let missing: Vec<_> = wanted
        .into_iter()
        .filter(|c| !controllers.split_whitespace().any(|found| found == *c) && !has_first(c))
        .collect();
    // Root passes every permission check but that of a read-only mount.
    let trees = second.iter().chain(first.iter().map(|(path, _)| path));
    for path in trees {
        if let Err(e) = access(path, AccessFlags::W_OK) {
            return Check::warn(name, format!("{} can't be written: {e}", path.display()), advice);
        }
    }
    let version = match (&second, first.is_empty()) {
        (None, true) => return Check::warn(name, "no cgroups are mounted", advice),
        (Some(_), true) => "v2",
        (None, false) => "v1",
        (Some(_), false) => "v1 and v2",
    };
    let slow = mount.as_ref().is_some_and(|fields| {
        !fields.get(3).is_some_and(|options| options.split(',').any(|option| option == "favordynmods"))
    });
    match missing.as_slice() {
        [] if slow => {
            // KVM moves a thread of its own into the VM's cgroups, which takes a grace period of RCU without this option.
            let finding = format!("{version} can be written; each start of a VM waits some 10 ms in it");
            let path = second.as_deref().unwrap_or(Path::new("/sys/fs/cgroup")).display();
            let advice = format!(
                "optional, for faster starts: mount -o remount,favordynmods {path} (Linux 6.0 or later)"
            );
            Check { advice, ..Check::ok(name, finding) }
        }
        [] => Check::ok(name, format!("{version} can be written")),
        missing => {
            Check::warn(name, format!("{version} lacks the controllers {}", missing.join(", ")), advice)
        }
    }
}

fn image_tools() -> Check {
    tools(
        "image-tools",
        &[("mke2fs", "e2fsprogs"), ("mmdebstrap", "mmdebstrap"), ("gzip", "gzip"), ("xz", "xz-utils")],
    )
}

fn kernel_tools() -> Check {
    tools("kernel-tools", &[("apt-get", "apt"), ("dpkg-deb", "dpkg")])
}

/// Programs and the packages that bring them. Missing ones only stop the making of images: those that exist run.
fn tools(name: &'static str, wanted: &[(&str, &str)]) -> Check {
    let missing: Vec<_> = wanted.iter().filter(|(program, _)| find(program).is_none()).collect();
    if missing.is_empty() {
        return Check::ok(name, wanted.iter().map(|(p, _)| *p).collect::<Vec<_>>().join(", "));
    }
    let programs: Vec<_> = missing.iter().map(|(p, _)| *p).collect();
    let packages: Vec<_> = missing.iter().map(|(_, p)| *p).collect();
    Check::warn(
        name,
        format!("{} not found; new images can't be made", programs.join(", ")),
        format!("apt-get install {}", packages.join(" ")),
    )
}

fn disk_space(state_dir: &Path) -> Check {
    let name = "disk";
    // The folder is made by the first start: until then its nearest parent tells.
    let Some(existing) = state_dir.ancestors().find(|d| d.exists()) else {
        return Check::fail(
            name,
            format!("{} has no parent folder", state_dir.display()),
            "give an absolute --state-dir",
        );
    };
    let shown = existing.display();
    match Space::of(existing, None) {
        Ok(space) => {
            let finding = format!("{} free in {shown}", size(space.free));
            if space.free < SPACE_NEEDED {
                let advice = format!(
                    "images and disks need at least {}; free some or use another --state-dir",
                    size(SPACE_NEEDED)
                );
                Check::warn(name, finding, advice)
            } else if space.is_low() {
                let finding = format!("{finding}, less than the reserve of {}", size(space.reserve));
                Check::warn(name, finding, ADVICE)
            } else {
                Check::ok(name, finding)
            }
        }
        Err(e) => Check::fail(name, format!("{shown}: {e}"), "use another --state-dir"),
    }
}

fn memory(meminfo: &str) -> Check {
    let kilobytes = |key: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|l| l.strip_prefix(key))?;
        line.trim_end_matches("kB").trim().parse().ok()
    };
    let (Some(total), Some(available)) = (kilobytes("MemTotal:"), kilobytes("MemAvailable:")) else {
        return Check::warn("memory", "/proc/meminfo can't be read", "mount /proc");
    };
    let finding = format!("{} of {} available", size(available << 10), size(total << 10));
    if available << 10 < MEMORY_NEEDED {
        Check::warn("memory", finding, format!("a sandbox of the default size needs {}", size(MEMORY_NEEDED)))
    } else {
        Check::ok("memory", finding)
    }
}

fn agent() -> Check {
    match crate::Config::default().find_agent() {
        Some(path) if path.is_file() => Check::ok("agent", path.display().to_string()),
        _ => Check::fail(
            "agent",
            "torpor-agent is neither beside this program nor in /usr/lib/torpor",
            "build it with `cargo xtask agent`, or set `agent` in the configuration file",
        ),
    }
}

/// Where a program is; `sbin` is looked at too, because a user's PATH often lacks it.
fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(sbin).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// Runs a program for its output, under a time limit.
fn ask(program: &str, args: &[&str]) -> Result<String, String> {
    ask_within(program, args, ASK_LIMIT)
}

fn ask_within(program: &str, args: &[&str], limit: Duration) -> Result<String, String> {
    let file = find(program).ok_or_else(|| format!("{program} not found"))?;
    let mut child = Command::new(file)
        .args(args)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| format!("{program} can't be run: {e}"))?;
    let output = child.stdout.take();
    let (sender, receiver) = mpsc::channel();
    // Read beside the wait: a program whose pipe is full never ends.
    thread::spawn(move || {
        let mut text = String::new();
        let read = output.map(|mut o| o.read_to_string(&mut text));
        // Nobody listens any more after the limit.
        let _ = sender.send(read.and_then(Result::ok).map(|_| text));
    });
    let answer = receiver.recv_timeout(limit);
    if answer.is_err() {
        // Already ended is as good as killed.
        let _ = child.kill();
    }
    let status = child.wait().map_err(|e| format!("{program}: {e}"))?;
    match answer {
        Err(_) => Err(format!("{program} did not answer within {} s", limit.as_secs())),
        Ok(_) if !status.success() => Err(format!("{program} {} failed: {status}", args.join(" "))),
        Ok(text) => text.ok_or_else(|| format!("{program} printed what is not text")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_are_named() {
        assert_eq!(privileges("CapEff:\t000001ffffffffff\n").level, Level::Ok);
        let check = privileges("CapEff:\t0000000000001000\n");
        assert_eq!((check.level, check.finding.as_str()), (Level::Fail, "CAP_SYS_ADMIN missing"));
        assert_eq!(privileges("").level, Level::Fail);
    }

    #[test]
    fn cgroups_of_the_older_version_are_as_good_and_controllers_that_lack_are_named() {
        assert_eq!(cgroup("tmpfs /sys/fs/cgroup tmpfs rw 0 0\n").finding, "no cgroups are mounted");
        let tree = |controllers: &str| format!("cgroup /tmp cgroup rw,nosuid,{controllers} 0 0\n");
        let all = cgroup(&[tree("cpu,cpuacct"), tree("cpuset"), tree("memory"), tree("pids")].concat());
        assert_eq!((all.level, all.finding.as_str()), (Level::Ok, "v1 can be written"));
        let some = cgroup(&[tree("cpu,cpuacct"), tree("memory")].concat());
        assert_eq!(
            (some.level, some.finding.as_str()),
            (Level::Warn, "v1 lacks the controllers cpuset, pids")
        );
    }

    #[test]
    fn a_second_version_that_makes_starts_wait_is_told_with_the_remount_that_helps() {
        let first =
            ["cpu", "cpuset", "memory", "pids"].map(|one| format!("cgroup /tmp cgroup rw,{one} 0 0\n"));
        let with =
            |options: &str| cgroup(&format!("{}cgroup2 /tmp/two cgroup2 rw,{options} 0 0\n", first.concat()));
        assert_eq!(with("relatime").level, Level::Warn, "a mount that isn't there can't be written");
        let here =
            |options: &str| cgroup(&format!("{}cgroup2 /tmp cgroup2 rw,{options} 0 0\n", first.concat()));
        assert_eq!(here("relatime").level, Level::Ok);
        assert!(here("relatime").advice.contains("remount,favordynmods /tmp"), "{}", here("relatime").advice);
        assert_eq!(here("relatime,favordynmods").advice, "");
    }

    #[test]
    fn little_memory_is_a_warning_with_both_sizes() {
        let check = memory("MemTotal:  1048576 kB\nMemAvailable:  102400 kB\n");
        assert_eq!((check.level, check.finding.as_str()), (Level::Warn, "100 MiB of 1 GiB available"));
        assert_eq!(memory("MemTotal:  8388608 kB\nMemAvailable: 4194304 kB\n").level, Level::Ok);
    }

    #[test]
    fn space_is_told_for_a_folder_that_is_not_made_yet() {
        let dir = env::temp_dir().join("torpor-doctor-not-made/state");
        assert!(disk_space(&dir).finding.contains(" free in "));
    }

    #[test]
    fn missing_tools_name_their_packages() {
        let check = tools("image-tools", &[("sh", "dash"), ("torpor-no-such-tool", "some-package")]);
        assert_eq!((check.level, check.advice.as_str()), (Level::Warn, "apt-get install some-package"));
    }

    #[test]
    fn a_program_that_never_answers_is_ended_at_the_limit() {
        let error = ask_within("sleep", &["1000"], Duration::from_millis(50)).unwrap_err();
        assert!(error.contains("did not answer"), "{error}");
    }
}
