//! Operations on disks and the verbs: who waits for whom, who is ended, who is refused.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::time::Duration;

use common::{World, create, error_info, no_wait, phase, slow, target};
use futures::StreamExt as _;
use tonic::{Code, Status, Streaming, transport::Channel};
use torpor_proto::v1::{self, DiskFormat, Phase, export_disk_chunk::Kind, sandboxes_client::SandboxesClient};
use torpor_sandbox::{
    DriverError, Exit,
    sim::{Script, Verb},
};

type Client = SandboxesClient<Channel>;

const GIB: u64 = 1 << 30;

async fn export(client: &mut Client, name: &str) -> Result<Streaming<v1::ExportDiskChunk>, Status> {
    let request = v1::ExportDiskRequest { sandbox: name.into(), format: DiskFormat::Raw.into() };
    client.export_disk(request).await.map(tonic::Response::into_inner)
}

async fn compact(
    client: &mut Client,
    name: &str,
    rewrite: bool,
) -> Result<Streaming<v1::CompactDiskProgress>, Status> {
    let request = v1::CompactDiskRequest { target: target(name), rewrite };
    client.compact_disk(request).await.map(tonic::Response::into_inner)
}

async fn grow(
    client: &mut Client,
    target: Option<v1::Target>,
    size_bytes: u64,
) -> Result<v1::Sandbox, Status> {
    let request = v1::GrowDiskRequest { target, size_bytes };
    client.grow_disk(request).await.map(tonic::Response::into_inner)
}

async fn get(client: &mut Client, name: &str) -> v1::Sandbox {
    client.get(v1::GetSandboxRequest { sandbox: name.into() }).await.unwrap().into_inner()
}

async fn disk(client: &mut Client, name: &str, check: bool) -> Result<v1::DiskReport, Status> {
    let request = v1::GetDiskRequest { sandbox: name.into(), check };
    client.get_disk(request).await.map(tonic::Response::into_inner)
}

async fn suspend(client: &mut Client, name: &str) {
    client.suspend(v1::SuspendRequest { target: target(name), keep: 0 }).await.unwrap();
}

fn resume(name: &str) -> v1::ResumeRequest {
    v1::ResumeRequest { target: no_wait(name), ..Default::default() }
}

