//! The allocation policy: exact under any interleaving, with a clock of the test's own.
#![allow(clippy::unwrap_used, reason = "a test that can't go on panics")]

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use proptest::prelude::*;
use torpor_netpool::policy::{Budget, Exhausted, Released, Resource, Usage, Want};
use torpor_netpool::policy::{admit, borrowers, choose_cpus, choose_slot, counters, cpu_loads, plan};
use torpor_netpool::{CpuSet, Loan, PoolConfig, Slot};

const QUARANTINE: Duration = Duration::from_secs(5);

fn loan(id: &str, slot: u32, cpus: &str, memory_bytes: u64) -> Loan {
    Loan { sandbox_id: id.to_string(), run: 1, slot: Slot(slot), cpus: cpus.parse().unwrap(), memory_bytes }
}

fn released(slot: u32, at_ms: u64) -> Released {
    Released { slot: Slot(slot), at_ms }
}

#[test]
fn never_used_slots_go_first_then_the_least_recently_used() {
    let choose = |used: &[u32], released: &[Released]| {
        choose_slot(4, used.iter().copied().map(Slot), released.iter().copied(), 100_000, QUARANTINE).unwrap()
    };
    assert_eq!(choose(&[], &[]).slot, Slot(0));
    assert_eq!(choose(&[1], &[released(0, 1)]).slot, Slot(2));
    let all = [released(0, 9), released(1, 4), released(2, 7), released(3, 5)];
    assert_eq!(choose(&[], &all).slot, Slot(1));
    assert_eq!(choose(&[1], &all).slot, Slot(3));
    // Several releases of one slot: the last one counts.
    assert_eq!(choose(&[2, 3], &[released(0, 1), released(0, 50), released(1, 20)]).slot, Slot(1));
}

#[test]
fn a_resting_slot_is_lent_only_when_nothing_else_is_free() {
    let choose = |used: &[u32], released: &[Released], now| {
        choose_slot(2, used.iter().copied().map(Slot), released.iter().copied(), now, QUARANTINE).unwrap()
    };
    let early = choose(&[0], &[released(1, 1_000)], 5_999);
    assert_eq!((early.slot, early.quarantine_cut_short), (Slot(1), true));
    assert!(!choose(&[0], &[released(1, 1_000)], 6_000).quarantine_cut_short);
    assert_eq!(choose(&[], &[released(0, 1_000)], 1_001).slot, Slot(1), "the other one is free");
    assert!(choose(&[0], &[released(1, 9_000)], 10).quarantine_cut_short, "the clock was set back");
}

#[test]
fn an_empty_pool_says_what_ran_out_and_who_has_it() {
    let config = PoolConfig { range: "10.231.0.0/29".parse().unwrap(), ..PoolConfig::default() };
    let budget = Budget { cpus: "0-3".parse().unwrap(), cpu_percent: 100, memory_bytes: 1_000 };
    let loans = [loan("sb-a", 0, "0", 10), loan("sb-b", 1, "1", 500)];
    let want = |cpus, memory_bytes| Want { cpus, memory_bytes };
    let error = |want| plan(&config, &budget, &loans, [], 0, want).unwrap_err();

    let slots = error(want(1, 1));
    assert_eq!((slots.resource, slots.used, slots.capacity), (Resource::NetworkSlots, 2, 2));
    assert!(slots.to_string().contains("2 of 2") && slots.to_string().contains("sb-a, sb-b"), "{slots}");
    let memory = error(want(1, 491));
    assert_eq!((memory.resource, memory.never_fits()), (Resource::Memory, false));
    assert_eq!(memory.holders, ["sb-b", "sb-a"], "the largest first");
    let memory = error(want(1, 1_001));
    assert!(memory.never_fits() && memory.to_string().contains("never fit"), "{memory}");
    assert_eq!(error(want(3, 1)).resource, Resource::Cpus);
    assert_eq!(error(want(1, u64::MAX)).resource, Resource::Memory, "no overflow");
}

#[test]
fn cpus_are_taken_from_the_least_loaded() {
    let host: CpuSet = "0-3".parse().unwrap();
    let loans = [loan("a", 0, "0-1", 1), loan("b", 1, "0,2,77", 1)];
    let loads = cpu_loads(&host, &loans);
    assert_eq!(loads, BTreeMap::from([(0, 2), (1, 1), (2, 1), (3, 0)]));
    assert_eq!(choose_cpus(&loads, 1).to_string(), "3");
    assert_eq!(choose_cpus(&loads, 2).to_string(), "1,3");
    assert_eq!(choose_cpus(&loads, 4).to_string(), "0-3");
    assert_eq!(choose_cpus(&loads, 64).to_string(), "0-3");
    assert_eq!(choose_cpus(&loads, 0).len(), 1);
}

