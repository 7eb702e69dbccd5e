//! Comparing the ledger with what the kernel has and with the VM processes that live: each with each, in both directions.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::Ipv4Addr;

use crate::{Egress, Guest, GuestNet, Ipv4Cidr, Loan, Mac, PoolConfig, Slot};

/// A route by a TAP of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapRoute {
    /// The TAP.
    pub tap: String,
    /// The destination.
    pub to: Ipv4Cidr,
}

/// A neighbour on a TAP of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapNeighbour {
    /// The TAP.
    pub tap: String,
    /// The neighbour's address.
    pub ip: Ipv4Addr,
    /// Its MAC, when it is known.
    pub mac: Option<Mac>,
}

/// A VM process that lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The sandbox that it runs.
    pub sandbox_id: String,
    /// The process.
    pub pid: i32,
}

/// What there is of the pool outside of the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// TAPs of the pool; not those in stock.
    pub taps: Vec<String>,
    /// Routes by these TAPs.
    pub routes: Vec<TapRoute>,
    /// Neighbours on these TAPs.
    pub neighbours: Vec<TapNeighbour>,
    /// Guests in the firewall.
    pub elements: Vec<Guest>,
    /// Addresses with a policy in the firewall that no guest there has.
    pub strays: Vec<Ipv4Addr>,
    /// Cgroups below the pool's parent.
    pub cgroups: Vec<String>,
    /// The VM processes, when the caller knows them.
    pub processes: Option<Vec<Process>>,
}

/// One repair. It prints as a line for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Repair {
    /// A TAP of this pool whose slot is lent to nobody.
    DeleteTap {
        /// The TAP's name.
        tap: String,
        /// Its slot.
        slot: Slot,
    },
    /// A firewall element that no loan accounts for.
    RemoveElement {
        /// The element.
        guest: Guest,
    },
    /// A sandbox whose TAP is there, but whose packets the firewall drops or lets through to where they may not go.
    AddElement {
        /// The sandbox.
        sandbox_id: String,
        /// The elements it needs.
        guest: Guest,
    },
    /// A policy in the firewall for an address that no guest has.
    ForgetAddress {
        /// The address.
        ip: Ipv4Addr,
    },
    /// A route by a guest's TAP to anywhere but the guest.
    RemoveRoute {
        /// The route.
        route: TapRoute,
    },
    /// A neighbour on a guest's TAP that isn't the guest.
    RemoveNeighbour {
        /// The neighbour.
        neighbour: TapNeighbour,
    },
    /// A cgroup named for a sandbox that has borrowed nothing.
    RemoveCgroup {
        /// The cgroup's name, a sandbox id.
        name: String,
    },
}

impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Repair::DeleteTap { tap, slot } => {
                write!(f, "delete tap {tap}: slot {} is lent to nobody", slot.0)
            }
            Repair::RemoveElement { guest: Guest { tap, mac, ip, .. } } => {
                write!(f, "remove firewall element {tap} {mac} {ip}: no sandbox has this address on this tap")
            }
            Repair::AddElement { sandbox_id, guest: Guest { tap, mac, ip, .. } } => {
                write!(f, "add firewall element {tap} {mac} {ip}: sandbox {sandbox_id} runs without it")
            }
            Repair::ForgetAddress { ip } => {
                write!(f, "remove the egress policy of {ip}: no guest has this address")
            }
            Repair::RemoveRoute { route: TapRoute { tap, to } } => {
                write!(f, "remove the route to {to} by tap {tap}: its guest is elsewhere")
            }
            Repair::RemoveNeighbour { neighbour: TapNeighbour { tap, ip, mac } } => {
                let mac = mac.map_or("unknown".to_string(), |mac| mac.to_string());
                write!(f, "remove neighbour {ip} ({mac}) on tap {tap}: its guest is another")
            }
            Repair::RemoveCgroup { name } => {
                write!(f, "remove cgroup {name}: the sandbox has borrowed nothing")
            }
        }
    }
}

