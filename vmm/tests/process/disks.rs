//! Disks of a running VM: larger ones, full ones, and requests larger than makes sense.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;
use torpor_overlay::{BaseIdentity, Block as _, inspect, open_read_only, sha256_file};
use torpor_vmm_api::{End, Event, GrowProblem, Reply, Request};

use crate::drive::{Driver, Part, block};
use crate::guest::{POWER_OFF, Step, kernel, say};
use crate::vm::{Setup, Vm, has, until};

const UID: u32 = 61_237;
const MIB: u64 = 1 << 20;
const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
/// Of the first device: capacity in sectors, interrupt status and acknowledgement.
const CAPACITY: u32 = 0xd000_0100;
const INTERRUPT: u32 = 0xd000_0060;
const ACKNOWLEDGE: u32 = 0xd000_0064;
const CONFIG_CHANGED: u32 = 2;
/// Memory that nobody uses.
const SPARE: u32 = 0x40_0000;

/// A confined guest over an overlay of that size in a folder, with a base of a mebibyte.
fn setup(kernel: &[u8], folder: Option<&Path>, bytes: u64) -> (Setup, PathBuf) {
    let mut setup = Setup::new(kernel);
    let base = setup.path("base");
    let overlay = folder.map_or_else(|| setup.path("overlay"), |folder| folder.join("overlay"));
    fs::write(&base, vec![7; MIB as usize]).unwrap();
    let identity = BaseIdentity { digest: sha256_file(&base).unwrap(), size: MIB };
    torpor_overlay::create(&overlay, &base, &identity, bytes).unwrap();
    let raw = setup.path("raw");
    fs::write(&raw, vec![9; MIB as usize]).unwrap();
    setup.config["memory_bytes"] = json!(16 * MIB);
    setup.config["disks"] = json!([
        {"overlay": {"image": {"path": overlay}, "path": overlay, "base": {"path": base}, "serial": "root"}},
        {"raw": {"file": {"path": raw}, "read_only": false, "serial": "data"}},
    ]);
    if nix::unistd::geteuid().is_root() {
        setup.config["jail"] = json!({"uid": UID});
    }
    (setup, overlay)
}

/// What an overlay holds there, after its VM.
fn content(overlay: &Path, base: &Path, offset: u64, bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    open_read_only(overlay, &[base]).unwrap().read(&mut content, offset).unwrap();
    content
}

/// KiB.
fn resident(vm: &Vm) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/status", vm.pid())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn a_disk_grows_under_its_guest_which_is_told_and_uses_the_room() {
    if !has("a_disk_grows_under_its_guest_which_is_told_and_uses_the_room", "kvm") {
        return;
    }
    let (before, after) = (MIB, 5 * MIB);
    let mut driver = Driver::new(0, 1, 16);
    driver.request(0, &block(WRITE, (after - 512) / 512, [Part::Give(vec![0x5a; 512])]));
    driver.request(0, &block(FLUSH, 0, []));
    driver.begin(1 << 9);
    driver.steps.push(Step::WaitBits(CAPACITY, (before / 512) as u32, u32::MAX));
    driver.steps.extend(say("up"));
    driver.steps.push(Step::WaitBits(INTERRUPT, CONFIG_CHANGED, CONFIG_CHANGED));
    driver.steps.push(Step::Write(ACKNOWLEDGE, CONFIG_CHANGED));
    driver.steps.push(Step::WaitBits(CAPACITY, (after / 512) as u32, u32::MAX));
    driver.offer(0, 2);
    driver.wait(0, 2);
    driver.steps.push(POWER_OFF);
    let (setup, overlay) = setup(&kernel(&driver.steps, &driver.memory()), None, before);
    let base = setup.path("base");
    let mut vm = setup.start();
    vm.console("up");
    let mut control = vm.control();
    let mut grow = |disk: &str, bytes| control.ask(&Request::GrowDisk { disk: disk.to_owned(), bytes });
    for (disk, bytes, text) in [
        ("root", before - 1, "1048576"),
        ("root", 1 << 60, "at most"),
        ("data", 2 * MIB, "raw one"),
        ("other", 2 * MIB, "no disk"),
    ] {
        let refused = grow(disk, bytes);
        let Reply::NotGrown { problem: GrowProblem::Invalid, reason } = refused else {
            panic!("{refused:?}")
        };
        assert!(reason.contains(text), "{reason}");
    }
    assert_eq!(grow("root", before), Reply::Grown { bytes: before }, "it has that size");
    // In whole clusters.
    assert_eq!(grow("root", after - 5), Reply::Grown { bytes: after });
    assert_eq!(vm.ended().code(), Some(0), "{}", vm.log());
    let end = vm.end_file().unwrap();
    assert_eq!((end.end, end.disks_closed, end.broken), (End::PowerOff, true, vec![]));
    assert_eq!(inspect(&overlay).unwrap().virtual_bytes, after);
    assert_eq!(content(&overlay, &base, after - 1024, 1024), [[0; 512], [0x5a; 512]].concat());
    assert_eq!(content(&overlay, &base, 0, 16), [7; 16]);
    assert!(torpor_overlay::check(&overlay).unwrap().damage.is_empty());
}

