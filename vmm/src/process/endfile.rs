//! The end file: written once, by whoever comes first. It was opened before the jail and outlives the process.

use std::fs::File;
use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use torpor_vmm_api::{End, EndFile};

use super::log;

static FILE: OnceLock<File> = OnceLock::new();
static WRITTEN: AtomicBool = AtomicBool::new(false);

/// The file to write to. Later files are ignored.
pub(super) fn keep(file: File) {
    let _ = FILE.set(file);
}

/// Its descriptor.
pub(super) fn file() -> Option<&'static File> {
    FILE.get()
}

/// One JSON object and a newline in one write: who reads half of it sees that the newline is missing.
pub(super) fn write(end: &EndFile) {
    let Some(mut file) = FILE.get() else { return };
    if WRITTEN.swap(true, Ordering::SeqCst) {
        return;
    }
    let written = serde_json::to_vec(end).map_err(std::io::Error::from).and_then(|mut line| {
        line.push(b'\n');
        file.write_all(&line)
    });
    if let Err(error) = written {
        log::say(&format_args!("cannot write the end file: {error}"));
    }
}

/// From here on a panic in any thread is the end of the process, told as such.
pub(super) fn catch_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let detail = panic.to_string().replace('\n', " ");
        log::say(&detail);
        let end = End::Failed { detail };
        let code = end.exit_code();
        write(&EndFile { end, disks_closed: false, disk_error: None, broken: Vec::new() });
        // SAFETY: ends the process at once, whatever its other threads are at: no state of this process is needed any more.
        unsafe { libc::_exit(code.into()) }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_in_any_thread_ends_the_process_with_an_end_file_of_its_own() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // SAFETY: the child runs only what this test says, and ends in the panic hook without returning.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            keep(file.reopen().unwrap());
            catch_panics();
            let _ = std::thread::spawn(|| panic!("on\npurpose")).join();
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(1) }
        }
        let status = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(pid), None).unwrap();
        assert!(matches!(status, nix::sys::wait::WaitStatus::Exited(_, 15)), "{status:?}");
        let text = std::fs::read_to_string(file.path()).unwrap();
        let told: EndFile = serde_json::from_str(text.strip_suffix('\n').unwrap()).unwrap();
        assert!(matches!(&told.end, End::Failed { detail } if detail.contains("on purpose")), "{told:?}");
        assert!(!told.disks_closed);
    }
}
