//! Network namespaces, and guests imitated by raw frames on TAP descriptors.
#![allow(dead_code, reason = "each test program uses its own part")]

pub mod frame;
pub mod guest;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use torpor_netpool::linux::{Firewall, Network, Tap, TapOptions, attach, enable_forwarding};
use torpor_netpool::{Egress, GuestNet, Mac, PoolConfig, Slot};

/// How long a packet that must arrive may take on a loaded machine, and how long one that must not is waited for.
pub const PATIENCE: Duration = Duration::from_secs(5);
pub const SILENCE: Duration = Duration::from_millis(250);

/// Whether the test can run: root, TAPs and nft. Panics instead when the environment requires it.
pub fn ready(test: &str) -> bool {
    let reason = if !nix::unistd::geteuid().is_root() {
        "needs root"
    } else if File::options().read(true).write(true).open("/dev/net/tun").is_err() {
        "needs /dev/net/tun"
    } else if Command::new("nft").arg("--version").output().is_err() {
        "needs the program nft"
    } else {
        return true;
    };
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|need| need == "root"), "{test}: {reason}");
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: {reason}\n"));
    false
}

type Job = Box<dyn FnOnce() + Send>;

/// A network namespace of its own: a thread that lives in it and runs what it is told.
pub struct Namespace {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Namespace {
    pub fn new() -> Namespace {
        let (jobs, inbox) = channel::<Job>();
        let thread = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            inbox.into_iter().for_each(|job| job());
        });
        let namespace = Namespace { jobs: Some(jobs), thread: Some(thread) };
        namespace.run(|| sh("ip link set lo up"));
        namespace
    }

    /// Runs `work` in the namespace; a panic of it is the caller's.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, result) = channel();
        let job = Box::new(move || {
            let _ = sender.send(std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)));
        });
        self.jobs.as_ref().unwrap().send(job).unwrap();
        result.recv().unwrap().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    pub fn tid(&self) -> i32 {
        self.run(|| nix::unistd::gettid().as_raw())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.jobs = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Runs a command of words, in the namespace of the calling thread, and gives back what it printed.
pub fn sh(command: &str) -> String {
    let output = Command::new("sh").args(["-c", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A host with an uplink to the outside, each a namespace. The outside has 198.51.100.2 and the metadata address, and a
/// route to the guests' range by the host (198.51.100.1).
pub struct World {
    pub host: Namespace,
    pub outside: Namespace,
    pub config: PoolConfig,
}

pub const HOST_UPLINK: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
pub const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

impl World {
    pub fn new() -> World {
        let (host, outside) = (Namespace::new(), Namespace::new());
        let tid = outside.tid();
        host.run(move || {
            // So that only the table under test drops a spoofed packet.
            sh("for f in all default; do echo 0 > /proc/sys/net/ipv4/conf/$f/rp_filter; done");
            sh("ip link add up0 type veth peer name out0");
            sh(&format!("ip link set out0 netns {tid}"));
            sh("ip addr add 198.51.100.1/24 dev up0; ip link set up0 up");
        });
        outside.run(|| {
            sh("for f in all default; do echo 0 > /proc/sys/net/ipv4/conf/$f/rp_filter; done");
            sh("ip addr add 198.51.100.2/24 dev out0; ip link set out0 up");
            sh("ip addr add 169.254.169.254/32 dev lo; ip route add 10.231.0.0/16 via 198.51.100.1");
        });
        host.run(|| {
            sh("ip route add default via 198.51.100.2");
            enable_forwarding().unwrap();
        });
        World { host, outside, config: PoolConfig::default() }
    }

    pub fn firewall(&self) -> Firewall {
        Firewall::new(&self.config)
    }

    /// Runs `work` on the host with the pool's firewall.
    pub fn with_firewall<T: Send + 'static>(&self, work: impl FnOnce(&Firewall) -> T + Send + 'static) -> T {
        let firewall = self.firewall();
        self.host.run(move || work(&firewall))
    }

    /// A guest in a slot, attached, that knows the host's MAC.
    pub fn guest(&self, slot: u32) -> RawGuest {
        self.guest_with(slot, self.config.egress.clone())
    }

    /// The same, with an egress policy.
    pub fn guest_with(&self, slot: u32, egress: Egress) -> RawGuest {
        let net = self.config.guest_net(&format!("sb-{slot}"), Slot(slot)).unwrap();
        let net = GuestNet { egress: Some(egress), ..net };
        let guest = self.with_firewall(move |firewall| {
            let tap = attach(firewall, &net, &TapOptions::default()).unwrap();
            RawGuest::new(tap, net)
        });
        guest.introduced()
    }

    /// The same, by a network with a stock of TAPs.
    pub fn guest_of(&self, network: &Arc<Network>, slot: u32) -> RawGuest {
        let net = self.config.guest_net(&format!("sb-{slot}"), Slot(slot)).unwrap();
        let network = Arc::clone(network);
        let guest = self.host.run(move || {
            let tap = network.attach(&net, &TapOptions::default()).unwrap();
            RawGuest::new(tap, net)
        });
        guest.introduced()
    }
}

/// A UDP socket in a namespace, on all of its addresses.
pub fn udp_socket(namespace: &Namespace, address: &'static str) -> UdpSocket {
    namespace.run(move || UdpSocket::bind(address).unwrap())
}

/// The next datagram that says `text`, and its sender; others are passed over.
pub fn arrival(socket: &UdpSocket, text: &str, wait: Duration) -> Option<SocketAddr> {
    let deadline = Instant::now() + wait;
    let mut buffer = [0; 2048];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        socket.set_read_timeout(Some(left)).unwrap();
        match socket.recv_from(&mut buffer) {
            Ok((length, sender)) if &buffer[..length] == text.as_bytes() => return Some(sender),
            Ok(_) => {}
            Err(_) => return None,
        }
    }
}

/// A guest without a kernel: frames on a TAP's descriptor.
pub struct RawGuest {
    pub net: GuestNet,
    pub gateway: Mac,
    pub tap: Tap,
    frames: File,
}

impl RawGuest {
    pub fn new(tap: Tap, net: GuestNet) -> RawGuest {
        let frames = File::from(tap.as_fd().try_clone_to_owned().unwrap());
        RawGuest { net, gateway: Mac([0; 6]), tap, frames }
    }

    /// Learns the host's MAC.
    pub fn introduced(mut self) -> RawGuest {
        self.gateway = self.ask_arp(self.net.host_ip, PATIENCE).expect("the host answers for its own end");
        self
    }

    pub fn send(&mut self, frame: &[u8]) {
        self.frames.write_all(frame).unwrap();
    }

    /// Sends a datagram with the guest's own addresses.
    pub fn send_udp(&mut self, to: Ipv4Addr, port: u16, text: &str) {
        let from = (self.net.mac, self.net.guest_ip);
        self.send(&frame::udp4(from, (self.gateway, to), (4000, port), text.as_bytes()));
    }

    /// The next frame that `wanted` gives something for. Meanwhile the guest answers ARP as a kernel would.
    pub fn receive<T>(&mut self, wait: Duration, wanted: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + wait;
        let mut buffer = [0; 2048];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(left).unwrap();
            let mut fds = [PollFd::new(self.frames.as_fd(), PollFlags::POLLIN)];
            if left.is_zero() || poll(&mut fds, timeout).unwrap() == 0 {
                return None;
            }
            let length = self.frames.read(&mut buffer).unwrap();
            let received = &buffer[..length];
            if let Some((asker, address)) = frame::arp_question(received, self.net.guest_ip) {
                let answer = frame::arp(2, (self.net.mac, self.net.guest_ip), (asker, address), asker);
                self.send(&answer);
            }
            if let Some(found) = wanted(received) {
                return Some(found);
            }
        }
    }

    /// Asks who has `address`; the answer's MAC.
    pub fn ask_arp(&mut self, address: Ipv4Addr, wait: Duration) -> Option<Mac> {
        let own = (self.net.mac, self.net.guest_ip);
        self.send(&frame::arp(1, own, (Mac([0; 6]), address), Mac([0xff; 6])));
        self.receive(wait, |received| frame::arp_answer(received, address))
    }

    /// Whether a datagram that says `text` comes in.
    pub fn hears(&mut self, text: &str, wait: Duration) -> bool {
        let found =
            |received: &[u8]| received.windows(text.len()).any(|part| part == text.as_bytes()).then_some(());
        self.receive(wait, found).is_some()
    }
}
