//! The test guest: what a kernel does in its first moments, step by step, each announced on an I/O port.
//!
//! References: Intel SDM volume 3, chapters 4 (paging), 6 (interrupts), 13 (XSAVE); Linux Documentation/virt/kvm/api.rst.

use std::{num::NonZeroUsize, ptr, slice};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};

use super::NO_KVM;

/// Guest memory, bytes: one large page, mapped one to one.
const MEMORY: usize = 2 << 20;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const DIRECTORY: u64 = 0x3000;
const GDT: u64 = 0x4000;
const IDT: u64 = 0x5000;
const CODE: u64 = 0x8000;
const STACK_TOP: u64 = 0x2_0000;
/// The port on which the guest says which step comes next.
const STEP_PORT: u16 = 0x10;
/// What the numbers on the port mean; after the last one the guest is done.
const STEPS: [&str; 6] =
    ["long mode", "lock cmpxchg16b", "int3 and iretq", "interrupt", "invalid opcode", "xsave and xrstor"];
const ALL_DONE: u8 = STEPS.len() as u8;
/// 8: code, 64 bits; 16: data.
const DESCRIPTORS: [u64; 3] = [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

core::arch::global_asm!(
    ".pushsection .rodata.torpor_probe, \"a\", @progbits",
    ".balign 16",
    "torpor_probe_begin:",
    "  xor r15d, r15d",
    "  mov al, 0",
    "  out 0x10, al",
    "  mov al, 1",
    "  out 0x10, al",
    "  mov rdi, 0x24000",
    "  xor eax, eax",
    "  xor edx, edx",
    "  mov ebx, 5",
    "  xor ecx, ecx",
    "  lock cmpxchg16b [rdi]",
    "  jnz 9f",
    "  cmp qword ptr [rdi], 5",
    "  jne 9f",
    "  mov al, 2",
    "  out 0x10, al",
    "  int3",
    "  cmp r15d, 1",
    "  jne 9f",
    "  mov al, 3",
    "  out 0x10, al",
    "  int 0x40",
    "  cmp r15d, 2",
    "  jne 9f",
    "  mov al, 4",
    "  out 0x10, al",
    "  ud2",
    "  cmp r15d, 3",
    "  jne 9f",
    "  mov al, 5",
    "  out 0x10, al",
    "  mov eax, 1",
    "  cpuid",
    "  bt ecx, 26",
    "  jnc 8f",
    "  mov rax, cr4",
    "  or rax, 0x40000",
    "  mov cr4, rax",
    "  xor ecx, ecx",
    "  xor edx, edx",
    "  mov eax, 3",
    "  xsetbv",
    "  mov rdi, 0x25000",
    "  mov eax, 3",
    "  xor edx, edx",
    "  xsave64 [rdi]",
    "  mov eax, 3",
    "  xor edx, edx",
    "  xrstor64 [rdi]",
    "8:",
    "  mov al, 6",
    "  out 0x10, al",
    "  hlt",
    "9:",
    "  mov al, 255",
    "  out 0x10, al",
    "  hlt",
    // Breakpoint and interrupt: count, return.
    "torpor_probe_count:",
    "  inc r15d",
    "  iretq",
    // Invalid opcode: count, return behind the two bytes of ud2.
    "torpor_probe_skip:",
    "  inc r15d",
    "  add qword ptr [rsp], 2",
    "  iretq",
    "torpor_probe_end:",
    ".popsection",
);

unsafe extern "C" {
    static torpor_probe_begin: u8;
    static torpor_probe_count: u8;
    static torpor_probe_skip: u8;
    static torpor_probe_end: u8;
}

/// Offset of a label in the code.
fn offset(label: *const u8) -> u64 {
    label as u64 - &raw const torpor_probe_begin as u64
}

fn code() -> &'static [u8] {
    let length = offset(&raw const torpor_probe_end) as usize;
    // SAFETY: both labels are in the one section above, which is read-only and part of the program.
    unsafe { slice::from_raw_parts(&raw const torpor_probe_begin, length) }
}

/// Guest memory with the guest in it. Never unmapped: the process ends soon, and KVM may use it until then.
struct Memory(ptr::NonNull<u8>);

impl Memory {
    fn new() -> Result<Self, String> {
        let size = NonZeroUsize::new(MEMORY).ok_or("no size")?;
        let (access, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE);
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing that is mapped already.
        let mapped =
            unsafe { mmap_anonymous(None, size, access, flags) }.map_err(|errno| errno.to_string())?;
        Ok(Self(mapped.cast()))
    }

    /// Writes before the guest runs.
    fn write(&mut self, at: u64, bytes: &[u8]) {
        let at = at as usize;
        assert!(at + bytes.len() <= MEMORY, "a constant of this file is wrong");
        // SAFETY: the range lies in the mapping, as just checked; no vCPU runs yet, so nobody else reads or writes it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.as_ptr().add(at), bytes.len()) };
    }

