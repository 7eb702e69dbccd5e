//! torpor-vmm on KVM: our own monitor, the machine that the product is made for.

use std::{
    fs::{self, File, Permissions},
    io::{self, Read as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{
            fs::{FileExt as _, PermissionsExt as _},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use torpor_sandbox::DriverError;
use torpor_vmm_api::{
    AgentSocket, Config, Disk, End, EndFile, HugePages, Jail, Net, Source,
    console::ConsoleReader,
    kernel_line::{host_makes_huge_pages, kernel_line},
};

use super::{AgentEndpoint, GuestEnd, LastWords, Launch, Machine, Monitor, Plan, control::Control};
use crate::sys;

/// As in the spec.
pub(crate) const NAME: &str = "kvm";
/// The program when it is looked up in PATH.
pub(crate) const PROGRAM: &str = "torpor-vmm";
/// CPUs of a VM of this machine; sandboxes with more run on QEMU.
pub(crate) const MOST_CPUS: u32 = torpor_vmm_api::MOST_CPUS as u32;
/// Where the agent listens on vsock (agent/src/serve.rs).
const AGENT_PORT: u32 = 1024;
/// The serial number of the disk that the guest boots from.
pub(super) const ROOT_DISK: &str = "root";
const CONTROL: &str = "control.sock";
const VSOCK: &str = "vsock.sock";
/// The folder of the listeners that the guest reaches over vsock, each named by its port. It is all that torpor-vmm sees of
/// the file system.
const PORTS: &str = "ports";
const CONSOLE: &str = "console.ring";
/// How far the console was taken over: a later gateway goes on from there.
const CONSOLE_READ: &str = "console.read";
const END: &str = "end.json";
/// What of it is read, bytes.
const LONGEST_END: u64 = 64 << 10;

/// torpor-vmm.
#[derive(Debug)]
pub(crate) struct Kvm {
    program: PathBuf,
}

impl Kvm {
    pub(crate) fn new(program: &Path) -> Self {
        Self { program: program.to_owned() }
    }
}

/// The whole configuration of a VM; the numbers of its descriptors are those in this process.
fn config(launch: &Launch<'_>, control: &OwnedFd, vsock: &OwnedFd) -> Result<Config, DriverError> {
    let path = |path: &Path| Source::Path(path.to_owned());
    let invalid = |what: &str, given: u64| DriverError::Invalid(format!("{what}: {given} is too much"));
    let disk = Disk::Overlay {
        image: Source::Fd(0),
        path: launch.overlay.to_owned(),
        base: path(launch.base),
        serial: ROOT_DISK.to_owned(),
        rate: None,
    };
    let net = Net {
        tap_fd: launch.tap_fd,
        mac: launch.net.mac.0,
        mtu: u16::try_from(launch.mtu).map_err(|_| invalid("mtu", launch.mtu.into()))?,
        send: None,
        receive: None,
    };
    let vsock = AgentSocket {
        cid: launch.net.cid,
        socket: launch.run_dir.join(VSOCK),
        ports: Some(launch.run_dir.join(PORTS)),
        listener_fd: Some(vsock.as_raw_fd()),
        connections: 256,
    };
    Ok(Config {
        cpus: u8::try_from(launch.cpus).map_err(|_| invalid("resources.cpus", launch.cpus.into()))?,
        memory_bytes: launch.memory_bytes.next_multiple_of(torpor_vmm_api::validate::MEMORY_STEP),
        huge_pages: HugePages::Default,
        // A bzImage takes a tenth of a second to unpack itself.
        kernel: path(launch.unpacked_kernel.unwrap_or(launch.kernel)),
        initramfs: Some(path(launch.initramfs)),
        command_line: kernel_line(launch.memory_bytes, host_makes_huge_pages()),
        disks: vec![disk],
        net: Some(net),
        vsock: Some(vsock),
        balloon: true,
        console: Some(path(&launch.run_dir.join(CONSOLE))),
        console_bytes: 64 << 10,
        control: None,
        control_fd: Some(control.as_raw_fd()),
        end: Some(path(&launch.run_dir.join(END))),
        jail: Some(Jail { uid: launch.uid, root: None, seccomp: true, cgroup: None }),
    })
}

/// A socket that is there before the process is: who connects early waits in its queue.
fn listen(run_dir: &Path, name: &str) -> Result<OwnedFd, DriverError> {
    let path = run_dir.join(name);
    let made = UnixListener::bind(&path);
    made.map(OwnedFd::from)
        .map_err(|source| DriverError::backend(format!("listen on {}", path.display()), source))
}

/// Makes the folder of the listeners for the guest: the VM's user may look names up in it, and no more; nobody else may
/// even that.
fn make_ports(run_dir: &Path, uid: Option<u32>) -> Result<(), DriverError> {
    let path = run_dir.join(PORTS);
    let made = fs::create_dir(&path)
        .and_then(|()| uid.map_or(Ok(()), |uid| std::os::unix::fs::chown(&path, None, Some(uid))))
        .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o710)));
    made.map_err(|source| DriverError::backend(format!("make {}", path.display()), source))
}

