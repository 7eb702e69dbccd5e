//! What never enters an image: traces of the host that built it, caches and logs. And what a guest needs to be there.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::scoped::{Missing, locate};
use crate::Error;
use crate::error::At;
use crate::fsutil::{set_mtime, sorted_entries};

/// Files of the machine that an image was made on: its resolver, its names, its secrets.
const HOST_FILES: &[&str] = &[
    "etc/resolv.conf",
    "etc/hostname",
    "etc/.pwd.lock",
    "var/lib/dbus/machine-id",
    "var/lib/systemd/random-seed",
    "var/lib/systemd/credential.secret",
    "var/cache/ldconfig/aux-cache",
];

/// Directories that come along without their files; their sub-directories stay, because services expect them.
const EMPTIED: &[&str] = &["var/log", "var/cache/apt", "var/lib/apt/lists"];

/// Directories that come along with nothing in them: other file systems are mounted there.
const MOUNT_POINTS: &[(&str, u32)] = &[("proc", 0o555), ("sys", 0o555), ("run", 0o755), ("tmp", 0o1777)];

/// Cleans the tree at `root` and adds the mount points; nothing outside of it is touched, whatever links it holds.
/// Times of changed directories stay as they were; what is added gets the time `epoch`.
pub(crate) fn clean(root: &Path, epoch: i64) -> Result<(), Error> {
    for file in HOST_FILES {
        remove(root, file)?;
    }
    remove_host_keys(root)?;
    for dir in EMPTIED {
        if let Some(path) = real_dir(root, dir)? {
            empty_files(&path)?;
        }
    }
    for (dir, mode) in MOUNT_POINTS {
        if let Some(path) = real_dir(root, dir)? {
            keeping_time(&path, || remove_all_in(&path))?;
        }
        mount_point(root, dir, *mode, epoch)?;
    }
    mount_point(root, "dev", 0o755, epoch)?;
    empty_machine_id(root, epoch)
}

/// Removes `path` of the tree, if it is there and isn't a directory.
pub(crate) fn remove(root: &Path, path: &str) -> Result<(), Error> {
    let Some(found) = inside(root, path)? else { return Ok(()) };
    if found.symlink_metadata().is_ok_and(|meta| !meta.is_dir()) {
        let parent = found.parent().unwrap_or(root);
        keeping_time(parent, || fs::remove_file(&found).at("remove", &found))?;
    }
    Ok(())
}

fn remove_host_keys(root: &Path) -> Result<(), Error> {
    let Some(ssh) = real_dir(root, "etc/ssh")? else { return Ok(()) };
    keeping_time(&ssh, || {
        for path in sorted_entries(&ssh)? {
            let key = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"ssh_host_"));
            if key && path.symlink_metadata().is_ok_and(|meta| !meta.is_dir()) {
                fs::remove_file(&path).at("remove", &path)?;
            }
        }
        Ok(())
    })
}

/// An empty file, not none: systemd then makes an id at boot and does not take the start for the very first.
fn empty_machine_id(root: &Path, epoch: i64) -> Result<(), Error> {
    remove(root, "etc/machine-id")?;
    let Some(etc) = real_dir(root, "etc")? else { return Ok(()) };
    let path = etc.join("machine-id");
    keeping_time(&etc, || {
        fs::write(&path, b"").at("create", &path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o444)).at("set the mode of", &path)
    })?;
    set_mtime(&path, epoch)
}

fn mount_point(root: &Path, dir: &str, mode: u32, epoch: i64) -> Result<(), Error> {
    let path = root.join(dir);
    match path.symlink_metadata() {
        // A link (run -> var/run) is the image's own way; the agent mounts where it leads.
        Ok(meta) if meta.is_dir() || meta.is_symlink() => Ok(()),
        Ok(_) => Err(Error::BadEntry {
            entry: dir.into(),
            why: "a guest mounts there, and it is no directory".into(),
        }),
        Err(_) => keeping_time(root, || {
            fs::create_dir(&path).at("create directory", &path)?;
            fs::set_permissions(&path, Permissions::from_mode(mode)).at("set the mode of", &path)?;
            set_mtime(&path, epoch)
        }),
    }
}

