//! Every system call that a thread may make once it has its filter: who needs it, with which arguments, and why.
//!
//! What isn't here kills the whole process. A test runs the real program under a tracer and fails for a rule that no
//! thread used, unless the rule says in which rare situation it is needed.

use torpor_vmm_api::ThreadKind::{self, Block, BlockWorker, Main, Net, Small, Starter, Vcpu, Vsock};

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The call's name in libc: `SYS_read`.
    pub name: &'static str,
    /// Its number.
    pub number: i64,
    /// The kinds of threads that may make it.
    pub who: &'static [ThreadKind],
    /// With which arguments: one of these lists must hold, all of its checks. Empty: with any.
    pub when: &'static [&'static [Check]],
    /// What for.
    pub why: &'static str,
    /// Why an ordinary run may not show it; none: it must.
    pub rare: Option<&'static str>,
}

/// How much of an argument the kernel looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// The lower 32 bits.
    Int,
    /// All 64.
    Long,
}

/// A check of one argument: `argument & mask == value`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    /// Which argument, from 0.
    pub argument: u8,
    /// How wide it is.
    pub width: Width,
    /// The bits that count.
    pub mask: u64,
    /// What they must be.
    pub value: u64,
}

impl Check {
    /// Whether an argument passes.
    pub fn holds(&self, arguments: &[u64; 6]) -> bool {
        let seen = match self.width {
            Width::Int => arguments[usize::from(self.argument)] & 0xffff_ffff,
            Width::Long => arguments[usize::from(self.argument)],
        };
        seen & self.mask == self.value
    }
}

impl Rule {
    /// Whether the rule allows a thread this call.
    pub fn allows(&self, kind: ThreadKind, number: i64, arguments: &[u64; 6]) -> bool {
        self.number == number
            && self.who.contains(&kind)
            && (self.when.is_empty()
                || self.when.iter().any(|checks| checks.iter().all(|check| check.holds(arguments))))
    }
}

/// An `int` argument that must be this.
const fn is(argument: u8, value: i32) -> Check {
    Check { argument, width: Width::Int, mask: u64::MAX, value: value as u32 as u64 }
}

/// An `int` argument of which some bits must be this.
const fn int_bits(argument: u8, mask: i32, value: i32) -> Check {
    Check { argument, width: Width::Int, mask: mask as u32 as u64, value: value as u32 as u64 }
}

/// A `long` argument of which some bits must be this.
const fn bits(argument: u8, mask: i32, value: i32) -> Check {
    Check { argument, width: Width::Long, mask: mask as u32 as u64, value: value as u32 as u64 }
}

const ANY: &[ThreadKind] = &ThreadKind::ALL;
/// Devices' threads: those that end while the process goes on, as when the guest resets a device.
pub const DEVICES: &[ThreadKind] = &[Block, BlockWorker, Net, Vsock, Small];
/// All that end in order while the process lives.
const ENDING: &[ThreadKind] = &[Vcpu, Block, BlockWorker, Net, Vsock, Small];
/// Those that do what the guest asks of a disk: either may do any request.
const DISK: &[ThreadKind] = &[Block, BlockWorker];
/// And the one that closes it in the end.
const DISK_END: &[ThreadKind] = &[Main, Block, BlockWorker];
/// What may happen with any arguments.
const ALWAYS: &[&[Check]] = &[];

/// KVM_RUN, `_IO(KVMIO, 0x80)` (linux/kvm.h).
const KVM_RUN: i32 = 0xae80;
/// KVM_KVMCLOCK_CTRL, `_IO(KVMIO, 0xad)`.
const KVM_KVMCLOCK_CTRL: i32 = 0xaead;
/// KVM_SET_GSI_ROUTING, `_IOW(KVMIO, 0x6a, struct kvm_irq_routing)`.
const KVM_SET_GSI_ROUTING: i32 = 0x4008_ae6a;
/// KVM_GET_REGS, `_IOR(KVMIO, 0x81, struct kvm_regs)` of 144 bytes.
const KVM_GET_REGS: i32 = 0x8090_ae81_u32 as i32;
/// TUNSETOFFLOAD, `_IOW('T', 208, unsigned int)` (linux/if_tun.h).
const TUNSETOFFLOAD: i32 = 0x4004_54d0;
/// What a thread of this process shares with it: all (clone(2)). Some C libraries add a flag that means nothing any more.
const THREAD_FLAGS: i32 = 0x003d_0f00;
const CLONE_DETACHED: i32 = 0x0040_0000;

