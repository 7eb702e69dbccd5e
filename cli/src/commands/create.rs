//! `torpor create`

use std::time::Duration;

use clap::{Args, ValueEnum};
use torpor_sdk::{Goal, v1};

use super::{
    Outcome,
    network::EgressArgs,
    verb::{Patience, Results, await_one},
};
use crate::{failure::Failure, parse, session::Session};

#[derive(Args)]
pub struct CreateArgs {
    /// Name of the sandbox: a-z, 0-9 and '-'. Made up when left out.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    name: Option<String>,
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
    /// A label. May be repeated.
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = parse::pair)]
    labels: Vec<(String, String)>,
    /// Where the main command starts.
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// Who runs the main command: a name or number, with an optional :group.
    #[arg(short, long)]
    user: Option<String>,
    /// What happens when the main command ends.
    #[arg(long, value_enum, default_value = "never")]
    restart: Restart,
    /// Compute driver; the gateway's default when left out.
    #[arg(long)]
    driver: Option<String>,
    /// Machine of the vm driver.
    #[arg(long, value_enum, default_value = "auto")]
    machine: Machine,
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
    #[command(flatten)]
    egress: EgressArgs,
    #[command(flatten)]
    patience: Patience,
    /// Main command, run at every boot. Without one the sandbox idles until it is used.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Restart {
    /// The sandbox is Completed.
    Never,
    /// Start it again unless it ended with code 0.
    OnFailure,
    /// Start it again.
    Always,
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

/// Makes a sandbox and waits until it runs.
pub async fn run(session: &Session, args: CreateArgs) -> Outcome {
    let patience = Patience { no_wait: args.patience.no_wait, timeout: args.patience.timeout };
    let request = request(session, args)?;
    let client = session.connect().await?;
    let created = client.create(request).await?;
    let mut results = Results::new(session, 1);
    let result = if patience.no_wait {
        Ok(created)
    } else {
        await_one(session, &client, &created, Goal::Running, parse::limit(patience.timeout)).await
    };
    results.add("", result)?;
    results.finish()
}

fn request(session: &Session, args: CreateArgs) -> Result<v1::CreateSandboxRequest, Failure> {
    let restart_policy = match args.restart {
        Restart::Never => v1::RestartPolicy::Never,
        Restart::OnFailure => v1::RestartPolicy::OnFailure,
        Restart::Always => v1::RestartPolicy::Always,
    };
    let machine = match args.machine {
        Machine::Auto => "auto",
        Machine::Qemu => "qemu",
        Machine::Kvm => "kvm",
    };
    let mut volumes = args.volumes;
    for volume in volumes.iter_mut().filter(|volume| volume.source.contains('/')) {
        volume.source = session.host_path(&volume.source)?;
    }
    let stop_grace = args.stop_grace.map(prost_types::Duration::try_from).transpose();
    let spec = v1::SandboxSpec {
        image: args.image.unwrap_or_default(),
        command: args.command,
        environment: args.environment.read()?,
        workdir: args.workdir.unwrap_or_default(),
        user: args.user.unwrap_or_default(),
        resources: Some(v1::Resources { cpus: args.cpus, memory_bytes: args.memory, disk_bytes: args.disk }),
        restart_policy: restart_policy.into(),
        driver: args.driver.unwrap_or_default(),
        machine: machine.to_owned(),
        kernel: args.kernel.map(|k| session.host_path(&k)).transpose()?.unwrap_or_default(),
        egress: args.egress.wanted()?,
        volumes,
        stop_grace: stop_grace.map_err(|e| Failure::usage(format!("--stop-grace: {e}")))?,
    };
    Ok(v1::CreateSandboxRequest {
        name: args.name.unwrap_or_default(),
        labels: args.labels.into_iter().collect(),
        spec: Some(spec),
        ..Default::default()
    })
}
