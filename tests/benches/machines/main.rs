//! torpor-vmm beside QEMU's microvm on the same KVM: same kernel, same initramfs, same disk, run by turns.
//!
//! `cargo xtask bench boot|disk|memory` builds all that this needs and runs it in the box, whose virtual clock makes the figures
//! repeatable. It needs: TORPOR_BENCH_VMM (torpor-vmm), TORPOR_BENCH_GUEST (torpor-test-guest, static),
//! TORPOR_BENCH_KERNEL (a vmlinuz with its modules), and a KVM that runs it.

mod disk;
mod machine;
mod memory;
mod payload;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use machine::{Bench, Job, MEMORY, Outcome, Which};
use torpor_vmm_api::kernel_line::{host_makes_huge_pages, kernel_line};

/// Rounds of each; the median is shown.
const ROUNDS: usize = 5;
/// Of a boot with the stock command line, which takes minutes of the host's time: on the box's clock one is enough.
const LONG_ROUNDS: usize = 1;
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> Outcome<()> {
    // Cargo's own words ("--bench") are no names of ours.
    let what = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    let path = |name: &str| std::env::var_os(format!("TORPOR_BENCH_{name}")).map(PathBuf::from);
    let (Some(vmm), Some(guest), Some(kernel)) = (path("VMM"), path("GUEST"), path("KERNEL")) else {
        println!("SKIP machines: run it by `cargo xtask bench boot|disk|memory`");
        return Ok(());
    };
    let bench = Bench::prepare(&vmm, &guest, &kernel)?;
    match what.as_deref() {
        Some("disk") => disk::run(&bench),
        Some("memory") => memory::run(&bench),
        Some("boot") | None => boot(&bench),
        Some(other) => Err(format!("unknown benchmark '{other}': boot, disk, memory").into()),
    }
}

/// The command line that the vm driver gives a guest with so much memory here.
fn command_line(memory_bytes: u64) -> String {
    kernel_line(memory_bytes, host_makes_huge_pages())
}

/// From the process's start to a line on its console.
fn until(bench: &Bench, which: Which, job: &Job, mark: &str) -> Outcome<Duration> {
    let begin = Instant::now();
    let mut running = bench.start(which, job)?;
    running.wait_for(mark, LIMIT)?;
    Ok(begin.elapsed())
}

/// What is started, and what ends it.
struct Kind<'a> {
    name: &'a str,
    job: Job,
    mark: &'a str,
    rounds: usize,
    /// First does what the vm driver does before it starts a VM.
    warm: bool,
}

fn boot(bench: &Bench) -> Outcome<()> {
    let payload = bench.file("payload.elf", &payload::elf())?;
    let ours = bench.job(&format!("{} torpor.test=marker", command_line(MEMORY)));
    let unpacked = bench.unpacked(&ours)?;
    let stock = bench.job("console=ttyS0 reboot=t panic=-1 torpor.test=marker");
    let of = |name, job, mark, warm| Kind { name, job, mark, rounds: ROUNDS, warm };
    let first_byte = || Job::of_kernel(&payload, "");
    let kinds = [
        of("first byte of a bare payload", first_byte(), "P", false),
        of("the same, cgroups warmed up as the driver does", first_byte(), "P", true),
        of("/init, our command line", ours, "MARK", true),
        of("/init, our command line, unpacked kernel", unpacked, "MARK", true),
        Kind { rounds: LONG_ROUNDS, ..of("/init, stock command line", stock, "MARK", true) },
    ];
    println!(
        "virtual ms from the process's start, median of {ROUNDS}, 128 MiB, 1 CPU; torpor-vmm beside QEMU microvm,rtc=on"
    );
    kinds.iter().try_for_each(|kind| beside(bench, kind))
}

/// One line: both machines by turns.
fn beside(bench: &Bench, kind: &Kind<'_>) -> Outcome<()> {
    let name = kind.name;
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..kind.rounds {
        for (which, times) in [Which::Torpor, Which::Qemu].into_iter().zip(&mut times) {
            if kind.warm {
                warm_up();
            }
            let time = until(bench, which, &kind.job, kind.mark);
            times.push(time.map_err(|e| format!("{name}, {which:?}: {e}"))?);
        }
    }
    let [ours, theirs] = times.map(median);
    let ratio = ours.as_secs_f64() / theirs.as_secs_f64();
    println!("RESULT boot | {name} | {:.1} | {:.1} | ratio {ratio:.3}", ms(ours), ms(theirs));
    Ok(())
}

/// As netpool's `CgroupParent::warm_up`: the process that can't exist makes the kernel wait now instead of in the start.
fn warm_up() {
    let _ = std::fs::write("/sys/fs/cgroup/cgroup.procs", i32::MAX.to_string());
}

pub(crate) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
