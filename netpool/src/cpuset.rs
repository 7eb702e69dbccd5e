//! Sets of CPUs in the kernel's list format.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The highest CPU number that a set may name; the kernel's own limit (NR_CPUS) is 8192.
const MAX_CPU: u32 = 8191;

/// A set of CPU numbers. It prints and parses in the kernel's list format: `0-1,4`; the empty set is the empty text.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(BTreeSet<u32>);

/// A text that is not a CPU list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not a CPU list: write it like 0-1,4 with numbers up to {MAX_CPU}")]
pub struct ParseCpuSetError(String);

impl CpuSet {
    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// How many CPUs the set holds.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set holds no CPU.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the set holds `cpu`.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        CpuSet(cpus.into_iter().collect())
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if(|&next| next == last + 1) {
                last = next;
            }
            match first == last {
                true => write!(f, "{separator}{first}")?,
                false => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

impl FromStr for CpuSet {
    type Err = ParseCpuSetError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(CpuSet::default());
        }
        let mut cpus = BTreeSet::new();
        for part in text.split(',') {
            let (first, last) = parse_range(part).ok_or_else(|| ParseCpuSetError(text.to_string()))?;
            cpus.extend(first..=last);
        }
        Ok(CpuSet(cpus))
    }
}

/// `4` or `4-7`, in order and within bounds.
fn parse_range(part: &str) -> Option<(u32, u32)> {
    let number = |text: &str| match text.bytes().all(|b| b.is_ascii_digit()) {
        true => text.parse::<u32>().ok(),
        false => None,
    };
    let (first, last) = match part.split_once('-') {
        Some((first, last)) => (number(first)?, number(last)?),
        None => (number(part)?, number(part)?),
    };
    (first <= last && last <= MAX_CPU).then_some((first, last))
}

impl TryFrom<String> for CpuSet {
    type Error = ParseCpuSetError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<CpuSet> for String {
    fn from(set: CpuSet) -> String {
        set.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn cpu_lists_print_in_the_kernels_form() {
        let set: CpuSet = [4, 0, 1].into_iter().collect();
        assert_eq!(set.to_string(), "0-1,4");
        assert_eq!("1,0,4-4\n".parse::<CpuSet>().unwrap(), set);
        assert_eq!("".parse::<CpuSet>().unwrap(), CpuSet::default());
    }

    #[test]
    fn bad_cpu_lists_are_refused() {
        for text in ["a", "1-", "-1", "3-1", "1,,2", "0-4294967295", "+1", "0-8192"] {
            assert!(text.parse::<CpuSet>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_set_survives_printing_and_parsing(cpus in proptest::collection::btree_set(0u32..300, 0..80)) {
            let set: CpuSet = cpus.into_iter().collect();
            prop_assert_eq!(set.to_string().parse::<CpuSet>().unwrap(), set);
        }
    }
}
