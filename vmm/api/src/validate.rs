//! What a configuration must satisfy before anything is opened.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use crate::config::{AgentSocket, Config, ConfigError, Disk, Jail, Net, RateLimit, Source};

/// Most virtual CPUs.
pub const MOST_CPUS: u8 = 32;
/// Guest memory is a multiple of this, bytes.
pub const MEMORY_STEP: u64 = 2 << 20;
/// Most guest memory, bytes: what the address width of every CPU with KVM covers.
pub const MOST_MEMORY: u64 = 512 << 30;
/// Longest command line, bytes: COMMAND_LINE_SIZE of Linux on x86 without its final zero.
pub const LONGEST_COMMAND_LINE: usize = 2047;
/// Most block devices: each takes an interrupt line.
pub const MOST_DISKS: usize = 8;
/// Longest serial number of a disk, bytes (virtio 1.2, 5.2.6: VIRTIO_BLK_T_GET_ID).
pub const LONGEST_SERIAL: usize = 20;
/// Most vsock connections at once.
pub const MOST_CONNECTIONS: u32 = 4096;
/// Smallest and largest ring of the console, bytes.
pub const CONSOLE_BYTES: std::ops::RangeInclusive<u32> = 4 << 10..=16 << 20;
/// Smallest and largest MTU (RFC 791; the TAP driver's largest frame).
pub const MTU: std::ops::RangeInclusive<u16> = 68..=65521;
/// Longest path of a Unix socket, bytes, without its final zero (unix(7)).
const LONGEST_SOCKET: usize = 107;
/// What follows a path for a listener of the host's: `_` or `/`, and a port.
const PORT_SUFFIX: usize = 11;

type Outcome = Result<(), ConfigError>;

fn refuse(field: impl Into<String>, problem: impl Into<String>) -> Outcome {
    Err(ConfigError { field: field.into(), problem: problem.into() })
}

fn ensure(holds: bool, field: &str, problem: impl FnOnce() -> String) -> Outcome {
    match holds {
        true => Ok(()),
        false => refuse(field, problem()),
    }
}

impl Config {
    /// Checks every field. Nothing is opened: a file that isn't there is found later.
    ///
    /// # Errors
    /// The first field that is wrong, and what is.
    pub fn validate(&self) -> Result<(), ConfigError> {
        ensure((1..=MOST_CPUS).contains(&self.cpus), "cpus", || {
            format!("is {}, but there can be 1 to {MOST_CPUS}", self.cpus)
        })?;
        let memory = self.memory_bytes;
        ensure(memory > 0 && memory.is_multiple_of(MEMORY_STEP), "memory_bytes", || {
            format!("is {memory}, which is not a multiple of 2 MiB ({MEMORY_STEP}) above 0")
        })?;
        ensure(memory <= MOST_MEMORY, "memory_bytes", || {
            format!("is {memory}, more than the {MOST_MEMORY} that a guest can have")
        })?;
        command_line(&self.command_line)?;
        ensure(self.disks.len() <= MOST_DISKS, "disks", || {
            format!("are {}, more than {MOST_DISKS}", self.disks.len())
        })?;
        self.disks.iter().enumerate().try_for_each(|(place, one)| disk(&format!("disks[{place}]"), one))?;
        serials_differ(&self.disks)?;
        self.net.as_ref().map_or(Ok(()), net)?;
        self.vsock.as_ref().map_or(Ok(()), vsock)?;
        ensure(CONSOLE_BYTES.contains(&self.console_bytes), "console_bytes", || {
            let (least, most) = (CONSOLE_BYTES.start(), CONSOLE_BYTES.end());
            format!("is {}, but a ring has {least} to {most}", self.console_bytes)
        })?;
        self.control.as_deref().map_or(Ok(()), |path| socket_path("control", path, LONGEST_SOCKET))?;
        self.jail.as_ref().map_or(Ok(()), jail)?;
        self.descriptors_differ()
    }

    /// All inherited descriptors that it names, with the field that does.
    pub fn descriptors(&self) -> Vec<(String, i32)> {
        let mut all = Vec::new();
        let mut source = |field: String, source: Option<&Source>| {
            if let Some(Source::Fd(fd)) = source {
                all.push((field, *fd));
            }
        };
        source("kernel".into(), Some(&self.kernel));
        source("initramfs".into(), self.initramfs.as_ref());
        for (place, disk) in self.disks.iter().enumerate() {
            match disk {
                Disk::Overlay { image, base, .. } => {
                    source(format!("disks[{place}].image"), Some(image));
                    source(format!("disks[{place}].base"), Some(base));
                }
                Disk::Raw { file, .. } => source(format!("disks[{place}].file"), Some(file)),
            }
        }
        source("console".into(), self.console.as_ref());
        source("end".into(), self.end.as_ref());
        source("jail.cgroup".into(), self.jail.as_ref().and_then(|jail| jail.cgroup.as_ref()));
        all.extend(self.net.as_ref().map(|net| ("net.tap_fd".to_owned(), net.tap_fd)));
        all.extend(self.control_fd.map(|fd| ("control_fd".to_owned(), fd)));
        let listener = self.vsock.as_ref().and_then(|vsock| vsock.listener_fd);
        all.extend(listener.map(|fd| ("vsock.listener_fd".to_owned(), fd)));
        all
    }

