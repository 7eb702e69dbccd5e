//! The CMOS clock (MC146818) at ports 0x70 and 0x71: the host's time in UTC.
//!
//! "Update in progress" is never set, so that nobody waits for it: readers compare the seconds before and after, as they
//! must anyway. The host's time is the truth: setting the clock is accepted and forgotten. No alarm, no interrupt.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::bus::BusDevice;

/// Registers.
const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const WEEKDAY: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const STATUS_A: u8 = 0x0a;
const STATUS_B: u8 = 0x0b;
const STATUS_C: u8 = 0x0c;
const STATUS_D: u8 = 0x0d;
/// Where PCs keep the century; the FADT names it.
const CENTURY: u8 = 0x32;

/// Bytes of memory, registers included.
const SIZE: usize = 128;
/// 32.768 kHz, no periodic interrupt.
const DIVIDER: u8 = 0x20;
/// Update in progress.
const UPDATING: u8 = 0x80;
/// 24 hours; the bit for binary numbers stays clear.
const HOURS_24: u8 = 0x02;
/// What a driver may set in status B: stop updates, and the interrupts that never come.
const WRITABLE_B: u8 = 0xf0;
/// The battery is good.
const VALID: u8 = 0x80;

const DAY_SECONDS: u64 = 86_400;

/// The clock: port 0 chooses a register, port 1 is it.
#[derive(Debug)]
pub struct Rtc {
    index: AtomicU8,
    memory: [AtomicU8; SIZE],
    now: fn() -> u64,
}

impl Default for Rtc {
    fn default() -> Self {
        Self::new()
    }
}

impl Rtc {
    /// With the host's clock.
    pub fn new() -> Self {
        Self::with_clock(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()))
    }

    /// With another source of seconds since 1970.
    pub fn with_clock(now: fn() -> u64) -> Self {
        Self { index: AtomicU8::new(0), memory: [const { AtomicU8::new(0) }; SIZE], now }
    }

    fn cell(&self, register: u8) -> &AtomicU8 {
        &self.memory[usize::from(register) % SIZE]
    }

    fn get(&self, register: u8) -> u8 {
        let stored = self.cell(register).load(Ordering::Relaxed);
        match register {
            SECONDS | MINUTES | HOURS | WEEKDAY | DAY | MONTH | YEAR | CENTURY => {
                bcd(Moment::at((self.now)()).field(register))
            }
            STATUS_A => DIVIDER | stored & !UPDATING,
            STATUS_B => HOURS_24 | stored & WRITABLE_B,
            STATUS_C => 0,
            STATUS_D => VALID,
            _ => stored,
        }
    }
}

impl BusDevice for Rtc {
    fn read(&self, offset: u64, data: &mut [u8]) {
        for (port, byte) in (offset..).zip(data) {
            // The index can't be read back on a PC.
            *byte = if port == 1 { self.get(self.index.load(Ordering::Relaxed)) } else { 0xff };
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        for (port, byte) in (offset..).zip(data) {
            match port {
                // The highest bit masks the NMI, of which there is none.
                0 => self.index.store(byte & 0x7f, Ordering::Relaxed),
                1 => self.cell(self.index.load(Ordering::Relaxed)).store(*byte, Ordering::Relaxed),
                _ => {}
            }
        }
    }
}

/// A moment in UTC, in the calendar.
struct Moment {
    year: u64,
    month: u64,
    day: u64,
    /// 1: Sunday.
    weekday: u64,
    second_of_day: u64,
}

impl Moment {
    fn at(seconds: u64) -> Self {
        let days = seconds / DAY_SECONDS;
        // 400 years have 146097 days; years are counted from 1970 on, one by one below that.
        let (mut year, mut left) = (1970 + days / 146_097 * 400, days % 146_097);
        while left >= year_days(year) {
            left -= year_days(year);
            year += 1;
        }
        let mut month = 1;
        while left >= month_days(year, month) {
            left -= month_days(year, month);
            month += 1;
        }
        // 1970-01-01 was a Thursday.
        let weekday = (days + 4) % 7 + 1;
        Self { year, month, day: left + 1, weekday, second_of_day: seconds % DAY_SECONDS }
    }

