//! KVM on x86_64: CPUID, registers, interrupt controllers.
//!
//! Sources: Linux Documentation/virt/kvm/x86/cpuid.rst and api.rst; Intel SDM volumes 2 (CPUID) and 3; AMD APM volume 3,
//! appendix E (CPUID).

use std::sync::Arc;

use kvm_bindings::{
    CpuId, KVM_CAP_SPLIT_IRQCHIP, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_clock_data, kvm_cpuid_entry2,
    kvm_debugregs, kvm_enable_cap, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_segment,
    kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Cap, Kvm as Device, VcpuFd, VmFd};

use super::failed;
use crate::boot::Entry;
use crate::hypervisor::{HypervisorError, Start};
use crate::layout;

/// What the host's KVM offers, asked once.
#[derive(Clone, Debug)]
pub(super) struct Platform {
    cpuid: Arc<CpuId>,
    device: Arc<Device>,
}

impl Platform {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, HypervisorError> {
        let mut cpuid = device
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(failed("ask KVM for the CPU's features"))?;
        let deadline_timer = device.check_extension(Cap::TscDeadlineTimer);
        for entry in cpuid.as_mut_slice() {
            restrict(entry, deadline_timer);
        }
        Ok(Self { cpuid: Arc::new(cpuid), device: Arc::clone(device) })
    }

    /// Numbers of the MSRs to save. Asked for when one saves: a start has no time for it.
    fn msrs(&self) -> Result<Vec<u32>, HypervisorError> {
        let list = self.device.get_msr_index_list().map_err(failed("ask KVM for the CPU's registers"))?;
        Ok(list.as_slice().to_vec())
    }
}

/// What is the same for all CPUs: features that the guest gets beside KVM's offer, and those that it doesn't.
fn restrict(entry: &mut kvm_cpuid_entry2, deadline_timer: bool) {
    const VMX: u32 = 1 << 5;
    const SVM: u32 = 1 << 2;
    const DEADLINE_TIMER: u32 = 1 << 24;
    const HYPERVISOR: u32 = 1 << 31;
    match entry.function {
        1 => {
            // No nested virtualization: much of KVM's surface for nothing that a sandbox asks for.
            entry.ecx &= !VMX;
            entry.ecx |= HYPERVISOR;
            if deadline_timer {
                // KVM emulates it, but leaves it to us to offer it. Without it a kernel needs a PIT to measure its timer.
                entry.ecx |= DEADLINE_TIMER;
            }
        }
        // No performance counters: they tell about the host.
        0xa => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        0x8000_0001 => entry.ecx &= !SVM,
        0x8000_000a => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        _ => {}
    }
}

/// Gives a CPU its place: one package, one thread per core.
fn place(entry: &mut kvm_cpuid_entry2, index: u8, cpus: u8) {
    const HYPER_THREADING: u32 = 1 << 28;
    let (id, count) = (u32::from(index), u32::from(cpus));
    let shift = count.next_power_of_two().trailing_zeros();
    match entry.function {
        1 => {
            entry.ebx = (entry.ebx & 0xffff) | (count << 16) | (id << 24);
            entry.edx = if count > 1 { entry.edx | HYPER_THREADING } else { entry.edx & !HYPER_THREADING };
        }
        // Deterministic caches: no sharing above level 2, and the number of cores.
        4 if entry.eax & 0x1f != 0 => {
            let level = (entry.eax >> 5) & 7;
            let sharing = if level >= 3 { count - 1 } else { 0 };
            entry.eax = (entry.eax & 0x3fff) | (sharing << 14) | ((count - 1) << 26);
        }
        // Extended topology: level 0 is the thread, level 1 the core.
        0xb | 0x1f => {
            (entry.eax, entry.ebx, entry.ecx) = match entry.index {
                0 => (0, 1, 1 << 8),
                1 => (shift, count, (2 << 8) | 1),
                level => (0, 0, level),
            };
            entry.edx = id;
        }
        0x8000_0008 => entry.ecx = (shift << 12) | (count - 1),
        0x8000_001d if entry.eax & 0x1f != 0 => {
            let level = (entry.eax >> 5) & 7;
            let sharing = if level >= 3 { count - 1 } else { 0 };
            entry.eax = (entry.eax & 0x3fff) | (sharing << 14);
        }
        0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (id, id, 0),
        _ => {}
    }
}

