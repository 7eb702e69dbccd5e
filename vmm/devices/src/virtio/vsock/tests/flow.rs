//! Credit, halves that close, many at once.

use super::*;

#[test]
fn the_guest_gets_no_more_than_it_has_room_for() {
    let mut guest = Guest::new(8);
    let mut client = guest.client("CONNECT 5\n");
    let request = guest.receive_some(operation::REQUEST);
    let answer = |guest: &mut Guest, operation, window, forwarded| {
        let header = Header {
            source_cid: CID,
            target_cid: HOST_CID,
            source_port: 5,
            target_port: request.source_port,
            kind: STREAM,
            operation,
            window,
            forwarded,
            ..Header::default()
        };
        guest.send(header, &[]);
    };
    answer(&mut guest, operation::RESPONSE, 100, 0);
    line(&mut client);
    client.write_all(&[7; 250]).unwrap();
    assert_eq!(guest.receive().1.len(), 100);
    guest.receive_some(operation::CREDIT_REQUEST);
    // Still nothing: it isn't asked a second time.
    answer(&mut guest, operation::CREDIT_UPDATE, 100, 0);
    assert!(guest.silent());
    answer(&mut guest, operation::CREDIT_UPDATE, 100, 60);
    assert_eq!(guest.receive().1.len(), 60);
    guest.receive_some(operation::CREDIT_REQUEST);
    // It says that it has taken more than it got: no credit, no harm.
    answer(&mut guest, operation::CREDIT_UPDATE, 100, 5000);
    assert!(guest.silent());
    answer(&mut guest, operation::CREDIT_UPDATE, u32::MAX, 160);
    assert_eq!(guest.receive().1.len(), 90);
}

#[test]
fn the_guest_learns_of_room_as_the_client_reads() {
    let mut guest = Guest::new(8);
    let (mut client, connection) = guest.connected(5);
    assert_eq!(connection.window, 64 << 10);
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        client.read_to_end(&mut all).unwrap();
        all.len()
    });
    let (mut sent, mut forwarded) = (0_u32, 0_u32);
    while sent < 1 << 20 {
        let room = connection.window - sent.wrapping_sub(forwarded);
        if room == 0 {
            forwarded = guest.receive_some(operation::CREDIT_UPDATE).forwarded;
            continue;
        }
        let data = vec![1; room.min(10_000) as usize];
        guest.reply(&connection, operation::DATA, 0, &data);
        sent += data.len() as u32;
    }
    guest.reply(&connection, operation::CREDIT_REQUEST, 0, &[]);
    guest.receive_some(operation::CREDIT_UPDATE);
    guest.reply(&connection, operation::SHUTDOWN, shut::BOTH, &[]);
    assert_eq!(reader.join().unwrap(), sent as usize, "all of it, although the guest is gone");
}

#[test]
fn halves_close_one_at_a_time() {
    let mut guest = Guest::new(8);
    let (mut client, connection) = guest.connected(5);
    client.write_all(b"last").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(guest.receive().1, b"last");
    assert_eq!(guest.receive_some(operation::SHUTDOWN).flags, shut::SEND);
    guest.reply(&connection, operation::DATA, 0, b"answer");
    guest.reply(&connection, operation::SHUTDOWN, shut::BOTH, &[]);
    guest.receive_some(operation::RESET);
    let mut all = String::new();
    client.read_to_string(&mut all).unwrap();
    assert_eq!(all, "answer");

    let (mut client, connection) = guest.connected(6);
    guest.reply(&connection, operation::SHUTDOWN, shut::SEND, &[]);
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    client.write_all(b"still here").unwrap();
    assert_eq!(guest.receive().1, b"still here");
    drop(client);
    assert_eq!(guest.receive_some(operation::SHUTDOWN).flags, shut::BOTH);
    guest.reply(&connection, operation::RESET, 0, &[]);

    let (mut client, connection) = guest.connected(7);
    guest.reply(&connection, operation::SHUTDOWN, shut::RECEIVE, &[]);
    guest.reply(&connection, operation::DATA, 0, b"one way");
    let mut bytes = [0; 7];
    client.read_exact(&mut bytes).unwrap();
    assert!(client.write_all(b"x").is_err(), "nobody takes it");
}

#[test]
fn what_a_guest_sent_before_it_left_is_still_read() {
    let mut guest = Guest::new(8);
    let (mut client, connection) = guest.connected(5);
    let data = vec![3; 60_000];
    guest.reply(&connection, operation::DATA, 0, &data);
    guest.reply(&connection, operation::RESET, 0, &[]);
    let mut all = Vec::new();
    client.read_to_end(&mut all).unwrap();
    assert_eq!(all, data);
}

