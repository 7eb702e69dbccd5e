//! Suspends with memory, on real engines with a real CRIU: processes go on where they were, in the same container.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{sync::Arc, time::Duration};

use common::{Bench, Running, exec, keeps_memory, with_criu};
use torpor_driver_container::{ContainerDriver, Engine};
use torpor_sandbox::{ComputeDriver, DriverError, Keep, Observed, Run, SandboxId, Stopped};

const GRACE: Duration = Duration::from_secs(10);
/// Counts in a file system that lives in memory only.
const COUNTER: &str = "i=0; while :; do i=$((i+1)); echo $i $$ > /dev/shm/count; sleep 0.05; done";

struct Case<'a> {
    running: &'a Running,
    bench: Bench,
    driver: Arc<ContainerDriver>,
    id: SandboxId,
}

impl<'a> Case<'a> {
    async fn new(running: &'a Running) -> Self {
        let (bench, driver) = Bench::new(running).await;
        let (id, mut spec) = (SandboxId::generate(), bench.spec());
        spec.command = ["/bin/sh", "-c", COUNTER].map(str::to_owned).to_vec();
        driver.create(&id, &spec, Run(1)).await.unwrap();
        driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
        Self { running, bench, driver, id }
    }

    async fn sh(&self, command: &str) -> String {
        let (code, text) = exec(self.driver.as_ref(), &self.id, command).await;
        assert_eq!(code, 0, "{command}: {text}");
        text.trim().to_owned()
    }

