//! The kinds of threads of the VMM's process. Each kind has a system call filter of its own.

/// What a thread is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ThreadKind {
    /// The first thread: control socket, power, end.
    Main,
    /// Runs one virtual CPU.
    Vcpu,
    /// Serves a block device's queue; does lone requests itself.
    Block,
    /// Does block requests when there are several in flight.
    BlockWorker,
    /// Serves a network device.
    Net,
    /// Serves the vsock device.
    Vsock,
    /// Serves the small devices: entropy, balloon, serial console.
    Small,
    /// Starts the threads that are wanted once CPUs run: a new thread has its starter's filter too.
    Starter,
}

impl ThreadKind {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::Main,
        Self::Vcpu,
        Self::Block,
        Self::BlockWorker,
        Self::Net,
        Self::Vsock,
        Self::Small,
        Self::Starter,
    ];

    /// The thread's name, as the kernel shows it (at most 15 bytes).
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "torpor-vmm",
            Self::Vcpu => "vcpu",
            Self::Block => "block",
            Self::BlockWorker => "block-worker",
            Self::Net => "net",
            Self::Vsock => "vsock",
            Self::Small => "small",
            Self::Starter => "starter",
        }
    }
}
