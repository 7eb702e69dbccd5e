//! The confinement of a VMM process.
//!
//! - [`table`]: every system call that any thread may make, with who needs it and why. All else kills the process.
//! - [`Filters`]: that table as programs for the kernel, one per kind of thread.
//! - [`enter`]: an empty mount namespace, an unprivileged user, no capabilities, tight limits; and before that [`close_all_but`].
//!
//! The network namespace stays as it is: the TAP is a descriptor that was opened before, and the filters let no thread
//! make any socket but a Unix stream socket, which the vsock device needs to reach listeners in its run directory.

mod close;
mod enter;
mod error;
mod filter;
mod mounts;
mod privileges;
pub mod table;

pub use close::close_all_but;
pub use enter::{Plan, enter};
pub use error::{JailError, Step};
pub use filter::{FilterError, Filters};
