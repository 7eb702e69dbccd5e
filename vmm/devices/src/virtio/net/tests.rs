use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use proptest::prelude::*;

use super::*;
use crate::testing::{Buffer, Driver, MOMENT, RawDescriptor, flag};
use crate::virtio::mmio::{register, status};

const MERGEABLE: u64 = 1 << VIRTIO_NET_F_MRG_RXBUF;

/// The other end of the wire.
struct Wire(OwnedFd);

impl Wire {
    fn send(&self, packet: &[u8]) {
        send(self.0.as_raw_fd(), packet, MsgFlags::MSG_DONTWAIT).unwrap();
    }

    fn receive(&self) -> Vec<u8> {
        for _ in 0..4000 {
            if let Some(packet) = self.poll() {
                return packet;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("no packet came");
    }

    fn poll(&self) -> Option<Vec<u8>> {
        let mut packet = vec![0; 70_000];
        match recv(self.0.as_raw_fd(), &mut packet, MsgFlags::MSG_DONTWAIT) {
            Ok(count) => packet.truncate(count),
            Err(Errno::EAGAIN) => return None,
            Err(error) => panic!("{error}"),
        }
        Some(packet)
    }
}

fn device(send: Option<RateLimit>, receive: Option<RateLimit>) -> (NetDevice, Wire) {
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let options =
        NetOptions { port: Port::packets(ours).unwrap(), mac: [2, 0, 0, 1, 2, 3], mtu: 1450, send, receive };
    (NetDevice::new(options), Wire(theirs))
}

fn started(features: u64) -> (Driver, Wire, Arc<Drops>) {
    let (device, wire) = device(None, None);
    let drops = device.drops();
    (Driver::start_with(Box::new(device), features), wire, drops)
}

/// A packet with header, of `length` bytes of frame.
fn packet(seed: u8, length: usize) -> Vec<u8> {
    let frame = (0..length).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed));
    [0; HEADER].into_iter().chain(frame).collect()
}

#[test]
fn the_configuration_tells_address_link_and_packet_size() {
    let (driver, ..) = started(u64::MAX);
    assert_eq!(driver.get(register::DEVICE_ID), 1);
    assert_eq!(driver.config::<6>(0), [2, 0, 0, 1, 2, 3]);
    assert_eq!(driver.config::<2>(6), [1, 0], "the link is up");
    assert_eq!(u16::from_le_bytes(driver.config(10)), 1450);
}

#[test]
fn offloads_follow_what_was_agreed_on() {
    let bit = |bits: &[u32]| bits.iter().fold(0, |all, bit| all | 1u64 << bit);
    let (csum, tso4, tso6, ecn) =
        (VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_ECN);
    assert_eq!(offloads(bit(&[tso4, tso6, ecn])), 0, "segmentation needs checksums");
    assert_eq!(offloads(bit(&[csum])), 1);
    assert_eq!(offloads(bit(&[csum, ecn])), 1);
    assert_eq!(offloads(bit(&[csum, tso6])), 5);
    assert_eq!(offloads(bit(&[csum, tso4, tso6, ecn])), 15);
    assert_eq!(longest(bit(&[csum]), 1500), 1530);
    assert_eq!(longest(bit(&[csum, tso4]), 1500), HEADER + MAX_FRAME);
}

#[test]
fn what_the_guest_sends_arrives_whole_however_it_is_cut() {
    let (mut driver, wire, _) = started(u64::MAX);
    for length in [14, 60, 1514, 65_000] {
        let sent = packet(7, length);
        let cuts = [5, 12, 20, sent.len()];
        let mut start = 0;
        let buffers = cuts.map(|end| {
            let buffer = driver.buffer(&sent[start..end]);
            start = end;
            buffer
        });
        assert_eq!(driver.request(SEND, &buffers), 0);
        assert!(wire.receive() == sent, "{length}");
    }
}

#[test]
fn packets_that_cannot_be_sent_are_dropped_and_counted_and_given_back() {
    let (mut driver, wire, drops) = started(u64::MAX);
    let short = driver.buffer(&packet(0, 13));
    let header = driver.buffer(&[0; 5]);
    let long = driver.buffer(&packet(0, MAX_FRAME + 1));
    let room = driver.room(100);
    for bad in [[short].as_slice(), &[header], &[long], &[room]] {
        assert_eq!(driver.request(SEND, bad), 0);
    }
    let good = packet(1, 64);
    let buffer = driver.buffer(&good);
    driver.request(SEND, &[buffer]);
    assert_eq!(wire.receive(), good);
    assert_eq!((wire.poll(), drops.sent()), (None, 4));
}

