//! Operations on the disks of sandboxes at rest: at most one for each and a few in all, and none that a start or a delete has to fail for.
//!
//! An operation takes its place here first and reads the record then; a start or delete is written into the record first
//! and looks here then. So one of the two sees the other, whatever comes first.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio_util::sync::CancellationToken;
use torpor_sandbox::SandboxId;

/// Most operations under way in a gateway. Each keeps one of the threads on which everything else that blocks is done as
/// well, for hours perhaps.
pub const MOST: usize = 16;

/// What can be done with a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Its structure is looked over.
    Check,
    /// It is made larger.
    Grow,
    /// What the guest no longer uses is given back.
    Compact,
    /// It is written anew.
    Rewrite,
    /// It is handed out.
    Export,
    /// Its sandbox is changed, and it perhaps made larger.
    Update,
}

impl Kind {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Check => "disk check",
            Self::Grow => "disk grow",
            Self::Compact => "disk compact",
            Self::Rewrite => "disk compact --rewrite",
            Self::Export => "disk export",
            Self::Update => "update",
        }
    }

    /// The step of a verb that waits for it.
    fn waiting(self) -> &'static str {
        match self {
            Self::Check => "waiting for disk check",
            Self::Grow => "waiting for disk grow",
            Self::Compact => "waiting for disk compact",
            Self::Rewrite => "waiting for disk compact --rewrite",
            Self::Export => "waiting for disk export",
            Self::Update => "waiting for update",
        }
    }

    /// May take long, and nothing is lost but the time that it took.
    fn can_be_cancelled(self) -> bool {
        matches!(self, Self::Compact | Self::Rewrite | Self::Export)
    }

    /// The disk is another one afterwards, as far as a memory image is concerned.
    pub fn changes_disk(self) -> bool {
        !matches!(self, Self::Check | Self::Export)
    }
}

/// Why an operation can't begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// This one is under way on the same disk.
    Busy(Kind),
    /// As many as there may be are under way on other disks.
    TooMany,
}

/// An operation under way.
#[derive(Debug)]
struct Operation {
    kind: Kind,
    cancel: CancellationToken,
    ended: CancellationToken,
    /// What it is cancelled for: the verb.
    verb: Mutex<Option<&'static str>>,
}

/// Operations under way, by sandbox.
#[derive(Debug, Default)]
pub struct Maintenance {
    running: Mutex<HashMap<SandboxId, Arc<Operation>>>,
}

/// An operation's place. Dropped when its work on the disk has come to its end, not before.
#[derive(Debug)]
pub struct Guard {
    owner: Arc<Maintenance>,
    id: SandboxId,
    operation: Arc<Operation>,
}

impl Guard {
    /// Cancelled when the operation shall end.
    pub fn cancel(&self) -> &CancellationToken {
        &self.operation.cancel
    }

    /// The verb that it was cancelled for, if it was one.
    pub fn cancelled_for(&self) -> Option<&'static str> {
        *locked(&self.operation.verb)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        locked(&self.owner.running).remove(&self.id);
        self.operation.ended.cancel();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Maintenance {
    /// Begins an operation, which is cancelled with `end` at the latest.
    ///
    /// # Errors
    /// One is under way, or too many are.
    pub fn begin(
        self: &Arc<Self>,
        id: &SandboxId,
        kind: Kind,
        end: &CancellationToken,
    ) -> Result<Guard, Refused> {
        let mut running = locked(&self.running);
        let full = running.len() >= MOST;
        match running.entry(id.clone()) {
            Entry::Occupied(there) => Err(Refused::Busy(there.get().kind)),
            Entry::Vacant(_) if full => Err(Refused::TooMany),
            Entry::Vacant(free) => {
                let (cancel, ended) = (end.child_token(), CancellationToken::new());
                let operation = Arc::new(Operation { kind, cancel, ended, verb: Mutex::default() });
                free.insert(operation.clone());
                Ok(Guard { owner: self.clone(), id: id.clone(), operation })
            }
        }
    }

    /// What is under way.
    pub fn running(&self, id: &SandboxId) -> Option<Kind> {
        locked(&self.running).get(id).map(|operation| operation.kind)
    }

    /// Waits until nothing is under way, for `verb`, which is written in the record; asks what can be cancelled to end.
    /// `tell` hears what is waited for.
    pub async fn make_way(&self, id: &SandboxId, verb: &'static str, mut tell: impl FnMut(&'static str)) {
        loop {
            let Some(operation) = locked(&self.running).get(id).cloned() else { return };
            tell(operation.kind.waiting());
            if operation.kind.can_be_cancelled() {
                locked(&operation.verb).get_or_insert(verb);
                operation.cancel.cancel();
            }
            operation.ended.cancelled().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_at_a_time_and_a_verb_ends_what_it_can_and_waits_for_the_rest() {
        let (all, end, id) =
            (Arc::new(Maintenance::default()), CancellationToken::new(), SandboxId::generate());
        all.make_way(&id, "resume", |_| panic!("nothing is there")).await;
        let grow = all.begin(&id, Kind::Grow, &end).unwrap();
        assert_eq!(all.begin(&id, Kind::Export, &end).unwrap_err(), Refused::Busy(Kind::Grow));
        all.begin(&SandboxId::generate(), Kind::Export, &end).unwrap();
        let mut heard = Vec::new();
        tokio::select! {
            biased;
            () = all.make_way(&id, "resume", |text| heard.push(text)) => panic!("it did not wait"),
            () = tokio::task::yield_now() => {}
        }
        assert_eq!(heard, ["waiting for disk grow"]);
        assert!(!grow.cancel().is_cancelled());
        drop(grow);

        for kind in [Kind::Export, Kind::Compact, Kind::Rewrite] {
            let running = all.begin(&id, kind, &end).unwrap();
            let (way, token) = (all.make_way(&id, "delete", |_| {}), running.cancel().clone());
            let ends = async {
                token.cancelled().await;
                assert_eq!(running.cancelled_for(), Some("delete"));
                drop(running);
            };
            tokio::join!(way, ends);
            assert_eq!(all.running(&id), None);
        }
    }

    #[test]
    fn there_are_only_so_many_at_once() {
        let (all, end) = (Arc::new(Maintenance::default()), CancellationToken::new());
        let begin = || all.begin(&SandboxId::generate(), Kind::Export, &end);
        let mut running: Vec<_> = (0..MOST).map(|_| begin().unwrap()).collect();
        assert_eq!(begin().unwrap_err(), Refused::TooMany);
        running.pop();
        begin().unwrap();
    }

    #[test]
    fn a_gateway_that_ends_cancels_all_for_no_verb() {
        let (all, end, id) =
            (Arc::new(Maintenance::default()), CancellationToken::new(), SandboxId::generate());
        let export = all.begin(&id, Kind::Export, &end).unwrap();
        end.cancel();
        assert!(export.cancel().is_cancelled() && export.cancelled_for().is_none());
    }
}