/// Local APICs in KVM, all else of interrupts here (see `ioapic`); and what Intel CPUs want.
pub(super) fn prepare_vm(vm: &VmFd) -> Result<(), HypervisorError> {
    vm.set_tss_address(layout::TSS as usize).map_err(failed("set the task state's address"))?;
    let mut split = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..kvm_enable_cap::default() };
    split.args[0] = super::ioapic::PINS as u64;
    vm.enable_cap(&split).map_err(failed("make interrupt controllers"))
}

pub(super) fn prepare_vcpu(
    vcpu: &VcpuFd,
    platform: &Platform,
    index: u8,
    cpus: u8,
    start: Start,
) -> Result<(), HypervisorError> {
    let mut cpuid = CpuId::clone(&platform.cpuid);
    for entry in cpuid.as_mut_slice() {
        place(entry, index, cpus);
    }
    vcpu.set_cpuid2(&cpuid).map_err(failed("set the CPU's features"))?;
    set_msrs(vcpu)?;
    match start {
        Start::Entry(entry) => begin_at(vcpu, entry),
        // KVM lets all but the first wait for their start by interrupt.
        Start::Waiting => Ok(()),
    }
}

/// What firmware would have set.
fn set_msrs(vcpu: &VcpuFd) -> Result<(), HypervisorError> {
    const MISC_ENABLE: u32 = 0x1a0;
    const FAST_STRINGS: u64 = 1;
    const MTRR_DEFAULT: u32 = 0x2ff;
    const ENABLED_WRITE_BACK: u64 = (1 << 11) | 6;
    let entry = |index, data| kvm_msr_entry { index, data, ..kvm_msr_entry::default() };
    let wanted = [entry(MISC_ENABLE, FAST_STRINGS), entry(MTRR_DEFAULT, ENABLED_WRITE_BACK)];
    let what = "set the CPU's model-specific registers";
    let msrs = Msrs::from_entries(&wanted)
        .map_err(|_| HypervisorError::new(what, std::io::Error::other("too many")))?;
    // A KVM that doesn't know one of them has a guest that doesn't miss it.
    vcpu.set_msrs(&msrs).map_err(failed(what)).map(drop)
}

fn begin_at(vcpu: &VcpuFd, entry: Entry) -> Result<(), HypervisorError> {
    let mut special = vcpu.get_sregs().map_err(failed("read the CPU's registers"))?;
    let flat = kvm_segment { limit: 0xffff_ffff, present: 1, s: 1, g: 1, ..kvm_segment::default() };
    let data = kvm_segment { selector: 16, type_: 3, db: 1, ..flat };
    (special.ds, special.es, special.ss, special.fs, special.gs) = (data, data, data, data, data);
    special.tr = kvm_segment { selector: 24, limit: 0xffff, type_: 11, present: 1, ..kvm_segment::default() };
    (special.gdt.base, special.gdt.limit) = (layout::GDT, 8 * 4 - 1);
    (special.idt.base, special.idt.limit) = (0, 0);
    let registers = match entry {
        Entry::Long { address, argument } => {
            long_mode(&mut special, flat);
            kvm_regs {
                rip: address,
                rsi: argument,
                rsp: layout::STACK,
                rbp: layout::STACK,
                ..kvm_regs::default()
            }
        }
        Entry::Protected { address, argument } => {
            const PROTECTION: u64 = 1;
            special.cs = kvm_segment { selector: 8, type_: 11, db: 1, ..flat };
            (special.cr0, special.cr4, special.efer) = (PROTECTION, 0, 0);
            kvm_regs { rip: u64::from(address), rbx: u64::from(argument), ..kvm_regs::default() }
        }
    };
    vcpu.set_sregs(&special).map_err(failed("set the CPU's special registers"))?;
    vcpu.set_regs(&kvm_regs { rflags: 2, ..registers }).map_err(failed("set the CPU's registers"))
}

