//! `torpor logs`

use std::io::{self, IsTerminal as _};

use clap::{Args, ValueEnum};
use torpor_sdk::v1::{self, logs_request};

use super::Outcome;
use crate::{output, session::Session};

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
