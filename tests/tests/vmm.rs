//! torpor-vmm as a process with a real guest: what is left of its disk when it is killed. Runs in the box (tests/box/ring).
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../benches/machines/machine.rs"]
#[allow(dead_code, reason = "the benchmarks use the rest")]
mod machine;

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread::sleep,
    time::Duration,
};

use machine::{Bench, Which};
use torpor_overlay::{BaseIdentity, Block as _, create, open, sha256_file};
use torpor_test_guest::{BLOCK, Places, place};

const DISK_BYTES: u64 = 48 << 20;
/// Bytes read at once.
const PIECE: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
const COMMAND_LINE: &str =
    "console=ttyS0 quiet reboot=t panic=-1 cryptomgr.notests i8042.noaux torpor.test=load";

/// The programs that the ring has built, or a word about why not.
fn bench(test: &str) -> Option<Bench> {
    let path = |name: &str| std::env::var_os(format!("TORPOR_TEST_{name}")).map(PathBuf::from);
    let in_box = std::env::var_os("TORPOR_BOX").is_some();
    if let (true, Some(vmm), Some(guest), Some(kernel)) = (in_box, path("VMM"), path("GUEST"), path("KERNEL"))
    {
        return Some(Bench::prepare(&vmm, &guest, &kernel).unwrap());
    }
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|word| word == "box"),
        "{test} is required, but its programs are not there"
    );
    let _ = std::io::Write::write_fmt(
        &mut std::io::stderr(),
        format_args!("SKIP {test}: runs in tests/box/ring\n"),
    );
    None
}

/// The last number that the guest knew to be durable.
fn synced(console: &str) -> u64 {
    // The last line may be cut short.
    let whole = &console[..console.rfind('\n').map_or(0, |end| end + 1)];
    let numbers = whole.lines().filter_map(|line| line.trim().strip_prefix("SYNCED ")?.parse().ok());
    numbers.max().unwrap_or_default()
}

/// Every block holds the newest number that was synced to it, or a later one.
fn verify(overlay: &Path, base: &Path, synced: u64) {
    let checked =
        Command::new("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(overlay).status().unwrap();
    // 3: clusters leaked, which a crash may leave (qemu-img(1)).
    assert!(matches!(checked.code(), Some(0 | 3)), "qemu-img check: {checked}");
    let disk = open(overlay, &[base]).unwrap();
    let blocks = DISK_BYTES / BLOCK as u64;
    let newest: HashMap<u64, u64> = (1..=synced).map(|number| (place(number, blocks), number)).collect();
    let mut whole = vec![0; DISK_BYTES as usize];
    for (piece, at) in whole.chunks_mut(PIECE).zip((0..).step_by(PIECE)) {
        disk.read(piece, at).unwrap();
    }
    for (block, index) in whole.chunks_exact(BLOCK).zip(0..) {
        let (first, others) = block.split_at(8);
        let found = u64::from_le_bytes(first.try_into().unwrap());
        // All of its words are the same if each is the one before it: one comparison of bytes, since the box is slow.
        assert!(others == &block[..BLOCK - 8], "block {index} is torn: {found} and others");
        let expected = newest.get(&index).copied().unwrap_or_default();
        let later = found > synced && place(found, blocks) == index;
        assert!(found == expected || later, "block {index}: {found} instead of {expected}, synced {synced}");
    }
    disk.close().unwrap();
}

fn kill_under_load(test: &str, rounds: u64) {
    let Some(bench) = bench(test) else { return };
    let base = bench.file("base.raw", &vec![0; DISK_BYTES as usize]).unwrap();
    let identity = BaseIdentity { digest: sha256_file(&base).unwrap(), size: DISK_BYTES };
    let mut moments = Places::new(u64::from(std::process::id()));
    for round in 0..rounds {
        let overlay = bench.folder.path().join(format!("kill-{round}.qcow2"));
        create(&overlay, &base, &identity, DISK_BYTES).unwrap();
        let mut job = bench.job(COMMAND_LINE);
        job.disk = Some((overlay.clone(), base.clone()));
        let mut running = bench.start(Which::Torpor, &job).unwrap();
        running.wait_for("SYNCED", LIMIT).unwrap();
        sleep(Duration::from_micros(moments.below(200_000)));
        running.child.kill().unwrap();
        let console = running.finish(LIMIT).unwrap();
        let synced = synced(&console);
        assert!(synced > 0, "{console}");
        verify(&overlay, &base, synced);
        println!("round {round}: {synced} blocks synced");
        fs::remove_file(overlay).unwrap();
    }
}

#[test]
fn all_that_a_guest_has_synced_survives_a_killed_vmm() {
    kill_under_load("all_that_a_guest_has_synced_survives_a_killed_vmm", 3);
}

#[test]
#[ignore = "slow: 50 boots"]
fn all_that_a_guest_has_synced_survives_fifty_killed_vmms() {
    kill_under_load("all_that_a_guest_has_synced_survives_fifty_killed_vmms", 50);
}
