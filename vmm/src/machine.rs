//! A VM, put together: memory, CPUs, kernel, devices.

use std::fs::File;
use std::io;
use std::sync::Arc;

use torpor_vmm_api::HugePages;
use torpor_vmm_devices::Memory;
use torpor_vmm_devices::bus::{Bus, BusDevice, Overlap};
use torpor_vmm_devices::host::Surroundings;
use torpor_vmm_devices::legacy::{I8042, Pvpanic, Rtc};
use torpor_vmm_devices::virtio::{Transport, VirtioDevice, mmio};
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::acpi::{self, Announced, Platform, PowerRegisters};
use crate::boot::{self, Boot, BootError};
use crate::hypervisor::{Hypervisor, HypervisorError, Start, Vm};
use crate::layout;
use crate::memory::{MemoryError, Ram};
use crate::vcpu::{Buses, Cpus, Ending};

/// First port and number of ports of what every machine has.
const RTC: (u16, u16) = (0x70, 2);
const KEYBOARD_CONTROLLER: (u16, u16) = (0x60, 5);
const PANIC_NOTIFIER: (u16, u16) = (0x505, 1);
const SERIAL_PORTS: u16 = 8;

/// A VM that is to be.
pub struct Plan {
    /// Virtual CPUs, 1 to [`layout::MOST_CPUS`].
    pub cpus: u8,
    /// Guest memory, bytes; a multiple of 2 MiB.
    pub memory_bytes: u64,
    /// Huge pages for it.
    pub huge_pages: HugePages,
    /// bzImage or ELF.
    pub kernel: File,
    /// The initramfs.
    pub initramfs: Option<File>,
    /// The kernel's command line.
    pub command_line: String,
    /// Virtio devices, in order; at most [`layout::MOST_DEVICES`].
    pub devices: Vec<Box<dyn VirtioDevice>>,
    /// COM1.
    pub serial: Option<SerialPort>,
}

/// COM1: its registers, and the event that it writes to raise its interrupt.
pub struct SerialPort {
    /// The registers, 8 ports.
    pub device: Arc<dyn BusDevice>,
    /// Its interrupt.
    pub line: EventFd,
}

/// A machine can't be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The number of CPUs.
    #[error("{0} CPUs: a machine has 1 to {most}", most = layout::MOST_CPUS)]
    Cpus(u8),
    /// The number of devices.
    #[error("{0} virtio devices: a machine has at most {most}", most = layout::MOST_DEVICES)]
    Devices(usize),
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The hypervisor.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// The kernel or the initramfs.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Two devices at one address.
    #[error(transparent)]
    Overlap(#[from] Overlap),
    /// The host said no.
    #[error("{what}: {source}")]
    Host {
        /// What was attempted.
        what: String,
        /// The host's error.
        source: io::Error,
    },
}

/// What a machine is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It was never started.
    Built,
    /// The CPUs run, until the guest ends.
    Running,
    /// CPUs and devices stand still.
    Paused,
}

/// State and counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// What it is doing.
    pub state: State,
    /// Exits of the CPUs to this process since the start.
    pub exits: u64,
}

/// How the devices were closed.
#[derive(Debug, Default)]
pub struct Closed {
    /// What went wrong, in order: "block vda: …".
    pub errors: Vec<String>,
}

impl Closed {
    /// Everything that was to be kept is.
    pub fn all_closed(&self) -> bool {
        self.errors.is_empty()
    }
}

/// A VM. To be closed by [`Machine::close`]: dropping it stops its CPUs, and makes nothing durable.
pub struct Machine {
    state: State,
    cpus: Cpus,
    buses: Arc<Buses>,
    devices: Vec<Arc<Transport>>,
    ending: Arc<Ending>,
    power_button: EventFd,
    /// Behind what uses it: fields are dropped in order.
    vm: Arc<dyn Vm>,
    ram: Ram,
}

impl Machine {
    /// Makes the VM, loads the kernel, connects the devices. Opens no file: all that is needed is in the plan.
    ///
    /// # Errors
    /// [`BuildError`].
    pub fn build(
        plan: Plan,
        hypervisor: &dyn Hypervisor,
        surroundings: Arc<dyn Surroundings>,
    ) -> Result<Self, BuildError> {
        check(&plan)?;
        let ending = Ending::new(surroundings);
        let surroundings = Arc::clone(&ending) as Arc<dyn Surroundings>;
        let ram = Ram::new(plan.memory_bytes, plan.huge_pages)?;
        let vm = hypervisor.create_vm(ram.memory(), plan.cpus)?;
        let entry = load(ram.memory(), &plan)?;
        let mut vcpus = Vec::with_capacity(plan.cpus.into());
        for index in 0..plan.cpus {
            let start = if index == 0 { Start::Entry(entry) } else { Start::Waiting };
            vcpus.push(vm.create_vcpu(index, start)?);
        }
        let mut ports = Bus::default();
        insert_standard(&mut ports, &surroundings)?;
        if let Some(serial) = plan.serial {
            vm.irq(layout::SERIAL_IRQ, &serial.line)?;
            ports.insert(layout::SERIAL_PORT.into(), SERIAL_PORTS.into(), serial.device)?;
        }
        let power_button = event("make an event for the power button")?;
        vm.irq(layout::EVENT_IRQ, &power_button)?;
        let (mmio, devices) = connect(plan.devices, &*vm, ram.memory(), &surroundings)?;
        let buses = Arc::new(Buses { ports, mmio });
        let cpus = Cpus::new(vcpus);
        Ok(Self { state: State::Built, cpus, buses, devices, ending, power_button, vm, ram })
    }

