//! One gateway per state directory.

use std::{
    fs::{File, OpenOptions},
    io::{Read as _, Seek as _, Write as _},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::fcntl::{Flock, FlockArg};

use super::StoreError;

/// A gateway that was killed may leave the lock for a moment to a child that it was just about to start.
const AFTER_DEATH: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(20);

/// Held as long as the gateway lives; the kernel lets go of it when the process ends, however it ends.
#[derive(Debug)]
pub struct StateLock {
    _file: Flock<File>,
}

impl StateLock {
    /// Takes the lock of `dir`.
    ///
    /// # Errors
    /// `InUse` with the holder's process, when another gateway has it.
    pub fn acquire(dir: &Path) -> Result<Self, StoreError> {
        let until = Instant::now() + AFTER_DEATH;
        loop {
            match Self::try_acquire(dir) {
                Err(StoreError::InUse { holder, .. })
                    if Instant::now() < until && holder.as_deref().is_some_and(is_dead) =>
                {
                    thread::sleep(LOOK);
                }
                done => return done,
            }
        }
    }

    fn try_acquire(dir: &Path) -> Result<Self, StoreError> {
        let path = dir.join("gateway.lock");
        let io = |action| {
            let path = path.clone();
            move |source| StoreError::Io { action, path, source }
        };
        let mut options = OpenOptions::new();
        let file =
            options.read(true).write(true).create(true).truncate(false).open(&path).map_err(io("open"))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut file) => {
                file.set_len(0).map_err(io("write"))?;
                file.rewind().map_err(io("write"))?;
                // Only for people: a full disk must not keep the gateway from starting.
                let _ = writeln!(file, "process {}", std::process::id());
                Ok(Self { _file: file })
            }
            Err((mut file, _)) => {
                let mut holder = String::new();
                // Only for the message.
                let _ = file.read_to_string(&mut holder);
                let holder = Some(holder.trim().to_owned()).filter(|h| !h.is_empty());
                Err(StoreError::InUse { dir: dir.to_owned(), holder })
            }
        }
    }
}

/// Whether the holder, "process 123", has ended.
fn is_dead(holder: &str) -> bool {
    let Some(pid) = holder.strip_prefix("process ").and_then(|pid| pid.parse::<u32>().ok()) else {
        return false;
    };
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        // proc(5): the state follows the name, which is in parentheses; Z and X have ended.
        Ok(stat) => stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_a_dead_gateway_has_left_to_a_child_is_waited_for_and_a_living_one_s_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let held = StateLock::acquire(dir.path()).unwrap();
        let began = Instant::now();
        assert!(matches!(StateLock::acquire(dir.path()), Err(StoreError::InUse { .. })));
        assert!(began.elapsed() < AFTER_DEATH);
        // Above every pid that there is: pid_max is at most 4 Mi.
        std::fs::write(dir.path().join("gateway.lock"), "process 4194305\n").unwrap();
        let waiting = thread::spawn({
            let dir = dir.path().to_owned();
            move || StateLock::acquire(&dir).map(drop)
        });
        thread::sleep(3 * LOOK);
        drop(held);
        waiting.join().unwrap().unwrap();
    }
}
