//! What containers promise beyond the suite: the same container for ever, nothing of the host held at rest, outsiders and
//! losses of power told for what they are. Every test is one for each engine.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use common::{Bench, Running, exec, own, running};
use serde_json::Value;
use torpor_driver_container::{ContainerDriver, Engine};
use torpor_sandbox::{
    Change, ComputeDriver, DriverError, Egress, Exit, Keep, Observed, Run, SandboxId, SandboxSpec, Volume,
};

const GRACE: Duration = Duration::from_secs(10);
/// Held by who makes volumes and by who counts them: the engine is everybody's.
static VOLUMES: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// A driver, and one sandbox of it.
struct Case<'a> {
    running: &'a Running,
    bench: Bench,
    driver: Arc<ContainerDriver>,
    id: SandboxId,
}

impl<'a> Case<'a> {
    async fn new(running: &'a Running) -> Self {
        Self::of(running, |_| ()).await
    }

    async fn of(running: &'a Running, change: impl FnOnce(&mut SandboxSpec)) -> Self {
        let (bench, driver) = Bench::new(running).await;
        let (id, mut spec) = (SandboxId::generate(), bench.spec());
        change(&mut spec);
        assert_eq!(driver.create(&id, &spec, Run(1)).await.unwrap(), Change::Done);
        Self { running, bench, driver, id }
    }

    async fn start(&self, run: u64) {
        self.driver.start(&self.id, Keep::Disk, Run(run)).await.unwrap();
        assert_eq!(self.observe().await, Observed::Running { run: Run(run), agent: true });
    }

    async fn stop(&self) -> torpor_sandbox::Stopped {
        let stopped = self.driver.stop(&self.id, Keep::Disk, GRACE).await.unwrap();
        assert_eq!(self.observe().await, Observed::Stopped { memory: false });
        self.at_rest();
        stopped
    }

    /// As the engine itself shows it.
    fn at_rest(&self) {
        assert_eq!(self.running.held(self.id.as_str()), Vec::<String>::new());
        assert!(self.bench.leftovers(&self.id).is_empty());
    }

    async fn observe(&self) -> Observed {
        self.driver.observe(&self.id).await.unwrap()
    }

    /// Waits until something else is seen than what is not yet decided.
    async fn ended(&self) -> Exit {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            match self.observe().await {
                Observed::Ended(ended) => return ended.exit,
                other => assert!(Instant::now() < until, "{other:?}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn sh(&self, command: &str) -> String {
        let (code, text) = exec(self.driver.as_ref(), &self.id, command).await;
        assert_eq!(code, 0, "{command}: {text}");
        text.trim().to_owned()
    }

    async fn delete(&self) {
        self.driver.delete(&self.id).await.unwrap();
        assert_eq!(self.observe().await, Observed::Missing);
        assert_eq!(self.running.inspect(self.id.as_str()), Value::Null);
        assert!(!self.driver.list().await.unwrap().contains(&self.id));
    }
}

/// One test for each engine out of a function of the name of the test.
macro_rules! on_both {
    ($($name:ident)*) => {
        mod docker {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                if let Some(running) = super::running(stringify!($name), super::Engine::Docker) {
                    super::$name(running).await;
                }
            })*
        }
        mod podman {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                if let Some(running) = super::running(stringify!($name), super::Engine::Podman) {
                    super::$name(running).await;
                }
            })*
        }
    };
}

on_both! {
    the_same_container_with_its_files_comes_back_every_time
    a_container_is_confined_and_can_write_to_nothing_of_ours
    a_paused_container_is_unpaused_and_stopped_in_order
    what_outsiders_do_is_told_for_what_it_is
    a_stop_from_outside_right_before_a_start_disturbs_no_later_run
    a_mount_that_is_gone_is_named_and_never_made_anew
    what_no_container_can_be_is_refused_by_its_field
    the_main_command_and_the_environment_are_those_of_the_spec
    an_anonymous_volume_lives_and_goes_with_its_sandbox
    another_state_directory_sees_and_touches_nothing_of_ours
    many_sleep_and_wake_side_by_side
}

