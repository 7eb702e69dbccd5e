//! Comparing the ledger with what the kernel has.

use std::collections::{HashMap, HashSet};
use std::fmt;

use crate::{Guest, Loan, PoolConfig, Slot};

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
    /// A sandbox whose TAP is there, but whose packets the firewall drops.
    AddElement {
        /// The sandbox.
        sandbox_id: String,
        /// The element it needs.
        guest: Guest,
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
            Repair::RemoveElement { guest: Guest { tap, mac, ip } } => {
                write!(f, "remove firewall element {tap} {mac} {ip}: no sandbox has this address on this tap")
            }
            Repair::AddElement { sandbox_id, guest: Guest { tap, mac, ip } } => {
                write!(f, "add firewall element {tap} {mac} {ip}: sandbox {sandbox_id} runs without it")
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
}

/// Compares loans with the pool's live TAPs, firewall elements and cgroups (named by sandbox id). List the kernel's
/// objects *before* reading the loans: a start writes its row before it makes any object, so an object that was listed
/// and has no row then is a leftover.
pub fn sweep(
    config: &PoolConfig,
    loans: &[Loan],
    taps: &[String],
    elements: &[Guest],
    cgroups: &[String],
) -> Sweep {
    let lent: HashSet<Slot> = loans.iter().map(|loan| loan.slot).collect();
    let borrowers: HashSet<&str> = loans.iter().map(|loan| loan.sandbox_id.as_str()).collect();
    let mut found = Sweep::default();
    let mut wanted: HashMap<String, Guest> = HashMap::new();
    for loan in loans {
        match config.guest_net(&loan.sandbox_id, loan.slot) {
            Ok(net) => {
                wanted.insert(net.tap.clone(), net.guest());
            }
            Err(_) => found.outside_range.push(loan.clone()),
        }
    }
    for tap in taps {
        if let Some(slot) = config.slot_of_tap(tap).filter(|slot| !lent.contains(slot)) {
            found.repairs.push(Repair::DeleteTap { tap: tap.clone(), slot });
        }
    }
    for guest in elements.iter().filter(|guest| wanted.get(&guest.tap) != Some(guest)) {
        found.repairs.push(Repair::RemoveElement { guest: guest.clone() });
    }
    let taps: HashSet<&String> = taps.iter().collect();
    let elements: HashSet<&Guest> = elements.iter().collect();
    for loan in loans {
        let Some(guest) = wanted.get(&config.tap_name(loan.slot)) else { continue };
        if !taps.contains(&guest.tap) {
            found.without_tap.push(loan.clone());
        } else if !elements.contains(guest) {
            let (sandbox_id, guest) = (loan.sandbox_id.clone(), guest.clone());
            found.repairs.push(Repair::AddElement { sandbox_id, guest });
        }
    }
    let orphans = cgroups.iter().filter(|name| !borrowers.contains(name.as_str()));
    found.repairs.extend(orphans.map(|name| Repair::RemoveCgroup { name: name.clone() }));
    found
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

    #[test]
    fn a_settled_world_needs_no_repair() {
        let config = PoolConfig::default();
        let loans = [loan("a", 0), loan("b", 7)];
        let taps = ["tpr-000000".to_string(), "tpr-000007".to_string()];
        let elements = [element(&config, "a", 0), element(&config, "b", 7)];
        assert_eq!(sweep(&config, &loans, &taps, &elements, &["a".to_string()]), Sweep::default());
        assert_eq!(sweep(&config, &[], &[], &[], &[]), Sweep::default());
    }

    #[test]
    fn leftovers_of_every_kind_are_found_and_named() {
        let config = PoolConfig::default();
        let stale = element(&config, "gone", 3);
        let taps = ["tpr-000003".to_string(), "eth0".to_string(), "tprx-000001".to_string()];
        let found = sweep(&config, &[], &taps, std::slice::from_ref(&stale), &["gone".to_string()]);
        let lines: Vec<String> = found.repairs.iter().map(Repair::to_string).collect();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert_eq!(lines[0], "delete tap tpr-000003: slot 3 is lent to nobody");
        assert!(
            lines[1].contains(&stale.mac.to_string()) && lines[1].contains("10.231.0.14"),
            "{}",
            lines[1]
        );
        assert!(lines[2].starts_with("remove cgroup gone"));
    }

    #[test]
    fn the_element_of_a_slots_former_borrower_is_replaced() {
        let config = PoolConfig::default();
        let (old, new) = (element(&config, "old", 3), element(&config, "new", 3));
        let found =
            sweep(&config, &[loan("new", 3)], &["tpr-000003".to_string()], std::slice::from_ref(&old), &[]);
        let expected = [
            Repair::RemoveElement { guest: old },
            Repair::AddElement { sandbox_id: "new".to_string(), guest: new },
        ];
        assert_eq!(found.repairs, expected);
    }

    #[test]
    fn a_loan_without_a_tap_is_reported_and_not_touched() {
        let config = PoolConfig::default();
        let (started, outside) = (loan("a", 1), loan("b", 999_999));
        let elements = [element(&config, "a", 1)];
        let found =
            sweep(&config, &[started.clone(), outside.clone()], &["tpr-999999".to_string()], &elements, &[]);
        assert_eq!(
            found,
            Sweep { repairs: vec![], without_tap: vec![started], outside_range: vec![outside] }
        );
    }
}
