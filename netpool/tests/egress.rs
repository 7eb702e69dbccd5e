//! Who reaches what under each egress policy, with real packets: every cell of the table in docs/reference/network.md.
#![allow(clippy::unwrap_used, reason = "a test that can't go on panics")]

mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::guest::KernelGuest;
use common::{
    HOST_UPLINK, METADATA, Namespace, OUTSIDE, PATIENCE, RawGuest, SILENCE, World, frame, ready, sh,
};
use torpor_netpool::linux::{Ensured, TapOptions, attach, effective_mtu, uplink};
use torpor_netpool::{Egress, Grants, GuestNet, Mac, PoolConfig, Slot};

const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 9, 9, 9);
const RESOLVER: Ipv4Addr = Ipv4Addr::new(10, 9, 9, 53);
/// Where the forwarder of names would listen.
const DNS_PORT: u16 = 5300;

fn world() -> World {
    let mut world = World::new();
    world.config.resolvers = vec![RESOLVER];
    world.config.dns_port = Some(DNS_PORT);
    world.outside.run(|| {
        sh("ip addr add 10.9.9.9/32 dev lo; ip addr add 10.9.9.53/32 dev lo");
    });
    world
}

/// All that can be sent to, and sockets for it. A datagram's text is the name of the destination.
struct Targets {
    sockets: Vec<UdpSocket>,
}

impl Targets {
    fn new(world: &World) -> Targets {
        let bind = |namespace: &Namespace, ports: [u16; 3]| {
            namespace.run(move || ports.map(|port| UdpSocket::bind(("0.0.0.0", port)).unwrap()))
        };
        let mut sockets: Vec<UdpSocket> = bind(&world.outside, [7, 8, 53]).into();
        sockets.extend(bind(&world.host, [7, 53, DNS_PORT]));
        sockets.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        Targets { sockets }
    }

    /// What arrives until all of `expected` has, or time is up, and a while longer.
    fn arrivals(&self, other: &mut RawGuest, expected: &BTreeSet<String>) -> BTreeSet<String> {
        let (mut found, mut deadline) = (BTreeSet::new(), Instant::now() + PATIENCE);
        let mut complete = false;
        while Instant::now() < deadline {
            let mut buffer = [0; 2048];
            for socket in &self.sockets {
                while let Ok((length, _)) = socket.recv_from(&mut buffer) {
                    found.insert(String::from_utf8_lossy(&buffer[..length]).into_owned());
                }
            }
            if other.hears("other guest", Duration::from_millis(5)) {
                found.insert("other guest".to_string());
            }
            if !complete && expected.is_subset(&found) {
                complete = true;
                deadline = Instant::now() + SILENCE;
            }
        }
        found
    }
}

fn send_everywhere(guest: &mut RawGuest, other: &RawGuest) {
    let own = guest.net.host_ip;
    for (name, to, port) in [
        ("public 7", OUTSIDE, 7),
        ("public 8", OUTSIDE, 8),
        ("private 7", PRIVATE, 7),
        ("resolver 53", RESOLVER, 53),
        ("resolver 7", RESOLVER, 7),
        ("public 53", OUTSIDE, 53),
        ("metadata", METADATA, 7),
        ("host", HOST_UPLINK, 7),
        ("host 53", HOST_UPLINK, 53),
        ("forwarder's port", own, DNS_PORT),
        ("own gateway 53", own, 53),
        ("own gateway 7", own, 7),
        ("other gateway 53", other.net.host_ip, 53),
        ("other guest", other.net.guest_ip, 7),
        ("broadcast", Ipv4Addr::BROADCAST, 7),
    ] {
        guest.send_udp(to, port, name);
    }
    for (name, mac, ip) in [
        ("spoofed ip", guest.net.mac, Ipv4Addr::new(203, 0, 113, 5)),
        ("spoofed other's ip", guest.net.mac, other.net.guest_ip),
        ("spoofed mac", Mac([2, 0, 0, 0, 0, 0x99]), guest.net.guest_ip),
    ] {
        guest.send(&frame::udp4((mac, ip), (guest.gateway, OUTSIDE), (4000, 7), name.as_bytes()));
    }
    let (from, to) = (Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1));
    guest.send(&frame::udp6((guest.net.mac, from), (guest.gateway, to), (4000, 7), b"ipv6"));
}

fn allow(rules: &[&str], names: bool) -> Egress {
    Egress::Allow { rules: rules.iter().map(|rule| rule.parse().unwrap()).collect(), names }
}

