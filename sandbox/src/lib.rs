//! The shared language of Torpor: what a sandbox is, which phases it goes through, and what a compute driver promises.
//!
//! Nothing here does I/O. `lifecycle` holds the only transition table; `driver` the trait behind which VMs, containers
//! and pods live; `sim` a driver that only pretends, for tests; `conformance` the list that any driver must pass.

pub mod conformance;
pub mod disk;
pub mod doctor;
pub mod driver;
pub mod failpoint;
pub mod id;
pub mod images;
pub mod lifecycle;
pub mod sim;
pub mod spec;
pub mod update;
pub mod words;

pub use disk::{DiskCare, DiskFormat, DiskReport};
pub use doctor::{Finding, Level};
pub use driver::{Capabilities, Change, ComputeDriver, DriverError, Ended, Exit, Facts, Observed, Stopped};
pub use id::{InvalidName, Run, SandboxId, SandboxName};
pub use images::{ImageCare, ImageFound, ImageSource, OnStep};
pub use lifecycle::{Event, Failure, Keep, Phase, Refusal, Request, State, Step};
pub use spec::{Egress, Endpoint, InvalidSpec, Resources, RestartPolicy, SandboxSpec, Volume};
pub use update::{EgressChange, Field, PendingUpdate, SpecChange, UpdateFailure};
