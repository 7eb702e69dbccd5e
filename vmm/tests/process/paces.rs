//! The whole program, confined, with every device driven, under a tracer: what each kind of thread calls is what the table
//! of system calls says, no more and no less.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use serde_json::json;
use torpor_overlay::{BaseIdentity, sha256_file};
use torpor_vmm_api::{End, Reply, Request, ThreadKind};
use torpor_vmm_jail::table::{DEVICES, RULES};

use crate::drive::{Driver, Part, block, vsock};
use crate::guest::{Step, kernel, say};
use crate::vm::{Control, Setup, Vm, has, until};

const UID: u32 = 61_235;
const MIB: u64 = 1 << 20;

/// A TAP in a network namespace of this thread's own.
fn tap() -> OwnedFd {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    let tun = fs::File::options().read(true).write(true).open("/dev/net/tun").unwrap();
    // SAFETY: all zeros is a value of this plain structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[..4].copy_from_slice(&[b't', b'a', b'p', b'0'].map(|byte| byte as libc::c_char));
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
    // SAFETY: the kernel reads and writes the structure, which is of the size that it expects.
    assert_eq!(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) }, 0);
    assert!(Command::new("ip").args(["link", "set", "tap0", "up"]).status().unwrap().success());
    tun.into()
}

/// Devices are: 0 the overlay, 1 the raw disk, 2 net, 3 vsock, 4 rng, 5 balloon.
fn drivers() -> Vec<Driver> {
    vec![
        disk(0),
        disk(1),
        net(2),
        agent(3),
        small(4, 1, 0, 0, Part::Take(64)),
        small(5, 2, 0, 0, Part::Give(vec![0, 8, 0, 0])),
    ]
}

fn disk(place: u32) -> Driver {
    let mut driver = Driver::new(place, 1, 32);
    let range = |sector: u64, count: u32| {
        Part::Give([sector.to_le_bytes().as_slice(), &count.to_le_bytes(), &[0; 4]].concat())
    };
    driver.request(0, &block(1, 0, [Part::Give(vec![7; 4096])]));
    driver.request(0, &block(0, 0, [Part::Take(4096)]));
    driver.request(0, &block(1, 0, [Part::Give(vec![8; 512]), Part::Give(vec![9; 4096])]));
    driver.request(0, &block(0, 0, [Part::Take(512), Part::Take(4096)]));
    driver.request(0, &block(13, 0, [range(0, 128)]));
    driver.request(0, &block(11, 0, [range(128, 128)]));
    driver.request(0, &block(4, 0, []));
    // Not flushed: what is given up here is given back when the disk is closed.
    driver.request(0, &block(1, 256, [Part::Give(vec![5; 4096])]));
    driver.request(0, &block(11, 256, [range(256, 128)]));
    // FLUSH, DISCARD, WRITE_ZEROES.
    driver.begin(1 << 9 | 1 << 13 | 1 << 14);
    for count in 1..=7 {
        driver.offer(0, count);
        driver.wait(0, count);
    }
    driver.reset();
    driver.forget();
    // All at once.
    driver.begin(1 << 9 | 1 << 13 | 1 << 14);
    for count in 7..=9 {
        driver.offer(0, count);
        driver.wait(0, count);
    }
    driver
}

fn net(place: u32) -> Driver {
    let mut driver = Driver::new(place, 2, 8);
    for _ in 0..4 {
        driver.request(0, &[Part::Take(2048)]);
    }
    driver.request(1, &[Part::Give([vec![0; 12], vec![0xff; 6], vec![2; 54]].concat())]);
    for round in 0..2 {
        driver.begin(1 << 0 | 1 << 1);
        driver.offer(0, 4);
        driver.offer(1, 1);
        driver.wait(1, 1);
        if round == 0 {
            driver.reset();
            driver.forget();
        }
    }
    driver
}

