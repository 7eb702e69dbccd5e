//! Kernel modules of the initramfs: those that a start needs, those that can wait, and those that the kernel asks for.
//!
//! Loading a module costs a guest milliseconds, most of them for its signature. So only what this machine has devices for is
//! loaded before there is a root disk; what a guest can do without for a while is loaded when it works; and file
//! systems that few use (overlay, fuse) when they are used: the kernel then calls the program of
//! /proc/sys/kernel/modprobe, which is ours (Documentation/admin-guide/sysctl/kernel.rst).

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    os::{
        fd::{AsRawFd as _, RawFd},
        unix::process::CommandExt as _,
    },
    path::Path,
    process::{Command, ExitCode},
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    kmod::{ModuleInitFlags, finit_module},
    sys::stat::{Mode, SFlag, makedev, mknod},
};

use crate::boot::say;

/// Where they are before the root is switched.
const FOLDER: &str = "/modules";
/// Names them, one a line, in an order that loads, each with the reasons to load it (images/src/kernel/when.rs).
const LIST: &str = "list";
/// The folder in the first process's table of descriptors, from where it can be reached when no path leads to it any
/// more. Above what the first process opens by itself, below the least limit.
const KEPT: RawFd = 200;
/// What the kernel runs for a module that isn't there.
const LOADER: &str = "/proc/sys/kernel/modprobe";
/// This program, also from a root in which it isn't.
const OURSELVES: &str = "/proc/1/exe";
/// The loader of an image that has its own modules.
const OF_IMAGE: &str = "/sbin/modprobe";
/// What can wait waits so long: the first commands shall not share their CPU with it.
const LATER: Duration = Duration::from_secs(2);

/// A line of the list.
#[derive(Debug, PartialEq, Eq)]
struct Module {
    file: String,
    reasons: Vec<Reason>,
}

#[derive(Debug, PartialEq, Eq)]
enum Reason {
    /// There is a virtio device of this kind.
    Virtio(u32),
    /// There is a PCI bus.
    Pci,
    /// As `Virtio`, but it can wait.
    Later(u32),
    /// The kernel asks for this name.
    For(String),
}

impl Module {
    fn is_needed_by(&self, kinds: &[u32], pci: bool) -> bool {
        self.reasons.is_empty()
            || self.reasons.iter().any(|reason| match reason {
                Reason::Virtio(kind) => kinds.contains(kind),
                Reason::Pci => pci,
                Reason::Later(_) | Reason::For(_) => false,
            })
    }

    fn is_asked_for_as(&self, name: &str) -> bool {
        self.reasons.iter().any(|reason| matches!(reason, Reason::For(other) if *other == name))
    }

    fn can_wait(&self) -> bool {
        self.reasons.iter().any(|reason| matches!(reason, Reason::Later(_)))
    }

    fn is_for_demand(&self) -> bool {
        self.reasons.iter().any(|reason| matches!(reason, Reason::For(_)))
    }
}

/// The list's lines. Words that are not known are reasons that are never given.
fn parse(list: &str) -> Vec<Module> {
    let lines = list.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let file = words.next()?.to_owned();
            Some(Module { file, reasons: words.map(reason).collect() })
        })
        .collect()
}

fn reason(word: &str) -> Reason {
    let kind = |kind: &str| kind.parse().unwrap_or_default();
    match word.split_once(':') {
        None if word == "pci" => Reason::Pci,
        Some(("virtio", number)) => Reason::Virtio(kind(number)),
        Some(("later", number)) => Reason::Later(kind(number)),
        Some(("for", name)) => Reason::For(plain(name)),
        _ => Reason::For(String::new()),
    }
}

/// Both spellings of a name are one.
fn plain(name: &str) -> String {
    name.replace('-', "_")
}

/// Loads what this machine needs to find its root disk and to be reached. `all`: also what seems to be needed by nothing
/// here, for a machine in which something is missing.
pub fn load_at_boot(all: bool) {
    let mut have = Vec::new();
    for module in read(Path::new(FOLDER)) {
        // The bus fills when its driver is loaded, which the list has before the devices'.
        have.clear();
        have.extend(virtio_devices());
        let waits = module.can_wait() || module.is_for_demand();
        if module.is_needed_by(&have, has_pci()) || all && !waits {
            load(Path::new(FOLDER), &module);
        }
    }
}

fn read(folder: &Path) -> Vec<Module> {
    parse(&fs::read_to_string(folder.join(LIST)).unwrap_or_default())
}

/// Kinds of the virtio devices on any bus (virtio 1.2, section 5).
fn virtio_devices() -> impl Iterator<Item = u32> {
    let devices = fs::read_dir("/sys/bus/virtio/devices").into_iter().flatten().flatten();
    devices.filter_map(|entry| {
        let text = fs::read_to_string(entry.path().join("device")).ok()?;
        u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
    })
}

fn has_pci() -> bool {
    fs::read_dir("/sys/bus/pci/devices").is_ok_and(|mut devices| devices.next().is_some())
}

/// A module that fails is said and skipped: whether it was needed shows in the steps after.
fn load(folder: &Path, module: &Module) -> bool {
    let path = folder.join(&module.file);
    let loaded = File::open(&path).and_then(|file| Ok(finit_module(&file, c"", ModuleInitFlags::empty())?));
    let Err(error) = loaded else { return true };
    // Already there, or a driver without its device.
    let harmless = matches!(error.raw_os_error(), Some(libc::EEXIST | libc::ENODEV));
    if !harmless {
        say(format_args!("load module {}: {error}", path.display()));
    }
    harmless
}

