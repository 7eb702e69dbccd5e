//! What whole-system tests are made with: a gateway of their own (`torpor serve`), the command line (`torpor`), and a
//! small image. Nothing of this is part of the product.

#![allow(clippy::unwrap_used, reason = "a helper of tests: what goes wrong here fails the test, loudly")]

pub mod engine;
pub mod secrets;
pub mod updates;

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use nix::{
    fcntl::{Flock, FlockArg},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use tempfile::TempDir;

/// Longest that any command of a test may take.
const PATIENCE: Duration = Duration::from_secs(180);

/// Whether a test may go on. When `REQUIRE` names `word`, a missing need is a failure instead of a skip.
pub fn need(test: &str, word: &str, met: bool, reason: &str) -> bool {
    if !met {
        let required = std::env::var("REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|need| need == word), "{test} needs {word}: {reason}");
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: {reason}\n"));
    }
    met
}

/// Whether this machine can run VMs for `test`: root, a TAP device, QEMU, and the programs built.
pub fn can_run_vms(test: &str) -> bool {
    let found = |tool: &str| std::env::split_paths(&path_variable()).any(|dir| dir.join(tool).is_file());
    need(test, "root", nix::unistd::geteuid().is_root(), "not root")
        && need(test, "root", Path::new("/dev/net/tun").exists(), "no /dev/net/tun")
        && need(test, "root", found("nft") && found("mke2fs"), "nft or mke2fs is not installed")
        && need(test, "emu", found("qemu-system-x86_64"), "qemu-system-x86 is not installed")
        && need(test, "emu", found("busybox"), "busybox-static is not installed")
}

/// PATH with the folders of the system's own programs.
pub fn path_variable() -> std::ffi::OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin");
    path
}

/// The folder of the built programs: target/debug.
pub fn programs() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().unwrap().parent().unwrap().to_owned()
}

/// The `torpor` program.
pub fn torpor_program() -> PathBuf {
    let program = programs().join("torpor");
    assert!(program.is_file(), "{} is not built: cargo build && cargo xtask agent", program.display());
    program
}

/// What the images and kernels of all tests share, made once per build folder.
struct Shared {
    dir: PathBuf,
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let dir = programs().join("torpor-tests");
        fs::create_dir_all(dir.join("kernels")).unwrap();
        let shared = Shared { dir };
        // Other test programs may be doing the same.
        let file = fs::File::create(shared.dir.join("lock")).unwrap();
        let _lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| e).unwrap();
        busybox_tree(&shared.dir.join("tree"));
        shared
    })
}

/// The tree of the image "tiny".
pub fn tiny_tree() -> PathBuf {
    shared().dir.join("tree")
}

/// A root file system of one program.
fn busybox_tree(tree: &Path) {
    if tree.join("complete").exists() {
        return;
    }
    for dir in ["bin", "etc", "proc", "sys", "dev", "run", "tmp", "root", "home/worker", "var"] {
        fs::create_dir_all(tree.join(dir)).unwrap();
    }
    let busybox =
        std::env::split_paths(&path_variable()).map(|d| d.join("busybox")).find(|p| p.is_file()).unwrap();
    fs::copy(&busybox, tree.join("bin/busybox")).unwrap();
    let list = Command::new(&busybox).arg("--list").output().unwrap();
    for applet in String::from_utf8(list.stdout).unwrap().lines().filter(|a| *a != "busybox") {
        let _ = symlink("busybox", tree.join("bin").join(applet));
    }
    fs::write(
        tree.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nworker:x:1000:1000::/home/worker:/bin/sh\n",
    )
    .unwrap();
    fs::write(tree.join("etc/group"), "root:x:0:\nworker:x:1000:\nusers:x:100:worker\n").unwrap();
    nix::unistd::chown(&tree.join("home/worker"), Some(1000.into()), Some(1000.into())).unwrap();
    fs::write(tree.join("complete"), "").unwrap();
}