#[test]
fn without_mergeable_buffers_a_packet_is_in_one_request() {
    let (mut driver, wire, drops) = started(!MERGEABLE);
    let buffers = [driver.room(5), driver.room(9), driver.room(2000)];
    driver.add(RECEIVE, &buffers);
    driver.kick(RECEIVE);
    wire.send(&packet(0, 2003)); // a byte too long
    wire.send(&packet(3, 2002));
    let used = driver.wait(RECEIVE);
    assert_eq!(used.length, 2014);
    let mut expected = packet(3, 2002);
    expected[10] = 1;
    assert!(buffers.map(|buffer| driver.content(buffer)).concat() == expected);
    assert_eq!(drops.received(), 1);
}

#[test]
fn a_large_packet_fills_as_many_mergeable_buffers_as_it_needs() {
    let (mut driver, wire, _) = started(u64::MAX);
    let rooms: Vec<Buffer> = (0..60).map(|_| driver.room(1500)).collect();
    let heads: Vec<u16> = rooms.iter().map(|room| driver.add(RECEIVE, &[*room])).collect();
    driver.kick(RECEIVE);
    wire.send(&packet(1, 100));
    wire.send(&packet(2, 60_000));
    let used = driver.wait(RECEIVE);
    assert_eq!((used.head, used.length), (heads[0], 112));
    let needed = 60_012_usize.div_ceil(1500);
    let mut all: Vec<u8> = Vec::new();
    for at in 1..=needed {
        let used = driver.wait(RECEIVE);
        assert_eq!(used.head, heads[at]);
        all.extend(&driver.content(rooms[at])[..used.length as usize]);
    }
    let mut expected = packet(2, 60_000);
    expected[10] = needed as u8;
    assert!(all == expected);
    assert_eq!(driver.take_used(RECEIVE), None);
}

#[test]
fn packets_of_all_sizes_arrive_in_order_through_buffers_of_all_sizes() {
    let (mut driver, wire, drops) = started(u64::MAX);
    let mut state = 12345u64;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut rooms = std::collections::HashMap::new();
    let begin = driver.mark();
    for round in 0..40u8 {
        if rooms.is_empty() {
            driver.release(begin);
        }
        while driver.queues[RECEIVE].available_index.wrapping_sub(driver.queues[RECEIVE].used_index) < 200 {
            let room = driver.room(20 + random(3000) as u32);
            rooms.insert(driver.add(RECEIVE, &[room]), room);
        }
        driver.kick(RECEIVE);
        let length = 14 + random(if round % 3 == 0 { 60_000 } else { 1600 });
        wire.send(&packet(round, length));
        let mut all: Vec<u8> = Vec::new();
        while all.len() < length + HEADER {
            let used = driver.wait(RECEIVE);
            let room = rooms.remove(&used.head).expect("a head that is not open");
            all.extend(&driver.content(room)[..used.length as usize]);
        }
        assert!(all[HEADER..] == packet(round, length)[HEADER..], "packet {round} of {length} bytes");
    }
    assert_eq!(drops.received(), 0);
}

#[test]
fn a_wire_that_nobody_has_room_for_wakes_nobody() {
    let (mut driver, wire, drops) = started(u64::MAX);
    for seed in 0..50 {
        wire.send(&packet(seed, 1000));
    }
    std::thread::sleep(MOMENT);
    let before = driver.host.processor_time();
    std::thread::sleep(Duration::from_millis(400));
    let busy = driver.host.processor_time() - before;
    assert!(busy < Duration::from_millis(100), "the thread was busy for {busy:?} with nothing to do");
    let rooms: Vec<Buffer> = (0..130).map(|_| driver.room(1500)).collect();
    let mut heads = std::collections::HashMap::new();
    for room in &rooms {
        heads.insert(driver.add(RECEIVE, &[*room]), *room);
    }
    driver.kick(RECEIVE);
    for seed in 0..50 {
        let used = driver.wait(RECEIVE);
        assert_eq!(driver.content(heads[&used.head])[12], seed);
    }
    assert_eq!(drops.received(), 0);
}

