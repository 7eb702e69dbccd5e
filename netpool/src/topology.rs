//! How CPUs lie together, and which of them a sandbox gets.

use std::collections::{BTreeMap, BTreeSet};

use crate::CpuSet;

/// One core: its hyper-threads, and the NUMA node that they lie in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Core {
    /// The CPUs of the core.
    pub cpus: CpuSet,
    /// The number of the node.
    pub node: u32,
}

/// The cores of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// The cores; no CPU is in two of them.
    pub cores: Vec<Core>,
}

/// CPUs for a sandbox, and the nodes that its memory should come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The CPUs.
    pub cpus: CpuSet,
    /// The NUMA nodes that they lie in.
    pub nodes: CpuSet,
}

impl Topology {
    /// Each CPU a core of its own, all in one node: nothing is known of how they lie.
    pub fn flat(cpus: &CpuSet) -> Topology {
        Topology {
            cores: cpus.iter().map(|cpu| Core { cpus: [cpu].into_iter().collect(), node: 0 }).collect(),
        }
    }

    /// The nodes of some CPUs.
    pub fn nodes_of(&self, cpus: &CpuSet) -> CpuSet {
        let touched = |core: &&Core| core.cpus.iter().any(|cpu| cpus.contains(cpu));
        self.cores.iter().filter(touched).map(|core| core.node).collect()
    }

    /// The `wanted` CPUs for a sandbox, given how many sandboxes each CPU carries: all in one node when one is large enough,
    /// in whole cores, and of these the least loaded. What is not a whole core comes from a core that is broken already. All CPUs when
    /// `wanted` is as many or more; at least one.
    pub fn place(&self, loads: &BTreeMap<u32, u32>, wanted: u32) -> Placement {
        let wanted = wanted.max(1) as usize;
        let nodes: BTreeSet<u32> = self.cores.iter().map(|core| core.node).collect();
        let in_node = |node: u32| self.cores.iter().filter(move |core| core.node == node).collect::<Vec<_>>();
        let fitting = nodes.iter().map(|node| in_node(*node)).filter(|cores| size(cores) >= wanted);
        let best = fitting.map(|cores| fill(cores, loads, wanted)).min_by_key(|cpus| weight(cpus, loads));
        let cpus = best.unwrap_or_else(|| self.spread(loads, wanted));
        Placement { nodes: self.nodes_of(&cpus), cpus }
    }

    /// More than any node has: node after node, the least loaded first.
    fn spread(&self, loads: &BTreeMap<u32, u32>, wanted: usize) -> CpuSet {
        let nodes: BTreeSet<u32> = self.cores.iter().map(|core| core.node).collect();
        let cores_of = |node: u32| self.cores.iter().filter(|core| core.node == node).collect::<Vec<_>>();
        let mut by_load: Vec<Vec<&Core>> = nodes.into_iter().map(cores_of).collect();
        let mean = |cores: &[&Core]| {
            let total: u64 = cores.iter().map(|core| load(&core.cpus, loads)).sum();
            total * 1000 / size(cores).max(1) as u64
        };
        by_load.sort_by_key(|cores| mean(cores));
        let mut cpus: Vec<u32> = Vec::new();
        for cores in by_load {
            let left = wanted - cpus.len();
            cpus.extend(fill(cores, loads, left).iter());
        }
        cpus.into_iter().collect()
    }
}

fn size(cores: &[&Core]) -> usize {
    cores.iter().map(|core| core.cpus.len()).sum()
}

/// How many sandboxes the CPUs carry together.
fn load(cpus: &CpuSet, loads: &BTreeMap<u32, u32>) -> u64 {
    cpus.iter().map(|cpu| u64::from(loads.get(&cpu).copied().unwrap_or(0))).sum()
}

/// The most that one of them carries, and the sum.
fn weight(cpus: &CpuSet, loads: &BTreeMap<u32, u32>) -> (u32, u64) {
    (cpus.iter().filter_map(|cpu| loads.get(&cpu).copied()).max().unwrap_or(0), load(cpus, loads))
}

