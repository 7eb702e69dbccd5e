//! A guest that follows a script: for tests of what is around a VM, without any hypervisor.

use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::os::fd::BorrowedFd;
use torpor_vmm_devices::Memory;
use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Exit, Hypervisor, HypervisorError, Kicker, Saved, Start, Vcpu, Vm};

/// What the scripted CPU does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Port output, of one element.
    PortWrite(u16, Vec<u8>),
    /// Port input of so many bytes; what is read goes to the log.
    PortRead(u16, usize),
    /// A write where no RAM is (or, where the VM has a notification for it, a signal).
    MmioWrite(u64, Vec<u8>),
    /// A read of so many bytes; what is read goes to the log.
    MmioRead(u64, usize),
    /// A write to RAM.
    Store(u64, Vec<u8>),
    /// Sleeps until an interrupt comes on the line.
    AwaitIrq(u32),
    /// Sleeps for good; a kick gets it out for a moment.
    Halt,
    /// A triple fault.
    Shutdown,
    /// The hypervisor gives up.
    Crash(String),
}

/// Runs the same script on the first CPU of each VM; other CPUs halt.
#[derive(Clone, Debug, Default)]
pub struct Sim {
    script: Vec<Step>,
    log: Arc<Mutex<Vec<Vec<u8>>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sim {
    /// With a script, at whose end the CPU halts.
    pub fn new(script: Vec<Step>) -> Self {
        Self { script, log: Arc::default() }
    }

    /// What the guest has read, in order.
    pub fn log(&self) -> Vec<Vec<u8>> {
        lock(&self.log).clone()
    }
}

impl Hypervisor for Sim {
    fn create_vm(&self, memory: &Memory, _cpus: u8) -> Result<Arc<dyn Vm>, HypervisorError> {
        Ok(Arc::new(SimVm { sim: self.clone(), memory: memory.clone(), wires: Arc::default() }))
    }
}

#[derive(Debug, Default)]
struct Wires {
    irqs: Mutex<Vec<(u32, EventFd)>>,
    notifications: Mutex<Vec<(u64, u32, EventFd)>>,
}

#[derive(Debug)]
struct SimVm {
    sim: Sim,
    memory: Memory,
    wires: Arc<Wires>,
}

fn copy(what: &'static str, event: &EventFd) -> Result<EventFd, HypervisorError> {
    event.try_clone().map_err(|error| HypervisorError::new(what, error))
}

struct SimVmState;

impl Vm for SimVm {
    fn create_vcpu(&self, index: u8, start: Start) -> Result<Box<dyn Vcpu>, HypervisorError> {
        let script = match (index, start) {
            (0, Start::Entry(_)) => self.sim.script.clone(),
            _ => Vec::new(),
        };
        let kicked = EventFd::new(EFD_NONBLOCK).map_err(|error| HypervisorError::new("make a CPU", error))?;
        Ok(Box::new(SimVcpu {
            script,
            next: 0,
            pending: Vec::new(),
            reading: false,
            log: Arc::clone(&self.sim.log),
            memory: self.memory.clone(),
            wires: Arc::clone(&self.wires),
            kicker: Arc::new(SimKicker { kicked }),
        }))
    }

    fn irq(&self, line: u32, event: &EventFd) -> Result<(), HypervisorError> {
        lock(&self.wires.irqs).push((line, copy("connect an interrupt line", event)?));
        Ok(())
    }

    fn notify(&self, address: u64, value: u32, event: &EventFd) -> Result<(), HypervisorError> {
        lock(&self.wires.notifications).push((address, value, copy("connect a notification", event)?));
        Ok(())
    }

    fn defer(&self, _address: u64) {
        // At once is not too late.
    }

    fn save(&self) -> Result<Saved, HypervisorError> {
        Ok(Saved::new(SimVmState))
    }

    fn restore(&self, saved: &Saved) -> Result<(), HypervisorError> {
        saved.get::<SimVmState>().map(drop)
    }
}

#[derive(Debug)]
struct SimKicker {
    kicked: EventFd,
}

impl Kicker for SimKicker {
    fn kick(&self) {
        // It fails only when 2^64 - 2 kicks are pending.
        let _ = self.kicked.write(1);
    }
}

struct SimVcpu {
    script: Vec<Step>,
    next: usize,
    /// Bytes of the exit that is being handled.
    pending: Vec<u8>,
    /// They are an answer, for the log.
    reading: bool,
    log: Arc<Mutex<Vec<Vec<u8>>>>,
    memory: Memory,
    wires: Arc<Wires>,
    kicker: Arc<SimKicker>,
}

/// The place in the script.
struct SimVcpuState(usize);

impl SimVcpu {
    fn kicked(&self) -> bool {
        self.kicker.kicked.read().is_ok()
    }

