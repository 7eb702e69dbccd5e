//! Standard error: a line each, lower case. It is a file of whoever started the process, so what a guest can cause
//! there has bounds.

use std::fmt::Display;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines that may come at once.
const BURST: u32 = 32;
/// After that, one for each of these.
const PACE: Duration = Duration::from_secs(10);
/// Longest line, bytes.
const LONGEST: usize = 1024;
/// All lines together, bytes.
const MOST: usize = 1 << 20;

struct Budget {
    lines: u32,
    filled: Option<Instant>,
    bytes: usize,
    dropped: u64,
}

static BUDGET: Mutex<Budget> = Mutex::new(Budget { lines: BURST, filled: None, bytes: MOST, dropped: 0 });

impl Budget {
    /// Whether a line of that many bytes may be written at that moment.
    fn take(&mut self, bytes: usize, now: Instant) -> bool {
        let filled = *self.filled.get_or_insert(now);
        let due =
            (now.saturating_duration_since(filled).as_nanos() / PACE.as_nanos()).min(BURST.into()) as u32;
        if due > 0 {
            self.lines = BURST.min(self.lines + due);
            self.filled = Some(now);
        }
        let fits = self.lines > 0 && bytes <= self.bytes;
        match fits {
            true => (self.lines, self.bytes) = (self.lines - 1, self.bytes - bytes),
            false => self.dropped += 1,
        }
        fits
    }
}

/// As much of a text as fits into so many bytes.
pub(super) fn clipped(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Writes a line, if the budget has room for it.
pub(super) fn say(message: &dyn Display) {
    let mut line = format!("torpor-vmm: {message}");
    line.truncate(clipped(&line, LONGEST).len());
    let mut budget = BUDGET.lock().unwrap_or_else(PoisonError::into_inner);
    if budget.take(line.len() + 64, Instant::now()) {
        if budget.dropped > 0 {
            line += &format!(" ({} messages before this one were dropped)", budget.dropped);
            budget.dropped = 0;
        }
        line.push('\n');
        // Nobody is left to be told.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_clipped_between_characters() {
        for (most, fits) in [(0, ""), (1, "a"), (2, "a"), (3, "aé"), (9, "aéx")] {
            assert_eq!(clipped("aéx", most), fits);
        }
    }

    #[test]
    fn a_flood_of_messages_becomes_a_trickle_and_ends_at_the_limit() {
        let mut budget = Budget { lines: BURST, filled: None, bytes: 1000, dropped: 0 };
        let begin = Instant::now();
        let count = (0..100).filter(|_| budget.take(10, begin)).count();
        assert_eq!((count, budget.dropped), (BURST as usize, 68));
        assert!(budget.take(10, begin + PACE));
        assert!(!budget.take(10, begin + PACE));
        let later = (1..1000).filter(|round| budget.take(10, begin + PACE * (10 * round))).count();
        assert_eq!(later, (1000 - 33 * 10) / 10, "all bytes are used up");
    }
}