    fn write_number(&mut self, at: u64, number: u64) {
        self.write(at, &number.to_le_bytes());
    }

    /// Page tables, descriptors, interrupt gates and code.
    fn fill(&mut self) {
        const PRESENT_WRITABLE: u64 = 3;
        const LARGE: u64 = 1 << 7;
        self.write_number(PML4, PDPT | PRESENT_WRITABLE);
        self.write_number(PDPT, DIRECTORY | PRESENT_WRITABLE);
        self.write_number(DIRECTORY, PRESENT_WRITABLE | LARGE);
        for (number, descriptor) in DESCRIPTORS.into_iter().enumerate() {
            self.write_number(GDT + 8 * number as u64, descriptor);
        }
        let (count, skip) = (offset(&raw const torpor_probe_count), offset(&raw const torpor_probe_skip));
        for (vector, handler) in [(3, count), (6, skip), (0x40, count)] {
            let address = CODE + handler;
            // An interrupt gate: offset, selector 8, type 14, present.
            let low = address & 0xffff | 8 << 16 | 0x8e00 << 32 | (address >> 16 & 0xffff) << 48;
            self.write_number(IDT + 16 * vector, low);
            self.write_number(IDT + 16 * vector + 8, address >> 32);
        }
        self.write(CODE, code());
    }
}

/// Runs the guest; every step is reported before it is tried.
pub(super) fn run(report: &mut dyn FnMut(&str)) -> Result<(), String> {
    let kvm = Kvm::new().map_err(|error| format!("{NO_KVM}open /dev/kvm: {error}"))?;
    let failed = |what: &'static str| move |error: kvm_ioctls::Error| format!("{what}: {error}");
    let vm = kvm.create_vm().map_err(failed("make a VM"))?;
    let mut memory = Memory::new()?;
    memory.fill();
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: MEMORY as u64,
        userspace_addr: memory.0.as_ptr() as u64,
    };
    // SAFETY: the region is the mapping above, which is never unmapped and from here on only the guest's.
    unsafe { vm.set_user_memory_region(region) }.map_err(failed("give the VM its memory"))?;
    let mut vcpu = vm.create_vcpu(0).map_err(failed("make a CPU"))?;
    let cpuid =
        kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(failed("ask for the CPU's features"))?;
    vcpu.set_cpuid2(&cpuid).map_err(failed("set the CPU's features"))?;
    set_registers(&vcpu).map_err(failed("set the CPU's registers"))?;
    follow(&mut vcpu, report)
}

fn set_registers(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    let mut special = vcpu.get_sregs()?;
    let segment = kvm_segment { limit: 0xffff_ffff, present: 1, s: 1, g: 1, ..kvm_segment::default() };
    special.cs = kvm_segment { selector: 8, type_: 11, l: 1, ..segment };
    let data = kvm_segment { selector: 16, type_: 3, db: 1, ..segment };
    (special.ds, special.es, special.ss, special.fs, special.gs) = (data, data, data, data, data);
    (special.gdt.base, special.gdt.limit) = (GDT, 8 * DESCRIPTORS.len() as u16 - 1);
    (special.idt.base, special.idt.limit) = (IDT, 16 * 256 - 1);
    special.cr3 = PML4;
    special.cr4 = 0x620; // physical address extension, SSE and its exceptions
    special.cr0 = 0x8005_0033; // protection, paging, write protection, alignment mask, FPU
    special.efer = 0x500; // long mode, enabled and active
    vcpu.set_sregs(&special)?;
    vcpu.set_regs(&kvm_regs { rip: CODE, rsp: STACK_TOP, rflags: 2, ..kvm_regs::default() })
}

fn follow(vcpu: &mut VcpuFd, report: &mut dyn FnMut(&str)) -> Result<(), String> {
    let mut step = "the first instruction";
    loop {
        let cannot = |how: &str| Err(format!("KVM can't run a stock kernel: {how} at '{step}'"));
        match vcpu.run() {
            Ok(VcpuExit::IoOut(STEP_PORT, &[number])) if number == ALL_DONE => return Ok(()),
            Ok(VcpuExit::IoOut(STEP_PORT, &[number])) => match STEPS.get(usize::from(number)) {
                Some(next) => {
                    step = next;
                    report(step);
                }
                None => return cannot("wrong result"),
            },
            Ok(VcpuExit::InternalError) => return cannot("KVM_EXIT_INTERNAL_ERROR"),
            Ok(other) => return cannot(&format!("unexpected exit {other:?}")),
            Err(error) => return cannot(&format!("KVM_RUN failed ({error})")),
        }
    }
}
