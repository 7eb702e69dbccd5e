//! `torpor watch`

use std::time::SystemTime;

use clap::Args;
use prost_types::Timestamp;
use torpor_sdk::{Event, phase, v1};

use super::Outcome;
use crate::{
    failure::Failure,
    output::{self, Format, clean, view},
    session::Session,
};

#[derive(Args)]
pub struct WatchArgs {
    /// Name or id; all when left out.
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Only those with these labels: key=value,other!=x,present,!absent
    #[arg(short = 'l', long, value_name = "LABELS", default_value = "", hide_default_value = true)]
    selector: String,
    /// Go on after the event with this cursor, as -o json shows it.
    #[arg(long, default_value = "", hide_default_value = true)]
    cursor: String,
}

/// Prints the present states, then every change, until it is interrupted.
pub async fn run(session: &Session, args: WatchArgs) -> Outcome {
    let client = session.connect().await?;
    let mut watch = client.watch(v1::WatchSandboxesRequest {
        sandbox: args.name.unwrap_or_default(),
        label_selector: args.selector,
        cursor: args.cursor,
        ..Default::default()
    });
    loop {
        let event = watch.next().await?;
        print(session, &event, watch.cursor())?;
    }
}

fn print(session: &Session, event: &Event, cursor: &str) -> Result<(), Failure> {
    let (kind, sandbox) = match event {
        Event::Reset => ("reset", None),
        Event::Snapshot(sandbox) => ("snapshot", Some(sandbox)),
        Event::Changed(sandbox) => ("changed", Some(sandbox)),
        Event::Deleted(sandbox) => ("deleted", Some(sandbox)),
        Event::Synced => ("synced", None),
    };
    match (session.format, sandbox) {
        (Format::Table, Some(sandbox)) => output::text(&line(kind, sandbox)),
        (Format::Name, Some(sandbox)) => output::lines(std::iter::once(sandbox.name.as_str())),
        (Format::Table | Format::Name, None) => Ok(()),
        (format, sandbox) => {
            let cursor = (!cursor.is_empty()).then(|| cursor.to_owned());
            let event = view::Event { kind, cursor, sandbox: sandbox.map(view::Sandbox::from) };
            output::structured_item(format, &event)
        }
    }
}

fn line(kind: &str, sandbox: &v1::Sandbox) -> String {
    let status = sandbox.status.clone().unwrap_or_default();
    let now = Timestamp::from(SystemTime::now()).to_string();
    let now = now.get(11..19).unwrap_or_default();
    let phase = if kind == "deleted" { "deleted" } else { phase::name(phase::of(sandbox)) };
    let detail = match status.failure {
        Some(failure) if status.step.is_empty() => failure.message,
        _ => status.step,
    };
    let text = format!("{now}  {:<24} {phase:<12} {}", clean(&sandbox.name), clean(&detail));
    format!("{}\n", text.trim_end())
}