async fn the_same_container_with_its_files_comes_back_every_time(running: &Running) {
    let case = Case::new(running).await;
    let container = running.inspect(case.id.as_str())["Id"].clone();
    for run in 1..=3 {
        case.start(run).await;
        assert_eq!(running.inspect(case.id.as_str())["Id"], container);
        let facts = case.driver.facts(&case.id).await;
        let host = facts.host.unwrap();
        assert!(host.pid > 0 && host.ip.parse::<std::net::Ipv4Addr>().is_ok(), "{host:?}");
        case.sh(&format!("echo {run} >> /root/runs; sleep 1000 & true")).await;
        let stopped = case.stop().await;
        assert!(stopped.flushed, "{:?}", stopped.detail);
        assert!(case.driver.facts(&case.id).await.host.is_none());
    }
    case.start(4).await;
    // What the cycles below find none of at rest can be seen at all.
    let looked = tokio::task::block_in_place(|| running.look(container.as_str().unwrap(), ""));
    assert!(!looked.is_empty());
    assert_eq!(case.sh("cat /root/runs").await, "1\n2\n3");
    assert_eq!(case.sh("hostname").await, "web");
    case.delete().await;
}

async fn a_container_is_confined_and_can_write_to_nothing_of_ours(running: &Running) {
    let case = Case::new(running).await;
    case.start(1).await;
    let seen = running.inspect(case.id.as_str());
    let host = &seen["HostConfig"];
    assert_eq!(host["Memory"], 96 << 20);
    assert_eq!(host["PidsLimit"], 4096);
    assert_eq!(host["Privileged"], false);
    assert_eq!(seen["HostConfig"]["RestartPolicy"]["Name"], "no");
    assert_eq!(seen["Config"]["Labels"]["torpor.dev/sandbox"], case.id.as_str());
    let refused = "for f in /.torpor/host/x /.torpor/torpor-agent; do touch $f && echo written; done; true";
    assert!(!case.sh(refused).await.contains("written"));
    assert_eq!(case.sh("grep NoNewPrivs /proc/self/status").await, "NoNewPrivs:\t1");
    // CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE: bits 0, 1, 3 to 7 and 10.
    assert_eq!(case.sh("grep CapBnd /proc/self/status").await, "CapBnd:\t00000000000004fb");
    let (code, _) = exec(case.driver.as_ref(), &case.id, "ls /.torpor/host").await;
    assert_eq!(code, 0);
    case.delete().await;
}

async fn a_paused_container_is_unpaused_and_stopped_in_order(running: &Running) {
    let case = Case::new(running).await;
    case.start(1).await;
    running.container(case.id.as_str(), "pause");
    assert_eq!(case.observe().await, Observed::Running { run: Run(1), agent: false });
    let stopped = case.stop().await;
    assert!(stopped.flushed, "{:?}", stopped.detail);
    case.start(2).await;
    running.container(case.id.as_str(), "pause");
    case.delete().await;
}

async fn what_outsiders_do_is_told_for_what_it_is(running: &Running) {
    let case = Case::new(running).await;
    case.start(1).await;
    case.sh("echo kept > /root/file").await;
    // Stopped: no fault of its own.
    running.container(case.id.as_str(), "stop?t=10");
    assert!(matches!(case.ended().await, Exit::Interrupted(_)));
    case.stop().await;
    // At rest an engine can't even start it: what it mounts of ours is gone.
    let (status, _) = running.ask("POST", &format!("/containers/torpor-{}/start", case.id));
    assert!(status >= 400, "{status}");
    assert_eq!(case.observe().await, Observed::Stopped { memory: false });
    // Who makes that as well has started compute that nobody wants.
    let folder = case.bench.config.run_dir.join(case.bench.engine.name()).join(case.id.as_str());
    std::fs::create_dir_all(folder.join("agent")).unwrap();
    running.container(case.id.as_str(), "start");
    assert_eq!(case.observe().await, Observed::Running { run: Run(0), agent: false });
    assert!(matches!(case.driver.start(&case.id, Keep::Disk, Run(2)).await, Err(DriverError::Invalid(_))));
    case.stop().await;
    // Restarted while it ran: the run is over.
    case.start(2).await;
    running.container(case.id.as_str(), "restart?t=10");
    assert!(matches!(case.ended().await, Exit::Interrupted(_)));
    case.stop().await;
    case.start(3).await;
    assert_eq!(case.sh("cat /root/file").await, "kept");
    // Killed: lost.
    running.container(case.id.as_str(), "kill");
    assert!(matches!(case.ended().await, Exit::Lost(text) if text.contains("137")));
    case.stop().await;
    // Removed: its data is gone, and is not made anew.
    running.remove(case.id.as_str());
    let refused = case.driver.start(&case.id, Keep::Disk, Run(4)).await;
    assert!(
        matches!(&refused, Err(DriverError::DataMissing(text)) if text.contains(case.id.as_str())),
        "{refused:?}"
    );
    assert_eq!(running.inspect(case.id.as_str()), Value::Null);
    case.delete().await;
}