    /// Lets the CPUs run.
    ///
    /// # Errors
    /// A thread can't be started.
    pub fn start(&mut self) -> io::Result<()> {
        self.cpus.start(&self.buses, &self.ending)?;
        self.state = State::Running;
        Ok(())
    }

    /// Stops the CPUs, then the devices; those finish what they have begun. Returns when all is still.
    pub fn pause(&mut self) {
        if self.state == State::Running {
            self.cpus.pause();
            self.devices.iter().for_each(|device| device.pause(true));
            self.state = State::Paused;
        }
    }

    /// Devices and CPUs go on.
    pub fn resume(&mut self) {
        if self.state == State::Paused {
            self.devices.iter().for_each(|device| device.pause(false));
            self.cpus.resume();
            self.state = State::Running;
        }
    }

    /// Presses the power button: the guest may switch itself off.
    ///
    /// # Errors
    /// The host can't signal it.
    pub fn power_button(&self) -> io::Result<()> {
        self.power_button.write(1)
    }

    /// State and counters.
    pub fn status(&self) -> Status {
        Status { state: self.state, exits: self.cpus.exits() }
    }

    /// Guest memory.
    pub fn memory(&self) -> &Memory {
        self.ram.memory()
    }

    /// The VM, for its state.
    pub fn vm(&self) -> &Arc<dyn Vm> {
        &self.vm
    }

    /// Ends it: CPUs are stopped, then devices closed, in order, each whatever became of those before it.
    pub fn close(mut self) -> Closed {
        self.cpus.stop();
        let mut closed = Closed::default();
        for device in &self.devices {
            device.pause(false);
            if let Err(error) = device.close() {
                closed.errors.push(format!("{}: {error}", device.name()));
            }
        }
        closed
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.cpus.stop();
    }
}

fn check(plan: &Plan) -> Result<(), BuildError> {
    if plan.cpus == 0 || plan.cpus > layout::MOST_CPUS {
        return Err(BuildError::Cpus(plan.cpus));
    }
    if plan.devices.len() > layout::MOST_DEVICES {
        return Err(BuildError::Devices(plan.devices.len()));
    }
    Ok(())
}

fn event(what: &str) -> Result<EventFd, BuildError> {
    EventFd::new(EFD_NONBLOCK).map_err(|source| BuildError::Host { what: what.to_owned(), source })
}

/// Kernel, initramfs and tables.
fn load(memory: &Memory, plan: &Plan) -> Result<boot::Entry, BuildError> {
    let announced: Vec<_> = (0..plan.devices.len())
        .map(|index| Announced { address: layout::mmio_window(index), irq: layout::device_irq(index) })
        .collect();
    let entry = boot::load(
        memory,
        &Boot {
            kernel: &plan.kernel,
            initramfs: plan.initramfs.as_ref(),
            command_line: &plan.command_line,
            memory_bytes: plan.memory_bytes,
            acpi_root: layout::ACPI_TABLES,
        },
    )?;
    let tables = acpi::tables(&Platform { cpus: plan.cpus, devices: &announced });
    let write = |what, address, bytes: &[u8]| {
        memory.write_slice(bytes, GuestAddress(address)).map_err(|source| BootError::Write { what, source })
    };
    write("ACPI tables", layout::ACPI_TABLES, &tables)?;
    write("the reset code", layout::RESET_VECTOR, &acpi::RESET_CODE)?;
    Ok(entry)
}

fn insert_standard(ports: &mut Bus, surroundings: &Arc<dyn Surroundings>) -> Result<(), BuildError> {
    let around = || Arc::clone(surroundings);
    let devices: [((u16, u16), Arc<dyn BusDevice>); 4] = [
        (RTC, Arc::new(Rtc::new())),
        (KEYBOARD_CONTROLLER, Arc::new(I8042::new(around()))),
        (PANIC_NOTIFIER, Arc::new(Pvpanic::new(around()))),
        ((acpi::POWER_PORTS, acpi::POWER_PORT_COUNT), Arc::new(PowerRegisters::new(around()))),
    ];
    for ((first, count), device) in devices {
        ports.insert(first.into(), count.into(), device)?;
    }
    Ok(())
}

/// Gives each device its window, its interrupt line and its notifications.
fn connect(
    devices: Vec<Box<dyn VirtioDevice>>,
    vm: &dyn Vm,
    memory: &Memory,
    surroundings: &Arc<dyn Surroundings>,
) -> Result<(Bus, Vec<Arc<Transport>>), BuildError> {
    let mut bus = Bus::default();
    let mut transports = Vec::with_capacity(devices.len());
    for (index, device) in devices.into_iter().enumerate() {
        let what = format!("make events for {}", device.name());
        let line = event(&what)?;
        let window = layout::mmio_window(index);
        vm.irq(layout::device_irq(index), &line)?;
        let transport = Transport::new(device, memory.clone(), line, Arc::clone(surroundings))
            .map_err(|source| BuildError::Host { what, source })?;
        for (queue, kick) in transport.kicks().iter().enumerate() {
            vm.notify(window + mmio::NOTIFY, queue as u32, kick)?;
        }
        // An interrupt then costs one exit, not two.
        vm.defer(window + mmio::INTERRUPT_ACKNOWLEDGE);
        let transport = Arc::new(transport);
        bus.insert(window, layout::MMIO_BYTES, Arc::clone(&transport) as Arc<dyn BusDevice>)?;
        transports.push(transport);
    }
    Ok((bus, transports))
}
