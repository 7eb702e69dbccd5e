//! The jail from outside: a child goes in, its parent looks at it through /proc.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use torpor_vmm_api::ThreadKind;
use torpor_vmm_jail::{Filters, JailError, Plan, Step, close_all_but, enter};

const UID: u32 = 61_234;

/// Prints why a test is skipped, or panics when it may not be.
fn has_root(test: &str) -> bool {
    if nix::unistd::geteuid().is_root() {
        return true;
    }
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|need| need == "root"), "{test} needs root");
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: needs root\n"));
    false
}

/// A child process that does `work` and exits with what it returns.
fn child(work: impl FnOnce() -> i32) -> Pid {
    // SAFETY: the child runs code of this file and of the jail only, takes no lock that another thread of the test
    // program may hold (the C library looks after its own), and ends without running anything of the parent's.
    match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let code = work();
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(code) }
        }
    }
}

fn plan() -> Plan<'static> {
    Plan { uid: Some(UID), root: None, folder: None, descriptors: 64, file_bytes: None, cgroup: None }
}

fn filtered(kind: ThreadKind, work: impl FnOnce() -> i32) -> WaitStatus {
    let filters = Filters::on();
    let pid = child(|| {
        nix::sys::prctl::set_no_new_privs().unwrap();
        filters.install(kind).unwrap();
        work()
    });
    waitpid(pid, None).unwrap()
}

fn call(number: i64, arguments: [u64; 6]) -> i64 {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the tests' calls get numbers only, or are never carried out.
    unsafe { libc::syscall(number, a, b, c, d, e, f) }
}

fn killed(status: WaitStatus) -> bool {
    matches!(status, WaitStatus::Signaled(_, Signal::SIGSYS, _))
}

#[test]
fn a_call_that_is_not_in_the_table_kills_every_kind_of_thread() {
    for kind in ThreadKind::ALL {
        let status = filtered(kind, || call(libc::SYS_getppid, [0; 6]).min(0) as i32);
        assert!(killed(status), "{kind:?}: {status:?}");
        let status = filtered(kind, || 7);
        assert!(matches!(status, WaitStatus::Exited(_, 7)), "{kind:?}: {status:?}");
    }
}

#[test]
fn a_call_with_arguments_that_are_not_in_the_table_kills() {
    use ThreadKind::{Main, Starter, Vcpu, Vsock};
    let executable = libc::PROT_READ as u64 | libc::PROT_EXEC as u64;
    let anonymous = libc::MAP_PRIVATE as u64 | libc::MAP_ANONYMOUS as u64;
    let no_file = u64::MAX;
    let cases = [
        ("executable memory", Main, libc::SYS_mmap, [0, 4096, executable, anonymous, no_file, 0]),
        ("KVM_SET_USER_MEMORY_REGION", Vcpu, libc::SYS_ioctl, [no_file, 0x4020_ae46, 0, 0, 0, 0]),
        ("TIOCSTI", Main, libc::SYS_ioctl, [no_file, 0x5412, 0, 0, 0, 0]),
        (
            "an internet socket",
            Vsock,
            libc::SYS_socket,
            [libc::AF_INET as u64, libc::SOCK_STREAM as u64, 0, 0, 0, 0],
        ),
        (
            "a netlink socket",
            Vsock,
            libc::SYS_socket,
            [libc::AF_NETLINK as u64, libc::SOCK_RAW as u64, 0, 0, 0, 0],
        ),
        ("a process", Starter, libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0, 0, 0]),
        (
            "a user namespace",
            Starter,
            libc::SYS_clone,
            [libc::CLONE_NEWUSER as u64 | 0x3d_0f00, 0, 0, 0, 0, 0],
        ),
        ("another thread's filter", Starter, libc::SYS_seccomp, [1, 1, 0, 0, 0, 0]),
    ];
    for (what, kind, number, arguments) in cases {
        let status = filtered(kind, || i32::from(call(number, arguments) == -1));
        assert!(killed(status), "{what} in {kind:?}: {status:?}");
    }
}

