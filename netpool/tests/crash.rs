//! A gateway that is killed again and again while it starts and stops sandboxes, 50 at a time: whatever it was doing, a sweep
//! brings the host back to what it was.
#![allow(clippy::unwrap_used, reason = "a test that can't go on panics")]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{Namespace, ready, sh};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use torpor_netpool::linux::{
    CgroupLimits, CgroupParent, CgroupProbe, Network, TapOptions, apply, list_taps, live,
};
use torpor_netpool::{CpuSet, Egress, GuestNet, Ledger, LedgerError, Loan, PoolConfig, Process, Slot, sweep};

const AT_ONCE: u32 = 50;
const SLOTS: u32 = 120;

/// What both processes know: a folder with a file per loan, and one byte per finished cycle in the file "done".
struct Bench {
    folder: PathBuf,
    config: PoolConfig,
    cgroups: Option<CgroupParent>,
}

impl Bench {
    fn new(folder: &Path) -> Bench {
        let instance = folder.file_name().unwrap().to_str().unwrap().parse().unwrap();
        let config = PoolConfig { instance, warm_taps: AT_ONCE, ..PoolConfig::default() };
        let cgroups = match CgroupParent::probe(&config) {
            CgroupProbe::Ready(parent) => Some(parent),
            CgroupProbe::Unavailable(reason) => {
                println!("without cgroups: {reason}");
                None
            }
        };
        fs::create_dir_all(folder.join("loans")).unwrap();
        Bench { folder: folder.to_path_buf(), config, cgroups }
    }

    fn done(&self) -> u64 {
        fs::metadata(self.folder.join("done")).map_or(0, |file| file.len())
    }

    fn row(&self, id: &str) -> PathBuf {
        self.folder.join("loans").join(id)
    }

    fn net(&self, id: &str, slot: u32) -> GuestNet {
        let net = self.config.guest_net(id, Slot(slot)).unwrap();
        let rules = ["192.0.2.0/24:443", "198.51.100.0/24:1-99/udp"].map(|rule| rule.parse().unwrap());
        let egress = match slot % 3 {
            0 => Egress::Public,
            1 => Egress::Allow { rules: rules.to_vec(), names: true },
            _ => Egress::Open,
        };
        GuestNet { egress: Some(egress), ..net }
    }

    /// What a process is found by.
    fn marker(&self, id: &str) -> String {
        format!("stub-{}-{id}", self.config.instance.as_str())
    }

