//! A hostile driver of the network device, over a socket that keeps packets apart.
#![no_main]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use libfuzzer_sys::fuzz_target;
use torpor_fuzz::{Bytes, act, settle};
use torpor_vmm_devices::testing::Driver;
use torpor_vmm_devices::virtio::net::{NetDevice, NetOptions, Port};

fn pair() -> [OwnedFd; 2] {
    let mut ends = [-1; 2];
    // SAFETY: there is room for both descriptors.
    let made = unsafe {
        libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, ends.as_mut_ptr())
    };
    assert_eq!(made, 0);
    // SAFETY: they were just made and are nobody else's.
    ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) })
}

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let [ours, wire] = pair();
    let port = Port::packets(ours).unwrap();
    let device = NetDevice::new(NetOptions { port, mac: [2; 6], mtu: 1500, send: None, receive: None });
    let mut driver = Driver::start_with(Box::new(device), bytes.number(8));
    let mut packet = [0u8; 4096];
    while !bytes.is_empty() {
        if bytes.byte() % 4 == 0 {
            let length = bytes.number(2) as usize % packet.len();
            // SAFETY: both buffers are as long as is said. Whether it works doesn't matter.
            unsafe {
                libc::send(wire.as_raw_fd(), packet.as_ptr().cast(), length, libc::MSG_DONTWAIT);
                libc::recv(wire.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), libc::MSG_DONTWAIT);
            }
        }
        act(&mut driver, &mut bytes);
    }
    settle(&driver);
});
