//! Against a guest in plain memory; its packets are built with this module's header, which a test of its own compares with
//! the virtio-vsock crate's.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use super::packet::{HEADER_BYTES, HOST_CID, Header, STREAM, operation, shut};
use super::*;
use crate::testing::{Buffer, Driver, MOMENT, RawDescriptor, flag};

mod floods;
mod flow;
mod hostile;

const CID: u64 = 42;
const ROOM: u32 = 4096;

/// The guest: rooms for packets are always there, as long as `rooms` says so.
struct Guest {
    driver: Driver,
    folder: tempfile::TempDir,
    handle: VsockHandle,
    rooms: HashMap<u16, Buffer>,
    out: Buffer,
}

fn path(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("vsock")
}

fn device(folder: &tempfile::TempDir, limit: u32) -> Vsock {
    Vsock::new(CID as u32, limit, HostSocket::bind(&path(folder)).unwrap()).unwrap()
}

impl Guest {
    fn new(limit: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let device = device(&folder, limit);
        Self::with(device, folder, 64, ROOM)
    }

    fn with(device: Vsock, folder: tempfile::TempDir, rooms: usize, size: u32) -> Self {
        let handle = device.handle();
        let mut driver = Driver::start(Box::new(device));
        let out = driver.room(HEADER_BYTES as u32 + (64 << 10));
        let mut guest = Self { driver, folder, handle, rooms: HashMap::new(), out };
        for _ in 0..rooms {
            let room = guest.driver.room(size);
            guest.give_room(room);
        }
        guest.driver.kick(engine::RECEIVE);
        guest
    }

    fn give_room(&mut self, room: Buffer) {
        let head = self.driver.add(engine::RECEIVE, &[room]);
        self.rooms.insert(head, room);
    }

    fn client(&self, line: &str) -> UnixStream {
        let mut client = UnixStream::connect(path(&self.folder)).unwrap();
        client.set_read_timeout(Some(crate::testing::PATIENCE)).unwrap();
        client.write_all(line.as_bytes()).unwrap();
        client
    }

    fn send(&mut self, header: Header, data: &[u8]) {
        let mut bytes = header.bytes().to_vec();
        bytes.extend_from_slice(data);
        self.driver.write(self.out.address, &bytes);
        let buffer = Buffer { length: bytes.len() as u32, writable: false, ..self.out };
        self.driver.request(engine::SEND, &[buffer]);
    }

    /// A packet for a connection of which one was received.
    fn reply(&mut self, to: &Header, operation: u16, flags: u32, data: &[u8]) {
        let header = Header {
            source_cid: CID,
            target_cid: HOST_CID,
            source_port: to.target_port,
            target_port: to.source_port,
            length: data.len() as u32,
            kind: STREAM,
            operation,
            flags,
            window: 256 << 10,
            forwarded: 0,
        };
        self.send(header, data);
    }

    fn taken(&mut self, used: crate::testing::Used) -> (Header, Vec<u8>) {
        let room = self.rooms.remove(&used.head).unwrap();
        let bytes = self.driver.read(room.address, used.length as usize);
        self.give_room(room);
        self.driver.kick(engine::RECEIVE);
        let header = Header::parse(bytes[..HEADER_BYTES].try_into().unwrap());
        assert_eq!(bytes.len(), HEADER_BYTES + header.length as usize);
        (header, bytes[HEADER_BYTES..].to_vec())
    }

    fn receive(&mut self) -> (Header, Vec<u8>) {
        let used = self.driver.wait(engine::RECEIVE);
        self.taken(used)
    }

    fn receive_some(&mut self, what: u16) -> Header {
        let (header, _) = self.receive();
        assert_eq!(header.operation, what, "{header:?}");
        header
    }

    fn silent(&mut self) -> bool {
        self.driver.wait_for(engine::RECEIVE, MOMENT).is_none()
    }

