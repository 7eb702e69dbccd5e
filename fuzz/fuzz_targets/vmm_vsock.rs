//! A hostile guest and odd clients of the vsock device. While the rings are in order, each packet that the guest gets is a
//! whole one.
#![no_main]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::{Bytes, act, settle};
use torpor_vmm_devices::testing::{Driver, RawDescriptor, flag};
use torpor_vmm_devices::virtio::vsock::{HostSocket, Vsock};

const HEADER: usize = 44;
const ROOM: u32 = 1024;
const ROOMS: u64 = 0x30_0000;
const PACKETS: u64 = 0x40_0000;

struct Fuzz {
    driver: Driver,
    clients: Vec<UnixStream>,
    listener: UnixListener,
    socket: PathBuf,
    /// No ring was touched but as it should be.
    orderly: bool,
    /// The host's ports that the guest has seen.
    ports: Vec<u32>,
}

impl Fuzz {
    fn packet(&mut self, bytes: &mut Bytes<'_>) {
        let mut header = [0; HEADER];
        let seen = self.ports.get(usize::from(bytes.byte()) % self.ports.len().max(1)).copied();
        let host_port = seen.unwrap_or(u32::from(bytes.byte() % 4));
        header[0..8].copy_from_slice(&if bytes.byte() == 0 { bytes.number(8) } else { 3 }.to_le_bytes());
        header[8..16].copy_from_slice(&if bytes.byte() == 0 { bytes.number(8) } else { 2 }.to_le_bytes());
        header[16..20].copy_from_slice(&u32::from(bytes.byte() % 4).to_le_bytes());
        header[20..24].copy_from_slice(&host_port.to_le_bytes());
        header[28] = if bytes.byte() == 0 { bytes.byte() } else { 1 };
        header[30] = bytes.byte() % 9;
        header[32] = bytes.byte();
        header[36..40].copy_from_slice(&bytes.length().to_le_bytes());
        header[40..44].copy_from_slice(&bytes.length().to_le_bytes());
        let repeat = 1 + usize::from(bytes.byte()) * usize::from(bytes.byte()) / 4;
        let count = usize::from(bytes.byte());
        let data = bytes.take(count).repeat(repeat);
        let data = &data[..data.len().min(60_000)];
        let length = if bytes.byte() == 0 { bytes.length() } else { data.len() as u32 };
        header[24..28].copy_from_slice(&length.to_le_bytes());
        let index = u16::from(bytes.byte() % 8);
        let at = PACKETS + u64::from(index) * 0x1_0000;
        self.driver.write(at, &header);
        self.driver.write(at + HEADER as u64, data);
        let descriptor =
            RawDescriptor { address: at, length: (HEADER + data.len()) as u32, ..Default::default() };
        self.offer(1, index, descriptor);
    }

    fn room(&mut self, index: u16) {
        let address = ROOMS + u64::from(index) * u64::from(ROOM);
        self.offer(0, index, RawDescriptor { address, length: ROOM, flags: flag::WRITE, next: 0 });
    }

    fn offer(&mut self, queue: usize, index: u16, descriptor: RawDescriptor) {
        if queue < self.driver.queues.len() {
            self.driver.set_descriptor(queue, index, descriptor);
            self.driver.publish(queue, index);
            self.driver.kick_anyway(queue as u32);
        }
    }

    fn receive(&mut self) {
        while let Some(used) = (!self.driver.queues.is_empty()).then(|| self.driver.take_used(0)).flatten() {
            if self.orderly {
                let header = self.driver.read(ROOMS + u64::from(used.head) * u64::from(ROOM), HEADER);
                let length = u32::from_le_bytes(header[24..28].try_into().unwrap());
                assert_eq!(used.length, HEADER as u32 + length);
                // From whomever the guest had called, but for nobody else than the guest.
                assert_eq!(header[8..16], 3_u64.to_le_bytes());
                self.ports.push(u32::from_le_bytes(header[16..20].try_into().unwrap()));
                self.ports.truncate(64);
                self.room(used.head);
            }
        }
    }

    fn client(&mut self, bytes: &mut Bytes<'_>) {
        let Ok(client) = UnixStream::connect(&self.socket) else { return };
        client.set_nonblocking(true).unwrap();
        let line = match bytes.byte() % 4 {
            0 => bytes.take(20).to_vec(),
            1 => format!("CONNECT {}\n", bytes.byte() % 4).into_bytes(),
            _ => format!("AWAIT {}\n", bytes.byte() % 4).into_bytes(),
        };
        let _ = (&client).write(&line);
        self.clients.push(client);
        if self.clients.len() > 20 {
            self.clients.remove(0);
        }
    }

    fn client_acts(&mut self, bytes: &mut Bytes<'_>) {
        if let Ok((stream, _)) = self.listener.accept() {
            stream.set_nonblocking(true).unwrap();
            self.clients.push(stream);
        }
        if self.clients.is_empty() {
            return;
        }
        let at = usize::from(bytes.byte()) % self.clients.len();
        let mut client = &self.clients[at];
        match bytes.byte() % 6 {
            0 => drop(self.clients.remove(at)),
            1 => drop(client.shutdown(Shutdown::Write)),
            2 => drop(client.shutdown(Shutdown::Read)),
            3 => drop(client.read(&mut [0; 4096])),
            _ => drop(client.write(&[7; 3000][..bytes.number(2) as usize % 3000])),
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vsock");
    let listener = UnixListener::bind(folder.path().join("vsock_1")).unwrap();
    listener.set_nonblocking(true).unwrap();
    let limit = 1 + u32::from(bytes.byte() % 16);
    let device = Vsock::new(3, limit, HostSocket::bind(&socket).unwrap()).unwrap();
    let handle = device.handle();
    let driver = Driver::start_with(Box::new(device), bytes.number(8));
    let mut fuzz = Fuzz { driver, clients: Vec::new(), listener, socket, orderly: true, ports: Vec::new() };
    (0..8).for_each(|index| fuzz.room(index));
    while !bytes.is_empty() {
        match bytes.byte() % 16 {
            0..=5 => fuzz.packet(&mut bytes),
            6 | 7 => fuzz.client(&mut bytes),
            8..=10 => fuzz.client_acts(&mut bytes),
            11 => handle.restored(),
            12 if bytes.byte() > 200 => {
                fuzz.orderly = false;
                act(&mut fuzz.driver, &mut bytes);
            }
            13 => settle(&fuzz.driver),
            _ => fuzz.receive(),
        }
    }
    settle(&fuzz.driver);
    fuzz.receive();
});
