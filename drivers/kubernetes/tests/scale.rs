//! Many objects: what a driver asks for, how long it takes, and what it needs of memory. The driver runs in a process of
//! its own, so that its memory is its own.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use common::{object, spec};
use futures::StreamExt as _;
use serde_json::json;
use torpor_driver_kubernetes::{KubernetesConfig, KubernetesDriver};
use torpor_sandbox::{ComputeDriver, Keep, Run, SandboxId};
use torpor_test_kube::{Behaviour, Generation, Server};

type Counts = BTreeMap<String, BTreeMap<String, u64>>;

const FOLDER: &str = "TORPOR_KUBE_SCALE_FOLDER";
/// At once.
const WIDTH: usize = 50;
/// Objects, and sandboxes that are used.
const LARGE: (usize, usize) = (20_000, 1_000);
/// Most memory of a driver with 20,000 objects, MiB.
const MOST: u64 = 150;

/// Resident memory, MiB.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() >> 10
}

fn driver_config(dir: &Path) -> KubernetesConfig {
    let mut config = KubernetesConfig::new(dir.join("state"), "agent:1");
    config.kubeconfig = Some(dir.join("kubeconfig"));
    config
}

/// Not a test: the driver's own process. It does a step for each line that it reads.
#[test]
fn the_driver_process() {
    let Some(dir) = std::env::var_os(FOLDER) else { return };
    let dir = Path::new(&dir);
    let ids: Vec<SandboxId> =
        fs::read_to_string(dir.join("ids")).unwrap().lines().map(|line| line.parse().unwrap()).collect();
    let count: usize = fs::read_to_string(dir.join("count")).unwrap().parse().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let say = |what: &str, began: Instant| {
            println!("STEP {what} {} {}", began.elapsed().as_millis(), resident());
        };
        let wait = || std::io::stdin().lock().read_line(&mut String::new()).unwrap();
        let began = Instant::now();
        let driver = KubernetesDriver::new(driver_config(dir)).await.unwrap();
        while driver.watched() != Some(count) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        say("watch", began);
        wait();
        let began = Instant::now();
        assert_eq!(driver.list().await.unwrap().len(), count);
        say("list", began);
        wait();
        let began = Instant::now();
        let each = |id: &SandboxId| {
            let (driver, id) = (driver.clone(), id.clone());
            async move { driver.create(&id, &spec(), Run(1)).await.unwrap() }
        };
        futures::stream::iter(ids.iter().map(each)).buffer_unordered(WIDTH).collect::<Vec<_>>().await;
        say("create", began);
        wait();
        let began = Instant::now();
        let each = |id: &SandboxId| {
            let (driver, id) = (driver.clone(), id.clone());
            async move { driver.start(&id, Keep::Disk, Run(1)).await.unwrap() }
        };
        futures::stream::iter(ids.iter().map(each)).buffer_unordered(WIDTH).collect::<Vec<_>>().await;
        say("start", began);
        wait();
        let began = Instant::now();
        let each = |id: &SandboxId| {
            let (driver, id) = (driver.clone(), id.clone());
            async move { driver.stop(&id, Keep::Disk, Duration::from_secs(30)).await.unwrap().flushed }
        };
        let flushed: Vec<bool> =
            futures::stream::iter(ids.iter().map(each)).buffer_unordered(WIDTH).collect().await;
        assert!(flushed.iter().all(|flushed| *flushed));
        say("suspend", began);
        wait();
    });
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Fails when it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Every object of a fleet that sleeps, as the driver would have made them, and a bit of what a server adds.
fn fill(server: &Server, identity: &str, count: usize) {
    let fields = json!([{
        "manager": "torpor", "operation": "Update", "apiVersion": "agents.x-k8s.io/v1beta1",
        "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:podTemplate": {"f:spec": {"f:containers": {}}}}},
    }]);
    for _ in 0..count {
        let id = SandboxId::generate();
        let labels = json!({"torpor.dev/gateway": identity, "torpor.dev/sandbox": id.as_str()});
        let made = server.make(
            "sandboxes",
            &object(&id),
            json!({
                "metadata": {"labels": labels, "managedFields": fields},
                "spec": {"operatingMode": "Suspended", "podTemplate": {"metadata": {"labels": labels}, "spec": {
                    "containers": [{"name": "sandbox", "image": "i", "env": [{"name": "A", "value": "x".repeat(1500)}]}]}}},
            }),
        );
        assert!(made);
    }
}

