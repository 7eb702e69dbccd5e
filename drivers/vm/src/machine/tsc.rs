//! How fast this host's time stamp counter runs.

use std::time::{Duration, Instant};

#[cfg(target_arch = "x86_64")]
use crate::sys;

const WINDOW: Duration = Duration::from_millis(25);

/// Ticks per millisecond, measured; none where there is no such counter.
///
/// A guest in software emulation sees the host's counter and finds out its speed with emulated timers, which on a busy
/// host fails, and without that speed a stock kernel on a machine without HPET and PM timer waits for ever. So it is told.
#[cfg(target_arch = "x86_64")]
pub(crate) fn khz() -> Option<u64> {
    let (begin, from) = sample();
    std::thread::sleep(WINDOW);
    let (end, to) = sample();
    let nanos = u64::try_from(end.duration_since(begin).as_nanos()).ok()?;
    let ticks = u128::from(to.checked_sub(from)?);
    u64::try_from(ticks * 1_000_000 / u128::from(nanos.max(1))).ok().filter(|khz| *khz > 100_000)
}

/// Counter and clock at the same moment: the closest of several tries, as any may be interrupted in between.
#[cfg(target_arch = "x86_64")]
fn sample() -> (Instant, u64) {
    let one = || {
        let before = sys::time_stamp();
        let at = Instant::now();
        let after = sys::time_stamp();
        (after.wrapping_sub(before), at, before / 2 + after / 2)
    };
    let best = (0..16).map(|_| one()).min_by_key(|(width, ..)| *width);
    best.map_or_else(|| (Instant::now(), 0), |(_, at, ticks)| (at, ticks))
}

/// Ticks per millisecond; other CPUs announce theirs.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn khz() -> Option<u64> {
    None
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    #[test]
    fn two_measurements_agree_within_a_thousandth() {
        let (one, two) = (super::khz().unwrap(), super::khz().unwrap());
        assert!(one.abs_diff(two) < one / 1000, "{one} {two}");
    }
}
