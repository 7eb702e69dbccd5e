//! What a running VM has of the network: its policy, as it changes, and what a sweep makes of the rest.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::{fs, time::Duration};

use common::{bench, block_on, exec, signal};
use futures::StreamExt as _;
use serde_json::Value;
use torpor_driver_vm::{Standing, VmDriver};
use torpor_netpool::{
    Grants, Slot,
    linux::{CgroupLimits, CgroupParent, CgroupProbe, Firewall, TapOptions, attach},
};
use torpor_sandbox::{Change, ComputeDriver as _, Egress, Keep, Run, SandboxId, SandboxSpec};

/// What the firewall lets the only guest send to.
fn grants(bench: &common::Bench) -> Grants {
    let all = Firewall::new(&bench.config.pool).list().unwrap();
    assert_eq!(all.len(), 1, "{all:?}");
    all[0].grants.clone()
}

fn policy(egress: &Egress) -> Grants {
    torpor_driver_vm::egress::to_pool(egress).unwrap().grants()
}

async fn started(driver: &VmDriver, bench: &common::Bench, spec: &SandboxSpec) -> SandboxId {
    let id = SandboxId::generate();
    driver.create(&id, spec, Run(1)).await.unwrap();
    bench.loans.lend(&id, Run(1));
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    id
}

#[test]
fn a_policy_is_the_runs_from_its_start_and_a_new_one_is_known_to_the_next_gateway() {
    let Some(bench) = bench("a_policy_is_the_runs_from_its_start_and_a_new_one_is_known_to_the_next_gateway")
    else {
        return;
    };
    block_on(async {
        let driver = bench.driver();
        let wrong = Egress::Allow { rules: vec!["nowhere".into()], names: false };
        let refused = driver.check(&SandboxSpec { egress: Some(wrong), ..bench.spec() }).unwrap_err();
        assert!(refused.to_string().contains("\"nowhere\""), "{refused}");

        let none = SandboxSpec { egress: Some(Egress::None), ..bench.spec() };
        let id = started(&driver, &bench, &none).await;
        assert_eq!(grants(&bench), Grants::default());
        assert_eq!(driver.adjust(&id, &none).await.unwrap(), Change::Already);
        let allow = Egress::Allow { rules: vec!["192.0.2.0/24:443".into()], names: true };
        let listed = SandboxSpec { egress: Some(allow.clone()), ..bench.spec() };
        assert_eq!(driver.adjust(&id, &listed).await.unwrap(), Change::Done);
        assert_eq!(grants(&bench), policy(&allow));
        let stored =
            |file: &str| -> Value { serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap() };
        let spec_file = bench.state(&id).join("spec.json").display().to_string();
        assert_eq!(stored(&spec_file)["egress"]["allow"]["rules"][0], "192.0.2.0/24:443");

        // The next gateway knows it; one that finds a record without a policy takes the pool's.
        drop(driver);
        let driver = bench.driver();
        driver.sweep(&|_| Standing::Runs).await.unwrap();
        assert_eq!(driver.adjust(&id, &listed).await.unwrap(), Change::Already);
        assert_eq!(grants(&bench), policy(&allow));
        drop(driver);
        let record = bench.run_dir(&id).join("vm.json");
        let mut old: Value = serde_json::from_str(&fs::read_to_string(&record).unwrap()).unwrap();
        assert!(old["net"].as_object_mut().unwrap().remove("egress").is_some());
        fs::write(&record, old.to_string()).unwrap();
        let driver = bench.driver();
        driver.sweep(&|_| Standing::Runs).await.unwrap();
        assert_eq!(grants(&bench), policy(&Egress::Public), "the default, not everything");
        assert_eq!(driver.adjust(&id, &listed).await.unwrap(), Change::Done);
        assert_eq!(grants(&bench), policy(&allow));
        assert_eq!(exec(&driver, &id, "true").await.0, 0, "it has run all the time");

        // At rest only what is stored changes.
        driver.stop(&id, Keep::Disk, Duration::from_secs(60)).await.unwrap();
        assert_eq!(driver.adjust(&id, &none).await.unwrap(), Change::Done);
        assert_eq!(stored(&spec_file)["egress"], "none");
        assert_eq!(driver.adjust(&id, &none).await.unwrap(), Change::Already);
        bench.loans.lend(&id, Run(2));
        driver.start(&id, Keep::Disk, Run(2)).await.unwrap();
        assert_eq!(grants(&bench), Grants::default());
        driver.delete(&id).await.unwrap();
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
    });
}

#[test]
fn a_sweep_repairs_what_is_too_much_and_what_is_missing_while_a_vm_runs() {
    let Some(bench) = bench("a_sweep_repairs_what_is_too_much_and_what_is_missing_while_a_vm_runs") else {
        return;
    };
    block_on(async {
        let driver = bench.driver();
        let mut hints = driver.hints();
        let id = started(&driver, &bench, &bench.spec()).await;
        assert_eq!(driver.sweep_kernel().await.unwrap(), Vec::<String>::new(), "nothing to do");

        let pool = &bench.config.pool;
        let firewall = Firewall::new(pool);
        let stray = pool.guest_net("sb-nobody", Slot(77)).unwrap();
        let tap = attach(&firewall, &stray, &TapOptions::default()).unwrap();
        let own = firewall.list().unwrap().into_iter().find(|guest| guest.tap != stray.tap).unwrap();
        firewall.remove(&own).unwrap();
        let parent = match CgroupParent::probe(pool) {
            CgroupProbe::Ready(parent) => Some(parent),
            CgroupProbe::Unavailable(_) => None,
        };
        let nobody = SandboxId::generate();
        if let Some(parent) = &parent {
            parent.create(nobody.as_str(), &CgroupLimits::default()).unwrap();
        }
        let lines = driver.sweep_kernel().await.unwrap().join("\n");
        let mut expected =
            vec![format!("delete tap {}", stray.tap), format!("remove firewall element {}", stray.tap)];
        expected.push(format!("add firewall element {}", own.tap));
        expected.extend(parent.map(|_| format!("remove cgroup {nobody}")));
        for words in expected {
            assert!(lines.contains(&words), "{words} is not in:\n{lines}");
        }
        assert!(!lines.contains("failed"), "{lines}");
        assert_eq!(driver.sweep_kernel().await.unwrap(), Vec::<String>::new(), "all is mended");
        drop(tap);
        assert_eq!(firewall.list().unwrap(), [own]);
        assert_eq!(exec(&driver, &id, "true").await.0, 0);

        // A loan without a process is told once it has stayed so, and looked at.
        let pid = driver.facts(&id).await.host.unwrap().pid;
        signal(pid, "-9");
        assert_eq!(hints.next().await, Some(id.clone()));
        let mut lines = String::new();
        for _ in 0..100 {
            lines = driver.sweep_kernel().await.unwrap().join("\n");
            if !lines.is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(lines.contains(id.as_str()) && lines.contains("no VM process"), "{lines}");
        driver.delete(&id).await.unwrap();
        bench.loans.release(&id);
        assert_eq!(driver.sweep_kernel().await.unwrap(), Vec::<String>::new());
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
    });
}