    /// Sleeps until a kick (true) or an interrupt on the line (false).
    fn sleep(&self, line: Option<u32>) -> Result<bool, HypervisorError> {
        let failed = |error: io::Error| HypervisorError::new("sleep", error);
        let irqs = lock(&self.wires.irqs);
        let event = irqs.iter().find(|(number, _)| Some(*number) == line);
        let event = event.map(|(_, event)| event.try_clone()).transpose().map_err(failed)?;
        drop(irqs);
        loop {
            // SAFETY: both events live longer than the borrows, which end with this loop's round.
            let borrow = |event: &EventFd| unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
            let mut waits = vec![PollFd::new(borrow(&self.kicker.kicked), PollFlags::POLLIN)];
            waits.extend(event.as_ref().map(|event| PollFd::new(borrow(event), PollFlags::POLLIN)));
            match poll(&mut waits, PollTimeout::NONE) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => return Err(failed(errno.into())),
            }
            if self.kicked() {
                return Ok(true);
            }
            if event.as_ref().is_some_and(|event| event.read().is_ok()) {
                return Ok(false);
            }
        }
    }

    /// Signals a notification that stands for the write, if there is one.
    fn notified(&self, address: u64, data: &[u8]) -> bool {
        let Ok(value) = <[u8; 4]>::try_from(data).map(u32::from_le_bytes) else { return false };
        let notifications = lock(&self.wires.notifications);
        let found = notifications.iter().find(|(at, wanted, _)| (*at, *wanted) == (address, value));
        found.is_some_and(|(_, _, event)| event.write(1).is_ok())
    }
}

impl Vcpu for SimVcpu {
    fn run(&mut self) -> Result<Exit<'_>, HypervisorError> {
        if std::mem::take(&mut self.reading) {
            lock(&self.log).push(std::mem::take(&mut self.pending));
        }
        loop {
            if self.kicked() {
                return Ok(Exit::Kicked);
            }
            let step = self.script.get(self.next).cloned().unwrap_or(Step::Halt);
            match &step {
                Step::Halt if self.sleep(None)? => return Ok(Exit::Kicked),
                Step::AwaitIrq(line) if self.sleep(Some(*line))? => return Ok(Exit::Kicked),
                Step::Halt => continue,
                _ => self.next += 1,
            }
            match step {
                Step::PortWrite(port, data) => {
                    self.pending = data;
                    return Ok(Exit::PortWrite { port, size: self.pending.len(), data: &self.pending });
                }
                Step::PortRead(port, size) => {
                    (self.pending, self.reading) = (vec![0; size], true);
                    return Ok(Exit::PortRead { port, size, data: &mut self.pending });
                }
                Step::MmioWrite(address, data) if self.notified(address, &data) => {}
                Step::MmioWrite(address, data) => {
                    self.pending = data;
                    return Ok(Exit::MmioWrite { address, data: &self.pending });
                }
                Step::MmioRead(address, size) => {
                    (self.pending, self.reading) = (vec![0; size], true);
                    return Ok(Exit::MmioRead { address, data: &mut self.pending });
                }
                Step::Store(address, data) => {
                    self.memory.write_slice(&data, GuestAddress(address)).map_err(|error| {
                        HypervisorError::new("store to guest memory", io::Error::other(error.to_string()))
                    })?;
                }
                Step::Shutdown => return Ok(Exit::Shutdown),
                Step::Crash(detail) => return Ok(Exit::Crash(detail)),
                Step::Halt | Step::AwaitIrq(_) => {}
            }
        }
    }

    fn kicker(&self) -> Arc<dyn Kicker> {
        Arc::clone(&self.kicker) as Arc<dyn Kicker>
    }

    fn save(&self) -> Result<Saved, HypervisorError> {
        Ok(Saved::new(SimVcpuState(self.next)))
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), HypervisorError> {
        self.next = saved.get::<SimVcpuState>()?.0;
        Ok(())
    }
}