    fn field(&self, register: u8) -> u8 {
        let number = match register {
            SECONDS => self.second_of_day % 60,
            MINUTES => self.second_of_day / 60 % 60,
            HOURS => self.second_of_day / 3600,
            WEEKDAY => self.weekday,
            DAY => self.day,
            MONTH => self.month,
            YEAR => self.year % 100,
            _ => self.year / 100 % 100,
        };
        number as u8
    }
}

fn leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn year_days(year: u64) -> u64 {
    365 + u64::from(leap(year))
}

fn month_days(year: u64, month: u64) -> u64 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 => 28 + u64::from(leap(year)),
        _ => 31,
    }
}

/// Two decimal digits, four bits each.
fn bcd(number: u8) -> u8 {
    ((number / 10) << 4) | (number % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(rtc: &Rtc, register: u8) -> u8 {
        rtc.write(0, &[register | 0x80]);
        let mut value = [0];
        rtc.read(1, &mut value);
        value[0]
    }

    fn set(rtc: &Rtc, register: u8, value: u8) {
        rtc.write(0, &[register]);
        rtc.write(1, &[value]);
    }

    fn date(rtc: &Rtc) -> [u8; 8] {
        [CENTURY, YEAR, MONTH, DAY, WEEKDAY, HOURS, MINUTES, SECONDS].map(|register| get(rtc, register))
    }

    #[test]
    fn the_time_is_read_in_decimal_digits_and_nobody_waits() {
        // 2024-02-29 23:59:58 UTC, a Thursday; 2100-03-01 00:00:00, a Monday; 1970-01-01; 1999-12-31 12:34:56, a Friday.
        type Case = (fn() -> u64, [u8; 8]);
        let cases: [Case; 4] = [
            (|| 1_709_251_198, [0x20, 0x24, 0x02, 0x29, 5, 0x23, 0x59, 0x58]),
            (|| 4_107_542_400, [0x21, 0x00, 0x03, 0x01, 2, 0, 0, 0]),
            (|| 0, [0x19, 0x70, 1, 1, 5, 0, 0, 0]),
            (|| 946_643_696, [0x19, 0x99, 0x12, 0x31, 6, 0x12, 0x34, 0x56]),
        ];
        for (now, expected) in cases {
            let rtc = Rtc::with_clock(now);
            assert_eq!(date(&rtc), expected);
            assert_eq!(get(&rtc, STATUS_A) & UPDATING, 0);
            assert_eq!(get(&rtc, STATUS_B) & 0x06, HOURS_24, "24 hours, decimal digits");
            assert_eq!((get(&rtc, STATUS_C), get(&rtc, STATUS_D)), (0, VALID));
        }
    }

    #[test]
    fn setting_the_clock_is_taken_and_forgotten_and_the_rest_is_memory() {
        let rtc = Rtc::with_clock(|| 1_709_251_198);
        let before = date(&rtc);
        set(&rtc, STATUS_B, 0x86);
        set(&rtc, STATUS_A, 0xff);
        (0..10).for_each(|register| set(&rtc, register, 0x11));
        set(&rtc, STATUS_B, 0x02);
        assert_eq!(date(&rtc), before);
        assert_eq!(get(&rtc, STATUS_A) & UPDATING, 0);
        assert_eq!(get(&rtc, 1), 0x11, "the alarm");
        set(&rtc, 0x7f, 0xab);
        assert_eq!(get(&rtc, 0x7f), 0xab);
    }

    #[test]
    fn any_access_and_any_time_are_survived() {
        let rtc = Rtc::with_clock(|| u64::MAX);
        for register in 0..=255 {
            set(&rtc, register, register);
            get(&rtc, register);
        }
        rtc.write(0, &[1, 2, 3, 4]);
        rtc.read(0, &mut [0; 8]);
    }
}
