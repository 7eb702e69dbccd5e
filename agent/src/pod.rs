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
    time::{Duration, Instant},
};

use nix::unistd::Pid;

use crate::container::STOP_GRACE;

/// The flag of the program that connects.
pub const CONNECT: &str = "--connect";
/// For the first process of the pod to listen, and how often that is tried: less than hosts wait for an answer.
const LISTENS: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_millis(20);
/// Carried at once, bytes.
const PIECE: usize = 64 << 10;
/// What clusters and engines set themselves: it is about the first process, which is the agent.
const NOT_THE_IMAGES: [&str; 5] = ["HOSTNAME", "HOME", "TERM", "container", GRACE];
/// The pod's grace in seconds, as the driver tells it: the kubelet kills so long after its TERM.
const GRACE: &str = "TORPOR_GRACE_SECONDS";
/// What of it is used, so that files are written out before.
const SHARE: f64 = 0.8;

/// Connects standard input and output with the socket, until it closes.
///
/// # Errors
/// When nobody listens there, or a stream breaks.
pub fn connect(path: &Path) -> io::Result<()> {
    let mut socket = reach(path)?;
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

/// The first process of a pod that has just begun to run may not listen yet. That is a moment, and ending for it would cost
/// the host another exec.
fn reach(path: &Path) -> io::Result<UnixStream> {
    let end = Instant::now() + LISTENS;
    loop {
        match UnixStream::connect(path) {
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
                    && Instant::now() < end =>
            {
                thread::sleep(AGAIN);
            }
            other => return other,
        }
    }
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

/// How long the end of a pod may take when the kubelet asks for it: a drain, an eviction.
pub fn grace() -> Duration {
    grace_of(std::env::var(GRACE).ok().as_deref())
}

fn grace_of(said: Option<&str>) -> Duration {
    let seconds = said.and_then(|text| text.parse::<u32>().ok());
    seconds.map_or(STOP_GRACE, |seconds| Duration::from_secs(u64::from(seconds)).mul_f64(SHARE))
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
    fn a_socket_that_is_not_there_yet_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        let late = path.clone();
        let listening = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            std::os::unix::net::UnixListener::bind(late).unwrap()
        });
        assert!(reach(&path).is_ok());
        drop(listening.join().unwrap());
    }

    #[test]
    fn only_what_the_image_sets_is_passed_on() {
        assert!(["PATH", "LANG", "JAVA_HOME"].into_iter().all(is_the_images));
        assert!(!["HOSTNAME", "HOME", "KUBERNETES_SERVICE_HOST", GRACE, ""].into_iter().any(is_the_images));
    }

    #[test]
    fn a_pods_grace_is_its_own_and_what_says_nothing_has_that_of_an_engine() {
        assert_eq!(grace_of(Some("40")), Duration::from_secs(32));
        assert_eq!([None, Some(""), Some("-1"), Some("x")].map(grace_of), [STOP_GRACE; 4]);
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
