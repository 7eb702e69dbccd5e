//! Requests that wait until a full host has room for what they write.
//!
//! A guest's file system takes an I/O error for a broken disk and goes read-only for good, but waits for a slow one. So
//! what fails for lack of room isn't answered: it is tried again, until there is room or its time has run out. Nothing of it
//! was acknowledged meanwhile, so nothing that was is lost; other requests go on.

use std::time::{Duration, Instant};

/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(500);
/// How often those outside are told again that there is no room.
const AGAIN: Duration = Duration::from_secs(20);

/// What waits, of one device.
#[derive(Debug)]
pub(super) struct Room<Job> {
    /// For messages.
    device: String,
    patience: Duration,
    waiting: Vec<Job>,
    /// When those that wait are tried again.
    next: Option<Instant>,
    /// When it was last told that there is no room; none: there is.
    told: Option<Instant>,
}

impl<Job> Room<Job> {
    pub(super) fn new(device: String, patience: Duration) -> Self {
        Self { device, patience, waiting: Vec::new(), next: None, told: None }
    }

    /// The device's name.
    pub(super) fn device(&self) -> &str {
        &self.device
    }

    /// Something waits.
    pub(super) fn is_waited_for(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether what has waited since then has waited enough.
    pub(super) fn is_too_late(&self, since: Instant, now: Instant) -> bool {
        now.saturating_duration_since(since) >= self.patience
    }

    /// Lets a request wait.
    pub(super) fn wait(&mut self, job: Job, now: Instant) {
        self.waiting.push(job);
        self.next.get_or_insert(now + PAUSE);
    }

    /// How long until those that wait are to be tried again; none when nothing waits.
    pub(super) fn pause(&self, now: Instant) -> Option<Duration> {
        self.next.map(|next| next.saturating_duration_since(now))
    }

    /// All that wait, in order.
    pub(super) fn take(&mut self) -> Vec<Job> {
        self.next = None;
        std::mem::take(&mut self.waiting)
    }

    /// There was no room. True: it is time to say so.
    pub(super) fn note_full(&mut self, now: Instant) -> bool {
        let due = self.told.is_none_or(|told| now.saturating_duration_since(told) >= AGAIN);
        if due {
            self.told = Some(now);
        }
        due
    }

    /// Something was written, or nothing ever will be. True: it was said before that there is no room, and nothing waits
    /// for it now.
    pub(super) fn note_room(&mut self) -> bool {
        self.waiting.is_empty() && self.told.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_room_is_told_at_once_and_seldom_after_that_and_its_end_once() {
        let (mut room, begin) = (Room::<u8>::new("vda".into(), Duration::from_secs(60)), Instant::now());
        assert!(!room.note_room(), "there was no lack");
        let told: Vec<_> =
            (0..100).filter(|second| room.note_full(begin + Duration::from_secs(*second))).collect();
        assert_eq!(told, [0, 20, 40, 60, 80]);
        room.wait(1, begin);
        assert!(!room.note_room(), "one waits");
        assert_eq!(room.take(), [1]);
        assert!(room.note_room() && !room.note_room());
    }

    #[test]
    fn what_waits_is_tried_again_together_and_has_a_limit() {
        let (mut room, begin) = (Room::new("vda".into(), Duration::from_secs(60)), Instant::now());
        assert_eq!(room.pause(begin), None);
        room.wait(1, begin);
        room.wait(2, begin + PAUSE / 2);
        assert_eq!(room.pause(begin), Some(PAUSE));
        assert_eq!(room.pause(begin + 2 * PAUSE), Some(Duration::ZERO));
        assert_eq!(room.take(), [1, 2]);
        assert_eq!(room.pause(begin), None);
        assert!(!room.is_too_late(begin, begin + Duration::from_secs(59)));
        assert!(room.is_too_late(begin, begin + Duration::from_secs(60)));
    }
}
