//! Whole machines: with scripted guests, and with bare ones on KVM.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

mod support;

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use support::{Around, MEMORY, assemble, elf, file, kvm};
use torpor_vmm::hypervisor::Hypervisor;
use torpor_vmm::hypervisor::sim::{Sim, Step};
use torpor_vmm::layout;
use torpor_vmm::machine::{BuildError, Machine, Plan, SerialPort, State};
use torpor_vmm_api::End;
use torpor_vmm_devices::bus::BusDevice;
use torpor_vmm_devices::host::Surroundings;
use torpor_vmm_devices::virtio::{Activation, DeviceError, VirtioDevice};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

fn plan(script: &[Step]) -> Plan {
    Plan {
        cpus: 1,
        memory_bytes: MEMORY,
        huge_pages: torpor_vmm_api::HugePages::Default,
        kernel: file(&elf(&assemble(script), None)),
        initramfs: None,
        command_line: String::new(),
        devices: Vec::new(),
        serial: None,
    }
}

/// Collects what is written to it.
#[derive(Default)]
struct Collector(Mutex<Vec<u8>>);

impl BusDevice for Collector {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        self.0.lock().unwrap().extend(data);
    }
}

/// What became of a device.
type Words = Arc<Mutex<Vec<String>>>;

struct Fake {
    name: &'static str,
    words: Words,
    close: Option<&'static str>,
}

impl VirtioDevice for Fake {
    fn id(&self) -> u32 {
        42
    }

    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16, 16]
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(
        &mut self,
        _activation: Activation,
        _around: &Arc<dyn Surroundings>,
    ) -> Result<(), DeviceError> {
        Ok(())
    }

    fn reset(&mut self) {}

    fn close(&mut self) -> io::Result<()> {
        self.words.lock().unwrap().push(format!("{} closed", self.name));
        self.close.map_or(Ok(()), |error| Err(io::Error::other(error)))
    }

    fn pause(&mut self, paused: bool) {
        self.words.lock().unwrap().push(format!(
            "{} {}",
            self.name,
            if paused { "paused" } else { "resumed" }
        ));
    }
}

/// Runs a script on a hypervisor until its end.
fn end_of(script: &[Step], hypervisor: &dyn Hypervisor) -> End {
    let around = Around::new();
    let mut machine = Machine::build(plan(script), hypervisor, around.clone()).unwrap();
    machine.start().unwrap();
    let end = around.end();
    assert!(machine.close().all_closed());
    end
}

fn ends() -> Vec<(Vec<Step>, End)> {
    vec![
        (vec![Step::PortWrite(0x600, vec![0x34])], End::PowerOff),
        (vec![Step::PortWrite(0x602, vec![1])], End::Reset),
        (vec![Step::PortWrite(0x64, vec![0xfe])], End::Reset),
        (vec![Step::Shutdown], End::TripleFault),
    ]
}

#[test]
fn every_end_has_a_reason_of_its_own() {
    for (script, end) in ends() {
        assert_eq!(end_of(&script, &Sim::new(script.clone())), end);
    }
    let crash = vec![Step::Crash("no more".to_owned())];
    assert_eq!(end_of(&[], &Sim::new(crash)), End::Crash { detail: "CPU 0: no more".to_owned() });
}

#[test]
fn every_end_has_a_reason_of_its_own_on_kvm() {
    let Some(kvm) = kvm("every_end_has_a_reason_of_its_own_on_kvm") else { return };
    for (script, end) in ends() {
        assert_eq!(end_of(&script, &kvm), end);
    }
}

#[test]
fn a_guest_that_has_ended_runs_no_further() {
    let script =
        [Step::PortWrite(0x602, vec![1]), Step::PortRead(0x70, 1), Step::Crash("went on".to_owned())];
    let sim = Sim::new(script.to_vec());
    assert_eq!(end_of(&[], &sim), End::Reset);
    assert!(sim.log().is_empty());
}

#[test]
fn a_bare_guest_on_kvm_writes_to_the_serial_port_with_four_cpus() {
    let Some(kvm) = kvm("a_bare_guest_on_kvm_writes_to_the_serial_port_with_four_cpus") else { return };
    let script = [
        Step::PortWrite(layout::SERIAL_PORT, vec![b'h']),
        Step::PortWrite(layout::SERIAL_PORT, vec![b'i']),
        Step::PortWrite(0x600, vec![0x34]),
    ];
    let (around, output) = (Around::new(), Arc::new(Collector::default()));
    let serial = SerialPort { device: output.clone(), line: EventFd::new(EFD_NONBLOCK).unwrap() };
    let plan = Plan { cpus: 4, serial: Some(serial), ..plan(&script) };
    let mut machine = Machine::build(plan, &kvm, around.clone()).unwrap();
    assert_eq!(machine.status().state, State::Built);
    machine.start().unwrap();
    assert_eq!(around.end(), End::PowerOff);
    assert!(machine.status().exits >= 2);
    machine.close();
    assert_eq!(&*output.0.lock().unwrap(), b"hi");
}

