//! Fork and exec with everything between the two: session, cgroup, terminal, groups, user, directory.

use std::{
    collections::HashMap,
    ffi::{CString, OsStr},
    fs::File,
    io::Read as _,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd},
        unix::ffi::OsStrExt as _,
    },
    path::PathBuf,
    ptr,
};

use nix::{errno::Errno, fcntl::OFlag, unistd::Pid};
use tokio::sync::oneshot;
use torpor_proto::agent::v1::{WindowSize, exec_error::Kind};

use super::{cgroup::Cgroups, users::Identity};
use crate::reaper::{Exit, Reaper};

/// Where commands are looked for when the environment names no PATH.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A command could not be started.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct SpawnError {
    /// What kind of fault it is.
    pub kind: Kind,
    /// In words, with the name of the thing.
    pub message: String,
}

impl SpawnError {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    fn os(what: &str, error: Errno) -> Self {
        Self::new(Kind::Other, format!("{what}: {}", error.desc()))
    }
}

/// What to run.
pub struct Plan {
    pub argv: Vec<String>,
    pub environment: HashMap<String, String>,
    pub workdir: String,
    pub identity: Identity,
    /// A pipe for stdin; else /dev/null.
    pub stdin: bool,
    /// A terminal of this size for all three; `stdin` has no meaning then.
    pub tty: Option<WindowSize>,
}

/// Our ends of a running command.
pub struct Child {
    pub pid: Pid,
    pub exit: oneshot::Receiver<Exit>,
    pub cgroup: Option<PathBuf>,
    pub ends: Ends,
}

/// Streams of a command, ours.
pub enum Ends {
    Pipes { stdin: Option<OwnedFd>, stdout: OwnedFd, stderr: OwnedFd },
    Tty(OwnedFd),
}

/// The step at which the child failed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Setup = 1,
    User = 2,
    Directory = 3,
    Exec = 4,
}

/// All that the child needs, made before the fork: after it nothing may allocate.
struct Prepared {
    programs: Vec<CString>,
    arguments: Pointers,
    environment: Pointers,
    workdir: CString,
    identity: Identity,
    change_user: bool,
    tty: bool,
    stdio: [RawFd; 3],
    cgroup: Option<RawFd>,
    report: RawFd,
}

/// Strings and the null-terminated list of their addresses.
struct Pointers {
    list: Vec<*const libc::c_char>,
    _strings: Vec<CString>,
}

impl Pointers {
    fn new(strings: Vec<CString>) -> Self {
        // The addresses are those of the heap, so moving the vector doesn't change them.
        let list = strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect();
        Self { list, _strings: strings }
    }
}

/// Starts a command. Blocks until it has replaced the child, or the child has said why not.
///
/// # Errors
/// [`SpawnError`] with the step's kind.
pub fn spawn(plan: &Plan, reaper: &Reaper, cgroups: &Cgroups) -> Result<Child, SpawnError> {
    let (ends, theirs) = streams(plan)?;
    let (report, reported) =
        nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|error| SpawnError::os("make a pipe", error))?;
    let cgroup = cgroups.create();
    let prepared = Prepared {
        programs: programs(plan)?,
        arguments: Pointers::new(strings("argument", plan.argv.iter().cloned())?),
        environment: Pointers::new(strings(
            "environment variable",
            plan.environment.iter().map(|(name, value)| format!("{name}={value}")),
        )?),
        workdir: string("directory", &plan.workdir)?,
        identity: plan.identity.clone(),
        change_user: nix::unistd::geteuid().is_root() || nix::unistd::geteuid().as_raw() != plan.identity.uid,
        tty: plan.tty.is_some(),
        stdio: theirs.each(),
        cgroup: cgroup.as_ref().map(|(_, procs)| procs.as_raw_fd()),
        report: reported.as_raw_fd(),
    };
    // SAFETY: the child calls nothing but async-signal-safe functions until it execs or exits.
    let forked = reaper.register(|| match unsafe { libc::fork() } {
        0 => run(&prepared),
        pid => Errno::result(pid).map(Pid::from_raw),
    });
    drop((reported, theirs));
    let cgroup = cgroup.map(|(path, _)| path);
    let failed = |error| {
        if let Some(path) = cgroup.clone() {
            cgroups.retire(path);
        }
        error
    };
    let (pid, exit) = forked.map_err(|error| failed(SpawnError::os("fork", error)))?;
    verdict(report, plan, &prepared.programs).map_err(failed)?;
    Ok(Child { pid, exit, cgroup, ends })
}

/// Their ends of the streams.
enum Theirs {
    Separate([OwnedFd; 3]),
    Tty(OwnedFd),
}

impl Theirs {
    fn each(&self) -> [RawFd; 3] {
        match self {
            Self::Separate(fds) => [fds[0].as_raw_fd(), fds[1].as_raw_fd(), fds[2].as_raw_fd()],
            Self::Tty(fd) => [fd.as_raw_fd(); 3],
        }
    }
}

