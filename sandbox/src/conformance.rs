//! What every driver must do, as a list of cases that the `conformance!` macro turns into tests.

use std::{future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::StreamExt as _;

use crate::{
    driver::{Change, ComputeDriver, DriverError, Observed},
    id::{Run, SandboxId},
    lifecycle::Keep,
    spec::SandboxSpec,
};

/// What a driver's tests provide, so that the cases can make things happen that no verb does.
#[async_trait]
pub trait Harness: Send + Sync {
    /// The driver as the gateway holds it now.
    fn driver(&self) -> Arc<dyn ComputeDriver>;
    /// A small sandbox.
    fn spec(&self) -> SandboxSpec;
    /// Writes the loan that `start` needs.
    async fn lend(&self, id: &SandboxId, run: Run);
    /// Takes it back.
    async fn take_back(&self, id: &SandboxId);
    /// The gateway's process ends and another begins: a new driver on the same host state.
    async fn restart(&self);
    /// The compute is killed from outside.
    async fn kill(&self, id: &SandboxId);
    /// The disk is removed from outside.
    async fn lose_storage(&self, id: &SandboxId);
    /// The longest a verb may take.
    fn patience(&self) -> Duration {
        Duration::from_secs(90)
    }
}

const GRACE: Duration = Duration::from_secs(10);

struct Case<'a> {
    harness: &'a dyn Harness,
    id: SandboxId,
}

impl Case<'_> {
    async fn within<T>(&self, what: &str, verb: impl Future<Output = T>) -> T {
        match tokio::time::timeout(self.harness.patience(), verb).await {
            Ok(done) => done,
            Err(_) => panic!("{what} of {} did not end within {:?}", self.id, self.harness.patience()),
        }
    }

    async fn observe(&self) -> Observed {
        let seen = self.within("observe", self.harness.driver().observe(&self.id)).await;
        seen.unwrap_or_else(|e| panic!("observe failed: {e}"))
    }

    async fn create(&self) -> Change {
        let made = self.harness.driver();
        let made = self.within("create", made.create(&self.id, &self.harness.spec(), Run(1))).await;
        made.unwrap_or_else(|e| panic!("create failed: {e}"))
    }

    async fn start(&self, run: u64) -> Result<Change, DriverError> {
        self.harness.lend(&self.id, Run(run)).await;
        self.within("start", self.harness.driver().start(&self.id, Keep::Disk, Run(run))).await
    }

    async fn started(&self, run: u64) {
        self.start(run).await.unwrap_or_else(|e| panic!("start of run {run} failed: {e}"));
        assert_eq!(self.observe().await, Observed::Running { run: Run(run), agent: true });
    }

    async fn stop(&self) -> crate::driver::Stopped {
        let stopped = self.within("stop", self.harness.driver().stop(&self.id, Keep::Disk, GRACE)).await;
        self.harness.take_back(&self.id).await;
        stopped.unwrap_or_else(|e| panic!("stop failed: {e}"))
    }

    async fn delete(&self) -> Change {
        let gone = self.within("delete", self.harness.driver().delete(&self.id)).await;
        self.harness.take_back(&self.id).await;
        gone.unwrap_or_else(|e| panic!("delete failed: {e}"))
    }

    async fn listed(&self) -> bool {
        let list = self.harness.driver().list().await;
        list.unwrap_or_else(|e| panic!("list failed: {e}")).contains(&self.id)
    }

    /// Waits until the driver sees that the compute has ended.
    async fn ended(&self) -> Observed {
        for _ in 0..200 {
            match self.observe().await {
                Observed::Running { .. } => tokio::time::sleep(Duration::from_millis(50)).await,
                other => return other,
            }
        }
        panic!("the end of {} was never seen", self.id);
    }
}