#[test]
fn a_full_wire_holds_packets_back_and_loses_none() {
    let (mut driver, wire, drops) = started(u64::MAX);
    let sent = packet(0, 8000);
    for _ in 0..100 {
        let buffer = driver.buffer(&sent);
        driver.add(SEND, &[buffer]);
    }
    driver.kick(SEND);
    for _ in 0..100 {
        assert_eq!(wire.receive().len(), sent.len());
    }
    for _ in 0..100 {
        driver.wait(SEND);
    }
    assert_eq!(drops.sent(), 0);
}

#[test]
fn limits_hold_both_ways() {
    let limit = RateLimit { operations_per_second: 200, burst_operations: 1, ..RateLimit::default() };
    let (device, wire) = device(Some(limit), Some(limit));
    let mut driver = Driver::start(Box::new(device));
    let begin = Instant::now();
    for _ in 0..60 {
        let room = driver.room(1500);
        driver.add(RECEIVE, &[room]);
    }
    driver.kick(RECEIVE);
    for seed in 0..20 {
        wire.send(&packet(seed, 100));
    }
    for _ in 0..20 {
        driver.wait(RECEIVE);
    }
    assert!(begin.elapsed() >= Duration::from_millis(90), "a lower bound: 18 waits of 5 ms");
    let begin = Instant::now();
    for seed in 0..20 {
        let buffer = driver.buffer(&packet(seed, 100));
        driver.add(SEND, &[buffer]);
    }
    driver.kick(SEND);
    for seed in 0..20 {
        assert_eq!(wire.receive()[HEADER], seed);
    }
    assert!(begin.elapsed() >= Duration::from_millis(90), "a lower bound: 18 waits of 5 ms");
}

#[test]
fn a_paused_device_moves_nothing_and_a_reset_one_works_again() {
    let (mut driver, wire, _) = started(u64::MAX);
    driver.transport.pause(true);
    let sent = packet(5, 100);
    let buffer = driver.buffer(&sent);
    driver.add(SEND, &[buffer]);
    driver.kick_anyway(SEND as u32);
    std::thread::sleep(MOMENT);
    assert_eq!(wire.poll(), None);
    driver.transport.pause(false);
    assert_eq!(wire.receive(), sent);
    driver.bring_up(u64::MAX);
    let buffer = driver.buffer(&sent);
    driver.request(SEND, &[buffer]);
    assert_eq!(wire.receive(), sent);
    driver.transport.close().unwrap();
}

/// Breaks a device; why it was broken. It must rest quietly, and work again after a reset.
fn broken_by(attack: impl FnOnce(&mut Driver)) -> String {
    let (mut driver, wire, _) = started(u64::MAX);
    attack(&mut driver);
    driver.kick_anyway(0);
    driver.kick_anyway(1);
    let reason = driver.host.wait_broken();
    assert_ne!(driver.status() & status::NEEDS_RESET, 0);
    driver.transport.pause(true);
    driver.transport.pause(false);
    (0..1000).for_each(|_| driver.kick_anyway(0));
    driver.bring_up(u64::MAX);
    let sent = packet(5, 100);
    let buffer = driver.buffer(&sent);
    driver.request(SEND, &[buffer]);
    assert_eq!(wire.receive(), sent);
    reason
}

type Attack = Box<dyn FnOnce(&mut Driver)>;

#[test]
fn a_hostile_driver_breaks_the_device_and_nothing_else() {
    let circle = RawDescriptor { address: 0x1000, length: 16, flags: flag::NEXT, next: 0 };
    let cases: Vec<(&str, Attack)> = vec![
        (
            "queue 1: a chain has more than 256 descriptors",
            Box::new(move |driver| {
                driver.set_descriptor(SEND, 0, circle);
                driver.publish(SEND, 0);
            }),
        ),
        (
            "queue 0: a chain has more than 256 descriptors",
            Box::new(move |driver| {
                driver.set_descriptor(
                    RECEIVE,
                    0,
                    RawDescriptor { flags: flag::NEXT | flag::WRITE, ..circle },
                );
                driver.publish(RECEIVE, 0);
            }),
        ),
        (
            "queue 0: descriptor 999 is beyond the table of 256",
            Box::new(|driver| driver.publish(RECEIVE, 999)),
        ),
        (
            "queue 1: the available index runs 32768 ahead of a ring of 256",
            Box::new(|driver| {
                driver.set_available_index(SEND, 0x8000);
            }),
        ),
        (
            "queue 0: a request to receive has no writable buffer",
            Box::new(|driver| {
                let buffer = driver.buffer(&[0; 2000]);
                driver.add(RECEIVE, &[buffer]);
            }),
        ),
        (
            "queue 0: a buffer of 4096 bytes at 0xfffffffffffff000 is not inside memory",
            Box::new(|driver| {
                driver.add(RECEIVE, &[Buffer { address: u64::MAX - 4095, length: 4096, writable: true }]);
            }),
        ),
    ];
    for (expected, attack) in cases {
        assert_eq!(broken_by(attack), expected);
    }
}

