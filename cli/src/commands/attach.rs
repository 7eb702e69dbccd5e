//! `torpor attach`

use std::io::{self, Write as _};

use bytes::Bytes;
use clap::Args;
use torpor_sdk::{Exec, ExecInput, phase, v1};

use super::{
    Outcome,
    exec::{End, Signals, conclude, forward_output, raw_mode},
};
use crate::{
    failure::{Failure, PRECONDITION},
    input,
    session::Session,
    terminal,
};

/// Of the kept output, when the command is there to be talked to.
const CONTEXT: u32 = 25;

#[derive(Args)]
pub struct AttachArgs {
    /// Name or id of a ready sandbox with a main command.
    name: String,
    /// Begin with so many of the last lines. When not given: all that is kept, or the last 25 where there is an input.
    #[arg(short = 'n', long, value_name = "LINES")]
    tail: Option<u32>,
    /// Leave our standard input alone, also where the command has an input.
    #[arg(long)]
    no_stdin: bool,
    /// End the command's input when ours ends. Without it the command waits for whoever attaches next.
    #[arg(long, conflicts_with = "no_stdin")]
    close_stdin: bool,
    /// The keys that leave the command running, with a terminal; an empty text: none.
    #[arg(long, value_name = "KEYS", default_value = "ctrl-p,ctrl-q")]
    detach_keys: DetachKeys,
}

/// Connects to the main command and ends as it does. An interrupt, or the keys for that, leave it running.
pub async fn run(session: &Session, args: AttachArgs) -> Outcome {
    let client = session.connect().await?;
    let sandbox = client.get(&args.name).await?;
    let spec = sandbox.spec.clone().unwrap_or_default();
    if spec.command.is_empty() {
        let mut failure =
            Failure::new(PRECONDITION, format!("sandbox '{}' has no main command", sandbox.name));
        failure.told.next = format!("torpor shell {}", sandbox.name);
        return Err(failure);
    }
    if phase::of(&sandbox) != v1::Phase::Ready {
        return end(&sandbox);
    }
    let stdin = spec.stdin && !args.no_stdin;
    let raw = spec.tty && stdin && terminal::has_input();
    // Before the terminal is raw: an interrupt must not leave it so.
    let mut signals = Signals::new(spec.tty && stdin, true)?;
    let start = v1::AttachStart {
        sandbox: sandbox.id.clone(),
        tail_lines: args.tail.unwrap_or(if stdin { CONTEXT } else { 0 }),
        only_new: false,
        stdin,
        size: terminal::size().filter(|_| spec.tty && stdin),
    };
    let attached = tokio::select! {
        attached = client.attach(start) => attached?,
        number = signals.deadly() => return Err(Failure::silent(128_u8.saturating_add(number))),
    };
    let guard = if raw { Some(raw_mode()?) } else { None };
    let keys = if raw { args.detach_keys } else { DetachKeys::default() };
    let end = drive(attached, &mut signals, stdin.then_some(keys), args.close_stdin).await;
    drop(guard);
    if matches!(end, Ok(End::Left)) && !session.quiet {
        let _ = writeln!(io::stderr(), "\nleft; '{}' goes on: torpor attach {}", sandbox.name, sandbox.name);
    }
    conclude(session, end?)
}

async fn drive(
    attached: Exec,
    signals: &mut Signals,
    stdin: Option<DetachKeys>,
    close: bool,
) -> Result<End, Failure> {
    let Exec { input, output } = attached;
    let keys = async {
        if let Some(keys) = stdin {
            if pass_stdin(&input, keys).await {
                return;
            }
            if close {
                input.close().await;
            }
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        end = forward_output(output) => end,
        number = signals.forward(&input) => Ok(End::Signal(number)),
        () = keys => Ok(End::Left),
    }
}

/// True when the keys to leave were typed.
async fn pass_stdin(command: &ExecInput, mut keys: DetachKeys) -> bool {
    let mut chunks = input::pieces(1);
    while let Some(chunk) = chunks.recv().await {
        let (typed, left) = keys.pass(&chunk);
        if left {
            return true;
        }
        if !typed.is_empty() && !command.write(typed).await {
            return false;
        }
    }
    false
}

/// Keys that are not passed on when they are typed one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct DetachKeys {
    keys: Vec<u8>,
    /// How many of them were typed just now, and are held back.
    typed: usize,
}