fn streams(plan: &Plan) -> Result<(Ends, Theirs), SpawnError> {
    if let Some(size) = &plan.tty {
        let (ours, theirs) =
            terminal(size, plan.identity.uid).map_err(|error| SpawnError::os("open a terminal", error))?;
        return Ok((Ends::Tty(ours), Theirs::Tty(theirs)));
    }
    let pipe = || nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|error| SpawnError::os("make a pipe", error));
    let (stdin, their_stdin) = if plan.stdin {
        let (read, write) = pipe()?;
        (Some(write), read)
    } else {
        let null = File::open("/dev/null")
            .map_err(|error| SpawnError::new(Kind::Other, format!("open /dev/null: {error}")))?;
        (None, null.into())
    };
    let (stdout, their_stdout) = pipe()?;
    let (stderr, their_stderr) = pipe()?;
    Ok((Ends::Pipes { stdin, stdout, stderr }, Theirs::Separate([their_stdin, their_stdout, their_stderr])))
}

/// Both sides of a new terminal that has its size and its owner before anybody sees it.
fn terminal(size: &WindowSize, owner: u32) -> Result<(OwnedFd, OwnedFd), Errno> {
    let master = nix::fcntl::open(
        "/dev/ptmx",
        OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC,
        nix::sys::stat::Mode::empty(),
    )?;
    let unlock: libc::c_int = 0;
    // SAFETY: TIOCSPTLCK reads one int.
    Errno::result(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlock) })?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: TIOCGPTPEER takes open flags and returns a new descriptor, so no path in /dev/pts is needed.
    let slave = Errno::result(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) })?;
    // SAFETY: the descriptor was just made and is nobody else's.
    let slave = unsafe { OwnedFd::from_raw_fd(slave) };
    resize(master.as_raw_fd(), size)?;
    // Refused without privilege: then the terminal stays ours, which is the same user.
    let _ = nix::unistd::fchown(&slave, Some(owner.into()), None);
    Ok((master, slave))
}