#[test]
fn every_policy_lets_through_what_its_column_says_and_changes_at_once() {
    if !ready("every_policy_lets_through_what_its_column_says_and_changes_at_once") {
        return;
    }
    let world = world();
    let targets = Targets::new(&world);
    let mut guest = world.guest_with(0, Egress::None);
    // What another guest may do changes nothing.
    let mut other = world.guest_with(1, Egress::Open);
    let names = ["own gateway 53", "resolver 53"];
    let public = ["public 7", "public 8", "public 53"];
    let cases: Vec<(Egress, Vec<&str>)> = vec![
        (Egress::None, vec![]),
        (Egress::Open, [&public[..], &names, &["private 7", "resolver 7"]].concat()),
        (Egress::Public, [&public[..], &names].concat()),
        (allow(&["198.51.100.2:7/udp"], false), vec!["public 7"]),
        (allow(&["198.51.100.0/24:8-60/udp"], true), [&["public 8", "public 53"][..], &names].concat()),
        (allow(&["10.9.9.0/24", "10.9.0.0/16:7/udp"], false), vec!["private 7", "resolver 7", "resolver 53"]),
        (allow(&["198.51.100.2:7/tcp"], false), vec![]),
        // Rules never reach what no guest reaches.
        (allow(&["0.0.0.0/0"], false), [&public[..], &["private 7", "resolver 7", "resolver 53"]].concat()),
        (Egress::Public, [&public[..], &names].concat()),
        (Egress::None, vec![]),
    ];
    for (egress, expected) in cases {
        let net = GuestNet { egress: Some(egress.clone()), ..guest.net.clone() };
        let wanted = net.guest();
        world.with_firewall(move |firewall| firewall.add(&wanted).unwrap());
        let mut listed = world.with_firewall(|firewall| firewall.listing().unwrap());
        assert_eq!(listed.strays, [Ipv4Addr::UNSPECIFIED; 0]);
        assert_eq!(listed.guests.remove(0), net.guest(), "the kernel holds the policy, and no former one");
        send_everywhere(&mut guest, &other);
        let expected: BTreeSet<String> = expected.iter().map(ToString::to_string).collect();
        assert_eq!(targets.arrivals(&mut other, &expected), expected, "{egress:?}");
    }
}

#[test]
fn name_servers_may_change_while_guests_run() {
    if !ready("name_servers_may_change_while_guests_run") {
        return;
    }
    let world = World::new();
    world.with_firewall(|firewall| {
        firewall.ensure().unwrap();
        let rules = || sh("nft -s list table inet torpor");
        let before = rules();
        assert!(!firewall.set_names(&[], None));
        assert_eq!(firewall.ensure().unwrap(), Ensured::Already);
        assert!(firewall.set_names(&[RESOLVER], Some(DNS_PORT)));
        assert_eq!(firewall.ensure().unwrap(), Ensured::Repaired);
        assert!(rules().contains("10.9.9.53") && rules().contains("redirect to :5300"), "{}", rules());
        assert!(firewall.set_names(&[], None));
        firewall.ensure().unwrap();
        assert_eq!(rules(), before);
    });
}

#[test]
fn without_the_table_the_same_packets_arrive() {
    if !ready("without_the_table_the_same_packets_arrive") {
        return;
    }
    let world = world();
    let targets = Targets::new(&world);
    let mut guest = world.guest_with(0, Egress::None);
    let mut other = world.guest_with(1, Egress::None);
    world.with_firewall(|firewall| firewall.remove_table().unwrap());
    send_everywhere(&mut guest, &other);
    let expected: BTreeSet<String> = [
        "public 7",
        "public 8",
        "private 7",
        "resolver 53",
        "resolver 7",
        "public 53",
        "metadata",
        "host",
        "host 53",
        "forwarder's port",
        "own gateway 53",
        "own gateway 7",
        "other gateway 53",
        "other guest",
        "broadcast",
        "spoofed ip",
        "spoofed other's ip",
        "spoofed mac",
    ]
    .map(ToString::to_string)
    .into();
    assert_eq!(targets.arrivals(&mut other, &expected), expected);
}