/// Where `path` is in the tree. A path through a link that leads out has nothing for us to clean.
fn inside(root: &Path, path: &str) -> Result<Option<PathBuf>, Error> {
    match locate(root, Path::new(path), Missing::Stop) {
        Err(Error::BadEntry { .. }) => Ok(None),
        found => found,
    }
}

fn real_dir(root: &Path, path: &str) -> Result<Option<PathBuf>, Error> {
    Ok(inside(root, path)?.filter(|found| found.symlink_metadata().is_ok_and(|meta| meta.is_dir())))
}

/// Removes all regular files below `dir`, at any depth.
fn empty_files(dir: &Path) -> Result<(), Error> {
    keeping_time(dir, || {
        for path in sorted_entries(dir)? {
            let meta = path.symlink_metadata().at("look at", &path)?;
            if meta.is_dir() {
                empty_files(&path)?;
            } else if meta.is_file() {
                fs::remove_file(&path).at("remove", &path)?;
            }
        }
        Ok(())
    })
}

fn remove_all_in(dir: &Path) -> Result<(), Error> {
    for path in sorted_entries(dir)? {
        let meta = path.symlink_metadata().at("look at", &path)?;
        let done: io::Result<()> =
            if meta.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        done.at("remove", &path)?;
    }
    Ok(())
}

/// Changes a directory without a trace in its time: when an image was built isn't part of what is in it.
fn keeping_time(dir: &Path, change: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    let before = dir.symlink_metadata().at("look at", dir)?.mtime();
    change()?;
    set_mtime(dir, before)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn traces_of_the_host_are_gone_and_mount_points_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for sub in ["etc/ssh", "var/log/nginx", "var/lib/apt/lists", "tmp/x"] {
            fs::create_dir_all(root.join(sub)).unwrap();
        }
        for file in [
            "etc/resolv.conf",
            "etc/hostname",
            "etc/ssh/ssh_host_rsa_key",
            "etc/ssh/sshd_config",
            "var/log/nginx/a",
            "tmp/x/y",
        ] {
            fs::write(root.join(file), b"secret").unwrap();
        }
        fs::write(root.join("etc/machine-id"), b"0123").unwrap();
        set_mtime(&root.join("etc"), 1000).unwrap();
        clean(root, 7).unwrap();

        for gone in
            ["etc/resolv.conf", "etc/hostname", "etc/ssh/ssh_host_rsa_key", "var/log/nginx/a", "tmp/x"]
        {
            assert!(root.join(gone).symlink_metadata().is_err(), "{gone}");
        }
        for kept in ["etc/ssh/sshd_config", "var/log/nginx", "proc", "sys", "dev", "run", "tmp"] {
            assert!(root.join(kept).exists(), "{kept}");
        }
        assert_eq!(fs::read(root.join("etc/machine-id")).unwrap(), b"");
        assert_eq!(root.join("etc").metadata().unwrap().mtime(), 1000);
    }

    #[test]
    fn links_out_of_the_tree_lead_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let (root, host) = (dir.path().join("root"), dir.path().join("host"));
        fs::create_dir_all(host.join("log")).unwrap();
        fs::create_dir(&root).unwrap();
        fs::write(host.join("resolv.conf"), b"host").unwrap();
        fs::write(host.join("machine-id"), b"host").unwrap();
        fs::write(host.join("log/x"), b"host").unwrap();
        symlink(&host, root.join("etc")).unwrap();
        symlink("../host", root.join("var")).unwrap();
        symlink(&host, root.join("tmp")).unwrap();
        clean(&root, 7).unwrap();
        for file in ["resolv.conf", "machine-id", "log/x"] {
            assert_eq!(fs::read(host.join(file)).unwrap(), b"host", "{file}");
        }
    }
}
