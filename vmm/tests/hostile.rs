//! One list of attacks over every queue of every virtio device: each ends with a device that says why it is broken and works
//! again after a reset, and none makes the process larger.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::any::Any;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::time::Duration;

use torpor_overlay::Raw;
use torpor_vmm_devices::testing::{Buffer, Driver, HIGH_START, LOW_MEMORY, RawDescriptor, flag};
use torpor_vmm_devices::virtio::VirtioDevice;
use torpor_vmm_devices::virtio::balloon::Balloon;
use torpor_vmm_devices::virtio::block::{BlockDevice, BlockOptions};
use torpor_vmm_devices::virtio::mmio::{feature, status};
use torpor_vmm_devices::virtio::net::{NetDevice, NetOptions, Port};
use torpor_vmm_devices::virtio::rng::Rng;
use torpor_vmm_devices::virtio::vsock::{HostSocket, Vsock};

/// A device, and what must live beside it.
type Made = (Box<dyn VirtioDevice>, Box<dyn Any>);

/// A kind of device, and its queues that it looks at when it is kicked: there, every attack must be noticed.
struct Kind {
    name: &'static str,
    make: fn() -> Made,
    looks_at: &'static [usize],
}

const KINDS: [Kind; 5] = [
    Kind { name: "block", make: block, looks_at: &[0] },
    Kind { name: "net", make: net, looks_at: &[0, 1] },
    // It takes room to receive when it has something to send, and events' when it was restored.
    Kind { name: "vsock", make: vsock, looks_at: &[1] },
    Kind { name: "rng", make: rng, looks_at: &[0] },
    Kind { name: "balloon", make: balloon, looks_at: &[0, 1, 2] },
];

fn block() -> Made {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let device = BlockDevice::new(BlockOptions {
        name: "vda".into(),
        disk: Arc::new(Raw::from_file(file, true).unwrap()),
        serial: "x".into(),
        read_only: false,
        rate: None,
        discard_unit: 65536,
        patience: Duration::from_secs(1),
    });
    (Box::new(device), Box::new(()))
}

fn net() -> Made {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    let port = Port::packets(OwnedFd::from(ours)).unwrap();
    let options = NetOptions { port, mac: [2, 0, 0, 0, 0, 1], mtu: 1500, send: None, receive: None };
    (Box::new(NetDevice::new(options)), Box::new(theirs))
}

fn vsock() -> Made {
    let folder = tempfile::tempdir().unwrap();
    let socket = HostSocket::bind(&folder.path().join("vsock")).unwrap();
    (Box::new(Vsock::new(3, 16, socket).unwrap()), Box::new(folder))
}

fn rng() -> Made {
    (Box::new(Rng::new(None).unwrap()), Box::new(()))
}

fn balloon() -> Made {
    (Box::new(Balloon::new().unwrap()), Box::new(()))
}

type Attack = Box<dyn Fn(&mut Driver, usize)>;

fn one(descriptor: RawDescriptor) -> Attack {
    Box::new(move |driver, queue| {
        driver.set_descriptor(queue, 0, descriptor);
        driver.publish(queue, 0);
    })
}

/// The list.
fn attacks() -> Vec<(String, Attack)> {
    let mut attacks: Vec<(String, Attack)> = Vec::new();
    let mut add = |name: String, attack: Attack| attacks.push((name, attack));
    for write in [0, flag::WRITE] {
        let plain = RawDescriptor { address: 0x10_0000, length: 16, flags: write, next: 0 };
        let circle = RawDescriptor { flags: write | flag::NEXT, ..plain };
        add(format!("a chain that is its own next, {write}"), one(circle));
        add(
            format!("two that are each other's next, {write}"),
            Box::new(move |driver, queue| {
                driver.set_descriptor(queue, 0, RawDescriptor { next: 1, ..circle });
                driver.set_descriptor(queue, 1, circle);
                driver.publish(queue, 0);
            }),
        );
        add(format!("a next beyond the table, {write}"), one(RawDescriptor { next: 0xffff, ..circle }));
        for (address, length) in
            [(LOW_MEMORY - 8, 16), (LOW_MEMORY, 1), (HIGH_START - 1, 2), (u64::MAX - 8, 16), (0, u32::MAX)]
        {
            let outside = RawDescriptor { address, length, ..plain };
            add(format!("{length} bytes at {address:#x}, {write}"), one(outside));
        }
    }
    for length in [0, 15, 17, 16 * 1025] {
        let table = RawDescriptor { address: 0x10_0000, length, flags: flag::INDIRECT, next: 0 };
        add(format!("a table of {length} bytes"), one(table));
    }
    let outside = RawDescriptor { address: u64::MAX - 15, length: 16, flags: flag::INDIRECT, next: 0 };
    add("a table outside memory".into(), one(outside));
    for inner in [flag::INDIRECT, flag::NEXT] {
        add(
            format!("a table of one with flag {inner}"),
            Box::new(move |driver, queue| {
                let inner = RawDescriptor { address: 0x10_0000, length: 16, flags: inner, next: 0 };
                driver.write(0x20_0000, &inner.bytes());
                let table = RawDescriptor { address: 0x20_0000, length: 16, flags: flag::INDIRECT, next: 0 };
                one(table)(driver, queue);
            }),
        );
    }
    for head in [256, 999, 0xffff] {
        add(format!("head {head}"), Box::new(move |driver, queue| driver.publish(queue, head)));
    }
    for ahead in [257, 0x8000, 0xffff] {
        add(
            format!("an index {ahead} ahead"),
            Box::new(move |driver, queue| {
                let index = driver.queues[queue].available_index.wrapping_add(ahead);
                driver.set_available_index(queue, index);
            }),
        );
    }
    attacks
}

