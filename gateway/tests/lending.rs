//! What the host has to lend: who has it is named, who waits goes on, and the counters are exact.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::{World, create, error_info, phase, target};
use tonic::Code;
use torpor_proto::v1::{self, Phase};
use torpor_sandbox::sim::Script;

async fn until(world: &World, name: &str, wanted: Phase) {
    let mut client = world.sandboxes().await;
    for _ in 0..1000 {
        let now = client.get(v1::GetSandboxRequest { sandbox: name.into() }).await.unwrap().into_inner();
        if phase(&now) == wanted {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{name} never came to {wanted:?}");
}

async fn suspend(world: &World, name: &str) {
    let request = v1::SuspendRequest { target: target(name), keep: 0 };
    world.sandboxes().await.suspend(request).await.unwrap();
}

async fn resource(world: &World, name: &str) -> (u64, u64, u64, u64) {
    let all = world.info().await.capacity.unwrap().resources;
    let found = all.into_iter().find(|resource| resource.name == name).unwrap();
    (found.capacity, found.used, found.free, found.quarantined)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_without_an_address_names_who_has_them_and_the_waiting_sandbox_goes_on_by_itself() {
    let world = World::with(Script::default(), |config| {
        config.network.range = "10.99.0.0/29".parse().unwrap();
        config.network.quarantine_seconds = 3600;
    })
    .await;
    let mut client = world.sandboxes().await;
    assert_eq!(resource(&world, "network slots").await, (2, 0, 2, 0));
    for name in ["first", "second"] {
        client.create(create(name)).await.unwrap();
    }
    assert_eq!(resource(&world, "network slots").await, (2, 2, 0, 0));
    let error = client.create(create("third")).await.unwrap_err();
    assert_eq!((error.code(), error_info(&error).0.as_str()), (Code::ResourceExhausted, "EXHAUSTED"));
    for words in ["network slots", "2 of 2", "first, second"] {
        assert!(error.message().contains(words), "{error}");
    }
    suspend(&world, "first").await;
    until(&world, "third", Phase::Ready).await;

    let resume = v1::ResumeRequest { target: target("first"), ..Default::default() };
    let error = client.resume(resume).await.unwrap_err();
    assert!(error.message().contains("second, third"), "{error}");
    until(&world, "first", Phase::Resuming).await;
    let request = v1::DeleteSandboxRequest { target: target("second"), allow_missing: false };
    client.delete(request).await.unwrap();
    until(&world, "first", Phase::Ready).await;
    suspend(&world, "third").await;
    // What was given back rests, and is lent all the same when nothing else is free.
    assert_eq!(resource(&world, "network slots").await, (2, 1, 0, 1));
    client.create(create("fourth")).await.unwrap();
    assert_eq!(resource(&world, "network slots").await, (2, 2, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_and_cpus_that_are_lent_are_told_with_their_sizes_and_come_back_with_a_suspend() {
    let world = World::with(Script::default(), |config| {
        config.limits.memory_bytes = 1 << 30;
        config.limits.cpu_percent = 1600;
        config.defaults.memory_bytes = 768 << 20;
    })
    .await;
    let mut client = world.sandboxes().await;
    client.create(create("large")).await.unwrap();
    assert_eq!(resource(&world, "memory bytes").await, (1 << 30, 768 << 20, 256 << 20, 0));
    assert_eq!(resource(&world, "cpus").await.1, 1);
    let error = client.create(create("late")).await.unwrap_err();
    for words in ["no memory left", "wanted 768 MiB", "768 MiB of 1024 MiB", "large"] {
        assert!(error.message().contains(words), "{error}");
    }
    suspend(&world, "large").await;
    until(&world, "late", Phase::Ready).await;
    assert_eq!(resource(&world, "memory bytes").await, (1 << 30, 768 << 20, 256 << 20, 0));
}
