//! The forwarder of names, with servers of the test's own, and from a guest through the firewall.
#![allow(clippy::unwrap_used, reason = "a test that can't go on panics")]

mod common;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::guest::KernelGuest;
use common::{PATIENCE, SILENCE, World, ready, sh};
use torpor_netpool::linux::{Forwarder, ForwarderOptions, NetError, TapOptions, attach};
use torpor_netpool::{Egress, GuestNet, Slot};

const LOCAL: &str = "127.0.0.1:0";

fn question(id: u16, name: &str) -> Vec<u8> {
    let mut message = id.to_be_bytes().to_vec();
    message.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    message.push(name.len() as u8);
    message.extend(name.as_bytes());
    message.extend([0, 0, 1, 0, 1]);
    message
}

fn answer_to(question: &[u8]) -> Vec<u8> {
    let mut answer = question.to_vec();
    answer[2] |= 0x80;
    answer.extend(b"the answer");
    answer
}

/// Answers every question, and tells from where each came and under which id.
fn server(socket: UdpSocket) -> Receiver<(SocketAddr, [u8; 2])> {
    let (seen, all) = channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            // Somebody who guesses: a wrong id, and another question.
            let mut wrong = answer_to(&buffer[..length]);
            wrong[0] ^= 1;
            socket.send_to(&wrong, from).unwrap();
            let mut other = answer_to(&buffer[..length]);
            other[14] ^= 1;
            socket.send_to(&other, from).unwrap();
            socket.send_to(&answer_to(&buffer[..length]), from).unwrap();
            if seen.send((from, [buffer[0], buffer[1]])).is_err() {
                return;
            }
        }
    });
    all
}

fn client() -> UdpSocket {
    let socket = UdpSocket::bind(LOCAL).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn start(upstreams: &[SocketAddr], options: &ForwarderOptions) -> (Forwarder, SocketAddr) {
    let forwarder = Forwarder::start(&[LOCAL.parse().unwrap()], upstreams, options).unwrap();
    let address = forwarder.addresses()[0];
    (forwarder, address)
}

fn ask(address: SocketAddr, question: &[u8]) -> Vec<u8> {
    let socket = client();
    socket.send_to(question, address).unwrap();
    let mut buffer = [0; 2048];
    let length = socket.recv(&mut buffer).unwrap();
    buffer[..length].to_vec()
}

const SERVFAIL: u8 = 2;

#[test]
fn answers_come_back_under_the_clients_id_and_questions_go_out_under_others() {
    let upstream = UdpSocket::bind(LOCAL).unwrap();
    let address = upstream.local_addr().unwrap();
    let seen = server(upstream);
    let (forwarder, own) = start(&[address], &ForwarderOptions::default());
    for id in 0..20 {
        let asked = question(id, "example");
        assert_eq!(ask(own, &asked), answer_to(&asked));
    }
    let seen: Vec<(SocketAddr, [u8; 2])> = seen.try_iter().collect();
    let ports: HashSet<u16> = seen.iter().map(|(from, _)| from.port()).collect();
    let ids: HashSet<[u8; 2]> = seen.iter().map(|(_, id)| *id).collect();
    assert!(ports.len() > 10 && ids.len() > 10, "{seen:?}");
    assert_eq!(forwarder.counts().0, 20);
    client().send_to(&answer_to(&question(1, "x")), own).unwrap();
    client().send_to(b"short", own).unwrap();
    drop(forwarder);
    assert!(UdpSocket::bind(own).is_ok(), "all is given back");
}

#[test]
fn a_silent_server_is_followed_by_the_next_and_none_by_a_failure() {
    let silent = UdpSocket::bind(LOCAL).unwrap();
    let closed = UdpSocket::bind(LOCAL).unwrap().local_addr().unwrap();
    let talking = UdpSocket::bind(LOCAL).unwrap();
    let (silent_at, talking_at) = (silent.local_addr().unwrap(), talking.local_addr().unwrap());
    let _seen = server(talking);
    let options = ForwarderOptions { patience: Duration::from_millis(50), ..ForwarderOptions::default() };
    let asked = question(7, "example");
    let (_forwarder, own) = start(&[silent_at, closed, talking_at], &options);
    assert_eq!(ask(own, &asked), answer_to(&asked));
    let (forwarder, own) = start(&[silent_at, closed], &options);
    let failed = ask(own, &asked);
    assert_eq!((&failed[..2], failed[3] & 15), (&asked[..2], SERVFAIL));
    assert_eq!(forwarder.counts().2, 1);
    let none = Forwarder::start(&[LOCAL.parse().unwrap()], &[], &options).unwrap_err();
    assert!(matches!(none, NetError::NoUpstream), "{none}");
}

#[test]
fn what_is_in_flight_is_bounded_for_each_client_and_in_all() {
    let silent = UdpSocket::bind(LOCAL).unwrap();
    let options = ForwarderOptions {
        in_flight: 8,
        in_flight_per_client: 6,
        patience: Duration::from_secs(60),
        ..ForwarderOptions::default()
    };
    let (forwarder, own) = start(&[silent.local_addr().unwrap()], &options);
    let greedy = client();
    for id in 0..9 {
        greedy.send_to(&question(id, "example"), own).unwrap();
    }
    let mut buffer = [0; 512];
    for _ in 0..3 {
        let length = greedy.recv(&mut buffer).unwrap();
        assert_eq!((buffer[3] & 15, length > 12), (SERVFAIL, true));
    }
    // All clients of this host are one address: the rest of the room is for others.
    silent.set_read_timeout(Some(PATIENCE)).unwrap();
    for _ in 0..6 {
        silent.recv(&mut buffer).unwrap();
    }
    silent.set_read_timeout(Some(SILENCE)).unwrap();
    assert!(silent.recv(&mut buffer).is_err());
    assert_eq!(forwarder.counts(), (0, 3, 0));
}

#[test]
fn long_answers_go_by_tcp() {
    let upstream = TcpListener::bind(LOCAL).unwrap();
    let address = upstream.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in upstream.incoming().take(2) {
            let mut stream = stream.unwrap();
            let mut head = [0; 2];
            stream.read_exact(&mut head).unwrap();
            let mut asked = vec![0; usize::from(u16::from_be_bytes(head))];
            stream.read_exact(&mut asked).unwrap();
            let mut answer = answer_to(&asked);
            answer.resize(40_000, 7);
            stream.write_all(&[&40_000u16.to_be_bytes()[..], &answer].concat()).unwrap();
        }
    });
    let (_forwarder, own) = start(&[address], &ForwarderOptions::default());
    let mut stream = TcpStream::connect(own).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    for id in 1..=2 {
        let asked = question(id, "example");
        stream.write_all(&[&(asked.len() as u16).to_be_bytes()[..], &asked].concat()).unwrap();
        let mut answer = vec![0; 40_002];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..2], 40_000u16.to_be_bytes());
        assert_eq!(answer[2..4], asked[..2]);
    }
}