fn long_mode(special: &mut kvm_sregs, flat: kvm_segment) {
    /// Protection, extension type, numeric errors, paging.
    const CR0: u64 = 1 | (1 << 4) | (1 << 5) | (1 << 31);
    /// Physical address extension.
    const CR4: u64 = 1 << 5;
    /// Long mode enabled and active.
    const EFER: u64 = (1 << 8) | (1 << 10);
    special.cs = kvm_segment { selector: 8, type_: 11, l: 1, ..flat };
    (special.cr0, special.cr3, special.cr4, special.efer) = (CR0, layout::PAGE_TABLES, CR4, EFER);
}

/// Where a CPU is, for messages.
pub(super) fn describe(vcpu: &VcpuFd) -> String {
    vcpu.get_regs().map_or_else(|_| String::new(), |registers| format!(", at {:#x}", registers.rip))
}

/// The VM's clock.
#[derive(Debug)]
pub(super) struct Clock(kvm_clock_data);

pub(super) fn save_clock(vm: &VmFd) -> Result<Clock, HypervisorError> {
    vm.get_clock().map(Clock).map_err(failed("save the clock"))
}

pub(super) fn restore_clock(vm: &VmFd, clock: &Clock) -> Result<(), HypervisorError> {
    // Only the value can be put back.
    let clock = kvm_clock_data { clock: clock.0.clock, ..kvm_clock_data::default() };
    vm.set_clock(&clock).map_err(failed("restore the clock"))
}

/// A CPU's state.
pub(super) struct VcpuState {
    registers: kvm_regs,
    special: kvm_sregs,
    floating: Box<kvm_xsave>,
    /// None where the host's CPUs have no XSAVE.
    control: Option<kvm_xcrs>,
    debug: kvm_debugregs,
    local_apic: kvm_lapic_state,
    msrs: Vec<kvm_msr_entry>,
    events: kvm_vcpu_events,
    multiprocessing: kvm_mp_state,
}

/// The order is that of the kernel's documentation: the multiprocessing state first, for reading it may change others.
pub(super) fn save_vcpu(vcpu: &VcpuFd, platform: &Platform) -> Result<VcpuState, HypervisorError> {
    Ok(VcpuState {
        multiprocessing: vcpu.get_mp_state().map_err(failed("save a CPU's state"))?,
        registers: vcpu.get_regs().map_err(failed("save a CPU's registers"))?,
        special: vcpu.get_sregs().map_err(failed("save a CPU's special registers"))?,
        floating: Box::new(vcpu.get_xsave().map_err(failed("save a CPU's vector registers"))?),
        control: vcpu.get_xcrs().ok(),
        debug: vcpu.get_debug_regs().map_err(failed("save a CPU's debug registers"))?,
        local_apic: vcpu.get_lapic().map_err(failed("save a CPU's interrupt controller"))?,
        msrs: read_msrs(vcpu, &platform.msrs()?)?,
        events: vcpu.get_vcpu_events().map_err(failed("save a CPU's pending events"))?,
    })
}

/// KVM stops at the first register that it can't read: it is left out, as what can't be read can't be missed.
fn read_msrs(vcpu: &VcpuFd, numbers: &[u32]) -> Result<Vec<kvm_msr_entry>, HypervisorError> {
    const WHAT: &str = "save a CPU's model-specific registers";
    let mut saved = Vec::with_capacity(numbers.len());
    let mut rest = numbers;
    while !rest.is_empty() {
        let entries: Vec<_> =
            rest.iter().map(|index| kvm_msr_entry { index: *index, ..kvm_msr_entry::default() }).collect();
        let mut msrs = Msrs::from_entries(&entries)
            .map_err(|_| HypervisorError::new(WHAT, std::io::Error::other("too many")))?;
        let count = vcpu.get_msrs(&mut msrs).map_err(failed(WHAT))?;
        saved.extend_from_slice(&msrs.as_slice()[..count]);
        rest = rest.get(count + 1..).unwrap_or_default();
    }
    Ok(saved)
}

