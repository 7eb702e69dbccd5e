//! `torpor doctor`

use std::path::PathBuf;

use clap::Args;
use torpor_gateway::{
    Config,
    doctor::{self, Check, Lent, Level},
    fixes::{self, Changed, FixError},
};
use torpor_sdk::v1::{self, health_response::Status};

use super::Outcome;
use crate::{
    failure::{FAILED, Failure},
    output::clean,
    session::Session,
};

#[derive(Args)]
pub struct DoctorArgs {
    /// The gateway's state directory: for the check of free space, and the record of changes [default: the
    /// configuration's, or /var/lib/torpor].
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// The gateway's configuration file, for its network.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// What this driver needs: of this host, or of the engine or cluster that the configuration names.
    #[arg(long, value_name = "NAME", default_value = "vm", value_parser = ["vm", "docker", "podman", "kubernetes"])]
    driver: String,
    /// Make the smallest changes of this host that help, until it boots again or --undo. Each is recorded first.
    #[arg(long, conflicts_with_all = ["undo", "orphans"])]
    fix: bool,
    /// Take back what --fix has changed.
    #[arg(long, conflicts_with = "orphans")]
    undo: bool,
    /// Only list the disks and runs below the state and run directories that the gateway's database doesn't know.
    #[arg(long)]
    orphans: bool,
    /// The gateway's run directory, for --orphans [default: the configuration's, or /run/torpor].
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
}

impl DoctorArgs {
    fn configuration(&self) -> Result<Config, Failure> {
        let mut config = match &self.config {
            Some(path) => Config::load(path).map_err(|e| Failure::usage(e.to_string()))?,
            None => Config::default(),
        };
        config.state_dir = self.state_dir.clone().unwrap_or(config.state_dir);
        config.run_dir = self.run_dir.clone().unwrap_or(config.run_dir);
        Ok(config)
    }
}

/// Prints what this machine lacks. Fails when sandboxes can't run.
pub fn run(session: &Session, args: &DoctorArgs) -> Outcome {
    let config = args.configuration()?;
    if args.orphans {
        return orphans(&config);
    }
    let (state, network) = (&config.state_dir, &config.network);
    if args.undo {
        return changed(session, fixes::undo(state), "taken back");
    }
    if args.fix {
        return changed(session, fixes::fix(state, network), "done");
    }
    let mut checks = match args.driver.as_str() {
        "kubernetes" => super::within_runtime(torpor_gateway::kubernetes::doctor(&config))?,
        engine @ ("docker" | "podman") => {
            super::within_runtime(torpor_gateway::containers::doctor(&config, engine))?
        }
        _ => doctor::run(state, network),
    };
    checks.extend(super::within_runtime(gateway(session))?);
    let names = || checks.iter().map(|c| c.name.to_owned()).collect();
    session.print(&checks, names, || human(&checks))?;
    let failed = checks.iter().any(|c| c.level == Level::Fail);
    Ok(if failed { FAILED } else { 0 })
}

/// Prints changes of the host; fails when one could not be made.
fn changed(session: &Session, changes: Result<Vec<Changed>, FixError>, word: &str) -> Outcome {
    let changes = changes.map_err(|error| Failure::new(FAILED, error.to_string()))?;
    let line = |change: &Changed| match &change.problem {
        None => format!("{word}: {}\n", clean(&change.change)),
        Some(problem) => format!("FAILED: {}: {}\n", clean(&change.change), clean(problem)),
    };
    let human = || match changes.as_slice() {
        [] => "nothing to change\n".to_owned(),
        all => all.iter().map(line).collect(),
    };
    session.print(&changes, || changes.iter().map(|c| c.change.clone()).collect(), human)?;
    Ok(if changes.iter().all(|change| change.done) { 0 } else { FAILED })
}

/// Prints one line for each; fails when there are any.
fn orphans(config: &Config) -> Outcome {
    let found = torpor_gateway::admin::orphans(&config.state_dir, &config.run_dir);
    let found = found.map_err(|e| Failure::new(FAILED, e.to_string()))?;
    for orphan in &found {
        let disk = orphan.disk.as_ref().map(|path| format!("disk {}", path.display()));
        let run = orphan.run.as_ref().map(|path| format!("run {}", path.display()));
        let objects = orphan.objects.as_ref().map(|command| format!("in the cluster: {}", clean(command)));
        let parts: Vec<String> = disk.into_iter().chain(run).chain(objects).collect();
        println!("{}  {}", orphan.id, parts.join(", "));
    }
    if found.is_empty() {
        println!("no orphans");
        return Ok(0);
    }
    eprintln!(
        "runs are ended by the gateway after a while; a disk stays until you remove its folder, or `torpor admin rebuild --force` gives it a record"
    );
    Ok(FAILED)
}

/// What the process does that this program starts to find out whether KVM works.
pub fn kvm_probe_child() -> ! {
    torpor_gateway::kvm_probe_child()
}

/// Whether a gateway serves, and what it has to lend.
async fn gateway(session: &Session) -> Vec<Check> {
    let name = "gateway";
    let advice = "start it as root: torpor serve, or systemctl start torpor";
    let client = match session.connect().await {
        Ok(client) => client,
        Err(error) => return vec![Check::warn(name, error.told.message, advice)],
    };
    let gateway = match client.health().await {
        Ok(health) if health.status() == Status::Serving => {
            Check::ok(name, format!("serves at {}", session.endpoint))
        }
        Ok(health) => {
            let finding = format!("answers, but does not serve: {}", health.message);
            Check::warn(name, finding, "look at its log: journalctl -u torpor")
        }
        Err(error) => Check::warn(name, error.to_string(), advice),
    };
    let capacity = client.info().await.ok().and_then(|info| info.capacity);
    std::iter::once(gateway).chain(capacity.map(|capacity| resources(&capacity))).collect()
}

fn resources(capacity: &v1::Capacity) -> Check {
    let lent = |resource: &v1::Resource| Lent {
        name: resource.name.clone(),
        capacity: resource.capacity,
        used: resource.used,
        free: resource.free,
        quarantined: resource.quarantined,
    };
    let all: Vec<Lent> = capacity.resources.iter().map(lent).collect();
    let amount = |lent: &Lent, amount: u64| match lent.name.strip_suffix(" bytes") {
        Some(_) => torpor_sandbox::spec::size(amount),
        None => amount.to_string(),
    };
    let line = |lent: &Lent| {
        let name = lent.name.strip_suffix(" bytes").unwrap_or(&lent.name);
        let rest = match lent.quarantined {
            0 => String::new(),
            resting => format!(", {} rest", amount(lent, resting)),
        };
        format!("{name}: {} of {} lent{rest}", amount(lent, lent.used), amount(lent, lent.capacity))
    };
    let finding = all.iter().map(line).collect::<Vec<_>>().join("; ");
    let check = match all.iter().find(|lent| lent.free == 0) {
        Some(lent) => {
            let advice = format!("no {} left: suspend what is not needed (torpor list)", lent.name);
            Check::warn("resources", finding, advice)
        }
        None => Check::ok("resources", finding),
    };
    Check { resources: all, ..check }
}

fn human(checks: &[Check]) -> String {
    let mut out = String::new();
    for check in checks {
        let mark = match check.level {
            Level::Ok => "ok  ",
            Level::Warn => "WARN",
            Level::Fail => "FAIL",
        };
        out.push_str(&format!("{mark}  {:<13} {}\n", check.name, clean(&check.finding)));
        if !check.advice.is_empty() {
            out.push_str(&format!("      {:<13} -> {}\n", "", clean(&check.advice)));
        }
    }
    out
}