/// At most `wanted` CPUs of these cores.
fn fill(mut cores: Vec<&Core>, loads: &BTreeMap<u32, u32>, wanted: usize) -> CpuSet {
    cores.sort_by_key(|core| (weight(&core.cpus, loads), core.cpus.iter().next()));
    let (mut chosen, mut rest): (Vec<u32>, Vec<&Core>) = (Vec::new(), Vec::new());
    for core in cores {
        match chosen.len() + core.cpus.len() <= wanted {
            true => chosen.extend(core.cpus.iter()),
            false => rest.push(core),
        }
    }
    // The remainder: the least loaded CPUs, and among equals those whose core is the most loaded.
    let mut single: Vec<(u32, std::cmp::Reverse<u64>, u32)> = rest
        .iter()
        .flat_map(|core| {
            let whole = load(&core.cpus, loads);
            let of = move |cpu| (loads.get(&cpu).copied().unwrap_or(0), std::cmp::Reverse(whole), cpu);
            core.cpus.iter().map(of).collect::<Vec<_>>()
        })
        .collect();
    single.sort_unstable();
    let left = wanted.saturating_sub(chosen.len());
    chosen.extend(single.into_iter().take(left).map(|(_, _, cpu)| cpu));
    chosen.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes of two cores with two threads: 0,4 1,5 | 2,6 3,7.
    fn host() -> Topology {
        let core = |n: u32| Core { cpus: [n, n + 4].into_iter().collect(), node: n / 2 };
        Topology { cores: (0..4).map(core).collect() }
    }

    fn loads(loaded: &[(u32, u32)]) -> BTreeMap<u32, u32> {
        let mut loads: BTreeMap<u32, u32> = (0..8).map(|cpu| (cpu, 0)).collect();
        loads.extend(loaded.iter().copied());
        loads
    }

    fn place(loaded: &[(u32, u32)], wanted: u32) -> (String, String) {
        let placement = host().place(&loads(loaded), wanted);
        (placement.cpus.to_string(), placement.nodes.to_string())
    }

    #[test]
    fn hyper_threads_of_a_core_go_together_and_cores_stay_in_a_node() {
        let text = |cpus: &str, nodes: &str| (cpus.to_string(), nodes.to_string());
        assert_eq!(place(&[], 2), text("0,4", "0"));
        assert_eq!(place(&[(0, 1), (4, 1)], 2), text("1,5", "0"));
        assert_eq!(place(&[(0, 1), (4, 1)], 4), text("2-3,6-7", "1"));
        assert_eq!(place(&[(0, 1), (4, 1), (1, 1), (5, 1)], 2), text("2,6", "1"));
        assert_eq!(place(&[], 8), text("0-7", "0-1"));
        assert_eq!(place(&[], 99), text("0-7", "0-1"));
        assert_eq!(place(&[], 6).0.len(), "0-2,4-6".len(), "a whole node and a core of the other");
    }

    #[test]
    fn what_is_no_whole_core_breaks_no_second_one() {
        assert_eq!(place(&[(0, 1)], 1).0, "4");
        assert_eq!(place(&[(0, 1)], 3).0, "1,4-5", "a whole core, and the other half of a broken one");
        assert_eq!(place(&[(0, 1), (2, 1)], 3).0, "1,4-5");
        assert_eq!(place(&[], 0).0, "0", "at least one");
    }

    #[test]
    fn where_nothing_is_known_the_least_loaded_cpus_are_taken() {
        let flat = Topology::flat(&"0-7".parse().unwrap());
        assert_eq!(flat.place(&loads(&[(0, 2), (1, 1)]), 3).cpus.to_string(), "2-4");
        assert_eq!(Topology::default().place(&BTreeMap::new(), 2), Placement::default());
    }
}
