//! The agent as the first process of a real kernel, in software emulation. Needs, besides QEMU, mke2fs, cpio and a
//! static busybox: `TORPOR_TEST_AGENT` (a static agent) and `TORPOR_TEST_KERNEL_PACKAGE` (an unpacked Debian cloud kernel package).
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{
    collections::HashMap,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant, SystemTime},
};

use common::{Client, Exec, LIMIT, command, run, sh};
use tokio::net::UnixStream;
use torpor_agent_channel::host;
use torpor_proto::agent::v1::{
    ConfigureRequest, ConfigureResponse, ExecStart, Network, ShutdownRequest, WindowSize,
    agent_client::AgentClient, exec_output,
};

const MODULES: [&str; 8] = [
    "virtio_ring",
    "virtio",
    "virtio_mmio",
    "virtio_blk",
    "virtio_console",
    "failover",
    "net_failover",
    "virtio_net",
];
const DISK_BYTES: u64 = 256 << 20;

const ARGUMENTS: &str = "-M microvm,rtc=on,acpi=on,auto-kernel-cmdline=off,pit=off,pic=off
    -accel tcg,thread=single -cpu max,-erms -smp 1 -m 256 -nodefaults -no-user-config -display none -no-reboot
    -serial stdio -initrd initramfs.cpio
    -drive id=root,file=disk,format=raw,if=none -device virtio-blk-device,drive=root
    -chardev socket,id=agent,path=agent.sock,server=on,wait=off
    -device virtio-serial-device -device virtserialport,chardev=agent,name=torpor.agent
    -netdev user,id=net,restrict=on -device virtio-net-device,netdev=net,mac=02:00:00:00:00:01";
const COMMAND_LINE: &str = "console=ttyS0 quiet reboot=t panic=-1 cryptomgr.notests i8042.noaux \
                            random.trust_cpu=on no_timer_check tsc=reliable";

/// What the machine is made of, none when the test can't run here.
fn parts(test: &str) -> Option<(PathBuf, PathBuf)> {
    let agent = std::env::var_os("TORPOR_TEST_AGENT").map(PathBuf::from);
    let kernel = std::env::var_os("TORPOR_TEST_KERNEL_PACKAGE").map(PathBuf::from);
    let parts = agent.zip(kernel);
    if parts.is_none() {
        let required = std::env::var("REQUIRE").unwrap_or_default();
        assert!(
            !required.split(',').any(|need| need == "emu"),
            "{test} needs TORPOR_TEST_AGENT and TORPOR_TEST_KERNEL_PACKAGE"
        );
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIP {test}: TORPOR_TEST_AGENT and TORPOR_TEST_KERNEL_PACKAGE are not set\n"),
        );
    }
    parts
}

fn tool(program: &str, arguments: &[&str], folder: &Path) {
    let output = Command::new(program).args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    fs::read_dir(folder)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .find_map(|path| if path.is_dir() { find(&path, name) } else { path.ends_with(name).then_some(path) })
}

fn initramfs(folder: &Path, agent: &Path, kernel: &Path, modules: &[&str]) {
    let tree = folder.join("initramfs");
    fs::create_dir_all(tree.join("modules")).unwrap();
    fs::copy(agent, tree.join("init")).unwrap();
    let mut list = String::new();
    for module in modules {
        let name = format!("{module}.ko");
        fs::copy(find(&kernel.join("lib"), &name).unwrap(), tree.join("modules").join(&name)).unwrap();
        list.push_str(&format!("{name}\n"));
    }
    fs::write(tree.join("modules/list"), list).unwrap();
    tool("sh", &["-c", "find . | cpio -o -H newc --quiet > ../initramfs.cpio"], &tree);
}

fn disk(folder: &Path) {
    let tree = folder.join("root");
    for name in ["bin", "etc", "root", "proc"] {
        fs::create_dir_all(tree.join(name)).unwrap();
    }
    fs::copy("/bin/busybox", tree.join("bin/busybox")).unwrap();
    for name in [
        "sh", "cat", "ip", "ping", "dd", "df", "date", "stty", "sleep", "setsid", "hostname", "mount", "ls",
        "tee",
    ] {
        std::os::unix::fs::symlink("busybox", tree.join("bin").join(name)).unwrap();
    }
    fs::write(tree.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n").unwrap();
    std::os::unix::fs::symlink("/run/systemd/stub.conf", tree.join("etc/resolv.conf")).unwrap();
    File::create(folder.join("disk")).unwrap().set_len(32 << 20).unwrap();
    tool("/usr/sbin/mke2fs", &["-q", "-t", "ext4", "-b", "4096", "-d", "root", "-F", "disk"], folder);
    File::options().write(true).open(folder.join("disk")).unwrap().set_len(DISK_BYTES).unwrap();
}

/// Speed of the time-stamp counter, which an emulated machine takes from its host: it has nothing to measure it by.
fn tsc_khz() -> u64 {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("cpu MHz")).unwrap();
    let mhz: f64 = line.rsplit(':').next().unwrap().trim().parse().unwrap();
    (mhz * 1000.0) as u64
}