impl std::str::FromStr for DetachKeys {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let key = |name: &str| match (name.strip_prefix("ctrl-").map(str::as_bytes), name.as_bytes()) {
            // What a terminal sends for a key with Ctrl: the lowest five bits.
            (Some([byte @ (b'a'..=b'z' | b'@' | b'['..=b'_')]), _) => Ok(byte & 0x1f),
            (None, [byte @ b'!'..=b'~']) => Ok(*byte),
            _ => {
                Err(format!("'{name}' is no key: a character, or ctrl- and one of a to z, @, [, \\, ], ^, _"))
            }
        };
        let keys = text.split(',').filter(|_| !text.is_empty()).map(key).collect::<Result<_, _>>()?;
        Ok(Self { keys, typed: 0 })
    }
}

impl DetachKeys {
    /// What of `chunk` is for the command, and whether the keys to leave are complete.
    fn pass(&mut self, chunk: &[u8]) -> (Bytes, bool) {
        let mut typed = Vec::with_capacity(chunk.len());
        for &byte in chunk {
            loop {
                if self.keys.get(self.typed) == Some(&byte) {
                    self.typed += 1;
                    break;
                }
                if self.typed == 0 {
                    typed.push(byte);
                    break;
                }
                // Not the keys after all: the first of them was meant for the command, the rest may begin them anew.
                let held = self.keys[1..self.typed].to_vec();
                typed.push(self.keys[0]);
                self.typed = 0;
                typed.extend_from_slice(&self.pass(&held).0);
            }
            if self.typed > 0 && self.typed == self.keys.len() {
                return (typed.into(), true);
            }
        }
        (typed.into(), false)
    }
}

/// How it ended before: with the command's own code, or because the sandbox is not Ready.
fn end(sandbox: &v1::Sandbox) -> Outcome {
    let name = &sandbox.name;
    let now = phase::of(sandbox);
    let code = sandbox.status.as_ref().and_then(|status| status.exit_code);
    if let (v1::Phase::Completed, Some(code)) = (now, code) {
        // As an operating system does it: the lowest eight bits.
        return Ok(code.to_le_bytes()[0]);
    }
    let mut failure =
        Failure::new(PRECONDITION, format!("sandbox '{name}' is {}, not Ready", phase::name(now)));
    failure.told.next = match now {
        v1::Phase::Suspended | v1::Phase::Suspending | v1::Phase::Error => format!("torpor resume {name}"),
        v1::Phase::Stopped | v1::Phase::Stopping | v1::Phase::Completed => format!("torpor start {name}"),
        _ => format!("torpor wait {name}"),
    };
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> DetachKeys {
        text.parse().unwrap()
    }

    #[test]
    fn the_keys_to_leave_are_taken_out_also_in_pieces() {
        let mut usual = keys("ctrl-p,ctrl-q");
        assert_eq!(usual.pass(b"ab\x10"), (Bytes::from_static(b"ab"), false));
        assert_eq!(usual.pass(b"\x11rest"), (Bytes::new(), true));
        let mut usual = keys("ctrl-p,ctrl-q");
        assert_eq!(usual.pass(b"\x10x\x11"), (Bytes::from_static(b"\x10x\x11"), false));
        assert_eq!(usual.pass(b"\x10\x10\x11"), (Bytes::from_static(b"\x10"), true));
        let mut longer = keys("a,a,b");
        assert_eq!(longer.pass(b"aaab"), (Bytes::from_static(b"a"), true));
    }

    #[test]
    fn without_keys_everything_is_passed_on() {
        assert_eq!(keys("").pass(b"\x10\x11"), (Bytes::from_static(b"\x10\x11"), false));
        for bad in ["ctrl-", "ctrl-1", "ab", "ctrl-p,"] {
            assert!(bad.parse::<DetachKeys>().is_err(), "{bad}");
        }
    }
}