#[test]
fn a_guest_asks_its_gateway_and_reaches_nothing_else_there() {
    if !ready("a_guest_asks_its_gateway_and_reaches_nothing_else_there") {
        return;
    }
    let mut world = World::new();
    let upstream = world.outside.run(|| UdpSocket::bind("198.51.100.2:53").unwrap());
    let _seen = server(upstream);
    let range = world.config.range;
    let forwarder = world.host.run(move || {
        let options = ForwarderOptions { clients: Some(range), ..ForwarderOptions::default() };
        Forwarder::start(&["0.0.0.0:0".parse().unwrap()], &["198.51.100.2:53".parse().unwrap()], &options)
            .unwrap()
    });
    let port = forwarder.addresses()[0].port();
    world.config.dns_port = Some(port);
    let asked_of = |slot: u32, egress: Egress, wait: Duration| {
        let net = GuestNet {
            egress: Some(egress),
            ..world.config.guest_net(&format!("sb-{slot}"), Slot(slot)).unwrap()
        };
        let gateway = net.host_ip;
        let (tap, net) = world
            .with_firewall(move |firewall| (attach(firewall, &net, &TapOptions::default()).unwrap(), net));
        let guest = KernelGuest::new(tap, &net, 1500);
        guest.namespace.run(move || {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.set_read_timeout(Some(wait)).unwrap();
            let asked = question(9, "example");
            let direct =
                socket.send_to(&asked, (gateway, port)).is_ok() && socket.recv(&mut [0; 512]).is_ok();
            socket.send_to(&asked, (gateway, 53)).unwrap();
            let mut buffer = [0; 512];
            let found = socket.recv_from(&mut buffer).ok();
            let tcp = TcpStream::connect_timeout(&(gateway, 53).into(), wait).is_ok();
            (
                direct,
                found.map(|(length, from)| (buffer[..length] == answer_to(&asked), from.to_string())),
                tcp,
            )
        })
    };
    let (direct, found, tcp) = asked_of(0, Egress::Public, Duration::from_secs(2));
    assert_eq!(found, Some((true, "10.231.0.1:53".to_string())), "from the address that was asked");
    assert!(tcp && !direct);
    let (_, found, tcp) = asked_of(1, Egress::None, SILENCE);
    assert!(found.is_none() && !tcp, "not even names");
    world.host.run(|| sh("ip link show up0"));
    let from_outside = world
        .outside
        .run(move || TcpStream::connect_timeout(&([198, 51, 100, 1], port).into(), SILENCE).is_ok());
    assert!(!from_outside, "the port is the guests' alone");
}