#[test]
fn the_last_words_before_the_vm_is_over_are_passed_on() {
    let mut guest = Guest::new(8);
    let (mut client, connection) = guest.connected(5);
    let header = Header {
        source_cid: CID,
        target_cid: HOST_CID,
        source_port: connection.target_port,
        target_port: connection.source_port,
        length: 3,
        kind: STREAM,
        operation: operation::DATA,
        flags: 0,
        window: 256 << 10,
        forwarded: 0,
    };
    let bytes = [&header.bytes()[..], b"bye"].concat();
    guest.driver.write(guest.out.address, &bytes);
    let buffer = Buffer { length: bytes.len() as u32, writable: false, ..guest.out };
    // Without a kick: the thread has not seen it when the VM is over.
    guest.driver.add(engine::SEND, &[buffer]);
    guest.driver.transport.close().unwrap();
    let mut all = Vec::new();
    client.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"bye");
}

#[test]
fn a_client_that_does_not_read_holds_nobody_up() {
    let mut guest = Guest::new(8);
    let (_slow, slow) = guest.connected(5);
    let (mut quick, connection) = guest.connected(6);
    // All that the socket and the window hold.
    let mut sent = 0_u32;
    let mut forwarded = 0;
    loop {
        let room = slow.window - sent.wrapping_sub(forwarded);
        if room == 0 {
            match guest.driver.wait_for(engine::RECEIVE, MOMENT) {
                Some(used) => forwarded = guest.taken(used).0.forwarded,
                None => break,
            }
            continue;
        }
        guest.reply(&slow, operation::DATA, 0, &vec![0; room.min(16 << 10) as usize]);
        sent += room.min(16 << 10);
    }
    for _ in 0..50 {
        guest.reply(&connection, operation::DATA, 0, b"ping");
        let mut bytes = [0; 4];
        quick.read_exact(&mut bytes).unwrap();
        quick.write_all(b"pong").unwrap();
        assert_eq!(guest.receive().1, b"pong");
    }
}

/// What an echoing guest keeps of a connection.
#[derive(Default)]
struct Echo {
    waiting: Vec<u8>,
    sent: u32,
    taken: u32,
    window: u32,
    forwarded: u32,
}

impl Guest {
    /// Echoes until so many connections have ended.
    fn echo(&mut self, ends: usize) {
        let mut connections: HashMap<u32, Echo> = HashMap::new();
        let mut ended = 0;
        while ended < ends {
            let (header, data) = self.receive();
            let echo = connections.entry(header.source_port).or_default();
            (echo.window, echo.forwarded) = (header.window, header.forwarded);
            match header.operation {
                operation::REQUEST => self.reply(&header, operation::RESPONSE, 0, &[]),
                operation::DATA => echo.waiting.extend(data),
                operation::SHUTDOWN if header.flags == shut::BOTH => {
                    self.reply(&header, operation::RESET, 0, &[]);
                    connections.remove(&header.source_port);
                    ended += 1;
                    continue;
                }
                _ => {}
            }
            let room = echo.window.saturating_sub(echo.sent.wrapping_sub(echo.forwarded)) as usize;
            let data: Vec<u8> = echo.waiting.drain(..room.min(echo.waiting.len())).collect();
            echo.sent = echo.sent.wrapping_add(data.len() as u32);
            echo.taken = echo.sent;
            if header.operation == operation::REQUEST
                || data.is_empty() && header.operation != operation::CREDIT_REQUEST
            {
                continue;
            }
            let operation = if data.is_empty() { operation::CREDIT_UPDATE } else { operation::DATA };
            let answer = Header {
                source_cid: CID,
                target_cid: HOST_CID,
                source_port: header.target_port,
                target_port: header.source_port,
                length: data.len() as u32,
                kind: STREAM,
                operation,
                flags: 0,
                window: 256 << 10,
                forwarded: echo.taken,
            };
            self.send(answer, &data);
        }
    }
}

#[test]
fn a_hundred_connections_carry_a_mebibyte_each_way_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let device = device(&folder, 256);
    let socket = path(&folder);
    let mut guest = Guest::with(device, folder, 100, 32 << 10);
    let clients: Vec<_> = (0..100_u8)
        .map(|number| {
            let socket = socket.clone();
            std::thread::spawn(move || {
                let mut client = UnixStream::connect(socket).unwrap();
                writeln!(client, "AWAIT {}", 1000 + u32::from(number)).unwrap();
                assert!(line(&mut client).starts_with("OK "));
                let mut writing = client.try_clone().unwrap();
                let data: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8 ^ number).collect();
                let copy = data.clone();
                let writer = std::thread::spawn(move || writing.write_all(&copy).unwrap());
                let mut all = vec![0; data.len()];
                client.read_exact(&mut all).unwrap();
                writer.join().unwrap();
                assert!(all == data, "connection {number} got something else");
            })
        })
        .collect();
    guest.echo(100);
    clients.into_iter().for_each(|client| client.join().unwrap());
    assert_eq!(guest.driver.host.told().broken, []);
}