/// What was asked for, by step and verb.
async fn measure(fleet: usize, busy: usize) -> Counts {
    let behaviour = Behaviour { reconcile: Duration::from_millis(20), ..Behaviour::default() };
    let server = Server::start(Generation::Stable, behaviour).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    server.kubeconfig(dir.path()).unwrap();
    fs::create_dir_all(dir.path().join("state/kubernetes")).unwrap();
    fs::write(dir.path().join("state/kubernetes/identity"), "fleet").unwrap();
    let ids: Vec<String> = (0..busy).map(|_| SandboxId::generate().to_string()).collect();
    fs::write(dir.path().join("ids"), ids.join("\n")).unwrap();
    fs::write(dir.path().join("count"), fleet.to_string()).unwrap();
    fill(&server, "fleet", fleet);
    server.count_only();
    server.forget();

    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_driver_process", "--nocapture"])
        .env(FOLDER, dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let _process = Process(child);
    let (steps, mut said) = tokio::sync::mpsc::channel(8);
    std::thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            // The runner prints a test's name without an end of line.
            if let Some((_, step)) = line.split_once("STEP ") {
                let _ = steps.blocking_send(step.to_owned());
            }
        }
    });
    println!("{fleet} objects asleep, {busy} sandboxes beside them, {WIDTH} at once");
    let mut counts = Counts::new();
    let mut most = 0;
    for _ in 0..5 {
        let step =
            tokio::time::timeout(Duration::from_secs(600), said.recv()).await.unwrap().expect("it lives");
        let words: Vec<&str> = step.split(' ').collect();
        let asked = server.counts();
        let shown: Vec<String> = asked.iter().map(|(verb, count)| format!("{count} {verb}")).collect();
        println!("  {:<8} {:>7} ms  {:>4} MiB  {}", words[0], words[1], words[2], shown.join(", "));
        // Connections of agents that are in use come on top.
        if matches!(words[0], "watch" | "list" | "create") {
            most = most.max(words[2].parse::<u64>().unwrap());
        }
        counts.insert(words[0].to_owned(), asked);
        server.forget();
        input.write_all(b"\n").unwrap();
    }
    let pages = fleet.div_ceil(500) as u64;
    let of = |step: &str, verb: &str| counts[step].get(verb).copied().unwrap_or_default();
    assert_eq!(of("watch", "list sandboxes"), pages, "one list");
    assert_eq!(of("list", "list sandboxes"), 0, "known by then");
    let busy = busy as u64;
    assert!((busy..=busy * 2).contains(&of("start", "patch sandboxes")), "{:?}", counts["start"]);
    // Some more than one each: the controller writes, too, and what was read is old then.
    assert!((busy..=busy * 2).contains(&of("suspend", "patch sandboxes")), "{:?}", counts["suspend"]);
    for step in ["create", "start", "suspend"] {
        let all: u64 = counts[step].values().sum();
        assert!(all <= 9 * busy, "{step}: {all} requests for {busy} sandboxes: {:?}", counts[step]);
        let lists: u64 = ["list sandboxes", "list pods"].iter().map(|verb| of(step, verb)).sum();
        assert!(lists <= 2 * pages + 2, "{step}: {:?}", counts[step]);
    }
    assert!(most <= MOST, "{most} MiB");
    counts
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_objects_are_watched_and_what_is_asked_for_is_linear() {
    let _counts = measure(2_000, 60).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "slow: twenty thousand objects and a thousand suspends"]
async fn twenty_thousand_objects_fit_in_150_mib_and_a_thousand_suspends_are_linear() {
    // A quarter of everything first: what is linear is four times as much then.
    let small = measure(5_000, 250).await;
    let large = measure(LARGE.0, LARGE.1).await;
    for (step, counts) in &large {
        for (verb, count) in counts {
            let before = small[step].get(verb).copied().unwrap_or_default();
            // Few requests (one list, one watch) and conflicts with the controller's own writes vary; a connection that
            // was let go meanwhile is made once more.
            let most = if before == 0 { LARGE.1 as u64 } else { 5 * before + 50 };
            assert!(*count <= most, "{step}: {before} times '{verb}', and {count} for four times as many");
        }
    }
}