async fn a_stop_from_outside_right_before_a_start_disturbs_no_later_run(running: &Running) {
    let case = Case::new(running).await;
    for run in 1..=4 {
        case.start(run).await;
        running.container(case.id.as_str(), "kill");
        // Without a look between: events of the old run come after the start of the next.
        case.driver.stop(&case.id, Keep::Disk, GRACE).await.unwrap();
    }
    case.start(5).await;
    for _ in 0..10 {
        assert_eq!(case.observe().await, Observed::Running { run: Run(5), agent: true });
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    case.delete().await;
}

async fn a_mount_that_is_gone_is_named_and_never_made_anew(running: &Running) {
    let _volumes = VOLUMES.lock().await;
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let bind = folder.path().join("shared");
    std::fs::create_dir(&bind).unwrap();
    let name = format!("cache-{}", SandboxId::generate());
    let case = Case::of(running, |spec| {
        let volume = |source: &str, target: &str, read_only| Volume {
            source: source.to_owned(),
            target: target.to_owned(),
            read_only,
        };
        spec.volumes = vec![volume(bind.to_str().unwrap(), "/shared", true), volume(&name, "/cache", false)];
    })
    .await;
    case.start(1).await;
    std::fs::write(bind.join("note"), "from the host").unwrap();
    assert_eq!(case.sh("cat /shared/note; echo once > /cache/file").await, "from the host");
    let (code, _) = exec(case.driver.as_ref(), &case.id, "touch /shared/x").await;
    assert_ne!(code, 0);
    case.stop().await;
    std::fs::rename(&bind, folder.path().join("away")).unwrap();
    let refused = case.driver.start(&case.id, Keep::Disk, Run(2)).await.unwrap_err();
    assert!(refused.reason() == "MOUNT_MISSING" && refused.to_string().contains("shared"), "{refused}");
    assert_eq!(case.observe().await, Observed::Stopped { memory: false });
    std::fs::rename(folder.path().join("away"), &bind).unwrap();
    case.start(2).await;
    assert_eq!(case.sh("cat /cache/file").await, "once");
    case.delete().await;
    // A volume with a name is its user's.
    assert_eq!(running.ask("GET", &format!("/volumes/{name}")).0, 200);
    assert!(running.ask("DELETE", &format!("/volumes/{name}")).0 < 300);
}

async fn what_no_container_can_be_is_refused_by_its_field(running: &Running) {
    let (bench, driver) = Bench::new(running).await;
    type Spoil = fn(&mut SandboxSpec);
    let cases: [(&str, Spoil); 4] = [
        ("kernel", |s| s.kernel = Some("/boot/vmlinuz".into())),
        ("machine", |s| s.machine = "kvm".into()),
        ("egress", |s| s.egress = Some(Egress::None)),
        ("volumes", |s| {
            s.volumes = vec![Volume { source: "/nonexistent".into(), target: "/a".into(), read_only: false }];
        }),
    ];
    for (field, spoil) in cases {
        let mut spec = bench.spec();
        spoil(&mut spec);
        let error = driver.check(&spec).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
        let id = SandboxId::generate();
        assert!(driver.create(&id, &spec, Run(1)).await.is_err());
        assert_eq!(driver.observe(&id).await.unwrap(), Observed::Missing);
    }
    let mut spec = bench.spec();
    spec.image_digest = format!("sha256:{}", "0".repeat(64));
    let id = SandboxId::generate();
    let error = driver.create(&id, &spec, Run(1)).await.unwrap_err();
    assert_eq!(error.reason(), "BASE_MISSING", "{error}");
    driver.delete(&id).await.unwrap();
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Missing);
}

