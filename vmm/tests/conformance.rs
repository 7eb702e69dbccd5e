//! What a hypervisor must do, run over each.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use support::{LOG_PORT, MEMORY, assemble, elf, kvm, load};
use torpor_vmm::hypervisor::sim::{Sim, Step};
use torpor_vmm::hypervisor::{Exit, Hypervisor, Start, Vcpu, Vm};
use torpor_vmm::memory::Ram;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _};
use vmm_sys_util::eventfd::EventFd;

/// A way to get a guest that follows a script.
trait Subject {
    fn hypervisor(&self, script: &[Step]) -> Arc<dyn Hypervisor>;
    /// What the guest has read, where that isn't told on [`LOG_PORT`].
    fn log(&self) -> Vec<Vec<u8>>;
}

struct Guest {
    vm: Arc<dyn Vm>,
    vcpu: Box<dyn Vcpu>,
    /// Outlives those above.
    ram: Ram,
}

fn guest(subject: &dyn Subject, script: &[Step]) -> Guest {
    let ram = Ram::new(MEMORY, torpor_vmm_api::HugePages::Default).unwrap();
    let entry = load(&ram, &elf(&assemble(script), None)).unwrap();
    let vm = subject.hypervisor(script).create_vm(ram.memory(), 1).unwrap();
    let vcpu = vm.create_vcpu(0, Start::Entry(entry)).unwrap();
    Guest { vm, vcpu, ram }
}

const DEVICE: u64 = 0xd000_0000;

fn accesses_come_out_in_order_with_their_sizes(subject: &dyn Subject) {
    let script = [
        Step::PortWrite(0x10, vec![1]),
        Step::PortWrite(0x11, vec![2, 3]),
        Step::PortWrite(0x12, vec![4, 5, 6, 7]),
        Step::MmioWrite(DEVICE + 8, vec![8, 9, 10, 11]),
    ];
    let mut guest = guest(subject, &script);
    for (port, data) in [(0x10, &[1][..]), (0x11, &[2, 3]), (0x12, &[4, 5, 6, 7])] {
        match guest.vcpu.run().unwrap() {
            Exit::PortWrite { port: at, size, data: bytes } => {
                assert_eq!((at, size, bytes), (port, data.len(), data));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(guest.vcpu.run().unwrap(), Exit::MmioWrite { address: DEVICE + 8, data: &[8, 9, 10, 11] });
}

fn the_guest_reads_what_it_is_given(subject: &dyn Subject) {
    let mut guest =
        guest(subject, &[Step::PortRead(0x70, 2), Step::MmioRead(DEVICE, 4), Step::PortWrite(0x72, vec![0])]);
    let mut told = Vec::new();
    loop {
        match guest.vcpu.run().unwrap() {
            Exit::PortRead { port: 0x70, size: 2, data } => data.copy_from_slice(&[0xab, 0xcd]),
            Exit::MmioRead { address: DEVICE, data } => data.copy_from_slice(&[1, 2, 3, 4]),
            Exit::PortWrite { port: LOG_PORT, data, .. } => told.push(data.to_vec()),
            Exit::PortWrite { port: 0x72, .. } => break,
            other => panic!("{other:?}"),
        }
    }
    told.extend(subject.log());
    assert_eq!(told, [vec![0xab, 0xcd], vec![1, 2, 3, 4]]);
}

fn a_notification_is_a_signal_and_no_exit_and_only_for_its_value(subject: &dyn Subject) {
    let script = [
        Step::MmioWrite(DEVICE + 0x50, vec![1, 0, 0, 0]),
        Step::MmioWrite(DEVICE + 0x50, vec![2, 0, 0, 0]),
        Step::MmioWrite(DEVICE + 0x50, vec![3, 0, 0, 0]),
    ];
    let mut guest = guest(subject, &script);
    let (first, second) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
    guest.vm.notify(DEVICE + 0x50, 1, &first).unwrap();
    guest.vm.notify(DEVICE + 0x50, 2, &second).unwrap();
    assert_eq!(guest.vcpu.run().unwrap(), Exit::MmioWrite { address: DEVICE + 0x50, data: &[3, 0, 0, 0] });
    assert_eq!((first.read().unwrap(), second.read().unwrap()), (1, 1));
}

fn deferred_writes_come_in_order_and_before_any_other_exit(subject: &dyn Subject) {
    let script = [
        Step::MmioWrite(DEVICE + 0x64, vec![1, 0, 0, 0]),
        Step::MmioWrite(DEVICE + 0x64, vec![2, 0, 0, 0]),
        Step::MmioWrite(DEVICE + 0x70, vec![3, 0, 0, 0]),
        Step::MmioWrite(DEVICE + 0x64, vec![4, 0, 0, 0]),
        Step::PortWrite(0x10, vec![5]),
    ];
    let mut guest = guest(subject, &script);
    guest.vm.defer(DEVICE + 0x64);
    for (address, value) in [(0x64, 1), (0x64, 2), (0x70, 3), (0x64, 4)] {
        assert_eq!(
            guest.vcpu.run().unwrap(),
            Exit::MmioWrite { address: DEVICE + address, data: &[value, 0, 0, 0] }
        );
    }
    assert_eq!(guest.vcpu.run().unwrap(), Exit::PortWrite { port: 0x10, size: 1, data: &[5] });
}

fn an_edge_on_a_line_reaches_the_guest(subject: &dyn Subject) {
    let mut guest = guest(subject, &[Step::AwaitIrq(5), Step::PortWrite(0x30, vec![1])]);
    let line = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).unwrap();
    guest.vm.irq(5, &line).unwrap();
    let raise = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        line.write(1).unwrap();
        line
    });
    loop {
        match guest.vcpu.run().unwrap() {
            Exit::PortWrite { port: LOG_PORT, .. } => {}
            Exit::PortWrite { port: 0x30, .. } => break,
            other => panic!("{other:?}"),
        }
    }
    raise.join().unwrap();
}

