//! TAPs, the host's settings, and sweeps, in namespaces.
#![allow(clippy::unwrap_used, reason = "a test that can't go on panics")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use common::{Namespace, ready, sh};
use torpor_netpool::linux::{
    Firewall, Forwarding, NetError, Network, Tap, TapOptions, apply, attach, check_range, delete_tap, detach,
    enable_forwarding, list_taps, live, uplink,
};
use torpor_netpool::{CpuSet, GuestNet, Ledger, LedgerError, Loan, PoolConfig, Repair, Slot, sweep};

fn net(slot: u32) -> GuestNet {
    PoolConfig::default().guest_net("sb-1", Slot(slot)).unwrap()
}

fn taps() -> Vec<String> {
    list_taps(&PoolConfig::default()).unwrap()
}

/// Runs `work` in a fresh namespace, if the machine allows. One at a time: these tests look at when a TAP goes away, and the child
/// that another test is just forking holds a copy of every descriptor until its exec.
fn isolated(test: &str, work: impl FnOnce() + Send + 'static) {
    static ONE: Mutex<()> = Mutex::new(());
    if ready(test) {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        Namespace::new().run(work);
    }
}

#[test]
fn a_tap_is_complete_and_up_before_anyone_has_its_descriptor() {
    isolated("a_tap_is_complete_and_up_before_anyone_has_its_descriptor", || {
        let options =
            TapOptions { owner_uid: Some(65534), mtu: Some(1400), vnet_hdr: true, ..TapOptions::default() };
        let tap = Tap::create(&net(5), &options).unwrap();
        assert_eq!(tap.name(), "tpr-000005");
        let shown = sh("ip -d addr show dev tpr-000005");
        for part in [
            "UP",
            "mtu 1400",
            "inet 10.231.0.21/30",
            "vnet_hdr on",
            "persist off",
            "user nobody",
            "02:74:70:72:00:01",
            "type tap",
        ] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
        assert!(!shown.contains("inet6"), "{shown}");
        assert_eq!(sh("cat /proc/sys/net/ipv6/conf/tpr-000005/disable_ipv6").trim(), "1");
        assert!(sh("ip route").contains("10.231.0.20/30 dev tpr-000005"));
        assert!(!sh("ip route").contains("10.0.0.0/8"), "no route of the address's class");
    });
}

#[test]
fn a_tap_ends_with_its_descriptor_and_takes_its_routes_along() {
    isolated("a_tap_ends_with_its_descriptor_and_takes_its_routes_along", || {
        let before = sh("ip route show table all; ip neigh");
        let fd = Tap::create(&net(5), &TapOptions::default()).unwrap().into_fd();
        assert_eq!(taps(), ["tpr-000005"]);
        drop(fd);
        assert_eq!(taps(), [""; 0]);
        assert_eq!(sh("ip route show table all; ip neigh"), before);
    });
}

#[test]
fn a_second_tap_for_the_slot_is_refused_by_name() {
    isolated("a_second_tap_for_the_slot_is_refused_by_name", || {
        let _first = Tap::create(&net(5), &TapOptions::default()).unwrap();
        let error = Tap::create(&net(5), &TapOptions::default()).unwrap_err();
        assert!(matches!(error, NetError::TapBusy { slot: 5, .. }), "{error}");
        assert!(error.to_string().contains("tpr-000005"), "{error}");
    });
}

#[test]
fn a_tap_that_cannot_be_configured_leaves_nothing() {
    isolated("a_tap_that_cannot_be_configured_leaves_nothing", || {
        let firewall = Firewall::new(&PoolConfig::default());
        let options = TapOptions { mtu: Some(1_000_000), ..TapOptions::default() };
        let error = attach(&firewall, &net(5), &options).unwrap_err();
        assert!(error.to_string().contains("set the mtu on interface tpr-000005"), "{error}");
        assert_eq!((taps().len(), firewall.list().unwrap().len()), (0, 0));
    });
}

