//! What `torpor-vmm` and whoever starts it say to each other: the configuration that it is given once, the frames on its
//! control socket, and the file in which it says how it ended. Types and their JSON only: no I/O.

mod config;
pub mod console;
mod control;
mod end;
pub mod kernel_line;
mod requests;
mod thread;
pub mod validate;

pub use config::{AgentSocket, Config, ConfigError, Disk, HugePages, Jail, Net, RateLimit, Source};
pub use control::{Counters, Event, GrowProblem, Reply, Request, Status, VmState};
pub use end::{End, EndFile};
pub use requests::{LONGEST_REQUEST, Requests, TooLong};
pub use thread::ThreadKind;
pub use validate::MOST_CPUS;
