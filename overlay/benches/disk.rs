//! The engine and `qemu-img bench` in one run, on overlays of the same kind over the same base: random 4 KiB and
//! sequential 1 MiB requests, one and 32 at a time, and the making of an overlay.
//!
//! `cargo bench -p torpor-overlay` prints requests a second and the ratio to qemu-img's better way of the two that it
//! has (threads, io_uring); each is the best of some short rounds, taken in turn. The processor time of a request is the
//! least of the rounds too: it tells more than the rate on a host that has other things to do. `cargo bench -p
//! torpor-overlay -- read` runs what has `read` in its name.
#![allow(clippy::unwrap_used)] // a measuring program

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use torpor_overlay::{BaseIdentity, Block, Limits, Queue, create, open, sha256_file};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 512 * MIB;
const ROUNDS: u32 = 8;

/// What is measured.
#[derive(Debug, Clone, Copy)]
struct Work {
    write: bool,
    length: u64,
    depth: u64,
    count: u64,
}

impl Work {
    /// What overlays that are new are written with; they can be measured once only.
    const FRESH: Self = Self { write: true, length: 4096, depth: 1, count: 5000 };

    const fn new(write: bool, length: u64, depth: u64, count: u64) -> Self {
        Self { write, length, depth, count }
    }

    fn name(self) -> String {
        let (kind, size) = (if self.write { "write" } else { "read" }, self.length / 1024);
        let order = if self.is_random() { "random" } else { "sequential" };
        format!("{kind} {size} KiB {order}, depth {}", self.depth)
    }

    fn is_random(self) -> bool {
        self.length < MIB
    }

    /// Where request `number` goes.
    fn offset(self, number: u64) -> u64 {
        let spread = if self.is_random() { number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20 } else { number };
        spread % (SIZE / self.length) * self.length
    }

    fn perform(self, disk: &dyn Block, number: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self.write {
            true => disk.write(buffer, self.offset(number)),
            false => disk.read(buffer, self.offset(number)),
        }
    }

    /// Requests a second.
    fn rate(self, time: Duration) -> f64 {
        self.count as f64 / time.as_secs_f64()
    }
}

/// What a round has shown, or the best of some.
#[derive(Debug, Clone, Copy)]
struct Shown {
    /// Requests a second.
    rate: f64,
    /// Microseconds of processor time of a request.
    cpu: f64,
}

impl Shown {
    const NOTHING: Self = Self { rate: 0.0, cpu: f64::INFINITY };

    fn best(self, other: Self) -> Self {
        Self { rate: self.rate.max(other.rate), cpu: self.cpu.min(other.cpu) }
    }
}

/// Processor time used so far, in microseconds.
fn cpu(who: UsageWho) -> f64 {
    let usage = getrusage(who).unwrap();
    (usage.user_time().num_microseconds() + usage.system_time().num_microseconds()) as f64
}

/// Times what performs all requests; what was made ready before doesn't count.
fn measured(work: Work, perform: impl FnOnce()) -> Shown {
    let (before, begun) = (cpu(UsageWho::RUSAGE_SELF), Instant::now());
    perform();
    let (rate, after) = (work.rate(begun.elapsed()), cpu(UsageWho::RUSAGE_SELF));
    Shown { rate, cpu: (after - before) / work.count as f64 }
}

/// A request at a time in the caller's thread, as a VMM does it.
fn inline(disk: &dyn Block, work: Work) -> Shown {
    let mut buffer = vec![1; work.length as usize];
    measured(work, || (0..work.count).for_each(|number| work.perform(disk, number, &mut buffer).unwrap()))
}

/// Many at a time through a queue; each completion hands the next request over.
fn queued(disk: &Arc<dyn Block>, work: Work) -> Shown {
    let queue = Queue::new(Arc::clone(disk), Limits { threads: 2, depth: 32 }, Arc::new(|| Ok(())));
    let (next, (done, ended)) = (Arc::new(AtomicU64::new(work.depth)), channel());
    // All writes come out of one buffer, which stays in the processor's cache: the disk is measured, not the memory.
    let buffer = || Arc::new(RwLock::new(vec![1; work.length as usize]));
    let shared = buffer();
    let slots: Vec<_> =
        (0..work.depth).map(|_| if work.write { Arc::clone(&shared) } else { buffer() }).collect();
    measured(work, || {
        for (number, slot) in (0..).zip(slots) {
            submit(queue.clone(), work, number, slot, Arc::clone(&next), done.clone());
        }
        (0..work.depth).for_each(|_| ended.recv().unwrap());
    })
}

fn submit(
    queue: Queue,
    work: Work,
    number: u64,
    slot: Arc<RwLock<Vec<u8>>>,
    next: Arc<AtomicU64>,
    done: Sender<()>,
) {
    let (buffer, again) = (Arc::clone(&slot), queue.clone());
    let completion = move |result: io::Result<()>| {
        result.unwrap();
        match next.fetch_add(1, Ordering::Relaxed) {
            number if number < work.count => submit(again, work, number, slot, next, done),
            _ => done.send(()).unwrap(),
        }
    };
    let request = move |disk: &dyn Block| match work.write {
        true => disk.write(&buffer.read().unwrap(), work.offset(number)),
        false => disk.read(&mut buffer.write().unwrap(), work.offset(number)),
    };
    assert!(queue.submit(request, completion).is_ok());
}