async fn the_main_command_and_the_environment_are_those_of_the_spec(running: &Running) {
    let case = Case::of(running, |spec| {
        spec.command = ["/bin/sh", "-c", "echo $GREETING > /tmp/said; id -u >> /tmp/said; sleep 0.3; exit 7"]
            .map(str::to_owned)
            .to_vec();
        spec.user = Some("ann".into());
    })
    .await;
    case.driver.start(&case.id, Keep::Disk, Run(1)).await.unwrap();
    assert_eq!(case.ended().await, Exit::Code(7));
    assert_eq!(case.sh("cat /tmp/said; echo $GREETING").await, "hello\n1000\nhello");
    case.stop().await;
    case.delete().await;
}

async fn an_anonymous_volume_lives_and_goes_with_its_sandbox(running: &Running) {
    let _volumes = VOLUMES.lock().await;
    let case = Case::new(running).await;
    // An image that wants a volume, made of the container: an import can't say so.
    let change = "changes=VOLUME%20/data&repo=with-volume&tag=1";
    // Podman's other way wants a body.
    let commit = if running.engine == Engine::Podman { "/libpod/commit" } else { "/commit" };
    let (status, made) = running.ask("POST", &format!("{commit}?container=torpor-{}&{change}", case.id));
    assert!(status < 300, "{status} {made}");
    let digest = format!("sha256:{}", made["Id"].as_str().unwrap().trim_start_matches("sha256:"));
    let with = Case::of(running, |spec| spec.image_digest = digest.clone()).await;
    with.start(1).await;
    with.sh("echo kept > /data/file").await;
    let mounts = running.inspect(with.id.as_str())["Mounts"].clone();
    let own = mounts.as_array().into_iter().flatten().find(|mount| mount["Destination"] == "/data");
    let own = own.and_then(|mount| mount["Name"].as_str()).unwrap().to_owned();
    assert!(volume_names(running).contains(&own));
    with.stop().await;
    with.start(2).await;
    assert_eq!(with.sh("cat /data/file").await, "kept");
    with.delete().await;
    assert!(!volume_names(running).contains(&own));
    case.delete().await;
    // With an image goes what it was made of, where that has no name: another import may have taken it.
    let (status, named) = running.ask("POST", &format!("/images/{}/tag?repo=kept&tag=1", case.bench.image));
    assert!(status < 300, "{status} {named}");
    let (status, gone) = running.ask("DELETE", &format!("/images/{digest}"));
    assert!(status < 300, "{status} {gone}");
}

fn volume_names(running: &Running) -> Vec<String> {
    let (_, all) = running.ask("GET", "/volumes");
    all["Volumes"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|one| Some(one["Name"].as_str()?.to_owned()))
        .collect()
}

async fn another_state_directory_sees_and_touches_nothing_of_ours(running: &Running) {
    let case = Case::new(running).await;
    case.start(1).await;
    let (_bench, other) = Bench::new(running).await;
    assert!(!other.list().await.unwrap().contains(&case.id));
    assert_eq!(other.observe(&case.id).await.unwrap(), Observed::Missing);
    assert_eq!(other.delete(&case.id).await.unwrap(), Change::Already);
    other.stop(&case.id, Keep::Disk, GRACE).await.unwrap();
    assert_eq!(case.observe().await, Observed::Running { run: Run(1), agent: true });
    case.delete().await;
}

async fn many_sleep_and_wake_side_by_side(running: &Running) {
    cycle(running, 20, 5).await;
}

