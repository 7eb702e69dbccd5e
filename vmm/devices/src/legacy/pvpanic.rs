//! The port at which a guest's kernel says that it panicked (QEMU's docs/specs/pvpanic.rst has the protocol).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use torpor_vmm_api::End;

use crate::bus::BusDevice;
use crate::host::Surroundings;

/// The kernel has panicked.
const PANICKED: u8 = 1;
/// The kernel has panicked and now runs its crash kernel, which will say how it ends.
const CRASH_LOADED: u8 = 2;

/// One port, 0x505 by custom.
pub struct Pvpanic {
    surroundings: Arc<dyn Surroundings>,
    crash_loaded: AtomicBool,
}

impl Pvpanic {
    /// It ends the VM through the surroundings.
    pub fn new(surroundings: Arc<dyn Surroundings>) -> Self {
        Self { surroundings, crash_loaded: AtomicBool::new(false) }
    }

    /// The guest has said that its crash kernel runs.
    pub fn crash_loaded(&self) -> bool {
        self.crash_loaded.load(Ordering::Relaxed)
    }
}

impl BusDevice for Pvpanic {
    /// The events that may be told.
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(first) = data.first_mut() {
            *first = PANICKED | CRASH_LOADED;
        }
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        let events = data.first().copied().unwrap_or(0);
        if events & CRASH_LOADED != 0 {
            self.crash_loaded.store(true, Ordering::Relaxed);
        }
        if events & PANICKED != 0 {
            self.surroundings.end(End::Panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::seen::Seen;
    use super::*;

    #[test]
    fn a_panic_ends_the_vm_and_a_crash_kernel_does_not() {
        let seen = Seen::new();
        let panic = Pvpanic::new(seen.clone());
        let mut events = [0];
        panic.read(0, &mut events);
        assert_eq!(events, [3]);
        panic.write(0, &[0xfc]);
        assert!(!panic.crash_loaded());
        panic.write(0, &[CRASH_LOADED]);
        assert!(panic.crash_loaded() && seen.ends().is_empty());
        panic.write(0, &[PANICKED]);
        assert_eq!(seen.ends(), [End::Panic]);
    }
}
