//! What the driver hears of a cluster, and how often it asks, when its watches are not what they should be.

use std::time::Duration;

use serde_json::json;
use torpor_driver_kubernetes::KubernetesDriver;
use torpor_sandbox::{Change, ComputeDriver, Keep, Observed, Run, SandboxId};
use torpor_test_kube::{Behaviour, Generation, Trouble};

use crate::common::{Bench, object, spec, until};

const GRACE: Duration = Duration::from_secs(5);
const UP: Observed = Observed::Running { run: Run(1), agent: true };

async fn ready(driver: &KubernetesDriver) -> SandboxId {
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    id
}

/// Objects that were asked for by their names.
fn gets(bench: &Bench) -> u64 {
    let counts = bench.server.counts();
    ["get sandboxes", "get pods"].iter().filter_map(|verb| counts.get(*verb)).sum()
}

#[tokio::test]
async fn watches_that_end_at_once_are_asked_for_slower_each_time() {
    let behaviour = Behaviour { brief_watches: true, ..Behaviour::default() };
    let (bench, driver) = Bench::with(Generation::Stable, behaviour, |_| {}).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let watches: u64 =
        bench.server.counts().iter().filter(|(verb, _)| verb.starts_with("watch")).map(|(_, n)| n).sum();
    assert!((2..20).contains(&watches), "{watches} watches of two kinds in two seconds");
    // Nothing is heard by them, and all works.
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    assert_eq!(driver.observe(&id).await.unwrap(), UP);
}

#[tokio::test]
async fn a_cluster_that_was_restored_is_seen_as_it_is() {
    let (bench, driver) = Bench::with(Generation::Stable, Behaviour::default(), |c| {
        c.stop_margin = Duration::from_secs(5);
    })
    .await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    for at in 0..40 {
        bench.server.change("sandboxes", &object(&id), |o| {
            o["metadata"]["annotations"]["theirs"] = json!(at.to_string())
        });
    }
    until("all is told", async || driver.observe(&id).await.unwrap() == UP).await;
    bench.server.set_back(40);
    tokio::time::sleep(Duration::from_millis(50)).await;
    bench.server.delete("pods", &object(&id));
    until("its pod is replaced", async || matches!(driver.observe(&id).await.unwrap(), Observed::Ended(_)))
        .await;
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
    assert_eq!(driver.start(&id, Keep::Disk, Run(2)).await.unwrap(), Change::Done);
}

#[tokio::test]
async fn a_comparison_that_takes_its_time_keeps_nothing_from_being_heard() {
    let (bench, driver) = Bench::with(Generation::Stable, Behaviour::default(), |c| {
        c.compare_every = Duration::from_millis(400);
    })
    .await;
    let id = ready(&driver).await;
    until("watched", async || driver.watched() == Some(1)).await;
    bench.server.trouble("GET", "limit=500", 2, Trouble::AnswerLate(Duration::from_secs(60)));
    until("both kinds are compared", async || bench.server.troubles() == 0).await;
    assert_eq!(driver.observe(&id).await.unwrap(), UP);
    bench.server.evict_pod(&object(&id));
    until("its end is heard", async || matches!(driver.observe(&id).await.unwrap(), Observed::Ended(_)))
        .await;
    assert_eq!(driver.watched(), Some(1), "by the watches");
}

#[tokio::test]
async fn a_namespace_that_can_not_be_watched_makes_no_other_one_blind() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    drop(driver);
    let mut config = bench.config.clone();
    config.namespaces.insert("team".to_owned(), "default".to_owned());
    bench.server.trouble("GET", "/namespaces/default/", 10_000, Trouble::Forbidden);
    let driver = KubernetesDriver::new(config).await.unwrap();
    let id = ready(&driver).await;
    assert_eq!(driver.watched(), None, "not all of them are open");
    until("its own is heard", async || {
        bench.server.forget();
        driver.observe(&id).await.unwrap() == UP && gets(&bench) == 0
    })
    .await;
    bench.server.forget();
    for _ in 0..20 {
        assert_eq!(driver.observe(&id).await.unwrap(), UP);
    }
    assert_eq!(gets(&bench), 0);
}

#[tokio::test]
async fn a_first_look_waits_for_the_first_list_and_asks_for_nothing() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = ready(&driver).await;
    drop(driver);
    bench.server.trouble("GET", "limit=500", 2, Trouble::AnswerLate(Duration::from_secs(1)));
    bench.server.forget();
    let driver = bench.driver().await;
    assert_eq!(driver.observe(&id).await.unwrap(), UP);
    assert_eq!(gets(&bench), 0);
}
