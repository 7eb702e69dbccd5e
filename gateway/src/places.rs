//! Places for connections, of which one peer may hold a share only: whoever can connect can't keep others out.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
};

/// Who is connected.
#[derive(Debug)]
pub(crate) struct Places<K> {
    most: usize,
    each: usize,
    taken: Mutex<HashMap<K, usize>>,
}

/// One connection's, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place<K: Eq + Hash> {
    all: Arc<Places<K>>,
    peer: K,
}

impl<K: Eq + Hash + Copy> Places<K> {
    /// `most` in all, `each` of one peer.
    pub(crate) fn new(most: usize, each: usize) -> Arc<Self> {
        Arc::new(Self { most, each, taken: Mutex::default() })
    }

    /// None: there is none for this one.
    pub(crate) fn take(self: &Arc<Self>, peer: K) -> Option<Place<K>> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let total: usize = taken.values().sum();
        let here = taken.get(&peer).copied().unwrap_or_default();
        if here >= self.each || total >= self.most {
            return None;
        }
        taken.insert(peer, here + 1);
        Some(Place { all: self.clone(), peer })
    }
}

impl<K: Eq + Hash> Drop for Place<K> {
    fn drop(&mut self) {
        let mut taken = self.all.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_has_some_places_all_have_more_and_all_come_back() {
        let places = Places::new(32, 8);
        let mut taken: Vec<Place<usize>> = (0..8).map(|_| places.take(1).unwrap()).collect();
        assert!(places.take(1).is_none());
        taken.push(places.take(2).unwrap());
        taken.remove(0);
        taken.push(places.take(1).unwrap());
        for peer in 3..7 {
            taken.extend((0..8).filter_map(|_| places.take(peer)));
        }
        assert_eq!(taken.len(), 32);
        assert!(places.take(200).is_none());
        drop(taken);
        assert!(places.taken.lock().unwrap().is_empty());
    }
}