#[async_trait]
impl Machine for Kvm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn label(&self) -> &str {
        "kvm (torpor-vmm)"
    }

    fn notice(&self) -> Option<String> {
        None
    }

    fn plan(&self, launch: &Launch<'_>) -> Result<Plan, DriverError> {
        let (control, vsock) = (listen(launch.run_dir, CONTROL)?, listen(launch.run_dir, VSOCK)?);
        make_ports(launch.run_dir, launch.uid)?;
        let config = config(launch, &control, &vsock)?;
        let text = serde_json::to_vec(&config)
            .map_err(|source| DriverError::backend("write the VM's configuration", source))?;
        let file = sys::file_in_memory(c"vm-config", &text)
            .map_err(|source| DriverError::backend("hand over the VM's configuration", source))?;
        let number = file.as_raw_fd().to_string();
        let args = ["-name", launch.marker, "--config-fd", &number].map(Into::into).to_vec();
        Ok(Plan { program: self.program.clone(), args, inherited: vec![file, control, vsock] })
    }

    fn agent(&self, run_dir: &Path) -> AgentEndpoint {
        AgentEndpoint::Vsock(run_dir.join(VSOCK), AGENT_PORT)
    }

    async fn monitor(&self, run_dir: &Path) -> io::Result<Box<dyn Monitor>> {
        Ok(Box::new(Control::connect(&run_dir.join(CONTROL), run_dir).await?))
    }

    fn last_words(&self, run_dir: &Path) -> LastWords {
        let console = take_console(run_dir).unwrap_or_default();
        // The process could write there as much as it likes, and a guest may have taken it over.
        let mut bytes = Vec::new();
        let read =
            File::open(run_dir.join(END)).and_then(|file| file.take(LONGEST_END).read_to_end(&mut bytes));
        let Some(file) = read.ok().and_then(|_| serde_json::from_slice::<EndFile>(&bytes).ok()) else {
            return LastWords { console, ..LastWords::default() };
        };
        let mut details = detail(&file.end).into_iter().collect::<Vec<_>>();
        let disk_error = file.disk_error.map(|error| format!("the disk could not be closed: {error}"));
        let disk_error = disk_error.or_else(|| {
            (!file.disks_closed && !matches!(file.end, End::Failed { .. }))
                .then(|| "the disk was not closed".to_owned())
        });
        details.extend(disk_error.clone());
        details.extend(file.broken.iter().map(|device| format!("the guest broke its {device}")));
        let detail = (!details.is_empty()).then(|| details.join("; "));
        LastWords { end: Some(guest_end(&file.end)), detail, disk_error, console }
    }

    fn headroom(&self, memory_bytes: u64, disk_bytes: u64) -> u64 {
        // The process itself; page tables of a guest that touches all its memory, twice; the disk's tables.
        (128 << 20) + memory_bytes / 128 + disk_bytes / 4096
    }
}

/// How the guest ended, in the words of all machines.
pub(super) fn guest_end(end: &End) -> GuestEnd {
    match end {
        End::PowerOff => GuestEnd::PowerOff,
        End::Reset | End::TripleFault => GuestEnd::Reset,
        End::Panic => GuestEnd::Panic,
        End::Host => GuestEnd::Ordered,
        End::Crash { .. } | End::Failed { .. } => GuestEnd::Crash,
    }
}

fn detail(end: &End) -> Option<String> {
    match end {
        End::Crash { detail } | End::Failed { detail } => Some(detail.clone()),
        _ => None,
    }
}

/// What the guest wrote to its console since the last call, by whichever gateway. Blocks.
pub(super) fn take_console(run_dir: &Path) -> io::Result<Vec<u8>> {
    let reader = ConsoleReader::new(File::open(run_dir.join(CONSOLE))?).map_err(io::Error::other)?;
    let mark = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(run_dir.join(CONSOLE_READ))?;
    let mut before = [0; 8];
    // An empty file is a console that nobody has read.
    let before = mark.read_exact_at(&mut before, 0).map_or(0, |()| u64::from_le_bytes(before));
    let read = reader.read_since(before).map_err(io::Error::other)?;
    if read.total != before {
        mark.write_all_at(&read.total.to_le_bytes(), 0)?;
    }
    Ok(read.bytes)
}

