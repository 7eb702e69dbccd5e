//! Who gets what: pure functions over the rows of the ledger. The caller reads the rows, asks, and writes the answer as
//! a loan in the same transaction, so that nothing is handed out twice.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{CpuSet, Loan, PoolConfig, Slot, Topology};

/// How many borrowers an error names.
const NAMED_HOLDERS: usize = 5;

/// What can run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Slots of the network pool: TAP, IP and vsock CID together.
    NetworkSlots,
    /// CPUs, in whole CPUs.
    Cpus,
    /// Guest memory, in bytes.
    Memory,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Resource::NetworkSlots => "network slots",
            Resource::Cpus => "CPUs",
            Resource::Memory => "memory",
        })
    }
}

impl Resource {
    /// An amount of it, as people read it: memory in MiB.
    fn amount(self, amount: u64) -> String {
        match self {
            Resource::Memory if amount.is_multiple_of(1 << 20) => format!("{} MiB", amount >> 20),
            Resource::Memory => format!("{amount} bytes"),
            Resource::NetworkSlots | Resource::Cpus => amount.to_string(),
        }
    }
}

/// Nothing is left to lend. When a loan comes back, the same request can succeed, unless it is larger than the whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no {resource} left: wanted {}, {} of {} are lent{}",
    resource.amount(*wanted),
    resource.amount(*used),
    resource.amount(*capacity),
    self.hint()
)]
pub struct Exhausted {
    /// What ran out.
    pub resource: Resource,
    /// How much was wanted.
    pub wanted: u64,
    /// How much is lent.
    pub used: u64,
    /// How much there is to lend.
    pub capacity: u64,
    /// The largest borrowers, at most five.
    pub holders: Vec<String>,
}

impl Exhausted {
    /// Whether waiting can't help: more is wanted than there is.
    pub fn never_fits(&self) -> bool {
        self.wanted > self.capacity
    }

    fn hint(&self) -> String {
        match (self.never_fits(), self.holders.is_empty()) {
            (true, _) => "; it can never fit: ask for less".to_string(),
            (false, true) => String::new(),
            (false, false) => format!(" ({}): suspend one, or wait", self.holders.join(", ")),
        }
    }
}

/// When a slot was last given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// The slot.
    pub slot: Slot,
    /// The time of release in milliseconds of any clock that [`choose_slot`] is given too.
    pub at_ms: u64,
}

/// A slot to lend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotChoice {
    /// The slot.
    pub slot: Slot,
    /// The slot was still resting, but every other one is lent or rested for less time.
    pub quarantine_cut_short: bool,
}

/// The free slot that was least recently used: never used ones first and in order, then by time of release. A slot in
/// quarantine is taken only when no other is free. A release "in the future" (the clock was set back) is in quarantine.
///
/// # Errors
/// All slots are lent.
pub fn choose_slot(
    capacity: u32,
    used: impl IntoIterator<Item = Slot>,
    released: impl IntoIterator<Item = Released>,
    now_ms: u64,
    quarantine: Duration,
) -> Result<SlotChoice, Exhausted> {
    let used: HashSet<Slot> = used.into_iter().filter(|slot| slot.0 < capacity).collect();
    let mut last_release: HashMap<Slot, u64> = HashMap::new();
    for Released { slot, at_ms } in released {
        if slot.0 < capacity && !used.contains(&slot) {
            let last = last_release.entry(slot).or_insert(at_ms);
            *last = at_ms.max(*last);
        }
    }
    let fresh = (0..capacity).map(Slot).find(|slot| !used.contains(slot) && !last_release.contains_key(slot));
    if let Some(slot) = fresh {
        return Ok(SlotChoice { slot, quarantine_cut_short: false });
    }
    let oldest = last_release.into_iter().map(|(slot, at_ms)| (at_ms, slot)).min();
    let (at_ms, slot) = oldest.ok_or(Exhausted {
        resource: Resource::NetworkSlots,
        wanted: 1,
        used: used.len() as u64,
        capacity: u64::from(capacity),
        holders: Vec::new(),
    })?;
    let rested = u128::from(now_ms.saturating_sub(at_ms));
    Ok(SlotChoice { slot, quarantine_cut_short: rested < quarantine.as_millis() })
}

