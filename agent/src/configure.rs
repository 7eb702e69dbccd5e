//! Makes the machine what the host says it is. Every step may be repeated.

use std::{
    fs,
    io::{self, Write as _},
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use nix::{
    errno::Errno,
    sys::time::TimeSpec,
    time::{ClockId, clock_settime},
};
use tonic::Status;
use torpor_proto::agent::v1::{ConfigureRequest, MainCommand, Network};

use crate::{
    agent::Agent,
    net::{self, NetError},
};

/// Ends each line of /etc/hosts that is ours.
const OURS: &str = "# torpor";

/// The machine could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum ConfigureError {
    /// A file could not be written.
    #[error("write {}: {source}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{what}: {}", source.desc())]
    System {
        /// What was attempted.
        what: &'static str,
        /// Why.
        source: Errno,
    },
    /// The network could not be set up.
    #[error(transparent)]
    Net(#[from] NetError),
}

/// Takes run and environment; the main command when it is to be started now.
///
/// A command starts once in a boot: after a memory resume the run is another one, and the command still runs.
pub fn accept(agent: &Arc<Agent>, request: &ConfigureRequest) -> Result<Option<MainCommand>, Status> {
    let mut state = agent.state();
    if state.ending {
        return Err(Status::failed_precondition("the sandbox is shutting down"));
    }
    if request.run < state.run {
        return Err(Status::aborted(format!(
            "run {} is over: the sandbox is in run {}",
            request.run, state.run
        )));
    }
    if request.run > state.run || !state.configured {
        state.run = request.run;
        state.environment.clone_from(&request.environment);
    }
    let start = state.main_started.is_none();
    Ok(request.main.clone().filter(|main| start && !main.argv.is_empty()))
}

/// Clock, entropy, names and network. Blocks for as long as the interface takes to appear.
///
/// # Errors
/// [`ConfigureError`] with the step that failed.
pub fn machine(request: &ConfigureRequest, last: Option<&Network>) -> Result<(), ConfigureError> {
    if let Some(time) = request.time.and_then(|time| SystemTime::try_from(time).ok()) {
        set_clock(time)?;
    }
    add_entropy(&request.entropy)?;
    if !request.hostname.is_empty() {
        nix::unistd::sethostname(&request.hostname)
            .map_err(|source| ConfigureError::System { what: "set the host name", source })?;
        let path = Path::new("/etc/hosts");
        let now = fs::read_to_string(path).unwrap_or_default();
        write(path, &hosts(&now, &request.hostname))?;
        write(Path::new("/etc/hostname"), &format!("{}\n", request.hostname))?;
    }
    net::loopback()?;
    let Some(network) = &request.network else {
        return Ok(());
    };
    if !network.nameservers.is_empty() {
        write(Path::new("/etc/resolv.conf"), &resolv_conf(network))?;
    }
    if last != Some(network) {
        net::configure(network)?;
    }
    Ok(())
}

fn set_clock(time: SystemTime) -> Result<(), ConfigureError> {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::from_duration(since))
        .map_err(|source| ConfigureError::System { what: "set the clock", source })
}

/// Gives the kernel the host's entropy, counts it, and makes the generator use it at once.
fn add_entropy(entropy: &[u8]) -> Result<(), ConfigureError> {
    /// Of linux/random.h: count of bits, count of bytes, bytes.
    #[repr(C)]
    struct Pool {
        bits: libc::c_int,
        bytes: libc::c_int,
        data: [u8; 256],
    }
    const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
    const RNDRESEEDCRNG: libc::Ioctl = 0x5207;

    let entropy = &entropy[..entropy.len().min(256)];
    if entropy.is_empty() {
        return Ok(());
    }
    let path = Path::new("/dev/urandom");
    let device = fs::OpenOptions::new()
        .write(true)
        .open(path)
        .map_err(|source| ConfigureError::Write { path: path.to_owned(), source })?;
    let bytes = entropy.len() as libc::c_int;
    let mut pool = Pool { bits: bytes * 8, bytes, data: [0; 256] };
    pool.data[..entropy.len()].copy_from_slice(entropy);
    // SAFETY: the kernel reads the two counts and as many bytes as the second says, all inside `pool`.
    Errno::result(unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY, &raw const pool) })
        .map_err(|source| ConfigureError::System { what: "add entropy", source })?;
    // SAFETY: takes no argument.
    Errno::result(unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG) })
        .map(drop)
        .map_err(|source| ConfigureError::System { what: "reseed the random generator", source })
}

/// The user's lines as they are, and ours after them.
fn hosts(now: &str, hostname: &str) -> String {
    let mut text: String =
        now.lines().filter(|line| !line.ends_with(OURS)).flat_map(|line| [line, "\n"]).collect();
    let named = |name: &str| {
        text.lines()
            .filter_map(|line| line.split('#').next())
            .any(|line| line.split_ascii_whitespace().skip(1).any(|other| other == name))
    };
    let mut ours = String::new();
    if !named("localhost") {
        ours.push_str(&format!("127.0.0.1\tlocalhost {OURS}\n"));
    }
    if !named(hostname) {
        ours.push_str(&format!("127.0.1.1\t{hostname} {OURS}\n"));
    }
    text.push_str(&ours);
    text
}

fn resolv_conf(network: &Network) -> String {
    let mut text = String::from("# written by torpor at every start\n");
    if !network.search_domains.is_empty() {
        text.push_str(&format!("search {}\n", network.search_domains.join(" ")));
    }
    for server in &network.nameservers {
        text.push_str(&format!("nameserver {server}\n"));
    }
    text
}

/// Replaces a file whole, also where a symlink stood: its target may be a resolver that is not there.
fn write(path: &Path, text: &str) -> Result<(), ConfigureError> {
    let is_file = path.symlink_metadata().is_ok_and(|file| file.is_file());
    if is_file && fs::read_to_string(path).is_ok_and(|now| now == text) {
        return Ok(());
    }
    let new = path.with_extension("torpor-new");
    let replace = || {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(&new)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&new, path)
    };
    replace().map_err(|source| ConfigureError::Write { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_hosts_stay_and_ours_are_not_doubled() {
        let user = "127.0.0.1 localhost\n10.0.0.9 db # mine\n";
        let once = hosts(user, "box");
        assert_eq!(once, format!("{user}127.0.1.1\tbox # torpor\n"));
        assert_eq!(hosts(&once, "box"), once);
        assert_eq!(hosts(&once, "other"), format!("{user}127.0.1.1\tother # torpor\n"));
    }

    #[test]
    fn an_image_without_hosts_gets_localhost() {
        assert_eq!(hosts("", "box"), "127.0.0.1\tlocalhost # torpor\n127.0.1.1\tbox # torpor\n");
    }

    #[test]
    fn a_symlink_is_replaced_and_its_target_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("stub"), folder.path().join("resolv.conf"));
        fs::write(&target, "nameserver 127.0.0.53\n").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        write(&link, "nameserver 10.0.0.1\n").unwrap();
        assert!(!link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&link).unwrap(), "nameserver 10.0.0.1\n");
        assert_eq!(fs::read_to_string(&target).unwrap(), "nameserver 127.0.0.53\n");
    }

    #[test]
    fn resolv_conf_names_servers_and_domains() {
        let network = Network {
            nameservers: vec!["1.1.1.1".into(), "9.9.9.9".into()],
            search_domains: vec!["a.test".into(), "b.test".into()],
            ..Network::default()
        };
        assert!(
            resolv_conf(&network).ends_with("search a.test b.test\nnameserver 1.1.1.1\nnameserver 9.9.9.9\n")
        );
    }
}
