//! A guest with a kernel: a namespace whose only interface is tied to the host's TAP by a loop that copies frames, as a VM's
//! network device does.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use torpor_netpool::GuestNet;
use torpor_netpool::linux::{Tap, TapOptions};

use super::{Namespace, sh};

pub struct KernelGuest {
    pub namespace: Namespace,
    ended: Arc<AtomicBool>,
    loops: Vec<JoinHandle<()>>,
}

impl KernelGuest {
    /// A guest with the addresses of `net` behind its TAP.
    pub fn new(tap: Tap, net: &GuestNet, mtu: u32) -> KernelGuest {
        let namespace = Namespace::new();
        let own = GuestNet { tap: "eth0".to_string(), host_ip: net.guest_ip, ..net.clone() };
        let (mac, gateway) = (net.mac, net.host_ip);
        let eth0 = namespace.run(move || {
            let eth0 = Tap::create(&own, &TapOptions { mtu: Some(mtu), ..TapOptions::default() }).unwrap();
            sh(&format!("ip link set eth0 address {mac}; ip route add default via {gateway}"));
            eth0
        });
        let (host, inner) = (Arc::new(File::from(tap.into_fd())), Arc::new(File::from(eth0.into_fd())));
        let ended = Arc::new(AtomicBool::new(false));
        let copies = [(Arc::clone(&host), Arc::clone(&inner)), (inner, host)];
        let loops = copies.map(|(from, to)| {
            let ended = Arc::clone(&ended);
            std::thread::spawn(move || copy(&from, &to, &ended))
        });
        KernelGuest { namespace, ended, loops: loops.into() }
    }
}

fn copy(mut from: &File, mut to: &File, ended: &AtomicBool) {
    let mut frame = [0; 65536];
    while !ended.load(Ordering::Relaxed) {
        let mut fds = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
        if poll(&mut fds, PollTimeout::from(50u8)).unwrap() == 0 {
            continue;
        }
        let Ok(length) = from.read(&mut frame) else { return };
        // A frame that is lost is sent again.
        let _ = to.write_all(&frame[..length]);
    }
}

impl Drop for KernelGuest {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        self.loops.drain(..).for_each(|thread| thread.join().unwrap());
    }
}
