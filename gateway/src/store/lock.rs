//! One gateway per state directory.

use std::{
    fs::{File, OpenOptions},
    io::{Read as _, Seek as _, Write as _},
    path::Path,
};

use nix::fcntl::{Flock, FlockArg};

use super::StoreError;

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
