//! `torpor get`

use std::collections::HashMap;

use clap::Args;
use torpor_sandbox::spec::size;
use torpor_sdk::{phase, v1};

use super::{Outcome, verb::Results};
use crate::{
    failure::Failure,
    output::{
        Format, clean_block,
        network::Egress,
        table::{age, fields},
        view,
    },
    session::Session,
};

#[derive(Args)]
pub struct GetArgs {
    /// Names or ids.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
}

/// Prints sandboxes in full.
pub async fn run(session: &Session, args: GetArgs) -> Outcome {
    let client = session.connect().await?;
    let mut results = Results::new(session, args.names.len());
    for (number, name) in args.names.iter().enumerate() {
        let got = client.get(name).await.map_err(Failure::from);
        match got {
            Ok(sandbox) if session.format == Format::Table => {
                let gap = if number > 0 { "\n" } else { "" };
                crate::output::text(&format!("{gap}{}", human(&sandbox)))?;
            }
            other => results.add(name, other)?,
        }
    }
    results.finish()
}

fn human(sandbox: &v1::Sandbox) -> String {
    let spec = sandbox.spec.clone().unwrap_or_default();
    let status = sandbox.status.clone().unwrap_or_default();
    let mut out = fields([
        ("Name", sandbox.name.clone()),
        ("Id", sandbox.id.clone()),
        ("Phase", phase_line(sandbox, &status)),
        ("Next", status.then.clone()),
        ("Exit code", status.exit_code.map(|c| c.to_string()).unwrap_or_default()),
        ("Image", join(&[&spec.image, &status.image_digest])),
        ("Driver", join(&[&status.driver, &status.machine])),
        ("Run", format!("{} (version {})", status.run, sandbox.version)),
        ("Boot id", status.boot_id.clone()),
        ("Created", sandbox.created.as_ref().map(ToString::to_string).unwrap_or_default()),
        ("Labels", pairs(&sandbox.labels)),
        ("Annotations", pairs(&sandbox.annotations)),
        ("Command", spec.command.iter().map(|a| quoted(a)).collect::<Vec<_>>().join(" ")),
        ("Restart", format!("{} ({} so far)", view::restart_policy(&spec), status.restart_count)),
        ("Resources", resources(&spec)),
        ("Egress", Egress::of(&spec, &status).map(|egress| egress.line()).unwrap_or_default()),
    ]);
    out.push_str(&host(status.host.as_ref()));
    out.push_str(&disk(status.disk.as_ref(), status.flushed));
    for seen in &status.endpoints {
        let status = if seen.http_status > 0 { format!(" {}", seen.http_status) } else { String::new() };
        let since = age(seen.since.as_ref());
        let since = if since.is_empty() { since } else { format!(", for {since}") };
        let result = view::endpoint_result(seen);
        let line = format!("{} (port {}) {result}{status}{since} {}", seen.name, seen.port, seen.message);
        out.push_str(&fields([("Endpoint", line.trim_end().to_owned())]));
    }
    for condition in &status.conditions {
        let line =
            format!("{}={} {} {}", condition.r#type, condition.status, condition.reason, condition.message);
        out.push_str(&fields([("Condition", line)]));
    }
    if let Some(failure) = &status.failure {
        out.push_str(&failed(failure));
    }
    out
}

fn phase_line(sandbox: &v1::Sandbox, status: &v1::SandboxStatus) -> String {
    let mut line = phase::name(phase::of(sandbox)).to_owned();
    if !status.step.is_empty() {
        line.push_str(&format!(", {}", status.step));
    }
    let since = age(status.phase_since.as_ref());
    if !since.is_empty() {
        line.push_str(&format!(", for {since}"));
    }
    if let Some(retained) = view::retained(status) {
        line.push_str(&format!(", kept: {retained}"));
    }
    line
}

fn pairs(map: &HashMap<String, String>) -> String {
    let mut pairs: Vec<_> = map.iter().map(|(k, v)| format!("{k}={v}")).collect();
    pairs.sort();
    pairs.join(", ")
}

fn resources(spec: &v1::SandboxSpec) -> String {
    let Some(r) = spec.resources else { return String::new() };
    let memory = size(r.memory_bytes.unwrap_or_default());
    format!(
        "{} CPUs, {memory} memory, {} disk",
        r.cpus.unwrap_or_default(),
        size(r.disk_bytes.unwrap_or_default())
    )
}

fn host(host: Option<&v1::HostResources>) -> String {
    let Some(host) = host else {
        return fields([("Host", "nothing: no process, no memory, no network".to_owned())]);
    };
    let memory = format!("{}, {} resident", size(host.memory_bytes), size(host.resident_bytes));
    fields([
        ("Host process", host.pid.to_string()),
        ("  memory", memory),
        ("  CPUs", host.cpus.clone()),
        ("  network", join(&[&host.tap, &host.ip, &host.mac])),
        ("  folder", host.run_dir.clone()),
    ])
}

fn disk(disk: Option<&v1::Disk>, flushed: Option<bool>) -> String {
    let Some(disk) = disk else { return String::new() };
    let flushed = match flushed {
        Some(true) => ", flushed by the guest",
        Some(false) => ", NOT flushed by the guest at the last stop",
        None => "",
    };
    let sizes = format!("{} used of {}{flushed}", size(disk.used_bytes), size(disk.virtual_bytes));
    fields([("Disk", sizes), ("  file", disk.path.clone())])
}

fn failed(failure: &v1::Failure) -> String {
    let mut out = fields([
        ("Failure", failure.message.clone()),
        ("  step", failure.step.clone()),
        ("  reason", failure.reason.clone()),
        ("  next", failure.next.clone()),
    ]);
    for line in failure.console_tail.lines() {
        out.push_str(&format!("  | {}\n", clean_block(line)));
    }
    out
}

fn join(parts: &[&String]) -> String {
    parts.iter().filter(|p| !p.is_empty()).map(|p| p.as_str()).collect::<Vec<_>>().join("  ")
}

/// An argument as a shell would take it.
fn quoted(argument: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !argument.is_empty() && argument.chars().all(plain) {
        argument.to_owned()
    } else {
        format!("'{}'", argument.replace('\'', r"'\''"))
    }
}
