//! The first process of a sandbox: brings the machine up, runs commands for the host, brings it down.
//!
//! As PID 1 it boots the machine and serves the host on a serial port or vsock. With `--container PATH` it is the first
//! process of a container and dials the host's Unix socket. With `--pod PATH` it is the first process of a pod and serves on
//! a Unix socket there, and on a port of its own once it has been given credentials for it; `--install FOLDER` brings it into
//! the pod, `--connect PATH` connects a host with it. With
//! `--serve-unix PATH` it serves the same on a Unix socket as an ordinary process and leaves the machine alone.

mod agent;
mod boot;
mod configure;
mod container;
mod disk;
mod exec;
mod fd;
mod files;
mod forward;
mod main_log;
mod modules;
mod net;
mod pod;
mod port;
mod proc;
mod reaper;
mod serve;
mod service;
mod shutdown;

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use tokio::runtime::Runtime;

use crate::{
    agent::{Agent, Mode},
    boot::say,
    port::Port,
};

const USAGE: &str = "usage: torpor-agent --version | --serve-unix PATH | --container PATH | --pod PATH | --connect PATH | --install FOLDER (as the first process of a machine: no arguments)";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    // The kernel may hand its own unknown arguments to the first process: they are not for us. An engine hands ours.
    let engines = |flag: &std::ffi::OsString| flag == "--container" || flag == "--pod" || flag == "--install";
    if std::process::id() == 1 && !matches!(arguments.as_slice(), [flag, _] if engines(flag)) {
        machine();
    }
    match arguments.as_slice() {
        // As the kernel calls modprobe, which it takes us for.
        [quiet, end, _] if quiet == "-q" && end == "--" => modules::load_for_kernel(&arguments),
        [flag] if flag == "--version" => {
            println!("torpor-agent {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        [flag, path] if flag == "--serve-unix" => match process(&PathBuf::from(path)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                say(format_args!("serve on {}: {error}", Path::new(path).display()));
                ExitCode::FAILURE
            }
        },
        [flag, path] if flag == "--container" || flag == "--pod" => {
            let first = if flag == "--pod" { in_pod } else { container };
            first(&PathBuf::from(path)).unwrap_or_else(|error| {
                say(format_args!("the sandbox can't start: {error}"));
                ExitCode::FAILURE
            })
        }
        [flag, path] if flag == pod::CONNECT || flag == "--install" => {
            let path = Path::new(path);
            let done = if flag == "--install" { pod::install(path) } else { pod::connect(path) };
            match done {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    say(format_args!("{}: {error}", path.display()));
                    ExitCode::FAILURE
                }
            }
        }
        _ => {
            say(USAGE);
            ExitCode::from(2)
        }
    }
}

/// One thread serves; blocking calls have their own.
fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn process(path: &Path) -> io::Result<()> {
    // Orphans of commands come to us, as they do to the first process of a machine.
    nix::sys::prctl::set_child_subreaper(true)?;
    runtime()?.block_on(async { serve::unix(Agent::new(Mode::Process)?, path).await })
}

fn container(path: &Path) -> io::Result<ExitCode> {
    // Of no effect for a first process, to which orphans come anyway.
    nix::sys::prctl::set_child_subreaper(true)?;
    container::prepare();
    runtime()?.block_on(async {
        let agent = Agent::new(Mode::Container)?;
        say(format_args!("{} ready to dial {}", env!("CARGO_PKG_VERSION"), path.display()));
        tokio::select! {
            () = serve::dial(agent.clone(), path) => {}
            ended = container::end_when_told(&agent, container::STOP_GRACE) => ended?,
        }
        Ok(ExitCode::from(container::TOLD))
    })
}

fn in_pod(path: &Path) -> io::Result<ExitCode> {
    nix::sys::prctl::set_child_subreaper(true)?;
    // What it holds of keys is not for other processes of root, which have no more capabilities than it.
    nix::sys::prctl::set_dumpable(false)?;
    container::prepare();
    // In a test of the driver it is no first process, and leaves the machine alone.
    let mode = if std::process::id() == 1 { Mode::Container } else { Mode::Process };
    runtime()?.block_on(async {
        let agent = Agent::new(mode)?;
        let _ = agent.port.set(Port::default());
        if mode == Mode::Container {
            agent.keep_image_environment(pod::image_environment());
        }
        say(format_args!("{} ready on {}", env!("CARGO_PKG_VERSION"), path.display()));
        tokio::select! {
            served = serve::unix(agent.clone(), path) => served?,
            ended = container::end_when_told(&agent, pod::grace()) => ended?,
        }
        Ok(ExitCode::from(container::TOLD))
    })
}

fn machine() -> ! {
    let ended = boot::prepare().map_err(|error| error.to_string()).and_then(|()| {
        let served = runtime().and_then(|runtime| {
            runtime.block_on(async {
                let agent = Agent::new(Mode::Machine)?;
                let ways = serve::machine(&agent).await;
                if ways.is_empty() {
                    return Err(io::Error::other("no serial port named torpor.agent and no vsock device"));
                }
                say(format_args!("{} ready on {}", env!("CARGO_PKG_VERSION"), ways.join(" and ")));
                std::future::pending::<io::Result<()>>().await
            })
        });
        served.map_err(|error| format!("serve the host: {error}"))
    });
    if let Err(reason) = ended {
        say(format_args!("the sandbox can't start: {reason}"));
    }
    nix::unistd::sync();
    shutdown::power_off()
}
