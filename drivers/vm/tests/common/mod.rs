//! A driver on a state directory of its own, in a network namespace of its own, with images and kernels shared between
//! tests and runs.
#![allow(dead_code, reason = "each test program uses its part")]

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use futures::StreamExt as _;
use torpor_driver_vm::{VmConfig, VmDriver};
use torpor_images::{Catalog, Kernels, Source};
use torpor_netpool::{
    CpuSet, Ledger, LedgerError, Loan, PoolConfig, Slot,
    linux::{CgroupParent, CgroupProbe, Firewall},
};
use torpor_proto::agent::v1::{ExecInput, ExecStart, agent_client::AgentClient, exec_input, exec_output};
use torpor_sandbox::{ComputeDriver as _, Resources, Run, SandboxId, SandboxSpec};

/// Set when the whole test program is in a network namespace of its own.
pub const IN_NAMESPACE: &str = "TORPOR_TEST_IN_NAMESPACE";

/// Loans in memory.
#[derive(Debug, Default)]
pub struct Loans(Mutex<HashMap<String, Loan>>);

impl Ledger for Loans {
    fn loan(&self, id: &str) -> Result<Option<Loan>, LedgerError> {
        Ok(self.0.lock().unwrap().get(id).cloned())
    }

    fn all(&self) -> Result<Vec<Loan>, LedgerError> {
        Ok(self.0.lock().unwrap().values().cloned().collect())
    }
}

impl Loans {
    pub fn lend(&self, id: &SandboxId, run: Run) {
        let mut rows = self.0.lock().unwrap();
        let slot = Slot(rows.len() as u32);
        let loan = Loan {
            sandbox_id: id.to_string(),
            run: run.0,
            slot,
            cpus: CpuSet::default(),
            memory_bytes: 192 << 20,
        };
        rows.entry(id.to_string()).and_modify(|loan| loan.run = run.0).or_insert(loan);
    }

    pub fn release(&self, id: &SandboxId) {
        self.0.lock().unwrap().remove(id.as_str());
    }
}

/// What a test works on.
pub struct Bench {
    pub folder: tempfile::TempDir,
    pub config: VmConfig,
    pub loans: Arc<Loans>,
    pub digest: String,
}

/// The reason why tests with a VM can't run here, with the word of REQUIRE.
fn missing() -> Option<(&'static str, String)> {
    if !nix::unistd::geteuid().is_root() {
        return Some(("root", "needs root".to_owned()));
    }
    if !Path::new("/dev/net/tun").exists() {
        return Some(("root", "needs /dev/net/tun".to_owned()));
    }
    for tool in ["qemu-system-x86_64", "nft", "mkfs.ext4", "busybox"] {
        if which(tool).is_none() {
            return Some(("emu", format!("needs {tool}")));
        }
    }
    agent().is_none().then(|| ("emu", "needs TORPOR_TEST_AGENT=PATH of a static torpor-agent".to_owned()))
}

pub fn which(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(tool)).find(|file| file.is_file())
}

fn agent() -> Option<PathBuf> {
    std::env::var_os("TORPOR_TEST_AGENT").map(PathBuf::from).filter(|path| path.is_file())
}

/// The test program that runs the KVM probe, as Cargo leaves it beside this one.
fn probe() -> Option<PathBuf> {
    let folder = std::env::current_exe().ok()?.parent()?.to_owned();
    let programs = fs::read_dir(folder).ok()?.flatten().filter(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with("probe-") && Path::new(&name).extension().is_none()
    });
    programs
        .max_by_key(|entry| entry.metadata().and_then(|data| data.modified()).ok())
        .map(|entry| entry.path())
}

/// torpor-vmm, where somebody has built it.
fn vmm() -> Option<PathBuf> {
    std::env::var_os("TORPOR_TEST_VMM").map(PathBuf::from).filter(|path| path.is_file())
}

/// The machine that the whole program is to use: "auto" unless TORPOR_TEST_MACHINE says otherwise.
pub fn machine() -> String {
    std::env::var("TORPOR_TEST_MACHINE").unwrap_or_else(|_| "auto".to_owned())
}

/// The bench of a test, or none when it is to be skipped.
pub fn bench(test: &str) -> Option<Bench> {
    if let Some((word, reason)) = missing() {
        let required = std::env::var("REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|required| required == word), "{test} is required, but {reason}");
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: {reason}\n"));
        return None;
    }
    // Before the network is left: a kernel may have to be fetched.
    let (assets, digest) = assets();
    // This thread's, and that of every thread that it or its runtime starts.
    if std::env::var_os(IN_NAMESPACE).is_none() {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    fs::create_dir(&state).unwrap();
    symlink(assets.join("images"), state.join("images")).unwrap();
    symlink(assets.join("kernels"), state.join("kernels")).unwrap();
    let mut config = VmConfig::new(&state, folder.path().join("run"), agent().unwrap());
    config.pool = PoolConfig { instance: instance().parse().unwrap(), ..PoolConfig::default() };
    config.probe = probe();
    config.vmm = vmm();
    config.machine = machine();
    config.boot_timeout = Duration::from_secs(90);
    Some(Bench { folder, config, loans: Arc::default(), digest: digest.clone() })
}

/// Four letters that no other test on this host has now.
fn instance() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = std::process::id().wrapping_mul(16).wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed));
    (0..4).map(|place| char::from_digit(number / 36u32.pow(place) % 36, 36).unwrap()).collect()
}

