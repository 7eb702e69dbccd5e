//! TAPs in stock: what the next sandbox gets is as if it were new, and nothing is lost or kept.
#![allow(clippy::unwrap_used, reason = "a test that can't go on panics")]

mod common;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::{Namespace, PATIENCE, SILENCE, World, arrival, ready, sh, udp_socket};
use torpor_netpool::linux::{Forgotten, NetError, Network, Offload, TapOptions, TapStock};
use torpor_netpool::{GuestNet, PoolConfig, Slot};

/// In a fresh namespace; one at a time, since forking children hold copies of descriptors for a moment.
fn isolated(test: &str, work: impl FnOnce() + Send + 'static) {
    static ONE: Mutex<()> = Mutex::new(());
    if ready(test) {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        Namespace::new().run(work);
    }
}

fn net(config: &PoolConfig, slot: u32) -> GuestNet {
    config.guest_net(&format!("sb-{slot}"), Slot(slot)).unwrap()
}

fn names() -> HashSet<String> {
    let shown = sh("ip -o link");
    let name = |line: &str| line.split(": ").nth(1).unwrap().to_string();
    shown.lines().map(name).filter(|name| name.starts_with("tpr")).collect()
}

fn index(name: &str) -> String {
    sh(&format!("ip -o link show dev {name}")).split(':').next().unwrap().to_string()
}

#[test]
fn a_tap_comes_back_from_stock_under_another_name_as_if_it_were_new() {
    isolated("a_tap_comes_back_from_stock_under_another_name_as_if_it_were_new", || {
        let config = PoolConfig::default();
        let stock = TapStock::new(&config);
        let options = TapOptions {
            owner_uid: Some(65534),
            mtu: Some(1400),
            vnet_hdr: true,
            offload: Offload { checksum: true, tso4: true, ..Offload::default() },
        };
        let tap = stock.acquire(&net(&config, 5), &options).unwrap();
        let first = index("tpr-000005");
        let shown = sh("ip -d addr show dev tpr-000005");
        for part in ["UP", "mtu 1400", "inet 10.231.0.21/30", "vnet_hdr on", "user nobody", "persist on"] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
        // What a VM process or an administrator may leave behind.
        sh("ip addr add 192.0.2.9/24 dev tpr-000005; ip link set tpr-000005 address 02:00:00:00:00:77");
        sh("ip neigh add 10.231.0.22 lladdr 02:00:00:00:00:78 dev tpr-000005 nud permanent");
        sh("ip route add 203.0.113.0/24 dev tpr-000005");
        drop(tap);
        assert!(stock.release("tpr-000005").unwrap());
        assert!(!stock.release("tpr-000005").unwrap(), "repeating does nothing");
        let stored = names().into_iter().next().unwrap();
        let shown =
            sh(&format!("ip -d addr show dev {stored}; ip route; ip neigh show nud all dev {stored}"));
        for part in ["inet ", "203.0.113", "10.231.0.22", ",UP"] {
            assert!(!shown.contains(part), "{part} in {shown}");
        }

        let tap = stock.acquire(&net(&config, 6), &TapOptions::default()).unwrap();
        assert_eq!(index("tpr-000006"), first, "the same interface");
        assert_eq!(names(), HashSet::from(["tpr-000006".to_string()]));
        let shown = sh("ip -d addr show dev tpr-000006; ip route");
        for part in
            ["UP", "mtu 1500", "inet 10.231.0.25/30", "user root", "02:74:70:72:00:01", "10.231.0.24/30 dev"]
        {
            assert!(shown.contains(part), "{part} in {shown}");
        }
        for part in ["192.0.2.9", "10.231.0.21", "vnet_hdr on"] {
            assert!(!shown.contains(part), "{part} in {shown}");
        }
        assert_eq!(sh("cat /proc/sys/net/ipv6/conf/tpr-000006/disable_ipv6").trim(), "1");
        assert_eq!(sh("cat /proc/sys/net/ipv4/conf/tpr-000006/arp_ignore").trim(), "2");
        drop(tap);
        stock.release("tpr-000006").unwrap();
        assert_eq!(stock.clear().unwrap(), 1);
        assert!(names().is_empty());
    });
}

