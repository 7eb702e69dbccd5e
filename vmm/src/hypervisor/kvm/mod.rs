//! KVM.
//!
//! Source: Linux Documentation/virt/kvm/api.rst. What is particular to a CPU architecture is in a file of its name.

mod ioapic;
mod kick;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::io;
use std::os::fd::{FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{
    KVM_API_VERSION, KvmIrqRouting, kvm_coalesced_mmio, kvm_run, kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, Kvm as Device, VcpuExit, VcpuFd, VmFd};
use torpor_vmm_devices::Memory;
use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};
use vmm_sys_util::eventfd::EventFd;

use self::ioapic::IoApic;
use self::kick::KvmKicker;
use super::{Exit, Hypervisor, HypervisorError, Kicker, Saved, Start, Vcpu, Vm};

fn failed(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> HypervisorError {
    move |error| HypervisorError::new(what, io::Error::from_raw_os_error(error.errno()))
}

/// `/dev/kvm`.
#[derive(Debug)]
pub struct Kvm {
    device: Arc<Device>,
    platform: x86_64::Platform,
}

impl Kvm {
    /// Opens `/dev/kvm`.
    ///
    /// # Errors
    /// It isn't there, may not be opened, or speaks another version.
    pub fn open() -> Result<Self, HypervisorError> {
        let path = Path::new("/dev/kvm");
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|error| HypervisorError::new("open /dev/kvm", error))?;
        Self::from_descriptor(file.into())
    }

    /// From an open `/dev/kvm`.
    ///
    /// # Errors
    /// It speaks another version.
    pub fn from_descriptor(descriptor: OwnedFd) -> Result<Self, HypervisorError> {
        // SAFETY: the descriptor was owned, and is given away for good.
        let device = unsafe { Device::from_raw_fd(descriptor.into_raw_fd()) };
        let version = device.get_api_version();
        if version != KVM_API_VERSION as i32 {
            let text = format!("it speaks version {version} instead of {KVM_API_VERSION}");
            return Err(HypervisorError::new("use /dev/kvm", io::Error::other(text)));
        }
        kick::install_handler().map_err(|error| HypervisorError::new("handle the kick signal", error))?;
        let device = Arc::new(device);
        let platform = x86_64::Platform::new(&device)?;
        Ok(Self { device, platform })
    }
}

impl Hypervisor for Kvm {
    fn create_vm(&self, memory: &Memory, cpus: u8) -> Result<Arc<dyn Vm>, HypervisorError> {
        let vm = retry(|| self.device.create_vm()).map_err(failed("make a VM"))?;
        for (slot, region) in memory.iter().enumerate() {
            let region = kvm_userspace_memory_region {
                slot: slot as u32,
                flags: 0,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the region is mapped guest memory. KVM uses it through the process's page tables: should it be
            // unmapped before the VM is gone, the guest's accesses fail.
            unsafe { vm.set_user_memory_region(region) }.map_err(failed("give the VM its memory"))?;
        }
        x86_64::prepare_vm(&vm)?;
        let chip = Arc::new(Chip { vm, registers: Mutex::new(IoApic::new()), deferred: Mutex::new(()) });
        Ok(Arc::new(KvmVm { chip, cpus, platform: self.platform.clone() }))
    }
}

/// Making a VM is interrupted by signals.
fn retry<T>(mut call: impl FnMut() -> Result<T, kvm_ioctls::Error>) -> Result<T, kvm_ioctls::Error> {
    loop {
        match call() {
            Err(error) if error.errno() == libc::EINTR => {}
            result => return result,
        }
    }
}

/// The VM, and what of its interrupt controllers isn't in KVM.
#[derive(Debug)]
struct Chip {
    vm: VmFd,
    registers: Mutex<IoApic>,
    /// Held by the CPU that takes from the ring of deferred writes, which all of them share.
    deferred: Mutex<()>,
}

impl Chip {
    fn registers(&self) -> MutexGuard<'_, IoApic> {
        self.registers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells KVM where each line leads; under the lock, so that the last change is the last word.
    fn publish(&self, registers: &IoApic) -> Result<(), HypervisorError> {
        const WHAT: &str = "route interrupt lines";
        let routing = KvmIrqRouting::from_entries(&registers.routes())
            .map_err(|_| HypervisorError::new(WHAT, io::Error::other("too many")))?;
        self.vm.set_gsi_routing(&routing).map_err(failed(WHAT))
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), HypervisorError> {
        let mut registers = self.registers();
        if registers.write(offset, data) { self.publish(&registers) } else { Ok(()) }
    }
}

#[derive(Debug)]
struct KvmVm {
    chip: Arc<Chip>,
    cpus: u8,
    platform: x86_64::Platform,
}

impl Vm for KvmVm {
    fn create_vcpu(&self, index: u8, start: Start) -> Result<Box<dyn Vcpu>, HypervisorError> {
        let mut vcpu = self.chip.vm.create_vcpu(u64::from(index)).map_err(failed("make a CPU"))?;
        let ring = vcpu.map_coalesced_mmio_ring().is_ok();
        x86_64::prepare_vcpu(&vcpu, &self.platform, index, self.cpus, start)?;
        // SAFETY: the page is mapped as long as the vCPU lives, and the kicker forgets it when that ends (see `drop`).
        let kicker = Arc::new(unsafe { KvmKicker::new(vcpu.get_kvm_run()) });
        Ok(Box::new(KvmVcpu {
            vcpu,
            chip: Arc::clone(&self.chip),
            kicker,
            platform: self.platform.clone(),
            begun: false,
            ring,
            late: None,
            came: None,
        }))
    }