fn a_kick_gets_a_halted_cpu_out_also_one_that_comes_early_and_it_can_go_on(subject: &dyn Subject) {
    let mut guest = guest(subject, &[Step::PortWrite(0x40, vec![1])]);
    let kicker = guest.vcpu.kicker();
    kicker.kick();
    assert_eq!(guest.vcpu.run().unwrap(), Exit::Kicked);
    assert!(matches!(guest.vcpu.run().unwrap(), Exit::PortWrite { port: 0x40, .. }));
    for _ in 0..3 {
        let kicker = Arc::clone(&kicker);
        let late = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            kicker.kick();
        });
        assert_eq!(guest.vcpu.run().unwrap(), Exit::Kicked);
        late.join().unwrap();
    }
    drop(guest);
    // Its CPU is gone.
    kicker.kick();
}

fn a_triple_fault_is_a_shutdown(subject: &dyn Subject) {
    let mut guest = guest(subject, &[Step::PortWrite(0x50, vec![1]), Step::Shutdown]);
    assert!(matches!(guest.vcpu.run().unwrap(), Exit::PortWrite { .. }));
    assert_eq!(guest.vcpu.run().unwrap(), Exit::Shutdown);
}

fn what_is_saved_goes_on_in_another_vm(subject: &dyn Subject) {
    let script = [
        Step::PortWrite(0x60, vec![1]),
        Step::Store(0x20_0000, vec![1, 2, 3, 4]),
        Step::PortWrite(0x61, vec![2]),
    ];
    let mut first = guest(subject, &script);
    assert!(matches!(first.vcpu.run().unwrap(), Exit::PortWrite { port: 0x60, .. }));
    // Out of an instruction that is half done.
    first.vcpu.kicker().kick();
    assert_eq!(first.vcpu.run().unwrap(), Exit::Kicked);
    let (cpu, vm) = (first.vcpu.save().unwrap(), first.vm.save().unwrap());
    let mut second = guest(subject, &script);
    second.vm.restore(&vm).unwrap();
    second.vcpu.restore(&cpu).unwrap();
    assert!(second.vcpu.restore(&vm).is_err(), "a VM's state is none of a CPU");
    drop(first);
    assert!(matches!(second.vcpu.run().unwrap(), Exit::PortWrite { port: 0x61, data: [2], .. }));
    let memory = second.ram.memory();
    assert!(memory.check_range(GuestAddress(0x20_0000), 4));
    assert_eq!(memory.read_obj::<u32>(GuestAddress(0x20_0000)).unwrap(), 0x0403_0201);
}

macro_rules! conformance {
    ($name:ident, $make:expr) => {
        mod $name {
            use super::*;
            conformance!(@ $make;
                accesses_come_out_in_order_with_their_sizes,
                the_guest_reads_what_it_is_given,
                a_notification_is_a_signal_and_no_exit_and_only_for_its_value,
                deferred_writes_come_in_order_and_before_any_other_exit,
                an_edge_on_a_line_reaches_the_guest,
                a_kick_gets_a_halted_cpu_out_also_one_that_comes_early_and_it_can_go_on,
                a_triple_fault_is_a_shutdown,
                what_is_saved_goes_on_in_another_vm,
            );
        }
    };
    (@ $make:expr; $($case:ident,)*) => {
        $(#[test]
        fn $case() {
            if let Some(subject) = $make(stringify!($case)) {
                super::$case(&subject);
            }
        })*
    };
}

#[derive(Default)]
struct Scripted(std::sync::Mutex<Option<Sim>>);

impl Subject for Scripted {
    fn hypervisor(&self, script: &[Step]) -> Arc<dyn Hypervisor> {
        let sim = Sim::new(script.to_vec());
        *self.0.lock().unwrap() = Some(sim.clone());
        Arc::new(sim)
    }

    fn log(&self) -> Vec<Vec<u8>> {
        self.0.lock().unwrap().as_ref().unwrap().log()
    }
}

struct Real;

impl Subject for Real {
    fn hypervisor(&self, _script: &[Step]) -> Arc<dyn Hypervisor> {
        Arc::new(torpor_vmm::hypervisor::kvm::Kvm::open().unwrap())
    }

    fn log(&self) -> Vec<Vec<u8>> {
        Vec::new()
    }
}

conformance!(sim, |_test| Some(Scripted::default()));
conformance!(kvm, |test| super::kvm(test).map(|_| Real));