#[test]
fn a_tap_that_has_left_the_stock_under_another_name_is_not_renamed() {
    isolated("a_tap_that_has_left_the_stock_under_another_name_is_not_renamed", || {
        let config = PoolConfig::default();
        let stock = TapStock::new(&config);
        drop(stock.acquire(&net(&config, 5), &TapOptions::default()).unwrap());
        stock.release("tpr-000005").unwrap();
        let warm = names().into_iter().next().unwrap();
        sh(&format!("ip link set {warm} name tpr-000009"));
        let _tap = stock.acquire(&net(&config, 3), &TapOptions::default()).unwrap();
        assert_eq!(names(), HashSet::from(["tpr-000003".to_string(), "tpr-000009".to_string()]));
    });
}

#[test]
fn what_is_too_much_is_deleted_as_one_group_and_nothing_else_is() {
    isolated("what_is_too_much_is_deleted_as_one_group_and_nothing_else_is", || {
        let config = PoolConfig { warm_taps: 4, ..PoolConfig::default() };
        let other = PoolConfig { instance: "oth".parse().unwrap(), ..config.clone() };
        let (stock, others) = (TapStock::new(&config), TapStock::new(&other));
        let acquire =
            |stock: &TapStock, config, n| stock.acquire(&net(config, n), &TapOptions::default()).unwrap();
        let taps: Vec<_> = (0..10).map(|n| acquire(&stock, &config, n)).collect();
        let foreign = acquire(&others, &other, 0);
        sh("ip link add up0 type veth peer name up1");
        drop(taps);
        for n in 0..10 {
            stock.release(&config.tap_name(Slot(n))).unwrap();
        }
        assert_eq!(names().len(), 11);
        let tended = stock.tend().unwrap();
        assert_eq!((tended.warm, tended.deleted, tended.made), (4, 6, 0));
        assert_eq!(names().len(), 5);
        assert!(sh("ip link").contains("up0"));
        drop(foreign);

        // An interface of somebody else's in the very same group stays.
        let _more: Vec<_> = (0..5).map(|n| acquire(&stock, &config, n)).collect();
        drop(_more);
        for n in 0..5 {
            stock.release(&config.tap_name(Slot(n))).unwrap();
        }
        let surplus = names().into_iter().find(|name| name.starts_with("tpr-x")).unwrap();
        let shown = sh(&format!("ip -d -o link show dev {surplus}"));
        let group = shown.split("group ").nth(1).unwrap().split(' ').next().unwrap().to_string();
        sh(&format!("ip link set up0 group {group}"));
        assert_eq!(stock.tend().unwrap().deleted, 1);
        assert!(sh("ip link").contains("up0"));
        assert_eq!(stock.clear().unwrap(), 4);
    });
}

#[test]
fn the_stock_of_a_process_that_was_killed_is_taken_over() {
    isolated("the_stock_of_a_process_that_was_killed_is_taken_over", || {
        let config = PoolConfig { warm_taps: 8, ..PoolConfig::default() };
        let first = TapStock::new(&config);
        assert_eq!(first.tend().unwrap().made, 2);
        let second = TapStock::new(&config);
        let tended = second.tend().unwrap();
        assert!(tended.elsewhere && tended.warm == 0, "the first one has it: {tended:?}");
        let tap = second.acquire(&net(&config, 1), &TapOptions::default()).unwrap();
        drop(tap);
        assert!(second.release("tpr-000001").unwrap(), "without the stock it is made and deleted");
        assert_eq!(names().len(), 2);

        // What a kill leaves: the lock goes with the process, the TAPs stay; one was about to be deleted.
        let stored = names().into_iter().next().unwrap();
        sh(&format!("ip link set {stored} name tpr-xzz"));
        drop(first);
        let kept = names().into_iter().find(|name| name.starts_with("tpr-w")).unwrap();
        sh(&format!("ip addr add 192.0.2.9/24 dev {kept}; ip link set {kept} up"));
        assert_eq!(second.warm().unwrap(), 1);
        assert!(!sh("ip addr").contains("192.0.2.9"), "made as it has to be in stock");
        second.tend().unwrap();
        assert_eq!(names().iter().filter(|name| name.starts_with("tpr-x")).count(), 0);
        second.clear().unwrap();
        assert!(names().is_empty());
    });
}

