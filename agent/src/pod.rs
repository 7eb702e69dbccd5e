//! The first process of a pod: serves on a Unix socket within it, since nothing outside can be dialed. Hosts come by a
//! program that the cluster starts in the pod and that connects its input and output with the socket.

use std::{
    collections::HashMap,
    fs::{self, File, Permissions},
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::AsFd as _,
        unix::{
            fs::{MetadataExt as _, PermissionsExt as _},
            net::UnixStream,
        },
    },
    path::Path,
    thread,
};

use nix::unistd::Pid;

/// The flag of the program that connects.
pub const CONNECT: &str = "--connect";
/// Carried at once, bytes.
const PIECE: usize = 64 << 10;
/// What clusters and engines set themselves: it is about the first process, which is the agent.
const NOT_THE_IMAGES: [&str; 4] = ["HOSTNAME", "HOME", "TERM", "container"];

/// Connects standard input and output with the socket, until it closes.
///
/// # Errors
/// When nobody listens there, or a stream breaks.
pub fn connect(path: &Path) -> io::Result<()> {
    let mut socket = UnixStream::connect(path)?;
    // Without the buffers of the standard library, which wait for the end of a line.
    let mut input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let mut feed = socket.try_clone()?;
    // It may read for ever: the end of the process ends it.
    thread::spawn(move || {
        let _ = carry(&mut input, &mut feed);
        let _ = feed.shutdown(Shutdown::Write);
    });
    carry(&mut socket, &mut output)
}

/// Each piece at once: the library's own copy may have the kernel wait for more.
fn carry(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece)? {
            0 => return Ok(()),
            count => to.write_all(&piece[..count])?,
        }
    }
}

/// Copies this program into a folder that other containers of the pod see.
///
/// # Errors
/// When it can't be read or written.
pub fn install(folder: &Path) -> io::Result<()> {
    // Nobody but root may put a socket of his own in the place of ours.
    fs::set_permissions(folder, Permissions::from_mode(0o755))?;
    let (new, place) = (folder.join("torpor-agent.new"), folder.join("torpor-agent"));
    fs::copy("/proc/self/exe", &new)?;
    fs::set_permissions(&new, Permissions::from_mode(0o755))?;
    fs::rename(new, place)
}

/// What the image sets for its programs. A cluster gives it to the first process, and tells it nobody else.
pub fn image_environment() -> HashMap<String, String> {
    let all = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    all.filter(|(name, _)| is_the_images(name)).collect()
}

fn is_the_images(name: &str) -> bool {
    !NOT_THE_IMAGES.contains(&name) && !name.starts_with("KUBERNETES_") && !name.is_empty()
}

/// Whether a process is a host's way in: it is ended last, by the end of the pod, as the answer goes by it.
pub fn is_way_in(pid: Pid) -> bool {
    let of = |who: &str| fs::metadata(format!("/proc/{who}/exe")).map(|file| (file.dev(), file.ino()));
    let same = match (of("self"), of(&pid.to_string())) {
        (Ok(ours), Ok(theirs)) => ours == theirs,
        _ => false,
    };
    same && fs::read(format!("/proc/{pid}/cmdline"))
        .is_ok_and(|line| line.split(|byte| *byte == 0).nth(1).is_some_and(|flag| flag == CONNECT.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_image_sets_is_passed_on() {
        assert!(["PATH", "LANG", "JAVA_HOME"].into_iter().all(is_the_images));
        assert!(!["HOSTNAME", "HOME", "KUBERNETES_SERVICE_HOST", ""].into_iter().any(is_the_images));
    }

    #[test]
    fn the_program_is_installed_whole_and_can_be_run_by_anybody() {
        let folder = tempfile::tempdir().unwrap();
        install(folder.path()).unwrap();
        install(folder.path()).unwrap();
        let file = fs::metadata(folder.path().join("torpor-agent")).unwrap();
        assert_eq!(file.permissions().mode() & 0o777, 0o755);
        assert_eq!(file.len(), fs::metadata("/proc/self/exe").unwrap().len());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_process_that_is_no_way_in_is_none() {
        assert!(!is_way_in(Pid::this()) && !is_way_in(Pid::from_raw(1)));
    }
}
