//! The engine and `qemu-img bench` in one run, on the same kind of overlay: 4 KiB random writes and reads at depths
//! 1 and 32, sequential 1 MiB, and the making of an overlay. `cargo run --release -p torpor-overlay --example disk_bench`
#![allow(clippy::unwrap_used, clippy::too_many_arguments)] // a measuring program

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use torpor_overlay::{BaseIdentity, Block, create, open, sha256_file};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 512 * MIB;
const COUNT: u64 = 40_000;

/// Requests of `length` bytes by `depth` threads at pseudo-random or rising offsets; returns requests a second.
fn engine(disk: &dyn Block, write: bool, length: u64, depth: u64, count: u64, random: bool) -> f64 {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..depth {
            scope.spawn(move || {
                let mut buffer = vec![thread as u8 + 1; length as usize];
                let mut state = thread * 77 + 1;
                for number in (thread..count).step_by(depth as usize) {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let slot =
                        if random { (state >> 33) % (SIZE / length) } else { number % (SIZE / length) };
                    match write {
                        true => disk.write(&buffer, slot * length).unwrap(),
                        false => disk.read(&mut buffer, slot * length).unwrap(),
                    }
                }
            });
        }
    });
    let seconds = begun.elapsed().as_secs_f64();
    // qemu-img bench doesn't count its flush at the end either.
    disk.flush().unwrap();
    count as f64 / seconds
}

/// The same by qemu-img bench, the better of its two ways, each on an image of its own; its step of an odd number of blocks spreads the requests.
fn qemu(path: &Path, write: bool, length: u64, depth: u64, count: u64, random: bool) -> f64 {
    let ways = ["threads", "io_uring"].into_iter();
    ways.filter_map(|way| qemu_by(way, path, write, length, depth, count, random)).fold(0.0, f64::max)
}

fn qemu_by(
    way: &str,
    path: &Path,
    write: bool,
    length: u64,
    depth: u64,
    count: u64,
    random: bool,
) -> Option<f64> {
    let step = if random { length * 10_007 } else { length };
    let mut command = Command::new("qemu-img");
    command.args(["bench", "-f", "qcow2", "-t", "writeback", "-i", way]);
    command.args(["-c", &count.to_string(), "-d", &depth.to_string(), "-s", &length.to_string()]);
    command.args(["-S", &step.to_string()]);
    if write {
        command.arg("-w");
    }
    let output = command.arg(path.with_extension(way)).output().unwrap();
    // "Run completed in 1.234 seconds."
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let seconds = text.split_whitespace().filter_map(|word| word.parse::<f64>().ok()).next_back()?;
    output.status.success().then_some(count as f64 / seconds)
}

fn main() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base.raw");
    std::fs::write(&base, vec![7; 64 << 20]).unwrap();
    let identity = BaseIdentity { digest: sha256_file(&base).unwrap(), size: 64 * MIB };
    let mut times: Vec<Duration> = (0..50).map(|number| make(dir.path(), &base, &identity, number)).collect();
    times.sort();
    println!("create 10 GiB: median {:?}, worst {:?}", times[25], times[49]);
    let (ours, theirs) = (dir.path().join("ours.qcow2"), dir.path().join("theirs.qcow2"));
    for path in [&ours, &theirs.with_extension("threads"), &theirs.with_extension("io_uring")] {
        create(path, &base, &identity, SIZE).unwrap();
    }
    let disk = open(&ours, &[&base]).unwrap();
    let rounds = [
        ("write 4k rnd fresh d1", true, 4096, 1, COUNT / 8, true),
        ("write 1M seq d1", true, MIB, 1, 1024, false),
        ("read 1M seq d1", false, MIB, 1, 2048, false),
        ("write 4k rnd d1", true, 4096, 1, COUNT, true),
        ("write 4k rnd d32", true, 4096, 32, COUNT * 4, true),
        ("read 4k rnd d1", false, 4096, 1, COUNT, true),
        ("read 4k rnd d32", false, 4096, 32, COUNT * 4, true),
    ];
    for (name, write, length, depth, count, random) in rounds {
        let own = engine(&disk, write, length, depth, count, random);
        let other = qemu(&theirs, write, length, depth, count, random);
        println!("{name:24} {own:10.0}/s  qemu {other:10.0}/s  ratio {:.2}", own / other);
    }
    disk.close().unwrap();
}

fn make(dir: &Path, base: &Path, identity: &BaseIdentity, number: u32) -> Duration {
    let path = dir.join(format!("{number}.qcow2"));
    let begun = Instant::now();
    create(&path, base, identity, 10 << 30).unwrap();
    begun.elapsed()
}