#[test]
fn a_tap_that_a_process_holds_is_neither_stocked_nor_taken() {
    isolated("a_tap_that_a_process_holds_is_neither_stocked_nor_taken", || {
        let config = PoolConfig::default();
        let stock = TapStock::new(&config);
        let held = stock.acquire(&net(&config, 5), &TapOptions::default()).unwrap();
        let error = stock.acquire(&net(&config, 5), &TapOptions::default()).unwrap_err();
        assert!(matches!(error, NetError::TapBusy { slot: 5, .. }), "{error}");
        assert!(stock.release("tpr-000005").unwrap());
        assert_eq!(stock.warm().unwrap(), 0);
        assert!(names().is_empty(), "deleted under its holder");
        drop(held);

        // Somebody takes hold of a TAP in stock: the next sandbox gets another one.
        drop(stock.acquire(&net(&config, 5), &TapOptions::default()).unwrap());
        stock.release("tpr-000005").unwrap();
        let stored = names().into_iter().next().unwrap();
        let thief = hold(&stored);
        let tap = stock.acquire(&net(&config, 6), &TapOptions::default()).unwrap();
        assert_eq!(names(), HashSet::from(["tpr-000006".to_string()]));
        drop((thief, tap));
        stock.release("tpr-000006").unwrap();
        stock.clear().unwrap();
    });
}

/// A process that has tied itself to the TAP.
fn hold(name: &str) -> OwnedFd {
    let config = PoolConfig { instance: "zzz".parse().unwrap(), ..PoolConfig::default() };
    let tied = GuestNet { tap: name.to_string(), ..net(&config, 900) };
    let other = TapStock::new(&PoolConfig { warm_taps: 0, ..config });
    other.acquire(&tied, &TapOptions::default()).unwrap().into_fd()
}

#[test]
fn a_slot_whose_tap_a_killed_start_left_is_started_again() {
    isolated("a_slot_whose_tap_a_killed_start_left_is_started_again", || {
        let config = PoolConfig::default();
        let network = Network::new(&config);
        drop(
            network
                .attach(&net(&config, 5), &TapOptions { mtu: Some(1300), ..TapOptions::default() })
                .unwrap(),
        );
        sh("ip addr add 192.0.2.9/24 dev tpr-000005");
        network.stock().tend().unwrap();
        let warm = network.stock().warm().unwrap();
        let _tap = network.attach(&net(&config, 5), &TapOptions::default()).unwrap();
        let shown = sh("ip addr show dev tpr-000005");
        assert!(shown.contains("mtu 1500") && shown.contains("10.231.0.21/30"), "{shown}");
        assert!(!shown.contains("192.0.2.9"), "{shown}");
        assert_eq!(network.stock().warm().unwrap(), warm, "none of the stock is lost");
        network.stock().clear().unwrap();
    });
}

#[test]
fn release_forgets_the_connections_and_neighbours_of_the_address() {
    const NAME: &str = "release_forgets_the_connections_and_neighbours_of_the_address";
    if !ready(NAME) {
        return;
    }
    let world = World::new();
    let server = udp_socket(&world.outside, "198.51.100.2:7");
    let network = Arc::new(Network::new(&world.config));
    let mut guests: Vec<_> = (0..2).map(|slot| world.guest_of(&network, slot)).collect();
    for guest in &mut guests {
        guest.send_udp([198, 51, 100, 2].into(), 7, "question");
        let sender = arrival(&server, "question", PATIENCE).expect("the datagram arrives");
        server.send_to(b"answer", sender).unwrap();
        assert!(guest.hears("answer", PATIENCE));
    }
    let (connections, neighbours) = (
        || sh("cat /proc/thread-self/net/nf_conntrack").matches("src=10.231.0.").count(),
        || sh("ip neigh show nud all").matches("10.231.0.").count(),
    );
    assert_eq!(world.host.run(neighbours), 2);
    let seen = world.host.run(connections);
    assert!(seen >= 2, "the kernel remembers both");
    let (first, second) = (guests.remove(0), guests.remove(0));
    let net = first.net.clone();
    drop(first);
    let in_host = Arc::clone(&network);
    let forgotten = world.host.run(move || {
        in_host.detach(&net).unwrap();
        in_host.settle().unwrap()
    });
    match forgotten {
        Forgotten::Connections(count) => {
            assert_eq!(count, 1);
            assert_eq!(world.host.run(connections), seen - 1, "those of the other guest stay");
        }
        Forgotten::Unsupported => {
            let required = std::env::var("REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|need| need == "box"), "{NAME}: needs ctnetlink");
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("SKIP {NAME}: this kernel can't delete connections\n"),
            );
        }
    }
    assert_eq!(world.host.run(neighbours), 1);
    assert!(arrival(&server, "late", SILENCE).is_none());
    drop(second);
    world.host.run(move || network.stock().clear().unwrap());
}

