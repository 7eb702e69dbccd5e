//! The care of disks, on real overlays. No VM boots here.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{
    fs::{self, File},
    ops::ControlFlow,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use common::{Bench, bench, block_on, which};
use tokio::sync::mpsc;
use torpor_driver_vm::VmDriver;
use torpor_overlay::{Block as _, Lock};
use torpor_sandbox::{
    Change, ComputeDriver as _, DiskCare as _, DiskFormat, DriverError, Run, SandboxId,
    disk::{Compaction, DiskPiece, DiskState, DiskWatch},
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

macro_rules! on_bench {
    ($name:expr, |$bench:ident| $work:block) => {
        let Some($bench) = bench($name) else { return };
        block_on(async { $work });
    };
}

fn overlay(bench: &Bench, id: &SandboxId) -> PathBuf {
    bench.state(id).join("overlay.qcow2")
}

fn base(bench: &Bench) -> PathBuf {
    bench.config.state_dir.join("images").join(bench.digest.trim_start_matches("sha256:")).join("base.raw")
}

/// As a guest would write.
fn write(bench: &Bench, id: &SandboxId, change: impl FnOnce(&torpor_overlay::Overlay)) {
    let disk = torpor_overlay::open(&overlay(bench, id), &[&base(bench)]).unwrap();
    change(&disk);
    disk.close().unwrap();
}

fn noise(length: u64, seed: u32) -> Vec<u8> {
    (0..length).map(|n| ((n as u32 ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

async fn made(bench: &Bench, driver: &VmDriver) -> SandboxId {
    let id = SandboxId::generate();
    driver.create(&id, &bench.spec(), Run(1)).await.unwrap();
    id
}

fn never_ends() -> DiskWatch {
    Box::new(|_, _| ControlFlow::Continue(()))
}

/// Puts the pieces of an export into a file.
async fn export_to(file: &Path, driver: &VmDriver, id: &SandboxId, format: DiskFormat) -> Vec<DiskPiece> {
    let (sink, mut pieces) = mpsc::channel(2);
    let file = File::create(file).unwrap();
    let receive = async {
        let (mut rest, mut at) = (Vec::new(), 0);
        while let Some(piece) = pieces.recv().await {
            match piece {
                DiskPiece::Size(size) => file.set_len(size).unwrap(),
                DiskPiece::Data(offset, bytes) => {
                    assert!(offset >= at && bytes.len() <= 256 << 10, "{} bytes at {offset}", bytes.len());
                    at = offset + bytes.len() as u64;
                    file.write_all_at(&bytes, offset).unwrap();
                }
                other => rest.push(other),
            }
        }
        rest
    };
    let (exported, rest) = tokio::join!(driver.export(id, format, sink), receive);
    exported.unwrap();
    rest
}

fn qemu_img(args: &[&str]) {
    let done = Command::new("qemu-img").args(args).output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "qemu-img {args:?}: {text}");
}

fn has_qemu_img(test: &str) -> bool {
    let found = which("qemu-img").is_some();
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(found || !required.split(',').any(|need| need == "tools"), "{test} needs qemu-img");
    if !found {
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: no qemu-img\n"));
    }
    found
}

#[test]
fn a_disk_is_reported_with_its_layers_and_a_check_names_damage() {
    on_bench!("a_disk_is_reported_with_its_layers_and_a_check_names_damage", |bench| {
        let driver = bench.driver();
        let id = made(&bench, &driver).await;
        write(&bench, &id, |disk| disk.write(&noise(3 * MIB, 1), 100 * MIB).unwrap());
        let report = driver.report(&id, true).await.unwrap();
        assert_eq!((report.virtual_bytes, report.generation, report.state), (GIB, 1, DiskState::AtRest));
        let [own, under] = &report.layers[..] else { panic!("{report:?}") };
        assert_eq!(
            (own.path.as_str(), own.format),
            (overlay(&bench, &id).to_str().unwrap(), Some(DiskFormat::Qcow2))
        );
        assert_eq!((under.digest.as_str(), under.format), (bench.digest.as_str(), Some(DiskFormat::Raw)));
        assert_eq!(under.virtual_bytes, base(&bench).metadata().unwrap().len());
        let check = report.check.unwrap();
        assert!(
            check.damages.is_empty() && check.damage_count == 0 && check.leaked_clusters == 0,
            "{check:?}"
        );
        assert!(check.data_bytes >= 3 * MIB && !check.unclean, "{check:?}");

        // The first entry of the L1 table: where the header says, at offset 40, in big endian.
        let file = File::options().read(true).write(true).open(overlay(&bench, &id)).unwrap();
        let mut l1 = [0; 8];
        file.read_exact_at(&mut l1, 40).unwrap();
        file.write_all_at(&[0x80, 0, 0, 0, 0, 0, 1, 1], u64::from_be_bytes(l1)).unwrap();
        let hurt = driver.report(&id, true).await.unwrap().check.unwrap();
        assert!(hurt.damage_count > 0 && !hurt.damages.is_empty(), "{hurt:?}");
        let error = driver.grow(&id, 2 * GIB).await.unwrap_err();
        assert_eq!(error.reason(), "CORRUPT", "{error}");

        assert!(matches!(driver.report(&SandboxId::generate(), false).await, Err(DriverError::Missing)));
        fs::remove_file(overlay(&bench, &id)).unwrap();
        assert_eq!(driver.report(&id, false).await.unwrap_err().reason(), "DATA_MISSING");
    });
}

#[test]
fn a_grown_disk_keeps_its_content_and_limits_are_named() {
    on_bench!("a_grown_disk_keeps_its_content_and_limits_are_named", |bench| {
        let driver = bench.driver();
        let id = made(&bench, &driver).await;
        let content = noise(MIB, 2);
        write(&bench, &id, |disk| disk.write(&content, GIB - MIB).unwrap());
        assert_eq!(driver.grow(&id, 3 * GIB).await.unwrap(), 3 * GIB);
        assert_eq!(driver.grow(&id, 3 * GIB).await.unwrap(), 3 * GIB);
        let spec: serde_json::Value =
            serde_json::from_slice(&fs::read(bench.state(&id).join("spec.json")).unwrap()).unwrap();
        assert_eq!(spec["resources"]["disk_bytes"], 3 * GIB);
        assert_eq!(driver.facts(&id).await.disk.unwrap().virtual_bytes, 3 * GIB);
        write(&bench, &id, |disk| {
            let mut found = vec![1; 2 * MIB as usize];
            disk.read(&mut found, GIB - MIB).unwrap();
            assert!(found[..MIB as usize] == content && found[MIB as usize..].iter().all(|b| *b == 0));
        });

        let smaller = driver.grow(&id, GIB).await.unwrap_err();
        assert_eq!(smaller.reason(), "INVALID");
        let text = smaller.to_string();
        assert!(text.contains(&GIB.to_string()) && text.contains(&(3 * GIB).to_string()), "{text}");
        let larger = driver.grow(&id, 1 << 50).await.unwrap_err();
        assert_eq!(larger.reason(), "INVALID");
        assert!(larger.to_string().contains(|c: char| c.is_ascii_digit()), "{larger}");
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());

        let mut spec = bench.spec();
        spec.resources.disk_bytes = 3 * GIB;
        assert_eq!(driver.create(&id, &spec, Run(1)).await.unwrap(), Change::Already);
    });
}

#[test]
fn compacting_gives_space_back_and_both_ways_can_be_ended_at_any_time() {
    on_bench!("compacting_gives_space_back_and_both_ways_can_be_ended_at_any_time", |bench| {
        let driver = bench.driver();
        let id = made(&bench, &driver).await;
        let content = noise(4 * MIB, 3);
        write(&bench, &id, |disk| {
            disk.write(&noise(16 * MIB, 4), 200 * MIB).unwrap();
            disk.write(&content, 600 * MIB).unwrap();
            disk.flush().unwrap();
            disk.write_zeroes(200 * MIB, 16 * MIB).unwrap();
        });
        let ends: DiskWatch = Box::new(|_, _| ControlFlow::Break(()));
        let ended = driver.compact(&id, Compaction::GiveBack, ends).await;
        assert!(matches!(ended, Err(DriverError::Cancelled(_))), "{ended:?}");
        let check = driver.report(&id, true).await.unwrap().check.unwrap();
        assert!(check.damages.is_empty() && !check.unclean, "{check:?}");
        let done = driver.compact(&id, Compaction::GiveBack, never_ends()).await.unwrap();
        assert!(done.used_after <= done.used_before && done.used_after < 12 * MIB, "{done:?}");

        let before = fs::read(overlay(&bench, &id)).unwrap();
        for steps in [0, 1, 2] {
            let mut left = steps;
            let watch: DiskWatch = Box::new(move |_, _| {
                left -= 1;
                if left < 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            let ended = driver.compact(&id, Compaction::Rewrite, watch).await;
            assert!(matches!(ended, Err(DriverError::Cancelled(_))) || steps == 2, "{ended:?}");
            assert!(steps == 2 || fs::read(overlay(&bench, &id)).unwrap() == before);
            assert_eq!(bench.leftovers(&id), Vec::<String>::new());
        }
        driver.compact(&id, Compaction::Rewrite, never_ends()).await.unwrap();
        write(&bench, &id, |disk| {
            let mut found = vec![0; content.len()];
            disk.read(&mut found, 600 * MIB).unwrap();
            assert!(found == content);
        });
        assert_eq!(driver.report(&id, true).await.unwrap().check.unwrap().damages, Vec::<String>::new());
    });
}

#[test]
fn both_exports_are_what_qemu_img_reads_from_the_disk() {
    const NAME: &str = "both_exports_are_what_qemu_img_reads_from_the_disk";
    if !has_qemu_img(NAME) {
        return;
    }
    on_bench!(NAME, |bench| {
        let driver = bench.driver();
        let id = made(&bench, &driver).await;
        write(&bench, &id, |disk| {
            for (number, place) in [0, 5 * MIB + 512, 300 * MIB, GIB - 4096].into_iter().enumerate() {
                disk.write(&noise(4096, number as u32), place).unwrap();
            }
            disk.write(&noise(9 * MIB, 9), 700 * MIB + 7).unwrap();
            disk.write_zeroes(MIB, MIB).unwrap();
        });
        let own = overlay(&bench, &id);
        let own = own.to_str().unwrap();
        for (format, name) in [(DiskFormat::Raw, "raw"), (DiskFormat::Qcow2, "qcow2")] {
            let file = bench.folder.path().join(format!("exported.{name}"));
            let told = export_to(&file, &driver, &id, format).await;
            assert!(matches!(told.last(), Some(DiskPiece::Reached(_))), "{told:?}");
            let file = file.to_str().unwrap();
            qemu_img(&["compare", "-F", name, "-f", "qcow2", own, file]);
            if name == "qcow2" {
                qemu_img(&["check", file]);
            }
            assert_eq!(bench.leftovers(&id), Vec::<String>::new());
        }
        let raw = bench.folder.path().join("exported.raw").metadata().unwrap();
        let used = std::os::unix::fs::MetadataExt::blocks(&raw) * 512;
        assert!(raw.len() == GIB && used < 200 * MIB, "{used} bytes used");
    });
}

#[test]
fn an_export_that_nobody_takes_ends_when_its_receiver_does_and_verbs_wait_for_it() {
    on_bench!("an_export_that_nobody_takes_ends_when_its_receiver_does_and_verbs_wait_for_it", |bench| {
        let driver = bench.driver();
        for format in [DiskFormat::Raw, DiskFormat::Qcow2] {
            let id = made(&bench, &driver).await;
            write(&bench, &id, |disk| disk.write(&noise(8 * MIB, 5), 100 * MIB).unwrap());
            let (sink, mut pieces) = mpsc::channel(1);
            let (other, wanted) = (driver.clone(), id.clone());
            let export = tokio::spawn(async move { other.export(&wanted, format, sink).await });
            pieces.recv().await.unwrap();
            // It holds the disk and the turn, and nothing of it looks like a run.
            let error = Lock::acquire(&overlay(&bench, &id)).unwrap_err();
            assert_eq!(error.reason(), "LOCKED");
            assert_eq!(driver.report(&id, false).await.unwrap().state, DiskState::InUse);
            let seen = driver.observe(&id).await.unwrap();
            assert!(matches!(seen, torpor_sandbox::Observed::Stopped { .. }), "{seen:?}");
            let delete = driver.delete(&id);
            tokio::pin!(delete);
            assert!(tokio::time::timeout(Duration::from_millis(300), &mut delete).await.is_err());
            drop(pieces);
            assert_eq!(delete.await.unwrap(), Change::Done);
            assert!(matches!(export.await.unwrap(), Err(DriverError::Cancelled(_))));
            assert!(!bench.state(&id).exists());
        }
    });
}

#[test]
fn a_disk_that_somebody_else_holds_is_left_alone_and_the_holder_named() {
    on_bench!("a_disk_that_somebody_else_holds_is_left_alone_and_the_holder_named", |bench| {
        let driver = bench.driver();
        let id = made(&bench, &driver).await;
        let lock = Lock::acquire(&overlay(&bench, &id)).unwrap();
        let mut holder = Command::new("sleep").arg("100").stdin(lock.into_fd()).spawn().unwrap();
        let (sink, _pieces) = mpsc::channel(9);
        let errors = [
            driver.grow(&id, 2 * GIB).await.unwrap_err(),
            driver.compact(&id, Compaction::GiveBack, never_ends()).await.unwrap_err(),
            driver.compact(&id, Compaction::Rewrite, never_ends()).await.unwrap_err(),
            driver.export(&id, DiskFormat::Qcow2, sink).await.unwrap_err(),
            driver.report(&id, true).await.unwrap_err(),
        ];
        for error in errors {
            let holds = matches!(error, DriverError::Locked { holder: Some(pid), .. } if pid == holder.id());
            assert!(holds, "{error}");
        }
        assert_eq!(driver.report(&id, false).await.unwrap().state, DiskState::InUse);
        assert_eq!(bench.leftovers(&id), Vec::<String>::new());
        holder.kill().unwrap();
        holder.wait().unwrap();
    });
}