fn engine(disk: &Arc<dyn Block>, work: Work) -> Shown {
    let shown = if work.depth == 1 { inline(&**disk, work) } else { queued(disk, work) };
    // qemu-img bench doesn't count its flush at the end either.
    disk.flush().unwrap();
    shown
}

/// [`run_qemu`], in processor time without what it costs to start and end it.
fn qemu(way: &str, path: &Path, work: Work) -> Option<Shown> {
    let measure = |work| {
        let before = cpu(UsageWho::RUSAGE_CHILDREN);
        let rate = run_qemu(way, path, work)?;
        Some((rate, cpu(UsageWho::RUSAGE_CHILDREN) - before))
    };
    let (_, start) = measure(Work { count: 1, depth: 1, ..work })?;
    let (rate, cpu) = measure(work)?;
    Some(Shown { rate, cpu: (cpu - start).max(0.0) / work.count as f64 })
}

/// qemu-img bench in one of its ways; a step of an odd number of blocks spreads the requests.
fn run_qemu(way: &str, path: &Path, work: Work) -> Option<f64> {
    let step = if work.is_random() { work.length * 10_007 } else { work.length };
    let mut command = Command::new("qemu-img");
    command.args(["bench", "-f", "qcow2", "-t", "writeback", "-i", way]);
    for (option, value) in [("-c", work.count), ("-d", work.depth), ("-s", work.length), ("-S", step)] {
        command.args([option, &value.to_string()]);
    }
    if work.write {
        command.arg("-w");
    }
    let output = command.arg(path).output().unwrap();
    // "Run completed in 1.234 seconds."
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let seconds = text.split_whitespace().filter_map(|word| word.parse::<f64>().ok()).next_back()?;
    output.status.success().then_some(work.count as f64 / seconds)
}

struct Bench {
    dir: tempfile::TempDir,
    base: PathBuf,
    identity: BaseIdentity,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base.raw");
        std::fs::write(&base, vec![7; 64 << 20]).unwrap();
        let identity = BaseIdentity { digest: sha256_file(&base).unwrap(), size: 64 * MIB };
        Self { dir, base, identity }
    }

    fn overlay(&self, name: &str, size: u64) -> PathBuf {
        let path = self.dir.path().join(name);
        create(&path, &self.base, &self.identity, size).unwrap();
        path
    }

    fn creation(&self) {
        let mut times: Vec<Duration> = (0..50)
            .map(|number| {
                let begun = Instant::now();
                self.overlay(&format!("{number}.qcow2"), 10 << 30);
                begun.elapsed()
            })
            .collect();
        times.sort();
        println!("create 10 GiB: median {:?}, worst {:?} of 50", times[25], times[49]);
    }
}

fn report(name: &str, own: Shown, other: Shown) {
    let (rate, cpu) = (own.rate / other.rate, own.cpu / other.cpu);
    print!("{name:36} {:10.0}/s  qemu {:10.0}/s  ratio {rate:.2};  ", own.rate, other.rate);
    println!("cpu {:7.2} us  qemu {:7.2} us  ratio {cpu:.2}", own.cpu, other.cpu);
}

fn main() {
    // Cargo passes its own options, which begin with a dash.
    let wanted = std::env::args().skip(1).find(|word| !word.starts_with('-')).unwrap_or_default();
    let bench = Bench::new();
    if "create".contains(&wanted) {
        bench.creation();
    }
    let disk: Arc<dyn Block> = Arc::new(open(&bench.overlay("ours.qcow2", SIZE), &[&bench.base]).unwrap());
    let others = ["threads", "io_uring"].map(|way| (way, bench.overlay(way, SIZE)));
    let best_other = |work| {
        let ways = others.iter().filter_map(|(way, path)| qemu(way, path, work));
        ways.fold(Shown::NOTHING, Shown::best)
    };
    let (own, other) = (engine(&disk, Work::FRESH), best_other(Work::FRESH));
    report("write 4 KiB to new clusters, depth 1", own, other);
    // From here on every cluster is there.
    let fill = Work::new(true, MIB, 1, SIZE / MIB);
    engine(&disk, fill);
    best_other(fill);
    for work in [
        Work::new(true, MIB, 1, 256),
        Work::new(true, MIB, 32, 256),
        Work::new(false, MIB, 1, 256),
        Work::new(false, MIB, 32, 256),
        Work::new(true, 4096, 1, 20_000),
        Work::new(true, 4096, 32, 20_000),
        Work::new(false, 4096, 1, 20_000),
        Work::new(false, 4096, 32, 20_000),
    ] {
        if !work.name().contains(&wanted) {
            continue;
        }
        let (mut own, mut other) = (Shown::NOTHING, Shown::NOTHING);
        for _ in 0..ROUNDS {
            own = own.best(engine(&disk, work));
            other = other.best(best_other(work));
        }
        report(&work.name(), own, other);
    }
    disk.close().unwrap();
}
