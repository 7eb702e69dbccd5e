//! Scratch directories that vanish unless their content is moved out, also after a kill.
//!
//! Each one is locked for as long as anything works in it. The lock belongs to an open file that is also the
//! standard input of every program started for the work, so it outlives a killed gateway exactly as long as those
//! programs do. [`sweep`] takes away only what nobody holds.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Error;
use crate::error::At;

const PREFIX: &str = ".tmp-";
const LOCK: &str = "lock";

static NEXT: AtomicU64 = AtomicU64::new(0);

/// A locked scratch directory; dropping it removes it with all it holds.
#[derive(Debug)]
pub(crate) struct Staging {
    path: PathBuf,
    lock: File,
}

impl Staging {
    pub(crate) fn new(parent: &Path) -> Result<Self, Error> {
        // Between making the directory and locking it a sweep would see it as a leftover: sweeps take the same guard.
        let _guard = guard(parent)?;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = parent.join(format!("{PREFIX}{}-{number}", std::process::id()));
            // Packages are fetched by an unprivileged user that must be able to pass through.
            match DirBuilder::new().mode(0o711).create(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => {
                    made.at("create directory", &path)?;
                    let file = path.join(LOCK);
                    let lock = File::create_new(&file).at("create", &file)?;
                    lock.lock().at("lock", &file)?;
                    return Ok(Self { path, lock });
                }
            }
        }
    }

    /// A path in the scratch directory.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// An empty standard input that keeps the lock for as long as a child process has it open.
    pub(crate) fn stdin(&self) -> Result<Stdio, Error> {
        self.lock.try_clone().map(Stdio::from).at("share the lock of", &self.path)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // What can't be removed now is a leftover for the next sweep.
        remove_tree(&self.path).ok();
    }
}

/// Takes the lock under which names of `dir` appear and vanish; it is free again when the file is dropped.
pub(crate) fn guard(dir: &Path) -> Result<File, Error> {
    let path = dir.join(".lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path).at("open", &path)?;
    file.lock().at("lock", &path)?;
    Ok(file)
}

/// Removes the scratch directories in `parent` that no process works in any more; the number of those removed.
pub(crate) fn sweep(parent: &Path) -> Result<usize, Error> {
    let _guard = guard(parent)?;
    let mut removed = 0;
    for path in crate::fsutil::sorted_entries(parent)? {
        let ours =
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(PREFIX));
        if ours && !is_held(&path)? && remove_tree(&path).is_ok() {
            removed += 1;
        }
    }
    Ok(removed)
}

fn is_held(path: &Path) -> Result<bool, Error> {
    let file = path.join(LOCK);
    match File::open(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).at("open", file),
        Ok(lock) => match lock.try_lock() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(error).at("lock", file),
        },
    }
}

/// Removes a directory with all it holds, never following a link and never through a mount: a builder that was
/// killed can leave the host's /dev mounted in its tree.
fn remove_tree(path: &Path) -> io::Result<()> {
    if has_mounts(path)? {
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, "something is mounted in it"));
    }
    // The lock goes last: a removal that is cut short leaves a directory that still says whether it is held.
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        }
    }
    fs::remove_dir_all(path)
}

fn has_mounts(path: &Path) -> io::Result<bool> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let path = path.canonicalize()?.display().to_string();
    // As proc_pid_mountinfo(5) writes names.
    let escaped =
        path.replace('\\', "\\134").replace(' ', "\\040").replace('\t', "\\011").replace('\n', "\\012");
    let prefix = escaped + "/";
    Ok(mounts.lines().any(|line| line.split(' ').nth(4).is_some_and(|point| point.starts_with(&prefix))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_leaves_held_directories_and_takes_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let held = Staging::new(dir.path()).unwrap();
        fs::write(held.join("data"), b"x").unwrap();
        let left = dir.path().join(".tmp-1-1");
        fs::create_dir_all(left.join("tree")).unwrap();
        fs::write(left.join(LOCK), b"").unwrap();
        fs::create_dir(dir.path().join(".tmp-1-2")).unwrap();

        assert_eq!(sweep(dir.path()).unwrap(), 2);
        assert!(held.join("data").exists());
        assert!(!left.exists());
    }

    #[test]
    fn a_program_that_outlives_its_starter_keeps_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let mut staging = Staging::new(dir.path()).unwrap();
        let path = staging.path.clone();
        let mut child =
            std::process::Command::new("sleep").arg("60").stdin(staging.stdin().unwrap()).spawn().unwrap();
        // A killed process runs no destructor; closing its lock is all that the kernel does for it.
        drop(std::mem::replace(&mut staging.lock, File::open("/dev/null").unwrap()));
        std::mem::forget(staging);
        let swept_while_running = sweep(dir.path()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(swept_while_running, 0);
        assert_eq!(sweep(dir.path()).unwrap(), 1);
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_with_a_mount_in_it_is_left_alone() {
        use nix::mount::{MsFlags, mount, umount};
        let dir = tempfile::Builder::new().prefix("a b").tempdir().unwrap();
        let left = dir.path().join(".tmp-1-1");
        fs::create_dir_all(left.join("tree")).unwrap();
        let flags = MsFlags::empty();
        if mount(Some("none"), &left.join("tree"), Some("tmpfs"), flags, None::<&str>).is_err() {
            let required = std::env::var("REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|need| need == "root"), "mounting needs root");
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("SKIP a_directory_with_a_mount_in_it_is_left_alone: can't mount\n"),
            );
            return;
        }
        let file = left.join("tree/file");
        fs::write(&file, b"").unwrap();
        let swept = sweep(dir.path());
        let there = file.exists();
        umount(&left.join("tree")).unwrap();
        assert_eq!(swept.unwrap(), 0);
        assert!(there);
        assert_eq!(sweep(dir.path()).unwrap(), 1);
    }

    #[test]
    fn dropping_removes_what_was_made() {
        let dir = tempfile::tempdir().unwrap();
        let staging = Staging::new(dir.path()).unwrap();
        let path = staging.path.clone();
        fs::create_dir(path.join("tree")).unwrap();
        std::os::unix::fs::symlink("/etc", path.join("tree/etc")).unwrap();
        drop(staging);
        assert!(!path.exists());
        assert!(Path::new("/etc/passwd").exists());
    }
}