#[test]
fn overcommit_lends_a_cpu_as_often_as_it_says() {
    let budget = |cpu_percent| Budget { cpus: "0-1".parse().unwrap(), cpu_percent, memory_bytes: 100 };
    let loans: Vec<Loan> = (0..3).map(|n| loan(&n.to_string(), n, "0", 1)).collect();
    let want = Want { cpus: 1, memory_bytes: 1 };
    assert!(matches!(
        admit(&budget(100), &loans, want),
        Err(Exhausted { resource: Resource::Cpus, capacity: 2, .. })
    ));
    assert_eq!(admit(&budget(200), &loans, want), Ok(()));
    // A VM with more virtual CPUs than the host has counts as all of the host's.
    assert_eq!(admit(&budget(100), &[], Want { cpus: 8, memory_bytes: 1 }), Ok(()));
}

#[test]
fn counters_say_what_there_is_and_who_has_it() {
    let config = PoolConfig {
        range: "10.231.0.0/27".parse().unwrap(),
        quarantine_seconds: 5,
        ..PoolConfig::default()
    };
    let budget = Budget { cpus: "0-3".parse().unwrap(), cpu_percent: 150, memory_bytes: 1_000 };
    let loans = [loan("sb-a", 0, "0", 10), loan("sb-b", 1, "1-3", 500)];
    // Slot 1 is lent again, slot 3 has rested for long enough, slot 70 is outside.
    let releases = [released(1, 9_999), released(2, 9_000), released(3, 4_000), released(70, 9_999)];
    let found = counters(&config, &budget, &loans, releases, 10_000);
    let shown = [found.slots, found.cpus, found.memory].map(|c| [c.capacity, c.used, c.free, c.quarantined]);
    assert_eq!(shown, [[8, 2, 5, 1], [6, 4, 2, 0], [1_000, 510, 490, 0]]);
    assert_eq!(borrowers(Resource::Memory, &loans), [("sb-b", 500), ("sb-a", 10)]);
    assert_eq!(borrowers(Resource::Cpus, &loans), [("sb-b", 3), ("sb-a", 1)]);
    assert_eq!(borrowers(Resource::NetworkSlots, &loans), [("sb-a", 1), ("sb-b", 1)]);
    let full = [loan("sb-c", 0, "0-3", 2_000), loan("sb-d", 1, "0-3", 0)];
    let found = counters(&config, &budget, &full, [], 0);
    assert_eq!((found.cpus.free, found.memory.free), (0, 0), "a smaller budget than what is lent");
}

/// A ledger of 20,000 sandboxes, of which few run, that counts the rows that are read.
struct Counted {
    loans: Vec<Loan>,
    suspended: Vec<String>,
    read: std::cell::Cell<usize>,
}

impl Counted {
    fn rows<'a, T>(&'a self, rows: &'a [T]) -> impl Iterator<Item = &'a T> {
        rows.iter().inspect(|_| self.read.set(self.read.get() + 1))
    }
}

#[test]
fn what_is_suspended_costs_nothing_when_something_is_lent_or_swept() {
    let config = PoolConfig { range: "10.231.0.0/19".parse().unwrap(), ..PoolConfig::default() };
    let slots = 2_000;
    let budget = Budget { cpus: "0-7".parse().unwrap(), cpu_percent: 100_000, memory_bytes: u64::MAX };
    let cost = |suspended: usize, running: u32| {
        let ledger = Counted {
            loans: (0..running).map(|n| loan(&format!("run-{n}"), n, "0", 1)).collect(),
            suspended: (0..suspended).map(|n| format!("sb-{n}")).collect(),
            read: std::cell::Cell::new(0),
        };
        // One row for a slot that was ever used, whoever used it.
        let releases: Vec<Released> = (0..slots).map(|slot| released(slot, 1)).collect();
        let loans: Vec<Loan> = ledger.rows(&ledger.loans).cloned().collect();
        let given = ledger.rows(&releases).copied();
        let plan = plan(&config, &budget, &loans, given, 100_000, Want { cpus: 1, memory_bytes: 1 }).unwrap();
        assert!(plan.slot.slot.0 >= running);
        let all: Vec<Loan> = ledger.rows(&ledger.loans).cloned().collect();
        let live = torpor_netpool::Live { cgroups: vec![], ..Default::default() };
        let found = torpor_netpool::sweep(&config, &all, &live, &|_| {
            ledger.read.set(ledger.read.get() + 1);
            None
        });
        assert_eq!(found.without_tap.len(), running as usize);
        assert_eq!(ledger.suspended.len(), suspended);
        ledger.read.get()
    };
    assert_eq!(cost(20_000, 100), cost(0, 100), "the rows read don't grow with what is suspended");
    assert!(cost(20_000, 1_900) <= 3 * 1_900 + slots as usize, "and are at most a few for each slot");
}

