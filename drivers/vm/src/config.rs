//! What the vm driver is told at its start.

use std::{net::Ipv4Addr, path::PathBuf, time::Duration};

use torpor_netpool::{PoolConfig, Topology};

/// Longest path of a Unix socket, bytes (unix(7): sun_path has 108 with the closing NUL).
const MAX_SOCKET_PATH: usize = 107;
/// `/sb-` and 16 letters, `/` and the longest socket name.
const BELOW_RUN_DIR: usize = 20 + 1 + 10;

/// Begins a range of ids that distributions, systemd and container engines leave alone (systemd's UIDS-GIDS document: 1879048192 to
/// 2147352575 is unused).
pub const FIRST_UID: u32 = 0x7000_0000;

/// The configuration of the vm driver.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// Durable: `sandboxes/`, `images/`, `kernels/`.
    pub state_dir: PathBuf,
    /// One folder per running sandbox; best on a tmpfs.
    pub run_dir: PathBuf,
    /// The static guest agent, which goes into the initramfs.
    pub agent: PathBuf,
    /// "auto", "qemu" or "kvm".
    pub machine: String,
    /// The program of the qemu machine; looked up in PATH when it has no slash.
    pub qemu: PathBuf,
    /// The program of the kvm machine, torpor-vmm; none: there is no such machine.
    pub vmm: Option<PathBuf>,
    /// First of the user ids that processes of the kvm machine run under, one for each slot of the pool; 0: they run as this
    /// process does.
    pub first_uid: u32,
    /// The program that answers to [`crate::probe::ARGUMENT`]; none: KVM is not looked for, emulation is used.
    pub probe: Option<PathBuf>,
    /// How long a guest may take from its first instruction to an agent that answers.
    pub boot_timeout: Duration,
    /// Name servers for guests in place of the host's.
    pub nameservers: Vec<Ipv4Addr>,
    /// How TAPs, addresses and CIDs follow from slots.
    pub pool: PoolConfig,
    /// CPU time that a VM may use for each of its virtual CPUs, in percent of a host's CPU; 0: as much as there is. What its
    /// devices need comes on top.
    pub cpu_quota_percent: u32,
    /// Whether VMs stay on the CPUs that they were lent.
    pub pin: bool,
    /// How the host's CPUs lie together, where the memory of a pinned VM shall come from the nodes of its CPUs.
    pub topology: Option<Topology>,
}

impl VmConfig {
    /// A configuration with the defaults for everything but the paths.
    pub fn new(
        state_dir: impl Into<PathBuf>,
        run_dir: impl Into<PathBuf>,
        agent: impl Into<PathBuf>,
    ) -> Self {
        Self {
            state_dir: state_dir.into(),
            run_dir: run_dir.into(),
            agent: agent.into(),
            machine: "auto".to_owned(),
            qemu: "qemu-system-x86_64".into(),
            vmm: None,
            first_uid: FIRST_UID,
            probe: None,
            boot_timeout: Duration::from_secs(60),
            nameservers: Vec::new(),
            pool: PoolConfig::default(),
            cpu_quota_percent: 100,
            pin: true,
            topology: None,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        self.pool.validate().map_err(ConfigError::Pool)?;
        for (name, path) in [("state", &self.state_dir), ("run", &self.run_dir)] {
            if !path.is_absolute() {
                return Err(ConfigError::Relative { name, path: path.clone() });
            }
        }
        let longest = MAX_SOCKET_PATH - BELOW_RUN_DIR;
        if self.run_dir.as_os_str().len() > longest {
            return Err(ConfigError::RunDirTooLong { path: self.run_dir.clone(), longest });
        }
        Ok(())
    }
}

/// Why the driver can't be made from its configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A folder must be named from the root on.
    #[error("the {name} directory {} must be an absolute path", path.display())]
    Relative {
        /// "state" or "run".
        name: &'static str,
        /// As given.
        path: PathBuf,
    },
    /// Unix sockets have short names.
    #[error(
        "the run directory {} is too long: names of Unix sockets leave {longest} bytes for it; choose a shorter --run-dir",
        path.display()
    )]
    RunDirTooLong {
        /// As given.
        path: PathBuf,
        /// What is possible, bytes.
        longest: usize,
    },
    /// No such machine.
    #[error("machine '{0}' is not one of auto, qemu, kvm")]
    UnknownMachine(String),
    /// The kvm machine can't run here.
    #[error("machine 'kvm' can't be used on this host: {0}")]
    NoKvmMachine(String),
    /// The pool's values don't fit.
    #[error("network pool: {0}")]
    Pool(#[from] torpor_netpool::ConfigError),
    /// The images or kernels can't be opened.
    #[error("open the images and kernels below {}", path.display())]
    Images {
        /// The state directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: torpor_images::Error,
    },
    /// Another driver holds the run directory.
    #[error(
        "the run directory {} is in use by another gateway; end that one, or give this one another --run-dir",
        path.display()
    )]
    RunDirInUse {
        /// The run directory.
        path: PathBuf,
    },
    /// The VMs in the run directory are another state directory's.
    #[error(
        "the run directory {} belongs to the state directory {}, not to {}; give another --run-dir",
        path.display(),
        owner.display(),
        state_dir.display()
    )]
    RunDirOwned {
        /// The run directory.
        path: PathBuf,
        /// The state directory that it belongs to.
        owner: PathBuf,
        /// The one that was given.
        state_dir: PathBuf,
    },
    /// A file that says whose the run directory is can't be used.
    #[error("claim the run directory by {}", path.display())]
    Claim {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A folder can't be made.
    #[error("make the directory {}", path.display())]
    Folder {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_directory_that_sockets_have_no_room_in_is_refused_with_the_limit() {
        let long = format!("/{}", "x".repeat(76));
        let error = VmConfig::new("/s", long, "/a").validate().unwrap_err().to_string();
        assert!(error.contains("76 bytes") && error.contains("--run-dir"), "{error}");
        VmConfig::new("/s", format!("/{}", "x".repeat(75)), "/a").validate().unwrap();
        assert!(VmConfig::new("s", "/r", "/a").validate().is_err());
    }
}
