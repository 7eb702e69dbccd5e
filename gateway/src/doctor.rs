//! What a host lacks for running sandboxes, and what to do about it. Looks only: changes nothing.

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
use serde_json::Value;
use torpor_sandbox::spec::size;

use crate::pressure::{ADVICE, Space};

/// How long a program that is asked for its version may take.
const ASK_LIMIT: Duration = Duration::from_secs(10);
/// Free space below which an image can't be built, bytes.
const SPACE_NEEDED: u64 = 2 << 30;
/// Free memory below which the default sandbox doesn't start, bytes.
const MEMORY_NEEDED: u64 = 768 << 20;
/// CAP_NET_ADMIN and CAP_SYS_ADMIN, by their numbers in linux/capability.h.
const CAPABILITIES: [(u32, &str); 2] = [(12, "CAP_NET_ADMIN"), (21, "CAP_SYS_ADMIN")];
/// The kernel's answer that legacy iptables is in use.
const LEGACY_TABLES: &str = "/proc/net/ip_tables_names";

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, with less.
    Warn,
    /// Sandboxes can't run.
    Fail,
}

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
}

impl Check {
    fn ok(name: &'static str, finding: impl Into<String>) -> Self {
        Self { name, level: Level::Ok, finding: finding.into(), advice: String::new() }
    }

    fn warn(name: &'static str, finding: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name, level: Level::Warn, finding: finding.into(), advice: advice.into() }
    }

    fn fail(name: &'static str, finding: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name, level: Level::Fail, finding: finding.into(), advice: advice.into() }
    }
}

