//! The machine that the configuration describes, out of what was opened for it.

use std::error::Error;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use torpor_overlay::{Block, Raw, open_locked_over};
use torpor_vmm_api::{AgentSocket, Config, Net};
use torpor_vmm_devices::host::Surroundings;
use torpor_vmm_devices::legacy::Serial;
use torpor_vmm_devices::virtio::VirtioDevice;
use torpor_vmm_devices::virtio::balloon::{Balloon, BalloonHandle};
use torpor_vmm_devices::virtio::block::{BlockDevice, BlockOptions};
use torpor_vmm_devices::virtio::net::{NetDevice, NetOptions, Port};
use torpor_vmm_devices::virtio::rng::Rng;
use torpor_vmm_devices::virtio::vsock::{HostSocket, Vsock};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::around::Around;
use super::error::StartError;
use super::grow::RunningDisk;
use super::sources::{OpenDisk, Opened};
use crate::hypervisor::kvm::Kvm;
use crate::machine::{Machine, Plan, SerialPort};

/// What a discard gives up whole of an overlay: its cluster, bytes.
const OVERLAY_CLUSTER: u32 = 64 << 10;
/// And of a raw file: the block of most file systems, bytes.
const RAW_BLOCK: u32 = 4 << 10;

/// How long a request waits for room on a full host until its guest is told of an I/O error: long enough for somebody to
/// make room, and for a guest's programs to be worth it.
const ROOM_PATIENCE: Duration = Duration::from_secs(600);

/// A machine, and what of its devices is asked for figures.
pub(super) struct Running {
    pub(super) machine: Machine,
    pub(super) serial: Arc<Serial>,
    pub(super) balloon: Option<BalloonHandle>,
    pub(super) disks: Vec<RunningDisk>,
    pub(super) cpus: u8,
    pub(super) memory_bytes: u64,
}

/// Builds it. What isn't part of it comes back: the control socket.
pub(super) fn machine(
    config: &Config,
    opened: Opened,
    around: &Arc<Around>,
) -> Result<(Running, Option<UnixListener>), StartError> {
    let line = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(StartError::host("make an eventfd"))?;
    let of_serial = line.try_clone().map_err(StartError::host("make an eventfd"))?;
    let serial = Arc::new(Serial::new(of_serial, opened.console));
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    let mut disks = Vec::new();
    for (place, disk) in opened.disks.into_iter().enumerate() {
        let (device, disk) = block(place, disk)?;
        devices.push(Box::new(device));
        disks.push(disk);
    }
    if let (Some(net), Some(tap)) = (&config.net, opened.tap) {
        devices.push(Box::new(network(net, tap)?));
    }
    if let (Some(vsock), Some(listener)) = (&config.vsock, opened.vsock) {
        devices.push(Box::new(agent_socket(vsock, listener, config.jail.is_some())?));
    }
    devices.push(Box::new(Rng::new(None).map_err(device("rng"))?));
    let balloon = config.balloon.then(|| Balloon::new().map_err(device("balloon"))).transpose()?;
    let handle = balloon.as_ref().map(Balloon::handle);
    devices.extend(balloon.map(|balloon| Box::new(balloon) as Box<dyn VirtioDevice>));
    let plan = Plan {
        cpus: config.cpus,
        memory_bytes: config.memory_bytes,
        huge_pages: config.huge_pages,
        kernel: opened.kernel,
        initramfs: opened.initramfs,
        command_line: config.command_line.clone(),
        devices,
        serial: Some(SerialPort { device: Arc::clone(&serial) as _, line }),
    };
    let hypervisor = Kvm::from_descriptor(opened.kvm.into()).map_err(failed)?;
    let surroundings = Arc::clone(around) as Arc<dyn Surroundings>;
    let machine = Machine::build(plan, &hypervisor, surroundings).map_err(failed)?;
    let (balloon, cpus, memory_bytes) = (handle, config.cpus, config.memory_bytes);
    let running = Running { machine, serial, balloon, disks, cpus, memory_bytes };
    Ok((running, opened.control))
}

/// An overlay is opened only now, in the jail: what is in it is the guest's.
fn block(place: usize, disk: OpenDisk) -> Result<(BlockDevice, RunningDisk), StartError> {
    // At most eight: vda to vdh.
    let name = format!("vd{}", char::from(b'a' + place as u8));
    let mut overlay = None;
    let (disk, serial, read_only, rate, discard_unit): (Arc<dyn Block>, _, _, _, _) = match disk {
        OpenDisk::Overlay { lock, base, base_path, serial, rate } => {
            let opened = Arc::new(open_locked_over(lock, base, &base_path)?);
            overlay = Some(Arc::clone(&opened));
            (opened, serial, false, rate, OVERLAY_CLUSTER)
        }
        OpenDisk::Raw { file, read_only, serial, rate } => {
            let raw = Raw::from_file(file, !read_only).map_err(device(&name))?;
            (Arc::new(raw), serial, read_only, rate, RAW_BLOCK)
        }
    };
    let running = serial.clone();
    let patience = ROOM_PATIENCE;
    let device =
        BlockDevice::new(BlockOptions { name, disk, serial, read_only, rate, discard_unit, patience });
    let running = RunningDisk { serial: running, overlay, handle: device.handle() };
    Ok((device, running))
}

fn network(net: &Net, tap: OwnedFd) -> Result<NetDevice, StartError> {
    let Net { mac, mtu, send, receive, .. } = *net;
    let port = Port::tap(tap).map_err(device("net"))?;
    Ok(NetDevice::new(NetOptions { port, mac, mtu, send, receive }))
}

/// In the jail, the working directory is that of the listeners.
fn agent_socket(vsock: &AgentSocket, listener: UnixListener, jailed: bool) -> Result<Vsock, StartError> {
    let mut socket = HostSocket::new(listener, vsock.socket.clone()).map_err(device("vsock"))?;
    socket = match (&vsock.ports, vsock.socket.file_name()) {
        (Some(_), _) if jailed => socket.find_peers_in(Path::new(".")),
        (Some(folder), _) => socket.find_peers_in(folder),
        (None, Some(name)) if jailed => socket.find_peers_at(Path::new(".").join(name)),
        (None, _) => socket,
    };
    Vsock::new(vsock.cid, vsock.connections, socket).map_err(device("vsock"))
}

fn device(name: &str) -> impl FnOnce(io::Error) -> StartError {
    let what = name.to_owned();
    move |source| StartError::Device { what, source }
}

fn failed(error: impl Error + Send + Sync + 'static) -> StartError {
    StartError::Machine(Box::new(error))
}