#[test]
fn loans_survive_serialization() {
    let loan = loan("sb-a", 7, "0-1,4", 1 << 30);
    let text = serde_json::to_string(&loan).unwrap();
    assert!(text.contains(r#""slot":7"#) && text.contains(r#""cpus":"0-1,4""#), "{text}");
    assert_eq!(serde_json::from_str::<Loan>(&text).unwrap(), loan);
}

/// One step of a random history: (start or stop, which, CPUs, memory, milliseconds that pass).
type Step = (bool, usize, u32, u64, u64);

fn step() -> impl Strategy<Value = Step> {
    (prop::bool::weighted(0.6), any::<usize>(), 1u32..5, 1u64..400, 0u64..800)
}

/// Plays a history against the policy as a gateway would, and checks every answer.
fn play(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let config = PoolConfig {
        range: "10.231.0.0/26".parse().unwrap(),
        quarantine_seconds: 5,
        ..PoolConfig::default()
    };
    let budget = Budget { cpus: "0-3".parse().unwrap(), cpu_percent: 800, memory_bytes: 3_000 };
    let (mut loans, mut last, mut now) = (Vec::<Loan>::new(), HashMap::<Slot, u64>::new(), 1_000_000);
    let (mut cpus, mut memory) = (0u64, 0u64);
    for (number, (start, which, want_cpus, memory_bytes, passed)) in steps.into_iter().enumerate() {
        now += passed;
        if start {
            let want = Want { cpus: want_cpus, memory_bytes };
            let releases: Vec<Released> = last.iter().map(|(slot, at)| released(slot.0, *at)).collect();
            match plan(&config, &budget, &loans, releases, now, want) {
                Ok(plan) => {
                    let slot = plan.slot.slot;
                    prop_assert!(slot.0 < config.capacity());
                    prop_assert!(
                        loans.iter().all(|loan| loan.slot != slot),
                        "slot {} handed out twice",
                        slot.0
                    );
                    let rested = |at: &u64| now - at >= 5_000;
                    prop_assert_eq!(
                        plan.slot.quarantine_cut_short,
                        last.get(&slot).is_some_and(|at| !rested(at))
                    );
                    let others = (0..config.capacity())
                        .map(Slot)
                        .filter(|other| loans.iter().all(|l| l.slot != *other));
                    if plan.slot.quarantine_cut_short {
                        prop_assert!(others.clone().all(|other| !last.get(&other).is_none_or(rested)));
                    }
                    prop_assert!(
                        others.into_iter().all(|other| last.get(&other) >= last.get(&slot)),
                        "not the oldest"
                    );
                    prop_assert_eq!(plan.cpus.len(), want_cpus.min(4) as usize);
                    cpus += plan.cpus.len() as u64;
                    memory += memory_bytes;
                    let sandbox_id = format!("sb-{number}");
                    loans.push(Loan { sandbox_id, run: 1, slot, cpus: plan.cpus, memory_bytes });
                }
                Err(error) => {
                    let justified = match error.resource {
                        Resource::NetworkSlots => loans.len() == config.capacity() as usize,
                        Resource::Cpus => cpus + u64::from(want_cpus.min(4)) > 32,
                        Resource::Memory => memory + memory_bytes > 3_000,
                    };
                    prop_assert!(justified, "{}", error);
                }
            }
        } else if !loans.is_empty() {
            let loan = loans.swap_remove(which % loans.len());
            cpus -= loan.cpus.len() as u64;
            memory -= loan.memory_bytes;
            last.insert(loan.slot, now);
        }
        prop_assert_eq!(Usage::of(&loans), Usage { slots: loans.len() as u64, cpus, memory_bytes: memory });
        prop_assert!(cpus <= 32 && memory <= 3_000);
        prop_assert_eq!(
            cpu_loads(&budget.cpus, &loans).values().map(|load| u64::from(*load)).sum::<u64>(),
            cpus
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn short_histories_hand_out_nothing_twice_and_sum_up(steps in prop::collection::vec(step(), 0..200)) {
        play(steps)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3, failure_persistence: None, max_shrink_iters: 0, ..ProptestConfig::default() })]
    #[test]
    fn ten_thousand_operations_keep_the_sums_exact(steps in prop::collection::vec(step(), 10_000)) {
        play(steps)?;
    }
}