/// `cycles` suspends and resumes in all, of as many sandboxes as are `parallel`.
async fn cycle(running: &Running, cycles: u64, parallel: u64) {
    let _volumes = VOLUMES.lock().await;
    let (bench, driver) = Bench::new(running).await;
    let bench = Arc::new(bench);
    let before = (volumes(running), networks(running));
    let one = |_| {
        let (bench, driver) = (bench.clone(), driver.clone());
        async move {
            let id = SandboxId::generate();
            driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
            let mut written = String::new();
            for run in 1..=cycles / parallel {
                driver.start(&id, Keep::Disk, Run(run)).await.unwrap();
                let (code, text) =
                    exec(driver.as_ref(), &id, &format!("echo {run} >> /root/runs; cat /root/runs")).await;
                written.push_str(&format!("{run}\n"));
                assert_eq!((code, &text), (0, &written));
                let stopped = driver.stop(&id, Keep::Disk, GRACE).await.unwrap();
                assert!(stopped.flushed, "{id}: {:?}", stopped.detail);
            }
            id
        }
    };
    let running_all: Vec<_> = (0..parallel).map(|n| tokio::spawn(one(n))).collect();
    let ids: Vec<_> = futures::future::join_all(running_all).await.into_iter().map(Result::unwrap).collect();
    for id in &ids {
        assert!(bench.leftovers(id).is_empty());
        assert_eq!(running.held(id.as_str()), Vec::<String>::new());
        assert_eq!(running.traces(id.as_str()), Vec::<String>::new());
        driver.delete(id).await.unwrap();
    }
    assert!(driver.list().await.unwrap().is_empty());
    assert_eq!((volumes(running), networks(running)), before);
}

fn volumes(running: &Running) -> usize {
    running.ask("GET", "/volumes").1["Volumes"].as_array().map_or(0, Vec::len)
}

fn networks(running: &Running) -> usize {
    running.ask("GET", "/networks").1.as_array().map_or(0, Vec::len)
}

