//! `torpor doctor`

use std::path::PathBuf;

use clap::Args;
use torpor_gateway::doctor::{self, Check, Level};
use torpor_sdk::v1::health_response::Status;

use super::Outcome;
use crate::{
    failure::{FAILED, Failure},
    output::clean,
    session::Session,
};

#[derive(Args)]
pub struct DoctorArgs {
    /// The gateway's state directory, for the check of free space.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/torpor")]
    state_dir: PathBuf,
    /// Only list the disks and runs below the state and run directories that the gateway's database doesn't know.
    #[arg(long)]
    orphans: bool,
    /// The gateway's run directory, for --orphans.
    #[arg(long, value_name = "DIR", default_value = "/run/torpor")]
    run_dir: PathBuf,
}

/// Prints what this machine lacks. Fails when sandboxes can't run.
pub fn run(session: &Session, args: &DoctorArgs) -> Outcome {
    if args.orphans {
        return orphans(args);
    }
    let mut checks = doctor::run(&args.state_dir);
    checks.push(super::within_runtime(gateway(session))?);
    let names = || checks.iter().map(|c| c.name.to_owned()).collect();
    session.print(&checks, names, || human(&checks))?;
    let failed = checks.iter().any(|c| c.level == Level::Fail);
    Ok(if failed { FAILED } else { 0 })
}

/// Prints one line for each; fails when there are any.
fn orphans(args: &DoctorArgs) -> Outcome {
    let found = torpor_gateway::admin::orphans(&args.state_dir, &args.run_dir);
    let found = found.map_err(|e| Failure::new(FAILED, e.to_string()))?;
    for orphan in &found {
        let disk = orphan.disk.as_ref().map(|path| format!("disk {}", path.display()));
        let run = orphan.run.as_ref().map(|path| format!("run {}", path.display()));
        let parts: Vec<String> = disk.into_iter().chain(run).collect();
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

async fn gateway(session: &Session) -> Check {
    let name = "gateway";
    let health = match torpor_sdk::Client::connect(&session.endpoint).await {
        Ok(client) => client.health().await,
        Err(error) => Err(error),
    };
    let advice = "start it as root: torpor serve, or systemctl start torpor";
    match health {
        Ok(health) if health.status() == Status::Serving => Check {
            name,
            level: Level::Ok,
            finding: format!("serves at {}", session.endpoint),
            advice: String::new(),
        },
        Ok(health) => Check {
            name,
            level: Level::Warn,
            finding: format!("answers, but does not serve: {}", health.message),
            advice: "look at its log: journalctl -u torpor".to_owned(),
        },
        Err(error) => {
            Check { name, level: Level::Warn, finding: error.to_string(), advice: advice.to_owned() }
        }
    }
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
