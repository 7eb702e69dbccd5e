//! The process: from its arguments to its exit code.
//!
//! `torpor-vmm -name MARKER --config-fd N` reads the configuration, opens or adopts everything that it names, goes into
//! its jail, builds the machine and runs it until the guest ends. It waits for nobody then: what happened is in the end
//! file and in the exit code.
//!
//! Exit codes: 0 the guest switched itself off; 1 the VM couldn't be started (standard error and the end file say why);
//! 2 wrong arguments; 10 the guest reset itself; 11 its kernel panicked; 12 triple fault; 13 the host ended it (control
//! socket or SIGTERM); 14 a CPU can't go on; 15 the VMM failed. See [`torpor_vmm_api::End::exit_code`].
//!
//! SIGTERM and SIGINT end the VM in order: disks are flushed and closed.

mod allocator;
mod arguments;
mod around;
mod build;
mod control;
mod endfile;
mod error;
mod grow;
mod log;
mod power;
mod sources;

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use torpor_vmm_api::{Config, End, EndFile, ThreadKind};
use torpor_vmm_devices::host::Surroundings as _;
use torpor_vmm_jail::{Filters, Plan, close_all_but};

use arguments::Command;
use around::Around;
use error::StartError;
use sources::Opened;

/// The exit code of a VM that never ran.
const NOT_STARTED: u8 = 1;
/// The exit code after wrong arguments.
const USAGE: u8 = 2;

/// Does what the program's arguments say. The first of them is its own name.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let command = match arguments::parse(arguments.skip(1)) {
        Ok(command) => command,
        Err(error) => {
            log::say(&error);
            return ExitCode::from(USAGE);
        }
    };
    match command {
        Command::Help => print(arguments::HELP),
        Command::Version => print(concat!("torpor-vmm ", env!("CARGO_PKG_VERSION"), "\n")),
        Command::Run(source) => run(&source),
    }
}

fn print(text: &str) -> ExitCode {
    use std::io::Write as _;
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn run(source: &arguments::ConfigSource) -> ExitCode {
    allocator::keep_small();
    endfile::catch_panics();
    match start(source) {
        Ok(end) => {
            log::say(&format_args!("ended: {end}"));
            ExitCode::from(end.exit_code())
        }
        Err(error) => {
            let text = error::with_causes(&error);
            log::say(&format_args!("cannot start: {text}"));
            endfile::write(&EndFile {
                end: End::Failed { detail: text },
                disks_closed: false,
                disk_error: None,
                broken: Vec::new(),
            });
            ExitCode::from(NOT_STARTED)
        }
    }
}

/// Runs the VM to its end.
fn start(source: &arguments::ConfigSource) -> Result<End, StartError> {
    let config = sources::read_config(source)?;
    config.validate()?;
    sources::open_end(&config)?;
    close_all_but(&sources::inherited(&config))?;
    let opened = sources::open(&config)?;
    let filters = confine(&config, &opened)?;
    let signals = power::signals()?;
    let around = Around::new(filters)?;
    let (running, control) = build::machine(&config, opened, &around)?;
    let mut power = power::Power::new(running, Arc::clone(&around), signals, control)?;
    around.start_starter()?;
    power.start()?;
    around.enter_thread(ThreadKind::Main).map_err(StartError::host("install the first thread's filter"))?;
    Ok(power.run())
}

fn confine(config: &Config, opened: &Opened) -> Result<Filters, StartError> {
    let Some(jail) = &config.jail else { return Ok(Filters::off()) };
    let filters = match jail.seccomp {
        true => Filters::on(),
        false => Filters::off(),
    };
    let folder = config.vsock.as_ref().and_then(|vsock| vsock.ports.as_deref().or(vsock.socket.parent()));
    let folder = folder.filter(|folder| !folder.as_os_str().is_empty());
    if let (Some(uid), Some(folder)) = (jail.uid, folder)
        && !can_search(uid, folder)
    {
        let folder = folder.display();
        log::say(&format_args!("user {uid} can't search {folder}: its guest reaches no listener there"));
    }
    torpor_vmm_jail::enter(&Plan {
        uid: jail.uid,
        root: jail.root.as_deref(),
        folder,
        descriptors: sources::most_descriptors(config),
        file_bytes: None,
        cgroup: opened.cgroup(),
    })?;
    Ok(filters)
}

/// Whether a user with a group of the same number, and no other, may look up names in a folder.
fn can_search(uid: u32, folder: &Path) -> bool {
    const SEARCH: u32 = 1;
    // What can't be looked at is for the jail to name.
    let Ok(found) = folder.metadata() else { return true };
    let shift = match (found.uid() == uid, found.gid() == uid) {
        (true, _) => 6,
        (false, true) => 3,
        (false, false) => 0,
    };
    found.mode() >> shift & SEARCH != 0
}
