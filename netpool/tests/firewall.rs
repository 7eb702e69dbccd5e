//! The firewall against real packets: two guests, a host and an outside in namespaces. Each denial is shown twice: the
//! packet doesn't pass with the table, and does without it, so that nothing else is what stops it.
#![allow(clippy::unwrap_used, reason = "a test that can't go on panics")]

mod common;

use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};

use common::{
    HOST_UPLINK, METADATA, OUTSIDE, PATIENCE, RawGuest, SILENCE, World, arrival, frame, ready, sh, udp_socket,
};
use torpor_netpool::linux::{Ensured, Firewall, TapOptions, attach, detach, effective_mtu, uplink};
use torpor_netpool::{Mac, PoolConfig, Slot};

#[test]
fn a_guest_reaches_the_outside_as_the_host_and_gets_its_replies() {
    if !ready("a_guest_reaches_the_outside_as_the_host_and_gets_its_replies") {
        return;
    }
    let world = World::new();
    let server = udp_socket(&world.outside, "198.51.100.2:7");
    let mut guest = world.guest(0);
    guest.send_udp(OUTSIDE, 7, "question");
    let sender = arrival(&server, "question", PATIENCE).expect("the datagram arrives");
    assert_eq!(sender.ip(), HOST_UPLINK, "masqueraded");
    server.send_to(b"answer", sender).unwrap();
    assert!(guest.hears("answer", PATIENCE), "the reply comes back");
    guest.send(&frame::ping((guest.net.mac, guest.net.guest_ip), (guest.gateway, OUTSIDE)));
    assert!(guest.receive(PATIENCE, |received| frame::is_pong(received, OUTSIDE)).is_some());

    // After release nothing passes, although the guest still holds the descriptor of its TAP.
    let released = guest.net.guest();
    world.with_firewall(move |firewall| firewall.remove(&released).unwrap());
    guest.send_udp(OUTSIDE, 7, "late");
    assert_eq!(arrival(&server, "late", SILENCE), None);
}

/// One forbidden way, tried with a text of its own; true when the packet arrived.
type Attempt<'a> =
    (&'static str, Box<dyn FnMut(&mut RawGuest, &mut RawGuest, &str, std::time::Duration) -> bool + 'a>);

#[test]
fn forbidden_destinations_and_spoofed_packets_are_stopped_by_the_table_alone() {
    if !ready("forbidden_destinations_and_spoofed_packets_are_stopped_by_the_table_alone") {
        return;
    }
    let world = World::new();
    let (mut a, mut b) = (world.guest(0), world.guest(1));
    let on_host = udp_socket(&world.host, "0.0.0.0:9");
    let outside = udp_socket(&world.outside, "0.0.0.0:7");
    let on_host6 = ipv6_on_the_tap(&world);

    let to_host = |address: Ipv4Addr| {
        let socket = &on_host;
        move |a: &mut RawGuest, _: &mut RawGuest, text: &str, wait| {
            a.send_udp(address, 9, text);
            arrival(socket, text, wait).is_some()
        }
    };
    let spoofed = |mac: Option<Mac>, ip: Option<Ipv4Addr>| {
        let socket = &outside;
        move |a: &mut RawGuest, _: &mut RawGuest, text: &str, wait| {
            let from = (mac.unwrap_or(a.net.mac), ip.unwrap_or(a.net.guest_ip));
            a.send(&frame::udp4(from, (a.gateway, OUTSIDE), (4000, 7), text.as_bytes()));
            arrival(socket, text, wait).is_some()
        }
    };
    let other_guests_ip = b.net.guest_ip;
    let mut attempts: Vec<Attempt> = vec![
        (
            "guest to guest",
            Box::new(|a, b, text, wait| {
                a.send_udp(b.net.guest_ip, 9, text);
                b.hears(text, wait)
            }),
        ),
        ("own gateway address", Box::new(to_host(a.net.host_ip))),
        ("other guest's gateway address", Box::new(to_host(b.net.host_ip))),
        ("the host's uplink address", Box::new(to_host(HOST_UPLINK))),
        ("broadcast", Box::new(to_host(Ipv4Addr::BROADCAST))),
        (
            "pinging the host",
            Box::new(|a, _, _, wait| {
                a.send(&frame::ping((a.net.mac, a.net.guest_ip), (a.gateway, HOST_UPLINK)));
                a.receive(wait, |received| frame::is_pong(received, HOST_UPLINK)).is_some()
            }),
        ),
        (
            "metadata service",
            Box::new(|a, _, text, wait| {
                a.send_udp(METADATA, 7, text);
                arrival(&outside, text, wait).is_some()
            }),
        ),
        ("spoofed foreign IP", Box::new(spoofed(None, Some(Ipv4Addr::new(203, 0, 113, 5))))),
        ("spoofed IP of the other guest", Box::new(spoofed(None, Some(other_guests_ip)))),
        ("spoofed MAC", Box::new(spoofed(Some("02:00:00:00:00:99".parse().unwrap()), None))),
        (
            "IPv6 to the host",
            Box::new(|a, _, text, wait| {
                let (from, to) =
                    (Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1));
                a.send(&frame::udp6((a.net.mac, from), (a.gateway, to), (4000, 9), text.as_bytes()));
                arrival(&on_host6, text, wait).is_some()
            }),
        ),
        (
            "a new connection from outside",
            Box::new(|a, _, text, wait| {
                outside.send_to(text.as_bytes(), (a.net.guest_ip, 9)).unwrap();
                a.hears(text, wait)
            }),
        ),
    ];
    for (name, attempt) in &mut attempts {
        assert!(!attempt(&mut a, &mut b, &format!("closed {name}"), SILENCE), "{name} passes the firewall");
    }
    world.with_firewall(|firewall| firewall.remove_table().unwrap());
    for (name, attempt) in &mut attempts {
        assert!(
            attempt(&mut a, &mut b, &format!("open {name}"), PATIENCE),
            "{name} is stopped by something else"
        );
    }
}

