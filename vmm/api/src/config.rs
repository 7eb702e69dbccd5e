//! The configuration: all of it, once, as JSON on a descriptor (`torpor-vmm -name MARKER --config-fd N`).

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A file that the VMM reads or holds: by descriptor, inherited from whoever starts it, or by path, opened before it
/// confines itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// An inherited descriptor's number.
    Fd(i32),
    /// A path.
    Path(PathBuf),
}

/// A whole VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Number of virtual CPUs, 1 to 32.
    pub cpus: u8,
    /// Guest memory, bytes; a multiple of 2 MiB.
    pub memory_bytes: u64,
    /// Guest memory in huge pages of 2 MiB.
    #[serde(default)]
    pub huge_pages: HugePages,
    /// bzImage, or ELF vmlinux with a PVH note or a 64-bit entry.
    pub kernel: Source,
    /// The initramfs, if any.
    #[serde(default)]
    pub initramfs: Option<Source>,
    /// The kernel's command line.
    pub command_line: String,
    /// Block devices, in order: vda, vdb and so on.
    #[serde(default)]
    pub disks: Vec<Disk>,
    /// The network device.
    #[serde(default)]
    pub net: Option<Net>,
    /// The vsock device.
    #[serde(default)]
    pub vsock: Option<AgentSocket>,
    /// A balloon that gives free guest pages back to the host.
    #[serde(default)]
    pub balloon: bool,
    /// Where the serial console's ring file is made; none: what the guest writes there is dropped.
    #[serde(default)]
    pub console: Option<Source>,
    /// The console ring's size, bytes.
    #[serde(default = "default_console_bytes")]
    pub console_bytes: u32,
    /// Where the control socket is made.
    #[serde(default)]
    pub control: Option<PathBuf>,
    /// An inherited descriptor of the control socket, bound and listening already; goes before `control`.
    #[serde(default)]
    pub control_fd: Option<i32>,
    /// The file in which the end is told: an [`crate::EndFile`] as JSON.
    #[serde(default)]
    pub end: Option<Source>,
    /// Confinement; none only for tests and debugging.
    #[serde(default)]
    pub jail: Option<Jail>,
}

fn default_console_bytes() -> u32 {
    64 << 10
}

/// Huge pages of 2 MiB for guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HugePages {
    /// As the host's settings say.
    #[default]
    Default,
    /// Asked for where the host has them to give (`MADV_HUGEPAGE`): memory is faster, and goes back to the host in larger
    /// pieces only.
    Advised,
    /// Only such as are reserved on the host (`vm.nr_hugepages`); all of them at the start.
    Reserved,
}

/// A block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Disk {
    /// A qcow2 overlay over a raw base.
    Overlay {
        /// The overlay. As a descriptor it is one that carries the overlay's lock already; as a path it is locked here.
        image: Source,
        /// The overlay's path, for messages.
        path: PathBuf,
        /// Its base, which whoever starts the VM has verified.
        base: Source,
        /// What the guest reads as serial number, at most 20 bytes of ASCII.
        serial: String,
        /// Limit, if any.
        #[serde(default)]
        rate: Option<RateLimit>,
    },
    /// A raw file.
    Raw {
        /// The file.
        file: Source,
        /// Writes are refused.
        read_only: bool,
        /// As for an overlay.
        serial: String,
        /// Limit, if any.
        #[serde(default)]
        rate: Option<RateLimit>,
    },
}

/// A token bucket for bytes and one for operations; 0: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimit {
    /// Bytes a second.
    #[serde(default)]
    pub bytes_per_second: u64,
    /// Bytes that may come at once.
    #[serde(default)]
    pub burst_bytes: u64,
    /// Operations (requests, packets) a second.
    #[serde(default)]
    pub operations_per_second: u64,
    /// Operations that may come at once.
    #[serde(default)]
    pub burst_operations: u64,
}

/// The network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Net {
    /// The TAP's descriptor, opened with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`.
    pub tap_fd: i32,
    /// The guest's hardware address.
    pub mac: [u8; 6],
    /// Largest packet, bytes.
    pub mtu: u16,
    /// Limit of what the guest sends, if any.
    #[serde(default)]
    pub send: Option<RateLimit>,
    /// Limit of what it gets, if any.
    #[serde(default)]
    pub receive: Option<RateLimit>,
}

/// The vsock device: the host's side is a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentSocket {
    /// The guest's context id, 3 or more.
    pub cid: u32,
    /// Where the host's socket is made. A client writes `CONNECT port\n` (refused when nobody listens in the guest) or
    /// `AWAIT port\n` (held until somebody does), reads `OK host-port\n`, and is then connected. A guest that
    /// connects to port P of the host is connected to a listener at `path_P`.
    pub socket: PathBuf,
    /// The folder of the listeners that the guest reaches: a guest that connects to port P of the host is connected to
    /// the one at `ports/P`. None: beside `socket`, as `path_P`. It is all that the jail leaves of the file system: the
    /// jail's user must be able to search it, and to write to a listener that it is to reach.
    #[serde(default)]
    pub ports: Option<PathBuf>,
    /// An inherited descriptor of that socket, bound and listening already: then nobody has to wait for it to be made.
    #[serde(default)]
    pub listener_fd: Option<i32>,
    /// Most connections at once.
    #[serde(default = "default_connections")]
    pub connections: u32,
}

fn default_connections() -> u32 {
    256
}

/// How the process confines itself before the guest runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Jail {
    /// User and group id to become; none: they stay (not recommended).
    #[serde(default)]
    pub uid: Option<u32>,
    /// An empty directory that becomes the root of a mount namespace of its own; none: a new tmpfs.
    #[serde(default)]
    pub root: Option<PathBuf>,
    /// `cgroup.procs` of the control group to join; none: the process stays where it was put.
    #[serde(default)]
    pub cgroup: Option<Source>,
    /// The system call filters; off only for debugging.
    #[serde(default = "yes")]
    pub seccomp: bool,
}

fn yes() -> bool {
    true
}

/// A configuration that can't be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the configuration's {field} {problem}")]
pub struct ConfigError {
    /// What it is about: `disks[0].serial`.
    pub field: String,
    /// What is wrong with it.
    pub problem: String,
}