#[test]
fn the_starter_starts_every_kind_of_device_thread_and_each_ends_in_order() {
    use ThreadKind::{Block, BlockWorker, Net, Small, Starter, Vsock};
    for kind in [Block, BlockWorker, Net, Vsock, Small] {
        let filters = Arc::new(Filters::on());
        let inner = Arc::clone(&filters);
        let status = filtered(Starter, move || {
            let started = std::thread::Builder::new()
                .name(kind.name().into())
                .stack_size(256 << 10)
                .spawn(move || inner.install(kind).is_ok());
            match started.map(std::thread::JoinHandle::join) {
                Ok(Ok(true)) => 0,
                _ => 1,
            }
        });
        assert!(matches!(status, WaitStatus::Exited(_, 0)), "{kind:?}: {status:?}");
        // A thread that it started is bound by its own filter.
        let inner = Arc::clone(&filters);
        let status = filtered(Starter, move || {
            let body =
                move || inner.install(kind).map(|()| call(libc::SYS_clone, [0x3d_0f00, 0, 0, 0, 0, 0]));
            let _ = std::thread::spawn(body).join();
            0
        });
        assert!(killed(status), "{kind:?}: {status:?}");
    }
    let status = filtered(Starter, || {
        let refused = call(libc::SYS_clone3, [0; 6]) == -1;
        i32::from(!(refused && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS)))
    });
    assert!(matches!(status, WaitStatus::Exited(_, 0)), "clone3: {status:?}");
}

/// A child in the jail that waits until it is told to end.
struct Jailed {
    pid: Pid,
    says: UnixStream,
}

impl Jailed {
    /// The child says what `then` returns when it is in, or why it isn't.
    fn new(
        plan: impl FnOnce(&UnixStream) -> Result<(), JailError>,
        then: impl FnOnce() -> String,
    ) -> (Self, String) {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let pid = child(|| {
            let said = match plan(&theirs) {
                Ok(()) => then(),
                Err(error) => format!("error: {error}"),
            };
            let _ = theirs.write_all(format!("{said}\n").as_bytes());
            let _ = theirs.read(&mut [0]);
            0
        });
        let mut said = Vec::new();
        let mut byte = [0];
        while ours.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
            said.push(byte[0]);
        }
        (Self { pid, says: ours }, String::from_utf8(said).unwrap())
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{file}", self.pid)).unwrap()
    }

    fn link(&self, file: &str) -> String {
        fs::read_link(format!("/proc/{}/{file}", self.pid)).unwrap().display().to_string()
    }

    /// A field of /proc/PID/status.
    fn status(&self, field: &str) -> String {
        let text = self.read("status");
        let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

impl Drop for Jailed {
    fn drop(&mut self) {
        let _ = self.says.write_all(b"x");
        waitpid(self.pid, None).unwrap();
    }
}

#[test]
fn each_step_of_the_way_in_is_seen_from_outside() {
    if !has_root("each_step_of_the_way_in_is_seen_from_outside") {
        return;
    }
    let stray = fs::File::open("/etc/passwd").unwrap();
    let (jailed, said) = Jailed::new(
        |stream| {
            close_all_but(&[stream.as_raw_fd()])?;
            enter(&Plan { file_bytes: Some(1 << 20), ..plan() })
        },
        || fs::read_dir("/").map_or_else(|error| error.to_string(), |entries| entries.count().to_string()),
    );
    assert_eq!(said, "0", "entries in the new root");
    let same = format!("{UID} {UID} {UID} {UID}");
    assert_eq!(
        (jailed.status("Uid"), jailed.status("Gid"), jailed.status("Groups")),
        (same.clone(), same, String::new())
    );
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(jailed.status(set), "0000000000000000", "{set}");
    }
    assert_eq!(jailed.status("NoNewPrivs"), "1");
    assert_eq!(jailed.status("Umask"), "0077");
    let mounts = jailed.read("mountinfo");
    assert_eq!(mounts.lines().count(), 1, "{mounts}");
    let fields: Vec<&str> = mounts.split_whitespace().collect();
    assert_eq!(fields[4], "/", "{mounts}");
    for option in ["ro", "nosuid", "nodev", "noexec"] {
        assert!(fields[5].split(',').any(|set| set == option), "{option}: {mounts}");
    }
    assert!(!mounts.contains("shared:") && !mounts.contains("master:"), "{mounts}");
    for namespace in ["mnt", "ipc", "uts"] {
        let name = format!("ns/{namespace}");
        assert_ne!(
            fs::read_link(format!("/proc/self/{name}")).unwrap().display().to_string(),
            jailed.link(&name)
        );
    }
    assert_eq!(fs::read_link("/proc/self/ns/net").unwrap().display().to_string(), jailed.link("ns/net"));
    let limits = jailed.read("limits");
    for (limit, most) in [
        ("Max open files", "64"),
        ("Max core file size", "0"),
        ("Max locked memory", "0"),
        ("Max msgqueue size", "0"),
        ("Max file size", "1048576"),
    ] {
        let line = limits.lines().find(|line| line.starts_with(limit)).unwrap();
        let values: Vec<&str> = line[limit.len()..].split_whitespace().take(2).collect();
        assert_eq!(values, [most, most], "{line}");
    }
    let open: BTreeSet<String> = fs::read_dir(format!("/proc/{}/fd", jailed.pid))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(open.len() <= 4 && !open.contains(&stray.as_raw_fd().to_string()), "{open:?}");
    // Not dumpable: its files in /proc are root's.
    use std::os::unix::fs::MetadataExt as _;
    assert_eq!(fs::metadata(format!("/proc/{}/environ", jailed.pid)).unwrap().uid(), 0);
}