/// Sets the size of a terminal; zero columns or rows mean 80 and 24.
pub fn resize(terminal: RawFd, size: &WindowSize) -> Result<(), Errno> {
    let or =
        |value: u32, default| if value == 0 { default } else { u16::try_from(value).unwrap_or(u16::MAX) };
    let size =
        libc::winsize { ws_col: or(size.cols, 80), ws_row: or(size.rows, 24), ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCSWINSZ reads one winsize.
    Errno::result(unsafe { libc::ioctl(terminal, libc::TIOCSWINSZ, &raw const size) }).map(drop)
}

fn string(what: &str, text: &str) -> Result<CString, SpawnError> {
    CString::new(text)
        .map_err(|_| SpawnError::new(Kind::Invalid, format!("{what} {text:?} holds a zero byte")))
}

fn strings(what: &str, texts: impl Iterator<Item = String>) -> Result<Vec<CString>, SpawnError> {
    texts.map(|text| string(what, &text)).collect()
}

/// The files that the command may be, in order.
fn programs(plan: &Plan) -> Result<Vec<CString>, SpawnError> {
    let name = plan.argv.first().map(String::as_str).unwrap_or_default();
    if name.is_empty() {
        return Err(SpawnError::new(Kind::Invalid, "the command is empty"));
    }
    if name.contains('/') {
        return Ok(vec![string("command", name)?]);
    }
    let path = plan.environment.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    path.split(':')
        .map(|folder| if folder.is_empty() { "." } else { folder })
        .map(|folder| string("command", &format!("{folder}/{name}")))
        .collect()
}

/// Reads the child's report: nothing when it became the command.
fn verdict(report: OwnedFd, plan: &Plan, programs: &[CString]) -> Result<(), SpawnError> {
    let mut bytes = Vec::new();
    File::from(report)
        .read_to_end(&mut bytes)
        .map_err(|error| SpawnError::new(Kind::Other, format!("read the report of the child: {error}")))?;
    let [step, number @ ..] = bytes.as_slice() else {
        return Ok(());
    };
    let errno = Errno::from_raw(i32::from_le_bytes(number.try_into().unwrap_or_default()));
    Err(explain(*step, errno, plan, programs))
}

fn explain(step: u8, errno: Errno, plan: &Plan, programs: &[CString]) -> SpawnError {
    let name = plan.argv.first().map(String::as_str).unwrap_or_default();
    let reason = errno.desc();
    if step == Step::Directory as u8 {
        let kind = match errno {
            Errno::ENOENT | Errno::ENOTDIR => Kind::NoSuchDirectory,
            _ => Kind::Other,
        };
        return SpawnError::new(kind, format!("enter directory {}: {reason}", plan.workdir));
    }
    if step == Step::User as u8 {
        let user = &plan.identity;
        return SpawnError::new(Kind::Other, format!("become user {}:{}: {reason}", user.uid, user.gid));
    }
    if step != Step::Exec as u8 {
        return SpawnError::new(Kind::Other, format!("prepare the streams of {name:?}: {reason}"));
    }
    match errno {
        Errno::ENOENT | Errno::ENOTDIR => {
            let there = programs
                .iter()
                .map(|program| OsStr::from_bytes(program.as_bytes()))
                .find(|program| std::fs::metadata(program).is_ok_and(|file| file.is_file()));
            let message = match there {
                Some(file) => format!("{}: its interpreter or loader is not in the image", file.display()),
                None => format!("command {name:?} not found in the image"),
            };
            SpawnError::new(Kind::NotFound, message)
        }
        Errno::EACCES | Errno::ENOEXEC | Errno::EISDIR | Errno::EPERM => {
            SpawnError::new(Kind::NotExecutable, format!("command {name:?} can't be executed: {reason}"))
        }
        _ => SpawnError::new(Kind::Other, format!("execute {name:?}: {reason}")),
    }
}

/// The child, between fork and exec.
fn run(prepared: &Prepared) -> ! {
    let (step, errno) = become_command(prepared);
    let number = (errno as i32).to_le_bytes();
    let report = [step as u8, number[0], number[1], number[2], number[3]];
    // SAFETY: writes five bytes of the stack to the report pipe, then leaves without running anything of the parent's.
    unsafe {
        libc::write(prepared.report, report.as_ptr().cast(), report.len());
        libc::_exit(127)
    }
}

fn check(step: Step, result: libc::c_int) -> Result<(), (Step, Errno)> {
    Errno::result(result).map(drop).map_err(|errno| (step, errno))
}

/// Returns only when it failed.
fn become_command(prepared: &Prepared) -> (Step, Errno) {
    let set_up = set_up(prepared).and_then(|()| change_user(prepared)).and_then(|()| {
        // SAFETY: a null-terminated string made before the fork.
        check(Step::Directory, unsafe { libc::chdir(prepared.workdir.as_ptr()) })
    });
    if let Err(failed) = set_up {
        return failed;
    }
    let mut worst = Errno::ENOENT;
    for program in &prepared.programs {
        // SAFETY: both lists end in null and point to strings that `prepared` keeps.
        unsafe {
            libc::execve(
                program.as_ptr(),
                prepared.arguments.list.as_ptr(),
                prepared.environment.list.as_ptr(),
            );
        }
        match Errno::last() {
            Errno::ENOENT | Errno::ENOTDIR => {}
            // As shells do: a later folder of PATH may have one that is executable.
            Errno::EACCES => worst = Errno::EACCES,
            errno => return (Step::Exec, errno),
        }
    }
    (Step::Exec, worst)
}

fn set_up(prepared: &Prepared) -> Result<(), (Step, Errno)> {
    // SAFETY: plain system calls on numbers and on memory of this frame; each is async-signal-safe.
    unsafe {
        // What the parent ignores or blocks would be ignored or blocked in the command. By the raw call: libc keeps its
        // hands off two of the numbers, which may have come to us ignored.
        let default = [0_u64; 4];
        for number in 1..=64 {
            let none = ptr::null_mut::<u64>();
            libc::syscall(libc::SYS_rt_sigaction, number, default.as_ptr(), none, 8_usize);
        }
        // All of ours close by themselves; what we were given ourselves must not go on either.
        libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        check(Step::Setup, libc::setsid())?;
        if let Some(cgroup) = prepared.cgroup {
            check(Step::Setup, libc::write(cgroup, c"0".as_ptr().cast(), 1) as libc::c_int)?;
        }
        for (target, source) in prepared.stdio.iter().enumerate() {
            check(Step::Setup, libc::dup2(*source, target as libc::c_int))?;
        }
        if prepared.tty {
            check(Step::Setup, libc::ioctl(0, libc::TIOCSCTTY, 0))?;
        }
        libc::umask(0o022);
    }
    Ok(())
}

fn change_user(prepared: &Prepared) -> Result<(), (Step, Errno)> {
    let identity = &prepared.identity;
    if !prepared.change_user {
        return Ok(());
    }
    // SAFETY: plain system calls on numbers and a list made before the fork. The raw calls change this process, which
    // has one thread; libc's own would wait for threads that fork did not copy.
    unsafe {
        let groups = &identity.groups;
        check(Step::User, libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) as libc::c_int)?;
        let (gid, uid) = (identity.gid, identity.uid);
        check(Step::User, libc::syscall(libc::SYS_setresgid, gid, gid, gid) as libc::c_int)?;
        check(Step::User, libc::syscall(libc::SYS_setresuid, uid, uid, uid) as libc::c_int)
    }
}
