//! The probe, as a program would have it: this one starts itself with the hidden argument.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use torpor_driver_vm::probe;

fn main() {
    if std::env::args().nth(1).as_deref() == Some(probe::ARGUMENT) {
        probe::child_main();
    }
    let listed = std::env::args().any(|argument| argument == "--list");
    if listed {
        println!("the_probe_gives_a_verdict_that_fits_this_host: test");
        return;
    }
    let found = probe::run(&std::env::current_exe().unwrap());
    println!("{found:?}");
    // Inside of the project's box KVM is complete.
    if ["TORPOR_BOX", "IN_KVMBOX"].iter().any(|name| std::env::var_os(name).is_some()) {
        assert!(found.usable, "{found:?}");
    }
    if !std::path::Path::new("/dev/kvm").exists() {
        assert!(!found.usable && found.reason.starts_with("no KVM"), "{found:?}");
    }
    // A verdict against always says at which step, or that there is no KVM.
    assert!(found.usable || found.reason.contains('\'') || found.reason.starts_with("no KVM"), "{found:?}");
}
