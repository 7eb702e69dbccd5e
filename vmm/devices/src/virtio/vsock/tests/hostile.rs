//! Packets that shouldn't be.

use super::*;

fn packet(operation: u16) -> Header {
    Header {
        source_cid: CID,
        target_cid: HOST_CID,
        source_port: 1,
        target_port: 2,
        kind: STREAM,
        operation,
        ..Header::default()
    }
}

#[test]
fn what_belongs_to_no_connection_is_reset_and_resets_are_not() {
    let mut guest = Guest::new(8);
    for operation in [0, 2, 4, 5, 6, 7, 8, 99, u16::MAX] {
        guest.send(packet(operation), b"data");
        let answer = guest.receive_some(operation::RESET);
        assert_eq!((answer.source_port, answer.target_port), (2, 1));
    }
    guest.send(packet(operation::RESET), &[]);
    // Seqpacket, and a host that is none.
    guest.send(Header { kind: 2, ..packet(operation::REQUEST) }, &[]);
    assert_eq!(guest.receive_some(operation::RESET).kind, 2);
    guest.send(Header { target_cid: 3, ..packet(operation::REQUEST) }, &[]);
    assert_eq!(guest.receive_some(operation::RESET).source_cid, 3);
    guest.send(Header { source_cid: 5, ..packet(operation::REQUEST) }, &[]);
    assert!(guest.silent(), "an answer to a wrong sender would reach nobody");
    guest.connected(5);
}

#[test]
fn an_open_connection_ends_with_what_makes_no_sense_there() {
    let mut guest = Guest::new(8);
    type Attack = fn(&mut Guest, &Header);
    let attacks: [Attack; 6] = [
        |guest, to| guest.reply(to, operation::REQUEST, 0, &[]),
        |guest, to| guest.reply(to, operation::RESPONSE, 0, &[]),
        |guest, to| guest.reply(to, 77, 0, &[]),
        // More data than the packet has, and more than the window.
        |guest, to| {
            let ports = (to.target_port, to.source_port);
            let header = Header {
                source_port: ports.0,
                target_port: ports.1,
                length: u32::MAX,
                ..packet(operation::DATA)
            };
            guest.send(header, b"short");
        },
        |guest, to| {
            for _ in 0..100 {
                guest.reply(to, operation::DATA, 0, &[0; 60_000]);
            }
        },
        |guest, to| {
            guest.reply(to, operation::SHUTDOWN, shut::SEND, &[]);
            guest.reply(to, operation::DATA, 0, b"after all");
        },
    ];
    for (number, attack) in (100..).zip(attacks) {
        let (mut client, connection) = guest.connected(number);
        attack(&mut guest, &connection);
        let mut first = guest.receive().0;
        while first.operation == operation::CREDIT_UPDATE {
            first = guest.receive().0;
        }
        assert_eq!((first.operation, first.target_port), (operation::RESET, number));
        let mut all = Vec::new();
        let _ = client.read_to_end(&mut all);
        while guest.driver.wait_for(engine::RECEIVE, MOMENT).map(|used| guest.taken(used)).is_some() {}
    }
    assert_eq!(guest.driver.host.told().broken, []);
}

#[test]
fn a_packet_too_short_for_a_header_says_nothing() {
    let mut guest = Guest::new(8);
    for length in [0, 1, 43] {
        let buffer = guest.driver.buffer(&vec![1; length]);
        guest.driver.request(engine::SEND, &[buffer]);
    }
    let room = guest.driver.room(44);
    guest.driver.request(engine::SEND, &[room]);
    assert!(guest.silent());
    guest.connected(5);
}

#[test]
fn a_header_may_be_cut_anywhere_and_followed_by_many_pieces() {
    let mut guest = Guest::new(8);
    let (mut client, connection) = guest.connected(5);
    let header =
        Header { source_port: 5, target_port: connection.source_port, length: 6, ..packet(operation::DATA) };
    let mut bytes = header.bytes().to_vec();
    bytes.extend(b"abcdefbeyond");
    for cut in [1, 20, 43, 44, 45] {
        let (front, back) = bytes.split_at(cut);
        let buffers =
            [guest.driver.buffer(front), guest.driver.buffer(&back[..1]), guest.driver.buffer(&back[1..])];
        guest.driver.request(engine::SEND, &buffers);
        let mut data = [0; 6];
        client.read_exact(&mut data).unwrap();
        assert_eq!(&data, b"abcdef");
    }
    // And buffers of the guest's in pieces.
    let pieces = [guest.driver.room(10), guest.driver.room(36), guest.driver.room(1), guest.driver.room(100)];
    let mut guest = {
        let folder = tempfile::tempdir().unwrap();
        let device = device(&folder, 8);
        let _ = pieces;
        Guest::with(device, folder, 0, ROOM)
    };
    let pieces = [guest.driver.room(10), guest.driver.room(36), guest.driver.room(1), guest.driver.room(100)];
    guest.driver.add(engine::RECEIVE, &pieces);
    guest.driver.kick(engine::RECEIVE);
    let _client = guest.client("CONNECT 5\n");
    assert_eq!(guest.driver.wait(engine::RECEIVE).length, HEADER_BYTES as u32);
    let bytes: Vec<u8> = pieces.iter().flat_map(|piece| guest.driver.content(*piece)).collect();
    let header = Header::parse(bytes[..HEADER_BYTES].try_into().unwrap());
    assert_eq!((header.operation, header.target_port), (operation::REQUEST, 5));
}

#[test]
fn broken_rings_break_the_device_and_a_reset_heals_it() {
    for queue in [engine::RECEIVE, engine::SEND] {
        let folder = tempfile::tempdir().unwrap();
        let device = device(&folder, 8);
        let mut guest = Guest::with(device, folder, 0, ROOM);
        let mut patient = guest.client("AWAIT 5\n");
        let write = if queue == engine::RECEIVE { flag::WRITE } else { 0 };
        let looping = RawDescriptor { address: 0x1000, length: 4, flags: flag::NEXT | write, next: 0 };
        guest.driver.set_descriptor(queue, 0, looping);
        guest.driver.publish(queue, 0);
        guest.driver.kick_anyway(queue as u32);
        assert!(guest.driver.host.wait_broken().contains("queue"));
        guest.driver.bring_up(u64::MAX);
        guest.out = guest.driver.room(4096);
        let room = guest.driver.room(ROOM);
        guest.give_room(room);
        guest.driver.kick(engine::RECEIVE);
        let request = guest.receive_some(operation::REQUEST);
        guest.reply(&request, operation::RESPONSE, 0, &[]);
        assert!(line(&mut patient).starts_with("OK "));
    }
}

#[test]
fn a_room_that_holds_no_packet_breaks_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let device = device(&folder, 8);
    let mut guest = Guest::with(device, folder, 1, HEADER_BYTES as u32);
    guest.send(packet(operation::DATA), &[]);
    assert!(guest.driver.host.wait_broken().contains("44 bytes"));
}
