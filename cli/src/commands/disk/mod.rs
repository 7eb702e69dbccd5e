//! `torpor sandbox disk …`

mod export;

use clap::{Args, Subcommand};
use torpor_sandbox::spec::size;
use torpor_sdk::{Error, phase, v1};

use super::Outcome;
use crate::{
    failure::{FAILED, Failure},
    output::{
        clean, disk,
        table::{fields, table},
    },
    parse,
    progress::Progress,
    session::Session,
};

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct DiskArgs {
    #[command(subcommand)]
    command: Option<DiskCommand>,
    /// Name or id. A sandbox that is called like one of the commands needs `show`.
    #[arg(required = true)]
    name: Option<String>,
    /// Check the structure of the disk; the sandbox must be at rest.
    #[arg(long)]
    check: bool,
}

#[derive(Subcommand)]
pub enum DiskCommand {
    /// Show size, use, layers and, with --check, whether all is in order.
    Show(ShowArgs),
    /// Make the disk of a sandbox larger, at rest or (machine kvm) while it runs.
    Grow(GrowArgs),
    /// Give back to the host what the guest of a sandbox at rest no longer uses.
    Compact(CompactArgs),
    /// Write the disk of a sandbox at rest to a file, with all that it stands on.
    Export(export::ExportArgs),
}

#[derive(Args)]
pub struct ShowArgs {
    /// Name or id.
    name: String,
    /// Check the structure of the disk; the sandbox must be at rest.
    #[arg(long)]
    check: bool,
}

#[derive(Args)]
pub struct GrowArgs {
    /// Name or id.
    name: String,
    /// The new size, as in 20G. A disk never shrinks.
    #[arg(value_parser = parse::size)]
    size: u64,
}

#[derive(Args)]
pub struct CompactArgs {
    /// Name or id.
    name: String,
    /// Write the disk's file anew, in order and without gaps. Needs room for a second copy of it meanwhile.
    #[arg(long)]
    rewrite: bool,
}

/// Runs one of the commands for disks.
pub async fn run(session: &Session, args: DiskArgs) -> Outcome {
    match args.command {
        Some(DiskCommand::Show(args)) => show(session, &args.name, args.check).await,
        Some(DiskCommand::Grow(args)) => grow(session, args).await,
        Some(DiskCommand::Compact(args)) => compact(session, args).await,
        Some(DiskCommand::Export(args)) => export::run(session, args).await,
        None => show(session, &args.name.unwrap_or_default(), args.check).await,
    }
}

async fn show(session: &Session, name: &str, check: bool) -> Outcome {
    let client = session.connect().await?;
    let progress = Progress::new(check && session.shows_progress(), name);
    progress.step("checking");
    let report = client.disk(name, check).await;
    drop(progress);
    let report = report?;
    session.print(&disk::DiskReport::from(&report), || vec![report.name.clone()], || human(&report))?;
    let damaged = report.check.as_ref().is_some_and(|check| check.damage_count > 0);
    Ok(if damaged { FAILED } else { 0 })
}

fn human(report: &v1::DiskReport) -> String {
    let state = disk::disk_state(report.state()).replace('_', " ");
    let mut out = fields([
        ("Disk of", format!("{} ({})", report.name, report.sandbox_id)),
        ("Size", size(report.virtual_bytes)),
        ("Used", format!("{} on the host", size(report.used_bytes))),
        ("State", format!("{state}, opened for writing {} times", report.generation)),
        ("Under way", report.operation.clone()),
    ]);
    if let Some(host) = &report.host {
        out.push_str(&fields([("Host", host_line(host))]));
    }
    out.push_str(&check_lines(report.check.as_ref()));
    out.push('\n');
    out.push_str(&table(["LAYER", "FORMAT", "SIZE", "USED", "DIGEST", "FILE"], rows(report)));
    out
}

fn check_lines(check: Option<&v1::DiskCheck>) -> String {
    let Some(check) = check else { return String::new() };
    let order = match check.damage_count {
        0 => "in order".to_owned(),
        1 => "DAMAGED in one place".to_owned(),
        count => format!("DAMAGED in {count} places"),
    };
    let closed = if check.unclean { ", not closed by its last writer" } else { "" };
    let mut out = fields([("Check", format!("{order}{closed}")), ("  data", size(check.data_bytes))]);
    if check.leaked_clusters > 0 {
        let leaked =
            format!("{}: no harm; the next start or a compaction gives it back", size(check.leaked_bytes));
        out.push_str(&fields([("  leaked", leaked)]));
    }
    for damage in &check.damages {
        out.push_str(&fields([("  damage", damage.clone())]));
    }
    out
}

fn rows(report: &v1::DiskReport) -> Vec<[String; 6]> {
    let row = |(number, layer): (usize, &v1::DiskLayer)| {
        let format = disk::disk_format(layer.format()).unwrap_or("MISSING");
        // "sha256:" and twelve digits tell images apart.
        let digest = layer.digest.chars().take(19).collect();
        let sizes = [layer.virtual_bytes, layer.used_bytes].map(size);
        let [virtual_size, used] = if layer.format == 0 { Default::default() } else { sizes };
        [number.to_string(), format.to_owned(), virtual_size, used, digest, layer.path.clone()]
    };
    report.layers.iter().enumerate().map(row).collect()
}

/// How full the gateway's disk is.
pub fn host_line(host: &v1::HostDisk) -> String {
    let pressure = match host.pressure {
        true => format!(", DISK PRESSURE: the reserve is {}", size(host.reserve_bytes)),
        false => String::new(),
    };
    format!("{} of {} free at {}{pressure}", size(host.free_bytes), size(host.total_bytes), host.path)
}

async fn grow(session: &Session, args: GrowArgs) -> Outcome {
    let grown = session.connect().await?.grow_disk(&args.name, args.size).await?;
    let line = |all: &[v1::Sandbox]| {
        let text = |s: &v1::Sandbox| {
            let bytes = s.spec.as_ref().and_then(|spec| spec.resources).and_then(|r| r.disk_bytes);
            let bytes = size(bytes.unwrap_or_default());
            let runs = phase::of(s) == v1::Phase::Ready;
            let when = if runs { "now" } else { "at the next start" };
            format!("{} has a disk of {bytes}; its guest sees it {when}\n", clean(&s.name))
        };
        all.iter().map(text).collect()
    };
    session.print_sandboxes(std::slice::from_ref(&grown), true, line)?;
    Ok(0)
}

async fn compact(session: &Session, args: CompactArgs) -> Outcome {
    let mut stream = session.connect().await?.compact_disk(&args.name, args.rewrite).await?;
    let progress = Progress::new(session.shows_progress(), &args.name);
    progress.step(if args.rewrite { "writing the disk anew" } else { "giving space back" });
    let mut result = None;
    while let Some(message) = stream.message().await.map_err(Error::from)? {
        progress.amount(message.done_bytes, message.total_bytes);
        result = message.result.or(result);
    }
    drop(progress);
    let done = result.ok_or_else(|| Failure::from(Error::Protocol("a compaction ended without a result")))?;
    let shown = disk::Compacted::new(&args.name, &done);
    let (before, after) = (size(done.used_before_bytes), size(done.used_after_bytes));
    let line = || format!("{} takes {after} on the host, {before} before\n", clean(&args.name));
    session.print(&shown, || vec![args.name.clone()], line)?;
    Ok(0)
}
