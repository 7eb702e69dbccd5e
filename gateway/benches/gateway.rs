//! `cargo xtask bench gateway`: a gateway over the sim driver at its planned size, beside the goals of the project.
//!
//! The gateway runs in a process of its own (this program again), so that its memory can be told from the clients'.
#![allow(clippy::unwrap_used, missing_docs, reason = "a measurement: what goes wrong ends it, loudly")]

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{StreamExt as _, stream};
use tonic::{
    Code,
    transport::{Channel, Endpoint, Uri},
};
use torpor_gateway::{Config, Gateway, simworld};
use torpor_proto::v1::{
    self, Phase, gateway_client::GatewayClient, sandbox_event::Kind, sandboxes_client::SandboxesClient,
};
use torpor_sandbox::{ComputeDriver, sim::Script};

const FOLDER: &str = "TORPOR_BENCH_FOLDER";
const GROUP: &str = "TORPOR_BENCH_GROUP";
const TEAMS: usize = 100;
/// Requests under way at once, of all clients.
const AT_ONCE: usize = 1024;
const CONNECTIONS: usize = 8;
/// What a verb of the pretended backend takes.
const VERB: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(20));

type Client = SandboxesClient<Channel>;

fn number(name: &str, usual: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

fn main() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    match std::env::var_os(FOLDER) {
        Some(folder) => runtime.block_on(be_the_gateway(Path::new(&folder))),
        None => runtime.block_on(measure()),
    }
}

fn config(folder: &Path) -> Config {
    let mut config = Config {
        state_dir: folder.join("state"),
        run_dir: folder.join("run"),
        listen: format!("unix://{}/gateway.sock", folder.display()),
        drivers: vec!["sim".into()],
        commit_group: number(GROUP, 0),
        ..Config::default()
    };
    config.network.range = "10.64.0.0/11".parse().unwrap();
    config.network.quarantine_seconds = 0;
    (config.limits.cpu_percent, config.limits.memory_bytes) = (100_000_000, 1 << 50);
    config
}

async fn be_the_gateway(folder: &Path) {
    let config = config(folder);
    let sim = simworld::open(&config.state_dir, Script { delay: VERB, ..Script::default() }).unwrap();
    let drivers: Vec<Arc<dyn ComputeDriver>> = vec![sim];
    let gateway = Gateway::start_with(config, Some(drivers)).await.unwrap();
    // Its parent ends it.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    gateway.end().await;
}

struct Host {
    folder: PathBuf,
    child: Child,
}

impl Host {
    fn start(folder: &Path, group: usize) -> Self {
        std::fs::create_dir_all(folder.join("state")).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            // As its unit has it.
            .env("MALLOC_ARENA_MAX", "2")
            .env(FOLDER, folder)
            .env(GROUP, group.to_string())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self { folder: folder.to_owned(), child }
    }

    async fn connect(&self) -> Channel {
        let socket = self.folder.join("gateway.sock");
        while tokio::net::UnixStream::connect(&socket).await.is_err() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let connect = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { tokio::net::UnixStream::connect(socket).await.map(hyper_util::rt::TokioIo::new) }
        });
        Endpoint::from_static("http://gateway").connect_with_connector(connect).await.unwrap()
    }

    async fn clients(&self) -> Vec<Client> {
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            clients.push(SandboxesClient::new(self.connect().await));
        }
        clients
    }

    /// A line of /proc/PID/status, MiB.
    fn memory(&self, line: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let kib = status.lines().find_map(|l| l.strip_prefix(line)).unwrap();
        kib.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() >> 10
    }

    /// What it has used of the CPUs so far (proc(5): utime and stime of /proc/PID/stat, in hundredths of a second).
    fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
        Duration::from_millis(ticks * 10)
    }

    fn kill(&mut self) {
        // Fails when it is gone already.
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Clone, Copy)]
enum Verb {
    Create,
    Suspend,
    Resume,
}

fn name(n: usize) -> String {
    format!("s{n}")
}