/// Connects to port 7 of the host, sends, receives, ends; then waits for a client of the host's.
pub(crate) fn agent(place: u32) -> Driver {
    let mut driver = Driver::new(place, 3, 8);
    for _ in 0..8 {
        driver.request(0, &[Part::Take(4096)]);
    }
    for (operation, flags, data) in [(1, 0, &b""[..]), (5, 0, b"hello"), (4, 3, b"")] {
        driver.request(1, &[Part::Give(vsock(operation, 1000, 7, flags, data))]);
    }
    driver.begin(0);
    driver.offer(0, 8);
    driver.offer(1, 1);
    driver.wait(0, 1); // accepted
    driver.offer(1, 2);
    driver.wait(0, 2); // "world"
    driver.offer(1, 3);
    driver
}

/// A device with one request on one of its queues.
fn small(place: u32, queues: usize, queue: usize, features: u32, part: Part) -> Driver {
    let mut driver = Driver::new(place, queues, 8);
    driver.request(queue, &[part]);
    for round in 0..2 {
        driver.begin(features);
        driver.offer(queue, 1);
        driver.wait(queue, 1);
        if round == 0 {
            driver.reset();
            driver.forget();
        }
    }
    driver
}

fn setup(tap: &OwnedFd) -> Setup {
    let drivers = drivers();
    let mut steps: Vec<Step> = drivers.iter().flat_map(|driver| driver.steps.clone()).collect();
    // Interrupt line 5 of the I/O APIC gets vector 33.
    steps.extend([Step::Write(0xfec0_0000, 0x10 + 2 * 5), Step::Write(0xfec0_0010, 0x21)]);
    steps.extend(say("done"));
    let at = steps.len() as u32;
    steps.extend([Step::In(0x71), Step::GoTo(at)]);
    let memory: Vec<_> = drivers.iter().flat_map(Driver::memory).collect();
    let mut setup = Setup::new(&kernel(&steps, &memory));
    let run = setup.path("run");
    fs::create_dir(&run).unwrap();
    let open = |path: &std::path::Path| {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    };
    open(setup.folder.path());
    open(&run);
    let (base, overlay) = (setup.path("base"), setup.path("overlay"));
    fs::write(&base, vec![9; MIB as usize]).unwrap();
    let identity = BaseIdentity { digest: sha256_file(&base).unwrap(), size: MIB };
    torpor_overlay::create(&overlay, &base, &identity, MIB).unwrap();
    let raw = setup.path("raw");
    fs::write(&raw, vec![9; MIB as usize]).unwrap();
    let config = &mut setup.config;
    config["memory_bytes"] = json!(16 * MIB);
    config["disks"] = json!([
        {"overlay": {"image": {"path": overlay}, "path": overlay, "base": {"path": base}, "serial": "root"}},
        {"raw": {"file": {"path": raw}, "read_only": false, "serial": "data"}},
    ]);
    config["net"] = json!({"tap_fd": tap.as_raw_fd(), "mac": [2, 0, 0, 0, 0, 1], "mtu": 1500});
    config["vsock"] = json!({"cid": 3, "socket": run.join("vsock")});
    config["balloon"] = json!(true);
    config["jail"] = json!({"uid": UID, "seccomp": std::env::var_os("LEARN").is_none()});
    setup
}

/// What the host does meanwhile; returns when the guest has been through its list.
pub(crate) fn accompany(vm: &mut Vm, listener: &UnixListener) {
    listener.set_nonblocking(true).unwrap();
    let (mut guest, _) = until("the guest's connection", || {
        assert!(vm.child.try_wait().unwrap().is_none(), "it was killed: see calls.trace");
        listener.accept().ok()
    });
    guest.set_nonblocking(false).unwrap();
    let mut said = [0; 5];
    guest.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"hello");
    guest.write_all(b"world").unwrap();
    assert_eq!(guest.read(&mut said).unwrap(), 0);
}

