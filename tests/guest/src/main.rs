//! The first program of a guest in tests and benchmarks of machines: does what the kernel's command line says, tells it on the
//! console, and ends the machine.
//!
//! - `torpor.test=marker`: says `MARK` at once, before it looks at anything.
//! - `torpor.test=idle`: says `MARK`, then sleeps for ever.
//! - `torpor.test=disk`: measures /dev/vda at queue depth 1 (see [`disk`]).
//! - `torpor.test=load`: writes numbered blocks and says up to which number they are synced (see [`load`]).
//! - `torpor.end=poweroff|reboot|panic|fault`: how it ends afterwards; `fault` is a triple fault where `reboot=t` makes it one.

mod disk;
mod load;

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::Path,
    thread::sleep,
    time::Duration,
};

use nix::{
    errno::Errno,
    kmod::{ModuleInitFlags, finit_module},
    mount::{MsFlags, mount},
    sys::reboot::{RebootMode, reboot},
};

/// Names the kernel modules to load, one a line, in order.
const MODULES: &str = "/modules/list";
const DISK: &str = "/dev/vda";

fn main() {
    // The kernel gives unknown words of its command line to the first program: those with a dot to nobody, so they are read below.
    say("MARK");
    let ended = run();
    if let Err(error) = ended {
        say(&format!("FAILED {error}"));
    }
    end()
}

fn run() -> io::Result<()> {
    prepare()?;
    match option("torpor.test").as_deref() {
        Some("idle") => loop {
            sleep(Duration::from_secs(3600));
        },
        Some("disk") => {
            load_modules()?;
            disk::measure(&disk_device()?)
        }
        Some("load") => {
            load_modules()?;
            load::run(&disk_device()?)
        }
        _ => Ok(()),
    }
}

/// One line for the console.
fn say(line: &str) {
    // Nobody to tell when it can't be told.
    let _ = io::stdout().write_all(format!("{line}\n").as_bytes());
    let _ = io::stdout().flush();
}

fn prepare() -> io::Result<()> {
    for (kind, target) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        fs::create_dir_all(target)?;
        match mount(Some(kind), target, Some(kind), MsFlags::empty(), None::<&str>) {
            Ok(()) | Err(Errno::EBUSY) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// The value of a word of the kernel's command line.
fn option(name: &str) -> Option<String> {
    let line = fs::read_to_string("/proc/cmdline").ok()?;
    line.split_whitespace().find_map(|word| Some(word.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

fn load_modules() -> io::Result<()> {
    // Behind a name are reasons to load it, of which the agent makes something.
    for name in fs::read_to_string(MODULES)?.lines().filter_map(|line| line.split_whitespace().next()) {
        let file = File::open(Path::new("/modules").join(name))?;
        match finit_module(&file, c"", ModuleInitFlags::empty()) {
            Ok(()) | Err(Errno::EEXIST | Errno::ENODEV) => {}
            Err(errno) => say(&format!("module {name}: {errno}")),
        }
    }
    Ok(())
}

/// The disk, past the page cache, once it is there.
fn disk_device() -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;
    for _ in 0..1000 {
        if Path::new(DISK).exists() {
            return OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(DISK);
        }
        sleep(Duration::from_millis(5));
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("{DISK} did not appear")))
}

fn end() -> ! {
    let how = option("torpor.end");
    let mode = match how.as_deref() {
        Some("reboot" | "fault") => RebootMode::RB_AUTOBOOT,
        // The first program's end is a panic.
        Some("panic") => std::process::exit(1),
        _ => RebootMode::RB_POWER_OFF,
    };
    let Err(errno) = reboot(mode);
    say(&format!("FAILED to end: {errno}"));
    std::process::exit(1)
}