/// A number that no other gateway of this test run uses.
fn lane() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Test programs run one after another, their tests side by side.
    NEXT.fetch_add(1, Ordering::SeqCst) % 200
}

/// A host with a gateway of its own.
pub struct Host {
    dir: TempDir,
    gateway: Mutex<Option<Child>>,
    instance: String,
    /// First on the gateway's path.
    tools: Option<PathBuf>,
    /// What the gateway logs; none: as it does by itself.
    log: Option<&'static str>,
}

impl Host {
    /// A gateway with the image "tiny".
    pub fn new() -> Self {
        Self::with("")
    }

    /// The same with more configuration (TOML, before the first table).
    pub fn with(more: &str) -> Self {
        let host = Self::empty(more);
        host.ok(&["image", "import", "tiny", shared().dir.join("tree").to_str().unwrap()]);
        host
    }

    /// The same, and it logs by this filter.
    pub fn logging(more: &str, filter: &'static str) -> Self {
        let host = Self::made(more, None, Some(filter));
        host.ok(&["image", "import", "tiny", shared().dir.join("tree").to_str().unwrap()]);
        host
    }

    /// A gateway of container drivers only, the first of these engines its default, with the image "tiny".
    pub fn on(engines: &[&engine::Engine]) -> Self {
        Self::of(&[], engines)
    }

    /// A gateway of these drivers and those of the engines, with the image "tiny".
    pub fn of(drivers: &[&str], engines: &[&engine::Engine]) -> Self {
        let names = drivers.iter().copied().chain(engines.iter().map(|engine| engine.name));
        let names: Vec<String> = names.map(|name| format!("'{name}'")).collect();
        let mut more = format!("enable_sandbox_updates = true\ndrivers = [{}]\n", names.join(", "));
        for engine in engines {
            more.push_str(&format!("[{}]\nsocket = '{}'\n", engine.name, engine.socket().display()));
        }
        let host = Self::made(&more, engines.iter().find_map(|engine| engine.criu.clone()), None);
        host.ok(&["image", "import", "tiny", shared().dir.join("tree").to_str().unwrap()]);
        host
    }

    /// A gateway with no image and more configuration (TOML).
    pub fn empty(more: &str) -> Self {
        Self::made(more, None, None)
    }

    fn made(more: &str, tools: Option<PathBuf>, log: Option<&'static str>) -> Self {
        let dir = tempfile::Builder::new().prefix("tt").tempdir_in("/tmp").unwrap();
        let state = dir.path().join("state");
        fs::create_dir_all(&state).unwrap();
        symlink(shared().dir.join("kernels"), state.join("kernels")).unwrap();
        let lane = lane();
        let instance = format!("t{lane}");
        let config = format!(
            "boot_timeout_seconds = 60\n{more}\n[defaults]\nimage = 'tiny'\nmemory_bytes = {}\ndisk_bytes = {}\n\
             [network]\ninstance = '{instance}'\nrange = '10.{}.{}.0/24'\ncid_base = {}\nquarantine_seconds = 0\n",
            192 << 20,
            1_u64 << 30,
            210 + lane / 100,
            lane % 100,
            10_000 + lane * 1000,
        );
        fs::write(dir.path().join("torpor.toml"), config).unwrap();
        let host = Self { dir, gateway: Mutex::new(None), instance, tools, log };
        host.start_gateway();
        host
    }

    /// Below this are `state`, `run` and the socket.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The folder of a sandbox's disk.
    pub fn sandbox_dir(&self, id: &str) -> PathBuf {
        self.dir().join("state/sandboxes").join(id)
    }

    /// Name of the nftables table.
    pub fn instance(&self) -> &str {
        &self.instance
    }

    /// Starts `torpor serve` and waits for its word that it serves.
    pub fn start_gateway(&self) {
        self.start_gateway_with("");
    }

    /// The same with `TORPOR_FAILPOINT` set: see sandbox/src/failpoint.rs.
    pub fn start_gateway_with(&self, failpoint: &str) {
        assert!(self.try_to_start_gateway(failpoint), "the gateway did not start:\n{}", self.gateway_log());
    }