pub(super) fn restore_vcpu(vcpu: &VcpuFd, state: &VcpuState) -> Result<(), HypervisorError> {
    vcpu.set_mp_state(state.multiprocessing).map_err(failed("restore a CPU's state"))?;
    vcpu.set_regs(&state.registers).map_err(failed("restore a CPU's registers"))?;
    vcpu.set_sregs(&state.special).map_err(failed("restore a CPU's special registers"))?;
    // SAFETY: the state was read by KVM_GET_XSAVE, which is as large as what KVM reads here; features of CPUs that need
    // more room have to be asked for first, and nothing here does.
    unsafe { vcpu.set_xsave(&state.floating) }.map_err(failed("restore a CPU's vector registers"))?;
    if let Some(control) = &state.control {
        vcpu.set_xcrs(control).map_err(failed("restore a CPU's control registers"))?;
    }
    vcpu.set_debug_regs(&state.debug).map_err(failed("restore a CPU's debug registers"))?;
    write_msrs(vcpu, &state.msrs)?;
    // After the registers that switch it on.
    vcpu.set_lapic(&state.local_apic).map_err(failed("restore a CPU's interrupt controller"))?;
    vcpu.set_vcpu_events(&state.events).map_err(failed("restore a CPU's pending events"))
}

/// KVM stops at the first register that it refuses: those that are read-only are left out.
fn write_msrs(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<(), HypervisorError> {
    const WHAT: &str = "restore a CPU's model-specific registers";
    let mut rest = entries;
    while !rest.is_empty() {
        let msrs = Msrs::from_entries(rest)
            .map_err(|_| HypervisorError::new(WHAT, std::io::Error::other("too many")))?;
        let count = vcpu.set_msrs(&msrs).map_err(failed(WHAT))?;
        rest = rest.get(count + 1..).unwrap_or_default();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
        let all = u32::MAX;
        kvm_cpuid_entry2 {
            function,
            index,
            eax: all,
            ebx: all,
            ecx: all,
            edx: all,
            ..kvm_cpuid_entry2::default()
        }
    }

    #[test]
    fn every_cpu_has_an_id_of_its_own_in_one_package_of_single_threads() {
        for (cpus, shift) in [(1, 0), (3, 2), (4, 2), (32, 5)] {
            let mut seen = Vec::new();
            for index in 0..cpus {
                let (mut first, mut threads, mut cores) = (entry(1, 0), entry(0xb, 0), entry(0xb, 1));
                for entry in [&mut first, &mut threads, &mut cores] {
                    place(entry, index, cpus);
                }
                assert_eq!(first.ebx >> 24, u32::from(index));
                assert_eq!((threads.eax, threads.ebx & 0xffff), (0, 1));
                assert_eq!(
                    (cores.eax, cores.ebx & 0xffff, cores.edx),
                    (shift, u32::from(cpus), u32::from(index))
                );
                seen.push(cores.edx >> cores.eax);
            }
            assert!(seen.iter().all(|package| *package == 0), "{cpus} CPUs: {seen:?}");
        }
    }

    #[test]
    fn nested_virtualization_and_counters_are_withheld_and_the_timer_is_offered_where_kvm_has_it() {
        let mut first = entry(1, 0);
        first.ecx = 1 << 5;
        restrict(&mut first, true);
        assert_eq!(first.ecx, (1 << 31) | (1 << 24));
        let mut counters = entry(0xa, 0);
        restrict(&mut counters, true);
        assert_eq!(counters.eax, 0);
        let mut features = entry(0x8000_0001, 0);
        restrict(&mut features, true);
        assert_eq!(features.ecx & (1 << 2), 0);
    }
}