/// Attacks a queue of a device, and heals it.
fn attack(kind: &Kind, driver: &mut Driver, queue: usize, name: &str, attack: &Attack) {
    let told = driver.host.told().broken.len();
    attack(driver, queue);
    driver.kick_anyway(queue as u32);
    let is_broken = |driver: &Driver| driver.status() & status::NEEDS_RESET != 0;
    if kind.looks_at.contains(&queue) {
        for _ in 0..20_000 {
            if is_broken(driver) && driver.host.told().broken.len() > told {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let said = driver.host.told().broken;
        assert!(is_broken(driver) && said.len() > told, "{}, queue {queue}: {name}: not noticed", kind.name);
        assert!(said.iter().all(|(_, reason)| !reason.is_empty()));
    }
    // A dead device stands still and can be paused.
    driver.kick_anyway(queue as u32);
    driver.transport.pause(true);
    driver.transport.pause(false);
    driver.bring_up(u64::MAX);
    assert!(!is_broken(driver), "{}, queue {queue}: {name}: not healed", kind.name);
}

fn a_pass(kind: &Kind, driver: &mut Driver, attacks: &[(String, Attack)]) {
    for queue in 0..driver.queues.len() {
        for (name, one) in attacks {
            attack(kind, driver, queue, name, one);
        }
    }
}

/// Resident KiB, threads, open descriptors.
fn size() -> (u64, usize, usize) {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let count = |folder| fs::read_dir(folder).unwrap().count();
    let resident = line.split_whitespace().next().unwrap().parse().unwrap();
    (resident, count("/proc/self/task"), count("/proc/self/fd"))
}

/// One test: what it measures is the process's.
#[test]
fn no_attack_goes_unnoticed_and_none_makes_the_process_grow() {
    let attacks = attacks();
    for kind in &KINDS {
        let (device, _beside) = (kind.make)();
        let mut driver = Driver::new(device);
        let queues = [0, 1, 2, 3, 99, u32::MAX];
        for number in 0..1_000_000 {
            driver.kick_anyway(queues[number % queues.len()]);
        }
        driver.bring_up(u64::MAX);
        assert_eq!(driver.host.told().broken, [], "{}: kicks before it was ready", kind.name);
        a_pass(kind, &mut driver, &attacks);
        let before = size();
        for number in 0..1_000_000 {
            driver.kick_anyway(queues[number % queues.len()]);
        }
        for _ in 0..5 {
            a_pass(kind, &mut driver, &attacks);
        }
        // Without tables and indexes agreed on, too.
        driver.bring_up(!(feature::INDIRECT_DESCRIPTORS | feature::EVENT_INDEX));
        a_pass(kind, &mut driver, &attacks);
        let after = size();
        assert!(after.0 < before.0 + 512, "{}: {} KiB after {}", kind.name, after.0, before.0);
        assert_eq!((after.1, after.2), (before.1, before.2), "{}: threads and descriptors", kind.name);
        // And it still serves.
        if kind.name == "rng" {
            let room = driver.room(16);
            assert_eq!(driver.request(0, &[Buffer { ..room }]), 16);
        }
    }
}