/// Looks at everything that the vm driver, the network and the images need. Takes seconds: it runs a small guest on KVM in a
/// process of its own.
pub fn run(state_dir: &Path) -> Vec<Check> {
    vec![
        privileges(&fs::read_to_string("/proc/self/status").unwrap_or_default()),
        kvm(),
        vmm(),
        qemu(),
        tun(Path::new("/dev/net/tun")),
        nftables(),
        ip_forward(),
        forward_policy(),
        cgroup(&fs::read_to_string("/proc/self/mounts").unwrap_or_default()),
        image_tools(),
        kernel_tools(),
        disk_space(state_dir),
        memory(&fs::read_to_string("/proc/meminfo").unwrap_or_default()),
        agent(),
    ]
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
        Check::ok(
            "kvm",
            "runs a 64-bit guest: sandboxes run on it by QEMU, or by torpor-vmm with --machine kvm",
        )
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

fn tun(device: &Path) -> Check {
    let shown = device.display();
    if !device.exists() {
        return Check::fail("tun", format!("{shown} is not there"), "modprobe tun");
    }
    match access(device, AccessFlags::R_OK | AccessFlags::W_OK) {
        Ok(()) => Check::ok("tun", format!("{shown} can be opened")),
        Err(e) => Check::fail(
            "tun",
            format!("{shown}: {e}"),
            "run as root; in a container, pass the device through",
        ),
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

fn ip_forward() -> Check {
    let name = "ip-forward";
    match fs::read_to_string("/proc/sys/net/ipv4/ip_forward").as_deref().map(str::trim) {
        Ok("1") => Check::ok(name, "on"),
        Ok(_) => Check::ok(name, "off; the gateway turns it on when it starts"),
        Err(e) => Check::warn(name, format!("can't be read: {e}"), "guests may not reach the network"),
    }
}

/// Other firewalls see the guests' packets too: one that drops what it doesn't know cuts them off.
fn forward_policy() -> Check {
    let name = "firewall";
    let rules = ask("nft", &["-j", "list", "chains"]).unwrap_or_default();
    let mut dropping = dropping_chains(&rules);
    if fs::read_to_string(LEGACY_TABLES).is_ok_and(|t| t.lines().any(|l| l == "filter"))
        && ask("iptables-legacy", &["-S", "FORWARD"]).is_ok_and(|t| t.contains("-P FORWARD DROP"))
    {
        dropping.push("iptables-legacy FORWARD".to_owned());
    }
    if dropping.is_empty() {
        return Check::ok(name, "no other firewall drops forwarded packets by default");
    }
    let advice = if dropping.iter().any(|c| c.contains("iptables") || c.contains(" filter ")) {
        "Docker or ufw set this. Let the guests through: iptables -I FORWARD -i tpr-+ -j ACCEPT; \
         iptables -I FORWARD -o tpr-+ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT (with Docker, into DOCKER-USER)"
    } else {
        "let forwarded packets from and to the devices 'tpr-*' through in that chain"
    };
    Check::warn(name, format!("drops forwarded packets by default: {}", dropping.join(", ")), advice)
}

/// Chains of `nft -j list chains` that see forwarded IPv4 packets and drop them by default, but for our own.
fn dropping_chains(json: &str) -> Vec<String> {
    let parsed: Value = serde_json::from_str(json).unwrap_or_default();
    let Some(items) = parsed.get("nftables").and_then(Value::as_array) else { return Vec::new() };
    let text =
        |chain: &Value, key: &str| chain.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    items
        .iter()
        .filter_map(|item| item.get("chain"))
        .filter(|c| text(c, "hook") == "forward" && text(c, "policy") == "drop")
        .filter(|c| {
            ["ip", "inet"].contains(&text(c, "family").as_str()) && !text(c, "table").starts_with("torpor")
        })
        .map(|c| format!("{} {} {}", text(c, "family"), text(c, "table"), text(c, "name")))
        .collect()
}

fn cgroup(mounts: &str) -> Check {
    let name = "cgroup";
    let advice = "sandboxes run all the same, without these limits on their processes; boot with \
                  systemd.unified_cgroup_hierarchy=1, or in a container pass a writable cgroup v2";
    let mount =
        mounts.lines().map(|l| l.split(' ').collect::<Vec<_>>()).find(|f| f.get(2) == Some(&"cgroup2"));
    let Some(path) = mount.and_then(|fields| fields.get(1).map(PathBuf::from)) else {
        return Check::warn(name, "cgroup v2 is not mounted", advice);
    };
    let shown = path.display();
    // Root passes every permission check but that of a read-only mount.
    if let Err(e) = access(&path, AccessFlags::W_OK) {
        return Check::warn(name, format!("{shown} can't be written: {e}"), advice);
    }
    let controllers = fs::read_to_string(path.join("cgroup.controllers")).unwrap_or_default();
    let has = |wanted: &str| controllers.split_whitespace().any(|c| c == wanted);
    let missing: Vec<_> = ["cpuset", "memory", "pids"].into_iter().filter(|c| !has(c)).collect();
    if missing.is_empty() {
        Check::ok(name, format!("v2 at {shown} can be written"))
    } else {
        Check::warn(name, format!("v2 at {shown} lacks the controllers {}", missing.join(", ")), advice)
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
    fn only_foreign_ipv4_forward_chains_that_drop_are_reported() {
        let chain = |family: &str, table: &str, hook: &str, policy: &str| serde_json::json!({"chain": {"family": family, "table": table, "name": "c", "hook": hook, "policy": policy}});
        let list = serde_json::json!({"nftables": [
            {"metainfo": {"version": "1"}},
            chain("ip", "filter", "forward", "drop"),
            chain("inet", "ufw", "forward", "accept"),
            chain("ip6", "filter", "forward", "drop"),
            chain("inet", "torpor", "forward", "drop"),
            chain("ip", "filter", "input", "drop"),
        ]});
        assert_eq!(dropping_chains(&list.to_string()), ["ip filter c"]);
        assert!(dropping_chains("not json").is_empty());
    }

    #[test]
    fn missing_capabilities_are_named() {
        assert_eq!(privileges("CapEff:\t000001ffffffffff\n").level, Level::Ok);
        let check = privileges("CapEff:\t0000000000001000\n");
        assert_eq!((check.level, check.finding.as_str()), (Level::Fail, "CAP_SYS_ADMIN missing"));
        assert_eq!(privileges("").level, Level::Fail);
    }

    #[test]
    fn cgroup_v1_is_a_warning() {
        assert_eq!(cgroup("tmpfs /sys/fs/cgroup tmpfs rw 0 0\n").level, Level::Warn);
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

    #[test]
    fn a_device_that_is_not_there_is_a_failure_with_advice() {
        let check = tun(Path::new("/nonexistent/tun"));
        assert_eq!((check.level, check.advice.as_str()), (Level::Fail, "modprobe tun"));
    }
}
