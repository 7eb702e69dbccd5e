//! The real `torpor` against a fake gateway.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod disk;
mod exec;
mod fake;
#[cfg(feature = "gateway")]
mod gateway;
mod lifecycle;
mod network;
mod output;
mod services;
mod terminal;