    /// The same, whether it comes to serve or ends before.
    pub fn try_to_start_gateway(&self, failpoint: &str) -> bool {
        let words = |host: &Self| host.gateway_log().matches("serves at").count();
        let before = words(self);
        let log = fs::File::options().create(true).append(true).open(self.dir().join("gateway.log")).unwrap();
        let mut child = Command::new(torpor_program())
            .args(["serve", "--config"])
            .arg(self.dir().join("torpor.toml"))
            .arg("--state-dir")
            .arg(self.dir().join("state"))
            .arg("--run-dir")
            .arg(self.dir().join("run"))
            .arg("--listen")
            .arg(self.endpoint())
            .env("PATH", self.path())
            .env("TORPOR_FAILPOINT", failpoint)
            .env("TORPOR_LOG", self.log.unwrap_or("info"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let end = Instant::now() + PATIENCE;
        while words(self) == before {
            if child.try_wait().unwrap().is_some() {
                return false;
            }
            assert!(Instant::now() < end, "the gateway does not start:\n{}", self.gateway_log());
            std::thread::sleep(Duration::from_millis(10));
        }
        *self.gateway.lock().unwrap() = Some(child);
        true
    }

    fn path(&self) -> std::ffi::OsString {
        let mut path = self.tools.clone().unwrap_or_default().into_os_string();
        if !path.is_empty() {
            path.push(":");
        }
        path.push(path_variable());
        path
    }

    /// What the gateway has logged.
    pub fn gateway_log(&self) -> String {
        fs::read_to_string(self.dir().join("gateway.log")).unwrap_or_default()
    }

    /// The gateway's process.
    pub fn gateway_pid(&self) -> i32 {
        i32::try_from(self.gateway.lock().unwrap().as_ref().unwrap().id()).unwrap()
    }

    /// Waits until the gateway has ended by itself.
    pub fn gateway_ends(&self, why: &str) {
        let mut gateway = self.gateway.lock().unwrap();
        let child = gateway.as_mut().unwrap();
        let end = Instant::now() + PATIENCE;
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "the gateway goes on: {why}\n{}", self.gateway_log());
            std::thread::sleep(Duration::from_millis(10));
        }
        *gateway = None;
    }

    /// Ends the gateway as a power cut would.
    pub fn kill_gateway(&self) {
        self.end_gateway(Signal::SIGKILL);
    }

