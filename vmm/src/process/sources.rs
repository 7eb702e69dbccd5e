//! Everything that the configuration names, opened or adopted before the process confines itself.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use torpor_overlay::Lock;
use torpor_vmm_api::{AgentSocket, Config, Disk, Net, RateLimit, Source};
use torpor_vmm_devices::legacy::Console;

use super::arguments::ConfigSource;
use super::endfile;
use super::error::StartError;

/// Longest configuration, bytes.
const LONGEST_CONFIG: u64 = 1 << 20;

/// What is open.
pub(super) struct Opened {
    pub(super) kvm: File,
    pub(super) kernel: File,
    pub(super) initramfs: Option<File>,
    pub(super) disks: Vec<OpenDisk>,
    pub(super) tap: Option<OwnedFd>,
    pub(super) console: Console,
    pub(super) control: Option<UnixListener>,
    pub(super) vsock: Option<UnixListener>,
    cgroup: Option<File>,
}

/// A disk's files.
pub(super) enum OpenDisk {
    Overlay { lock: Lock, base: File, base_path: PathBuf, serial: String, rate: Option<RateLimit> },
    Raw { file: File, read_only: bool, serial: String, rate: Option<RateLimit> },
}

impl Opened {
    /// `cgroup.procs` of the control group to join.
    pub(super) fn cgroup(&self) -> Option<BorrowedFd<'_>> {
        self.cgroup.as_ref().map(File::as_fd)
    }
}

/// Reads all of it; not more than makes sense.
pub(super) fn read_config(source: &ConfigSource) -> Result<Config, StartError> {
    let (from, opened) = match source {
        ConfigSource::Fd(fd) => (format!("descriptor {fd}"), adopt("--config-fd", *fd).map(File::from)),
        ConfigSource::File(path) => {
            let from = path.display().to_string();
            let opened = File::open(path);
            (from.clone(), opened.map_err(|source| StartError::ReadConfig { from, source }))
        }
    };
    let mut text = Vec::new();
    let read = opened?.take(LONGEST_CONFIG + 1).read_to_end(&mut text);
    read.map_err(|source| StartError::ReadConfig { from, source })?;
    if text.len() as u64 > LONGEST_CONFIG {
        return Err(StartError::LongConfig(LONGEST_CONFIG));
    }
    serde_json::from_slice(&text).map_err(StartError::Json)
}

/// Opens the end file, first of all: what goes wrong later is told in it.
pub(super) fn open_end(config: &Config) -> Result<(), StartError> {
    let Some(end) = &config.end else { return Ok(()) };
    endfile::keep(create("end", end)?);
    Ok(())
}

/// Opens the rest.
pub(super) fn open(config: &Config) -> Result<Opened, StartError> {
    let kvm = open_path("hypervisor", Path::new("/dev/kvm"), true)?;
    let jail = config.jail.as_ref();
    let console = config.console.as_ref().map(|source| console(source, config.console_bytes)).transpose()?;
    Ok(Opened {
        kvm,
        kernel: read_only("kernel", &config.kernel)?,
        initramfs: config.initramfs.as_ref().map(|source| read_only("initramfs", source)).transpose()?,
        disks: config.disks.iter().enumerate().map(disk).collect::<Result<_, _>>()?,
        tap: config.net.as_ref().map(|Net { tap_fd, .. }| adopt("net.tap_fd", *tap_fd)).transpose()?,
        console: console.unwrap_or(Console::None),
        control: control(config)?,
        vsock: config.vsock.as_ref().map(vsock).transpose()?,
        cgroup: jail
            .and_then(|jail| jail.cgroup.as_ref())
            .map(|source| create("jail.cgroup", source))
            .transpose()?,
    })
}