async fn slow(test: &str, engine: Engine) {
    if let Some(running) = running(test, engine) {
        cycle(running, 200, 20).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "slow: 200 cycles"]
async fn two_hundred_cycles_of_twenty_at_once_on_docker() {
    slow("two_hundred_cycles_of_twenty_at_once_on_docker", Engine::Docker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "slow: 200 cycles"]
async fn two_hundred_cycles_of_twenty_at_once_on_podman() {
    slow("two_hundred_cycles_of_twenty_at_once_on_podman", Engine::Podman).await;
}

/// The engine of the test's own ends under its sandboxes.
async fn power(running: &Running) {
    let case = Case::new(running).await;
    let resting = SandboxId::generate();
    case.driver.create(&resting, &case.bench.spec(), Run(1)).await.unwrap();
    case.start(1).await;
    case.sh("echo kept > /root/file").await;
    let container = running.inspect(case.id.as_str())["Id"].clone();
    running.tell("kill");
    assert!(matches!(case.observe().await, Observed::Unknown(text) if text.contains("reached")));
    let refused = case.driver.stop(&case.id, Keep::Disk, GRACE).await.unwrap_err();
    assert!(refused.waits_for_host() && refused.reason() == "BACKEND_UNREACHABLE", "{refused}");
    assert!(case.driver.delete(&case.id).await.is_err());
    // What the engine never heard of can go without it.
    let never = SandboxId::generate();
    assert_eq!(case.driver.observe(&never).await.unwrap(), Observed::Missing);
    assert_eq!(case.driver.delete(&never).await.unwrap(), Change::Already);

    running.tell("start");
    let exit = case.ended().await;
    assert!(matches!(exit, Exit::Interrupted(_)), "{exit:?}");
    assert_eq!(case.driver.observe(&resting).await.unwrap(), Observed::Stopped { memory: false });
    assert!(!case.stop().await.flushed);
    case.start(2).await;
    assert_eq!(running.inspect(case.id.as_str())["Id"], container);
    assert_eq!(case.sh("cat /root/file").await, "kept");

    // In its own order: containers of Docker end with it, those of Podman need it only to be told.
    running.tell("term");
    running.tell("start");
    let exit = case.ended().await;
    assert!(matches!(exit, Exit::Interrupted(_)), "{exit:?}");
    case.stop().await;
    case.start(3).await;
    assert_eq!(case.sh("cat /root/file").await, "kept");
    case.delete().await;
    case.driver.delete(&resting).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_docker_that_ends_or_loses_power_is_waited_for_and_its_containers_come_back() {
    if let Some(running) = own("power_loss_docker", Engine::Docker) {
        power(&running).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_podman_that_ends_or_loses_power_is_waited_for_and_its_containers_come_back() {
    if let Some(running) = own("power_loss_podman", Engine::Podman) {
        power(&running).await;
    }
}

async fn pulls(running: &Running) {
    let tree = common::busybox_tree();
    std::fs::write(tree.path().join("etc/from"), "the registry").unwrap();
    running.tell(&format!("registry {}", tree.path().display()));
    let (mut bench, driver) = Bench::new(running).await;
    let name = "127.0.0.1:5000/team/web:1";
    assert_eq!(driver.images().unwrap().find(name).await.unwrap(), None);
    let refused = driver.images().unwrap().pull(name, &|_, _| ()).await.unwrap_err();
    assert_eq!(refused.reason(), "BASE_MISSING", "{refused}");

    // As `docker login` leaves it: ann:secret.
    let file = bench.folder.path().join("auth.json");
    std::fs::write(&file, r#"{"auths": {"127.0.0.1:5000": {"auth": "YW5uOnNlY3JldA=="}}}"#).unwrap();
    bench.config.auth_file = Some(file);
    let driver = bench.driver();
    let images = driver.images().unwrap();
    let told = std::sync::Mutex::new(Vec::new());
    let tell = |step: &'static str, detail: String| told.lock().unwrap().push(format!("{step} {detail}"));
    let pulled = images.pull(name, &tell).await.unwrap();
    assert_eq!(images.find(name).await.unwrap().map(|found| found.digest), Some(pulled.digest.clone()));
    assert!(told.lock().unwrap().len() > 1, "{told:?}");
    let missing = images.pull("127.0.0.1:5000/team/web:2", &|_, _| ()).await.unwrap_err();
    assert_eq!(missing.reason(), "BASE_MISSING", "{missing}");

    let (id, mut spec) = (SandboxId::generate(), bench.spec());
    (spec.image, spec.image_digest) = (name.to_owned(), pulled.digest);
    driver.create(&id, &spec, Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    let (_, text) = exec(driver.as_ref(), &id, "cat /etc/from; echo $OF_IMAGE").await;
    assert_eq!(text, "the registryyes\n");
    driver.delete(&id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn docker_pulls_with_the_credentials_that_are_configured_and_tells_its_steps() {
    if let Some(running) = own("pull_docker", Engine::Docker) {
        pulls(&running).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn podman_pulls_with_the_credentials_that_are_configured_and_tells_its_steps() {
    if let Some(running) = own("pull_podman", Engine::Podman) {
        pulls(&running).await;
    }
}

/// Podman removes the containers of an image with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_docker_has_no_more_is_named_at_the_start() {
    let Some(running) = running("an_image_that_docker_has_no_more_is_named_at_the_start", Engine::Docker)
    else {
        return;
    };
    let (bench, driver) = Bench::new(running).await;
    let tree = common::busybox_tree();
    std::fs::write(tree.path().join("etc/other"), "other").unwrap();
    let source = torpor_sandbox::ImageSource::Dir(tree.path().to_owned());
    let images = driver.images().unwrap();
    let image = images.import("other:1", &source, &|_, _| ()).await.unwrap();
    assert_eq!(images.find("other:1").await.unwrap().map(|found| found.digest), Some(image.digest.clone()));
    let (id, mut spec) = (SandboxId::generate(), bench.spec());
    (spec.image, spec.image_digest) = ("other:1".into(), image.digest.clone());
    driver.create(&id, &spec, Run(1)).await.unwrap();
    let (status, body) = running.ask("DELETE", &format!("/images/{}?force=true", image.digest));
    assert_eq!(status, 200, "{body}");
    let error = driver.start(&id, Keep::Disk, Run(1)).await.unwrap_err();
    assert!(error.reason() == "BASE_MISSING" && error.to_string().contains("other:1"), "{error}");
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Stopped { memory: false });
    driver.delete(&id).await.unwrap();
}