/// How many loans each of the host's CPUs carries. CPUs that the host no longer has are left out.
pub fn cpu_loads<'a>(host: &CpuSet, loans: impl IntoIterator<Item = &'a Loan>) -> BTreeMap<u32, u32> {
    let mut loads: BTreeMap<u32, u32> = host.iter().map(|cpu| (cpu, 0)).collect();
    for cpu in loans.into_iter().flat_map(|loan| loan.cpus.iter()) {
        if let Some(load) = loads.get_mut(&cpu) {
            *load += 1;
        }
    }
    loads
}

/// The `wanted` least loaded CPUs, lower numbers first among equals; all of them when `wanted` is as many or more; at
/// least one.
pub fn choose_cpus(loads: &BTreeMap<u32, u32>, wanted: u32) -> CpuSet {
    let mut by_load: Vec<(u32, u32)> = loads.iter().map(|(&cpu, &load)| (load, cpu)).collect();
    by_load.sort_unstable();
    by_load.into_iter().take(wanted.max(1) as usize).map(|(_, cpu)| cpu).collect()
}

/// What the host has to lend besides network slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// The CPUs that VMs may run on.
    pub cpus: CpuSet,
    /// How many CPUs may be lent per host CPU, in percent: 100 lends each once, 400 up to four times.
    pub cpu_percent: u32,
    /// Memory for guests in bytes.
    pub memory_bytes: u64,
}

impl Budget {
    /// How many CPUs may be lent in all.
    pub fn cpu_capacity(&self) -> u64 {
        self.cpus.len() as u64 * u64::from(self.cpu_percent) / 100
    }
}

/// What is lent: the sum over all loans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Network slots.
    pub slots: u64,
    /// CPUs.
    pub cpus: u64,
    /// Memory in bytes.
    pub memory_bytes: u64,
}

impl Usage {
    /// The sum over `loans`.
    pub fn of<'a>(loans: impl IntoIterator<Item = &'a Loan>) -> Usage {
        loans.into_iter().fold(Usage::default(), |sum, loan| Usage {
            slots: sum.slots + 1,
            cpus: sum.cpus + loan.cpus.len() as u64,
            memory_bytes: sum.memory_bytes.saturating_add(loan.memory_bytes),
        })
    }
}

/// What a sandbox asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// Virtual CPUs. More than the host has are placed on all that it has.
    pub cpus: u32,
    /// Guest memory in bytes.
    pub memory_bytes: u64,
}

/// Whether the wanted CPUs and memory fit beside the loans.
///
/// # Errors
/// The resource that doesn't fit, with its largest borrowers.
pub fn admit(budget: &Budget, loans: &[Loan], want: Want) -> Result<(), Exhausted> {
    let used = Usage::of(loans);
    let cpus = u64::from(want.cpus.max(1)).min(budget.cpus.len().max(1) as u64);
    fits(Resource::Cpus, cpus, used.cpus, budget.cpu_capacity())
        .and_then(|()| fits(Resource::Memory, want.memory_bytes, used.memory_bytes, budget.memory_bytes))
        .map_err(|exhausted| name_holders(exhausted, loans))
}

/// What [`plan`] chose: with the sandbox's id, run and memory it is a [`Loan`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The slot.
    pub slot: SlotChoice,
    /// The CPUs.
    pub cpus: CpuSet,
}

/// The whole decision for one start, where nothing is known of how the CPUs lie: admission, a slot and CPUs. The cost grows
/// with what is lent and with the slots, not with the number of sandboxes that have borrowed nothing.
///
/// # Errors
/// The resource that ran out, with its largest borrowers.
pub fn plan(
    config: &PoolConfig,
    budget: &Budget,
    loans: &[Loan],
    released: impl IntoIterator<Item = Released>,
    now_ms: u64,
    want: Want,
) -> Result<Plan, Exhausted> {
    plan_on(&Topology::flat(&budget.cpus), config, budget, loans, released, now_ms, want)
}

