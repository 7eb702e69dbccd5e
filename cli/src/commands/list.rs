//! `torpor list`

use clap::Args;
use torpor_sdk::{phase, v1};

use super::Outcome;
use crate::{
    output::table::{age, bytes, table},
    session::Session,
};

#[derive(Args)]
pub struct ListArgs {
    /// Only those with these labels: key=value,other!=x,present,!absent
    #[arg(short = 'l', long, value_name = "LABELS", default_value = "", hide_default_value = true)]
    selector: String,
    /// Of every workspace that one may look into.
    #[arg(short = 'A', long)]
    all_workspaces: bool,
}

/// Prints all sandboxes, whatever their phase.
pub async fn run(session: &Session, args: ListArgs) -> Outcome {
    let client = session.connect().await?;
    let sandboxes = match args.all_workspaces {
        true => client.list_everywhere(&args.selector).await?,
        false => client.list(&args.selector).await?,
    };
    let table = if args.all_workspaces { rows_with_workspaces } else { rows };
    session.print_sandboxes(&sandboxes, false, table)?;
    Ok(0)
}

fn rows(sandboxes: &[v1::Sandbox]) -> String {
    let head = ["NAME", "PHASE", "SINCE", "IMAGE", "CPUS", "MEMORY", "DISK", "USED", "IP"];
    table(head, sandboxes.iter().map(row))
}

fn rows_with_workspaces(sandboxes: &[v1::Sandbox]) -> String {
    let head = ["WORKSPACE", "NAME", "PHASE", "SINCE", "IMAGE", "CPUS", "MEMORY", "DISK", "USED", "IP"];
    let row = |sandbox: &v1::Sandbox| {
        let [a, b, c, d, e, f, g, h, i] = row(sandbox);
        [sandbox.workspace.clone(), a, b, c, d, e, f, g, h, i]
    };
    table(head, sandboxes.iter().map(row))
}

fn row(sandbox: &v1::Sandbox) -> [String; 9] {
    let spec = sandbox.spec.clone().unwrap_or_default();
    let status = sandbox.status.clone().unwrap_or_default();
    let resources = spec.resources.unwrap_or_default();
    let disk = status.disk.unwrap_or_default();
    [
        sandbox.name.clone(),
        phase::name(phase::of(sandbox)).to_owned(),
        age(status.phase_since.as_ref()),
        spec.image,
        resources.cpus.map(|c| c.to_string()).unwrap_or_default(),
        bytes(resources.memory_bytes.unwrap_or_default()),
        bytes(resources.disk_bytes.unwrap_or_default()),
        bytes(disk.used_bytes),
        status.host.unwrap_or_default().ip,
    ]
}