/// The result of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sweep {
    /// What to repair in the kernel, in order.
    pub repairs: Vec<Repair>,
    /// Loans whose TAP is not there: the sandbox is just being started or stopped, or its VM has ended. Only the owner
    /// of the ledger can tell which, by looking at the VM, and release the row.
    pub without_tap: Vec<Loan>,
    /// Loans whose slot the configured range no longer has. They need the old range until their sandboxes are suspended.
    pub outside_range: Vec<Loan>,
    /// Loans without a VM process, when the processes are known: for the owner of the ledger, as those without a TAP.
    pub without_process: Vec<Loan>,
    /// VM processes that have borrowed nothing: only the one who starts them can end them.
    pub without_loan: Vec<Process>,
}

impl Sweep {
    /// A line for the log for all that isn't a repair of the kernel's objects.
    pub fn lines(&self) -> Vec<String> {
        let outside = self.outside_range.iter().map(|Loan { sandbox_id, slot, .. }| {
            format!(
                "{sandbox_id}: slot {} is outside of the configured range; suspend it with the old one",
                slot.0
            )
        });
        let ended = self.without_process.iter().map(|Loan { sandbox_id, run, slot, .. }| {
            format!("{sandbox_id}: has slot {} for run {run}, but no VM process", slot.0)
        });
        let unknown = self.without_loan.iter().map(|Process { sandbox_id, pid }| {
            format!("{sandbox_id}: runs in process {pid}, but has borrowed nothing")
        });
        outside.chain(ended).chain(unknown).collect()
    }
}

/// Compares loans with what is live. List the kernel's objects and the processes *before* reading the loans: a start writes
/// its row before it makes any object, so an object that was listed and has no row then is a leftover. `egress` gives the
/// policy of a loan's sandbox; `None` stands for the pool's default. The cost grows with what runs, not with what is
/// suspended.
pub fn sweep(
    config: &PoolConfig,
    loans: &[Loan],
    live: &Live,
    egress: &dyn Fn(&Loan) -> Option<Egress>,
) -> Sweep {
    let mut found = Sweep::default();
    let mut wanted: HashMap<String, (&Loan, GuestNet, Guest)> = HashMap::new();
    for loan in loans {
        match config.guest_net(&loan.sandbox_id, loan.slot) {
            Ok(net) => {
                let egress = egress(loan).or_else(|| net.egress.clone());
                let net = GuestNet { egress, ..net };
                let guest = net.guest();
                wanted.insert(net.tap.clone(), (loan, net, guest));
            }
            Err(_) => found.outside_range.push(loan.clone()),
        }
    }
    let lent: HashSet<Slot> = loans.iter().map(|loan| loan.slot).collect();
    for tap in &live.taps {
        if let Some(slot) = config.slot_of_tap(tap).filter(|slot| !lent.contains(slot)) {
            found.repairs.push(Repair::DeleteTap { tap: tap.clone(), slot });
        }
    }
    sweep_firewall(live, loans, config, &wanted, &mut found);
    sweep_links(live, &wanted, &mut found);
    sweep_processes(live, loans, &mut found);
    found
}

type Wanted<'a> = HashMap<String, (&'a Loan, GuestNet, Guest)>;

fn sweep_firewall(live: &Live, loans: &[Loan], config: &PoolConfig, wanted: &Wanted<'_>, found: &mut Sweep) {
    let accounted = |guest: &Guest| wanted.get(&guest.tap).is_some_and(|(_, _, own)| own.is_same(guest));
    for guest in live.elements.iter().filter(|guest| !accounted(guest)) {
        found.repairs.push(Repair::RemoveElement { guest: guest.clone() });
    }
    let of_guests: HashSet<Ipv4Addr> = wanted.values().map(|(_, net, _)| net.guest_ip).collect();
    for ip in live.strays.iter().filter(|ip| !of_guests.contains(ip)) {
        found.repairs.push(Repair::ForgetAddress { ip: *ip });
    }
    let taps: HashSet<&String> = live.taps.iter().collect();
    let elements: HashSet<&Guest> = live.elements.iter().collect();
    for loan in loans {
        let Some((_, _, guest)) = wanted.get(&config.tap_name(loan.slot)) else { continue };
        if !taps.contains(&guest.tap) {
            found.without_tap.push(loan.clone());
        } else if !elements.contains(guest) {
            let (sandbox_id, guest) = (loan.sandbox_id.clone(), guest.clone());
            found.repairs.push(Repair::AddElement { sandbox_id, guest });
        }
    }
}