/// A guest that counts on a port for ever.
fn counting() -> Vec<u8> {
    let mut code = assemble(&[Step::PortWrite(0x80, vec![1])]);
    let end = code.len();
    // Instead of the halt: jump back to the begin.
    code.truncate(end - 3);
    code.extend([0xe9]);
    code.extend((-(code.len() as i32 + 4)).to_le_bytes());
    code
}

#[test]
fn a_paused_machine_stands_still_and_a_resumed_one_goes_on() {
    let Some(kvm) = kvm("a_paused_machine_stands_still_and_a_resumed_one_goes_on") else { return };
    let around = Around::new();
    let words = Words::default();
    let device = Fake { name: "fake", words: words.clone(), close: None };
    let plan =
        Plan { cpus: 2, kernel: file(&elf(&counting(), None)), devices: vec![Box::new(device)], ..plan(&[]) };
    let mut machine = Machine::build(plan, &kvm, around.clone()).unwrap();
    machine.start().unwrap();
    for _ in 0..3 {
        let before = machine.status().exits;
        while machine.status().exits < before + 10 {
            std::thread::sleep(Duration::from_millis(1));
        }
        machine.pause();
        machine.pause();
        let still = machine.status().exits;
        assert_eq!(machine.status().state, State::Paused);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(machine.status().exits, still);
        machine.resume();
    }
    machine.pause();
    assert!(machine.close().all_closed(), "also while it is paused");
    assert!(!around.ended());
    assert!(words.lock().unwrap().contains(&"fake closed".to_owned()));
}

#[test]
fn all_devices_are_closed_in_order_whatever_one_of_them_says() {
    let words = Words::default();
    let fake =
        |name, close| -> Box<dyn VirtioDevice> { Box::new(Fake { name, words: words.clone(), close }) };
    let devices = vec![fake("first", None), fake("second", Some("disk full")), fake("third", None)];
    let machine = Machine::build(Plan { devices, ..plan(&[]) }, &Sim::default(), Around::new()).unwrap();
    let closed = machine.close();
    assert_eq!((closed.all_closed(), closed.errors), (false, vec!["second: disk full".to_owned()]));
    let words: Vec<_> =
        words.lock().unwrap().iter().filter(|word| word.ends_with("closed")).cloned().collect();
    assert_eq!(words, ["first closed", "second closed", "third closed"]);
}

#[test]
fn a_device_answers_in_its_window_and_the_power_button_raises_its_line() {
    let script = vec![
        Step::MmioRead(layout::mmio_window(0), 4),
        Step::MmioRead(layout::mmio_window(1), 4),
        Step::AwaitIrq(layout::EVENT_IRQ),
        Step::PortWrite(0x600, vec![0x34]),
    ];
    let sim = Sim::new(script);
    let device = Fake { name: "fake", words: Words::default(), close: None };
    let around = Around::new();
    let plan = Plan { devices: vec![Box::new(device)], ..plan(&[]) };
    let mut machine = Machine::build(plan, &sim, around.clone()).unwrap();
    machine.start().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(!around.ended());
    machine.power_button().unwrap();
    assert_eq!(around.end(), End::PowerOff);
    machine.close();
    assert_eq!(sim.log(), [b"virt".to_vec(), vec![0xff; 4]]);
}

#[test]
fn plans_that_cannot_be_are_refused_with_the_limit() {
    let build = |plan| Machine::build(plan, &Sim::default(), Around::new()).map(drop).unwrap_err();
    let none = build(Plan { cpus: 0, ..plan(&[]) }).to_string();
    assert_eq!(none, "0 CPUs: a machine has 1 to 32");
    assert!(matches!(build(Plan { cpus: 33, ..plan(&[]) }), BuildError::Cpus(33)));
    let fake = |_| -> Box<dyn VirtioDevice> {
        Box::new(Fake { name: "fake", words: Words::default(), close: None })
    };
    let many = build(Plan { devices: (0..19).map(fake).collect(), ..plan(&[]) });
    assert!(matches!(many, BuildError::Devices(19)), "{many}");
    assert!(matches!(build(Plan { memory_bytes: 5, ..plan(&[]) }), BuildError::Memory(_)));
    assert!(matches!(build(Plan { kernel: file(b"none"), ..plan(&[]) }), BuildError::Boot(_)));
}
