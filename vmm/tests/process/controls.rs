//! The control socket's protocol, and those who abuse it.

use std::io::{Read as _, Write as _};
use std::process::Command;

use torpor_vmm_api::{End, Event, Reply, Request, VmState};

use crate::guest::{Step, kernel, say};
use crate::vm::{Setup, Vm, has, until};

fn busy() -> Vm {
    let vm =
        Setup::new(&kernel(&[say("up").as_slice(), &[Step::In(0x71), Step::GoTo(2)]].concat(), &[])).start();
    vm.console("up");
    vm
}

fn state(reply: Reply) -> (VmState, u64) {
    match reply {
        Reply::Status(status) => (status.state, status.counters.exits),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_vm_tells_its_state_and_its_cpus_stand_still_while_it_is_paused() {
    if !has("a_vm_tells_its_state_and_its_cpus_stand_still_while_it_is_paused", "kvm") {
        return;
    }
    let mut vm = busy();
    let mut control = vm.control();
    let Reply::Status(status) = control.ask(&Request::Status) else { panic!("no status") };
    assert_eq!((status.state, status.cpus, status.memory_bytes), (VmState::Running, 1, 4 << 20));
    assert_eq!((status.broken.len(), status.counters.console_bytes), (0, 2));
    for _ in 0..3 {
        assert_eq!(control.ask(&Request::Pause), Reply::Done);
        let (paused, exits) = state(control.ask(&Request::Status));
        assert_eq!((paused, exits), (VmState::Paused, state(control.ask(&Request::Status)).1));
        // Once more changes nothing.
        assert_eq!(control.ask(&Request::Pause), Reply::Done);
        assert_eq!(control.ask(&Request::Resume), Reply::Done);
        until("progress", || (state(control.ask(&Request::Status)).1 > exits).then_some(()));
        assert_eq!(state(control.ask(&Request::Status)).0, VmState::Running);
    }
    assert_eq!(control.ask(&Request::PowerButton), Reply::Done);
    let refused = control.ask(&Request::Snapshot { folder: "/x".into() });
    assert!(matches!(refused, Reply::Refused { reason } if reason.contains("memory images")));
    // A paused one ends, too.
    control.ask(&Request::Pause);
    control.ask(&Request::Shutdown);
    assert_eq!(vm.ended().code(), Some(13));
}

#[test]
fn who_subscribes_learns_of_the_end_and_who_does_not_is_not_disturbed() {
    if !has("who_subscribes_learns_of_the_end_and_who_does_not_is_not_disturbed", "kvm") {
        return;
    }
    let mut vm = busy();
    let (mut listener, mut quiet, mut asker) = (vm.control(), vm.control(), vm.control());
    assert_eq!(listener.ask(&Request::Subscribe), Reply::Done);
    assert_eq!(state(quiet.ask(&Request::Status)).0, VmState::Running);
    assert_eq!(asker.ask(&Request::Shutdown), Reply::Done);
    assert_eq!(listener.next(), Some(Reply::Event(Event::Ended { end: End::Host })));
    assert_eq!((listener.next(), quiet.next()), (None, None));
    vm.ended();
}

#[test]
fn a_shortage_of_descriptors_passes_and_clients_are_taken_in_again() {
    let test = "a_shortage_of_descriptors_passes_and_clients_are_taken_in_again";
    if !(has(test, "kvm") && has(test, "prlimit")) {
        return;
    }
    let mut vm = busy();
    let pid = vm.pid().to_string();
    let limit = |soft: &str| {
        let limit = format!("--nofile={soft}:");
        assert!(Command::new("prlimit").args(["--pid", &pid, &limit]).status().unwrap().success());
    };
    let shown = Command::new("prlimit").args(["--noheadings", "--raw", "-o", "SOFT", "--nofile"]).output();
    let before = String::from_utf8(shown.unwrap().stdout).unwrap();
    limit("3");
    let mut client = vm.control();
    until("the shortage", || vm.log().contains("rests for a second").then_some(()));
    limit(before.trim());
    assert_eq!(state(client.ask(&Request::Status)).0, VmState::Running);
    client.ask(&Request::Shutdown);
    assert_eq!(vm.ended().code(), Some(13));
}

#[test]
fn what_is_no_request_is_refused_and_the_connection_goes_on() {
    if !has("what_is_no_request_is_refused_and_the_connection_goes_on", "kvm") {
        return;
    }
    let mut vm = busy();
    let mut control = vm.control();
    let lines =
        ["", "{}", "[]", "nonsense", "{\"request\":\"explode\"}", "{\"request\":\"snapshot\"}", "\u{0}"];
    for line in lines {
        control.stream.write_all(format!("{line}\n").as_bytes()).unwrap();
        let reply = control.next();
        assert!(
            matches!(&reply, Some(Reply::Refused { reason }) if reason.contains("not a request")),
            "{line}: {reply:?}"
        );
    }
    // Many in one go are answered in order.
    let status = "{\"request\":\"status\"}\n";
    control.stream.write_all(format!("{status}x\n{status}").as_bytes()).unwrap();
    assert_eq!(state(control.next().unwrap()).0, VmState::Running);
    assert!(matches!(control.next(), Some(Reply::Refused { .. })));
    assert_eq!(state(control.next().unwrap()).0, VmState::Running);
}

#[test]
fn a_million_bytes_of_garbage_cost_that_client_its_connection_and_nobody_else_anything() {
    if !has("a_million_bytes_of_garbage_cost_that_client_its_connection_and_nobody_else_anything", "kvm") {
        return;
    }
    let mut vm = busy();
    let mut other = vm.control();
    let before = resident(&vm);
    for byte in [b'x', b'\n', 0, 0xff] {
        let mut control = vm.control();
        let garbage = vec![byte; 1 << 20];
        // The other side closes at some point.
        let _ = control.stream.write_all(&garbage);
        let _ = control.stream.shutdown(std::net::Shutdown::Write);
        let mut said = Vec::new();
        let _ = control.stream.read_to_end(&mut said);
        assert_eq!(state(other.ask(&Request::Status)).0, VmState::Running);
    }
    assert!(resident(&vm) < before + 1024, "{} KiB after {before}", resident(&vm));
}

#[test]
fn who_does_not_read_is_dropped_and_the_rest_is_served() {
    if !has("who_does_not_read_is_dropped_and_the_rest_is_served", "kvm") {
        return;
    }
    let mut vm = busy();
    let (mut slow, mut other) = (vm.control(), vm.control());
    slow.stream.set_nonblocking(true).unwrap();
    let request = b"{\"request\":\"status\"}\n".repeat(100);
    until("the slow client's end", || match slow.stream.write(&request) {
        Ok(_) => None,
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
        Err(_) => Some(()),
    });
    assert_eq!(state(other.ask(&Request::Status)).0, VmState::Running);
}

#[test]
fn one_client_too_many_is_told_so_and_there_is_room_again_when_one_has_gone() {
    if !has("one_client_too_many_is_told_so_and_there_is_room_again_when_one_has_gone", "kvm") {
        return;
    }
    let mut vm = busy();
    let mut clients: Vec<_> = (0..16).map(|_| vm.control()).collect();
    for client in &mut clients {
        client.ask(&Request::Status);
    }
    let refused = vm.control().next();
    assert!(
        matches!(&refused, Some(Reply::Refused { reason }) if reason.contains("16 clients")),
        "{refused:?}"
    );
    clients.pop();
    until("room", || {
        matches!(vm.control().ask_gently(&Request::Status), Some(Reply::Status(_))).then_some(())
    });
}

/// KiB.
fn resident(vm: &Vm) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", vm.pid())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}