    /// A client that is connected to a port of the guest.
    fn connected(&mut self, port: u32) -> (UnixStream, Header) {
        let mut client = self.client(&format!("CONNECT {port}\n"));
        let request = self.receive_some(operation::REQUEST);
        assert_eq!(request.target_port, port);
        self.reply(&request, operation::RESPONSE, 0, &[]);
        assert_eq!(line(&mut client), format!("OK {}\n", request.source_port));
        (client, request)
    }
}

fn line(client: &mut UnixStream) -> String {
    let mut text = String::new();
    while !text.ends_with('\n') {
        let mut byte = [0];
        client.read_exact(&mut byte).unwrap();
        text.push(char::from(byte[0]));
    }
    text
}

fn is_closed(client: &mut UnixStream) -> bool {
    match client.read(&mut [0]) {
        Ok(count) => count == 0,
        // It was closed with something of ours unread.
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn the_guest_reads_its_context_id() {
    let guest = Guest::new(8);
    assert_eq!(guest.driver.config::<8>(0), CID.to_le_bytes());
    assert_eq!(guest.driver.config::<4>(4), [0; 4]);
    assert_eq!(guest.driver.config::<4>(u64::MAX - 0x200), [0; 4]);
}

#[test]
fn a_client_is_connected_and_data_goes_both_ways() {
    let mut guest = Guest::new(8);
    let (mut client, connection) = guest.connected(1024);
    client.write_all(b"to the guest").unwrap();
    let (header, data) = guest.receive();
    assert_eq!((header.operation, data.as_slice()), (operation::DATA, &b"to the guest"[..]));
    assert_eq!((header.source_cid, header.target_cid, header.kind), (HOST_CID, CID, STREAM));
    guest.reply(&connection, operation::DATA, 0, b"to the host");
    let mut bytes = [0; 11];
    client.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"to the host");
}

#[test]
fn what_a_client_says_with_its_first_line_is_data() {
    let mut guest = Guest::new(8);
    let _client = guest.client("CONNECT 5\nhello");
    let request = guest.receive_some(operation::REQUEST);
    assert!(guest.silent(), "nothing before the guest has answered");
    guest.reply(&request, operation::RESPONSE, 0, &[]);
    assert_eq!(guest.receive().1, b"hello");
}

#[test]
fn a_refused_client_is_closed_and_a_patient_one_is_asked_for_again() {
    let mut guest = Guest::new(8);
    let mut client = guest.client("CONNECT 7\n");
    let request = guest.receive_some(operation::REQUEST);
    guest.reply(&request, operation::RESET, 0, &[]);
    assert!(is_closed(&mut client));
    let mut client = guest.client("AWAIT 7\n");
    for _ in 0..5 {
        let request = guest.receive_some(operation::REQUEST);
        guest.reply(&request, operation::RESET, 0, &[]);
    }
    let request = guest.receive_some(operation::REQUEST);
    guest.reply(&request, operation::RESPONSE, 0, &[]);
    assert_eq!(line(&mut client), format!("OK {}\n", request.source_port));
}

#[test]
fn a_guest_that_takes_its_time_is_asked_once() {
    let mut guest = Guest::new(8);
    let mut client = guest.client("AWAIT 7\n");
    let request = guest.receive_some(operation::REQUEST);
    std::thread::sleep(std::time::Duration::from_millis(1200));
    assert!(guest.silent());
    guest.reply(&request, operation::RESPONSE, 0, &[]);
    assert!(line(&mut client).starts_with("OK "));
}

#[test]
fn clients_wait_for_a_driver_and_through_its_reset() {
    let folder = tempfile::tempdir().unwrap();
    let device = device(&folder, 8);
    let mut early = UnixStream::connect(path(&folder)).unwrap();
    early.write_all(b"AWAIT 9\n").unwrap();
    let mut guest = Guest::with(device, folder, 8, ROOM);
    let request = guest.receive_some(operation::REQUEST);
    guest.reply(&request, operation::RESET, 0, &[]);
    let (mut open, _) = {
        let request = guest.receive_some(operation::REQUEST);
        guest.reply(&request, operation::RESET, 0, &[]);
        // Between two requests for the one, another is connected.
        let client = guest.client("CONNECT 10\n");
        loop {
            let (header, _) = guest.receive();
            let answer = if header.target_port == 10 { operation::RESPONSE } else { operation::RESET };
            guest.reply(&header, answer, 0, &[]);
            if header.target_port == 10 {
                break (client, header);
            }
        }
    };
    assert!(line(&mut open).starts_with("OK "));
    guest.rooms.clear();
    guest.driver.bring_up(u64::MAX);
    assert!(is_closed(&mut open), "what was open ends with the driver");
    guest.out = guest.driver.room(4096);
    let room = guest.driver.room(ROOM);
    guest.give_room(room);
    guest.driver.kick(engine::RECEIVE);
    let request = guest.receive_some(operation::REQUEST);
    assert_eq!(request.target_port, 9);
    guest.reply(&request, operation::RESPONSE, 0, &[]);
    assert!(line(&mut early).starts_with("OK "));
}

#[test]
fn a_guest_reaches_listeners_of_the_host_and_is_refused_where_there_is_none() {
    let mut guest = Guest::new(8);
    let listener = UnixListener::bind(guest.folder.path().join("vsock_77")).unwrap();
    let to = |port| Header { source_port: port, target_port: 3000, ..Header::default() };
    guest.reply(&to(77), operation::REQUEST, 0, &[]);
    let answer = guest.receive_some(operation::RESPONSE);
    assert_eq!((answer.source_port, answer.target_port), (77, 3000));
    guest.reply(&to(77), operation::DATA, 0, b"hi");
    let (mut stream, _) = listener.accept().unwrap();
    let mut bytes = [0; 2];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hi", "no line of greeting: it is the listener's own connection");
    stream.write_all(b"ho").unwrap();
    assert_eq!(guest.receive().1, b"ho");
    guest.reply(&to(78), operation::REQUEST, 0, &[]);
    let answer = guest.receive_some(operation::RESET);
    assert_eq!((answer.source_port, answer.target_port), (78, 3000));
}

#[test]
fn a_restored_guest_is_told_and_its_connections_are_gone() {
    let mut guest = Guest::new(8);
    let (mut client, _) = guest.connected(5);
    let room = guest.driver.room(8);
    guest.driver.add(engine::EVENT, &[room]);
    guest.driver.kick(engine::EVENT);
    guest.handle.restored();
    assert_eq!(guest.driver.wait(engine::EVENT).length, 4);
    assert_eq!(guest.driver.content(room)[..4], [0; 4]);
    assert!(is_closed(&mut client));
    guest.connected(6);
}

#[test]
fn a_paused_device_is_silent_until_it_goes_on() {
    let mut guest = Guest::new(8);
    let (mut client, _) = guest.connected(5);
    guest.driver.transport.pause(true);
    client.write_all(b"x").unwrap();
    assert!(guest.silent());
    guest.driver.transport.pause(false);
    assert_eq!(guest.receive().1, b"x");
}

#[test]
fn clients_beyond_the_limit_wait_in_the_backlog() {
    let mut guest = Guest::new(2);
    let (first, _) = guest.connected(1);
    let (_second, _) = guest.connected(2);
    let mut third = guest.client("CONNECT 3\n");
    assert!(guest.silent());
    drop(first);
    let goodbye = guest.receive_some(operation::SHUTDOWN);
    assert_eq!(goodbye.flags, shut::BOTH);
    guest.reply(&goodbye, operation::RESET, 0, &[]);
    let request = guest.receive_some(operation::REQUEST);
    assert_eq!(request.target_port, 3);
    guest.reply(&request, operation::RESPONSE, 0, &[]);
    assert!(line(&mut third).starts_with("OK "));
}

#[test]
fn who_says_nonsense_is_closed() {
    let guest = Guest::new(8);
    for line in ["GET / HTTP/1.1\r\n\r\n", "CONNECT\n", "AWAIT -1\n"] {
        assert!(is_closed(&mut guest.client(line)), "{line:?}");
    }
}
