//! Answers that come after the watch has told of something newer.

use std::time::Duration;

use serde_json::json;
use torpor_sandbox::{ComputeDriver, Keep, Observed, Run, SandboxId};
use torpor_test_kube::{Generation, Trouble};

use crate::common::{Bench, object, spec, until};

const GRACE: Duration = Duration::from_secs(5);

/// A pod that was there when it was asked for and is gone when the answer comes stays gone: nobody would ever take it out
/// again, since the watch has said all that it has to say of it.
#[tokio::test]
async fn an_answer_older_than_what_the_watch_has_said_brings_nothing_back() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    until("watched", async || driver.watched() == Some(1)).await;
    bench.server.behave(|b| b.linger = Duration::from_secs(3));
    bench.server.change("sandboxes", &object(&id), |o| o["spec"]["operatingMode"] = json!("Suspended"));
    until("on its way out", async || {
        bench
            .server
            .object("pods", &object(&id))
            .is_some_and(|pod| pod["metadata"]["deletionTimestamp"].is_string())
    })
    .await;
    let pod = format!("/pods/{}", object(&id));
    bench.server.forget();
    bench.server.trouble("GET", &format!("{pod}?"), 1, Trouble::AnswerLate(Duration::from_secs(5)));
    driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
    assert_eq!(bench.server.troubles(), 0, "nobody had a late answer");
    let asked = bench.server.asked().into_iter();
    let codes: Vec<u16> =
        asked.filter(|one| one.method == "GET" && one.path.ends_with(&pod)).map(|one| one.code).collect();
    assert_eq!(
        (codes.first(), codes.last()),
        (Some(&200), Some(&404)),
        "there when it was asked for, then gone"
    );
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
}

/// An object whose deletion the watch has missed is let go of when the server says that there is none.
#[tokio::test]
async fn what_the_server_has_not_is_not_kept() {
    let (bench, driver) = Bench::new(Generation::Stable).await;
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    until("watched", async || driver.watched() == Some(1)).await;
    bench.server.lose("sandboxes", &object(&id));
    assert_eq!(driver.watched(), Some(1), "the watch has heard nothing");
    // What the controller has written of it before may still be on its way to the watch, and is newer than what was asked for.
    until("let go of", async || {
        assert!(driver.start(&id, Keep::Disk, Run(1)).await.is_err());
        driver.watched() == Some(0)
    })
    .await;
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false }, "there is storage");
}
