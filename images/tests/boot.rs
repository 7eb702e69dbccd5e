//! The kernel and the initramfs in a guest in software emulation: needs qemu-system-x86_64, a C compiler and the
//! network sources of the host's apt (or a kernel that an earlier run kept).

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use common::*;
use torpor_images::{Catalog, Error, Image, Kernel, Kernels, Source};

fn static_init(dir: &Path) -> Option<PathBuf> {
    let (source, program) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/init.c"), dir.join("init"));
    let built = run("cc", &["-static", "-Os", "-o", program.to_str()?, source.to_str()?]);
    built.status.success().then_some(program)
}

/// The kernel that `TORPOR_TEST_KERNEL` names (for hosts without package sources), else the default one.
fn test_kernel(kernels: &Kernels) -> Result<Kernel, Error> {
    match std::env::var("TORPOR_TEST_KERNEL") {
        Ok(path) => kernels.from_path(Path::new(&path)),
        Err(_) => {
            let kernel = kernels.ensure_default(&mut |p| println!("{}: {}", p.step, p.detail))?;
            let again = kernels.ensure_default(&mut |p| panic!("fetched again: {p:?}"))?;
            assert_eq!(again, kernel);
            Ok(kernel)
        }
    }
}

/// A writable disk of 8 GiB that begins with the image.
fn disk_of(image: &Image, disk: &Path) {
    fs::copy(&image.path, disk).unwrap();
    fs::set_permissions(disk, fs::Permissions::from_mode(0o600)).unwrap();
    fs::File::options().write(true).open(disk).unwrap().set_len(8 << 30).unwrap();
}

/// The rate at which software emulation counts the guest's TSC: the host's own. A microvm has no other clock to
/// measure it by, and hangs without being told.
fn tsc_khz() -> Option<String> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").ok()?;
    let mhz = cpuinfo.lines().find(|line| line.starts_with("cpu MHz"))?.rsplit(' ').next()?;
    Some(format!("{:.0}", mhz.parse::<f64>().ok()? * 1000.0))
}

#[test]
fn a_guest_loads_the_modules_in_order_and_grows_its_root_disk() {
    let test = "a_guest_loads_the_modules_in_order_and_grows_its_root_disk";
    if !have_root(test)
        || !have(test, "emu", found("qemu-system-x86_64"), "no qemu-system-x86_64")
        || !have(test, "emu", found("cc"), "no C compiler")
    {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let kernels = Kernels::open(dir.path()).unwrap();
    let kernel = test_kernel(&kernels);
    let reason = kernel.as_ref().err().map(ToString::to_string).unwrap_or_default();
    if !have(test, "emu", kernel.is_ok(), &reason) {
        return;
    }
    let kernel = kernel.unwrap();
    let program = static_init(dir.path()).unwrap();
    let initramfs = kernels.initramfs(&kernel, &program).unwrap();
    assert_eq!(kernels.initramfs(&kernel, &program).unwrap(), initramfs);
    let by_path = kernels.from_path(&kernel.vmlinuz).unwrap();
    assert_eq!(by_path.release, kernel.release);
    assert!(by_path.modules.is_some(), "modules beside it are found");

    let tree = dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    sample_tree(&tree);
    let image = Catalog::open(dir.path()).unwrap().import("it", &Source::Dir(tree), &mut quiet()).unwrap();
    let tsc = tsc_khz().map(|khz| format!(" tsc_early_khz={khz}")).unwrap_or_default();
    for (machine, device) in [
        ("microvm,rtc=on", "virtio-blk-device,drive=root"),
        ("q35,usb=off,vmport=off,smbus=off,sata=off", "virtio-blk-pci,drive=root"),
    ] {
        let disk = dir.path().join("disk");
        disk_of(&image, &disk);
        let drive = format!("id=root,file={},format=raw,if=none", disk.display());
        let line = format!("console=ttyS0 quiet panic=-1 cryptomgr.notests i8042.noaux reboot=t{tsc}");
        let said = text(&run(
            "timeout",
            &[
                "--kill-after=5",
                "60",
                "qemu-system-x86_64",
                "-M",
                machine,
                "-accel",
                "tcg",
                "-cpu",
                "max",
                "-m",
                "256",
                "-kernel",
                kernel.vmlinuz.to_str().unwrap(),
                "-initrd",
                initramfs.to_str().unwrap(),
                "-append",
                &line,
                "-drive",
                &drive,
                "-device",
                device,
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
                "-serial",
                "stdio",
                "-no-reboot",
            ],
        ));
        println!("{machine}:\n{said}");
        check_guest(machine, &said);
        let disk = disk.to_str().unwrap();
        let replayed = run("e2fsck", &["-fp", disk]);
        assert!(replayed.status.code().is_some_and(|code| code <= 1), "{}", text(&replayed));
        let check = run("e2fsck", &["-fn", disk]);
        assert!(check.status.success(), "{}", text(&check));
        fs::remove_file(disk).unwrap();
    }
}

fn check_guest(machine: &str, said: &str) {
    for wanted in ["VDA there", "MOUNT ok", "GROW ok", "MARKER marker-content", "END at"] {
        assert!(said.contains(wanted), "{machine}: no {wanted:?} in:\n{said}");
    }
    let modules: Vec<&str> =
        said.lines().filter(|line| line.starts_with("MODULE")).map(str::trim_end).collect();
    assert!(
        !modules.is_empty() && modules.iter().all(|line| line.ends_with(" ok")),
        "{machine}: {modules:?}"
    );
}
