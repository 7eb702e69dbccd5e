//! The records that changed last, as they are on the disk: whoever acts on a change reads it from here and not from the
//! database. The writer puts them here after the commit and before anybody is answered, so that they are never older
//! than what a caller has seen.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use torpor_sandbox::SandboxId;

use super::{Change, Record};

/// So many are kept; those who hear of changes may be as many behind.
const KEPT: usize = 4096;

#[derive(Default)]
struct Inner {
    records: HashMap<SandboxId, Arc<Record>>,
    /// Changes in their order, each by its number; of a sandbox that changed again, the last one counts.
    order: VecDeque<(SandboxId, u64)>,
}

/// See the module.
#[derive(Default)]
pub struct Recent(Mutex<Inner>);

impl Recent {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A change that is on the disk.
    pub fn put(&self, change: &Change) {
        let mut inner = self.lock();
        let id = &change.record.id;
        if change.gone {
            inner.records.remove(id);
            return;
        }
        inner.records.insert(id.clone(), change.record.clone());
        inner.order.push_back((id.clone(), change.number));
        while inner.order.len() > KEPT {
            let Some((oldest, number)) = inner.order.pop_front() else { break };
            if inner.records.get(&oldest).is_some_and(|record| record.change == number) {
                inner.records.remove(&oldest);
            }
        }
    }

    /// The record, if it changed lately.
    pub fn get(&self, id: &SandboxId) -> Option<Arc<Record>> {
        self.lock().records.get(id).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use torpor_sandbox::State;

    fn change(id: &SandboxId, number: u64, gone: bool) -> Change {
        let record = Record {
            id: id.clone(),
            name: "a".to_owned(),
            version: number,
            labels: std::collections::BTreeMap::new(),
            annotations: std::collections::BTreeMap::new(),
            spec: super::super::sandboxes::empty_spec(),
            state: State::new(),
            created: std::time::SystemTime::UNIX_EPOCH,
            since: std::time::SystemTime::UNIX_EPOCH,
            change: number,
            seq: 1,
        };
        Change { number, record: Arc::new(record), gone, ended: None }
    }

    #[test]
    fn the_last_change_of_a_sandbox_is_kept_until_many_others_changed_or_it_is_gone() {
        let recent = Recent::default();
        let (one, other) = (SandboxId::generate(), SandboxId::generate());
        recent.put(&change(&one, 1, false));
        recent.put(&change(&one, 2, false));
        for number in 3..KEPT as u64 + 2 {
            recent.put(&change(&other, number, false));
        }
        assert_eq!(recent.get(&one).map(|record| record.version), Some(2), "its first change was let go");
        recent.put(&change(&other, KEPT as u64 + 2, false));
        assert!(recent.get(&one).is_none());
        recent.put(&change(&other, KEPT as u64 + 3, true));
        assert!(recent.get(&other).is_none());
    }
}
