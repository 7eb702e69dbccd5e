//! What a lone request costs on its way through the block device: nanoseconds, the block thread's processor time and its
//! system calls, at queue depth 1 on an overlay in the page cache.
//!
//! ```text
//! cargo run --release -p torpor-vmm-devices --features testing --example block_path [REQUESTS]
//! ```
//!
//! System calls are counted by running this program a second time under `strace -c -f`, if that is installed. The driver's
//! side makes three for each request: it kicks (write), waits (poll) and takes the interrupt (read).
#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use torpor_overlay::{BaseIdentity, create, open, sha256_file};
use torpor_vmm_devices::testing::{Buffer, Driver};
use torpor_vmm_devices::virtio::block::{BlockDevice, BlockOptions};

const MEBIBYTE: u64 = 1 << 20;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let count: u64 = arguments.next().and_then(|count| count.parse().ok()).unwrap_or(20_000);
    if let Some(kind) = arguments.next() {
        // The traced child: one kind of request, nothing else.
        run(&kind, count);
        return;
    }
    println!("{:<12} {:>10} {:>14}   system calls per request, all threads", "request", "ns", "processor ns");
    for (kind, count) in
        [("read", count), ("overwrite", count), ("fresh", count / 10), ("write+flush", count / 100)]
    {
        let (elapsed, processor) = run(kind, count.max(1));
        println!("{kind:<12} {elapsed:>10} {processor:>14}   {}", calls(kind, count.clamp(1, 1000)));
    }
}

/// Does requests of a kind; nanoseconds and the device's processor nanoseconds for each.
fn run(kind: &str, count: u64) -> (u128, u128) {
    let folder = tempfile::tempdir().unwrap();
    let (base, path) = (folder.path().join("base.raw"), folder.path().join("overlay.qcow2"));
    std::fs::write(&base, vec![7; 16 * MEBIBYTE as usize]).unwrap();
    let identity = BaseIdentity { digest: sha256_file(&base).unwrap(), size: 16 * MEBIBYTE };
    create(&path, &base, &identity, 8 << 30).unwrap();
    let disk = open(&path, &[&base]).unwrap();
    let device = BlockDevice::new(BlockOptions {
        name: "vda".into(),
        disk: Arc::new(disk),
        serial: "bench".into(),
        read_only: false,
        rate: None,
        discard_unit: 65536,
        patience: std::time::Duration::from_secs(60),
    });
    let mut driver = Driver::start(Box::new(device));
    let data = driver.buffer(&[1; 4096]);
    let room = driver.room(4096);
    for block in 0..1024 {
        ask(&mut driver, 1, block * 8, Some(data));
    }
    let begin = Instant::now();
    let before = driver.host.processor_time();
    for at in 0..count {
        let block = at * 7919 % 1024 * 8;
        match kind {
            "read" => ask(&mut driver, 0, block, Some(room)),
            "overwrite" => ask(&mut driver, 1, block, Some(data)),
            "fresh" => ask(&mut driver, 1, (64 * MEBIBYTE + at % 100_000 * 65536) / 512, Some(data)),
            _ => {
                ask(&mut driver, 1, block, Some(data));
                ask(&mut driver, 4, 0, None);
            }
        }
    }
    let each = |time: std::time::Duration| time.as_nanos() / u128::from(count.max(1));
    let result = (each(begin.elapsed()), each(driver.host.processor_time() - before));
    driver.transport.close().unwrap();
    result
}

fn ask(driver: &mut Driver, kind: u32, sector: u64, data: Option<Buffer>) {
    let mark = driver.mark();
    let header = [kind.to_le_bytes().as_slice(), &[0; 4], &sector.to_le_bytes()].concat();
    let (header, status) = (driver.buffer(&header), driver.room(1));
    let buffers: Vec<Buffer> = [Some(header), data, Some(status)].into_iter().flatten().collect();
    driver.request(0, &buffers);
    assert_eq!(driver.content(status), [0]);
    driver.release(mark);
}

/// Calls per request of the device's threads: the difference between a run of many requests and one of none.
fn calls(kind: &str, count: u64) -> String {
    let (Some(many), Some(none)) = (trace(kind, count), trace(kind, 0)) else {
        return "strace is not installed".into();
    };
    let shown = many.into_iter().filter_map(|(name, calls)| {
        let before = none.iter().find(|(other, _)| *other == name).map_or(0, |(_, calls)| *calls);
        let each = calls.saturating_sub(before) as f64 / count as f64;
        (each >= 0.05).then(|| format!("{name} {each:.2}"))
    });
    shown.collect::<Vec<_>>().join(", ")
}

fn trace(kind: &str, count: u64) -> Option<Vec<(String, u64)>> {
    let output = Command::new("strace")
        .args(["-c", "-f", "-U", "calls,name"])
        .arg(std::env::current_exe().unwrap())
        .args([&count.to_string(), kind])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let calls = words.next()?.parse().ok()?;
        Some((words.next()?.to_owned(), calls))
    });
    Some(lines.filter(|(name, _)| name != "total").collect())
}