/// Routes and neighbours on the TAPs of slots that are lent; those of others go with their TAP.
fn sweep_links(live: &Live, wanted: &Wanted<'_>, found: &mut Sweep) {
    for route in &live.routes {
        let own = |net: &GuestNet| Ipv4Cidr::containing(net.guest_ip, net.prefix);
        if wanted.get(&route.tap).is_some_and(|(_, net, _)| own(net) != route.to) {
            found.repairs.push(Repair::RemoveRoute { route: route.clone() });
        }
    }
    for neighbour in &live.neighbours {
        let other =
            |net: &GuestNet| net.guest_ip != neighbour.ip || neighbour.mac.is_some_and(|mac| mac != net.mac);
        if wanted.get(&neighbour.tap).is_some_and(|(_, net, _)| other(net)) {
            found.repairs.push(Repair::RemoveNeighbour { neighbour: neighbour.clone() });
        }
    }
}

fn sweep_processes(live: &Live, loans: &[Loan], found: &mut Sweep) {
    let borrowers: HashSet<&str> = loans.iter().map(|loan| loan.sandbox_id.as_str()).collect();
    let orphans = live.cgroups.iter().filter(|name| !borrowers.contains(name.as_str()));
    found.repairs.extend(orphans.map(|name| Repair::RemoveCgroup { name: name.clone() }));
    let Some(processes) = &live.processes else { return };
    let running: HashSet<&str> = processes.iter().map(|process| process.sandbox_id.as_str()).collect();
    let ended = loans.iter().filter(|loan| !running.contains(loan.sandbox_id.as_str()));
    found.without_process.extend(ended.cloned());
    let unknown = processes.iter().filter(|process| !borrowers.contains(process.sandbox_id.as_str()));
    found.without_loan.extend(unknown.cloned());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CpuSet;

    fn loan(id: &str, slot: u32) -> Loan {
        Loan {
            sandbox_id: id.to_string(),
            run: 1,
            slot: Slot(slot),
            cpus: CpuSet::default(),
            memory_bytes: 1,
        }
    }

    fn element(config: &PoolConfig, id: &str, slot: u32) -> Guest {
        config.guest_net(id, Slot(slot)).unwrap().guest()
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    fn compare(config: &PoolConfig, loans: &[Loan], live: &Live) -> Sweep {
        sweep(config, loans, live, &|_| None)
    }

    #[test]
    fn a_settled_world_needs_no_repair() {
        let config = PoolConfig::default();
        let net = config.guest_net("b", Slot(7)).unwrap();
        let live = Live {
            taps: names(&["tpr-000000", "tpr-000007"]),
            routes: vec![TapRoute { tap: net.tap.clone(), to: "10.231.0.28/30".parse().unwrap() }],
            neighbours: vec![TapNeighbour { tap: net.tap.clone(), ip: net.guest_ip, mac: Some(net.mac) }],
            elements: vec![element(&config, "a", 0), element(&config, "b", 7)],
            strays: vec![],
            cgroups: names(&["a"]),
            processes: Some(["a", "b"].map(|id| Process { sandbox_id: id.to_string(), pid: 7 }).to_vec()),
        };
        assert_eq!(compare(&config, &[loan("a", 0), loan("b", 7)], &live), Sweep::default());
        assert_eq!(compare(&config, &[], &Live::default()), Sweep::default());
    }

    #[test]
    fn leftovers_of_every_kind_are_found_and_named() {
        let config = PoolConfig::default();
        let stale = element(&config, "gone", 3);
        let live = Live {
            taps: names(&["tpr-000003", "eth0", "tprx-000001", "tpr-w5"]),
            elements: vec![stale.clone()],
            strays: vec![Ipv4Addr::new(10, 231, 0, 18)],
            cgroups: names(&["gone"]),
            ..Live::default()
        };
        let found = compare(&config, &[], &live);
        let lines: Vec<String> = found.repairs.iter().map(Repair::to_string).collect();
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert_eq!(lines[0], "delete tap tpr-000003: slot 3 is lent to nobody");
        assert!(
            lines[1].contains(&stale.mac.to_string()) && lines[1].contains("10.231.0.14"),
            "{}",
            lines[1]
        );
        assert!(lines[2].contains("10.231.0.18"), "{}", lines[2]);
        assert!(lines[3].starts_with("remove cgroup gone"));
    }

    #[test]
    fn routes_and_neighbours_that_are_not_the_guests_are_found_on_its_tap() {
        let config = PoolConfig::default();
        let net = config.guest_net("a", Slot(0)).unwrap();
        let neighbour = |ip: [u8; 4], mac| TapNeighbour { tap: net.tap.clone(), ip: ip.into(), mac };
        let route = |to: &str| TapRoute { tap: net.tap.clone(), to: to.parse().unwrap() };
        let live = Live {
            taps: vec![net.tap.clone()],
            elements: vec![net.guest()],
            routes: vec![route("10.231.0.0/30"), route("10.9.0.0/16")],
            neighbours: vec![
                neighbour([10, 231, 0, 2], None),
                neighbour([10, 231, 0, 2], Some(Mac([2; 6]))),
                neighbour([10, 231, 0, 3], Some(net.mac)),
            ],
            ..Live::default()
        };
        let expected = [
            Repair::RemoveRoute { route: route("10.9.0.0/16") },
            Repair::RemoveNeighbour { neighbour: live.neighbours[1].clone() },
            Repair::RemoveNeighbour { neighbour: live.neighbours[2].clone() },
        ];
        assert_eq!(compare(&config, &[loan("a", 0)], &live).repairs, expected);
    }

    #[test]
    fn rows_and_processes_without_each_other_are_reported_and_not_touched() {
        let config = PoolConfig::default();
        let process = Process { sandbox_id: "b".to_string(), pid: 42 };
        let live = Live { processes: Some(vec![process.clone()]), ..Live::default() };
        let found = compare(&config, &[loan("a", 1)], &live);
        assert_eq!(found.without_process, [loan("a", 1)]);
        assert_eq!(found.without_loan, [process]);
        let lines = found.lines();
        assert!(lines[0].starts_with("a: has slot 1") && lines[1].contains("process 42"), "{lines:?}");
        let unknown = compare(&config, &[loan("a", 1)], &Live::default());
        assert!(unknown.without_process.is_empty(), "nobody has looked for processes");
    }

    #[test]
    fn the_element_of_a_slots_former_borrower_is_replaced() {
        let config = PoolConfig::default();
        let (old, new) = (element(&config, "old", 3), element(&config, "new", 3));
        let live = Live { taps: names(&["tpr-000003"]), elements: vec![old.clone()], ..Live::default() };
        let found = compare(&config, &[loan("new", 3)], &live);
        let expected = [
            Repair::RemoveElement { guest: old },
            Repair::AddElement { sandbox_id: "new".to_string(), guest: new },
        ];
        assert_eq!(found.repairs, expected);
    }

    #[test]
    fn a_guest_with_another_policy_than_its_own_gets_its_own() {
        let config = PoolConfig::default();
        let wide = Guest { grants: Egress::Open.grants(), ..element(&config, "a", 3) };
        let live = Live { taps: names(&["tpr-000003"]), elements: vec![wide], ..Live::default() };
        let found = sweep(&config, &[loan("a", 3)], &live, &|_| Some(Egress::None));
        let expected = Guest { grants: Egress::None.grants(), ..element(&config, "a", 3) };
        assert_eq!(found.repairs, [Repair::AddElement { sandbox_id: "a".to_string(), guest: expected }]);
    }

    #[test]
    fn a_loan_without_a_tap_is_reported_and_not_touched() {
        let config = PoolConfig::default();
        let (started, outside) = (loan("a", 1), loan("b", 999_999));
        let live = Live {
            taps: names(&["tpr-999999"]),
            elements: vec![element(&config, "a", 1)],
            ..Live::default()
        };
        let found = compare(&config, &[started.clone(), outside.clone()], &live);
        let expected = Sweep { without_tap: vec![started], outside_range: vec![outside], ..Sweep::default() };
        assert_eq!(found, expected);
    }
}
