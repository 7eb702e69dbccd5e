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
    process::Command,
    time::{Duration, Instant},
};

use machine::{Bench, Job, Outcome, Which};

/// Rounds of each; the median is shown.
const ROUNDS: usize = 5;
const LIMIT: Duration = Duration::from_secs(60);
const COMMAND_LINE: &str = "console=ttyS0 quiet reboot=t panic=-1 cryptomgr.notests i8042.noaux i8042.nokbd";

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

/// From the process's start to a line on its console.
fn until(bench: &Bench, which: Which, job: &Job, mark: &str) -> Outcome<Duration> {
    let begin = Instant::now();
    let mut running = bench.start(which, job)?;
    running.wait_for(mark, LIMIT)?;
    Ok(begin.elapsed())
}

fn boot(bench: &Bench) -> Outcome<()> {
    let payload = bench.file("payload.elf", &payload::elf())?;
    let line = |end: &str| format!("{COMMAND_LINE} {end}");
    let kinds = [
        ("first byte of a bare payload", Job::of_kernel(&payload, ""), "P"),
        ("/init, our command line", bench.job(&line("torpor.test=marker")), "MARK"),
        (
            "/init, stock command line",
            bench.job("console=ttyS0 reboot=t panic=-1 torpor.test=marker"),
            "MARK",
        ),
    ];
    println!(
        "virtual ms from the process's start, median of {ROUNDS}, 128 MiB, 1 CPU; torpor-vmm beside QEMU microvm,rtc=on"
    );
    for kind in &kinds {
        beside(bench, kind)?;
    }
    // KVM moves a thread of its own into the process's cgroups, which takes two or three ticks without this option.
    let status = Command::new("mount").args(["-o", "remount,favordynmods", "/sys/fs/cgroup"]).status()?;
    if !status.success() {
        return Err(format!("mount -o remount,favordynmods /sys/fs/cgroup: {status}").into());
    }
    println!("with cgroup2 mounted with favordynmods:");
    kinds[..2].iter().try_for_each(|kind| beside(bench, kind))
}

/// One line: both machines by turns.
fn beside(bench: &Bench, (name, job, mark): &(&str, Job, &str)) -> Outcome<()> {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (which, times) in [Which::Torpor, Which::Qemu].into_iter().zip(&mut times) {
            times.push(until(bench, which, job, mark).map_err(|e| format!("{name}, {which:?}: {e}"))?);
        }
    }
    let [ours, theirs] = times.map(median);
    let ratio = ours.as_secs_f64() / theirs.as_secs_f64();
    println!("RESULT boot | {name} | {:.1} | {:.1} | ratio {ratio:.3}", ms(ours), ms(theirs));
    Ok(())
}

pub(crate) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
