//! Boots a kernel with a serial port that prints: `boot KERNEL INITRAMFS CPUS MIB COMMAND-LINE`. For trying things out; the program is
//! `torpor-vmm`.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, mpsc};

use torpor_vmm::hypervisor::kvm::Kvm;
use torpor_vmm::machine::{Machine, Plan, SerialPort};
use torpor_vmm_api::{End, ThreadKind};
use torpor_vmm_devices::host::Surroundings;
use torpor_vmm_devices::legacy::{Console, Serial};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

struct Around(Mutex<mpsc::Sender<End>>);

impl Surroundings for Around {
    fn enter_thread(&self, _kind: ThreadKind) -> io::Result<()> {
        Ok(())
    }

    fn end(&self, end: End) {
        if let Ok(sender) = self.0.lock() {
            let _ = sender.send(end);
        }
    }

    fn device_broken(&self, device: &str, reason: &str) {
        eprintln!("{device}: {reason}");
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let mut word = move || words.next().ok_or("boot KERNEL INITRAMFS|- CPUS MIB COMMAND-LINE");
    let kernel = File::open(word()?)?;
    let initramfs = word()?;
    let initramfs = if initramfs == "-" { None } else { Some(File::open(initramfs)?) };
    let (cpus, mib): (u8, u64) = (word()?.parse()?, word()?.parse()?);
    let (sender, ends) = mpsc::channel();
    let line = EventFd::new(EFD_NONBLOCK)?;
    let output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let console = Console::open(output, 64 << 10)?;
    let serial = SerialPort { device: Arc::new(Serial::new(line.try_clone()?, console)), line };
    let plan = Plan {
        cpus,
        memory_bytes: mib << 20,
        huge_pages: torpor_vmm_api::HugePages::Default,
        kernel,
        initramfs,
        command_line: word()?,
        devices: Vec::new(),
        serial: Some(serial),
    };
    let mut machine = Machine::build(plan, &Kvm::open()?, Arc::new(Around(Mutex::new(sender))))?;
    machine.start()?;
    let end = ends.recv()?;
    eprintln!("end: {end:?}, exits: {}", machine.status().exits);
    machine.close();
    Ok(())
}