    fn end_gateway(&self, signal: Signal) {
        if let Some(mut child) = self.gateway.lock().unwrap().take() {
            let _ = kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal);
            child.wait().unwrap();
        }
    }

    /// Kills and starts the gateway.
    pub fn restart_gateway(&self) {
        self.kill_gateway();
        self.start_gateway();
    }

    fn endpoint(&self) -> String {
        format!("unix://{}/gw.sock", self.dir().display())
    }

    /// `torpor` with these arguments, not started yet.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(torpor_program());
        command.args(arguments).env("TORPOR_ENDPOINT", self.endpoint()).stdin(Stdio::null());
        command
    }

    /// Runs `torpor` with these arguments.
    pub fn run(&self, arguments: &[&str]) -> Output {
        let mut child =
            self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let read = |pipe: &mut dyn std::io::Read| {
            let mut data = Vec::new();
            pipe.read_to_end(&mut data).unwrap();
            data
        };
        let (stdout, stderr, status) = std::thread::scope(|scope| {
            let stdout = scope.spawn(move || read(&mut out));
            let stderr = scope.spawn(move || read(&mut err));
            let status = wait_at_most(&mut child, PATIENCE);
            (stdout.join().unwrap(), stderr.join().unwrap(), status)
        });
        let status =
            status.unwrap_or_else(|| panic!("torpor {arguments:?} did not end\n{}", self.gateway_log()));
        Output { status, stdout, stderr }
    }

    /// Runs `torpor`, which must succeed; its standard output.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "torpor {arguments:?}: {}\n{text}{errors}\ngateway:\n{}",
            output.status,
            self.gateway_log()
        );
        text
    }

    /// Runs `torpor`, which must fail; its exit code and standard error.
    pub fn fails(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.run(arguments);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success(),
            "torpor {arguments:?} succeeded: {}",
            String::from_utf8_lossy(&output.stdout)
        );
        (output.status.code().unwrap_or(-1), errors)
    }

    /// `torpor get NAME -o json`.
    pub fn get(&self, name: &str) -> Value {
        serde_json::from_str(&self.ok(&["get", name, "-o", "json"])).unwrap()
    }

    /// Standard output of a shell command in a sandbox.
    pub fn sh(&self, name: &str, script: &str) -> String {
        self.ok(&["exec", name, "--", "sh", "-c", script])
    }

    /// Waits until `test` holds.
    pub fn until(&self, what: &str, mut test: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !test(self) {
            assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}\n{}", self.gateway_log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whatever of a sandbox is left on the host; `host` is the object that `get` showed while it ran.
    pub fn leftovers(&self, id: &str, host: &Value) -> Vec<String> {
        let mut left = Vec::new();
        let pid = host["pid"].as_i64().unwrap();
        if is_alive(pid) {
            left.push(format!("process {pid}"));
        }
        let tap = host["tap"].as_str().unwrap();
        if Path::new("/sys/class/net").join(tap).exists() {
            left.push(format!("TAP {tap}"));
        }
        let rules =
            Command::new("nft").args(["list", "ruleset"]).env("PATH", path_variable()).output().unwrap();
        if String::from_utf8_lossy(&rules.stdout).contains(&format!("\"{tap}\"")) {
            left.push(format!("nftables element of {tap}"));
        }
        if self.dir().join("run").join(id).exists() {
            left.push(format!("run folder of {id}"));
        }
        for base in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
            let found = find_dir(Path::new(base), id, 4);
            left.extend(found.map(|dir| format!("cgroup {}", dir.display())));
        }
        left
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- gateway log\n{}", self.gateway_log());
        }
        // VMs outlive their gateway: they are deleted first, by whatever works.
        if self.gateway.lock().is_ok_and(|g| g.is_some()) {
            if let Ok(list) = self.command(&["list", "-o", "name"]).output() {
                for name in String::from_utf8_lossy(&list.stdout).lines() {
                    let name = name.rsplit('/').next().unwrap_or(name);
                    let _ = self.command(&["delete", name, "--allow-missing"]).output();
                }
            }
            self.end_gateway(Signal::SIGTERM);
        }
        for id in fs::read_dir(self.dir().join("run")).into_iter().flatten().flatten() {
            let record = fs::read_to_string(id.path().join("vm.json")).unwrap_or_default();
            let record: Value = serde_json::from_str(&record).unwrap_or_default();
            if let Some(pid) = record["process"]["pid"].as_i64().filter(|&pid| pid > 1) {
                let _ = kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL);
            }
        }
        let mut nft = Command::new("nft");
        let table = format!("torpor_{}", self.instance);
        let _ = nft
            .args(["delete", "table", "inet", &table])
            .env("PATH", path_variable())
            .stderr(Stdio::null())
            .status();
    }
}

/// Waits for a child, but not for ever.
pub fn wait_at_most(child: &mut Child, limit: Duration) -> Option<std::process::ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if Instant::now() > end {
            child.kill().unwrap();
            child.wait().unwrap();
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether a process is there and not a zombie.
pub fn is_alive(pid: i64) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.trim().chars().next());
    state.is_some_and(|s| s != 'Z' && s != 'X')
}

fn find_dir(below: &Path, name: &str, depth: u32) -> Option<PathBuf> {
    if depth == 0 {
        return None;
    }
    for entry in fs::read_dir(below).ok()?.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
        if entry.file_name().to_string_lossy().contains(name) {
            return Some(entry.path());
        }
        if let Some(found) = find_dir(&entry.path(), name, depth - 1) {
            return Some(found);
        }
    }
    None
}