    /// The count, and the process that counts.
    async fn count(&self) -> (u64, u64) {
        for _ in 0..100 {
            let text = self.sh("cat /dev/shm/count 2>/dev/null; true").await;
            if let Some((count, pid)) = text.split_once(' ') {
                return (count.parse().unwrap(), pid.parse().unwrap());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("nothing counts");
    }

    async fn sleep(&self) -> Stopped {
        let stopped = self.driver.stop(&self.id, Keep::Memory, GRACE).await.unwrap();
        assert_eq!(self.running.held(self.id.as_str()), Vec::<String>::new());
        assert!(self.bench.leftovers(&self.id).is_empty());
        stopped
    }

    async fn asleep(&self) {
        let stopped = self.sleep().await;
        assert_eq!((stopped.kept, stopped.flushed), (Keep::Memory, true), "{:?}", stopped.detail);
        assert_eq!(self.observe().await, Observed::Stopped { memory: true });
    }

    async fn observe(&self) -> Observed {
        self.driver.observe(&self.id).await.unwrap()
    }

    async fn wake(&self, run: u64) {
        self.driver.start(&self.id, Keep::Memory, Run(run)).await.unwrap();
        assert_eq!(self.observe().await, Observed::Running { run: Run(run), agent: true });
    }

    fn container(&self) -> serde_json::Value {
        self.running.inspect(self.id.as_str())["Id"].clone()
    }
}

/// One engine for all, one after the other: each start of one costs seconds.
async fn all(test: &str, engine: Engine) {
    let Some(running) = with_criu(test, engine) else { return };
    processes_go_on_where_they_were(&running).await;
    what_can_not_be_written_out_is_suspended_with_its_disk(&running).await;
    memory_that_is_damaged_or_used_up_is_never_gone_on_from(&running).await;
    memory_outlives_the_gateway_and_the_engine(&running).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_of_docker_sleep_with_their_memory() {
    all("containers_of_docker_sleep_with_their_memory", Engine::Docker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_of_podman_sleep_with_their_memory() {
    all("containers_of_podman_sleep_with_their_memory", Engine::Podman).await;
}

async fn processes_go_on_where_they_were(running: &Running) {
    let case = Case::new(running).await;
    let container = case.container();
    case.sh("echo kept > /root/file; echo mine > /dev/shm/note; mkdir -p /tmp; echo t > /tmp/t").await;
    let facts = case.driver.facts(&case.id).await;
    let (boot, first_ip) = (facts.boot_id, facts.host.unwrap().ip);
    let (mut count, pid) = case.count().await;
    for run in 2..=3 {
        case.asleep().await;
        // Twice is once.
        case.asleep().await;
        // Somebody else takes its address.
        let other = SandboxId::generate();
        case.driver.create(&other, &case.bench.spec(), Run(1)).await.unwrap();
        case.driver.start(&other, Keep::Disk, Run(1)).await.unwrap();
        let taken = case.driver.facts(&other).await.host.unwrap().ip;
        case.wake(run).await;
        assert_eq!(case.container(), container);
        let (now, same) = case.count().await;
        assert!(now >= count && now < count + 400, "{now} after {count}");
        assert_eq!(same, pid);
        count = now;
        assert_eq!(case.sh("cat /root/file /dev/shm/note /tmp/t").await, "kept\nmine\nt");
        let facts = case.driver.facts(&case.id).await;
        let ip = facts.host.unwrap().ip;
        assert!(facts.boot_id == boot && ip != taken && !ip.is_empty(), "{ip} {first_ip} {taken}");
        assert!(case.sh("ip addr").await.contains(&ip));
        case.driver.delete(&other).await.unwrap();
    }
    // It counts on, and a suspend with the disk only ends that.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(case.count().await.0 > count);
    let stopped = case.driver.stop(&case.id, Keep::Disk, GRACE).await.unwrap();
    assert!(stopped.flushed && stopped.kept == Keep::Disk, "{stopped:?}");
    assert_eq!(case.observe().await, Observed::Stopped { memory: false });
    case.driver.delete(&case.id).await.unwrap();
}

async fn what_can_not_be_written_out_is_suspended_with_its_disk(running: &Running) {
    let case = Case::new(running).await;
    // CRIU has no leave to write out an established connection.
    let connected = "seen() { for i in $(busybox seq 400); do
            grep -qs \":1B58 .* $1 \" /proc/net/tcp /proc/net/tcp6 && return; busybox sleep 0.05; done; exit 1; }
        busybox nc -l -p 7000 -e busybox sleep 1000 </dev/null >/dev/null 2>&1 &
        seen 0A; busybox sleep 1000 | busybox nc 127.0.0.1 7000 >/dev/null 2>&1 &
        seen 01; echo kept > /root/file";
    case.sh(connected).await;
    let stopped = case.sleep().await;
    let detail = stopped.detail.unwrap_or_default();
    assert!(stopped.kept == Keep::Disk && stopped.flushed, "{detail}");
    assert!(detail.contains("memory could not be kept"), "{detail}");
    assert_eq!(case.observe().await, Observed::Stopped { memory: false });
    assert!(running.checkpoint_files(case.container().as_str().unwrap()).is_empty());
    case.driver.start(&case.id, Keep::Disk, Run(2)).await.unwrap();
    assert_eq!(case.sh("cat /root/file").await, "kept");
    case.driver.delete(&case.id).await.unwrap();
}

async fn memory_that_is_damaged_or_used_up_is_never_gone_on_from(running: &Running) {
    let case = Case::new(running).await;
    case.sh("echo kept > /root/file").await;
    case.asleep().await;
    for image in running.checkpoint_files(case.container().as_str().unwrap()) {
        if image.file_name().is_some_and(|name| name.to_string_lossy().starts_with("core-")) {
            std::fs::write(image, "damaged").unwrap();
        }
    }
    let refused = case.driver.start(&case.id, Keep::Memory, Run(2)).await.unwrap_err();
    assert!(
        matches!(&refused, DriverError::Failed { step, .. } if step == "restore") && !refused.is_transient(),
        "{refused:?}"
    );
    // Its processes may have run: nobody tries again, and the disk is there.
    assert_eq!(case.observe().await, Observed::Stopped { memory: false });
    assert!(case.driver.start(&case.id, Keep::Memory, Run(3)).await.is_err());
    case.driver.start(&case.id, Keep::Disk, Run(3)).await.unwrap();
    assert_eq!(case.sh("cat /root/file").await, "kept");
    // A boot from the disk gives memory up that is there.
    case.asleep().await;
    case.driver.start(&case.id, Keep::Disk, Run(4)).await.unwrap();
    case.driver.stop(&case.id, Keep::Disk, GRACE).await.unwrap();
    assert_eq!(case.observe().await, Observed::Stopped { memory: false });
    case.driver.delete(&case.id).await.unwrap();
}

async fn memory_outlives_the_gateway_and_the_engine(running: &Running) {
    let mut case = Case::new(running).await;
    let (count, pid) = case.count().await;
    case.asleep().await;
    case.driver = case.bench.driver();
    running.tell("kill");
    assert!(matches!(case.observe().await, Observed::Unknown(_)));
    let refused = case.driver.start(&case.id, Keep::Memory, Run(2)).await.unwrap_err();
    assert!(refused.waits_for_host(), "{refused}");
    running.tell("start");
    keeps_memory(&case.driver).await;
    assert_eq!(case.observe().await, Observed::Stopped { memory: true });
    case.wake(2).await;
    let (now, same) = case.count().await;
    assert!(now >= count && same == pid, "{now} {count}");
    case.asleep().await;
    case.driver.delete(&case.id).await.unwrap();
    assert_eq!(case.observe().await, Observed::Missing);
}