fn sleeper(command: &mut Command) -> Child {
    command.arg("60").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_tap_handed_to_a_process_lives_and_dies_with_it() {
    isolated("a_tap_handed_to_a_process_lives_and_dies_with_it", || {
        let tap = Tap::create(&net(5), &TapOptions::default()).unwrap();
        let bystander = sleeper(&mut Command::new("sleep"));
        let mut command = Command::new("sleep");
        let number = tap.hand_to(&mut command);
        let owner = sleeper(&mut command);
        drop(command);
        let target = std::fs::read_link(format!("/proc/{}/fd/{number}", owner.id())).unwrap();
        assert_eq!(target.to_str(), Some("/dev/net/tun"));
        assert_eq!(taps(), ["tpr-000005"], "this process has let go of it, the child holds it");
        end(owner);
        assert_eq!(taps(), [""; 0], "the bystander has no copy");
        end(bystander);
    });
}

#[test]
fn qemu_takes_the_tap_and_ends_it_when_it_is_killed() {
    const NAME: &str = "qemu_takes_the_tap_and_ends_it_when_it_is_killed";
    if Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        let required = std::env::var("REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|need| need == "emu"), "{NAME}: needs qemu-system-x86_64");
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIP {NAME}: needs qemu-system-x86_64\n"),
        );
        return;
    }
    isolated(NAME, || {
        let tap = Tap::create(&net(5), &TapOptions { vnet_hdr: true, ..TapOptions::default() }).unwrap();
        let mut command = Command::new("qemu-system-x86_64");
        let number = tap.hand_to(&mut command);
        command.args("-S -nodefaults -accel tcg -m 32 -display none -qmp stdio".split(' '));
        command.args([
            "-netdev",
            &format!("tap,id=net0,fd={number}"),
            "-device",
            "virtio-net-pci,netdev=net0,romfile=",
        ]);
        let mut qemu = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        drop(command);
        let mut greeting = String::new();
        BufReader::new(qemu.stdout.take().unwrap()).read_line(&mut greeting).unwrap();
        let held = taps();
        end(qemu);
        assert!(greeting.contains("QMP"), "QEMU has set up all devices: {greeting}");
        assert_eq!(held, ["tpr-000005"]);
        assert_eq!(taps(), [""; 0]);
    });
}

#[test]
fn a_tap_that_a_process_still_holds_can_be_deleted() {
    isolated("a_tap_that_a_process_still_holds_can_be_deleted", || {
        let _held = Tap::create(&net(5), &TapOptions::default()).unwrap();
        assert!(delete_tap("tpr-000005").unwrap());
        assert_eq!(taps(), [""; 0]);
        assert!(!delete_tap("tpr-000005").unwrap(), "repeating does nothing");
        let _again = Tap::create(&net(5), &TapOptions::default()).unwrap();
    });
}

#[test]
fn attach_and_detach_come_back_to_the_baseline_and_can_be_repeated() {
    isolated("attach_and_detach_come_back_to_the_baseline_and_can_be_repeated", || {
        let firewall = Firewall::new(&PoolConfig::default());
        firewall.ensure().unwrap();
        let state = || sh("ip link; ip route show table all; nft list ruleset");
        let before = state();
        for _ in 0..3 {
            let tap = attach(&firewall, &net(5), &TapOptions::default()).unwrap();
            assert_eq!(firewall.list().unwrap(), [net(5).guest()]);
            let error = attach(&firewall, &net(5), &TapOptions::default()).unwrap_err();
            assert!(matches!(error, NetError::TapBusy { .. }), "{error}");
            assert_eq!(firewall.list().unwrap(), [net(5).guest()], "a doubled start harms nothing");
            detach(&firewall, &net(5)).unwrap();
            detach(&firewall, &net(5)).unwrap();
            drop(tap);
        }
        assert_eq!(state(), before);
    });
}

#[test]
fn forwarding_is_switched_on_once_and_reported() {
    isolated("forwarding_is_switched_on_once_and_reported", || {
        sh("echo 0 > /proc/sys/net/ipv4/ip_forward");
        assert_eq!(enable_forwarding().unwrap(), Forwarding::TurnedOn);
        assert_eq!(enable_forwarding().unwrap(), Forwarding::AlreadyOn);
        assert_eq!(sh("cat /proc/sys/net/ipv4/ip_forward").trim(), "1");
    });
}

#[test]
fn the_uplink_and_a_range_in_use_are_read_from_this_namespace() {
    isolated("the_uplink_and_a_range_in_use_are_read_from_this_namespace", || {
        let config = PoolConfig::default();
        assert_eq!(uplink(&config).unwrap(), None);
        check_range(&config).unwrap();
        sh("ip link add up0 type veth peer name up1; ip link set up1 up; ip link set up0 up mtu 1380");
        sh("ip addr add 192.0.2.1/24 dev up0; ip route add default via 192.0.2.2");
        let found = uplink(&config).unwrap().unwrap();
        assert_eq!((found.interface.as_str(), found.mtu), ("up0", 1380));
        let named = PoolConfig { uplink: Some("none0".to_string()), ..config.clone() };
        assert!(uplink(&named).unwrap_err().to_string().contains("none0"));
        let _tap = Tap::create(&net(5), &TapOptions::default()).unwrap();
        check_range(&config).unwrap();
        sh("ip route add 10.231.128.0/17 via 192.0.2.2");
        let error = check_range(&config).unwrap_err().to_string();
        assert!(error.contains("10.231.128.0/17 on up0"), "{error}");
    });
}

