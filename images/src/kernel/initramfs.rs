//! The initramfs: the agent, the modules, and the little that a kernel expects to find.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::cpio::Cpio;
use super::{Kernel, when};
use crate::Error;
use crate::error::At;
use crate::fsutil::{sha256, sorted_entries};

/// Counted up when the same inputs make another archive.
const FORMAT: u32 = 2;
const PREFIX: &str = "initramfs-";
const SUFFIX: &str = ".cpio";
/// An initramfs that no start asked for in this time belongs to an agent that is gone.
const FORGET_AFTER: Duration = Duration::from_secs(14 * 24 * 3600);

/// The name of the archive for this kernel and this agent.
pub(crate) fn file_name(kernel_digest: &str, agent_hex: &str) -> String {
    let inputs = format!("{FORMAT} {kernel_digest} {agent_hex}");
    format!("{PREFIX}{}{SUFFIX}", &sha256(inputs.as_bytes())[..32])
}

/// Whether the archive is there; if so, it counts as used now.
pub(crate) fn touch(path: &Path) -> bool {
    // A read-only state directory still has the file.
    path.is_file() && File::open(path).map(|file| file.set_modified(SystemTime::now()).ok()).is_ok()
}

/// A guest has no libraries before its root disk is mounted, so the first program must need none.
pub(crate) fn check_agent(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    const PT_INTERP: u32 = 3;
    let bad = |why| Err(Error::BadAgent { path: path.to_owned(), why });
    if bytes.get(..6) != Some(b"\x7fELF\x02\x01") {
        return bad("it is not a 64-bit ELF program");
    }
    let le = |at: usize, width: usize| {
        let field = bytes.get(at..at.saturating_add(width)).unwrap_or_default();
        field.iter().rev().fold(0_usize, |value, byte| value << 8 | usize::from(*byte))
    };
    let (table, size, count) = (le(0x20, 8), le(0x36, 2), le(0x38, 2));
    let interpreter = (0..count).any(|i| le(table.saturating_add(i * size), 4) == PT_INTERP as usize);
    if interpreter {
        return bad("it needs shared libraries; build it with -C target-feature=+crt-static");
    }
    Ok(())
}

/// The archive's bytes.
pub(crate) fn build(kernel: &Kernel, agent: &[u8]) -> Result<Vec<u8>, Error> {
    let mut cpio = Cpio::default();
    for dir in ["dev", "proc", "sys", "run", "newroot", "modules"] {
        cpio.directory(dir);
    }
    cpio.character_device("dev/console", 0o600, (5, 1));
    cpio.character_device("dev/null", 0o666, (1, 3));
    cpio.file("init", 0o755, agent);
    let mut modules = Vec::new();
    if let Some(dir) = &kernel.modules {
        for (name, path) in module_files(dir)? {
            let bytes = fs::read(&path).at("read", &path)?;
            cpio.file(&format!("modules/{name}"), 0o644, &bytes);
            modules.push((name, bytes));
        }
    }
    cpio.file("modules/list", 0o644, when::list(&modules)?.as_bytes());
    Ok(cpio.finish())
}

/// The numbered modules in load order.
fn module_files(dir: &Path) -> Result<Vec<(String, PathBuf)>, Error> {
    let files =
        sorted_entries(dir)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "ko"));
    Ok(files.filter_map(|path| Some((path.file_name()?.to_str()?.to_owned(), path))).collect())
}

/// Removes archives for other agents that no start has used for a while.
pub(crate) fn forget_old(dir: &Path, keep: &str) {
    for path in sorted_entries(dir).unwrap_or_default() {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let archive = name.starts_with(PREFIX) && name.ends_with(SUFFIX) && name != keep;
        let used = path.metadata().and_then(|meta| meta.modified());
        let age = used.ok().and_then(|time| time.elapsed().ok()).unwrap_or_default();
        if archive && age > FORGET_AFTER {
            // One that can't be removed only takes space.
            fs::remove_file(&path).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_archives_that_are_long_unused_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let old = SystemTime::now() - FORGET_AFTER - Duration::from_secs(60);
        for name in ["initramfs-a.cpio", "initramfs-b.cpio", "initramfs-c.cpio", "vmlinuz"] {
            let path = dir.path().join(name);
            fs::write(&path, b"").unwrap();
            if name != "initramfs-b.cpio" {
                File::open(&path).unwrap().set_modified(old).unwrap();
            }
        }
        forget_old(dir.path(), "initramfs-c.cpio");
        let left: Vec<_> =
            sorted_entries(dir.path()).unwrap().iter().map(|p| p.file_name().unwrap().to_owned()).collect();
        assert_eq!(left, ["initramfs-b.cpio", "initramfs-c.cpio", "vmlinuz"]);
    }

    #[test]
    fn a_dynamic_program_or_a_script_is_no_agent() {
        let check = |file: &str| check_agent(Path::new(file), &fs::read(file).unwrap());
        let error = check("/proc/self/exe").unwrap_err();
        assert!(error.to_string().contains("crt-static"), "{error}");
        assert!(check("/etc/passwd").is_err());
    }
}