#[test]
fn a_stub_vm_has_the_tap_and_after_release_nobody_has() {
    isolated("a_stub_vm_has_the_tap_and_after_release_nobody_has", || {
        let config = PoolConfig::default();
        let network = Network::new(&config);
        let tap = network.attach(&net(&config, 1), &TapOptions::default()).unwrap();
        assert!(tap.as_fd().try_clone_to_owned().is_ok());
        let mut command = Command::new("sleep");
        let number = tap.hand_to(&mut command);
        let mut vm = command.arg("60").stdin(Stdio::null()).spawn().unwrap();
        drop(command);
        let target = std::fs::read_link(format!("/proc/{}/fd/{number}", vm.id())).unwrap();
        assert_eq!(target.to_str(), Some("/dev/net/tun"));
        vm.kill().unwrap();
        vm.wait().unwrap();
        assert_eq!(names().len(), 1, "it outlives the process until it is released");
        network.detach(&net(&config, 1)).unwrap();
        assert_eq!(network.stock().warm().unwrap(), 1);
        assert_eq!(network.firewall().list().unwrap(), []);
        network.stock().clear().unwrap();
        assert!(names().is_empty());
    });
}

#[test]
fn many_at_once_get_a_tap_each_and_give_it_back() {
    isolated("many_at_once_get_a_tap_each_and_give_it_back", || {
        let config = PoolConfig { warm_taps: 50, ..PoolConfig::default() };
        let network = Network::new(&config);
        network.firewall().ensure().unwrap();
        let began = Instant::now();
        std::thread::scope(|scope| {
            for worker in 0..20 {
                let (network, config) = (&network, &config);
                scope.spawn(move || {
                    for round in 0..5 {
                        let net = net(config, worker * 10 + round);
                        drop(network.attach(&net, &TapOptions::default()).unwrap());
                        network.detach(&net).unwrap();
                    }
                });
            }
        });
        println!("100 cycles, 20 at a time: {:?} each", began.elapsed() / 100);
        assert_eq!(names().len(), network.stock().warm().unwrap());
        assert_eq!(network.firewall().listing().unwrap(), Default::default());
        network.stock().clear().unwrap();
        assert!(names().is_empty());
    });
}

/// Readers and writers of a TAP's descriptor are the VM's business; that frames pass at all is the firewall's tests'.
#[test]
fn a_recycled_tap_brings_no_frames_of_its_former_guest() {
    isolated("a_recycled_tap_brings_no_frames_of_its_former_guest", || {
        let config = PoolConfig::default();
        let stock = TapStock::new(&config);
        let tap = stock.acquire(&net(&config, 5), &TapOptions::default()).unwrap();
        let mut writer = std::fs::File::from(tap.as_fd().try_clone_to_owned().unwrap());
        // The host asks for its guest; nobody reads the question.
        sh("ping -c 1 -W 1 10.231.0.22 >/dev/null 2>&1 || true");
        writer.write_all(&[0xff; 60]).unwrap();
        drop((writer, tap));
        stock.release("tpr-000005").unwrap();
        let tap = stock.acquire(&net(&config, 6), &TapOptions::default()).unwrap();
        let mut reader = std::fs::File::from(tap.into_fd());
        let flags = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK);
        nix::fcntl::fcntl(&reader, flags).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let mut frame = [0; 2048];
        let mut read = Vec::new();
        while let Ok(length) = reader.read(&mut frame) {
            read.push(frame[..length].to_vec());
        }
        let old = [10, 231, 0, 22];
        assert!(read.iter().all(|frame| !frame.windows(4).any(|part| part == old)), "{read:?}");
        drop(reader);
        stock.release("tpr-000006").unwrap();
        stock.clear().unwrap();
    });
}
