//! How full the file system below the state directory is.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
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
}

impl Pressure {
    /// Of the file system of `dir`.
    pub fn new(dir: PathBuf, reserve: Option<u64>) -> Self {
        Self { dir, reserve, last: Mutex::default(), failed: Mutex::default() }
    }

    /// How it stands, or stood a few seconds ago. None: it can't be told.
    pub fn look(&self) -> Option<Space> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
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
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some((Instant::now(), space.clone()));
        Some(space)
    }

    /// Something failed for lack of space.
    pub fn note_failure(&self) {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn has_failed(&self) -> bool {
        let at = *self.failed.lock().unwrap_or_else(PoisonError::into_inner);
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
    fn a_folder_that_is_not_there_tells_nothing() {
        assert_eq!(Pressure::new("/nonexistent".into(), None).look(), None);
    }
}