    fn processes(&self) -> Vec<Process> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let line = fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
            let first = line.split('\0').next().unwrap_or_default();
            if let Some(id) = first.strip_prefix(&self.marker("")) {
                found.push(Process { sandbox_id: id.to_string(), pid });
            }
        }
        found
    }

    fn start(&self, network: &Network, id: &str, slot: u32, step: &dyn Fn()) -> Option<Child> {
        // A row appears whole or not at all.
        let draft = self.folder.join(format!("draft-{id}"));
        fs::write(&draft, slot.to_string()).unwrap();
        fs::rename(&draft, self.row(id)).unwrap();
        step();
        let options = TapOptions { vnet_hdr: true, ..TapOptions::default() };
        let tap = network.attach(&self.net(id, slot), &options).unwrap();
        step();
        let cgroup = self.cgroups.as_ref().map(|parent| parent.create(id, &CgroupLimits::default()).unwrap());
        step();
        let mut command = Command::new("sleep");
        command
            .arg0(self.marker(id))
            .arg("600")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        tap.hand_to(&mut command);
        let child = command.spawn().unwrap();
        drop(command);
        step();
        if let Some(cgroup) = cgroup {
            cgroup.add(child.id() as i32).unwrap();
        }
        Some(child)
    }

    /// Everything of a sandbox whose process is gone, and its row last.
    fn release(&self, network: &Network, id: &str, slot: u32, step: &dyn Fn()) {
        network.detach(&self.net(id, slot)).unwrap();
        step();
        if let Some(cgroup) = self.cgroups.as_ref().and_then(|parent| parent.open(id).unwrap()) {
            cgroup.remove().unwrap();
        }
        step();
        fs::remove_file(self.row(id)).unwrap();
    }

    /// What the next gateway does first.
    fn recover(&self, network: &Network) -> usize {
        for draft in fs::read_dir(&self.folder).unwrap().flatten() {
            if draft.file_name().to_string_lossy().starts_with("draft-") {
                fs::remove_file(draft.path()).unwrap();
            }
        }
        network.firewall().ensure().unwrap();
        let processes = self.processes();
        let mut seen = live(&self.config, network, self.cgroups.as_ref()).unwrap();
        seen.processes = Some(processes);
        let loans = self.all().unwrap();
        let egress = |loan: &Loan| self.net(&loan.sandbox_id, loan.slot.0).egress;
        let found = sweep(&self.config, &loans, &seen, &egress);
        let count = found.repairs.len() + found.without_process.len() + found.without_loan.len();
        for process in &found.without_loan {
            end(process.pid);
        }
        for loan in &found.without_process {
            self.release(network, &loan.sandbox_id, loan.slot.0, &|| {});
        }
        for (repair, result) in apply(&self.config, network, self.cgroups.as_ref(), self, found.repairs) {
            result.unwrap_or_else(|error| panic!("{repair}: {error}"));
        }
        network.stock().tend().unwrap();
        // A second pass finds a settled world.
        let mut seen = live(&self.config, network, self.cgroups.as_ref()).unwrap();
        seen.processes = Some(self.processes());
        assert_eq!(sweep(&self.config, &self.all().unwrap(), &seen, &egress), Default::default());
        count
    }

    /// Ends all that runs, and takes everything away.
    fn stop_all(&self, network: &Network) {
        for process in self.processes() {
            end(process.pid);
        }
        for loan in self.all().unwrap() {
            self.release(network, &loan.sandbox_id, loan.slot.0, &|| {});
        }
        network.stock().clear().unwrap();
    }
}

impl Ledger for Bench {
    fn loan(&self, sandbox_id: &str) -> Result<Option<Loan>, LedgerError> {
        Ok(self.all()?.into_iter().find(|loan| loan.sandbox_id == sandbox_id))
    }

    fn all(&self) -> Result<Vec<Loan>, LedgerError> {
        let rows = fs::read_dir(self.folder.join("loans")).map_err(LedgerError::new)?.flatten();
        let loan = |row: fs::DirEntry| Loan {
            sandbox_id: row.file_name().into_string().unwrap(),
            run: 1,
            slot: Slot(fs::read_to_string(row.path()).unwrap().parse().unwrap()),
            cpus: CpuSet::default(),
            memory_bytes: 1,
        };
        Ok(rows.map(loan).collect())
    }
}

/// Kills a process that isn't this one's child, and waits until it is gone with all that it holds.
fn end(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    while fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The gateway: cycles until `TORPOR_TEST_CYCLES` are done; dies by itself with a chance of one in
/// `TORPOR_TEST_DEATH` at each step.
#[test]
#[ignore = "a process of the tests below"]
fn child() {
    let Ok(folder) = std::env::var("TORPOR_TEST_FOLDER") else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<u32>().unwrap();
    let (bench, cycles, death) =
        (Bench::new(Path::new(&folder)), number("TORPOR_TEST_CYCLES"), number("TORPOR_TEST_DEATH"));
    let network = Network::new(&bench.config);
    let done =
        Mutex::new(fs::File::options().create(true).append(true).open(bench.folder.join("done")).unwrap());
    let dice = AtomicU32::new(std::process::id().wrapping_mul(2_654_435_761));
    let step = || {
        let number = dice.fetch_add(0x9e37_79b9, Ordering::Relaxed);
        let mixed = (number ^ (number >> 16)).wrapping_mul(0x85eb_ca6b);
        if death > 0 && (mixed >> 8).is_multiple_of(death) {
            kill(Pid::this(), Signal::SIGKILL).unwrap();
        }
    };
    let taken: BTreeSet<u32> = bench.all().unwrap().iter().map(|loan| loan.slot.0).collect();
    let free: Mutex<Vec<u32>> = Mutex::new((0..SLOTS).filter(|slot| !taken.contains(slot)).collect());
    let left = AtomicU32::new(cycles.saturating_sub(bench.done() as u32));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while left
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                    .is_ok()
                {
                    let slot = free.lock().unwrap().pop().unwrap();
                    let id = format!("sb{:x}-{slot}", std::process::id());
                    let mut vm = bench.start(&network, &id, slot, &step).unwrap();
                    step();
                    vm.kill().unwrap();
                    vm.wait().unwrap();
                    step();
                    bench.release(&network, &id, slot, &step);
                    free.lock().unwrap().insert(0, slot);
                    done.lock().unwrap().write_all(b".").unwrap();
                }
            });
        }
    });
    network.tend().unwrap();
}