#[test]
fn a_chain_of_a_thousand_pieces_is_received_into_and_sent() {
    let (mut driver, wire, _) = started(u64::MAX);
    let pieces: Vec<Buffer> = (0..1024).map(|_| driver.room(3)).collect();
    driver.add_indirect(RECEIVE, &pieces);
    for _ in 0..200 {
        let room = driver.room(400);
        driver.add(RECEIVE, &[room]);
    }
    driver.kick(RECEIVE);
    wire.send(&packet(9, 1000));
    assert_eq!(driver.wait(RECEIVE).length, 1012);
    let sent = packet(4, 2000);
    let pieces: Vec<Buffer> = sent.chunks(2).map(|piece| driver.buffer(piece)).collect();
    assert!(pieces.len() <= 1024);
    driver.add_indirect(SEND, &pieces);
    driver.kick(SEND);
    assert!(wire.receive() == sent);
}

#[test]
fn many_kicks_before_ready_and_after_change_nothing() {
    let (device, wire) = device(None, None);
    let mut driver = Driver::new(Box::new(device));
    for queue in [0, 1, 2] {
        (0..100_000).for_each(|_| driver.kick_anyway(queue));
    }
    driver.bring_up(u64::MAX);
    for queue in [0, 1] {
        (0..300_000).for_each(|_| driver.kick_anyway(queue));
    }
    let sent = packet(5, 100);
    let buffer = driver.buffer(&sent);
    driver.request(SEND, &[buffer]);
    assert_eq!(wire.receive(), sent);
}

/// A TAP that is up, in a network namespace of this thread's own, and a raw socket on it.
mod tap {
    use std::fs::File;
    use std::os::fd::FromRawFd;

    use super::*;

    pub(super) fn make() -> io::Result<(OwnedFd, OwnedFd)> {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
        let tun = File::options().read(true).write(true).open("/dev/net/tun")?;
        // SAFETY: all zeros is a value of this plain structure.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(b"tap0") {
            *to = *from as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
        // SAFETY: the structure is what this request takes.
        check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
        let protocol = i32::from((libc::ETH_P_ALL as u16).to_be());
        // SAFETY: plain numbers.
        let raw =
            check(unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) })?;
        // SAFETY: the socket was just made and nobody else has it.
        let raw = unsafe { OwnedFd::from_raw_fd(raw) };
        request.ifr_ifru.ifru_flags = libc::IFF_UP as i16;
        // SAFETY: the structure is what this request takes.
        check(unsafe { libc::ioctl(raw.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) })?;
        // SAFETY: all zeros is a value of this plain structure.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = nix::net::if_::if_nametoindex("tap0")? as i32;
        let length = size_of_val(&address) as u32;
        // SAFETY: address and length are those of one structure.
        check(unsafe { libc::bind(raw.as_raw_fd(), (&raw const address).cast(), length) })?;
        Ok((tun.into(), raw))
    }

    fn check(result: i32) -> io::Result<i32> {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }
}