/// Gives the memory of the modules that are loaded back, and keeps hold of the others: after the switch of the root no
/// path leads to them. To be called before it.
pub fn keep() {
    let folder = Path::new(FOLDER);
    let (kept, done): (Vec<_>, Vec<_>) =
        read(folder).into_iter().partition(|module| module.can_wait() || module.is_for_demand());
    for module in done {
        let _ = fs::remove_file(folder.join(module.file));
    }
    if kept.is_empty() {
        let _ = fs::remove_dir_all(folder);
        return;
    }
    if let Err(error) = hold(folder) {
        say(format_args!("modules that are loaded on demand can't be kept: {error}"));
        return;
    }
    for module in &kept {
        make_nodes(module);
    }
    // A kernel without this file loads no modules on demand.
    let _ = fs::write(LOADER, OURSELVES);
}

fn hold(folder: &Path) -> io::Result<()> {
    let opened = File::open(folder)?;
    // SAFETY: the call makes a copy of a descriptor that is open, at a number that nothing of ours has at this time; what
    // it gives stays open for the process's life, and nobody owns it.
    Errno::result(unsafe { libc::dup3(opened.as_raw_fd(), KEPT, libc::O_CLOEXEC) })?;
    Ok(())
}

/// A device whose driver is loaded when it is opened has to be there before.
fn make_nodes(module: &Module) {
    let names = || {
        module.reasons.iter().filter_map(|reason| match reason {
            Reason::For(name) => Some(name.as_str()),
            _ => None,
        })
    };
    let Some(node) = names().find_map(|name| name.strip_prefix("devname:")) else { return };
    let number = names().find_map(|name| {
        let (major, minor) = name.strip_prefix("char_major_")?.split_once('_')?;
        Some(makedev(major.parse().ok()?, minor.parse().ok()?))
    });
    let Some(number) = number.filter(|_| !node.contains('/')) else { return };
    let mode = Mode::from_bits_truncate(0o600);
    // It is there when the driver is in the kernel.
    let _ = mknod(&Path::new("/dev").join(node), SFlag::S_IFCHR, mode, number);
}

fn kept_folder() -> String {
    format!("/proc/1/fd/{KEPT}")
}

/// Loads what could wait, in a while. For a guest that works.
pub fn load_later() {
    let load = || {
        thread::sleep(LATER);
        let folder = kept_folder();
        let folder = Path::new(&folder);
        let have: Vec<_> = virtio_devices().collect();
        for module in read(folder).iter().filter(|module| module.can_wait()) {
            let wanted = |reason: &Reason| matches!(reason, Reason::Later(kind) if have.contains(kind));
            if module.reasons.iter().any(wanted) {
                load(folder, module);
            }
            if !module.is_for_demand() {
                let _ = fs::remove_file(folder.join(&module.file));
            }
        }
    };
    if let Err(error) = thread::Builder::new().name("modules".to_owned()).spawn(load) {
        say(format_args!("start the thread that loads modules: {error}"));
    }
}

/// Called by the kernel in place of modprobe, which may be asked for anything.
pub fn load_for_kernel(arguments: &[OsString]) -> ExitCode {
    let wanted = arguments.last().map(|name| plain(&name.to_string_lossy())).unwrap_or_default();
    let folder = kept_folder();
    let folder = Path::new(&folder);
    let asked: Vec<_> = read(folder).into_iter().filter(|module| module.is_asked_for_as(&wanted)).collect();
    if asked.is_empty() {
        // An image may have modules of its own. It returns only when it can't be run.
        let _failed = Command::new(OF_IMAGE).args(arguments).exec();
        return ExitCode::FAILURE;
    }
    // Each, also after one that failed.
    let failed = asked.iter().filter(|module| !load(folder, module)).count();
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "00-virtio.ko\n# a word\n\n05-virtio_pci.ko pci\n06-virtio_blk.ko virtio:2\n\
        14-virtio_rng.ko later:4\n18-fuse.ko for:fs-fuse for:devname:fuse for:char-major-10-229 news:1\n";

    #[test]
    fn what_a_machine_needs_is_told_by_its_devices() {
        let modules = parse(LIST);
        let needed = |kinds: &[u32], pci| {
            let needed = modules.iter().filter(|module| module.is_needed_by(kinds, pci));
            needed.map(|module| module.file.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(needed(&[], false), ["00-virtio.ko"]);
        assert_eq!(needed(&[2, 4], false), ["00-virtio.ko", "06-virtio_blk.ko"]);
        assert_eq!(needed(&[], true), ["00-virtio.ko", "05-virtio_pci.ko"]);
    }

    #[test]
    fn a_module_answers_to_its_names_in_either_spelling_and_to_no_other() {
        let modules = parse(LIST);
        let fuse = &modules[4];
        for name in ["fs-fuse", "fs_fuse", "char-major-10-229"] {
            assert!(fuse.is_asked_for_as(&plain(name)), "{name}");
        }
        assert!(!fuse.is_asked_for_as("fuse") && fuse.is_for_demand() && !fuse.can_wait());
        assert!(modules.iter().all(|module| !module.is_asked_for_as("nothing")));
        assert!(modules[3].can_wait());
    }
}
