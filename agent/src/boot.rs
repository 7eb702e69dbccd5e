//! From the kernel's hand to a running root: modules, mounts, disk, switch of the root.

use std::{
    fmt::Display,
    fs, io,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    mount::{MsFlags, mount},
    sys::stat::Mode,
    unistd::{chdir, chroot, dup2_stderr, dup2_stdin, dup2_stdout},
};

use crate::{disk, modules};

const ROOT_DISK: &str = "/dev/vda";
const NEW_ROOT: &str = "/newroot";
/// The driver may still be looking for its devices.
const DISK_WITHIN: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(5);

/// An essential step of the boot failed.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A mount failed.
    #[error("mount {source_name} on {target} as {kind}: {}", source.desc())]
    Mount {
        /// Device or name.
        source_name: String,
        /// Where.
        target: String,
        /// File system.
        kind: String,
        /// Why.
        source: Errno,
    },
    /// The root disk did not appear.
    #[error(
        "root disk {ROOT_DISK} did not appear within {} s; block devices: {present}",
        DISK_WITHIN.as_secs()
    )]
    NoDisk {
        /// Those that are there.
        present: String,
    },
    /// Another system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was attempted.
        what: String,
        /// Why.
        source: io::Error,
    },
}

/// Prints one line for the console.
pub fn say(text: impl Display) {
    eprintln!("torpor-agent: {text}");
}

/// Does everything up to a root file system in which commands can run.
///
/// # Errors
/// [`BootError`]: without the step that failed there is no sandbox.
pub fn prepare() -> Result<(), BootError> {
    mount_on("devtmpfs", "/dev", "devtmpfs", MsFlags::MS_NOSUID, None)?;
    open_console()?;
    mount_on("proc", "/proc", "proc", quiet(), None)?;
    mount_on("sysfs", "/sys", "sysfs", quiet(), None)?;
    mount_on("tmpfs", "/run", "tmpfs", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some("mode=755"))?;
    modules::load_at_boot(false);
    if !Path::new(ROOT_DISK).exists() {
        modules::load_at_boot(true);
    }
    wait_for_disk()?;
    mount_root()?;
    modules::keep();
    switch_root()?;
    finish_dev()?;
    // Images without /tmp are rare, programs that need it are not.
    if !Path::new("/tmp").exists() && fs::create_dir("/tmp").is_ok() {
        let _ = fs::set_permissions("/tmp", fs::Permissions::from_mode(0o1777));
    }
    Ok(())
}

/// Flags of a file system that holds no programs.
fn quiet() -> MsFlags {
    MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC
}

fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> BootError {
    let what = what.into();
    move |source| BootError::Io { what, source }
}

fn mount_on(
    source: &str,
    target: &str,
    kind: &str,
    flags: MsFlags,
    options: Option<&str>,
) -> Result<(), BootError> {
    make_folder(target)?;
    match mount(Some(source), target, Some(kind), flags, options) {
        // The kernel may have mounted /dev itself.
        Ok(()) | Err(Errno::EBUSY) => Ok(()),
        Err(errno) => Err(BootError::Mount {
            source_name: source.to_owned(),
            target: target.to_owned(),
            kind: kind.to_owned(),
            source: errno,
        }),
    }
}

fn make_folder(path: &str) -> Result<(), BootError> {
    if Path::new(path).is_dir() {
        return Ok(());
    }
    fs::create_dir_all(path).map_err(failed(format!("make {path}")))
}

/// What is printed goes to the console; nothing is read from it.
fn open_console() -> Result<(), BootError> {
    let opened = |path: &str, flags| {
        open(path, flags | OFlag::O_NOCTTY | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(|errno| failed(format!("open {path}"))(errno.into()))
    };
    let null = opened("/dev/null", OFlag::O_RDWR)?;
    // A kernel without a console still boots: then nobody reads what is said.
    let console = opened("/dev/console", OFlag::O_WRONLY).or_else(|_| opened("/dev/null", OFlag::O_RDWR))?;
    dup2_stdin(&null)
        .and_then(|()| dup2_stdout(&console))
        .and_then(|()| dup2_stderr(&console))
        .map_err(|errno| failed("attach to the console")(errno.into()))
}

fn wait_for_disk() -> Result<(), BootError> {
    let limit = Instant::now() + DISK_WITHIN;
    while !Path::new(ROOT_DISK).exists() {
        if Instant::now() > limit {
            let present: Vec<_> = fs::read_dir("/sys/block")
                .into_iter()
                .flatten()
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .collect();
            let present = if present.is_empty() { "none".to_owned() } else { present.join(" ") };
            return Err(BootError::NoDisk { present });
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

fn mount_root() -> Result<(), BootError> {
    mount_on(ROOT_DISK, NEW_ROOT, "ext4", MsFlags::empty(), None)?;
    grow_root(Path::new(NEW_ROOT));
    Ok(())
}

/// Grows the root file system, mounted there, to its disk. A root that can't grow is still a root.
pub fn grow_root(mounted: &Path) {
    match disk::grow(Path::new(ROOT_DISK), mounted) {
        Ok(None) => {}
        Ok(Some(bytes)) => say(format_args!("root file system grown to {bytes} bytes")),
        Err(error) => say(format_args!("root file system not grown: {error}")),
    }
}

fn switch_root() -> Result<(), BootError> {
    for name in ["dev", "proc", "sys", "run"] {
        let target = format!("{NEW_ROOT}/{name}");
        // An image may have a link where a folder is wanted, or nothing at all.
        if Path::new(&target).is_symlink() {
            let _ = fs::remove_file(&target);
        }
        make_folder(&target)?;
        move_mount(&format!("/{name}"), &target)?;
    }
    chdir(NEW_ROOT).map_err(|errno| failed(format!("enter {NEW_ROOT}"))(errno.into()))?;
    move_mount(".", "/")?;
    chroot(".").and_then(|()| chdir("/")).map_err(|errno| failed("switch to the new root")(errno.into()))
}

fn move_mount(from: &str, to: &str) -> Result<(), BootError> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_MOVE, None::<&str>).map_err(|source| BootError::Mount {
        source_name: from.to_owned(),
        target: to.to_owned(),
        kind: "move".to_owned(),
        source,
    })
}

/// What programs expect in /dev and /sys beyond what the kernel puts there.
fn finish_dev() -> Result<(), BootError> {
    let terminals = Some("gid=5,mode=620,ptmxmode=666");
    mount_on("devpts", "/dev/pts", "devpts", MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, terminals)?;
    mount_on("tmpfs", "/dev/shm", "tmpfs", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some("mode=1777"))?;
    for (target, link) in [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ] {
        let _ = symlink(target, PathBuf::from(link));
    }
    // A kernel without cgroups can't hold commands as tightly, but can run them.
    if let Err(error) = mount_on("cgroup2", "/sys/fs/cgroup", "cgroup2", quiet(), None) {
        say(error);
    }
    Ok(())
}