#[cfg(test)]
mod tests {
    use torpor_netpool::{PoolConfig, Slot};

    use super::*;

    /// Only root can give a folder to another user.
    fn uid() -> Option<u32> {
        rustix::process::geteuid().is_root().then_some(70_000)
    }

    #[test]
    fn the_folder_of_what_the_guest_reaches_is_searchable_by_its_user_and_by_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        let (_plan, config) = planned(folder.path());
        let ports = config.vsock.unwrap().ports.unwrap();
        let found = fs::metadata(&ports).unwrap();
        assert_eq!(found.permissions().mode() & 0o777, 0o710);
        if let Some(uid) = uid() {
            assert_eq!(std::os::unix::fs::MetadataExt::gid(&found), uid);
        }
        // A second start of the run finds nothing of the first: the run's folder is made anew.
        assert!(make_ports(folder.path(), None).is_err());
    }

    fn planned(run_dir: &Path) -> (Plan, Config) {
        let net = PoolConfig::default().guest_net("sb-x", Slot(1)).unwrap();
        let launch = Launch {
            marker: "torpor-sb-x-run-3",
            run_dir,
            kernel: Path::new("/k/vmlinuz"),
            unpacked_kernel: Some(Path::new("/k/vmlinux-1")),
            initramfs: Path::new("/k/initramfs"),
            overlay: Path::new("/s/overlay.qcow2"),
            base: Path::new("/i/base.raw"),
            cpus: 2,
            memory_bytes: 255 << 20,
            net: &net,
            mtu: 1400,
            uid: uid(),
            tap_fd: 9,
        };
        let plan = Kvm::new(Path::new("/usr/lib/torpor/torpor-vmm")).plan(&launch).unwrap();
        let text = std::fs::read(format!("/proc/self/fd/{}", plan.inherited[0].as_raw_fd())).unwrap();
        (plan, serde_json::from_slice(&text).unwrap())
    }

    #[test]
    fn the_process_is_named_for_its_run_and_gets_its_whole_configuration_on_a_descriptor() {
        let folder = tempfile::tempdir().unwrap();
        let (plan, config) = planned(folder.path());
        let args: Vec<_> = plan.args.iter().map(|arg| arg.to_str().unwrap()).collect();
        assert_eq!(args[..3], ["-name", "torpor-sb-x-run-3", "--config-fd"]);
        assert_eq!(args[3], plan.inherited[0].as_raw_fd().to_string());
        assert_eq!((config.cpus, config.memory_bytes), (2, 256 << 20));
        assert_eq!(config.net.as_ref().map(|net| (net.tap_fd, net.mtu)), Some((9, 1400)));
        assert!(matches!(&config.disks[..], [Disk::Overlay { image: Source::Fd(0), .. }]));
        assert_eq!(config.jail, Some(Jail { uid: uid(), root: None, seccomp: true, cgroup: None }));
    }

    #[test]
    fn its_sockets_are_there_before_the_process_is() {
        let folder = tempfile::tempdir().unwrap();
        let (plan, config) = planned(folder.path());
        let fds: Vec<_> = plan.inherited.iter().map(|fd| Some(fd.as_raw_fd())).collect();
        assert!(fds.contains(&config.control_fd) && fds.contains(&config.vsock.unwrap().listener_fd));
        for name in [CONTROL, VSOCK] {
            std::os::unix::net::UnixStream::connect(folder.path().join(name)).unwrap();
        }
    }

    #[test]
    fn an_end_is_read_from_what_the_process_left() {
        let folder = tempfile::tempdir().unwrap();
        let kvm = Kvm::new(Path::new("x"));
        assert_eq!(kvm.last_words(folder.path()), LastWords::default());
        let file = EndFile {
            end: End::Crash { detail: "entry failed".into() },
            disks_closed: false,
            disk_error: Some("no space".into()),
            broken: vec!["net: a loop".into()],
        };
        std::fs::write(folder.path().join(END), serde_json::to_vec(&file).unwrap()).unwrap();
        let words = kvm.last_words(folder.path());
        assert_eq!(words.end, Some(GuestEnd::Crash));
        let detail = words.detail.unwrap();
        for part in ["entry failed", "could not be closed: no space", "broke its net: a loop"] {
            assert!(detail.contains(part), "{detail}");
        }
    }
}