fn disk((place, disk): (usize, &Disk)) -> Result<OpenDisk, StartError> {
    match disk {
        Disk::Overlay { image, path, base, serial, rate } => {
            let lock = match image {
                Source::Fd(fd) => Lock::from_fd(adopt(&format!("disks[{place}].image"), *fd)?, path)?,
                Source::Path(image) => Lock::acquire(image)?,
            };
            let base_path = match base {
                Source::Fd(_) => path.with_extension("base"),
                Source::Path(base) => base.clone(),
            };
            let base = read_only(&format!("disks[{place}].base"), base)?;
            Ok(OpenDisk::Overlay { lock, base, base_path, serial: serial.clone(), rate: *rate })
        }
        Disk::Raw { file, read_only, serial, rate } => {
            let field = format!("disks[{place}].file");
            let file = match file {
                Source::Fd(fd) => adopt(&field, *fd)?.into(),
                Source::Path(path) => open_path(&field, path, !read_only)?,
            };
            Ok(OpenDisk::Raw { file, read_only: *read_only, serial: serial.clone(), rate: *rate })
        }
    }
}

fn console(source: &Source, bytes: u32) -> Result<Console, StartError> {
    let file = create("console", source)?;
    Console::open(file, bytes.into()).map_err(StartError::host("prepare the console's file"))
}

fn control(config: &Config) -> Result<Option<UnixListener>, StartError> {
    match (config.control_fd, &config.control) {
        (Some(fd), _) => Ok(Some(adopt("control_fd", fd)?.into())),
        (None, Some(path)) => listen("control", path).map(Some),
        (None, None) => Ok(None),
    }
}

fn vsock(vsock: &AgentSocket) -> Result<UnixListener, StartError> {
    match vsock.listener_fd {
        Some(fd) => Ok(adopt("vsock.listener_fd", fd)?.into()),
        None => listen("vsock", &vsock.socket),
    }
}

/// A Unix socket that only its owner can connect to.
fn listen(what: &'static str, path: &Path) -> Result<UnixListener, StartError> {
    use nix::sys::stat::{Mode, umask};
    let before = umask(Mode::from_bits_truncate(0o177));
    let listener = UnixListener::bind(path);
    umask(before);
    listener.map_err(|source| StartError::Socket { what, path: path.to_owned(), source })
}

fn read_only(field: &str, source: &Source) -> Result<File, StartError> {
    match source {
        Source::Fd(fd) => Ok(adopt(field, *fd)?.into()),
        Source::Path(path) => open_path(field, path, false),
    }
}

fn open_path(field: &str, path: &Path, write: bool) -> Result<File, StartError> {
    let opened = OpenOptions::new().read(true).write(write).open(path);
    opened.map_err(|source| StartError::Open { field: field.to_owned(), path: path.to_owned(), source })
}

/// A file to write to, made if it isn't there.
fn create(field: &str, source: &Source) -> Result<File, StartError> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let path = match source {
        Source::Fd(fd) => return Ok(adopt(field, *fd)?.into()),
        Source::Path(path) => path,
    };
    let opened =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    // Not every file that can be written to can be read.
    let opened = opened.or_else(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => OpenOptions::new().write(true).open(path),
        _ => Err(error),
    });
    opened.map_err(|source| StartError::Open { field: field.to_owned(), path: path.to_owned(), source })
}

/// Becomes the owner of an inherited descriptor.
fn adopt(field: &str, fd: RawFd) -> Result<OwnedFd, StartError> {
    // SAFETY: the call takes numbers and changes nothing in this process.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1 {
        let source = io::Error::last_os_error();
        return Err(StartError::Descriptor { field: field.to_owned(), fd, source });
    }
    // SAFETY: it is open, as just seen; whoever started the process says in the configuration that it is ours, and the
    // validation has seen to it that it is named once.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// All descriptors that were inherited for a purpose.
pub(super) fn inherited(config: &Config) -> Vec<RawFd> {
    let mut all: Vec<RawFd> = config.descriptors().into_iter().map(|(_, fd)| fd).collect();
    all.extend(endfile::file().map(|file| file.as_raw_fd()));
    all
}

/// More descriptors than the process can need: those of devices, CPUs and clients, and one for each vsock connection.
pub(super) fn most_descriptors(config: &Config) -> u64 {
    const OTHERS: u64 = 512;
    OTHERS + config.vsock.as_ref().map_or(0, |vsock| u64::from(vsock.connections))
}
