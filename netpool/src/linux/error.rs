//! Errors of the Linux half.

use std::io;
use std::path::PathBuf;

use crate::SlotOutOfRange;

/// What went wrong with the host's network, cgroups or CPUs.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The TUN/TAP driver can't be opened.
    #[error(
        "cannot open /dev/net/tun: {0}; load it with \"modprobe tun\", and run as root or with CAP_NET_ADMIN"
    )]
    OpenTun(#[source] io::Error),
    /// A TAP with this name is there already.
    #[error(
        "tap {tap} exists already: another process holds slot {slot}; a sweep removes it if nobody borrowed it"
    )]
    TapBusy {
        /// The TAP's name.
        tap: String,
        /// Its slot.
        slot: u32,
    },
    /// One step of setting a link up or down failed.
    #[error("cannot {step} on interface {interface}: {source}")]
    Link {
        /// What was attempted.
        step: &'static str,
        /// The interface.
        interface: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The list of interfaces can't be read.
    #[error("cannot list network interfaces: {0}")]
    ListLinks(#[source] io::Error),
    /// A file of the kernel's can't be read or written.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// "read", "write" and the like.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The program `nft` can't be started.
    #[error("cannot run nft: {0}; install the package nftables")]
    NftMissing(#[source] io::Error),
    /// `nft` refused a command.
    #[error("nft refused to {what} table inet {table}: {message}")]
    Nft {
        /// What was attempted.
        what: &'static str,
        /// The table.
        table: String,
        /// The first line that it printed.
        message: String,
    },
    /// The kernel refused a change of the firewall's sets, or to list them.
    #[error("cannot {what} elements of table inet {table}: {source}")]
    Elements {
        /// What was attempted.
        what: &'static str,
        /// The table.
        table: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The kernel refused to forget connections.
    #[error("cannot forget the connections of an address: {0}")]
    Connections(#[source] io::Error),
    /// A program that fixes the host can't be run, or refused.
    #[error("cannot run \"{command}\": {reason}")]
    Command {
        /// The command.
        command: String,
        /// Why not.
        reason: String,
    },
    /// The record of fixes is damaged.
    #[error("cannot read the record of fixes {}: {reason}; undo them by hand and remove it", path.display())]
    FixRecord {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A name server can't be listened for.
    #[error("cannot listen on {address} for the name servers of sandboxes: {source}")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// There is nobody to forward questions to.
    #[error("no name server to forward to: set the name servers in the gateway's configuration")]
    NoUpstream,
    /// The configured range is somebody else's too.
    #[error(
        "range {range} is in use on this host: {route}; set another range for sandboxes in the configuration"
    )]
    RangeInUse {
        /// The configured range.
        range: crate::Ipv4Cidr,
        /// The other's route.
        route: String,
    },
    /// The slot lies outside of the configured range.
    #[error(transparent)]
    Slot(#[from] SlotOutOfRange),
    /// A cgroup still has processes after all retries.
    #[error("cannot remove cgroup {}: processes {pids:?} are still in it", path.display())]
    CgroupBusy {
        /// The cgroup.
        path: PathBuf,
        /// The processes.
        pids: Vec<i32>,
    },
    /// A name that can't be a cgroup's.
    #[error("\"{0}\" can't name a cgroup: use letters, digits, '-', '_' and '.', not first")]
    CgroupName(String),
    /// The CPUs of a process can't be set or read.
    #[error("cannot set the CPUs of process {pid} to \"{cpus}\": {source}")]
    Affinity {
        /// The process.
        pid: i32,
        /// The wanted CPUs.
        cpus: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The ledger can't be read.
    #[error(transparent)]
    Ledger(#[from] crate::LedgerError),
    /// The object was borrowed between the comparison and the repair.
    #[error("slot {0} has been lent again meanwhile: left alone")]
    LentAgain(u32),
}

impl NetError {
    pub(super) fn file(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> NetError {
        let path = path.into();
        move |source| NetError::File { what, path, source }
    }

    pub(super) fn link(step: &'static str, interface: &str) -> impl FnOnce(io::Error) -> NetError {
        let interface = interface.to_string();
        move |source| NetError::Link { step, interface, source }
    }
}
