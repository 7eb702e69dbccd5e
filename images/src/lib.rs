//! Base images and guest kernels, by digest.
//!
//! An image is a raw ext4 disk that never changes once it is in the catalog; sandboxes write to qcow2 overlays over
//! it. A kernel is a boot image with the few modules that a guest needs before its root disk is mounted, and an
//! initramfs that carries those modules and the agent. Both live in files named by what they hold, so that a lost
//! database loses neither.
//!
//! Everything here blocks (it unpacks, hashes and runs programs) and reports what it is doing through a callback;
//! an async caller runs it on a thread of its own.

mod build;
mod catalog;
mod error;
mod fsutil;
mod kernel;
mod name;
mod staging;
mod tool;

pub use build::Source;
pub use catalog::{Catalog, Image};
pub use error::Error;
pub use kernel::{Kernel, Kernels};
pub use name::check_name;

/// One step of a long operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// The step: a short, fixed lower-case phrase, such as `unpack` or `make disk`.
    pub step: &'static str,
    /// What in that step: a file, a package, a line of a program's output. May be empty.
    pub detail: String,
}

/// The callback that is told about every step.
pub type OnProgress<'a> = &'a mut dyn FnMut(Progress);

fn tell(progress: OnProgress<'_>, step: &'static str, detail: impl Into<String>) {
    progress(Progress { step, detail: detail.into() });
}