macro_rules! cases {
    ($($(#[doc = $doc:literal])* $name:ident |$case:ident| $body:block)*) => {
        $($(#[doc = $doc])*
        pub async fn $name(harness: &dyn Harness) {
            let $case = Case { harness, id: SandboxId::generate() };
            $body
            $case.delete().await;
            assert_eq!($case.observe().await, Observed::Missing, "something is left after the delete");
        })*

        /// One test per case. `$harness` is an expression that makes a [`Harness`](crate::conformance::Harness) or, as
        /// `None`, says that this machine can't run the driver (having said why).
        #[macro_export]
        macro_rules! conformance {
            ($module:ident, $harness:expr) => {
                mod $module {
                    use super::*;
                    $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                    async fn $name() {
                        if let Some(harness) = $harness.await {
                            $crate::conformance::$name(&harness).await;
                        }
                    })*
                }
            };
        }
    };
}

cases! {
    /// Nothing is known of an id that was never used.
    a_new_id_is_missing |case| {
        assert_eq!(case.observe().await, Observed::Missing);
        assert!(!case.listed().await);
    }

    /// Storage, and nothing runs.
    create_makes_storage_and_runs_nothing |case| {
        assert_eq!(case.create().await, Change::Done);
        assert_eq!(case.observe().await, Observed::Stopped { memory: false });
        assert!(case.listed().await);
    }

    /// The second create keeps the first one's storage.
    a_repeated_create_changes_nothing |case| {
        case.create().await;
        assert_eq!(case.create().await, Change::Already);
        assert_eq!(case.observe().await, Observed::Stopped { memory: false });
    }

    /// Start returns when the agent has answered; a repeat succeeds; stop is confirmed, and repeated.
    start_and_stop_are_idempotent |case| {
        case.create().await;
        case.started(1).await;
        assert_eq!(case.start(1).await.ok(), Some(Change::Already));
        let stopped = case.stop().await;
        assert!(stopped.flushed, "a healthy guest flushes its disk: {:?}", stopped.detail);
        assert_eq!(case.observe().await, Observed::Stopped { memory: false });
        case.stop().await;
        assert_eq!(case.observe().await, Observed::Stopped { memory: false });
        assert!(case.harness.driver().facts(&case.id).await.host.is_none(), "something of the host is still lent");
    }

    /// Stop of something that never ran is no error.
    stop_before_the_first_start_succeeds |case| {
        case.create().await;
        case.stop().await;
        assert_eq!(case.observe().await, Observed::Stopped { memory: false });
    }

    /// The next life has its own number.
    a_second_run_is_told_from_the_first |case| {
        case.create().await;
        case.started(1).await;
        case.stop().await;
        case.started(2).await;
        case.stop().await;
    }

    /// The gateway drops a start when the user turns round.
    a_start_that_is_dropped_can_be_stopped |case| {
        case.create().await;
        case.harness.lend(&case.id, Run(1)).await;
        let driver = case.harness.driver();
        for millis in [0, 5, 50, 300] {
            let start = driver.start(&case.id, Keep::Disk, Run(1));
            let _ = tokio::time::timeout(Duration::from_millis(millis), start).await;
            case.stop().await;
            assert_eq!(case.observe().await, Observed::Stopped { memory: false });
            case.harness.lend(&case.id, Run(1)).await;
        }
    }

    /// Killed compute is seen, hinted at, cleaned up by stop, and can be started again.
    compute_that_is_killed_is_seen_and_can_be_started_again |case| {
        case.create().await;
        case.started(1).await;
        let mut hints = case.harness.driver().hints();
        case.harness.kill(&case.id).await;
        let id = case.id.clone();
        let hinted = async { while let Some(hint) = hints.next().await { if hint == id { return; } } };
        case.within("hint", hinted).await;
        assert!(!matches!(case.ended().await, Observed::Running { .. } | Observed::Missing));
        assert!(!case.stop().await.flushed, "nobody flushed a disk");
        assert_eq!(case.observe().await, Observed::Stopped { memory: false });
        case.started(2).await;
        case.stop().await;
    }

    /// Compute outlives the gateway.
    a_new_driver_finds_what_runs |case| {
        case.create().await;
        case.started(1).await;
        let before = case.harness.driver().facts(&case.id).await;
        case.harness.restart().await;
        for _ in 0..100 {
            if case.observe().await == (Observed::Running { run: Run(1), agent: true }) { break; }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        case.started(1).await;
        let after = case.harness.driver().facts(&case.id).await;
        assert_eq!(before.boot_id, after.boot_id, "it was booted anew");
        assert_eq!(before.host.map(|h| h.pid), after.host.map(|h| h.pid));
        assert!(case.stop().await.flushed);
    }

    /// A lost disk is an error, never a new disk.
    a_lost_disk_is_never_made_anew |case| {
        case.create().await;
        case.harness.lose_storage(&case.id).await;
        let refused = case.start(1).await;
        assert!(matches!(refused, Err(DriverError::DataMissing(_) | DriverError::Missing)), "{refused:?}");
        case.stop().await;
        assert!(!matches!(case.observe().await, Observed::Running { .. }));
    }

    /// What a driver can't do it refuses, and nothing changes.
    memory_is_kept_or_refused |case| {
        case.create().await;
        case.started(1).await;
        let driver = case.harness.driver();
        let kept = case.within("stop", driver.stop(&case.id, Keep::Memory, GRACE)).await;
        if driver.capabilities().keeps_memory {
            case.harness.take_back(&case.id).await;
            assert_eq!(kept.map(|s| s.kept).ok(), Some(Keep::Memory));
            assert_eq!(case.observe().await, Observed::Stopped { memory: true });
        } else {
            assert!(matches!(kept, Err(DriverError::Unsupported(_))), "{kept:?}");
            assert_eq!(case.observe().await, Observed::Running { run: Run(1), agent: true });
            case.stop().await;
        }
    }

    /// Delete works whatever is there.
    delete_works_in_every_state |case| {
        assert_eq!(case.delete().await, Change::Already);
        case.create().await;
        assert_eq!(case.delete().await, Change::Done);
        case.create().await;
        case.started(1).await;
        assert_eq!(case.delete().await, Change::Done);
        assert!(!case.listed().await);
        case.create().await;
        case.started(2).await;
        case.harness.kill(&case.id).await;
        assert_eq!(case.delete().await, Change::Done);
        case.create().await;
        case.harness.lose_storage(&case.id).await;
        case.delete().await;
        assert_eq!(case.observe().await, Observed::Missing);
    }
}
