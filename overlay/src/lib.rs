//! The workspace of a sandbox: one qcow2 overlay over one immutable raw base image.
//!
//! An overlay made by [`create`] has a fixed layout: version 3, clusters of 64 KiB, refcounts of 16 bits, and
//! every metadata table (refcount table, refcount blocks for the largest size, L1, all L2 tables) in place from
//! the start. While a sandbox runs, only L2 entries, refcounts and data clusters change, which is what makes the
//! order of writes simple enough to be proven: a crash at any moment leaves at most leaked clusters.
//!
//! The base is named by its digest, kept in a header extension of our own ([`BaseIdentity`]); what the qcow2
//! header says about a backing file is written for other tools and never trusted here.
//!
//! ```no_run
//! use std::path::Path;
//! use torpor_overlay::{BaseIdentity, Block, create, open, sha256_file};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (base, path) = (Path::new("/images/base.raw"), Path::new("/sandboxes/one/overlay.qcow2"));
//! let identity = BaseIdentity { digest: sha256_file(base)?, size: base.metadata()?.len() };
//! create(path, base, &identity, 10 << 30)?;
//! let disk = open(path, &[base])?; // takes the lock, verifies the base, checks the image
//! disk.write(b"hello", 4096)?;
//! disk.flush()?; // durable from here on
//! disk.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # What is where
//! - [`create`], [`inspect`], [`verify_base`], [`Lock`]: for a driver whose hypervisor does the I/O itself; with
//!   [`raise_generation`] before it starts and [`mark_closed`] after it ended.
//! - [`open()`] and [`Block`]: the engine, for a VMM. [`Raw`] and [`Image`] (any qcow2 file, read only) are the other
//!   disks. A request runs in the thread that calls; [`Queue`] takes many at a time, with completions or futures.
//! - [`check`], [`repair`], [`grow`], [`compact`], [`rewrite`], [`flatten`], [`export`]: for the workspace at rest.
//! - [`fork()`] and [`remove()`]: many overlays on one, and the order in which they go. A sealed overlay is neither
//!   written to nor deleted while others stand on it ([`Error::Sealed`]).
//! - [`fault`]: disks that fail and hosts that crash, for tests.

mod alloc;
mod base;
mod bitmap;
mod block;
mod check;
mod compact;
mod compressed;
mod create;
mod engine;
mod error;
mod export;
pub mod fault;
mod files;
mod flush;
mod fork;
mod header;
mod image;
mod inspect;
mod layout;
mod lock;
mod maintain;
mod open;
mod overlay;
mod queue;
mod remove;
mod reply;
mod runs;
mod tables;
mod vectors;

pub use base::{BaseIdentity, sha256_file, verify_base};
pub use block::{Block, Host, Raw};
pub use check::Report;
pub use compact::{Compacted, compact, rewrite};
pub use create::create;
pub use error::{Error, is_full};
pub use export::{Format, export, flatten};
pub use fork::fork;
pub use image::Image;
pub use inspect::{Info, inspect};
pub use lock::{Lock, holder_of, is_locked};
pub use maintain::{Repaired, check, grow, grow_on, repair};
pub use open::{mark_closed, open, open_locked, open_locked_over, open_read_only, raise_generation};
pub use overlay::Overlay;
pub use queue::{CloseError, Hook, Limits, Queue, Refused};
pub use remove::remove;
