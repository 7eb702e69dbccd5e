//! The options that say what a sandbox is, of `create` and `template create`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use torpor_sdk::v1;

use super::network::EgressArgs;
use crate::{failure::Failure, parse, session::Session};

#[derive(Args)]
pub struct SpecArgs {
    /// Name or digest of an image; the gateway's default image when left out.
    #[arg(long)]
    image: Option<String>,
    /// Virtual CPUs.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    cpus: Option<u32>,
    /// Guest memory, as in 512M or 1GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    memory: Option<u64>,
    /// Virtual size of the disk, as in 10G. It takes what is written, not its size.
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    disk: Option<u64>,
    #[command(flatten)]
    environment: parse::Environment,
    /// Where the main command starts.
    #[arg(short = 'w', long, value_name = "DIR")]
    workdir: Option<String>,
    /// Who runs the main command: a name or number, with an optional :group.
    #[arg(short, long)]
    user: Option<String>,
    /// Give the main command an input, for `torpor attach`.
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Give the main command a terminal, for `torpor attach`.
    #[arg(long)]
    tty: bool,
    /// What happens when the main command ends; never when left out.
    #[arg(long, value_enum)]
    restart: Option<Restart>,
    /// Compute driver; the gateway's default when left out.
    #[arg(long)]
    driver: Option<String>,
    /// Machine of the vm driver; what the host can run when left out.
    #[arg(long, value_enum)]
    machine: Option<Machine>,
    /// A kernel (bzImage or vmlinux) on the gateway's host in place of the gateway's own.
    #[arg(long, value_name = "PATH")]
    kernel: Option<String>,
    /// How long processes may take to end at suspend, stop and delete, as in 10s.
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    stop_grace: Option<Duration>,
    /// A volume of the engine by its name, or a folder of the gateway's host, in the sandbox; for containers. May be
    /// repeated.
    #[arg(long = "volume", value_name = "SOURCE:TARGET[:ro]", value_parser = parse::volume)]
    volumes: Vec<v1::Volume>,
    /// Something that the sandbox serves, to be looked at while it is ready: a port that takes connections, or with a path
    /// an HTTP server that answers a GET of it, as in `web=8080/health`. May be repeated.
    #[arg(long = "serves", value_name = "NAME=PORT[/PATH]", value_parser = parse::endpoint)]
    endpoints: Vec<v1::Endpoint>,
    /// Something that the driver is told in its own words, as far as the gateway's configuration allows it: JSON, or text,
    /// as in `runtimeClassName=kata` or `nodeSelector={"pool":"large"}`. May be repeated.
    #[arg(long = "driver-config", value_name = "KEY=VALUE", value_parser = parse::config)]
    driver_config: Vec<(String, prost_types::Value)>,
    #[command(flatten)]
    egress: EgressArgs,
    /// Main command, run at every boot. Without one the sandbox idles until it is used.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Restart {
    /// The sandbox is Completed.
    Never,
    /// Start it again unless it ended with code 0.
    OnFailure,
    /// Start it again.
    Always,
}

impl Restart {
    /// As the gateway is told; nothing when it isn't said.
    pub fn wire(this: Option<Self>) -> i32 {
        let policy = match this {
            None => v1::RestartPolicy::Unspecified,
            Some(Self::Never) => v1::RestartPolicy::Never,
            Some(Self::OnFailure) => v1::RestartPolicy::OnFailure,
            Some(Self::Always) => v1::RestartPolicy::Always,
        };
        policy.into()
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Machine {
    /// What this host can run.
    Auto,
    /// qemu-system-x86_64.
    Qemu,
    /// torpor-vmm on KVM.
    Kvm,
}

/// A time as the gateway is told.
pub fn stop_grace(time: Option<Duration>) -> Result<Option<prost_types::Duration>, Failure> {
    let time = time.map(prost_types::Duration::try_from).transpose();
    time.map_err(|e| Failure::usage(format!("--stop-grace: {e}")))
}

impl SpecArgs {
    /// What the gateway is told.
    pub fn spec(self, session: &Session) -> Result<v1::SandboxSpec, Failure> {
        let machine = match self.machine {
            None => "",
            Some(Machine::Auto) => "auto",
            Some(Machine::Qemu) => "qemu",
            Some(Machine::Kvm) => "kvm",
        };
        let mut volumes = self.volumes;
        for volume in volumes.iter_mut().filter(|volume| volume.source.contains('/')) {
            volume.source = session.host_path(&volume.source)?;
        }
        Ok(v1::SandboxSpec {
            image: self.image.unwrap_or_default(),
            command: self.command,
            environment: self.environment.read()?,
            workdir: self.workdir.unwrap_or_default(),
            user: self.user.unwrap_or_default(),
            stdin: self.stdin,
            tty: self.tty,
            resources: Some(v1::Resources {
                cpus: self.cpus,
                memory_bytes: self.memory,
                disk_bytes: self.disk,
            }),
            restart_policy: Restart::wire(self.restart),
            driver: self.driver.unwrap_or_default(),
            machine: machine.to_owned(),
            kernel: self.kernel.map(|k| session.host_path(&k)).transpose()?.unwrap_or_default(),
            egress: self.egress.wanted()?,
            volumes,
            endpoints: self.endpoints,
            driver_config: (!self.driver_config.is_empty())
                .then(|| prost_types::Struct { fields: self.driver_config.into_iter().collect() }),
            stop_grace: stop_grace(self.stop_grace)?,
        })
    }
}
