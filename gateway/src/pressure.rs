//! How full the file system below the state directory is.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use nix::sys::statvfs::statvfs;
use torpor_sandbox::spec::size;

/// How long a look is good for.
const FRESH: Duration = Duration::from_secs(3);
/// How long it is remembered that something failed for lack of space.
const REMEMBERED: Duration = Duration::from_secs(60);
/// What a new disk must find free, bytes: its tables and what a first boot writes.
pub const NEW_DISK: u64 = 32 << 20;
/// The least reserve of a file system, bytes.
const LEAST_RESERVE: u64 = 1 << 30;
/// Of a large one, the reserve is its fiftieth part: 2 %.
const RESERVE_PART: u64 = 50;
/// What to do about it.
pub const ADVICE: &str = "delete sandboxes or images that are not needed (torpor list, torpor image list), give back what guests freed (torpor sandbox disk compact NAME), or make the file system larger";

/// What a look found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    /// The folder whose file system it is.
    pub dir: PathBuf,
    /// Free for programs, bytes.
    pub free: u64,
    /// In all, bytes.
    pub total: u64,
    /// Free space below which there is pressure, bytes.
    pub reserve: u64,
    /// Something failed for lack of space a moment ago.
    pub failed: bool,
}

impl Space {
    /// Looks. `reserve` none: two hundredths of the file system, at least 1 GiB.
    ///
    /// # Errors
    /// The folder's.
    pub fn of(dir: &Path, reserve: Option<u64>) -> io::Result<Self> {
        let found = statvfs(dir)?;
        let unit = found.fragment_size();
        let (free, total) = (found.blocks_available() * unit, found.blocks() * unit);
        let reserve = reserve.unwrap_or_else(|| (total / RESERVE_PART).max(LEAST_RESERVE));
        Ok(Self { dir: dir.to_owned(), free, total, reserve, failed: false })
    }

    /// Whether there is pressure.
    pub fn is_low(&self) -> bool {
        self.failed || self.free < self.reserve
    }

    /// How it stands, and what to do, for people.
    pub fn words(&self) -> String {
        let (free, total, dir) = (size(self.free), size(self.total), self.dir.display());
        let why = match self.free < self.reserve {
            true => format!("less than the reserve of {}", size(self.reserve)),
            false => "and something failed for lack of space a moment ago".to_owned(),
        };
        format!("{free} of {total} free on the file system of {dir}, {why}: {ADVICE}")
    }
}

/// Looks at one file system, seldom.
#[derive(Debug)]
pub struct Pressure {
    dir: PathBuf,
    reserve: Option<u64>,
    last: Mutex<Option<(Instant, Space)>>,
    failed: Mutex<Option<Instant>>,
    claimed: Arc<Mutex<u64>>,
}

/// Room that is set aside for a copy while this lives.
#[derive(Debug)]
pub struct Claim {
    bytes: u64,
    claimed: Arc<Mutex<u64>>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = locked(&self.claimed);
        *claimed = claimed.saturating_sub(self.bytes);
    }
}

/// Why there is no room for a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// How it stands.
    pub space: Space,
    /// What other copies have set aside, bytes.
    pub claimed: u64,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pressure {
    /// Of the file system of `dir`.
    pub fn new(dir: PathBuf, reserve: Option<u64>) -> Self {
        Self { dir, reserve, last: Mutex::default(), failed: Mutex::default(), claimed: Arc::default() }
    }

    /// How it stands, or stood a few seconds ago. None: it can't be told.
    pub fn look(&self) -> Option<Space> {
        let last = locked(&self.last).clone();
        match last {
            Some((at, space)) if at.elapsed() < FRESH => Some(Space { failed: self.has_failed(), ..space }),
            _ => self.look_now(),
        }
    }

    /// How it stands now.
    pub fn look_now(&self) -> Option<Space> {
        let found = Space::of(&self.dir, self.reserve).inspect_err(|error| {
            tracing::warn!(dir = %self.dir.display(), %error, "free space can't be told");
        });
        let space = Space { failed: self.has_failed(), ..found.ok()? };
        let mut last = locked(&self.last);
        *last = Some((Instant::now(), space.clone()));
        Some(space)
    }

    /// Sets room aside for a copy of so many bytes, such that the reserve stays free for what runs. What a copy has
    /// written already is counted twice until it ends: it only makes the next one wait.
    ///
    /// # Errors
    /// How much there is. Never when that can't be told.
    pub fn claim(&self, bytes: u64) -> Result<Claim, NoRoom> {
        let mut claimed = locked(&self.claimed);
        if let Some(space) = self.look_now() {
            let needed = bytes.saturating_add(*claimed).saturating_add(space.reserve);
            if space.free < needed {
                return Err(NoRoom { space, claimed: *claimed });
            }
        }
        *claimed = claimed.saturating_add(bytes);
        Ok(Claim { bytes, claimed: self.claimed.clone() })
    }

    /// Something failed for lack of space.
    pub fn note_failure(&self) {
        *locked(&self.failed) = Some(Instant::now());
    }

    fn has_failed(&self) -> bool {
        let at = *locked(&self.failed);
        at.is_some_and(|at| at.elapsed() < REMEMBERED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_is_less_than_the_reserve_or_a_failure_a_moment_ago() {
        let dir = std::env::temp_dir();
        assert!(!Pressure::new(dir.clone(), Some(0)).look().unwrap().is_low());
        let low = Pressure::new(dir.clone(), Some(u64::MAX)).look().unwrap();
        assert!(low.is_low() && low.words().contains("less than the reserve"), "{}", low.words());
        let pressure = Pressure::new(dir, Some(0));
        pressure.look().unwrap();
        pressure.note_failure();
        let failed = pressure.look().unwrap();
        assert!(failed.is_low() && failed.words().contains("a moment ago"), "{}", failed.words());
    }

    #[test]
    fn the_reserve_of_a_file_system_is_two_hundredths_and_at_least_a_gibibyte() {
        let space = Space::of(&std::env::temp_dir(), None).unwrap();
        assert_eq!(space.reserve, (space.total / 50).max(1 << 30));
    }

    #[test]
    fn copies_leave_the_reserve_and_what_others_have_set_aside() {
        let dir = std::env::temp_dir();
        let free = Space::of(&dir, None).unwrap().free;
        let half = free / 2 + (1 << 20);
        let pressure = Pressure::new(dir.clone(), Some(0));
        let first = pressure.claim(half).unwrap();
        assert_eq!(pressure.claim(half).unwrap_err().claimed, half);
        drop(first);
        drop(pressure.claim(half).unwrap());
        let reserve = Pressure::new(dir, Some(half));
        assert_eq!(reserve.claim(half).unwrap_err().claimed, 0);
        assert!(Pressure::new("/nonexistent".into(), None).claim(u64::MAX).is_ok());
    }

    #[test]
    fn a_folder_that_is_not_there_tells_nothing() {
        assert_eq!(Pressure::new("/nonexistent".into(), None).look(), None);
    }
}