/// Asks for all that can be asked.
fn interview(control: &mut Control) {
    assert_eq!(control.ask(&Request::Subscribe), Reply::Done);
    for request in [Request::Pause, Request::Resume, Request::PowerButton] {
        assert_eq!(control.ask(&request), Reply::Done);
    }
    let bytes = 3 * MIB;
    assert_eq!(control.ask(&Request::GrowDisk { disk: "root".into(), bytes }), Reply::Grown { bytes });
    let mut exits = || match control.ask(&Request::Status) {
        Reply::Status(status) => status.counters.exits,
        other => panic!("{other:?}"),
    };
    let before = exits();
    until("progress", || (exits() > before).then_some(()));
}

#[test]
fn no_rule_of_the_table_of_system_calls_is_unused_and_none_is_missing() {
    let test = "no_rule_of_the_table_of_system_calls_is_unused_and_none_is_missing";
    if !["kvm", "root", "strace", "ip"].iter().all(|need| has(test, need)) {
        return;
    }
    let tap = tap();
    // The child inherits it.
    nix::fcntl::fcntl(&tap, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let setup = setup(&tap);
    let run = setup.path("run");
    let listener = UnixListener::bind(run.join("vsock_7")).unwrap();
    fs::set_permissions(run.join("vsock_7"), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    // Outside the test's folder: it is there to be looked at when the test has failed.
    let trace = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("calls.trace");
    let plain = setup.command();
    let mut command = Command::new("strace");
    command
        .args(["-f", "-Y", "-e", "raw=all", "-o"])
        .arg(&trace)
        .arg(plain.get_program())
        .args(plain.get_args());
    let mut vm = setup.start_as(command);
    let mut control = vm.control();
    accompany(&mut vm, &listener);
    vm.console("done");
    // A client that nobody in the guest answers, and one that says what makes no sense.
    let mut client = UnixStream::connect(run.join("vsock")).unwrap();
    client.write_all(b"AWAIT 5\n").unwrap();
    let mut stranger = UnixStream::connect(run.join("vsock")).unwrap();
    stranger.write_all(b"nonsense\n").unwrap();
    let _ = stranger.read(&mut [0]);
    interview(&mut control);
    let mut second = vm.control();
    second.stream.write_all(b"nonsense\n").unwrap();
    drop(second);
    drop(client);
    // The tracer writes down its child's number first.
    let traced = fs::read_to_string(&trace).unwrap();
    let pid = traced.split('<').next().unwrap().trim().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM).unwrap();
    let status = vm.ended();
    assert_eq!(status.code(), Some(13), "{}\n{}", vm.log(), tail(&trace));
    let end = vm.end_file().unwrap();
    assert_eq!((end.end, end.disks_closed, end.broken), (End::Host, true, vec![]));
    let text = fs::read_to_string(&trace).unwrap();
    if std::env::var_os("LEARN").is_some() {
        return learn(&text);
    }
    compare(&text);
}

fn tail(trace: &std::path::Path) -> String {
    let text = fs::read_to_string(trace).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}

/// A call as strace writes it down with `-f -Y -e raw=all`.
struct Call<'a> {
    thread: &'a str,
    /// The thread's name at that moment.
    command: &'a str,
    name: &'a str,
    arguments: [u64; 6],
}

fn parse(line: &str) -> Option<Call<'_>> {
    let (thread, rest) = line.split_once('<')?;
    let (command, rest) = rest.split_once("> ")?;
    let (name, rest) = rest.trim_start().split_once('(')?;
    // Signals, ends, and the second halves of calls that were interrupted in the log.
    if !name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_') {
        return None;
    }
    let end = rest.find(')').or_else(|| rest.find(" <unfinished")).unwrap_or(rest.len());
    let mut arguments = [0; 6];
    for (place, text) in arguments.iter_mut().zip(rest[..end].split(", ")) {
        *place = number(text);
    }
    Some(Call { thread: thread.trim(), command, name, arguments })
}

