//! The few devices of a PC that a kernel looks for without being told.

mod console;
mod i8042;
mod pvpanic;
mod rtc;
mod serial;

pub use console::{Console, ConsoleLimit, ConsoleRing, ConsoleStream};
pub use i8042::I8042;
pub use pvpanic::Pvpanic;
pub use rtc::Rtc;
pub use serial::Serial;

#[cfg(test)]
mod seen {
    //! Surroundings that remember how the guest ended.

    use std::io;
    use std::sync::{Arc, Mutex};

    use torpor_vmm_api::{End, ThreadKind};

    use crate::host::Surroundings;

    #[derive(Default)]
    pub struct Seen(Mutex<Vec<End>>);

    impl Seen {
        pub fn new() -> Arc<Self> {
            Arc::default()
        }

        pub fn ends(&self) -> Vec<End> {
            self.0.lock().unwrap().clone()
        }
    }

    impl Surroundings for Seen {
        fn enter_thread(&self, _kind: ThreadKind) -> io::Result<()> {
            Ok(())
        }

        fn end(&self, end: End) {
            self.0.lock().unwrap().push(end);
        }

        fn device_broken(&self, _device: &str, _reason: &str) {}
    }
}
