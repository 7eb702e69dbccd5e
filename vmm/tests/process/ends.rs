//! Every end has its own reason, in the end file and in the exit code.

use std::fs;

use nix::sys::signal::{Signal, kill};
use serde_json::json;
use torpor_overlay::{BaseIdentity, is_locked, sha256_file};
use torpor_vmm_api::{End, Request};

use crate::guest::{ACPI_RESET, KEYBOARD_RESET, PANIC, POWER_OFF, Step, kernel, say};
use crate::vm::{Setup, has, until};

#[test]
fn each_way_of_a_guest_to_end_has_its_own_reason_and_exit_code() {
    if !has("each_way_of_a_guest_to_end_has_its_own_reason_and_exit_code", "kvm") {
        return;
    }
    let cases = [
        (POWER_OFF, End::PowerOff),
        (ACPI_RESET, End::Reset),
        (KEYBOARD_RESET, End::Reset),
        (PANIC, End::Panic),
        (Step::Fault, End::TripleFault),
    ];
    for (step, end) in cases {
        let mut steps = say("bye");
        steps.push(step);
        let mut vm = Setup::new(&kernel(&steps, &[])).start();
        assert_eq!(vm.ended().code(), Some(end.exit_code().into()), "{end:?}: {}", vm.log());
        let told = vm.end_file().unwrap();
        assert_eq!((told.end, told.disks_closed, told.disk_error), (end, true, None));
        vm.console("bye");
    }
}

#[test]
fn sigterm_and_the_control_socket_end_a_guest_that_never_would() {
    if !has("sigterm_and_the_control_socket_end_a_guest_that_never_would", "kvm") {
        return;
    }
    let busy = kernel(&[say("up").as_slice(), &[Step::GoTo(2)]].concat(), &[]);
    let idle = kernel(&say("up"), &[]);
    for guest in [busy, idle] {
        for signal in [Some(Signal::SIGTERM), Some(Signal::SIGINT), None] {
            let mut vm = Setup::new(&guest).start();
            vm.console("up");
            match signal {
                Some(signal) => kill(vm.pid(), signal).unwrap(),
                None => drop(vm.control().ask(&Request::Shutdown)),
            }
            assert_eq!(vm.ended().code(), Some(13), "{signal:?}: {}", vm.log());
            assert_eq!(vm.end_file().unwrap().end, End::Host);
        }
    }
}

/// A VM with an overlay, and the overlay's path.
fn with_overlay(guest: &[u8]) -> (Setup, std::path::PathBuf) {
    let mut setup = Setup::new(guest);
    let (base, overlay) = (setup.path("base"), setup.path("overlay"));
    fs::write(&base, vec![7; 1 << 20]).unwrap();
    let identity = BaseIdentity { digest: sha256_file(&base).unwrap(), size: 1 << 20 };
    torpor_overlay::create(&overlay, &base, &identity, 1 << 20).unwrap();
    setup.config["disks"] = json!([
        {"overlay": {"image": {"path": overlay}, "path": overlay, "base": {"path": base}, "serial": "root"}},
    ]);
    (setup, overlay)
}

#[test]
fn a_kill_leaves_no_end_file_and_no_lock() {
    if !has("a_kill_leaves_no_end_file_and_no_lock", "kvm") {
        return;
    }
    let (setup, overlay) = with_overlay(&kernel(&say("up"), &[]));
    let mut vm = setup.start();
    vm.console("up");
    assert!(is_locked(&overlay).unwrap());
    kill(vm.pid(), Signal::SIGKILL).unwrap();
    assert_eq!(vm.ended().code(), None);
    assert!(vm.end_file().is_none());
    assert!(!is_locked(&overlay).unwrap());
}

#[test]
fn a_second_vm_on_the_same_overlay_is_refused_and_the_first_goes_on() {
    if !has("a_second_vm_on_the_same_overlay_is_refused_and_the_first_goes_on", "kvm") {
        return;
    }
    let (setup, overlay) = with_overlay(&kernel(&say("up"), &[]));
    let disks = setup.config["disks"].clone();
    let mut first = setup.start();
    first.console("up");
    let mut setup = Setup::new(&kernel(&[], &[]));
    setup.config["disks"] = disks;
    let mut second = setup.start();
    assert_eq!(second.ended().code(), Some(1));
    assert!(second.log().contains(&format!("in use by process {}", first.pid())), "{}", second.log());
    assert!(is_locked(&overlay).unwrap());
    first.control().ask(&Request::Shutdown);
    first.ended();
    let end = first.end_file().unwrap();
    assert!(end.disks_closed && end.disk_error.is_none(), "{end:?}");
    until("the lock's end", || (!is_locked(&overlay).unwrap()).then_some(()));
}
