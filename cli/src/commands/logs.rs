//! `torpor logs`

use std::{
    io::{self, IsTerminal as _},
    time::SystemTime,
};

use clap::{Args, ValueEnum};
use torpor_sdk::v1::{self, logs_request};

use super::Outcome;
use crate::{output, parse, session::Session};

#[derive(Args)]
pub struct LogsArgs {
    /// Name or id.
    name: String,
    /// Go on with what is written from now on.
    #[arg(short, long)]
    follow: bool,
    /// The last lines only.
    #[arg(short = 'n', long, value_name = "LINES", default_value_t = 0, hide_default_value = true)]
    tail: u32,
    /// Only what came at this time or later: a time ago, as in 10m, or a date as in 2026-01-31T12:00:00Z. Not for the console.
    #[arg(long, value_name = "TIME", value_parser = since)]
    since: Option<prost_types::Timestamp>,
    /// Whose output; that of the main command when there is one, else the console.
    #[arg(long, value_enum)]
    source: Option<Source>,
    /// Print control characters as they are, also to a terminal. A hostile guest can write anything there.
    #[arg(long)]
    raw: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Source {
    /// The main command.
    Main,
    /// The serial console.
    Console,
}

fn since(text: &str) -> Result<prost_types::Timestamp, String> {
    if let Ok(time) = text.parse() {
        return Ok(time);
    }
    let ago =
        parse::duration(text).map_err(|error| format!("{error}; or a date as in 2026-01-31T12:00:00Z"))?;
    let then = SystemTime::now().checked_sub(ago).unwrap_or(SystemTime::UNIX_EPOCH);
    Ok(then.max(SystemTime::UNIX_EPOCH).into())
}

/// Prints output that was kept, and with --follow what comes.
pub async fn run(session: &Session, args: LogsArgs) -> Outcome {
    let source = match args.source {
        None => logs_request::Source::Unspecified,
        Some(Source::Main) => logs_request::Source::Main,
        Some(Source::Console) => logs_request::Source::Console,
    };
    let request = v1::LogsRequest {
        sandbox: args.name,
        source: source.into(),
        tail_lines: args.tail,
        follow: args.follow,
        since: args.since,
    };
    let mut chunks = session.connect().await?.logs(request).await?;
    let plain = !args.raw && io::stdout().is_terminal();
    let mut rest = Vec::new();
    while let Some(chunk) = chunks.message().await.map_err(torpor_sdk::Error::from)? {
        if !plain {
            output::bytes(&chunk.data)?;
            continue;
        }
        rest.extend_from_slice(&chunk.data);
        // Whole lines: a letter or a control sequence may be cut by the end of a chunk.
        if let Some(end) = rest.iter().rposition(|&b| b == b'\n') {
            let whole: Vec<u8> = rest.drain(..=end).collect();
            output::text(&output::clean_block(&String::from_utf8_lossy(&whole)))?;
        }
    }
    output::text(&output::clean_block(&String::from_utf8_lossy(&rest)))?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_while_ago_or_a_date() {
        assert_eq!(since("2026-01-31T12:00:00Z").unwrap().seconds, 1_769_860_800);
        let now = prost_types::Timestamp::from(SystemTime::now()).seconds;
        assert!((now - since("10m").unwrap().seconds - 600).abs() < 60);
        assert_eq!(since("99999d").unwrap().seconds, 0);
        for bad in ["", "yesterday", "-5m", "12:00"] {
            assert!(since(bad).unwrap_err().contains("2026-01-31T12:00:00Z"), "{bad}");
        }
    }
}
