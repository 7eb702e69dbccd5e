//! A set of cluster numbers.

/// Bits from zero to the highest one set; all beyond are clear.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bitmap(Vec<u64>);

impl Bitmap {
    pub(crate) fn get(&self, bit: u64) -> bool {
        self.0.get((bit / 64) as usize).is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }

    /// Sets a bit; false if it was set already.
    pub(crate) fn set(&mut self, bit: u64) -> bool {
        let at = (bit / 64) as usize;
        if at >= self.0.len() {
            self.0.resize(at + 1, 0);
        }
        let (word, mask) = (&mut self.0[at], 1 << (bit % 64));
        let fresh = *word & mask == 0;
        *word |= mask;
        fresh
    }

    /// Clears a bit; false if it was clear already.
    pub(crate) fn clear(&mut self, bit: u64) -> bool {
        let Some(word) = self.0.get_mut((bit / 64) as usize) else { return false };
        let mask = 1 << (bit % 64);
        let was = *word & mask != 0;
        *word &= !mask;
        was
    }

    /// True when a bit in this range is set; both ends are multiples of 64.
    pub(crate) fn any(&self, from: u64, end: u64) -> bool {
        let (from, end) = ((from / 64) as usize, self.0.len().min((end / 64) as usize));
        from < end && self.0[from..end].iter().any(|word| *word != 0)
    }

    /// The first clear bit at or after `from` and before `end`.
    pub(crate) fn next_clear(&self, from: u64, end: u64) -> Option<u64> {
        let mut bit = from;
        while bit < end {
            let Some(word) = self.0.get((bit / 64) as usize) else { return Some(bit) };
            let rest = !word >> (bit % 64);
            if rest != 0 {
                return Some(bit + u64::from(rest.trailing_zeros())).filter(|bit| *bit < end);
            }
            bit = (bit / 64 + 1) * 64;
        }
        None
    }

    /// One more than the highest bit set.
    pub(crate) fn end(&self) -> u64 {
        self.0
            .iter()
            .rposition(|word| *word != 0)
            .map_or(0, |at| (at as u64 + 1) * 64 - u64::from(self.0[at].leading_zeros()))
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(operations in prop::collection::vec((any::<bool>(), 0u64..300), 0..200), from in 0u64..300) {
            let (mut bitmap, mut model) = (Bitmap::default(), std::collections::BTreeSet::new());
            for (set, bit) in operations {
                match set {
                    true => prop_assert_eq!(bitmap.set(bit), model.insert(bit)),
                    false => prop_assert_eq!(bitmap.clear(bit), model.remove(&bit)),
                }
            }
            prop_assert_eq!(bitmap.count(), model.len() as u64);
            prop_assert_eq!(bitmap.end(), model.last().map_or(0, |bit| bit + 1));
            prop_assert_eq!(bitmap.next_clear(from, 290), (from..290).find(|bit| !model.contains(bit)));
            prop_assert_eq!(bitmap.any(64, 192), model.range(64..192).next().is_some());
            prop_assert!((0..400).all(|bit| bitmap.get(bit) == model.contains(&bit)));
        }
    }
}