/// An Ethernet frame with an IPv4 TCP segment of `payload` bytes whose TCP checksum is left to be done.
fn tcp_frame(payload: usize) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend([2, 0, 0, 1, 2, 3, 8, 0]);
    let total = (40 + payload) as u16;
    let mut ip = vec![0x45, 0];
    ip.extend(total.to_be_bytes());
    ip.extend([0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let sum: u32 = ip.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ip[10..12].copy_from_slice(&(!(folded as u16)).to_be_bytes());
    frame.extend(ip);
    frame.extend([0, 80, 0, 81, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    frame.extend((0..payload).map(|at| at as u8));
    frame
}

#[test]
fn over_a_tap_frames_pass_both_ways_offloads_work_and_nonsense_is_dropped() {
    let name = "over_a_tap_frames_pass_both_ways_offloads_work_and_nonsense_is_dropped";
    if !nix::unistd::geteuid().is_root() || !std::path::Path::new("/dev/net/tun").exists() {
        assert!(
            !std::env::var("REQUIRE").is_ok_and(|need| need.contains("root")),
            "root and /dev/net/tun are needed"
        );
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIP {name}: needs root and /dev/net/tun\n"),
        );
        return;
    }
    let (tap, raw) = tap::make().unwrap();
    let wire = Wire(raw);
    let port = Port::tap(tap).unwrap();
    let device = NetDevice::new(NetOptions { port, mac: [2; 6], mtu: 1500, send: None, receive: None });
    let drops = device.drops();
    let mut driver = Driver::start(Box::new(device));
    // What the kernel says of itself, such as IPv6 neighbour discovery, is not of interest.
    let ours = |frame: &[u8]| frame.len() > 14 && frame[12..14] == [8, 0];
    let next = |wire: &Wire| loop {
        let frame = wire.receive();
        if ours(&frame) {
            return frame;
        }
    };

    // A plain frame, and one that the kernel has to segment or finish.
    let plain = tcp_frame(100);
    let buffers = [driver.buffer(&[0; HEADER]), driver.buffer(&plain)];
    driver.request(SEND, &buffers);
    assert_eq!(next(&wire), plain);
    let large = tcp_frame(9000);
    let gso = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0]; // NEEDS_CSUM, TCPv4, headers of 54, segments of 1448
    let buffers = [driver.buffer(&gso), driver.buffer(&large)];
    driver.request(SEND, &buffers);
    let got = next(&wire);
    assert_eq!(got.len(), large.len(), "a raw socket sees it before it is cut");

    // Headers that make no sense.
    for header in [
        [1, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0], // a checksum beyond the frame
        [1, 1, 0xff, 0xff, 1, 0, 34, 0, 16, 0, 0, 0],     // headers longer than the frame
        [0, 77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],            // an unknown kind of segmentation
        [1, 1, 54, 0, 0, 0, 34, 0, 16, 0, 0, 0],          // segments of no bytes
    ] {
        let before = drops.sent();
        let buffers = [driver.buffer(&header), driver.buffer(&plain)];
        driver.request(SEND, &buffers);
        assert_eq!(drops.sent(), before + 1, "{header:?}");
    }

    // The other way, in mergeable buffers.
    let mut rooms = std::collections::HashMap::new();
    for _ in 0..140 {
        let room = driver.room(1600);
        rooms.insert(driver.add(RECEIVE, &[room]), room);
    }
    driver.kick(RECEIVE);
    wire.send(&plain);
    loop {
        let used = driver.wait(RECEIVE);
        let content = driver.content(rooms[&used.head]);
        let frame = &content[HEADER..used.length as usize];
        if ours(frame) {
            assert_eq!(frame, plain);
            assert_eq!(content[10..12], [1, 0]);
            break;
        }
    }
    driver.transport.close().unwrap();
}

#[test]
fn what_is_no_tap_is_refused() {
    let (ours, _theirs) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    assert!(Port::tap(ours).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn whatever_is_in_the_rings_the_device_lives_and_can_be_reset(
        descriptors in prop::collection::vec(
            (prop_oneof![4 => 0u64..0x10_0000, 1 => any::<u64>()], 0u32..5000, 0u16..8, 0u16..18),
            32,
        ),
        heads in prop::collection::vec((0usize..2, 0u16..17), 1..40),
        packets in prop::collection::vec(0usize..3000, 0..10),
    ) {
        let (mut driver, wire, _) = started(u64::MAX);
        for (at, (address, length, flags, next)) in descriptors.into_iter().enumerate() {
            let index = (at % 16) as u16;
            driver.set_descriptor(at / 16, index, RawDescriptor { address, length, flags, next });
        }
        for (queue, head) in heads {
            driver.publish(queue, head);
        }
        for length in packets {
            wire.send(&packet(0, length));
        }
        driver.kick_anyway(0);
        driver.kick_anyway(1);
        driver.settle(Duration::from_millis(20));
        driver.transport.pause(true);
        driver.transport.pause(false);
        driver.bring_up(u64::MAX);
        let buffer = driver.buffer(&packet(5, 100));
        prop_assert_eq!(driver.request(SEND, &[buffer]), 0);
    }
}