/// Images and kernels, made once per target directory.
fn assets() -> &'static (PathBuf, String) {
    static ASSETS: OnceLock<(PathBuf, String)> = OnceLock::new();
    ASSETS.get_or_init(|| {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm-assets");
        fs::create_dir_all(&root).unwrap();
        Kernels::open(&root).unwrap().ensure_default(&mut |_| {}).unwrap();
        let catalog = Catalog::open(&root).unwrap();
        let image = catalog.resolve("busybox").unwrap_or_else(|_| {
            let tree = busybox_tree();
            catalog.import("busybox", &Source::Dir(tree.path().to_owned()), &mut |_| {}).unwrap()
        });
        (root, image.digest)
    })
}

fn busybox_tree() -> tempfile::TempDir {
    let tree = tempfile::tempdir().unwrap();
    let root = tree.path();
    for dir in ["bin", "dev", "etc", "proc", "sys", "tmp", "root", "run", "var"] {
        fs::create_dir(root.join(dir)).unwrap();
    }
    fs::copy(which("busybox").unwrap(), root.join("bin/busybox")).unwrap();
    for applet in
        ["sh", "cat", "echo", "sleep", "ip", "ping", "sync", "reboot", "poweroff", "ls", "df", "true"]
    {
        symlink("busybox", root.join("bin").join(applet)).unwrap();
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").unwrap();
    fs::write(root.join("etc/group"), "root:x:0:\n").unwrap();
    tree
}

impl Bench {
    pub fn driver(&self) -> Arc<VmDriver> {
        VmDriver::new(self.config.clone(), self.loans.clone()).unwrap()
    }

    pub fn spec(&self) -> SandboxSpec {
        SandboxSpec {
            environment: [("GREETING".to_owned(), "hello".to_owned())].into(),
            stop_grace: Duration::from_secs(5),
            ..SandboxSpec::of(
                "vm",
                "busybox",
                &self.digest,
                Resources { cpus: 1, memory_bytes: 192 << 20, disk_bytes: 1 << 30 },
            )
        }
    }

    pub fn state(&self, id: &SandboxId) -> PathBuf {
        self.config.state_dir.join("sandboxes").join(id.as_str())
    }

    pub fn run_dir(&self, id: &SandboxId) -> PathBuf {
        self.config.run_dir.join(id.as_str())
    }

    /// Everything of a sandbox that a host could still hold, in words.
    pub fn leftovers(&self, id: &SandboxId) -> Vec<String> {
        let mut found = Vec::new();
        if self.run_dir(id).exists() {
            found.push(format!("run dir {}", self.run_dir(id).display()));
        }
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&format!("torpor-{id}-run-")) {
                found.push(format!("process {}", entry.file_name().display()));
            }
        }
        let interfaces = nix::net::if_::if_nameindex().unwrap();
        // Those in stock are nobody's.
        let pool = &self.config.pool;
        let taps = interfaces
            .iter()
            .filter(|interface| pool.slot_of_tap(&interface.name().to_string_lossy()).is_some());
        found.extend(taps.map(|tap| format!("tap {}", tap.name().to_string_lossy())));
        found.extend(
            Firewall::new(&self.config.pool).list().unwrap().iter().map(|guest| format!("element {guest:?}")),
        );
        if let CgroupProbe::Ready(parent) = CgroupParent::probe(&self.config.pool) {
            found.extend(parent.list().unwrap().iter().map(|name| format!("cgroup {name}")));
        }
        if self.state(id).exists() {
            let names = fs::read_dir(self.state(id)).unwrap().map(|entry| entry.unwrap().file_name());
            let odd = names.filter(|name| name != "overlay.qcow2" && name != "spec.json");
            found.extend(odd.map(|name| format!("file {}", name.display())));
        }
        found
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Only what this test made: the namespace takes TAPs and tables with it.
        if let CgroupProbe::Ready(parent) = CgroupParent::probe(&self.config.pool) {
            let _ = parent.remove();
        }
    }
}

/// Runs a command in the guest: exit code and standard output.
pub async fn exec(driver: &VmDriver, id: &SandboxId, command: &str) -> (i32, String) {
    let mut client = AgentClient::new(driver.agent(id).await.unwrap());
    let argv = ["/bin/sh", "-c", command].map(str::to_owned).to_vec();
    let start = ExecStart { argv, ..ExecStart::default() };
    let input = ExecInput { kind: Some(exec_input::Kind::Start(start)) };
    // Open until the end: a closed request stream would be a client that went away.
    let requests = futures::stream::once(async { input }).chain(futures::stream::pending());
    let mut output = client.exec(requests).await.unwrap().into_inner();
    let mut text = Vec::new();
    while let Some(message) = output.message().await.unwrap() {
        match message.kind {
            Some(exec_output::Kind::Stdout(bytes) | exec_output::Kind::Stderr(bytes)) => {
                text.extend_from_slice(&bytes)
            }
            Some(exec_output::Kind::Exit(exit)) => {
                return (exit.code, String::from_utf8_lossy(&text).into_owned());
            }
            Some(exec_output::Kind::Error(error)) => panic!("{error:?}"),
            _ => {}
        }
    }
    panic!("the output ended without an exit");
}

/// Ends a process that the test knows by its number.
pub fn signal(pid: u32, name: &str) {
    let done = Command::new("kill").arg(name).arg(pid.to_string()).status().unwrap();
    assert!(done.success());
}

/// A runtime whose threads are in the caller's network namespace.
pub fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(work)
}
