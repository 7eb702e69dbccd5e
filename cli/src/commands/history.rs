//! `torpor history`

use clap::Args;
use torpor_sdk::{phase, v1};

use super::Outcome;
use crate::{
    output::{
        table::{short, table},
        view,
    },
    session::Session,
};

#[derive(Args)]
pub struct HistoryArgs {
    /// Name or id.
    name: String,
    /// The newest only.
    #[arg(short = 'n', long, value_name = "COUNT")]
    limit: Option<usize>,
}

/// Prints phase changes, newest first.
pub async fn run(session: &Session, args: HistoryArgs) -> Outcome {
    let transitions = session.connect().await?.history(&args.name, args.limit).await?;
    let views: Vec<_> = transitions.iter().map(view::Transition::from).collect();
    let names = || transitions.iter().map(|t| phase::name(phase::from_wire(t.to)).to_owned()).collect();
    session.print(&views, names, || rows(&transitions))?;
    Ok(0)
}

fn rows(transitions: &[v1::Transition]) -> String {
    table(["TIME", "FROM", "TO", "AFTER", "RUN", "WHY"], transitions.iter().map(row))
}

fn row(t: &v1::Transition) -> [String; 6] {
    let from = phase::from_wire(t.from);
    [
        t.time.as_ref().map(ToString::to_string).unwrap_or_default(),
        if from == v1::Phase::Unspecified { String::new() } else { phase::name(from).to_owned() },
        phase::name(phase::from_wire(t.to)).to_owned(),
        t.after.as_ref().map(after).unwrap_or_default(),
        t.run.to_string(),
        t.why.clone(),
    ]
}

/// Short phases matter to the tenth of a second, long ones don't.
fn after(time: &prost_types::Duration) -> String {
    match u64::try_from(time.seconds) {
        Ok(seconds) if seconds >= 60 => short(seconds),
        _ => format!("{:.1}s", time.seconds as f64 + f64::from(time.nanos) / 1e9),
    }
}