struct Machine {
    process: Child,
    folder: tempfile::TempDir,
}

impl Machine {
    fn boot(agent: &Path, kernel: &Path, modules: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        initramfs(folder.path(), agent, kernel, modules);
        disk(folder.path());
        let image = fs::read_dir(kernel.join("boot")).unwrap().flatten().map(|entry| entry.path());
        let image = image.into_iter().find(|path| path.to_string_lossy().contains("vmlinuz")).unwrap();
        let console = File::create(folder.path().join("console")).unwrap();
        let process = Command::new("qemu-system-x86_64")
            .current_dir(folder.path())
            .args(ARGUMENTS.split_ascii_whitespace())
            .arg("-kernel")
            .arg(image)
            .arg("-append")
            .arg(format!("{COMMAND_LINE} tsc_early_khz={}", tsc_khz()))
            .stdin(Stdio::null())
            .stdout(console.try_clone().unwrap())
            .stderr(console)
            .spawn()
            .unwrap();
        Self { process, folder }
    }

    fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.folder.path().join("console")).unwrap()).into_owned()
    }

    async fn dial(&self) -> Client {
        let socket = self.folder.path().join("agent.sock");
        for _ in 0..500 {
            if socket.exists() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let stream = UnixStream::connect(&socket).await.unwrap();
        match host::connect(stream, LIMIT).await {
            Ok(stream) => AgentClient::new(common::channel(stream).await),
            Err(error) => panic!("{error}\n{}", self.console()),
        }
    }

    /// Waits for the end of the machine.
    async fn end(&mut self) {
        let limit = Instant::now() + LIMIT;
        while self.process.try_wait().unwrap().is_none() {
            assert!(Instant::now() < limit, "the machine does not end\n{}", self.console());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn request(address: &str) -> ConfigureRequest {
    ConfigureRequest {
        run: 3,
        sandbox_id: "test".into(),
        hostname: "box".into(),
        time: Some(SystemTime::now().into()),
        network: Some(Network {
            mac: "02:00:00:00:00:01".into(),
            address: address.into(),
            gateway: "10.0.2.2".into(),
            mtu: 1400,
            nameservers: vec!["10.0.2.3".into()],
            search_domains: vec!["test.internal".into()],
        }),
        environment: HashMap::new(),
        main: None,
        entropy: vec![7; 32].into(),
    }
}

async fn configure(client: &mut Client, address: &str) -> ConfigureResponse {
    client.configure(request(address)).await.unwrap().into_inner()
}

async fn out(client: &mut Client, script: &str) -> String {
    let outcome = run(client, sh(script)).await;
    assert_eq!(outcome.code(), 0, "{script}: {outcome:?} {}", String::from_utf8_lossy(&outcome.stderr));
    outcome.text()
}

#[tokio::test]
async fn a_real_kernel_boots_into_the_agent_is_configured_serves_and_powers_off() {
    let Some((agent, kernel)) =
        parts("a_real_kernel_boots_into_the_agent_is_configured_serves_and_powers_off")
    else {
        return;
    };
    let start = Instant::now();
    let mut machine = Machine::boot(&agent, &kernel, &MODULES);
    let mut client = machine.dial().await;
    println!("answered after {:?}", start.elapsed());
    let first = configure(&mut client, "10.0.2.15/24").await;
    println!("configured after {:?}: {first:?}", start.elapsed());
    assert!(first.root_bytes > DISK_BYTES * 3 / 4, "{first:?}");
    machine_is_as_configured(&mut client).await;

    // Another address, as after a resume elsewhere: nothing of the former is left.
    configure(&mut client, "10.0.2.77/24").await;
    let addresses = out(&mut client, "ip -4 addr show eth0; ip route").await;
    assert!(addresses.contains("10.0.2.77/24") && !addresses.contains("10.0.2.15"), "{addresses}");
    out(&mut client, "ping -c 1 -W 5 10.0.2.2").await;

    large_output(&mut client).await;
    limits_and_terminals(&mut client).await;

    // A host that dies in the middle of an output; its command's process lives.
    let mut exec =
        Exec::start(&mut client, sh("echo $$; dd if=/dev/zero bs=64k count=100; exec sleep 1000")).await;
    let pid = exec.until("\n").await.split('\n').next().unwrap().to_owned();
    drop((exec, client));
    let mut client = machine.dial().await;
    let again = configure(&mut client, "10.0.2.77/24").await;
    assert_eq!(again.boot_id, first.boot_id);
    out(&mut client, &format!("cat /proc/{pid}/cmdline")).await;

    out(&mut client, "echo kept > /root/unsynced").await;
    let start = Instant::now();
    let grace = prost_types::Duration::try_from(Duration::from_secs(2)).ok();
    let answer = client.shutdown(ShutdownRequest { grace }).await.unwrap().into_inner();
    println!("shut down in {:?}: {answer:?}", start.elapsed());
    assert!(answer.flushed && answer.run == 3, "{answer:?}");
    drop(client);
    machine.end().await;
    println!("powered off after {:?}\n{}", start.elapsed(), machine.console());
    tool("/usr/sbin/e2fsck", &["-fn", "disk"], machine.folder.path());
    let mut cat = Command::new("/usr/sbin/debugfs");
    cat.args(["-R", "cat /root/unsynced"]).arg(machine.folder.path().join("disk"));
    assert_eq!(cat.output().unwrap().stdout, b"kept\n");
}

async fn machine_is_as_configured(client: &mut Client) {
    assert_eq!(out(client, "hostname").await, "box\n");
    let hosts = out(client, "cat /etc/hosts").await;
    assert!(hosts.contains("127.0.0.1\tlocalhost") && hosts.contains("127.0.1.1\tbox"), "{hosts}");
    let resolv = out(client, "cat /etc/resolv.conf").await;
    assert!(resolv.contains("search test.internal\nnameserver 10.0.2.3"), "{resolv}");
    let network = out(client, "ip addr; ip route").await;
    for wanted in ["10.0.2.15/24", "mtu 1400", "default via 10.0.2.2", "127.0.0.1/8"] {
        assert!(network.contains(wanted), "{wanted} not in {network}");
    }
    assert!(!network.contains("inet6 fe80"), "{network}");
    let guest: u64 = out(client, "date +%s").await.trim().parse().unwrap();
    let host = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    assert!(host.abs_diff(guest) <= 5, "{host} {guest}");
    let mounts = out(client, "mount; ls -l /dev/fd /dev/shm /dev/pts").await;
    for wanted in
        ["/dev/vda on / type ext4 (rw", "cgroup2 on /sys/fs/cgroup", "tmpfs on /run", "devpts on /dev/pts"]
    {
        assert!(mounts.contains(wanted), "{wanted} not in {mounts}");
    }
    out(client, "ping -c 1 -W 5 10.0.2.2").await;
}

async fn large_output(client: &mut Client) {
    let start = Instant::now();
    let mut exec = Exec::start(client, command(&["dd", "if=/dev/zero", "bs=1M", "count=200"])).await;
    let mut length = 0;
    while let Some(kind) = exec.next().await {
        if let exec_output::Kind::Stdout(data) = kind {
            length += data.len();
        }
    }
    println!("{} MiB streamed in {:?}", length >> 20, start.elapsed());
    assert_eq!(length, 200 << 20);
}

async fn limits_and_terminals(client: &mut Client) {
    let timeout = prost_types::Duration::try_from(Duration::from_secs(1)).ok();
    let kill_grace = prost_types::Duration::try_from(Duration::from_millis(300)).ok();
    let script = "setsid sh -c 'trap \"\" TERM; while :; do sleep 777; done' & sleep 888; wait";
    let outcome = run(client, ExecStart { timeout, kill_grace, ..sh(script) }).await;
    assert!(outcome.exit.as_ref().unwrap().timed_out, "{outcome:?}");
    let left = out(client, "cat /proc/[0-9]*/cmdline | tee /dev/null; echo").await;
    assert!(!left.contains("sleep\x00777") && !left.contains("sleep\x00888"), "{left:?}");
    let size = Some(WindowSize { cols: 100, rows: 33 });
    let outcome = run(client, ExecStart { tty: true, size, ..sh("stty size") }).await;
    assert_eq!(outcome.text(), "33 100\r\n");
}

#[tokio::test]
async fn a_machine_without_its_disk_driver_says_so_on_the_console_and_ends() {
    let Some((agent, kernel)) = parts("a_machine_without_its_disk_driver_says_so_on_the_console_and_ends")
    else {
        return;
    };
    let mut machine = Machine::boot(&agent, &kernel, &["virtio_ring", "virtio", "virtio_mmio"]);
    machine.end().await;
    let console = machine.console();
    assert!(
        console.contains("torpor-agent: the sandbox can't start: root disk /dev/vda did not appear"),
        "{console}"
    );
}