/// Everything that may be left behind.
fn host(config: &PoolConfig) -> String {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().count();
    let parts = [
        "ip -o link",
        "ip -o addr",
        "ip route show table all",
        "ip neigh show nud all",
        "nft -s list ruleset",
    ];
    let taps = list_taps(config).unwrap();
    let cgroups = match CgroupParent::probe(config) {
        CgroupProbe::Ready(parent) => format!("{:?}", parent.list().unwrap()),
        CgroupProbe::Unavailable(_) => String::new(),
    };
    format!("{}\n{taps:?}\n{cgroups}\n{descriptors} descriptors", parts.map(sh).concat())
}

fn killed_again_and_again(test: &str, instance: &'static str, cycles: u32, kills: u32) {
    if !ready(test) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join(instance);
    Namespace::new().run(move || {
        let bench = Bench::new(&folder);
        {
            // What stays of a gateway that has run: the firewall's table.
            Network::new(&bench.config).firewall().ensure().unwrap();
        }
        let before = host(&bench.config);
        let (mut repairs, mut rounds) = (0, 0);
        while bench.done() < u64::from(cycles) {
            rounds += 1;
            let by_itself = rounds % 2 == 0;
            let death = if rounds <= kills && by_itself { cycles * 3 / kills } else { 0 };
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "child", "--ignored"])
                .env("TORPOR_TEST_FOLDER", &folder)
                .env("TORPOR_TEST_CYCLES", cycles.to_string())
                .env("TORPOR_TEST_DEATH", death.to_string())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            if rounds <= kills && !by_itself {
                let goal = (bench.done() + u64::from(cycles / kills)).min(u64::from(cycles) - 1);
                while bench.done() < goal && child.try_wait().unwrap().is_none() {
                    std::thread::sleep(Duration::from_millis(3));
                }
                child.kill().unwrap();
            }
            let status = child.wait().unwrap();
            assert!(status.success() || status.signal() == Some(9), "gateway {rounds}: {status}");
            let network = Network::new(&bench.config);
            repairs += bench.recover(&network);
            let mut listed = network.firewall().list().unwrap();
            listed.retain(|guest| {
                bench.all().unwrap().iter().all(|l| bench.net(&l.sandbox_id, l.slot.0).guest() != *guest)
            });
            assert_eq!(listed, [], "only what has a loan is let through");
        }
        println!("{} cycles, {rounds} gateways, {repairs} repairs", bench.done());
        assert!(repairs > 0, "the kills were for nothing");
        let network = Network::new(&bench.config);
        bench.stop_all(&network);
        assert_eq!(network.firewall().listing().unwrap(), Default::default());
        drop(network);
        assert_eq!(host(&bench.config), before);
        if let Some(parent) = &bench.cgroups {
            parent.remove().unwrap();
        }
    });
}

#[test]
fn starts_and_stops_with_kills_between_steps_come_back_to_the_baseline() {
    killed_again_and_again(
        "starts_and_stops_with_kills_between_steps_come_back_to_the_baseline",
        "zk1",
        200,
        6,
    );
}

#[test]
#[ignore = "long: for the slow ring"]
fn a_thousand_starts_and_stops_with_kills_come_back_to_the_baseline() {
    killed_again_and_again(
        "a_thousand_starts_and_stops_with_kills_come_back_to_the_baseline",
        "zk2",
        1000,
        20,
    );
}
