//! A machine boots in QEMU, by emulation, over an overlay that the engine has written: it finds there what was written,
//! and what it writes the engine finds.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Bench, assert_clean, base_content, run, scribble, skip, text};
use torpor_overlay::{Block, Lock, check, mark_closed, open, raise_generation, sha256_file};

const MIB: u64 = 1 << 20;
const BASE: u64 = 2 * MIB + 512;
const SIZE: u64 = 6 * MIB;
/// Far more than it takes, for hosts that are busy.
const LIMIT: Duration = Duration::from_secs(120);
/// Which of the first two needs the other depends on the kernel's build: the init tries one of them twice.
const MODULES: [&str; 4] = ["virtio", "virtio_ring", "virtio_mmio", "virtio_blk"];
/// Where the guest writes, in bytes, and how much: over content of the base and beyond it.
const WRITTEN: (usize, usize) = (375 * 4096, 1_500_160);

/// What is the first process of the machine. Its console tells what it finds.
const INIT: &str = "#!/bin/sh
mount -t devtmpfs none /dev
for module in virtio_ring virtio virtio_ring virtio_mmio virtio_blk; do insmod /$module.ko 2>/dev/null; done
echo found $(sha256sum < /dev/vda)
yes torpor | head -c 1500160 | dd of=/dev/vda bs=4096 seek=375 conv=notrunc,fsync 2>/dev/null
echo written $?
reboot -f
";

/// The kernel package's folder, none when the test can't run here.
fn kernel_package(test: &str) -> Option<PathBuf> {
    let package = std::env::var_os("TORPOR_TEST_KERNEL_PACKAGE").map(PathBuf::from);
    let there = |program: &str| Command::new(program).arg("--help").output().is_ok();
    let missing = match &package {
        None => "TORPOR_TEST_KERNEL_PACKAGE is not set",
        _ if !["qemu-system-x86_64", "busybox", "cpio"].into_iter().all(there) => {
            "qemu-system-x86_64, busybox or cpio are not installed"
        }
        _ => return package,
    };
    skip(test, "emu", missing);
    None
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let mut found = entries.map(|path| match path.is_dir() && !path.is_symlink() {
        true => find(&path, name),
        false => {
            path.file_name().is_some_and(|found| found.to_string_lossy().starts_with(name)).then_some(path)
        }
    });
    found.find_map(|path| path)
}

fn initramfs(bench: &Bench, package: &Path) -> PathBuf {
    let (tree, archive) = (bench.path("initramfs"), bench.path("initramfs.cpio"));
    for name in ["bin", "dev"] {
        std::fs::create_dir_all(tree.join(name)).unwrap();
    }
    std::fs::copy("/bin/busybox", tree.join("bin/busybox")).unwrap();
    for name in ["sh", "mount", "insmod", "sha256sum", "yes", "head", "dd", "reboot"] {
        symlink("busybox", tree.join("bin").join(name)).unwrap();
    }
    for module in MODULES {
        let name = format!("{module}.ko");
        std::fs::copy(find(&package.join("lib"), &name).unwrap(), tree.join(&name)).unwrap();
    }
    std::fs::write(tree.join("init"), INIT).unwrap();
    std::fs::set_permissions(tree.join("init"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let pack = format!("cd {} && find . | cpio -o -H newc --quiet > {}", text(&tree), text(&archive));
    run("sh", &["-c", &pack]);
    archive
}

/// Speed of the time-stamp counter, which an emulated machine takes from its host and can't measure.
fn tsc_khz() -> u64 {
    let information = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let line = information.lines().find(|line| line.starts_with("cpu MHz")).unwrap();
    (line.rsplit(':').next().unwrap().trim().parse::<f64>().unwrap() * 1000.0) as u64
}

struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots over the overlay until the machine powers off; returns its console.
fn boot(bench: &Bench, package: &Path, overlay: &Path) -> String {
    let base = format!(
        r#"{{"driver":"raw","node-name":"base","read-only":true,"file":{{"driver":"file","filename":"{}"}}}}"#,
        text(&bench.base)
    );
    let disk = format!(
        r#"{{"driver":"qcow2","node-name":"disk","file":{{"driver":"file","filename":"{}","locking":"off"}},"backing":"base"}}"#,
        text(overlay)
    );
    let line = format!(
        "console=ttyS0 quiet reboot=t panic=-1 no_timer_check tsc=reliable tsc_early_khz={}",
        tsc_khz()
    );
    let console = bench.path("console");
    let machine = Command::new("qemu-system-x86_64")
        .args([
            "-M",
            "microvm,rtc=on,acpi=on,auto-kernel-cmdline=off,pit=off,pic=off",
            "-accel",
            "tcg,thread=single",
        ])
        .args([
            "-cpu",
            "max,-erms",
            "-m",
            "192",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ])
        .args(["-blockdev", &base, "-blockdev", &disk, "-device", "virtio-blk-device,drive=disk"])
        .args(["-kernel", text(&find(&package.join("boot"), "vmlinuz").unwrap()), "-append", &line])
        .args(["-initrd", text(&initramfs(bench, package)), "-serial", &format!("file:{}", text(&console))])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    let (mut machine, end) = (Machine(machine.unwrap()), Instant::now() + LIMIT);
    let said = || std::fs::read_to_string(&console).unwrap_or_default();
    while machine.0.try_wait().unwrap().is_none() {
        assert!(Instant::now() < end, "the machine doesn't end:\n{}", said());
        std::thread::sleep(Duration::from_millis(10));
    }
    said()
}

#[test]
fn a_machine_in_qemu_finds_what_the_engine_wrote_and_the_engine_what_the_machine_wrote() {
    let test = "a_machine_in_qemu_finds_what_the_engine_wrote_and_the_engine_what_the_machine_wrote";
    let Some(package) = kernel_package(test) else { return };
    let bench = Bench::new(BASE);
    let path = bench.overlay(SIZE);
    let mut expected = scribble(&path, &[&bench.base], base_content(BASE), 21);
    let flat = bench.path("flat.raw");
    std::fs::write(&flat, &expected).unwrap();
    let digest = sha256_file(&flat).unwrap();

    let lock = Lock::acquire(&path).unwrap();
    let generation = raise_generation(&lock).unwrap();
    let console = boot(&bench, &package, &path);
    mark_closed(&lock).unwrap();
    drop(lock);
    let found = console.lines().find_map(|line| line.trim().strip_prefix("found ")).unwrap_or_default();
    assert_eq!(format!("sha256:{}", found.trim_end_matches(['-', ' '])), digest, "{console}");
    assert!(console.contains("written 0"), "{console}");

    let (at, length) = WRITTEN;
    expected[at..at + length].iter_mut().zip("torpor\n".bytes().cycle()).for_each(|(to, from)| *to = from);
    assert_clean(&path);
    assert_eq!(check(&path).unwrap().damages, 0);
    let disk = open(&path, &[&bench.base]).unwrap();
    assert_eq!(disk.generation(), generation + 1);
    assert!(common::model::content(&disk) == expected);
    disk.close().unwrap();
}