    fn irq(&self, line: u32, event: &EventFd) -> Result<(), HypervisorError> {
        self.chip.vm.register_irqfd(event, line).map_err(failed("connect an interrupt line"))
    }

    fn notify(&self, address: u64, value: u32, event: &EventFd) -> Result<(), HypervisorError> {
        self.chip
            .vm
            .register_ioevent(event, &IoEventAddress::Mmio(address), value)
            .map_err(failed("connect a notification"))
    }

    fn defer(&self, address: u64) {
        // Where KVM can't, each write is an exit.
        let _ = self.chip.vm.register_coalesced_mmio(IoEventAddress::Mmio(address), 4);
    }

    fn save(&self) -> Result<Saved, HypervisorError> {
        let clock = x86_64::save_clock(&self.chip.vm)?;
        Ok(Saved::new(VmState { clock, registers: self.chip.registers().clone() }))
    }

    fn restore(&self, saved: &Saved) -> Result<(), HypervisorError> {
        let state: &VmState = saved.get()?;
        let mut registers = self.chip.registers();
        *registers = state.registers.clone();
        self.chip.publish(&registers)?;
        x86_64::restore_clock(&self.chip.vm, &state.clock)
    }
}

/// A VM's state beside its CPUs'.
struct VmState {
    clock: x86_64::Clock,
    registers: IoApic,
}

#[derive(Debug)]
struct KvmVcpu {
    vcpu: VcpuFd,
    chip: Arc<Chip>,
    kicker: Arc<KvmKicker>,
    platform: x86_64::Platform,
    begun: bool,
    /// There is a ring of deferred writes.
    ring: bool,
    /// The deferred write that is being handled.
    late: Option<kvm_coalesced_mmio>,
    /// What comes after it.
    came: Option<Came>,
}

impl Drop for KvmVcpu {
    fn drop(&mut self) {
        self.kicker.forget();
    }
}

/// What [`VcpuExit`] said, without its borrow.
#[derive(Clone, Copy, Debug)]
enum Came {
    Port,
    Mmio,
    Kicked,
    Shutdown,
    Crash(&'static str, u64),
}

impl KvmVcpu {
    fn enter(&mut self) -> Result<Came, HypervisorError> {
        loop {
            return Ok(match self.vcpu.run() {
                Ok(VcpuExit::IoIn(..) | VcpuExit::IoOut(..)) => Came::Port,
                Ok(VcpuExit::MmioRead(..) | VcpuExit::MmioWrite(..)) => Came::Mmio,
                Ok(VcpuExit::Intr) => Came::Kicked,
                Ok(VcpuExit::Shutdown) => Came::Shutdown,
                Ok(VcpuExit::InternalError) => Came::Crash("internal error", 0),
                Ok(VcpuExit::FailEntry(reason, _)) => Came::Crash("failed entry", reason),
                Ok(VcpuExit::Hlt) => Came::Crash("halt outside KVM", 0),
                Ok(VcpuExit::MemoryFault { gpa, .. }) => Came::Crash("memory fault", gpa),
                Ok(VcpuExit::Unsupported(reason)) => Came::Crash("unknown exit", u64::from(reason)),
                // Some kernels tell of it; the I/O APIC here needs nothing of the end of an interrupt.
                Ok(VcpuExit::IoapicEoi(_)) => continue,
                Ok(_) => Came::Crash("unexpected exit", 0),
                Err(error) => match error.errno() {
                    libc::EINTR => Came::Kicked,
                    // A waiting CPU was started.
                    libc::EAGAIN => continue,
                    _ => return Err(failed("run a CPU")(error)),
                },
            });
        }
    }

    fn enter_until_needed(&mut self) -> Result<Came, HypervisorError> {
        loop {
            let came = self.enter()?;
            if !matches!(came, Came::Mmio) || !self.handle_chip()? {
                return Ok(came);
            }
        }
    }

