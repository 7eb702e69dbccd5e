//! What a VM process takes beside its guest's memory, and what it does while its guest idles.

use std::{fs, thread::sleep, time::Duration};

use crate::{
    LIMIT, command_line,
    machine::{Bench, Outcome, Which},
};

/// How long an idle guest is looked at.
const LOOK: Duration = Duration::from_secs(10);

pub(crate) fn run(bench: &Bench) -> Outcome<()> {
    for (name, bytes) in [("128 MiB", 128 << 20), ("1 GiB", 1 << 30)] {
        for which in [Which::Torpor, Which::Qemu] {
            let mut job = bench.job(&format!("{} torpor.test=idle", command_line(bytes)));
            job.memory_bytes = bytes;
            let mut running = bench.start(which, &job)?;
            running.wait_for("MARK", LIMIT)?;
            sleep(Duration::from_secs(2));
            let pid = running.child.id();
            let (pss, private) = beside_guest(pid, bytes)?;
            let before = activity(pid)?;
            sleep(LOOK);
            let after = activity(pid)?;
            println!(
                "RESULT memory | {which:?}, {name} | Pss {:.2} MiB | private dirty {:.2} MiB | idle: {} ms CPU and {} switches in {} s",
                pss as f64 / 1024.0,
                private as f64 / 1024.0,
                (after.0 - before.0) * 10,
                after.1 - before.1,
                LOOK.as_secs()
            );
        }
    }
    Ok(())
}

/// Pss and private dirty memory of all mappings but the guest's, KiB (proc(5): smaps).
fn beside_guest(pid: u32, guest_bytes: u64) -> Outcome<(u64, u64)> {
    let (mut sums, mut counted) = ((0, 0), true);
    for line in fs::read_to_string(format!("/proc/{pid}/smaps"))?.lines() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some((start, end)) = first.split_once('-')
            && let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
        {
            // A mapping half the guest's size is part of its memory: the hole may split it.
            counted = end - start < guest_bytes / 2;
            continue;
        }
        let kib = words.next().and_then(|number| number.parse::<u64>().ok()).unwrap_or_default();
        match first {
            "Pss:" if counted => sums.0 += kib,
            "Private_Dirty:" if counted => sums.1 += kib,
            _ => {}
        }
    }
    Ok(sums)
}

/// CPU time in clock ticks of 10 ms, and voluntary switches, of all threads.
fn activity(pid: u32) -> Outcome<(u64, u64)> {
    let mut sums = (0, 0);
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = thread?.path();
        let stat = fs::read_to_string(thread.join("stat"))?;
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split_whitespace().collect();
        // utime and stime are fields 14 and 15, where the state is field 3.
        sums.0 += fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
        let status = fs::read_to_string(thread.join("status"))?;
        let switches = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sums.1 += switches.and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or_default();
    }
    Ok(sums)
}