/// Switches IPv6 on again on the first TAP, as another program might, and listens there.
fn ipv6_on_the_tap(world: &World) -> std::net::UdpSocket {
    world.host.run(|| {
        sh("echo 0 > /proc/sys/net/ipv6/conf/tpr-000000/disable_ipv6");
        sh("ip -6 addr add fd00::1/64 dev tpr-000000 nodad");
        std::net::UdpSocket::bind("[fd00::1]:9").unwrap()
    })
}

#[test]
fn a_port_published_by_address_translation_of_others_is_still_the_hosts() {
    if !ready("a_port_published_by_address_translation_of_others_is_still_the_hosts") {
        return;
    }
    let world = World::new();
    let server = udp_socket(&world.outside, "198.51.100.2:7");
    world.host.run(|| {
        sh("nft 'add table ip other'");
        sh("nft 'add chain ip other pre { type nat hook prerouting priority -100; }'");
        sh("nft 'add rule ip other pre fib daddr type local udp dport 8080 dnat to 198.51.100.2:7'");
    });
    let mut guest = world.guest(0);
    guest.send_udp(HOST_UPLINK, 8080, "closed");
    assert_eq!(arrival(&server, "closed", SILENCE), None);
    world.with_firewall(|firewall| firewall.remove_table().unwrap());
    guest.send_udp(HOST_UPLINK, 8080, "open");
    assert!(arrival(&server, "open", PATIENCE).is_some());
}

#[test]
fn the_host_answers_arp_only_for_its_end_of_the_link() {
    if !ready("the_host_answers_arp_only_for_its_end_of_the_link") {
        return;
    }
    let world = World::new();
    let mut guest = world.guest(0);
    let _other = world.guest(1);
    for address in [HOST_UPLINK, Ipv4Addr::new(10, 231, 0, 5), OUTSIDE] {
        assert_eq!(guest.ask_arp(address, SILENCE), None, "{address}");
    }
    assert_eq!(guest.ask_arp(guest.net.host_ip, PATIENCE), Some(guest.gateway));
}

#[test]
fn segments_are_clamped_to_a_small_uplink_mtu() {
    if !ready("segments_are_clamped_to_a_small_uplink_mtu") {
        return;
    }
    let world = World::new();
    let _listener = world.outside.run(|| TcpListener::bind("198.51.100.2:80").unwrap());
    let config = world.config.clone();
    let mut guest = world.with_firewall(move |firewall| {
        sh("ip link set up0 mtu 1400");
        let found = uplink(&config).unwrap();
        let mtu = effective_mtu(&config, found.as_ref());
        assert_eq!((found.unwrap().interface.as_str(), mtu), ("up0", 1400));
        let net = config.guest_net("sb", Slot(0)).unwrap();
        let options = TapOptions { mtu: Some(mtu), ..TapOptions::default() };
        RawGuest::new(attach(firewall, &net, &options).unwrap(), net)
    });
    guest.gateway = guest.ask_arp(guest.net.host_ip, PATIENCE).unwrap();
    let (from, to) = ((guest.net.mac, guest.net.guest_ip), (guest.gateway, OUTSIDE));
    guest.send(&frame::tcp_syn(from, to, (4000, 80)));
    assert_eq!(guest.receive(PATIENCE, frame::syn_ack_mss), Some(1360));
}