    /// The next deferred write.
    fn take_late(&mut self) -> Option<kvm_coalesced_mmio> {
        if !self.ring {
            return None;
        }
        let _only_one = self.chip.deferred.lock().unwrap_or_else(PoisonError::into_inner);
        self.vcpu.coalesced_mmio_read().ok().flatten()
    }

    /// Whether an access to memory was one to the I/O APIC, and is done.
    fn handle_chip(&mut self) -> Result<bool, HypervisorError> {
        match mmio_exit(self.vcpu.get_kvm_run()) {
            Exit::MmioRead { address, data } => match ioapic::offset(address) {
                Some(offset) => self.chip.registers().read(offset, data),
                None => return Ok(false),
            },
            Exit::MmioWrite { address, data } => match ioapic::offset(address) {
                Some(offset) => self.chip.write(offset, data)?,
                None => return Ok(false),
            },
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// What is known about a crash.
    fn crash(&mut self, how: &str, number: u64) -> String {
        let run = self.vcpu.get_kvm_run();
        let mut text = format!("KVM says: {how} {number:#x}");
        if run.exit_reason == kvm_bindings::KVM_EXIT_INTERNAL_ERROR {
            // SAFETY: the exit reason says that this part of the union is the filled one; it is plain numbers.
            let internal = unsafe { run.__bindgen_anon_1.internal };
            text += &format!(", suberror {}", internal.suberror);
        }
        text + &x86_64::describe(&self.vcpu)
    }
}

impl Vcpu for KvmVcpu {
    fn run(&mut self) -> Result<Exit<'_>, HypervisorError> {
        if !self.begun {
            self.begun = true;
            self.kicker.enter_thread();
        }
        let came = match self.came.take() {
            Some(came) => came,
            None => self.enter_until_needed()?,
        };
        if let Some(late) = self.take_late() {
            self.came = Some(came);
            let late = self.late.insert(late);
            let length = (late.len as usize).min(late.data.len());
            return Ok(Exit::MmioWrite { address: late.phys_addr, data: &late.data[..length] });
        }
        match came {
            Came::Port => Ok(port_exit(self.vcpu.get_kvm_run())),
            Came::Mmio => Ok(mmio_exit(self.vcpu.get_kvm_run())),
            Came::Kicked => {
                self.vcpu.set_kvm_immediate_exit(0);
                Ok(Exit::Kicked)
            }
            Came::Shutdown => Ok(Exit::Shutdown),
            Came::Crash(how, number) => Ok(Exit::Crash(self.crash(how, number))),
        }
    }

    fn kicker(&self) -> Arc<dyn Kicker> {
        Arc::clone(&self.kicker) as Arc<dyn Kicker>
    }

    fn save(&self) -> Result<Saved, HypervisorError> {
        x86_64::save_vcpu(&self.vcpu, &self.platform).map(Saved::new)
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), HypervisorError> {
        x86_64::restore_vcpu(&self.vcpu, saved.get()?)
    }

    fn was_paused(&mut self) {
        // It fails when the guest doesn't use KVM's clock: then there is nobody to tell.
        let _ = self.vcpu.kvmclock_ctrl();
    }
}

fn port_exit(run: &mut kvm_run) -> Exit<'_> {
    // SAFETY: KVM_RUN came back with KVM_EXIT_IO, which fills this part of the union with plain numbers.
    let io = unsafe { run.__bindgen_anon_1.io };
    let size = usize::from(io.size);
    let begin = std::ptr::from_mut(run).cast::<u8>();
    // SAFETY: KVM puts `count` elements of `size` bytes at that offset of the page(s) of which `run` is the beginning,
    // and which stay mapped and untouched while the vCPU, that the result borrows, isn't run again.
    let data = unsafe {
        std::slice::from_raw_parts_mut(begin.add(io.data_offset as usize), size * io.count as usize)
    };
    if u32::from(io.direction) == kvm_bindings::KVM_EXIT_IO_IN {
        Exit::PortRead { port: io.port, size, data }
    } else {
        Exit::PortWrite { port: io.port, size, data }
    }
}

fn mmio_exit(run: &mut kvm_run) -> Exit<'_> {
    // SAFETY: KVM_RUN came back with KVM_EXIT_MMIO, which fills this part of the union with plain numbers.
    let mmio = unsafe { &mut run.__bindgen_anon_1.mmio };
    let length = (mmio.len as usize).min(mmio.data.len());
    let data = &mut mmio.data[..length];
    if mmio.is_write == 0 {
        Exit::MmioRead { address: mmio.phys_addr, data }
    } else {
        Exit::MmioWrite { address: mmio.phys_addr, data }
    }
}
