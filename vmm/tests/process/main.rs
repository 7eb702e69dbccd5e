//! The real program with small guests: configuration, control socket, signals, ends.

#![allow(clippy::unwrap_used, reason = "tests")]

mod drive;
mod guest;
mod vm;

mod configs;
mod confined;
mod controls;
mod disks;
mod ends;
mod paces;