#[test]
fn with_a_configured_uplink_guests_leave_by_no_other() {
    if !ready("with_a_configured_uplink_guests_leave_by_no_other") {
        return;
    }
    let mut world = World::new();
    let server = udp_socket(&world.outside, "198.51.100.2:7");
    world.config.uplink = Some("up0".to_string());
    world.guest(0).send_udp(OUTSIDE, 7, "by up0");
    assert!(arrival(&server, "by up0", PATIENCE).is_some());
    world.with_firewall(|firewall| firewall.remove_table().unwrap());
    world.config.uplink = Some("vpn0".to_string());
    world.guest(0).send_udp(OUTSIDE, 7, "not by up0");
    assert_eq!(arrival(&server, "not by up0", SILENCE), None);
}

#[test]
fn ensure_heals_every_kind_of_damage_and_says_what_it_did() {
    if !ready("ensure_heals_every_kind_of_damage_and_says_what_it_did") {
        return;
    }
    let world = World::new();
    let net = world.config.guest_net("sb", Slot(3)).unwrap();
    world.with_firewall(move |firewall| {
        let rules = || sh("nft -s list table inet torpor");
        assert_eq!(firewall.ensure().unwrap(), Ensured::Created);
        firewall.add(&net.guest()).unwrap();
        let right = rules();
        assert_eq!(firewall.ensure().unwrap(), Ensured::Already);
        assert_eq!(
            Firewall::new(&PoolConfig::default()).ensure().unwrap(),
            Ensured::Already,
            "after a restart"
        );
        for damage in [
            "flush table inet torpor",
            "flush chain inet torpor input",
            "insert rule inet torpor guest_in accept",
            "delete chain inet torpor postrouting",
            "add chain inet torpor more { type filter hook input priority 5; }",
        ] {
            sh(&format!("nft '{damage}'"));
            assert_ne!(rules(), right, "{damage}");
            assert_eq!(firewall.ensure().unwrap(), Ensured::Repaired, "{damage}");
            assert_eq!(rules(), right, "rules and elements are back after: {damage}");
        }
        sh("nft flush ruleset");
        assert_eq!(firewall.list().unwrap(), []);
        assert_eq!(firewall.ensure().unwrap(), Ensured::Created);
        assert_eq!(firewall.list().unwrap(), [], "lost elements are the sweep's to add");
        sh("nft flush ruleset");
        firewall.add(&net.guest()).unwrap();
        assert_eq!(rules(), right, "adding makes a missing table");
    });
}

#[test]
fn adding_and_removing_are_idempotent_and_cost_no_rules() {
    if !ready("adding_and_removing_are_idempotent_and_cost_no_rules") {
        return;
    }
    let world = World::new();
    let config = world.config.clone();
    world.with_firewall(move |firewall| {
        let guest = |n: u32| config.guest_net(&format!("sb-{n}"), Slot(n)).unwrap().guest();
        let count = || sh("nft -a list table inet torpor").matches("# handle").count();
        firewall.remove(&guest(0)).unwrap();
        firewall.ensure().unwrap();
        let before = count();
        for n in (0..20).chain(0..20) {
            firewall.add(&guest(n)).unwrap();
        }
        assert_eq!(count(), before);
        let mut expected: Vec<_> = (0..20).map(guest).collect();
        expected.sort();
        assert_eq!(firewall.list().unwrap(), expected);
        for n in (0..19).chain(0..19) {
            firewall.remove(&guest(n)).unwrap();
        }
        assert_eq!(firewall.list().unwrap(), [guest(19)]);
        firewall.remove_table().unwrap();
        firewall.remove_table().unwrap();
        assert_eq!(firewall.list().unwrap(), []);
    });
}

#[test]
fn tables_of_others_and_of_other_instances_are_left_alone() {
    if !ready("tables_of_others_and_of_other_instances_are_left_alone") {
        return;
    }
    let world = World::new();
    world.with_firewall(|firewall| {
        sh("nft 'add table inet filter; add chain inet filter forward { type filter hook forward priority 0; policy drop; }'");
        sh("nft 'add table inet torpor_x; add set inet torpor_x guests { type ipv4_addr; }'");
        let others = sh("nft -a list ruleset");
        firewall.ensure().unwrap();
        sh("nft flush table inet torpor");
        firewall.ensure().unwrap();
        let net = PoolConfig::default().guest_net("sb", Slot(0)).unwrap();
        firewall.add(&net.guest()).unwrap();
        detach(firewall, &net).unwrap();
        firewall.remove_table().unwrap();
        assert_eq!(sh("nft -a list ruleset"), others);
    });
}