fn number(text: &str) -> u64 {
    let text = text.trim();
    text.strip_prefix("0x")
        .map_or_else(|| text.parse().unwrap_or(0), |hex| u64::from_str_radix(hex, 16).unwrap())
}

/// All calls that a filter saw, with the kind of thread whose filter it was.
fn filtered(text: &str) -> Vec<(ThreadKind, Call<'_>)> {
    let mut installed = BTreeMap::new();
    let mut seen = Vec::new();
    let mut starter = None;
    for call in text.lines().filter_map(parse) {
        let Some(named) = ThreadKind::ALL.into_iter().find(|kind| kind.name() == call.command) else {
            continue;
        };
        // A new thread is bound by its starter's filter until it has its own.
        let kind = installed.get(call.thread).copied();
        let new = DEVICES.contains(&named) || named == ThreadKind::Starter && starter.is_some();
        let kind = kind.or_else(|| new.then_some(ThreadKind::Starter));
        if call.name == "seccomp" {
            installed.insert(call.thread, named);
            starter = starter.or_else(|| (named == ThreadKind::Starter).then_some(call.thread));
        }
        seen.extend(kind.map(|kind| (kind, call)));
    }
    seen
}

fn compare(text: &str) {
    let mut used = BTreeSet::new();
    let mut wrong = Vec::new();
    for (kind, call) in filtered(text) {
        let mut allowed = false;
        for (place, rule) in RULES.iter().enumerate() {
            let inherited = kind == ThreadKind::Starter && rule.who.iter().any(|who| DEVICES.contains(who));
            if rule.name.strip_prefix("SYS_") != Some(call.name) || !(rule.who.contains(&kind) || inherited) {
                continue;
            }
            let hold = |checks: &&[_]| {
                checks.iter().all(|check: &torpor_vmm_jail::table::Check| check.holds(&call.arguments))
            };
            match rule.when.iter().position(hold) {
                Some(alternative) => drop(used.insert((place, shared(kind), alternative))),
                None if rule.when.is_empty() => drop(used.insert((place, shared(kind), 0))),
                None => continue,
            }
            allowed = true;
        }
        // The starter is told that there is no clone3.
        if !allowed && call.name != "clone3" {
            wrong.push(format!("{kind:?} calls {}({:x?}) without a rule", call.name, call.arguments));
        }
    }
    for (place, rule) in RULES.iter().enumerate().filter(|(_, rule)| rule.rare.is_none()) {
        for kind in rule.who {
            for alternative in 0..rule.when.len().max(1) {
                if !used.contains(&(place, shared(*kind), alternative)) {
                    wrong.push(format!(
                        "{} for {kind:?} ({}), alternative {alternative}, is unused",
                        rule.name, rule.why
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Which of the two does a request is a matter of chance.
fn shared(kind: ThreadKind) -> ThreadKind {
    if kind == ThreadKind::BlockWorker { ThreadKind::Block } else { kind }
}

/// For who changes the program: LEARN=1 runs without filters and prints what each thread calls.
fn learn(text: &str) {
    let mut calls: BTreeMap<(&str, &str), BTreeSet<String>> = BTreeMap::new();
    let mut main_begun = false;
    for call in text.lines().filter_map(parse) {
        main_begun |= call.name == "clone3" || call.name == "clone";
        if call.command != "torpor-vmm" || main_begun {
            let telling = matches!(
                call.name,
                "ioctl"
                    | "madvise"
                    | "socket"
                    | "prctl"
                    | "fallocate"
                    | "fcntl"
                    | "futex"
                    | "mmap"
                    | "mprotect"
            );
            let shown = if telling { format!("{:x?}", &call.arguments[1..4]) } else { String::new() };
            calls.entry((call.command, call.name)).or_default().insert(shown);
        }
    }
    for ((command, name), arguments) in calls {
        println!("{command:14} {name:18} {:?}", arguments.into_iter().take(6).collect::<Vec<_>>());
    }
}
