//! `torpor attach`

use std::{
    io::{self, Write as _},
    time::Duration,
};

use clap::Args;
use torpor_sdk::{phase, v1};

use super::Outcome;
use crate::{
    failure::{FAILED, Failure, PRECONDITION},
    output,
    session::Session,
};

/// Between the command's end and the word of it in the sandbox's phase.
const NOTICED: Duration = Duration::from_millis(250);
const LOOKS: u32 = 40;

#[derive(Args)]
pub struct AttachArgs {
    /// Name or id of a ready sandbox with a main command.
    name: String,
    /// Begin with so many of the last lines; all that is kept when not given.
    #[arg(short = 'n', long, value_name = "LINES", default_value_t = 0, hide_default_value = true)]
    tail: u32,
}

/// Prints what the main command has written and writes, and ends as it does. An interrupt leaves it running.
pub async fn run(session: &Session, args: AttachArgs) -> Outcome {
    let client = session.connect().await?;
    let sandbox = client.get(&args.name).await?;
    let spec = sandbox.spec.as_ref();
    if spec.is_none_or(|spec| spec.command.is_empty()) {
        let mut failure =
            Failure::new(PRECONDITION, format!("sandbox '{}' has no main command", sandbox.name));
        failure.told.next = format!("torpor shell {}", sandbox.name);
        return Err(failure);
    }
    if !matches!(phase::of(&sandbox), v1::Phase::Ready | v1::Phase::Completed) {
        return end(&sandbox);
    }
    let mut chunks = client
        .logs(v1::LogsRequest {
            sandbox: sandbox.id.clone(),
            source: v1::logs_request::Source::Main.into(),
            tail_lines: args.tail,
            follow: true,
            ..v1::LogsRequest::default()
        })
        .await?;
    while let Some(chunk) = chunks.message().await.map_err(torpor_sdk::Error::from)? {
        if chunk.stderr {
            // Losing remarks is no reason to lose results.
            let _ = io::stderr().write_all(&chunk.data);
        } else {
            output::bytes(&chunk.data)?;
        }
    }
    let mut now = client.get(&sandbox.id).await?;
    for _ in 0..LOOKS {
        if phase::of(&now) != v1::Phase::Ready {
            break;
        }
        tokio::time::sleep(NOTICED).await;
        now = client.get(&sandbox.id).await?;
    }
    end(&now)
}

/// How it ended: with the command's own code, or because the sandbox left Ready.
fn end(sandbox: &v1::Sandbox) -> Outcome {
    let name = &sandbox.name;
    let code = sandbox.status.as_ref().and_then(|status| status.exit_code);
    match (phase::of(sandbox), code) {
        // As an operating system does it: the lowest eight bits.
        (v1::Phase::Completed, Some(code)) => Ok(code.to_le_bytes()[0]),
        (v1::Phase::Ready, _) => Err(Failure::new(
            FAILED,
            format!("the output of sandbox '{name}' ended, and the sandbox goes on: torpor logs {name}"),
        )),
        (now, _) => {
            let mut failure =
                Failure::new(PRECONDITION, format!("sandbox '{name}' is {}, not Ready", phase::name(now)));
            failure.told.next = match now {
                v1::Phase::Suspended | v1::Phase::Suspending | v1::Phase::Error => {
                    format!("torpor resume {name}")
                }
                v1::Phase::Stopped | v1::Phase::Stopping | v1::Phase::Completed => {
                    format!("torpor start {name}")
                }
                _ => format!("torpor wait {name}"),
            };
            Err(failure)
        }
    }
}
