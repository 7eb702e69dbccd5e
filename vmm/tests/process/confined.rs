//! The confined process from outside, sockets that it inherits, and a guest that breaks its devices.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde_json::json;
use torpor_vmm_api::{Event, Reply, Request};

use crate::drive::Driver;
use crate::guest::{Step, kernel, say};
use crate::paces::{accompany, agent};
use crate::vm::{Setup, has, until};

const UID: u32 = 61_236;

#[test]
fn every_thread_of_a_confined_vm_is_filtered_and_the_process_has_no_rights_and_no_files() {
    let test = "every_thread_of_a_confined_vm_is_filtered_and_the_process_has_no_rights_and_no_files";
    if !has(test, "kvm") || !has(test, "root") {
        return;
    }
    let mut setup = Setup::new(&kernel(&say("up"), &[]));
    fs::set_permissions(setup.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    setup.config["cpus"] = json!(2);
    setup.config["vsock"] = json!({"cid": 3, "socket": setup.path("vsock")});
    setup.config["jail"] = json!({"uid": UID});
    let mut vm = setup.start();
    vm.console("up");
    vm.control().ask(&Request::Status);
    let folder = format!("/proc/{}", vm.pid());
    let threads: Vec<_> =
        fs::read_dir(format!("{folder}/task")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let mut names = Vec::new();
    for thread in threads {
        let status = fs::read_to_string(thread.join("status")).unwrap();
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        names.push(field("Name:"));
        assert_eq!((field("Seccomp:"), field("Seccomp_filters:")), ("2".into(), "1".into()), "{status}");
        assert_eq!((field("NoNewPrivs:"), field("CapBnd:")), ("1".into(), "0".repeat(16)), "{status}");
        assert!(field("Uid:").split_whitespace().all(|id| id == UID.to_string()), "{status}");
    }
    // The kernel's own thread, for huge pages of guests.
    names.retain(|name| !name.starts_with("kvm-"));
    names.sort();
    assert_eq!(names, ["starter", "torpor-vmm", "vcpu", "vcpu"]);
    assert_eq!(fs::read_to_string(format!("{folder}/mountinfo")).unwrap().lines().count(), 1);
    let open = fs::read_dir(format!("{folder}/fd")).unwrap();
    let targets: Vec<String> = open
        .map(|entry| fs::read_link(entry.unwrap().path()).unwrap().display().to_string())
        .filter(|target| target.starts_with('/') && target != "/dev/null")
        .collect();
    let known = ["/console", "/end", "/log", "/dev/kvm"];
    assert!(targets.iter().all(|target| known.iter().any(|end| target.ends_with(end))), "{targets:?}");
    drop(vm.control().ask(&Request::Shutdown));
    assert_eq!(vm.ended().code(), Some(13), "{}", vm.log());
}

/// A confined guest that connects to port 7 of the host; its listeners are in a folder of that mode that is root's and the
/// group's of the jail's user.
fn calling(mode: u32) -> (Setup, UnixListener) {
    let driver = agent(0);
    let mut steps = say("up");
    steps.extend(driver.steps.iter().copied());
    steps.extend(say("through"));
    let mut setup = Setup::new(&kernel(&steps, &driver.memory()));
    let (run, ports) = (setup.path("run"), setup.path("run").join("ports"));
    fs::create_dir_all(&ports).unwrap();
    let listener = UnixListener::bind(ports.join("7")).unwrap();
    fs::set_permissions(ports.join("7"), fs::Permissions::from_mode(0o666)).unwrap();
    std::os::unix::fs::chown(&ports, Some(0), Some(UID)).unwrap();
    // As the driver makes them: nobody but root gets to the run's folder.
    fs::set_permissions(&ports, fs::Permissions::from_mode(mode)).unwrap();
    fs::set_permissions(&run, fs::Permissions::from_mode(0o700)).unwrap();
    setup.config["memory_bytes"] = json!(16 << 20);
    setup.config["vsock"] = json!({"cid": 3, "socket": run.join("vsock"), "ports": ports});
    setup.config["jail"] = json!({"uid": UID});
    (setup, listener)
}

#[test]
fn a_guest_reaches_a_listener_of_the_host_out_of_a_jail_that_nothing_else_leads_out_of() {
    let test = "a_guest_reaches_a_listener_of_the_host_out_of_a_jail_that_nothing_else_leads_out_of";
    if !has(test, "kvm") || !has(test, "root") {
        return;
    }
    let (setup, listener) = calling(0o710);
    let mut vm = setup.start();
    accompany(&mut vm, &listener);
    vm.console("through");
    assert!(!vm.log().contains("can't search"), "{}", vm.log());
    drop(vm.control().ask(&Request::Shutdown));
    assert_eq!(vm.ended().code(), Some(13), "{}", vm.log());
}

#[test]
fn a_folder_of_listeners_that_the_jails_user_cannot_search_is_told_of() {
    let test = "a_folder_of_listeners_that_the_jails_user_cannot_search_is_told_of";
    if !has(test, "kvm") || !has(test, "root") {
        return;
    }
    let (setup, listener) = calling(0o700);
    let vm = setup.start();
    vm.console("up");
    until("the word about it", || vm.log().contains(&format!("user {UID} can't search")).then_some(()));
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "it was refused");
}

#[test]
fn inherited_sockets_are_served_and_take_clients_that_came_before_the_process() {
    if !has("inherited_sockets_are_served_and_take_clients_that_came_before_the_process", "kvm") {
        return;
    }
    let mut setup = Setup::new(&kernel(&say("up"), &[]));
    let bound = |name: &str| {
        let listener = UnixListener::bind(setup.path(name)).unwrap();
        fcntl(&listener, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        listener
    };
    let (control, vsock) = (bound("control"), bound("vsock"));
    setup.config["control_fd"] = json!(control.as_raw_fd());
    setup.config["vsock"] =
        json!({"cid": 3, "socket": setup.path("vsock"), "listener_fd": vsock.as_raw_fd()});
    // `control` names the socket, too: the inherited one counts, and nobody binds it anew.
    let early = std::os::unix::net::UnixStream::connect(setup.path("control")).unwrap();
    let mut vm = setup.start();
    drop((control, vsock));
    let mut early = crate::vm::Control::new(early);
    assert!(matches!(early.ask(&Request::Status), Reply::Status(_)));
    early.ask(&Request::Shutdown);
    assert_eq!(vm.ended().code(), Some(13), "{}", vm.log());
}

#[test]
fn a_guest_that_breaks_its_device_again_and_again_is_told_of_and_floods_nothing() {
    if !has("a_guest_that_breaks_its_device_again_and_again_is_told_of_and_floods_nothing", "kvm") {
        return;
    }
    // The entropy device, with queues of sizes that can't be: each time for another reason.
    let (mut one, mut other) = (Driver::new(0, 1, 3), Driver::new(0, 1, 5));
    one.begin(0);
    other.begin(0);
    let steps = [say("up"), one.steps, other.steps, vec![Step::GoTo(2)]].concat();
    let mut vm = Setup::new(&kernel(&steps, &[])).start();
    vm.console("up");
    let mut control = vm.control();
    control.ask(&Request::Subscribe);
    let told = control.next();
    assert!(
        matches!(&told, Some(Reply::Event(Event::DeviceBroken { reason, .. })) if reason.contains("size")),
        "{told:?}"
    );
    drop(control);
    let mut control = vm.control();
    let reply = control.ask(&Request::Status);
    assert!(matches!(&reply, Reply::Status(status) if status.broken.len() == 1), "{reply:?}");
    let mut exits = 0;
    until("a thousand exits more", || match control.ask(&Request::Status) {
        Reply::Status(status) => {
            exits = if exits == 0 { status.counters.exits } else { exits };
            (status.counters.exits > exits + 1000).then_some(())
        }
        _ => None,
    });
    control.ask(&Request::Shutdown);
    assert_eq!(vm.ended().code(), Some(13));
    assert_eq!(vm.end_file().unwrap().broken.len(), 1);
    let log = vm.log();
    assert!(log.lines().count() < 50 && log.contains("broken by its guest"), "{log}");
}
