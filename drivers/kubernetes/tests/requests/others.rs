//! What others do to the pods of sandboxes.

use std::time::Duration;

use serde_json::json;
use torpor_sandbox::{ComputeDriver, DriverError, Keep, Observed, Run, SandboxId};
use torpor_test_kube::Generation;

use crate::common::{Bench, object, spec, until};

const GRACE: Duration = Duration::from_secs(5);

/// The controller leaves such a pod alone (`PodNotOwned`, from 0.5.4 on), so the sandbox is not at rest while it is there.
#[tokio::test]
async fn a_pod_that_was_taken_from_its_sandbox_is_told_and_keeps_it_from_resting() {
    for generation in [Generation::Early, Generation::Late, Generation::Stable] {
        let (bench, driver) = Bench::new(generation).await;
        let id = SandboxId::generate();
        driver.create(&id, &spec(), Run(1)).await.unwrap();
        driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
        bench.server.change("pods", &object(&id), |pod| {
            pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "x",
                "uid": "another", "controller": true}]);
        });
        let refused = driver.stop(&id, Keep::Disk, GRACE).await;
        assert!(
            matches!(&refused, Err(DriverError::Invalid(text)) if text.contains(&object(&id)) && text.contains("somebody else")),
            "{generation:?}: {refused:?}"
        );
        assert!(!matches!(driver.observe(&id).await.unwrap(), Observed::Stopped { .. }), "{generation:?}");
        bench.server.remove("pods", &object(&id));
        until("it can rest", async || driver.stop(&id, Keep::Disk, GRACE).await.is_ok()).await;
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false }, "{generation:?}");
    }
}