#[test]
fn the_run_directory_is_the_only_place_that_paths_lead_to() {
    if !has_root("the_run_directory_is_the_only_place_that_paths_lead_to") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir_in(folder.path()).unwrap();
    let run = outside.path().join("run");
    fs::create_dir(&run).unwrap();
    let open =
        |path: &Path| fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    for path in [folder.path(), outside.path(), &run] {
        open(path);
    }
    let inside = UnixListener::bind(run.join("vsock_7")).unwrap();
    let _beside = UnixListener::bind(outside.path().join("other")).unwrap();
    open(&run.join("vsock_7"));
    open(&outside.path().join("other"));
    let (_jailed, said) = Jailed::new(
        |_| enter(&Plan { folder: Some(&run), ..plan() }),
        || {
            let reached = UnixStream::connect("./vsock_7").is_ok();
            let escaped = UnixStream::connect("../other").is_ok() || fs::metadata("../run").is_ok();
            let written = fs::File::create("/x").is_ok();
            format!("{reached} {escaped} {written}")
        },
    );
    assert_eq!(said, "true false false");
    drop(inside);
}

#[test]
fn a_directory_that_is_given_becomes_the_read_only_root() {
    if !has_root("a_directory_that_is_given_becomes_the_read_only_root") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    fs::set_permissions(root.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let (jailed, said) = Jailed::new(
        |_| enter(&Plan { root: Some(root.path()), ..plan() }),
        || fs::File::create("/x").map_or_else(|error| error.kind().to_string(), |_| "written".into()),
    );
    assert_eq!(said, "read-only filesystem or storage medium");
    assert_eq!(jailed.read("mountinfo").lines().count(), 1);
    // Outside nothing is mounted there.
    assert!(
        !fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&root.path().display().to_string())
    );
}

#[test]
fn who_is_not_root_learns_which_step_needs_it() {
    let (_jailed, said) = Jailed::new(
        |_| {
            if nix::unistd::geteuid().is_root() {
                nix::unistd::setresuid(UID.into(), UID.into(), UID.into()).unwrap();
            }
            enter(&plan())
        },
        || "in".into(),
    );
    let expected = "error: the jail cannot make mount, ipc and uts namespaces; start torpor-vmm as root, or without a jail for a test";
    assert_eq!(said, expected);
}

#[test]
fn a_process_with_threads_is_refused_before_anything_is_done() {
    let (jailed, said) = Jailed::new(
        |_| {
            let (_hold, wait) = std::sync::mpsc::channel::<()>();
            std::thread::spawn(move || wait.recv());
            enter(&plan())
        },
        || "in".into(),
    );
    assert!(said.contains("there are 2 threads"), "{said}");
    assert_eq!(jailed.status("Umask"), Jailed::new(|_| Ok(()), String::new).0.status("Umask"));
}

#[test]
fn a_step_that_fails_keeps_its_cause() {
    if !has_root("a_step_that_fails_keeps_its_cause") {
        return;
    }
    let nowhere = Path::new("/nonexistent/root");
    let (_jailed, said) = Jailed::new(
        |_| match enter(&Plan { root: Some(nowhere), ..plan() }) {
            Err(JailError::Step { step: Step::MountRoot, source })
                if source.raw_os_error() == Some(libc::ENOENT) =>
            {
                Ok(())
            }
            other => other,
        },
        || "as expected".into(),
    );
    assert_eq!(said, "as expected");
}

#[test]
fn the_process_joins_the_control_group_that_it_is_given() {
    let test = "the_process_joins_the_control_group_that_it_is_given";
    if !has_root(test) {
        return;
    }
    let group = Path::new("/sys/fs/cgroup").join(format!("torpor-jail-test-{}", std::process::id()));
    if !Path::new("/sys/fs/cgroup/cgroup.procs").exists() || fs::create_dir(&group).is_err() {
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIP {test}: no writable unified control group hierarchy\n"),
        );
        return;
    }
    let procs = fs::OpenOptions::new().write(true).open(group.join("cgroup.procs")).unwrap();
    let (jailed, said) = Jailed::new(
        |_| {
            let cgroup = Some(procs.as_fd());
            enter(&Plan { cgroup, ..plan() })
        },
        || "in".into(),
    );
    let inside = fs::read_to_string(group.join("cgroup.procs")).unwrap();
    let pid = jailed.pid.to_string();
    drop(jailed);
    fs::remove_dir(&group).unwrap();
    assert_eq!((said.as_str(), inside.trim()), ("in", pid.as_str()));
}