struct Rows(Mutex<Vec<Loan>>);

impl Ledger for Rows {
    fn loan(&self, sandbox_id: &str) -> Result<Option<Loan>, LedgerError> {
        Ok(self.all()?.into_iter().find(|loan| loan.sandbox_id == sandbox_id))
    }

    fn all(&self) -> Result<Vec<Loan>, LedgerError> {
        Ok(self.0.lock().unwrap().clone())
    }
}

fn loan(id: &str, slot: u32) -> Loan {
    Loan { sandbox_id: id.to_string(), run: 1, slot: Slot(slot), cpus: CpuSet::default(), memory_bytes: 1 }
}

#[test]
fn a_sweep_repairs_leftovers_and_a_second_one_finds_nothing() {
    isolated("a_sweep_repairs_leftovers_and_a_second_one_finds_nothing", || {
        let config = PoolConfig::default();
        let network = Network::new(&config);
        let firewall = network.firewall();
        let guest_net = |id: &str, slot| config.guest_net(id, Slot(slot)).unwrap();
        // "a" runs, but its element was lost; "gone" left everything behind; slot 3 has only an element; slot 4's element is
        // its former borrower's; address 10.231.0.22 has only a policy.
        let _a = network.attach(&guest_net("a", 1), &TapOptions::default()).unwrap();
        firewall.remove(&guest_net("a", 1).guest()).unwrap();
        drop(network.attach(&guest_net("gone", 2), &TapOptions::default()).unwrap());
        firewall.add(&guest_net("old", 3).guest()).unwrap();
        let _b = network.attach(&guest_net("b", 4), &TapOptions::default()).unwrap();
        firewall.add(&guest_net("former", 4).guest()).unwrap();
        sh("nft 'add element inet torpor open { 10.231.0.22 }'");
        sh("ip route add 203.0.113.0/24 dev tpr-000001");
        sh("ip neigh add 10.231.0.7 lladdr 02:00:00:00:00:09 dev tpr-000001 nud permanent");
        sh("ip neigh add 10.231.0.6 lladdr 02:00:00:00:00:09 dev tpr-000001 nud permanent");
        let rows = Rows(Mutex::new(vec![loan("a", 1), loan("b", 4)]));

        let look = || {
            let live = live(&config, &network, None).unwrap();
            sweep(&config, &rows.all().unwrap(), &live, &|_| None)
        };
        let repairs = look().repairs;
        let lines: Vec<String> = repairs.iter().map(Repair::to_string).collect();
        assert_eq!(lines.len(), 9, "{lines:#?}");
        let results = apply(&config, &network, None, &rows, repairs);
        assert!(results.iter().all(|(_, result)| result.is_ok()), "{results:?}");
        assert_eq!(taps(), ["tpr-000001", "tpr-000004"]);
        let mut expected = [guest_net("a", 1).guest(), guest_net("b", 4).guest()];
        expected.sort();
        assert_eq!(firewall.list().unwrap(), expected);
        assert_eq!(look(), torpor_netpool::Sweep::default());
        assert!(!sh("ip route").contains("203.0.113"));
        assert!(!sh("nft list ruleset").contains("10.231.0.22"));
    });
}

#[test]
fn what_was_lent_since_the_comparison_is_left_alone() {
    isolated("what_was_lent_since_the_comparison_is_left_alone", || {
        let config = PoolConfig::default();
        let network = Network::new(&config);
        let net = config.guest_net("new", Slot(2)).unwrap();
        let _tap = network.attach(&net, &TapOptions::default()).unwrap();
        let repairs = vec![
            Repair::DeleteTap { tap: net.tap.clone(), slot: net.slot },
            Repair::RemoveElement { guest: net.guest() },
            Repair::ForgetAddress { ip: net.guest_ip },
        ];
        let rows = Rows(Mutex::new(vec![loan("new", 2)]));
        for (repair, result) in apply(&config, &network, None, &rows, repairs) {
            assert!(matches!(result, Err(NetError::LentAgain(2))), "{repair}: {result:?}");
        }
        let listing = network.firewall().listing().unwrap();
        assert_eq!((taps().len(), listing.guests), (1, vec![net.guest()]));
    });
}