async fn until(client: &mut Client, name: &str, what: impl Fn(&v1::Sandbox) -> bool) -> v1::Sandbox {
    for _ in 0..1000 {
        let now = get(client, name).await;
        if what(&now) {
            return now;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{name} is {:?}", get(client, name).await);
}

fn step(sandbox: &v1::Sandbox) -> &str {
    &sandbox.status.as_ref().unwrap().step
}

fn disk_bytes(sandbox: &v1::Sandbox) -> u64 {
    sandbox.spec.as_ref().unwrap().resources.unwrap().disk_bytes.unwrap()
}

/// A suspended sandbox "web".
async fn asleep() -> (World, Client) {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    client.create(create("web")).await.unwrap();
    suspend(&mut client, "web").await;
    (world, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_grows_in_the_record_and_for_those_who_watch() {
    let (world, mut client) = asleep().await;
    let before = get(&mut client, "web").await;
    let request = v1::WatchSandboxesRequest { sandbox: "web".into(), ..Default::default() };
    let mut events = client.watch(request).await.unwrap().into_inner();
    let size = disk_bytes(&before) + 5 * GIB;
    let grown = grow(&mut client, target("web"), size).await.unwrap();
    assert_eq!((disk_bytes(&grown), phase(&grown)), (size, Phase::Suspended));
    assert!(grown.version > before.version);
    assert_eq!(grown.status.unwrap().disk.unwrap().virtual_bytes, size);
    let seen = async {
        while let Some(event) = events.next().await {
            let event = event.unwrap();
            if event.sandbox.is_some_and(|s| disk_bytes(&s) == size) {
                return;
            }
        }
        panic!("the watch ended");
    };
    tokio::time::timeout(Duration::from_secs(20), seen).await.expect("no watcher heard of it");

    // The same size again changes nothing; a smaller one is refused with both.
    let again = grow(&mut client, target("web"), size).await.unwrap();
    assert_eq!(again.version, grown.version);
    let smaller = grow(&mut client, target("web"), GIB).await.unwrap_err();
    assert_eq!(smaller.code(), Code::InvalidArgument);
    assert!(smaller.message().contains("1 GiB") && smaller.message().contains("15 GiB"), "{smaller}");

    let mut world = world;
    world.restart().await;
    assert_eq!(disk_bytes(&get(&mut world.sandboxes().await, "web").await), size);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_version_is_aborted_and_a_retry_gets_the_first_result() {
    let (world, mut client) = asleep().await;
    let version = get(&mut client, "web").await.version;
    let at = |version: u64, id: &str| {
        Some(v1::Target { expected_version: version, request_id: id.into(), ..target("web").unwrap() })
    };
    let stale = grow(&mut client, at(version - 1, ""), 50 * GIB).await.unwrap_err();
    assert_eq!((stale.code(), error_info(&stale).0.as_str()), (Code::Aborted, "STALE_VERSION"));
    assert_eq!(world.sim.calls(Verb::Disk), 0);
    let grown = grow(&mut client, at(version, "r1"), 50 * GIB).await.unwrap();
    let retried = grow(&mut client, at(version, "r1"), 50 * GIB).await.unwrap();
    assert_eq!((retried.version, world.sim.calls(Verb::Disk)), (grown.version, 1));
    let other = grow(&mut client, at(0, "r1"), 60 * GIB).await.unwrap_err();
    assert_eq!(error_info(&other).0, "REQUEST_ID_REUSED");
    let compaction = v1::CompactDiskRequest { target: at(version, ""), rewrite: false };
    assert_eq!(client.compact_disk(compaction).await.unwrap_err().code(), Code::Aborted);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_phase_allows_an_operation_or_names_the_command_that_makes_it_possible() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let made = client.create(create("web")).await.unwrap().into_inner();
    let id = made.id.parse().unwrap();
    let refused = |error: Status| {
        let (reason, next) = error_info(&error);
        (error.code(), reason, next)
    };
    let wanted = |next: &str| (Code::FailedPrecondition, "NOT_AT_REST".to_owned(), next.to_owned());

    // Ready: nothing but a look.
    assert_eq!(disk(&mut client, "web", false).await.unwrap().name, "web");
    let suspend_it = wanted("torpor suspend web");
    assert_eq!(refused(disk(&mut client, "web", true).await.unwrap_err()), suspend_it);
    assert_eq!(refused(grow(&mut client, target("web"), 90 * GIB).await.unwrap_err()), suspend_it);
    assert_eq!(refused(compact(&mut client, "web", false).await.unwrap_err()), suspend_it);
    assert_eq!(refused(export(&mut client, "web").await.unwrap_err()), suspend_it);

    // On the way.
    world.sim.set_script(slow_script(Duration::from_secs(60)));
    client.suspend(v1::SuspendRequest { target: no_wait("web"), keep: 0 }).await.unwrap();
    let wait = wanted("torpor wait web --for Suspended");
    assert_eq!(refused(export(&mut client, "web").await.unwrap_err()), wait);
    client.resume(resume("web")).await.unwrap();
    assert_eq!(refused(export(&mut client, "web").await.unwrap_err()), suspend_it);
    client.stop(v1::StopRequest { target: no_wait("web") }).await.unwrap();
    assert_eq!(
        refused(export(&mut client, "web").await.unwrap_err()),
        wanted("torpor wait web --for Stopped")
    );
    let mut world = world;
    world.sim.set_script(Script::default());
    world.restart().await;
    let mut client = world.sandboxes().await;

    // Stopped, Suspended, Completed and Error: at rest.
    until(&mut client, "web", |s| phase(s) == Phase::Stopped).await;
    finish(export(&mut client, "web").await.unwrap()).await.unwrap();
    client.start(v1::StartRequest { target: target("web") }).await.unwrap();
    world.sim.end(&id, Exit::Code(0));
    until(&mut client, "web", |s| phase(s) == Phase::Completed).await;
    until_allowed(&mut client, "web").await;
    client.start(v1::StartRequest { target: target("web") }).await.unwrap();
    world.sim.end(&id, Exit::Panic("oops".into()));
    until(&mut client, "web", |s| phase(s) == Phase::Error).await;
    until_allowed(&mut client, "web").await;
    suspend(&mut client, "web").await;
    finish(export(&mut client, "web").await.unwrap()).await.unwrap();

    // A memory image is bound to the disk as it is.
    client.resume(v1::ResumeRequest { target: target("web"), ..Default::default() }).await.unwrap();
    let keep = v1::Keep::Memory.into();
    client.suspend(v1::SuspendRequest { target: target("web"), keep }).await.unwrap();
    finish(export(&mut client, "web").await.unwrap()).await.unwrap();
    disk(&mut client, "web", true).await.unwrap();
    for rewrite in [false, true] {
        let (reason, next) = error_info(&compact(&mut client, "web", rewrite).await.unwrap_err());
        assert!(reason == "MEMORY_KEPT" && next.starts_with("torpor stop web"), "{reason} {next}");
    }
    assert_eq!(error_info(&grow(&mut client, target("web"), 90 * GIB).await.unwrap_err()).0, "MEMORY_KEPT");
    assert_eq!(export(&mut client, "nobody").await.unwrap_err().code(), Code::NotFound);
    assert_eq!(world.sim.violations(), Vec::<String>::new());
}

fn slow_script(delay: Duration) -> Script {
    Script { delay: (delay, delay + Duration::from_millis(1)), ..Script::default() }
}

/// What an ended run held is given back a turn after it is seen to have ended.
async fn until_allowed(client: &mut Client, name: &str) {
    for _ in 0..1000 {
        match export(client, name).await {
            Ok(stream) => return finish(stream).await.map(drop).unwrap(),
            Err(error) => assert_eq!(error_info(&error).0, "NOT_AT_REST"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{name} is never at rest");
}

/// Reads an export to its end. Its size and its data.
async fn finish(mut stream: Streaming<v1::ExportDiskChunk>) -> Result<(u64, Vec<u8>), Status> {
    let (mut size, mut data, mut ended) = (0, Vec::new(), false);
    while let Some(chunk) = stream.next().await {
        match chunk?.kind.unwrap() {
            Kind::Start(start) => size = start.size_bytes,
            Kind::Extent(extent) => data.extend_from_slice(&extent.data),
            Kind::Progress(_) => {}
            Kind::End(end) => {
                assert_eq!(end.data_bytes, data.len() as u64);
                ended = true;
            }
        }
    }
    assert!(ended, "a stream without an end");
    Ok((size, data))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_hands_out_the_disk() {
    let (world, mut client) = asleep().await;
    let web = get(&mut client, "web").await;
    let (size, data) = finish(export(&mut client, "web").await.unwrap()).await.unwrap();
    let number = world.sim.disk_id(&web.id.parse().unwrap()).unwrap();
    assert_eq!((size, data), (disk_bytes(&web), number.to_le_bytes().to_vec()));
    assert_eq!(disk(&mut client, "web", false).await.unwrap().operation, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_waits_for_what_can_not_be_cut_short_and_says_so() {
    let (world, mut client) = asleep().await;
    world.sim.hold_disks(true);
    let mut other = client.clone();
    let growing = tokio::spawn(async move { grow(&mut other, target("web"), 90 * GIB).await });
    while disk(&mut client, "web", false).await.unwrap().operation.is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    client.resume(resume("web")).await.unwrap();
    let waiting = until(&mut client, "web", |s| step(s).contains("waiting")).await;
    assert_eq!((phase(&waiting), step(&waiting)), (Phase::Resuming, "waiting for disk grow"));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(phase(&get(&mut client, "web").await), Phase::Resuming);
    assert!(world.sim.running().is_empty(), "it started under an operation");

    world.sim.hold_disks(false);
    growing.await.unwrap().unwrap();
    until(&mut client, "web", |s| phase(s) == Phase::Ready).await;
    assert_eq!(world.sim.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_and_a_rewrite_end_when_the_sandbox_is_resumed() {
    let (world, mut client) = asleep().await;
    world.sim.hold_disks(true);
    let running = export(&mut client, "web").await.unwrap();
    client.resume(v1::ResumeRequest { target: target("web"), ..Default::default() }).await.unwrap();
    let error = finish(running).await.unwrap_err();
    assert_eq!((error.code(), error_info(&error).0.as_str()), (Code::Aborted, "TURNED_ROUND"));
    assert!(error.message().contains("resumed meanwhile"), "{error}");

    suspend(&mut client, "web").await;
    let mut running = compact(&mut client, "web", true).await.unwrap();
    client.start(v1::StartRequest { target: target("web") }).await.unwrap();
    let error = loop {
        match running.next().await.expect("an end") {
            Ok(message) => assert_eq!(message.result, None),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), Code::Aborted);
    assert!(error.message().contains("started meanwhile"), "{error}");
    assert_eq!(world.sim.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_that_nobody_reads_holds_up_neither_a_resume_nor_a_delete() {
    let (world, mut client) = asleep().await;
    let unread = export(&mut client, "web").await.unwrap();
    client.resume(v1::ResumeRequest { target: target("web"), ..Default::default() }).await.unwrap();
    suspend(&mut client, "web").await;
    world.sim.hold_disks(true);
    let mut other = world.sandboxes().await;
    let running = export(&mut other, "web").await.unwrap();
    let delete = v1::DeleteSandboxRequest { target: target("web"), allow_missing: false };
    client.delete(delete).await.unwrap();
    assert!(finish(running).await.unwrap_err().message().contains("deleted meanwhile"));
    drop(unread);
    assert_eq!(world.sim.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_operation_is_refused_with_the_name_of_the_first_and_others_are_free() {
    let (world, mut client) = asleep().await;
    client.create(create("other")).await.unwrap();
    suspend(&mut client, "other").await;
    world.sim.hold_disks(true);
    let running = export(&mut client, "web").await.unwrap();
    assert_eq!(disk(&mut client, "web", false).await.unwrap().operation, "disk export");
    let error = grow(&mut client, target("web"), 90 * GIB).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_eq!(error_info(&error), ("DISK_BUSY".into(), "torpor sandbox disk show web".into()));
    assert!(error.message().contains("disk export"), "{error}");
    assert_eq!(error_info(&disk(&mut client, "web", true).await.unwrap_err()).0, "DISK_BUSY");
    let also = export(&mut client, "other").await.unwrap();
    world.sim.hold_disks(false);
    finish(also).await.unwrap();
    finish(running).await.unwrap();
    grow(&mut client, target("web"), 90 * GIB).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn as_many_operations_as_there_may_be_refuse_the_next_one_for_a_moment() {
    use tonic_types::StatusExt as _;

    let (world, mut client) = asleep().await;
    for number in 0..16 {
        let name = format!("s{number}");
        client.create(create(&name)).await.unwrap();
        suspend(&mut client, &name).await;
    }
    world.sim.hold_disks(true);
    let mut running = Vec::new();
    for number in 0..16 {
        running.push(export(&mut client, &format!("s{number}")).await.unwrap());
    }
    let error = export(&mut client, "web").await.unwrap_err();
    assert_eq!((error.code(), error_info(&error).0.as_str()), (Code::ResourceExhausted, "OVERLOADED"));
    assert!(error.get_details_retry_info().is_some() && error.message().contains("16"), "{error}");
    // Verbs go on.
    client.resume(v1::ResumeRequest { target: target("s3"), ..Default::default() }).await.unwrap();
    world.sim.hold_disks(false);
    drop(running);
    until_allowed_again(&mut client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_was_grown_without_a_record_of_it_has_one_after_the_next_operation() {
    let (world, mut client) = asleep().await;
    let id = get(&mut client, "web").await.id.parse().unwrap();
    // As if the gateway had been killed in the middle of a `disk grow`.
    torpor_sandbox::DiskCare::grow(&*world.sim, &id, 20 * GIB).await.unwrap();
    assert_eq!(disk_bytes(&get(&mut client, "web").await), 10 * GIB);
    disk(&mut client, "web", true).await.unwrap();
    assert_eq!(disk_bytes(&get(&mut client, "web").await), 20 * GIB);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewrite_that_would_take_the_reserve_is_refused() {
    let world = World::with(Script::default(), |config| config.limits.disk_reserve_bytes = u64::MAX).await;
    let mut client = world.sandboxes().await;
    client.create(create("web")).await.unwrap();
    suspend(&mut client, "web").await;
    let error = compact(&mut client, "web", true).await.unwrap_err();
    assert_eq!((error.code(), error_info(&error).0.as_str()), (Code::ResourceExhausted, "DISK_PRESSURE"));
    assert!(error.message().contains("kept for what runs"), "{error}");
    drop(compact(&mut client, "web", false).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_whose_client_goes_away_ends_and_a_compaction_goes_on() {
    let (world, mut client) = asleep().await;
    world.sim.hold_disks(true);
    drop(export(&mut client, "web").await.unwrap());
    for _ in 0..1000 {
        if disk(&mut client, "web", false).await.unwrap().operation.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(compact(&mut client, "web", true).await.unwrap());
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(disk(&mut client, "web", false).await.unwrap().operation, "disk compact --rewrite");
    world.sim.hold_disks(false);
    until_allowed_again(&mut client).await;
}

async fn until_allowed_again(client: &mut Client) {
    for _ in 0..1000 {
        if disk(client, "web", true).await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the operation never ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_ends_does_not_wait_for_an_export() {
    let (mut world, mut client) = asleep().await;
    world.sim.hold_disks(true);
    let running = export(&mut client, "web").await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(4), world.stop()).await;
    assert!(ended.is_ok(), "it waited");
    assert!(finish(running).await.is_err());
    world.sim.hold_disks(false);
    world.start().await;
    finish(export(&mut world.sandboxes().await, "web").await.unwrap()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_driver_says_reaches_the_client_with_its_code() {
    let (world, mut client) = asleep().await;
    let locked = DriverError::Locked { holder: Some(77), detail: "/x/overlay.qcow2".into() };
    for (error, code, word) in [
        (locked, Code::FailedPrecondition, "process 77"),
        (DriverError::Corrupt("cluster 5".into()), Code::FailedPrecondition, "cluster 5"),
        (DriverError::Invalid("room for 9 bytes".into()), Code::InvalidArgument, "room for 9 bytes"),
        (DriverError::NoSpace("write /x".into()), Code::ResourceExhausted, "/x"),
    ] {
        let reason = error.reason();
        world.sim.fail_next(Verb::Disk, error);
        let error = grow(&mut client, target("web"), 90 * GIB).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(word), "{error}");
        assert!(error_info(&error).0 == reason || code == Code::InvalidArgument);
    }
    assert_eq!(disk_bytes(&get(&mut client, "web").await), 10 * GIB);
    let pressure = condition(&get(&mut client, "web").await).expect("pressure after NO_SPACE");
    assert_eq!(pressure.reason, "NO_SPACE");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_in_use_grows_where_its_driver_can_do_that() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    client.create(create("web")).await.unwrap();
    world.sim.grow_running(true);
    let grown = grow(&mut client, target("web"), 20 * GIB).await.unwrap();
    assert_eq!((disk_bytes(&grown), phase(&grown)), (20 * GIB, Phase::Ready));
    let smaller = grow(&mut client, target("web"), GIB).await.unwrap_err();
    assert_eq!(smaller.code(), Code::InvalidArgument);
    // A suspend that comes meanwhile waits for it.
    world.sim.hold_disks(true);
    let mut other = client.clone();
    let growing = tokio::spawn(async move { grow(&mut other, target("web"), 30 * GIB).await });
    while world.sim.calls(Verb::Disk) < 2 {
        tokio::task::yield_now().await;
    }
    client.suspend(v1::SuspendRequest { target: no_wait("web"), keep: 0 }).await.unwrap();
    world.sim.hold_disks(false);
    growing.await.unwrap().unwrap();
    client.suspend(v1::SuspendRequest { target: target("web"), keep: 0 }).await.unwrap();
    let web = get(&mut client, "web").await;
    assert_eq!((disk_bytes(&web), phase(&web)), (30 * GIB, Phase::Suspended));
    assert_eq!(world.sim.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_sandbox_that_finds_no_room_raises_the_pressure_of_all() {
    let world = World::new(Script::default()).await;
    let mut client = world.sandboxes().await;
    let made = client.create(create("web")).await.unwrap().into_inner();
    client.create(create("other")).await.unwrap();
    assert!(condition(&get(&mut client, "other").await).is_none());
    assert!(world.sim.starve(&made.id.parse().unwrap()), "the gateway listens");
    let mut pressed = None;
    for _ in 0..500 {
        pressed = condition(&get(&mut client, "other").await);
        if pressed.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(pressed.expect("pressure").reason, "NO_SPACE");
}

fn condition(sandbox: &v1::Sandbox) -> Option<v1::Condition> {
    let status = sandbox.status.clone().unwrap();
    status.conditions.into_iter().find(|condition| condition.r#type == "DiskPressure")
}

#[tokio::test(flavor = "multi_thread")]
async fn pressure_is_a_condition_of_every_sandbox_and_part_of_what_the_gateway_says() {
    let world = World::with(Script::default(), |config| config.limits.disk_reserve_bytes = u64::MAX).await;
    let mut client = world.sandboxes().await;
    // Low, but not so low that there is no room for a disk.
    client.create(create("web")).await.unwrap();
    let condition = condition(&get(&mut client, "web").await).expect("a condition");
    assert!(condition.status && condition.reason == "LOW_SPACE");
    assert!(condition.message.contains(&*world.config.state_dir.to_string_lossy()), "{}", condition.message);
    assert!(condition.message.contains("torpor sandbox disk compact"), "{}", condition.message);
    let disk = world.info().await.disk.unwrap();
    assert!(disk.pressure && disk.free_bytes > 0 && disk.total_bytes > disk.free_bytes);

    let (_world, mut client) = asleep().await;
    assert_eq!(self::condition(&get(&mut client, "web").await), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_random_mix_of_operations_and_verbs_breaks_nothing_and_every_start_succeeds() {
    let world = World::new(slow()).await;
    let mut client = world.sandboxes().await;
    client.create(create("web")).await.unwrap();
    for round in 0..12_u64 {
        suspend(&mut client, "web").await;
        let operation = async {
            let mut client = world.sandboxes().await;
            match round % 4 {
                0 => drop(grow(&mut client, target("web"), (20 + round) * GIB).await),
                1 => drop(compact(&mut client, "web", false).await),
                2 => drop(compact(&mut client, "web", true).await),
                _ => {
                    if let Ok(stream) = export(&mut client, "web").await {
                        drop(finish(stream).await);
                    }
                }
            }
        };
        let verb = async {
            tokio::time::sleep(Duration::from_millis(round * 7 % 60)).await;
            let mut client = world.sandboxes().await;
            let awake = v1::ResumeRequest { target: target("web"), ..Default::default() };
            assert_eq!(phase(&client.resume(awake).await.unwrap().into_inner()), Phase::Ready);
        };
        tokio::join!(operation, verb);
    }
    assert_eq!(world.sim.violations(), Vec::<String>::new());
}