/// [`plan`] on a host whose cores and nodes are known: see [`Topology::place`]. The nodes for the memory follow from the
/// CPUs ([`Topology::nodes_of`]).
///
/// # Errors
/// The resource that ran out, with its largest borrowers.
pub fn plan_on(
    topology: &Topology,
    config: &PoolConfig,
    budget: &Budget,
    loans: &[Loan],
    released: impl IntoIterator<Item = Released>,
    now_ms: u64,
    want: Want,
) -> Result<Plan, Exhausted> {
    admit(budget, loans, want)?;
    let used = loans.iter().map(|loan| loan.slot);
    let slot = choose_slot(config.capacity(), used, released, now_ms, config.quarantine())
        .map_err(|exhausted| name_holders(exhausted, loans))?;
    Ok(Plan { slot, cpus: topology.place(&cpu_loads(&budget.cpus, loans), want.cpus).cpus })
}

/// How much there is of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    /// All that can be lent.
    pub capacity: u64,
    /// What is lent.
    pub used: u64,
    /// What can be lent at once: not lent, and not resting.
    pub free: u64,
    /// What rests after its release, and is lent only when nothing else is free.
    pub quarantined: u64,
}

impl Counter {
    fn new(capacity: u64, used: u64, quarantined: u64) -> Counter {
        let free = capacity.saturating_sub(used).saturating_sub(quarantined);
        Counter { capacity, used, free, quarantined }
    }
}

/// A [`Counter`] for each resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Slots of the network pool: TAP, IP and vsock CID together.
    pub slots: Counter,
    /// CPUs, as often as they may be lent.
    pub cpus: Counter,
    /// Memory in bytes.
    pub memory: Counter,
}

/// The counters of a pool. Only slots rest after their release: memory and CPUs can be lent again at once.
pub fn counters(
    config: &PoolConfig,
    budget: &Budget,
    loans: &[Loan],
    released: impl IntoIterator<Item = Released>,
    now_ms: u64,
) -> Counters {
    let usage = Usage::of(loans);
    let used: HashSet<Slot> = loans.iter().map(|loan| loan.slot).collect();
    let quarantine = u64::try_from(config.quarantine().as_millis()).unwrap_or(u64::MAX);
    let rests = |released: &Released| {
        let within = now_ms.saturating_sub(released.at_ms) < quarantine;
        within && released.slot.0 < config.capacity() && !used.contains(&released.slot)
    };
    let resting: HashSet<Slot> = released.into_iter().filter(rests).map(|released| released.slot).collect();
    Counters {
        slots: Counter::new(u64::from(config.capacity()), usage.slots, resting.len() as u64),
        cpus: Counter::new(budget.cpu_capacity(), usage.cpus, 0),
        memory: Counter::new(budget.memory_bytes, usage.memory_bytes, 0),
    }
}

/// The borrowers of a resource, the largest first, each with how much it has: for "who uses it".
pub fn borrowers(resource: Resource, loans: &[Loan]) -> Vec<(&str, u64)> {
    let size = |loan: &Loan| match resource {
        Resource::NetworkSlots => 1,
        Resource::Cpus => loan.cpus.len() as u64,
        Resource::Memory => loan.memory_bytes,
    };
    let mut all: Vec<(&str, u64)> = loans.iter().map(|loan| (loan.sandbox_id.as_str(), size(loan))).collect();
    all.sort_by(|(id, size), (other, other_size)| other_size.cmp(size).then_with(|| id.cmp(other)));
    all
}

fn fits(resource: Resource, wanted: u64, used: u64, capacity: u64) -> Result<(), Exhausted> {
    match used.checked_add(wanted).is_some_and(|sum| sum <= capacity) {
        true => Ok(()),
        false => Err(Exhausted { resource, wanted, used, capacity, holders: Vec::new() }),
    }
}

fn name_holders(exhausted: Exhausted, loans: &[Loan]) -> Exhausted {
    let all = borrowers(exhausted.resource, loans);
    let holders = all.into_iter().take(NAMED_HOLDERS).map(|(id, _)| id.to_string()).collect();
    Exhausted { holders, ..exhausted }
}