const KEEP_SIZE: i32 = libc::FALLOC_FL_KEEP_SIZE;
const PUNCH_HOLE: i32 = libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE;
/// A socket's type without its flags.
const SOCKET_TYPE: i32 = !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);

const NOT_EXECUTABLE: Check = bits(2, libc::PROT_EXEC, 0);
const ANONYMOUS_ANYWHERE: Check = bits(3, libc::MAP_ANONYMOUS | libc::MAP_FIXED, libc::MAP_ANONYMOUS);
const FUTEX_COMMAND: i32 = !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);

macro_rules! rules {
    ($($call:ident: $who:expr, $when:expr, $why:literal $(, rare $rare:literal)?;)*) => {
        &[$(Rule {
            name: stringify!($call),
            number: libc::$call,
            who: $who,
            when: $when,
            why: $why,
            rare: rules!(@rare $($rare)?),
        }),*]
    };
    (@rare) => { None };
    (@rare $rare:literal) => { Some($rare) };
}

/// The table.
pub const RULES: &[Rule] = rules! {
    // Memory, locks, ends: what std and the C library do in any thread.
    SYS_futex: ANY, &[
        &[int_bits(1, FUTEX_COMMAND, libc::FUTEX_WAIT)],
        &[int_bits(1, FUTEX_COMMAND, libc::FUTEX_WAKE)],
        &[int_bits(1, FUTEX_COMMAND, libc::FUTEX_WAIT_BITSET)],
    ], "mutexes, condition variables, waiting for a thread's end", rare "only when two threads want the same lock";
    SYS_write: ANY, ALWAYS, "eventfds: the guest's end, a broken device, interrupts; console and log",
        rare "a thread may have nothing to say";
    SYS_close: ANY, ALWAYS, "connections; queues of a device that is reset", rare "whoever lets go last closes";
    SYS_brk: ANY, ALWAYS, "the heap grows or shrinks", rare "small allocations fit what the heap has";
    SYS_mmap: ANY, &[&[NOT_EXECUTABLE, ANONYMOUS_ANYWHERE]], "large allocations, stacks", rare "few allocations are large";
    SYS_munmap: ANY, ALWAYS, "large allocations; stacks for overflows of threads that end", rare "few allocations are large";
    SYS_mremap: ANY, &[&[int_bits(3, libc::MREMAP_FIXED, 0)]], "large allocations grow", rare "few allocations are large";
    SYS_exit_group: ANY, ALWAYS, "the end, also from the panic hook", rare "one thread ends all";
    SYS_fcntl: ANY, &[&[is(1, libc::F_GETFD)]], "std looks whether a descriptor is open before it closes it",
        rare "in debug builds only";
    SYS_clock_gettime: ANY, ALWAYS, "time", rare "where the host's clock can't be read without the kernel";
    SYS_restart_syscall: ANY, ALWAYS, "a wait with a time limit goes on", rare "after SIGSTOP or a debugger";
    SYS_sched_yield: ANY, ALWAYS, "a channel's other side is at it just now", rare "a race of two threads";

    // Threads that end: when the guest resets a device, and when all is over.
    SYS_sigaltstack: ENDING, ALWAYS, "std takes a thread's stack for overflows down";
    SYS_rt_sigprocmask: ENDING, ALWAYS, "the C library blocks signals in a thread that ends";
    SYS_madvise: ENDING, &[&[is(2, libc::MADV_DONTNEED)]], "the C library gives a stack back; the balloon, guest memory";
    SYS_exit: ENDING, ALWAYS, "a thread ends";
    SYS_sigaltstack: &[Main], ALWAYS, "std takes the first thread's stack for overflows down";

    // The first thread: control socket, signals, stopping CPUs.
    SYS_epoll_wait: &[Main, Net, Vsock], ALWAYS, "waits for clients, signals, packets";
    SYS_epoll_ctl: &[Main, Vsock, Vcpu], ALWAYS, "clients and connections come and go; a device's queues are watched";
    SYS_accept4: &[Main, Vsock], ALWAYS, "takes in clients and connections";
    SYS_recvfrom: &[Main, Vsock], ALWAYS, "reads requests of clients, and the line with which a connection begins";
    SYS_sendto: &[Main], ALWAYS, "answers clients";
    SYS_getpid: &[Main], ALWAYS, "names the process in the signal that stops a CPU";
    SYS_tgkill: &[Main], ALWAYS, "the signal that stops a CPU";

    // CPUs, and the devices' registers, which are served in their threads.
    SYS_ioctl: &[Vcpu], &[&[is(1, KVM_RUN)], &[is(1, KVM_KVMCLOCK_CTRL)], &[is(1, KVM_SET_GSI_ROUTING)]],
        "runs the guest; tells it that it was paused; the guest has changed where its interrupts go";
    SYS_ioctl: &[Vcpu], &[&[is(1, KVM_GET_REGS)]], "says where a CPU is that can't go on",
        rare "only when KVM gives up";
    SYS_gettid: &[Vcpu], ALWAYS, "its number, for the signal that stops it";
    SYS_rt_sigreturn: &[Vcpu], ALWAYS, "returns from the signal that stops a CPU";
    SYS_fcntl: &[Vcpu], &[&[is(1, libc::F_DUPFD_CLOEXEC)]], "a queue's eventfd is handed to the device";
    SYS_eventfd2: &[Vcpu], ALWAYS, "a network device that becomes ready gets what wakes its thread";
    SYS_epoll_create1: &[Vcpu], ALWAYS, "a network device that becomes ready gets what its thread waits on";

    // Waiting for the guest, or for one another.
    SYS_read: &[Main, Block, Small], ALWAYS, "eventfds: a queue's kick, a wish of another thread; signals";
    SYS_poll: &[Small], ALWAYS, "waits for a kick or for the end of a rate limit";

    // Disks: requests, and in the end what is still to be written.
    SYS_pread64: DISK, ALWAYS, "reads a disk or its tables";
    SYS_preadv: DISK, ALWAYS, "reads a disk into several pieces of guest memory";
    SYS_pwrite64: DISK, ALWAYS, "writes a disk or its tables";
    SYS_pwritev: DISK, ALWAYS, "writes a disk from several pieces of guest memory";
    SYS_lseek: DISK, ALWAYS, "asks a base where its data are";
    SYS_fdatasync: DISK_END, ALWAYS, "makes writes durable";
    SYS_fallocate: DISK, &[&[is(1, KEEP_SIZE)], &[is(1, PUNCH_HOLE)]], "reserves room; gives discarded clusters back";
    SYS_fallocate: &[Main], &[&[is(1, PUNCH_HOLE)]], "gives clusters back that wait for the next flush";
    SYS_ftruncate: DISK_END, ALWAYS, "an overlay grows; what it reserved and didn't use goes back";
    SYS_fsync: &[Main], ALWAYS, "makes a raw disk durable that is closed";
    SYS_pread64: &[Main], ALWAYS, "reads the tables of an overlay that grows";
    SYS_lseek: &[Main], ALWAYS, "finds data in the tables of an overlay that grows";
    SYS_pwrite64: &[Main], ALWAYS, "what is still to be written of an overlay that is closed";
    SYS_statx: &[Main], &[&[is(2, libc::AT_EMPTY_PATH)]], "how long the file of an overlay is that is closed";
    SYS_fcntl: &[Main], &[&[is(1, libc::F_OFD_SETLK)]], "gives up an overlay's lock";

    // Packets.
    SYS_readv: &[Net], ALWAYS, "takes a packet from the TAP";
    SYS_writev: &[Net], ALWAYS, "gives a packet to the TAP";
    SYS_ioctl: &[Net], &[&[is(1, TUNSETOFFLOAD)]], "tells the TAP what the guest does by itself";

    // Connections between guest and host.
    SYS_socket: &[Vsock], &[&[is(0, libc::AF_UNIX), int_bits(1, SOCKET_TYPE, libc::SOCK_STREAM)]],
        "a guest connects to a listener in the run directory";
    SYS_connect: &[Vsock], ALWAYS, "and reaches it; only Unix sockets can be made";
    SYS_recvmsg: &[Vsock], ALWAYS, "takes bytes from a connection into guest memory";
    SYS_sendmsg: &[Vsock], ALWAYS, "gives bytes to a connection from guest memory";
    SYS_shutdown: &[Vsock], ALWAYS, "one side of a connection ends";

    // Entropy.
    SYS_getrandom: &[Small], ALWAYS, "random bytes for the guest";

    // The starter, and what a thread does before it has its own filter.
    SYS_clone: &[Starter], &[&[int_bits(0, !CLONE_DETACHED, THREAD_FLAGS)]], "starts a thread";
    SYS_mprotect: &[Starter], &[&[NOT_EXECUTABLE]], "makes a new thread's stack accessible, all but its guard page";
    SYS_rseq: &[Starter], ALWAYS, "a new thread's restartable sequences";
    SYS_set_robust_list: &[Starter], ALWAYS, "a new thread's robust locks";
    SYS_sigaltstack: &[Starter], ALWAYS, "a new thread's stack for overflows";
    SYS_rt_sigprocmask: &[Starter], ALWAYS, "no signal arrives in a thread that is half made";
    SYS_sched_getaffinity: &[Starter], ALWAYS, "std asks where a new thread's stack ends";
    SYS_gettid: &[Starter], ALWAYS, "std notes a new thread's number";
    SYS_prctl: &[Starter], &[&[is(0, libc::PR_SET_NAME)]], "a new thread's name";
    SYS_seccomp: &[Starter], &[&[is(0, libc::SECCOMP_SET_MODE_FILTER as i32), is(1, 0)]], "a new thread's filter";
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_says_what_for_and_no_rule_makes_another_one_useless() {
        for (place, rule) in RULES.iter().enumerate() {
            assert!(!rule.why.is_empty() && !rule.who.is_empty(), "{}", rule.name);
            for other in &RULES[place + 1..] {
                let shared = rule.who.iter().any(|kind| other.who.contains(kind));
                let free = rule.when.is_empty() || other.when.is_empty();
                assert!(!(rule.number == other.number && shared && free), "{} stands twice", rule.name);
            }
        }
    }

    #[test]
    fn no_thread_may_run_programs_open_files_or_look_at_other_processes() {
        let never = [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_clone3,
            libc::SYS_ptrace,
            libc::SYS_kill,
            libc::SYS_process_vm_writev,
            libc::SYS_mount,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
            libc::SYS_unshare,
            libc::SYS_bind,
            libc::SYS_memfd_create,
            libc::SYS_userfaultfd,
            libc::SYS_unlinkat,
            libc::SYS_renameat2,
        ];
        for rule in RULES {
            assert!(!never.contains(&rule.number), "{}", rule.name);
        }
    }

    #[test]
    fn memory_that_is_executable_or_at_a_chosen_place_is_refused() {
        let allowed = |number, arguments| RULES.iter().any(|rule| rule.allows(Main, number, &arguments));
        let plain = libc::PROT_READ as u64 | libc::PROT_WRITE as u64;
        let anonymous = libc::MAP_PRIVATE as u64 | libc::MAP_ANONYMOUS as u64;
        assert!(allowed(libc::SYS_mmap, [0, 4096, plain, anonymous, u64::MAX, 0]));
        assert!(!allowed(libc::SYS_mmap, [0, 4096, plain | libc::PROT_EXEC as u64, anonymous, u64::MAX, 0]));
        assert!(!allowed(libc::SYS_mmap, [0, 4096, plain, anonymous | libc::MAP_FIXED as u64, u64::MAX, 0]));
        assert!(!allowed(libc::SYS_mmap, [0, 4096, plain, libc::MAP_PRIVATE as u64, 5, 0]));
    }
}