#[test]
fn the_largest_requests_need_no_memory_and_larger_ones_are_refused() {
    if !has("the_largest_requests_need_no_memory_and_larger_ones_are_refused", "kvm") {
        return;
    }
    let buffers = |count: usize, write| (0..count).map(move |_| Part::At(SPARE, 2 << 20, write));
    let mut driver = Driver::new(0, 1, 64);
    let mut statuses = Vec::new();
    // A small one first, so that all that is needed once is there; then 30 MiB each way, then 32.
    for (kind, count) in [(WRITE, 1), (WRITE, 15), (READ, 15), (READ, 16)] {
        let sector = (64 * MIB / 512) * statuses.len() as u64;
        statuses.push(driver.request(0, &block(kind, sector, buffers(count, kind == READ))));
    }
    driver.begin(0);
    // The guest touches its buffers before they are looked at.
    for page in 0..512 {
        driver.steps.push(Step::Write(SPARE + page * 4096, page));
    }
    for (place, status) in statuses.iter().enumerate() {
        let count = place as u32 + 1;
        driver.offer(0, count);
        driver.wait(0, count);
        let expected = if place == 3 { 1 } else { 0 };
        driver.steps.push(Step::WaitBits(*status, expected, 0xff));
        driver.steps.extend(say(&format!("did {count}.")));
        if place == 0 {
            // Until the host has looked.
            driver.steps.push(Step::WaitBits(CAPACITY, (1024 * MIB / 512) as u32, u32::MAX));
        }
    }
    let (setup, _overlay) = setup(&kernel(&driver.steps, &driver.memory()), None, 512 * MIB);
    let mut vm = setup.start();
    vm.console("did 1.");
    let before = resident(&vm);
    let bytes = 1024 * MIB;
    let grown = vm.control().ask(&Request::GrowDisk { disk: "root".into(), bytes });
    assert_eq!(grown, Reply::Grown { bytes });
    vm.console("did 4.");
    let after = resident(&vm);
    assert!(after < before + 2048, "{after} KiB after {before}");
    vm.control().ask(&Request::Shutdown);
    assert_eq!(vm.ended().code(), Some(13), "{}", vm.log());
}

/// A file system of its own, gone with this.
struct Small(PathBuf);

impl Small {
    fn mount(folder: &Path, options: &str) {
        let mut command = Command::new("mount");
        let done = command.args(["-t", "tmpfs", "-o", options, "torpor-test"]).arg(folder).status().unwrap();
        assert!(done.success());
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn writes_that_find_no_room_on_the_host_wait_and_are_done_when_there_is_some() {
    let test = "writes_that_find_no_room_on_the_host_wait_and_are_done_when_there_is_some";
    if !has(test, "kvm") || !has(test, "root") || !has(test, "mount") {
        return;
    }
    let mut driver = Driver::new(0, 1, 64);
    let mut statuses = Vec::new();
    for place in 0..8 {
        let data = [Part::At(SPARE, 512 << 10, false)];
        statuses.push(driver.request(0, &block(WRITE, place * MIB / 512, data)));
    }
    driver.request(0, &block(READ, 0, [Part::Take(512)]));
    driver.request(0, &block(FLUSH, 0, []));
    driver.begin(1 << 9);
    driver.steps.extend((0..128).map(|page| Step::Write(SPARE + page * 4096, 0x6b)));
    driver.steps.extend(say("up"));
    driver.offer(0, 8);
    driver.wait(0, 8);
    driver.steps.extend(statuses.iter().map(|status| Step::WaitBits(*status, 0, 0xff)));
    driver.steps.extend(say("written"));
    driver.offer(0, 10);
    driver.wait(0, 10);
    driver.steps.push(POWER_OFF);
    let folder = tempfile::tempdir().unwrap();
    Small::mount(folder.path(), "size=2m");
    let small = Small(folder.path().to_owned());
    let (setup, overlay) = setup(&kernel(&driver.steps, &driver.memory()), Some(folder.path()), 16 * MIB);
    let base = setup.path("base");
    let mut vm = setup.start();
    let mut control = vm.control();
    control.ask(&Request::Subscribe);
    let full = || Reply::Event(Event::DiskFull { device: "block vda".into() });
    assert_eq!(control.next(), Some(full()));
    let status = vm.control().ask(&Request::Status);
    assert!(matches!(&status, Reply::Status(status) if status.full == ["block vda"]), "{status:?}");
    Small::mount(folder.path(), "remount,size=64m");
    until("room", || match control.next() {
        Some(Reply::Event(Event::DiskHasRoom { .. })) => Some(()),
        Some(reply) if reply == full() => None,
        other => panic!("{other:?}"),
    });
    vm.console("written");
    assert_eq!(vm.ended().code(), Some(0), "{}", vm.log());
    assert!(vm.end_file().unwrap().disks_closed);
    for place in 0..8 {
        let read = content(&overlay, &base, place * MIB, 512 << 10);
        assert!(read.chunks(4096).all(|page| page[..4] == [0x6b, 0, 0, 0]), "at {place} MiB");
    }
    drop(small);
}
