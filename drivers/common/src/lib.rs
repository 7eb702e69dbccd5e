//! What the drivers do alike, whatever their sandboxes run in: small files that are whole or absent, the folder of a
//! sandbox's spec, one verb of a sandbox at a time, and what is said to its agent.

pub mod agent;
pub mod files;
pub mod specs;
pub mod turns;

pub use specs::Specs;
pub use turns::{Turn, Turns};