    /// Each becomes the only owner of its descriptor.
    fn descriptors_differ(&self) -> Outcome {
        let mut seen = BTreeSet::new();
        for (field, fd) in self.descriptors() {
            ensure(fd >= 0, &field, || format!("is the descriptor {fd}, but they begin at 0"))?;
            ensure(fd != 2, &field, || "is descriptor 2, which is the log's".to_owned())?;
            ensure(seen.insert(fd), &field, || format!("is descriptor {fd}, which another field has too"))?;
        }
        Ok(())
    }
}

fn command_line(line: &str) -> Outcome {
    let field = "command_line";
    ensure(line.len() <= LONGEST_COMMAND_LINE, field, || {
        format!("has {} bytes, more than the {LONGEST_COMMAND_LINE} that Linux takes", line.len())
    })?;
    let bad = line.chars().find(|letter| letter.is_control());
    bad.map_or(Ok(()), |letter| refuse(field, format!("holds the control character {letter:?}")))
}

fn disk(field: &str, disk: &Disk) -> Outcome {
    let (serial, rate) = match disk {
        Disk::Overlay { serial, rate, .. } | Disk::Raw { serial, rate, .. } => (serial, rate),
    };
    ensure(serial.len() <= LONGEST_SERIAL, &format!("{field}.serial"), || {
        format!("has {} bytes, more than {LONGEST_SERIAL}", serial.len())
    })?;
    ensure(serial.bytes().all(|byte| byte.is_ascii_graphic()), &format!("{field}.serial"), || {
        format!("is {serial:?}, but only visible ASCII characters can be in it")
    })?;
    rate.as_ref().map_or(Ok(()), |rate| rate_limit(&format!("{field}.rate"), rate))
}

fn serials_differ(disks: &[Disk]) -> Outcome {
    let mut seen = BTreeSet::new();
    for (place, disk) in disks.iter().enumerate() {
        let (Disk::Overlay { serial, .. } | Disk::Raw { serial, .. }) = disk;
        ensure(serial.is_empty() || seen.insert(serial), &format!("disks[{place}].serial"), || {
            format!("is {serial:?}, as another disk's")
        })?;
    }
    Ok(())
}

fn rate_limit(field: &str, rate: &RateLimit) -> Outcome {
    let without = |burst: u64, rate: u64| burst > 0 && rate == 0;
    ensure(!without(rate.burst_bytes, rate.bytes_per_second), field, || {
        "has burst_bytes without bytes_per_second".to_owned()
    })?;
    ensure(!without(rate.burst_operations, rate.operations_per_second), field, || {
        "has burst_operations without operations_per_second".to_owned()
    })
}

fn net(net: &Net) -> Outcome {
    ensure(net.mac[0] & 1 == 0 && net.mac != [0; 6], "net.mac", || {
        format!("is {:02x?}, which is no address of one device", net.mac)
    })?;
    ensure(MTU.contains(&net.mtu), "net.mtu", || {
        format!("is {}, but packets have {} to {} bytes", net.mtu, MTU.start(), MTU.end())
    })?;
    net.send.as_ref().map_or(Ok(()), |rate| rate_limit("net.send", rate))?;
    net.receive.as_ref().map_or(Ok(()), |rate| rate_limit("net.receive", rate))
}

fn vsock(vsock: &AgentSocket) -> Outcome {
    // 0 to 2 are the hypervisor, the guest itself and the host; the last one means any (vsock(7)).
    ensure((3..u32::MAX).contains(&vsock.cid), "vsock.cid", || {
        format!("is {}, but guests have 3 to {}", vsock.cid, u32::MAX - 1)
    })?;
    ensure((1..=MOST_CONNECTIONS).contains(&vsock.connections), "vsock.connections", || {
        format!("is {}, but there can be 1 to {MOST_CONNECTIONS}", vsock.connections)
    })?;
    if let Some(ports) = &vsock.ports {
        socket_path("vsock.ports", ports, LONGEST_SOCKET - PORT_SUFFIX)?;
    }
    socket_path("vsock.socket", &vsock.socket, LONGEST_SOCKET - PORT_SUFFIX)
}

fn socket_path(field: &str, path: &Path, longest: usize) -> Outcome {
    let bytes = path.as_os_str().as_bytes();
    ensure(bytes.len() <= longest, field, || {
        format!("has {} bytes, more than the {longest} that a socket's path can have here", bytes.len())
    })?;
    ensure(path.file_name().is_some() && !bytes.contains(&0), field, || {
        format!("is {}, which names no file", path.display())
    })
}

fn jail(jail: &Jail) -> Outcome {
    ensure(!matches!(jail.uid, Some(0 | u32::MAX)), "jail.uid", || {
        "is root's or nobody's; leave it out to stay who starts it".to_owned()
    })?;
    ensure(jail.root.as_ref().is_none_or(|root| root.is_absolute()), "jail.root", || {
        "is not an absolute path".to_owned()
    })
}
