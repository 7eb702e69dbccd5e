//! The keyboard controller, of which only the reset line is there.

use std::sync::Arc;

use torpor_vmm_api::End;

use crate::bus::BusDevice;
use crate::host::Surroundings;

/// The command port's offset from 0x60, where the device begins; reading it gives the status.
const COMMAND: u64 = 4;
/// Pulses the output port's lowest line, to which the CPU's reset is connected (and none of the other three).
const PULSE_RESET: u8 = 0xfe;
/// "There is a byte to fetch", and "you may write": both always. A driver that looks for a controller first empties it,
/// finds that it never gets empty and gives up after a few reads, where a silent one would be waited for; and whoever only
/// wants to pulse the reset line may do so at once.
const STATUS: u8 = 1;
/// What every other port here reads as: nothing.
const NOTHING: u8 = 0xff;

/// Ports 0x60 to 0x64.
pub struct I8042(Arc<dyn Surroundings>);

impl I8042 {
    /// It ends the VM through the surroundings.
    pub fn new(surroundings: Arc<dyn Surroundings>) -> Self {
        Self(surroundings)
    }
}

impl BusDevice for I8042 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        for (port, byte) in (offset..).zip(data) {
            *byte = if port == COMMAND { STATUS } else { NOTHING };
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if (offset..).zip(data).any(|(port, byte)| port == COMMAND && *byte == PULSE_RESET) {
            self.0.end(End::Reset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::seen::Seen;
    use super::*;

    #[test]
    fn only_the_reset_command_at_the_command_port_ends_the_vm() {
        let seen = Seen::new();
        let controller = I8042::new(seen.clone());
        for value in 0..=255 {
            (0..4).for_each(|port| controller.write(port, &[value]));
            if value != PULSE_RESET {
                controller.write(COMMAND, &[value]);
            }
        }
        assert_eq!(seen.ends(), []);
        controller.write(COMMAND, &[PULSE_RESET]);
        assert_eq!(seen.ends(), [End::Reset]);
    }

    #[test]
    fn a_driver_that_empties_it_gives_up_and_one_that_resets_never_waits() {
        let controller = I8042::new(Seen::new());
        let mut data = [0; 5];
        controller.read(0, &mut data);
        assert_eq!(data, [0xff, 0xff, 0xff, 0xff, 1]);
    }
}
