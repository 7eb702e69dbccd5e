//! Clean sessions over a dirty byte pipe.
//!
//! A virtio-serial port is one pipe without connections: when the host's end is killed and another one opens it, half
//! a frame and stale bytes may stand in both directions, and the guest may never notice the change. This crate puts
//! sessions on top: the host greets with a fresh nonce, both ends throw away everything that doesn't belong to it, and
//! what follows is a plain duplex byte stream, fit for HTTP/2.
//!
//! - host: [`host::connect`]
//! - guest: [`guest::serve`]
//!
//! The same bytes go over vsock and Unix sockets unchanged. Buffers are bounded on both ends, so a slow reader slows
//! the writer down.
//!
//! # On the wire
//! ```text
//! host  → guest  PADDING HELLO(nonce) [HELLO(nonce) ...]
//! guest → host   WELCOME(nonce) for every HELLO
//! host  → guest  START, then DATA and CLOSE frames
//! guest → host   DATA and CLOSE frames, only after START
//! ```
//! A greeting is 16 bytes of magic, one byte of version and the 16 bytes of the nonce. A frame is a header of 16 bytes
//! (marker, kind, version, length, tag), at most 16 KiB of data and a trailer of 8 bytes. The tag comes from the nonce.
//! The trailer proves that the frame was not cut: a frame that the death of its writer left half-written is completed
//! by the padding of the next one, and must not reach anybody. Padding is longer than any frame for that reason.

pub mod guest;
pub mod host;
mod wire;

pub use wire::VERSION;