#[test]
fn thousands_of_sandboxes_cost_no_rules_and_come_back_after_damage() {
    if !ready("thousands_of_sandboxes_cost_no_rules_and_come_back_after_damage") {
        return;
    }
    let world = world();
    let config = world.config.clone();
    world.with_firewall(move |firewall| {
        let count = || sh("nft -a list table inet torpor").matches("# handle").count();
        firewall.ensure().unwrap();
        let before = count();
        let egress = |n: u32| match n % 4 {
            0 => Egress::Open,
            1 => Egress::Public,
            2 => allow(&["192.0.2.0/24", "198.51.100.0/25:443", "198.51.100.0/24:80-90"], true),
            _ => Egress::None,
        };
        let guest = |n: u32| {
            let net = config.guest_net(&format!("sb-{n}"), Slot(n)).unwrap();
            GuestNet { egress: Some(egress(n)), ..net }.guest()
        };
        let mut expected: Vec<_> = (0..1000).map(guest).collect();
        expected.iter().for_each(|guest| firewall.add(guest).unwrap());
        expected.sort();
        assert_eq!(count(), before);
        assert_eq!(firewall.list().unwrap(), expected);
        sh("nft delete chain inet torpor postrouting");
        assert_eq!(firewall.ensure().unwrap(), Ensured::Repaired);
        assert_eq!(firewall.list().unwrap(), expected, "the table is replaced with all of them");
        expected.iter().for_each(|guest| firewall.remove(guest).unwrap());
        assert_eq!(firewall.listing().unwrap(), Default::default());
    });
}

#[test]
fn large_transfers_pass_an_uplink_of_a_small_mtu_both_ways() {
    if !ready("large_transfers_pass_an_uplink_of_a_small_mtu_both_ways") {
        return;
    }
    const SIZE: usize = 2 << 20;
    let world = World::new();
    // Nobody tells the sender that a packet was too large: only small segments pass.
    world.outside.run(|| {
        sh("nft 'add table ip quiet; add chain ip quiet in { type filter hook input priority 0; }'");
        sh("nft 'add rule ip quiet in ip protocol icmp drop'");
    });
    let listener = world.outside.run(|| TcpListener::bind("198.51.100.2:80").unwrap());
    let server = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE * 4)).unwrap();
            let mut received = vec![0; SIZE];
            stream.read_exact(&mut received).unwrap();
            stream.write_all(&received).unwrap();
        }
    });
    let config = world.config.clone();
    // The guest's MTU as it should be, and one that a careless image has set itself.
    for (slot, guest_mtu) in [(0, None), (1, Some(1500))] {
        let config = config.clone();
        let (tap, net, mtu) = world.with_firewall(move |firewall| {
            sh("ip link set up0 mtu 1400");
            let mtu = effective_mtu(&config, uplink(&config).unwrap().as_ref());
            let net = config.guest_net("sb", Slot(slot)).unwrap();
            let options = TapOptions { mtu: Some(mtu), ..TapOptions::default() };
            (attach(firewall, &net, &options).unwrap(), net, mtu)
        });
        assert_eq!(mtu, 1400);
        let guest = KernelGuest::new(tap, &net, guest_mtu.unwrap_or(mtu));
        let sent: Arc<Vec<u8>> = Arc::new((0..SIZE).map(|n| (n / 7) as u8).collect());
        let copy = Arc::clone(&sent);
        let back = guest.namespace.run(move || {
            let mut stream = TcpStream::connect("198.51.100.2:80").unwrap();
            stream.set_read_timeout(Some(PATIENCE * 4)).unwrap();
            stream.write_all(&copy).unwrap();
            let mut back = vec![0; SIZE];
            stream.read_exact(&mut back).unwrap();
            back
        });
        assert!(back == *sent, "as it was sent");
    }
    server.join().unwrap();
}

#[test]
fn the_default_policy_is_the_configured_one() {
    let config: PoolConfig =
        serde_json::from_str(r#"{"egress": {"allow": {"rules": ["192.0.2.0/24:443"], "names": true}}}"#)
            .unwrap();
    let net = config.guest_net("sb", Slot(0)).unwrap();
    assert_eq!(net.egress, Some(allow(&["192.0.2.0/24:443/tcp"], true)));
    assert_eq!(PoolConfig::default().egress, Egress::Public);
    let text = serde_json::to_string(&net).unwrap();
    assert_eq!(serde_json::from_str::<GuestNet>(&text).unwrap(), net);
    let mut old = serde_json::to_value(&net).unwrap();
    old.as_object_mut().unwrap().remove("egress");
    let old: GuestNet = serde_json::from_value(old).unwrap();
    assert_eq!((old.egress.clone(), old.guest().grants), (None, Grants::default()), "unknown is not open");
}