/// One request; tried again as long as the gateway says that it has too much to do. How often that was.
async fn ask(mut client: Client, verb: Verb, n: usize, wait: bool) -> u64 {
    let mut refused = 0;
    loop {
        let target = Some(v1::Target { sandbox: name(n), wait, ..Default::default() });
        let done = match verb {
            Verb::Create => {
                let labels = [("team".to_owned(), format!("t{}", n % TEAMS))].into();
                let request = v1::CreateSandboxRequest { name: name(n), labels, wait, ..Default::default() };
                client.create(request).await.map(drop)
            }
            Verb::Suspend => client.suspend(v1::SuspendRequest { target, keep: 0 }).await.map(drop),
            Verb::Resume => client.resume(v1::ResumeRequest { target, ..Default::default() }).await.map(drop),
        };
        match done {
            Ok(()) => return refused,
            Err(status) if status.code() == Code::ResourceExhausted => {
                refused += 1;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(status) => panic!("{status:?}"),
        }
    }
}

async fn ask_all(
    clients: &[Client],
    verb: Verb,
    range: std::ops::Range<usize>,
    at_once: usize,
    wait: bool,
) -> (Duration, u64) {
    let began = Instant::now();
    let asked = stream::iter(range).map(|n| ask(clients[n % clients.len()].clone(), verb, n, wait));
    let refused = asked.buffer_unordered(at_once).fold(0, |sum, n| async move { sum + n }).await;
    (began.elapsed(), refused)
}

/// Waits until so many sandboxes have this phase, as the gateway counts them for whoever asks.
async fn settled(client: &mut Client, wanted: HashMap<Phase, usize>) {
    loop {
        let mut counted: HashMap<Phase, usize> = HashMap::new();
        let mut page_token = String::new();
        loop {
            let request = v1::ListSandboxesRequest { page_size: 1000, page_token, ..Default::default() };
            let page = client.list(request).await.unwrap().into_inner();
            for sandbox in &page.sandboxes {
                *counted.entry(sandbox.status.as_ref().unwrap().phase()).or_default() += 1;
            }
            page_token = page.next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        if wanted.iter().all(|(phase, count)| counted.get(phase).copied().unwrap_or_default() == *count) {
            return;
        }
        // To look costs about as much as a thousand transitions.
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort_unstable();
    times[(times.len() * percent / 100).min(times.len() - 1)]
}

struct Report {
    missed: usize,
}

impl Report {
    fn line(&self, what: &str, figure: impl std::fmt::Display) {
        println!("{what:<64} {figure}");
    }

    fn goal(&mut self, what: &str, figure: Duration, goal: Duration) {
        let verdict = if figure <= goal { "ok" } else { "MISSED" };
        self.missed += usize::from(figure > goal);
        println!(
            "{what:<64} {:>9.1} ms   goal {:>7} ms   {verdict}",
            figure.as_secs_f64() * 1e3,
            goal.as_millis()
        );
    }
}

/// So many clients watch, each its own team's sandboxes, and one watches all; how many events they have seen.
async fn watch(host: &Host, seen: &Arc<AtomicU64>, report: &Report) {
    let began = Instant::now();
    let mut synced = Vec::new();
    for n in 0..=TEAMS {
        let mut client = SandboxesClient::new(host.connect().await);
        let (done, sync) = tokio::sync::oneshot::channel();
        let seen = seen.clone();
        synced.push(sync);
        tokio::spawn(async move {
            let label_selector = if n == TEAMS { String::new() } else { format!("team=t{n}") };
            let request = v1::WatchSandboxesRequest { label_selector, ..Default::default() };
            let mut events = client.watch(request).await.unwrap().into_inner();
            let mut done = Some(done);
            while let Some(Ok(event)) = events.next().await {
                seen.fetch_add(1, Ordering::Relaxed);
                if event.kind() == Kind::Synced {
                    done.take().map(|done| done.send(()));
                }
            }
        });
    }
    for sync in synced {
        sync.await.unwrap();
    }
    report.line(
        "101 watchers (100 of a team each, 1 of all) in sync after",
        format!("{:.1?}", began.elapsed()),
    );
}

async fn pages(client: &mut Client, report: &mut Report, selector: &str, what: &str) {
    let (mut times, mut page_token, mut rows) = (Vec::new(), String::new(), 0);
    loop {
        let began = Instant::now();
        let label_selector = selector.to_owned();
        let request =
            v1::ListSandboxesRequest { page_size: 100, page_token, label_selector, all_workspaces: false };
        let page = client.list(request).await.unwrap().into_inner();
        times.push(began.elapsed());
        rows += page.sandboxes.len();
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    let median = percentile(&mut times, 50);
    report.line(&format!("{what}: {rows} rows in {} pages, median", times.len()), format!("{median:.1?}"));
    report.goal(&format!("{what}: slowest page of 100"), *times.last().unwrap(), Duration::from_millis(20));
}

/// Gets of one client while 200 sandboxes are on their way from one phase to the other all the time.
async fn gets(clients: &[Client], report: &mut Report) {
    let end = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..200)
        .map(|n| {
            let (client, end) = (clients[n % clients.len()].clone(), end.clone());
            tokio::spawn(async move {
                let mut turns = 0;
                while !end.load(Ordering::Relaxed) {
                    ask(client.clone(), Verb::Resume, n, true).await;
                    ask(client.clone(), Verb::Suspend, n, true).await;
                    turns += 2;
                }
                turns
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let (began, mut client, mut times) = (Instant::now(), clients[0].clone(), Vec::new());
    for n in 0..2000 {
        let began = Instant::now();
        client.get(v1::GetSandboxRequest { sandbox: name(n * 7 % 2000) }).await.unwrap();
        times.push(began.elapsed());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let took = began.elapsed();
    end.store(true, Ordering::Relaxed);
    let mut turns = 0;
    for worker in workers {
        turns += worker.await.unwrap();
    }
    report.line("transitions a second meanwhile", format!("{:.0}", f64::from(turns) / took.as_secs_f64()));
    report.line(
        "get while 200 transitions are in flight: median",
        format!("{:.1?}", percentile(&mut times, 50)),
    );
    report.goal(
        "get while 200 transitions are in flight: p99",
        percentile(&mut times, 99),
        Duration::from_millis(10),
    );
}

/// Sandboxes a second through create, suspend and resume, so many at once.
async fn throughput(group: usize, count: usize) -> [f64; 3] {
    let folder = tempfile::tempdir().unwrap();
    let host = Host::start(folder.path(), group);
    let clients = host.clients().await;
    let mut rates = [0.0; 3];
    for (rate, verb) in rates.iter_mut().zip([Verb::Create, Verb::Suspend, Verb::Resume]) {
        let (took, _) = ask_all(&clients, verb, 0..count, 200, true).await;
        *rate = count as f64 / took.as_secs_f64();
    }
    rates
}

async fn measure() {
    let all = number("TORPOR_BENCH_SANDBOXES", 20_000);
    let awake = all / 10;
    let mut report = Report { missed: 0 };
    let folder = tempfile::tempdir().unwrap();
    let mut host = Host::start(folder.path(), 0);
    let mut clients = host.clients().await;
    let secs = |s| Duration::from_secs(s);

    let began = Instant::now();
    let (accepted, refused) = ask_all(&clients, Verb::Create, 0..all, AT_ONCE, false).await;
    report.line(&format!("{all} creates accepted ({refused} asked again)"), format!("{accepted:.1?}"));
    settled(&mut clients[0], [(Phase::Ready, all)].into()).await;
    report.line(&format!("{all} sandboxes Ready"), format!("{:.1?}", began.elapsed()));
    report.line("gateway's memory, all Ready", format!("{} MiB", host.memory("VmRSS:")));
    report.line("gateway's CPU time so far", format!("{:.1?}", host.cpu()));

    pages(&mut clients[0], &mut report, "", "list").await;
    pages(&mut clients[0], &mut report, "team=t7", "list of a label").await;
    let seen = Arc::new(AtomicU64::new(0));
    watch(&host, &seen, &report).await;

    let (began, before, used) = (Instant::now(), seen.load(Ordering::Relaxed), host.cpu());
    let (accepted, refused) = ask_all(&clients, Verb::Suspend, 0..all, AT_ONCE, false).await;
    report.line(&format!("{all} suspends accepted ({refused} asked again)"), format!("{accepted:.1?}"));
    settled(&mut clients[0], [(Phase::Suspended, all)].into()).await;
    report.goal(&format!("{all} suspends accepted and settled"), began.elapsed(), secs(30));
    report.line("gateway's CPU time for it", format!("{:.1?}", host.cpu() - used));
    report.line("events that the watchers saw meanwhile", seen.load(Ordering::Relaxed) - before);

    gets(&clients, &mut report).await;

    let began = Instant::now();
    ask_all(&clients, Verb::Resume, 0..awake, AT_ONCE, false).await;
    settled(&mut clients[0], [(Phase::Ready, awake), (Phase::Suspended, all - awake)].into()).await;
    report.line(&format!("{awake} of {all} resumed"), format!("{:.1?}", began.elapsed()));

    let most = host.memory("VmHWM:");
    ask_all(&clients, Verb::Suspend, 0..awake / 2, AT_ONCE, false).await;
    host.kill();
    let began = Instant::now();
    host = Host::start(folder.path(), 0);
    let channel = host.connect().await;
    GatewayClient::new(channel.clone()).info(v1::InfoRequest {}).await.unwrap();
    report.goal("killed with suspends under way, started: serves after", began.elapsed(), secs(2));
    let mut client = SandboxesClient::new(channel);
    let rest = [(Phase::Ready, awake - awake / 2), (Phase::Suspended, all - awake + awake / 2)];
    settled(&mut client, rest.into()).await;
    report.goal("… and is settled after", began.elapsed(), secs(15));
    let most = most.max(host.memory("VmHWM:"));
    let verdict = if most <= 250 { "ok" } else { "MISSED" };
    report.missed += usize::from(most > 250);
    println!("{:<64} {most:>9} MiB  goal     250 MiB  {verdict}", "gateway's memory, at most");
    drop(host);

    let count = (all / 20).max(50);
    let (grouped, single) = (throughput(0, count).await, throughput(1, count).await);
    for (at, verb) in ["create", "suspend", "resume"].iter().enumerate() {
        let figure = format!(
            "{:.0}/s in groups, {:.0}/s with a flush each: {:.1} times",
            grouped[at],
            single[at],
            grouped[at] / single[at]
        );
        report.line(&format!("{verb} and wait, {count} by 200 at once"), figure);
    }
    println!("{} goals missed", report.missed);
    std::process::exit(i32::from(report.missed > 0));
}
